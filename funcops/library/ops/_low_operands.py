"""The operands of the three products of a linear layer in low precision: x, w and dy, by rows and by columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.contract.needs import Needs
from funcops.engine.trees import Aside
from funcops.library.formats import Format, QTensor, QWeight, check_quantized, quantize_sides, quantize_tensor, turned
from funcops.library.formats.recipes import Recipe
from funcops.library.formats.scaled import Scaled
from funcops.library.kernels import linear as products
from funcops.library.kernels import quantize as kernels
from funcops.library.ops.qlinear_wgrads import product

Largest = Callable[[Tensor], Tensor] | None  # from the amax [1] of this rank's part to the amax of the whole tensor


def operands(x: Tensor, recipe: Recipe, needs: Needs, largest: Largest = None) -> tuple[QTensor, Any]:
    """The operand of y, x by rows, and the form of x that is saved for dw."""
    if recipe.keep == "input":
        return quantized(x, recipe.x, largest), x
    if recipe.keep == "row" or not needs.param("weight"):
        row = quantized(x, recipe.x, largest)
        return row, row
    return sides(x, recipe.x, recipe.x_col, recipe, largest)


def quantized(
    t: Tensor, format: Format, largest: Largest, *, side: str = "row", key: Tensor | None = None, hadamard: bool = False
) -> QTensor:
    """The result of `quantize_tensor`. `largest`: if t is a part of a tensor, the function from its amax to the whole one's."""
    amax = largest(kernels.amax(t, hadamard)) if format.whole and largest is not None else None
    return quantize_tensor(t, format, side=side, key=key, amax=amax, hadamard=hadamard)


def scaled_tensor(t: Tensor, format: Format, scale: Tensor, largest: Largest = None) -> tuple[QTensor, Tensor]:
    """t quantised by the given scale [1], or by the amax that it has now if no step has measured one yet [0]; and its amax [1]."""
    if not scale.numel():
        amax = kernels.amax(t, False)
        return quantize_tensor(t, format, amax=amax if largest is None else largest(amax)), amax
    codes, amax = kernels.quantize_scaled(t, format.element, scale)
    scales = (1.0 / scale).reshape(1, 1)[: t.shape[:-1].numel()]  # a tensor without rows has no tile
    return QTensor(codes, scales, None, format=format, shape=t.shape, dtype=t.dtype, side="row", hadamard=False), amax


def scaled_weight(weight: Scaled, recipe: Recipe, largest: Largest = None) -> tuple[QTensor, Tensor]:
    if isinstance(weight.value, QWeight) and weight.amax is not None:
        return weight.value.row, weight.amax
    return scaled_tensor(weight.value, recipe.w, weight.scale[1:2], largest)


def row_of(weight: Any, recipe: Recipe, largest: Largest = None) -> QTensor:
    """The weight by rows, for y."""
    return weight.row if isinstance(weight, QWeight) else quantized(weight, recipe.w, largest)


def col_of(weight: Any, recipe: Recipe, largest: Largest = None) -> QTensor:
    """The weight by columns, for dx."""
    if isinstance(weight, Scaled):
        made = weight.value if isinstance(weight.value, QWeight) else None
        weight = QWeight(scaled_weight(weight, recipe, largest)[0], None, None, Aside()) if made is None else made
    if isinstance(weight, QWeight):
        return turned(weight.row) if weight.col is None else weight.col
    return quantized(weight, recipe.w_col, largest, side="col")


def sides(t: Tensor, format: Format, col: Format, recipe: Recipe, largest: Largest = None) -> tuple[QTensor, QTensor]:
    """t by rows, and by columns for dw."""
    if recipe.hadamard or col is not format:
        return quantized(t, format, largest), quantized(t, col, largest, side="col", hadamard=recipe.hadamard)
    return quantize_sides(t, format, largest(kernels.amax(t, False)) if format.whole and largest is not None else None)


def of_gradient(
    dy: Tensor, recipe: Recipe, key: Tensor | None, rows: bool, columns: bool, largest: Largest = None
) -> tuple[QTensor | None, QTensor | None]:
    """dy by rows, for dx, and by columns, for dw."""
    if rows and columns and not recipe.stochastic:
        return sides(dy, recipe.dy, recipe.dy_col, recipe, largest)
    keys = random.split(key, 2) if recipe.stochastic else (None, None)
    row = quantized(dy, recipe.dy, largest, key=keys[0]) if rows else None
    if not columns:
        return row, None
    return row, quantized(dy, recipe.dy_col, largest, side="col", key=keys[1], hadamard=recipe.hadamard)


def dw_of(dy: Any, x: Any, recipe: Recipe, out: torch.dtype) -> Tensor:
    """dw [O, I] in the dtype `out`, from the operands that `factors_of_dw` returns."""
    if not isinstance(dy, QTensor):  # in high precision
        return products.linear_wgrad(dy, x, False)[0].to(out)  # type: ignore[no-any-return]
    return product(dy, x, out, recipe.emulate)


def factors_of_dw(where: str, dy: Any, x: Any, recipe: Recipe, largest: Largest = None) -> tuple[Any, Any]:
    """The operands of dw: both by columns, or both in high precision, from x in the form that the recipe saves."""
    if not isinstance(dy, QTensor):
        return dy, x
    if not isinstance(x, QTensor):
        return dy, quantized(x, recipe.x_col, largest, side="col", hadamard=recipe.hadamard)
    side, format = kept_side(recipe, x)
    check_quantized(where, "pending.x", x, format, side, torch.Size((*dy.shape[:-1], x.shape[-1])), dy.codes)
    return dy, turned(x) if side == "row" else x


def kept_side(recipe: Recipe, x: QTensor) -> tuple[str, Format]:
    """The side, "row" or "col", by which a saved x must have been quantised, and its format."""
    return ("row", recipe.x) if recipe.keep == "row" or x.side == "row" else ("col", recipe.x_col)
