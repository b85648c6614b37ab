"""Linear layers with dropouts and activations between them: the backward kernel of an activation or a dropout also sums the
gradient that it writes, for the bias gradient of the layer before, and recomputes the activation if it was not saved.

Steps: linear layers of any variant in turn with activations or dropouts; backward.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from funcops.fused.matchers import alike, alone, dgrad, joins, layer, x_shape
from funcops.kernels.bias_activation import activation_bwd_recompute, bias_activation_bwd, dropout_bwd_sums
from funcops.kernels.pointwise import dropout as dropout_kernel
from funcops.ops.activation import activation
from funcops.ops.dropout import dropout
from funcops.program.lower import Call
from funcops.program.rules import BACKWARD, Rule, Saving, Window, register_fusion
from funcops.program.run import filled


def _between(call: Call) -> bool:
    return alone(call, activation) or (joins(call, dropout) and call.cfg.train and 0.0 < call.cfg.p < 1.0)


def _sums(calls: tuple[Call, ...], i: int) -> bool:
    """Whether the sum of the gradient that this call writes is the bias gradient of the layer before it."""
    return i > 0 and calls[i - 1].op.layer is not None and calls[i - 1].cfg.bias and bool(calls[i - 1].needs.param("bias"))


def _recomputed(calls: tuple[Call, ...], i: int) -> bool:
    """Whether this call reads the recomputed y of the activation before it."""
    return 0 < i < len(calls) and calls[i - 1].op is activation and calls[i].recomputed_by is calls[i - 1]


def _match(window: Window) -> int | str | None:
    calls, last = window.calls, len(window.calls) - 1
    first = layer(calls[0]) is not None
    if not all(layer(call) for call in calls[1 - first :: 2]) or not all(_between(call) for call in calls[first::2]):
        return None
    if last < 1 or (first and not _sums(calls, 1)) or not (_recomputed if calls[last].op.layer else _sums)(calls, last):
        return None
    if any(call.op.layer and call.op.layer.overlaps(call.cfg) for call in calls):
        return "a layer sends its dx under the product of dw"
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    asked = all(call.needs.input(0) if call.op is dropout else call.needs.x for call in calls)
    return len(calls) if asked else "no gradient is asked of its input"


def _worth(window: Window) -> int:
    """The reads that it saves. A split backward, which recomputes y separately, counts the same: both run the same kernels."""
    return sum(
        call.op.layer is None and _sums(window.calls, i) + _recomputed(window.calls, i + 1) for i, call in enumerate(window.calls)
    )


def _run(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any], whole: bool) -> Any:
    if not _fits(calls, kept, dy):
        return NotImplemented
    pendings: list[Any] = [None] * len(calls)
    sums = None
    for i in range(len(calls))[::-1]:
        call, node, summed = calls[i], kept[i], _sums(calls, i)
        if call.op.layer is not None:
            dy, pendings[i] = dgrad(call, node, dy, sums)
        elif call.op is dropout:
            dy, sums = dropout_bwd_sums(dy, node.key, call.cfg.p) if summed else (dropout_kernel(dy, node.key, call.cfg.p), None)
        elif whole and _recomputed(calls, i + 1):
            y, reader = dy, calls[i + 1]
            dy, sums = activation_bwd_recompute(y, node.x, call.cfg.kind, summed)
            pendings[i + 1] = filled(pendings[i + 1], reader.fields, y, reader.needs)
        else:
            dy, sums = bias_activation_bwd(dy, node.x, None, call.cfg.kind, summed)
    return dy, pendings


def _fits(calls: Any, kept: list[Any], dy: Any) -> bool:
    """Whether the gradient that each call writes has the shape of y of the call before it."""
    pairs = list(zip(calls, kept, strict=True))
    tensors = [node.x for call, node in pairs if call.op is activation]
    if not alike(dy, *tensors, *[node.weight for call, node in pairs if call.op.layer and call.op.layer.dense]):
        return False
    shape = dy.shape
    for call, node in pairs[::-1]:
        if (node.y_shape if call.op.layer else node.x.shape if call.op is activation else node.shape) != shape:
            return False
        shape = x_shape(call, node) if call.op.layer else shape
    return True


def _saves(window: Window) -> Saving:
    """A sum saves the read of its input; a recomputed activation, too."""
    return Saving(_worth(window), _worth(window))


def _rule(name: str, whole: bool) -> Rule:
    return register_fusion(Rule(name, BACKWARD, _match, functools.partial(_run, whole=whole), _saves, whole=whole))


rule, whole_rule = _rule("bias gradients", False), _rule("bias gradients, recomputed", True)
