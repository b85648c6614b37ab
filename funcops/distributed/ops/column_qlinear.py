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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from funcops import random
from funcops.contract.by_config import ByConfig
from funcops.contract.needs import Needs
from funcops.contract.op import bwd_of, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.contract.schema import NO_GRADIENT, WGRAD, Pending, saved
from funcops.distributed.ops._linear import init_linear, rows_axis
from funcops.distributed.ops._qlinear import (
    CodedOverAxis,
    LowOverAxis,
    Sent,
    arrived,
    columns_of,
    gathered,
    over,
    send,
    send_columns,
    whole_tiles,
)
from funcops.distributed.ops.column_linear import ColumnLayer, ColumnLinearConfig, column_linear
from funcops.formats import QTensor, check_quantized
from funcops.formats.recipes import Recipe
from funcops.ops._low_config import low_form, old_of_input
from funcops.ops._low_operands import factors_of_dw, kept_side, operands, quantized
from funcops.ops.coded_linear import check_low_into
from funcops.ops.linear import LinearParams
from funcops.ops.qlinear import QLinearOfInputResiduals, QLinearResiduals

__all__ = ["ColumnQLinearConfig", "ColumnQLinearPending", "ColumnQLinearResiduals"]
__all__ += ["column_qlinear", "column_qlinear_bwd", "column_qlinear_dgrad"]
__all__ += ["column_qlinear_fwd", "column_qlinear_init", "column_qlinear_wgrad"]


@config
class ColumnQLinearConfig(LowOverAxis, ColumnLinearConfig):
    """The fields of `ColumnLinearConfig`, and a `recipe` of `funcops.low_precision`. `overlap`: "none" or "bulk". Raises
    `ValueError` for sizes that the recipe's blocks do not divide."""

    recipe: Recipe = field(kw_only=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_low(ColumnLinearConfig)


class ColumnQLinearResiduals(QLinearResiduals):
    """The fields of `QLinearResiduals`, of this rank: x [*, I], weight [O/n, I]."""


class ColumnQLinearOfInputResiduals(QLinearOfInputResiduals):
    """The fields of `QLinearOfInputResiduals`, of this rank."""


ColumnQLinearKept = ColumnQLinearResiduals | ColumnQLinearOfInputResiduals


class ColumnQLinearPending(Pending, static=("dtype",)):
    x: Any = saved("[*, I]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",), tree=True)
    rows: Any = saved("[n *, I]", needed_by=WGRAD, of=("params.weight",), tree=True)  # of all ranks, if siblings gathered them
    dy: Any = saved("[*, O/n]", needed_by=WGRAD, of=("params.weight",), tree=True)
    db: Tensor = saved("[O/n]", needed_by=WGRAD, of=("params.bias",))
    amaxes: Tensor = saved("[3]", needed_by=WGRAD, of=("params.weight",))


