"""Two or three linear layers of one input, such as q, k, v or gate, up: one product forward, and one for the sum of their input
gradients.

Steps: the first of each branch of a parallel, all linear. On the CPU only the backward: a joint forward gains nothing there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.fused.matchers import alike
from funcops.kernels.sibling_linear import sibling_linear_dgrad, sibling_linear_fwd
from funcops.ops.linear import LinearParams, LinearPending, linear, linear_kept
from funcops.program.rules import SIBLINGS_BACKWARD, SIBLINGS_FORWARD, Rule, Saving, Window, register_fusion

MOST = 3


def _match(window: Window) -> tuple[int, ...] | str | None:
    if any(step.op is not linear for step in window.calls):
        return None
    return (1,) * len(window.calls) if len(window.calls) <= MOST else f"more than {MOST} branches"


def _match_forward(window: Window) -> tuple[int, ...] | str | None:
    sizes = _match(window)
    return "float64 runs on torch" if sizes and window.dtype is torch.float64 else sizes


def _match_backward(window: Window) -> tuple[int, ...] | str | None:
    sizes = _match(window)
    if isinstance(sizes, tuple) and not all(needs.x for needs in window.needs):
        return "no gradient is asked of their input"
    return sizes


def _three(given: Any) -> list[Any]:
    return [*given] + [None] * (MOST - len(given))


def _run(calls: Any, params: Any, x: Any, values: dict[int, Any]) -> Any:
    return linears_fwd(calls, params, x)


def linears_fwd(calls: Any, params: Any, x: Any) -> Any:
    if any(type(p) is not LinearParams for p in params) or not alike(x) or x.dim() < 1:
        return NotImplemented
    for step, p in zip(calls, params, strict=True):
        given = [p.weight, *([p.bias] if step.cfg.bias else [])]
        shapes = [step.cfg.weight_shape, step.cfg.bias_shape][: len(given)]
        if not alike(x, *given) or [t.shape for t in given] != shapes or (p.bias is not None) != step.cfg.bias:
            return NotImplemented
        if x.shape[-1] != step.cfg.in_features:
            return NotImplemented
    ys: tuple[Tensor, ...] = sibling_linear_fwd(x, *_three([p.weight for p in params]), *_three([p.bias for p in params]))
    ys = ys[: len(calls)]
    return ys, [linear_kept(call.cfg, call.kept, x, p.weight, y) for call, p, y in zip(calls, params, ys, strict=True)]


def _run_backward(calls: Any, kept: list[Any], dys: tuple[Any, ...], gradients: dict[int, Any]) -> Any:
    weights = [node.weight for node in kept]
    if not alike(*dys, *weights) or any(d.shape != node.y_shape for d, node in zip(dys, kept, strict=True)):
        return NotImplemented
    dx = sibling_linear_dgrad(*_three(dys), *_three(weights))
    pendings = [LinearPending.keep(step.cfg, node.needs, x=node.x, dy=dy) for step, node, dy in zip(calls, kept, dys, strict=True)]
    return dx, pendings


def _saves(window: Window) -> Saving:
    """In each sum of two gradients the second is neither written nor read."""
    return Saving(2 * len(window.calls) - 2, len(window.calls) - 1)


rule = register_fusion(Rule("sibling linears", SIBLINGS_FORWARD, _match_forward, _run))
backward_rule = register_fusion(Rule("sibling linears", SIBLINGS_BACKWARD, _match_backward, _run_backward, _saves, on_cpu=True))
