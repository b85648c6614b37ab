"""Weight gradients of several grouped linear layers, or of several microbatches of one, in one grouped product.

batch, group: the rows of all products one after the other; each product has its groups there, and one more for its rows without a
group, whose gradient is dropped. Each row keeps its group, so every sum has the terms that it has alone. Codes lie side by side
along rows, with their scales; columns without a group are zeros, and count to the group before them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.accumulators import takes_sums
from funcops.library.kernels import grouped as kernels
from funcops.library.kernels.grouped_scaled import grouped_scaled_wgrad
from funcops.library.ops.linear_wgrads import join_some


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


class Columns(NamedTuple):
    """The operands of `grouped_scaled_wgrad`: codes, scales and scale of dy and of x, by columns; the first column of each group,
    and of none; the last ones; elements, columns of a scale, and the kind of scales; and the number of columns."""

    dy: tuple[Tensor, Tensor, Tensor | None]
    x: tuple[Tensor, Tensor, Tensor | None]
    starts: Tensor
    ends: Tensor
    how: tuple[Any, ...]
    width: int

    def product(self, out: torch.dtype) -> Tensor:
        """dw [E, O, I]."""
        return grouped_scaled_wgrad(*self.dy, *self.x, self.starts, self.ends, *self.how, self.width, out)  # type: ignore[no-any-return]

    @staticmethod
    def joined(parts: list[Columns]) -> Columns:
        """The groups of all parts, one part after the other."""
        bases = [sum(part.width for part in parts[:i]) for i in range(len(parts) + 1)]
        starts = [part.starts[:-1] + base for part, base in zip(parts, bases, strict=False)]
        ends = [part.ends + base for part, base in zip(parts, bases, strict=False)]
        starts.append(starts[0].new_full((1,), bases[-1]))
        dy, x = _side_by_side([part.dy for part in parts]), _side_by_side([part.x for part in parts])
        return Columns(dy, x, torch.cat(starts), torch.cat(ends), parts[0].how, bases[-1])


def _side_by_side(operands: list[tuple[Tensor, Tensor, Tensor | None]]) -> tuple[Tensor, Tensor, Tensor | None]:
    codes, scales, scale = zip(*operands, strict=True)
    if scales[0].mT.is_contiguous():  # the layout that quantisers return
        joined = torch.cat([s.mT for s in scales]).mT
    else:
        joined = torch.cat(scales, 1)
    return torch.cat(codes, 1), joined, None if scale[0] is None else torch.cat(scale, 1)


class GroupedScaledProduct(NamedTuple):
    """The weight gradient of a grouped layer in low precision, and its accumulator dw [E, O, I], checked. `made` returns the
    operands, in its turn: codes that are gathered or turned for the product should not wait beside others. Products of one `kind`
    and one shape of dw can be joined. `out`: the product's dtype."""

    made: Callable[[], Columns]
    kind: Hashable
    dw: Tensor
    out: torch.dtype

    @staticmethod
    def join(products: list[GroupedScaledProduct], how: str | None) -> None:
        """Add every product to its accumulator, joined if `how` is "batch" or "group"."""
        left = join_some(products, products, _scaled_kind, _scaled_together) if how in ("batch", "group") else products
        for p in left:
            p.dw.add_(p.made().product(p.out))


def _scaled_kind(p: GroupedScaledProduct) -> Hashable:
    return p.kind, p.dw.shape, p.out, p.dw.device


def _scaled_together(products: list[GroupedScaledProduct]) -> None:
    found, groups = Columns.joined([p.made() for p in products]).product(products[0].out), len(products[0].dw)
    for i, p in enumerate(products):
        p.dw.add_(found[i * groups :][:groups])
