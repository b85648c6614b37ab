"""Grouped products of codes with scales that read no value on the host: rows and tiles as in `grouped.py`.

Codes of 8 bits with float32 scales are multiplied as they are if the device takes them (sm_89), else as bfloat16, which holds each:
scales multiply sums, and scales of blocks of 128 along K the block's partial sum. Blocks of 32 and 16 are decoded on every device,
with their scales, to bfloat16, which holds them too. The interpreter multiplies the decoded values in float32.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import grouped_scaled as declared
from funcops.library.kernels.quantize import BLOCK
from funcops.library.kernels.triton.common import INTERPRETED, cdiv, contiguous, load_wide, rounded
from funcops.library.kernels.triton.gemm import tile_of
from funcops.library.kernels.triton.gemm_table import Tile
from funcops.library.kernels.triton.grouped import FEW_ROWS, blocks_of, locate, place_of
from funcops.library.kernels.triton.low_bits import decode, decode_scale, native, store_exact, times, unpacked

GROUP = 8


# for 8 bits: one scale per row, blocks, and few rows; for blocks that a device has to decode; for decoded values
LARGE, BLOCKS, SMALL = Tile(128, 128, 128, 8, 3), Tile(128, 64, 128, 8, 3), Tile(64, 64, 128, 4, 3)
FOREIGN, DECODED = Tile(64, 64, 128, 8, 3), Tile(64, 64, 64, 4, 3)


@triton.jit
def _codes(ptr, row, size, k, last, stride, ELEMENT: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr):
    """Codes [ROWS, BLOCK_K] of rows of `stride` bytes, from element k on, 0 from `last` on; 4-bit codes are unpacked."""
    PACK: tl.constexpr = 2 if ELEMENT == "e2m1" else 1
    byte = k // PACK + tl.arange(0, BLOCK_K // PACK)
    inside = (row < size)[:, None] & (byte * PACK < last)[None, :]
    codes = tl.load(ptr + row[:, None] * stride + byte.to(tl.int64)[None, :], mask=inside, other=0)
    return unpacked(codes, ROWS, BLOCK_K) if ELEMENT == "e2m1" else codes


@triton.jit
def _operand(
    ptr, scales_ptr, row, size, k, last, stride, down, along, ELEMENT: tl.constexpr, KIND: tl.constexpr, HIGH: tl.constexpr,
    COLS: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """An operand of the product, [ROWS, BLOCK_K]: codes, or their values; times scales for blocks below 128."""
    codes = _codes(ptr, row, size, k, last, stride, ELEMENT, ROWS, BLOCK_K)
    if COLS == 32 or COLS == 16:
        j = k // COLS + tl.arange(0, BLOCK_K // COLS)
        at = scales_ptr + (row // HIGH)[:, None] * down + j.to(tl.int64)[None, :] * along
        scales = tl.load(at, mask=(row < size)[:, None] & (j * COLS < last)[None, :], other=0)
        values = times(decode(codes, ELEMENT, NATIVE), decode_scale(scales, KIND), ROWS, BLOCK_K, 1, COLS)
        return values if INTERPRETED else values.to(tl.bfloat16)
    elif NATIVE and ELEMENT == "e4m3":
        return codes.to(tl.float8e4nv, bitcast=True)
    elif NATIVE and ELEMENT == "e5m2":
        return codes.to(tl.float8e5, bitcast=True)
    else:
        values = decode(codes, ELEMENT, NATIVE)
        return values if INTERPRETED else values.to(tl.bfloat16)


@triton.jit
def _add(total, a, b, of_a, of_b, COLS: tl.constexpr, NATIVE: tl.constexpr):
    """total + a b^T, times the scales of a block of 128 along K if there are such blocks."""
    if COLS == 128:
        return total + tl.dot(a, b.T) * of_a[:, None] * of_b[None, :]
    elif NATIVE and COLS <= 1:
        return tl.dot(a, b.T, total, max_num_imprecise_acc=128)
    else:
        return tl.dot(a, b.T, total)


@triton.jit
def _product(
    a_ptr, a_scales_ptr, a_scale_ptr, w_ptr, w_scales_ptr, w_scale_ptr, y_ptr, bias_ptr, scales_ptr, index_ptr, offsets_ptr, tiles,
    rows, a_rows, E, N, K, a_stride, w_stride, a_down, a_along, w_each, w_down, w_along, A: tl.constexpr, W: tl.constexpr,
    KIND: tl.constexpr, W_ROWS: tl.constexpr, COLS: tl.constexpr, NATIVE: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr,
    INDEXED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    E_BLOCK: tl.constexpr,
):
    """y [rows, N] from codes A [a_rows, K] and W [E, N, K]. COLS elements along K share a scale, 0: all; in W also W_ROWS rows."""
    tile_m, tile_n = tile_of(tl.program_id(0), tiles * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP)
    e, first, last = locate(tile_m, offsets_ptr, E, rows, BLOCK_M, E_BLOCK)
    if last == 0:
        return
    e, m = e.to(tl.int64), first + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = place_of(m, last, index_ptr, 1, a_rows, INDEXED)
    w_ptr += e * N * w_stride
    w_scales_ptr += e * w_each
    HIGH: tl.constexpr = W_ROWS if W_ROWS else 1
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    length = tl.where(e < E, K, 0)
    of_a = tl.zeros([BLOCK_M], tl.float32)
    of_w = tl.zeros([BLOCK_N], tl.float32)
    for k in range(0, length, BLOCK_K):
        a = _operand(a_ptr, a_scales_ptr, row, a_rows, k, K, a_stride, a_down, a_along, A, KIND, 1, COLS, NATIVE, BLOCK_M, BLOCK_K)
        w = _operand(w_ptr, w_scales_ptr, n, N, k, K, w_stride, w_down, w_along, W, KIND, HIGH, COLS, NATIVE, BLOCK_N, BLOCK_K)
        if COLS == 128:
            of_a = tl.load(a_scales_ptr + row * a_down + k // COLS * a_along, mask=row < a_rows, other=0.0)
            of_w = tl.load(w_scales_ptr + n // HIGH * w_down + k // COLS * w_along, mask=n < N, other=0.0)
        total = _add(total, a, w, of_a, of_w, COLS, NATIVE)
    if COLS == 0:
        total = total * tl.load(a_scales_ptr + row * a_down, mask=row < a_rows, other=0.0)[:, None]
        total = total * tl.load(w_scales_ptr, mask=e < E, other=0.0)
    if a_scale_ptr is not None:
        total = total * tl.load(a_scale_ptr + row, mask=row < a_rows, other=0.0)[:, None]
        total = total * tl.load(w_scale_ptr + e, mask=e < E, other=0.0)
    total = tl.where(e < E, total, 0.0)
    if BIAS:
        bias = load_wide(bias_ptr + e * N + n, (n < N) & (e < E))[None, :]
        if SCALED:
            bias = bias * load_wide(scales_ptr + m, m < last)[:, None]
        total = rounded(total, y_ptr.dtype.element_ty) + bias
    store_exact(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], total, (m < last)[:, None] & (n < N)[None, :])


@triton.jit
def _wgrad(
    dy_ptr, dy_scales_ptr, dy_scale_ptr, x_ptr, x_scales_ptr, x_scale_ptr, starts_ptr, dw_ptr,
    O, I,  # noqa: E741 (as in the math)
    dy_stride, x_stride, dy_down, dy_along, x_down, x_along, DY: tl.constexpr, X: tl.constexpr, KIND: tl.constexpr,
    COLS: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """dw [E, O, I] from codes dy [O, P] and x [I, P], over a group's columns, which begin at multiples of 16, and their padding.
    COLS columns share a scale; 1: all of a group do."""
    e = tl.program_id(1).to(tl.int64)
    tile_m, tile_n = tile_of(tl.program_id(0), O, I, BLOCK_M, BLOCK_N, GROUP)
    first, last = tl.multiple_of(tl.load(starts_ptr + e), 16), tl.multiple_of(tl.load(starts_ptr + e + 1), 16)
    o = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    of_dy = tl.zeros([BLOCK_M], tl.float32)
    of_x = tl.zeros([BLOCK_N], tl.float32)
    for k in range(first, last, BLOCK_K):
        dy = _operand(
            dy_ptr, dy_scales_ptr, o, O, k, last, dy_stride, dy_down, dy_along, DY, KIND, 1, COLS, NATIVE, BLOCK_M, BLOCK_K
        )
        x = _operand(x_ptr, x_scales_ptr, i, I, k, last, x_stride, x_down, x_along, X, KIND, 1, COLS, NATIVE, BLOCK_N, BLOCK_K)
        if COLS == 128:
            of_dy = tl.load(dy_scales_ptr + o * dy_down + k // COLS * dy_along, mask=o < O, other=0.0)
            of_x = tl.load(x_scales_ptr + i * x_down + k // COLS * x_along, mask=i < I, other=0.0)
        total = _add(total, dy, x, of_dy, of_x, COLS, NATIVE)
    if first < last:
        if COLS == 1:
            total = total * tl.load(dy_scales_ptr + first * dy_along) * tl.load(x_scales_ptr + first * x_along)
        if dy_scale_ptr is not None:
            total = total * tl.load(dy_scale_ptr + first // COLS) * tl.load(x_scale_ptr + first // COLS)
    store_exact(dw_ptr + (e * O + o[:, None]) * I + i[None, :], total, (o < O)[:, None] & (i < I)[None, :])


_launch_product, _launch_wgrad = launcher(_product), launcher(_wgrad)


def _tile(large: Tile, cols: int, rows: int, groups: int, *widths: int) -> Tile:
    """Choose the tile, by shapes alone: a large one if groups fill it and rows are aligned."""
    if cols in (16, 32) or not native():
        return FOREIGN if cols == BLOCK else DECODED
    fills = min(widths) > FEW_ROWS and rows > FEW_ROWS * groups and all([width % 16 == 0 for width in widths])
    return (BLOCKS if cols == BLOCK else large) if fills else SMALL


@declared.grouped_scaled_mm.triton
def grouped_scaled_mm(
    a: Tensor, a_scales: Tensor, a_scale: Optional[Tensor], w: Tensor, w_scales: Tensor, w_scale: Optional[Tensor],
    b: Optional[Tensor], scales: Optional[Tensor], offsets: Tensor, index: Optional[Tensor], a_element: str, a_cols: int,
    w_element: str, w_rows: int, w_cols: int, kind: str, width: int, out: torch.dtype,
) -> Tensor:
    if a_cols != w_cols or a_cols not in (0, 16, 32, BLOCK) or out is torch.float64:
        return declared.grouped_scaled_mm.kernel.torch_impl(  # type: ignore[no-any-return]
            a, a_scales, a_scale, w, w_scales, w_scale, b, scales, offsets, index, a_element, a_cols, w_element, w_rows, w_cols,
            kind, width, out,
        )
    (groups, outer, _), rows = w.shape, a.shape[0] if index is None else index.shape[0]
    y = a.new_empty((rows, outer), dtype=out)
    if not rows:
        return y
    tile = _tile(LARGE, a_cols, rows, groups, outer, width)
    tiles = cdiv(rows, tile.m) + groups + 1
    _launch_product(
        tiles * cdiv(outer, tile.n), 1, 1, a.contiguous(), a_scales, contiguous(a_scale), w.contiguous(), w_scales,
        contiguous(w_scale), y, contiguous(b), contiguous(scales), contiguous(index), offsets.contiguous(), tiles, rows, a.shape[0],
        groups, outer, width, a.shape[1], w.shape[2], *a_scales.stride(), *w_scales.stride(), a_element, w_element, kind, w_rows,
        a_cols, native(), b is not None, scales is not None, index is not None, tile.m, tile.n, tile.k, GROUP, blocks_of(groups),
        num_warps=tile.warps, num_stages=tile.stages,
    )
    return y


@declared.grouped_scaled_wgrad.triton
def grouped_scaled_wgrad(
    dy: Tensor, dy_scales: Tensor, dy_scale: Optional[Tensor], x: Tensor, x_scales: Tensor, x_scale: Optional[Tensor],
    starts: Tensor, ends: Tensor, dy_element: str, x_element: str, cols: int, kind: str, width: int, out: torch.dtype,
) -> Tensor:
    groups, outer, inner = ends.shape[0], dy.shape[0], x.shape[0]
    if cols not in (1, 16, 32, BLOCK) or out is torch.float64:
        return declared.grouped_scaled_wgrad.kernel.torch_impl(  # type: ignore[no-any-return]
            dy, dy_scales, dy_scale, x, x_scales, x_scale, starts, ends, dy_element, x_element, cols, kind, width, out
        )
    dw = dy.new_empty((groups, outer, inner), dtype=out)
    tile = _tile(BLOCKS, cols, dy.shape[1], 0, outer, inner)
    _launch_wgrad(
        cdiv(outer, tile.m) * cdiv(inner, tile.n), groups, 1, dy.contiguous(), dy_scales, contiguous(dy_scale), x.contiguous(),
        x_scales, contiguous(x_scale), starts.contiguous(), dw, outer, inner, dy.shape[1], x.shape[1],
        *dy_scales.stride(), *x_scales.stride(), dy_element, x_element, kind, cols, native(), tile.m, tile.n, tile.k, GROUP,
        num_warps=tile.warps, num_stages=tile.stages,
    )
    return dw
