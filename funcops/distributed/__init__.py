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

__all__ = ["AllToAllConfig", "AllToAllResiduals", "Axis", "Collective", "ColumnLinearConfig", "ColumnLinearPending"]
__all__ += ["ColumnLinearResiduals", "ColumnQLinearConfig", "ColumnQLinearPending", "ColumnQLinearResiduals"]
__all__ += ["CombineConfig", "CombineResiduals", "ContextAttentionConfig", "ContextAttentionResiduals"]
__all__ += ["ContextSinkAttentionConfig", "CopyToConfig", "CopyToResiduals", "DispatchConfig", "DispatchResiduals"]
__all__ += ["GatherConfig", "GatherResiduals", "GatherSameConfig", "GatherSameResiduals", "Gathering", "InFlight", "Mesh"]
__all__ += ["ParallelExpertsConfig", "ParallelExpertsPending", "ParallelExpertsResiduals", "ParallelLatentSplitConfig"]
__all__ += ["ParallelLatentSplitResiduals", "ParallelLowRankConfig", "ParallelLowRankPending", "ParallelLowRankResiduals"]
__all__ += ["Program", "Reducing", "RowLinearConfig", "RowLinearPending", "RowLinearResiduals", "RowQLinearConfig"]
__all__ += ["RowQLinearPending", "RowQLinearResiduals", "Saving", "ScatterSumConfig", "ScatterSumResiduals"]
__all__ += ["ShardedConfig", "ShardedDropoutConfig", "ShardedDropoutResiduals", "ShardedPending", "ShardedResiduals"]
__all__ += ["Shared", "ShiftConfig", "ShiftResiduals", "SliceOfConfig", "SliceOfResiduals", "Spec", "SumOverConfig"]
__all__ += ["SumOverResiduals", "VocabCrossEntropyConfig", "VocabCrossEntropyResiduals", "VocabEmbeddingConfig"]
__all__ += ["VocabEmbeddingPending", "VocabEmbeddingResiduals", "VocabLinearCrossEntropyConfig"]
__all__ += ["VocabLinearCrossEntropyPending", "VocabLinearCrossEntropyResiduals", "all_ranks", "all_to_all"]
__all__ += ["all_to_all_bwd", "all_to_all_dgrad", "all_to_all_fwd", "all_to_all_init", "all_to_all_start"]
__all__ += ["all_to_all_wgrad", "amaxes_over", "check_program", "column_linear", "column_linear_bwd"]
__all__ += ["column_linear_dgrad", "column_linear_fwd", "column_linear_init", "column_linear_wgrad", "column_qlinear"]
__all__ += ["column_qlinear_bwd", "column_qlinear_dgrad", "column_qlinear_fwd", "column_qlinear_init"]
__all__ += ["column_qlinear_wgrad", "combine", "combine_bwd", "combine_dgrad", "combine_fwd", "combine_init"]
__all__ += ["combine_wgrad", "context_attention", "context_attention_bwd", "context_attention_dgrad"]
__all__ += ["context_attention_fwd", "context_attention_init", "context_attention_wgrad", "context_sink_attention"]
__all__ += ["context_sink_attention_bwd", "context_sink_attention_dgrad", "context_sink_attention_fwd"]
__all__ += ["context_sink_attention_init", "context_sink_attention_wgrad", "copy_to", "copy_to_bwd", "copy_to_dgrad"]
__all__ += ["copy_to_fwd", "copy_to_init", "copy_to_wgrad", "data_parallel", "dispatch", "dispatch_bwd", "dispatch_dgrad"]
__all__ += ["dispatch_fwd", "dispatch_init", "dispatch_wgrad", "finish", "fsdp_specs", "gather", "gather_bwd"]
__all__ += ["gather_dgrad", "gather_fwd", "gather_init", "gather_same", "gather_same_bwd", "gather_same_dgrad"]
__all__ += ["gather_same_fwd", "gather_same_init", "gather_same_wgrad", "gather_shards_start", "gather_start"]
__all__ += ["gather_wgrad", "global_norm", "handshake", "init", "init_tree", "is_saved", "load", "load_values"]
__all__ += ["own_shards", "parallel", "parallel_experts", "parallel_experts_bwd", "parallel_experts_dgrad"]
__all__ += ["parallel_experts_fwd", "parallel_experts_init", "parallel_experts_wgrad", "parallel_latent_split"]
__all__ += ["parallel_latent_split_bwd", "parallel_latent_split_dgrad", "parallel_latent_split_fwd"]
__all__ += ["parallel_latent_split_init", "parallel_latent_split_wgrad", "parallel_low_rank", "parallel_low_rank_bwd"]
__all__ += ["parallel_low_rank_dgrad", "parallel_low_rank_fwd", "parallel_low_rank_init", "parallel_low_rank_wgrad"]
__all__ += ["part_axes", "raise_on_all_ranks", "record", "reduce_start", "row_linear", "row_linear_bwd"]
__all__ += ["row_linear_dgrad", "row_linear_fwd", "row_linear_init", "row_linear_wgrad", "row_qlinear", "row_qlinear_bwd"]
__all__ += ["row_qlinear_dgrad", "row_qlinear_fwd", "row_qlinear_init", "row_qlinear_wgrad", "save", "save_start"]
__all__ += ["scatter_sum", "scatter_sum_bwd", "scatter_sum_dgrad", "scatter_sum_fwd", "scatter_sum_init"]
__all__ += ["scatter_sum_start", "scatter_sum_wgrad", "shard", "sharded", "sharded_bwd", "sharded_dgrad"]
__all__ += ["sharded_dropout", "sharded_dropout_bwd", "sharded_dropout_dgrad", "sharded_dropout_fwd"]
__all__ += ["sharded_dropout_init", "sharded_dropout_wgrad", "sharded_fwd", "sharded_init", "sharded_wgrad", "shift"]
__all__ += ["shift_bwd", "shift_dgrad", "shift_fwd", "shift_init", "shift_wgrad", "slice_of", "slice_of_bwd"]
__all__ += ["slice_of_dgrad", "slice_of_fwd", "slice_of_init", "slice_of_wgrad", "specs_of", "sum_axes", "sum_gradients"]
__all__ += ["sum_over", "sum_over_bwd", "sum_over_dgrad", "sum_over_fwd", "sum_over_init", "sum_over_start"]
__all__ += ["sum_over_wgrad", "unshard", "unzigzag", "vocab_cross_entropy", "vocab_cross_entropy_bwd"]
__all__ += ["vocab_cross_entropy_dgrad", "vocab_cross_entropy_fwd", "vocab_cross_entropy_init"]
__all__ += ["vocab_cross_entropy_wgrad", "vocab_embedding", "vocab_embedding_bwd", "vocab_embedding_dgrad"]
__all__ += ["vocab_embedding_fwd", "vocab_embedding_init", "vocab_embedding_wgrad", "vocab_linear_cross_entropy"]
__all__ += ["vocab_linear_cross_entropy_bwd", "vocab_linear_cross_entropy_dgrad", "vocab_linear_cross_entropy_fwd"]
__all__ += ["vocab_linear_cross_entropy_init", "vocab_linear_cross_entropy_wgrad", "zero3", "zigzag", "zigzag_positions"]
