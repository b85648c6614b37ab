"""Slice: each rank of an axis takes its part of an x that is the same on all.

    y = this rank's part of x, along dim        dx = dy of rank 0, 1, ... n - 1, along dim

x, dx: [*]; y, dy: the same with 1/n of the size along `dim`; any float dtype. Kept: nothing. x must be the same on all
ranks. y is a view of it. The pair of `gather_same`.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.SliceOfConfig(mesh["tp"])
...     y, residuals = dist.slice_of_fwd(None, torch.tensor([1.0, 2.0]), cfg)
...     return y, dist.slice_of_bwd(residuals, 10 * y, cfg)[1]
...
>>> run_ranks({"tp": 2}, each)
[(tensor([1.]), tensor([10., 20.])), (tensor([2.]), tensor([10., 20.]))]
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

__all__ = ["SliceOfConfig", "SliceOfResiduals"]
__all__ += ["slice_of", "slice_of_bwd", "slice_of_dgrad", "slice_of_fwd", "slice_of_init", "slice_of_wgrad"]


@config
class SliceOfConfig(OpConfig):
    """`axis` of n ranks; `dim`: the sharded dimension of y."""

    axis: Axis = field(kw_only=False)
    dim: int = 0

    def __post_init__(self) -> None:
        require_axis("SliceOfConfig", self.axis)

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return None, width // self.axis.size if width and self.dim == -1 else None


class SliceOfResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(SliceOfConfig)
def slice_of_fwd(
    params: None, x: Tensor, cfg: SliceOfConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, SliceOfResiduals | None]:
    """x: [..., n m, ...] -> y: [..., m, ...], a view. Raises `ValueError` or `TypeError` for an x whose size the axis
    does not divide, or that is not a float tensor."""
    check_divides("slice_of_fwd", "x", x, check_part("slice_of_fwd", "x", x, cfg.dim), cfg.axis)
    y = comm.own_slice(x, cfg.axis, cfg.dim)
    return y, SliceOfResiduals.keep(cfg, needs, shape=y.shape, dtype=y.dtype)


@dgrad_of(SliceOfResiduals)
def slice_of_dgrad(residuals: SliceOfResiduals, dy: Any, cfg: SliceOfConfig) -> tuple[Tensor, None]:
    """The dy of all ranks, concatenated. No params, so pending is None."""
    check_tensor("slice_of_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return comm.gather(dy, cfg.axis, cfg.dim) if residuals.needs.x else NO_GRADIENT, None


slice_of = make_op("slice_of", SliceOfConfig, fwd=slice_of_fwd, dgrad=slice_of_dgrad, view=True)
slice_of_init, slice_of_bwd, slice_of_wgrad = no_params(slice_of, slice_of_dgrad)
