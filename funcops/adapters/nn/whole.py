"""Modules whose calls run the forward and the backward of their joint graph: what `from_torch` makes of a model.

With an example the graph is traced in `from_torch`, and a call that cannot be traced warns. Without one it is traced at the first
call, and a model of which a call cannot be traced hands the task down to its parts.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import operator
import threading
import types
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from funcops.adapters.autocast import any_autocast, is_on, outside
from funcops.adapters.autograd.differentiable import run
from funcops.adapters.autograd.requires_grad import taken_apart
from funcops.adapters.flatten import indexed_paths, unflatten
from funcops.adapters.from_function.lent import lent
from funcops.adapters.from_function.op_from_module import ModuleTraces
from funcops.adapters.from_function.op_from_torch import TorchConfig, Traced
from funcops.adapters.from_function.outside import PLAIN
from funcops.adapters.nn.form import Form
from funcops.adapters.nn.kept import bytes_of_call, unharmed
from funcops.adapters.nn.module import OpModule
from funcops.adapters.nn.report import Change, Replaced
from funcops.adapters.nn.sequential import Sequential
from funcops.adapters.nn.unchanged import HOOKS, watched
from funcops.engine.errors import describe, fail, join_path
from funcops.engine.trees import WithExtras, leaf, static, tensors, tree

SEEN = 1024  # layouts, of which a second one is known
TRACES = 32  # of one module: a trace takes about half a second a layer
WHOLE, CFG = "_whole", TorchConfig()
SEVERAL = nn.ModuleList, nn.Sequential  # which hold a model's blocks
NO_FEWER = "its graph keeps no fewer bytes"
IN_A_TRACE = "which would run in a trace alone"
# what a call reads beside the forward: the hooks of the module itself, and what replaces its forward
BESIDE = frozenset(vars(nn.Module())) | {"forward", WHOLE, "_original_forward"}
TENSORS, ARGUMENTS = {Tensor, nn.Parameter}, {type(None), bool, int, float, complex, str}
WRAPPERS = {
    "DistributedDataParallel": "the module inside (model.module)",
    "DataParallel": "the module inside (model.module)",
    "FullyShardedDataParallel": "the module inside, before it is wrapped",
    "OptimizedModule": "the module inside (model._orig_mod), and compile it then",
    "ScriptModule": "a module of Python, not a compiled one",
}
_compiling, _grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_hooks_of_saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks
_transforms, _jit_tracing = torch._C._functorch.maybe_current_level, torch._C._get_tracing_state
_requires_grad = operator.attrgetter("requires_grad")
_thread = threading.local()  # `traces`: whether it traces a model, of which its parts have no graphs of their own
_ddp: Any = nn.parallel.DistributedDataParallel
_forward_ad: Any = torch.autograd.forward_ad


class _Untraced(Exception):
    """Its arguments: the reason why a call runs as before, and whether a trace was tried."""


@tree
class Outcome:
    """A module's result: its tensors, and its form."""

    values: Any = leaf("")
    form: Any = static()


class Inside(nn.Module):
    """Calls a module's forward without the hooks of the module, which run around the graph."""

    def __init__(self, whole: Whole) -> None:
        super().__init__()
        self.module, self.whole = whole.module, whole

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.whole.before(*args, **kwargs)


