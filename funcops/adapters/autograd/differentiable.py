"""`differentiable(op)`: an op as a function that autograd can differentiate, with one node, whose residuals autograd keeps.

The needs of a backward are read from `requires_grad`: a frozen weight keeps no input, an x that requires no gradient computes no
dgrad. If no gradient is requested (`no_grad`, `inference_mode`, no leaf requires one), no node is made and nothing is kept.

A value between two nodes is kept, never recomputed: a program may have written to it where no version counts the write (`h.data`,
NumPy). Inside a chain no such program runs, so a chain recomputes (`program/`).
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from funcops.adapters.autocast import any_autocast, without_autocast
from funcops.adapters.autograd import delayed, transforms
from funcops.adapters.autograd.first_order import Reads, anchor, first_order
from funcops.adapters.autograd.outputs import owned
from funcops.adapters.autograd.requires_grad import able, taken_apart
from funcops.adapters.autograd.saved_tensors import gradient_writer, slots_of
from funcops.adapters.autograd.traced import run_traced
from funcops.adapters.flatten import flatten, unflatten
from funcops.engine.backend import select
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, raw_of, refuse_autocast
from funcops.engine.contract.schema import Donated
from funcops.engine.contract.signatures import C, HasFwd, P, R, Run, X, Y
from funcops.engine.errors import fail, require_type
from funcops.engine.residuals.report import kept_values
from funcops.engine.trees import structure, tensors

_ddp: Any = DistributedDataParallel


class Bound:
    """An op with its config and needs, and the functions generated for it, which read its residuals and gradients."""

    __slots__ = (
        "bwd",
        "cfg",
        "choice",
        "empty",
        "fill",
        "frees",
        "fwd",
        "kind",
        "needs",
        "op",
        "reads",
        "slots",
        "write",
        "y_shape",
    )
    fill: Any  # from `slots`
    empty: Any
    fwd: Any  # the op's; after it has checked params of this kind, the function behind its checks
    bwd: Any  # the function behind the op's checks, if that is one function: its residuals come from our own forward
    kind: Any
    frees: bool  # whether memory falls within its backward: the op may be a whole model, which is one node

    def __init__(self, op: Op, cfg: Any, needs: Needs, params_shape: Any, x_shape: Any) -> None:
        self.op, self.cfg, self.needs = op, cfg, needs
        self.write = gradient_writer(params_shape, x_shape, bool(needs.x))
        self.choice = None if select.choice() == select.DEFAULT else select.choice()
        self.fwd, self.kind, self.bwd, self.frees = op.fwd, None, op.bwd, getattr(op.fwd, "any_tree", False)
        self.slots: Any = None  # made from the first residuals; False if they do not fit
        self.y_shape: Any = None  # None for a tensor
        self.reads: Any = None  # the `Reads` of the first call

    def made(self, params: Any, leaves: Any, y: Any, residuals: Any) -> Any:
        """Fix, after the first forward, what is the same for all later ones; return the slots."""
        self.reads = Reads.of(leaves, params, y, residuals)
        slots: Any = slots_of(residuals) or False
        if slots:
            self.fill, self.empty = slots.fill, slots.empty
            self.fwd, self.kind = raw_of(self.op.fwd) or self.op.fwd, type(params)
            raw = raw_of(self.op.bwd)
            self.bwd = raw if callable(raw) else self.op.bwd
        self.slots = slots
        return slots


class _Node(Function):
    """`trees` is (params, x); its leaves follow as arguments, so that autograd sees them."""

    @staticmethod
    def forward(ctx: Any, bound: Bound, trees: Any, *leaves: Any) -> Any:
        op, (params, x) = bound.op, trees
        y, residuals = (bound.fwd if type(params) is bound.kind else op.fwd)(params, x, bound.cfg, needs=bound.needs)
        slots: Any = bound.slots
        if slots is None:
            slots = bound.made(params, leaves, y, residuals)
        single = isinstance(y, Tensor)
        outputs: list[Any] = [y] if single else []
        bound.y_shape = shape = None if single else flatten(y, outputs)
        views = y._is_view() if single else any([t._is_view() for t in outputs])
        own = (anchor(y),) if bound.reads.anchored else ()
        if slots:
            found = slots.take(residuals)
            if views:
                found = owned(outputs, found, leaves)
            try:
                ctx.save_for_backward(*found, *own)
            except TypeError:  # a policy packs a field that it left unpacked in the first call
                slots.fill(residuals, found)
                slots = False
        if not slots:
            kept: list[Tensor] = []
            residuals, own = flatten(residuals, kept), (anchor(y),)
            ctx.save_for_backward(*(owned(outputs, kept, leaves) if views else kept), *own)
        if _ddp._active_ddp_module is not None:
            ctx.synced = delayed.synced()
        ctx.call = bound, params, residuals, bool(slots), shape
        if single and not own:
            return outputs[0]
        ctx.set_materialize_grads(False)
        if not single:
            ctx.mark_non_differentiable(*[t for t in outputs if not able(t)])
        return (*outputs, *own)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        bound = ctx.call[0]
        choice = bound.choice
        if choice is None and not any_autocast() and not _grad_enabled():
            return _backward(ctx, list(ctx.saved_tensors) if bound.frees else ctx.saved_tensors, *dys)
        with contextlib.ExitStack() as stack:
            if choice is not None:  # autograd's threads for devices have their own contexts
                stack.enter_context(select.chosen(choice))
            if any_autocast():  # the forward ran without it
                stack.enter_context(without_autocast(dys))
            return _once(ctx, *dys) if _grad_enabled() else _backward(ctx, ctx.saved_tensors, *dys)


def _backward(ctx: Any, saved: Any, *dys: Any) -> Any:
    global _calls
    _calls += 1
    bound, params, residuals, slotted, y_shape = ctx.call
    if y_shape is None:
        dy = dys[0]
    elif any([d is not None for d in dys]):
        dy = unflatten(y_shape, dys)
    else:
        return (None,) * len(ctx.needs_input_grad)
    op, store = bound.op, delayed._current
    if slotted:
        bound.fill(residuals, saved)
    else:
        residuals = unflatten(residuals, saved)
    given = type(saved) is list and not _graph_is_kept()
    if given:
        saved.clear()  # the caller holds the list
        ctx.maybe_clear_saved_tensors()
        residuals = Donated(residuals)
    del saved
    try:
        if store is None:
            dparams, dx = (bound.bwd if slotted and dy is not None and not given else op.bwd)(residuals, dy, bound.cfg)
        else:
            dx, pending = op.dgrad(residuals, dy, bound.cfg)
            dparams = delayed.put(store, op, bound.cfg, pending, params, getattr(ctx, "synced", False))
    except (NotImplementedError, RuntimeError) as error:
        transforms.refuse_batches(op, dys, error)
        raise
    finally:
        if slotted and not given:
            bound.empty(residuals)
    return bound.write(dparams, dx)


_calls = 0


@contextlib.contextmanager
def backward_calls() -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many backwards of ops autograd has run since the block began."""
    before = _calls
    yield lambda: _calls - before


