"""Linear layers with dropouts and activations between them: the backward kernel of an activation or a dropout also sums the
gradient that it writes, for the bias gradient of the layer before, and recomputes the activation if it was not saved.

Steps: linear layers of any variant in turn with activations or dropouts, and behind a layer perhaps a sum, such as that with its
adapter's y; backward. Where the layer after an activation has an adapter beside it, both read the recomputed activation.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from funcops.engine.compose.add import add
from funcops.engine.program.lower import Call
from funcops.engine.program.rules import BACKWARD, Rule, Saving, Window, register_fusion
from funcops.engine.program.run import filled
from funcops.engine.program.values import add as total
from funcops.library.fused.matchers import alike, alone, dgrad, joins, layer, readers_wait, x_shape
from funcops.library.kernels.bias_activation import activation_bwd_recompute, bias_activation_bwd, dropout_bwd_sums
from funcops.library.kernels.pointwise import dropout as dropout_kernel
from funcops.library.ops.activation import activation
from funcops.library.ops.dropout import dropout


def _between(call: Call) -> bool:
    return alone(call, activation) or (joins(call, dropout) and call.cfg.train and 0.0 < call.cfg.p < 1.0)


def _layer_before(calls: tuple[Call, ...], i: int) -> Call | None:
    """The linear layer before a call, perhaps with a sum between them."""
    before = calls[:i]
    before = before[:-1] if before and joins(before[-1], add) else before
    return before[-1] if before and before[-1].op.layer is not None else None


def _sums(calls: tuple[Call, ...], i: int) -> bool:
    """Whether the sum of the gradient that this call writes is the bias gradient of the layer before it."""
    before = _layer_before(calls, i)
    return before is not None and before.cfg.bias and bool(before.needs.param("bias"))


def _recomputed(calls: tuple[Call, ...], i: int) -> bool:
    """Whether this call reads the recomputed y of the activation before it."""
    return 0 < i < len(calls) and calls[i - 1].op is activation and calls[i].recomputed_by is calls[i - 1]


def _in_turn(calls: tuple[Call, ...]) -> bool:
    """Whether layers, each perhaps with a sum behind it, and other calls are in turn."""
    if any(joins(call, add) and (i == 0 or calls[i - 1].op.layer is None) for i, call in enumerate(calls)) or joins(calls[-1], add):
        return False
    row = [call for call in calls if not joins(call, add)]
    first = layer(row[0]) is not None
    return all(layer(call) for call in row[1 - first :: 2]) and all(_between(call) for call in row[first::2])


def _match(window: Window) -> int | str | None:
    calls, last = window.calls, len(window.calls) - 1
    if last < 1 or not _in_turn(calls) or not (_recomputed if calls[last].op.layer else _sums)(calls, last):
        return None
    return _covers(window)


def _match_for_readers(window: Window) -> int | str | None:
    """Windows whose last call is an activation that several calls read, each for its weight gradient."""
    last = window.calls[-1]
    if last.op is not activation or last.read_by_others or not readers_wait(last) or not _in_turn(window.calls):
        return None
    if any(reader.op.layer is not None and reader.op.layer.overlaps(reader.cfg) for reader in last.readers):
        return "the dx of a layer that reads it is sent under the product of dw"
    return _covers(window)


def _covers(window: Window) -> int | str | None:
    calls = window.calls
    if calls[0].op.layer is not None and not _sums(calls, 1 + joins(calls[1], add)):
        return None
    if any(call.op.layer and call.op.layer.overlaps(call.cfg) for call in calls):
        return "a layer sends its dx under the product of dw"
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    asked = all(call.needs.input(0) if call.takes else call.needs.x for call in calls)
    return len(calls) if asked else "no gradient is asked of its input"


def _worth(window: Window) -> int:
    """The reads that it saves. A split backward, which recomputes y separately, counts the same: both run the same kernels."""
    return sum(
        call.op.layer is None and _sums(window.calls, i) + _recomputed(window.calls, i + 1) for i, call in enumerate(window.calls)
    )


def _run(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any], whole: bool, for_readers: bool) -> Any:
    if not _fits(calls, kept, dy):
        return NotImplemented
    pendings: list[Any] = [None] * len(calls)
    sums = None
    for i in range(len(calls))[::-1]:
        call, node, summed = calls[i], kept[i], _sums(calls, i)
        if call.op.layer is not None:
            dy, pendings[i] = dgrad(call, node, dy, sums)
        elif call.op is add:  # the gradient of what it adds is dy, too
            if call.needs.input(1):
                gradients[call.takes[0]] = total(gradients.get(call.takes[0]), dy)
        elif call.op is dropout:
            dy, sums = dropout_bwd_sums(dy, node.key, call.cfg.p) if summed else (dropout_kernel(dy, node.key, call.cfg.p), None)
        elif for_readers and i == len(calls) - 1:
            gradients[call.out] = dy
            dy, sums = activation_bwd_recompute(dy, node.x, call.cfg.kind, summed)
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
        if node is not None and _y_shape(call, node) != shape:  # the sum of a skip keeps nothing
            return False
        shape = x_shape(call, node) if call.op.layer else shape
    return True


def _y_shape(call: Call, node: Any) -> Any:
    return node.y_shape if call.op.layer else node.x.shape if call.op is activation else node.shape


def _saves(window: Window) -> Saving:
    """A sum saves the read of its input; a recomputed activation, too."""
    return Saving(_worth(window), _worth(window))


def _saves_for_readers(window: Window) -> Saving:
    return Saving(_worth(window) + 1, _worth(window) + 1)


def _rule(name: str, whole: bool, for_readers: bool = False) -> Rule:
    run = functools.partial(_run, whole=whole, for_readers=for_readers)
    match, saves = (_match_for_readers, _saves_for_readers) if for_readers else (_match, _saves)
    return register_fusion(Rule(name, BACKWARD, match, run, saves, whole=whole, recompute=for_readers))


rule, whole_rule = _rule("bias gradients", False), _rule("bias gradients, recomputed", True)
readers_rule = _rule("bias gradients, recomputed for readers", True, for_readers=True)