class _Layer(CodedOverAxis, ColumnLayer):
    def operands(self, x: Tensor, cfg: Any, needs: Needs) -> tuple[QTensor, Any]:
        recipe, axis = cfg.recipe, rows_axis(cfg)
        if recipe.keep == "col" and needs.param("weight") and not whole_tiles(x, recipe.x_col, axis):
            return quantized(x, recipe.x, over(axis)), x
        return operands(x, recipe, needs, over(axis))

    def x_rows_of_all(self, row: QTensor, cfg: Any) -> QTensor:
        return gathered(row, rows_axis(cfg))  # type: ignore[no-any-return]

    def of_dy(self, dy: Tensor, key: Tensor | None, rows: bool, columns: bool, cfg: Any) -> tuple[QTensor | None, QTensor | None]:
        if cfg.recipe.stochastic and key is not None and cfg.axis.size > 1:
            key = random.fold_in(key, cfg.axis.rank)
        return super().of_dy(dy, key, rows, columns, cfg)

    def start_x(self, residuals: Any, dy: Tensor, cfg: Any) -> Any:
        return self.send_x(f"{self.name}_bwd", residuals.x, dy, cfg) if cfg.sequence_parallel else None

    def wait_x(self, sent: Any, residuals: Any, cfg: Any) -> Any:
        return self.arrived_x(sent, residuals.x, cfg)

    def factors(self, where: str, pending: Any, cfg: Any, sent: Sent | None = None) -> tuple[Any, Any]:
        """`sent`: x, if it is in flight already."""
        whole = pending.rows
        if whole is None:
            sent = self.send_x(where, pending.x, pending.dy, cfg) if sent is None else sent
            whole = self.arrived_x(sent, pending.x, cfg)
        return factors_of_dw(where, pending.dy, whole, cfg.recipe)

    def send_x(self, where: str, x: Any, dy: Any, cfg: Any) -> Sent:
        """Begin to gather x in the form that dw reads."""
        recipe, axis = cfg.recipe, rows_axis(cfg)
        if not isinstance(x, QTensor):
            return send(x, axis) if recipe.wgrad == "high" else send_columns(x, recipe, recipe.x_col, axis)
        rows = (dy.shape[0] // axis.size, *dy.shape[1:-1]) if axis.size > 1 else dy.shape[:-1]
        shape = torch.Size((*rows, cfg.in_features))
        side, format = kept_side(recipe, x)
        check_quantized(where, "pending.x", x, format, side, shape, dy.codes if isinstance(dy, QTensor) else dy)
        return send(x, axis)

    def arrived_x(self, sent: Sent, x: Any, cfg: Any) -> Any:
        """The gathered x in the form that dw reads."""
        recipe, axis = cfg.recipe, rows_axis(cfg)
        by_columns = recipe.wgrad == "low" and not isinstance(x, QTensor)
        return columns_of(sent, recipe, recipe.x_col, axis) if by_columns else arrived(sent, axis)

    def bwd(self, residuals: Any, dy: Tensor, cfg: Any, into: LinearParams | None) -> tuple[LinearParams, Tensor]:
        """The whole backward, in the order that `cfg.overlap` says."""
        where, bulk = f"{self.name}_bwd", cfg.overlap == "bulk"
        row, pending = self.rounded(where, residuals, dy, cfg)
        if into is not None and pending is not None:  # before anything is sent
            check_low_into(where, pending, pending.x, cfg, into)
        reads_x = pending is not None and pending.x is not None
        sent = self.send_x(where, pending.x, pending.dy, cfg) if bulk and reads_x else None
        dx = NO_GRADIENT if row is None else self.start_dx((dy,), cfg, lambda _: self.part(row, residuals, cfg))
        dx = self.wait_dx(dx, cfg) if row is not None and not bulk else dx
        factors = functools.partial(self.factors, sent=sent)
        dparams = into if pending is None else self.gradients(where, pending, cfg, into, factors)
        dparams = LinearParams(NO_GRADIENT, None) if dparams is None else dparams
        return dparams, self.wait_dx(dx, cfg) if bulk and row is not None else dx

    def prepares(self, cfg: Any) -> Hashable:
        return None if cfg.recipe.delayed else (cfg.recipe, rows_axis(cfg))

    def joins(self, cfg: Any) -> Hashable:
        return None if cfg.axis.size == 1 else (cfg.axis, cfg.sequence_parallel, cfg.recipe)

    def shared(self, pending: Any, cfg: Any) -> dict[str, Any] | None:
        if not cfg.sequence_parallel or pending.rows is not None:
            return None
        sent = self.send_x(f"{self.name}_wgrad", pending.x, pending.dy, cfg)
        return {"rows": self.arrived_x(sent, pending.x, cfg)}


_layer = _Layer("column_qlinear", ColumnQLinearResiduals, ColumnQLinearOfInputResiduals, ColumnQLinearPending)
KEPT = ByConfig(ColumnQLinearConfig, _layer.kept_class, (ColumnQLinearResiduals, ColumnQLinearOfInputResiduals))


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
    return _layer.fwd(params, x, cfg, needs)


@dgrad_of(KEPT)
def column_qlinear_dgrad(
    residuals: ColumnQLinearKept, dy: Tensor, cfg: ColumnQLinearConfig, sums: Tensor | None = None
) -> tuple[Tensor, ColumnQLinearPending | None]:
    """dy: [n m, *, O/n] -> dx: [m, *, I] (without `sequence_parallel`: [*, I]), and the pending dw: dy in low precision, and the
    saved x."""
    return _layer.dgrad(residuals, dy, cfg, sums)


@wgrad_of(ColumnQLinearPending, LinearParams)
def column_qlinear_wgrad(
    pending: ColumnQLinearPending, cfg: ColumnQLinearConfig, *, into: LinearParams | None = None
) -> LinearParams:
    """Gather x in codes, then compute `dw_r = q(dy_r)^T q(x)`, and db_r; added to `into` if given. For a `Scaled` weight dw is
    `Scaled` too, with this rank's amaxes."""
    return _layer.wgrad(pending, cfg, into)


@bwd_of(KEPT, LinearParams)
def column_qlinear_bwd(
    residuals: ColumnQLinearKept, dy: Tensor, cfg: ColumnQLinearConfig, *, into: LinearParams | None = None
) -> tuple[LinearParams, Tensor]:
    """The whole backward, in the order that `cfg.overlap` says. Returns `(dparams, dx)`."""
    return _layer.bwd(residuals, dy, cfg, into)


column_qlinear = make_op(
    "column_qlinear",
    ColumnQLinearConfig,
    init=column_qlinear_init,
    fwd=column_qlinear_fwd,
    dgrad=column_qlinear_dgrad,
    wgrad=column_qlinear_wgrad,
    bwd=column_qlinear_bwd,
    products=_layer.products,
    layer=_layer,
)
low_form(column_linear, column_qlinear)


if not TYPE_CHECKING:  # a checker would take every name for one of the module's
    __getattr__ = old_of_input(__name__, "column_qlinear")
