"""The backward of a trace whose outputs do not all get a gradient: without the steps that autograd would not run either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from funcops.adapters.from_function.cut import Graphs
from funcops.adapters.from_function.joint import Like

_ADD = (torch.ops.aten.add.Tensor, torch.add, "add")
CONSTANT, MISSING, LIVE = range(3)  # of a node: it reads no gradient of an output, only missing ones, or others, too


def without(graphs: Graphs, missing: frozenset[int]) -> Graphs:
    """The same graphs with the backward for outputs of which these have no gradient. A step that reads only missing gradients is
    left out, and its result is None; elsewhere a missing gradient counts as zeros."""
    dys = [MISSING if i in missing else LIVE for i in graphs.dys.values()]
    middle = sum(n not in graphs.kept and n not in graphs.dys for n in graphs.waiting)  # results of dgrad for wgrad
    dgrad, found, _ = _shorter(graphs.dgrad, [CONSTANT] * len(graphs.kept) + dys, middle)
    of_dys, computed = dict(zip(graphs.dys, dys, strict=True)), iter(found[len(found) - middle :])
    waiting = {n: CONSTANT if n in graphs.kept else of_dys[n] if n in of_dys else next(computed) for n in graphs.waiting}
    wgrad, _, given = _shorter(graphs.wgrad, list(waiting.values()))
    backward, *_ = _shorter(graphs.backward, [CONSTANT] * len(graphs.kept) + dys)
    left = {n: like for n, like in graphs.waiting.items() if waiting[n] != MISSING}
    passes = tuple([own or one for own, one in zip(graphs.passes, given, strict=True)])
    return graphs._replace(dgrad=dgrad, wgrad=wgrad, backward=backward, waiting=left, passes=passes)


def _shorter(module: fx.GraphModule, given: Sequence[int], last: int = 0) -> tuple[fx.GraphModule, list[int], list[bool]]:
    """A copy of a graph without its missing inputs; what its results are; and which may be what was a part of a sum, or a view of
    it, and so an input. Of the `last` ones, missing ones are left out."""
    graph, copies, kinds, parts = fx.Graph(), dict[fx.Node, Any](), dict[fx.Node, int](), set[fx.Node]()
    inputs = iter(given)
    for node in module.graph.nodes:
        if node.op == "output":
            found = [CONSTANT if n is None else kinds[n] for n in node.args[0]]
            alone = [n is not None and _within(n, parts) for n in node.args[0]]
            results = [None if n is None or kinds[n] == MISSING else copies[n] for n in node.args[0]]
            first = len(results) - last
            graph.output((*results[:first], *[one for one in results[first:] if one is not None]))
            break
        read = [kinds[n] for n in node.all_input_nodes]
        kind = kinds[node] = next(inputs) if node.op == "placeholder" else LIVE if LIVE in read else max(read, default=CONSTANT)
        if kind == MISSING:
            continue
        other = _other_part(node, kinds) if MISSING in read else None
        if other is not None:
            copies[node] = copies[other]
            parts.add(node)
            continue
        for n in node.all_input_nodes:
            if kinds[n] == MISSING:
                copies[n] = graph.call_function(_zeros, tuple(Like.of(n.meta["val"])))
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph), found, alone


def _within(node: fx.Node, parts: set[fx.Node]) -> bool:
    """Whether a node is one of these, or computed from one of them alone, as its views are."""
    while node not in parts and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node in parts


def _zeros(shape: Any, stride: Any, dtype: Any, device: Any) -> Tensor:
    return Like(shape, stride, dtype, device).zeros()


def _other_part(node: fx.Node, kinds: dict[fx.Node, int]) -> fx.Node | None:
    """The part of a sum whose other part is missing, if the sum is that part."""
    if node.target not in _ADD or len(node.args) != 2 or node.kwargs or len(node.all_input_nodes) != 2:
        return None
    other = next(n for n in node.all_input_nodes if kinds[n] != MISSING)
    return other if Like.of(other.meta["val"]) == Like.of(node.meta["val"]) else None
