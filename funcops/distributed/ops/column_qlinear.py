"""`column_linear` in low precision: x is sent over the axis as codes and scales.

    y_r = q(x) q(w_r)^T + b_r

    dx = sum over r of q(dy_r) q(w_r)        dw_r = q(dy_r)^T q(x)        db_r = sum over rows of dy_r

Letters and shapes are as in `column_linear`, q as in `qlinear`: a scale for a whole tensor (x in sequence parallelism, w, dy) comes
from the largest element over all ranks, so that all ranks have one scale. Each rank quantises its own rows of x, and gathers the
codes: about half the bytes of bfloat16, for y and once more for dw. The sum of dx is sent in the dtype of dy. For dw columns are
quantised along rows: a recipe with keep="col" saves codes if a rank's rows are whole tiles, else x itself, which is then gathered
unquantised. On an axis of one rank it has the bits of `qlinear`.

Each rank tiles its own features of w and dy: they have the bits of one process if O/n is a multiple of the tile. A recipe that
rounds stochastically folds the rank into its key. The amaxes of delayed scaling are of this rank's parts: take the largest over all
ranks before the update (`funcops.dist.amaxes_over`).

>>> import torch
>>> from funcops import dist, random
>>> from funcops.low_precision import Fp8Block
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.ColumnQLinearConfig(128, 256, recipe=Fp8Block(), axis=mesh["tp"], bias=False)
...     params = dist.column_qlinear_init(cfg, key=random.key(0))
...     y, residuals = dist.column_qlinear_fwd(params, torch.ones(2, 128), cfg)
...     dparams, dx = dist.column_qlinear_bwd(residuals, torch.ones(4, 128), cfg)
...     return y.shape, dx.shape, dparams.weight[0, :2]
...
>>> run_ranks({"tp": 2}, each)[1]
(torch.Size([4, 128]), torch.Size([2, 128]), tensor([4., 4.]))
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from funcops import random
from funcops.contract.by_config import ByConfig
from funcops.contract.configs import fields_of
from funcops.contract.needs import Needs
from funcops.contract.op import Op, bwd_of, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.contract.renamed import old_names
from funcops.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Pending, Residuals, saved, static
from funcops.distributed import comm
from funcops.distributed.checks import check_tensor
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._linear import check_parts, check_x, init_linear
from funcops.distributed.ops._qlinear import (
    Sent,
    arrived,
    check_low_config,
    columns_of,
    gathered,
    over,
    send,
    send_columns,
    whole_tiles,
)
from funcops.distributed.ops.column_linear import ColumnLinearConfig, column_linear
from funcops.distributed.specs import Spec
from funcops.formats import QTensor, check_quantized, turned
from funcops.formats.recipes import LOW_FORMS, Recipe
from funcops.formats.scaled import Scaled
from funcops.ops import _low_operands as low_operands
from funcops.ops import qlinear as coded
from funcops.ops._low_config import LowConfig
from funcops.ops.linear import LinearParams
from funcops.ops.qlinear_wgrads import product

__all__ = ["ColumnQLinearConfig", "ColumnQLinearPending", "ColumnQLinearResiduals"]
__all__ += ["column_qlinear", "column_qlinear_bwd", "column_qlinear_dgrad"]
__all__ += ["column_qlinear_fwd", "column_qlinear_init", "column_qlinear_wgrad"]


@config
class ColumnQLinearConfig(LowConfig):
    """The fields of `ColumnLinearConfig`, and a `recipe` of `funcops.low_precision`. `overlap`: "none" or "bulk". Raises
    `ValueError` for sizes that the recipe's blocks do not divide."""

    in_features: int = field(kw_only=False)
    out_features: int = field(kw_only=False)
    recipe: Recipe = field(kw_only=False)
    axis: Axis
    bias: bool = True
    sequence_parallel: bool = True
    overlap: str = "none"
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_low_config(self, "out_features")
        check_parts(self)
        how: Any = {"bias": self.bias, "sequence_parallel": self.sequence_parallel, "overlap": self.overlap, "parts": self.parts}
        object.__setattr__(self, "linear", ColumnLinearConfig(self.in_features, self.out_features, axis=self.axis, **how))

    linear: ClassVar[ColumnLinearConfig]  # the same layer without the recipe
    shards_features = True

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the sharded params, by path."""
        return self.linear.specs

    def largest(self, amaxes: Tensor) -> Tensor:
        """The amaxes of whole weights, from the amaxes of this rank's parts."""
        return comm.largest(amaxes, self.axis)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.linear.widths(width)


