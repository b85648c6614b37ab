"""Conditions on calls and tensors that several rules check."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.op import Op, raw_of
from funcops.engine.errors import FLOATS
from funcops.engine.program.lower import Call
from funcops.library.kernels.triton.gemm_table import choose
from funcops.library.ops.bias import bias, bias_kept
from funcops.library.ops.linear import LinearParams
from funcops.library.ops.linear_layer import LinearLayer


def alone(call: Call, op: Op) -> bool:
    """Whether the call is of this op, and takes and gives nothing but main."""
    return call.op is op and not call.takes and not call.gives


def joins(call: Call, op: Op) -> bool:
    """Whether the call is of this op, takes one extra and gives none."""
    return call.op is op and len(call.takes) == 1 and not call.gives


def layer(call: Call) -> LinearLayer | None:
    """How to run the call if it is a linear layer, of any variant, that takes and gives nothing but main; else None."""
    return None if call.takes or call.gives else call.op.layer


def readers_wait(call: Call) -> bool:
    """Whether y was not saved, and only weight gradients, which can come late, read it."""
    waits = [bool(one.needs) and not one.recomputed_in_dgrad and not one.source for one in call.readers]
    return len(waits) > 0 and all(waits)


def x_shape(call: Call, node: Any) -> torch.Size:
    """The shape of a linear layer's x on this rank, from its residuals."""
    own: Any = call.op.layer
    first, *rest = node.y_shape[:-1] or (None,)
    width = call.cfg.weight_shape[1]
    return torch.Size((width,) if first is None else (own.x_rows(first, call.cfg), *rest, width))


def dgrad(call: Call, node: Any, dy: Tensor, sums: Tensor | None = None) -> tuple[Tensor, Any]:
    """The dgrad of a linear layer, after the op's checks of the residuals; `sums`: dy summed over blocks of rows, if known."""
    return raw_of(call.op.dgrad)(node, dy, call.cfg, sums)  # type: ignore[no-any-return]


def by_library(family: str, dtype: torch.dtype, columns: int) -> bool:
    """Whether torch's kernel computes a product of many rows with such an epilogue, followed by one for the epilogue."""
    return choose(family, dtype, 1 << 20, columns, True).library


def alike(*given: Any) -> bool:
    """Whether all are tensors of one float dtype on one device that autograd would not record, as the calls themselves require."""
    first, recording = given[0], torch.is_grad_enabled()
    if not isinstance(first, Tensor) or first.dtype not in FLOATS or (recording and first.requires_grad):
        return False
    dtype, device = first.dtype, first.device
    for t in given[1:]:  # without a list: it is on the launch path
        if not isinstance(t, Tensor) or t.dtype is not dtype or t.device != device or (recording and t.requires_grad):
            return False
    return True


def is_key(key: Any, like: Tensor) -> bool:
    """Whether `key` is a random key on the device of `like`."""
    return isinstance(key, Tensor) and key.dtype is torch.int64 and key.shape == (2,) and key.device == like.device


def fits(call: Any, params: Any, x: Any) -> bool:
    """Whether a linear layer takes these inputs; if not, the call itself raises the error."""
    cfg = call.cfg
    if type(params) is not LinearParams or not isinstance(x, Tensor) or x.dim() < 1 + bool(cfg.sequence_parallel):
        return False
    given: list[Any] = [params.weight]
    shapes = [cfg.weight_shape]
    if (params.bias is not None) != cfg.bias or x.shape[-1] != cfg.weight_shape[1]:
        return False
    if cfg.bias:
        given, shapes = [*given, params.bias], [*shapes, cfg.bias_shape]
    if call.op.layer.dense:
        return alike(x, *given) and [t.shape for t in given] == shapes
    try:
        call.op.layer.check(params, x, cfg)
    except (ValueError, TypeError, RuntimeError):
        return False
    return alike(x, *[t for t in given if isinstance(t, Tensor)])


def adds(call: Call) -> bool:
    """Whether the call adds a bias by a kernel of its own: a bias, or a linear layer whose product takes none."""
    own = layer(call)
    return alone(call, bias) if own is None else own.bias_apart(call.cfg)


def before_bias(call: Call, params: Any, x: Any) -> Any:
    """For a call that `adds`: what it adds its bias to, and its residuals. NotImplemented for inputs that the call itself must
    refuse."""
    own, b = call.op.layer, params.bias
    if own is None:
        right = alike(x, b) and x.dim() > 0 and b.shape == x.shape[-1:] == (call.cfg.dim,)
        return (x, bias_kept(call.cfg, call.kept, x)) if right else NotImplemented
    if not fits(call, params, x):
        return NotImplemented
    return own.from_prepared(own.prepared(x, params, call.cfg, call.kept), LinearParams(params.weight, None), call.cfg, call.kept)
