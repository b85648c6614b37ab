"""A linear layer and the steps that follow it: y = f(c x w^T + b) + residual, in one product.

Steps: a layer whose y is a product, or it and a bias, or it without bias and a scale; then an activation; then an add. At least two
of them.
"""

from __future__ import annotations

from typing import Any

import torch

from funcops.engine.compose.add import add, add_kept
from funcops.engine.program.rules import FORWARD, Rule, Saving, Window, register_fusion
from funcops.library.fused.matchers import alike, alone, by_library, joins, layer
from funcops.library.kernels.fused_linear import fused_linear_fwd
from funcops.library.ops.activation import activation, activation_kept
from funcops.library.ops.bias import bias, bias_kept
from funcops.library.ops.scale import scale, scale_kept


def _match(window: Window) -> int | str | None:
    first, *rest = window.calls
    own = layer(first)
    if own is None or not own.y_is_product(first.cfg):
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    size, biased = 1, first.cfg.bias
    if rest and alone(rest[0], bias) and not biased:
        size = 2
    elif rest and alone(rest[0], scale):
        if biased:
            return "the linear's bias is scaled too"
        size = 2
    if len(rest) >= size and alone(rest[size - 1], activation):
        size += 1
    if len(rest) >= size and joins(rest[size - 1], add):
        size += 1
    return size if size > 1 else None


def _run(calls: Any, params: Any, main: Any, values: dict[int, Any]) -> Any:
    weight, b, factor, kind, residual = params[0].weight, params[0].bias, 1.0, "", None
    by_op = {call.op: i for i, call in enumerate(calls)}
    if bias in by_op:
        b = params[by_op[bias]].bias
    if scale in by_op:
        factor = calls[by_op[scale]].cfg.factor
    if activation in by_op:
        kind = calls[by_op[activation]].cfg.kind
    if add in by_op:
        residual = values[calls[by_op[add]].takes[0]]
    biased = calls[0].cfg.bias or bias in by_op
    if (
        (params[0].bias is not None) != calls[0].cfg.bias
        or (b is not None) != biased
        or not _fits(calls[0], main, weight, b, add in by_op, residual)
    ):
        return NotImplemented
    first, own = calls[0], calls[0].op.layer
    keep = bool(kind) and bool(calls[by_op[activation]].needs.x)
    y, z = fused_linear_fwd(own.rows(main, first.cfg), weight, b, residual, kind, factor, keep)
    made = {first.op: (own.kept, main, weight, y), bias: (bias_kept, y), scale: (scale_kept, y)}
    made |= {activation: (activation_kept, z), add: (add_kept, (y, residual))}
    nodes = [(call, *made[call.op]) for call in calls]
    return y, [kept(call.cfg, call.kept, *given) for call, kept, *given in nodes]


def _saves(window: Window) -> Saving:
    """Our kernel covers every step after the product, and writes the activation's input if that is saved. torch's kernel applies
    bias and factor, and leaves the rest to one more kernel."""
    found = {call.op: call for call in window.calls}
    keeps, steps = activation in found and bool(found[activation].needs.x), len(window.calls) - 1
    family = "kept" if keeps else "added" if add in found else "fused"
    if by_library(family, window.dtype, window.calls[0].cfg.weight_shape[0]):
        steps -= activation in found or add in found
        return Saving(2 * steps, steps)
    return Saving(2 * steps - keeps, steps)


def _fits(call: Any, x: Any, weight: Any, b: Any, adds: bool, residual: Any) -> bool:
    cfg, own = call.cfg, call.op.layer
    given = (x, weight) if b is None else (x, weight, b)
    if not (alike(*given, residual) if adds else alike(*given)) or x.dim() < 1 + bool(cfg.sequence_parallel):
        return False
    o, i = cfg.weight_shape
    *rows, width = x.shape
    if width != i or weight.shape != (o, i) or (b is not None and b.shape != (o,)):
        return False
    return not adds or residual.shape == ((own.y_rows(rows[0], cfg), *rows[1:], o) if rows else (o,))


rule = register_fusion(Rule("linear + epilogue", FORWARD, _match, _run, _saves))
