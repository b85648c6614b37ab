"""Low-precision operands of grouped products: each group of sorted rows is quantised as a tensor of its own.

A `QTensor` by rows has the codes of all groups; if the format has one scale for a whole tensor, each row has its group's scale, as
in a format with scales by rows. A `QTensor` by columns has its rows in the aligned layout of `library.kernels.grouped_quantize`, so
that a block along rows belongs to one group. A weight's `QTensor` has a leading dimension of groups.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.trees import replace
from funcops.library.formats import Format, QTensor, QWeight, by_tiles, quantize_tensor, stacked, turned
from funcops.library.formats.recipes import Recipe
from funcops.library.formats.scaled import Scaled
from funcops.library.kernels import grouped_quantize as kernels
from funcops.library.kernels import quantize
from funcops.library.kernels.grouped import group_of
from funcops.library.kernels.grouped_scaled import grouped_scaled_mm
from funcops.library.ops._low_operands import scaled_weight
from funcops.library.ops.grouped_wgrads import Columns

ALIGN = 16  # rows of 8 bits, for a product over rows


class Groups(NamedTuple):
    """The groups of `rows` sorted rows, which are rows order // choices of a tensor, or, without an order, its own rows."""

    offsets: Tensor
    order: Tensor | None
    choices: int
    rows: int

    def at(self) -> Tensor | None:
        """[N]: the tensor's row for each sorted row; None without an order."""
        return self.order if self.order is None or self.choices == 1 else self.order // self.choices

    @property
    def experts(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def places(self) -> tuple[Tensor, Tensor | None, int]:
        """The arguments by which kernels find the rows of each group: offsets, order, choices."""
        return self.offsets, self.order, self.choices

    def gathered(self) -> Groups:
        """The same groups, of gathered rows."""
        return Groups(self.offsets, None, 1, self.rows)

    def aligned(self, block: int, missing: int) -> tuple[Tensor, Tensor]:
        """The starts of groups in the aligned layout, and for each of its rows the row of x in it: `missing`, the number of rows of
        x, for a row of zeros."""
        starts = kernels.aligned_starts(self.offsets, block)
        size = kernels.aligned_count(self.rows, self.experts, block)
        source = kernels.aligned_source(self.offsets, starts, self.rows, size)
        index = self.at()
        if index is not None:
            source = torch.cat((index, index.new_full((1,), missing))).index_select(0, source)
        return starts, source


def rows_in(x: Tensor, format: Format, groups: Groups, key: Tensor | None = None) -> tuple[QTensor, Tensor | None]:
    """x [M, K] by rows, and the index that gathers its rows, or None if they are gathered. Blocks within a row do not depend on
    groups, so that a row of x is quantised once, however often it is gathered."""
    if not format.whole:
        return quantize_tensor(x, format), groups.at()
    words = None
    if key is not None:
        first, width = groups.offsets[:-1].to(torch.int64), x.shape[1]
        ones, group = torch.ones_like(first), group_of(groups.offsets, groups.rows)
        words = kernels.random_words(key, group, first, ones, ones * width, width)
    amax = kernels.group_amax(x, *groups.places, False)
    element, _, cols, kind = format.by_rows.how()
    codes, scales, scale = kernels.quantize_groups(x, *groups.places, amax, words, element, cols, kind, format.amax_epsilon)
    return _coded(codes, scales, scale, format.by_rows, (groups.rows, x.shape[1]), x.dtype), None


def _coded(
    codes: Tensor,
    scales: Tensor,
    scale: Tensor | None,
    format: Format,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    side: str = "row",
    hadamard: bool = False,
) -> QTensor:
    return QTensor(codes, scales, scale, format=format, shape=torch.Size(shape), dtype=dtype, side=side, hadamard=hadamard)


def scaled_rows(x: Tensor, format: Format, groups: Groups, scale: Tensor) -> tuple[QTensor, Tensor]:
    """The gathered rows with given scales [E], or by the groups' amaxes now if none is known yet [0]; and these amaxes [E]."""
    if not scale.numel():
        return rows_in(x, format, groups)[0], kernels.group_amax(x, *groups.places, False)[:-1]
    codes, scales, amaxes = kernels.quantize_groups_scaled(x, *groups.places, format.element, scale)
    return _coded(codes, scales, None, format.by_rows, (groups.rows, x.shape[1]), x.dtype), amaxes[:-1]


def columns_in(x: Tensor, format: Format, groups: Groups, hadamard: bool = False, key: Tensor | None = None) -> QTensor:
    """x [M, K] by columns, for dw, in the aligned layout. If a group has one scale, codes by rows also serve for dw."""
    if format.tile == (0, 0):
        return rows_in(x, format, groups, key)[0]
    starts, source = groups.aligned(format.tile[1], len(x))
    rows = kernels.taken(x, source)
    if not format.whole:
        return quantize_tensor(rows, format, side="col")
    group, block = group_of(starts, len(rows)), format.tile[1]
    amax = kernels.group_amax(rows, starts, None, 1, hadamard)[group[::block]].unsqueeze(-1)
    words = None
    if key is not None:
        sizes = (starts if hadamard else groups.offsets).diff().to(torch.int64)
        words = kernels.random_words(key, group, starts[:-1].to(torch.int64), sizes, torch.ones_like(sizes), rows.shape[1]).mT
    codes, scales = quantize.quantize_col(rows, *format.how(), amax, words, hadamard)
    return _coded(codes, scales, quantize.tensor_scale(amax, format.largest_scale).mT, format, rows.shape, x.dtype, "col", hadamard)


def columns_of(row: QTensor, groups: Groups) -> QTensor:
    """The result of `rows_in` for dw: codes of blocks are tiled anew, in the aligned layout."""
    if row.format.tile == (1, 0):
        return row
    _, source = groups.aligned(row.format.tile[1], len(row.codes))
    codes, scales = kernels.taken(row.codes, source), kernels.taken(row.scales, source)
    return turned(replace(row, codes=codes, scales=scales, shape=codes.shape))


def weight_rows(weight: Any, recipe: Recipe) -> QTensor:
    """Weights [E, O, I] by rows, for y."""
    return weight.row if isinstance(weight, QWeight) else _quantized(weight, recipe.w, "row")


def scaled_weights(weight: Scaled, recipe: Recipe) -> tuple[QTensor, Tensor]:
    """Weights [E, O, I] by rows, with given scales, and their amaxes [E]."""
    if isinstance(weight.value, QWeight) and weight.amax is not None:
        return weight.value.row, weight.amax.reshape(-1)
    found = [scaled_weight(Scaled(w, s, None), recipe) for w, s in zip(weight.value, weight.scale, strict=True)]
    return stacked([row for row, _ in found]), torch.cat([amax for _, amax in found])


def weight_columns(weight: Any, recipe: Recipe) -> QTensor:
    """Weights by columns, for dx."""
    if isinstance(weight, Scaled):
        weight = weight.value if isinstance(weight.value, QWeight) else QWeight(scaled_weights(weight, recipe)[0])
    if isinstance(weight, QWeight):
        return stacked([turned(one) for one in weight.row.each()]) if weight.col is None else weight.col
    return _quantized(weight, recipe.w_col, "col")


def _quantized(weight: Tensor, format: Format, side: str) -> QTensor:
    lying = weight if side == "row" else weight.mT
    groups, high, width = lying.shape
    if format.whole or high % format.tile[0]:
        return stacked([quantize_tensor(one, format, side=side) for one in weight])
    rows = lying.reshape(groups * high, width)  # all groups as one
    codes, scales = quantize.quantize_row(rows, *format.how(), None, None, format.amax_epsilon)
    codes, scales = codes.view(groups, high, -1), by_tiles(scales, format).reshape(groups, high // format.tile[0], -1)
    return QTensor(codes, scales, None, format=format, shape=weight.shape[1:], dtype=weight.dtype, side=side, hadamard=False)


def product(
    a: QTensor, index: Tensor | None, w: QTensor, bias: Tensor | None, scales: Tensor | None, groups: Groups, out: torch.dtype
) -> Tensor:
    """y or dx by row, [N, O], with a bias multiplied by `scales` [N]."""
    return grouped_scaled_mm(  # type: ignore[no-any-return]
        *a.args,
        *w.args,
        bias,
        scales,
        groups.offsets,
        index,
        a.format.element,
        a.format.tile[1],
        w.format.element,
        *w.format.tile,
        a.format.scales,
        min(a.width, w.width),  # codes of 4 bits are padded to whole bytes, others are not
        out,
    )


def columns(dy: QTensor, x: QTensor, groups: Groups) -> Columns:
    """The operands of dw."""
    operands, cols, width = (dy.args, x.args), dy.format.tile[1], dy.width
    if dy.side == "row":  # one scale per group
        starts, source = groups.gathered().aligned(ALIGN, groups.rows)
        operands, cols, width = (_turned(dy, source), _turned(x, source)), 1, source.shape[0]
    else:
        starts = kernels.aligned_starts(groups.offsets, cols)
    ends = starts[1:] if dy.hadamard else starts[:-1] + groups.offsets.diff()
    return Columns(*operands, starts, ends, (dy.format.element, x.format.element, cols, dy.format.scales), width)


def _turned(q: QTensor, source: Tensor) -> tuple[Tensor, Tensor, None]:
    """Codes by columns in the aligned layout, and each column's scale."""
    return quantize.transpose(kernels.taken(q.codes, source)), kernels.taken(q.scales, source).mT, None


def split_keys(keys: Tensor) -> Tensor:
    """Split each of keys [E, 2] into two, as `random.split` does: [2, E, 2]."""
    each: Any = [random.split(key, 2) for key in keys]
    return torch.stack(each, 1)
