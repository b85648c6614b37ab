"""Depthwise causal convolution over time, as before the recurrences of Mamba2, Qwen3-Next and Kimi Linear.

    z_t = sum over j < W of w_j x_(t - W + 1 + j) + b        y = silu(z), or z        (x is 0 before the first time)

With g = dy f'(z):

    dx_t = sum over j of w_j g_(t + W - 1 - j)        dw_j = sum over batches and t of g_t x_(t - W + 1 + j)        db = sum of g

x, y, dy, dx: [B, T, C]; w: [C, W] (torch's Conv1d has [C, 1, W]); b: [C]; one float dtype. Kept: x, w and b, aliases: no bytes of
their own; z is recomputed. dgrad returns dw and db as partial sums. To continue a sequence, prepend its last W - 1 inputs, and
drop their y.

>>> import torch
>>> from funcops import CausalConv1dConfig, CausalConv1dParams, causal_conv1d_bwd, causal_conv1d_fwd
>>> cfg = CausalConv1dConfig(1, width=2, bias=False, silu=False)
>>> params = CausalConv1dParams(torch.tensor([[1.0, 10.0]]), None)
>>> y, residuals = causal_conv1d_fwd(params, torch.tensor([[[1.0], [2.0], [3.0]]]), cfg)
>>> y.flatten()
tensor([10., 21., 32.])
>>> dparams, dx = causal_conv1d_bwd(residuals, torch.ones(1, 3, 1), cfg)
>>> dparams.weight, dx.flatten()
(tensor([[3., 6.]]), tensor([11., 11., 10.]))
"""

from __future__ import annotations

import functools
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op, recompute_of, wgrad_of
from funcops.engine.contract.schema import DGRAD, RECOMPUTE, WGRAD, Pending, Residuals, saved, static
from funcops.engine.errors import FLOATS, check, describe, fail, require, require_count
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import causal_conv1d as kernels
from funcops.library.ops._norm import finish

__all__ = ["CausalConv1dConfig", "CausalConv1dParams", "CausalConv1dPending", "CausalConv1dResiduals"]
__all__ += ["causal_conv1d", "causal_conv1d_bwd", "causal_conv1d_dgrad"]
__all__ += ["causal_conv1d_fwd", "causal_conv1d_init", "causal_conv1d_wgrad"]


@config
class CausalConv1dConfig(OpConfig):
    """`channels` (C); `width`: the kernel size W; `bias` adds b; `silu`: y = silu(z)."""

    mixes_positions = True

    channels: int = field(kw_only=False)
    width: int = 4
    bias: bool = True
    silu: bool = True

    def __post_init__(self) -> None:
        require_count("CausalConv1dConfig", channels=self.channels, width=self.width)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.channels, self.channels


@tree
class CausalConv1dParams:
    weight: Tensor = leaf("[C, W]")
    bias: Tensor | None = leaf("[C]")


class CausalConv1dResiduals(Residuals):  # without silu dgrad does not read x; it is kept anyway, as an alias
    x: Tensor = saved("[B, T, C]", alias="x", needed_by=DGRAD | RECOMPUTE, of=("x", "params"))
    weight: Tensor = saved("[C, W]", alias="params.weight", needed_by=DGRAD | RECOMPUTE, of=("x", "params"))
    bias: Tensor | None = saved("[C]", alias="params.bias", needed_by=DGRAD | RECOMPUTE, of=("x", "params"))


class CausalConv1dPending(Pending):  # float32 (float64 for float64)
    dw_parts: Tensor | None = saved("[P, C W]", needed_by=WGRAD, of=("params.weight",))
    db_parts: Tensor | None = saved("[P, C]", needed_by=WGRAD, of=("params.bias",))
    weight_dtype: torch.dtype = static()


