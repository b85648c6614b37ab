"""The cut of a module's joint graph at the beginnings of some of its modules, and what crosses each cut.

A node of the forward belongs to the stage in which it ran. A node of the backward belongs to the stage of the autograd node that
computed it, which is the stage in which that one was made. At a cut, the values that later stages read go forward. If autograd
differentiates one of them, its gradient comes back: the sum of what the later stages contribute, to which each stage adds its own
contributions, in autograd's order. A parameter that two stages read has a gradient in each.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from funcops.adapters.from_function.cut import OWN, SAME, by_module, cheap, has_gradient, unique
from funcops.adapters.from_function.joint import Joint, Like, Steps
from funcops.engine.errors import fail

_ADD, _CLONE = torch.ops.aten.add.Tensor, torch.ops.aten.clone.default
Edge = tuple[Any, int]  # a node of autograd, and the number of its output


class Variable:
    """A leaf, or a tensor that autograd differentiates and that a later stage than its own reads."""

    def __init__(self, stage: int, stages: int) -> None:
        self.stage, self.last = stage, stage  # that computed it (a leaf: -1), and the last one that reads it
        self.total: fx.Node | None = None  # its whole gradient, as its own stage reads it
        self.values: list[fx.Node | None] = [None] * stages  # what it is at the beginning of each stage; of a leaf not noted
        self.parts: list[list[fx.Node]] = [[] for _ in range(stages)]  # what each stage contributes to its gradient

    def returns(self, stage: int) -> bool:
        """Whether its gradient comes back at the beginning of the stage."""
        return self.stage < stage and any(self.parts[stage:])


class CutSteps(Steps):
    """The `Steps` of a module whose stages begin where the modules `starts`, paths by id, begin to run."""

    def __init__(self, module: nn.Module, where: str, starts: Mapping[int, str]) -> None:
        super().__init__(module)
        self.where, self.starts = where, starts
        self.stage = 0
        self.numbers: list[int] = []  # of autograd's first node in each later stage
        self.before: list[fx.Node] = []  # the last node before each
        self.alive: list[dict[Edge, fx.Node | None]] = []  # the tensors at the beginning of each
        self.variables: dict[Edge, Variable] = {}
        self.leaves: list[Variable] = []  # of those whose gradients are wanted

    def _enter(self, module: nn.Module, args: Any) -> None:
        mode = get_proxy_mode()
        if threading.get_ident() == self.thread and id(module) in self.starts and mode is not None and self.backward is None:
            self.mark()
            tensors = [t for t in list(mode.tracer.tensor_tracker) if t.requires_grad]
            # first, because a view that was written to makes its node when it is asked for it
            self.alive.append({(t.grad_fn, t.output_nr): self.node(t) for t in tensors if t.grad_fn is not None})
            self.numbers.append(torch.autograd._get_sequence_nr())
            self.before.append(next(iter(reversed(mode.tracer.graph.nodes))))
            self.stage += 1
        super()._enter(module, args)

    def label(self, custom: dict[str, Any]) -> None:
        custom.setdefault("stage", (self.stage, self.backward is not None))
        super().label(custom)

    def gradients(self, ys: list[Tensor], dys: list[Tensor], wanted: list[Tensor]) -> list[Any]:
        last = self.stage
        roots: list[Edge] = [(edge.node, edge.output_nr) for edge in map(get_gradient_edge, ys)]
        nodes, readers = dict[Any, None](), [(edge, last) for edge in roots]
        while readers:
            (node, number), stage = readers.pop()
            own = self._stage_of(node)
            one = self.variables.setdefault((node, number), Variable(own, last + 1))
            one.last = max(one.last, stage)
            if node not in nodes:
                nodes[node] = None
                readers += [((source, i), own) for source, i in node.next_functions if source is not None]
        self.variables = {edge: one for edge, one in self.variables.items() if one.last > one.stage}
        for (node, number), one in self.variables.items():
            one.values = [None, *[alive.get((node, number)) for alive in self.alive]]
        leaves = {id(node.variable): one for (node, _), one in self.variables.items() if one.stage < 0}
        self.leaves = [leaves.get(id(t)) or Variable(-1, last + 1) for t in wanted]
        for edge, dy in zip(roots, dys, strict=True):
            self._contribute(edge, last, dy)
        inner = [node for node in nodes if self._stage_of(node) >= 0]
        hooks = [node.register_prehook(functools.partial(self._before, node)) for node in inner]
        hooks += [node.register_hook(functools.partial(self._after, node)) for node in inner]
        try:
            return super().gradients(ys, dys, wanted)
        finally:
            self.mark()
            for hook in hooks:
                hook.remove()

    def _stage_of(self, node: Any) -> int:
        """The stage of an autograd node; -1 for a leaf."""
        return -1 if "AccumulateGrad" in node.name() else bisect_right(self.numbers, node._sequence_nr())

    def _before(self, node: Any, given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Give the node its gradients, each of a variable as a copy, which has a node of its own in the graph."""
        self.mark()
        self.stage = self._stage_of(node)
        found = list(given)
        for i, dy in enumerate(given):
            one = self.variables.get((node, i))
            if one is not None and dy is not None:
                if not _is_sum(self.node(dy), [part for parts in reversed(one.parts) for part in parts]):
                    name = by_module(next(value for value in one.values if value is not None)) or node.name()
                    fail(self.where, "cuts", "places where no hook changes the gradient of what crosses", f"one on {name}")
                found[i] = copy = dy.clone()
                one.total = self.node(copy)
        return tuple(found)

    def _after(self, node: Any, found: tuple[Tensor | None, ...], given: Any) -> None:
        for edge, part in zip(node.next_functions, found, strict=True):
            if part is not None:
                self._contribute(edge, self.stage, part)

    def _contribute(self, edge: Edge, stage: int, part: Tensor) -> None:
        if edge in self.variables:
            node = self.node(part)
            if node is None:
                fail(self.where, "a gradient", "computed by torch's operators", f"one by {edge[0].name()}, which none did")
            self.variables[edge].parts[stage].append(node)

    @property
    def noted(self) -> list[Variable]:
        return [*self.leaves, *[one for one in self.variables.values() if one.stage >= 0]]

    def finish(self, traced: fx.GraphModule) -> None:
        """Let the graph return the nodes of all variables, so that they are known after writes are removed."""
        returned = []
        for one in self.noted:
            for stage in range(1 if one.stage >= 0 else len(one.values), len(one.values)):
                value, one.values[stage] = one.values[stage], None
                if one.returns(stage):
                    if value is None:
                        path = list(self.starts.values())[stage - 1]
                        wanted = "modules before which every value that is differentiated is a tensor that is at hand"
                        fail(self.where, "cuts", wanted, f"{path!r}, before which one is not")
                    with traced.graph.inserting_after(self.before[stage - 1]):
                        one.values[stage] = copy = traced.graph.call_function(_CLONE, (value,))
                    copy.meta["custom"] = {"stage": (stage - 1, False)}
            returned.append((one.total, one.values, one.parts))
        output = traced.graph.output_node()
        output.args = ((*output.args[0], returned),)  # type: ignore[misc]

    def read(self, graph: fx.Graph) -> list[fx.Node]:
        """Take the variables' nodes from the finished graph; returns its outputs."""
        given: Any = graph.output_node().args[0]
        ys, _, returned = given
        for one, (total, values, parts) in zip(self.noted, returned, strict=True):
            one.total, one.parts = total, [list(part) for part in parts]
            one.values = [None if value is None else base(value.args[0]) for value in values]
        return list(map(base, ys))


