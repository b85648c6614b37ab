"""Sum of two inputs.

    y = a + b        da = db = dy

a, b, y, dy: [*] of one shape and float dtype. Kept: nothing. da and db are dy itself.

>>> import torch
>>> from funcops import AddConfig, add_bwd, add_fwd
>>> y, residuals = add_fwd(None, (torch.ones(2), torch.ones(2)), AddConfig())
>>> y, add_bwd(residuals, torch.ones(2), AddConfig())[1]
(tensor([2., 2.]), (tensor([1., 1.]), tensor([1., 1.])))
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import Inputs, Residuals
from funcops.engine.errors import FLOATS, check, not_a_tuple

__all__ = ["AddConfig", "AddResiduals", "add", "add_bwd", "add_dgrad", "add_fwd", "add_init", "add_wgrad"]


@config
class AddConfig(OpConfig):
    """No options."""

    widths = same_width
    featurewise = True
    reruns = True


class AddResiduals(Residuals, static=("inputs", "shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


def add_kept(cfg: AddConfig, needs: Needs, x: tuple[Tensor, Tensor]) -> AddResiduals | None:
    return AddResiduals.keep(cfg, needs, inputs=Inputs.of(x), shape=x[0].shape, dtype=x[0].dtype)


@forward(AddConfig)
def add_fwd(
    params: None, x: tuple[Tensor, Tensor], cfg: AddConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, AddResiduals | None]:
    """`y = a + b`. x: `(a, b)`, of one shape: nothing is broadcast. Raises `ValueError` or `TypeError` unless both are float
    tensors of one shape, dtype and device."""
    if not isinstance(x, tuple) or len(x) != 2:
        not_a_tuple("add_fwd", x, "a", "b")
    a, b = x
    check("add_fwd", "x.0", a, (...,), FLOATS)
    # nothing is broadcast: da and db are dy itself, and not sums of it
    check("add_fwd", "x.1", b, a.shape, a.dtype, a)
    return a + b, add_kept(cfg, needs, x)


@dgrad_of(AddResiduals)
def add_dgrad(residuals: AddResiduals, dy: Any, cfg: AddConfig) -> tuple[tuple[Tensor, Tensor], None]:
    """`(dy, dy)`. No params, so pending is None."""
    needs = residuals.needs
    check("add_dgrad", "dy", dy, residuals.shape, residuals.dtype)
    return residuals.inputs.make(dy if needs.input(i) else None for i in range(2)), None


add = make_op("add", AddConfig, fwd=add_fwd, dgrad=add_dgrad, mixes="")
add_init, add_bwd, add_wgrad = no_params(add, add_dgrad)
