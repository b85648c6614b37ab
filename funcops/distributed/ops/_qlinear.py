"""Shared by the low-precision linear layers over an axis: quantisation of a sharded tensor, and codes and scales in flight.

Codes by rows are gathered as rows are. Codes by columns are put side by side if the rows of a rank are whole tiles; if they are
not, the tensor itself is sent, and quantised when it is whole: the same codes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._linear import OverAxis, rows_axis
from funcops.engine import random
from funcops.engine.errors import require
from funcops.library.formats import Format, QTensor, as_made, by_tiles
from funcops.library.formats.recipes import OPERANDS, Recipe, require_recipe
from funcops.library.kernels.quantize import by_columns
from funcops.library.ops._low_config import LowConfig
from funcops.library.ops._low_operands import Largest, quantized
from funcops.library.ops.coded_linear import CodedLinear


class LowOverAxis(LowConfig):
    """The base of the config of a linear layer over an axis with a recipe, which is checked after all other fields."""

    def __post_init__(self) -> None:
        super().__post_init__()
        cfg: Any = self
        where, recipe = type(self).__name__, self.recipe
        require(cfg.overlap != "ring", where, "overlap", "'none' or 'bulk' with a recipe, whose codes are sent as one", "'ring'")
        require_recipe(where, recipe)
        for name in OPERANDS if cfg.axis.size > 1 else ():
            tile, whole = getattr(recipe, name).tile, "(0, 0) or blocks, as ranks hold parts of a row and share no scale of it"
            require(tile != (1, 0), where, f"recipe.{name}.tile", whole, tile)
            rows, none = getattr(recipe, name).row_scaled, "False, as ranks hold parts of a row and share no scale of it"
            require(not rows, where, f"recipe.{name}.row_scaled", none, rows)
            within = name[0] == "w" or tile[0] < 2 or not cfg.sequence_parallel
            require(within, where, f"recipe.{name}.tile", "within a row with sequence_parallel, as ranks hold other rows", tile)
        for name in ("in_features", "out_features"):
            multiple = recipe.multiple * (cfg.axis.size if name == cfg.shared else 1)
            of = f"{type(recipe).__name__} on {cfg.axis}" if name == cfg.shared else type(recipe).__name__
            require(getattr(cfg, name) % multiple == 0, where, name, f"a multiple of {multiple} ({of})", getattr(cfg, name))

    def largest(self, amaxes: Tensor) -> Tensor:
        """The amaxes of whole weights, from the amaxes of this rank's parts."""
        return comm.largest(amaxes, self.axis)  # type: ignore[attr-defined]

    def key_of_rank(self, key: Tensor) -> Tensor:
        """See `LowConfig.key_of_rank`."""
        cfg: Any = self
        axis = cfg.axis if cfg.shards_features else rows_axis(cfg)  # else all ranks have the same dy
        return key if axis.size == 1 else random.fold_in(key, axis.rank)


class CodedOverAxis(OverAxis, CodedLinear):
    """A linear layer over an axis in low precision: a scale for a whole tensor is one for all ranks."""

    def largest(self, cfg: Any) -> Largest:
        return over(cfg.axis)


def over(axis: Axis) -> Largest:
    """The function from a rank's amax to the amax over all ranks of an axis; None for one rank."""
    return None if axis.size == 1 else lambda amax: comm.largest(amax, axis)


def whole_tiles(t: Tensor, format: Format, axis: Axis) -> bool:
    """Whether the tiles by columns of this rank's rows are also tiles of all rows."""
    return axis.size == 1 or format.tile == (0, 0) or (format.tile[1] > 0 and t.shape[:-1].numel() % format.tile[1] == 0)


class Sent(NamedTuple):
    """A tensor in flight, in low precision or not."""

    of: Any
    codes: Tensor
    scales: Tensor | None = None


def send(t: Any, axis: Axis) -> Sent:
    """Begin to gather a `QTensor`, or a tensor, over an axis, along dimension 0 of the tensor that it stands for."""
    if not isinstance(t, QTensor) or axis.size == 1:
        return Sent(t, t if axis.size == 1 else comm.start_gather(t, axis))
    codes = comm.start_gather(t.codes, axis)
    if t.format.tile == (0, 0):
        return Sent(t, codes)
    return Sent(t, codes, comm.start_gather(by_tiles(t.scales, t.format) if t.side == "col" else t.scales, axis))


def arrived(sent: Sent, axis: Axis) -> Any:
    """Wait for the whole tensor."""
    q = sent.of
    if axis.size == 1:
        return q
    codes = comm.wait(sent.codes, axis)
    if not isinstance(q, QTensor):
        return codes
    scales = q.scales if sent.scales is None else comm.wait(sent.scales, axis)
    if q.side == "col":
        codes = _side_by_side(codes, axis)
        if sent.scales is not None:
            scales = scales.mT if by_columns(*q.format.tile, q.format.scales) else _side_by_side(scales, axis)
    elif sent.scales is not None:
        scales = as_made(scales, q.format)
    shape = q.shape[:0] + (axis.size * q.shape[0], *q.shape[1:])
    return QTensor(codes, scales, q.scale, format=q.format, shape=shape, dtype=q.dtype, side=q.side, hadamard=q.hadamard)


def gathered(t: Any, axis: Axis) -> Any:
    return arrived(send(t, axis), axis)


def send_columns(x: Tensor, recipe: Recipe, format: Format, axis: Axis, key: Tensor | None = None) -> Sent:
    """Begin to gather the codes by columns of this rank's rows, or the rows themselves; `columns_of` returns the codes of all
    rows."""
    if not whole_tiles(x, format, axis):
        return send(x, axis)
    return send(quantized(x, format, over(axis), side="col", key=key, hadamard=recipe.hadamard), axis)


def columns_of(sent: Sent, recipe: Recipe, format: Format, axis: Axis, key: Tensor | None = None) -> QTensor:
    t = arrived(sent, axis)
    return t if isinstance(t, QTensor) else quantized(t, format, None, side="col", key=key, hadamard=recipe.hadamard)


def _side_by_side(t: Tensor, axis: Axis) -> Tensor:
    """[n K, R], concatenated over ranks -> [K, n R]."""
    return t.unflatten(0, (axis.size, -1)).movedim(0, 1).flatten(1)
