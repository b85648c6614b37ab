"""The graphs of a trace in `named_steps()`: the path of the module around the steps of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from funcops.engine.backend import notes, scopes
from funcops.engine.errors import join_path

HALVES = {"forward": "fwd", "dgrad": "dgrad", "wgrad": "wgrad", "backward": "bwd"}


@contextmanager
def left() -> Iterator[None]:
    """A block that leaves the scopes which an error in it leaves open."""
    before = len(scopes._thread.open)
    try:
        yield
    finally:
        scopes.leave_all(before)


def with_paths(module: fx.GraphModule, half: str, level: int = scopes.NAMED) -> fx.GraphModule:
    """A copy of a graph whose steps run in scopes. What a backward computes again of the forward has its half for that. If `level`
    is NOTED, each scope tells what others read of it at its end."""
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    for inside, nodes in _runs(module, half):
        if inside is not None:
            graph.call_function(scopes.enter, inside)
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        if inside is not None:
            found = _told(nodes, inside[1], module.graph.output_node()) if level == scopes.NOTED else []
            if found:
                graph.call_function(notes.tell, (tuple((None, of, name, copies[node]) for of, name, node in found),))
            graph.call_function(scopes.leave)
    return fx.GraphModule(module, graph)


def _runs(module: fx.GraphModule, half: str) -> list[tuple[tuple[str, str] | None, list[fx.Node]]]:
    """The nodes of a graph in parts that have one scope each; none for the inputs before the first step, and for the outputs."""
    found: list[tuple[tuple[str, str] | None, list[fx.Node]]] = [(None, [])]
    for node in module.graph.nodes:
        inside = found[-1][0]
        if node.op in ("call_function", "call_method"):
            inside = _scope(node, half) or inside or ("", half)
        elif node.op == "output":
            inside = None
        if inside != found[-1][0]:
            found.append((inside, []))
        found[-1][1].append(node)
    return found


def _told(nodes: list[fx.Node], half: str, output: fx.Node) -> list[tuple[str, str, fx.Node]]:
    """The half, the name and the node of each value that a scope makes and others read: y of a forward, or what it computes
    again; of a backward dx, and what only the caller gets of weight gradients."""
    read = [node for node in nodes if node.op != "placeholder" and not set(node.users) <= set(nodes)]
    if half in ("fwd", scopes.RECOMPUTE):
        kinds = [(half, "y")] * len(read)
    else:
        last = [half != "dgrad" and set(node.users) == {output} for node in read]
        kinds = [("wgrad", "dparams") if alone else ("dgrad", "dx") for alone in last]
    names = [join_path(name, i if kinds.count((of, name)) > 1 else None) for i, (of, name) in enumerate(kinds)]
    return [(of, name, node) for (of, _), name, node in zip(kinds, names, read, strict=True)]


def _scope(node: fx.Node, half: str) -> tuple[str, str] | None:
    """The path and half of a node; None for one that no trace has made, such as zeros in place of a missing gradient."""
    custom = node.meta.get("custom", {})
    if "backward" in custom:
        return custom["backward"], half
    return (custom["path"], half if half == "fwd" else scopes.RECOMPUTE) if "path" in custom else None
