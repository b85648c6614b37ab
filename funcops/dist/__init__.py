"""Parallelism as functions: meshes as plain data, collectives and parallel layers as ops, communication in flight as a value.

Meshes        Mesh, Axis
In flight     gather_start, scatter_sum_start, sum_over_start, all_to_all_start; finish (InFlight)
Checkpoints   save, load
Programs      handshake, check_program, record (Program, Collective)
Gradients     reduce_start, sum_axes; global_norm, part_axes, everywhere, raise_everywhere; amaxes_over
ZeRO          own_shards, gather_shards_start, zero3
Collectives   gather, scatter_sum, sum_over, copy_to, gather_same, slice_of, all_to_all, shift
Layers        column_linear, row_linear; column_qlinear, row_qlinear; sharded; sharded_dropout
Experts       parallel_experts; dispatch, combine
Vocabulary    vocab_embedding, vocab_cross_entropy, vocab_linear_cross_entropy
Sequence      context_attention; zigzag, unzigzag, zigzag_positions
Models        parallel
Sharding      Spec, specs_of; shard, unshard, init, sum_gradients
"""

from funcops.dist.checkpoint import load as load
from funcops.dist.checkpoint import save as save
from funcops.dist.data import Reducing as Reducing
from funcops.dist.data import part_axes as part_axes
from funcops.dist.data import reduce_start as reduce_start
from funcops.dist.data import sum_axes as sum_axes
from funcops.dist.handshake import Collective as Collective
from funcops.dist.handshake import Program as Program
from funcops.dist.handshake import check_program as check_program
from funcops.dist.handshake import handshake as handshake
from funcops.dist.handshake import record as record
from funcops.dist.in_flight import InFlight as InFlight
from funcops.dist.in_flight import all_to_all_start as all_to_all_start
from funcops.dist.in_flight import finish as finish
from funcops.dist.in_flight import gather_start as gather_start
from funcops.dist.in_flight import scatter_sum_start as scatter_sum_start
from funcops.dist.in_flight import sum_over_start as sum_over_start
from funcops.dist.init import init as init
from funcops.dist.init import specs_of as specs_of
from funcops.dist.mesh import Axis as Axis
from funcops.dist.mesh import Mesh as Mesh
from funcops.dist.norms import amaxes_over as amaxes_over
from funcops.dist.norms import everywhere as everywhere
from funcops.dist.norms import global_norm as global_norm
from funcops.dist.norms import raise_everywhere as raise_everywhere
from funcops.dist.ops.all_to_all import *
from funcops.dist.ops.column_linear import *
from funcops.dist.ops.column_qlinear import *
from funcops.dist.ops.combine import *
from funcops.dist.ops.context_attention import *
from funcops.dist.ops.copy_to import *
from funcops.dist.ops.dispatch import *
from funcops.dist.ops.gather import *
from funcops.dist.ops.gather_same import *
from funcops.dist.ops.parallel_experts import *
from funcops.dist.ops.row_linear import *
from funcops.dist.ops.row_qlinear import *
from funcops.dist.ops.scatter_sum import *
from funcops.dist.ops.sharded import *
from funcops.dist.ops.sharded_dropout import *
from funcops.dist.ops.shift import *
from funcops.dist.ops.slice_of import *
from funcops.dist.ops.sum_over import *
from funcops.dist.ops.vocab_cross_entropy import *
from funcops.dist.ops.vocab_embedding import *
from funcops.dist.ops.vocab_linear_cross_entropy import *
from funcops.dist.parallel import parallel as parallel
from funcops.dist.shards import Gathering as Gathering
from funcops.dist.shards import gather_shards_start as gather_shards_start
from funcops.dist.shards import own_shards as own_shards
from funcops.dist.siblings import rule as _rule  # noqa: F401  registers it
from funcops.dist.specs import Spec as Spec
from funcops.dist.specs import shard as shard
from funcops.dist.specs import sum_gradients as sum_gradients
from funcops.dist.specs import unshard as unshard
from funcops.dist.zero import zero3 as zero3
from funcops.dist.zigzag import unzigzag as unzigzag
from funcops.dist.zigzag import zigzag as zigzag
from funcops.dist.zigzag import zigzag_positions as zigzag_positions
