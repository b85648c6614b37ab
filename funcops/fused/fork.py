"""A stream that a step reads and that goes on: the kernel of the reader's input gradient adds the stream's gradient.

Steps: a fork that gives the stream, and a norm or a linear. Every `skip` begins with a fork, where Triton runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from funcops.fused.add_norm import match_recomputed, norm_gradient
from funcops.fused.matchers import alike, alone, by_library
from funcops.kernels.fused_linear import fused_linear_dgrad_add
from funcops.ops.fork import fork
from funcops.ops.layer_norm import layer_norm
from funcops.ops.linear import LinearPending, linear
from funcops.ops.rms_norm import rms_norm
from funcops.program.rules import BACKWARD, Rule, Saving, Window, register_fusion


def _match(window: Window) -> int | str | None:
    if len(window.calls) < 2:
        return None
    split, reader = window.calls[:2]
    if split.op is not fork or len(split.gives) != 1 or split.takes:
        return None
    if not any(alone(reader, op) for op in (linear, rms_norm, layer_norm)):
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    if not alone(reader, linear) and len(reader.cfg.dim) > 1:
        return "the norm goes over several dimensions"
    return 2 if window.needs[0].x and window.needs[1].x else "no gradient is asked of its input"


def _run(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any], recomputed: bool = False) -> Any:
    split, reader = calls
    node, dstream = kept[1], gradients.get(split.gives[0])
    shape = node.y_shape[:-1] + node.weight.shape[1:] if reader.op is linear else node.x.shape
    if dstream is None or not alike(dy, dstream, node.weight if reader.op is linear else node.x) or dstream.shape != shape:
        return NotImplemented
    if reader.op is not linear:
        if dy.shape != shape:
            return NotImplemented
        gradients.pop(split.gives[0])
        dx, pending = norm_gradient(reader, node, dy, dstream, gradients if recomputed else None)
        return dx, [None, pending]
    if dy.shape != node.y_shape:
        return NotImplemented
    gradients.pop(split.gives[0])
    pending = LinearPending.keep(reader.cfg, node.needs, x=node.x, dy=dy)
    return fused_linear_dgrad_add(dy, node.weight, 1.0, dstream), [None, pending]


def _saves(window: Window) -> Saving:
    """The reader's gradient is neither written nor read."""
    reader = window.calls[1]
    none = reader.op is linear and by_library("added", window.dtype, reader.cfg.in_features)
    return Saving() if none else Saving(2, 1)


rule = register_fusion(Rule("fork + reader", BACKWARD, _match, _run, _saves))
recompute_rule = register_fusion(
    Rule(
        "fork + norm, recomputed",
        BACKWARD,
        match_recomputed(_match),
        functools.partial(_run, recomputed=True),
        Saving(3, 2),
        whole=True,
        recompute=True,
    )
)
