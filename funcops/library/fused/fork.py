"""A stream that a step reads and that goes on: the kernel of the reader's input gradient adds the stream's gradient.

Steps: a fork that gives the stream, and a norm or a linear layer whose dx is a product. Every `skip` begins with a fork, where
Triton runs.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from funcops.engine.compose.fork import fork
from funcops.engine.program.rules import BACKWARD, Rule, Saving, Window, register_fusion
from funcops.library.fused.add_norm import match_recomputed, norm_gradient
from funcops.library.fused.matchers import alike, alone, by_library, layer, x_shape
from funcops.library.kernels.fused_linear import fused_linear_dgrad_add
from funcops.library.ops.layer_norm import layer_norm
from funcops.library.ops.rms_norm import rms_norm


def _match(window: Window) -> int | str | None:
    if len(window.calls) < 2:
        return None
    split, reader = window.calls[:2]
    if split.op is not fork or len(split.gives) != 1 or split.takes:
        return None
    own = layer(reader)
    if not alone(reader, rms_norm) and not alone(reader, layer_norm) and (own is None or not own.dx_is_product(reader.cfg)):
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    if own is None and len(reader.cfg.dim) > 1:
        return "the norm goes over several dimensions"
    return 2 if window.needs[0].x and window.needs[1].x else "no gradient is asked of its input"


def _run(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any], recomputed: bool = False) -> Any:
    split, reader = calls
    node, dstream, own = kept[1], gradients.get(split.gives[0]), reader.op.layer
    shape = node.x.shape if own is None else x_shape(reader, node)
    if dstream is None or not alike(dy, dstream, node.x if own is None else node.weight) or dstream.shape != shape:
        return NotImplemented
    if own is None:
        if dy.shape != shape:
            return NotImplemented
        gradients.pop(split.gives[0])
        dx, pending = norm_gradient(reader, node, dy, dstream, gradients if recomputed else None)
        return dx, [None, pending]
    if dy.shape != node.y_shape:
        return NotImplemented
    gradients.pop(split.gives[0])
    rows = own.dy_rows(dy, reader.cfg)
    return fused_linear_dgrad_add(rows, node.weight, 1.0, dstream), [None, own.pending(node, dy, rows, reader.cfg)]


def _saves(window: Window) -> Saving:
    """The reader's gradient is neither written nor read."""
    reader = window.calls[1]
    none = reader.op.layer is not None and by_library("added", window.dtype, reader.cfg.weight_shape[1])
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
