"""Normalisations over the last dimension. x, y, dy, dx: [*, D] of one dtype; w, b: [D]; mean, rstd: [*, 1].

Statistics and the gradients of w and b are in the wide dtype: float32, or float64 for float64. The latter come as P
partial sums [P, D], to be summed over P (here P = 1). A gradient that is not requested is None; a weight that
only dx would read may be.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch._prims_common import are_strides_like_channels_last_or_false

from funcops.engine.backend import kernel, select, wide

_vector_norm = torch.linalg.vector_norm
FEW_FOR_MATMUL = 1 << 14  # elements; below it the number of operators counts, above it the passes over memory
_backward = torch.ops.aten.native_layer_norm_backward.default


def dense(t: Tensor, like: Tensor) -> Tensor:
    """`t` in the layout in which torch's norms read and write: channels_last if `like` has it, else contiguous."""
    if like.dim() not in (4, 5) or not are_strides_like_channels_last_or_false(like.shape, like.stride()):
        return t.contiguous()
    return t.contiguous(memory_format=torch.channels_last if like.dim() == 4 else torch.channels_last_3d)


def _to(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype is dtype else t.to(dtype)


def _scale(w: Tensor, centred: bool, dtype: torch.dtype) -> Tensor:
    """The factor of the normalised x: w, or 1 + w."""
    w = w if w.dtype is dtype else w.to(dtype)
    return w + 1.0 if centred else w


def _rstd(x: Tensor, alpha: float, eps: float, dtype: torch.dtype) -> Tensor:
    """(alpha * sum(x^2) + eps)^(-1/2), in one pass over x."""
    norm = _vector_norm(x, 2, -1, True, dtype=dtype)
    shift = torch.scalar_tensor(eps, dtype=dtype, device=x.device)
    return torch.addcmul(shift, norm, norm, value=alpha).rsqrt_()


@kernel(rows="each")
def rms_norm_fwd(x: Tensor, w: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """y = x * rstd * w (or 1 + w), rstd = (mean(x^2) + eps)^(-1/2). Returns y, rstd."""
    dtype = wide(x.dtype)
    t = _to(x, dtype)  # widening once is faster than at every use
    rstd = _rstd(t, 1.0 / x.shape[-1], eps, dtype)
    y = t * rstd if t is x else t.mul_(rstd)
    return _to(y.mul_(_scale(w, centred, dtype)), x.dtype), rstd


@rms_norm_fwd.plain
def plain_rms_norm_fwd(x: Tensor, w: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    rstd = (x.square().mean(-1, keepdim=True) + eps) ** -0.5
    return x * rstd * (w + centred), rstd


def rms_norm_recompute(x: Tensor, w: Tensor, rstd: Tensor, eps: float, centred: bool) -> Tensor:
    """Recompute y of `rms_norm_fwd` with the same bits; on the CPU, outside of any block that chooses kernels, from rstd."""
    if select.chosen_anywhere or not x.is_cpu:
        return rms_norm_fwd(x, w, eps, centred)[0]
    narrow, dtype = x.dtype, rstd.dtype
    y = (x if narrow is dtype else x.to(dtype)) * rstd
    y.mul_(_scale(w, centred, dtype))
    return y if narrow is dtype else y.to(narrow)


@kernel(rows="pinned")
def rms_norm_bwd(
    dy: Tensor, x: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """dx = rstd * (g - n * mean(g n)) with g = dy * w, n = x * rstd; dw = sum over rows of dy * n. w may be None
    without dx."""
    d_x, d_w = rms_norm_gradients(dy, x, w, rstd, centred, dx, dw)
    return d_x, None if d_w is None else d_w.unsqueeze(0)


def rms_norm_bwd_at_once(
    dy: Tensor, x: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """`rms_norm_bwd` whose dw is [D] on the CPU outside of any block that chooses kernels, in two views less."""
    if select.chosen_anywhere or not x.is_cpu:
        return rms_norm_bwd(dy, x, w, rstd, centred, dx, dw)  # type: ignore[no-any-return]
    return rms_norm_gradients(dy, x, w, rstd, centred, dx, dw)


def rms_norm_gradients(
    dy: Tensor, x: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool, few: float = FEW_FOR_MATMUL
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """LayerNorm's backward with a mean of zero gives dw, and dx less rstd * mean(g), in one pass; that term is added back."""
    narrow, dtype, size = x.dtype, rstd.dtype, x.shape[-1]
    scale = rstd.new_ones(size) if w is None else _scale(w, centred, dtype)
    if narrow is not dtype:
        dy, x = dy.to(dtype), x.to(dtype)
    rstd = rstd.contiguous()  # aten walks the memory of statistics, whatever the strides
    zero = torch.zeros_like(rstd)
    d_x, d_w, _ = _backward(dy, x, [size], zero, rstd, scale, None, [dx, dw, False])
    if dx:  # plus rstd * mean(g)
        if torch.compiler.is_compiling() or d_x.numel() < few:  # a tracer takes no size for a constant
            d_x.addcmul_((dy * scale).sum(-1, True), rstd, value=1.0 / size)
        else:
            d_x.add_(torch.matmul(dy, scale).unsqueeze_(-1).mul_(rstd), alpha=1.0 / size)
    if dx and narrow is not dtype:
        d_x = d_x.to(narrow)
    return d_x if dx else None, d_w if dw else None


@rms_norm_bwd.plain
def plain_rms_norm_bwd(dy: Tensor, x: Tensor, w: Tensor, rstd: Tensor, centred: bool, dx: bool, dw: bool) -> tuple[Tensor, Tensor]:
    """The gradients of y = n w with n = x * rstd."""
    n, g = x * rstd, dy * (w + centred)
    along_x = rstd * g  # term 1: through x itself
    along_rstd = -rstd * n * (g * n).mean(-1, keepdim=True)  # term 2: through rstd
    return along_x + along_rstd, _over_rows(dy * n)


@kernel(rows="each")
def layer_norm_fwd(x: Tensor, w: Tensor, b: Optional[Tensor], eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) * rstd * w (or 1 + w) + b. Returns y, mean, rstd."""
    dtype = wide(x.dtype)
    shift = None if b is None else _to(b, dtype)
    y, mean, rstd = torch.native_layer_norm(_to(x, dtype), [x.shape[-1]], _scale(w, centred, dtype), shift, eps)
    return _to(y, x.dtype), mean, rstd


@layer_norm_fwd.plain
def plain_layer_norm_fwd(x: Tensor, w: Tensor, b: Optional[Tensor], eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(-1, keepdim=True)
    rstd = ((x - mean).square().mean(-1, keepdim=True) + eps) ** -0.5
    y = (x - mean) * rstd * (w + centred)
    return y if b is None else y + b, mean, rstd


@kernel(rows="each")
def layer_norm_bwd(
    dy: Tensor, x: Tensor, w: Optional[Tensor], mean: Tensor, rstd: Tensor, centred: bool, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """dx = rstd * (g - mean(g) - n * mean(g n)) with g = dy * w; dw = sum of dy * n, db = sum of dy over rows. w may be
    None without dx."""
    dtype, size = wide(x.dtype), x.shape[-1]
    scale = rstd.new_ones(size) if w is None else _scale(w, centred, dtype)
    mean, rstd = mean.contiguous(), rstd.contiguous()  # as in `rms_norm_bwd`
    d_x, d_w, d_b = _backward(_to(dy, dtype), _to(x, dtype), [size], mean, rstd, scale, scale if db else None, [dx, dw, db])
    return _to(d_x, x.dtype) if dx else None, d_w.unsqueeze(0) if dw else None, d_b.unsqueeze(0) if db else None


@layer_norm_bwd.plain
def plain_layer_norm_bwd(
    dy: Tensor, x: Tensor, w: Tensor, mean: Tensor, rstd: Tensor, centred: bool, dx: bool, dw: bool, db: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y = n w + b with n = (x - mean) * rstd."""
    n, g = (x - mean) * rstd, dy * (w + centred)
    along_x = rstd * g  # term 1: through x itself
    along_mean = -rstd * g.mean(-1, keepdim=True)  # term 2: through the mean
    along_rstd = -rstd * n * (g * n).mean(-1, keepdim=True)  # term 3: through rstd
    return along_x + along_mean + along_rstd, _over_rows(dy * n), _over_rows(dy)


def _over_rows(t: Tensor) -> Tensor:
    """The sum over rows, [1, D]."""
    return t.reshape(-1, t.shape[-1]).sum(0, keepdim=True)


@kernel(rows="each")
def row_sums(dy: Tensor) -> Tensor:
    """Only db of a LayerNorm: the sum of dy over rows, as partial sums."""
    return dy.reshape(-1, dy.shape[-1]).sum(0, keepdim=True, dtype=wide(dy.dtype))


@kernel(rows="each")
def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The total [D] of partial sums [P, D]."""
    return _to(parts.sum(0), dtype)


@kernel(rows="each")
def sum_two_parts(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`sum_parts` of two tensors."""
    return _to(a.sum(0), dtype), _to(b.sum(0), dtype)


@kernel(rows="each")
def l2_norm_fwd(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = x * rstd, rstd = (sum(x^2) + eps)^(-1/2). Returns y, rstd."""
    rstd = _rstd(x, 1.0, eps, wide(x.dtype))
    return _to(x * rstd, x.dtype), rstd


@l2_norm_fwd.plain
def plain_l2_norm_fwd(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rstd = (x.square().sum(-1, keepdim=True) + eps) ** -0.5
    return x * rstd, rstd


@kernel(rows="each")
def l2_norm_bwd(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """dx = rstd * (dy - n * sum(dy n)) with n = x * rstd."""
    n = x * rstd
    along = (dy * n).sum(-1, True)
    return _to(torch.addcmul(_to(dy, n.dtype), n, along, value=-1.0).mul_(rstd), x.dtype)


@l2_norm_bwd.plain
def plain_l2_norm_bwd(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    n = x * rstd
    along_x = rstd * dy  # term 1: through x itself
    along_rstd = -rstd * n * (dy * n).sum(-1, keepdim=True)  # term 2: through rstd
    return along_x + along_rstd
