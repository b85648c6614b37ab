"""Dropout and the sum that follows it, with a bias before them where there is one: residual + dropout(x + b), in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.fused._steps import alike, alone, joins
from funcops.kernels.pointwise import dropout_add
from funcops.ops.add import AddResiduals, add
from funcops.ops.bias import BiasResiduals, bias
from funcops.ops.dropout import DropoutResiduals, dropout
from funcops.program.rules import FORWARD, Rule, Window, register_fusion
from funcops.schema import Inputs


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
    if not isinstance(key, Tensor) or key.dtype is not torch.int64 or key.shape != (2,) or key.device != main.device:
        return NotImplemented
    y = dropout_add(main, b, residual, key, drop.cfg.p)
    statics = {"shape": y.shape, "dtype": y.dtype}
    nodes = [
        DropoutResiduals.keep(drop.cfg, drop.kept, key=key, inputs=Inputs.of((main, key)), **statics),
        AddResiduals.keep(join.cfg, join.kept, inputs=Inputs.of((y, residual)), **statics),
    ]
    return y, nodes if b is None else [BiasResiduals.keep(calls[0].cfg, calls[0].kept, **statics), *nodes]


rule = register_fusion(Rule("dropout + add", FORWARD, _match, _run))
