"""Groups of sorted rows for quantisers: one scale per group, and rows laid out anew so that no block of rows crosses two groups.

    offsets [E + 1], int32: rows offsets[e] to offsets[e + 1] of N are group e's; rows from offsets[E] on have no group (number E)
    aligned: group e begins at starts[e], a multiple of `block`, zero-padded; P = N + E (block - 1) rows, rounded down to blocks

P suffices however the N rows are distributed, so that no size depends on offsets, and no value is read on the host.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend import kernel
from funcops.library.kernels.grouped import gathered, group_of
from funcops.library.kernels.quantize import (
    FEWER,
    FOUR_OVER_SIX,
    hadamard_of,
    magnitudes,
    quantize_row,
    quantize_scaled,
    tensor_scale,
)


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


@kernel()
def group_amax(x: Tensor, offsets: Tensor, index: Optional[Tensor], every: int, hadamard: bool) -> Tensor:
    """The largest |x| of each group's rows, float32 [E + 1], without NaN; 0 for a group without rows. x [N, K]; or, with `index`
    [N] and `every`, row n is x[index[n] // every]. `hadamard`: after x is transformed along its rows, of which each 16 belong to
    one group."""
    rows = x if index is None else gathered(x, index, every)
    wide = hadamard_of(rows.mT).mT if hadamard else rows.float()
    found = wide.new_zeros(len(offsets))
    return found.scatter_reduce(0, group_of(offsets, len(rows)), magnitudes(wide).amax(1), "amax") if x.shape[1] else found


@kernel()
def quantize_groups(
    x: Tensor,
    offsets: Tensor,
    index: Optional[Tensor],
    every: int,
    amax: Tensor,
    words: Optional[Tensor],
    element: str,
    cols: int,
    kind: str,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """Codes of rows as `group_amax` takes them, by their groups' `amax` [E + 1]; scales [N, K / cols] (cols 0: [N, 1]); and, for
    e4m3 scales, the scale of each row's group [N, 1]. `words`: a random word for each element, for stochastic rounding."""
    rows = x if index is None else gathered(x, index, every)
    each = amax.index_select(0, group_of(offsets, len(rows))).unsqueeze(-1)
    codes, scales = quantize_row(rows, element, 1, cols, kind, each, words, epsilon)
    whole = tensor_scale(each, FEWER if kind in FOUR_OVER_SIX else 448.0) if kind.startswith("e4m3") else None
    return codes, scales, whole


@kernel()
def quantize_groups_scaled(
    x: Tensor, offsets: Tensor, index: Optional[Tensor], every: int, element: str, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of rows as `group_amax` takes them, times their groups' `scale` [E], 1 for rows without a group; what decodes them,
    [N, 1]; and `group_amax`, all in one read of x."""
    rows = x if index is None else gathered(x, index, every)
    each = torch.cat((scale, scale.new_ones(1))).index_select(0, group_of(offsets, len(rows))).unsqueeze(-1)
    codes, _ = quantize_scaled(rows, element, each)
    return codes, 1.0 / each, group_amax(x, offsets, index, every, False)


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
