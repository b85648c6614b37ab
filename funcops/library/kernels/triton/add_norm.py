"""Normalisations of a residual stream: the kernels of `norm`, with the additions in them."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.library.kernels import add_norm as declared
from funcops.library.kernels.triton.norm import Norm, gradients, normalise, parts_like


@declared.add_rms_norm_fwd.triton
def add_rms_norm_fwd(x: Tensor, residual: Tensor, w: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    y, _, rstd, stream = normalise(x, w, None, Norm(1.0 / x.shape[-1], False, centred, eps), residual)
    assert stream is not None
    return y, stream, rstd


@declared.add_rms_norm_bwd.triton
def add_rms_norm_bwd(
    dy: Tensor, dstream: Tensor, stream: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    how = Norm(1.0 / stream.shape[-1], False, centred)
    return gradients(dy, stream, w, None, rstd, how, dx, dw, False, dstream)[:2]


@declared.add_rms_norm_bwd.fake
def _add_rms_norm_bwd_fake(stream: Tensor, dx: bool, dw: bool) -> tuple[Optional[Tensor], Optional[Tensor]]:
    return torch.empty_like(stream) if dx else None, parts_like(stream) if dw else None


@declared.add_layer_norm_fwd.triton
def add_layer_norm_fwd(
    x: Tensor, residual: Tensor, w: Tensor, b: Optional[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, mean, rstd, stream = normalise(x, w, b, Norm(1.0 / x.shape[-1], True, centred, eps), residual)
    assert stream is not None and mean is not None
    return y, stream, mean, rstd


@declared.add_layer_norm_bwd.triton
def add_layer_norm_bwd(
    dy: Tensor, dstream: Tensor, stream: Tensor, w: Optional[Tensor], mean: Tensor, rstd: Tensor, centred: bool, dx: bool,
    dw: bool, db: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    return gradients(dy, stream, w, mean, rstd, Norm(1.0 / stream.shape[-1], True, centred), dx, dw, db, dstream)


@declared.add_layer_norm_bwd.fake
def _add_layer_norm_bwd_fake(
    stream: Tensor, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    return torch.empty_like(stream) if dx else None, parts_like(stream) if dw else None, parts_like(stream) if db else None


@declared.add_rms_norm_bwd_recompute.triton
def add_rms_norm_bwd_recompute(
    dy: Tensor, dstream: Tensor, stream: Tensor, w: Tensor, rstd: Tensor, centred: bool, dw: bool
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    how, y = Norm(1.0 / stream.shape[-1], False, centred), torch.empty_like(stream, memory_format=torch.contiguous_format)
    dx, parts, _ = gradients(dy, stream, w, None, rstd, how, True, dw, False, dstream, None, y)
    assert dx is not None
    return dx, y, parts


@declared.add_rms_norm_bwd_recompute.fake
def _add_rms_norm_bwd_recompute_fake(stream: Tensor, dw: bool) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    return torch.empty_like(stream), torch.empty_like(stream), parts_like(stream) if dw else None


@declared.add_layer_norm_bwd_recompute.triton
def add_layer_norm_bwd_recompute(
    dy: Tensor, dstream: Tensor, stream: Tensor, w: Tensor, b: Optional[Tensor], mean: Tensor, rstd: Tensor, centred: bool,
    dw: bool, db: bool,
) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    how, y = Norm(1.0 / stream.shape[-1], True, centred), torch.empty_like(stream, memory_format=torch.contiguous_format)
    dx, d_w, d_b = gradients(dy, stream, w, mean, rstd, how, True, dw, db, dstream, b, y)
    assert dx is not None
    return dx, y, d_w, d_b


@declared.add_layer_norm_bwd_recompute.fake
def _add_layer_norm_bwd_recompute_fake(
    stream: Tensor, dw: bool, db: bool
) -> tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]:
    parts = [parts_like(stream) if wanted else None for wanted in (dw, db)]
    return torch.empty_like(stream), torch.empty_like(stream), parts[0], parts[1]


@declared.dropout_add_rms_norm_fwd.triton
def dropout_add_rms_norm_fwd(
    x: Tensor, residual: Tensor, w: Tensor, key: Tensor, p: float, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, _, rstd, stream = normalise(x, w, None, Norm(1.0 / x.shape[-1], False, centred, eps), residual, key, p)
    assert stream is not None
    return y, stream, rstd


@declared.dropout_add_layer_norm_fwd.triton
def dropout_add_layer_norm_fwd(
    x: Tensor, residual: Tensor, w: Tensor, b: Optional[Tensor], key: Tensor, p: float, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y, mean, rstd, stream = normalise(x, w, b, Norm(1.0 / x.shape[-1], True, centred, eps), residual, key, p)
    assert stream is not None and mean is not None
    return y, stream, mean, rstd
