"""Equal layers of a module are traced once: the joint graph of one is copied for the others.

While the module is traced, a call of a layer that has equals is one node of the graph for its forward, and one for its backward.
Then a copy of the layer's own joint graph, traced with the values of the first call, takes the place of both.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot, track_tensor_tree

from funcops.adapters.flatten import TensorIndex, flatten, unflatten
from funcops.adapters.from_function.calls import same_tensors
from funcops.adapters.from_function.joint import Joint, Like, Run, draws, trace_module
from funcops.adapters.from_function.lent import lent
from funcops.adapters.from_function.outside import MEMBERS, PLAIN, by_identity
from funcops.engine.errors import join_path

Attribute = tuple[str, str]  # the path of a part of a layer, and the name
_ADD = torch.ops.aten.add.Tensor


def trace_layers(where: str, module: nn.Module, run: Run, leaves: Sequence[Tensor], asked: Sequence[bool]) -> Joint:
    """`trace_module`, with one trace for equal layers if their arguments and results are tensors and plain values."""
    layers = Layers(module)
    if layers.groups:
        try:
            made = trace_module(where, module, run, leaves, asked, layers)
            if not layers.calls or _same_forward(run, leaves, made):
                return made
        except Exception:  # as a whole it may be traced, or says why not
            pass
    return trace_module(where, module, run, leaves, asked)


def _same_forward(run: Run, leaves: Sequence[Tensor], made: Joint) -> bool:
    """Whether the outputs of a graph with copies have the bits of the module's own."""
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    graph.graph_copy(made.graph.graph, copies)
    ys = next(node for node in made.graph.graph.nodes if node.op == "output").args[0][0]  # type: ignore[index]
    graph.output([copies[y] for y in ys])
    graph.eliminate_dead_code()
    forward = fx.GraphModule(made.graph, graph)
    given = [*leaves, *[like.zeros() for like in made.outputs]]
    with torch.no_grad():
        with torch.random.fork_rng():
            wanted = run(list(leaves))
        with torch.random.fork_rng():
            return same_tensors(forward(*given), wanted)


class _Unlike(Exception):
    """Raised where a copy would not be the same."""


class First(NamedTuple):
    """The one of some equal layers that was called first, and what its call took and gave. `given`: its leaves, from its params to
    the tensors among its arguments; `outputs`: its results beside `same`, those which are leaves, by number; `read`: what it read
    of the attributes in which the layers differ; `joints`: its graphs, by the layouts of the gradients that they take."""

    path: str
    layer: nn.Module
    run: Run
    given: list[Tensor]
    y_shape: Any
    outputs: list[Like]
    trained: list[bool]
    same: dict[int, int]
    attributes: dict[Attribute, Any]
    read: set[Any]
    joints: dict[Any, fx.GraphModule]


class Call(NamedTuple):
    first: First
    path: str
    layer: nn.Module
    asked: tuple[bool, ...]


