"""LayerNorm over the last dimensions.

    m = mean_j(x_j)    r = (mean_j((x_j - m)^2) + eps)^(-1/2)    n = (x - m) * r    y = n * w + b

With g = dy * w (1 + w with zero_centered_gamma):

    dx = r * (g - mean_j(g_j) - n * mean_j(g_j * n_j))    dw = sum over rows of dy * n    db = sum over rows of dy

x, y, dy, dx: [*, *D] of one float dtype; w, b: [*D], of x's dtype or float32; m, r: [*], float32 (float64 for float64).
Kept: x and w, aliases, m and r: 8 bytes a row. dgrad sums dw and db on its way, so pending holds [*D] each.
arXiv:1607.06450.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.backend import wide
from funcops.errors import check, require
from funcops.kernels import linear as linear_kernels
from funcops.kernels import norm as kernels
from funcops.needs import Needs
from funcops.op import accumulate, config, dgrad_of, forward, make_op, positional, wgrad_of
from funcops.ops._norm import check_norm, flat, normalized
from funcops.schema import DGRAD, WGRAD, pending, residuals, saved, static
from funcops.trees import leaf, tree


@config
class LayerNormConfig:
    """`dim`: the size, or sizes, of the normalised trailing dimensions; `bias` adds b; `zero_centered_gamma`: 1 + w."""

    dim: int | tuple[int, ...] = positional()
    eps: float = 1e-5
    bias: bool = True
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        normalized(self, "LayerNormConfig")


@tree
class LayerNormParams:
    weight: Tensor = leaf("[*D]")
    bias: Tensor | None = leaf("[*D]")


@residuals
class LayerNormResiduals:
    x: Tensor = saved("[*, *D]", alias="x", needed_by=DGRAD, of=("x", "params.weight"))
    weight: Tensor = saved("[*D]", alias="params.weight", needed_by=DGRAD, of=("x", "params.weight"))
    mean: Tensor = saved("[*]", needed_by=DGRAD, of=("x", "params.weight"), recompute_from=("x",))
    rstd: Tensor = saved("[*]", needed_by=DGRAD, of=("x", "params.weight"), recompute_from=("x",))
    weight_dtype: Any = static()


@pending
class LayerNormPending:
    dw: Tensor = saved("[*D]", needed_by=WGRAD, of=("params.weight",))  # in float32 (float64 for float64)
    db: Tensor | None = saved("[*D]", needed_by=WGRAD, of=("params.bias",))
    weight_dtype: Any = static()


def layer_norm_init(
    cfg: LayerNormConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LayerNormParams:
    """Weight of ones (zeros where zero-centred), bias of zeros; draws nothing."""
    fill = torch.zeros if cfg.zero_centered_gamma else torch.ones
    bias = torch.zeros(cfg.dim, device=device, dtype=dtype) if cfg.bias else None
    return LayerNormParams(fill(cfg.dim, device=device, dtype=dtype), bias)


@forward(LayerNormConfig, LayerNormParams)
def layer_norm_fwd(
    params: LayerNormParams, x: Tensor, cfg: LayerNormConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, Any]:
    """x: [*, *D] -> y: [*, *D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    w, b = params.weight, params.bias
    check_norm("layer_norm_fwd", x, cfg.dim, w)
    if cfg.bias:
        check("layer_norm_fwd", "params.bias", b, cfg.dim, w.dtype, x)
    else:
        require(b is None, "layer_norm_fwd", "params.bias", "None (cfg.bias is False)", "a tensor")
    flat_b = None if b is None else flat(b, cfg.dim)
    y, mean, rstd = kernels.layer_norm_fwd(
        flat(x, cfg.dim), flat(w, cfg.dim), flat_b, cfg.eps, cfg.zero_centered_gamma
    )
    kept = LayerNormResiduals.keep(cfg, needs, x=x, weight=w, mean=mean, rstd=rstd, weight_dtype=w.dtype)
    return y if len(cfg.dim) == 1 else y.reshape(x.shape), kept


@dgrad_of(LayerNormResiduals)
def layer_norm_dgrad(residuals: Any, dy: Tensor, cfg: LayerNormConfig) -> tuple[Tensor | None, Any]:
    """dx: [*, *D], and the pending sums for dw and db."""
    x, w, needs = residuals.x, residuals.weight, residuals.needs
    if x is None:  # only db is wanted
        check("layer_norm_dgrad", "dy", dy, (..., *cfg.dim))
        _, db = linear_kernels.linear_wgrad(flat(dy, cfg.dim).to(wide(dy.dtype)), None, True)
        return None, LayerNormPending.keep(cfg, needs, db=db, weight_dtype=residuals.weight_dtype)
    check("layer_norm_dgrad", "dy", dy, x.shape, x.dtype, x)
    wanted = bool(needs.x), needs.param("weight"), cfg.bias and needs.param("bias")
    dx, dw, db = kernels.layer_norm_bwd(
        flat(dy, cfg.dim),
        flat(x, cfg.dim),
        flat(w, cfg.dim),
        residuals.mean,
        residuals.rstd,
        cfg.zero_centered_gamma,
        *wanted,
    )
    dx = dx if dx is None or len(cfg.dim) == 1 else dx.reshape(x.shape)
    return dx, LayerNormPending.keep(cfg, needs, dw=dw, db=db, weight_dtype=residuals.weight_dtype)


@wgrad_of(LayerNormPending, LayerNormParams)
def layer_norm_wgrad(pending: Any, cfg: LayerNormConfig, *, into: LayerNormParams | None = None) -> LayerNormParams:
    """dw and db: [*D]; added to `into` where that is given, unrounded."""

    def finish(total: Tensor | None) -> Tensor | None:
        if total is None:
            return None
        return total.reshape(cfg.dim) if into is not None else total.reshape(cfg.dim).to(pending.weight_dtype)

    return accumulate("layer_norm_wgrad", LayerNormParams(finish(pending.dw), finish(pending.db)), into)


layer_norm = make_op(
    "layer_norm",
    LayerNormConfig,
    init=layer_norm_init,
    fwd=layer_norm_fwd,
    dgrad=layer_norm_dgrad,
    wgrad=layer_norm_wgrad,
)
layer_norm_bwd = layer_norm.bwd
