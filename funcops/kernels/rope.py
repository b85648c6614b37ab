"""Rotary position embedding. x: [*, T, N, D]; positions: [T] or [*, T], int64."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.backend import kernel, tracing, wide


@kernel()
def rope_apply(
    x: Tensor, positions: Tensor, theta: float, rotary_dim: int, interleaved: bool, inverse: bool
) -> Tensor:
    """Rotate the first `rotary_dim` of D by position * theta^(-2i/rotary_dim), backwards where `inverse`."""
    dtype = wide(x.dtype)
    powers = torch.arange(0, rotary_dim, 2, dtype=dtype, device=x.device).mul_(-1.0 / rotary_dim)
    angle = (positions.to(dtype).unsqueeze(-1) * torch.pow(theta, powers)).unsqueeze(-2)  # [*, T, 1, R/2]
    cos, sin = angle.cos(), angle.sin()
    if inverse:
        sin = -sin
    t = x if x.dtype is dtype else x.to(dtype)
    a, b = _pair(t, rotary_dim, interleaved)
    if tracing():
        first, second = a * cos - b * sin, b * cos + a * sin
        turned = torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)
        y = torch.cat((turned, t[..., rotary_dim:]), -1) if rotary_dim < x.shape[-1] else turned
        return y.to(x.dtype)
    y = torch.empty_like(t, memory_format=torch.contiguous_format)
    y_a, y_b = _pair(y, rotary_dim, interleaved)
    torch.mul(a, cos, out=y_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=y_b).addcmul_(a, sin)
    if rotary_dim < x.shape[-1]:
        y[..., rotary_dim:].copy_(t[..., rotary_dim:])
    return y.to(x.dtype)


def _pair(t: Tensor, rotary_dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return t[..., 0:rotary_dim:2], t[..., 1:rotary_dim:2]
    half = rotary_dim // 2
    return t[..., :half], t[..., half:rotary_dim]
