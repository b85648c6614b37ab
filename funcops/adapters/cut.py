"""A function and its autograd backward as three graphs: forward, dgrad, wgrad."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from funcops.errors import fail

Run = Callable[[Sequence[Tensor]], list[Tensor]]
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default)


class Like(NamedTuple):
    """A tensor's shape, dtype and device."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class Graphs(NamedTuple):
    """The graphs, and the names of what each takes. "input.3" is leaf 3 of the call, "dy.0" the gradient of output 0; any other
    name is that of a node, whose value the graph before gives after its results."""

    forward: fx.GraphModule
    dgrad: fx.GraphModule
    wgrad: fx.GraphModule
    outputs: tuple[Like, ...]
    kept: tuple[str, ...]
    waiting: tuple[str, ...]


def cut(where: str, run: Run, leaves: Sequence[Tensor], asked: Sequence[bool], params: int) -> Graphs:
    """Trace `run(leaves) -> outputs` with its gradients for the leaves that are asked for, the first `params` of which are params."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
        given = [mode.from_tensor(t.detach()) for t in leaves]
        outputs = [Like(tuple(y.shape), y.dtype, y.device) for y in run(given)]

        def joint(*flat: Tensor) -> tuple[list[Any], list[Any]]:
            own = [t.detach().requires_grad_() if ask else t for t, ask in zip(flat, asked, strict=False)]
            ys = run(own)
            pairs = [(y, dy) for y, dy in zip(ys, flat[len(leaves) :], strict=True) if y.requires_grad]
            wanted = [t for t, ask in zip(own, asked, strict=True) if ask]
            if not pairs or not wanted:
                return ys, [None] * len(wanted)
            found = torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs], allow_unused=True)
            return ys, list(found)

        dys = [torch.empty(like.shape, dtype=like.dtype, device=like.device) for like in outputs]
        traced = make_fx(joint)(*given, *dys)
        if any(_writes(node) for node in traced.graph.nodes):
            with torch.no_grad():
                traced = make_fx(torch.func.functionalize(traced, remove="mutations"))(*given, *dys)
    return _Cutter(where, traced, len(leaves), len(outputs), asked, params).graphs(tuple(outputs))


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    """Whether the node is another look at its argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and len(schema.returns) == 1 and schema.returns[0].alias_info is not None


class _Cutter:
    """Which node of a joint graph goes where."""

    def __init__(self, where: str, traced: fx.GraphModule, leaves: int, outputs: int, asked: Sequence[bool], params: int) -> None:
        self.root, self.graph = traced, traced.graph
        self._drop_aliases()
        nodes = list(self.graph.nodes)
        for node in nodes:
            if _writes(node):
                fail(where, "fn", "a function that torch can trace without writes", str(node.target))
        self.order = [n for n in nodes if n.op not in ("placeholder", "output")]
        inputs = [n for n in nodes if n.op == "placeholder"]
        self.names = {n: f"input.{i}" if i < leaves else f"dy.{i - leaves}" for i, n in enumerate(inputs)}
        self.ys, self.grads = nodes[-1].args[0]
        owners = [i for i, ask in enumerate(asked) if ask]
        self.dx = [g for i, g in zip(owners, self.grads, strict=True) if i >= params]
        self.dparams = [g for i, g in zip(owners, self.grads, strict=True) if i < params]
        self.leaves, self.inputs = inputs[:leaves], set(inputs)

    def graphs(self, outputs: tuple[Like, ...]) -> Graphs:
        views = {n for n in self.order if _is_view(n)}  # made again where they are read, so that their bases cross
        first = self._ancestors(self.ys)
        second = self._ancestors(self.dx) - (first - views)
        third = self._ancestors(self.dparams) - (first - views) - (second - views)
        for node in self.order:  # but a part of a tuple goes where the tuple is, so that tensors cross
            for part in (first, second):
                if node.target is operator.getitem and node.args[0] in part:
                    third.discard(node)
                    (second if part is first else set()).discard(node)
                    part.add(node)
        kept = self._crossing(self.dx + self.dparams, second | third)
        kept = [n for n in kept if not self.names.get(n, "").startswith("dy.")]
        waiting = self._crossing(self.dparams, third)
        dys = [n for n in self.names if self.names[n].startswith("dy.")]
        forward = self._part(first, self.leaves, [*self.ys, *[n for n in kept if n not in self.inputs]])
        middle = [n for n in waiting if n in second]
        dgrad = self._part(second, [*kept, *dys], [*self.dx, *middle])
        wgrad = self._part(third, waiting, self.dparams)
        return Graphs(forward, dgrad, wgrad, outputs, self._named(kept), self._named(waiting))

    def _drop_aliases(self) -> None:
        for node in list(self.graph.nodes):
            if node.target in _SAME:
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)

    def _ancestors(self, ends: Iterable[Any]) -> set[fx.Node]:
        """The nodes that the ends are computed by, inputs aside."""
        found: set[fx.Node] = set()
        stack = [n for n in ends if n is not None]
        while stack:
            node = stack.pop()
            if node in found or node in self.inputs:
                continue
            found.add(node)
            stack += node.all_input_nodes
        return found

    def _crossing(self, ends: Iterable[Any], part: set[fx.Node]) -> list[fx.Node]:
        """What a part reads, or gives as a result, without computing it; constants are copied instead."""
        read = {n: None for node in self.order if node in part for n in node.all_input_nodes}
        read.update({n: None for n in ends if n is not None})
        return [n for n in read if n not in part and n.op != "get_attr"]

    def _named(self, nodes: Iterable[fx.Node]) -> tuple[str, ...]:
        return tuple(self.names.get(n, n.name) for n in nodes)

    def _part(self, part: set[fx.Node], inputs: Sequence[fx.Node], results: Sequence[Any]) -> fx.GraphModule:
        graph, copies = fx.Graph(), {}
        for i, node in enumerate(inputs):
            copies[node] = graph.placeholder(f"i{i}")
        for node in self.order:
            if node not in copies and (node in part or node.op == "get_attr"):
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(None if n is None else copies[n] for n in results))
        graph.eliminate_dead_code()
        return fx.GraphModule(self.root, graph)