@init_of(CausalConv1dConfig)
def causal_conv1d_init(
    cfg: CausalConv1dConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> CausalConv1dParams:
    """Weight and bias uniform in ±1/sqrt(W), as torch.nn.Conv1d of one channel a group draws them."""
    bound = cfg.width**-0.5
    keys = random.split(key, 2)
    draw = functools.partial(random.uniform, low=-bound, high=bound, dtype=dtype, device=device)
    weight = draw(keys[0], (cfg.channels, cfg.width))
    return CausalConv1dParams(weight, draw(keys[1], (cfg.channels,)) if cfg.bias else None)


@forward(CausalConv1dConfig, CausalConv1dParams)
def causal_conv1d_fwd(
    params: CausalConv1dParams, x: Tensor, cfg: CausalConv1dConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, CausalConv1dResiduals | None]:
    """x: [B, T, C] -> y: [B, T, C]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    where, w, b = "causal_conv1d_fwd", params.weight, params.bias
    check(where, "x", x, (..., cfg.channels), FLOATS)
    if x.dim() != 3:
        fail(where, "x", f"[B, T, {cfg.channels}]", list(x.shape))
    check(where, "params.weight", w, (cfg.channels, cfg.width), x.dtype, x)
    if cfg.bias:
        check(where, "params.bias", b, (cfg.channels,), x.dtype, x)
    else:
        require(b is None, where, "params.bias", "None (cfg.bias is False)", describe(b))
    return kernels.causal_conv1d_fwd(x, w, b, cfg.silu), CausalConv1dResiduals.keep(cfg, needs, x=x, weight=w, bias=b)


@recompute_of(CausalConv1dResiduals)
def causal_conv1d_recompute(residuals: CausalConv1dResiduals, cfg: CausalConv1dConfig) -> Tensor:
    """Recompute y, bit for bit."""
    return kernels.causal_conv1d_fwd(residuals.x, residuals.weight, residuals.bias, cfg.silu)


@dgrad_of(CausalConv1dResiduals)
def causal_conv1d_dgrad(
    residuals: CausalConv1dResiduals, dy: Tensor, cfg: CausalConv1dConfig
) -> tuple[Tensor, CausalConv1dPending | None]:
    """dx: [B, T, C], and the pending sums for dw and db."""
    x, w, needs = residuals.x, residuals.weight, residuals.needs
    check("causal_conv1d_dgrad", "dy", dy, x.shape, x.dtype, x)
    wanted = bool(needs.x), needs.param("weight"), cfg.bias and needs.param("bias")
    dx, dw_parts, db_parts = kernels.causal_conv1d_bwd(dy, x, w, residuals.bias, cfg.silu, *wanted)
    return dx, CausalConv1dPending.keep(cfg, needs, dw_parts=dw_parts, db_parts=db_parts, weight_dtype=w.dtype)


@wgrad_of(CausalConv1dPending, CausalConv1dParams)
def causal_conv1d_wgrad(
    pending: CausalConv1dPending, cfg: CausalConv1dConfig, *, into: CausalConv1dParams | None = None
) -> CausalConv1dParams:
    """dw: [C, W] and db: [C], in the weight's dtype; added to `into` if given, in float32 if `into` is."""
    dtype, target = pending.weight_dtype, into or CausalConv1dParams(None, None)  # type: ignore[arg-type]
    dw: Any = finish(pending.dw_parts, (cfg.channels, cfg.width), dtype, target.weight)
    db = finish(pending.db_parts, (cfg.channels,), dtype, target.bias)
    return accumulate("causal_conv1d_wgrad", CausalConv1dParams(dw, db), into)


causal_conv1d = make_op(
    "causal_conv1d",
    CausalConv1dConfig,
    init=causal_conv1d_init,
    fwd=causal_conv1d_fwd,
    dgrad=causal_conv1d_dgrad,
    wgrad=causal_conv1d_wgrad,
    recomputable="elementwise",
    recompute=causal_conv1d_recompute,
)
causal_conv1d_bwd = both_halves(causal_conv1d, causal_conv1d_dgrad, causal_conv1d_wgrad)
