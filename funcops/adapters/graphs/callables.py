"""`make_graphed_callables`, with torch's signature: modules and functions under autograd, their forward and backward as graphs."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn

from funcops.adapters.autograd.delayed import WgradStore, accumulate
from funcops.adapters.autograd.first_order import anchor, first_order
from funcops.adapters.autograd.hushed import hush, unhush
from funcops.adapters.graphs.backend import Capturer, Options
from funcops.adapters.graphs.lease import Lease
from funcops.adapters.graphs.slot import FREE, PENDING, RESIDUALS, Slot
from funcops.adapters.graphs.statics import HOOKS, Inputs, Part, restored
from funcops.engine.contract.fused_steps import watch
from funcops.engine.errors import BorrowedError, GraphOrderError, describe, fail, require, require_flag, require_type
from funcops.engine.trees import leaves, tensors, with_leaves


def _autocast() -> tuple[Any, ...]:
    """The dtype of autocast on each kind of device, or False."""
    return tuple([torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")])


class _CallSlot(Slot):
    """A slot of autograd's graphs: `fwd`, `bwd` if there is a gradient, `wgrad` if weight gradients are put off."""

    form: Any = None  # makes outputs that only torch's pytree knows of their leaves
    out_tensors: list[Tensor]
    dys: list[Tensor]  # of the outputs that require grad
    grads: list[Tensor | None]  # of the inputs, then of the params
    weights: list[tuple[Tensor, Tensor]]  # params whose gradients were put off, and their gradients
    held: Any  # the autograd graph and the pendings: each backward reads their memory, which must not return to the pool
    lent: Lease  # of the buffers that become a parameter's gradient


class _Callable:
    """One captured callable, with its slots and params."""

    def __init__(
        self, where: str, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], clone_param_grads: bool, outputs: str
    ) -> None:
        self.where, self.fn, self.clone, self.outputs = where, fn, clone_param_grads, outputs
        self.args, self.kwargs = args, kwargs
        self.params = [p for p in fn.parameters() if p.requires_grad] if isinstance(fn, nn.Module) else []
        self.parts, self.autocast = list[Part](), _autocast()
        self.forward = fn.forward if isinstance(fn, nn.Module) else fn
        self.replaces = isinstance(fn, nn.Module) and "forward" in vars(fn)
        self.slots: list[_CallSlot] = []
        self.order: _Order | None = None
        self.number = 0
        self.waiting: list[_CallSlot] = []  # whose weight gradients backward_dw will compute

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.forward, memo)  # a method of the copied module, which has other parameters

    def __reduce__(self) -> Any:
        return (functools.partial, (self.forward,)) if self.replaces else (getattr, (self.fn, "forward"))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any([part.module.training is not part.training for part in self.parts]) or _autocast() != self.autocast:
            return self.forward(*args, **kwargs)  # it was captured in another mode
        values = self.slots[0].inputs["fwd"].check((args, kwargs))
        for part in self.parts:
            part.check(self.where)
        if self.order is not None and torch.is_grad_enabled():
            self.order.take(self.number)
        slot = next((one for one in self.slots if one.state == FREE), None)
        if slot is None:
            raise GraphOrderError(
                f"{self.where}: a slot must be free, got {len(self.slots)} calls whose backward has not run: capture with an order"
            )
        found = _Graphed.apply(self, slot, values, *tensors(values), *self.params)
        outputs = slot.results["fwd"]
        made = with_leaves(outputs, _fill(leaves(outputs), found[:-1]))
        return made if slot.form is None else torch_pytree.tree_unflatten(made, slot.form)

    def check_taken(self, slot: _CallSlot) -> None:
        """Raise if a parameter's gradient still is the buffer that a backward will write to, before it adds to it."""
        if any([slot.lent.at(i, p.grad) for i, p in enumerate(self.params)]):
            remedy = "set p.grad to None after each backward, or capture with clone_param_grads=True"
            raise BorrowedError(f"{self.where}: the graph's buffers must be free, got some that are a parameter's p.grad: {remedy}")

    def backward_dw(self) -> None:
        """Compute and accumulate the weight gradients of every backward since the last call, as `delayed_wgrad`'s `run` does."""
        unhush([p for slot in self.waiting for p, _ in slot.weights])
        while self.waiting:
            slot = self.waiting.pop(0)
            slot.enter(FREE)  # after an error, too: its buffers are of no more use
            hint = "Call backward_dw() before the optimiser"
            slot.check(self.where, "the tensors of the backward", "fwd", "bwd", by="backward", hint=hint)
            slot.replay("wgrad")
            for p, gradient in slot.weights:
                if p.requires_grad:
                    accumulate(p, gradient.clone())