class WholeTraces(ModuleTraces):
    """The traces of a module's own forward. x is (args, kwargs, kinds of devices with autocast, whether each tensor of these
    requires grad)."""

    def __init__(self, whole: Whole) -> None:
        super().__init__(whole.module, None, BESIDE)
        self.inside, self.tries = Inside(whole), 0
        self.seen: set[Any] | None = set() if whole.lazy else None  # layouts of x
        self.trained: Collection[bool] = ()  # whether the tensors of the result require grad, in the traced run

    def fixed(self, params_shape: Any, x_shape: Any) -> frozenset[int]:
        given = [i for i, _ in indexed_paths(x_shape, "")]
        # a forward may ask whether x requires grad, and its result tells
        untrained = [i for i, asks in zip(given, x_shape[3], strict=True) if not asks]
        return super().fixed(params_shape, x_shape).union(untrained)

    def result(self, values: dict[str, Tensor], x: Any) -> Outcome:
        args, kwargs, casts, _ = x
        with lent(self.module, values) as left, _cast(casts):
            found = self.inside(*args, **kwargs)
        values.update(left)
        held = [one for part in self.module.modules() for one in vars(part).values()]
        form = Form(found, {id(one): one for one in held if not isinstance(one, (*PLAIN, tuple))})
        if torch.is_grad_enabled():
            self.trained = form.trained.values()
        elif len(self.trained) == len(form.trained):  # a run for values alone, after the traced one
            form.trained = dict(zip(form.trained, self.trained, strict=True))
        return Outcome(form.tensors(), form=form)

    def _complain(self, where: str, params: Any, x: Any, error: Exception) -> None:
        raise error  # the caller names the arguments as the module takes them

    def _trace(self, *given: Any) -> Any:
        if self.seen is not None:
            *_, x_shape, leaves, count = given
            layouts = repr(x_shape[:2]), *[(t.shape, t.dtype) for t in leaves[count:]]
            new = len(self.seen) > 0 and layouts not in self.seen
            self.seen.add(layouts)
            if len(self.seen) > SEEN:
                self.seen.pop()
            if new:  # lengths that change in each step would be traced for nothing
                raise _Untraced("", False)
        if self.tries == TRACES:
            remedy = "pad inputs to few lengths, and pass numbers that change as tensors"
            raise _Untraced(
                f"it has been traced {TRACES} times, for as many shapes, modes or values of its arguments: {remedy}", False
            )
        self.tries += 1
        self.trained = ()
        _thread.traces = True
        try:
            found = super()._trace(*given)
            if self.seen is not None and not self._saves(found, *given[2:4]):
                raise ValueError(NO_FEWER)
            return found
        except Exception as error:
            raise _Untraced(str(error), True) from None
        finally:
            _thread.traces = False

    def _saves(self, found: Traced, x_shape: Any, leaves: list[Tensor]) -> bool:
        """Whether a graph keeps fewer bytes than autograd does without it. Between modules nobody else holds x."""
        args, kwargs, casts, _ = unflatten(x_shape, leaves)
        held = {id(t) for t in leaves if t.is_leaf}
        given = {name: leaves[i] for name, i in found.graphs.leaves.items()}
        kept = {name: like for name, like in found.graphs.kept.items() if id(given.get(name)) not in held}
        # by elements, as two halves of one memory are two values
        ours = sum(like.dtype.itemsize * math.prod(like.shape) for name, like in kept.items() if name not in found.graphs.captured)
        with unharmed(self.module, leaves), _cast(casts), torch.enable_grad():  # beside the runs that the model is asked for
            call = functools.partial(self.inside, *args, **kwargs)
            return ours < bytes_of_call(self.module, call, [t for t in leaves if id(t) in held])


