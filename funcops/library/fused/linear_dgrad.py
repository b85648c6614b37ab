"""The input gradients of a linear layer and the step before it: dz = c dy w f'(z), in one product.

Steps: an activation or a scale, and a linear layer whose dx is a product.
"""

from __future__ import annotations

from typing import Any

import torch

from funcops.engine.program.rules import BACKWARD, Rule, Saving, Window, register_fusion
from funcops.library.fused.matchers import alike, alone, by_library, layer, x_shape
from funcops.library.kernels.fused_linear import fused_linear_dgrad
from funcops.library.ops.activation import activation
from funcops.library.ops.scale import scale


def _match(window: Window) -> int | str | None:
    own = layer(window.calls[1]) if len(window.calls) > 1 else None
    if own is None or not own.dx_is_product(window.calls[1].cfg):
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
    if inner != x_shape(calls[1], product) or (z is not None and not alike(dy, z)):
        return NotImplemented
    own, cfg = calls[1].op.layer, calls[1].cfg
    rows = own.dy_rows(dy, cfg)
    pending = own.pending(product, dy, rows, cfg)
    kind, factor = ("", calls[0].cfg.factor) if calls[0].op is scale else (calls[0].cfg.kind, 1.0)
    return fused_linear_dgrad(rows, product.weight, z, kind, factor), [None, pending]


def _saves(window: Window) -> Saving:
    """The product's own result is neither written nor read. torch's kernel applies the factor too, but not a derivative."""
    first, product = window.calls
    derivative = first.op is activation and by_library("kept", window.dtype, product.cfg.weight_shape[1])
    return Saving() if derivative else Saving(2, 1)


rule = register_fusion(Rule("linear dgrad + derivative", BACKWARD, _match, _run, _saves))
