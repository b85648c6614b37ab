"""Attention whose q, k, v and dy are codes of 8 bits with scales for blocks of a head's rows: FlashAttention-3's block
quantisation (arXiv 2407.08608, section 3.3).

q: [B, H, T, D]; k: [B, K, S, D]; v: [B, K, S, V], with K dividing H, and dy: [B, H, T, V]: uint8, heads first, each with float32
scales [B, H, N, 1], one for each 128 rows of a head, or with N = 1 for all of them. out: [B, T, H, V]; dq, dk, dv: [B, T, H, D].

    s = scale q k^T        p = exp(s - max)        out = p v / sum(p)        ds = p' (dp - rowsum(p' dp))        dp = dy v^T

where p' is p over its row's sum. `low`: p is rounded to e4m3 for its product with v, as 256 p / exp(top), top the largest score of
a row's keys so far, over steps of KEYS keys. Nothing else is rounded here: the backward treats p's rounding as the identity, and
computes sum(p) and rowsum(p' dp) from the codes, so that neither out nor logsumexp is kept. Masks: see `scored_attention`.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide
from funcops.library.kernels import quantize as codes
from funcops.library.kernels.quantize import BLOCK
from funcops.library.kernels.scored_attention import nothing_to_see, scored_attention_bwd, scored_attention_fwd, sequence_of

KEYS = 64  # of a step, after which rounded probabilities are relative to the largest score so far; divides BLOCK
LARGEST = 256.0  # the code's value of the largest probability: the greatest power of two in e4m3
ROWS = 128  # whose scores are in memory at a time
LONGEST = 128  # the largest head size


@kernel()
def quantize_heads(x: Tensor, element: str, block: int, kind: str, epsilon: float) -> tuple[Tensor, Tensor]:
    """Codes [B, H, T, D] and scales [B, H, T / block, 1] of x [B, T, H, D]; `block` 0: one scale for each
    head. `epsilon`: the least amax that a scale is made from."""
    (batch, t, heads, size), rows = x.shape, block or max(x.shape[1], 1)
    number = -(-t // rows)
    flat = torch.nn.functional.pad(x.transpose(1, 2), (0, 0, 0, number * rows - t)).reshape(-1, size)
    how = element, rows, BLOCK if block else 0, kind, None, None, epsilon
    found, scales = codes.quantize_row.kernel.torch_impl(flat, *how)
    found = found.reshape(batch, heads, number * rows, size)[:, :, :t].contiguous()
    return found, scales.reshape(batch, heads, number, 1)


@quantize_heads.fake
def _fake_heads(x: Tensor, block: int) -> tuple[Tensor, Tensor]:
    batch, t, heads, size = x.shape
    number = -(-t // (block or max(t, 1)))
    return x.new_empty((batch, heads, t, size), dtype=torch.uint8), x.new_empty((batch, heads, number, 1), dtype=torch.float32)


@kernel()
def scaled_attention_fwd(
    q: Tensor,
    q_scales: Tensor,
    k: Tensor,
    k_scales: Tensor,
    v: Tensor,
    v_scales: Tensor,
    cu_seqlens: Optional[Tensor],
    element: str,
    causal: bool,
    window: int,
    scale: float,
    low: bool,
    out: torch.dtype,
) -> Tensor:
    """y [B, T, H, V] in the dtype `out`."""
    dtype = wide(out)
    q, k, v = (decoded(t, s, element, dtype) for t, s in ((q, q_scales), (k, k_scales), (v, v_scales)))
    if low and not nothing_to_see(q, k):
        return _of_rounded(q, k, v, cu_seqlens, causal, window, scale).to(out)
    y, _ = scored_attention_fwd.kernel.torch_impl(q, k, v, None, cu_seqlens, causal, window, 0.0, False, scale)
    return y.to(out)  # type: ignore[no-any-return]


@scaled_attention_fwd.fake
def _fake_fwd(q: Tensor, v: Tensor, out: torch.dtype) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]), dtype=out)


@kernel()
def scaled_attention_bwd(
    dy: Tensor,
    dy_scales: Tensor,
    q: Tensor,
    q_scales: Tensor,
    k: Tensor,
    k_scales: Tensor,
    v: Tensor,
    v_scales: Tensor,
    cu_seqlens: Optional[Tensor],
    dy_element: str,
    element: str,
    causal: bool,
    window: int,
    scale: float,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [B, T, H, D], dk [B, S, K, D] and dv [B, S, K, V] in the dtype `out`."""
    dtype = wide(out)
    q, k, v = (decoded(t, s, element, dtype) for t, s in ((q, q_scales), (k, k_scales), (v, v_scales)))
    score = causal, window, 0.0, False, scale
    y, lse = scored_attention_fwd.kernel.torch_impl(q, k, v, None, cu_seqlens, *score)
    dy = decoded(dy, dy_scales, dy_element, dtype)
    dq, dk, dv, _ = scored_attention_bwd.kernel.torch_impl(dy, q, k, v, None, cu_seqlens, y, lse, *score, False)
    return dq.to(out), dk.to(out), dv.to(out)