class ColumnQLinearResiduals(Residuals, static=("dtype",)):
    x: Any = saved("[*, I]", needed_by=WGRAD, of=("params.weight",), tree=True)
    weight: Any = saved("[O/n, I]", alias="params.weight", needed_by=DGRAD, tree=True)
    amaxes: Tensor = saved("[2]", needed_by=WGRAD, of=("params.weight",))
    rounding: Tensor = saved("[3] or [2]", needed_by=DGRAD | WGRAD, of=("x", "params.weight"), tree=True)
    y_shape: torch.Size = static()


class ColumnQLinearOfInputResiduals(Residuals, static=("dtype",)):
    x: Tensor = saved("[*, I]", alias="x", needed_by=WGRAD, of=("params.weight",))
    weight: Any = saved("[O/n, I]", alias="params.weight", needed_by=DGRAD, tree=True)
    rounding: Tensor = saved("[2]", needed_by=DGRAD | WGRAD, of=("x", "params.weight"), tree=True)
    y_shape: torch.Size = static()


ColumnQLinearKept = ColumnQLinearResiduals | ColumnQLinearOfInputResiduals


def _kept(cfg: ColumnQLinearConfig) -> type[ColumnQLinearKept]:
    return ColumnQLinearOfInputResiduals if cfg.recipe.keep == "input" else ColumnQLinearResiduals


KEPT = ByConfig(ColumnQLinearConfig, _kept, (ColumnQLinearResiduals, ColumnQLinearOfInputResiduals))


class ColumnQLinearPending(Pending, static=("dtype",)):
    x: Any = saved("[*, I]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",), tree=True)
    rows: Any = saved("[n *, I]", needed_by=WGRAD, of=("params.weight",), tree=True)  # of all ranks, if siblings gathered them
    dy: Any = saved("[*, O/n]", needed_by=WGRAD, of=("params.weight",), tree=True)
    db: Tensor = saved("[O/n]", needed_by=WGRAD, of=("params.bias",))
    amaxes: Tensor = saved("[3]", needed_by=WGRAD, of=("params.weight",))


