"""Scatter of a sum: adds the x of all ranks of an axis, and gives each rank a part of the sum.

    y = this rank's part, along dim, of the sum of x over the axis        dx = dy of rank 0, 1, ... n - 1, along dim

x, dx: [*]; y, dy: the same with 1/n of the size along `dim`; any float dtype. Kept: nothing. The pair of `gather`.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.ScatterSumConfig(mesh["tp"])
...     y, residuals = dist.scatter_sum_fwd(None, torch.tensor([1.0, 2.0]), cfg)
...     return y, dist.scatter_sum_bwd(residuals, torch.tensor([10.0 + mesh["tp"].rank]), cfg)[1]
...
>>> run_ranks({"tp": 2}, each)
[(tensor([2.]), tensor([10., 11.])), (tensor([4.]), tensor([10., 11.]))]
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_divides, check_part, check_tensor, require_axis
from funcops.distributed.mesh import Axis
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import NO_GRADIENT, Residuals

__all__ = ["ScatterSumConfig", "ScatterSumResiduals"]
__all__ += ["scatter_sum", "scatter_sum_bwd", "scatter_sum_dgrad", "scatter_sum_fwd", "scatter_sum_init", "scatter_sum_wgrad"]


@config
class ScatterSumConfig(OpConfig):
    """`axis` of n ranks; `dim`: the sharded dimension of y."""

    axis: Axis = field(kw_only=False)
    dim: int = 0

    def __post_init__(self) -> None:
        require_axis("ScatterSumConfig", self.axis)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, width // self.axis.size if width and self.dim == -1 else None


class ScatterSumResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(ScatterSumConfig)
def scatter_sum_fwd(
    params: None, x: Tensor, cfg: ScatterSumConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ScatterSumResiduals | None]:
    """x: [..., n m, ...] -> y: [..., m, ...]. Raises `ValueError` or `TypeError` for an x whose size the axis does not
    divide, or that is not a float tensor."""
    check_divides("scatter_sum_fwd", "x", x, check_part("scatter_sum_fwd", "x", x, cfg.dim), cfg.axis)
    y = comm.scatter_sum(x, cfg.axis, cfg.dim)
    return y, ScatterSumResiduals.keep(cfg, needs, shape=y.shape, dtype=y.dtype)


@dgrad_of(ScatterSumResiduals)
def scatter_sum_dgrad(residuals: ScatterSumResiduals, dy: Any, cfg: ScatterSumConfig) -> tuple[Tensor, None]:
    """The dy of all ranks, concatenated. No params, so pending is None."""
    check_tensor("scatter_sum_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return comm.gather(dy, cfg.axis, cfg.dim) if residuals.needs.x else NO_GRADIENT, None


scatter_sum = make_op("scatter_sum", ScatterSumConfig, fwd=scatter_sum_fwd, dgrad=scatter_sum_dgrad, view=True)
scatter_sum_init, scatter_sum_bwd, scatter_sum_wgrad = no_params(scatter_sum, scatter_sum_dgrad)
