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

from typing import Any

from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_divides
from funcops.distributed.ops._linear import rows_axis, start_sum
from funcops.distributed.ops._qlinear import (
    CodedOverAxis,
    LowOverAxis,
    arrived,
    columns_of,
    gathered,
    over,
    send,
    send_columns,
    whole_tiles,
)
from funcops.distributed.ops.row_linear import RowLinearConfig, row_linear
from funcops.engine import random
from funcops.engine.contract.op import config
from funcops.library.formats import QTensor, turned
from funcops.library.ops._layer_op import layer_op
from funcops.library.ops._low_config import low_form
from funcops.library.ops._low_operands import of_gradient, quantized
from funcops.library.ops._rounding_logs import ROUNDING_LOGS
from funcops.library.ops.qlinear import QLinearOfInputResiduals, QLinearPending, QLinearResiduals

__all__ = ["RowQLinearConfig", "RowQLinearPending", "RowQLinearResiduals"]
__all__ += ["row_qlinear", "row_qlinear_bwd", "row_qlinear_dgrad", "row_qlinear_fwd", "row_qlinear_init", "row_qlinear_wgrad"]


@config
class RowQLinearConfig(LowOverAxis, RowLinearConfig):
    """The fields of `RowLinearConfig`, and a `recipe` of `funcops.low_precision`. `overlap`: "none" or "bulk", the same order here.
    Raises `ValueError` for sizes that the recipe's blocks do not divide."""

    plain = RowLinearConfig


class RowQLinearResiduals(QLinearResiduals):
    """The fields of `QLinearResiduals`, of this rank: x [*, I/n], weight [O, I/n]."""


class RowQLinearOfInputResiduals(QLinearOfInputResiduals):
    """The fields of `QLinearOfInputResiduals`, of this rank."""


class RowQLinearPending(QLinearPending):
    """The fields of `QLinearPending`, with dy of all ranks."""


class _Layer(CodedOverAxis):
    of_input = RowQLinearOfInputResiduals

    def check_x(self, where: str, x: Tensor, cfg: Any) -> None:
        super().check_x(where, x, cfg)
        check_divides(where, "x", x, 0, rows_axis(cfg))

    def y_of(self, part: Tensor, cfg: Any) -> Tensor:
        return comm.wait(start_sum(part, cfg), cfg.axis)

    def dy_rows_of_all(self, row: QTensor, cfg: Any) -> QTensor:
        return gathered(row, rows_axis(cfg))  # type: ignore[no-any-return]

    def of_dy(self, dy: Tensor, key: Tensor | None, rows: bool, columns: bool, cfg: Any) -> tuple[QTensor | None, QTensor | None]:
        recipe, format, col, axis = cfg.recipe, cfg.recipe.dy, cfg.recipe.dy_col, rows_axis(cfg)
        if axis.size == 1:
            return of_gradient(dy, recipe, key, rows, columns)
        if format.turns and format is col and not recipe.hadamard and not recipe.stochastic:
            row = gathered(quantized(dy, format, over(axis)), axis)
            return row, turned(row) if columns else None
        if not whole_tiles(dy, col, axis):
            return of_gradient(gathered(dy, axis), recipe, key, rows, columns)
        keys: Any = random.split(random.fold_in(key, axis.rank), 2) if recipe.stochastic and key is not None else (None, None)
        by_rows = send(quantized(dy, format, over(axis), key=keys[0]), axis) if rows else None
        by_columns = send_columns(dy, recipe, col, axis, keys[1]) if columns else None
        return (
            None if by_rows is None else arrived(by_rows, axis),
            None if by_columns is None else columns_of(by_columns, recipe, col, axis),
        )

    def factors(self, where: str, pending: Any, cfg: Any, sent: Any = None) -> tuple[Any, Any]:
        if cfg.recipe.wgrad == "high":
            return gathered(pending.dy, rows_axis(cfg)), pending.x
        return super().factors(where, pending, cfg)


row_qlinear, row_qlinear_init, row_qlinear_fwd, row_qlinear_bwd, row_qlinear_dgrad, row_qlinear_wgrad = layer_op(
    _Layer,
    "row_qlinear",
    RowQLinearConfig,
    RowQLinearResiduals,
    RowQLinearPending,
    logs=ROUNDING_LOGS,
    init="The params that `row_linear_init` draws, in high precision.",
    fwd="""`y = sum over r of q(x_r) q(w_r)^T + b`. x: [n m, *, I/n] -> y: [m, *, O] (without `sequence_parallel`: [*, I/n] -> [*,
    O]). Raises as `qlinear_fwd`.""",
    dgrad="""dy: [m, *, O] -> dx: [n m, *, I/n] (without `sequence_parallel`: [*, O] -> [*, I/n]), and the pending dw: dy of all
    ranks in low precision, and the saved x.""",
    wgrad="""`dw_r = q(dy)^T q(x_r)`, and db of this rank's rows; added to `into` if given. For a `Scaled` weight dw is `Scaled`
    too, with this rank's amaxes.""",
)
low_form(row_linear, row_qlinear)
