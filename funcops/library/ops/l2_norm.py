"""L2 normalisation over the last dimension.

    r = (sum_j(x_j^2) + eps)^(-1/2)        y = x * r        dx = r * (dy - y * sum_j(dy_j * y_j))

x, y, dy, dx: [*, D] of one float dtype; r: [*, 1], float32 (float64 for float64). Kept: x, an alias, and r: 4 bytes a row.

>>> import torch
>>> from funcops import L2NormConfig, l2_norm_bwd, l2_norm_fwd
>>> cfg = L2NormConfig(2, eps=0.0)
>>> y, residuals = l2_norm_fwd(None, torch.tensor([[0.0, 4.0]]), cfg)
>>> y, residuals.rstd, l2_norm_bwd(residuals, torch.tensor([[1.0, 1.0]]), cfg)[1]
(tensor([[0., 1.]]), tensor([[0.2500]]), tensor([[0.2500, 0.0000]]))
"""

from __future__ import annotations

from dataclasses import field

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, recompute_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, RECOMPUTE, Residuals, saved
from funcops.engine.errors import FLOATS, check, require
from funcops.library.kernels import norm as kernels
from funcops.library.ops._norm import check_eps

__all__ = ["L2NormConfig", "L2NormResiduals"]
__all__ += ["l2_norm", "l2_norm_bwd", "l2_norm_dgrad", "l2_norm_fwd", "l2_norm_init", "l2_norm_wgrad"]


@config
class L2NormConfig(OpConfig):
    """`dim`: the size D of the last dimension."""

    dim: int = field(kw_only=False)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        require(type(self.dim) is int and self.dim >= 1, "L2NormConfig", "dim", "a size of at least 1", repr(self.dim))
        check_eps("L2NormConfig", self.eps)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.dim, self.dim


class L2NormResiduals(Residuals):
    x: Tensor = saved("[*, D]", alias="x", needed_by=DGRAD | RECOMPUTE)
    rstd: Tensor = saved("[*, 1]", needed_by=DGRAD)


@forward(L2NormConfig)
def l2_norm_fwd(params: None, x: Tensor, cfg: L2NormConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, L2NormResiduals | None]:
    """`y = x * rstd`. x: [*, D] -> y: [*, D]. Raises `ValueError` or `TypeError` for a wrong shape or dtype."""
    check("l2_norm_fwd", "x", x, (..., cfg.dim), FLOATS)
    y, rstd = kernels.l2_norm_fwd(x, cfg.eps)
    return y, L2NormResiduals.keep(cfg, needs, x=x, rstd=rstd)


@recompute_of(L2NormResiduals)
def l2_norm_recompute(residuals: L2NormResiduals, cfg: L2NormConfig) -> Tensor:
    """Recompute y, bit for bit."""
    return kernels.l2_norm_fwd(residuals.x, cfg.eps)[0]


@dgrad_of(L2NormResiduals)
def l2_norm_dgrad(residuals: L2NormResiduals, dy: Tensor, cfg: L2NormConfig) -> tuple[Tensor, None]:
    """dx: [*, D]. No params, so pending is None."""
    if not residuals.needs.x:
        return NO_GRADIENT, None
    x = residuals.x
    check("l2_norm_dgrad", "dy", dy, x.shape, x.dtype, x)
    return kernels.l2_norm_bwd(dy, x, residuals.rstd), None


l2_norm = make_op(
    "l2_norm", L2NormConfig, fwd=l2_norm_fwd, dgrad=l2_norm_dgrad, recomputable="norm", recompute=l2_norm_recompute, mixes=""
)
l2_norm_init, l2_norm_bwd, l2_norm_wgrad = no_params(l2_norm, l2_norm_dgrad)
