"""Functional optimisers over any pytree of params: AdamW and SGD on torch's fused multi-tensor ops, and Muon for matrices.

    params, state = adamw_update(params, grads, state, cfg)                  # pure: the arguments stay as they are
    params, state = adamw_update(params, grads, state, cfg, in_place=True)   # the same bits, written into the arguments

The updates run the fused ops of `torch.optim.AdamW(fused=True)` and `torch.optim.SGD(fused=True)`, with equal bits. A compiler gets
an update of AdamW, the norm and the clipping as one operator each, for which it writes no code, and SGD's as the same formulas in
`torch._foreach_*` ops; so runs SGD of 16-bit params on the CPU, which torch's fused op leaves as they are if they have 16 elements
or more. 16-bit params are updated in float32, and rounded once.

Muon updates the matrices of a model, and AdamW the rest:

    matrices, rest = partition(params, matrix_mask(params))
    matrices, momentum = muon_update(matrices, partition(grads, mask)[0], momentum, MuonConfig())
    params = combine(matrices, rest)

A leaf whose gradient is None is skipped: no decay, no step; a pure update returns the same tensor. Gradients have the
dtype of their param, or a narrower one (bfloat16 gradients of float32 master weights).
"""

from funcops.optim.adamw import AdamWConfig, AdamWState, adamw_init, adamw_update
from funcops.optim.balance import balance
from funcops.optim.clip import clip_by_global_norm, clip_factor, global_norm
from funcops.optim.ema import ema_init, ema_update
from funcops.optim.masks import NO_DECAY, NO_MATRIX, combine, decay_mask, matrix_mask, partition
from funcops.optim.muon import MuonConfig, MuonState, muon_init, muon_update
from funcops.optim.quantized_state import BlockTensor, code_book, dequantize_state, quantize_state, with_quantized_state
from funcops.optim.ratios import update_ratios
from funcops.optim.schedules import warmup_cosine
from funcops.optim.sgd import SGDConfig, SGDState, sgd_init, sgd_update

__all__ = ["AdamWConfig", "AdamWState", "BlockTensor", "MuonConfig", "MuonState", "NO_DECAY", "NO_MATRIX", "SGDConfig", "SGDState"]
__all__ += [
    "adamw_init",
    "adamw_update",
    "balance",
    "clip_by_global_norm",
    "clip_factor",
    "combine",
    "decay_mask",
    "ema_init",
    "ema_update",
]
__all__ += ["global_norm", "matrix_mask", "muon_init", "muon_update", "partition", "sgd_init", "sgd_update", "update_ratios"]
__all__ += ["warmup_cosine"]
__all__ += ["code_book", "dequantize_state", "quantize_state", "with_quantized_state"]
