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
FEW = 1 << 14  # elements
SATURATED = 1e4  # from here on exp(-|x|) is 0 in every dtype, and x^3 no infinity in any that is wide


class Activation(NamedTuple):
    """`forward(x)` gives y, and `backward(dy, x, y)` dx, both fresh tensors; y = f(x) is None unless `reads_y`."""

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    reads_y: bool = False


def _squared_relu_backward(dy: Tensor, x: Tensor, y: Optional[Tensor]) -> Tensor:
    return torch.relu(x).mul_(2) * dy


def _quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(c x): where c x overflows, x does not."""
    t = x.to(wide(x.dtype))
    return (t * _QUICK).sigmoid_().mul_(t).to(x.dtype)


def _quick_gelu_backward(dy: Tensor, x: Tensor, y: Optional[Tensor]) -> Tensor:
    """The derivative of silu(c x) / c is silu'(c x)."""
    dtype = wide(x.dtype)
    return _silu_backward(dy.to(dtype), saturated_(x.to(dtype) * _QUICK)).to(x.dtype)


def _gelu_tanh_backward(dy: Tensor, x: Tensor, y: Optional[Tensor]) -> Tensor:
    """torch's derivative is 0 times infinity where x^2 overflows."""
    if x.dtype is not torch.float16:
        x = x.clamp(-SATURATED, SATURATED)
    return _gelu_backward(dy, x, approximate="tanh")


def _few(x: Tensor) -> bool:
    """Whether oneDNN, which torch asks for the erf of contiguous tensors, takes longer to begin than torch's own loop takes in all:
    that gets a transposed view, which is not contiguous but as dense."""
    return x.is_cpu and x.dim() > 1 and x.numel() < FEW


def _gelu_erf(x: Tensor) -> Tensor:
    return _gelu(x.mT).mT if _few(x) else _gelu(x)


def _gelu_erf_backward(dy: Tensor, x: Tensor, y: Optional[Tensor]) -> Tensor:
    return _gelu_backward(dy.mT, x.mT).mT if _few(x) else _gelu_backward(dy, x)


def saturated_(t: Tensor) -> Tensor:
    """t, which is written to, within the range beyond which the derivatives of sigmoids do not change."""
    return t.clamp_(-SATURATED, SATURATED)


_silu: Any = torch._C._nn.silu  # as torch.nn.functional calls it
_gelu: Any = torch.nn.functional.gelu
_silu_backward, _gelu_backward = _aten.silu_backward.default, _aten.gelu_backward.default
_relu_backward = _aten.threshold_backward.default
_tanh_backward, _sigmoid_backward = _aten.tanh_backward.default, _aten.sigmoid_backward.default

ACTIVATIONS = {
    "relu": Activation(torch.relu, lambda dy, x, y: _relu_backward(dy, x, 0)),
    "squared_relu": Activation(lambda x: torch.relu(x).square_(), _squared_relu_backward),
    "gelu": Activation(_gelu_erf, _gelu_erf_backward),
    "gelu_tanh": Activation(lambda x: _gelu(x, approximate="tanh"), _gelu_tanh_backward),
    "quick_gelu": Activation(_quick_gelu, _quick_gelu_backward),
    "silu": Activation(_silu, lambda dy, x, y: _silu_backward(dy, x)),
    "tanh": Activation(torch.tanh, lambda dy, x, y: _tanh_backward(dy, y), reads_y=True),
    "sigmoid": Activation(torch.sigmoid, lambda dy, x, y: _sigmoid_backward(dy, y), reads_y=True),
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
