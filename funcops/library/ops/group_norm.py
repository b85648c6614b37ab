"""GroupNorm: channels in G groups, each normalised over its channels and positions.

    m = mean(x)    r = (mean((x - m)^2) + eps)^(-1/2)    n = (x - m) * r    y = n * w + b        means over a group

With g = dy * w:

    dx = r * (g - mean(g) - n * mean(g n))    dw = sum over batches and positions of dy * n    db = the same sum of dy

x, y, dy, dx: [B, C, *S] of one float dtype; w, b: [C], of x's dtype or float32; m, r: [B, G], float32 (float64 for float64).
Kept: x and w, both aliases, m and r: 8 bytes a group. dgrad returns dw and db as partial sums [P, C] each. If only db is requested,
only the shape is kept. arXiv:1803.08494.

>>> import torch
>>> from funcops import GroupNormConfig, GroupNormParams, group_norm_bwd, group_norm_fwd
>>> cfg, params = GroupNormConfig(2, 4), GroupNormParams(torch.ones(4), torch.zeros(4))
>>> y, residuals = group_norm_fwd(params, torch.ones(1, 4, 3, 3), cfg)
>>> residuals.mean
tensor([[1., 1.]])
>>> dparams, dx = group_norm_bwd(residuals, torch.ones_like(y), cfg)
>>> dparams.bias, dx.shape
(tensor([9., 9., 9., 9.]), torch.Size([1, 4, 3, 3]))
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op, recompute_of, wgrad_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, RECOMPUTE, WGRAD, Pending, Residuals, saved, static
from funcops.engine.errors import FLOATS, check, fail, require, require_count
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import group_norm as kernels
from funcops.library.ops._norm import check_eps, check_weight, finish_two

__all__ = ["GroupNormConfig", "GroupNormParams", "GroupNormPending", "GroupNormResiduals"]
__all__ += ["group_norm", "group_norm_bwd", "group_norm_dgrad", "group_norm_fwd", "group_norm_init", "group_norm_wgrad"]


@config
class GroupNormConfig(OpConfig):
    """`groups` (G), which divides `channels` (C)."""

    mixes_positions = True

    groups: int = field(kw_only=False)
    channels: int = field(kw_only=False)
    eps: float = 1e-5

    def __post_init__(self) -> None:
        require_count("GroupNormConfig", groups=self.groups, channels=self.channels)
        whole = self.channels % self.groups == 0
        require(whole, "GroupNormConfig", "channels", f"a multiple of groups ({self.groups})", self.channels)
        check_eps("GroupNormConfig", self.eps)


@tree
class GroupNormParams:
    weight: Tensor = leaf("[C]")
    bias: Tensor = leaf("[C]")


class GroupNormResiduals(Residuals):
    x: Tensor = saved("[B, C, *S]", alias="x", needed_by=DGRAD | RECOMPUTE, of=("x", "params.weight"))
    weight: Tensor = saved("[C]", alias="params.weight", needed_by=DGRAD | RECOMPUTE)
    bias: Tensor = saved("[C]", alias="params.bias", needed_by=RECOMPUTE)
    mean: Tensor = saved("[B, G]", needed_by=DGRAD, of=("x", "params.weight"))
    rstd: Tensor = saved("[B, G]", needed_by=DGRAD, of=("x", "params.weight"))
    like: Any = static()  # shape and dtype of x if x is not kept
    weight_dtype: torch.dtype = static()


class GroupNormPending(Pending):  # float32 (float64 for float64)
    dw_parts: Tensor | None = saved("[P, C]", needed_by=WGRAD, of=("params.weight",))
    db_parts: Tensor | None = saved("[P, C]", needed_by=WGRAD, of=("params.bias",))
    weight_dtype: torch.dtype = static()


@init_of(GroupNormConfig)
def group_norm_init(
    cfg: GroupNormConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> GroupNormParams:
    """Weight of ones, bias of zeros; draws nothing."""
    return GroupNormParams(
        torch.ones(cfg.channels, device=device, dtype=dtype), torch.zeros(cfg.channels, device=device, dtype=dtype)
    )


@forward(GroupNormConfig, GroupNormParams)
def group_norm_fwd(
    params: GroupNormParams, x: Tensor, cfg: GroupNormConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, GroupNormResiduals | None]:
    """x: [B, C, *S] -> y: [B, C, *S]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    w, b = params.weight, params.bias
    check("group_norm_fwd", "x", x, (...,), FLOATS)
    if x.dim() < 2 or x.shape[1] != cfg.channels:
        fail("group_norm_fwd", "x", f"[B, {cfg.channels}, ...]", list(x.shape))
    check_weight("group_norm_fwd", x, w, (cfg.channels,))
    check("group_norm_fwd", "params.bias", b, (cfg.channels,), w.dtype, x)
    y, mean, rstd = kernels.group_norm_fwd(x, w, b, cfg.groups, cfg.eps)
    like = None if needs.x or needs.param("weight") else (x.shape, x.dtype)
    kept = GroupNormResiduals.keep(cfg, needs, x=x, weight=w, bias=b, mean=mean, rstd=rstd, like=like, weight_dtype=w.dtype)
    return y, kept


@recompute_of(GroupNormResiduals)
def group_norm_recompute(residuals: GroupNormResiduals, cfg: GroupNormConfig) -> Tensor:
    """Recompute y, bit for bit."""
    return kernels.group_norm_fwd(residuals.x, residuals.weight, residuals.bias, cfg.groups, cfg.eps)[0]  # type: ignore[no-any-return]


@dgrad_of(GroupNormResiduals)
def group_norm_dgrad(residuals: GroupNormResiduals, dy: Tensor, cfg: GroupNormConfig) -> tuple[Tensor, GroupNormPending | None]:
    """dx: [B, C, *S], and the pending sums for dw and db."""
    x, needs = residuals.x, residuals.needs
    shape, dtype = residuals.like if x is None else (x.shape, x.dtype)
    check("group_norm_dgrad", "dy", dy, shape, dtype, x)
    dx, dw_parts, db_parts = kernels.group_norm_bwd(
        dy,
        x,
        residuals.weight,
        residuals.mean,
        residuals.rstd,
        cfg.groups,
        bool(needs.x),
        needs.param("weight"),
        needs.param("bias"),
    )
    pending = GroupNormPending.keep(cfg, needs, dw_parts=dw_parts, db_parts=db_parts, weight_dtype=residuals.weight_dtype)
    return NO_GRADIENT if dx is None else dx, pending


@wgrad_of(GroupNormPending, GroupNormParams)
def group_norm_wgrad(pending: GroupNormPending, cfg: GroupNormConfig, *, into: GroupNormParams | None = None) -> GroupNormParams:
    """dw and db: [C], in the weight's dtype; added to `into` if given, in float32 if `into` is."""
    target: Any = into or GroupNormParams(None, None)  # type: ignore[arg-type]
    found: Any = finish_two(pending.dw_parts, pending.db_parts, (cfg.channels,), pending.weight_dtype, target.weight, target.bias)
    return accumulate("group_norm_wgrad", GroupNormParams(*found), into)


group_norm = make_op(
    "group_norm",
    GroupNormConfig,
    init=group_norm_init,
    fwd=group_norm_fwd,
    dgrad=group_norm_dgrad,
    wgrad=group_norm_wgrad,
    recomputable="norm",
    recompute=group_norm_recompute,
)
group_norm_bwd = both_halves(group_norm, group_norm_dgrad, group_norm_wgrad)
