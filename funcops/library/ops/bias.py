"""Bias.

    y = x + b        dx = dy        db = sum over rows of dy

x, y, dy, dx: [*, D]; b: [D]; one float dtype. Kept: nothing. dx is dy itself.

>>> import torch
>>> from funcops import BiasConfig, BiasParams, bias_bwd, bias_fwd
>>> y, residuals = bias_fwd(BiasParams(torch.tensor([1.0, 2.0])), torch.zeros(3, 2), BiasConfig(2))
>>> y[0], bias_bwd(residuals, torch.ones(3, 2), BiasConfig(2))[0].bias
(tensor([1., 2.]), tensor([3., 3.]))
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import NO_GRADIENT, WGRAD, Pending, Residuals, saved
from funcops.engine.errors import check, require
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import linear as linear_kernels
from funcops.library.kernels import pointwise as kernels

__all__ = ["BiasConfig", "BiasParams", "BiasPending", "BiasResiduals"]
__all__ += ["bias", "bias_bwd", "bias_dgrad", "bias_fwd", "bias_init", "bias_wgrad"]


@config
class BiasConfig(OpConfig):
    """`dim`: the size D of the last dimension."""

    dim: int = field(kw_only=False)
    reruns = True

    def __post_init__(self) -> None:
        require(isinstance(self.dim, int) and self.dim >= 1, "BiasConfig", "dim", "at least 1", self.dim)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.dim, self.dim


@tree
class BiasParams:
    bias: Tensor = leaf("[D]")


class BiasResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


class BiasPending(Pending, static=("dtype",)):
    dy: Tensor = saved("[*, D]", alias="dy", needed_by=WGRAD)  # or partial sums of it [P, D], in a wider dtype


@init_of(BiasConfig)
def bias_init(cfg: BiasConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None) -> BiasParams:
    """Zeros; draws nothing."""
    return BiasParams(torch.zeros(cfg.dim, device=device, dtype=dtype))


def bias_kept(cfg: BiasConfig, needs: Needs, x: Tensor) -> BiasResiduals | None:
    """Residuals for x, or for any tensor of its shape and dtype."""
    return BiasResiduals.keep(cfg, needs, shape=x.shape, dtype=x.dtype)


@forward(BiasConfig, BiasParams)
def bias_fwd(params: BiasParams, x: Tensor, cfg: BiasConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, BiasResiduals | None]:
    """`y = x + b`. x: [*, D] -> y: [*, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    check("bias_fwd", "x", x, (..., cfg.dim))
    check("bias_fwd", "params.bias", params.bias, (cfg.dim,), x.dtype, x)
    return kernels.add(x, params.bias), bias_kept(cfg, needs, x)


@dgrad_of(BiasResiduals)
def bias_dgrad(residuals: BiasResiduals, dy: Tensor, cfg: BiasConfig) -> tuple[Tensor, BiasPending | None]:
    """`dx = dy`, and the pending sum over dy."""
    check("bias_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return dy if residuals.needs.x else NO_GRADIENT, BiasPending.keep(cfg, residuals.needs, dy=dy, dtype=residuals.dtype)


@wgrad_of(BiasPending, BiasParams)
def bias_wgrad(pending: BiasPending, cfg: BiasConfig, *, into: BiasParams | None = None) -> BiasParams:
    """`db = sum of dy`; added to `into` if given."""
    _, db = linear_kernels.linear_wgrad(pending.dy, None, True)
    if db.dtype is not pending.dtype and (into is None or getattr(into.bias, "dtype", None) is not db.dtype):
        db = db.to(pending.dtype)
    return accumulate("bias_wgrad", BiasParams(db), into)


bias = make_op("bias", BiasConfig, init=bias_init, fwd=bias_fwd, dgrad=bias_dgrad, wgrad=bias_wgrad, mixes="")
bias_bwd = both_halves(bias, bias_dgrad, bias_wgrad)
