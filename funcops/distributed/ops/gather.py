"""Gather: concatenates the parts of all ranks of an axis, on each of them.

    y = x of rank 0, 1, ... n - 1, along dim        dx = this rank's part of the sum of dy over the axis

x, dx: [*]; y, dy: the same with n times the size along `dim`; any float dtype. Kept: nothing. The ranks may use y in
different ways, so that each has a part of its gradient: their sum is scattered. `scatter_sum` is the pair of this op; if all
ranks have the same dy, use `gather_same`.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.GatherConfig(mesh["tp"])
...     y, residuals = dist.gather_fwd(None, torch.tensor([1.0 + mesh["tp"].rank]), cfg)
...     return y, dist.gather_bwd(residuals, torch.tensor([10.0, 20.0]), cfg)[1]
...
>>> run_ranks({"tp": 2}, each)
[(tensor([1., 2.]), tensor([20.])), (tensor([1., 2.]), tensor([40.]))]
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_part, check_tensor, require_axis
from funcops.distributed.mesh import Axis
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import NO_GRADIENT, Residuals

__all__ = ["GatherConfig", "GatherResiduals", "gather", "gather_bwd", "gather_dgrad", "gather_fwd", "gather_init", "gather_wgrad"]


@config
class GatherConfig(OpConfig):
    """`axis` of n ranks; `dim`: the sharded dimension of x."""

    axis: Axis = field(kw_only=False)
    dim: int = 0

    def __post_init__(self) -> None:
        require_axis("GatherConfig", self.axis)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, width * self.axis.size if width and self.dim == -1 else None


class GatherResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(GatherConfig)
def gather_fwd(params: None, x: Tensor, cfg: GatherConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, GatherResiduals | None]:
    """x: [..., m, ...] -> y: [..., n m, ...]. Raises `ValueError` or `TypeError` for an x without that
    dimension, or that is not a float tensor."""
    check_part("gather_fwd", "x", x, cfg.dim)
    y = comm.gather(x, cfg.axis, cfg.dim)
    return y, GatherResiduals.keep(cfg, needs, shape=y.shape, dtype=y.dtype)


@dgrad_of(GatherResiduals)
def gather_dgrad(residuals: GatherResiduals, dy: Any, cfg: GatherConfig) -> tuple[Tensor, None]:
    """This rank's part of the sum of dy over the axis. No params, so pending is None."""
    check_tensor("gather_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return comm.scatter_sum(dy, cfg.axis, cfg.dim) if residuals.needs.x else NO_GRADIENT, None


gather = make_op("gather", GatherConfig, fwd=gather_fwd, dgrad=gather_dgrad, view=True)
gather_init, gather_bwd, gather_wgrad = no_params(gather, gather_dgrad)
