"""Elementwise activation.

    y = f(x)        dx = dy * f'(x)

relu: max(x, 0), f'(0) = 0; squared_relu: max(x, 0)^2; gelu: x Phi(x) (erf); gelu_tanh: its tanh form
(arXiv:1606.08415); quick_gelu: x sigmoid(1.702 x); silu: x sigmoid(x); tanh; sigmoid.

x, y, dy, dx: [*] of one float dtype. Kept: x, an alias: no bytes of its own.

>>> import torch
>>> from funcops import ActivationConfig, activation_bwd, activation_fwd
>>> y, residuals = activation_fwd(None, torch.tensor([-1.0, 2.0]), ActivationConfig("relu"))
>>> y, activation_bwd(residuals, torch.ones(2), ActivationConfig("relu"))[1]
(tensor([0., 2.]), tensor([0., 1.]))
"""

from __future__ import annotations

from dataclasses import field

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, recompute_of, same_width
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, RECOMPUTE, Residuals, saved
from funcops.engine.errors import FLOATS, check, one_of, require
from funcops.library.kernels import activation as kernels

__all__ = ["ActivationConfig", "ActivationResiduals"]
__all__ += ["activation", "activation_bwd", "activation_dgrad", "activation_fwd", "activation_init", "activation_wgrad"]

KINDS = tuple(kernels.ACTIVATIONS)


@config
class ActivationConfig(OpConfig):
    """`kind`: relu, squared_relu, gelu, gelu_tanh, quick_gelu, silu, tanh or sigmoid."""

    widths = same_width
    featurewise = True

    kind: str = field(kw_only=False)

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "ActivationConfig", "kind", one_of(KINDS, self.kind), repr(self.kind))


class ActivationResiduals(Residuals):
    x: Tensor = saved("[*]", alias="x", needed_by=DGRAD | RECOMPUTE)


def activation_kept(cfg: ActivationConfig, needs: Needs, x: Tensor | None) -> ActivationResiduals | None:
    return ActivationResiduals.keep(cfg, needs, x=x)


@forward(ActivationConfig)
def activation_fwd(
    params: None, x: Tensor, cfg: ActivationConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ActivationResiduals | None]:
    """`y = f(x)`. x: [*] -> y: [*]. Raises `TypeError` for a dtype that is not a float."""
    check("activation_fwd", "x", x, (...,), FLOATS)
    return kernels.activation_fwd(x, cfg.kind), activation_kept(cfg, needs, x)


@recompute_of(ActivationResiduals)
def activation_recompute(residuals: ActivationResiduals, cfg: ActivationConfig) -> Tensor:
    """Recompute y, bit for bit."""
    return kernels.activation_fwd(residuals.x, cfg.kind)


@dgrad_of(ActivationResiduals)
def activation_dgrad(residuals: ActivationResiduals, dy: Tensor, cfg: ActivationConfig) -> tuple[Tensor, None]:
    """`dx = dy * f'(x)`. No params, so pending is None."""
    if not residuals.needs.x:
        return NO_GRADIENT, None
    x = residuals.x
    check("activation_dgrad", "dy", dy, x.shape, x.dtype, x)
    return kernels.activation_bwd(dy, x, cfg.kind), None


activation = make_op(
    "activation",
    ActivationConfig,
    fwd=activation_fwd,
    dgrad=activation_dgrad,
    recomputable="elementwise",
    recompute=activation_recompute,
    mixes="",
)
activation_init, activation_bwd, activation_wgrad = no_params(activation, activation_dgrad)
