"""The sum of a residual stream and the norm that reads it: one kernel forward, and one backward, which adds the stream's gradient.

Steps: an add, a fork that gives the stream, and an RMSNorm or LayerNorm over the last dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from funcops.fused._steps import alike, alone, joins
from funcops.kernels import add_norm as kernels
from funcops.ops.add import add, add_kept
from funcops.ops.fork import fork, fork_kept
from funcops.ops.layer_norm import LayerNormPending, layer_norm, layer_norm_kept
from funcops.ops.rms_norm import RMSNormPending, rms_norm, rms_norm_kept
from funcops.program.rules import BACKWARD, FORWARD, Rule, Saving, Window, register_fusion
from funcops.program.values import add as summed


def _match(window: Window) -> int | str | None:
    if len(window.calls) < 3:
        return None
    join, split, norm = window.calls[:3]
    if not joins(join, add) or split.op is not fork or len(split.gives) != 1 or split.takes:
        return None
    if not alone(norm, rms_norm) and not alone(norm, layer_norm):
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    return 3 if len(norm.cfg.dim) == 1 else "the norm goes over several dimensions"


def _match_backward(window: Window) -> int | str | None:
    size = _match(window)
    if size != 3:
        return size
    return 3 if all(needs.x for needs in window.needs[:3]) else "no gradient is asked of its input"


def _run(calls: Any, params: Any, main: Any, values: dict[int, Any]) -> Any:
    join, split, norm = calls
    residual, cfg, w = values[join.takes[0]], norm.cfg, params[2].weight
    b = getattr(params[2], "bias", None)
    if getattr(cfg, "bias", False) != (b is not None) or not alike(main, residual, w, *([b] if b is not None else [])):
        return NotImplemented
    sizes = [main.shape[-1:], w.shape, cfg.dim if b is None else b.shape]
    if main.shape != residual.shape or any([tuple(size) != cfg.dim for size in sizes]):
        return NotImplemented
    if norm.op is rms_norm:
        y, stream, rstd = kernels.add_rms_norm_fwd(main, residual, w, cfg.eps, cfg.zero_centered_gamma)
        node: Any = rms_norm_kept(cfg, norm.kept, stream, params[2], rstd)
    else:
        y, stream, mean, rstd = kernels.add_layer_norm_fwd(main, residual, w, b, cfg.eps, cfg.zero_centered_gamma)
        node = layer_norm_kept(cfg, norm.kept, stream, params[2], mean, rstd)
    values[split.gives[0]] = stream
    return y, [add_kept(join.cfg, join.kept, (main, residual)), fork_kept(split.cfg, split.kept, stream), node]


def _run_backward(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any]) -> Any:
    join, split, norm = calls
    node = kept[2]
    dstream = gradients.get(split.gives[0])
    if dstream is None or not alike(dy, dstream, node.x) or not dy.shape == dstream.shape == node.x.shape:
        return NotImplemented
    gradients.pop(split.gives[0])
    dx, pending = norm_gradient(norm, node, dy, dstream)
    residual = join.takes[0]
    if join.needs.input(1):
        gradients[residual] = summed(gradients.get(residual), dx)
    return dx if join.needs.input(0) else None, [None, None, pending]


def norm_gradient(norm: Any, node: Any, dy: Any, dstream: Any) -> tuple[Any, Any]:
    """dx of a norm plus the gradient of the stream that it read, and the norm's pending."""
    cfg = norm.cfg
    shared = (dy, dstream, node.x, node.weight)
    if norm.op is rms_norm:
        wanted = bool(node.needs.params)
        dx, parts = kernels.add_rms_norm_bwd(*shared, node.rstd, cfg.zero_centered_gamma, True, wanted)
        pending = RMSNormPending.keep(cfg, node.needs, parts=parts, weight_dtype=node.weight_dtype)
    else:
        wants = node.needs.param("weight"), cfg.bias and node.needs.param("bias")
        dx, dw, db = kernels.add_layer_norm_bwd(*shared, node.mean, node.rstd, cfg.zero_centered_gamma, True, *wants)
        pending = LayerNormPending.keep(cfg, node.needs, dw_parts=dw, db_parts=db, weight_dtype=node.weight_dtype)
    return dx, pending


# forward the norm does not read the sum; backward the norm's gradient is neither written nor read
rule = register_fusion(Rule("add + norm", FORWARD, _match, _run, Saving(1, 1)))
backward_rule = register_fusion(Rule("add + norm", BACKWARD, _match_backward, _run_backward, Saving(2, 1)))
