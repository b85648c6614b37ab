"""Linear layer with inputs sharded over an axis: each rank has some columns of w (rows of w^T, hence the name).

    y = sum over r of x_r w_r^T + b

    dx_r = dy w_r        dw_r = dy^T x_r        db = sum over rows of dy

r: a rank of the axis, of n. x_r, dx_r: [*, I/n], of all rows; w_r: [O, I/n]; b: [O] or None, the same on all; one float dtype.
With sequence parallelism y is sharded along its first dimension: a rank has 1/n of it, from a sum that is scattered, and 1/n of dy,
which is gathered. The gradient of w_r is complete. The gradient of b is over this rank's rows only, as for the weights of a norm
between such layers: sum it over the axis. Without, y and dy are the same on all ranks, and all gradients are complete.

Kept: x_r and w_r, both aliases. `overlap="bulk"`: in the whole backward dy is in flight while db is summed, with the same bits.
`overlap="ring"` sums y around the ring, each part during the product of another: in another order. In the backward dy is sent
around the ring, too, during the products for dx.

>>> import torch
>>> from funcops import LinearParams, dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.RowLinearConfig(4, 1, axis=mesh["tp"], bias=False)
...     x, params = torch.ones(2, 2), LinearParams(torch.full((1, 2), 1.0 + mesh["tp"].rank), None)
...     y, residuals = dist.row_linear_fwd(params, x, cfg)
...     dparams, dx = dist.row_linear_bwd(residuals, torch.ones(1, 1), cfg)
...     return y, residuals.x is x, dparams.weight
...
>>> run_ranks({"tp": 2}, each)
[(tensor([[6.]]), True, tensor([[2., 2.]])), (tensor([[6.]]), True, tensor([[2., 2.]]))]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_divides
from funcops.distributed.ops._linear import DenseOverAxis, OverAxisConfig, by_ring, rows_axis, start_sum
from funcops.distributed.ring import gathered_products, scattered_products
from funcops.distributed.specs import Spec
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config
from funcops.engine.contract.schema import NO_GRADIENT, WGRAD, Pending, saved
from funcops.library.kernels import linear as kernels
from funcops.library.kernels import pointwise
from funcops.library.ops._layer_op import layer_op
from funcops.library.ops.linear import LinearParams, LinearResiduals, check_linear_into, linear_gradients, wants_bias
from funcops.library.ops.linear_wgrads import Product

__all__ = ["RowLinearConfig", "RowLinearPending", "RowLinearResiduals"]
__all__ += ["row_linear", "row_linear_bwd", "row_linear_dgrad", "row_linear_fwd", "row_linear_init", "row_linear_wgrad"]


@config
class RowLinearConfig(OverAxisConfig):
    """`in_features` (I) and `out_features` (O) of the whole layer, I a multiple of the size of `axis`; `bias` adds b.
    `sequence_parallel`: y is sharded along its first dimension. `overlap`: "none", "bulk", or, if `sequence_parallel`, "ring"."""

    shards_features = False

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the sharded params, by path."""
        return {"weight": Spec(self.axis.name, 1)}


class RowLinearResiduals(LinearResiduals):
    """The fields of `LinearResiduals`, of this rank: x [*, I/n], weight [O, I/n]."""


class RowLinearPending(Pending):
    x: Tensor = saved("[*, I/n]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",))
    rows: Tensor = saved("[*, O]", alias="dy", needed_by=WGRAD, of=("params.weight",))  # dy of all ranks
    dy: Tensor | None = saved("[*, O]", alias="dy", needed_by=WGRAD, of=("params.bias",))
    sums: Tensor | None = saved("[P, O]", needed_by=WGRAD, of=("params.bias",))  # of dy over blocks of rows, from a rule


