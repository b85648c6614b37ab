"""A function and its autograd backward as one joint graph."""

from __future__ import annotations

import functools
import itertools
import operator
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.traceback import preserve_node_meta
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from funcops.engine.errors import describe, fail
from funcops.engine.residuals.forms import Layout

_OFF = {"p": 0, "dropout": 0, "dropout_p": 0, "train": False, "training": False}  # with such an argument nothing is drawn
Run = Callable[[Sequence[Tensor]], list[Tensor]]


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
        return Layout(self.shape, self.stride, 0).dense

    def extent(self) -> int:
        """The elements from the first to the last in memory."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def zeros(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).zero_()

    def ones(self) -> Tensor:
        return self.zeros().fill_(1)

    def fits(self, t: Any) -> bool:
        """Whether t is a plain tensor of this layout: a quick look."""
        return not torch.compiler.is_dynamo_compiling() and self.matches(t)

    def matches(self, t: Any) -> bool:
        """`fits`, outside a compiler, which cannot trace the last two."""
        right = type(t) is Tensor and t.dtype is self.dtype and t.stride() == self.stride and t.shape == self.shape
        return right and not t.is_neg() and not t.is_conj()

    def fits_strides(self, t: Tensor) -> bool:
        if not torch.compiler.is_dynamo_compiling():
            return t.stride() == self.stride
        # the compiler may have symbols here, and strides of t that it cannot compare, but it knows what is contiguous
        own = self._replace(shape=tuple(map(operator.index, self.shape)), stride=tuple(map(operator.index, self.stride)))
        if not own.is_dense():
            return t.stride() == own.stride
        return t.permute(sorted(range(len(own.stride)), key=lambda i: -own.stride[i])).is_contiguous()

    def laid_out(self, where: str, name: str, t: Any) -> Tensor:
        """t, which must have this shape and dtype, in these strides, for which the graph was traced; a copy only if its strides
        differ."""
        if not isinstance(t, Tensor) or t.shape != self.shape or t.dtype is not self.dtype:
            fail(where, name, describe(torch.empty(self.shape, dtype=self.dtype, device="meta")), describe(t))
        t = resolved(t)
        if t.numel() == 0 or self.fits_strides(t):
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


def copied(t: Tensor) -> Tensor:
    """A copy of t in its strides and at its place in memory, of which a graph may make use."""
    if t.numel() == 0:
        return t.clone()
    offset, extent = t.storage_offset(), Like.of(t).extent()
    made = t.new_empty(offset + extent)
    made[offset:] = t.detach().as_strided((extent,), (1,), offset)
    return made.as_strided(t.shape, t.stride(), offset)


class Joint(NamedTuple):
    """A joint graph, from (leaves, gradients of the outputs) to (outputs, gradients of the leaves that are asked for)."""

    graph: fx.GraphModule
    outputs: tuple[Like, ...]  # in the layout of their gradients
    constants: tuple[Tensor, ...] = ()  # whose values the trace contains


def trace(where: str, run: Run, leaves: Sequence[Tensor], asked: Sequence[bool], steps: Steps | None = None) -> Joint:
    """Trace `run(leaves) -> outputs` with the gradients of the leaves that are `asked` for. Hooks on saved tensors that are active
    around the call (a checkpoint's, an offload's) do not see the trace's, which would come with their changes into the graph."""
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with torch.inference_mode(False), fake, torch.enable_grad(), hidden_from_hooks(), _NoValues(_is_real):
            given = [stand_in(t) for t in leaves]
            outputs = [Like.of(y).dense() for y in run(given)]
            return Joint(joint_graph(run, given, outputs, asked, steps), tuple(outputs))
    except (DataDependentOutputException, DynamicOutputShapeException, _ReadsValues) as error:
        fail(where, "fn", "a function whose shapes and steps do not depend on values", error)


