"""A graph that takes its inputs out of a list, so that those which nobody else holds are freed after their last readers."""

from __future__ import annotations

from typing import Any

from torch import fx


def boxed(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph whose one input is the list of its inputs, which it empties."""
    graph, copies = fx.Graph(), dict[fx.Node, Any]()
    box, count = graph.placeholder("box"), 0
    for node in module.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
            continue
        # the code sets the name of a node to None after its last reader, and of an input it does not
        copies[node] = graph.call_function(_take, (box, count))
        copies[node].meta = dict(node.meta)
        count += 1
    return fx.GraphModule(module, graph)


def _take(box: list[Any], i: int) -> Any:
    value, box[i] = box[i], None
    return value
