"""The order and places of rows sorted by expert. indices: [T, K], the experts of each token; N = T K rows, E experts.

    order [N]: the stable order of the flat indices       token [N] = order // K       (the token of each row)
    offsets [E + 1]: rows offsets[e] to offsets[e + 1] are expert e's                   place [T, K]: the inverse of order

An index of E is a dropped choice: its row comes from offsets[E] on, and is zero in every tensor with a row per choice.
All are int32 and stay on the device. `order` is a permutation of N rows, so a sum of a token's rows, by place, has a fixed order.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide
from funcops.engine.errors import require

MOST_ROWS = 2**31 - 2**16  # with less than a tile more, the numbers of rows still fit 32 bits


def check_row_count(where: str, name: str, rows: int) -> None:
    """Raise if there are too many rows for their int32 numbers."""
    require(rows <= MOST_ROWS, where, name, f"of at most {MOST_ROWS} rows", rows)


@kernel(library=True, rows="each")
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


def of_rows(weights: Tensor, order: Tensor) -> Tensor:
    """The weight of each row, in the shape of `order`: [N]."""
    return weights.reshape(-1).index_select(0, order.reshape(-1)).view(order.shape)


def of_choices(rows: Tensor, order: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `of_rows`: put the value of each row [N] at its choice, in `shape`."""
    flat = rows.reshape(-1)
    return torch.empty_like(flat).scatter_(0, order.reshape(-1).to(torch.int64), flat).view(shape)


def over_capacity(indices: Tensor, experts: int, capacity: int | Tensor) -> Tensor:
    """Whether `capacity` choices of the same expert come before each choice, [T, K], in the order of tokens, then of k."""
    _, _, offsets, place = sort_by_expert(indices, experts)
    return place - offsets[indices] >= capacity


@kernel(rows="each")
def scatter_rows(x: Tensor, place: Tensor, offsets: Optional[Tensor]) -> Tensor:
    """rows [N, D] from x [T, D]: x_t at place[t, k], for every k. With `offsets`, rows from the last offset on are zero."""
    choices = place.shape[-1]
    ranks = torch.arange(place.numel(), device=x.device)
    token = torch.empty_like(ranks).scatter_(0, place.reshape(-1).to(torch.int64), ranks // choices)
    rows = x.index_select(0, token)
    return rows if offsets is None else rows.masked_fill_((ranks >= offsets[-1]).unsqueeze(-1), 0.0)


@kernel(rows="each")
def gather_rows(rows: Tensor, place: Tensor, offsets: Optional[Tensor]) -> Tensor:
    """y [T, D]: the sum of a token's rows, rows[place[t, k]], over k in order, in the wide dtype. With `offsets`, rows from
    the last offset on count as zero. A place outside [0, N) raises IndexError on the CPU."""
    total = torch.zeros(place.shape[0], rows.shape[-1], dtype=wide(rows.dtype), device=rows.device)
    for k in range(place.shape[-1]):
        at = place[:, k]
        part = rows.index_select(0, at)
        total += part if offsets is None else part.masked_fill_((at >= offsets[-1]).unsqueeze(-1), 0.0)
    return total.to(rows.dtype)
