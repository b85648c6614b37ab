"""Products of sorted rows, some rows of a group at a time."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.library.kernels.grouped import biased, gathered, grouped_product, groups_of
from funcops.library.kernels.pins import Pins, pinned, row_product

EACH = 32  # rows of a group in a product, at most: a group may have few


@pinned(grouped_product)
def _pinned_product(
    pins: Pins,
    a: Tensor,
    w: Tensor,
    b: Optional[Tensor],
    offsets: Tensor,
    index: Optional[Tensor],
    every: int,
    scales: Optional[Tensor],
    transposed: bool,
) -> Tensor:
    rows, matrices = a if index is None else gathered(a, index, every), w.mT if transposed else w
    y = rows.new_zeros((rows.shape[0], matrices.shape[2]))
    for e, first, last in groups_of(offsets, len(rows)):
        y[first:last] = row_product(rows[first:last], matrices[e], None, min(pins.rows, EACH))
    return y if b is None else biased(y, b, scales, offsets)
