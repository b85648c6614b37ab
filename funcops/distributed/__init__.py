"""Parallelism as functions: meshes as plain data, collectives and parallel layers as ops, communication in flight as a value.

Meshes        Mesh, Axis
In flight     gather_start, scatter_sum_start, sum_over_start, all_to_all_start; finish (InFlight)
Checkpoints   save, save_start (Saving), load, load_values, is_saved
Programs      handshake, check_program, record (Program, Collective)
Gradients     data_parallel; reduce_start (Reducing), sum_axes; global_norm, part_axes, all_ranks, raise_on_all_ranks; amaxes_over
ZeRO          own_shards, gather_shards_start (Gathering), zero3
Collectives   gather, scatter_sum, sum_over, copy_to, gather_same, slice_of, all_to_all, shift
Layers        column_linear, row_linear; column_qlinear, row_qlinear; parallel_low_rank; sharded (Shared);
              sharded_dropout
Experts       parallel_experts; dispatch, combine
Vocabulary    vocab_embedding, vocab_cross_entropy, vocab_linear_cross_entropy
Sequence      context_attention, context_sink_attention, parallel_latent_split; zigzag, unzigzag, zigzag_positions
Models        parallel
Sharding      Spec, specs_of, fsdp_specs; shard, unshard, init, init_tree, sum_gradients
"""

from types import ModuleType as _ModuleType

from funcops.distributed.async_collectives import InFlight as InFlight
from funcops.distributed.async_collectives import all_to_all_start as all_to_all_start
from funcops.distributed.async_collectives import finish as finish
from funcops.distributed.async_collectives import gather_start as gather_start
from funcops.distributed.async_collectives import scatter_sum_start as scatter_sum_start
from funcops.distributed.async_collectives import sum_over_start as sum_over_start
from funcops.distributed.checkpoint import Saving as Saving
from funcops.distributed.checkpoint import is_saved as is_saved
from funcops.distributed.checkpoint import load as load
from funcops.distributed.checkpoint import load_values as load_values
from funcops.distributed.checkpoint import save as save
from funcops.distributed.checkpoint import save_start as save_start
from funcops.distributed.data import Reducing as Reducing
from funcops.distributed.data import part_axes as part_axes
from funcops.distributed.data import reduce_start as reduce_start
from funcops.distributed.data import sum_axes as sum_axes
from funcops.distributed.handshake import Collective as Collective
from funcops.distributed.handshake import Program as Program
from funcops.distributed.handshake import check_program as check_program
from funcops.distributed.handshake import handshake as handshake
from funcops.distributed.handshake import record as record
from funcops.distributed.init import init as init
from funcops.distributed.init import init_tree as init_tree
from funcops.distributed.init import specs_of as specs_of
from funcops.distributed.mesh import Axis as Axis
from funcops.distributed.mesh import Mesh as Mesh
from funcops.distributed.norms import all_ranks as all_ranks
from funcops.distributed.norms import amaxes_over as amaxes_over
from funcops.distributed.norms import global_norm as global_norm
from funcops.distributed.norms import raise_on_all_ranks as raise_on_all_ranks
from funcops.distributed.ops.all_to_all import *
from funcops.distributed.ops.column_linear import *
from funcops.distributed.ops.column_qlinear import *
from funcops.distributed.ops.combine import *
from funcops.distributed.ops.context_attention import *
from funcops.distributed.ops.context_sink_attention import *
from funcops.distributed.ops.copy_to import *
from funcops.distributed.ops.dispatch import *
from funcops.distributed.ops.gather import *
from funcops.distributed.ops.gather_same import *
from funcops.distributed.ops.parallel_experts import *
from funcops.distributed.ops.parallel_latent_split import *
from funcops.distributed.ops.parallel_low_rank import *
from funcops.distributed.ops.row_linear import *
from funcops.distributed.ops.row_qlinear import *
from funcops.distributed.ops.scatter_sum import *
from funcops.distributed.ops.sharded import *
from funcops.distributed.ops.sharded_dropout import *
from funcops.distributed.ops.shift import *
from funcops.distributed.ops.slice_of import *
from funcops.distributed.ops.sum_over import *
from funcops.distributed.ops.vocab_cross_entropy import *
from funcops.distributed.ops.vocab_embedding import *
from funcops.distributed.ops.vocab_linear_cross_entropy import *
from funcops.distributed.rewrite import parallel as parallel
from funcops.distributed.shards import Gathering as Gathering
from funcops.distributed.shards import gather_shards_start as gather_shards_start
from funcops.distributed.shards import own_shards as own_shards
from funcops.distributed.specs import Spec as Spec
from funcops.distributed.specs import fsdp_specs as fsdp_specs
from funcops.distributed.specs import shard as shard
from funcops.distributed.specs import sum_gradients as sum_gradients
from funcops.distributed.specs import unshard as unshard
from funcops.distributed.zero import data_parallel as data_parallel
from funcops.distributed.zero import zero3 as zero3
from funcops.distributed.zigzag import unzigzag as unzigzag
from funcops.distributed.zigzag import zigzag as zigzag
from funcops.distributed.zigzag import zigzag_positions as zigzag_positions

__all__ = [name for name, value in list(globals().items()) if name[0] != "_" and not isinstance(value, _ModuleType)]
