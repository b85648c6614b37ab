"""Normalisations over the last dimension. x, dy: [*, D]; w, b: [D]; rstd, mean: [*] in float32 (float64 for float64).

Gradients of w and b come as finished sums [D] in the wide dtype. `None` stands for what was not asked for.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.backend import kernel, wide


@kernel()
def rms_norm_fwd(x: Tensor, w: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """y = x * rstd * w (or 1 + w), rstd = (mean(x^2) + eps)^(-1/2)."""
    n = x if x.dtype is wide(x.dtype) else x.to(wide(x.dtype))
    norm = torch.linalg.vector_norm(n, dim=-1)
    rstd = torch.rsqrt_((norm * norm).mul_(1.0 / x.shape[-1]).add_(eps))
    y = (n * rstd.unsqueeze(-1)).mul_(w + 1.0 if centred else w)
    return y.to(x.dtype), rstd


@kernel()
def rms_norm_bwd(
    dy: Tensor, x: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """dx = rstd * (g - n * mean(g n)) with g = dy w, n = x rstd; dw = sum over rows of dy n."""
    dtype, rows = wide(x.dtype), rstd.unsqueeze(-1)
    dy = dy.to(dtype)
    n = x * rows
    if not dx or w is None:
        return None, (dy * n).reshape(-1, x.shape[-1]).sum(0) if dw else None
    dyn = dy * n
    scale = (w + 1.0 if centred else w).to(dtype)
    mean = torch.matmul(dyn, scale).mul_(-1.0 / x.shape[-1]).unsqueeze(-1)
    d_x = (dy * scale).addcmul_(n, mean).mul_(rows)
    return d_x.to(x.dtype), dyn.reshape(-1, x.shape[-1]).sum(0) if dw else None


@kernel()
def layer_norm_fwd(
    x: Tensor, w: Tensor, b: Optional[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) * rstd * w (or 1 + w) + b. Returns y, mean [*], rstd [*]."""
    dtype = wide(x.dtype)
    scale = (w + 1.0 if centred else w).to(dtype)
    shift = None if b is None else b.to(dtype)
    y, mean, rstd = torch.native_layer_norm(x.to(dtype), x.shape[-1:], scale, shift, eps)
    return y.to(x.dtype), mean.reshape(x.shape[:-1]), rstd.reshape(x.shape[:-1])


@kernel()
def layer_norm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, centred: bool, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """dx = rstd * (g - mean(g) - n * mean(g n)), dw = sum of dy n, db = sum of dy."""
    dtype, shape = wide(x.dtype), [*mean.shape, 1]
    scale = (w + 1.0 if centred else w).to(dtype)
    d_x, d_w, d_b = torch.ops.aten.native_layer_norm_backward.default(
        dy.to(dtype), x.to(dtype), x.shape[-1:], mean.reshape(shape), rstd.reshape(shape), scale, scale, [dx, dw, db]
    )
    return d_x.to(x.dtype) if dx else None, d_w if dw else None, d_b if db else None


@kernel()
def l2_norm_fwd(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = x * rstd, rstd = (sum(x^2) + eps)^(-1/2)."""
    n = x.to(wide(x.dtype))
    norm = torch.linalg.vector_norm(n, dim=-1)
    rstd = torch.rsqrt_((norm * norm).add_(eps))
    return (n * rstd.unsqueeze(-1)).to(x.dtype), rstd


@kernel()
def l2_norm_bwd(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """dx = rstd * (dy - n * sum(dy n)) with n = x rstd."""
    rows = rstd.unsqueeze(-1)
    dy, n = dy.to(wide(x.dtype)), x * rows
    return (dy - n * (dy * n).sum(-1, keepdim=True)).mul_(rows).to(x.dtype)
