"""A function and its autograd backward as three graphs: forward, dgrad, wgrad."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from funcops.engine.errors import describe, fail, join_path

Run = Callable[[Sequence[Tensor]], list[Tensor]]
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.lift_fresh.default)
_OWN = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)  # of a tensor that the function makes of numbers
_OFF = {"p": 0, "dropout": 0, "dropout_p": 0, "train": False, "training": False}  # with such an argument nothing is drawn


class Like(NamedTuple):
    """A tensor's shape, strides, dtype and device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(t: Tensor) -> Like:
        return Like(tuple(t.shape), tuple(t.stride()), t.dtype, t.device)

    def dense(self) -> Like:
        """The layout of its gradient: the same, or contiguous if its elements overlap or leave gaps."""
        return self if self.is_dense() else self._replace(stride=torch.empty(self.shape, device="meta").stride())

    def is_dense(self) -> bool:
        step = 1
        for stride, n in sorted((stride, n) for stride, n in zip(self.stride, self.shape, strict=True) if n != 1):
            if stride != step:
                return False
            step *= n
        return True

    def extent(self) -> int:
        """The elements from the first to the last in memory."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def zeros(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()

    def laid_out(self, where: str, name: str, t: Any) -> Tensor:
        """t, which must have this shape and dtype, in these strides, for which the graph was traced; a copy only if its strides
        differ."""
        if not isinstance(t, Tensor) or t.shape != self.shape or t.dtype is not self.dtype:
            fail(where, name, describe(torch.empty(self.shape, dtype=self.dtype, device="meta")), describe(t))
        t = resolved(t)
        if t.stride() == self.stride or t.numel() == 0:
            return t
        extent = self.extent()
        flat = torch.empty(extent, dtype=t.dtype, device=t.device)
        made = flat.as_strided(self.shape, self.stride)
        if self.is_dense():
            return made.copy_(t)
        flat[torch.arange(extent, device=t.device).as_strided(self.shape, self.stride).reshape(-1)] = t.reshape(-1)
        if not torch.equal(made.nan_to_num(), t.nan_to_num()):
            fail(where, name, f"equal at elements that overlapped in the forward (strides {list(self.stride)})", "other values")
        return made


def resolved(t: Tensor) -> Tensor:
    """t with its conjugate and negative bits materialised, because a graph's views ignore them."""
    return t.resolve_conj().resolve_neg()


class Graphs(NamedTuple):
    """The graphs, and the names of their inputs. "input.3" is leaf 3 of the call, "dy.0" the gradient of output 0; any other name
    is a node's, whose value the previous graph returns after its results."""

    forward: fx.GraphModule
    dgrad: fx.GraphModule
    wgrad: fx.GraphModule
    outputs: tuple[Like, ...]  # in the layout of their gradients
    kept: dict[str, Like]
    waiting: dict[str, Like]
    placed: bool  # whether they contain storage offsets, so that they only serve leaves at these offsets
    captured: dict[str, Tensor]  # which the function reads beside its arguments; a backward gets those that it reads as kept ones
    draws: str  # the first operator of the forward that draws random numbers, or ""


def trace(where: str, run: Run, leaves: Sequence[Tensor], asked: Sequence[bool], params: int, known: dict[int, str]) -> Cutter:
    """Trace `run(leaves) -> outputs` with the gradients of the leaves that are `asked` for; the first `params` leaves are params.
    `known`: names of tensors that `run` may capture, by id. Hooks on saved tensors that are active around the call (a
    checkpoint's, an offload's) do not see the trace's, which would come with their changes into the graph."""
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.inference_mode(False), fake, torch.enable_grad(), _hidden_from_hooks(), _NoValues():
            given = [_stand_in(t) for t in leaves]
            outputs = [Like.of(y).dense() for y in run(given)]
            traced = _joint(run, given, outputs, asked)
    except (DataDependentOutputException, DynamicOutputShapeException, _ReadsValues) as error:
        fail(where, "fn", "a function whose shapes and steps do not depend on values", error)
    return Cutter(where, traced, len(leaves), tuple(outputs), asked, params, known)