class Whole:
    """The forward of a module that runs on its joint graphs."""

    __slots__ = ("bounds", "lazy", "module", "number", "op", "refused", "said", "traces", "untraced")
    _funcops_caches = (*__slots__, "__func__")  # what `ReadByModule` leaves out

    def __init__(self, module: nn.Module, lazy: bool = False) -> None:
        self.module = module  # which is still empty when a copy of it is made
        self.lazy = lazy  # whether nobody asked for the graph of this very module
        self.traces: Any = None
        self.number: Any = None  # from `ReadByModule`; the next two hold for it
        self.bounds: dict[Any, Any] = {}
        self.untraced = ""  # why no call is traced, because of a part
        self.refused: set[Any] = set()  # the kinds of calls that were not traced
        self.said: set[str] = set()

    def __reduce__(self) -> Any:
        return Whole, (self.module, self.lazy)

    __code__ = property(lambda self: type(self.module).forward.__code__)  # which torch.export reads
    __signature__ = property(lambda self: inspect.signature(types.MethodType(type(self.module).forward, self.module)))

    def before(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module's class."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __func__(self) -> Any:
        """A function of the module, as a method has one: accelerate wraps that one."""

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            return vars(module)[WHOLE](*args, **kwargs)

        vars(forward).update({"__signature__": inspect.signature(type(self.module).forward), WHOLE: True})
        return forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _grad_enabled() or _compiling() or _elsewhere() or (self.lazy and _in_checkpoint()):
            return self.before(*args, **kwargs)
        try:
            params, x = self.given(args, kwargs)
            asked = True in map(_requires_grad, itertools.chain(params.values(), tensors(x)))
            if asked and not (self.refused and self.kind(x) in self.refused):
                return self.run(params, x)
            why, tried = "", False
        except _Untraced as error:
            why, tried = error.args
        found = self.before(*args, **kwargs)  # raises itself what the arguments are to blame for
        if tried:
            self.refused.add(self.kind((args, kwargs, self.casts())))
        if why and why not in self.said:
            self.said.add(why)
            if self.lazy:
                if why != NO_FEWER:
                    place(self.module.children())
                return found
            name = type(self.module).__name__
            warnings.warn(f"{name}: this call, and others like it, run as before from_torch, as {why}", RuntimeWarning, 4)
        return found

    def given(self, args: Any, kwargs: Any) -> tuple[dict[str, Tensor], Any]:
        """The op's params and x. Raises `_Untraced` for what is seen before a trace."""
        if self.traces is None:
            self.traces = WholeTraces(self)
            self.op = self.traces.op()
        number, params = self.traces.outside.values(), self.traces.outside.params
        if self.lazy and _ddp._active_ddp_module is not None and any([isinstance(part, SEVERAL) for part in self.module.modules()]):
            raise _Untraced("DistributedDataParallel reduces gradients as its parts give them", False)
        if number != self.number:
            parts = list(self.module.named_modules())
            whys = [why for path, part in parts if (why := _why_not(path, part) or (self.lazy and _is_set(path, part)))]
            self.untraced = whys[0] if whys else ""
            self.number, self.bounds = number, {}
        if self.untraced or watched():
            raise _Untraced(self.untraced or f"hooks are set on all modules, {IN_A_TRACE}", False)
        for path, one in _parts("", (args, kwargs)):
            if not (type(one) in ARGUMENTS or (type(one) in TENSORS and one.layout is torch.strided)):
                name, kind = path.partition(".")[2], type(one).__name__
                raise _Untraced(f"its argument {name!r} is of class {kind}, not a plain tensor or number", False)
        if not {*map(type, params.values())} <= TENSORS:
            name, kind = next((name, type(p).__name__) for name, p in params.items() if type(p) not in TENSORS)
            raise _Untraced(f"its parameter {name!r} is of class {kind}, not a plain tensor", False)
        return params, (args, kwargs, self.casts(), tuple(map(_requires_grad, tensors((args, kwargs)))))

    def casts(self) -> Any:
        """The kinds of devices with autocast, with its dtype and whether it caches casts."""
        if not any_autocast():
            return ()
        kinds = sorted({"cpu", *[p.device.type for p in self.module.parameters()]})
        cached = torch.is_autocast_cache_enabled()
        return tuple([(k, str(torch.get_autocast_dtype(k)).removeprefix("torch."), cached) for k in kinds if is_on(k)])

    def kind(self, x: Any) -> Any:
        """The part of a call without shapes and values: if one call of a kind cannot be traced, no other is tried."""
        return self.traces.outside.mode(), x[2], tuple([(path, type(one)) for path, one in _parts("", x[:2])])

    def run(self, params: Any, x: Any) -> Any:
        with _without(x[2]):
            given = tuple([path for path, one in _parts("", x) if isinstance(one, Tensor)])
            bounds = self.bounds.setdefault((given, x[3]), {})
            y = run(self.op, params, x, CFG, None, bounds)
        main, new = (y.main, y.extras) if isinstance(y, WithExtras) else (y, {})
        with torch.no_grad():
            for name, value in new.items():
                self.module.get_buffer(name).copy_(value)
        return main.form.filled(main.values)

    def reason(self, args: Any, kwargs: Any) -> tuple[str, bool]:
        """Trace such a call, without running it, and return why it cannot be traced, or ""; and whether that was tried."""
        try:
            params, x = self.given(args, kwargs)
            with _without(x[2]), torch.no_grad():
                self.traces.traced(params, x, CFG, taken_apart(params, x)[3])
        except _Untraced as error:
            return error.args  # type: ignore[return-value]
        self.refused.clear()
        return "", False


def _why_not(path: str, part: nn.Module) -> str:
    """Why a module with this part runs as before; "" if it does not."""
    if isinstance(part, nn.RNNBase):  # a graph has a node for each time step
        return f"its part {path!r} is recurrent, and torch runs all its steps at once"
    hooked = path and any([vars(part)[name] for name in HOOKS])  # the module's own hooks run around the graph
    return f"its part {path!r} has a hook, {IN_A_TRACE}" if hooked else ""


def _is_set(path: str, part: nn.Module) -> str:
    """Why a part runs as the layer that somebody has made of it; "" if nobody has."""
    name = next((name for name in ("recipe", "policy") if isinstance(part, OpModule) and vars(part).get(name) is not None), "")
    return f"its part {path!r} has a {name}, which is for layers" if name else ""


def _cast(casts: Any) -> Any:
    """A block with autocast."""
    stack = contextlib.ExitStack()
    for kind, dtype, cached in casts:
        stack.enter_context(torch.autocast(kind, getattr(torch, dtype), cache_enabled=cached))
    return stack


def _without(casts: Any) -> Any:
    """A block without autocast, whose casts are in a trace."""
    stack = contextlib.ExitStack()
    for kind, *_ in casts:
        stack.enter_context(outside(kind))
    return stack


def _elsewhere() -> bool:
    """Whether a tracer or a transform runs the call."""
    traced = getattr(_thread, "traces", False) or get_proxy_mode() is not None or _jit_tracing() is not None
    return traced or _transforms() is not None or _forward_ad._current_level >= 0


def _in_checkpoint() -> bool:
    """Whether torch.utils.checkpoint runs the call, or runs it again: then both must save the same tensors, and what is traced
    between them must change neither. A checkpoint keeps the call's inputs alone, so a graph could save nothing but the
    second run's memory."""
    hooks = _hooks_of_saved_tensors(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


def _parts(path: str, one: Any) -> Iterator[tuple[str, Any]]:
    """The parts of tuples, lists and dicts of arguments, each with its path."""
    if type(one) is dict:
        for name, part in one.items():
            yield from _parts(join_path(path, name), part)
    elif type(one) in (tuple, list) or hasattr(type(one), "_make"):
        for i, part in enumerate(one):
            yield from _parts(join_path(path, i), part)
    else:
        yield path, one


def place(modules: Iterable[nn.Module]) -> None:
    """Let modules run on their joint graphs from their next calls on, and instead of lists and the like their parts."""
    for module in modules:
        cls, state = type(module), vars(module)
        if cls.forward is nn.Module.forward:
            place(module.children())
        elif not (is_ours(module) or "forward" in state or _is_one_call(module)):
            state[WHOLE] = state["forward"] = Whole(module, lazy=True)


def is_ours(module: nn.Module) -> bool:
    """Whether a module runs on ops alone."""
    return isinstance(module, OpModule) or (isinstance(module, Sequential) and all(map(is_ours, module)))


def _is_one_call(module: nn.Module) -> bool:
    """Whether a module calls one operator of torch, of whose graph nothing can be left out."""
    return type(module).__module__.startswith("torch.nn.") and not module._modules


def whole(model: nn.Module, example: Any) -> Replaced:
    """See `from_torch`."""
    found = next((WRAPPERS[cls.__name__] for cls in type(model).__mro__ if cls.__name__ in WRAPPERS), None)
    if found is not None:
        fail("from_torch", "model", f"{found}, with example", type(model).__name__)
    state, name, now = vars(model), type(model).__name__, _forward_of(model)
    own = Whole(model) if WHOLE not in state or state[WHOLE].lazy else state[WHOLE]
    if now is not None and WHOLE not in state:
        remedy = "call from_torch before accelerate's prepare, or what else set it"
        fail("from_torch", "model", f"a module without a forward of its own, with example ({remedy})", name)
    args = example if type(example) is tuple else () if isinstance(example, Mapping) else (example,)
    why, tried = own.reason(args, dict(example) if isinstance(example, Mapping) else {})
    if why and (not tried or why.startswith(f"{name}_fwd: ")):
        wanted = "one whose call with the example can be traced (without example, its layers run on funcops)"
        fail("from_torch", "model", wanted, why)
    if why:
        fail("from_torch", "example", f"arguments with which {name} runs", f"{describe(example)}: {why}")
    if now is not None and not state[WHOLE].lazy:
        return Replaced([], [], [Change("", name, "on its joint graph")])
    state[WHOLE] = state["forward"] = own
    return Replaced([Change("", name, "its joint graph")], [], [])


def _forward_of(model: nn.Module) -> Any:
    """The forward that is set on a module, or None. A pickle may make the method of its class out of ours."""
    now = vars(model).get("forward")
    return None if getattr(now, "__func__", None) is type(model).forward else now


def undo(path: str, module: nn.Module, done: Replaced) -> None:
    """See `to_torch`."""
    state, name = vars(module), type(module).__name__
    own = state.get(WHOLE)
    if own is None:
        return
    now = state.get("forward")
    # accelerate's unwrap_model leaves a method of `__func__`
    if now is not own and not (hasattr(getattr(now, "__func__", None), WHOLE) and not hasattr(now, "__wrapped__")):
        done.left.append(Change(path, name, "its forward was wrapped or replaced since"))
        return
    del state[WHOLE], state["forward"]
    done.replaced.append(Change(path, "its joint graph", name))
