"""Cast to another float dtype.

    y = x in dtype        dx = dy in the dtype of x

x, dx: [*] of one float dtype; y, dy: [*] of `cfg.dtype`. Kept: nothing. If x already has `cfg.dtype`, y is x itself.

>>> import torch
>>> from funcops import CastConfig, cast_bwd, cast_fwd
>>> y, residuals = cast_fwd(None, torch.ones(2), CastConfig(torch.bfloat16))
>>> y.dtype, cast_bwd(residuals, torch.ones_like(y), CastConfig(torch.bfloat16))[1].dtype
(torch.bfloat16, torch.float32)
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import NO_GRADIENT, Residuals
from funcops.engine.errors import FLOATS, check, require, short

__all__ = ["CastConfig", "CastResiduals", "cast", "cast_bwd", "cast_dgrad", "cast_fwd", "cast_init", "cast_wgrad"]


@config
class CastConfig(OpConfig):
    """`dtype`: the floating dtype of y."""

    widths = same_width
    featurewise = True
    reruns = True

    dtype: torch.dtype = field(kw_only=False)

    def __post_init__(self) -> None:
        require(self.dtype in FLOATS, "CastConfig", "dtype", f"one of {', '.join(map(short, FLOATS))}", self.dtype)


class CastResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(CastConfig)
def cast_fwd(params: None, x: Tensor, cfg: CastConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, CastResiduals | None]:
    """x: [*] -> y: [*] in `cfg.dtype`. Raises `ValueError` or `TypeError` unless x is a float tensor."""
    check("cast_fwd", "x", x, (...,), FLOATS)
    return x.to(cfg.dtype), CastResiduals.keep(cfg, needs, shape=x.shape, dtype=x.dtype)


@dgrad_of(CastResiduals)
def cast_dgrad(residuals: CastResiduals, dy: Any, cfg: CastConfig) -> tuple[Tensor, None]:
    """dx: [*] in the dtype of x. No params, so pending is None."""
    check("cast_dgrad", "dy", dy, residuals.shape, cfg.dtype)
    return dy.to(residuals.dtype) if residuals.needs.x else NO_GRADIENT, None


cast = make_op("cast", CastConfig, fwd=cast_fwd, dgrad=cast_dgrad, mixes="")
cast_init, cast_bwd, cast_wgrad = no_params(cast, cast_dgrad)
