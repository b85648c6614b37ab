"""Known parts of a traced module run as ops of this library.

The forward of the joint graph is searched for the formulas of a table. A part is a group of nodes that computes exactly a formula:
the same operators, constants, casts and shapes, and nothing else reads its inner values. The forward then runs again without
memory, with an op in the place of each part, and is traced with its autograd backward. That this gives a module's own gradients is
known from the same without ops: it must give the joint graph of the module, operator by operator.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from funcops.adapters.from_function.cut import SAME
from funcops.adapters.from_function.joint import (
    Joint,
    Like,
    Steps,
    arguments_of,
    draws,
    hidden_from_hooks,
    is_view,
    joint_graph,
    operator_name,
    stand_in,
    writes,
)

CAST = torch.ops.aten._to_copy.default
_ADD = torch.ops.aten.add.Tensor
_SWAPS = (torch.ops.aten.mul.Tensor, _ADD)  # whose two tensors may change places
Call = Callable[..., Tensor]


class Part(NamedTuple):
    """Nodes of a forward, and the function that computes `out` from `inputs` in their place."""

    inner: frozenset[fx.Node]
    inputs: tuple[fx.Node, ...]
    call: Call


class Formula(NamedTuple):
    """A way to write an op. `fn(*tensors, **numbers)` is traced on tensors like each of `examples(dtype)`; a constant that equals
    one of `numbers` stands for any other. `op(like, *likes, **numbers)`, of the result and the tensors, returns the function that
    takes its place, or None if it does not fit. `dtypes`: in which it is the same function, but for roundings between its steps.
    `holds(*nodes)`: what must be known of the tensors."""

    fn: Callable[..., Tensor]
    examples: Callable[[torch.dtype], Sequence[tuple[Like, ...]]]
    numbers: tuple[tuple[str, Any], ...]
    op: Callable[..., Call | None]
    dtypes: tuple[torch.dtype, ...]
    holds: Callable[..., bool] = lambda *inputs: True


def with_parts(
    joint: Joint, leaves: Sequence[Tensor], asked: Sequence[bool], find: Callable[[Forward], dict[fx.Node, Part]]
) -> Joint | None:
    """The joint graph with the parts of its forward that `find` finds, by their last nodes; the same one if it has none. None if
    autograd gives another backward for its forward's operators, as it does for an `autograd.Function`."""
    forward = Forward(joint.graph, len(leaves))
    parts = find(forward)
    if not parts:
        return joint
    if any([writes(node) for node in joint.graph.graph.nodes]):
        return None
    known: dict[Any, int] = {}
    try:
        plain = _again(joint, forward, leaves, asked, {})
    except RuntimeError:  # an operator that needs memory
        return None
    if _results(plain, _numbered(plain, known)) != _results(joint.graph, _numbered(joint.graph, known)):
        return None
    made = _again(joint, forward, leaves, asked, parts)
    _merge(made)
    return joint._replace(graph=made)


class Forward:
    """The nodes of a joint graph's forward, in order, with the random numbers that nobody reads."""

    def __init__(self, traced: fx.GraphModule, leaves: int) -> None:
        nodes = list(traced.graph.nodes)
        inputs = [node for node in nodes if node.op == "placeholder"]
        self.leaves, self.ys = inputs[:leaves], list(nodes[-1].args[0][0])
        wanted, later = set(self.ys), set(inputs[leaves:])
        for node in reversed(nodes):
            if node in wanted:
                wanted.update(node.all_input_nodes)
        for node in nodes:
            if not later.isdisjoint(node.all_input_nodes):
                later.add(node)
            elif draws(node):
                wanted.update([node, *node.all_input_nodes])
        self.nodes = [node for node in nodes if node in wanted and node.op != "placeholder"]
        self.inside = set(self.nodes)

    def run(self, values: dict[fx.Node, Any], parts: dict[fx.Node, Part], done: Callable[[fx.Node, Any], None]) -> list[Tensor]:
        """The results from the values of leaves and constants, by the calls of the parts. `done(node, value)` follows each."""
        skipped = {node for part in parts.values() for node in part.inner} - parts.keys()
        for node in self.nodes:
            if node in values or node in skipped:
                continue
            if node in parts:
                values[node] = parts[node].call(*[values[one] for one in parts[node].inputs])
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            done(node, values[node])
        return [values[y] for y in self.ys]

    def readers(self, node: fx.Node) -> set[fx.Node]:
        return {user for user in node.users if user in self.inside or user.op == "output"}


