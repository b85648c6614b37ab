"""Where rows go that are sorted by expert. indices: [T, K], the experts of each token; N = T K rows, E experts.

    order [N]: the stable order of the flat indices       token [N] = order // K       (of which token the row is)
    offsets [E + 1]: rows offsets[e] to offsets[e + 1] are expert e's                   place [T, K]: the inverse of order

An index of E is a choice that was dropped: its row is behind offsets[E], and is zero in whatever has a row for each.
All are int32 and stay on the device; a permutation of N rows, so that a sum over a token's rows, by place, has a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.backend import kernel


@kernel(library=True)
def sort_by_expert(indices: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(order [N], token [N], offsets [E + 1], place [T, K]), all int32. An index outside [0, E] raises IndexError on the CPU."""
    key = torch.int16 if experts < 2**15 else torch.int32  # a radix sort passes over two bytes
    bounds = torch.arange(experts + 1, dtype=key, device=indices.device)
    ordered, order = torch.sort(bounds.index_select(0, indices.reshape(-1)), stable=True)
    offsets = torch.searchsorted(ordered, bounds, out_int32=True)
    ranks = torch.arange(order.numel(), dtype=torch.int32, device=indices.device)
    place = torch.empty_like(ranks).scatter_(0, order, ranks).view(indices.shape)
    order = order.to(torch.int32)
    return order, order // indices.shape[-1], offsets, place