class _BackwardDw:
    """`backward_dw` of a captured callable. In a copy it has nothing to do, as backwards that are not captured delay nothing."""

    def __init__(self, of: _Callable | None = None) -> None:
        self.of = of

    def __call__(self) -> None:
        if self.of is not None:
            self.of.backward_dw()

    def __reduce__(self) -> Any:
        return _BackwardDw, ()


class _Order:
    """Checks that forwards and backwards repeat the captured order."""

    def __init__(self, order: Sequence[int]) -> None:
        self.order, self.at = list(order), 0

    def take(self, step: int) -> None:
        wanted = self.order[self.at]
        if step != wanted:
            raise GraphOrderError(f"make_graphed_callables: step {self.at} of the order must be {wanted}, got {step}")
        self.at = (self.at + 1) % len(self.order)


class _Token:
    """Lives as long as an autograd node, and frees the slot if the node's backward never ran."""

    def __init__(self, slot: _CallSlot) -> None:
        self.slot, self.ticket = slot, slot.enter(RESIDUALS)

    def used(self) -> bool:
        return self.slot.ticket != self.ticket

    def __del__(self) -> None:
        if not self.used():
            self.slot.enter(FREE)


class _Graphed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, of: _Callable, slot: _CallSlot, values: list[Any], *inputs: Tensor) -> Any:  # type: ignore[override]
        slot.inputs["fwd"].copy(values)
        slot.replay("fwd")
        if any(ctx.needs_input_grad):
            ctx.token = _Token(slot)
        ctx.of, ctx.slot = of, slot
        made = [t.clone() if of.outputs == "clone" else t.detach() for t in slot.out_tensors]
        ctx.mark_non_differentiable(*[m for m, t in zip(made, slot.out_tensors, strict=True) if not t.requires_grad])
        made.append(anchor(made))
        ctx.save_for_backward(made[-1])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return _replayed(ctx, *dys[:-1])
        with torch.no_grad():
            found = _replayed(ctx, *dys[:-1])
        return first_order(ctx.of.where, ctx, found, (*dys, *ctx.saved_tensors), ())


