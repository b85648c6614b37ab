"""Normalisations of a residual stream: the kernels of `norm`, which add on their way."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.kernels import add_norm as declared
from funcops.kernels.triton.norm import Norm, gradients, normalise, parts_like


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
def _add_rms_norm_bwd_fake(
    dy: Tensor, dstream: Tensor, stream: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
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
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    return gradients(dy, stream, w, mean, rstd, Norm(1.0 / stream.shape[-1], True, centred), dx, dw, db, dstream)


@declared.add_layer_norm_bwd.fake
def _add_layer_norm_bwd_fake(
    dy: Tensor, dstream: Tensor, stream: Tensor, w: Optional[Tensor], mean: Tensor, rstd: Tensor, centred: bool, dx: bool,
    dw: bool, db: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    return torch.empty_like(stream) if dx else None, parts_like(stream) if dw else None, parts_like(stream) if db else None
