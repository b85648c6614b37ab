"""Identity.

    y = x        dx = dy

x, y, dy, dx: [*], any float dtype. Kept: nothing. y is x itself, dx is dy itself.

>>> import torch
>>> from funcops import IdentityConfig, identity_bwd, identity_fwd
>>> x, dy = torch.ones(2), torch.ones(2)
>>> y, residuals = identity_fwd(None, x, IdentityConfig())
>>> y is x, identity_bwd(residuals, dy, IdentityConfig())[1] is dy
(True, True)
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import NO_GRADIENT, Residuals
from funcops.engine.errors import FLOATS, check

__all__ = ["IdentityConfig", "IdentityResiduals"]
__all__ += ["identity", "identity_bwd", "identity_dgrad", "identity_fwd", "identity_init", "identity_wgrad"]


@config
class IdentityConfig(OpConfig):
    """No options."""

    widths = same_width
    featurewise = True
    reruns = True


class IdentityResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(IdentityConfig)
def identity_fwd(
    params: None, x: Tensor, cfg: IdentityConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, IdentityResiduals | None]:
    """`y = x`, the same tensor. Raises `ValueError` or `TypeError` unless x is a float tensor."""
    check("identity_fwd", "x", x, (...,), FLOATS)
    # the shape and dtype are kept only to check dy by them
    return x, IdentityResiduals.keep(cfg, needs, shape=x.shape, dtype=x.dtype)


@dgrad_of(IdentityResiduals)
def identity_dgrad(residuals: IdentityResiduals, dy: Any, cfg: IdentityConfig) -> tuple[Tensor, None]:
    """`dx = dy`, the same tensor. No params, so pending is None."""
    check("identity_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return dy if residuals.needs.x else NO_GRADIENT, None


identity = make_op("identity", IdentityConfig, fwd=identity_fwd, dgrad=identity_dgrad, view=True, mixes="")
identity_init, identity_bwd, identity_wgrad = no_params(identity, identity_dgrad)
