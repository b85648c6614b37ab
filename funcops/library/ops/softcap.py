"""Soft cap: bounds numbers smoothly by ±c.

    y = c tanh(x / c)        dx = dy (1 - tanh(x / c)^2)

x, y, dy, dx: [*] of one float dtype. Kept: x, an alias: no bytes of its own. Gemma 2 caps logits and attention scores,
arXiv:2408.00118.

>>> import torch
>>> from funcops import SoftcapConfig, softcap_bwd, softcap_fwd
>>> y, residuals = softcap_fwd(None, torch.tensor([0.0, 1000.0]), SoftcapConfig(30.0))
>>> y, softcap_bwd(residuals, torch.ones(2), SoftcapConfig(30.0))[1]
(tensor([ 0., 30.]), tensor([1., 0.]))
"""

from __future__ import annotations

import math
from dataclasses import field

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, recompute_of, same_width
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, RECOMPUTE, Residuals, saved
from funcops.engine.errors import FLOATS, check, require
from funcops.library.kernels import softcap as kernels

__all__ = ["SoftcapConfig", "SoftcapResiduals"]
__all__ += ["softcap", "softcap_bwd", "softcap_dgrad", "softcap_fwd", "softcap_init", "softcap_wgrad"]


@config
class SoftcapConfig(OpConfig):
    """`cap`: c, above 0."""

    widths = same_width
    featurewise = True

    cap: float = field(kw_only=False)

    def __post_init__(self) -> None:
        require(0 < self.cap < math.inf, "SoftcapConfig", "cap", "above 0, and finite", self.cap)


class SoftcapResiduals(Residuals):
    x: Tensor = saved("[*]", alias="x", needed_by=DGRAD | RECOMPUTE)


@forward(SoftcapConfig)
def softcap_fwd(params: None, x: Tensor, cfg: SoftcapConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, SoftcapResiduals | None]:
    """`y = c tanh(x / c)`. x: [*] -> y: [*]. Raises `TypeError` for a dtype that is not a float."""
    check("softcap_fwd", "x", x, (...,), FLOATS)
    return kernels.softcap_fwd(x, cfg.cap), SoftcapResiduals.keep(cfg, needs, x=x)


@recompute_of(SoftcapResiduals)
def softcap_recompute(residuals: SoftcapResiduals, cfg: SoftcapConfig) -> Tensor:
    """Recompute y, bit for bit."""
    return kernels.softcap_fwd(residuals.x, cfg.cap)


@dgrad_of(SoftcapResiduals)
def softcap_dgrad(residuals: SoftcapResiduals, dy: Tensor, cfg: SoftcapConfig) -> tuple[Tensor, None]:
    """`dx = dy (1 - tanh(x / c)^2)`. No params, so pending is None."""
    if not residuals.needs.x:
        return NO_GRADIENT, None
    x = residuals.x
    check("softcap_dgrad", "dy", dy, x.shape, x.dtype, x)
    return kernels.softcap_bwd(dy, x, cfg.cap), None


softcap = make_op(
    "softcap",
    SoftcapConfig,
    fwd=softcap_fwd,
    dgrad=softcap_dgrad,
    recomputable="elementwise",
    recompute=softcap_recompute,
    mixes="",
)
softcap_init, softcap_bwd, softcap_wgrad = no_params(softcap, softcap_dgrad)
