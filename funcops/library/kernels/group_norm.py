"""Normalisation of groups of channels. x, y, dy, dx: [B, C, *S]; w, b: [C]; mean, rstd: [B, G].

Statistics and the gradients of w and b are in the wide dtype: float32, or float64 for float64. The latter come as P partial sums
[P, C], to be summed over P (here P = 1). A gradient that is not requested is None; an input that only it would read may be.

On a CPU torch's fused operators run. They keep channels_last, as torch.nn.GroupNorm does there.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide
from funcops.library.kernels.norm import dense

_forward, _backward = torch.ops.aten.native_group_norm.default, torch.ops.aten.native_group_norm_backward.default


def _grouped(t: Tensor, groups: int) -> Tensor:
    """[B, C, *S] as [B, G, C S / G]."""
    return t.reshape(t.shape[0], groups, t.shape[1] // groups * math.prod(t.shape[2:]))


def _along(t: Tensor, x: Tensor) -> Tensor:
    """[C] as [C, 1, ...], to be broadcast over x [B, C, *S]."""
    return t.view(-1, *[1] * (x.dim() - 2))


@kernel()
def group_norm_fwd(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) * rstd * w + b, with the statistics of a group. Returns y, mean, rstd."""
    dtype = wide(x.dtype)
    if x.is_cpu:  # elsewhere the operators take no x in 16 bits beside a weight in 32, whose statistics are wide
        shape = x.shape
        sizes = shape[0], shape[1], math.prod(shape[2:]), groups
        return _forward(dense(x, x), w.to(dtype).contiguous(), b.to(dtype).contiguous(), *sizes, eps)  # type: ignore[no-any-return]
    return plain_group_norm_fwd(x, w, b, groups, eps)


@group_norm_fwd.plain
def plain_group_norm_fwd(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dtype = wide(x.dtype)
    t = _grouped(x.to(dtype), groups)
    mean = t.mean(-1, keepdim=True)
    centred = t - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (centred * rstd).reshape(x.shape) * _along(w.to(dtype), x) + _along(b.to(dtype), x)
    return y.to(x.dtype), mean.squeeze(-1), rstd.squeeze(-1)


@kernel()
def group_norm_bwd(
    dy: Tensor,
    x: Optional[Tensor],
    w: Optional[Tensor],
    mean: Optional[Tensor],
    rstd: Optional[Tensor],
    groups: int,
    dx: bool,
    dw: bool,
    db: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """With g = dy * w and n = (x - mean) * rstd: dx = rstd * (g - mean(g) - n * mean(g n)) over a group; dw = sum of dy * n,
    db = sum of dy, both over B and *S. x, mean and rstd may be None if only db is requested, w without dx."""
    if x is not None and x.is_cpu and mean is not None and rstd is not None:
        if w is None:  # torch's operator wants one even if it computes no dx
            w = mean.new_ones(x.shape[1])
        shape = x.shape
        sizes = shape[0], shape[1], math.prod(shape[2:]), groups
        of_groups = mean.contiguous(), rstd.contiguous(), w.to(mean.dtype).contiguous()
        # all three: for channels_last torch's operator writes to what it was told to leave out, and the process dies
        d_x, d_w, d_b = _backward(dense(dy, x), dense(x, x), *of_groups, *sizes, [True, True, True])
        return d_x if dx else None, d_w.unsqueeze(0) if dw else None, d_b.unsqueeze(0) if db else None
    return plain_group_norm_bwd(dy, x, w, mean, rstd, groups, dx, dw, db)


@group_norm_bwd.plain
def plain_group_norm_bwd(
    dy: Tensor,
    x: Optional[Tensor],
    w: Optional[Tensor],
    mean: Optional[Tensor],
    rstd: Optional[Tensor],
    groups: int,
    dx: bool,
    dw: bool,
    db: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    d = dy.to(wide(dy.dtype))
    over = [i for i in range(d.dim()) if i != 1]
    d_x, d_w, d_b = None, None, d.sum(over).unsqueeze(0) if db else None
    if x is not None and mean is not None and rstd is not None:
        n = ((_grouped(x.to(d.dtype), groups) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)).reshape(x.shape)
        d_w = (d * n).sum(over).unsqueeze(0) if dw else None
        if dx and w is not None:
            g, n = _grouped(d * _along(w.to(d.dtype), x), groups), _grouped(n, groups)
            inner = g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True)
            d_x = (inner * rstd.unsqueeze(-1)).reshape(x.shape).to(dy.dtype)
    return d_x, d_w, d_b
