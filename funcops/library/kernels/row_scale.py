"""Rows times one number each. x, y, dy, dx: [*, H]; gate, dgate: [*, 1], of x's dtype or the wide one. Computed in the wide dtype
and rounded once."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.engine.backend import kernel, wide


@kernel(rows="pinned")
def row_scale_fwd(x: Tensor, gate: Tensor, sigmoid: bool) -> Tensor:
    """y = x s with s = gate, or sigmoid(gate)."""
    dtype = wide(x.dtype)
    s = gate.to(dtype)
    return (x.to(dtype) * (s.sigmoid() if sigmoid else s)).to(x.dtype)


@kernel(rows="pinned")
def row_scale_bwd(
    dy: Tensor, x: Optional[Tensor], gate: Tensor, sigmoid: bool, dx: bool, dgate: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """dx = dy s; dgate = sum over H of dy x, times s (1 - s) if `sigmoid`. x may be None without dgate."""
    dtype = wide(dy.dtype)
    d, s = dy.to(dtype), gate.to(dtype)
    s = s.sigmoid() if sigmoid else s
    d_gate = None
    if dgate and x is not None:
        d_gate = (d * x).sum(-1, keepdim=True)
        d_gate = (d_gate * s * (1 - s) if sigmoid else d_gate).to(gate.dtype)
    return (d * s).to(dy.dtype) if dx else None, d_gate
