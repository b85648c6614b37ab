"""RMSNorm over the last dimensions.

    r = (mean_j(x_j^2) + eps)^(-1/2)        n = x * r        y = n * w      (1 + w with zero_centered_gamma)

With g = dy * w:

    dx = r * (g - n * mean_j(g_j * n_j))    dw = sum over rows of dy * n

x, y, dy, dx: [*, *D] of one float dtype; w, dw: [*D], of x's dtype or float32; r: [*, 1], float32 (float64 for float64).
Kept: x and w, both aliases, and r: 4 bytes a row. dgrad reads dy and x anyway, so it returns dw as partial sums [P, D].
arXiv:1910.07467.

>>> import torch
>>> from funcops import RMSNormConfig, RMSNormParams, rms_norm_fwd
>>> y, residuals = rms_norm_fwd(RMSNormParams(torch.ones(2)), torch.tensor([[3.0, 3.0]]), RMSNormConfig(2))
>>> y
tensor([[1., 1.]])
"""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import bwd_of, config, dgrad_of, forward, init_of, make_op, recompute_of, wgrad_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, RECOMPUTE, WGRAD, Pending, Residuals, saved, static
from funcops.engine.errors import check
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import norm as kernels
from funcops.library.ops._norm import check_norm, check_sizes, finish, flat

__all__ = ["RMSNormConfig", "RMSNormParams", "RMSNormPending", "RMSNormResiduals"]
__all__ += ["rms_norm", "rms_norm_bwd", "rms_norm_dgrad", "rms_norm_fwd", "rms_norm_init", "rms_norm_wgrad"]


@config
class RMSNormConfig(OpConfig):
    """`dim`: the size, or sizes, of the normalised trailing dimensions; `zero_centered_gamma` scales by 1 + w."""

    dim: Any = field(kw_only=False)  # int or tuple of ints, kept as a tuple
    eps: float = 1e-6
    zero_centered_gamma: bool = False
    bias: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_sizes("RMSNormConfig", self)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        last = self.dim[-1] if isinstance(self.dim, tuple) else self.dim
        return last, last


@tree
class RMSNormParams:
    weight: Any = leaf("[*D]")


class RMSNormResiduals(Residuals):
    x: Tensor = saved("[*, *D]", alias="x", needed_by=DGRAD | RECOMPUTE, of=("x", "params"))
    weight: Tensor = saved("[*D]", alias="params.weight", needed_by=DGRAD | RECOMPUTE)
    rstd: Tensor = saved("[*, 1]", needed_by=DGRAD | RECOMPUTE, of=("x", "params"))
    weight_dtype: torch.dtype = static()


class RMSNormPending(Pending):
    parts: Tensor = saved("[P, D]", needed_by=WGRAD)  # of dw, over blocks of rows; float32 (float64 for float64)
    weight_dtype: torch.dtype = static()


