"""A GLU whose output was not saved: one kernel computes its dx, and recomputes its y for the weight gradients of the layers that
read it, such as a linear layer and its adapter.

Steps: a GLU, in a full backward. The kernel writes y over dy, which the readers have made: nothing else reads the GLU.
"""

from __future__ import annotations

from typing import Any

from funcops.engine.program.rules import BACKWARD, Rule, Saving, Window, register_fusion
from funcops.library.fused.matchers import alike, alone, readers_wait
from funcops.library.kernels.glu import GATES, glu_bwd_recompute, glu_pair_bwd_recompute
from funcops.library.ops.glu import glu


def _match(window: Window) -> int | str | None:
    call = window.calls[0]
    if not alone(call, glu):
        return None
    if not call.readers:
        return "the layers that read it keep what they read"
    if call.read_by_others or not readers_wait(call):
        return "others than weight gradients read its y"
    if any(reader.op.layer is not None and reader.op.layer.overlaps(reader.cfg) for reader in call.readers):
        return "the dx of a layer that reads it is sent under the product of dw"
    cfg = call.cfg
    if cfg.scaled or cfg.kind not in GATES:
        return "the GLU has scales" if cfg.scaled else f"{cfg.kind} has no such kernel"
    wants = call.needs.input(0) and call.needs.input(1) if cfg.paired else call.needs.x
    return 1 if wants else "no gradient is asked of its input"


def _run(calls: Any, kept: list[Any], dy: Any, gradients: dict[int, Any]) -> Any:
    call, x = calls[0], kept[0].x
    if call.cfg.paired:
        pair = dy, x, kept[0].linear
        if not alike(*pair) or any([t.shape != dy.shape for t in pair]) or not dy.is_contiguous():
            return NotImplemented
        found, gradients[call.out] = glu_pair_bwd_recompute(*pair, call.cfg.kind), dy
        return kept[0].inputs.make(found), [None]
    if not alike(dy, x) or x.shape != (*dy.shape[:-1], 2 * dy.shape[-1]):
        return NotImplemented
    dx, gradients[call.out] = glu_bwd_recompute(dy, x, call.cfg.kind, call.cfg.first), dy
    return dx, [None]


rule = register_fusion(Rule("recomputed GLU", BACKWARD, _match, _run, Saving(2, 1), on_cpu=True, whole=True, recompute=True))
