"""The products of a linear layer, some rows at a time."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.library.kernels.linear import linear_bwd, linear_dgrad, linear_fwd, linear_wgrad
from funcops.library.kernels.pins import Pins, pinned, row_product


@pinned(linear_fwd)
def _pinned_fwd(pins: Pins, x: Tensor, w: Tensor, b: Optional[Tensor]) -> Tensor:
    return row_product(x, w.mT, b, pins.rows)


@pinned(linear_dgrad)
def _pinned_dgrad(pins: Pins, dy: Tensor, w: Tensor) -> Tensor:
    return row_product(dy, w, None, pins.rows)


@pinned(linear_bwd)
def _pinned_bwd(
    pins: Pins, dy: Tensor, x: Optional[Tensor], w: Tensor, bias: bool
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    return row_product(dy, w, None, pins.rows), *linear_wgrad(dy, x, bias)
