"""Linear layer with outputs sharded over an axis: each rank has some rows of w (columns of w^T, hence the name).

    y_r = x w_r^T + b_r

    dx = sum over r of dy_r w_r        dw_r = dy_r^T x        db_r = sum over rows of dy_r

r: a rank of the axis, of n. w_r: [O/n, I]; b_r: [O/n] or None; y_r, dy_r: [*, O/n], of all rows; one float dtype.
With sequence parallelism x is sharded along its first dimension: a rank has x_r, 1/n of it, gathers the whole, and gets 1/n of dx,
whose sum is scattered. Without, x and dx are the same on all ranks. The gradients of w_r and b_r are complete either way.

Kept: x_r and w_r, both aliases. The weight gradient gathers x once more when it runs, which a schedule can hide.
`overlap="bulk"` orders the whole backward so that x is in flight during the product for dx, and dx during the product for dw: the
same bits. `overlap="ring"` sends x from rank to rank, each part during the product of another, and sums dx around the ring during
its products: in another order. In the whole backward x is gathered meanwhile, so that dw has the same bits.

>>> import torch
>>> from funcops import LinearParams, dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.ColumnLinearConfig(2, 4, axis=mesh["tp"], bias=False)
...     x, params = torch.ones(1, 2), LinearParams(torch.full((2, 2), 1.0 + mesh["tp"].rank), None)
...     y, residuals = dist.column_linear_fwd(params, x, cfg)
...     dparams, dx = dist.column_linear_bwd(residuals, torch.ones(2, 2), cfg)
...     return y, residuals.x is x, dx
...
>>> run_ranks({"tp": 2}, each)[1]
(tensor([[4., 4.],
        [4., 4.]]), True, tensor([[6., 6.]]))
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from funcops.contract.needs import Needs
from funcops.contract.op import bwd_of, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.contract.schema import NO_GRADIENT, WGRAD, Pending, saved
from funcops.distributed import comm
from funcops.distributed.checks import check_tensor
from funcops.distributed.ops._linear import (
    OverAxisConfig,
    by_ring,
    check_params,
    check_parts,
    check_x,
    init_linear,
    rows_axis,
    start_sum,
)
from funcops.distributed.ring import gathered_products, scattered_products
from funcops.distributed.specs import Spec
from funcops.kernels import linear as kernels
from funcops.ops.linear import LinearParams, LinearResiduals, check_linear_into, linear_gradients, products_of, wants_bias
from funcops.ops.linear_layer import LinearLayer
from funcops.ops.linear_wgrads import Product

__all__ = ["ColumnLinearConfig", "ColumnLinearPending", "ColumnLinearResiduals"]
__all__ += ["column_linear", "column_linear_bwd", "column_linear_dgrad"]
__all__ += ["column_linear_fwd", "column_linear_init", "column_linear_wgrad"]


@config
class ColumnLinearConfig(OverAxisConfig):
    """`in_features` (I) and `out_features` (O) of the whole layer, O a multiple of the size of `axis`; `bias` adds b.
    `sequence_parallel`: x is sharded along its first dimension. `overlap`: "none", "bulk", or, if `sequence_parallel`, "ring".
    `parts`: the sizes of outputs packed into one (q, k and v; gates and values), each of which is sharded by itself."""

    parts: tuple[int, ...] = ()
    shards_features = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self)

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the sharded params, by path."""
        spec = Spec(self.axis.name, 0, parts=self.parts)
        return {"weight": spec, "bias": spec} if self.bias else {"weight": spec}


class ColumnLinearResiduals(LinearResiduals):
    """The fields of `LinearResiduals`, of this rank: x [*, I], weight [O/n, I]."""


class ColumnLinearPending(Pending):
    x: Tensor = saved("[*, I]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",))
    rows: Tensor = saved("[n *, I]", needed_by=WGRAD, of=("params.weight",))  # of all ranks, if siblings gathered them
    dy: Tensor = saved("[*, O/n]", alias="dy", needed_by=WGRAD)
    sums: Tensor | None = saved("[P, O/n]", needed_by=WGRAD, of=("params.bias",))  # of dy over blocks of rows, from a rule