def _again(
    joint: Joint, forward: Forward, leaves: Sequence[Tensor], asked: Sequence[bool], parts: dict[fx.Node, Part]
) -> fx.GraphModule:
    """The joint graph of the forward's nodes, traced on tensors without memory."""
    reads = [node for node in forward.nodes if node.op == "get_attr"]
    constants = {str(node.target): getattr(joint.graph, str(node.target)) for node in reads}
    values, steps = list(constants.values()), Steps(nn.Module())

    def label(node: fx.Node, value: Any) -> None:
        custom = node.meta.get("custom", {})
        steps.stack = [custom.get("path", "")]
        steps.mark()
        made = steps.node(value)
        if made is not None and "input" in custom:
            made.meta["custom"].setdefault("input", custom["input"])

    def run(flat: Sequence[Tensor]) -> list[Tensor]:
        steps.seen = 0
        steps.mark()
        given = dict(zip(constants, flat[len(leaves) :], strict=True))
        found: dict[fx.Node, Any] = dict(zip(forward.leaves, flat[: len(leaves)], strict=True))
        return forward.run(found | {node: given[str(node.target)] for node in reads}, parts, label)

    every = [*leaves, *values]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.inference_mode(False), fake, torch.enable_grad(), hidden_from_hooks():
        given = [stand_in(t) for t in every]
        made = joint_graph(run, given, joint.outputs, [*asked, *[False] * len(values)], steps)
    inputs = made.graph.find_nodes(op="placeholder")
    for i, (value, node) in enumerate(zip(values, inputs[len(leaves) : len(every)], strict=True)):
        name = f"constant_{i}"
        made.register_buffer(name, value)
        with made.graph.inserting_before(node):
            constant = made.graph.get_attr(name)
        constant.meta = node.meta
        node.replace_all_uses_with(constant)
        made.graph.erase_node(node)
    return made


def _merge(traced: fx.GraphModule) -> None:
    """Compute the same once, such as a table of rotations of which each layer makes its own."""
    first: dict[int, fx.Node] = {}
    for node, number in _numbered(traced, {}).items():
        same = first.setdefault(number, node)
        if same is not node:
            node.replace_all_uses_with(same)
            traced.graph.erase_node(node)


def _results(traced: fx.GraphModule, numbers: dict[fx.Node, int]) -> list[int | None]:
    (output,) = traced.graph.find_nodes(op="output")
    return [None if node is None else numbers[node] for side in output.args[0] for node in side]


def _numbered(traced: fx.GraphModule, known: dict[Any, int]) -> dict[fx.Node, int]:
    """A number for each node: equal ones are computed by equal operators from equal values. Each random number is another."""
    numbers: dict[fx.Node, Any] = {}
    inputs = drawn = 0
    for node in traced.graph.nodes:
        key: Any
        if node.op == "output":
            continue
        if node.target in SAME:
            numbers[node] = numbers[node.args[0]]
            continue
        if node.op == "placeholder":
            key, inputs = ("input", inputs), inputs + 1
        elif node.op == "get_attr":
            key = "constant", id(getattr(traced, node.target))
        else:
            args = fx.node.map_arg(arguments_of(node), lambda n: _Number(numbers[n]))
            drawn += draws(node)
            key = node.target, repr(args), drawn if draws(node) else 0
        numbers[node] = known.setdefault(key, len(known))
    return numbers


class _Number(int):
    def __repr__(self) -> str:
        return f"value {int(self)}"


