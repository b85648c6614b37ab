"""`row_linear` in low precision: dy is sent over the axis as codes and scales.

    y = sum over r of q(x_r) q(w_r)^T + b

    dx_r = q(dy) q(w_r)        dw_r = q(dy)^T q(x_r)        db = sum over rows of dy

Letters and shapes are as in `row_linear`, q as in `qlinear`: a scale for a whole tensor (x, w, dy in sequence parallelism) comes
from the largest element over all ranks, so that all ranks have one scale. The sum of y is sent in the dtype of x. In sequence
parallelism each rank quantises its own rows of dy, and gathers the codes. If codes by columns follow from codes by rows
(`Format.turns`, without a Hadamard transform), only codes by rows are sent, about half the bytes of bfloat16, and dy is tiled anew
for dw, as x is with keep="row". Otherwise both are sent; or dy itself, if a rank's rows are not whole tiles. On an axis of one rank
it has the bits of `qlinear`.

Each rank tiles its own features of x and w: they have the bits of one process if I/n is a multiple of the tile. db, keys and
amaxes: see `row_linear`, `column_qlinear`.

>>> import torch
>>> from funcops import dist, random
>>> from funcops.low_precision import Fp8Block
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.RowQLinearConfig(256, 128, recipe=Fp8Block(), axis=mesh["tp"], bias=False)
...     params = dist.row_qlinear_init(cfg, key=random.key(0))
...     y, residuals = dist.row_qlinear_fwd(params, torch.ones(4, 128), cfg)
...     dparams, dx = dist.row_qlinear_bwd(residuals, torch.ones(2, 128), cfg)
...     return y.shape, dx.shape, dparams.weight[0, :2]
...
>>> run_ranks({"tp": 2}, each)[1]
(torch.Size([2, 128]), torch.Size([4, 128]), tensor([4., 4.]))
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from funcops import random
from funcops.contract.by_config import ByConfig
from funcops.contract.configs import fields_of
from funcops.contract.needs import Needs
from funcops.contract.op import Op, both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.contract.renamed import old_names
from funcops.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Pending, Residuals, saved, static
from funcops.distributed import comm
from funcops.distributed.checks import check_divides, check_tensor
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._linear import check_x, init_linear
from funcops.distributed.ops._qlinear import arrived, check_low_config, columns_of, gathered, over, send, send_columns, whole_tiles
from funcops.distributed.ops.row_linear import RowLinearConfig, row_linear
from funcops.distributed.specs import Spec
from funcops.formats import QTensor, turned
from funcops.formats.recipes import LOW_FORMS, Recipe
from funcops.formats.scaled import Scaled
from funcops.ops import _low_operands as low_operands
from funcops.ops import qlinear as coded
from funcops.ops._low_config import LowConfig
from funcops.ops.linear import LinearParams
from funcops.ops.qlinear_wgrads import product

__all__ = ["RowQLinearConfig", "RowQLinearPending", "RowQLinearResiduals"]
__all__ += ["row_qlinear", "row_qlinear_bwd", "row_qlinear_dgrad", "row_qlinear_fwd", "row_qlinear_init", "row_qlinear_wgrad"]


@config
class RowQLinearConfig(LowConfig):
    """The fields of `RowLinearConfig`, and a `recipe` of `funcops.low_precision`. `overlap`: "none" or "bulk", the same order here.
    Raises `ValueError` for sizes that the recipe's blocks do not divide."""

    in_features: int = field(kw_only=False)
    out_features: int = field(kw_only=False)
    recipe: Recipe = field(kw_only=False)
    axis: Axis
    bias: bool = True
    sequence_parallel: bool = True
    overlap: str = "none"

    def __post_init__(self) -> None:
        check_low_config(self, "in_features")
        how: Any = {"bias": self.bias, "sequence_parallel": self.sequence_parallel, "overlap": self.overlap}
        object.__setattr__(self, "linear", RowLinearConfig(self.in_features, self.out_features, axis=self.axis, **how))

    linear: ClassVar[RowLinearConfig]  # the same layer without the recipe
    shards_features = False

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the sharded params, by path."""
        return self.linear.specs

    def largest(self, amaxes: Tensor) -> Tensor:
        """The amaxes of whole weights, from the amaxes of this rank's parts."""
        return comm.largest(amaxes, self.axis)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.linear.widths(width)


class RowQLinearResiduals(Residuals, static=("dtype",)):
    x: Any = saved("[*, I/n]", needed_by=WGRAD, of=("params.weight",), tree=True)
    weight: Any = saved("[O, I/n]", alias="params.weight", needed_by=DGRAD, tree=True)
    amaxes: Tensor = saved("[2]", needed_by=WGRAD, of=("params.weight",))
    rounding: Tensor = saved("[3] or [2]", needed_by=DGRAD | WGRAD, of=("x", "params.weight"), tree=True)
    y_shape: torch.Size = static()