def refuse_trained(where: str, captured: Iterable[Tensor]) -> None:
    """Raise `ValueError` if a tensor beside the arguments requires grad, which it may do since the trace."""
    for t in captured:
        if t.requires_grad:
            fail(where, "fn", "a function that takes tensors that require grad as params or x", describe(t))


_NUMBERS = {"tolist", "__index__"}  # which read memory, and a captured tensor has some, as it is not fake
_ARRAYS = {"numpy", "__array__", "__dlpack__", "tensor", "as_tensor", "asarray"}  # so do these, of no other tensor either


class _NoValues(TorchFunctionMode):
    """A block that refuses what turns a tensor into numbers, which a trace would contain for ever."""

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(fn, "__name__", "")
        if name in _NUMBERS and not isinstance(args[0], FakeTensor):
            raise _ReadsValues(f"Tensor.{name} of a captured tensor")
        given = args[0] if args and name in _ARRAYS else None
        if isinstance(given, Tensor) == hasattr(Tensor, name) and any([isinstance(t, Tensor) for t in tree_leaves(given)]):
            raise _ReadsValues(f"{name} of {'a tensor' if isinstance(given, Tensor) else 'a list of tensors'}")
        return fn(*args, **(kwargs or {}))


class _ReadsValues(Exception):
    pass


def _hidden_from_hooks() -> AbstractContextManager[Any]:
    """A block whose saved tensors active hooks do not see: hooks that change nothing take their place. Without active hooks none
    are set, as torch 2.14 cannot save a sparse fake tensor under hooks."""
    active = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return nullcontext() if active is None else saved_tensors_hooks(_unchanged, _unchanged)


def _unchanged(t: Tensor) -> Tensor:
    return t


def _stand_in(t: Tensor) -> Tensor:
    """A fake tensor with t's layout and storage offset, in its own storage, so that no two leaves look like one tensor."""
    size = t.untyped_storage().nbytes() // t.element_size()
    return torch.empty(size, dtype=t.dtype, device=t.device).as_strided(t.shape, t.stride(), t.storage_offset())


def _joint(run: Run, given: list[Tensor], outputs: Sequence[Like], asked: Sequence[bool]) -> fx.GraphModule:
    """The graph from (leaves, gradients of the outputs) to (outputs, gradients), without writes if torch can remove them."""

    def joint(*flat: Tensor) -> tuple[list[Any], list[Any]]:
        own = [t.detach().requires_grad_() if ask else t for t, ask in zip(flat, asked, strict=False)]
        ys = run(own)
        pairs = [(y, dy) for y, dy in zip(ys, flat[len(given) :], strict=True) if y.requires_grad]
        wanted = [t for t, ask in zip(own, asked, strict=True) if ask]
        if not pairs or not wanted:
            return ys, [None] * len(wanted)
        found = torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs], allow_unused=True)
        return ys, list(found)

    dys = [like.zeros() for like in outputs]
    traced = make_fx(joint)(*given, *dys)
    if any(_writes(node) for node in traced.graph.nodes):
        with torch.no_grad():
            traced = make_fx(torch.func.functionalize(traced, remove="mutations"))(*given, *dys)
    return traced


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    """Whether the node returns a view of its argument."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and len(schema.returns) == 1 and schema.returns[0].alias_info is not None


def _draws(node: fx.Node) -> bool:
    """Whether the node draws from a generator of torch."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    given = dict(node.kwargs)
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        given[argument.name] = value
    for argument in node.target._schema.arguments:
        given.setdefault(argument.name, argument.default_value if argument.has_default_value() else None)
    return all(given.get(name) is None or given[name] != off for name, off in _OFF.items())


