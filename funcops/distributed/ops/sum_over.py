"""Sum over an axis: adds the x of all ranks, on each of them.

    y = sum of x over the axis        dx = dy

x, y, dy, dx: [*]; any float dtype. Kept: nothing. y is the same on all ranks, and so must dy be: dx is dy itself. The pair of
`copy_to` (Megatron's g).

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg, dy = dist.SumOverConfig(mesh["tp"]), torch.ones(1)
...     y, residuals = dist.sum_over_fwd(None, torch.tensor([1.0 + mesh["tp"].rank]), cfg)
...     return y, dist.sum_over_bwd(residuals, dy, cfg)[1] is dy
...
>>> run_ranks({"tp": 2}, each)
[(tensor([3.]), True), (tensor([3.]), True)]
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_tensor, require_axis
from funcops.distributed.mesh import Axis
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import NO_GRADIENT, Residuals
from funcops.engine.errors import FLOATS

__all__ = ["SumOverConfig", "SumOverResiduals"]
__all__ += ["sum_over", "sum_over_bwd", "sum_over_dgrad", "sum_over_fwd", "sum_over_init", "sum_over_wgrad"]


@config
class SumOverConfig(OpConfig):
    """`axis`: the axis to sum over."""

    axis: Axis = field(kw_only=False)

    def __post_init__(self) -> None:
        require_axis("SumOverConfig", self.axis)

    widths = same_width
    featurewise = True


class SumOverResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(SumOverConfig)
def sum_over_fwd(
    params: None, x: Tensor, cfg: SumOverConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, SumOverResiduals | None]:
    """y: the sum, on every rank. Raises `ValueError` or `TypeError` unless x is a float tensor."""
    check_tensor("sum_over_fwd", "x", x, (...,), FLOATS)
    y = comm.sum_over(x, cfg.axis)
    return y, SumOverResiduals.keep(cfg, needs, shape=y.shape, dtype=y.dtype)


@dgrad_of(SumOverResiduals)
def sum_over_dgrad(residuals: SumOverResiduals, dy: Any, cfg: SumOverConfig) -> tuple[Tensor, None]:
    """`dx = dy`, the same tensor. No params, so pending is None."""
    check_tensor("sum_over_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return dy if residuals.needs.x else NO_GRADIENT, None


sum_over = make_op("sum_over", SumOverConfig, fwd=sum_over_fwd, dgrad=sum_over_dgrad, view=True)
sum_over_init, sum_over_bwd, sum_over_wgrad = no_params(sum_over, sum_over_dgrad)
