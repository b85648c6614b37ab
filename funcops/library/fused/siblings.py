"""Linear layers of one input, such as q, k, v or gate, up: x is prepared once (gathered over ranks, in codes) and read by one
product; the parts of dx are summed before they are sent, and x is prepared once for the weight gradients, whenever they run. In a
whole backward of layers with an `overlap`, x is in flight during the products for dx, and dx during the products for dw.

Steps: the first of each branch of a parallel, linear layers of any variant whose y needs no sum. Where layers do not all prepare x
alike, the most common ones share it, and the others run by themselves. On the CPU a joint forward of layers that prepare nothing
gains nothing. y and dw have the bits of layers one by one; dx is summed over the layers first, and over the ranks then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.engine.program.rules import SIBLINGS_BACKWARD, SIBLINGS_FORWARD, Rule, Saving, Window, register_fusion
from funcops.library.fused.matchers import alike, fits, layer
from funcops.library.kernels.linear import linear_dgrad, linear_fwd
from funcops.library.kernels.pointwise import add
from funcops.library.kernels.sibling_linear import sibling_linear_dgrad, sibling_linear_fwd, stacked
from funcops.library.ops.coded_linear import check_low_into
from funcops.library.ops.linear import LinearParams, check_linear_into, wants_bias

MOST = 3


def _match_plain(window: Window) -> tuple[int, ...] | str | None:
    if not all((own := layer(call)) and own.y_is_product(call.cfg) and own.prepares(call.cfg) is None for call in window.calls):
        return None
    if len(window.calls) > MOST:
        return f"more than {MOST} branches"
    return "float64 runs on torch" if window.dtype is torch.float64 else (1,) * len(window.calls)


def _match_prepared(window: Window) -> tuple[int, ...] | str | None:
    marks = [None if (own := layer(call)) is None else own.prepares(call.cfg) for call in window.calls]
    asked = [mark for mark in marks if mark is not None]
    if len(asked) < 2:
        return None
    common = max(asked, key=asked.count)  # of equal counts the first
    return tuple([int(mark == common) for mark in marks]) if asked.count(common) > 1 else "each prepares x in its own way"


def match_backward(window: Window) -> tuple[int, ...] | str | None:
    marks = [None if (own := layer(call)) is None else own.joins(call.cfg) for call in window.calls]
    if any(mark is None for mark in marks):
        return None
    if len(set(marks)) > 1:
        return "they sum dx in different ways"
    if marks[0] == "linear" and len(marks) > MOST:
        return f"more than {MOST} branches"
    return (1,) * len(marks) if all(needs.x for needs in window.needs) else "no gradient is asked of their input"


def _run(calls: Any, params: Any, x: Any, values: dict[int, Any]) -> Any:
    return forward(calls, params, x)


def forward(calls: Any, params: Any, x: Any) -> Any:
    """The y and the residuals of each, or NotImplemented."""
    return forward_each(calls, params, x) if fit(calls, params, x) else NotImplemented


def fit(calls: Any, params: Any, x: Any) -> bool:
    return all([fits(call, p, x) for call, p in zip(calls, params, strict=True)])


def forward_each(calls: Any, params: Any, x: Any) -> Any:
    """The y and the residuals of each, of inputs that `fit`."""
    own = calls[0].op.layer
    if own.dense:
        ys = own.y_products(x, calls[0].cfg, lambda rows: _products(rows, params))
        given = zip(calls, params, ys, strict=True)
        return ys, [call.op.layer.kept(call.cfg, call.kept, x, p.weight, y) for call, p, y in given]
    first = next((i for i, call in enumerate(calls) if call.kept.param("weight")), 0)
    prepared = own.prepared(x, params[first], calls[first].cfg, calls[first].kept)
    made = [own.from_prepared(prepared, p, call.cfg, call.kept) for call, p in zip(calls, params, strict=True)]
    return tuple([y for y, _ in made]), [node for _, node in made]


def forward_as_one(calls: Any, params: Any, x: Any) -> Any:
    """The same as parts of one y, from one product; None if their params do not lie in one memory."""
    own, weights = calls[0].op.layer, [p.weight for p in params]
    weight = stacked(*weights) if own.dense else None
    if weight is None:
        return None
    biased = [p.bias for p in params if p.bias is not None]
    bias = stacked(*biased) if len(biased) == len(params) else None
    if biased and bias is None:
        return None
    (y,) = own.y_products(x, calls[0].cfg, lambda rows: (linear_fwd(rows, weight, bias),))
    ys = y.split_with_sizes([w.shape[0] for w in weights], -1)
    given = zip(calls, weights, ys, strict=True)
    return y, ys, [call.op.layer.kept(call.cfg, call.kept, x, w, part) for call, w, part in given]


def _products(x: Tensor, params: Any) -> tuple[Tensor, ...]:
    if len(params) > MOST or x.dtype is torch.float64:
        return tuple([linear_fwd(x, p.weight, p.bias) for p in params])
    ys: tuple[Tensor, ...] = sibling_linear_fwd(x, *_three([p.weight for p in params]), *_three([p.bias for p in params]))
    return ys[: len(params)]


def _three(given: Any) -> list[Any]:
    return [*given] + [None] * (MOST - len(given))


def match_in_flight(window: Window, match: Callable[[Window], Any]) -> Any:
    """The answer of a backward rule, if the layers send dx under the products of dw."""
    return match(window) if all((own := layer(call)) and own.overlaps(call.cfg) for call in window.calls) else None


def _run_backward(calls: Any, kept: list[Any], dys: tuple[Any, ...], gradients: dict[int, Any]) -> Any:
    found = _start_backward(calls, kept, dys, gradients)
    return found if found is NotImplemented else (calls[0].op.layer.wait_dx(found[0], calls[0].cfg), found[1])


def _run_in_flight(calls: Any, kept: list[Any], dys: tuple[Any, ...], gradients: dict[int, Any]) -> Any:
    return in_flight(calls, kept, dys, lambda: _start_backward(calls, kept, dys, gradients))


def in_flight(calls: Any, nodes: Any, dys: Any, start: Callable[[], Any]) -> Any:
    """The dx that `start` returns, in flight, and its pendings, after x was sent under the product of dx."""
    own, cfg = calls[0].op.layer, calls[0].cfg
    first = next((node for node in nodes if node.x is not None), None)
    one = first is not None and all([node.x is None or node.x is first.x for node in nodes])
    sent = own.start_x(first, dys[0], cfg) if one else None
    found = start()
    if sent is None:
        return found
    rows = own.wait_x(sent, first, cfg)
    if found is not NotImplemented:
        for pending in found[1]:
            if pending is not None:
                pending.set(rows=rows)
    return found


def arrived(calls: Any, dx: Any) -> Any:
    return calls[0].op.layer.wait_dx(dx, calls[0].cfg)


def _start_backward(calls: Any, kept: list[Any], dys: tuple[Any, ...], gradients: dict[int, Any]) -> Any:
    own, cfg = calls[0].op.layer, calls[0].cfg
    weights = [node.weight for node in kept] if own.dense else []
    if not alike(*dys, *weights) or any(d.shape != n.y_shape or d.dtype is not n.dtype for d, n in zip(dys, kept, strict=True)):
        return NotImplemented
    both = list(zip(calls, kept, dys, strict=True))
    if not own.dense:
        found = [_part(own, node, dy, call.cfg) for call, node, dy in both]
        return own.start_dx(dys, cfg, lambda _: _sum([part for part, _ in found])), [pending for _, pending in found]
    pendings = [call.op.layer.pending(node, dy, dy, call.cfg) for call, node, dy in both]

    def product(dys: tuple[Tensor, ...]) -> Tensor:
        if own.joins(cfg) == "linear":
            return sibling_linear_dgrad(*_three(dys), *_three(weights))  # type: ignore[no-any-return]
        return _sum([linear_dgrad(dy, w) for dy, w in zip(dys, weights, strict=True)])

    return own.start_dx(dys, cfg, product), pendings


def _part(own: Any, residuals: Any, dy: Tensor, cfg: Any) -> tuple[Tensor, Any]:
    """A rank's part of one layer's dx, and the pending weight gradient."""
    row, pending = own.read_dy(f"{own.name}_dgrad", residuals, dy, cfg)
    return own.part(row, residuals, cfg), pending


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = add(total, part)
    return total


def shared(calls: Any, pendings: list[Any], into: tuple[Any, ...]) -> Any:
    """The pendings with what they make of x made once, or NotImplemented."""
    own, x = calls[0].op.layer, pendings[0].x
    if x is None or any([one.x is not x for one in pendings]):
        return NotImplemented
    for call, one, sums in zip(calls, pendings, into, strict=True):
        if sums is not None and not takes(call, one, x, sums):
            return NotImplemented
    made = own.shared(pendings[0], calls[0].cfg)
    return NotImplemented if made is None else [one.copy(**made) for one in pendings]


def takes(call: Any, pending: Any, x: Any, into: Any) -> bool:
    """Whether the call can add to the accumulators; if not, the call itself raises, before anything is sent."""
    if type(into) is not LinearParams:
        return False
    try:
        if call.op.layer.dense:
            check_linear_into(call.op.wgrad.__name__, pending.dy, x, wants_bias(call.cfg, pending.needs), into)
        else:
            check_low_into(call.op.wgrad.__name__, pending, x, call.cfg, into)
    except (ValueError, TypeError):
        return False
    return True


def _saves(window: Window) -> Saving:
    """For each layer but one, x is neither read nor prepared."""
    return Saving(2 * len(window.calls) - 2, len(window.calls) - 1)


def prepared_once(first: Any, layers: int) -> Saving:
    """For each layer but one, x is neither read nor prepared; where it is gathered, it is also neither sent nor received."""
    times = (layers - 1) * (1 + bool(first.cfg.sequence_parallel))
    return Saving(2 * times, times)


def _saves_forward(window: Window) -> Saving:
    return prepared_once(window.calls[0], len(window.calls))


rule = register_fusion(Rule("sibling linears", SIBLINGS_FORWARD, _match_plain, _run))
prepared_rule = register_fusion(
    Rule("sibling linears, x once", SIBLINGS_FORWARD, _match_prepared, _run, _saves_forward, on_cpu=True)
)
# in each sum of two gradients the second is neither written nor read, or not sent
backward_rule = register_fusion(
    Rule("sibling linears", SIBLINGS_BACKWARD, match_backward, _run_backward, _saves, on_cpu=True, shared=shared)
)
in_flight_rule = register_fusion(
    Rule(
        "sibling linears, in flight",
        SIBLINGS_BACKWARD,
        functools.partial(match_in_flight, match=match_backward),
        _run_in_flight,
        _saves,
        on_cpu=True,
        whole=True,
        shared=shared,
        settle=arrived,
    )
)
