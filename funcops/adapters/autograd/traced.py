"""`differentiable` under torch.compile: a node that a tracer can trace."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from funcops.adapters.autograd import delayed
from funcops.adapters.autograd.requires_grad import able, taken_apart
from funcops.adapters.flatten import flatten, gradients, unflatten
from funcops.contract.needs import Needs
from funcops.contract.op import Op

# Before torch 2.13, the tracer returns every tensor that a node writes in place as an additional output. If the node also returns
# that tensor, its gradient goes to the additional output, and the node gets zeros. A copy avoids this, and a compiler removes it.
_RETURNS_WRITES = torch.__version__ < "2.13"


class _TracedNode(Function):
    """A node that rebuilds its trees from the leaves. Kept tensors are returned as additional outputs, because Dynamo does not keep
    an intermediate value that was written in place."""

    @staticmethod
    def forward(ctx: Any, call: Any, shapes: list[Any], *leaves: Any) -> Any:
        op, cfg, params_shape, x_shape, needs = call
        y, residuals = op.fwd(unflatten(params_shape, leaves), unflatten(x_shape, leaves), cfg, needs=needs)
        kept: list[Tensor] = []
        ctx.call, ctx.residuals = call, flatten(residuals, kept)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        outputs: list[Tensor] = []
        ctx.y_shape = flatten(y, outputs)
        if _RETURNS_WRITES:
            outputs = [t.clone() for t in outputs]
        shapes.append(ctx.y_shape)
        new: list[Tensor] = []
        for t in kept:
            if not any([t is seen for seen in (*leaves, *outputs, *new)]):
                new.append(t)
        ctx.able = [able(t) for t in outputs]
        ctx.mark_non_differentiable(*[t for t in outputs if not able(t)], *new)
        return (*outputs, *new)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Any) -> Any:
        op, cfg, params_shape, x_shape, _ = ctx.call
        dparams = dx = None
        dys = tuple([d if ok else None for d, ok in zip(dys, ctx.able, strict=False)])  # a compiler passes zeros for the others
        if any([d is not None for d in dys]):
            dy = unflatten(ctx.y_shape, dys)
            dparams, dx = op.bwd(unflatten(ctx.residuals, ctx.saved_tensors), dy, cfg)
        return None, None, *gradients(x_shape, dx, gradients(params_shape, dparams, []))


def run_traced(op: Op, params: Any, x: Any, cfg: Any) -> Any:
    """`differentiable(op)(params, x, cfg)` while torch.compile traces."""
    params_shape, x_shape, leaves, needs = taken_apart(params, x)
    if not torch.is_grad_enabled() or not any([t.requires_grad for t in leaves]):
        return op.fwd(params, x, cfg, needs=Needs.NONE)[0]
    delayed.traced()
    shapes: list[Any] = []
    _floats_as_constants(True)
    found = _TracedNode.apply((op, cfg, params_shape, x_shape, needs), shapes, *leaves)
    _floats_as_constants(False)
    return unflatten(shapes[0], found)


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
