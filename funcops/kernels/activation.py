"""Elementwise activations and their derivatives. x, y, dy, dx: [*].

16-bit inputs compute in float32 and round once; only the derivatives of tanh and sigmoid read the rounded y, as autograd's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from funcops.backend import kernel, wide

_aten = torch.ops.aten
_QUICK = 1.702


class Activation(NamedTuple):
    """`forward(x, out=None)` gives y, and `backward(dy, x, y, out=None)` dx; y = f(x) is None unless `reads_y`.

    Without `out` the result is a fresh tensor; `out` may be dy itself.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    reads_y: bool = False


def _either(fresh: Any, into: Any, name: str) -> Callable[..., Tensor]:
    """An aten operator as one function: its fresh overload, or the one that writes to its argument `name`."""

    def call(*args: Any, out: Optional[Tensor] = None, **options: Any) -> Tensor:
        return fresh(*args, **options) if out is None else into(*args, **options, **{name: out})

    return call


def _into(value: Tensor, dtype: torch.dtype, out: Optional[Tensor]) -> Tensor:
    return value.to(dtype) if out is None else out.copy_(value)


def _squared_relu_backward(dy: Tensor, x: Tensor, y: Optional[Tensor], out: Optional[Tensor] = None) -> Tensor:
    return torch.mul(torch.relu(x).mul_(2), dy, out=out)


def _quick_gelu(x: Tensor, out: Optional[Tensor] = None) -> Tensor:
    """x sigmoid(c x) = silu(c x) / c."""
    return _into(_silu(x.to(wide(x.dtype)) * _QUICK).mul_(1 / _QUICK), x.dtype, out)


def _quick_gelu_backward(dy: Tensor, x: Tensor, y: Optional[Tensor], out: Optional[Tensor] = None) -> Tensor:
    """The derivative of silu(c x) / c is silu'(c x)."""
    dtype = wide(x.dtype)
    return _into(_silu_backward(dy.to(dtype), x.to(dtype) * _QUICK), x.dtype, out)


_silu: Any = torch._C._nn.silu  # as torch.nn.functional calls it; takes out=
_gelu: Any = torch._C._nn.gelu
_silu_backward = _either(_aten.silu_backward.default, _aten.silu_backward.grad_input, "grad_input")
_gelu_backward = _either(_aten.gelu_backward.default, _aten.gelu_backward.grad_input, "grad_input")
_relu_backward = _either(_aten.threshold_backward.default, _aten.threshold_backward.grad_input, "grad_input")
_tanh_backward = _either(_aten.tanh_backward.default, _aten.tanh_backward.grad_input, "grad_input")
_sigmoid_backward = _either(_aten.sigmoid_backward.default, _aten.sigmoid_backward.grad_input, "grad_input")


def _relu(x: Tensor, out: Optional[Tensor] = None) -> Tensor:
    return torch.relu(x) if out is None else torch.clamp_min(x, 0, out=out)


ACTIVATIONS = {
    "relu": Activation(_relu, lambda dy, x, y, out=None: _relu_backward(dy, x, 0, out=out)),
    "squared_relu": Activation(lambda x, out=None: _relu(x, out).square_(), _squared_relu_backward),
    "gelu": Activation(_gelu, lambda dy, x, y, out=None: _gelu_backward(dy, x, out=out)),
    "gelu_tanh": Activation(
        lambda x, out=None: _gelu(x, approximate="tanh", out=out),
        lambda dy, x, y, out=None: _gelu_backward(dy, x, approximate="tanh", out=out),
    ),
    "quick_gelu": Activation(_quick_gelu, _quick_gelu_backward),
    "silu": Activation(_silu, lambda dy, x, y, out=None: _silu_backward(dy, x, out=out)),
    "tanh": Activation(torch.tanh, lambda dy, x, y, out=None: _tanh_backward(dy, y, out=out), reads_y=True),
    "sigmoid": Activation(torch.sigmoid, lambda dy, x, y, out=None: _sigmoid_backward(dy, y, out=out), reads_y=True),
}


@kernel()
def activation_fwd(x: Tensor, kind: str) -> Tensor:
    """y = f(x)."""
    return ACTIVATIONS[kind].forward(x)


@kernel()
def activation_bwd(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """dx = dy * f'(x); f' is 0 where relu has its corner."""
    f = ACTIVATIONS[kind]
    return f.backward(dy, x, f.forward(x) if f.reads_y else None)
