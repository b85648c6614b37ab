"""Which kernel attends, by options, dtype, head size and device: the table is in docs/kernels.md."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.kernels import attention as library
from funcops.kernels.scored_attention import Score, nothing_to_see, scored_attention_bwd, scored_attention_fwd

Gradients = tuple[Tensor, Tensor, Tensor, Optional[Tensor]]


def attend_fwd(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], cu_seqlens: Optional[Tensor], score: Score
) -> tuple[Tensor, Tensor]:
    """y and logsumexp, in the layout of what made it: [B, H, T], or longer."""
    served = _served(q, k, v, bias, cu_seqlens, score)
    if served == "library":
        return library.attention_fwd(q, k, v, score.causal, score.scale)  # type: ignore[no-any-return]
    if served == "flash":
        return library.flash_fwd(q, k, v, cu_seqlens, score.causal, score.window, score.scale)
    return scored_attention_fwd(q, k, v, bias, cu_seqlens, *score)  # type: ignore[no-any-return]


def attend_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], cu_seqlens: Optional[Tensor], y: Tensor, lse: Tensor,
    score: Score, wants_bias: bool,
) -> Gradients:  # fmt: skip
    """dq, dk, dv and, where it is wanted, dbias."""
    served = _served(q, k, v, bias, cu_seqlens, score)
    if served == "library":
        return *library.attention_bwd(dy, q, k, v, y, lse, score.causal, score.scale), None
    if served == "flash":
        return *library.flash_bwd(dy, q, k, v, cu_seqlens, y, lse, score.causal, score.window, score.scale), None
    return scored_attention_bwd(dy, q, k, v, bias, cu_seqlens, y, lse, *score, wants_bias)  # type: ignore[no-any-return]


def _served(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], cu_seqlens: Optional[Tensor], score: Score) -> str:
    """By whom: the "library", its "flash" with options, or "" for our own."""
    if bias is not None or score.softcap or score.alibi:
        return ""
    window, shorter = score.window or cu_seqlens is not None, score.causal and q.shape[1] != k.shape[1]
    if q.shape[3] == v.shape[3] and not (window or shorter):
        return "library"
    if not q.is_cuda or nothing_to_see(q, k):
        return ""
    by = library.way(q.dtype, max(q.shape[3], v.shape[3])).kernel
    if by == "flash":
        return "flash" if window else "library"
    return "library" if by == "efficient" and not (window or shorter) else ""
