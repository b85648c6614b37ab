"""`column_linear` in low precision: x goes over the axis in codes and scales.

    y_r = q(x) q(w_r)^T + b_r

    dx = sum over r of q(dy_r) q(w_r)        dw_r = q(dy_r)^T q(x)        db_r = sum over rows of dy_r

Letters and shapes are those of `column_linear`, q that of `qlinear`: what needs the largest element of a whole tensor (of x in
sequence parallelism, of w, of dy) has it of all ranks, so that all have one scale. Each rank quantises its own rows of x, and
gathers the codes: about half the bytes of bfloat16, for y and once more for dw. The sum of dx is sent in the dtype of dy. For dw
columns are quantised along rows: recipes with keep="col" keep codes where a rank's rows are whole tiles, and else x itself, which
is then gathered as it is. On an axis of one rank it has the bits of `qlinear`.

Tiles of w and dy along features are those of a rank: they have the bits of one process where O/n is a multiple of the tile. A
recipe that rounds stochastically folds the rank into its key. Amaxes of delayed scaling are of this rank's parts: take the largest
of all ranks before the update (`funcops.dist.amaxes_over`).

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

from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops import random
from funcops.contract.configs import fields_of
from funcops.contract.needs import Needs
from funcops.contract.op import Op, bwd_of, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Pending, Residuals, saved, static
from funcops.distributed import comm
from funcops.distributed.checks import check_tensor
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._linear import check_parts, check_x, init_linear
from funcops.distributed.ops._qlinear import (
    Sent,
    arrived,
    check_low_config,
    check_op,
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
from funcops.ops._low_config import LowConfig
from funcops.ops.linear import LinearParams
from funcops.ops.qlinear import (
    a_tensor,
    check_low_into,
    check_params,
    check_rounding,
    col_of,
    db_of,
    kept_side,
    low_gradients,
    needs_low,
    of_gradient,
    operands,
    product,
    product_of_columns,
    quantized,
    rounding_of,
    row_of,
    scaled_tensor,
    scaled_weight,
    y_of,
)

__all__ = [
    "ColumnQLinearConfig",
    "ColumnQLinearPending",
    "ColumnQLinearResiduals",
    "column_qlinear",
    "column_qlinear_bwd",
    "column_qlinear_dgrad",
    "column_qlinear_fwd",
    "column_qlinear_init",
    "column_qlinear_wgrad",
]


@config
class ColumnQLinearConfig(LowConfig):
    """As `ColumnLinearConfig`, with a `recipe` of `funcops.low_precision`. `overlap`: "none" or "bulk". Raises `ValueError` for
    sizes that the recipe's blocks do not divide."""

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
        """What the axis shares out, by the name of the leaf."""
        return self.linear.specs

    def largest(self, amaxes: Tensor) -> Tensor:
        """The amaxes of whole weights, of those of the parts of the ranks."""
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


class ColumnQLinearPending(Pending, static=("dtype",)):
    x: Any = saved("[*, I]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",), tree=True)
    rows: Any = saved("[n *, I]", needed_by=WGRAD, of=("params.weight",), tree=True)  # of all ranks, where siblings gathered them
    dy: Any = saved("[*, O/n]", needed_by=WGRAD, of=("params.weight",), tree=True)
    db: Tensor = saved("[O/n]", needed_by=WGRAD, of=("params.bias",))
    amaxes: Tensor = saved("[3]", needed_by=WGRAD, of=("params.weight",))


