"""Shift: sends x along an axis, cyclically.

    y = x of rank r - by        dx = dy of rank r + by        (modulo n)

r: this rank. x, y, dy, dx: [*], of one shape on all ranks; any float dtype. Kept: nothing.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.ShiftConfig(mesh["tp"])
...     y, residuals = dist.shift_fwd(None, torch.tensor([1.0 + mesh["tp"].rank]), cfg)
...     return y, dist.shift_bwd(residuals, y, cfg)[1]
...
>>> run_ranks({"tp": 3}, each)
[(tensor([3.]), tensor([1.])), (tensor([1.]), tensor([2.])), (tensor([2.]), tensor([3.]))]
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

__all__ = ["ShiftConfig", "ShiftResiduals", "shift", "shift_bwd", "shift_dgrad", "shift_fwd", "shift_init", "shift_wgrad"]


@config
class ShiftConfig(OpConfig):
    """`axis` of n ranks; `by`: how far, negative for the other way."""

    axis: Axis = field(kw_only=False)
    by: int = 1

    def __post_init__(self) -> None:
        require_axis("ShiftConfig", self.axis)

    widths = same_width
    featurewise = True


class ShiftResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(ShiftConfig)
def shift_fwd(params: None, x: Tensor, cfg: ShiftConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, ShiftResiduals | None]:
    """y: the x of the rank that is `by` before this one. Raises `ValueError` or `TypeError` unless x is a float tensor."""
    check_tensor("shift_fwd", "x", x, (...,), FLOATS)
    y = comm.shift(x, cfg.axis, cfg.by)
    return y, ShiftResiduals.keep(cfg, needs, shape=y.shape, dtype=y.dtype)


@dgrad_of(ShiftResiduals)
def shift_dgrad(residuals: ShiftResiduals, dy: Any, cfg: ShiftConfig) -> tuple[Tensor, None]:
    """The dy of the rank that is `by` after this one. No params, so pending is None."""
    check_tensor("shift_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return comm.shift(dy, cfg.axis, -cfg.by) if residuals.needs.x else NO_GRADIENT, None


shift = make_op("shift", ShiftConfig, fwd=shift_fwd, dgrad=shift_dgrad, view=True)
shift_init, shift_bwd, shift_wgrad = no_params(shift, shift_dgrad)
