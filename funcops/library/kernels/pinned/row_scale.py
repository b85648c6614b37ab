"""Rows times a sigmoid, in whole vectors."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.engine.backend import wide
from funcops.library.kernels.pins import Pins, pinned, vectorized
from funcops.library.kernels.row_scale import row_scale_bwd, row_scale_fwd


def _factor(gate: Tensor, sigmoid: bool) -> Tensor:
    s = gate.to(wide(gate.dtype))
    return vectorized(Tensor.sigmoid, s) if sigmoid else s


@pinned(row_scale_fwd)
def _pinned_fwd(pins: Pins, x: Tensor, gate: Tensor, sigmoid: bool) -> Tensor:
    return row_scale_fwd.kernel.torch_impl(x, _factor(gate, sigmoid), False)  # type: ignore[no-any-return]


@pinned(row_scale_bwd)
def _pinned_bwd(
    pins: Pins, dy: Tensor, x: Optional[Tensor], gate: Tensor, sigmoid: bool, dx: bool, dgate: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    s = _factor(gate, sigmoid)
    d_x, d_gate = row_scale_bwd.kernel.torch_impl(dy, x, s, False, dx, dgate)
    if d_gate is not None:
        d_gate = (d_gate * s * (1 - s) if sigmoid else d_gate).to(gate.dtype)
    return d_x, d_gate
