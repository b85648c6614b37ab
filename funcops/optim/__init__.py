"""Functional optimisers over any pytree of params: AdamW and SGD on torch's fused multi-tensor ops.

    params, state = adamw_update(params, grads, state, cfg)                  # pure: the arguments stay as they are
    params, state = adamw_update(params, grads, state, cfg, in_place=True)   # the same bits, written into the arguments

The fused ops are those of `torch.optim.AdamW(fused=True)` and `torch.optim.SGD(fused=True)`: equal bits. While tracing
(torch.compile, make_fx) the same formulas are written in `torch._foreach_*` ops, which a compiler can fuse.

A leaf whose gradient is None is skipped: no decay, no step; a pure update returns that very tensor. Gradients have the
dtype of their param, or a narrower one (bfloat16 gradients of float32 master weights).
"""

from funcops.optim.adamw import AdamWConfig, AdamWState, adamw_init, adamw_update
from funcops.optim.balance import balance
from funcops.optim.clip import clip_by_global_norm, global_norm
from funcops.optim.ema import ema_init, ema_update
from funcops.optim.masks import NO_DECAY, decay_mask
from funcops.optim.schedules import warmup_cosine
from funcops.optim.sgd import SGDConfig, SGDState, sgd_init, sgd_update

__all__ = ["AdamWConfig", "AdamWState", "NO_DECAY", "SGDConfig", "SGDState"]
__all__ += ["adamw_init", "adamw_update", "balance", "clip_by_global_norm", "decay_mask"]
__all__ += ["ema_init", "ema_update", "global_norm", "sgd_init", "sgd_update", "warmup_cosine"]
