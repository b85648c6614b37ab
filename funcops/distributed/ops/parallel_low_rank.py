"""The adapter of a linear layer with sharded features, `column_linear` or `row_linear`.

    side="column"   u = c x a^T          y_r = u b_r^T        b_r: [O/n, R], a rank's rows
                    t = c sum over r of dy_r b_r              dx = t a          da = t^T x      db_r = dy_r^T u
    side="row"      u = c sum over r of x_r a_r^T             y = u b^T         a_r: [R, I/n], a rank's columns
                    t = c dy b           dx_r = t a_r         da_r = t^T x_r    db = dy^T u

With dropout x is multiplied by a mask, as in `low_rank`, and so is dx: ranks draw their parts of one mask.

c = cfg.scale; all of one float dtype. Only u and t are sent over the axis, R numbers a row. With sequence parallelism rows are
sharded where features are not, as in the layer: u and t are gathered for the side that has all rows, and their sums are
scattered. Without, all ranks have the same rows. The gradient of the sharded leaf is complete either way; the other leaf's gradient
is over a rank's own rows or, without sequence parallelism, complete.

Kept: x, a and b, aliases, and u of this rank's rows, [*, R]. `init` draws this rank's part of the params that `low_rank_init`
draws. LoRA: arXiv 2106.09685; sharded as in PEFT's `LoraParallelLinear` (peft/tuners/lora/tp_layer.py).

>>> import torch
>>> from funcops import dist, random
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.ParallelLowRankConfig(8, 16, 2, axis=mesh["tp"], side="column")
...     params = dist.parallel_low_rank_init(cfg, key=random.key(0))
...     y, residuals = dist.parallel_low_rank_fwd(params, torch.ones(3, 8), cfg)
...     dparams, dx = dist.parallel_low_rank_bwd(residuals, torch.ones(6, 8), cfg)
...     return y.shape, params.a.shape, params.b.shape, dx.shape
...
>>> run_ranks({"tp": 2}, each)[1]
(torch.Size([6, 8]), torch.Size([2, 8]), torch.Size([8, 2]), torch.Size([3, 8]))
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_divides, check_tensor, require_axis, require_shares
from funcops.distributed.init import init_part
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._linear import check_parts, check_x
from funcops.distributed.ops.column_linear import ColumnLinearConfig
from funcops.distributed.ops.column_qlinear import ColumnQLinearConfig
from funcops.distributed.ops.row_linear import RowLinearConfig
from funcops.distributed.ops.row_qlinear import RowQLinearConfig
from funcops.distributed.ops.sharded_dropout import Shared
from funcops.distributed.specs import Spec
from funcops.engine.contract.by_config import ByConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Inputs, Pending, Residuals, saved, static
from funcops.engine.errors import describe, require
from funcops.library.kernels import linear as products
from funcops.library.kernels import pointwise
from funcops.library.ops._tuples import require_tuple
from funcops.library.ops.dropout import check_shared
from funcops.library.ops.linear_wgrads import Product
from funcops.library.ops.low_rank import (
    ADAPTERS,
    Adapter,
    LowRankConfig,
    LowRankParams,
    dropped,
    low_rank_gradients,
    low_rank_init,
    masked,
    products_of,
)

__all__ = ["ParallelLowRankConfig", "ParallelLowRankPending", "ParallelLowRankResiduals"]
__all__ += ["parallel_low_rank", "parallel_low_rank_bwd", "parallel_low_rank_dgrad"]
__all__ += ["parallel_low_rank_fwd", "parallel_low_rank_init", "parallel_low_rank_wgrad"]


@config
class ParallelLowRankConfig(LowRankConfig):
    """The fields of `LowRankConfig` for the whole adapter. `side`: "column" if outputs are sharded over `axis`, "row" if inputs
    are. `sequence_parallel` and, for a column, `parts`: as in the layer."""

    axis: Axis
    side: str
    sequence_parallel: bool = True
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        where = "ParallelLowRankConfig"
        require_axis(where, self.axis)
        require(self.side in ("column", "row"), where, "side", "'column' or 'row'", repr(self.side))
        object.__setattr__(self, "shards_features", self.side == "column")
        right = isinstance(self.shared, tuple) and all(type(one) is Shared for one in self.shared)
        require(right, where, "shared", "a tuple of Shared", describe(self.shared))
        shared = "out_features" if self.side == "column" else "in_features"
        require_shares(where, shared, getattr(self, shared), self.axis)
        check_parts(self)
        require(not self.parts or self.side == "column", where, "parts", "() for a row, whose outputs are not sharded", self.parts)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of this rank's part of each leaf."""
        n = self.axis.size
        i, o = (self.in_features, self.out_features // n) if self.shards_features else (self.in_features // n, self.out_features)
        return {"a": (self.rank, i), "b": (o, self.rank)}

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the sharded params, by path."""
        return {"b": Spec(self.axis.name, 0, parts=self.parts)} if self.shards_features else {"a": Spec(self.axis.name, 1)}

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.shapes["a"][1], self.shapes["b"][0]


class ParallelLowRankResiduals(Residuals, static=("dtype",)):
    x: Tensor = saved("[*, I or I/n]", alias="x", needed_by=WGRAD, of=("params.a",))
    u: Tensor = saved("[*, R]", needed_by=WGRAD, of=("params.b",))
    a: Tensor = saved("[R, I or I/n]", alias="params.a", needed_by=DGRAD)
    b: Tensor = saved("[O/n or O, R]", alias="params.b", needed_by=DGRAD | WGRAD, of=("x", "params.a"))
    y_shape: torch.Size = static()


class ParallelLowRankDropoutResiduals(Residuals, static=("inputs", "dtype")):
    x: Tensor = saved("[*, I or I/n]", alias="x.0", needed_by=WGRAD, of=("params.a",))
    u: Tensor = saved("[*, R]", needed_by=WGRAD, of=("params.b",))
    a: Tensor = saved("[R, I or I/n]", alias="params.a", needed_by=DGRAD, of=("x.0",))
    b: Tensor = saved("[O/n or O, R]", alias="params.b", needed_by=DGRAD | WGRAD, of=("x.0", "params.a"))
    key: Tensor = saved("[2]", alias="x.1", needed_by=DGRAD | WGRAD, of=("x.0", "params.a"))
    y_shape: torch.Size = static()


Kept = ParallelLowRankResiduals | ParallelLowRankDropoutResiduals


def _keyed(cfg: ParallelLowRankConfig) -> bool:
    return cfg.draws_mask


def _kept(cfg: ParallelLowRankConfig) -> type[Kept]:
    return ParallelLowRankDropoutResiduals if cfg.draws_mask else ParallelLowRankResiduals


class ParallelLowRankPending(Pending):
    x: Tensor = saved("[*, I or I/n]", alias="residuals.x", needed_by=WGRAD, of=("params.a",))
    t: Tensor = saved("[*, R]", needed_by=WGRAD, of=("params.a",))
    key: Tensor = saved("[2]", alias="residuals.key", needed_by=WGRAD, of=("params.a",))
    dy: Tensor = saved("[*, O/n or O]", alias="dy", needed_by=WGRAD, of=("params.b",))
    u: Tensor = saved("[*, R]", alias="residuals.u", needed_by=WGRAD, of=("params.b",))


@init_of(ParallelLowRankConfig)
def parallel_low_rank_init(
    cfg: ParallelLowRankConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LowRankParams:
    """This rank's part of the params that `low_rank_init` draws with the same key, on every mesh."""
    plain = LowRankConfig(cfg.in_features, cfg.out_features, cfg.rank)
    return init_part(cfg, lambda: low_rank_init(plain, key=key, device=device, dtype=dtype))  # type: ignore[no-any-return]


@forward(ParallelLowRankConfig, LowRankParams)
def parallel_low_rank_fwd(
    params: LowRankParams, x: Tensor | tuple[Tensor, Tensor], cfg: ParallelLowRankConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, Kept | None]:
    """x: [m, *, I] -> y: [n m, *, O/n] for a column; [n m, *, I/n] -> [m, *, O] for a row; without `sequence_parallel` both have
    all rows. With dropout x is `(x, key)`. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    rows: Any = x
    where, more = "parallel_low_rank_fwd", {}
    if cfg.draws_mask:
        rows, key = require_tuple(where, x, "x", "key")
        check_tensor(where, "x.1 (the key)", key, (2,), torch.int64, rows)
        more = {"key": key, "inputs": Inputs.of((rows, key))}
    check_x(where, rows, cfg.shapes["a"][1], cfg.sequence_parallel)
    for name, shape in cfg.shapes.items():
        check_tensor(where, f"params.{name}", getattr(params, name), shape, rows.dtype, rows)
    if cfg.sequence_parallel and not cfg.shards_features:
        check_divides(where, "x", rows, 0, cfg.axis)
    if more:
        check_shared(where, rows, cfg.shared)
    u = pointwise.scale(products.linear_fwd(masked(rows, more["key"], cfg) if more else rows, params.a, None), cfg.scale)
    u = u if cfg.shards_features else _summed(u, cfg)
    y = products.linear_fwd(_rows(u, cfg) if cfg.shards_features else u, params.b, None)
    return y, _kept(cfg).keep(cfg, needs, x=rows, u=u, a=params.a, b=params.b, y_shape=y.shape, dtype=y.dtype, **more)


@dgrad_of(ByConfig(ParallelLowRankConfig, _kept, (ParallelLowRankResiduals, ParallelLowRankDropoutResiduals)))
def parallel_low_rank_dgrad(residuals: Kept, dy: Tensor, cfg: ParallelLowRankConfig) -> tuple[Any, ParallelLowRankPending | None]:
    """dy: like y -> dx: like x, or with dropout `(dx, None)`, and the pending weight gradients: x, t, dy and u; t is new."""
    a, b, needs, t = residuals.a, residuals.b, residuals.needs, NO_GRADIENT
    check_tensor("parallel_low_rank_dgrad", "dy", dy, residuals.y_shape, residuals.dtype, residuals.u if b is None else b)
    if b is not None:  # dx or da is computed from t
        t = pointwise.scale(products.linear_dgrad(dy, b), cfg.scale)
        t = _summed(t, cfg) if cfg.shards_features else _rows(t, cfg)
    if isinstance(residuals, ParallelLowRankResiduals):
        dx: Any = products.linear_dgrad(t, a) if needs.x else NO_GRADIENT
        return dx, ParallelLowRankPending.keep(cfg, needs, x=residuals.x, t=t, key=None, dy=dy, u=residuals.u)
    key = residuals.key
    dx = masked(products.linear_dgrad(t, a), key, cfg) if needs.input(0) else NO_GRADIENT
    pending = ParallelLowRankPending.keep(cfg, needs, x=residuals.x, t=t, key=key, dy=dy, u=residuals.u)
    return residuals.inputs.make((dx, None)), pending


@wgrad_of(ParallelLowRankPending, LowRankParams)
def parallel_low_rank_wgrad(
    pending: ParallelLowRankPending, cfg: ParallelLowRankConfig, *, into: LowRankParams | None = None
) -> LowRankParams:
    """`da = t^T x`, `db = dy^T u`, for a column with u of all rows, which is gathered once more; added to `into` if given."""
    return low_rank_gradients("parallel_low_rank_wgrad", pending, cfg, into, _factors)


def parallel_low_rank_products(
    pending: ParallelLowRankPending, cfg: ParallelLowRankConfig, *, into: LowRankParams
) -> list[Product]:
    """da and db as products to run later."""
    return products_of("parallel_low_rank_wgrad", pending, cfg, into, _factors)


def _factors(pending: ParallelLowRankPending, cfg: ParallelLowRankConfig, name: str) -> tuple[Tensor, Tensor]:
    if name == "a":
        return pending.t, dropped(pending, cfg)
    return pending.dy, _rows(pending.u, cfg) if cfg.shards_features else pending.u


def _rows(t: Tensor, cfg: ParallelLowRankConfig) -> Tensor:
    """The rows of all ranks."""
    return comm.gather(t, cfg.axis) if cfg.sequence_parallel else t


def _summed(t: Tensor, cfg: ParallelLowRankConfig) -> Tensor:
    """The sum over the ranks, for this rank's rows."""
    return comm.scatter_sum(t, cfg.axis) if cfg.sequence_parallel else comm.sum_over(t, cfg.axis)


parallel_low_rank = make_op(
    "parallel_low_rank",
    ParallelLowRankConfig,
    init=parallel_low_rank_init,
    fwd=parallel_low_rank_fwd,
    dgrad=parallel_low_rank_dgrad,
    wgrad=parallel_low_rank_wgrad,
    keyed=_keyed,
    products=parallel_low_rank_products,
)
parallel_low_rank_bwd = both_halves(parallel_low_rank, parallel_low_rank_dgrad, parallel_low_rank_wgrad)


def _beside(side: str, cfg: Any, rank: int, scale: float, dropout: float) -> tuple[Op, ParallelLowRankConfig]:
    wanted = "0 beside a layer over ranks (call with_lora before dist.parallel, which knows how x is sharded)"
    require(dropout == 0.0, "ParallelLowRankConfig", "dropout", wanted, dropout)
    how: Any = dict(side=side, axis=cfg.axis, sequence_parallel=cfg.sequence_parallel, parts=cfg.parts if side == "column" else ())
    return parallel_low_rank, ParallelLowRankConfig(cfg.in_features, cfg.out_features, rank, scale=scale, **how)


ADAPTERS |= dict.fromkeys((ColumnLinearConfig, ColumnQLinearConfig), Adapter(functools.partial(_beside, "column")))
ADAPTERS |= dict.fromkeys((RowLinearConfig, RowQLinearConfig), Adapter(functools.partial(_beside, "row")))
