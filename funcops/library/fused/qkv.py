"""Queries, keys and values of one input: forward, one launch rotates q and k; backward, their gradients lie in one tensor, so that
the input gradient is one product, and the three weight gradients another.

Steps: three branches of a parallel, each a linear layer of any variant, the sum with its adapter's y if it has one, and a reshape
to heads; the first two with the same rope, or all without one. In the backward, layers whose products read tensors, not codes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import tracing
from funcops.engine.compose.add import add, add_kept
from funcops.engine.program.rules import SIBLINGS_BACKWARD, SIBLINGS_FORWARD, Rule, Saving, Window, register_fusion
from funcops.library.fused.matchers import alike, alone, joins, layer
from funcops.library.fused.siblings import (
    arrived,
    fit,
    forward_as_one,
    forward_each,
    in_flight,
    match_backward,
    match_in_flight,
    prepared_once,
    shared,
    takes,
)
from funcops.library.kernels.linear import linear_wgrad
from funcops.library.kernels.pointwise import add as added
from funcops.library.kernels.qkv_split import qkv_split_bwd, qkv_split_fwd
from funcops.library.kernels.rope import rope_apply_pair
from funcops.library.kernels.sibling_linear import joined_linear_dgrad, stacked
from funcops.library.ops.linear import LinearParams, linear_gradients
from funcops.library.ops.reshape import reshape, reshape_kept
from funcops.library.ops.rope import check_rotation, rope, rope_kept, table_of


def _match(window: Window) -> tuple[int, ...] | str | None:
    sums = [int(len(row) > 1 and joins(row[1], add)) for row in window.branches]
    rows = [row[n:] for row, n in zip(window.branches, sums, strict=True)]  # from the sum on, or from the layer
    if len(rows) != 3 or any(len(row) < 2 for row in rows):
        return None
    turned = [len(row) > 2 and joins(row[2], rope) for row in rows]
    layers = all(layer(row[0]) is not None for row in window.branches)
    if not layers or not all(alone(row[1], reshape) for row in rows) or turned[2] or turned[0] != turned[1]:
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    shapes = [row[1].cfg for row in rows]
    if any(len(cfg.in_shape) != 1 or len(cfg.out_shape) != 2 or cfg.out_shape[1] != shapes[0].out_shape[1] for cfg in shapes):
        return "their heads are not of one size"
    if shapes[1].out_shape != shapes[2].out_shape:
        return "k and v have not as many heads"
    if turned[0] and rows[0][2].cfg != rows[1][2].cfg:
        return "q and k do not turn alike"
    return sums[0] + 2 + turned[0], sums[1] + 2 + turned[1], sums[2] + 2


def _match_forward(window: Window) -> tuple[int, ...] | str | None:
    sizes = _match(window)
    if not isinstance(sizes, tuple) or not any(joins(call, rope) for call in window.branches[0][: sizes[0]]):
        return sizes if isinstance(sizes, str) else None
    first = window.calls[0]
    apart = {(call.op, call.op.layer.prepares(call.cfg)) for call in window.calls}
    together = len(apart) == 1 and (first.op.layer.prepares(first.cfg) is not None or first.op.layer.y_is_product(first.cfg))
    return sizes if together else None


def _match_backward(window: Window) -> tuple[int, ...] | str | None:
    sizes = _match(window)
    if isinstance(sizes, tuple):
        if not isinstance(match_backward(window), tuple) or not window.calls[0].op.layer.dense:
            return None
        calls = [call for row, size in zip(window.branches, sizes, strict=True) for call in row[:size]]
        if not all(call.needs.input(0) if call.takes else call.needs.x for call in calls):
            return "no gradient is asked of their input"
    return sizes


Pairs = tuple[list[Any], list[Any]]


def _by_op(calls: Any, given: Any) -> tuple[Pairs, Pairs, Pairs, Pairs]:
    """The calls of linear layers, sums, reshapes and ropes, each with their entries of `given`."""
    found: tuple[Pairs, ...] = ([], []), ([], []), ([], []), ([], [])
    layers, sums, shapes, turns = found
    for call, one in zip(calls, given, strict=True):
        op = call.op
        own, entries = layers if op.layer else turns if op is rope else sums if op is add else shapes
        own.append(call)
        entries.append(one)
    return layers, sums, shapes, turns


def _run(calls: Any, params: Any, x: Any, values: dict[int, Any]) -> Any:
    (products, weights), (sums, _), (shapes, _), (turns, _) = _by_op(calls, params)
    tables = [values[call.takes[0]] for call in turns]
    if tables[0] is not tables[1]:
        return NotImplemented
    if not fit(products, weights, x):
        return NotImplemented
    one = None if sums else forward_as_one(products, weights, x)
    whole, ys, nodes = one or (None, *forward_each(products, weights, x))
    if sums:
        beside = [next((values[call.takes[0]] for call in sums if call.main == product.out), None) for product in products]
        pairs = [(y, other) for y, other in zip(ys, beside, strict=True) if other is not None]
        if any([not alike(y, other) or other.shape != y.shape for y, other in pairs]):
            return NotImplemented
        ys = [y if other is None else added(y, other) for y, other in zip(ys, beside, strict=True)]
        nodes += [add_kept(call.cfg, call.kept, pair) for call, pair in zip(sums, pairs, strict=True)]
    heads = [y.view(*y.shape[:-1], *call.cfg.out_shape) for y, call in zip(ys, shapes, strict=True)]
    nodes += [reshape_kept(call.cfg, call.kept, y.shape, head) for y, call, head in zip(ys, shapes, heads, strict=True)]
    try:
        check_rotation("rope_fwd", heads[0], tables[0], turns[0].cfg)
    except (TypeError, ValueError):
        return NotImplemented
    cfg = turns[0].cfg
    table, (q, k, v) = table_of(tables[0], cfg, x.dtype), heads
    if whole is None:
        out = (*rope_apply_pair(q, k, table, cfg.interleaved, False), v)
    else:
        out = qkv_split_fwd(whole, table, q.shape[-2], k.shape[-2], cfg.interleaved)
    nodes += [rope_kept(call.cfg, call.kept, (head, tables[0])) for call, head in zip(turns, heads[:2], strict=True)]
    kept = dict(zip((*products, *sums, *shapes, *turns), nodes, strict=True))
    return out, [kept[call] for call in calls]


def _run_backward(calls: Any, kept: list[Any], dys: tuple[Any, ...], gradients: dict[int, Any]) -> Any:
    found = _start_backward(calls, kept, dys, gradients)
    return found if found is NotImplemented else (arrived(calls, found[0]), found[1])


def _run_in_flight(calls: Any, kept: list[Any], dys: tuple[Any, ...], gradients: dict[int, Any]) -> Any:
    return in_flight(*_by_op(calls, kept)[0], dys, lambda: _start_backward(calls, kept, dys, gradients))


def _start_backward(calls: Any, kept: list[Any], dys: tuple[Any, ...], gradients: dict[int, Any]) -> Any:
    (products, nodes), (sums, _), (_, shapes), (turns, angles) = _by_op(calls, kept)
    weights = [node.weight for node in nodes]
    if not alike(*dys, *weights) or any([d.shape != node.y_shape for d, node in zip(dys, shapes, strict=True)]):
        return NotImplemented
    if any([node.shape != d.shape for d, node in zip(dys, angles, strict=False)]):
        return NotImplemented
    table, interleaved = None, False
    if turns:
        if angles[0].positions is not angles[1].positions:
            return NotImplemented
        table, interleaved = table_of(angles[0].positions, turns[0].cfg, dys[0].dtype), turns[0].cfg.interleaved
    joined = qkv_split_bwd(*dys, table, interleaved)
    own, cfg = products[0].op.layer, products[0].cfg
    dx = own.start_dx((joined,), cfg, lambda dys: joined_linear_dgrad(dys[0], *weights))
    parts = joined.split_with_sizes([w.shape[0] for w in weights], -1)  # split itself is a function in Python
    pendings = {call: own.pending(node, dy, dy, call.cfg) for call, node, dy in zip(products, nodes, parts, strict=True)}
    if sums:
        of_products = dict(zip([call.out for call in products], parts, strict=True))
        gradients |= {call.takes[0]: of_products[call.main] for call in sums if call.needs.input(1)}
    return dx, [pendings.get(call) for call in calls]


def _wgrads(calls: Any, pendings: Any, into: Any) -> Any:
    """Compute the weight gradients in one product, if dy are parts of one tensor, from `_run_backward`; and if `into` is empty, or
    its accumulators lie one below the other in one memory."""
    if tracing():
        return NotImplemented
    joined, x = pendings[0].dy._base, pendings[0].x
    if joined is None or any([p.dy._base is not joined or p.x is not x or x is None for p in pendings]):
        return NotImplemented
    sizes = [p.dy.shape[-1] for p in pendings]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if joined.shape[-1] != sum(sizes) or [p.dy.storage_offset() for p in pendings] != starts:
        return NotImplemented
    biased = [call.cfg.bias and p.needs.param("bias") for call, p in zip(calls, pendings, strict=True)]
    given = any([one is not None for one in into])
    total = _sums(calls, pendings, into, biased) if given else None
    if given and total is None:
        return NotImplemented
    rows = calls[0].op.layer.dw_rows(pendings[0], calls[0].cfg)
    if total is not None:
        linear_gradients(calls[0].op.wgrad.__name__, joined, rows, any(biased), total)
        return list(into)
    dw, db = linear_wgrad(joined, rows, any(biased))
    biases = [None] * len(sizes) if db is None else db.split_with_sizes(sizes)
    return [LinearParams(w, b if wanted else None) for w, b, wanted in zip(dw.split_with_sizes(sizes), biases, biased, strict=True)]


def _sums(calls: Any, pendings: Any, into: Any, biased: list[bool]) -> LinearParams | None:
    """The accumulators as one, or None."""
    if any(biased) != all(biased) or not all([type(one) is LinearParams and isinstance(one.weight, Tensor) for one in into]):
        return None
    weight = stacked(*[one.weight for one in into])
    each = zip(calls, pendings, into, strict=True)
    if weight is None or not all([takes(call, one, one.x, sums) for call, one, sums in each]):
        return None
    bias = stacked(*[one.bias for one in into]) if all(biased) else None
    return None if bias is None and any(biased) else LinearParams(weight, bias)


def _saves_backward(window: Window) -> Saving:
    """One product sums the three gradients and reads x once; biases save launches, too. Without a rope the gradients are copied to
    one tensor."""
    biases = sum(call.op.layer is not None and call.cfg.bias for call in window.calls)
    turned = any(call.op is rope for call in window.calls)
    return Saving(10 if turned else 8, (6 if turned else 4) + max(0, 2 * biases - 2))


def _saves(window: Window) -> Saving:
    """One launch turns q and k; and x is prepared once, if it is."""
    first, passes, launches = window.calls[0], 0, 0
    if first.op.layer.prepares(first.cfg) is not None:
        passes, launches = prepared_once(first, 3)
    return Saving(passes, launches + 1)


rule = register_fusion(Rule("q, k and v", SIBLINGS_FORWARD, _match_forward, _run, _saves))
backward_rule = register_fusion(
    Rule("q, k and v", SIBLINGS_BACKWARD, _match_backward, _run_backward, _saves_backward, wgrads=_wgrads, shared=shared)
)
in_flight_rule = register_fusion(
    Rule(
        "q, k and v, in flight",
        SIBLINGS_BACKWARD,
        functools.partial(match_in_flight, match=_match_backward),
        _run_in_flight,
        _saves_backward,
        whole=True,
        wgrads=_wgrads,
        shared=shared,
        settle=arrived,
    )
)
