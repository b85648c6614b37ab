"""Copy to an axis: passes on an x that is the same on all ranks, for each to use in its own way.

    y = x        dx = sum of dy over the axis

x, y, dy, dx: [*]; any float dtype. Kept: nothing. x must be the same on all ranks. y is x itself.
The pair of `sum_over` (Megatron's f).

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.CopyToConfig(mesh["tp"])
...     x = torch.ones(1)
...     y, residuals = dist.copy_to_fwd(None, x, cfg)
...     return y is x, dist.copy_to_bwd(residuals, torch.ones(1), cfg)[1]
...
>>> run_ranks({"tp": 2}, each)
[(True, tensor([2.])), (True, tensor([2.]))]
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

__all__ = ["CopyToConfig", "CopyToResiduals"]
__all__ += ["copy_to", "copy_to_bwd", "copy_to_dgrad", "copy_to_fwd", "copy_to_init", "copy_to_wgrad"]


@config
class CopyToConfig(OpConfig):
    """`axis`: the axis over which the gradient is summed."""

    axis: Axis = field(kw_only=False)

    def __post_init__(self) -> None:
        require_axis("CopyToConfig", self.axis)

    widths = same_width
    featurewise = True


class CopyToResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(CopyToConfig)
def copy_to_fwd(params: None, x: Tensor, cfg: CopyToConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, CopyToResiduals | None]:
    """`y = x`, the same tensor. Raises `ValueError` or `TypeError` unless x is a float tensor."""
    check_tensor("copy_to_fwd", "x", x, (...,), FLOATS)
    return x, CopyToResiduals.keep(cfg, needs, shape=x.shape, dtype=x.dtype)


@dgrad_of(CopyToResiduals)
def copy_to_dgrad(residuals: CopyToResiduals, dy: Any, cfg: CopyToConfig) -> tuple[Tensor, None]:
    """The sum of dy, on every rank. No params, so pending is None."""
    check_tensor("copy_to_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return comm.sum_over(dy, cfg.axis) if residuals.needs.x else NO_GRADIENT, None


copy_to = make_op("copy_to", CopyToConfig, fwd=copy_to_fwd, dgrad=copy_to_dgrad, view=True)
copy_to_init, copy_to_bwd, copy_to_wgrad = no_params(copy_to, copy_to_dgrad)
