"""Gated linear units of an x in 8 bits, one program per tile. If a block of scales straddles the halves, x is decoded to a copy."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import coded_glu as declared
from funcops.library.kernels.glu import GATES
from funcops.library.kernels.triton.activation import activate, derivative
from funcops.library.kernels.triton.common import cdiv, load_wide, rounded, store_rounded
from funcops.library.kernels.triton.low_bits import decode, decode_scale, native, times

COLS = 32, 128
BLOCK_M, BLOCK_N = 8, 256  # a thread loads 16 codes at once


@triton.jit
def _half(
    codes_ptr, scales_ptr, start, row, column, rows, width, DTYPE: tl.constexpr, COLS: tl.constexpr, NATIVE: tl.constexpr,
    A: tl.constexpr, B: tl.constexpr,
):
    """A tile [A, B] of the half of x that begins at element `start` of each row, rounded to x's dtype."""
    n, j = column + tl.arange(0, B), column // COLS + tl.arange(0, B // COLS)
    high, wide = (row < rows)[:, None], 2 * width // COLS
    codes = tl.load(codes_ptr + row[:, None] * (2 * width) + start + n[None, :], mask=high & (n < width)[None, :], other=0)
    at = scales_ptr + row[:, None] * wide + start // COLS + j[None, :]
    scales = tl.load(at, mask=high & (j < width // COLS)[None, :], other=0)
    v = times(decode(codes, "e4m3", NATIVE), decode_scale(scales, "e8m0"), A, B, 1, COLS)
    return rounded(v, DTYPE).to(tl.float32)


@triton.jit
def _coded(
    dy_ptr, codes_ptr, scales_ptr, y_ptr, dx_ptr, rows, width, KIND: tl.constexpr, FIRST: tl.constexpr, COLS: tl.constexpr,
    NATIVE: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
):
    """Compute y if dy is None, else dx."""
    across = tl.cdiv(width, B)
    pid = tl.program_id(0)
    row, column = (pid // across).to(tl.int64) * A + tl.arange(0, A), (pid % across) * B
    n = column + tl.arange(0, B)
    inside = (row < rows)[:, None] & (n < width)[None, :]
    at_gate, at_linear = (0, width) if FIRST else (width, 0)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty if dy_ptr is None else dy_ptr.dtype.element_ty
    gate = _half(codes_ptr, scales_ptr, at_gate, row, column, rows, width, DTYPE, COLS, NATIVE, A, B)
    linear = _half(codes_ptr, scales_ptr, at_linear, row, column, rows, width, DTYPE, COLS, NATIVE, A, B)
    active = activate(gate, KIND)
    if dy_ptr is None:
        store_rounded(y_ptr + row[:, None] * width + n[None, :], active * linear, inside)
    else:
        d = load_wide(dy_ptr + row[:, None] * width + n[None, :], inside)
        at = row[:, None] * (2 * width) + n[None, :]
        store_rounded(dx_ptr + at_gate + at, d * linear * derivative(gate, KIND), inside)
        store_rounded(dx_ptr + at_linear + at, d * active, inside)


_launch_coded = launcher(_coded)


def _run(
    dy: Optional[Tensor],
    codes: Tensor,
    scales: Tensor,
    cols: int,
    kind: str,
    first: bool,
    y: Optional[Tensor],
    dx: Optional[Tensor],
) -> None:
    width = codes.shape[-1] // 2
    rows = codes.numel() // (2 * width)
    _launch_coded(
        cdiv(rows, BLOCK_M) * cdiv(width, BLOCK_N), 1, 1, dy, codes.contiguous(), scales.contiguous(), y, dx, rows, width,
        GATES[kind], first, cols, native(), BLOCK_M, BLOCK_N, num_warps=4,
    )


def _serves(codes: Tensor, cols: int) -> bool:
    return codes.numel() > 0 and cols in COLS and codes.shape[-1] // 2 % cols == 0


@declared.coded_glu_fwd.triton
def coded_glu_fwd(codes: Tensor, scales: Tensor, cols: int, kind: str, first: bool, out: torch.dtype) -> Tensor:
    if out is torch.float64 or not _serves(codes, cols):
        return declared.coded_glu_fwd.kernel.torch_impl(codes, scales, cols, kind, first, out)  # type: ignore[no-any-return]
    y = codes.new_empty((*codes.shape[:-1], codes.shape[-1] // 2), dtype=out)
    _run(None, codes, scales, cols, kind, first, y, None)
    return y


@declared.coded_glu_bwd.triton
def coded_glu_bwd(dy: Tensor, codes: Tensor, scales: Tensor, cols: int, kind: str, first: bool) -> Tensor:
    if not _serves(codes, cols):
        return declared.coded_glu_bwd.kernel.torch_impl(dy, codes, scales, cols, kind, first)  # type: ignore[no-any-return]
    dx = dy.new_empty(codes.shape)
    _run(dy.contiguous(), codes, scales, cols, kind, first, None, dx)
    return dx