def _is_sum(node: Any, parts: Sequence[fx.Node]) -> bool:
    """Whether the node is the sum of these, as autograd adds them."""
    for part in reversed(parts[1:]):
        if node.target is not _ADD or node.args[1] is not part:
            return False
        node = node.args[0]
    return node is parts[0]


def base(node: fx.Node) -> fx.Node:
    """The node of which this one is another name."""
    while node.target in SAME and node.args[0].op != "get_attr":  # type: ignore[union-attr]
        node = node.args[0]  # type: ignore[assignment]
    return node


class Slot(NamedTuple):
    """A value that a stage gets from the one before, and the variable whose gradient it returns."""

    value: fx.Node
    variable: Variable | None


class Part(NamedTuple):
    """A stage's joint graph, from (its params, x, gradients of its outputs) to (its outputs, gradients of its params and of x)."""

    joint: Joint
    asked: tuple[bool, ...]
    params: list[int]  # the numbers of the leaves that it reads
    names: list[str]  # of the values of x


class _Reads(NamedTuple):
    nodes: set[fx.Node]  # that a stage computes
    params: list[int]  # the numbers of the leaves that it reads
    x: set[fx.Node]


class Parts:
    """The parts of a joint graph that was traced under `steps`. `names` and `asked`: of its leaves, the first `count` of params."""

    def __init__(self, where: str, joint: Joint, steps: CutSteps, names: Sequence[str], count: int, asked: Sequence[bool]) -> None:
        self.where, self.root, self.count, self.asked = where, joint.graph, count, asked
        self.ys = steps.read(joint.graph.graph)
        self.nodes, self.last = list(joint.graph.graph.nodes), len(steps.starts)
        inputs = [node for node in self.nodes if node.op == "placeholder"]
        self.leaves, self.dys = {node: i for i, node in enumerate(inputs[: len(names)])}, inputs[len(names) :]
        wanted = [node for node, ask in zip(self.leaves, asked, strict=True) if ask]
        self.of_leaf = dict(zip(wanted, steps.leaves, strict=True)) if steps.leaves else {}  # nothing may be differentiated
        self.inner = [one for one in steps.noted if one.stage >= 0]
        self.totals = {one.total: one for one in self.inner if one.total is not None}
        self.constant = set[fx.Node]()  # what each stage that reads it computes by itself
        for node in self.nodes:
            light = node.op == "get_attr" or (node.op == "call_function" and (node.target in OWN or cheap(node)))
            if light and self.constant.issuperset(node.all_input_nodes):
                self.constant.add(node)
        self.names = dict(zip(self.leaves, names, strict=True))

    def made(self) -> list[Part]:
        """The part of each stage."""
        reads, slots = list[_Reads](), [[Slot(y, None) for y in self.ys]]
        for stage in reversed(range(self.last + 1)):
            reads.insert(0, self._read(stage, [slot.value for slot in slots[0]]))
            slots.insert(0, self._slots(stage, reads[0].x))
        taken, crossing = set(self.names.values()), {slot.value for of_stage in slots[:-1] for slot in of_stage}
        for node in self.nodes:
            if node in crossing and node not in self.names:
                self.names[node] = unique(by_module(node) or node.name, taken, "_")
        found, dys = list[Part](), [node.meta["val"] for node in self.dys]
        for stage in reversed(range(self.last + 1)):
            part, dys = self._part(stage, reads[stage], slots[stage], slots[stage + 1], dys)
            found.insert(0, part)
        return found

    def _slots(self, stage: int, read: set[fx.Node]) -> list[Slot]:
        """The slots of a stage's x, in the order of the graph."""
        x = [node for node, i in self.leaves.items() if i >= self.count]
        found: dict[Any, list[Variable]] = {node: [] for node in (read if stage else x)}
        back = [(node, self.of_leaf[node]) for node in x if node in self.of_leaf]
        for node, one in [*back, *[(one.values[stage], one) for one in self.inner]]:
            if one.returns(stage):
                found.setdefault(node, []).append(one)
        # of two variables that are one value each has a slot, as each has a gradient
        nobody: list[Variable | None] = [None]
        return [Slot(node, one) for node in self.nodes if node in found for one in found[node] or nobody]

    def _read(self, stage: int, ys: list[fx.Node]) -> _Reads:
        """The nodes that a stage computes or reads for these outputs, and for the gradients to which it contributes."""
        every = [*self.inner, *self.of_leaf.values()]
        todo = [*ys, *[node for one in every if one.stage < stage for node in one.parts[stage]]]
        nodes, x = set[fx.Node](), set[fx.Node]()
        params = {
            i for node, i in self.leaves.items() if i < self.count and node in self.of_leaf and self.of_leaf[node].parts[stage]
        }
        while todo:
            node = base(todo.pop())
            if node in nodes or node in x or (stage == self.last and node in self.dys):
                continue
            own, backward = node.meta.get("custom", {}).get("stage", (None, None))
            if self.leaves.get(node, self.count) < self.count:
                params.add(self.leaves[node])
            elif node in self.leaves or (backward is False and own < stage and node not in self.constant):
                x.add(node)
            elif node in self.constant or (own == stage and node.op != "placeholder"):
                nodes.add(node)
                todo += self.totals[node].parts[stage] if node in self.totals else node.all_input_nodes
            else:
                wanted = "between steps whose backward reads nothing that another stage computes later"
                got = f"stage {stage} reads {by_module(node) or node.name} of {'dy' if own is None else f'stage {own}'}"
                fail(self.where, "cuts", wanted, got)
        return _Reads(nodes, sorted(params), x)

    def _part(self, stage: int, reads: _Reads, x: list[Slot], out: list[Slot], dys: list[Any]) -> tuple[Part, list[Any]]:
        """The part of a stage, and examples of the gradients of its x. `dys`: of the gradients of its outputs."""
        graph, made, coming, leaves = fx.Graph(), dict[fx.Node, fx.Node](), dict[Variable, fx.Node](), list(self.leaves)

        def given(example: Any) -> fx.Node:
            found = graph.placeholder(f"i{len(graph.nodes)}")
            found.meta["val"] = example
            return found

        for node in [leaves[i] for i in reads.params]:
            made[node] = given(node.meta["val"])
        for slot in x:
            value = given(slot.value.meta["val"])
            made.setdefault(slot.value, value)
        gradients = [given(dy) for dy in dys]
        if stage == self.last:
            made.update(zip(self.dys, gradients, strict=True))
        else:
            coming = {slot.variable: dy for slot, dy in zip(out, gradients, strict=True) if slot.variable is not None}

        def total(one: Variable | None) -> fx.Node | None:
            """The sum of what later stages and this one contribute."""
            terms = [] if one is None else [coming.get(one), *[made[base(node)] for node in one.parts[stage]]]
            terms = [node for node in terms if node is not None]
            return functools.reduce(functools.partial(_sum, graph), terms) if terms else None

        for node in self.nodes:
            if node in reads.nodes:
                of = self.totals.get(node)
                made[node] = graph.node_copy(node, lambda one: made[base(one)]) if of is None else total(of)  # type: ignore[assignment]
        back = [*[self.of_leaf.get(leaves[i]) for i in reads.params], *[slot.variable for slot in x]]
        grads = list(map(total, back))
        asked = [self.asked[i] for i in reads.params] + [has_gradient(slot.value.meta["val"].dtype) for slot in x]
        graph.output(([made[slot.value] for slot in out], [node for node, ask in zip(grads, asked, strict=True) if ask]))
        joint, taken = Joint(fx.GraphModule(self.root, graph), tuple(map(Like.of, dys))), set[str]()
        values, dxs = [slot.value.meta["val"] for slot in x], grads[len(reads.params) :]
        with FakeTensorMode():  # in the layout of the copy that `_before` gives on
            likes = [Like.of(value if node is None else node.meta["val"]) for value, node in zip(values, dxs, strict=True)]
            found = [like.zeros().clone() for like in likes]
        return Part(joint, tuple(asked), reads.params, [unique(self.names[slot.value], taken, "_") for slot in x]), found


def _sum(graph: fx.Graph, first: fx.Node, second: fx.Node) -> fx.Node:
    found = graph.call_function(_ADD, (first, second))
    with FakeTensorMode():
        found.meta["val"] = Like.of(first.meta["val"]).zeros() + Like.of(second.meta["val"]).zeros()
    return found
