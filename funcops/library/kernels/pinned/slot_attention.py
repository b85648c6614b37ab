"""Attention over a cache in the blocks of training."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.library.kernels.block_attention import require_plain, slots_fwd
from funcops.library.kernels.pins import Pins, pinned
from funcops.library.kernels.scored_attention import Score
from funcops.library.kernels.slot_attention import slot_attention_fwd, with_sinks


@pinned(slot_attention_fwd)
def _pinned_fwd(
    pins: Pins,
    q: Tensor,
    k: Tensor,
    v: Optional[Tensor],
    first: Tensor,
    ends: Tensor,
    bias: Optional[Tensor],
    sinks: Optional[Tensor],
    width: int,
    window: int,
    chunk: int,
    softcap: float,
    alibi: bool,
    scale: float,
) -> Tensor:
    require_plain("slot_attention_fwd", q, bias, softcap)
    y, lse = slots_fwd(pins, q, k, k[..., :width] if v is None else v, first, ends, Score(True, window, 0.0, alibi, scale), chunk)
    return with_sinks(y, lse, sinks).to(q.dtype)
