"""Elementwise activations and their derivatives. x, y, dy, dx: [*]. 16-bit inputs compute in float32 inside aten."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funcops.backend import kernel

_aten = torch.ops.aten
_QUICK = 1.702


class Activation(NamedTuple):
    """`forward(x)` and `backward(dy, x)`, both giving fresh tensors."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]


def _quick_gelu_backward(dy: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(x * _QUICK)
    return dy * (gate + x * _QUICK * gate * (1 - gate))


ACTIVATIONS = {
    "relu": Activation(torch.relu, lambda dy, x: _aten.threshold_backward.default(dy, x, 0)),
    "squared_relu": Activation(lambda x: torch.relu(x).square_(), lambda dy, x: torch.relu(x).mul_(2).mul_(dy)),
    "gelu": Activation(_aten.gelu.default, _aten.gelu_backward.default),
    "gelu_tanh": Activation(
        lambda x: _aten.gelu.default(x, approximate="tanh"),
        lambda dy, x: _aten.gelu_backward.default(dy, x, approximate="tanh"),
    ),
    "quick_gelu": Activation(lambda x: torch.sigmoid(x * _QUICK).mul_(x), _quick_gelu_backward),
    "silu": Activation(_aten.silu.default, _aten.silu_backward.default),
    "tanh": Activation(torch.tanh, lambda dy, x: _aten.tanh_backward.default(dy, torch.tanh(x))),
    "sigmoid": Activation(torch.sigmoid, lambda dy, x: _aten.sigmoid_backward.default(dy, torch.sigmoid(x))),
}


@kernel()
def activation_fwd(x: Tensor, kind: str) -> Tensor:
    """y = f(x)."""
    return ACTIVATIONS[kind].forward(x)


@kernel()
def activation_bwd(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """dx = dy * f'(x); f' is 0 where relu has its corner."""
    return ACTIVATIONS[kind].backward(dy, x)
