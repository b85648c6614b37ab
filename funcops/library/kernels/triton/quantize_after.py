"""Norms, GLUs and activations whose output is quantised before it is written: whole rows of a norm, tiles of the others.

The arithmetic is the same as in the kernels that write y, and y is rounded to x's dtype as there. Rows too long to hold, and
formats that these kernels lack, go through y.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import quantize_after as declared
from funcops.library.kernels.quantize import by_columns
from funcops.library.kernels.triton.activation import activate
from funcops.library.kernels.triton.common import block_of, cdiv, contiguous, flat_rows, load_wide, rounded, warps_of
from funcops.library.kernels.triton.low_bits import native, quantise, scale_at
from funcops.library.kernels.triton.norm import FORWARD_TILE

LONGEST = 16384  # elements of a norm's row that a program holds
TILES = 32, 128
BLOCK_M, BLOCK_N = 32, 128


@triton.jit
def _store_quantised(
    codes_ptr, scales_ptr, y, row, column, rows, width, DTYPE: tl.constexpr, ELEMENT: tl.constexpr, COLS: tl.constexpr,
    KIND: tl.constexpr, EPSILON: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):
    """Store codes and scales of y [A, B], which is rounded first, from `column` on, in rows `row` [A]."""
    codes, stored = quantise(rounded(y, DTYPE).to(tl.float32), 0.0, A, B, ELEMENT, KIND, 1, COLS, EPSILON, NARROW, NATIVE)
    n, j = column + tl.arange(0, B), column // COLS + tl.arange(0, B // COLS)
    high = (row < rows)[:, None]
    across = tl.cdiv(width, COLS)
    tl.store(codes_ptr + row[:, None] * width + n[None, :], codes, mask=high & (n < width)[None, :])
    at = scale_at(row[:, None], j[None, :], rows, across, 1, KIND)
    tl.store(scales_ptr + at, stored, mask=high & (j < across)[None, :])


@triton.jit
def _norm(
    x_ptr, w_ptr, b_ptr, codes_ptr, scales_ptr, mean_ptr, rstd_ptr, rows, width, alpha: tl.float32, eps: tl.float32,
    CENTRE: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr, ELEMENT: tl.constexpr, COLS: tl.constexpr,
    KIND: tl.constexpr, EPSILON: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows)[:, None] & (i < width)
    x = load_wide(x_ptr + row[:, None] * width + i, inside)
    mean = tl.zeros([ROWS], tl.float32)
    if CENTRE:
        mean = tl.sum(x, 1) / width
        tl.store(mean_ptr + row, mean, mask=row < rows)
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) * alpha + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    each = tl.broadcast_to(i, [ROWS, BLOCK])
    y = centred * rstd[:, None] * (load_wide(w_ptr + each, each < width) + (1.0 if SHIFTED else 0.0))
    if BIAS:
        y += load_wide(b_ptr + each, each < width)
    _store_quantised(
        codes_ptr, scales_ptr, y, row, 0, rows, width, x_ptr.dtype.element_ty, ELEMENT, COLS, KIND, EPSILON, NARROW, NATIVE, ROWS,
        BLOCK,
    )


@triton.jit
def _pointwise(
    x_ptr, linear_ptr, codes_ptr, scales_ptr, rows, width, stride, GATE: tl.constexpr, ELEMENT: tl.constexpr, COLS: tl.constexpr,
    KIND: tl.constexpr, EPSILON: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):
    """Quantise y = f(x), times linear if it is given; `stride`: the distance between their rows."""
    across = tl.cdiv(width, B)
    pid = tl.program_id(0)
    row, column = (pid // across).to(tl.int64) * A + tl.arange(0, A), (pid % across) * B
    n = column + tl.arange(0, B)
    at, inside = row[:, None] * stride + n[None, :], (row < rows)[:, None] & (n < width)[None, :]
    y = activate(load_wide(x_ptr + at, inside), GATE)
    if linear_ptr is not None:
        y *= load_wide(linear_ptr + at, inside)
    y = tl.where(inside, y, 0.0)  # f(0) need not be 0
    _store_quantised(
        codes_ptr, scales_ptr, y, row, column, rows, width, x_ptr.dtype.element_ty, ELEMENT, COLS, KIND, EPSILON, NARROW, NATIVE,
        A, B,
    )


_launch_norm, _launch_pointwise = launcher(_norm), launcher(_pointwise)


def _serves(element: str, cols: int, scales: str) -> bool:
    return element != "e2m1" and cols in TILES and scales != "e4m3"


def _room(x: Tensor, width: int, cols: int, scales: str) -> tuple[Tensor, Tensor]:
    """Allocate codes [*, width] and scales, for as many rows as x has."""
    rows = x.shape[:-1].numel()
    codes = x.new_empty((*x.shape[:-1], width), dtype=torch.uint8)
    size = (cdiv(width, cols), rows) if by_columns(1, cols, scales) else (rows, cdiv(width, cols))
    return codes, x.new_empty(size, dtype=torch.uint8 if scales.startswith("e8m0") else torch.float32)


def _narrow(x: Tensor, cols: int) -> bool:
    return x.dtype is torch.bfloat16 and cols == 128


def _normed(
    x: Tensor, w: Tensor, b: Optional[Tensor], centre: bool, eps: float, shifted: bool, element: str, cols: int, scales: str,
    epsilon: float,
) -> tuple[Tensor, Tensor, Optional[Tensor], Tensor]:
    x, rows, width = flat_rows(x)
    made = _room(x, width, cols, scales)
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    mean = torch.empty_like(rstd) if centre else None
    block = max(block_of(width, LONGEST), cols)
    at_once = max(1, FORWARD_TILE // block)
    _launch_norm(
        cdiv(rows, at_once), 1, 1, x, w.contiguous(), contiguous(b), *made, mean, rstd, rows, width, 1.0 / width, eps, centre,
        shifted, b is not None, element, cols, scales, epsilon, _narrow(x, cols), native(), at_once, block,
        num_warps=warps_of(at_once * block),
    )
    return *made, mean, rstd


def _gated(
    x: Tensor, linear: Optional[Tensor], like: Tensor, width: int, kind: str, element: str, cols: int, scales: str,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    rows, made = like.shape[:-1].numel(), _room(like, width, cols, scales)
    _launch_pointwise(
        cdiv(rows, BLOCK_M) * cdiv(width, BLOCK_N), 1, 1, x, linear, *made, rows, width, like.shape[-1], kind, element, cols,
        scales, epsilon, _narrow(like, cols), native(), BLOCK_M, BLOCK_N, num_warps=4,
    )
    return made


@declared.rms_norm_quantize.triton
def rms_norm_quantize(
    x: Tensor, w: Tensor, eps: float, zero_centered_gamma: bool, element: str, cols: int, scales: str, epsilon: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    if not x.numel() or x.shape[-1] > LONGEST or not _serves(element, cols, scales):
        plain = declared.rms_norm_quantize.kernel.torch_impl
        return plain(x, w, eps, zero_centered_gamma, element, cols, scales, epsilon)  # type: ignore[no-any-return]
    codes, made, _, rstd = _normed(x, w, None, False, eps, zero_centered_gamma, element, cols, scales, epsilon)
    return codes, made, rstd


@declared.layer_norm_quantize.triton
def layer_norm_quantize(
    x: Tensor, w: Tensor, b: Optional[Tensor], eps: float, zero_centered_gamma: bool, element: str, cols: int, scales: str,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not x.numel() or x.shape[-1] > LONGEST or not _serves(element, cols, scales):
        plain = declared.layer_norm_quantize.kernel.torch_impl
        return plain(x, w, b, eps, zero_centered_gamma, element, cols, scales, epsilon)  # type: ignore[no-any-return]
    return _normed(x, w, b, True, eps, zero_centered_gamma, element, cols, scales, epsilon)  # type: ignore[return-value]


@declared.glu_quantize.triton
def glu_quantize(
    x: Tensor, kind: str, first: bool, element: str, cols: int, scales: str, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    if not x.numel() or not _serves(element, cols, scales):
        plain = declared.glu_quantize.kernel.torch_impl
        return plain(x, kind, first, element, cols, scales, epsilon)  # type: ignore[no-any-return]
    x = x.contiguous()
    width = x.shape[-1] // 2
    halves = x[..., :width], x[..., width:]
    gate, linear = halves if first else halves[::-1]
    return _gated(gate, linear, x, width, declared.glu.GATES[kind], element, cols, scales, epsilon)


@declared.activation_quantize.triton
def activation_quantize(x: Tensor, kind: str, element: str, cols: int, scales: str, epsilon: float = 0.0) -> tuple[Tensor, Tensor]:
    if not x.numel() or not _serves(element, cols, scales):
        plain = declared.activation_quantize.kernel.torch_impl
        return plain(x, kind, element, cols, scales, epsilon)  # type: ignore[no-any-return]
    x = x.contiguous()
    return _gated(x, None, x, x.shape[-1], kind, element, cols, scales, epsilon)