@init_of(RMSNormConfig)
def rms_norm_init(
    cfg: RMSNormConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> RMSNormParams:
    """Weight of ones (zeros if zero-centred); draws nothing."""
    fill = torch.zeros if cfg.zero_centered_gamma else torch.ones
    return RMSNormParams(fill(cfg.dim, device=device, dtype=dtype))


def rms_norm_kept(cfg: RMSNormConfig, needs: Needs, x: Tensor, params: RMSNormParams, rstd: Tensor) -> RMSNormResiduals | None:
    w = params.weight
    return RMSNormResiduals.keep(cfg, needs, x=x, weight=w, rstd=rstd, weight_dtype=w.dtype)


@forward(RMSNormConfig, RMSNormParams)
def rms_norm_fwd(
    params: RMSNormParams, x: Tensor, cfg: RMSNormConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, RMSNormResiduals | None]:
    """`y = x * rstd * w`. x: [*, *D] -> y: [*, *D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    w = params.weight
    dim = cfg.dim
    check_norm("rms_norm_fwd", x, w, dim)
    if len(dim) == 1:
        y, rstd = kernels.rms_norm_fwd(x, w, cfg.eps, cfg.zero_centered_gamma)
    else:
        y, rstd = kernels.rms_norm_fwd(flat(x, dim), flat(w, dim), cfg.eps, cfg.zero_centered_gamma)
        y = y.reshape(x.shape)
    if not x.is_contiguous():
        y = kernels.dense(y, x)
    return y, rms_norm_kept(cfg, needs, x, params, rstd)


@recompute_of(RMSNormResiduals)
def rms_norm_recompute(residuals: RMSNormResiduals, cfg: RMSNormConfig) -> Tensor:
    """Recompute y, bit for bit, in two products."""
    x, w, dim = residuals.x, residuals.weight, cfg.dim
    if len(dim) == 1:
        return kernels.rms_norm_recompute(x, w, residuals.rstd, cfg.eps, cfg.zero_centered_gamma)
    y = kernels.rms_norm_recompute(flat(x, dim), flat(w, dim), residuals.rstd, cfg.eps, cfg.zero_centered_gamma)
    return y.reshape(x.shape)


@dgrad_of(RMSNormResiduals)
def rms_norm_dgrad(residuals: RMSNormResiduals, dy: Tensor, cfg: RMSNormConfig) -> tuple[Tensor, RMSNormPending | None]:
    """dx: [*, *D], and the pending sums for dw."""
    dx, parts = _dx_and_parts("rms_norm_dgrad", residuals, dy, cfg, kernels.rms_norm_bwd)
    return dx, RMSNormPending.keep(cfg, residuals.needs, parts=parts, weight_dtype=residuals.weight_dtype)


def _dx_and_parts(
    where: str, residuals: RMSNormResiduals, dy: Tensor, cfg: RMSNormConfig, run: Any
) -> tuple[Tensor, Tensor | None]:
    x, w, needs, dim = residuals.x, residuals.weight, residuals.needs, cfg.dim
    check(where, "dy", dy, x.shape, x.dtype, x)
    wanted = cfg.zero_centered_gamma, bool(needs.x), bool(needs.params)
    if len(dim) == 1:
        return run(dy, x, w, residuals.rstd, *wanted)  # type: ignore[no-any-return]
    flat_w = None if w is None else flat(w, dim)
    dx, parts = run(flat(dy, dim), flat(x, dim), flat_w, residuals.rstd, *wanted)
    return NO_GRADIENT if dx is None else dx.reshape(x.shape), parts


@wgrad_of(RMSNormPending, RMSNormParams)
def rms_norm_wgrad(pending: RMSNormPending, cfg: RMSNormConfig, *, into: RMSNormParams | None = None) -> RMSNormParams:
    """dw: [*D], in the weight's dtype; added to `into` if given, in float32 if `into` is."""
    dw = finish(pending.parts, cfg.dim, pending.weight_dtype, None if into is None else into.weight)
    return accumulate("rms_norm_wgrad", RMSNormParams(dw), into)


@bwd_of(RMSNormResiduals, RMSNormParams)
def rms_norm_bwd(
    residuals: RMSNormResiduals, dy: Tensor, cfg: RMSNormConfig, *, into: RMSNormParams | None = None
) -> tuple[RMSNormParams, Tensor]:
    """The whole backward, one pass over dy and x. Returns `(dparams, dx)`."""
    dx, parts = _dx_and_parts("rms_norm_bwd", residuals, dy, cfg, kernels.rms_norm_bwd_at_once)
    dw = finish(parts, cfg.dim, residuals.weight_dtype, None if into is None else into.weight, owned=True)
    return RMSNormParams(dw) if into is None else accumulate("rms_norm_bwd", RMSNormParams(dw), into), dx


rms_norm = make_op(
    "rms_norm",
    RMSNormConfig,
    init=rms_norm_init,
    fwd=rms_norm_fwd,
    dgrad=rms_norm_dgrad,
    wgrad=rms_norm_wgrad,
    bwd=rms_norm_bwd,
    recomputable="norm",
    recompute=rms_norm_recompute,
    mixes="",
)
