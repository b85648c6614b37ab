"""Weight gradients of several grouped linear layers, or of several microbatches of one, in one grouped product.

batch, group: the rows of all products one after the other; each product has its groups there, and one more for its rows without a
group, whose gradient is dropped. Each row keeps its group, so every sum has the terms that it has alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.backend import wide
from funcops.contract.accumulators import takes_sums
from funcops.kernels import grouped as kernels
from funcops.ops.linear_wgrads import join_some


class GroupedProduct(NamedTuple):
    """The arguments of `grouped_wgrad` for one weight gradient, and its accumulators dw [E, O, I] and db [E, O] or None; all
    checked."""

    args: tuple[Any, ...]  # dy, x, offsets, dy_order, order, choices, scales
    dw: Tensor
    db: Tensor | None

    @staticmethod
    def join(products: list[GroupedProduct], how: str | None) -> None:
        """Add every product to its accumulators, joined if `how` is "batch" or "group"."""
        left = join_some(products, products, _kind, _together) if how in ("batch", "group") else products
        for p in left:
            add_grouped(p.args, p.dw, p.db)


def add_grouped(args: tuple[Any, ...], dw: Tensor | None, db: Tensor | None) -> None:
    """Add dw and db of `grouped_wgrad(*args)`, each if given: in the product itself, unrounded, if both accumulators are as wide as
    its sums."""
    if takes_sums(dw, args[0].dtype) and takes_sums(db, args[0].dtype):
        kernels.grouped_wgrad_into(*args, dw, db)
        return
    found = kernels.grouped_wgrad(*args, db is not None)
    for accumulator, gradient in zip((dw, db), found, strict=True):
        if accumulator is not None:
            accumulator.add_(gradient)


def _kind(p: GroupedProduct) -> Hashable:
    dy, _, _, _, _, _, scales = p.args
    return p.dw.shape, dy.dtype, dy.device, p.db is None, None if scales is None else scales.dtype


def _together(products: list[GroupedProduct]) -> None:
    every: list[Any] = []
    for dy, x, offsets, dy_order, order, choices, scales in (p.args for p in products):
        rows, inner = kernels.factors(dy, x, dy_order, order, choices)
        every.append((rows, inner, offsets, scales))
    starts = [sum(len(rows) for rows, *_ in every[:i]) for i in range(len(every))]
    offsets = torch.cat([one[2] + start for one, start in zip(every, starts, strict=True)])
    scales = None if every[0][3] is None else torch.cat([one[3] for one in every])
    dy, x, first, groups = (
        torch.cat([one[0] for one in every]),
        torch.cat([one[1] for one in every]),
        products[0],
        len(products[0].dw),
    )
    dw, db = (
        None if t is None else dy.new_zeros((len(offsets) - 1, *t.shape[1:]), dtype=wide(dy.dtype)) for t in (first.dw, first.db)
    )
    kernels.grouped_wgrad_into(dy, x, offsets, None, None, 1, scales, dw, db)
    for i, p in enumerate(products):
        for accumulator, found in ((p.dw, dw), (p.db, db)):
            if accumulator is not None and found is not None:
                accumulator.add_(found[i * (groups + 1) :][:groups])
