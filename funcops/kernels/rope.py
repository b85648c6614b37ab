"""Rotary position embedding. x: [*, T, N, D]; positions: [T] or [*, T], int64; table: [T, R] or [*, T, R], cos then sin."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.backend import kernel, tracing, wide


@kernel()
def rope_table(positions: Tensor, theta: float, rotary_dim: int, dtype: torch.dtype) -> Tensor:
    """cos and sin of position * theta^(-2i/R), i < R/2, side by side."""
    powers = torch.arange(0, rotary_dim, 2, dtype=dtype, device=positions.device).mul_(-1.0 / rotary_dim)
    angle = positions.to(dtype).unsqueeze(-1) * torch.pow(theta, powers)
    return torch.cat((angle.cos(), angle.sin()), -1)


@kernel()
def rope_apply(x: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate the first R of D by the angles of the table, backwards where `inverse`."""
    dtype, rotary_dim, sign = wide(x.dtype), table.shape[-1], -1.0 if inverse else 1.0
    cos, sin = table.unsqueeze(-2).chunk(2, -1)  # [*, T, 1, R/2]
    t = x if x.dtype is dtype else x.to(dtype)
    a, b = _pair(t, rotary_dim, interleaved)
    if tracing():
        first, second = a * cos - sign * b * sin, b * cos + sign * a * sin
        turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
        y = torch.cat((turned, t[..., rotary_dim:]), -1) if rotary_dim < x.shape[-1] else turned
        return y.to(x.dtype)
    y = torch.empty_like(t, memory_format=torch.contiguous_format)
    y_a, y_b = _pair(y, rotary_dim, interleaved)
    torch.mul(a, cos, out=y_a).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=y_b).addcmul_(a, sin, value=sign)
    if rotary_dim < x.shape[-1]:
        y[..., rotary_dim:].copy_(t[..., rotary_dim:])
    return y if y.dtype is x.dtype else y.to(x.dtype)


def _pair(t: Tensor, rotary_dim: int, interleaved: bool) -> tuple[Tensor, ...]:
    if interleaved:
        return t[..., 0:rotary_dim:2], t[..., 1:rotary_dim:2]
    turning = t if rotary_dim == t.shape[-1] else t[..., :rotary_dim]
    return turning.chunk(2, -1)