def _replayed(ctx: Any, *dys: Tensor) -> Any:
    of, slot = ctx.of, ctx.slot
    if ctx.token.used():
        raise GraphOrderError(f"{of.where}: a backward must run once, got a second one: another call may use its buffers now")
    slot.check(of.where, "the tensors of the forward", "fwd")
    of.check_taken(slot)
    if of.order is not None:
        of.order.take(-of.number)
    wanted = [dy for dy, t in zip(dys, slot.out_tensors, strict=True) if t.requires_grad]
    for static, dy in zip(slot.dys, wanted, strict=True):
        static.copy_(dy)
    if "bwd" in slot.graphs:
        slot.replay("bwd")
    slot.enter(PENDING if slot.weights else FREE)
    first_param = len(slot.grads) - len(of.params)
    own = [None if g is None else g.clone() if i < first_param or of.clone else g.detach() for i, g in enumerate(slot.grads)]
    if slot.weights:
        of.waiting.append(slot)
        trained = [p for p, _ in slot.weights]
        watch(trained)
        hush(trained)
    return None, None, None, *own


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Any = None,
    *,
    sample_kwargs: Any = None,
    order: Sequence[int] | None = None,
    delayed_wgrad: bool = False,
    clone_param_grads: bool = True,
    outputs: str = "clone",
    stream: Any = None,
    capture_error_mode: str = "global",
) -> Any:
    """Capture modules and functions under autograd, with the signature of `torch.cuda.make_graphed_callables`: each of them, alone
    or in a tuple, runs as one autograd node whose forward and backward are graphs, or recordings on machines without CUDA.

    `sample_args`: a tuple of pytrees per callable, `sample_kwargs` a dict per callable; leaves other than tensors must be the same
    at every call. `order`: the order of forwards (k) and backwards (-k) of the callables, counted from 1, such as `[1, 2, 1, 2, -2,
    -1, -2, -1]`; each callable gets separate graphs for the calls that the order has in flight at once, and another order raises
    `GraphOrderError`. `delayed_wgrad`: backwards leave the weight gradients of `funcops.nn` modules to `module.backward_dw()`, a
    third graph. The caller owns parameter gradients unless `clone_param_grads=False`, and outputs unless `outputs="borrow"`:
    borrowed tensors are valid until the next forward of that call's graphs. Each call in flight has its own memory pool; `pool` is
    for the first callable's first call. A module runs uncaptured while its training mode, a submodule's, or autocast differs from
    the captured one. Every call checks shapes, dtypes, strides and devices, and that the module has its captured submodules,
    parameters and buffers, at their addresses. A module's deep copy or pickle is uncaptured.

    Raises `ValueError` for modules with hooks or with buffers that require grad, under autocast with its cache, and for unused
    inputs unless they are allowed; `CaptureError` for anything that a graph cannot hold; later `BorrowedError` if a graph captured
    earlier into `pool` may have overwritten the tensors that a forward or backward kept.

    >>> import torch
    >>> from funcops import nn
    >>> from funcops.graphs import make_graphed_callables
    >>> layer = make_graphed_callables(nn.Linear(2, 1), (torch.ones(4, 2),))
    >>> layer(torch.ones(4, 2)).sum().backward()
    >>> layer.weight.grad
    tensor([[4., 4.]])
    """
    where = "make_graphed_callables"
    require(outputs in ("clone", "borrow"), where, "outputs", "'clone' or 'borrow'", repr(outputs))
    require_flag(where, allow_unused_input=allow_unused_input, delayed_wgrad=delayed_wgrad, clone_param_grads=clone_param_grads)
    _check_trees(where, order, sample_kwargs)
    if any(_autocast()) and torch.is_autocast_cache_enabled():
        fail(where, "autocast", "off, or with cache_enabled=False", "on, with its cache")
    one = not isinstance(callables, tuple)
    fns = (callables,) if one else callables
    samples = (sample_args,) if one else sample_args
    kwargs: Any = ({},) * len(fns) if sample_kwargs is None else (sample_kwargs,) if one else sample_kwargs
    if not len(fns) == len(samples) == len(kwargs):
        fail(where, "sample_args", f"{len(fns)} tuples, one per callable", f"{len(samples)}, and {len(kwargs)} of sample_kwargs")
    made = [
        _checked(f"{where}, callable {i}", *of, clone_param_grads, outputs)
        for i, of in enumerate(zip(fns, samples, kwargs, strict=True))
    ]
    counts = _in_flight(where, order, len(fns))
    options = Options(stream, capture_error_mode)
    capturer = Capturer(where, (samples, kwargs, [c.params for c in made]), pool, options, num_warmup_iters)
    numbers = itertools.count()
    for c, count in zip(made, counts, strict=True):
        with restored(list(c.fn.buffers()) if isinstance(c.fn, nn.Module) else []):
            for i in range(count):
                c.slots.append(_capture(c, allow_unused_input, delayed_wgrad, capturer.of_slot(next(numbers)), warm=i == 0))
    checker = None if order is None else _Order(order)
    for i, c in enumerate(made):
        c.order, c.number = checker, i + 1
    finished = tuple(_installed(c, delayed_wgrad) for c in made)
    return finished[0] if one else finished


