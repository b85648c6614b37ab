"""Causal convolution of each channel by itself (depthwise). x, y, dy, dx: [B, T, C]; w: [C, W]; b: [C].

Computed in the wide dtype and rounded once. The gradients of w and b are wide, P partial sums [P, C W] and [P, C] (here P = 1).
"""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from funcops.engine.backend import kernel, wide


def _convolved(t: Tensor, w: Tensor, b: Optional[Tensor]) -> Tensor:
    """z_t = b + the sum over j of w_j x_(t - W + 1 + j); x is 0 before its first time."""
    length, width = t.shape[1], w.shape[1]
    padded = F.pad(t, (0, 0, width - 1, 0))
    z = padded[:, :length] * w[:, 0]
    for j in range(1, width):
        z = z + padded[:, j : j + length] * w[:, j]
    return z if b is None else z + b


@kernel()
def causal_conv1d_fwd(x: Tensor, w: Tensor, b: Optional[Tensor], silu: bool) -> Tensor:
    """y = z, or silu(z)."""
    dtype = wide(x.dtype)
    z = _convolved(x.to(dtype), w.to(dtype), None if b is None else b.to(dtype))
    return (F.silu(z) if silu else z).to(x.dtype)


@kernel()
def causal_conv1d_bwd(
    dy: Tensor, x: Tensor, w: Tensor, b: Optional[Tensor], silu: bool, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """With g = dy f'(z): dx_t = sum over j of w_j g_(t + W - 1 - j); dw_j = sum over batches and t of g_t x_(t - W + 1 + j);
    db = sum of g."""
    dtype, length, width = wide(x.dtype), x.shape[1], w.shape[1]
    g, t, weight = dy.to(dtype), x.to(dtype), w.to(dtype)
    if silu:
        g = torch.ops.aten.silu_backward.default(g, _convolved(t, weight, None if b is None else b.to(dtype)))
    d_x = _convolved(g.flip(1), weight, None).flip(1).to(x.dtype) if dx else None
    padded, d_w = F.pad(t, (0, 0, width - 1, 0)), None
    if dw:
        d_w = torch.stack([(g * padded[:, j : j + length]).sum((0, 1)) for j in range(width)], -1).reshape(1, -1)
    return d_x, d_w, g.sum((0, 1)).unsqueeze(0) if db else None
