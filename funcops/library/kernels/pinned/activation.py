"""Activations in whole vectors."""

from __future__ import annotations

from torch import Tensor

from funcops.library.kernels.activation import ACTIVATIONS, activation_bwd, activation_fwd
from funcops.library.kernels.pins import Pins, pinned, vectorized


@pinned(activation_fwd)
def _pinned_fwd(pins: Pins, x: Tensor, kind: str) -> Tensor:
    return vectorized(ACTIVATIONS[kind].forward, x)


@pinned(activation_bwd)
def _pinned_bwd(pins: Pins, dy: Tensor, x: Tensor, kind: str) -> Tensor:
    return vectorized(lambda d, t: activation_bwd.kernel.torch_impl(d, t, kind), dy, x)
