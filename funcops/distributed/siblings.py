"""Column layers of one x, such as q, k and v: x is sent over the axis once for all of them, and so is the sum of their dx.

Steps: the first of each branch of a parallel, all `column_linear`, or all `column_qlinear` with one recipe, over one axis and
without the ring. y and dw have the same bits as without the rule; dx is summed over the layers first, and over the ranks then.

    forward             one gather of x
    input gradients     one scatter of dx
    weight gradients    one gather of x, whenever they run (in a graph of torch.compile one each)
"""

from __future__ import annotations

from typing import Any, Union

from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.ops._qlinear import gathered
from funcops.distributed.ops.column_linear import ColumnLinearPending, check_column, column_kept, column_linear
from funcops.distributed.ops.column_qlinear import (
    arrived_x,
    check_low_column,
    column_of,
    column_operands,
    column_qlinear,
    part_of_dx,
    rounded_dy,
    send_x,
)
from funcops.fused.matchers import alike, alone
from funcops.kernels import linear as kernels
from funcops.kernels import pointwise
from funcops.ops.linear import LinearParams, check_linear_into, wants_bias
from funcops.ops.qlinear import check_low_into
from funcops.program.rules import SIBLINGS_BACKWARD, SIBLINGS_FORWARD, Rule, Saving, Window, register_fusion

Answer = Union[tuple[int, ...], str, None]


def _match(window: Window) -> Answer:
    calls = window.calls
    op = next((op for op in (column_linear, column_qlinear) if all(alone(call, op) for call in calls)), None)
    if op is None or calls[0].cfg.axis.size == 1:
        return None
    if len({(call.cfg.axis, call.cfg.sequence_parallel) for call in calls}) > 1:
        return "they communicate over different axes"
    if any(call.cfg.overlap == "ring" for call in calls):
        return "the ring sends parts of x under each product"
    if op is not column_linear and len({call.cfg.recipe for call in calls}) > 1:
        return "recipes differ"
    return (1,) * len(calls)


def _match_forward(window: Window) -> Answer:
    sizes = _match(window)
    if not isinstance(sizes, tuple):
        return sizes
    first = window.calls[0].cfg
    if first.sequence_parallel and first.low_recipe is not None and first.recipe.delayed:
        return "each has a scale of its own"
    return sizes if first.sequence_parallel else None  # without it nothing is gathered


def _match_backward(window: Window) -> Answer:
    sizes = _match(window)
    if isinstance(sizes, tuple) and not all(needs.x for needs in window.needs):
        return "no gradient is asked of their input"
    return sizes


def _run(calls: Any, params: Any, x: Any, values: dict[int, Any]) -> Any:
    if any(type(p) is not LinearParams for p in params) or not alike(x) or x.dim() < 1:
        return NotImplemented
    low = calls[0].op is not column_linear
    checked = check_low_column if low else check_column
    try:
        for call, p in zip(calls, params, strict=True):
            checked(p, x, call.cfg)
            if not alike(x, *[t for t in (p.weight, p.bias) if isinstance(t, Tensor)]):
                return NotImplemented
    except (ValueError, TypeError, RuntimeError):  # the call raises it itself
        return NotImplemented
    axis = calls[0].cfg.axis
    if low:
        wanting = next((i for i, call in enumerate(calls) if call.kept.param("weight")), 0)
        row, kept, _ = column_operands(x, params[wanting].weight, calls[wanting].cfg, calls[wanting].kept)
        rows = gathered(row, axis)
        made = [column_of(rows, kept, None, p, call.cfg, call.kept) for call, p in zip(calls, params, strict=True)]
        return tuple([y for y, _ in made]), [node for _, node in made]
    whole = comm.gather(x, axis)
    ys = tuple([kernels.linear_fwd(whole, p.weight, p.bias) for p in params])
    return ys, [column_kept(call.cfg, call.kept, x, p.weight, y) for call, p, y in zip(calls, params, ys, strict=True)]


def _run_backward(calls: Any, kept: list[Any], dys: tuple[Any, ...], gradients: dict[int, Any]) -> Any:
    if not alike(*dys) or any(d.shape != node.y_shape or d.dtype is not node.dtype for d, node in zip(dys, kept, strict=True)):
        return NotImplemented
    both = list(zip(calls, kept, dys, strict=True))
    if calls[0].op is column_linear:
        dx = _sum([kernels.linear_dgrad(dy, node.weight) for _, node, dy in both])
        pendings: list[Any] = [
            ColumnLinearPending.keep(call.cfg, node.needs, x=node.x, rows=None, dy=dy) for call, node, dy in both
        ]
    else:
        rounded: list[Any] = [rounded_dy("column_qlinear_dgrad", node, dy, call.cfg) for call, node, dy in both]
        dx = _sum([part_of_dx(row, node, call.cfg) for (call, node, _), (row, _) in zip(both, rounded, strict=True)])
        pendings = [pending for _, pending in rounded]
    cfg = calls[0].cfg
    sent = comm.start_scatter_sum(dx, cfg.axis) if cfg.sequence_parallel else comm.start_sum(dx, cfg.axis)
    return comm.wait(sent, cfg.axis), pendings


def _wgrads(calls: Any, pendings: list[Any], into: tuple[Any, ...]) -> Any:
    """Gather x once for all weight gradients."""
    cfg, low, x = calls[0].cfg, calls[0].op is not column_linear, pendings[0].x
    if not cfg.sequence_parallel or x is None or any(one.x is not x for one in pendings):
        return NotImplemented
    for call, one, sums in zip(calls, pendings, into, strict=True):
        if sums is not None and not _takes(call, one, x, sums, low):
            return NotImplemented
    rows = arrived_x(send_x("column_qlinear_wgrad", pendings[0], cfg), pendings[0], cfg) if low else comm.gather(x, cfg.axis)
    found = zip(calls, pendings, into, strict=True)
    return tuple([call.op.wgrad(one.copy(rows=rows), call.cfg, into=sums) for call, one, sums in found])


def _takes(call: Any, pending: Any, x: Any, into: Any, low: bool) -> bool:
    """Whether the call can add to the accumulators; if not, the call itself raises, before anything is sent."""
    if type(into) is not LinearParams:
        return False
    try:
        if low:
            check_low_into("column_qlinear_wgrad", pending, x, call.cfg, into)
        else:
            check_linear_into("column_linear_wgrad", pending.dy, x, wants_bias(call.cfg, pending.needs), into)
    except (ValueError, TypeError):
        return False
    return True


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = pointwise.add(total, part)
    return total


def _saves(window: Window) -> Saving:
    """For each layer but one: the gather and the write of x, and the send of dx."""
    return Saving(2 * len(window.calls) - 2, len(window.calls) - 1)


rule = register_fusion(Rule("sibling columns", SIBLINGS_FORWARD, _match_forward, _run, _saves, on_cpu=True))
backward_rule = register_fusion(
    Rule("sibling columns", SIBLINGS_BACKWARD, _match_backward, _run_backward, _saves, on_cpu=True, wgrads=_wgrads)
)
