"""Linears with dropouts and activations between them: the backward kernel of an activation or a dropout also sums the gradient that
it writes, for the bias gradient of the linear before, and recomputes the activation if it was not saved.

Steps: linears in turn with activations or dropouts; backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from funcops.fused.matchers import alike, alone, joins
from funcops.kernels.bias_activation import activation_bwd_recompute, bias_activation_bwd, dropout_bwd_sums
from funcops.kernels.linear import linear_dgrad
from funcops.kernels.pointwise import dropout as dropout_kernel
from funcops.ops.activation import activation
from funcops.ops.dropout import dropout
from funcops.ops.linear import LinearPending, linear
from funcops.program.lower import Call
from funcops.program.rules import BACKWARD, Rule, Saving, Window, register_fusion


def _between(call: Call) -> bool:
    return alone(call, activation) or (joins(call, dropout) and call.cfg.train and 0.0 < call.cfg.p < 1.0)


def _sums(calls: tuple[Call, ...], i: int) -> bool:
    """Whether the sum of the gradient that this call writes is the bias gradient of the linear before it."""
    return i > 0 and calls[i - 1].op is linear and calls[i - 1].cfg.bias and bool(calls[i - 1].needs.param("bias"))


def _recomputed(calls: tuple[Call, ...], i: int) -> bool:
    """Whether this call reads the recomputed y of the activation before it."""
    return 0 < i < len(calls) and calls[i - 1].op is activation and calls[i].recomputed_by is calls[i - 1]


def _match(window: Window) -> int | str | None:
    calls, last = window.calls, len(window.calls) - 1
    first = alone(calls[0], linear)
    if not all(alone(call, linear) for call in calls[1 - first :: 2]) or not all(_between(call) for call in calls[first::2]):
        return None
    if last < 1 or (first and not _sums(calls, 1)) or not (_recomputed if calls[last].op is linear else _sums)(calls, last):
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    asked = all(call.needs.input(0) if call.op is dropout else call.needs.x for call in calls)
    return len(calls) if asked else "no gradient is asked of its input"


def _worth(window: Window) -> int:
    """The reads that it saves. A split backward, which recomputes y separately, counts the same: both run the same kernels."""
    return sum(
        call.op is not linear and _sums(window.calls, i) + _recomputed(window.calls, i + 1) for i, call in enumerate(window.calls)
    )


def _run(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any], whole: bool) -> Any:
    if not _fits(calls, kept, dy):
        return NotImplemented
    pendings: list[Any] = [None] * len(calls)
    sums = None
    for i in range(len(calls))[::-1]:
        call, node, summed = calls[i], kept[i], _sums(calls, i)
        if call.op is linear:
            pendings[i] = LinearPending.keep(call.cfg, node.needs, x=node.x, dy=dy, sums=sums)
            dy = linear_dgrad(dy, node.weight)
        elif call.op is dropout:
            dy, sums = dropout_bwd_sums(dy, node.key, call.cfg.p) if summed else (dropout_kernel(dy, node.key, call.cfg.p), None)
        elif whole and _recomputed(calls, i + 1):
            product, y = pendings[i + 1], dy
            dy, sums = activation_bwd_recompute(y, node.x, call.cfg.kind, summed)
            pendings[i + 1] = LinearPending.keep(calls[i + 1].cfg, calls[i + 1].needs, x=y, dy=product.dy, sums=product.sums)
        else:
            dy, sums = bias_activation_bwd(dy, node.x, None, call.cfg.kind, summed)
    return dy, pendings


def _fits(calls: Any, kept: list[Any], dy: Any) -> bool:
    """Whether the gradient that each call writes has the shape of y of the call before it."""
    tensors = [
        node.weight if call.op is linear else node.x for call, node in zip(calls, kept, strict=True) if call.op is not dropout
    ]
    if not alike(dy, *tensors):
        return False
    shape = tuple(dy.shape)
    for call, node in list(zip(calls, kept, strict=True))[::-1]:
        own = node.y_shape if call.op is linear else node.x.shape if call.op is activation else node.shape
        if tuple(own) != shape:
            return False
        shape = (*shape[:-1], node.weight.shape[1]) if call.op is linear else shape
    return True


def _saves(window: Window) -> Saving:
    """A sum saves the read of its input; a recomputed activation, too."""
    return Saving(_worth(window), _worth(window))


def _rule(name: str, whole: bool) -> Rule:
    return register_fusion(Rule(name, BACKWARD, _match, functools.partial(_run, whole=whole), _saves, whole=whole))


rule, whole_rule = _rule("bias gradients", False), _rule("bias gradients, recomputed", True)
