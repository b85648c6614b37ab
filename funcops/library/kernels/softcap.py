"""Soft cap. x, y, dy, dx: [*]. Computed in the wide dtype and rounded once."""

from __future__ import annotations

from torch import Tensor

from funcops.engine.backend import kernel, wide


@kernel(rows="each")
def softcap_fwd(x: Tensor, cap: float) -> Tensor:
    """y = cap tanh(x / cap)."""
    return (x.to(wide(x.dtype)) / cap).tanh_().mul_(cap).to(x.dtype)


@kernel(rows="each")
def softcap_bwd(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    """dx = dy (1 - tanh(x / cap)^2)."""
    dtype = wide(x.dtype)
    t = (x.to(dtype) / cap).tanh_()
    return (1 - t.square_()).mul_(dy.to(dtype)).to(x.dtype)
