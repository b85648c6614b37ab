"""Weight gradients of linear layers in low precision, dw += q(dy)^T q(x), several of them in few products.

concatenate: codes and scales of dy, and of x, side by side along rows, one product for one dw. batch, group: every product a group
of rows of one grouped product. Joined are operands of blocks along rows, all of whole blocks, whose codes stay as they are; and
operands with one scale each, of rows by 16, for one dw too as groups, whose gradients are then added.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from funcops.engine.trees import replace
from funcops.library.formats import QTensor, by_tiles
from funcops.library.formats.recipes import Recipe
from funcops.library.kernels.grouped_scaled import grouped_scaled_wgrad
from funcops.library.kernels.quantize import by_columns
from funcops.library.kernels.scaled_mm import scaled_mm
from funcops.library.kernels.tables import Tables
from funcops.library.ops.linear_wgrads import join_some

_starts = Tables(32)  # the first row of each product of a group


def product(a: QTensor, b: QTensor, out: torch.dtype, emulate: bool) -> Tensor:
    """The product [*, N] of [*, K] and [N, K], where K is the last dimension of codes."""
    of_a, of_b = a.format, b.format
    width = min(a.width, b.width)  # codes of 4 bits are padded to whole bytes, others are not
    how = of_a.element, *of_a.tile, of_b.element, *of_b.tile, of_a.scales, width
    kind = "" if of_a.kind == of_b.kind else of_b.scales
    return scaled_mm(a.codes, a.scales, a.scale, b.codes, b.scales, b.scale, *how, out, emulate, kind)  # type: ignore[no-any-return]


class ScaledProduct(NamedTuple):
    """dy [O, R] and x [I, R] of one weight gradient, both by columns, and its accumulator dw [O, I]; all checked. `made` returns x,
    in its turn: codes that are gathered or turned for the product should not wait beside others. `out`: the product's dtype."""

    dy: QTensor
    made: Callable[[], QTensor]
    recipe: Recipe
    dw: Tensor
    out: torch.dtype

    @staticmethod
    def join(products: list[ScaledProduct], how: str | None) -> None:
        """Add every product to its accumulator, joined as `how` says; alone if it is None, as no way was measured to be faster."""
        left = products
        if how == "concatenate":
            left = join_some(products, products, _of_one, _concatenate)
            left = join_some(left, left, _of_one_scaled, _group)
        elif how in ("batch", "group"):
            left = join_some(products, products, _of_a_group, _group)
        for p in left:
            p.dw.add_(product(p.dy, p.made(), p.out, p.recipe.emulate))


def _kind(p: ScaledProduct) -> Hashable:
    """Products of one kind can be joined; None for a product that cannot be."""
    dy, rows = p.dy, p.dy.shape[:-1].numel()
    blocks = [format.tile[1] > 0 and rows % format.tile[1] == 0 for format in (dy.format, p.recipe.x_col)]
    return (p.recipe, p.out, dy.device) if all(blocks) and dy.scale is None and dy.width == rows else None


def _of_one(p: ScaledProduct) -> Hashable:
    kind = _kind(p)
    return None if kind is None else (kind, p.dw.data_ptr(), p.dw.stride())


def _of_one_scaled(p: ScaledProduct) -> Hashable:
    return (_of_a_group(p), p.dw.data_ptr(), p.dw.stride()) if _one_scale(p) else None


def _one_scale(p: ScaledProduct) -> bool:
    """Whether each operand has one scale, and the rows make a group."""
    whole = p.dy.format.tile == p.recipe.x_col.tile == (0, 0)
    return whole and p.dy.scale is None and p.dy.width % 16 == 0 < p.dy.width and not p.recipe.emulate


def _of_a_group(p: ScaledProduct) -> Hashable:
    if _one_scale(p):
        return p.recipe, p.out, p.dy.device, p.dw.shape
    kind, tiles = _kind(p), (p.dy.format.tile, p.recipe.x_col.tile)
    one = kind is not None and tiles[0] == tiles[1] and tiles[0][0] == 1 and tiles[0][1] % 16 == 0 and not p.recipe.emulate
    return (kind, p.dw.shape) if one else None


def _side_by_side(parts: list[QTensor]) -> QTensor:
    """Codes by columns of several tensors, as the codes of their rows one after the other."""
    first = parts[0]
    if first.format.tile == (0, 0):  # each column of codes gets the scale of its tensor
        scales = torch.cat([q.scales.expand(1, q.width) for q in parts], 1)
    elif by_columns(*first.format.tile, first.format.scales):  # the layout that quantisers return
        scales = by_tiles(torch.cat([by_tiles(q.scales, first.format) for q in parts]), first.format)
    else:
        scales = torch.cat([q.scales for q in parts], 1)
    shape = torch.Size((sum(q.shape[:-1].numel() for q in parts), first.shape[-1]))
    return replace(first, codes=torch.cat([q.codes for q in parts], 1), scales=scales, shape=shape)


def _concatenate(products: list[ScaledProduct]) -> None:
    first = products[0]
    dy, x = _side_by_side([p.dy for p in products]), _side_by_side([p.made() for p in products])
    first.dw.add_(product(dy, x, first.out, first.recipe.emulate))


def _group(products: list[ScaledProduct]) -> None:
    dy, x = _side_by_side([p.dy for p in products]), _side_by_side([p.made() for p in products])
    rows = tuple([0, *[p.dy.width for p in products]])

    def made() -> tuple[tuple[Tensor, ...], None]:
        return (torch.tensor(rows, device="cpu").cumsum(0, dtype=torch.int32),), None

    ((starts,), _, _) = _starts.get(dy.device, rows, made)
    format, out = dy.format, products[0].out
    how = format.element, x.format.element, format.tile[1] or 1, format.scales, dy.width
    found = grouped_scaled_wgrad(*dy.args, *x.args, starts, starts[1:], *how, out)
    for p, dw in zip(products, found.unbind(), strict=True):
        p.dw.add_(dw)
