"""Gather, if all ranks of an axis use the result in the same way.

    y = x of rank 0, 1, ... n - 1, along dim        dx = this rank's part of dy

x, dx: [*]; y, dy: the same with n times the size along `dim`; any float dtype. Kept: nothing. dy must be the same on all
ranks; if each has a part of it, use `gather`. The pair of `slice_of`.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.GatherSameConfig(mesh["tp"])
...     y, residuals = dist.gather_same_fwd(None, torch.tensor([1.0 + mesh["tp"].rank]), cfg)
...     return y, dist.gather_same_bwd(residuals, torch.tensor([10.0, 20.0]), cfg)[1]
...
>>> run_ranks({"tp": 2}, each)
[(tensor([1., 2.]), tensor([10.])), (tensor([1., 2.]), tensor([20.]))]
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

__all__ = ["GatherSameConfig", "GatherSameResiduals"]
__all__ += ["gather_same", "gather_same_bwd", "gather_same_dgrad", "gather_same_fwd", "gather_same_init", "gather_same_wgrad"]


@config
class GatherSameConfig(OpConfig):
    """`axis` of n ranks; `dim`: the sharded dimension of x."""

    axis: Axis = field(kw_only=False)
    dim: int = 0

    def __post_init__(self) -> None:
        require_axis("GatherSameConfig", self.axis)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, width * self.axis.size if width and self.dim == -1 else None


class GatherSameResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(GatherSameConfig)
def gather_same_fwd(
    params: None, x: Tensor, cfg: GatherSameConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, GatherSameResiduals | None]:
    """x: [..., m, ...] -> y: [..., n m, ...]. Raises `ValueError` or `TypeError` for an x without that
    dimension, or that is not a float tensor."""
    check_part("gather_same_fwd", "x", x, cfg.dim)
    y = comm.gather(x, cfg.axis, cfg.dim)
    return y, GatherSameResiduals.keep(cfg, needs, shape=y.shape, dtype=y.dtype)


@dgrad_of(GatherSameResiduals)
def gather_same_dgrad(residuals: GatherSameResiduals, dy: Any, cfg: GatherSameConfig) -> tuple[Tensor, None]:
    """This rank's part of dy, a view. No params, so pending is None."""
    check_tensor("gather_same_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return comm.own_slice(dy, cfg.axis, cfg.dim) if residuals.needs.x else NO_GRADIENT, None


gather_same = make_op("gather_same", GatherSameConfig, fwd=gather_same_fwd, dgrad=gather_same_dgrad, view=True)
gather_same_init, gather_same_bwd, gather_same_wgrad = no_params(gather_same, gather_same_dgrad)