class Layers:
    """The layers of a module that look alike, and their calls while it is traced."""

    trace_one: Callable[[str, Run, Sequence[Tensor], Sequence[Like], Sequence[bool]], fx.GraphModule]  # of the trace of the whole

    def __init__(self, module: nn.Module) -> None:
        self.groups = list(_alike(module))
        self.calls: list[Call] = []
        self.dys: dict[int, tuple[Like | None, ...]] = {}  # by the number of a call, the layouts of the gradients that it got
        self.firsts: dict[Any, list[First]] = {}
        self.inside = False

    @contextlib.contextmanager
    def copied(self) -> Iterator[None]:
        """A block in which a call of such a layer becomes nodes of the graph that is traced."""
        changed: list[tuple[nn.Module, Any]] = []
        try:
            for number, group in enumerate(self.groups):
                every = [_attributes(layer) for layer in group.values()]
                differ = {key for one in every for key in {**one, **every[0]} if one.get(key) != every[0].get(key)}
                if any([name in ("forward", "__class__") for _, name in differ]):
                    continue
                for path, layer in group.items():
                    changed.append((layer, vars(layer).get("forward", self)))
                    layer.forward = functools.partial(self._call, number, differ, path, layer, layer.forward)
            yield
        finally:
            for layer, before in changed:
                if before is self:
                    del layer.forward
                else:
                    layer.forward = before

    def _call(
        self, group: int, differ: set[Attribute], path: str, layer: nn.Module, forward: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # only from the graph of the whole, and where its backward will run in the same state
        mode = None if self.inside else get_proxy_mode()
        if mode is None or not torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            return forward(*args, **kwargs)
        leaves: list[Tensor] = []
        params = dict(layer.named_parameters())
        shape = flatten((params, args, kwargs), leaves)
        # a buffer that the forward computes is not a constant
        if not _is_plain(shape) or any([get_proxy_slot(b, mode.tracer, None) is not None for b in layer.buffers()]):
            return forward(*args, **kwargs)
        asked = tuple([t.requires_grad for t in leaves])
        own = {key: value for key, value in _attributes(layer).items() if key in differ}
        key = group, repr(shape), asked, tuple([Like.of(t) for t in leaves])
        known = self.firsts.setdefault(key, [])
        first = next((one for one in known if not _tells_apart(one.read, layer, own, one.attributes)), None)
        if first is None:
            first = self._first(path, layer, forward, shape, leaves, len(params), own)
            known.append(first)
        self.calls.append(Call(first, path, layer, asked))
        made = iter(_Once.apply(self, len(self.calls) - 1, *leaves))
        ys = [leaves[first.same[i]] if i in first.same else next(made) for i in range(len(first.outputs) + len(first.same))]
        return unflatten(first.y_shape, ys)

    def _first(
        self, path: str, layer: nn.Module, forward: Any, shape: Any, leaves: list[Tensor], params: int, own: dict[Attribute, Any]
    ) -> First:
        """Run a layer, to see what it reads and gives."""
        bare, y_shape, same = _Bare(layer, forward), list[Any](), dict[int, int]()

        def run(flat: Sequence[Tensor]) -> list[Tensor]:
            ys: list[Tensor] = []
            weights, args, kwargs = unflatten(shape, flat)
            with lent(layer, weights):
                y = bare(*args, **kwargs)
            y_shape[:] = [flatten(y, ys)]
            numbers = {id(t): i for i, t in enumerate(flat)}
            same.update({i: numbers[id(y)] for i, y in enumerate(ys) if id(y) in numbers})
            return [y for i, y in enumerate(ys) if i not in same]

        with self._alone():
            # it may write to its arguments
            given = [t.detach() if i < params else t.detach().clone() for i, t in enumerate(leaves)]
            with _watched(layer, own) as read:
                found = run([t.detach().requires_grad_(leaf.requires_grad) for t, leaf in zip(given, leaves, strict=True)])
        if not _is_plain(y_shape[0]):
            raise _Unlike(path)
        outputs, trained = [Like.of(y) for y in found], [y.requires_grad for y in found]
        return First(path, layer, run, given, y_shape[0], outputs, trained, dict(same), own, read, {})

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A block outside of the trace of the whole."""
        self.inside = True
        try:
            with disable_proxy_modes_tracing(), torch.random.fork_rng(), torch.enable_grad():
                yield
        finally:
            self.inside = False

    def joint(self, call: Call, dys: tuple[Like | None, ...]) -> fx.GraphModule:
        """The joint graph of a layer for gradients of its outputs in these layouts."""
        first, key = call.first, dys
        if key not in first.joints:

            def run(flat: Sequence[Tensor]) -> list[Tensor]:
                return [y.detach() if dy is None else y for y, dy in zip(first.run(flat), dys, strict=True)]

            likes = [like if dy is None else dy for like, dy in zip(first.outputs, dys, strict=True)]
            asked = call.asked if any([dy is not None for dy in dys]) else (False,) * len(call.asked)
            with self._alone(), _watched(first.layer, first.attributes) as read:
                first.joints[key] = self.trace_one(first.path, run, first.given, likes, asked)
            if not read <= first.read:  # others were taken for equal before it was known that this is read
                raise _Unlike(first.path)
        return first.joints[key]

    def record(self, target: Any, args: tuple[Any, ...], results: list[Tensor]) -> None:
        """Add a node to the graph that is traced."""
        mode: Any = get_proxy_mode()
        slots = [get_proxy_slot(t, mode.tracer, None) if isinstance(t, Tensor) else None for t in args]
        given = [t if slot is None else slot.proxy for t, slot in zip(args, slots, strict=True)]
        proxy = mode.tracer.create_proxy("call_function", target, tuple(given), {})
        track_tensor_tree(tuple(results), proxy, constant=None, tracer=mode.tracer)

    def expand(self, traced: fx.GraphModule, leaves: int) -> None:
        """Put copies of the layers' graphs into the place of their calls, in a graph from leaves and gradients."""
        nodes = list(traced.graph.nodes)
        backwards = {node.args[0]: node for node in nodes if node.target is _backward}
        dys = {node for node in nodes if node.op == "placeholder"} - set(nodes[:leaves])
        forward = set(itertools.takewhile(lambda node: dys.isdisjoint(node.all_input_nodes), nodes))
        constants: dict[int, fx.Node] = {}
        for node in [node for node in traced.graph.nodes if node.target is _forward]:
            number: Any = node.args[0]
            call, back = self.calls[number], backwards.get(number)
            likes = self.dys.get(number, (None,) * len(call.first.outputs))
            copy = _Copy(traced, self.joint(call, likes), call, node.args[1:], constants)
            # of a leaf that others read, too, autograd adds the parts of the gradient in an order that a layer's sum would change
            asked = [leaf for leaf, ask in zip(node.args[1:], call.asked, strict=True) if ask and back is not None]
            sums = [leaf for leaf, g in zip(asked, copy.every, strict=True) if g is not None and g.target is _ADD]
            if any([isinstance(leaf, fx.Node) and len(forward & leaf.users.keys()) > 1 for leaf in sums]):
                raise _Unlike(call.path)
            copy.put(node, copy.forward, copy.ys)
            if back is not None:
                given = iter(back.args[1:])
                copy.take([None if like is None else next(given) for like in likes])
                copy.put(back, copy.backward, copy.grads)


class _Copy:
    """A copy of a layer's graph in the graph of the whole."""

    def __init__(self, traced: fx.GraphModule, joint: fx.GraphModule, call: Call, leaves: Sequence[Any], constants: Any) -> None:
        self.traced, self.joint, self.call, self.constants = traced, joint, call, constants
        nodes = list(joint.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.ys, self.every = nodes[-1].args[0]  # type: ignore[misc]
        self.grads = [g for g in self.every if g is not None]
        self.copies: dict[fx.Node, Any] = {}
        self.next = iter(self.inputs)
        self.take(leaves)
        first, after = _ancestors(self.ys), set(self.inputs[len(leaves) :])
        for node in nodes:
            if after.isdisjoint(node.all_input_nodes):
                # what it draws and nobody reads moves the generator all the same
                first |= {node} if draws(node) else set()
            else:
                after.add(node)
        inner = [node for node in nodes if node.op not in ("placeholder", "output")]
        self.forward, self.backward = [n for n in inner if n in first], [n for n in inner if n not in first]
        theirs, ours = dict(call.first.layer.named_buffers()), dict(call.layer.named_buffers())
        self.buffers = {id(b): ours[name] for name, b in theirs.items()}

    def take(self, given: Sequence[Any]) -> None:
        """Let the next inputs of the layer's graph be these nodes."""
        for outer in given:
            inner = next(self.next)
            self.copies[inner] = outer
            label = inner.meta.get("custom", {}).get("input")
            if label is not None and outer is not None:
                outer.meta.setdefault("custom", {}).setdefault("input", self._label(label))

    def put(self, place: fx.Node, nodes: list[fx.Node], results: Sequence[fx.Node]) -> None:
        """Copy the nodes to a place, and give its readers the results."""
        with self.traced.graph.inserting_before(place):
            for node in nodes:
                if node.op == "get_attr":
                    self.copies[node] = self._constant(node)
                    continue
                made = self.copies[node] = self.traced.graph.node_copy(node, self.copies.__getitem__)
                made.meta["custom"] = {key: self._label(path) for key, path in node.meta.get("custom", {}).items()}
        for user in list(place.users):
            result = results[user.args[1]]  # type: ignore[index]
            user.replace_all_uses_with(self.copies[result])
            self.traced.graph.erase_node(user)
        self.traced.graph.erase_node(place)

    def _constant(self, node: fx.Node) -> fx.Node:
        value = operator.attrgetter(str(node.target))(self.joint)
        value = self.buffers.get(id(value), value)
        if id(value) not in self.constants:
            name = f"copied_{len(self.constants)}"
            if isinstance(value, Tensor):
                self.traced.register_buffer(name, value)
            else:
                setattr(self.traced, name, value)
            with self.traced.graph.inserting_before(next(iter(self.traced.graph.nodes))):
                self.constants[id(value)] = self.traced.graph.get_attr(name)
            self.constants[id(value)].meta = dict(node.meta)
        return self.constants[id(value)]

    def _label(self, path: str) -> str:
        return join_path(self.call.path, path.removeprefix(self.call.first.path).lstrip("."))


class _Once(torch.autograd.Function):
    """A call of a layer in the graph that is traced. Its results are zeros, as nothing may read values of a trace."""

    @staticmethod
    def forward(ctx: Any, layers: Layers, number: int, *leaves: Tensor) -> tuple[Tensor, ...]:
        first = layers.calls[number].first
        with disable_proxy_modes_tracing():
            ys = [like.zeros() for like in first.outputs]
        layers.record(_forward, (number, *leaves), ys)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[y for y, trained in zip(ys, first.trained, strict=True) if not trained])
        ctx.layers, ctx.number = layers, number
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> tuple[Any, ...]:
        layers, call = ctx.layers, ctx.layers.calls[ctx.number]
        likes = tuple([None if dy is None else Like.of(dy) for dy in dys])
        layers.dys[ctx.number] = likes
        _, grads = next(node for node in reversed(layers.joint(call, likes).graph.nodes)).args[0]
        with disable_proxy_modes_tracing():
            made = [None if g is None else Like.of(g.meta["val"]).zeros() for g in grads]
        layers.record(_backward, (ctx.number, *[dy for dy in dys if dy is not None]), [g for g in made if g is not None])
        found = iter(made)
        return None, None, *[next(found) if asked else None for asked in call.asked]


def _forward(number: int, *leaves: Tensor) -> Any:
    raise AssertionError("a node that copies replace")


def _backward(number: int, *dys: Tensor) -> Any:
    raise AssertionError("a node that copies replace")


class _Bare(nn.Module):
    """A layer by its forward alone: what its hooks do is traced around it."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self.run = layer, forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _alike(module: nn.Module) -> Iterator[dict[str, nn.Module]]:
    """The groups of layers that have the same parts, by path: the outermost, and none without parts."""
    inside: set[int] = set()
    for path, part in module.named_modules():
        if id(part) in inside:
            continue
        groups: dict[Any, dict[str, nn.Module]] = {}
        for name, child in part.named_children():
            if next(child.children(), None) is not None and next(child.parameters(), None) is not None:
                groups.setdefault(_structure(child), {})[join_path(path, name)] = child
        for group in groups.values():
            if len(group) > 1:
                inside |= {id(inner) for layer in group.values() for inner in layer.modules()}
                yield group


def _structure(layer: nn.Module) -> Any:
    """All in which equal layers agree beside their attributes, and the layouts of their params, which are arguments."""
    parts = tuple([(path, type(part), part.training) for path, part in layer.named_modules(remove_duplicate=False)])
    held = [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)]
    numbers: dict[int, int] = {}
    return parts, tuple([(name, numbers.setdefault(id(t), len(numbers))) for name, t in held])  # which are tied


def _attributes(layer: nn.Module) -> dict[Attribute, Any]:
    return {
        (path, name): by_identity(value)
        for path, part in layer.named_modules()
        for name, value in vars(part).items()
        if name not in MEMBERS
    }


def _tells_apart(read: set[Any], layer: nn.Module, own: Mapping[Attribute, Any], others: Mapping[Attribute, Any]) -> bool:
    """Whether two layers differ in an attribute that was read."""
    parts = dict(layer.named_modules())
    return any([(type(parts[path]), name) in read and own.get((path, name)) != others.get((path, name)) for path, name in own])


def _is_plain(shape: Any) -> bool:
    """Whether a tree holds nothing but tensors and plain values."""
    if isinstance(shape, TensorIndex) or type(shape) in (*PLAIN, torch.dtype, torch.device, torch.Size):
        return True
    if type(shape) is dict:
        return all(map(_is_plain, shape.values()))
    return isinstance(shape, (tuple, list)) and all(map(_is_plain, shape))


@contextlib.contextmanager
def _watched(layer: nn.Module, attributes: Mapping[Attribute, Any]) -> Iterator[set[Any]]:
    """A block that notes which of these attributes are read, by class and name."""
    parts, read = dict(layer.named_modules()), set[Any]()
    watches = {(type(parts[path]), name) for path, name in attributes}
    before = {(cls, name): vars(cls)[name] for cls, name in watches if name in vars(cls)}
    try:
        for cls, name in watches:
            setattr(cls, name, _Watch(cls, name, read))
        yield read
    finally:
        for cls, name in watches:
            if isinstance(vars(cls).get(name), _Watch):
                delattr(cls, name)
            if (cls, name) in before:
                setattr(cls, name, before[cls, name])


class _Watch:
    """An attribute of a class in place of what its instances have, which it finds and notes."""

    def __init__(self, cls: type, name: str, read: set[Any]) -> None:
        self.cls, self.name, self.read = cls, name, read

    def __get__(self, part: Any, cls: Any = None) -> Any:
        self.read.add((self.cls, self.name))
        if part is not None and self.name in vars(part):
            return vars(part)[self.name]
        for base in (cls or type(part)).__mro__:
            value = vars(base).get(self.name, self)
            if not isinstance(value, _Watch):
                return value.__get__(part, cls) if hasattr(value, "__get__") else value
        raise AttributeError(self.name)

    def __set__(self, part: Any, value: Any) -> None:
        vars(part)[self.name] = value

    def __delete__(self, part: Any) -> None:
        del vars(part)[self.name]


def _ancestors(ends: Sequence[fx.Node]) -> set[fx.Node]:
    found, todo = set[fx.Node](), list(ends)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
