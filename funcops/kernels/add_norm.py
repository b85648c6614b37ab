"""Normalisations of a residual stream, the sum of two tensors, which is a result too: one kernel forward, one backward.

x, residual, stream, y: [*, D] of one dtype; w, b: [D]; mean, rstd: [*, 1]. The rest as in `norm`.
"""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.backend import kernel
from funcops.kernels import norm


@kernel()
def add_rms_norm_fwd(x: Tensor, residual: Tensor, w: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """stream = x + residual, rounded, and its RMSNorm y. Returns y, stream, rstd."""
    stream = x + residual
    y, rstd = norm.rms_norm_fwd.kernel.torch_impl(stream, w, eps, centred)
    return y, stream, rstd


@kernel()
def add_rms_norm_bwd(
    dy: Tensor, dstream: Tensor, stream: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """dx = dstream + the norm's gradient, which is that of x and of residual; the partial sums of dw."""
    d_x, d_w = norm.rms_norm_bwd.kernel.torch_impl(dy, stream, w, rstd, centred, dx, dw)
    return _added(d_x, dstream), d_w


@kernel()
def add_layer_norm_fwd(
    x: Tensor, residual: Tensor, w: Tensor, b: Optional[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """stream = x + residual, rounded, and its LayerNorm y. Returns y, stream, mean, rstd."""
    stream = x + residual
    y, mean, rstd = norm.layer_norm_fwd.kernel.torch_impl(stream, w, b, eps, centred)
    return y, stream, mean, rstd


@kernel()
def add_layer_norm_bwd(
    dy: Tensor, dstream: Tensor, stream: Tensor, w: Optional[Tensor], mean: Tensor, rstd: Tensor, centred: bool, dx: bool,
    dw: bool, db: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    """As `add_rms_norm_bwd`, and the partial sums of db."""
    d_x, d_w, d_b = norm.layer_norm_bwd.kernel.torch_impl(dy, stream, w, mean, rstd, centred, dx, dw, db)
    return _added(d_x, dstream), d_w, d_b


def _added(dx: Optional[Tensor], dstream: Tensor) -> Optional[Tensor]:
    return None if dx is None else dx.add_(dstream)
