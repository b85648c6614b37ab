"""Modulation of normalised sequences by a condition (the adaptive LayerNorm of DiT).

    y = x (1 + scale) + shift        dx = dy (1 + scale)        d scale = sum over T of dy x        d shift = sum over T of dy

x is `(x, scale, shift)`. x, y, dy, dx: [B, *T, D]; scale, shift and their gradients: [B, D]; one float dtype.
Kept: x and scale, aliases: no bytes of their own. arXiv:2212.09748.

>>> import torch
>>> from funcops import ModulateConfig, modulate_bwd, modulate_fwd
>>> x, scale, shift = torch.ones(1, 4, 2), torch.tensor([[1.0, 2.0]]), torch.zeros(1, 2)
>>> y, residuals = modulate_fwd(None, (x, scale, shift), ModulateConfig())
>>> y[0, 0]
tensor([2., 3.])
>>> dx, dscale, dshift = modulate_bwd(residuals, torch.ones_like(y), ModulateConfig())[1]
>>> dx[0, 0], dscale
(tensor([2., 3.]), tensor([[4., 4.]]))
"""

from __future__ import annotations

import math

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import FLOATS, check, fail
from funcops.library.kernels import modulate as kernels
from funcops.library.kernels.norm import sum_parts
from funcops.library.ops._tuples import require_tuple

__all__ = ["ModulateConfig", "ModulateResiduals"]
__all__ += ["modulate", "modulate_bwd", "modulate_dgrad", "modulate_fwd", "modulate_init", "modulate_wgrad"]


@config
class ModulateConfig(OpConfig):
    """No options."""

    widths = same_width
    featurewise = True


class ModulateResiduals(Residuals, static=("inputs", "shape", "dtype")):
    x: Tensor = saved("[B, *T, D]", alias="x.0", needed_by=DGRAD, of=("x.1",))
    scale: Tensor = saved("[B, D]", alias="x.1", needed_by=DGRAD, of=("x.0",))


def _flat(t: Tensor) -> Tensor:
    """[B, *T, D] as [B, T, D]."""
    return t.reshape(t.shape[0], math.prod(t.shape[1:-1]), t.shape[-1])


@forward(ModulateConfig)
def modulate_fwd(
    params: None, x: tuple[Tensor, Tensor, Tensor], cfg: ModulateConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ModulateResiduals | None]:
    """x: `(x, scale, shift)` -> y: [B, *T, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    t, scale, shift = require_tuple("modulate_fwd", x, "x", "scale", "shift")
    check("modulate_fwd", "x.0 (x)", t, (...,), FLOATS)
    if t.dim() < 2:
        fail("modulate_fwd", "x.0 (x)", "[B, ..., D]", list(t.shape))
    for place, name, part in ((1, "scale", scale), (2, "shift", shift)):
        check("modulate_fwd", f"x.{place} ({name})", part, (t.shape[0], t.shape[-1]), t.dtype, t)
    y = kernels.modulate_fwd(_flat(t), scale, shift).reshape(t.shape)
    return y, ModulateResiduals.keep(cfg, needs, x=t, scale=scale, inputs=Inputs.of(x), shape=t.shape, dtype=t.dtype)


@dgrad_of(ModulateResiduals)
def modulate_dgrad(residuals: ModulateResiduals, dy: Tensor, cfg: ModulateConfig) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    """`(dx, dscale, dshift)`. No params, so pending is None."""
    x, scale, needs = residuals.x, residuals.scale, residuals.needs
    check("modulate_dgrad", "dy", dy, residuals.shape, residuals.dtype, x if scale is None else scale)
    dx, *sums = kernels.modulate_bwd(
        _flat(dy), None if x is None else _flat(x), scale, needs.input(0), needs.input(1), needs.input(2)
    )
    whole = (dy.shape[0], dy.shape[-1])
    found = [None if parts is None else sum_parts(parts, dy.dtype).reshape(whole) for parts in sums]
    return residuals.inputs.make((None if dx is None else dx.reshape(dy.shape), *found)), None


modulate = make_op("modulate", ModulateConfig, fwd=modulate_fwd, dgrad=modulate_dgrad)
modulate_init, modulate_bwd, modulate_wgrad = no_params(modulate, modulate_dgrad)
