"""Tensors in few bits: codes and scales, as data."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.contract.fused_steps import watch
from funcops.engine.contract.marks import counts_writes, mark_of, version
from funcops.engine.errors import FLOATS, check, describe, fail, require, require_type
from funcops.engine.random import fold_in
from funcops.engine.trees import Aside, leaf, leaves, register, replace, show, stands_for_one, stands_in, static, tree
from funcops.library.formats.format import Format
from funcops.library.formats.nf4 import NF4Tensor
from funcops.library.kernels import quantize as kernels

T = TypeVar("T")


@stands_in
@counts_writes
@tree
class QTensor:
    """A tensor in few bits: a tree node, not a tensor. It counts as the one leaf that it stands for; its gradient is dense.

    `side` "row": codes in the layout of x, [*, K], scales by blocks along K. "col": codes of the transposed x, [K, R], scales by
    blocks along R; with `hadamard`, x was transformed along R before. `scale` multiplies all elements, or each row of codes
    (NVFP4). `shape` and `dtype` are x's, whatever the side.

    >>> import torch
    >>> from funcops.low_precision import Format, QTensor, quantize_tensor
    >>> q = quantize_tensor(torch.ones(4, 300, dtype=torch.bfloat16), Format("e4m3"))
    >>> isinstance(q, QTensor), q.codes.dtype, q.codes.shape, q.scales.shape
    (True, torch.uint8, torch.Size([4, 300]), torch.Size([4, 3]))
    >>> q.dequantize().dtype
    torch.bfloat16
    """

    codes: Tensor = leaf("uint8")
    scales: Tensor = leaf("[tiles]")
    scale: Tensor | None = leaf("[1] or [R, 1]")
    format: Format = static()
    shape: torch.Size = static()
    dtype: torch.dtype = static()
    side: str = static("row")
    hadamard: bool = static(False)

    def zero_gradient(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros to accumulate the gradient in, which is dense."""
        return self.codes.new_zeros(self.shape, dtype=dtype or self.dtype)

    def cast(self, dtype: torch.dtype) -> QTensor:
        """The same codes and scales, to be decoded to `dtype`."""
        return self if dtype is self.dtype else replace(self, dtype=dtype)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def form(self) -> str:
        """The name of the form in a report, which shows it as one row."""
        return self.format.name

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.codes, self.scales, self.scale

    def outline(self) -> Tensor:
        """A tensor without memory that has its shape, dtype and device, for checks."""
        return self.codes.new_empty((), dtype=self.dtype).expand(self.shape)

    @property
    def width(self) -> int:
        """The number of elements along the last dim of the codes, padding included."""
        return self.codes.shape[-1] * (2 if self.format.element == "e2m1" else 1)

    def each(self) -> list[QTensor]:
        """Split a stacked `QTensor` along the first dim of its codes."""
        scale = [None] * len(self.codes) if self.scale is None else self.scale
        parts = zip(self.codes, self.scales, scale, strict=True)
        return [replace(self, codes=codes, scales=scales, scale=of) for codes, scales, of in parts]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Codes times scales, rounded once to `dtype` (by default x's): [*, K] for either side, after stacked dims."""
        if self.codes.dim() > (len(self.shape) if self.side == "row" else 2):
            return torch.stack([one.dequantize(dtype) for one in self.each()])
        out = self.dtype if dtype is None else dtype
        if self.side == "row":
            return kernels.dequantize(*self.args, *self.format.args(), self.shape[-1], out).reshape(self.shape)  # type: ignore[no-any-return]
        found = kernels.dequantize(*self.args, *self.format.args(), self.width, torch.float32 if self.hadamard else out)
        if self.hadamard:
            found = kernels.hadamard_undone(found).to(out)
        return found[:, : self.shape[:-1].numel()].mT.reshape(self.shape)  # type: ignore[no-any-return]


@stands_in
@dataclasses.dataclass(slots=True, eq=False, repr=False)
class QWeight:
    """A weight as its products read it: y's reads `row`, dx's reads `col`; a `col` of None is made from `row` when it is read.

    `key` rounds dy stochastically, if the recipe does. It has a weak reference to the weight that it was made from, and is stale
    once that weight is written to.

    >>> import torch
    >>> from funcops import QLinearConfig, qlinear, random
    >>> from funcops.low_precision import Fp8Block, QWeight, quantize_params
    >>> cfg = QLinearConfig(128, 128, recipe=Fp8Block())
    >>> work = quantize_params(qlinear.init(cfg, key=random.key(0)), cfg)
    >>> isinstance(work.weight, QWeight), work.weight.row.codes.shape, work.bias.dtype
    (True, torch.Size([128, 128]), torch.bfloat16)
    """

    row: QTensor = leaf("[O, I]")
    col: QTensor | None = leaf("[O, I]")
    key: Tensor | None = leaf("[2]")
    source: Aside = dataclasses.field(default_factory=Aside, metadata={"hidden": True})

    __repr__ = show

    def zero_gradient(self, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros to accumulate the gradient in, which is dense; with the stacked dims in front."""
        return self.row.codes.new_zeros(self.shape, dtype=dtype or self.dtype)

    def cast(self, dtype: torch.dtype) -> QWeight:
        """Return itself: a cast does not change codes."""
        return self

    @property
    def shape(self) -> torch.Size:
        """[O, I], after the dims that it is stacked by."""
        lead, own = self.row.codes.shape, self.row.shape
        return torch.Size((*lead[: len(lead) - len(own)], *own))

    @property
    def dtype(self) -> torch.dtype:
        return self.row.dtype

    @property
    def device(self) -> torch.device:
        return self.row.device

    def fold_key(self, number: int) -> QWeight:
        """The same codes, with `number` folded into the key."""
        if self.key is None:
            return self
        each = [fold_in(key, number) for key in self.key.reshape(-1, 2)]
        return replace(self, key=torch.stack(each).view_as(self.key))

    def dequantize(self) -> Tensor:
        """The weight that its rows stand for."""
        return self.row.dequantize()

    def made_of(self, weight: Tensor) -> QWeight:
        """Note the weight that it was made from, and that weight's count of writes now."""
        if not torch.compiler.is_compiling():  # inside a graph weights have no count of writes
            watch([weight])
            self.source = Aside((weakref.ref(weight), mark_of(weight)))
        return self

    def stale(self) -> bool:
        """Whether the weight that it was made from has been written to since."""
        if self.source.value is None:
            return False
        ref, then = self.source.value
        weight = ref()
        return weight is not None and version(weight) != then


register(QWeight, aside="source")
counts_writes(QWeight)
IN_CODES = (QTensor, QWeight, NF4Tensor)  # nodes that count as one leaf, whose gradient is dense


def has_keys(params: Any) -> bool:
    """Whether any weight has a key by which dy is rounded."""
    return any(
        type(node) is QWeight and node.key is not None for node in leaves(params, is_leaf=lambda node: type(node) is QWeight)
    )


def stacked(made: list[QTensor]) -> QTensor:
    """Stack tensors of one format and shape along a new first dim."""
    codes, scales = (torch.stack([getattr(q, name) for q in made]) for name in ("codes", "scales"))
    scale = None if made[0].scale is None else torch.stack([q.scale for q in made])  # type: ignore[misc]
    return replace(made[0], codes=codes, scales=scales, scale=scale)


def quantized_weight(
    weight: Tensor, format: Format, columns: bool, amax: Tensor | None = None, col: Format | None = None
) -> QWeight:
    """Quantise a weight [O, I] by rows for y, and also by columns for dx if `columns`, or if these cannot be made from the rows.
    `amax`: the largest |w|, for a format that needs it. `col`: the format by columns, if it is not the same."""
    if col is not None and col is not format:
        of_rows, of_columns = (amax if one.whole else None for one in (format, col))
        row = quantize_tensor(weight, format, amax=of_rows)
        return QWeight(row, quantize_tensor(weight, col, side="col", amax=of_columns), None, Aside())
    if columns or not format.turns:
        return QWeight(*quantize_sides(weight, format, amax), None, Aside())
    return QWeight(quantize_tensor(weight, format, amax=amax), None, None, Aside())


def quantize_tensor(
    x: Tensor,
    format: Format,
    *,
    side: str = "row",
    key: Tensor | None = None,
    amax: Tensor | None = None,
    hadamard: bool = False,
    where: str = "quantize_tensor",
) -> QTensor:
    """Quantise x [*, K] in a format.

    `side`: "row" or "col" (see `QTensor`). `key`: round stochastically. `amax`: float32 [1], used as the largest |x| of the whole
    tensor, for formats that need it (such as the amax over several devices). `hadamard`: for "col", transform x along R, 16
    elements at a time, which spreads outliers: the product of two such operands is the product of the plain ones. Raises
    `ValueError` or `TypeError`.

    >>> import torch
    >>> from funcops.low_precision import Format, quantize_tensor
    >>> x = torch.tensor([[1.0, 1.1, 1000.0]])
    >>> quantize_tensor(x, Format("e4m3")).dequantize()
    tensor([[1.0000e+00, 1.1250e+00, 1.0240e+03]])
    """
    require_type(where, "format", format, Format)
    _check_x(where, x)
    require(side in ("row", "col"), where, "side", "'row' or 'col'", repr(side))
    require(side == "col" or not hadamard, where, "hadamard", "False for the side 'row'", hadamard)
    if amax is not None:
        require(format.whole, where, "amax", f"None (the scales of {format.name} need no amax of the tensor)", describe(amax))
        check(where, "amax", amax, (1,), torch.float32, x)
    elif format.whole:
        amax = kernels.amax(x, hadamard)
    elif format.row_scaled:
        amax = kernels.line_amax(x, side == "col", hadamard)
    if key is not None and format.four_over_six != "off":
        fail(where, "key", "None where four_over_six compares the errors of rounding to nearest", "a key")
    if side == "row":
        codes, scales = kernels.quantize_row(x, *format.how(), amax, key, format.amax_epsilon)
    else:
        codes, scales = kernels.quantize_col(x, *format.how(), amax, key, hadamard, format.amax_epsilon)
    return _made(codes, scales, amax, x, format, side, hadamard)


def quantize_sides(x: Tensor, format: Format, amax: Tensor | None = None) -> tuple[QTensor, QTensor]:
    """Quantise x [*, K] in a format, as "row" and as "col", in one read of x. `amax`: see `quantize_tensor`."""
    require_type("quantize_sides", "format", format, Format)
    _check_x("quantize_sides", x)
    if format.square:
        row = quantize_tensor(x, format, amax=amax)
        return row, turned(row)
    if format.row_scaled:
        return quantize_tensor(x, format, amax=amax), quantize_tensor(x, format, side="col", amax=amax)
    amax = kernels.amax(x, False) if format.whole and amax is None else amax
    codes, scales, turned_codes, turned_scales = kernels.quantize_both(x, *format.how(), amax, format.amax_epsilon)
    return _made(codes, scales, amax, x, format, "row"), _made(turned_codes, turned_scales, amax, x, format, "col")


def by_tiles(scales: Tensor, format: Format) -> Tensor:
    """Scales as a kernel makes them, viewed as [R / rows, K / cols]."""
    return scales.mT if kernels.by_columns(*format.tile, format.scales) else scales


def as_made(scales: Tensor, format: Format) -> Tensor:
    """Scales [R / rows, K / cols] in the layout in which quantisers return them."""
    return by_tiles(by_tiles(scales, format).contiguous(), format)


def turned(q: QTensor) -> QTensor:
    """Make the "col" side from a "row" one: a transposed copy where tiles are square, else tiled anew. Tiling anew gives the bits
    of quantising x itself if the elements of old and new tiles span a factor of at most 14,336 (e5m2: 7 * 2^26), half the largest
    over the least normal number. Beyond that, smaller elements may be rounded twice, as an element can have fewer bits in its row's
    tile than in its column's. Raises `ValueError` for a format whose codes would be rounded twice."""
    require_type("turned", "q", q, QTensor)
    require(q.side == "row", "turned", "q.side", "'row'", repr(q.side))
    format = q.format
    if format.square and format.element != "e2m1":
        codes, scales = kernels.transpose(q.codes), q.scales.mT
    elif format.scales == "pow2":
        codes, scales = kernels.retile(q.codes, q.scales, format.element, *format.tile, format.amax_epsilon)
        scales = by_tiles(scales, format)
    elif format.square:
        codes, scales = _turned_nibbles(q), q.scales.mT
    elif format.retiles:
        codes, scales = kernels.quantize_col(q.dequantize(torch.float32), *format.how(), None, None, False, format.amax_epsilon)
    else:
        fail("turned", "q.format", "one with square tiles or power-of-two scales", format.name)
    return QTensor(codes, scales, q.scale, format=format, shape=q.shape, dtype=q.dtype, side="col", hadamard=q.hadamard)


def check_quantized(
    where: str,
    name: str,
    q: Any,
    format: Format,
    side: str,
    shape: torch.Size,
    like: Tensor | None = None,
    groups: tuple[int, ...] = (),
) -> None:
    """Raise unless q is a `QTensor` of that format, side and shape, whose codes and scales fit these, on the device of `like` (by
    default its codes'). `groups`: the dims that its codes, scales and scale are stacked by."""
    try:
        codes, scales, scale = q.codes, q.scales, q.scale
        if (
            q.format is format
            and q.side == side
            and q.shape == shape
            and (side == "col" or not q.hadamard)
            and not torch.compiler.is_dynamo_compiling()  # sizes may be symbols, which the memo cannot hash
            and (codes.shape, scales.shape, scales.dtype, scale is None) == _sizes(format, side, shape, q.hadamard, groups)
            and codes.dtype is torch.uint8
            and ((codes.is_cpu and scales.is_cpu) or codes.device == scales.device)
            and (like is None or (codes.is_cpu and like.is_cpu) or codes.device == like.device)
            and not scales.requires_grad
        ):
            if scale is not None:
                check(where, f"{name}.scale", scale, _scale_of(format, groups, scales.shape), torch.float32, codes)
            return
    except (AttributeError, TypeError):
        pass
    _check_each(where, name, q, format, side, shape, like, groups)


def _sizes_of(
    format: Format, side: str, shape: torch.Size, hadamard: bool, groups: tuple[int, ...]
) -> tuple[torch.Size, torch.Size, torch.dtype, bool]:
    """Sizes of a `QTensor`'s codes and scales, the dtype of the scales, and whether it has no scale for the whole tensor."""
    rows, width = shape[:-1].numel(), shape[-1]
    if side == "col":
        rows, width = width, rows + (-rows % kernels.HADAMARD if hadamard else 0)
    codes = -(-width // 2) if format.element == "e2m1" else width
    tiles = [-(-size // (tile or max(size, 1))) for size, tile in zip((rows, width), format.tile, strict=True)]
    dtype = torch.float32 if format.scales in ("pow2", "float32") else torch.uint8
    sizes = (*groups, *(shape[:-1] if side == "row" else (rows,)), codes)
    return torch.Size(sizes), torch.Size((*groups, *tiles)), dtype, format.scales != "e4m3"


def _scale_of(format: Format, groups: tuple[int, ...], scales: torch.Size) -> tuple[int, ...]:
    """The shape of the scale beside the tiles', one for a whole tensor or one for each row of codes."""
    return (*groups, scales[-2], 1) if format.row_scaled else (*groups, 1)


_sizes = functools.lru_cache(maxsize=1024)(_sizes_of)


def _check_each(
    where: str, name: str, q: Any, format: Format, side: str, shape: torch.Size, like: Tensor | None, groups: tuple[int, ...]
) -> None:
    """The checks of `check_quantized` one by one, each with its error."""
    require_type(where, name, q, QTensor)
    if q.format is not format and q.format != format:
        fail(where, f"{name}.format", format.name, getattr(q.format, "name", repr(q.format)))
    if q.side != side:
        fail(where, f"{name}.side", repr(side), repr(q.side))
    if side == "row" and q.hadamard:
        fail(where, f"{name}.hadamard", "False (codes by rows are never transformed)", q.hadamard)
    if tuple(q.shape) != tuple(shape):
        fail(where, name, str(list(shape)), list(q.shape))
    first = q.codes if like is None else like
    codes, tiles, dtype, alone = _sizes_of(format, side, shape, q.hadamard, groups)
    check(where, f"{name}.codes", q.codes, tuple(codes), torch.uint8, first)
    check(where, f"{name}.scales", q.scales, tuple(tiles), dtype, first)
    if not alone:
        check(where, f"{name}.scale", q.scale, _scale_of(format, groups, tiles), torch.float32, first)
    elif q.scale is not None:
        fail(where, f"{name}.scale", f"None ({format.name})", describe(q.scale))


def zero_gradient(node: Any, dtype: torch.dtype | None = None) -> Any:
    """Zeros to accumulate the gradient of a params leaf in, of `dtype`, or by default the leaf's."""
    if isinstance(node, Tensor):
        return torch.zeros_like(node, dtype=dtype, memory_format=torch.contiguous_format)
    return node.zero_gradient(dtype) if stands_for_one(node) else node


def _check_x(where: str, x: Any) -> None:
    check(where, "x", x, (...,), FLOATS)
    if x.dim() < 1:
        fail(where, "x", "[*, K], with at least one dimension", describe(x))


def _made(
    codes: Tensor, scales: Tensor, amax: Tensor | None, x: Tensor, format: Format, side: str, hadamard: bool = False
) -> QTensor:
    scale = kernels.tensor_scale(amax, format.largest_scale) if format.scales == "e4m3" and amax is not None else None
    if scale is not None and format.row_scaled and side == "col":
        scale = scale.mT
    scales = by_tiles(scales, format)
    return QTensor(codes, scales, scale, format=format, shape=x.shape, dtype=x.dtype, side=side, hadamard=hadamard)


def _turned_nibbles(q: QTensor) -> Tensor:
    """Codes of the transposed tensor, from e2m1 codes [*, K / 2]."""
    rows, width = q.shape[:-1].numel(), q.shape[-1]
    codes = q.codes.reshape(rows, -1)
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)[:, :width].mT
    if rows % 2:
        nibbles = torch.nn.functional.pad(nibbles, (0, 1))
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