@scaled_attention_bwd.fake
def _fake_bwd(q: Tensor, k: Tensor, v: Tensor, out: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (t.new_empty((t.shape[0], t.shape[2], t.shape[1], t.shape[3]), dtype=out) for t in (q, k, v))
    return dq, dk, dv


def rows_of_scale(scales: Tensor, rows: int) -> int:
    """The number of rows of a head that share a scale."""
    return BLOCK if scales.shape[2] > 1 else max(rows, 1)


def decoded(t: Tensor, scales: Tensor, element: str, dtype: torch.dtype) -> Tensor:
    """Codes [B, H, T, D] as numbers [B, T, H, D]."""
    of_rows = scales.repeat_interleave(rows_of_scale(scales, t.shape[2]), 2)[:, :, : t.shape[2]]
    return (codes.decode(t, element) * of_rows).to(dtype).transpose(1, 2)


def _of_rounded(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Optional[Tensor], causal: bool, window: int, scale: float) -> Tensor:
    """y [B, T, H, V] from p that is rounded step by step, as a kernel does."""
    (_, t, heads, _), s = q.shape, k.shape[1]
    keys, values = (each.transpose(1, 2).repeat_interleave(heads // k.shape[2], 1) for each in (k, v))
    ids = None if cu_seqlens is None else sequence_of(cu_seqlens, s)
    j, parts = torch.arange(s, device=q.device), []
    for first in range(0, t, ROWS):
        rows = q[:, first : first + ROWS].transpose(1, 2)
        i = torch.arange(first, first + rows.shape[2], device=q.device).unsqueeze(-1) + (s - t)
        unseen = (j > i) if causal else (j < 0)
        unseen = unseen | (j <= i - window) if window else unseen
        unseen = unseen if ids is None else unseen | (ids[i] != ids)
        scores = (torch.matmul(rows, keys.mT) * scale).masked_fill(unseen, float("-inf"))
        top = scores.new_full((*scores.shape[:3], 1), float("-inf"))
        total, y = torch.zeros_like(top), scores.new_zeros((*scores.shape[:3], v.shape[3]))
        for at in range(0, s, KEYS):
            some = scores[..., at : at + KEYS]
            higher = torch.maximum(top, some.amax(-1, keepdim=True))
            base = higher.masked_fill(higher == float("-inf"), 0.0)
            p, before = (some - base).exp(), (top - base).exp()
            total = total * before + p.sum(-1, keepdim=True)
            near = (p * LARGEST).to(torch.float8_e4m3fn).to(p.dtype)
            y = y * before + torch.matmul(near, values[:, :, at : at + KEYS])
            top = higher
        parts.append((y / (total.masked_fill(total == 0, 1.0) * LARGEST)).transpose(1, 2))
    return torch.cat(parts, 1)
