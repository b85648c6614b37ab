"""Normalisations of a residual stream, the sum of two tensors, which is returned too: one kernel forward, one backward.

x, residual, stream, y: [*, D] of one dtype; w, b: [D]; mean, rstd: [*, 1]. The rest as in `norm`.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel
from funcops.library.kernels import norm, pointwise


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
    """dx = dstream + the norm's gradient, which is the gradient of both x and residual; and the partial sums of dw."""
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
    dy: Tensor,
    dstream: Tensor,
    stream: Tensor,
    w: Optional[Tensor],
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    dx: bool,
    dw: bool,
    db: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """dx = dstream + the norm's gradient, which is the gradient of both x and residual; and the partial sums of dw and db."""
    d_x, d_w, d_b = norm.layer_norm_bwd.kernel.torch_impl(dy, stream, w, mean, rstd, centred, dx, dw, db)
    return _added(d_x, dstream), d_w, d_b


@kernel()
def add_rms_norm_bwd_recompute(
    dy: Tensor, dstream: Tensor, stream: Tensor, w: Tensor, rstd: Tensor, centred: bool, dw: bool
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """Return dx of `add_rms_norm_bwd`, the recomputed y of the forward, and the partial sums of dw."""
    dx, parts = add_rms_norm_bwd.kernel.torch_impl(dy, dstream, stream, w, rstd, centred, True, dw)
    return dx, _recomputed(stream.to(rstd.dtype) * rstd, w, None, centred, stream.dtype), parts


@kernel()
def add_layer_norm_bwd_recompute(
    dy: Tensor,
    dstream: Tensor,
    stream: Tensor,
    w: Tensor,
    b: Optional[Tensor],
    mean: Tensor,
    rstd: Tensor,
    centred: bool,
    dw: bool,
    db: bool,
) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    """Return dx of `add_layer_norm_bwd`, the recomputed y of the forward, and the partial sums of dw and db."""
    dx, d_w, d_b = add_layer_norm_bwd.kernel.torch_impl(dy, dstream, stream, w, mean, rstd, centred, True, dw, db)
    return dx, _recomputed((stream.to(rstd.dtype) - mean) * rstd, w, b, centred, stream.dtype), d_w, d_b


def _recomputed(n: Tensor, w: Tensor, b: Optional[Tensor], centred: bool, dtype: torch.dtype) -> Tensor:
    y = n * (w.to(n.dtype) + 1.0 if centred else w.to(n.dtype))
    return (y if b is None else y + b.to(n.dtype)).to(dtype)


@kernel()
def dropout_add_rms_norm_fwd(
    x: Tensor, residual: Tensor, w: Tensor, key: Tensor, p: float, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm_fwd` with dropout(x), unrounded, in the place of x."""
    stream = pointwise.dropout_add.kernel.torch_impl(x, None, residual, key, p)
    y, rstd = norm.rms_norm_fwd.kernel.torch_impl(stream, w, eps, centred)
    return y, stream, rstd


@kernel()
def dropout_add_layer_norm_fwd(
    x: Tensor, residual: Tensor, w: Tensor, b: Optional[Tensor], key: Tensor, p: float, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`add_layer_norm_fwd` with dropout(x), unrounded, in the place of x."""
    stream = pointwise.dropout_add.kernel.torch_impl(x, None, residual, key, p)
    y, mean, rstd = norm.layer_norm_fwd.kernel.torch_impl(stream, w, b, eps, centred)
    return y, stream, mean, rstd


def _added(dx: Optional[Tensor], dstream: Tensor) -> Optional[Tensor]:
    return None if dx is None else dx.add_(dstream)
