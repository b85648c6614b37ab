"""`differentiable` under torch.compile: a node that a tracer can trace."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from funcops.adapters.autograd import delayed
from funcops.adapters.autograd.requires_grad import able, taken_apart
from funcops.adapters.flatten import flatten, gradients, unflatten
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.errors import FLOATS


class _Traced(NamedTuple):
    """A traced node's tensors, by kind: the guards, the leaves, the outputs and the other kept tensors, in this order."""

    op: Op
    cfg: Any
    params_shape: Any
    x_shape: Any
    y_shape: Any
    residuals: Any  # their shape
    kept: list[int]  # the numbers of the residuals' tensors
    guards: int
    leaves: int
    outputs: int


class _TracedNode(Function):
    """The backward of an op, as a node. The forward has run before it: Dynamo does not keep a value that a node writes in place."""

    @staticmethod
    def forward(ctx: Any, call: _Traced, *given: Any) -> Any:
        first = call.guards + call.leaves
        # Copies, which a compiler removes: a program may write to an output, but not to a tensor that the node keeps.
        outputs = [t.clone() for t in given[first : first + call.outputs]]
        ctx.call, ctx.able, ctx.others = call, [able(t) for t in outputs], len(given) - first
        ctx.save_for_backward(*[given[i] for i in call.kept])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[t for t in outputs if not able(t)])
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Any) -> Any:
        call = ctx.call
        dparams = dx = None
        dys = tuple([d if ok else None for d, ok in zip(dys, ctx.able, strict=False)])  # a compiler passes zeros for the others
        if any([d is not None for d in dys]):
            dy = unflatten(call.y_shape, dys)
            dparams, dx = call.op.bwd(unflatten(call.residuals, ctx.saved_tensors), dy, call.cfg)
        found = gradients(call.x_shape, dx, gradients(call.params_shape, dparams, []))
        return None, *[None] * call.guards, *found, *[None] * ctx.others


def run_traced(op: Op, params: Any, x: Any, cfg: Any) -> Any:
    """`differentiable(op)(params, x, cfg)` while torch.compile traces."""
    params_shape, x_shape, leaves, needs = taken_apart(params, x)
    if not torch.is_grad_enabled() or not any([t.requires_grad for t in leaves]):
        return op.fwd(params, x, cfg, needs=Needs.NONE)[0]
    delayed.traced()
    _floats_as_constants(True)
    with torch.no_grad():
        y, residuals = op.fwd(params, x, cfg, needs=needs)
    kept: list[Tensor] = []
    outputs: list[Tensor] = []
    shape, y_shape = flatten(residuals, kept), flatten(y, outputs)
    guards = _guards(leaves, kept)
    given = list(guards)
    for t in [*leaves, *outputs]:
        # Dynamo gives a node no tensor twice: a leaf that is another one, or an output, goes in as a copy.
        given.append(t.clone() if any([t is seen for seen in given]) else t)
    for t in kept:
        if not any([t is seen for seen in given]):
            given.append(t)
    numbers = [next(i for i, seen in enumerate(given) if seen is t) for t in kept]
    call = _Traced(op, cfg, params_shape, x_shape, y_shape, shape, numbers, len(guards), len(leaves), len(outputs))
    found = _TracedNode.apply(call, *given)
    _floats_as_constants(False)
    return unflatten(y_shape, found)


def _guards(leaves: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    """Empty inputs of a node, made by torch's own product, which keeps a view of each leaf that the node keeps. They bring back
    autograd's guard against writes, which a traced node does not have: it hands over what it keeps as plain values."""
    asked = next(_empty(t) for t in leaves if t.requires_grad)
    return [asked * _empty(t) for t in leaves if any([t is k for k in kept])]


def _empty(t: Tensor) -> Tensor:
    """An empty view of t, in a dtype that has products: it counts the writes to t."""
    view = t[None][:0].view(0)
    return view if t.dtype in FLOATS or not t.is_floating_point() else view.view(torch.uint8)


_before: list[bool] = []  # the tracer's setting for floats, saved while a node is traced


def _floats_as_constants(on: bool) -> bool:
    """Make the tracer treat the floats of configs as constants, or restore its setting. With `dynamic=True` they are symbols, and a
    symbol that the tracer first meets in one node is missing in the next (torch 2.13: "lift_tracked_freevar_to_input"). After an
    error in a node they stay constants until the next node."""
    config: Any = sys.modules["torch._dynamo.config"]
    if on and not _before:
        _before.append(config.specialize_float)
    config.specialize_float = on or (_before.pop() if _before else config.specialize_float)
    return on


# Makes the tracer run it, as `torch.compiler.assume_constant_result` would, which imports the compiler.
_floats_as_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]
