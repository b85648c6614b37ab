"""`differentiable(op)`: an op as a function that autograd can differentiate: one node, whose residuals autograd keeps.

What a backward needs is read off `requires_grad`: a frozen weight keeps no input, an x without gradient computes no dgrad. Where no
gradient is asked for (`no_grad`, `inference_mode`, nothing requires one) there is no node, and nothing is kept.

As in a chain, the output of a cheap op (a norm, an activation, a GLU) is computed again rather than kept,
where it goes straight into another op and is not small.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from funcops.adapters import delayed
from funcops.adapters.autocast import any_autocast, without_autocast
from funcops.adapters.first_order import first_order
from funcops.adapters.hollow import gradients, holes, hollow, refill
from funcops.adapters.slots import gradient_writer, slots_of
from funcops.backend import select
from funcops.errors import fail, require_type
from funcops.marks import version
from funcops.needs import Needs
from funcops.op import Op, refuse_autocast
from funcops.program.rules import FEW
from funcops.trees import structure, tensors

_ddp: Any = DistributedDataParallel


class Bound:
    """An op with its config and needs, and what was written for it: the readers of its residuals and gradients."""

    __slots__ = ("cfg", "choice", "empty", "fill", "needs", "op", "slots", "write", "y_shape")
    fill: Any  # those of `slots`
    empty: Any

    def __init__(self, op: Op, cfg: Any, needs: Needs, params_shape: Any, x_shape: Any) -> None:
        self.op, self.cfg, self.needs = op, cfg, needs
        self.write = gradient_writer(params_shape, x_shape)
        self.choice = None if select.choice() == select.DEFAULT else select.choice()
        self.slots: Any = None  # made of the first residuals; False where those cannot be had so
        self.y_shape: Any = None  # None for a tensor


class _Node(Function):
    """`trees` is (params, x), whose leaves follow, so that autograd sees them."""

    @staticmethod
    def forward(ctx: Any, bound: Bound, trees: Any, *leaves: Any) -> Any:
        y, residuals = bound.op.fwd(trees[0], trees[1], bound.cfg, needs=bound.needs)
        slots: Any = bound.slots
        if slots is None:
            slots = bound.slots = slots_of(residuals) or False
            if slots:
                bound.fill, bound.empty = slots.fill, slots.empty
        again = None
        if slots:
            found = slots.take(residuals)
            if type(trees[1]) is Tensor and trees[1].numel() >= FEW and trees[1] in _again:
                found, again = _left_out(trees[1], found)
            try:
                ctx.save_for_backward(*found)
            except TypeError:  # a policy packs what it left alone in the first call
                slots.fill(residuals, found)
                slots, again = False, None
        if not slots:
            kept: list[Tensor] = []
            residuals = hollow(residuals, kept)
            ctx.save_for_backward(*kept)
        if _ddp._active_ddp_module is not None:
            ctx.synced = delayed.synced()
        if isinstance(y, Tensor):
            bound.y_shape = None
            ctx.call = bound, trees[0], residuals, bool(slots), again, None
            return y
        outputs: list[Tensor] = []
        bound.y_shape = shape = hollow(y, outputs)
        ctx.call = bound, trees[0], residuals, bool(slots), again, shape
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in outputs if not _able(t)])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        backward_of: Any = _once if torch.is_grad_enabled() else _backward
        if ctx.call[0].choice is not None:  # autograd's threads for devices have contexts of their own
            backward_of = functools.partial(_chosen, ctx.call[0].choice, backward_of)
        if not any_autocast():
            return backward_of(ctx, *dys)
        with without_autocast(dys):  # the forward had none
            return backward_of(ctx, *dys)


def _chosen(choice: Any, backward_of: Any, *args: Any) -> Any:
    with select.chosen(choice):
        return backward_of(*args)


def _backward(ctx: Any, *dys: Any) -> Any:
    global _calls
    _calls += 1
    bound, params, residuals, slotted, again, y_shape = ctx.call
    if y_shape is None:
        dy = dys[0]
    elif any([d is not None for d in dys]):
        dy = refill(y_shape, dys)
    else:
        return (None,) * len(ctx.needs_input_grad)
    op, store = bound.op, delayed._current
    if slotted:
        bound.fill(residuals, ctx.saved_tensors if again is None else _with_again(again, ctx.saved_tensors))
    else:
        residuals = refill(residuals, ctx.saved_tensors)
    try:
        if store is None:
            dparams, dx = op.bwd(residuals, dy, bound.cfg)
        else:
            dx, pending = op.dgrad(residuals, dy, bound.cfg)
            dparams = delayed.put(store, op, bound.cfg, pending, params, getattr(ctx, "synced", False))
    finally:
        if slotted:
            bound.empty(residuals)
    return bound.write(dparams, dx)


class Again(NamedTuple):
    """How the output of a cheap op is computed again, for the node that would keep it."""

    op: Op
    cfg: Any
    shape: Any  # of (params, x)
    leaves: list[Tensor]
    version: Any  # of the output


_again: Any = WeakTensorKeyDictionary()  # by that output, while it lives


def _left_out(x: Tensor, found: tuple[Any, ...]) -> tuple[tuple[Any, ...], Any]:
    """What a node keeps without x, the output of a cheap op, and with what that op read, which is kept anyway."""
    again: Again = _again[x]
    places = [i for i, t in enumerate(found) if t is x]
    if not places or again.version != version(x):
        return found, None
    kept = [None if t is x else t for t in found]
    return (*kept, *again.leaves), (again._replace(leaves=[]), places, len(kept))


def _with_again(left_out: Any, saved: tuple[Any, ...]) -> list[Any]:
    """What a node kept, with x computed again."""
    again, places, count = left_out
    params, x = refill(again.shape, saved[count:])
    value = again.op.fwd(params, x, again.cfg, needs=Needs.NONE)[0]
    filled = list(saved[:count])
    for i in places:
        filled[i] = value
    return filled


_calls = 0


@contextmanager
def backward_calls() -> Iterator[Callable[[], int]]:
    """Inside the block, the function that it gives says how many backwards of ops autograd has run since the block began."""
    before = _calls
    yield lambda: _calls - before


def _once(ctx: Any, *dys: Any) -> Any:
    """The backward under `create_graph=True`."""
    op = ctx.call[0].op
    if delayed._current is not None:
        fail(f"{op.name}_bwd", "a backward inside delayed_wgrad", "without create_graph", "create_graph=True", RuntimeError)
    with torch.no_grad():
        found = _backward(ctx, *dys)
    return first_order(f"{op.name}_bwd", found)


_apply = super(Function, _Node).apply  # Function.apply after its search for functorch's wrappers, which `run` has refused


class _TracedNode(Function):
    """As `_Node`, for torch.compile: trees are rebuilt of the leaves, so that a tracer can follow. What is kept is given as further
    outputs: dynamo keeps no intermediate value that a write in place has made."""

    @staticmethod
    def forward(ctx: Any, call: Any, shapes: list[Any], *leaves: Any) -> Any:
        op, cfg, params_shape, x_shape, needs = call
        y, residuals = op.fwd(refill(params_shape, leaves), refill(x_shape, leaves), cfg, needs=needs)
        kept: list[Tensor] = []
        ctx.call, ctx.residuals = call, hollow(residuals, kept)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        outputs: list[Tensor] = []
        ctx.y_shape = hollow(y, outputs)
        shapes.append(ctx.y_shape)
        new: list[Tensor] = []
        for t in kept:
            if not any([t is seen for seen in (*leaves, *outputs, *new)]):
                new.append(t)
        ctx.mark_non_differentiable(*[t for t in outputs if not _able(t)], *new)
        return (*outputs, *new)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Any) -> Any:
        op, cfg, params_shape, x_shape, _ = ctx.call
        dparams = dx = None
        if any([d is not None for d in dys]):
            dy = refill(ctx.y_shape, dys)
            dparams, dx = op.bwd(refill(ctx.residuals, ctx.saved_tensors), dy, cfg)
        return None, None, *gradients(x_shape, dx, gradients(params_shape, dparams, []))


_transforms = torch._C._functorch.maybe_current_level
_jit_tracing = torch._C._get_tracing_state
_compiling, _grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_bound: dict[Any, Bound] = {}


def run(op: Op, params: Any, x: Any, cfg: Any, leaves: Any = None) -> Any:
    """`differentiable(op)(params, x, cfg)`. `leaves`: the tensors of params and x, in their trees' order, where the caller has
    them."""
    if any_autocast():
        refuse_autocast(op.name, params, x)
    if _transforms() is not None:  # torch.compile would drop the backward of a node in silence
        _refuse_transforms(op)
    if _compiling():
        return _traced(op, params, x, cfg)
    if leaves is None:
        leaves = tensors((params, x))
    if not _grad_enabled():
        return op.fwd(params, x, cfg, needs=Needs.NONE)[0]
    asked = tuple([t.requires_grad for t in leaves])
    if True not in asked:
        return op.fwd(params, x, cfg, needs=Needs.NONE)[0]
    if _jit_tracing() is not None:
        fail(op.name, "torch.jit.trace", "around calls under torch.no_grad()", "one that asks for a gradient", RuntimeError)
    key: Any = (op.fwd, cfg, asked)
    if select.chosen_anywhere:
        key = (*key, select.choice())
    bound = _bound.get(key)
    if bound is None:
        bound = _bind(op, params, x, cfg, key)
    found = _apply(bound, (params, x), *leaves)
    if bound.y_shape is not None:
        return refill(bound.y_shape, found)
    if op.cheap and found.numel() >= FEW:
        given: list[Tensor] = []
        _again[found] = Again(op, cfg, hollow((params, x), given), given, version(found))
    return found


def _bind(op: Op, params: Any, x: Any, cfg: Any, key: Any) -> Bound:
    if getattr(op.fwd, "any_tree", False):  # cfg does not tell the structure
        key = *key, structure((params, x)), repr(cfg)
    if key not in _bound:
        params_shape, x_shape, _, needs = _taken_apart(params, x)
        _bound[key] = Bound(op, cfg, needs, params_shape, x_shape)
    return _bound[key]


def _taken_apart(params: Any, x: Any) -> tuple[Any, Any, list[Tensor], Needs]:
    leaves: list[Tensor] = []
    params_shape = hollow(params, leaves)
    count = len(leaves)
    x_shape = hollow(x, leaves)
    needs = Needs(x=_asked(x_shape, leaves[count:], count), params=_asked(params_shape, leaves[:count], 0))
    return params_shape, x_shape, leaves, needs


def _traced(op: Op, params: Any, x: Any, cfg: Any) -> Any:
    params_shape, x_shape, leaves, needs = _taken_apart(params, x)
    if not torch.is_grad_enabled() or not any([t.requires_grad for t in leaves]):
        return op.fwd(params, x, cfg, needs=Needs.NONE)[0]
    delayed.traced()
    shapes: list[Any] = []
    found = _TracedNode.apply((op, cfg, params_shape, x_shape, needs), shapes, *leaves)
    return refill(shapes[0], found)


def differentiable(op: Op) -> Callable[[Any, Any, Any], Any]:
    """`run(params, x, cfg) -> y`: the op's forward, which autograd differentiates through the op's own backward.

    params and x are trees of tensors as the op takes them. Gradients flow to the leaves that require them. A graph may be kept and
    run backward again, but not differentiated twice: that raises `RuntimeError`. So does a call under `torch.autocast` (an op's
    dtype is that of its inputs, and nothing is cast in silence) or inside a `torch.func` transform.
    """
    require_type("differentiable", "op", op, Op)
    return functools.partial(run, op)


def _refuse_transforms(op: Op) -> None:
    raise RuntimeError(
        f"{op.name}: must run outside of torch.func transforms (grad, vjp, vmap), got one around it. Use funcops.value_and_grad or "
        "funcops.vjp, which need no autograd, or torch.autograd.grad"
    )


def _able(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _asked(shape: Any, leaves: list[Tensor], first: int) -> Any:
    """A mask for `Needs`: which of the leaves require a gradient."""
    asked = [t.requires_grad for t in leaves if _able(t)]
    if all(asked):
        return bool(asked)
    return [path for i, path in holes(shape, "") if leaves[i - first].requires_grad] if any(asked) else False
