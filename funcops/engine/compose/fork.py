"""Fork: return the input twice.

    y = (x, x)        dx = dy_0 + dy_1

x, dx and both parts of y and dy: [*] of one float dtype. A part of dy may be None, which means zero. Kept: nothing.

>>> import torch
>>> from funcops import ForkConfig, fork_bwd, fork_fwd
>>> (a, b), residuals = fork_fwd(None, torch.ones(2), ForkConfig())
>>> a is b, fork_bwd(residuals, (torch.ones(2), torch.full((2,), 3.0)), ForkConfig())[1]
(True, tensor([4., 4.]))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import NO_GRADIENT, Residuals
from funcops.engine.errors import FLOATS, check, describe, fail

__all__ = ["ForkConfig", "ForkResiduals", "fork", "fork_bwd", "fork_dgrad", "fork_fwd", "fork_init", "fork_wgrad"]


@config
class ForkConfig(OpConfig):
    """No options."""

    widths = same_width
    featurewise = True


class ForkResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


def fork_kept(cfg: ForkConfig, needs: Needs, x: Tensor) -> ForkResiduals | None:
    return ForkResiduals.keep(cfg, needs, shape=x.shape, dtype=x.dtype)


@forward(ForkConfig)
def fork_fwd(
    params: None, x: Tensor, cfg: ForkConfig, *, needs: Needs = Needs.ALL
) -> tuple[tuple[Tensor, Tensor], ForkResiduals | None]:
    """`y = (x, x)`, the same tensor twice. Raises `ValueError` or `TypeError` unless x is a float tensor."""
    check("fork_fwd", "x", x, (...,), FLOATS)
    return (x, x), fork_kept(cfg, needs, x)


@dgrad_of(ForkResiduals)
def fork_dgrad(residuals: ForkResiduals, dy: Any, cfg: ForkConfig) -> tuple[Tensor, None]:
    """`dx = dy_0 + dy_1`. No params, so pending is None."""
    if not isinstance(dy, tuple) or len(dy) != 2:
        fail("fork_dgrad", "dy", "a tuple of 2 (None for zero)", describe(dy), TypeError)
    for i, part in enumerate(dy):
        if part is not None:
            check("fork_dgrad", f"dy.{i}", part, residuals.shape, residuals.dtype)
    a, b = dy
    # a part without a gradient adds nothing: the other one is dx itself, without a copy
    if not residuals.needs.x or a is None or b is None:
        return (b if a is None else a) if residuals.needs.x else NO_GRADIENT, None
    return a + b, None


fork = make_op("fork", ForkConfig, fwd=fork_fwd, dgrad=fork_dgrad, view=True, mixes="")
fork_init, fork_bwd, fork_wgrad = no_params(fork, fork_dgrad)