class _Layer(DenseOverAxis):
    def y_is_product(self, cfg: Any) -> bool:
        return False  # it is a sum over the ranks

    def dx_is_product(self, cfg: Any) -> bool:
        return not by_ring(cfg)

    def check_x(self, where: str, x: Any, cfg: Any) -> None:
        super().check_x(where, x, cfg)
        check_divides(where, "x", x, 0, rows_axis(cfg))

    def run(self, params: LinearParams, x: Tensor, cfg: Any, needs: Needs) -> tuple[Tensor, Any]:
        weight, bias, axis = params.weight, params.bias, cfg.axis
        alone = axis.size == 1
        if by_ring(cfg):
            y = scattered_products(x.chunk(axis.size), axis, lambda rows: kernels.linear_fwd(rows, weight, None))
        elif alone:
            y = kernels.linear_fwd(x, weight, bias)
        else:
            y = comm.wait(start_sum(kernels.linear_fwd(x, weight, None), cfg), axis)
        y = y if bias is None or alone else pointwise.add(y, bias)
        return y, self.kept(cfg, needs, x, weight, y)

    def dy_rows(self, dy: Tensor, cfg: Any) -> Tensor:
        return comm.gather(dy, rows_axis(cfg))

    def pending(self, residuals: Any, dy: Tensor, rows: Tensor, cfg: Any, sums: Tensor | None = None) -> Any:
        own = dy if rows is dy else comm.own_slice(rows, cfg.axis)
        return RowLinearPending.keep(cfg, residuals.needs, x=residuals.x, rows=rows, dy=own if cfg.bias else None, sums=sums)

    def read_dy(
        self, where: str, residuals: Any, dy: Tensor, cfg: Any, sums: Tensor | None = None, into: LinearParams | None = None
    ) -> tuple[Tensor | None, Any]:
        self.check_backward(where, residuals, dy, cfg, into)
        needs = residuals.needs  # x may be missing here, and recomputed for the wgrad
        rows = self.dy_rows(dy, cfg) if needs.x or needs.param("weight") else dy
        return rows if needs.x else None, self.pending(residuals, dy, rows, cfg, sums)

    def dgrad(self, residuals: Any, dy: Tensor, cfg: Any, sums: Tensor | None = None) -> tuple[Tensor, Any]:
        needs = residuals.needs
        if not by_ring(cfg) or not needs.x:
            return super().dgrad(residuals, dy, cfg, sums)
        self.check_backward("row_linear_dgrad", residuals, dy, cfg, None)
        dxs, parts = gathered_products(dy, cfg.axis, lambda part: self.part(part, residuals, cfg))
        return torch.cat(dxs), self.pending(residuals, dy, torch.cat(parts) if needs.param("weight") else dy, cfg, sums)

    def gradients(self, where: str, pending: Any, cfg: Any, into: LinearParams | None, sent: Any = None) -> LinearParams:
        x, rows, dy = pending.x, pending.rows, pending.dy
        some = dy if rows is None else rows
        if some is None:  # a gradient of a bias is asked for, and the layer has none
            return LinearParams(NO_GRADIENT, None) if into is None else into
        if into is not None:
            check_linear_into(where, some, x, dy is not None, into)
        if rows_axis(cfg).size == 1 or x is None:
            return linear_gradients(where, some, x, dy is not None, into, pending.sums)
        return _with_db(where, rows, x, None if dy is None else _db(where, dy, into, pending.sums), into)

    def bwd(self, residuals: Any, dy: Tensor, cfg: Any, into: LinearParams | None) -> tuple[LinearParams, Tensor]:
        """The whole backward, in the order that `cfg.overlap` says."""
        where, x, needs = "row_linear_bwd", residuals.x, residuals.needs
        self.check_backward(where, residuals, dy, cfg, into)
        if cfg.overlap == "bulk" and rows_axis(cfg).size > 1 and (needs.x or x is not None):
            dy = dy.contiguous()
            sent = comm.start_gather(dy, cfg.axis)
            db = _db(where, dy, into) if wants_bias(cfg, needs) else None
            rows = comm.wait(sent, cfg.axis)
            dx = self.part(rows, residuals, cfg) if needs.x else NO_GRADIENT
            return _with_db(where, rows, x, db, into), dx
        dx, pending = self.dgrad(residuals, dy, cfg)
        nothing = LinearParams(NO_GRADIENT, None) if into is None else into
        return nothing if pending is None else self.gradients(where, pending, cfg, into), dx

    def products(self, pending: Any, cfg: Any, *, into: LinearParams) -> list[Product]:
        """dw as a product to run later, with db if both are sums over the same rows. Any other db is added at once."""
        x, rows, dy, where = pending.x, pending.rows, pending.dy, "row_linear_wgrad"
        if x is None:
            self.wgrad(pending, cfg, into)
            return []
        check_linear_into(where, rows, x, dy is not None, into)
        if dy is not None and (rows_axis(cfg).size > 1 or pending.sums is not None):
            _db(where, dy, into, pending.sums)
            dy = None
        return [Product.of(rows, x, into.weight, None if dy is None else into.bias)]


def _db(where: str, dy: Tensor, into: LinearParams | None, sums: Tensor | None = None) -> Tensor | None:
    return linear_gradients(where, dy, None, True, None if into is None else LinearParams(NO_GRADIENT, into.bias), sums).bias


def _with_db(where: str, rows: Tensor, x: Tensor | None, db: Tensor | None, into: LinearParams | None) -> LinearParams:
    """dw, beside a db that is there already."""
    dw = linear_gradients(where, rows, x, False, None if into is None else LinearParams(into.weight, None)).weight
    return LinearParams(dw, db) if into is None else into


row_linear, row_linear_init, row_linear_fwd, row_linear_bwd, row_linear_dgrad, row_linear_wgrad = layer_op(
    _Layer,
    "row_linear",
    RowLinearConfig,
    RowLinearResiduals,
    RowLinearPending,
    init="This rank's columns of the weight that `linear_init` draws with the same key, on every mesh, and the whole bias.",
    fwd="""`y = sum of x_r w_r^T + b`. x: [n m, *, I/n] -> y: [m, *, O] (without `sequence_parallel`: [*, I/n] -> [*, O]). Raises
    `ValueError` or `TypeError` for a wrong shape, dtype or device.""",
    dgrad="""dy: [m, *, O] -> dx: [n m, *, I/n] (without `sequence_parallel`: [*, O] -> [*, I/n]), and the pending weight gradient:
    x, and the gathered dy of all ranks.""",
    wgrad="`dw_r = dy^T x_r`, and db of this rank's rows; added to `into` if given.",
    bwd="The whole backward, in the order that `cfg.overlap` says. Returns `(dparams, dx)`.",
)
