"""Dropout and the sum that follows it, optionally with a bias before them: residual + dropout(x + b), in one kernel.

Steps: a bias, or a linear layer in low precision that has one; a dropout; an add.
"""

from __future__ import annotations

from typing import Any

import torch

from funcops.engine.compose.add import add, add_kept
from funcops.engine.program.rules import FORWARD, Rule, Saving, Window, register_fusion
from funcops.library.fused.matchers import adds, alike, before_bias, is_key, joins
from funcops.library.kernels.pointwise import dropout_add
from funcops.library.ops.dropout import dropout, dropout_kept


def _match(window: Window) -> int | str | None:
    size = int(adds(window.calls[0]))
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
    residual, key = values[join.takes[0]], values[drop.takes[0]]
    if not is_key(key, main) or not alike(main, residual):
        return NotImplemented
    b, first = None, []
    if len(calls) == 3:
        found = before_bias(calls[0], params[0], main)
        if found is NotImplemented:
            return NotImplemented
        main, b, first = found[0], params[0].bias, [found[1]]
    if main.dim() < 1 or residual.shape != main.shape:
        return NotImplemented
    y = dropout_add(main, b, residual, key, drop.cfg.p)
    nodes = [dropout_kept(drop.cfg, drop.kept, (main, key)), add_kept(join.cfg, join.kept, (y, residual))]
    return y, [*first, *nodes]


rule = register_fusion(
    Rule("dropout + add", FORWARD, _match, _run, lambda window: Saving(2 * len(window.calls) - 2, len(window.calls) - 1))
)
