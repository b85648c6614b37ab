"""Dropout and the sum that follows it, optionally with a bias before them: residual + dropout(x + b), in one kernel."""

from __future__ import annotations

from typing import Any

import torch

from funcops.fused.matchers import alike, alone, is_key, joins
from funcops.kernels.pointwise import dropout_add
from funcops.ops.add import add, add_kept
from funcops.ops.bias import bias, bias_kept
from funcops.ops.dropout import dropout, dropout_kept
from funcops.program.rules import FORWARD, Rule, Saving, Window, register_fusion


def _match(window: Window) -> int | str | None:
    size = 1 if alone(window.calls[0], bias) else 0
    rest = window.calls[size:]
    if len(rest) < 2 or not joins(rest[0], dropout) or not joins(rest[1], add):
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    cfg = rest[0].cfg
    if not cfg.train or cfg.p in (0.0, 1.0):
        return "nothing is drawn (train=False, or p is 0 or 1)"
    return size + 2


def _run(calls: Any, params: Any, main: Any, values: dict[int, Any]) -> Any:
    drop, join = calls[-2:]
    b = params[0].bias if len(calls) == 3 else None
    residual, key = values[join.takes[0]], values[drop.takes[0]]
    if not alike(main, residual, *([b] if len(calls) == 3 else [])) or main.dim() < 1 or residual.shape != main.shape:
        return NotImplemented
    if b is not None and (b.shape != (calls[0].cfg.dim,) or b.shape != main.shape[-1:]):
        return NotImplemented
    if not is_key(key, main):
        return NotImplemented
    y = dropout_add(main, b, residual, key, drop.cfg.p)
    nodes: list[Any] = [dropout_kept(drop.cfg, drop.kept, (main, key)), add_kept(join.cfg, join.kept, (y, residual))]
    return y, nodes if b is None else [bias_kept(calls[0].cfg, calls[0].kept, y), *nodes]


rule = register_fusion(
    Rule("dropout + add", FORWARD, _match, _run, lambda window: Saving(2 * len(window.calls) - 2, len(window.calls) - 1))
)