class RowQLinearOfInputResiduals(Residuals, static=("dtype",)):
    x: Tensor = saved("[*, I/n]", alias="x", needed_by=WGRAD, of=("params.weight",))
    weight: Any = saved("[O, I/n]", alias="params.weight", needed_by=DGRAD, tree=True)
    rounding: Tensor = saved("[2]", needed_by=DGRAD | WGRAD, of=("x", "params.weight"), tree=True)
    y_shape: torch.Size = static()


RowQLinearKept = RowQLinearResiduals | RowQLinearOfInputResiduals


def _kept(cfg: RowQLinearConfig) -> type[RowQLinearKept]:
    return RowQLinearOfInputResiduals if cfg.recipe.keep == "input" else RowQLinearResiduals


class RowQLinearPending(Pending, static=("dtype",)):
    x: Any = saved("[*, I/n]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",), tree=True)
    dy: Any = saved("[*, O]", needed_by=WGRAD, of=("params.weight",), tree=True)
    db: Tensor = saved("[O]", needed_by=WGRAD, of=("params.bias",))
    amaxes: Tensor = saved("[3]", needed_by=WGRAD, of=("params.weight",))


@init_of(RowQLinearConfig)
def row_qlinear_init(
    cfg: RowQLinearConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LinearParams:
    """The params that `row_linear_init` draws, in high precision."""
    return init_linear(cfg, key, device, dtype)


@forward(RowQLinearConfig, LinearParams)
def row_qlinear_fwd(
    params: LinearParams, x: Tensor, cfg: RowQLinearConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, RowQLinearKept | None]:
    """`y = sum over r of q(x_r) q(w_r)^T + b`. x: [n m, *, I/n] -> y: [m, *, O] (without `sequence_parallel`: [*, I/n] ->
    [*, O]). Raises as `qlinear_fwd`."""
    where, recipe, weight = "row_qlinear_fwd", cfg.recipe, params.weight
    check_x(where, x, cfg.linear.weight_shape[1], cfg.sequence_parallel)
    if cfg.sequence_parallel:
        check_divides(where, "x", x, 0, cfg.axis)
    coded.check_params(where, params, x, cfg)
    kept: Any = x
    amaxes = None
    rounding = coded.rounding_of(weight, recipe) if not isinstance(weight, Scaled) else weight.scale
    if isinstance(weight, Scaled):
        row, amax_x = low_operands.scaled_tensor(x, recipe.x, weight.scale[0:1])
        w, amax_w = low_operands.scaled_weight(weight, recipe)
        kept, amaxes = turned(row) if recipe.keep == "col" and needs.param("weight") else row, torch.cat((amax_x, amax_w))
    else:
        w = low_operands.row_of(weight, recipe, over(cfg.axis))
        row, kept = low_operands.operands(x, recipe, needs, over(cfg.axis))
    part = low_operands.y_of(row, w, None, recipe.emulate)
    y = comm.scatter_sum(part, cfg.axis) if cfg.sequence_parallel else comm.sum_over(part, cfg.axis)
    y = y if params.bias is None else y.add_(params.bias)
    fields: Any = {"x": kept, "weight": weight, "rounding": rounding, "y_shape": y.shape, "dtype": y.dtype}
    if recipe.keep == "input":
        return y, RowQLinearOfInputResiduals.keep(cfg, needs, **fields)
    return y, RowQLinearResiduals.keep(cfg, needs, amaxes=amaxes, **fields)


@dgrad_of(ByConfig(RowQLinearConfig, _kept, (RowQLinearResiduals, RowQLinearOfInputResiduals)))
def row_qlinear_dgrad(
    residuals: RowQLinearKept, dy: Tensor, cfg: RowQLinearConfig, sums: Tensor | None = None
) -> tuple[Tensor, RowQLinearPending | None]:
    """dy: [m, *, O] -> dx: [n m, *, I/n] (without `sequence_parallel`: [*, O] -> [*, I/n]), and the pending dw: dy of all ranks in
    low precision, and the saved x."""
    where = "row_qlinear_dgrad"
    recipe, needs, weight = cfg.recipe, residuals.needs, residuals.weight
    here = residuals.x if weight is None else weight
    check_tensor(where, "dy", dy, residuals.y_shape, residuals.dtype, coded.a_tensor(here))
    low = coded.needs_low(needs, recipe)
    coded.check_rounding(where, residuals, recipe, low)
    row = col = None
    amaxes, rounding = getattr(residuals, "amaxes", None), residuals.rounding
    if recipe.delayed and rounding is not None:
        own, amax = low_operands.scaled_tensor(dy, recipe.dy, rounding[2:3])
        amaxes = None if amaxes is None else torch.cat((amaxes, amax))
        row = gathered(own, _rows(cfg))
        col = turned(row) if low else None
    elif needs.x or low:
        row, col = _of_all(dy, recipe, rounding, bool(needs.x), low, _rows(cfg))
    dx = NO_GRADIENT
    if needs.x and row is not None:
        dx = product(row, low_operands.col_of(weight, recipe, over(cfg.axis)), dy.dtype, recipe.emulate)
    return dx, RowQLinearPending.keep(
        cfg, needs, x=residuals.x, dy=col if low else dy, db=coded.db_of(dy, cfg, needs, sums), amaxes=amaxes, dtype=dy.dtype
    )


@wgrad_of(RowQLinearPending, LinearParams)
def row_qlinear_wgrad(pending: RowQLinearPending, cfg: RowQLinearConfig, *, into: LinearParams | None = None) -> LinearParams:
    """`dw_r = q(dy)^T q(x_r)`, and db of this rank's rows; added to `into` if given. For a `Scaled` weight dw is `Scaled` too,
    with this rank's amaxes."""
    return coded.low_wgrad("row_qlinear_wgrad", pending, cfg, into, _factors)


def row_qlinear_products(pending: RowQLinearPending, cfg: RowQLinearConfig, *, into: LinearParams) -> list[Any]:
    """The weight's gradient as a product to run later, with dy of all ranks."""
    return coded.low_products("row_qlinear_wgrad", pending, cfg, into, _factors)


def _factors(where: str, pending: RowQLinearPending, cfg: RowQLinearConfig) -> tuple[Any, Any]:
    recipe, dy, x = cfg.recipe, pending.dy, pending.x
    if recipe.wgrad == "high":
        dy = gathered(dy, _rows(cfg))
    elif not isinstance(x, QTensor):
        x = low_operands.quantized(x, recipe.x, over(cfg.axis), side="col", hadamard=recipe.hadamard)
    return low_operands.factors_of_dw(where, dy, x, recipe)


def _rows(cfg: RowQLinearConfig) -> Axis:
    """The axis over which rows of dy are sharded."""
    return cfg.axis if cfg.sequence_parallel else _ALONE


_ALONE = Axis("alone", 1, 0)


def _of_all(
    dy: Tensor, recipe: Recipe, key: Tensor | None, rows: bool, columns: bool, axis: Axis
) -> tuple[QTensor | None, QTensor | None]:
    """dy of all ranks by rows, for dx, and by columns, for dw."""
    format = recipe.dy
    if axis.size == 1:
        return low_operands.of_gradient(dy, recipe, key, rows, columns)
    if format.turns and not recipe.hadamard and not recipe.stochastic:
        row = gathered(low_operands.quantized(dy, format, over(axis)), axis)
        return row, turned(row) if columns else None
    if not whole_tiles(dy, format, axis):
        return low_operands.of_gradient(gathered(dy, axis), recipe, key, rows, columns)
    keys: Any = random.split(random.fold_in(key, axis.rank), 2) if recipe.stochastic and key is not None else (None, None)
    by_rows = send(low_operands.quantized(dy, format, over(axis), key=keys[0]), axis) if rows else None
    by_columns = send_columns(dy, recipe, format, axis, keys[1]) if columns else None
    return (
        None if by_rows is None else arrived(by_rows, axis),
        None if by_columns is None else columns_of(by_columns, recipe, format, axis),
    )


row_qlinear = make_op(
    "row_qlinear",
    RowQLinearConfig,
    init=row_qlinear_init,
    fwd=row_qlinear_fwd,
    dgrad=row_qlinear_dgrad,
    wgrad=row_qlinear_wgrad,
    products=row_qlinear_products,
    layer=coded.LowLayer(),
)
row_qlinear_bwd = both_halves(row_qlinear, row_qlinear_dgrad, row_qlinear_wgrad)


def _low(cfg: RowLinearConfig, recipe: Recipe) -> tuple[Op, Op, RowQLinearConfig]:
    return row_linear, row_qlinear, RowQLinearConfig(**fields_of(cfg), recipe=recipe)


LOW_FORMS[RowLinearConfig] = _low


if not TYPE_CHECKING:  # a checker would take every name for one of the module's
    __getattr__ = old_names(
        __name__,
        row_qlinear_of_input="row_qlinear",
        row_qlinear_of_input_fwd="row_qlinear_fwd",
        row_qlinear_of_input_dgrad="row_qlinear_dgrad",
        row_qlinear_of_input_bwd="row_qlinear_bwd",
    )
