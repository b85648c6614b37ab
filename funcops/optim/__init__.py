"""Functional optimisers over any pytree of params: AdamW and SGD on torch's fused multi-tensor ops.

    params, state = adamw_update(params, grads, state, cfg)                  # pure: the arguments stay as they are
    params, state = adamw_update(params, grads, state, cfg, in_place=True)   # the same bits, written into the arguments

The fused ops are those of `torch.optim.AdamW(fused=True)` and `torch.optim.SGD(fused=True)`: equal bits. While tracing
(torch.compile, make_fx) the same formulas are written in `torch._foreach_*` ops, which a compiler can fuse.

A leaf whose gradient is None is skipped: no decay, no step; a pure update returns that very tensor. Gradients have the
dtype of their param, or a narrower one (bfloat16 gradients of float32 master weights).
"""

from funcops.optim.adamw import AdamWConfig as AdamWConfig
from funcops.optim.adamw import AdamWState as AdamWState
from funcops.optim.adamw import adamw_init as adamw_init
from funcops.optim.adamw import adamw_update as adamw_update
from funcops.optim.balance import balance as balance
from funcops.optim.clip import clip_by_global_norm as clip_by_global_norm
from funcops.optim.clip import global_norm as global_norm
from funcops.optim.ema import ema_init as ema_init
from funcops.optim.ema import ema_update as ema_update
from funcops.optim.masks import NO_DECAY as NO_DECAY
from funcops.optim.masks import decay_mask as decay_mask
from funcops.optim.schedules import warmup_cosine as warmup_cosine
from funcops.optim.sgd import SGDConfig as SGDConfig
from funcops.optim.sgd import SGDState as SGDState
from funcops.optim.sgd import sgd_init as sgd_init
from funcops.optim.sgd import sgd_update as sgd_update
