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

from funcops.distributed import comm
from funcops.distributed.ops._linear import DenseOverAxis, OverAxis, OverAxisConfig, by_ring, check_parts, rows_axis, start_sum
from funcops.distributed.ring import gathered_products, scattered_products
from funcops.distributed.specs import Spec
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config
from funcops.engine.contract.schema import NO_GRADIENT, WGRAD, Pending, saved
from funcops.library.kernels import linear as kernels
from funcops.library.ops._layer_op import layer_op
from funcops.library.ops.linear import LinearParams, LinearResiduals, check_linear_into, linear_gradients, products_of, wants_bias
from funcops.library.ops.linear_wgrads import Product

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
    def reruns(self) -> bool:  # type: ignore[override]
        return not self.sequence_parallel and self.low_recipe is None  # else the forward sends x, or an amax

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


class ColumnLayer(OverAxis):
    """How a column layer sends x and dx, in high precision or in low."""

    def overlaps(self, cfg: Any) -> bool:
        return bool(cfg.overlap != "none" and cfg.axis.size > 1)

    def joins(self, cfg: Any) -> Hashable:
        return None if cfg.axis.size == 1 else (cfg.axis, cfg.sequence_parallel, by_ring(cfg), cfg.low_recipe)

    def start_dx(self, dys: tuple[Tensor, ...], cfg: Any, product: Callable[[tuple[Tensor, ...]], Tensor]) -> Tensor:
        if not by_ring(cfg):
            return start_sum(product(dys), cfg)
        return scattered_products(list(zip(*[dy.chunk(cfg.axis.size) for dy in dys], strict=True)), cfg.axis, product)

    def wait_dx(self, dx: Tensor, cfg: Any) -> Tensor:
        return dx if by_ring(cfg) else comm.wait(dx, cfg.axis)

    def send_x(self, where: str, x: Any, dy: Any, cfg: Any) -> Any:
        """Begin to gather x in the form that dw reads."""
        return comm.start_gather(x, rows_axis(cfg))

    def arrived_x(self, sent: Any, x: Any, cfg: Any) -> Any:
        """The gathered x in the form that dw reads."""
        return comm.wait(sent, rows_axis(cfg))

    def start_x(self, residuals: Any, dy: Tensor, cfg: Any) -> Any:
        return self.send_x(f"{self.name}_bwd", residuals.x, dy, cfg) if cfg.sequence_parallel else None

    def wait_x(self, sent: Any, residuals: Any, cfg: Any) -> Any:
        return self.arrived_x(sent, residuals.x, cfg)

    def x_of_all(self, where: str, pending: Any, cfg: Any, sent: Any = None) -> Any:
        """The x that dw reads. `sent`: x, if it is in flight already."""
        if pending.rows is not None:
            return pending.rows
        return self.arrived_x(self.send_x(where, pending.x, pending.dy, cfg) if sent is None else sent, pending.x, cfg)

    def dw_rows(self, pending: Any, cfg: Any) -> Any:
        return self.x_of_all(f"{self.name}_wgrad", pending, cfg)

    def shared(self, pending: Any, cfg: Any) -> dict[str, Any] | None:
        return {"rows": self.dw_rows(pending, cfg)} if cfg.sequence_parallel and pending.rows is None else None

    def bwd(self, residuals: Any, dy: Tensor, cfg: Any, into: LinearParams | None) -> tuple[LinearParams, Tensor]:
        """The whole backward, in the order that `cfg.overlap` says."""
        where, late = f"{self.name}_bwd", cfg.overlap != "none"
        row, pending = self.read_dy(where, residuals, dy, cfg, into=into)
        early = late and pending is not None and pending.x is not None
        sent = self.send_x(where, pending.x, pending.dy, cfg) if early else None
        dx = NO_GRADIENT if row is None else self.dx_of(row, residuals, cfg)
        dx = dx if row is None or late else self.wait_dx(dx, cfg)
        nothing = LinearParams(NO_GRADIENT, None) if into is None else into
        dparams = nothing if pending is None else self.gradients(where, pending, cfg, into, sent)
        return dparams, self.wait_dx(dx, cfg) if late and row is not None else dx


class _Layer(DenseOverAxis, ColumnLayer):
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

    def prepares(self, cfg: Any) -> Hashable:
        return (cfg.axis, by_ring(cfg)) if cfg.sequence_parallel and cfg.axis.size > 1 else None

    def run(self, params: LinearParams, x: Tensor, cfg: Any, needs: Needs) -> tuple[Tensor, Any]:
        weight, bias = params.weight, params.bias
        (y,) = self.y_products(x, cfg, lambda rows: (kernels.linear_fwd(rows, weight, bias),))
        return y, self.kept(cfg, needs, x, weight, y)

    def pending(self, residuals: Any, dy: Tensor, rows: Tensor, cfg: Any, sums: Tensor | None = None) -> Any:
        return ColumnLinearPending.keep(cfg, residuals.needs, x=residuals.x, rows=None, dy=dy, sums=sums)

    def read_dy(
        self, where: str, residuals: Any, dy: Tensor, cfg: Any, sums: Tensor | None = None, into: LinearParams | None = None
    ) -> tuple[Tensor | None, Any]:
        self.check_backward(where, residuals, dy, cfg, into)
        return dy if residuals.needs.x else None, self.pending(residuals, dy, dy, cfg, sums)

    def gradients(self, where: str, pending: Any, cfg: Any, into: LinearParams | None, sent: Any = None) -> LinearParams:
        x, dy, bias = pending.x, pending.dy, wants_bias(cfg, pending.needs)
        if into is not None:  # before anything is sent
            check_linear_into(where, dy, x, bias, into)
        rows = None if x is None else self.x_of_all(where, pending, cfg, sent)
        return linear_gradients(where, dy, rows, bias, into, pending.sums)

    def products(self, pending: Any, cfg: Any, *, into: LinearParams) -> list[Product]:
        """dw and db as a product to run later, with x of all ranks, which is gathered then."""
        rows = None if pending.x is None else functools.partial(self.dw_rows, pending, cfg)
        return products_of(f"{self.name}_wgrad", pending, rows, wants_bias(cfg, pending.needs), into)


column_linear, column_linear_init, column_linear_fwd, column_linear_bwd, column_linear_dgrad, column_linear_wgrad = layer_op(
    _Layer,
    "column_linear",
    ColumnLinearConfig,
    ColumnLinearResiduals,
    ColumnLinearPending,
    init="This rank's rows of the params that `linear_init` draws with the same key, on every mesh.",
    fwd="""`y_r = x w_r^T + b_r`. x: [m, *, I], of n m in all (without `sequence_parallel`: [*, I]) -> y: [n m, *, O/n]. Raises
    `ValueError` or `TypeError` for a wrong shape, dtype or device.""",
    dgrad="dy: [n m, *, O/n] -> dx: [m, *, I] (without `sequence_parallel`: [*, I]), and the pending dw: dy and x, aliases.",
    wgrad="Gathers x, then `dw_r = dy_r^T x`, `db_r = sum of dy_r`; added to `into` if given.",
    bwd="The whole backward, in the order that `cfg.overlap` says. Returns `(dparams, dx)`.",
)
