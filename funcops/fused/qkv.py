"""Queries, keys and values of one input: forward, one launch rotates q and k; backward, their gradients lie in one tensor, so that
the input gradient is one product, and the three weight gradients another.

Steps: three branches of a parallel, each a linear layer of any variant and a reshape to heads; the first two with the same rope, or
all without one. In the backward, layers whose products read tensors, not codes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from funcops.backend import tracing
from funcops.fused.matchers import alike, alone, joins, layer
from funcops.fused.siblings import arrived, forward, in_flight, match_backward, match_in_flight, shared
from funcops.kernels.linear import linear_wgrad
from funcops.kernels.qkv_split import qkv_split_bwd
from funcops.kernels.rope import rope_apply_pair
from funcops.kernels.sibling_linear import joined_linear_dgrad
from funcops.ops.linear import LinearParams
from funcops.ops.reshape import reshape, reshape_kept
from funcops.ops.rope import check_rotation, rope, rope_kept, table_of
from funcops.program.rules import SIBLINGS_BACKWARD, SIBLINGS_FORWARD, Rule, Saving, Window, register_fusion


def _match(window: Window) -> tuple[int, ...] | str | None:
    if len(window.branches) != 3 or any(len(row) < 2 for row in window.branches):
        return None
    turned = [len(row) > 2 and joins(row[2], rope) for row in window.branches]
    if not all(layer(row[0]) and alone(row[1], reshape) for row in window.branches) or turned[2] or turned[0] != turned[1]:
        return None
    if window.dtype is torch.float64:
        return "float64 runs on torch"
    shapes = [row[1].cfg for row in window.branches]
    if any(len(cfg.in_shape) != 1 or len(cfg.out_shape) != 2 or cfg.out_shape[1] != shapes[0].out_shape[1] for cfg in shapes):
        return "their heads are not of one size"
    if shapes[1].out_shape != shapes[2].out_shape:
        return "k and v have not as many heads"
    if turned[0] and window.branches[0][2].cfg != window.branches[1][2].cfg:
        return "q and k do not turn alike"
    return 2 + turned[0], 2 + turned[1], 2


def _match_forward(window: Window) -> tuple[int, ...] | str | None:
    sizes = _match(window)
    if not isinstance(sizes, tuple) or sizes == (2, 2, 2):
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
        if not all(call.needs.input(0) if call.op is rope else call.needs.x for call in calls):
            return "no gradient is asked of their input"
    return sizes


def _of(op: Any, calls: Any, given: Any) -> tuple[list[Any], list[Any]]:
    """The calls of an op, or the linear layers for None, and their entries of `given`."""
    pairs = [(call, one) for call, one in zip(calls, given, strict=True) if (call.op is op if op else call.op.layer)]
    return [call for call, _ in pairs], [one for _, one in pairs]


def _run(calls: Any, params: Any, x: Any, values: dict[int, Any]) -> Any:
    products, weights = _of(None, calls, params)
    turns, _ = _of(rope, calls, params)
    tables = [values[call.takes[0]] for call in turns]
    if tables[0] is not tables[1]:
        return NotImplemented
    found = forward(products, weights, x)
    if found is NotImplemented:
        return NotImplemented
    ys, nodes = found
    shapes, _ = _of(reshape, calls, params)
    heads = [y.view(*y.shape[:-1], *call.cfg.out_shape) for y, call in zip(ys, shapes, strict=True)]
    nodes += [reshape_kept(call.cfg, call.kept, y.shape, head) for y, call, head in zip(ys, shapes, heads, strict=True)]
    try:
        check_rotation("rope_fwd", heads[0], tables[0], turns[0].cfg)
    except (TypeError, ValueError):
        return NotImplemented
    cfg = turns[0].cfg
    turned = rope_apply_pair(heads[0], heads[1], table_of(tables[0], cfg, x.dtype), cfg.interleaved, False)
    nodes += [rope_kept(call.cfg, call.kept, (head, tables[0])) for call, head in zip(turns, heads[:2], strict=True)]
    kept = dict(zip((*products, *shapes, *turns), nodes, strict=True))
    return (*turned, heads[2]), [kept[call] for call in calls]


def _run_backward(calls: Any, kept: list[Any], dys: tuple[Any, ...], gradients: dict[int, Any]) -> Any:
    found = _start_backward(calls, kept, dys)
    return found if found is NotImplemented else (arrived(calls, found[0]), found[1])


def _run_in_flight(calls: Any, kept: list[Any], dys: tuple[Any, ...], gradients: dict[int, Any]) -> Any:
    return in_flight(*_of(None, calls, kept), dys, lambda: _start_backward(calls, kept, dys))


def _start_backward(calls: Any, kept: list[Any], dys: tuple[Any, ...]) -> Any:
    products, nodes = _of(None, calls, kept)
    _, shapes = _of(reshape, calls, kept)
    turns, angles = _of(rope, calls, kept)
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
    parts = joined.split([w.shape[0] for w in weights], -1)
    pendings = {call: own.pending(node, dy, dy, call.cfg) for call, node, dy in zip(products, nodes, parts, strict=True)}
    return dx, [pendings.get(call) for call in calls]


def _wgrads(calls: Any, pendings: Any, into: Any) -> Any:
    """Compute the weight gradients in one product, if dy are parts of one tensor, from `_run_backward`, and `into` is empty."""
    if tracing() or any([sums is not None for sums in into]):
        return NotImplemented
    joined, x = pendings[0].dy._base, pendings[0].x
    if joined is None or any([p.dy._base is not joined or p.x is not x or x is None for p in pendings]):
        return NotImplemented
    sizes = [p.dy.shape[-1] for p in pendings]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    if joined.shape[-1] != sum(sizes) or [p.dy.storage_offset() for p in pendings] != starts:
        return NotImplemented
    biased = [call.cfg.bias and p.needs.param("bias") for call, p in zip(calls, pendings, strict=True)]
    dw, db = linear_wgrad(joined, calls[0].op.layer.dw_rows(pendings[0], calls[0].cfg), any(biased))
    biases = [None] * len(sizes) if db is None else db.split(sizes)
    return [LinearParams(w, b if wanted else None) for w, b, wanted in zip(dw.split(sizes), biases, biased, strict=True)]


def _saves_backward(window: Window) -> Saving:
    """One product sums the three gradients and reads x once; biases save launches, too. Without a rope the gradients are copied to
    one tensor."""
    biases = sum(call.op.layer is not None and call.cfg.bias for call in window.calls)
    turned = any(call.op is rope for call in window.calls)
    return Saving(10 if turned else 8, (6 if turned else 4) + max(0, 2 * biases - 2))


def _saves(window: Window) -> Saving:
    """One launch turns q and k; and x is prepared once, if it is."""
    first = window.calls[0]
    return Saving(0, 1) if first.op.layer.prepares(first.cfg) is None else Saving(4, 3)


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
