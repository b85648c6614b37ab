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

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from funcops.distributed.ops._linear import rows_axis
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
from funcops.engine import random
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config
from funcops.engine.contract.schema import WGRAD, Pending, saved
from funcops.library.formats import QTensor, check_quantized
from funcops.library.ops._layer_op import layer_op
from funcops.library.ops._low_config import low_form
from funcops.library.ops._low_operands import factors_of_dw, kept_side, operands, quantized
from funcops.library.ops._rounding_logs import ROUNDING_LOGS
from funcops.library.ops.qlinear import QLinearOfInputResiduals, QLinearResiduals

__all__ = ["ColumnQLinearConfig", "ColumnQLinearPending", "ColumnQLinearResiduals"]
__all__ += ["column_qlinear", "column_qlinear_bwd", "column_qlinear_dgrad"]
__all__ += ["column_qlinear_fwd", "column_qlinear_init", "column_qlinear_wgrad"]


@config
class ColumnQLinearConfig(LowOverAxis, ColumnLinearConfig):
    """The fields of `ColumnLinearConfig`, and a `recipe` of `funcops.low_precision`. `overlap`: "none" or "bulk". Raises
    `ValueError` for sizes that the recipe's blocks do not divide."""

    plain = ColumnLinearConfig


class ColumnQLinearResiduals(QLinearResiduals):
    """The fields of `QLinearResiduals`, of this rank: x [*, I], weight [O/n, I]."""


class ColumnQLinearOfInputResiduals(QLinearOfInputResiduals):
    """The fields of `QLinearOfInputResiduals`, of this rank."""


class ColumnQLinearPending(Pending, static=("dtype",)):
    x: Any = saved("[*, I]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",), tree=True)
    rows: Any = saved("[n *, I]", needed_by=WGRAD, of=("params.weight",), tree=True)  # of all ranks, if siblings gathered them
    dy: Any = saved("[*, O/n]", needed_by=WGRAD, of=("params.weight",), tree=True)
    db: Tensor = saved("[O/n]", needed_by=WGRAD, of=("params.bias",))
    amaxes: Tensor = saved("[3]", needed_by=WGRAD, of=("params.weight",))


class _Layer(CodedOverAxis, ColumnLayer):
    of_input = ColumnQLinearOfInputResiduals

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

    def factors(self, where: str, pending: Any, cfg: Any, sent: Sent | None = None) -> tuple[Any, Any]:
        return factors_of_dw(where, pending.dy, self.x_of_all(where, pending, cfg, sent), cfg.recipe)

    def send_x(self, where: str, x: Any, dy: Any, cfg: Any) -> Sent:
        recipe, axis = cfg.recipe, rows_axis(cfg)
        if not isinstance(x, QTensor):
            return send(x, axis) if recipe.wgrad == "high" else send_columns(x, recipe, recipe.x_col, axis)
        rows = (dy.shape[0] // axis.size, *dy.shape[1:-1]) if axis.size > 1 else dy.shape[:-1]
        shape = torch.Size((*rows, cfg.in_features))
        side, format = kept_side(recipe, x)
        check_quantized(where, "pending.x", x, format, side, shape, dy.codes if isinstance(dy, QTensor) else dy)
        return send(x, axis)

    def arrived_x(self, sent: Sent, x: Any, cfg: Any) -> Any:
        recipe, axis = cfg.recipe, rows_axis(cfg)
        by_columns = recipe.wgrad == "low" and not isinstance(x, QTensor)
        return columns_of(sent, recipe, recipe.x_col, axis) if by_columns else arrived(sent, axis)

    def prepares(self, cfg: Any) -> Hashable:
        return None if cfg.recipe.delayed else (cfg.recipe, rows_axis(cfg))


column_qlinear, column_qlinear_init, column_qlinear_fwd, column_qlinear_bwd, column_qlinear_dgrad, column_qlinear_wgrad = layer_op(
    _Layer,
    "column_qlinear",
    ColumnQLinearConfig,
    ColumnQLinearResiduals,
    ColumnQLinearPending,
    logs=ROUNDING_LOGS,
    init="The params that `column_linear_init` draws, in high precision.",
    fwd="""`y_r = q(x) q(w_r)^T + b_r`. x: [m, *, I], of n m in all (without `sequence_parallel`: [*, I]) -> y: [n m, *, O/n].
    Raises as `qlinear_fwd`.""",
    dgrad="""dy: [n m, *, O/n] -> dx: [m, *, I] (without `sequence_parallel`: [*, I]), and the pending dw: dy in low precision, and
    the saved x.""",
    wgrad="""Gather x in codes, then compute `dw_r = q(dy_r)^T q(x)`, and db_r; added to `into` if given. For a `Scaled` weight dw
    is `Scaled` too, with this rank's amaxes.""",
    bwd="The whole backward, in the order that `cfg.overlap` says. Returns `(dparams, dx)`.",
)
low_form(column_linear, column_qlinear)
