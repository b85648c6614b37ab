"""A product that is added to a sum, some rows at a time."""

from __future__ import annotations

from torch import Tensor

from funcops.library.kernels.fused_linear import fused_linear_dgrad_into
from funcops.library.kernels.pins import Pins, pinned, row_product


@pinned(fused_linear_dgrad_into)
def _pinned_dgrad_into(pins: Pins, dy: Tensor, w: Tensor, scale: float, into: Tensor) -> None:
    into += row_product(dy, w, None, pins.rows) * scale
