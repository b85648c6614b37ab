"""`op_from_torch(fn)`: an op made from any differentiable torch function, for operators that funcops lacks.

The function and its autograd backward are traced together, and the graph is cut in three. The values that cross the first cut are
the residuals, named by the graph's nodes; those that cross the second cut are the pending.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from funcops.adapters.flatten import Shape, TensorIndex, flatten, gradients, indexed_paths, unflatten
from funcops.adapters.from_function.compiled import Watched, constants, stand_in, uncompiled
from funcops.adapters.from_function.cut import Cutter, Graphs, Rules, has_gradient
from funcops.adapters.from_function.joint import Joint, Like, copied, refuse_trained, resolved, trace
from funcops.adapters.from_function.outside import ReadByFunction
from funcops.adapters.from_function.paths import HALVES, left
from funcops.adapters.from_function.plan import run_once
from funcops.adapters.from_function.read_by_module import ReadByModule
from funcops.adapters.from_function.traced import Held, Memo, Noted, Trace, Traced, as_traced, asked_of, listed, takers
from funcops.adapters.from_function.transforms import complain, refuse_trace
from funcops.engine.backend import scopes, select
from funcops.engine.contract import rerun
from funcops.engine.contract.accumulators import accumulate, check_into
from funcops.engine.contract.configs import OpConfig, require_config
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.contract.op import Op, config, dgrad_of, make_op, refuse_autocast
from funcops.engine.contract.rerun import note
from funcops.engine.contract.schema import DGRAD, WGRAD, Donated, Pending, Residuals, open_node, saved, static
from funcops.engine.errors import check, describe, describe_tree, fail, join_path, require, require_callable, require_type
from funcops.engine.trees import nothing_like, paths
from funcops.memory.packing import from_place, to_place

_autocast_enabled = torch._C._is_any_autocast_enabled


@config
class TorchConfig(OpConfig):
    """The config of an op without settings."""


class TorchResiduals(Residuals, static=("inputs",)):
    kept: Any = saved("{name: tensor}", needed_by=DGRAD | WGRAD, tree=True)
    traced: Any = static()


class TorchPending(Pending):
    kept: Any = saved("{name: tensor}", needed_by=WGRAD, tree=True)
    traced: Any = static()


def op_from_torch(
    fn: Callable[[Any, Any, Any], Any],
    *,
    name: str | None = None,
    config: type = TorchConfig,
    init: Callable[..., Any] | None = None,
) -> Op:
    """Make an `Op` from `fn(params, x, cfg) -> y`, a function that torch's autograd can differentiate.

    params, x and y are trees of tensors. The function is traced once for each set of shapes, strides and dtypes, and again when a
    variable of its closure or a global that it reads is another object, a list, dict, set or array (of up to 1 MiB) of other
    values, or a module in another mode or with another parameter, buffer or submodule. It is not traced again when another
    attribute of an object changes, and Python control flow that depends on the values of tensors is not traced: pass what changes
    in params, x or the config. A tensor of its closure that the backward
    reads is a residual: a write to it in between raises `StaleResidualError`. Under `remat`, and rules and presets that recompute
    it, so does a write to any other, and a function that draws random numbers raises `ValueError`; the second run is of the first
    one's trace. A dy, or a residual that was moved, is copied if its strides differ from the traced ones. `init(cfg, *, key,
    device, dtype)` makes params; without it the op has none. Raises `TypeError` for a y that holds anything but tensors,
    `ValueError` for a function that cannot be traced without writes, whose shapes or steps depend on values, whose backward draws
    again what its forward drew (as with `torch.utils.checkpoint`), or that captures a tensor that requires grad, and
    `RuntimeError` under autocast.

    >>> import torch
    >>> from funcops import TorchConfig, op_from_torch
    >>> squared = op_from_torch(lambda params, x, cfg: x * x, name="squared")
    >>> y, residuals = squared.fwd(None, torch.tensor([3.0]), TorchConfig())
    >>> y, squared.bwd(residuals, torch.ones(1), TorchConfig())[1]
    (tensor([9.]), tensor([6.]))
    """
    require_callable("op_from_torch", fn=fn)
    if name is not None:
        require_type("op_from_torch", "name", name, str)
        require(bool(name), "op_from_torch", "name", "a name", repr(name))
    require_type("op_from_torch", "config", config, type)
    if init is not None:
        require_callable("op_from_torch", init=init)
    return Traces(str(name or getattr(fn, "__name__", type(fn).__name__)), fn, config, init, ReadByFunction(fn)).op()


_numbers = itertools.count()
one_at_a_time = threading.RLock()  # torch says by a flag of the whole process that it traces: threads would leave it set


class Traces:
    """The state that the functions of one op share: its traces, keyed by all that they depend on."""

    def __init__(
        self,
        label: str,
        fn: Callable[..., Any],
        config: type,
        init: Callable[..., Any] | None,
        outside: ReadByFunction | ReadByModule,
    ) -> None:
        self.label, self.fn, self.config, self.init, self.outside = label, fn, config, init, outside
        self.memo = Memo()
        self.last: Any = None  # the newest trace
        self.rules: Rules | None = None
        self.whole = self  # the one without rules, which traces
        self.watched, self.states = Watched(self._state), dict[Any, int]()

    def __repr__(self) -> str:
        return self.label

    def op(self) -> Op:
        self.number = f"op {next(_numbers)}"
        takers[self.number] = self

        def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
            return self.forward(params, x, cfg, needs)

        dgrad = self._opening("dgrad", self.inputs)
        both = self._opening("bwd", self.backward)

        def wgrad(pending: Any, cfg: Any, *, into: Any = None) -> Any:
            return self.weights(pending, cfg, into)

        def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> tuple[Any, Any]:
            dx, dparams = both(residuals, dy, cfg)
            return (wgrad(None, cfg, into=into) if dparams is None else accumulate(f"{self.label}_bwd", dparams, into)), dx

        def no_params(cfg: Any, *, key: Any = None, device: Any = None, dtype: Any = None) -> None:
            return None

        rerun.used = True  # from here on a compiler traces what takes notes
        fwd.any_tree = True  # type: ignore[attr-defined]
        made = make_op(self.label, self.config, init=self.init or no_params, fwd=fwd, dgrad=dgrad, wgrad=wgrad, bwd=bwd)
        return made._replace(
            pending=TorchPending,
            products=self.products,
            draws=self.draws,
            named=self.named,
            traces=Held(self.label, self.traces, self._state),
        )

    def _opening(self, half: str, run: Callable[..., Any]) -> Any:
        """`run(residuals, dy, cfg, given)` with checks; `given`: whether nobody else has the residuals."""

        def of_given(residuals: Any, dy: Any, cfg: Any) -> Any:
            return run(residuals, dy, cfg, True)

        usual, freeing = (dgrad_of(TorchResiduals, f"{self.label}_{half}")(fn) for fn in (run, of_given))

        @functools.wraps(usual)
        def opening(residuals: Any, dy: Any, cfg: Any) -> Any:
            return (freeing if type(residuals) is Donated else usual)(residuals, dy, cfg)

        return opening

    def joint(self, run: Any, leaves: list[Tensor], asked: tuple[bool, ...], x_shape: Any) -> Joint:
        return trace(f"{self.label}_fwd", run, leaves, asked)

    def fixed(self, params_shape: Any, x_shape: Any) -> frozenset[int]:
        """The leaves whose gradients nobody asks for."""
        return frozenset()

    def names(self, params_shape: Any, x_shape: Any, count: int) -> list[str]:
        """The names of the leaves among residuals."""
        return [f"input.{i}" for i in range(count)]

    held = False  # whether the caller keeps x anyway
    named: Any = None  # see `Op.named`
    quick = False  # whether each node of a graph is called in the fastest way
    settles = False  # whether only the first run of a trace may change what is read outside

    def traced(self, params: Any, x: Any, cfg: Any, needs: Needs) -> tuple[Traced, list[Tensor], list[Tensor]]:
        """The trace for these trees, their leaves, and what its graph takes for them."""
        leaves: list[Tensor] = []
        params_shape = flatten(params, leaves)
        count = len(leaves)
        x_shape = flatten(x, leaves)
        unusual = torch.is_grad_enabled() and any([t.requires_grad for t in leaves])  # a trace has no node of autograd's
        if unusual or not {*map(type, leaves)} <= _USUAL or not all([t.layout is torch.strided for t in leaves]):
            _check_leaves(f"{self.label}_fwd", params, x)
        compiling = torch.compiler.is_dynamo_compiling()
        flat = [resolved(t) if compiling or t.dtype is not torch.float32 or t.is_neg() else t for t in leaves]
        find, call = self._compiled if compiling else self._ruled, (params_shape, x_shape, cfg, flat, count)
        noted = note(self, lambda: self._noted(find(*call, Needs.ALL)))
        if noted is None:
            return find(*call, needs), leaves, flat
        noted.complain(f"{self.label}_fwd")
        found = as_traced(f"{self.label}_fwd", noted.traced, leaves, flat)
        if compiling:
            id(noted.traced)  # its guard
            name = noted.traced.asking_while_compiling(self.number, needs.x, needs.params)
            return getattr(self.watched, name), found, list(map(resolved, found))
        return noted.traced.asking(needs), found, list(map(resolved, found))

    def _noted(self, own: Traced) -> Noted:
        if own.graphs.draws:
            remedy = "draw in x instead, or use dropout with a key, or keep its residuals (no remat, no Recompute)"
            got = f"one that calls {own.graphs.draws}: {remedy}"
            fail(f"{self.label}_fwd", self.label, "an op that gives the same when its forward runs again", got)
        return Noted(own)

    def _state(self) -> str:
        """A text that is another one after a change of what the traces depend on beside their arguments."""
        return repr(self.states.setdefault((self.outside.values(), self.outside.mode(), *defaults()), len(self.states)))

    def _compiled(self, params_shape: Any, x_shape: Any, cfg: Any, flat: list[Tensor], count: int, needs: Needs) -> Traced:
        """The trace of a call in a function that torch.compile traces."""
        id(cfg)  # the compiler guards on it, as on the state
        call = self.watched.state, params_shape, x_shape, [constants(t) for t in flat], count, needs.x, needs.params
        return getattr(self.watched, cfg.given_while_tracing(self.number, call))  # type: ignore[no-any-return]

    def taken(self, cfg: Any, call: Any) -> str:
        """The name of the trace; see `given_while_tracing`. The compiler has no values, so stand-ins are traced."""
        _, params_shape, x_shape, likes, count, *masks = call
        flat = [stand_in(Like(*like)) for like in likes]
        with uncompiled():
            own = self._ruled(params_shape, x_shape, cfg, flat, count, Needs(*masks))
        if own.graphs.placed:
            got = "one whose graph holds the places of tensors in their memory (as_strided)"
            fail(f"{self.label}_fwd", self.label, "an op without places in memory, under torch.compile", got)
        return self.watched.kept(own)

    def _ruled(self, *call: Any) -> Traced:
        *given, needs = call
        own = self.whole._found(*given)
        if needs is not Needs.ALL:  # a cut of the one trace, so a gradient has the same bits whatever else is needed
            own = own.asking(needs)
        return own if self.rules is None else own.cut(own.asked, self.rules)

    def _found(self, params_shape: Any, x_shape: Any, cfg: Any, flat: list[Tensor], count: int) -> Traced:
        values, memo = self.outside.values(), self.memo
        if values != memo.values:  # an annealed number would leave a trace for each value
            memo = self.memo = Memo(values)
            self.watched.clear()
        # The reprs distinguish 1, 1.0 and True, and 0.0 and -0.0, which are equal but may give different traces.
        mode = (self.outside.mode(), *defaults())
        shapes = _named(params_shape), repr(x_shape)
        key: Any = (cfg, repr(cfg), count, shapes, tuple([(t.shape, t.stride(), t.dtype, t.device) for t in flat]), *mode)
        found = memo.get(key)
        if found is not None and found.graphs.placed:
            found = memo.get((key, _offsets(flat)))
        if found is None:
            with one_at_a_time, disable_proxy_modes_tracing():  # in the trace of a caller, which shall have the graphs alone
                found = self._trace(cfg, params_shape, x_shape, flat, count)
            if self.settles and (values := self.outside.values()) != memo.values:
                memo = self.memo = Memo(values)
                self.watched.clear()
            memo.put(f"{self.label}_fwd", key, found)
            if found.graphs.placed:
                memo.put(f"{self.label}_fwd", (key, _offsets(flat)), found)
            self.last = found
        return found

    def _trace(self, cfg: Any, params_shape: Any, x_shape: Any, leaves: list[Tensor], count: int) -> Traced:
        refuse_trace(f"{self.label}_fwd", self.label)
        where, shape, likes = f"{self.label}_fwd", list[Any](), [Like.of(t) for t in leaves]
        # other leaves than tensors are part of the key, so they are looked at once
        _check_leaves(where, unflatten(params_shape, leaves), unflatten(x_shape, leaves))
        asked = asked_of(params_shape, x_shape, likes, count, Needs.ALL, self.fixed(params_shape, x_shape))

        def run(flat: Any) -> Any:
            found: list[Tensor] = []
            y = self.fn(unflatten(params_shape, flat), unflatten(x_shape, flat), cfg)
            for path, value in paths(y).items():
                if not isinstance(value, Tensor):
                    fail(where, join_path("y", path), "a tensor", describe(value), TypeError)
            shape[:] = [flatten(y, found)]
            return found

        with torch.enable_grad():
            joint = self.joint(run, leaves, asked, x_shape)
        return self.made(joint, shape[0], params_shape, x_shape, leaves, count, asked)

    def made(
        self, joint: Joint, y_shape: Any, params_shape: Any, x_shape: Any, leaves: list[Tensor], count: int, asked: tuple[bool, ...]
    ) -> Any:
        """The graphs of a joint graph."""
        # a param at the root belongs to itself, any other to the part of the tree that holds it
        owners = [path.rpartition(".")[0] or path for _, path in indexed_paths(params_shape, "")]
        names = self.names(params_shape, x_shape, len(leaves))
        cutter = Cutter(f"{self.label}_fwd", joint.graph, names, joint.outputs, asked, owners, self.outside.names(), self.held)
        if self.quick:
            with torch.random.fork_rng():
                run_once(cutter, asked, [*map(copied, leaves)], [like.ones() for like in joint.outputs])
        layouts = tuple([(Like.of(t), int(t.storage_offset())) for t in leaves])
        shapes = params_shape, x_shape, _of_tensors(x_shape), y_shape
        return Traced(cutter.graphs(asked), *shapes, asked, count, layouts, cutter, self.fixed(params_shape, x_shape))

    def draws(self, cfg: Any) -> str:
        """See `Op.draws`."""
        graphs = [one.graphs for key, (one, _) in list(self.whole.memo.traces.items()) if key[:2] == (cfg, repr(cfg))]
        return next((one.draws for one in graphs if one.draws), "")

    def traces(self) -> list[Trace]:
        """See `Op.traces`."""
        return listed(self.whole.memo, lambda key: (key[0], key[5]) if len(key) > 2 else (key[0][0], key[0][5]))

    def other(self, own: Traced, make: str, *args: Any) -> Any:
        """See `Traced.other`."""
        if not torch.compiler.is_dynamo_compiling():
            return own.other(make, *args)
        id(own)  # its guard
        return getattr(self.watched, own.other_while_compiling(self.number, make, *args))

    def ran(self, own: Traced, which: str, values: list[Any], given: bool = False) -> Any:
        """The results of one of the graphs. `given`: take the values out of the list, so that each is freed after its last read."""
        try:
            if not given and not scopes.on:
                return getattr(own.graphs, which).forward(*values)
            if given and not torch.compiler.is_dynamo_compiling():
                return _run(own.other("boxed", which, scopes.on), [values])
            return _run(self.other(own, "with_paths", which, scopes.on) if scopes.on else getattr(own.graphs, which), values)
        except RuntimeError as error:
            complain(f"{self.label}_{HALVES[which]}", getattr(own.graphs, which), error)
            raise

    def forward(self, params: Any, x: Any, cfg: Any, needs: Needs) -> tuple[Any, Any]:
        label = f"{self.label}_fwd"
        require_config(label, cfg, self.config)
        if self.init is None and params is not None:
            fail(label, "params", "None (op_from_torch got no init)", describe(params), TypeError)
        if _autocast_enabled():
            refuse_autocast(label, params, x)
        if needs is not Needs.ALL:
            check_needs(label, needs, params, x)
        own, leaves, flat = self.traced(params, x, cfg, needs)
        refuse_trained(label, own.graphs.captured.values())
        found, count = self.ran(own, "forward", flat), len(own.graphs.outputs)
        values, captured = iter(found[count:]), own.graphs.captured
        given = own.graphs.leaves
        kept = {n: leaves[given[n]] if n in given else captured[n] if n in captured else next(values) for n in own.graphs.kept}
        kept.update({n: to_place(n, kept[n], action) for n, action in own.graphs.actions.items()})
        node: Any = TorchResiduals
        residuals = node.keep(cfg, needs, kept=kept, traced=own, inputs=own) if needs else None
        if scopes.on and residuals is not None:
            scopes.kept(residuals)
        return unflatten(own.y_shape, _distinct(found[:count])), residuals

    def inputs(self, residuals: Any, dy: Any, cfg: Any, given: bool = False) -> tuple[Any, Any]:
        label = f"{self.label}_dgrad"
        own, dys = _as_traced_dys(self, label, residuals.traced, dy)
        kept, needs, numbers = residuals.kept, residuals.needs, own.graphs.dys
        values = [*_laid_out(label, "residuals.kept", own.graphs, own.graphs.kept, kept, own.graphs.idle), *dys.values()]
        if given:
            residuals.empty()
            kept = {n: t for n, t in kept.items() if n in own.graphs.waiting}
            dys = {i: dys[i] for n, i in numbers.items() if n in own.graphs.waiting}
        dx, middle = own.dx(self.ran(own, "dgrad", values, given))
        if not needs.params:
            return dx, None
        waiting = {}
        for n in own.graphs.waiting:
            waiting[n] = kept[n] if n in own.graphs.kept else dys[numbers[n]] if n in numbers else next(middle)
        node: Any = TorchPending
        return dx, node.keep(residuals.cfg, needs, kept=waiting, traced=own)

    def backward(self, residuals: Any, dy: Any, cfg: Any, given: bool = False) -> tuple[Any, Any]:
        label, needs = f"{self.label}_bwd", residuals.needs
        own, dys = _as_traced_dys(self, label, residuals.traced, dy)
        values = [*_laid_out(label, "residuals.kept", own.graphs, own.graphs.kept, residuals.kept), *dys.values()]
        if given:
            residuals.empty()
            del dys
        dx, dparams = own.dx(self.ran(own, "backward", values, given))
        return dx, unflatten(own.params_shape, own.spread(dparams, 0, own.params)) if needs.params else None

    def opened(self, label: str, pending: Any, cfg: Any) -> tuple[Traced, list[Any], bool]:
        """The trace of a pending, what the graph of wgrad takes, and whether nobody else has that."""
        if _autocast_enabled():
            refuse_autocast(label, pending)
        node = open_node(label, pending, TorchPending, cfg)
        own: Traced = node.traced
        values = _laid_out(label, "pending.kept", own.graphs, own.graphs.waiting, node.kept)
        if node is not pending:
            node.empty()
        return own, values, node is not pending

    def products(self, pending: Any, cfg: Any, *, into: Any) -> list[Any]:
        """See `Op.products`."""
        if pending is None:
            return []
        label = f"{self.label}_wgrad"
        own, values, _ = self.opened(label, pending, cfg)
        factors = self.other(own, "factors_with_paths" if scopes.on else "factors")
        # what will be added, without data
        check_into(label, into, unflatten(own.params_shape, own.spread(factors.without_data(), 0, own.params)))
        have = paths(into)
        accumulators = [have[path] for i, path in sorted(indexed_paths(own.params_shape, "")) if own.asked[i]]
        return factors.products(_run(factors.graph, values), accumulators)  # type: ignore[no-any-return]

    def weights(self, pending: Any, cfg: Any, into: Any) -> Any:
        label, init = f"{self.label}_wgrad", self.init
        if pending is None:
            return nothing_like(init(cfg, key=None, device="meta", dtype=None)) if into is None and init is not None else into
        own, values, given = self.opened(label, pending, cfg)
        found = self.ran(own, "wgrad", values, given)
        if not given and into is None:  # the pending still holds those that dgrad computed already
            found = [g.clone() if passes and g is not None else g for g, passes in zip(found, own.graphs.passes, strict=True)]
        dparams = unflatten(own.params_shape, own.spread(found, 0, own.params))
        return accumulate(label, dparams, into)


def _run(graph: fx.GraphModule, values: list[Any]) -> Any:
    if not scopes.on or torch.compiler.is_dynamo_compiling():
        return graph.forward(*values)
    with left():
        return graph.forward(*values)


def _offsets(leaves: list[Tensor]) -> tuple[int, ...]:
    return tuple([int(t.storage_offset()) for t in leaves])


_USUAL = {Tensor, torch.nn.Parameter}


def _distinct(ys: Any) -> list[Tensor]:
    """The outputs, each a tensor of its own: autograd sends all gradients of a tensor that a node returns twice to the last one."""
    seen: dict[int, int] = {}
    return [y if seen.setdefault(id(y), i) == i else y.view_as(y) for i, y in enumerate(ys)]


def _named(shape: Any) -> Any:
    """A text of a shape, or, for a dict of tensors such as a module's parameters, its names in order: quicker to compare."""
    if type(shape) is dict and {*map(type, shape.values())} == {TensorIndex}:
        return tuple(shape)
    return repr(shape)


def defaults() -> tuple[Any, ...]:
    """The global state on which a trace depends: products, attention and kernels are chosen by it, or a model reads it."""
    cuda, flags = torch.backends.cuda, torch.backends
    return (
        select.choice(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        (cuda.math_sdp_enabled(), cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        (flags.cudnn.enabled, flags.mha.get_fastpath_enabled(), flags.opt_einsum.enabled, flags.opt_einsum.strategy),
    )


def _check_leaves(where: str, params: Any, x: Any) -> None:
    for path, t in paths({"params": params, "x": x}).items():
        if isinstance(t, Tensor):
            check(where, path, t, (...,))
        elif t is not None and type(t) not in (bool, int, float, complex, str):
            fail(where, path, "a tensor", describe(t), TypeError)


def _laid_out(where: str, what: str, graphs: Graphs, likes: dict[str, Like], values: dict[str, Any], idle: Any = ()) -> list[Any]:
    """The values in the layouts for which a graph was traced; None for the idle ones."""
    if not idle and not graphs.actions and not torch.compiler.is_dynamo_compiling():  # the usual call: a look at each, and no more
        found = [values[n] for n in likes]
        if all(map(Like.matches, likes.values(), found)):
            return found
    found = []
    for n, like in likes.items():
        t = None if n in idle else values[n]
        if n in graphs.actions and n not in idle:
            wanted = "kept, because this half of the backward reads it"
            require(t is not None, where, f"{what}.{n}", wanted, "dropped (policy)")
            t = from_place(n, t)
        found.append(t if n in idle or like.fits(t) else like.laid_out(where, f"{what}.{n}", t))
    return found


def _check_mirror(where: str, path: str, shape: Any, dy: Any) -> None:
    """Raise for a dy that is not a tree like y, in which None stands for a part without a gradient."""
    if type(shape) is TensorIndex or dy is None:
        return
    names: Any = range(len(shape)) if type(shape) is tuple else shape.leaves if type(shape) is Shape else shape
    if type(shape) is Shape:
        right = type(dy) is shape.cls
    else:
        right = type(dy) is type(shape) and (dy.keys() == shape.keys() if type(shape) is dict else len(dy) == len(shape))
    if not right:
        got = f"{type(dy).__name__} {describe_tree(dy)}"
        wanted = shape.cls.__name__ if type(shape) is Shape else f"a {type(shape).__name__}"
        fail(where, path, f"{wanted} of {', '.join(map(str, names))}, as y is", got, TypeError)
    parts = dy if type(shape) is not Shape else {name: getattr(dy, name) for name in names}
    for name in names:
        _check_mirror(where, join_path(path, name), shape.leaves[name] if type(shape) is Shape else shape[name], parts[name])


def _of_tensors(shape: Any) -> Any:
    """The shape without its other leaves, which have no gradients."""
    if type(shape) is TensorIndex:
        return shape
    if type(shape) is Shape:
        return shape._replace(leaves=_of_tensors(shape.leaves))
    if isinstance(shape, dict):
        return {name: _of_tensors(part) for name, part in shape.items()}
    if isinstance(shape, (tuple, list)):
        parts = map(_of_tensors, shape)
        return type(shape)._make(parts) if hasattr(shape, "_make") else type(shape)(parts)
    return None


def _as_traced_dys(of: Traces, label: str, own: Traced, dy: Any) -> tuple[Traced, dict[int, Any]]:
    """The trace for the outputs that have gradients, and these by number, in the layouts for which it was traced; None for
    integers, of which it reads none."""
    _check_mirror(label, "dy", own.y_shape, dy)
    outputs, values = own.graphs.outputs, gradients(own.y_shape, dy, [])
    for i, (d, like) in enumerate(zip(values, outputs, strict=True)):
        if d is not None:
            path = join_path("dy", i if len(outputs) > 1 else None)
            if not has_gradient(like.dtype):
                fail(label, path, "None, as integers have no gradient", describe(d), TypeError)
            check(label, path, d, like.shape, like.dtype)
    able = [has_gradient(like.dtype) for like in outputs]
    missing = [i for i, d in enumerate(values) if d is None and able[i]]
    if len(missing) == sum(able):
        return own, {i: like.zeros() if able[i] else None for i, like in enumerate(outputs)}
    given = {i: d for i, d in enumerate(values) if i not in missing}
    laid_out = {i: d if d is None else outputs[i].laid_out("", "", d) for i, d in given.items()}
    return of.other(own, "without", *missing) if missing else own, laid_out
