"""`graph_data`: a captured graph as nodes and edges, with the path of the step that launched each; `graph_diff`: what changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from funcops.adapters.graphs.without_gpu import recorder
from funcops.engine.backend.scopes import Label, node_labels
from funcops.engine.errors import describe, fail, in_html, on_screen, require_type


class GraphNode(NamedTuple):
    """A node of a graph. `kind`: "kernel", "memcpy", "memset", ... on a device, "operator" in a recording; `name`: of the kernel or
    operator; `path` and `half`: of the step that launched it, "" if none is known; `grid` and `block`: its launch, None without
    one."""

    kind: str
    name: str
    path: str = ""
    half: str = ""
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None


class GraphData(NamedTuple):
    """The topology of a graph: nodes, and edges from the number of a node to the number of one that runs after it."""

    nodes: tuple[GraphNode, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def width(self) -> int:
        """The most nodes at one depth, of which none waits for another: 1 for a graph without branches."""
        before: list[list[int]] = [[] for _ in self.nodes]
        for a, b in self.edges:
            before[b].append(a)
        depth: list[int] = []
        for numbers in before:
            depth.append(1 + max((depth[n] for n in numbers), default=0))
        return max(Counter(depth).values(), default=0)

    def counts(self) -> Counter[tuple[str, str, str]]:
        """The number of nodes by path, half and name."""
        return Counter((node.path, node.half, node.name) for node in self.nodes)

    def dot(self) -> str:
        """The graph for Graphviz, with a box around the nodes of each step."""
        lines = ["digraph graph_data {", "  node [shape=box, fontsize=10];"]
        steps: dict[str, list[int]] = {}
        for i, node in enumerate(self.nodes):
            steps.setdefault(str(Label(node.path, node.half)), []).append(i)
        for number, (step, own) in enumerate(steps.items()):
            boxed = bool(step)
            lines += [f"  subgraph cluster_{number} {{ label={_quoted(step)};"] * boxed
            for i in own:
                node = self.nodes[i]
                grid = f"\\n{'x'.join(map(str, node.grid))}" if node.grid else ""
                lines.append(f"  {'  ' * boxed}n{i} [label={_quoted(node.name + grid)}, tooltip={_quoted(node.kind)}];")
            lines += ["  }"] * boxed
        return "\n".join([*lines, *(f"  n{a} -> n{b};" for a, b in self.edges), "}"]) + "\n"

    def __str__(self) -> str:
        return f"{len(self.nodes)} nodes, {len(self.edges)} edges, at most {self.width} at once\n" + _table(self.counts(), "")

    def __repr__(self) -> str:
        return on_screen(str(self))

    def _repr_html_(self) -> str:
        return in_html(str(self))


def graph_data(captured: Any) -> GraphData:
    """The topology of what `graphed` captured (the first graph of its first slot), or of a torch `CUDAGraph`.

    Steps have paths if the capture ran in `named_steps()` (on a device: torch 2.15 and a driver that annotates graphs). On a device
    the graph must be captured with `keep_graph=True`, and torch must know `get_graph_data`. Raises what torch
    raises if it cannot, and `TypeError` for anything else.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, SoftcapConfig, Step, chain, linear, named_steps, random, softcap
    >>> from funcops.graphs import graph_data, graphed
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 8)), Step("cap", softcap, SoftcapConfig(30.0))))
    >>> params, x = chain.init(cfg, key=random.key(0)), torch.ones(2, 4)
    >>> with named_steps():
    ...     step = graphed(lambda x: chain.fwd(params, x, cfg)[0], x)
    ...
    >>> list(dict.fromkeys(node.path for node in graph_data(step).nodes))
    ['up', 'cap']
    """
    found = next(iter(captured._slots[0].graphs.values())) if hasattr(captured, "_slots") else captured
    if hasattr(found, "data"):
        return found.data()  # type: ignore[no-any-return]
    if not hasattr(found, "get_graph_data"):
        fail("graph_data", "captured", "what graphed captured, or a CUDAGraph", describe(captured), TypeError)
    return from_torch_data(found.get_graph_data(), node_labels())


def graph_diff(before: GraphData, after: GraphData) -> str:
    """Return what `after` has more (+) and less (-) than `before`, by path, half and name of the nodes; "" if nothing. Raises
    `TypeError` for anything but `GraphData`.

    >>> from funcops.graphs import GraphData, GraphNode, graph_diff
    >>> one = GraphData((GraphNode("kernel", "gemm", "up", "fwd"),), ())
    >>> print(graph_diff(one, GraphData((*one.nodes, GraphNode("memset", "zero", "up", "wgrad")), ((0, 1),))))
    + up: wgrad  zero
    """
    require_type("graph_diff", "before", before, GraphData)
    require_type("graph_diff", "after", after, GraphData)
    return "\n".join(filter(None, (_table(after.counts() - before.counts(), "+ "), _table(before.counts() - after.counts(), "- "))))


def from_torch_data(data: Mapping[str, Any], labels: Mapping[int, Label]) -> GraphData:
    """The topology in torch's `CUDAGraph.get_graph_data()`, with the labels of its nodes by `tools_id`."""
    nodes = []
    for node in data["nodes"]:
        label = labels.get(node["tools_id"]) or labels.get(node["node_id"]) or Label()
        name = node["kernel_name"] or node.get("host_fn_name") or node["node_type"]
        nodes.append(GraphNode(node["node_type"], name, *label, node["grid_dim"], node["block_dim"]))
    return GraphData(tuple(nodes), tuple((edge["from"], edge["to"]) for edge in data["edges"]))


def from_recording(recording: recorder.Recording) -> GraphData:
    """The topology of a recording: its operators, without views, in the order of their branches."""
    numbers = {i: number for number, i in enumerate(i for i, call in enumerate(recording.calls) if call.moves)}
    nodes = tuple(GraphNode("operator", str(recording.calls[i].func), *recording.calls[i].label) for i in numbers)
    edges = ((numbers[before], number) for i, number in numbers.items() for before in recording.calls[i].before)
    return GraphData(nodes, tuple(edges))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\\\\n", "\\n") + '"'


def _table(counts: Counter[tuple[str, str, str]], sign: str) -> str:
    rows = [(str(Label(path, half)), f"{name}" + (f" (x {n})" if n > 1 else "")) for (path, half, name), n in counts.items()]
    wide = max((len(step) for step, _ in rows), default=0)
    return "\n".join(f"{sign}{step.ljust(wide)}  {name}".rstrip() for step, name in rows)