def trace_module(
    where: str,
    module: nn.Module,
    run: Run,
    leaves: Sequence[Tensor],
    asked: Sequence[bool],
    layers: Any = None,
    watch: Callable[[nn.Module], Steps] | None = None,
) -> Joint:
    """`trace` on the leaves themselves, as many models choose another way for tensors without values, and with the path of the
    module in which each node was computed, in `node.meta["custom"]`. It holds what one step of autograd holds. A value that
    depends neither on a leaf nor on a random number is a constant; to ask for any other raises. `layers`: the `Layers` of it that
    are traced once. `watch` makes the `Steps`."""
    watch, name = watch or Steps, type(module).__name__
    steps = watch(module)
    devices = sorted({t.device.index or 0 for t in leaves if t.is_cuda})
    with torch.inference_mode(False), torch.enable_grad(), hidden_from_hooks(), torch.random.fork_rng(devices), _apart(module):
        with torch.no_grad():
            outputs = [Like.of(y).dense() for y in run(list(leaves))]
        try:
            with steps, _NoValues(steps.decided), _ValuesOf(steps), nullcontext() if layers is None else layers.copied():
                if layers is not None:
                    layers.trace_one = steps.trace_layer
                graph = joint_graph(run, list(leaves), outputs, asked, steps, layers)
                return Joint(graph, tuple(outputs), tuple(steps.constants))
        except _ReadsValues as error:
            why = f"{error}{steps.here()}"
        except RuntimeError as error:
            if "modified by an inplace operation" in str(error):
                wanted = "a module that writes to nothing that its backward reads"
                fail(where, name, wanted, f"one whose gradients torch does not compute, either ({error})")
            if "in-place operation" not in str(error):
                raise
            fail(where, name, "a module that writes neither to its inputs nor to its parameters", f"{error}{steps.here()}")
    steps = watch(module)
    try:  # some ask for values only of tensors that have some
        with steps:
            return trace(where, run, leaves, asked, steps)
    except ValueError:
        pass
    fail(where, name, "a module whose shapes and steps do not depend on values of its inputs or random numbers", why)


@contextmanager
def _apart(module: nn.Module) -> Iterator[None]:
    """A block without mkldnn for a recurrent module: it computes dx and dW of a layer at once, so there would be no halves."""
    settings = torch.backends.mkldnn
    before = settings.set_flags(False) if any(isinstance(part, nn.RNNBase) for part in module.modules()) else None
    try:
        yield
    finally:
        if before is not None:
            settings.set_flags(before[0])


