"""Groups of sorted rows for quantisers: one scale per group, and rows laid out anew so that no block of rows crosses two groups.

    offsets [E + 1], int32: rows offsets[e] to offsets[e + 1] of N are group e's; rows from offsets[E] on have no group (number E)
    aligned: group e begins at starts[e], a multiple of `block`, zero-padded; P = N + E (block - 1) rows, rounded down to blocks

P suffices however the N rows are distributed, so that no size depends on offsets, and no value is read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcops import random
from funcops.backend import kernel
from funcops.kernels.grouped import group_of
from funcops.kernels.quantize import hadamard_of, magnitudes


def aligned_count(rows: int, groups: int, block: int) -> int:
    """The number P of aligned rows."""
    return (rows + groups * (block - 1)) // block * block


@kernel(library=True)
def aligned_starts(offsets: Tensor, block: int) -> Tensor:
    """The first aligned row of each group, and the end of the last: starts [E + 1], int32."""
    blocks = (offsets.diff() + (block - 1)) // block * block
    return torch.cat((offsets.new_zeros(1), blocks.cumsum(0, dtype=torch.int32)))


@kernel(library=True)
def aligned_source(offsets: Tensor, starts: Tensor, rows: int, aligned: int) -> Tensor:
    """The row, of N = `rows`, that each of P = `aligned` rows holds, int64 [P]; N for a row of zeros."""
    at = torch.arange(aligned, device=offsets.device)
    group = group_of(starts, aligned)
    found = offsets.index_select(0, group) + at - starts.index_select(0, group)
    ends = torch.cat((offsets[1:], offsets.new_zeros(1))).index_select(0, group)
    return torch.where(found < ends, found, rows)


@kernel(library=True)
def taken(x: Tensor, source: Tensor) -> Tensor:
    """The rows `source` [P] of x [R, K]; zeros where `source` is R."""
    if not len(x):
        return x.new_zeros((source.shape[0], x.shape[1]))
    made = x.index_select(0, source.clamp(max=len(x) - 1))
    return made.masked_fill_((source >= len(x)).unsqueeze(-1), 0)


@kernel(library=True)
def group_amax(x: Tensor, group: Tensor, groups: int, hadamard: bool) -> Tensor:
    """The largest |x| of each group's rows, float32 [E + 1], without NaN; 0 for a group without rows. `hadamard`: after x is
    transformed along its rows, of which each 16 belong to one group."""
    wide = hadamard_of(x.mT).mT if hadamard else x.float()
    return wide.new_zeros(groups + 1).scatter_reduce(0, group, magnitudes(wide).amax(1), "amax")


@kernel(library=True)
def random_words(keys: Tensor, group: Tensor, first: Tensor, across: Tensor, down: Tensor, width: int) -> Tensor:
    """The random word, int64 [R, width], that rounds each element of sorted rows: drawn from group e's key, int64 [E, 2], at the
    element's number in its group, (row - first[e]) * down[e] + column * across[e]; first, across and down: int64 [E]."""
    lead = torch.arange(len(group), device=group.device) - _of(first, group)
    place = (lead * _of(down, group)).unsqueeze(-1) + torch.arange(width, device=group.device) * _of(across, group).unsqueeze(-1)
    block, (seed, stream) = place // 4, (_of(k, group).unsqueeze(-1) for k in keys.unbind(-1))
    low = 0xFFFFFFFF
    words = random.philox((seed & low, (seed >> 32) & low), (block & low, block >> 32, stream & low, (stream >> 32) & low))
    return torch.stack(words, -1).gather(-1, (place % 4).unsqueeze(-1)).squeeze(-1)


def _of(each: Tensor, group: Tensor) -> Tensor:
    """The entry of each row's group; 0 for a row without a group."""
    return torch.cat((each, each.new_zeros(1))).index_select(0, group)