@init_of(ColumnQLinearConfig)
def column_qlinear_init(
    cfg: ColumnQLinearConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LinearParams:
    """As `column_linear_init`: params in high precision."""
    return init_linear(cfg, key, device, dtype)


@forward(ColumnQLinearConfig, LinearParams)
def column_qlinear_fwd(
    params: LinearParams, x: Tensor, cfg: ColumnQLinearConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ColumnQLinearResiduals | None]:
    """`y_r = q(x) q(w_r)^T + b_r`. x: [m, *, I], of n m in all (without `sequence_parallel`: [*, I]) -> y: [n m, *, O/n].
    Raises as `qlinear_fwd`."""
    return _fwd("column_qlinear", params, x, cfg, needs)


def _fwd(name: str, params: LinearParams, x: Tensor, cfg: ColumnQLinearConfig, needs: Needs) -> Any:
    check_low_column(name, params, x, cfg)
    row, kept, amax = column_operands(x, params.weight, cfg, needs)
    return column_of(gathered(row, rows_axis(cfg)), kept, amax, params, cfg, needs)


def check_low_column(name: str, params: LinearParams, x: Tensor, cfg: ColumnQLinearConfig) -> None:
    check_op(name, "column_qlinear", cfg)
    check_x(f"{name}_fwd", x, cfg.in_features, cfg.sequence_parallel)
    check_params(f"{name}_fwd", params, x, cfg)


def column_operands(x: Tensor, weight: Any, cfg: ColumnQLinearConfig, needs: Needs) -> tuple[QTensor, Any, Tensor | None]:
    """This rank's x by rows, and as it is kept; its amax, where scales are given."""
    recipe, axis = cfg.recipe, rows_axis(cfg)
    if isinstance(weight, Scaled):
        row, amax = scaled_tensor(x, recipe.x, weight.scale[0:1])
        return row, turned(row) if recipe.keep == "col" and needs.param("weight") else row, amax
    if recipe.keep == "input" or (recipe.keep == "col" and needs.param("weight") and not whole_tiles(x, recipe.x, axis)):
        return quantized(x, recipe.x, over(axis)), x, None
    return *operands(x, recipe, needs, over(axis)), None


def column_of(
    whole: QTensor, kept: Any, amax: Tensor | None, params: LinearParams, cfg: ColumnQLinearConfig, needs: Needs
) -> tuple[Tensor, Any]:
    """y and residuals, of x by rows of all ranks; after every check."""
    recipe, weight = cfg.recipe, params.weight
    if isinstance(weight, Scaled) and amax is not None:
        row, amax_w = scaled_weight(weight, recipe)
        amaxes, rounding = torch.cat((amax, amax_w)), weight.scale
    else:
        row, amaxes, rounding = row_of(weight, recipe, over(cfg.axis)), None, rounding_of(weight, recipe)
    y = y_of(whole, row, params.bias, recipe.emulate)
    fields: Any = {"x": kept, "weight": weight, "rounding": rounding, "y_shape": y.shape, "dtype": y.dtype}
    if recipe.keep == "input":
        return y, ColumnQLinearOfInputResiduals.keep(cfg, needs, **fields)
    return y, ColumnQLinearResiduals.keep(cfg, needs, amaxes=amaxes, **fields)


@forward(ColumnQLinearConfig, LinearParams)
def column_qlinear_of_input_fwd(
    params: LinearParams, x: Tensor, cfg: ColumnQLinearConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ColumnQLinearOfInputResiduals | None]:
    """As `column_qlinear_fwd`, for a recipe with keep="input": residuals hold x itself."""
    return _fwd("column_qlinear_of_input", params, x, cfg, needs)


@dgrad_of(ColumnQLinearResiduals)
def column_qlinear_dgrad(
    residuals: ColumnQLinearResiduals, dy: Tensor, cfg: ColumnQLinearConfig
) -> tuple[Tensor, ColumnQLinearPending | None]:
    """dy: [n m, *, O/n] -> dx: [m, *, I] (without `sequence_parallel`: [*, I]), and the pending dw: dy in low precision, and x as
    it is kept."""
    return _dgrad("column_qlinear_dgrad", residuals, dy, cfg)


@dgrad_of(ColumnQLinearOfInputResiduals)
def column_qlinear_of_input_dgrad(
    residuals: ColumnQLinearOfInputResiduals, dy: Tensor, cfg: ColumnQLinearConfig
) -> tuple[Tensor, ColumnQLinearPending | None]:
    """As `column_qlinear_dgrad`."""
    return _dgrad("column_qlinear_of_input_dgrad", residuals, dy, cfg)


def _dgrad(where: str, residuals: Any, dy: Tensor, cfg: ColumnQLinearConfig) -> tuple[Tensor, ColumnQLinearPending | None]:
    row, pending = rounded_dy(where, residuals, dy, cfg)
    return NO_GRADIENT if row is None else comm.wait(_send_dx(row, residuals, cfg), cfg.axis), pending


@wgrad_of(ColumnQLinearPending, LinearParams)
def column_qlinear_wgrad(
    pending: ColumnQLinearPending, cfg: ColumnQLinearConfig, *, into: LinearParams | None = None
) -> LinearParams:
    """Gathers x in codes, then `dw_r = q(dy_r)^T q(x)`, and db_r; added to `into` where that is given. Of a `Scaled` weight dw is
    one too, with this rank's amaxes."""
    return _gradients("column_qlinear_wgrad", pending, None, cfg, into)


@bwd_of(ColumnQLinearResiduals, LinearParams)
def column_qlinear_bwd(
    residuals: ColumnQLinearResiduals, dy: Tensor, cfg: ColumnQLinearConfig, *, into: LinearParams | None = None
) -> tuple[LinearParams, Tensor]:
    """The whole backward, in the order that `cfg.overlap` says. Returns `(dparams, dx)`."""
    return _bwd("column_qlinear_bwd", residuals, dy, cfg, into)


@bwd_of(ColumnQLinearOfInputResiduals, LinearParams)
def column_qlinear_of_input_bwd(
    residuals: ColumnQLinearOfInputResiduals, dy: Tensor, cfg: ColumnQLinearConfig, *, into: LinearParams | None = None
) -> tuple[LinearParams, Tensor]:
    """As `column_qlinear_bwd`."""
    return _bwd("column_qlinear_of_input_bwd", residuals, dy, cfg, into)


def _bwd(
    where: str, residuals: Any, dy: Tensor, cfg: ColumnQLinearConfig, into: LinearParams | None
) -> tuple[LinearParams, Tensor]:
    row, pending = rounded_dy(where, residuals, dy, cfg)
    if pending is None:
        dx = NO_GRADIENT if row is None else comm.wait(_send_dx(row, residuals, cfg), cfg.axis)
        return column_qlinear_wgrad(None, cfg, into=into), dx  # type: ignore[arg-type]
    if into is not None:  # before anything is sent
        check_low_into(where, pending, pending.x, cfg, into)
    bulk = cfg.overlap == "bulk"
    sent = send_x(where, pending, cfg) if bulk and pending.x is not None else None
    dx = NO_GRADIENT if row is None else _send_dx(row, residuals, cfg)
    if row is not None and not bulk:
        dx = comm.wait(dx, cfg.axis)
    dparams = _gradients(where, pending, sent, cfg, into)
    return dparams, comm.wait(dx, cfg.axis) if bulk and row is not None else dx


def rows_axis(cfg: ColumnQLinearConfig) -> Axis:
    """The axis that shares out rows of x."""
    return cfg.axis if cfg.sequence_parallel else _ALONE


_ALONE = Axis("alone", 1, 0)


def rounded_dy(
    where: str, residuals: Any, dy: Tensor, cfg: ColumnQLinearConfig
) -> tuple[QTensor | None, ColumnQLinearPending | None]:
    """dy by rows, where dx is wanted, and what waits for dw."""
    recipe, needs, weight = cfg.recipe, residuals.needs, residuals.weight
    here = residuals.x if weight is None else weight
    check_tensor(where, "dy", dy, residuals.y_shape, residuals.dtype, a_tensor(here))
    low = needs_low(needs, recipe)
    check_rounding(where, residuals, recipe, low)
    row = col = None
    amaxes = getattr(residuals, "amaxes", None)
    if recipe.delayed and residuals.rounding is not None:
        row, amax = scaled_tensor(dy, recipe.dy, residuals.rounding[2:3])
        col = turned(row) if low else None
        amaxes = None if amaxes is None else torch.cat((amaxes, amax))
    elif needs.x or low:
        key = (
            residuals.rounding if cfg.axis.size == 1 or not recipe.stochastic else random.fold_in(residuals.rounding, cfg.axis.rank)
        )
        row, col = of_gradient(dy, recipe, key, bool(needs.x), low, over(cfg.axis))
    pending = ColumnQLinearPending.keep(
        cfg, needs, x=residuals.x, rows=None, dy=col if low else dy, db=db_of(dy, cfg, needs), amaxes=amaxes, dtype=dy.dtype
    )
    return row if needs.x else None, pending


def _send_dx(row: QTensor, residuals: Any, cfg: ColumnQLinearConfig) -> Tensor:
    """The sum of the ranks' parts of dx, to be waited for."""
    dx = part_of_dx(row, residuals, cfg)
    return comm.start_scatter_sum(dx, cfg.axis) if cfg.sequence_parallel else comm.start_sum(dx, cfg.axis)


def part_of_dx(row: QTensor, residuals: Any, cfg: ColumnQLinearConfig) -> Tensor:
    col = col_of(residuals.weight, cfg.recipe, over(cfg.axis))
    return product(row, col, residuals.dtype, cfg.recipe.emulate)


def send_x(where: str, pending: ColumnQLinearPending, cfg: ColumnQLinearConfig) -> Sent:
    """Begin to gather x as dw reads it."""
    recipe, axis, x = cfg.recipe, rows_axis(cfg), pending.x
    if not isinstance(x, QTensor):
        return send(x, axis) if recipe.wgrad == "high" else send_columns(x, recipe, recipe.x, axis)
    dy = pending.dy.shape
    shape = (
        torch.Size((dy[0] // axis.size, *dy[1:-1], cfg.in_features)) if axis.size > 1 else torch.Size((*dy[:-1], cfg.in_features))
    )
    check_quantized(where, "pending.x", x, recipe.x, kept_side(recipe, x), shape, pending.dy.codes)
    return send(x, axis)


def arrived_x(sent: Sent, pending: ColumnQLinearPending, cfg: ColumnQLinearConfig) -> Any:
    """All of x as dw reads it."""
    recipe, axis = cfg.recipe, rows_axis(cfg)
    by_columns = recipe.wgrad == "low" and not isinstance(pending.x, QTensor)
    return columns_of(sent, recipe, recipe.x, axis) if by_columns else arrived(sent, axis)


def _gradients(
    where: str, pending: ColumnQLinearPending, sent: Sent | None, cfg: ColumnQLinearConfig, into: LinearParams | None
) -> LinearParams:
    """Of x as it is kept, or as it was `sent`."""

    def dw(out: torch.dtype) -> Tensor | None:
        if pending.x is None:
            return None
        whole = pending.rows
        if whole is None:
            whole = arrived_x(send_x(where, pending, cfg) if sent is None else sent, pending, cfg)
        return product_of_columns(where, pending.dy, whole, cfg.recipe, out)

    return low_gradients(where, pending, pending.x, cfg, into, dw)


column_qlinear = make_op(
    "column_qlinear",
    ColumnQLinearConfig,
    init=column_qlinear_init,
    fwd=column_qlinear_fwd,
    dgrad=column_qlinear_dgrad,
    wgrad=column_qlinear_wgrad,
    bwd=column_qlinear_bwd,
)
column_qlinear_of_input = make_op(
    "column_qlinear_of_input",
    ColumnQLinearConfig,
    init=column_qlinear_init,
    fwd=column_qlinear_of_input_fwd,
    dgrad=column_qlinear_of_input_dgrad,
    wgrad=column_qlinear_wgrad,
    bwd=column_qlinear_of_input_bwd,
)


def column_op_of(recipe: Recipe) -> Op:
    """The op that keeps what the recipe says."""
    return column_qlinear_of_input if recipe.keep == "input" else column_qlinear


def _low(cfg: ColumnLinearConfig, recipe: Recipe) -> tuple[Op, Op, ColumnQLinearConfig]:
    return column_linear, column_op_of(recipe), ColumnQLinearConfig(**fields_of(cfg), recipe=recipe)


LOW_FORMS[ColumnLinearConfig] = _low