class Cutter:
    """Assigns each node of a joint graph to the forward, dgrad or wgrad."""

    def __init__(
        self,
        where: str,
        traced: fx.GraphModule,
        leaves: int,
        outputs: tuple[Like, ...],
        asked: Sequence[bool],
        params: int,
        known: dict[int, str],
    ) -> None:
        self.where, self.root, self.graph, self.outputs, self.params = where, traced, traced.graph, outputs, params
        self.captured = self._find_captured()
        self._drop_aliases()
        nodes = list(self.graph.nodes)
        for node in nodes:
            if _writes(node):
                fail(where, "fn", "a function that torch can trace without writes", str(node.target))
        self.order = [n for n in nodes if n.op not in ("placeholder", "output")]
        inputs = [n for n in nodes if n.op == "placeholder"]
        self.names = {n: f"input.{i}" if i < leaves else f"dy.{i - leaves}" for i, n in enumerate(inputs)}
        self.ys, grads = nodes[-1].args[0]
        self.grads = dict(zip([i for i, ask in enumerate(asked) if ask], grads, strict=True))
        self.leaves, self.inputs = inputs[:leaves], {*inputs, *self.captured}
        for i, (node, t) in enumerate(self.captured.items()):
            name = f"captured.{known.get(id(t), i)}"  # two functions may call their variables the same
            self.names[node] = join_path(name, i if name in self.names.values() else None)

    def graphs(self, asked: Sequence[bool]) -> Graphs:
        """The graphs with the gradients of these leaves, which may be fewer than were traced."""
        dx = [g for i, g in self.grads.items() if asked[i] and i >= self.params]
        dparams = [g for i, g in self.grads.items() if asked[i] and i < self.params]
        views = {n for n in self.order if _is_view(n)}  # recomputed by each part that reads them, so that their bases cross
        first = self._ancestors(self.ys)
        second = self._ancestors(dx) - (first - views)
        third = self._ancestors(dparams) - (first - views) - (second - views)
        for node in self.order:  # but an element of a tuple goes to the tuple's part, so that tensors cross
            for part in (first, second):
                if node.target is operator.getitem and node.args[0] in part:
                    third.discard(node)
                    (second if part is first else set()).discard(node)
                    part.add(node)
        kept = self._crossing(dx + dparams, second | third)
        kept = [n for n in kept if not self.names.get(n, "").startswith("dy.")]
        waiting = self._crossing(dparams, third)
        dys = [n for n in self.names if self.names[n].startswith("dy.")]
        forward = self._part(first, self.leaves, [*self.ys, *[n for n in kept if n not in self.inputs]])
        middle = [n for n in waiting if n in second]
        dgrad = self._part(second, [*kept, *dys], [*dx, *middle])
        wgrad = self._part(third, waiting, dparams)
        placed = any("as_strided" in str(n.target) for n in self.order)
        captured = {self.names[node]: t for node, t in self.captured.items()}
        drawing = [n for n in self.order if _draws(n)]
        draws = next((str(n.target) for n in drawing if n in first), "")
        anew = {n.target for n in drawing if n in second | third} & {n.target for n in drawing if n in first}
        if anew:
            wanted = "a function whose backward draws nothing again (leave out torch.utils.checkpoint around what draws)"
            fail(self.where, "fn", wanted, ", ".join(map(str, anew)))
        return Graphs(forward, dgrad, wgrad, self.outputs, self._named(kept), self._named(waiting), placed, captured, draws)

    def _find_captured(self) -> dict[fx.Node, Tensor]:
        """The nodes of tensors that the function reads beside its arguments, one for each, and the tensors."""
        first: dict[int, fx.Node] = {}
        found: dict[fx.Node, Tensor] = {}
        for node in [node for node in self.graph.nodes if node.op == "get_attr"]:
            t = getattr(self.root, node.target)
            if not isinstance(t, Tensor) or all(user.target in _OWN for user in node.users):
                continue
            if first.setdefault(id(t), node) is node:
                found[node] = t
            else:
                node.replace_all_uses_with(first[id(t)])
                self.graph.erase_node(node)
        return found

    def _drop_aliases(self) -> None:
        for node in list(self.graph.nodes):
            if node.target in _SAME:
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)

    def _ancestors(self, ends: Iterable[Any]) -> set[fx.Node]:
        """The nodes from which the ends are computed, without inputs."""
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
        """The nodes that a part reads or returns without computing them; the function's own constants are copied instead."""
        read = {n: None for node in self.order if node in part for n in node.all_input_nodes}
        read.update({n: None for n in ends if n is not None})
        return [n for n in read if n not in part and (n.op != "get_attr" or n in self.captured)]

    def _named(self, nodes: Iterable[fx.Node]) -> dict[str, Like]:
        return {self.names.get(n, n.name): Like.of(self.captured[n] if n in self.captured else n.meta["val"]) for n in nodes}

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
