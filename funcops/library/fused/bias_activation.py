"""A bias and the activation that follows it: one kernel forward if nothing is saved; one kernel backward for the derivative and the
bias gradient.

Steps: a bias and an activation; forward, also a linear layer in low precision that has a bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from funcops.engine.program.lower import Call
from funcops.engine.program.rules import BACKWARD, FORWARD, Rule, Saving, Window, register_fusion
from funcops.library.fused.matchers import adds, alike, alone, before_bias
from funcops.library.kernels.bias_activation import bias_activation_bwd, bias_activation_fwd
from funcops.library.ops.activation import activation
from funcops.library.ops.bias import BiasPending, bias


def _match(window: Window, first: Callable[[Call], bool]) -> int | str | None:
    if len(window.calls) < 2 or not first(window.calls[0]) or not alone(window.calls[1], activation):
        return None
    return "float64 runs on torch" if window.dtype is torch.float64 else 2


def _match_forward(window: Window) -> int | str | None:
    size = _match(window, adds)
    return "the activation keeps the sum" if size == 2 and window.needs[1].x else size


def _match_backward(window: Window) -> int | str | None:
    size = _match(window, lambda call: alone(call, bias))
    return "no gradient is asked of the sum" if size == 2 and not window.needs[1].x else size


def _run(calls: Any, params: Any, main: Any, values: dict[int, Any]) -> Any:
    found = before_bias(calls[0], params[0], main)
    if found is NotImplemented:
        return NotImplemented
    return bias_activation_fwd(found[0], params[0].bias, calls[1].cfg.kind), [found[1], None]


def _run_backward(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any]) -> Any:
    first, z = kept[0], kept[1].x
    if not alike(dy, z) or not dy.shape == z.shape == first.shape:
        return NotImplemented
    dz, parts = bias_activation_bwd(dy, z, None, calls[1].cfg.kind, bool(first.needs.params))
    pending = BiasPending.keep(calls[0].cfg, first.needs, dy=parts, dtype=first.dtype)
    return dz if first.needs.x else None, [pending, None]


rule = register_fusion(Rule("bias + activation", FORWARD, _match_forward, _run, Saving(2, 1)))
backward_rule = register_fusion(Rule("bias + activation", BACKWARD, _match_backward, _run_backward, Saving(1, 1)))