@init_of(ColumnQLinearConfig)
def column_qlinear_init(
    cfg: ColumnQLinearConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LinearParams:
    """The params that `column_linear_init` draws, in high precision."""
    return init_linear(cfg, key, device, dtype)


@forward(ColumnQLinearConfig, LinearParams)
def column_qlinear_fwd(
    params: LinearParams, x: Tensor, cfg: ColumnQLinearConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ColumnQLinearKept | None]:
    """`y_r = q(x) q(w_r)^T + b_r`. x: [m, *, I], of n m in all (without `sequence_parallel`: [*, I]) -> y: [n m, *, O/n].
    Raises as `qlinear_fwd`."""
    check_x("column_qlinear_fwd", x, cfg.in_features, cfg.sequence_parallel)
    coded.check_params("column_qlinear_fwd", params, x, cfg)
    row, kept, amax = column_operands(x, params.weight, cfg, needs)
    return column_of(gathered(row, rows_axis(cfg)), kept, amax, params, cfg, needs)


def column_operands(x: Tensor, weight: Any, cfg: ColumnQLinearConfig, needs: Needs) -> tuple[QTensor, Any, Tensor | None]:
    """This rank's x by rows, and the form of it that is saved; with given scales also its amax, else None."""
    recipe, axis = cfg.recipe, rows_axis(cfg)
    if isinstance(weight, Scaled):
        row, amax = low_operands.scaled_tensor(x, recipe.x, weight.scale[0:1])
        return row, turned(row) if recipe.keep == "col" and needs.param("weight") else row, amax
    if recipe.keep == "col" and needs.param("weight") and not whole_tiles(x, recipe.x, axis):
        return low_operands.quantized(x, recipe.x, over(axis)), x, None
    return *low_operands.operands(x, recipe, needs, over(axis)), None


def column_of(
    whole: QTensor, kept: Any, amax: Tensor | None, params: LinearParams, cfg: ColumnQLinearConfig, needs: Needs
) -> tuple[Tensor, Any]:
    """Return y and residuals, after all checks, from all ranks' x by rows and the form of this rank's x that is saved."""
    recipe, weight = cfg.recipe, params.weight
    if isinstance(weight, Scaled) and amax is not None:
        row, amax_w = low_operands.scaled_weight(weight, recipe)
        amaxes, rounding = torch.cat((amax, amax_w)), weight.scale
    else:
        row, amaxes, rounding = low_operands.row_of(weight, recipe, over(cfg.axis)), None, coded.rounding_of(weight, recipe)
    y = low_operands.y_of(whole, row, params.bias, recipe.emulate)
    fields: Any = {"x": kept, "weight": weight, "rounding": rounding, "y_shape": y.shape, "dtype": y.dtype}
    if recipe.keep == "input":
        return y, ColumnQLinearOfInputResiduals.keep(cfg, needs, **fields)
    return y, ColumnQLinearResiduals.keep(cfg, needs, amaxes=amaxes, **fields)


@dgrad_of(KEPT)
def column_qlinear_dgrad(
    residuals: ColumnQLinearKept, dy: Tensor, cfg: ColumnQLinearConfig, sums: Tensor | None = None
) -> tuple[Tensor, ColumnQLinearPending | None]:
    """dy: [n m, *, O/n] -> dx: [m, *, I] (without `sequence_parallel`: [*, I]), and the pending dw: dy in low precision, and the
    saved x."""
    row, pending = rounded_dy("column_qlinear_dgrad", residuals, dy, cfg, sums)
    return NO_GRADIENT if row is None else comm.wait(_send_dx(row, residuals, cfg), cfg.axis), pending


@wgrad_of(ColumnQLinearPending, LinearParams)
def column_qlinear_wgrad(
    pending: ColumnQLinearPending, cfg: ColumnQLinearConfig, *, into: LinearParams | None = None
) -> LinearParams:
    """Gather x in codes, then compute `dw_r = q(dy_r)^T q(x)`, and db_r; added to `into` if given. For a `Scaled` weight dw is
    `Scaled` too, with this rank's amaxes."""
    return _gradients("column_qlinear_wgrad", pending, None, cfg, into)


@bwd_of(KEPT, LinearParams)
def column_qlinear_bwd(
    residuals: ColumnQLinearKept, dy: Tensor, cfg: ColumnQLinearConfig, *, into: LinearParams | None = None
) -> tuple[LinearParams, Tensor]:
    """The whole backward, in the order that `cfg.overlap` says. Returns `(dparams, dx)`."""
    where = "column_qlinear_bwd"
    row, pending = rounded_dy(where, residuals, dy, cfg)
    if pending is None:
        dx = NO_GRADIENT if row is None else comm.wait(_send_dx(row, residuals, cfg), cfg.axis)
        return column_qlinear_wgrad(None, cfg, into=into), dx  # type: ignore[arg-type]
    if into is not None:  # before anything is sent
        coded.check_low_into(where, pending, pending.x, cfg, into)
    bulk = cfg.overlap == "bulk"
    sent = send_x(where, pending, cfg) if bulk and pending.x is not None else None
    dx = NO_GRADIENT if row is None else _send_dx(row, residuals, cfg)
    if row is not None and not bulk:
        dx = comm.wait(dx, cfg.axis)
    dparams = _gradients(where, pending, sent, cfg, into)
    return dparams, comm.wait(dx, cfg.axis) if bulk and row is not None else dx


def rows_axis(cfg: ColumnQLinearConfig) -> Axis:
    """The axis over which rows of x are sharded."""
    return cfg.axis if cfg.sequence_parallel else _ALONE


_ALONE = Axis("alone", 1, 0)


def rounded_dy(
    where: str, residuals: Any, dy: Tensor, cfg: ColumnQLinearConfig, sums: Tensor | None = None
) -> tuple[QTensor | None, ColumnQLinearPending | None]:
    """Return dy by rows, None if dx is not needed, and the pending weight gradient."""
    recipe, needs, weight = cfg.recipe, residuals.needs, residuals.weight
    here = residuals.x if weight is None else weight
    check_tensor(where, "dy", dy, residuals.y_shape, residuals.dtype, coded.a_tensor(here))
    low = coded.needs_low(needs, recipe)
    coded.check_rounding(where, residuals, recipe, low)
    row = col = None
    amaxes = getattr(residuals, "amaxes", None)
    if recipe.delayed and residuals.rounding is not None:
        row, amax = low_operands.scaled_tensor(dy, recipe.dy, residuals.rounding[2:3])
        col = turned(row) if low else None
        amaxes = None if amaxes is None else torch.cat((amaxes, amax))
    elif needs.x or low:
        key = (
            residuals.rounding if cfg.axis.size == 1 or not recipe.stochastic else random.fold_in(residuals.rounding, cfg.axis.rank)
        )
        row, col = low_operands.of_gradient(dy, recipe, key, bool(needs.x), low, over(cfg.axis))
    pending = ColumnQLinearPending.keep(
        cfg,
        needs,
        x=residuals.x,
        rows=None,
        dy=col if low else dy,
        db=coded.db_of(dy, cfg, needs, sums),
        amaxes=amaxes,
        dtype=dy.dtype,
    )
    return row if needs.x else None, pending


def _send_dx(row: QTensor, residuals: Any, cfg: ColumnQLinearConfig) -> Tensor:
    """Begin to sum the ranks' parts of dx."""
    return _send(part_of_dx(row, residuals, cfg), cfg)


def _send(dx: Tensor, cfg: ColumnQLinearConfig) -> Tensor:
    return comm.start_scatter_sum(dx, cfg.axis) if cfg.sequence_parallel else comm.start_sum(dx, cfg.axis)


def part_of_dx(row: QTensor, residuals: Any, cfg: ColumnQLinearConfig) -> Tensor:
    col = low_operands.col_of(residuals.weight, cfg.recipe, over(cfg.axis))
    return product(row, col, residuals.dtype, cfg.recipe.emulate)


def send_x(where: str, pending: ColumnQLinearPending, cfg: ColumnQLinearConfig) -> Sent:
    """Begin to gather x in the form that dw reads."""
    recipe, axis, x = cfg.recipe, rows_axis(cfg), pending.x
    if not isinstance(x, QTensor):
        return send(x, axis) if recipe.wgrad == "high" else send_columns(x, recipe, recipe.x, axis)
    dy = pending.dy.shape
    shape = (
        torch.Size((dy[0] // axis.size, *dy[1:-1], cfg.in_features)) if axis.size > 1 else torch.Size((*dy[:-1], cfg.in_features))
    )
    check_quantized(where, "pending.x", x, recipe.x, low_operands.kept_side(recipe, x), shape, pending.dy.codes)
    return send(x, axis)


def arrived_x(sent: Sent, pending: ColumnQLinearPending, cfg: ColumnQLinearConfig) -> Any:
    """The gathered x in the form that dw reads."""
    recipe, axis = cfg.recipe, rows_axis(cfg)
    by_columns = recipe.wgrad == "low" and not isinstance(pending.x, QTensor)
    return columns_of(sent, recipe, recipe.x, axis) if by_columns else arrived(sent, axis)


def _gradients(
    where: str, pending: ColumnQLinearPending, sent: Sent | None, cfg: ColumnQLinearConfig, into: LinearParams | None
) -> LinearParams:
    """The gradients of params; x is gathered, unless it is in flight already (`sent`)."""
    return coded.low_wgrad(where, pending, cfg, into, functools.partial(_factors, sent=sent))


def column_qlinear_products(pending: ColumnQLinearPending, cfg: ColumnQLinearConfig, *, into: LinearParams) -> list[Any]:
    """The weight's gradient as a product to run later, with x of all ranks."""
    return coded.low_products("column_qlinear_wgrad", pending, cfg, into, _factors)


def _factors(where: str, pending: ColumnQLinearPending, cfg: ColumnQLinearConfig, sent: Sent | None = None) -> tuple[Any, Any]:
    whole = pending.rows
    if whole is None:
        whole = arrived_x(send_x(where, pending, cfg) if sent is None else sent, pending, cfg)
    return low_operands.factors_of_dw(where, pending.dy, whole, cfg.recipe)


class _Layer(coded.LowLayer):
    def prepares(self, cfg: Any) -> Hashable:
        return None if cfg.recipe.delayed else (cfg.recipe, rows_axis(cfg))

    def prepared(self, x: Tensor, params: Any, cfg: Any, needs: Needs) -> Any:
        row, kept, _ = column_operands(x, params.weight, cfg, needs)
        return gathered(row, rows_axis(cfg)), kept

    def from_prepared(self, given: Any, params: Any, cfg: Any, needs: Needs) -> tuple[Tensor, Any]:
        whole, kept = given
        return column_of(whole, kept, None, params, cfg, needs)

    def check(self, params: Any, x: Tensor, cfg: Any) -> None:
        coded.check_params("column_qlinear_fwd", params, x, cfg)

    def joins(self, cfg: Any) -> Hashable:
        return None if cfg.axis.size == 1 else (cfg.axis, cfg.sequence_parallel, cfg.recipe)

    def part_of_dx(self, residuals: Any, dy: Tensor, cfg: Any) -> tuple[Tensor, Any]:
        row, pending = rounded_dy("column_qlinear_dgrad", residuals, dy, cfg)
        assert row is not None
        return part_of_dx(row, residuals, cfg), pending

    def dx_of(self, part: Tensor, cfg: Any) -> Tensor:
        return comm.wait(_send(part, cfg), cfg.axis)

    def shared(self, pending: Any, cfg: Any) -> dict[str, Any] | None:
        if not cfg.sequence_parallel:
            return None
        return {"rows": arrived_x(send_x("column_qlinear_wgrad", pending, cfg), pending, cfg)}

    def overlaps(self, cfg: Any) -> bool:
        return bool(cfg.overlap != "none" and cfg.axis.size > 1)


column_qlinear = make_op(
    "column_qlinear",
    ColumnQLinearConfig,
    init=column_qlinear_init,
    fwd=column_qlinear_fwd,
    dgrad=column_qlinear_dgrad,
    wgrad=column_qlinear_wgrad,
    bwd=column_qlinear_bwd,
    products=column_qlinear_products,
    layer=_Layer(),
)


def _low(cfg: ColumnLinearConfig, recipe: Recipe) -> tuple[Op, Op, ColumnQLinearConfig]:
    return column_linear, column_qlinear, ColumnQLinearConfig(**fields_of(cfg), recipe=recipe)


LOW_FORMS[ColumnLinearConfig] = _low


if not TYPE_CHECKING:  # a checker would take every name for one of the module's
    __getattr__ = old_names(
        __name__,
        column_qlinear_of_input="column_qlinear",
        column_qlinear_of_input_fwd="column_qlinear_fwd",
        column_qlinear_of_input_dgrad="column_qlinear_dgrad",
        column_qlinear_of_input_bwd="column_qlinear_bwd",
    )
