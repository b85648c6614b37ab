"""The input gradients of a linear layer and the step before it: dz = c dy w f'(z), in one product.

Steps: an activation and a linear, or a scale and a linear.
"""

from __future__ import annotations

from typing import Any

import torch

from funcops.fused.matchers import alike, alone, by_library
from funcops.kernels.fused_linear import fused_linear_dgrad
from funcops.ops.activation import activation
from funcops.ops.linear import LinearPending, linear
from funcops.ops.scale import scale
from funcops.program.rules import BACKWARD, Rule, Saving, Window, register_fusion


def _match(window: Window) -> int | str | None:
    if len(window.calls) < 2 or not alone(window.calls[1], linear):
        return None
    if not alone(window.calls[0], activation) and not alone(window.calls[0], scale):
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    return 2 if window.needs[0].x and window.needs[1].x else "no gradient is asked of its input"


def _run(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any]) -> Any:
    before, product = kept
    if not alike(dy, product.weight) or dy.shape != product.y_shape:
        return NotImplemented
    z = before.x if calls[0].op is activation else None
    inner = before.shape if z is None else z.shape
    if inner != (*dy.shape[:-1], product.weight.shape[1]) or (z is not None and not alike(dy, z)):
        return NotImplemented
    pending = LinearPending.keep(calls[1].cfg, product.needs, x=product.x, dy=dy)
    if calls[0].op is scale:
        return fused_linear_dgrad(dy, product.weight, None, "", calls[0].cfg.factor), [None, pending]
    return fused_linear_dgrad(dy, product.weight, z, calls[0].cfg.kind, 1.0), [None, pending]


def _saves(window: Window) -> Saving:
    """The product's own result is neither written nor read. torch's kernel applies the factor too, but not a derivative."""
    first, product = window.calls
    derivative = first.op is activation and by_library("kept", window.dtype, product.cfg.in_features)
    return Saving() if derivative else Saving(2, 1)


rule = register_fusion(Rule("linear dgrad + derivative", BACKWARD, _match, _run, _saves))
