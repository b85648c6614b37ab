"""`low_rank` for groups of rows, each with factors of its own, as a LoRA adapter adds it to the layers of experts.

    y_n = c x_n a_e^T b_e^T        e: the group of row n, offsets[e] <= n < offsets[e + 1]

    t_n = c dy_n b_e        da_e = t^T x, db_e = c dy^T (x a_e^T), over the rows of e        dx_n = t_n a_e

x: `(rows, offsets)`, [N, I] and [E + 1], or with `gathered` `(x, offsets, order, place)`, as for `grouped_linear`; y, dy: [N, O];
a: [E, R, I]; b: [E, O, R]; all of one float dtype. Rows in no group have y and dx 0. Kept: x, a, b, offsets and indices, aliases,
and c x a^T: [N, R]. LoRA: arXiv 2106.09685.

>>> import torch
>>> from funcops import random
>>> from funcops.library.ops.grouped_low_rank import GroupedLowRankConfig, grouped_low_rank
>>> cfg = GroupedLowRankConfig(8, 4, 2, experts=3)
>>> params, offsets = grouped_low_rank.init(cfg, key=random.key(0)), torch.tensor([0, 1, 1, 5], dtype=torch.int32)
>>> y, residuals = grouped_low_rank.fwd(params, (torch.ones(5, 8), offsets), cfg)
>>> params.a.shape, y.shape, residuals.u.shape
(torch.Size([3, 2, 8]), torch.Size([5, 4]), torch.Size([5, 2]))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.contract.accumulators import accumulate, check_into
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Inputs, Pending, Residuals, saved, static
from funcops.engine.errors import check, require, require_count
from funcops.engine.trees import tree_map
from funcops.library.kernels import pointwise
from funcops.library.kernels.grouped import grouped_product, grouped_wgrad
from funcops.library.kernels.routing import gather_rows
from funcops.library.ops.grouped_linear import GroupedLinearConfig, grouped_inputs
from funcops.library.ops.grouped_qlinear import GroupedQLinearConfig
from funcops.library.ops.low_rank import ADAPTERS, Adapter, LowRankConfig, LowRankParams, low_rank_init


@config
class GroupedLowRankConfig(LowRankConfig):
    """The fields of `LowRankConfig`, without dropout; `experts` (E); `gathered`: as in `GroupedLinearConfig`."""

    experts: int
    gathered: bool = False
    weighted = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("GroupedLowRankConfig", experts=self.experts)
        wanted = "0 beside experts, whose rows and so their masks depend on the routing"
        require(self.dropout == 0.0, "GroupedLowRankConfig", "dropout", wanted, self.dropout)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:  # type: ignore[override]
        return {name: (self.experts, *shape) for name, shape in super().shapes.items()}


OF_A, OF_B = ("params.a",), ("params.b",)


class GroupedLowRankResiduals(Residuals, static=("inputs", "shape", "dtype")):
    x: Tensor = saved("[N, I] or [*, I]", alias="x.0", needed_by=WGRAD, of=OF_A)
    u: Tensor = saved("[N, R]", needed_by=WGRAD, of=OF_B)
    a: Tensor = saved("[E, R, I]", alias="params.a", needed_by=DGRAD, of=("x.0",))
    b: Tensor = saved("[E, O, R]", alias="params.b", needed_by=DGRAD | WGRAD, of=("x.0", *OF_A))
    offsets: Tensor = saved("[E + 1]", alias="x.1", needed_by=DGRAD | WGRAD, of=("x.0", *OF_A, *OF_B))
    order: Tensor | None = saved("[N]", alias="x.2", needed_by=WGRAD, of=OF_A)
    place: Tensor | None = saved("[*, K]", alias="x.3", needed_by=DGRAD, of=("x.0",))
    y_shape: torch.Size = static()
    choices: int = static()  # K; 1 if not gathered


class GroupedLowRankPending(Pending):
    x: Tensor = saved("[N, I] or [*, I]", alias="residuals.x", needed_by=WGRAD, of=OF_A)
    t: Tensor = saved("[N, R]", needed_by=WGRAD, of=OF_A)
    dy: Tensor = saved("[N, O]", alias="dy", needed_by=WGRAD, of=OF_B)
    u: Tensor = saved("[N, R]", alias="residuals.u", needed_by=WGRAD, of=OF_B)
    offsets: Tensor = saved("[E + 1]", alias="residuals.offsets", needed_by=WGRAD)
    order: Tensor | None = saved("[N]", alias="residuals.order", needed_by=WGRAD, of=OF_A)
    choices: int = static()


@init_of(GroupedLowRankConfig)
def grouped_low_rank_init(
    cfg: GroupedLowRankConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LowRankParams:
    """Each group's factors as `low_rank_init` draws them: b is zero, and so is y."""
    plain = LowRankConfig(cfg.in_features, cfg.out_features, cfg.rank)
    keys = [None] * cfg.experts if key is None else random.split(key, cfg.experts)
    made = [low_rank_init(plain, key=one, device=device, dtype=dtype) for one in keys]
    return tree_map(lambda *each: torch.stack(each), *made)  # type: ignore[no-any-return]


