"""Elementwise activations and their derivatives. x, y, dy, dx: [*].

16-bit inputs compute in float32 and round once; only the derivatives of tanh and sigmoid read the rounded y, as in autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide

_aten = torch.ops.aten
is_compiling = torch.compiler.is_compiling
_QUICK = 1.702
FEW_FOR_ONEDNN = 1 << 14  # elements
SATURATED = 1e4  # beyond it exp(-|x|) is 0 in every dtype; its cube is finite in every wide dtype


class Activation(NamedTuple):
    """`forward(x)` returns y, and `backward(dy, x, y)` dx, both new tensors; `backward` gets y = f(x) if `reads_y`, else None."""

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    reads_y: bool = False


def _squared_relu_backward(dy: Tensor, x: Tensor, y: Optional[Tensor]) -> Tensor:
    return torch.relu(x).mul_(2) * dy


def _quick_gelu(x: Tensor) -> Tensor:
    """x sigmoid(c x). Not silu(c x) / c: c x can overflow where x does not."""
    t = x.to(wide(x.dtype))
    return (t * _QUICK).sigmoid_().mul_(t).to(x.dtype)


def _quick_gelu_backward(dy: Tensor, x: Tensor, y: Optional[Tensor]) -> Tensor:
    """The derivative of silu(c x) / c is silu'(c x)."""
    dtype = wide(x.dtype)
    return _silu_backward(dy.to(dtype), saturated_(x.to(dtype) * _QUICK)).to(x.dtype)


def _gelu_tanh_backward(dy: Tensor, x: Tensor, y: Optional[Tensor]) -> Tensor:
    """Clamp x, as torch's derivative is 0 times infinity where x^2 overflows."""
    if x.dtype is not torch.float16:
        x = x.clamp(-SATURATED, SATURATED)
    return _gelu_backward(dy, x, approximate="tanh")


def _few(x: Tensor) -> bool:
    """Whether x is so small that oneDNN, which torch uses for the erf of contiguous tensors, takes longer to start than torch's own
    loop takes in all. A transposed view, which is dense but not contiguous, goes to that loop. So does another x that is not
    contiguous, as it is. A tracer takes no size for a constant."""
    return x.is_cpu and x.dim() > 1 and not is_compiling() and 0 < x.numel() < FEW_FOR_ONEDNN and x.is_contiguous()


def _gelu_erf(x: Tensor) -> Tensor:
    return _gelu(x.mT).mT if _few(x) else _gelu(x)


def _gelu_erf_backward(dy: Tensor, x: Tensor, y: Optional[Tensor]) -> Tensor:
    return _gelu_backward(dy.mT, x.mT).mT if _few(x) else _gelu_backward(dy, x)


def saturated_(t: Tensor) -> Tensor:
    """Clamp t in place to the range beyond which the derivatives of sigmoids do not change."""
    return t.clamp_(-SATURATED, SATURATED)


_silu: Any = torch._C._nn.silu  # the function that torch.nn.functional.silu calls
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


@kernel(rows="pinned")
def activation_fwd(x: Tensor, kind: str) -> Tensor:
    """y = f(x)."""
    return ACTIVATIONS[kind].forward(x)


@kernel(rows="pinned")
def activation_bwd(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """dx = dy * f'(x); f' is 0 at the corner of relu."""
    f = ACTIVATIONS[kind]
    return f.backward(dy, x, f.forward(x) if f.reads_y else None)