class Steps:
    """The modules of a module that run during its trace. In a block, each node of the graph learns where it was computed."""

    def __init__(self, module: nn.Module) -> None:
        self.paths = {id(part): path for path, part in module.named_modules()}
        self.begin("")
        self.constants: list[Tensor] = []

    def begin(self, path: str) -> None:
        """Begin a trace of the module at a path."""
        # a device's backward has a thread of its own
        self.stack, self.seen, self.thread = [path], 0, threading.get_ident()
        self.ran: list[tuple[int, str]] = []  # the number of autograd's next node, and the path, whenever another module ran on
        self.backward: str | None = None  # the path of the module whose backward runs

    def __enter__(self) -> None:
        hooks = nn.modules.module
        self.hooks = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=False),
        ]

    def __exit__(self, *error: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self.thread:
            return  # another thread's model
        self.mark()
        self.stack.append(self.paths.get(id(module), self.stack[-1]))
        self.ran.append((torch.autograd._get_sequence_nr(), self.stack[-1]))
        node = self.node(args[0]) if args and module._parameters else None
        if node is not None:
            node.meta.setdefault("custom", {}).setdefault("input", f"{self.stack[-1]}.input".lstrip("."))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self.thread:
            self.mark()
            self.stack.pop()
            self.ran.append((torch.autograd._get_sequence_nr(), self.stack[-1]))

    def mark(self) -> None:
        """Give the nodes that are new the path of the module that runs."""
        mode = get_proxy_mode()
        if mode is None:
            return
        nodes = mode.tracer.graph.nodes
        for node in itertools.islice(reversed(nodes), len(nodes) - self.seen):
            self.label(node.meta.setdefault("custom", {}))
        self.seen = len(nodes)

    def label(self, custom: dict[str, Any]) -> None:
        """Say in a new node's meta where it was computed or, of one of the backward, the module whose backward it is."""
        if self.backward is None:
            custom.setdefault("path", self.stack[-1])
        else:
            custom.setdefault("backward", self.backward)

    def gradients(self, ys: list[Tensor], dys: list[Tensor], wanted: list[Tensor]) -> list[Any]:
        """The gradients of the wanted leaves."""
        self.backward = self.stack[0]
        todo, hooks = [get_gradient_edge(y).node for y in ys], dict[Any, Any]()
        while todo:
            node = todo.pop()
            if node not in hooks:
                hooks[node] = node.register_prehook(functools.partial(self._enter_backward, node._sequence_nr()))
                todo += [source for source, _ in node.next_functions if source is not None]
        try:
            return _gradients(ys, dys, wanted)
        finally:
            self.mark()
            for hook in hooks.values():
                hook.remove()

    def _enter_backward(self, number: int, dys: Any) -> None:
        self.mark()
        before = bisect_right(self.ran, number, key=operator.itemgetter(0))
        self.backward = self.ran[before - 1][1] if before else self.stack[0]

    def finish(self, traced: fx.GraphModule) -> None:
        """Change the whole graph, while its writes are still in it."""

    def node(self, t: Any) -> fx.Node | None:
        """The node of a tensor in the graph that is being traced."""
        mode = get_proxy_mode()
        slot = None if mode is None or not isinstance(t, Tensor) else get_proxy_slot(t, mode.tracer, None)
        return None if slot is None else slot.proxy.node  # type: ignore[union-attr]

    def decided(self, t: Tensor) -> bool:
        """Whether a tensor is computed from a leaf, or from random numbers. If not, those from which it is are noted."""
        todo, seen, read = [self.node(t)], set(), [t] if self.node(t) is None else []
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            if node.op == "placeholder" or draws(node):
                return True
            if node.op == "get_attr":
                read.append(getattr(get_proxy_mode().tracer.root, str(node.target)))  # type: ignore[union-attr]
            seen.add(node)
            if not _never(node):
                todo += node.all_input_nodes
        self.constants += read
        return False

    def trace_layer(
        self, path: str, run: Run, leaves: Sequence[Tensor], dys: Sequence[Like], asked: Sequence[bool]
    ) -> fx.GraphModule:
        """The joint graph of the module at a path, within the trace of the whole."""
        before = self.stack, self.seen, self.thread, self.ran, self.backward
        self.begin(path)
        try:
            count = len(self.constants)
            made = joint_graph(run, list(leaves), dys, asked, self)
            if len(self.constants) > count:
                raise _ReadsValues("values that its equals may have otherwise")
            return made
        finally:
            self.stack, self.seen, self.thread, self.ran, self.backward = before

    def here(self) -> str:
        """The module that ran last, which after an error is the one that raised."""
        return f", in its module {self.stack[-1]!r}" if self.stack[-1] else ""


def _never(node: fx.Node) -> bool:
    """Whether the node asks if a number in [0, 1) is below 0, as models do that could leave out a layer, with probability 0."""
    drawn = node.args[0] if node.target is torch.ops.aten.lt.Scalar else None
    return isinstance(drawn, fx.Node) and drawn.target is torch.ops.aten.rand.default and bool(node.args[1] <= 0)  # type: ignore[operator]


def _of_values(func: Any, args: Any) -> bool:
    """Whether the operator's result is a number, or has a shape, that depends on values."""
    if torch.Tag.dynamic_output_shape not in func.tags and torch.Tag.data_dependent_output not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any([isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1]])  # a mask


