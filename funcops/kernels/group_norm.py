"""Normalisation of groups of channels. x, y, dy, dx: [B, C, S]; w, b: [C]; mean, rstd: [B, G].

Statistics and the gradients of w and b are in the wide dtype: float32, or float64 for float64. The latter come as P partial sums
[P, C], to be summed over P (here P = 1). A gradient that is not requested is None; an input that only it would read may be.
"""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.backend import kernel, wide


def _grouped(t: Tensor, groups: int) -> Tensor:
    """[B, C, S] as [B, G, C S / G]."""
    return t.reshape(t.shape[0], groups, t.shape[1] // groups * t.shape[2])


@kernel()
def group_norm_fwd(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) * rstd * w + b, with the statistics of a group. Returns y, mean, rstd."""
    dtype = wide(x.dtype)
    t = _grouped(x.to(dtype), groups)
    mean = t.mean(-1, keepdim=True)
    centred = t - mean
    rstd = (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (centred * rstd).reshape(x.shape) * w.to(dtype).unsqueeze(-1) + b.to(dtype).unsqueeze(-1)
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
    db = sum of dy, both over B and S. x, mean and rstd may be None if only db is requested, w without dx."""
    d = dy.to(wide(dy.dtype))
    d_x, d_w, d_b = None, None, d.sum((0, 2)).unsqueeze(0) if db else None
    if x is not None and mean is not None and rstd is not None:
        n = ((_grouped(x.to(d.dtype), groups) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)).reshape(x.shape)
        d_w = (d * n).sum((0, 2)).unsqueeze(0) if dw else None
        if dx and w is not None:
            g, n = _grouped(d * w.to(d.dtype).unsqueeze(-1), groups), _grouped(n, groups)
            inner = g - g.mean(-1, keepdim=True) - n * (g * n).mean(-1, keepdim=True)
            d_x = (inner * rstd.unsqueeze(-1)).reshape(x.shape).to(dy.dtype)
    return d_x, d_w, d_b
