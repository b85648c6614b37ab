"""The kernels of torch that compute attention on CUDA, in pairs: q, k, v [B, H, T, D] to out and logsumexp [B, H, T], and back.

Flash attention and cuDNN take each other's out and logsumexp, which is a natural logarithm. Memory-efficient attention pads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten
VECTOR = 16  # bytes that the CUDA kernels read at a time: heads, strides and addresses are multiples of it
LONGEST = 256  # the largest head size of flash attention
LSE_ROWS = 32  # memory-efficient attention pads logsumexp to a multiple of it, with infinity


class Way(NamedTuple):
    """How CUDA computes attention: by "flash" (or cuDNN, where `cudnn_serves`), "efficient" or "math"; the head size to which heads
    are zero-padded; and whether k and v must be repeated to a head for each of q's."""

    kernel: str
    size: int
    repeated: bool


def way(dtype: torch.dtype, head_size: int) -> Way:
    """Choose the kernel: both take heads of whole vectors, flash only 16-bit ones of up to 256 elements, neither float64."""
    if dtype is torch.float64:
        return Way("math", head_size, True)
    step = VECTOR // dtype.itemsize
    size = -(-head_size // step) * step
    flash = dtype.itemsize == 2 and size <= LONGEST
    return Way("flash" if flash else "efficient", size, not flash)


def _flash_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.empty((), dtype=torch.uint64, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward.default(
        dy, q, k, v, y, logsumexp, None, None, q.shape[2], k.shape[2], 0.0, causal, state, state, scale=scale
    )


def _cudnn_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = _aten._scaled_dot_product_cudnn_attention.default(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
    return out, lse.view(out.shape[:3])


def _cudnn_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    state = torch.empty((), dtype=torch.int64, device=q.device)
    dy, y = _as_planned(dy), _as_planned(y)
    lse = logsumexp.contiguous().unsqueeze(-1)
    return _aten._scaled_dot_product_cudnn_attention_backward.default(
        dy, q, k, v, y, lse, state, state, None, None, None, q.shape[2], k.shape[2], 0.0, causal, scale=scale
    )


def _as_planned(t: Tensor) -> Tensor:
    """[B, H, T, D] in the memory of a dense [B, T, H, D], which a plan takes it to be without a look."""
    t = t.transpose(1, 2)
    return (t if t.is_contiguous() else t.clone(memory_format=torch.contiguous_format)).transpose(1, 2)


def _efficient_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return _aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.0, causal, scale=scale)[:2]


def _efficient_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    if logsumexp.shape[-1] % LSE_ROWS:
        logsumexp = torch.nn.functional.pad(logsumexp, (0, -logsumexp.shape[-1] % LSE_ROWS), value=float("inf"))
    return _aten._scaled_dot_product_efficient_attention_backward.default(
        dy, q, k, v, None, y, logsumexp, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
    )[:3]


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores = torch.matmul(q, k.mT) * scale
    if not causal:
        return scores
    t = torch.arange(q.shape[2], device=q.device)
    return scores.masked_fill(t > t.unsqueeze(1), float("-inf"))


def _math_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale)
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse.unsqueeze(-1)).exp(), v), lse


def _math_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    p = (_scores(q, k, causal, scale) - logsumexp.unsqueeze(-1)).exp()
    dp = torch.matmul(dy, v.mT)  # term 1 of ds: through the score's own exp
    along = (dy * y).sum(-1, keepdim=True)  # term 2: through logsumexp; it is the sum of p dp over a row
    ds = p * (dp - along) * scale
    return torch.matmul(ds, k), torch.matmul(ds.mT, q), torch.matmul(p.mT, dy)


class Pair(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]


WAYS = {
    "flash": Pair(_flash_fwd, _flash_bwd),
    "cudnn": Pair(_cudnn_fwd, _cudnn_bwd),
    "efficient": Pair(_efficient_fwd, _efficient_bwd),
    "math": Pair(_math_fwd, _math_bwd),
}
