"""A GLU whose output was not saved, and the linear layer that reads it: one kernel computes the GLU's dx, and recomputes its y for
the weight gradient of the linear.

Steps: a GLU and a linear layer that saves its x, in a full backward.
"""

from __future__ import annotations

from typing import Any

from funcops.fused.matchers import alike, alone, dgrad, layer, x_shape
from funcops.kernels.glu import GATES, glu_bwd_recompute
from funcops.ops.glu import glu
from funcops.program.rules import BACKWARD, Rule, Saving, Window, register_fusion
from funcops.program.run import filled


def _match(window: Window) -> int | str | None:
    if len(window.calls) < 2 or not alone(window.calls[0], glu) or layer(window.calls[1]) is None:
        return None
    if window.calls[1].recomputed_by is None:
        return "the linear keeps what it reads"
    if window.calls[1].op.layer.overlaps(window.calls[1].cfg):
        return "its dx is sent under the product of dw"
    cfg = window.calls[0].cfg
    if cfg.scaled or cfg.paired or cfg.kind not in GATES:
        return "the GLU has two inputs" if cfg.scaled or cfg.paired else f"{cfg.kind} has no such kernel"
    if not window.needs[0].x or not window.needs[1].param("weight"):
        return "no gradient is asked of both input and weight"
    return 2


def _run(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any]) -> Any:
    x, product, call = kept[0].x, kept[1], calls[1]
    dense = call.op.layer.dense
    if product.x is not None or not alike(dy, x, *[product.weight] * dense) or dy.shape != product.y_shape:
        return NotImplemented
    inner = x_shape(call, product)
    if x.shape != (*inner[:-1], 2 * inner[-1]):
        return NotImplemented
    recomputed, pending = dgrad(call, product, dy)
    dx = glu_bwd_recompute(recomputed, x, calls[0].cfg.kind, calls[0].cfg.first)
    return dx, [None, filled(pending, call.fields, recomputed, call.needs)]


rule = register_fusion(Rule("recomputed GLU + linear", BACKWARD, _match, _run, Saving(2, 1), on_cpu=True, whole=True))
