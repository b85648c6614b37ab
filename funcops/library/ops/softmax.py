"""Softmax over the last dimension.

    y = exp(x) / sum_j exp(x_j)        dx = y (dy - sum_j dy_j y_j)

x, y, dy, dx: [*, D] of one float dtype. Kept: y, the caller's own output: no bytes of its own.

>>> import torch
>>> from funcops import SoftmaxConfig, softmax_bwd, softmax_fwd
>>> y, residuals = softmax_fwd(None, torch.zeros(2), SoftmaxConfig())
>>> y, softmax_bwd(residuals, torch.tensor([1.0, 0.0]), SoftmaxConfig())[1]
(tensor([0.5000, 0.5000]), tensor([ 0.2500, -0.2500]))
"""

from __future__ import annotations

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, Residuals, saved
from funcops.engine.errors import FLOATS, check, fail
from funcops.library.kernels import softmax as kernels

__all__ = ["SoftmaxConfig", "SoftmaxResiduals"]
__all__ += ["softmax", "softmax_bwd", "softmax_dgrad", "softmax_fwd", "softmax_init", "softmax_wgrad"]


@config
class SoftmaxConfig(OpConfig):
    """No options."""

    widths = same_width


class SoftmaxResiduals(Residuals):
    y: Tensor = saved("[*, D]", alias="y", needed_by=DGRAD)


@forward(SoftmaxConfig)
def softmax_fwd(params: None, x: Tensor, cfg: SoftmaxConfig, *, needs: Needs = Needs.ALL) -> tuple[Tensor, SoftmaxResiduals | None]:
    """x: [*, D] -> y: [*, D]. A row of -inf alone gives NaN, as in PyTorch. Raises `ValueError` for a scalar, `TypeError` for a
    dtype that is not a float."""
    check("softmax_fwd", "x", x, (...,), FLOATS)
    if x.dim() < 1:
        fail("softmax_fwd", "x", "[..., D]", list(x.shape))
    y = kernels.softmax_fwd(x)
    return y, SoftmaxResiduals.keep(cfg, needs, y=y)


@dgrad_of(SoftmaxResiduals)
def softmax_dgrad(residuals: SoftmaxResiduals, dy: Tensor, cfg: SoftmaxConfig) -> tuple[Tensor, None]:
    """`dx = y (dy - sum(dy y))`. No params, so pending is None."""
    if not residuals.needs.x:
        return NO_GRADIENT, None
    y = residuals.y
    check("softmax_dgrad", "dy", dy, y.shape, y.dtype, y)
    return kernels.softmax_bwd(dy, y), None


softmax = make_op("softmax", SoftmaxConfig, fwd=softmax_fwd, dgrad=softmax_dgrad, mixes="")
softmax_init, softmax_bwd, softmax_wgrad = no_params(softmax, softmax_dgrad)
