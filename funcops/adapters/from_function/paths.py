"""The graphs of a trace in `named_steps()`: the path of the module around the steps of each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from funcops.engine.backend import scopes

HALVES = {"forward": "fwd", "dgrad": "dgrad", "wgrad": "wgrad", "backward": "bwd"}


@contextmanager
def left() -> Iterator[None]:
    """A block that leaves the scopes which an error in it leaves open."""
    before = len(scopes._thread.open)
    try:
        yield
    finally:
        scopes.leave_all(before)


def with_paths(module: fx.GraphModule, half: str) -> fx.GraphModule:
    """A copy of a graph whose steps run in scopes. What a backward computes again of the forward has its half for that."""
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    inside: tuple[str, str] | None = None
    for node in module.graph.nodes:
        if node.op in ("call_function", "call_method") and (scope := _scope(node, half) or inside or ("", half)) != inside:
            if inside is not None:
                graph.call_function(scopes.leave)
            graph.call_function(scopes.enter, scope)
            inside = scope
        if node.op == "output" and inside is not None:
            graph.call_function(scopes.leave)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(module, graph)


def _scope(node: fx.Node, half: str) -> tuple[str, str] | None:
    """The path and half of a node; None for one that no trace has made, such as zeros in place of a missing gradient."""
    custom = node.meta.get("custom", {})
    if "backward" in custom:
        return custom["backward"], half
    return (custom["path"], half if half == "fwd" else scopes.RECOMPUTE) if "path" in custom else None