class Finder:
    """The parts of a forward that are written as formulas of a table say, the first first; `wanted` says of which results."""

    def __init__(self, formulas: tuple[Formula, ...], wanted: Callable[[Tensor], bool]) -> None:
        self.formulas, self.wanted = formulas, wanted

    def __call__(self, forward: Forward) -> dict[fx.Node, Part]:
        targets = {node.target for node in forward.nodes}
        taken, found = set[fx.Node](), dict[fx.Node, Part]()
        for node in reversed(forward.nodes):
            val = node.meta.get("val")
            if node in taken or not isinstance(val, Tensor) or not self.wanted(val):
                continue
            for formula, pattern in _patterns(self.formulas, val.dtype, val.device).get(node.target, ()):
                if pattern.targets <= targets and (part := _part(forward, formula, pattern, node)) is not None:
                    if taken.isdisjoint(part.inner):
                        found[node] = part
                        taken |= part.inner
                        break
        return found


def _part(forward: Forward, formula: Formula, pattern: Pattern, node: fx.Node) -> Part | None:
    """The part that ends with the node, if it is written as this formula: found on small tensors, and compared on its own."""
    val, rough = node.meta["val"], pattern.match(node, exact=False)
    if rough is None:
        return None
    inputs = [rough.nodes[one] for one in pattern.inputs]
    if not formula.holds(*inputs):
        return None
    likes = tuple([Like.of(one.meta["val"]) for one in inputs])
    call, same = formula.op(Like.of(val), *likes, **rough.numbers), _traced(formula.fn, likes, tuple(rough.numbers.items()))
    match = None if same is None else same.match(node, exact=True)
    if call is None or same is None or match is None or [match.nodes[one] for one in same.inputs] != inputs:
        return None
    inner = {one for mine, one in match.nodes.items() if mine.op != "placeholder"}
    views = set(inputs)
    for one in forward.nodes:
        if one in inner and one is not node and is_view(one) and views.issuperset(one.all_input_nodes):
            views.add(one)  # which costs nothing, so others may read it, too
    inner -= views
    if any([not forward.readers(one) <= inner for one in inner - {node}]):
        return None
    return Part(frozenset(inner), tuple(inputs), call)


class Match(NamedTuple):
    nodes: dict[fx.Node, fx.Node]
    numbers: dict[str, Any]


class Pattern:
    """The graph of a formula."""

    def __init__(self, traced: fx.GraphModule, numbers: dict[str, Any]) -> None:
        nodes = list(traced.graph.nodes)
        self.inputs, self.out = [node for node in nodes if node.op == "placeholder"], nodes[-1].args[0]
        self.numbers = numbers
        self.targets = {node.target for node in nodes if node.op == "call_function"}

    def match(self, node: fx.Node, exact: bool) -> Match | None:
        """The node for each node of the pattern, if `node` is its result. Not `exact`: sizes may be others."""
        return self._unify(self.out, node, Match({}, {}), exact)

    def _unify(self, mine: Any, other: Any, so_far: Match, exact: bool) -> Match | None:
        if not isinstance(mine, fx.Node):
            return self._constant(mine, other, so_far, exact)
        if not isinstance(other, fx.Node):
            return None
        other = _itself(other)
        if mine in so_far.nodes:
            return so_far if so_far.nodes[mine] is other else None
        if mine.op == "placeholder":
            a, b = mine.meta["val"], other.meta.get("val")
            if not isinstance(b, Tensor) or a.dtype is not b.dtype or (exact and Like.of(a) != Like.of(b)):
                return None
            return Match({**so_far.nodes, mine: other}, so_far.numbers)
        if mine.op != other.op or mine.target is not other.target:
            return None
        own, theirs = _arguments(mine), _arguments(other)
        orders = [own]
        if mine.target in _SWAPS and (mine.target is not _ADD or own[2] == theirs[2] == 1):
            orders.append([own[1], own[0], *own[2:]])
        for order in orders:
            found: Match | None = Match({**so_far.nodes, mine: other}, so_far.numbers)
            if (found := self._each(order, theirs, found, exact)) is not None:
                return found
        return None

    def _each(self, mine: Any, other: Any, so_far: Match | None, exact: bool) -> Match | None:
        if len(mine) != len(other):
            return None
        for a, b in zip(mine, other, strict=True):
            if so_far is not None:
                so_far = self._unify(a, b, so_far, exact)
        return so_far

    def _constant(self, mine: Any, other: Any, so_far: Match, exact: bool) -> Match | None:
        if isinstance(mine, (list, tuple)):
            if isinstance(other, (list, tuple)) and (exact or any([isinstance(one, fx.Node) for one in mine])):
                return self._each(mine, other, so_far, exact)
            return so_far if isinstance(other, (list, tuple)) else None
        if type(mine) in (int, float) and type(other) in (int, float):
            name = next((name for name, value in self.numbers.items() if type(value) is type(mine) and value == mine), None)
            if name is not None and not exact:
                given = so_far.numbers.get(name, other)
                return Match(so_far.nodes, {**so_far.numbers, name: given}) if given == other else None
            if type(mine) is int and not exact:
                return so_far
        return so_far if type(mine) is type(other) and mine == other else None