@forward(GroupedLowRankConfig, LowRankParams)
def grouped_low_rank_fwd(
    params: LowRankParams, x: tuple[Tensor, ...], cfg: GroupedLowRankConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, GroupedLowRankResiduals | None]:
    """x: `(rows, offsets)` or `(x, offsets, order, place)` -> y: [N, O]. Raises `ValueError` or `TypeError` for a wrong shape,
    dtype or device."""
    where, (a, b) = "grouped_low_rank_fwd", (params.a, params.b)
    rows, offsets, order, place = grouped_inputs(where, x, cfg)
    for name, shape in cfg.shapes.items():
        check(where, f"params.{name}", getattr(params, name), shape, rows.dtype, rows)
    choices = 1 if place is None else place.shape[-1]
    u = grouped_product(rows.reshape(-1, cfg.in_features), a, None, offsets, order, choices, None, True)
    u = pointwise.scale(u, cfg.scale)
    y = grouped_product(u, b, None, offsets, None, 1, None, True)
    kept: Any = dict(x=rows, u=u, a=a, b=b, offsets=offsets, order=order, place=place, y_shape=y.shape, choices=choices)
    return y, GroupedLowRankResiduals.keep(cfg, needs, **kept, inputs=Inputs.of(x), shape=rows.shape, dtype=y.dtype)


@dgrad_of(GroupedLowRankResiduals)
def grouped_low_rank_dgrad(
    residuals: GroupedLowRankResiduals, dy: Tensor, cfg: GroupedLowRankConfig
) -> tuple[tuple[Tensor | None, ...], GroupedLowRankPending | None]:
    """`dx_n = t_n a_e`, by token if x was gathered, and the pending weight gradients. dy: [N, O]."""
    r, t, dx = residuals, NO_GRADIENT, NO_GRADIENT
    check("grouped_low_rank_dgrad", "dy", dy, r.y_shape, r.dtype, r.offsets)
    if r.b is not None:  # dx or da is computed from t
        t = pointwise.scale(grouped_product(dy, r.b, None, r.offsets, None, 1, None, False), cfg.scale)
    if r.needs.input(0):
        dx = grouped_product(t, r.a, None, r.offsets, None, 1, None, False)
        if r.place is not None:
            dx = gather_rows(dx, r.place.reshape(-1, r.place.shape[-1]), None).view(r.shape)
    given: Any = dict(x=r.x, t=t, dy=dy, u=r.u, offsets=r.offsets, order=r.order, choices=r.choices)
    return r.inputs.make((dx, None, None, None)[: r.inputs.parts]), GroupedLowRankPending.keep(cfg, r.needs, **given)


@wgrad_of(GroupedLowRankPending, LowRankParams)
def grouped_low_rank_wgrad(
    pending: GroupedLowRankPending, cfg: GroupedLowRankConfig, *, into: LowRankParams | None = None
) -> LowRankParams:
    """`da_e = t^T x`, `db_e = dy^T u`, 0 for a group without rows; added to `into` if given."""
    where, p, made = "grouped_low_rank_wgrad", pending, LowRankParams(NO_GRADIENT, NO_GRADIENT)
    if into is not None:
        like = {
            name: None if t is None else t.new_empty(()).expand(cfg.shapes[name]) for name, t in zip("ab", (p.t, p.u), strict=True)
        }
        check_into(where, into, LowRankParams(**like))  # type: ignore[arg-type]
    if p.t is not None:
        made.a = grouped_wgrad(p.t, p.x.reshape(-1, cfg.in_features), p.offsets, None, p.order, p.choices, None, False)[0]
    if p.u is not None:
        made.b = grouped_wgrad(p.dy, p.u, p.offsets, None, None, 1, None, False)[0]
    return made if into is None else accumulate(where, made, into)


grouped_low_rank = make_op(
    "grouped_low_rank",
    GroupedLowRankConfig,
    init=grouped_low_rank_init,
    fwd=grouped_low_rank_fwd,
    dgrad=grouped_low_rank_dgrad,
    wgrad=grouped_low_rank_wgrad,
)


def _beside(cfg: Any, rank: int, scale: float, dropout: float) -> tuple[Op, LowRankConfig]:
    linear: GroupedLinearConfig = cfg if cfg.low_recipe is None else cfg.linear
    require(linear.stacked, "GroupedLowRankConfig", "cfg.stacked", "True (its factors are stacked, too)", linear.stacked)
    sizes, shared = (cfg.in_features, cfg.out_features, rank), dict(experts=cfg.experts, gathered=cfg.gathered)
    return grouped_low_rank, GroupedLowRankConfig(*sizes, scale=scale, dropout=dropout, **shared)


ADAPTERS |= dict.fromkeys((GroupedLinearConfig, GroupedQLinearConfig), Adapter(_beside))