def _checked(where: str, fn: Any, args: Any, kwargs: Any, clone_param_grads: bool, outputs: str) -> _Callable:
    if not callable(fn):
        fail(where, "callable", "a module or a function", describe(fn), TypeError)
    if not isinstance(args, tuple):
        fail(where, "sample_args", "a tuple", describe(args), TypeError)
    if isinstance(fn, nn.Module):
        hooks = [name for name in HOOKS for m in fn.modules() if getattr(m, name)]
        require(not hooks, where, "module", "without hooks (register them afterwards)", ", ".join(sorted(set(hooks))))
        trained = [name for name, b in fn.named_buffers() if b.requires_grad]
        require(not trained, where, "module", "without buffers that require grad", ", ".join(trained))
    return _Callable(where, fn, args, kwargs, clone_param_grads, outputs)


def _check_trees(where: str, order: Any, sample_kwargs: Any) -> None:
    if order is not None:
        require_type(where, "order", order, list, tuple)
    for i, one in enumerate(
        [] if sample_kwargs is None else [sample_kwargs] if not isinstance(sample_kwargs, tuple) else sample_kwargs
    ):
        require_type(where, f"sample_kwargs.{i}", one, Mapping)


def _in_flight(where: str, order: Sequence[int] | None, count: int) -> list[int]:
    """The number of calls of each callable that the order has in flight at once."""
    if order is None:
        return [1] * count
    now, most = [0] * count, [0] * count
    for step in order:
        k = abs(step) - 1
        if not 0 <= k < count:
            fail(where, "order", f"of numbers from 1 to {count} and their negatives", step)
        now[k] += 1 if step > 0 else -1
        require(now[k] >= 0, where, "order", "with each backward after its forward", f"{step} before {k + 1}")
        most[k] = max(most[k], now[k])
    require(not any(now) and all(most), where, "order", "with every callable, and a backward for each forward", list(order))
    return most


def _capture(c: _Callable, allow_unused: bool, delayed: bool, capturer: Capturer, warm: bool) -> _CallSlot:
    own = [*c.fn.parameters(), *c.fn.buffers()] if isinstance(c.fn, nn.Module) else []
    slot = _CallSlot(capturer, own)
    slot.inputs["fwd"] = reads = Inputs(c.where, (c.args, c.kwargs), "copy", differentiable=True)
    args, kwargs = reads.trees
    given = tensors(reads.trees)
    # detached aliases, so that no param's autograd node belongs to the capture's stream
    aliases = {id(p): p.detach().requires_grad_() for p in c.params}
    params = list(aliases.values())
    differentiable = [t for t in (*given, *params) if t.requires_grad]

    def forward() -> Any:
        if not params:
            found = c.forward(*args, **kwargs)
        else:
            found = torch.func.functional_call(c.fn, _standing_in(c.fn, aliases), args, kwargs, tie_weights=False)
        found, slot.form = _opened(c.where, found)
        return found

    def backward(outs: list[Tensor], dys: list[Tensor]) -> tuple[Any, WgradStore]:
        store = WgradStore(every=True)
        with store if delayed else contextlib.nullcontext():
            found: Any = ()
            if outs and differentiable:
                found = torch.autograd.grad(outs, differentiable, dys, allow_unused=allow_unused or delayed, retain_graph=True)
        return found, store

    def both() -> None:
        outs = [t for t in tensors(forward()) if t.requires_grad]
        backward(outs, [torch.ones_like(t) for t in outs])[1].discard()

    slot.weights = []
    with torch.enable_grad():
        if warm:
            capturer.warm_up(both)
            c.parts = [Part(*found) for found in c.fn.named_modules()] if isinstance(c.fn, nn.Module) else []
        found = slot.capture("fwd", forward)
        outs = [t for t in tensors(found) if t.requires_grad]
        slot.dys, slot.held = [torch.ones_like(t) for t in outs], outs
        grads: Any = ()
        if outs and differentiable:
            grads, store = slot.capture("bwd", lambda: backward(outs, slot.dys), lambda result: tensors(list(result[0])))
            if delayed:
                with torch.no_grad():
                    slot.weights = slot.capture("wgrad", lambda: _weights(store), lambda pairs: [g for _, g in pairs])
                slot.held = outs, [one.pending for one in store.waiting]
                store.discard()
    by_id = {id(t): g for t, g in zip(differentiable, grads, strict=True)} if grads else {}
    slot.grads = [by_id.get(id(t)) for t in (*given, *params)]
    originals = {id(alias): p for p, alias in zip(c.params, params, strict=True)}
    slot.weights = [(originals[id(p)], gradient) for p, gradient in slot.weights]
    slot.out_tensors = [t.detach().requires_grad_(t.requires_grad) if t.requires_grad else t for t in tensors(found)]
    slot.results = {"fwd": with_leaves(found, _fill(leaves(found), slot.out_tensors))}  # without autograd's graph
    param_grads = slot.grads[len(given) :]
    slot.lent = Lease().hold([None] * len(c.params) if c.clone else param_grads)
    if c.outputs == "borrow":
        slot.graphs["fwd"].entry.lend(slot.out_tensors)
    if not c.clone and "bwd" in slot.graphs:
        slot.graphs["bwd"].entry.lend([g for g in param_grads if g is not None])
    for part in c.parts:
        part.check(c.where)  # a forward that puts other tensors in their places
    slot.leases["fwd"].hold(_read_by_backward(c, slot))
    return slot