class ColumnLayer(LinearLayer):
    """How a column layer sends dx, in high precision or in low."""

    def overlaps(self, cfg: Any) -> bool:
        return bool(cfg.overlap != "none" and cfg.axis.size > 1)

    def start_dx(self, dys: tuple[Tensor, ...], cfg: Any, product: Callable[[tuple[Tensor, ...]], Tensor]) -> Tensor:
        if not by_ring(cfg):
            return start_sum(product(dys), cfg)
        return scattered_products(list(zip(*[dy.chunk(cfg.axis.size) for dy in dys], strict=True)), cfg.axis, product)

    def wait_dx(self, dx: Tensor, cfg: Any) -> Tensor:
        return dx if by_ring(cfg) else comm.wait(dx, cfg.axis)


class _Layer(ColumnLayer):
    def y_is_product(self, cfg: Any) -> bool:
        return not by_ring(cfg)

    def dx_is_product(self, cfg: Any) -> bool:
        return False  # it is a sum over the ranks

    def rows(self, x: Tensor, cfg: Any) -> Tensor:
        return comm.gather(x, rows_axis(cfg))

    def y_products(self, x: Tensor, cfg: Any, products: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if not by_ring(cfg):
            return products(self.rows(x, cfg))
        found, _ = gathered_products(x, cfg.axis, products)
        return tuple([torch.cat(ys) for ys in zip(*found, strict=True)])

    def start_x(self, residuals: Any, dy: Tensor, cfg: Any) -> Any:
        return comm.start_gather(residuals.x, cfg.axis) if cfg.sequence_parallel else None

    def wait_x(self, sent: Any, residuals: Any, cfg: Any) -> Any:
        return comm.wait(sent, cfg.axis)

    def dw_rows(self, pending: Any, cfg: Any) -> Tensor:
        return self.rows(pending.x, cfg) if pending.rows is None else pending.rows  # type: ignore[no-any-return]

    def prepares(self, cfg: Any) -> Hashable:
        return (cfg.axis, by_ring(cfg)) if cfg.sequence_parallel and cfg.axis.size > 1 else None

    def joins(self, cfg: Any) -> Hashable:
        return None if cfg.axis.size == 1 else (cfg.axis, cfg.sequence_parallel, by_ring(cfg))

    def pending(self, residuals: Any, dy: Tensor, rows: Tensor, cfg: Any) -> Any:
        return ColumnLinearPending.keep(cfg, residuals.needs, x=residuals.x, rows=None, dy=dy)

    def shared(self, pending: Any, cfg: Any) -> dict[str, Any] | None:
        return {"rows": self.rows(pending.x, cfg)} if cfg.sequence_parallel and pending.rows is None else None

    def kept(self, cfg: Any, needs: Needs, x: Tensor, weight: Tensor, y: Tensor) -> Any:
        return ColumnLinearResiduals.keep(cfg, needs, x=x, weight=weight, y_shape=y.shape, dtype=y.dtype)


_layer = _Layer()


@init_of(ColumnLinearConfig)
def column_linear_init(
    cfg: ColumnLinearConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LinearParams:
    """This rank's rows of the params that `linear_init` draws with the same key, on every mesh."""
    return init_linear(cfg, key, device, dtype)


@forward(ColumnLinearConfig, LinearParams)
def column_linear_fwd(
    params: LinearParams, x: Tensor, cfg: ColumnLinearConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ColumnLinearResiduals | None]:
    """`y_r = x w_r^T + b_r`. x: [m, *, I], of n m in all (without `sequence_parallel`: [*, I]) -> y: [n m, *, O/n]. Raises
    `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    check_x("column_linear_fwd", x, cfg.in_features, cfg.sequence_parallel)
    check_params("column_linear_fwd", params, cfg.weight_shape, cfg.bias_shape, x)
    weight, bias = params.weight, params.bias
    (y,) = _layer.y_products(x, cfg, lambda rows: (kernels.linear_fwd(rows, weight, bias),))
    return y, _layer.kept(cfg, needs, x, weight, y)


@dgrad_of(ColumnLinearResiduals)
def column_linear_dgrad(
    residuals: ColumnLinearResiduals, dy: Tensor, cfg: ColumnLinearConfig, sums: Tensor | None = None
) -> tuple[Tensor, ColumnLinearPending | None]:
    """dy: [n m, *, O/n] -> dx: [m, *, I] (without `sequence_parallel`: [*, I]), and the pending dw: dy and x, aliases."""
    x, weight, needs = residuals.x, residuals.weight, residuals.needs
    check_tensor("column_linear_dgrad", "dy", dy, residuals.y_shape, residuals.dtype, weight if x is None else x)
    dx = _layer.wait_dx(_start_dx(dy, weight, cfg), cfg) if needs.x else NO_GRADIENT
    return dx, ColumnLinearPending.keep(cfg, needs, x=x, rows=None, dy=dy, sums=sums)


@wgrad_of(ColumnLinearPending, LinearParams)
def column_linear_wgrad(pending: ColumnLinearPending, cfg: ColumnLinearConfig, *, into: LinearParams | None = None) -> LinearParams:
    """Gathers x, then `dw_r = dy_r^T x`, `db_r = sum of dy_r`; added to `into` if given."""
    x, dy, bias = pending.x, pending.dy, wants_bias(cfg, pending.needs)
    if into is not None:  # before anything is sent
        check_linear_into("column_linear_wgrad", dy, x, bias, into)
    rows = None if x is None else _layer.dw_rows(pending, cfg)
    return linear_gradients("column_linear_wgrad", dy, rows, bias, into, pending.sums)


def column_linear_products(pending: ColumnLinearPending, cfg: ColumnLinearConfig, *, into: LinearParams) -> list[Product]:
    """dw and db as a product to run later, with x of all ranks, which is gathered then."""
    rows = None if pending.x is None else functools.partial(_layer.dw_rows, pending, cfg)
    return products_of("column_linear_wgrad", pending, rows, wants_bias(cfg, pending.needs), into)


@bwd_of(ColumnLinearResiduals, LinearParams)
def column_linear_bwd(
    residuals: ColumnLinearResiduals, dy: Tensor, cfg: ColumnLinearConfig, *, into: LinearParams | None = None
) -> tuple[LinearParams, Tensor]:
    """The whole backward, in the order that `cfg.overlap` says. Returns `(dparams, dx)`."""
    x, weight, needs, late = residuals.x, residuals.weight, residuals.needs, cfg.overlap != "none"
    check_tensor("column_linear_bwd", "dy", dy, residuals.y_shape, residuals.dtype, weight if x is None else x)
    bias = wants_bias(cfg, needs)
    if into is not None:  # before anything is sent
        check_linear_into("column_linear_bwd", dy, x, bias, into)
    sent = _layer.start_x(residuals, dy, cfg) if late and x is not None else None
    dx = _start_dx(dy, weight, cfg) if needs.x else NO_GRADIENT
    dx = _layer.wait_dx(dx, cfg) if needs.x and not late else dx
    if x is not None:
        x = _layer.rows(x, cfg) if sent is None else _layer.wait_x(sent, residuals, cfg)
    dparams = linear_gradients("column_linear_bwd", dy, x, bias, into)
    return dparams, _layer.wait_dx(dx, cfg) if needs.x and late else dx


def _start_dx(dy: Tensor, weight: Tensor, cfg: ColumnLinearConfig) -> Tensor:
    return _layer.start_dx((dy,), cfg, lambda dys: kernels.linear_dgrad(dys[0], weight))


column_linear = make_op(
    "column_linear",
    ColumnLinearConfig,
    init=column_linear_init,
    fwd=column_linear_fwd,
    dgrad=column_linear_dgrad,
    wgrad=column_linear_wgrad,
    bwd=column_linear_bwd,
    products=column_linear_products,
    layer=_layer,
)
