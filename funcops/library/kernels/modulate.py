"""Modulation of sequences. x, y, dy, dx: [B, T, D]; scale, shift: [B, D]. Computed in the wide dtype and rounded once.

Gradients of scale and shift are in the wide dtype, as P partial sums over T, [P, B D] (here P = 1).
"""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.engine.backend import kernel, wide


@kernel()
def modulate_fwd(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """y = x (1 + scale) + shift."""
    dtype = wide(x.dtype)
    return (x.to(dtype) * (1 + scale.to(dtype)).unsqueeze(1) + shift.to(dtype).unsqueeze(1)).to(x.dtype)


@kernel()
def modulate_bwd(
    dy: Tensor, x: Optional[Tensor], scale: Optional[Tensor], dx: bool, dscale: bool, dshift: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """dx = dy (1 + scale); dscale = sum of dy x, dshift = sum of dy, over T. x may be None without dscale, scale without dx."""
    d = dy.to(wide(dy.dtype))
    return (
        (d * (1 + scale.to(d.dtype)).unsqueeze(1)).to(dy.dtype) if dx and scale is not None else None,
        (d * x).sum(1).reshape(1, -1) if dscale and x is not None else None,
        d.sum(1).reshape(1, -1) if dshift else None,
    )