def kept_by(node: Any, saved: Sequence[Tensor]) -> list[tuple[str, str]] | None:
    """The path and the readers of each tensor that a node of ours has saved, as `report` shows them; for its output, "y" and "".
    None for another node."""
    call = getattr(node, "call", None)
    if type(call) is not tuple or type(call[0]) is not Bound:
        return None
    bound, _, residuals, slotted, _ = call
    if slotted:
        bound.fill(residuals, saved)
    else:
        residuals = unflatten(residuals, saved)
    found: dict[int, list[tuple[str, str]]] = {}
    for path, value, phases in kept_values(residuals):
        for t in tensors(value):
            found.setdefault(id(t), []).append((path, phases))
    if slotted:
        bound.empty(residuals)
    return [found[id(t)].pop(0) if found.get(id(t)) else ("y", "") for t in saved]


def _once(ctx: Any, *dys: Any) -> Any:
    """The backward under `create_graph=True`."""
    bound, params = ctx.call[:2]
    op, saved = bound.op, ctx.saved_tensors  # read once: unpacking a second time may recompute
    if delayed._current is not None:
        fail(f"{op.name}_bwd", "a backward inside delayed_wgrad", "without create_graph", "create_graph=True", RuntimeError)
    with torch.no_grad():
        found = _backward(ctx, saved, *dys)
    sources = [*dys, *saved, *(tensors(params) if bound.reads.params else ())]
    return first_order(f"{op.name}_bwd", ctx, found, sources, bound.reads.leaves)


