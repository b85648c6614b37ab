"""A GLU whose output was not saved, and the linear layer that reads it: one kernel computes the GLU's dx, and recomputes its y for
the weight gradient of the linear.

Steps: a GLU and a linear, in a full backward.
"""

from __future__ import annotations

from typing import Any

from funcops.fused.matchers import alike, alone
from funcops.kernels.glu import GATES, glu_bwd_recompute
from funcops.kernels.linear import linear_dgrad
from funcops.ops.glu import glu
from funcops.ops.linear import LinearPending, linear
from funcops.program.rules import BACKWARD, Rule, Saving, Window, register_fusion


def _match(window: Window) -> int | str | None:
    if len(window.calls) < 2 or not alone(window.calls[0], glu) or not alone(window.calls[1], linear):
        return None
    if window.calls[1].recomputed_by is None:
        return "the linear keeps what it reads"
    cfg = window.calls[0].cfg
    if cfg.scaled or cfg.paired or cfg.kind not in GATES:
        return "the GLU has two inputs" if cfg.scaled or cfg.paired else f"{cfg.kind} has no such kernel"
    if not window.needs[0].x or not window.needs[1].param("weight"):
        return "no gradient is asked of both input and weight"
    return 2


def _run(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any]) -> Any:
    x, product = kept[0].x, kept[1]
    if product.x is not None or not alike(dy, x, product.weight) or dy.shape != product.y_shape:
        return NotImplemented
    if x.shape != (*dy.shape[:-1], 2 * product.weight.shape[1]):
        return NotImplemented
    recomputed = linear_dgrad(dy, product.weight)
    dx = glu_bwd_recompute(recomputed, x, calls[0].cfg.kind, calls[0].cfg.first)
    return dx, [None, LinearPending.keep(calls[1].cfg, calls[1].needs, x=recomputed, dy=dy)]


rule = register_fusion(Rule("recomputed GLU + linear", BACKWARD, _match, _run, Saving(2, 1), on_cpu=True, whole=True))
