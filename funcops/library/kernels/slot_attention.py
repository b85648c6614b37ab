"""Attention of new tokens over the slots of a cache, some of which are empty.

q: [B, T, H, D]; k: [B, K, R, D]; v: [B, K, R, V] with K dividing H, or None: then values are the first V elements of keys; y:
[B, T, H, V]. `first` [B]: the position of each sequence's row 0; `ends` [B]: the number of its positions in the cache, these rows
included. Position p is in slot p mod R, so slot j holds the last position p < end with p mod R = j, and is empty without one.

    s = scale q k^T        s = softcap tanh(s / softcap)        s = s - slope_h (i - p) + bias[i, p]        y = softmax(s, sink_h) v

A row at position i sees positions p <= i; with `window` only i - p < window; with `chunk` only the ones in its chunk. bias:
[B or 1, H or 1, T, positions]. `sinks` [H]: a logit for each head, whose share of the sum goes to no value. 0 means no window, no
chunks and no cap. A row that sees nothing has y 0.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel
from funcops.library.kernels.attention import by_elements, heads_first
from funcops.library.kernels.block_attention import with_sink
from funcops.library.kernels.scored_attention import Score, alibi_slopes, nothing_to_see, scored_attention_fwd


@kernel(opaque=True, rows="pinned")
def slot_attention_fwd(
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
    """Compute y. `width` is V."""
    values = k[..., :width] if v is None else v
    low, high = _filled(ends, k.shape[2])
    if not high or nothing_to_see(q, k) or nothing_to_see(q, values):
        return q.new_zeros((*q.shape[:3], width))
    mask = None
    if q.shape[1] > 1 or bias is not None or alibi or low < high or chunk or (window and high > window):
        mask = _mask(q, first, ends, bias, (k.shape[2], high), window, chunk, alibi)
    y, lse = _masked(q, k[:, :, :high], values[:, :, :high], mask, softcap, scale)
    return with_sinks(y, lse, sinks).to(q.dtype)


def with_sinks(y: Tensor, lse: Tensor, sinks: Optional[Tensor]) -> Tensor:
    return y if sinks is None else y * torch.exp(lse - with_sink(lse, sinks)).transpose(1, 2).unsqueeze(-1)


@slot_attention_fwd.fake
def _fake(q: Tensor, width: int) -> Tensor:
    return q.new_empty((*q.shape[:3], width))


def _flops(q: Tensor, k: Tensor, width: int) -> int:
    """Scores and their products with values, of all slots."""
    return 2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + width)


slot_attention_fwd.kernel.flops = _flops


def _filled(ends: Tensor, slots: int) -> tuple[int, int]:
    """The fewest and the most slots that a sequence has filled. Unknown on a device: none, and all."""
    if not ends.is_cpu or not ends.numel():
        return 0, slots
    low, high = torch.aminmax(ends)
    return min(int(low), slots), min(int(high), slots)


def _mask(
    q: Tensor, first: Tensor, ends: Tensor, bias: Optional[Tensor], sizes: tuple[int, int], window: int, chunk: int, alibi: bool
) -> Tensor:
    """Make the summand of the scores of the first slots: [B, 1 or H, T, slots]. `sizes`: of the ring, and of these slots."""
    ring, slots = sizes
    last = ends.unsqueeze(1) - 1
    held = last - (last - torch.arange(slots, device=q.device)) % ring
    at = first.unsqueeze(1) + torch.arange(q.shape[1], device=q.device)
    away = at.unsqueeze(2) - held.unsqueeze(1)
    hidden = (away < 0) | (held < 0).unsqueeze(1)
    if window:
        hidden |= away >= window
    if chunk:
        hidden |= (at - at % chunk).unsqueeze(2) > held.unsqueeze(1)
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf")).unsqueeze(1)
    if alibi:
        mask = mask - alibi_slopes(q.shape[2], q.device, q.dtype)[:, None, None] * away.abs().unsqueeze(1)
    if bias is not None:
        places = held.clamp(0, bias.shape[3] - 1)[:, None, None, :].expand(-1, bias.shape[1], q.shape[1], -1)
        mask = mask + bias.expand(q.shape[0], -1, -1, -1).gather(3, places)
    return mask


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Optional[Tensor], softcap: float, scale: float) -> tuple[Tensor, Tensor]:
    """Compute y and logsumexp [B, H, T] from k and v with heads first. On the CPU aten's flash kernel does it, if it can."""
    if softcap or not q.is_cpu or q.shape[3] != v.shape[3]:
        score = Score(False, 0, softcap, False, scale)
        return scored_attention_fwd(q, k.transpose(1, 2), v.transpose(1, 2), mask, None, *score)  # type: ignore[no-any-return]
    q, k, v = heads_first(q), by_elements(k), by_elements(v)
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out.transpose(1, 2), lse
