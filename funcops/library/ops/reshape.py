"""Reshape of the trailing dimensions.

    y = x as [*, *out]        dx = dy as [*, *in]

x, dx: [*, *in]; y, dy: [*, *out]; any dtype. Kept: nothing. y is a view of x if x's strides allow it, and so is dx of dy.

>>> import torch
>>> from funcops import ReshapeConfig, reshape_bwd, reshape_fwd
>>> cfg = ReshapeConfig((6,), (2, 3))
>>> y, residuals = reshape_fwd(None, torch.ones(4, 6), cfg)
>>> y.shape, reshape_bwd(residuals, y, cfg)[1].shape
(torch.Size([4, 2, 3]), torch.Size([4, 6]))
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import NO_GRADIENT, Residuals, static
from funcops.engine.errors import FLOATS, check, check_rows, require

__all__ = ["ReshapeConfig", "ReshapeResiduals"]
__all__ += ["reshape", "reshape_bwd", "reshape_dgrad", "reshape_fwd", "reshape_init", "reshape_wgrad"]


@config
class ReshapeConfig(OpConfig):
    """`in_shape` and `out_shape`: the trailing sizes before and after, with the same product; leading dimensions stay."""

    in_shape: tuple[int, ...] = field(kw_only=False)
    out_shape: tuple[int, ...] = field(kw_only=False)
    reruns = True

    def __post_init__(self) -> None:
        for name in ("in_shape", "out_shape"):
            sizes = getattr(self, name)
            right = isinstance(sizes, tuple) and all(isinstance(n, int) and n >= 1 for n in sizes)
            require(right, "ReshapeConfig", name, "a tuple of sizes of at least 1", sizes)
        same = math.prod(self.in_shape) == math.prod(self.out_shape)
        require(same, "ReshapeConfig", "out_shape", f"sizes with the product of in_shape {self.in_shape}", self.out_shape)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return (self.in_shape or (None,))[-1], (self.out_shape or (None,))[-1]

    def sharded(self, dim: int, n: int) -> tuple[ReshapeConfig, int]:
        """The config for an x sharded over n ranks along dim -`dim`, and the sharded dim of y, counted from the end. The dim must
        be the first that is reshaped, or come before it."""
        wide, deep = len(self.in_shape), len(self.out_shape)
        if wide < dim:
            return self, dim + deep - wide
        right = wide == dim and deep > 0
        require(right, "ReshapeConfig", "in_shape", f"{dim} sizes, as x is sharded along dim -{dim}", self.in_shape)
        for name in ("in_shape", "out_shape"):
            sizes = getattr(self, name)
            wanted = f"sizes of which the first is a multiple of {n}, the number of ranks"
            require(sizes[0] % n == 0, "ReshapeConfig", name, wanted, sizes)
        first = ((sizes[0] // n, *sizes[1:]) for sizes in (self.in_shape, self.out_shape))
        return ReshapeConfig(*first), deep


class ReshapeResiduals(Residuals, static=("dtype",)):
    x_shape: torch.Size = static()
    y_shape: torch.Size = static()


def reshape_kept(cfg: ReshapeConfig, needs: Needs, x_shape: torch.Size, y: Tensor) -> ReshapeResiduals | None:
    return ReshapeResiduals.keep(cfg, needs, x_shape=x_shape, y_shape=y.shape, dtype=y.dtype)


@forward(ReshapeConfig)
def reshape_fwd(params: None, x: Tensor, cfg: ReshapeConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, ReshapeResiduals | None]:
    """x: [*, *in] -> y: [*, *out]. Raises `ValueError` or `TypeError` for a wrong shape or dtype."""
    inner = cfg.in_shape
    if len(inner) == 1:
        check_rows("reshape_fwd", "x", x, inner[0])
    else:
        check("reshape_fwd", "x", x, (..., *inner), FLOATS)
    x_shape = x.shape
    y = torch.reshape(x, (*x_shape[: len(x_shape) - len(inner)], *cfg.out_shape))
    return y, reshape_kept(cfg, needs, x_shape, y)


@dgrad_of(ReshapeResiduals)
def reshape_dgrad(residuals: ReshapeResiduals, dy: Any, cfg: ReshapeConfig) -> tuple[Tensor, None]:
    """dx: [*, *in]. No params, so pending is None."""
    check("reshape_dgrad", "dy", dy, residuals.y_shape, residuals.dtype)
    return torch.reshape(dy, residuals.x_shape) if residuals.needs.x else NO_GRADIENT, None


reshape = make_op("reshape", ReshapeConfig, fwd=reshape_fwd, dgrad=reshape_dgrad, view=True, mixes="")
reshape_init, reshape_bwd, reshape_wgrad = no_params(reshape, reshape_dgrad)