class _ValuesOf(TorchDispatchMode):
    """A block in which operators whose result depends on values of a leaf, in shape or as a number, raise."""

    runs = True

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.steps = steps

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _of_values(func, args):
            return func(*args, **(kwargs or {}))
        if any([self.steps.decided(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]):
            raise _ReadsValues(str(func))
        with disable_proxy_modes_tracing():
            return func(*args, **(kwargs or {}))


def refuse_trained(where: str, captured: Iterable[Tensor]) -> None:
    """Raise `ValueError` if a tensor beside the arguments requires grad, which it may do since the trace."""
    for t in captured:
        if t.requires_grad:
            fail(where, "fn", "a function that takes tensors that require grad as params or x", describe(t))


_NUMBERS = {"tolist", "__index__"}  # which read memory, and a captured tensor has some, as it is not fake
_ARRAYS = {"numpy", "__array__", "__dlpack__", "tensor", "as_tensor", "asarray"}  # so do these, of no other tensor either


def _is_real(t: Tensor) -> bool:
    """Whether a tensor has memory during a trace on fake tensors: a captured one has."""
    return not isinstance(t, FakeTensor)


class _NoValues(TorchFunctionMode):
    """A block that refuses what turns a tensor into numbers, which a trace would contain for ever. `reads`: of which tensors."""

    def __init__(self, reads: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(fn, "__name__", "")
        if name in _NUMBERS and self.reads(args[0]):
            raise _ReadsValues(f"Tensor.{name} of a tensor")
        given = args[0] if args and name in _ARRAYS else None
        read = (
            [t for t in tree_leaves(given) if isinstance(t, Tensor)] if isinstance(given, Tensor) == hasattr(Tensor, name) else []
        )
        # a fake tensor has no memory to read, but a list of them is read all the same
        if any([self.reads(t) or isinstance(t, FakeTensor) for t in read]):
            raise _ReadsValues(f"{name} of {'a tensor' if isinstance(given, Tensor) else 'a list of tensors'}")
        return fn(*args, **(kwargs or {}))


class _ReadsValues(Exception):
    pass


def hidden_from_hooks() -> AbstractContextManager[Any]:
    """A block whose saved tensors active hooks do not see: hooks that change nothing take their place. Without active hooks none
    are set, as torch 2.14 cannot save a sparse fake tensor under hooks."""
    active = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return nullcontext() if active is None else saved_tensors_hooks(_unchanged, _unchanged)


def _unchanged(t: Tensor) -> Tensor:
    return t


def stand_in(t: Tensor) -> Tensor:
    """A fake tensor with t's layout and storage offset, in its own storage, so that no two leaves look like one tensor."""
    size = t.untyped_storage().nbytes() // t.element_size()
    return torch.empty(size, dtype=t.dtype, device=t.device).as_strided(t.shape, t.stride(), t.storage_offset())


def joint_graph(
    run: Run, given: list[Tensor], outputs: Sequence[Like], asked: Sequence[bool], steps: Steps | None = None, layers: Any = None
) -> fx.GraphModule:
    """The graph from (leaves, gradients of the outputs) to (outputs, gradients), without writes if torch can remove them."""

    def joint(*flat: Tensor) -> tuple[list[Any], list[Any]]:
        own = [t.detach().requires_grad_() if ask else t for t, ask in zip(flat, asked, strict=False)]
        ys = run(own)
        if steps is not None:
            steps.mark()
        pairs = [(y, dy) for y, dy in zip(ys, flat[len(given) :], strict=True) if y.requires_grad]
        wanted = [t for t, ask in zip(own, asked, strict=True) if ask]
        if not pairs or not wanted:
            return ys, [None] * len(wanted)
        found = _gradients if steps is None else steps.gradients
        return ys, found([y for y, _ in pairs], [dy for _, dy in pairs], wanted)

    dys = [like.zeros() for like in outputs]
    with preserve_node_meta(False):  # a selective checkpoint inside leaves its own behind, which the next compiler would obey
        traced = make_fx(joint)(*given, *dys)
    if layers is not None:
        layers.expand(traced, len(given))
    if steps is not None:
        steps.finish(traced)
    _without_detached(traced, asked)
    return _without_writes(traced, [*given, *dys]) if any(writes(node) for node in traced.graph.nodes) else traced


def _without_detached(traced: fx.GraphModule, asked: Sequence[bool]) -> None:
    """Let the nodes read the leaves themselves, which were detached only to ask for gradients of the trace's own."""
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    for leaf in [node for node, ask in zip(inputs[: len(asked)], asked, strict=True) if ask]:
        for node in [user for user in leaf.users if user.target is torch.ops.aten.detach.default]:
            node.replace_all_uses_with(leaf)
            traced.graph.erase_node(node)


def _gradients(ys: list[Tensor], dys: list[Tensor], wanted: list[Tensor]) -> list[Any]:
    return list(torch.autograd.grad(ys, wanted, dys, allow_unused=True))


def _without_writes(traced: fx.GraphModule, given: list[Tensor]) -> fx.GraphModule:
    """The same graph, traced again, where a write makes a new tensor, if torch can do that: a write to an input stays one."""
    # as inputs, because what is made of a constant would not be followed
    own = {node.target: getattr(traced, node.target) for node in traced.graph.nodes if node.op == "get_attr"}

    class Lifted(fx.Interpreter):
        constants: dict[Any, Tensor]

        def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
            return self.constants[target]

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if not _draws_into(target) or args[0].is_contiguous():
                return super().call_function(target, args, kwargs)
            order = sorted(range(args[0].dim()), key=lambda i: -args[0].stride(i))  # numbers are drawn in the order of memory
            super().call_function(target, (args[0].permute(order), *args[1:]), kwargs)
            return args[0]

    def again(*flat: Tensor) -> Any:
        run = Lifted(traced)
        run.constants = dict(zip(own, flat[len(given) :], strict=True))
        with preserve_node_meta():  # the paths
            return run.run(*flat[: len(given)])

    with torch.no_grad(), preserve_node_meta():
        made = make_fx(torch.func.functionalize(again, remove="mutations"))(*given, *own.values())
    inputs = [node for node in made.graph.nodes if node.op == "placeholder"]
    for i, (node, t) in enumerate(zip(inputs[len(given) :], own.values(), strict=True)):
        made.register_buffer(f"_lifted_{i}", t)
        with made.graph.inserting_before(node):
            constant = made.graph.get_attr(f"_lifted_{i}")
        constant.meta = node.meta
        for copy in [user for user in node.users if operator_name(user) == "clone"]:
            counts = [*copy.users]  # as a batch norm's, which is made anew and given back: no backward reads it
            only = len(counts) == 1 and [*counts[0].users] == [made.graph.output_node()]
            if only and not writes(counts[0]) and not is_view(counts[0]):
                copy.replace_all_uses_with(constant)
        node.replace_all_uses_with(constant)
        made.graph.erase_node(node)
    return made


def _draws_into(target: Any) -> bool:
    """Whether an operator writes random numbers into its first argument."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    first = target._schema.arguments[0].alias_info
    return first is not None and bool(first.is_write)


def of_schema(node: fx.Node) -> Any:
    """The schema of the node's operator, or None."""
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def operator_name(node: fx.Node) -> str:
    """The name of the node's operator, as in its schema; "" if it has none."""
    schema = of_schema(node)
    return "" if schema is None else str(schema.name).partition("::")[2]


def writes(node: fx.Node) -> bool:
    schema = of_schema(node)
    return schema is not None and schema.is_mutable


def is_view(node: fx.Node) -> bool:
    """Whether the node returns a view of its argument."""
    schema = of_schema(node)
    return schema is not None and not schema.is_mutable and len(schema.returns) == 1 and schema.returns[0].alias_info is not None


def draws(node: fx.Node) -> bool:
    """Whether the node draws from a generator of torch."""
    schema = of_schema(node)
    if schema is None or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    given = arguments_of(node)
    return all(given.get(name) is None or given[name] != off for name, off in _OFF.items())


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """The arguments of a node by the names of its operator, in order, with its defaults."""
    schema = of_schema(node)
    if schema is None:
        return {f"{i}": value for i, value in enumerate(node.args)} | node.kwargs
    given = dict(zip([argument.name for argument in schema.arguments], node.args, strict=False)) | node.kwargs
    defaults = {one.name: one.default_value if one.has_default_value() else None for one in schema.arguments}
    return defaults | given
