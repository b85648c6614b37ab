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

from funcops.contract.needs import Needs
from funcops.contract.op import bwd_of, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.contract.schema import NO_GRADIENT, WGRAD, Pending, saved
from funcops.distributed import comm
from funcops.distributed.checks import check_divides, check_tensor
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._linear import OverAxisConfig, by_ring, check_params, check_x, init_linear, start_sum
from funcops.distributed.ring import gathered_products, scattered_products
from funcops.distributed.specs import Spec
from funcops.kernels import linear as kernels
from funcops.kernels import pointwise
from funcops.ops.linear import LinearParams, LinearResiduals, check_linear_into, linear_gradients
from funcops.ops.linear_layer import LinearLayer
from funcops.ops.linear_wgrads import Product

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


@init_of(RowLinearConfig)
def row_linear_init(
    cfg: RowLinearConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LinearParams:
    """This rank's columns of the weight that `linear_init` draws with the same key, on every mesh, and the whole bias."""
    return init_linear(cfg, key, device, dtype)


@forward(RowLinearConfig, LinearParams)
def row_linear_fwd(
    params: LinearParams, x: Tensor, cfg: RowLinearConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, RowLinearResiduals | None]:
    """`y = sum of x_r w_r^T + b`. x: [n m, *, I/n] -> y: [m, *, O] (without `sequence_parallel`: [*, I/n] -> [*, O]). Raises
    `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    axis = cfg.axis
    check_x("row_linear_fwd", x, cfg.weight_shape[1], cfg.sequence_parallel)
    check_params("row_linear_fwd", params, cfg.weight_shape, cfg.bias_shape, x)
    if axis.size == 1:
        y = kernels.linear_fwd(x, params.weight, params.bias)
    else:
        if cfg.sequence_parallel:
            check_divides("row_linear_fwd", "x", x, 0, axis)
        y = _sum_of_products(x, params.weight, cfg)
        y = y if params.bias is None else pointwise.add(y, params.bias)
    return y, RowLinearResiduals.keep(cfg, needs, x=x, weight=params.weight, y_shape=y.shape, dtype=y.dtype)


@dgrad_of(RowLinearResiduals)
def row_linear_dgrad(
    residuals: RowLinearResiduals, dy: Tensor, cfg: RowLinearConfig, sums: Tensor | None = None
) -> tuple[Tensor, RowLinearPending | None]:
    """dy: [m, *, O] -> dx: [n m, *, I/n] (without `sequence_parallel`: [*, O] -> [*, I/n]), and the pending weight gradient: x,
    and the gathered dy of all ranks."""
    x, weight, needs = residuals.x, residuals.weight, residuals.needs
    check_tensor("row_linear_dgrad", "dy", dy, residuals.y_shape, residuals.dtype, weight if x is None else x)
    rows, of_weight = dy, needs.param("weight")  # x may be missing here, and recomputed for the wgrad
    if by_ring(cfg) and needs.x:
        dx, rows = _products_of_dy(dy, of_weight, weight, cfg.axis)
    else:
        if _gathers(cfg) and (needs.x or of_weight):
            rows = comm.gather(dy, cfg.axis)
        dx = kernels.linear_dgrad(rows, weight) if needs.x else NO_GRADIENT
    return dx, _pending(residuals, dy, rows, cfg, sums)


def _pending(
    residuals: RowLinearResiduals, dy: Tensor, rows: Tensor, cfg: RowLinearConfig, sums: Tensor | None = None
) -> RowLinearPending | None:
    own = dy if rows is dy else comm.own_slice(rows, cfg.axis)
    return RowLinearPending.keep(cfg, residuals.needs, x=residuals.x, rows=rows, dy=own if cfg.bias else None, sums=sums)


@wgrad_of(RowLinearPending, LinearParams)
def row_linear_wgrad(pending: RowLinearPending, cfg: RowLinearConfig, *, into: LinearParams | None = None) -> LinearParams:
    """`dw_r = dy^T x_r`, and db of this rank's rows; added to `into` if given."""
    x, rows, dy = pending.x, pending.rows, pending.dy
    some = dy if rows is None else rows
    if some is None:  # a gradient of a bias is asked for, and the layer has none
        return LinearParams(NO_GRADIENT, None) if into is None else into
    if into is not None:
        check_linear_into("row_linear_wgrad", some, x, dy is not None, into)
    if not _gathers(cfg) or x is None:
        return linear_gradients("row_linear_wgrad", some, x, dy is not None, into, pending.sums)
    db = None if dy is None else _db("row_linear_wgrad", dy, into, pending.sums)
    return _with_db(linear_gradients("row_linear_wgrad", rows, x, False, _weight_of(into)), db, into)


def row_linear_products(pending: RowLinearPending, cfg: RowLinearConfig, *, into: LinearParams) -> list[Product]:
    """dw as a product to run later, with db if both are sums over the same rows. Any other db is added at once."""
    x, rows, dy = pending.x, pending.rows, pending.dy
    if x is None:
        row_linear_wgrad(pending, cfg, into=into)
        return []
    check_linear_into("row_linear_wgrad", rows, x, dy is not None, into)
    if dy is not None and (_gathers(cfg) or pending.sums is not None):
        _db("row_linear_wgrad", dy, into, pending.sums)
        dy = None
    return [Product.of(rows, x, into.weight, None if dy is None else into.bias)]


@bwd_of(RowLinearResiduals, LinearParams)
def row_linear_bwd(
    residuals: RowLinearResiduals, dy: Tensor, cfg: RowLinearConfig, *, into: LinearParams | None = None
) -> tuple[LinearParams, Tensor]:
    """The whole backward, in the order that `cfg.overlap` says. Returns `(dparams, dx)`."""
    x, weight, needs = residuals.x, residuals.weight, residuals.needs
    check_tensor("row_linear_bwd", "dy", dy, residuals.y_shape, residuals.dtype, weight if x is None else x)
    bias = cfg.bias and (needs.params is True or needs.param("bias"))
    if into is not None:  # before anything is sent
        check_linear_into("row_linear_bwd", dy, x, bias, into)
    if not _gathers(cfg) or not (needs.x or x is not None):
        dx = kernels.linear_dgrad(dy, weight) if needs.x else NO_GRADIENT
        return linear_gradients("row_linear_bwd", dy, x, bias, into), dx
    if by_ring(cfg) and needs.x:
        dx, rows = _products_of_dy(dy, x is not None, weight, cfg.axis)
        db = _db("row_linear_bwd", dy, into) if bias else None
    else:
        dy = dy.contiguous()
        sent = comm.start_gather(dy, cfg.axis)
        early = cfg.overlap == "none"
        rows = comm.wait(sent, cfg.axis) if early else sent
        db = _db("row_linear_bwd", dy, into) if bias else None
        rows = rows if early else comm.wait(sent, cfg.axis)
        dx = kernels.linear_dgrad(rows, weight) if needs.x else NO_GRADIENT
    return _with_db(linear_gradients("row_linear_bwd", rows, x, False, _weight_of(into)), db, into), dx


def _sum_of_products(x: Tensor, weight: Tensor, cfg: RowLinearConfig) -> Tensor:
    if by_ring(cfg):
        return scattered_products(x.chunk(cfg.axis.size), cfg.axis, lambda rows: kernels.linear_fwd(rows, weight, None))
    return comm.wait(start_sum(kernels.linear_fwd(x, weight, None), cfg), cfg.axis)


def _products_of_dy(dy: Tensor, of_weight: bool, weight: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """dx from dy of all ranks, and that dy, if the gradient of the weight is requested."""
    dxs, parts = gathered_products(dy, axis, lambda part: kernels.linear_dgrad(part, weight))
    return torch.cat(dxs), torch.cat(parts) if of_weight else dy


def _gathers(cfg: RowLinearConfig) -> bool:
    return cfg.sequence_parallel and cfg.axis.size > 1


def _db(where: str, dy: Tensor, into: LinearParams | None, sums: Tensor | None = None) -> Tensor | None:
    return linear_gradients(where, dy, None, True, None if into is None else LinearParams(NO_GRADIENT, into.bias), sums).bias


def _weight_of(into: LinearParams | None) -> LinearParams | None:
    return None if into is None else LinearParams(into.weight, None)


def _with_db(dparams: LinearParams, db: Tensor | None, into: LinearParams | None) -> LinearParams:
    return LinearParams(dparams.weight, db) if into is None else into


class _Layer(LinearLayer):
    def y_is_product(self, cfg: Any) -> bool:
        return False  # it is a sum over the ranks

    def dx_is_product(self, cfg: Any) -> bool:
        return not by_ring(cfg)

    def dy_rows(self, dy: Tensor, cfg: Any) -> Tensor:
        return comm.gather(dy, cfg.axis) if _gathers(cfg) else dy

    def pending(self, residuals: Any, dy: Tensor, rows: Tensor, cfg: Any) -> Any:
        return _pending(residuals, dy, rows, cfg)


row_linear = make_op(
    "row_linear",
    RowLinearConfig,
    init=row_linear_init,
    fwd=row_linear_fwd,
    dgrad=row_linear_dgrad,
    wgrad=row_linear_wgrad,
    bwd=row_linear_bwd,
    products=row_linear_products,
    layer=_Layer(),
)