_apply = super(Function, _Node).apply  # skips Function.apply's search for functorch's wrappers, which `run` has refused


_graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph  # type: ignore[attr-defined]
_forward_ad: Any = torch.autograd.forward_ad
_transforms = torch._C._functorch.maybe_current_level
_jit_tracing = torch._C._get_tracing_state
_compiling, _grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_requires_grad = operator.attrgetter("requires_grad")
_bound: dict[Any, Bound] = {}


def run(op: Op, params: Any, x: Any, cfg: Any, leaves: Any = None, bounds: Any = None) -> Any:
    """`differentiable(op)(params, x, cfg)`. `leaves`: the tensors of params and x, in their trees' order, if the caller has them.
    `bounds`: the caller's own dict, a faster cache for calls of this op and config."""
    if any_autocast():
        refuse_autocast(op.name, params, x)
    if _transforms() is not None:  # torch.compile would silently drop the backward of a node
        transforms.refuse_transforms(op)
    if _compiling():
        return run_traced(op, params, x, cfg)
    if leaves is None:
        leaves = tensors((params, x))
    if _forward_ad._current_level >= 0:
        transforms.refuse_tangents(op, leaves)
    if not _grad_enabled():
        return op.fwd(params, x, cfg, needs=Needs.NONE)[0]
    asked = tuple(map(_requires_grad, leaves))
    if True not in asked:
        return op.fwd(params, x, cfg, needs=Needs.NONE)[0]
    if _jit_tracing() is not None:
        fail(op.name, "torch.jit.trace", "around calls under torch.no_grad()", "a call that requires a gradient", RuntimeError)
    bound = None if bounds is None or select.chosen_anywhere else bounds.get(asked)
    if bound is None:
        key: Any = (op.fwd, cfg, asked)
        if select.chosen_anywhere:
            key = (*key, select.choice())
        bound = _bound.get(key) or _bind(op, params, x, cfg, key)
        if bounds is not None and not select.chosen_anywhere:
            bounds[asked] = bound
    found = _apply(bound, (params, x), *leaves)
    if type(found) is tuple:
        return found[0] if bound.y_shape is None else unflatten(bound.y_shape, found)
    return found


def _bind(op: Op, params: Any, x: Any, cfg: Any, key: Any) -> Bound:
    found = _bound
    if getattr(op.fwd, "any_tree", False):  # cfg does not determine the structure
        key, found = (*key, structure((params, x)), repr(cfg)), vars(op.fwd).setdefault("bound", {})  # as the op may be dropped
    if key not in found:
        params_shape, x_shape, _, needs = taken_apart(params, x)
        found[key] = Bound(op, cfg, needs, params_shape, x_shape)
    return found[key]


def differentiable(op: HasFwd[P, X, C, Y, R]) -> Run[P, X, C, Y]:
    """Return `run(params, x, cfg) -> y`: the op's forward, which autograd differentiates by the op's own backward.

    params and x are trees of tensors as the op takes them. Gradients flow to the leaves that require them. A graph may be retained
    and run backward again, but not differentiated twice: that raises `RuntimeError`. So does a call under `torch.autocast` (an op
    runs in its inputs' dtype, without implicit casts), inside a `torch.func` transform, or with a leaf that has a tangent
    (`torch.autograd.forward_ad`) if a leaf requires grad or Triton's kernels run.

    >>> import torch
    >>> from funcops import ScaleConfig, differentiable, scale
    >>> x = torch.ones(2, requires_grad=True)
    >>> y = differentiable(scale)(None, x, ScaleConfig(3.0))
    >>> y.sum().backward()
    >>> x.grad
    tensor([3., 3.])
    """
    require_type("differentiable", "op", op, Op)
    return functools.partial(run, cast(Op, op))