def _itself(node: fx.Node) -> fx.Node:
    while node.target in SAME:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _arguments(node: fx.Node) -> list[Any]:
    """The arguments of a node in order, with dims counted from the end, and of a cast the dtype alone."""
    given = arguments_of(node)
    if node.target is CAST:
        before, after = given["self"].meta["val"], node.meta["val"]
        if before.device == after.device and before.stride() == after.stride():
            return [given["self"], after.dtype]
    if (dim := given.get("dim")) is not None:
        rank = _rank(node)
        given["dim"] = [d % rank - rank for d in dim] if isinstance(dim, (list, tuple)) else dim % rank - rank
    if "dim0" in given:
        rank = _rank(node)
        given["dim0"], given["dim1"] = sorted([given[name] % rank for name in ("dim0", "dim1")])
    return list(given.values())


def _rank(node: fx.Node) -> int:
    """The number of dims among which the node chooses; 1 for a number, which has the dims 0 and -1."""
    rank = node.all_input_nodes[0].meta["val"].dim() + (operator_name(node) in ("unsqueeze", "stack"))
    return max(rank, 1)


@functools.lru_cache(64)
def _patterns(formulas: tuple[Formula, ...], dtype: torch.dtype, device: torch.device) -> dict[Any, list[tuple[Formula, Pattern]]]:
    """The graphs of the formulas whose results have this dtype, on small tensors, by their last operators."""
    found: dict[Any, list[tuple[Formula, Pattern]]] = {}
    for formula in [one for one in formulas if dtype in one.dtypes]:
        for likes in formula.examples(dtype):
            pattern = _traced(formula.fn, tuple([like._replace(device=device) for like in likes]), formula.numbers)
            if pattern is not None:
                found.setdefault(pattern.out.target, []).append((formula, pattern))
    return found


@functools.lru_cache(4096)
def _traced(fn: Callable[..., Tensor], likes: tuple[Like, ...], numbers: tuple[tuple[str, Any], ...]) -> Pattern | None:
    """The graph of a formula for such tensors; None if it refuses them."""
    with torch.inference_mode(False), torch.enable_grad(), FakeTensorMode(), hidden_from_hooks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch may advise another dtype
        given = [torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device=a.device) for a in likes]
        trained = [t.requires_grad_(t.is_floating_point()) for t in given]  # a composite operator of torch asks
        call = functools.partial(fn, **dict(numbers))
        try:
            traced = make_fx(call)(*trained)
            if any([writes(node) for node in traced.graph.nodes]):
                traced = make_fx(torch.func.functionalize(traced, remove="mutations"))(*given)
        except (RuntimeError, ValueError, TypeError):
            return None
    traced.graph.eliminate_dead_code()
    return Pattern(traced, dict(numbers))
