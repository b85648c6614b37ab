"""Scale by a constant.

    y = c x        dx = c dy

x, y, dy, dx: [*] of one float dtype. Kept: nothing.

>>> import torch
>>> from funcops import ScaleConfig, scale_bwd, scale_fwd
>>> y, residuals = scale_fwd(None, torch.ones(2), ScaleConfig(3.0))
>>> y, scale_bwd(residuals, torch.ones(2), ScaleConfig(3.0))[1]
(tensor([3., 3.]), tensor([3., 3.]))
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import NO_GRADIENT, Residuals
from funcops.engine.errors import FLOATS, check, require
from funcops.library.kernels import pointwise as kernels

__all__ = ["ScaleConfig", "ScaleResiduals", "scale", "scale_bwd", "scale_dgrad", "scale_fwd", "scale_init", "scale_wgrad"]


@config
class ScaleConfig(OpConfig):
    """`factor`: the constant c, finite."""

    widths = same_width
    featurewise = True
    reruns = True

    factor: float = field(kw_only=False)

    def __post_init__(self) -> None:
        require(math.isfinite(self.factor), "ScaleConfig", "factor", "finite", self.factor)


class ScaleResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


def scale_kept(cfg: ScaleConfig, needs: Needs, x: Tensor) -> ScaleResiduals | None:
    """Residuals for x, or for any tensor of its shape and dtype."""
    return ScaleResiduals.keep(cfg, needs, shape=x.shape, dtype=x.dtype)


@forward(ScaleConfig)
def scale_fwd(params: None, x: Tensor, cfg: ScaleConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, ScaleResiduals | None]:
    """`y = c x`. x: [*] -> y: [*]. Raises `ValueError` or `TypeError` unless x is a float tensor."""
    check("scale_fwd", "x", x, (...,), FLOATS)
    return kernels.scale(x, cfg.factor), scale_kept(cfg, needs, x)


@dgrad_of(ScaleResiduals)
def scale_dgrad(residuals: ScaleResiduals, dy: Any, cfg: ScaleConfig) -> tuple[Tensor, None]:
    """`dx = c dy`. No params, so pending is None."""
    check("scale_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return kernels.scale(dy, cfg.factor) if residuals.needs.x else NO_GRADIENT, None


scale = make_op("scale", ScaleConfig, fwd=scale_fwd, dgrad=scale_dgrad, mixes="")
scale_init, scale_bwd, scale_wgrad = no_params(scale, scale_dgrad)