def _read_by_backward(c: _Callable, slot: _CallSlot) -> dict[str, Any]:
    """The tensors that a backward may read, by name, and that no replay writes to."""
    found: dict[str, Any] = {"outputs": slot.out_tensors if c.outputs == "borrow" else []}
    if isinstance(c.fn, nn.Module):
        written = set(map(id, slot.written["fwd"]))
        for kind, own in (("parameters", c.fn.named_parameters()), ("buffers", c.fn.named_buffers())):
            found[kind] = {name: t for name, t in own if id(t) not in written}
    return found


def _opened(where: str, outputs: Any) -> tuple[Any, Any]:
    """The outputs, or, if they hold nodes that only torch's pytree knows (a ModelOutput), their leaves and what makes them again.
    Raises `TypeError` for outputs without a tensor."""
    form = None
    if any(list(map(id, torch_pytree.tree_leaves(leaf))) != [id(leaf)] for leaf in leaves(outputs)):
        outputs, form = torch_pytree.tree_flatten(outputs)
    if not tensors(outputs):
        fail(where, "the output", "a tensor or a tree with tensors", describe(outputs), TypeError)
    return outputs, form


def _standing_in(module: nn.Module, aliases: dict[int, Tensor]) -> dict[str, Tensor]:
    """The aliases by the names of their params, each module once, so that a shared module is swapped and restored once."""
    found = {}
    for path, part in module.named_modules():
        own = part.named_parameters(path, recurse=False, remove_duplicate=False)
        found.update({name: aliases[id(p)] for name, p in own if id(p) in aliases})
    return found


def _weights(store: WgradStore) -> list[tuple[Tensor, Tensor]]:
    """Every delayed weight gradient, summed by parameter."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for one in store.waiting:
        for p, gradient in zip(leaves(one.params), leaves(one.op.wgrad(one.pending, one.cfg)), strict=True):
            if gradient is not None and p.requires_grad:
                found[id(p)] = (p, gradient if id(p) not in found else found[id(p)][1] + gradient)
    return list(found.values())


def _fill(values: list[Any], given: Sequence[Tensor]) -> list[Any]:
    """The values with their tensors replaced by `given`, in order."""
    source = iter(given)
    return [next(source) if isinstance(value, Tensor) else value for value in values]


def _installed(c: _Callable, delayed: bool) -> Any:
    """The module with its forward replaced, as torch does, or a wrapper of the function."""
    if isinstance(c.fn, nn.Module):
        c.fn.forward = c
        if delayed:
            c.fn.backward_dw = _BackwardDw(c)  # type: ignore[assignment]
        return c.fn

    @functools.wraps(c.fn)
    def graphed(*args: Any, **kwargs: Any) -> Any:
        return c(*args, **kwargs)

    graphed.backward_dw = _BackwardDw(c)  # type: ignore[attr-defined]
    return graphed
