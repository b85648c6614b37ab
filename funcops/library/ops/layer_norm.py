"""LayerNorm over the last dimensions.

    m = mean_j(x_j)    r = (mean_j((x_j - m)^2) + eps)^(-1/2)    n = (x - m) * r    y = n * w + b

With g = dy * w (1 + w with zero_centered_gamma):

    dx = r * (g - mean_j(g_j) - n * mean_j(g_j * n_j))    dw = sum over rows of dy * n    db = sum over rows of dy

x, y, dy, dx: [*, *D] of one float dtype; w, b: [*D], of x's dtype or float32; m, r: [*, 1], float32
(float64 for float64).
Kept: x and w, both aliases, m and r: 8 bytes a row. dgrad reads dy and x anyway, so it returns dw and db as partial sums
[P, D] each. If only db is requested, only the shape is kept.
arXiv:1607.06450.

>>> import torch
>>> from funcops import LayerNormConfig, LayerNormParams, layer_norm_bwd, layer_norm_fwd
>>> cfg, params = LayerNormConfig(2, eps=0.0), LayerNormParams(torch.ones(2), torch.zeros(2))
>>> y, residuals = layer_norm_fwd(params, torch.tensor([[1.0, 3.0]]), cfg)
>>> y, residuals.mean, residuals.rstd
(tensor([[-1.,  1.]]), tensor([[2.]]), tensor([[1.]]))
>>> dparams, dx = layer_norm_bwd(residuals, torch.tensor([[1.0, 0.0]]), cfg)
>>> dparams.weight, dparams.bias
(tensor([-1.,  0.]), tensor([1., 0.]))
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
from funcops.engine.errors import check, describe, require
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import norm as kernels
from funcops.library.ops._norm import check_norm, check_sizes, finish_two, flat

__all__ = ["LayerNormConfig", "LayerNormParams", "LayerNormPending", "LayerNormResiduals"]
__all__ += ["layer_norm", "layer_norm_bwd", "layer_norm_dgrad", "layer_norm_fwd", "layer_norm_init", "layer_norm_wgrad"]


@config
class LayerNormConfig(OpConfig):
    """`dim`: the size, or sizes, of the normalised trailing dimensions; `bias` adds b; `zero_centered_gamma`: 1 + w."""

    dim: Any = field(kw_only=False)  # int or tuple of ints, kept as a tuple
    eps: float = 1e-5
    bias: bool = True
    zero_centered_gamma: bool = False

    def __post_init__(self) -> None:
        check_sizes("LayerNormConfig", self)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        last = self.dim[-1] if isinstance(self.dim, tuple) else self.dim
        return last, last


@tree
class LayerNormParams:
    weight: Any = leaf("[*D]")
    bias: Tensor | None = leaf("[*D]")


class LayerNormResiduals(Residuals):
    x: Tensor = saved("[*, *D]", alias="x", needed_by=DGRAD | RECOMPUTE, of=("x", "params.weight"))
    weight: Tensor = saved("[*D]", alias="params.weight", needed_by=DGRAD | RECOMPUTE)
    bias: Tensor | None = saved("[*D]", alias="params.bias", needed_by=RECOMPUTE)
    mean: Tensor = saved("[*, 1]", needed_by=DGRAD, of=("x", "params.weight"))
    rstd: Tensor = saved("[*, 1]", needed_by=DGRAD, of=("x", "params.weight"))
    like: Any = static()  # shape and dtype of x if x is not kept
    weight_dtype: torch.dtype = static()


class LayerNormPending(Pending):  # over blocks of rows; float32 (float64 for float64)
    dw_parts: Tensor | None = saved("[P, D]", needed_by=WGRAD, of=("params.weight",))
    db_parts: Tensor | None = saved("[P, D]", needed_by=WGRAD, of=("params.bias",))
    weight_dtype: torch.dtype = static()


@init_of(LayerNormConfig)
def layer_norm_init(
    cfg: LayerNormConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LayerNormParams:
    """Weight of ones (zeros if zero-centred), bias of zeros; draws nothing."""
    fill = torch.zeros if cfg.zero_centered_gamma else torch.ones
    bias = torch.zeros(cfg.dim, device=device, dtype=dtype) if cfg.bias else None
    return LayerNormParams(fill(cfg.dim, device=device, dtype=dtype), bias)


def layer_norm_kept(
    cfg: LayerNormConfig, needs: Needs, x: Tensor, params: LayerNormParams, mean: Tensor, rstd: Tensor
) -> LayerNormResiduals | None:
    w, b = params.weight, params.bias
    like = None if needs.x or needs.param("weight") else (x.shape, x.dtype)
    return LayerNormResiduals.keep(cfg, needs, x=x, weight=w, bias=b, mean=mean, rstd=rstd, like=like, weight_dtype=w.dtype)


@forward(LayerNormConfig, LayerNormParams)
def layer_norm_fwd(
    params: LayerNormParams, x: Tensor, cfg: LayerNormConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, LayerNormResiduals | None]:
    """x: [*, *D] -> y: [*, *D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    w, b, dim = params.weight, params.bias, cfg.dim
    check_norm("layer_norm_fwd", x, w, dim)
    if cfg.bias:
        check("layer_norm_fwd", "params.bias", b, dim, w.dtype, x)
    elif b is not None:
        require(False, "layer_norm_fwd", "params.bias", "None (cfg.bias is False)", describe(b))
    y, mean, rstd = kernels.layer_norm_fwd(
        flat(x, dim), flat(w, dim), None if b is None else flat(b, dim), cfg.eps, cfg.zero_centered_gamma
    )
    return y if len(dim) == 1 else y.reshape(x.shape), layer_norm_kept(cfg, needs, x, params, mean, rstd)


@recompute_of(LayerNormResiduals)
def layer_norm_recompute(residuals: LayerNormResiduals, cfg: LayerNormConfig) -> Tensor:
    """Recompute y, bit for bit."""
    x, w, b, dim = residuals.x, residuals.weight, residuals.bias, cfg.dim
    y = kernels.layer_norm_fwd(flat(x, dim), flat(w, dim), None if b is None else flat(b, dim), cfg.eps, cfg.zero_centered_gamma)[0]
    return y if len(dim) == 1 else y.reshape(x.shape)


@dgrad_of(LayerNormResiduals)
def layer_norm_dgrad(residuals: LayerNormResiduals, dy: Tensor, cfg: LayerNormConfig) -> tuple[Tensor, LayerNormPending | None]:
    """dx: [*, *D], and the pending sums for dw and db."""
    x, w, needs, dim = residuals.x, residuals.weight, residuals.needs, cfg.dim
    db = cfg.bias and needs.param("bias")
    if residuals.like is not None:
        check("layer_norm_dgrad", "dy", dy, *residuals.like)
        db_parts = kernels.row_sums(flat(dy, dim)) if db else None
        return NO_GRADIENT, LayerNormPending.keep(cfg, needs, db_parts=db_parts, weight_dtype=residuals.weight_dtype)
    check("layer_norm_dgrad", "dy", dy, x.shape, x.dtype, x)
    dx, dw_parts, db_parts = kernels.layer_norm_bwd(
        flat(dy, dim),
        flat(x, dim),
        None if w is None else flat(w, dim),
        residuals.mean,
        residuals.rstd,
        cfg.zero_centered_gamma,
        bool(needs.x),
        needs.param("weight"),
        db,
    )
    if dx is not None and len(dim) > 1:
        dx = dx.reshape(x.shape)
    return dx, LayerNormPending.keep(cfg, needs, dw_parts=dw_parts, db_parts=db_parts, weight_dtype=residuals.weight_dtype)


@wgrad_of(LayerNormPending, LayerNormParams)
def layer_norm_wgrad(pending: LayerNormPending, cfg: LayerNormConfig, *, into: LayerNormParams | None = None) -> LayerNormParams:
    """dw and db: [*D], in the weight's dtype; added to `into` if given, in float32 if `into` is."""
    dtype, target = pending.weight_dtype, into or LayerNormParams(None, None)
    dw, db = finish_two(pending.dw_parts, pending.db_parts, cfg.dim, dtype, target.weight, target.bias)
    return accumulate("layer_norm_wgrad", LayerNormParams(dw, db), into)


layer_norm = make_op(
    "layer_norm",
    LayerNormConfig,
    init=layer_norm_init,
    fwd=layer_norm_fwd,
    dgrad=layer_norm_dgrad,
    wgrad=layer_norm_wgrad,
    recomputable="norm",
    recompute=layer_norm_recompute,
    mixes="",
)
layer_norm_bwd = both_halves(layer_norm, layer_norm_dgrad, layer_norm_wgrad)
