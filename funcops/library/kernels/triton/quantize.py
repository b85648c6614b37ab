"""Quantisers: one program per tile of x, which is read once for all outputs; one program per row for rows with one scale.

The torch body serves x that is rounded by a key, or transformed before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import quantize as declared
from funcops.library.kernels.triton.common import block_of, cdiv, warps_of
from funcops.library.kernels.triton.low_bits import (
    decode,
    decode_scale,
    encode,
    load_exact,
    native,
    number,
    packed,
    quantise,
    scale_at,
    scales_of,
    sizes,
    store_exact,
    times,
    unpacked,
)

TILES = 16, 32, 64, 128
LONGEST, STEP = 16384, 4096  # elements of a row that a program holds, and that it takes at a time of a longer one
AMAX_BLOCK, AMAX_PROGRAMS = 4096, 1024


@triton.jit
def _store_codes(ptr, codes, row, column, rows, stride, ELEMENT: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Store codes [A, B] to rows of `stride` bytes, from (row, column) on; 4-bit codes two to a byte."""
    if ELEMENT == "e2m1":
        _store(ptr, packed(codes, A, B), row, column // 2, rows, stride, A, B // 2)
    else:
        _store(ptr, codes, row, column, rows, stride, A, B)


@triton.jit
def _store(ptr, v, row, column, rows, columns, A: tl.constexpr, B: tl.constexpr):
    m, n = row + tl.arange(0, A), column + tl.arange(0, B)
    tl.store(ptr + m[:, None] * columns + n[None, :], v, mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit
def _store_turned(
    ptr, codes, row, column, rows, stride, ELEMENT: tl.constexpr, FOUR: tl.constexpr, A: tl.constexpr, B: tl.constexpr
):
    """`_store_codes`; with FOUR, code i of a row is the one at i % (B / 4) * 4 + i / (B / 4)."""
    if FOUR:
        byte = tl.arange(0, 4)[None, :, None]
        words = tl.sum(tl.reshape(codes, [A, 4, B // 4]).to(tl.int32) << (byte * 8), 1)
        _store(ptr.to(tl.pointer_type(tl.int32)), words, row, column // 4, rows, stride // 4, A, B // 4)
    else:
        _store_codes(ptr, codes, row, column, rows, stride, ELEMENT, A, B)


@triton.jit
def _store_scales(ptr, v, m, n, rows, columns, KIND: tl.constexpr):
    """Store scales of rows m, one for each block n of a row."""
    m, n = m[:, None], n[None, :]
    tl.store(ptr + scale_at(m, n, rows, columns, 1, KIND), v, mask=(m < rows) & (n < columns))


@triton.jit
def _tiles(
    x_ptr, given_ptr, codes_ptr, scales_ptr, turned_ptr, turned_scales_ptr, rows, width, stride, turned_stride, FROM: tl.constexpr,
    ELEMENT: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr,
    EPSILON: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, FOUR: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute codes and scales of x [rows, width], as x lies (ROW), transposed (COL), or both if tiles are not square. FROM: x is
    codes of this element, with a scale at given_ptr for each row of a block. Else `given` is the largest |x| of the tensor, for its
    one scale (ROWS 0) or the tiles'; with KIND "scaled" it is the factor, and the largest |x| is joined at scales_ptr. FOUR: one
    scale serves all rows of a tile, which are taken such that a thread holds four neighbours: it stores their transposed codes as
    32 bits."""
    across = tl.cdiv(width, BLOCK_N)
    pid = tl.program_id(0)
    row, column = (pid // across).to(tl.int64) * BLOCK_M, (pid % across).to(tl.int64) * BLOCK_N
    i = tl.arange(0, BLOCK_M)
    if FOUR:
        i = i % (BLOCK_M // 4) * 4 + i // (BLOCK_M // 4)
    m, n = row + i, column + tl.arange(0, BLOCK_N)
    at, inside = m[:, None] * width + n[None, :], (m < rows)[:, None] & (n < width)[None, :]
    given = 0.0
    if FROM != "":
        scales = tl.load(given_ptr + scale_at(m, pid % across, rows, across, ROWS, KIND), mask=m < rows, other=0.0)
        x = decode(tl.load(x_ptr + at, mask=inside, other=0), FROM, NATIVE) * scales[:, None]
    else:
        x = load_exact(x_ptr + at, inside)
        if given_ptr is not None:
            given = tl.load(given_ptr)
    if ROWS == 0:  # one scale, whichever way tiles lie
        factor = given
        if KIND == "scaled":
            largest = number(tl.max(tl.max(sizes(x), 1), 0))
            tl.atomic_max(scales_ptr, largest.to(tl.int32, bitcast=True), sem="relaxed")
        else:
            factor, stored = scales_of(given, given, ELEMENT, KIND, EPSILON, NARROW, NATIVE)
            if pid == 0:
                tl.store(scales_ptr if ROW else turned_scales_ptr, stored)
        codes = encode(x * factor, ELEMENT, NATIVE)
        if ROW:
            _store_codes(codes_ptr, codes, row, column, rows, stride, ELEMENT, BLOCK_M, BLOCK_N)
        else:
            _store_codes(turned_ptr, tl.trans(codes), column, row, width, turned_stride, ELEMENT, BLOCK_N, BLOCK_M)
    elif ROWS == COLS:  # codes are the same, whichever way tiles lie
        codes, stored = quantise(x, given, BLOCK_M, BLOCK_N, ELEMENT, KIND, ROWS, COLS, EPSILON, NARROW, NATIVE)
        high, wide = tl.cdiv(rows, ROWS), tl.cdiv(width, COLS)
        HIGH: tl.constexpr = BLOCK_M // ROWS
        WIDE: tl.constexpr = BLOCK_N // COLS
        if ROW:
            _store_codes(codes_ptr, codes, row, column, rows, stride, ELEMENT, BLOCK_M, BLOCK_N)
            _store(scales_ptr, stored, row // ROWS, column // COLS, high, wide, HIGH, WIDE)
        else:
            _store_codes(turned_ptr, tl.trans(codes), column, row, width, turned_stride, ELEMENT, BLOCK_N, BLOCK_M)
            _store(turned_scales_ptr, tl.trans(stored), column // COLS, row // ROWS, wide, high, WIDE, HIGH)
    else:
        if ROW:
            codes, stored = quantise(x, given, BLOCK_M, BLOCK_N, ELEMENT, KIND, ROWS, COLS, EPSILON, NARROW, NATIVE)
            j = tl.arange(0, BLOCK_N // COLS)
            if FOUR:
                tl.store(codes_ptr + at, codes, mask=inside)
            else:
                _store_codes(codes_ptr, codes, row, column, rows, stride, ELEMENT, BLOCK_M, BLOCK_N)
            _store_scales(scales_ptr, stored, m, column // COLS + j, rows, tl.cdiv(width, COLS), KIND)
        if COL:
            codes, stored = quantise(tl.trans(x), given, BLOCK_N, BLOCK_M, ELEMENT, KIND, ROWS, COLS, EPSILON, NARROW, NATIVE)
            _store_turned(turned_ptr, codes, column, row, width, turned_stride, ELEMENT, FOUR, BLOCK_N, BLOCK_M)
            j = tl.arange(0, BLOCK_M // COLS)
            _store_scales(turned_scales_ptr, stored, n, row // COLS + j, width, tl.cdiv(rows, COLS), KIND)


@triton.jit
def _rows(
    x_ptr, codes_ptr, scales_ptr, width, ELEMENT: tl.constexpr, KIND: tl.constexpr, EPSILON: tl.constexpr, NATIVE: tl.constexpr,
    AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):
    """Quantise a row with a scale of its own; a row that a program cannot hold is loaded AGAIN."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * width
    codes_ptr += row * width
    i = tl.arange(0, BLOCK)
    x = load_exact(x_ptr + i, i < width)
    most = sizes(x)
    if AGAIN:
        for start in range(BLOCK, width, BLOCK):
            v = sizes(load_exact(x_ptr + start + i, start + i < width))
            most = tl.maximum(most, v)
    factor, stored = scales_of(number(tl.max(most, 0)), 0.0, ELEMENT, KIND, EPSILON, False, NATIVE)
    tl.store(scales_ptr + row, stored)
    tl.store(codes_ptr + i, encode(x * factor, ELEMENT, NATIVE), mask=i < width)
    if AGAIN:
        for start in range(BLOCK, width, BLOCK):
            v = load_exact(x_ptr + start + i, start + i < width)
            tl.store(codes_ptr + start + i, encode(v * factor, ELEMENT, NATIVE), mask=start + i < width)


@triton.jit
def _amax(x_ptr, amax_ptr, n, BLOCK: tl.constexpr):
    """Join programs' results by their bits, ordered as the numbers, which are >= 0: the order of programs does not matter."""
    total = tl.zeros([BLOCK], tl.float32)
    for block in range(tl.program_id(0).to(tl.int64), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        v = sizes(load_exact(x_ptr + i, i < n))
        total = tl.maximum(total, v)
    tl.atomic_max(amax_ptr, tl.max(total, 0).to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def _turn(x_ptr, y_ptr, rows, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    across = tl.cdiv(width, BLOCK_N)
    pid = tl.program_id(0)
    row, column = (pid // across).to(tl.int64) * BLOCK_M, (pid % across).to(tl.int64) * BLOCK_N
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    x = tl.load(x_ptr + m[:, None] * width + n[None, :], mask=(m < rows)[:, None] & (n < width)[None, :], other=0)
    _store(y_ptr, tl.trans(x), column, row, width, rows, BLOCK_N, BLOCK_M)


@triton.jit
def _decode(
    codes_ptr, scales_ptr, scale_ptr, y_ptr, rows, width, stride, wide, down, along, ELEMENT: tl.constexpr, KIND: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """y [rows, width] from codes with rows of `stride` bytes and scales with rows of `wide`, whose strides are `down` and `along`.
    ROWS 0: one scale for all; COLS 0: one for each row."""
    across = tl.cdiv(width, BLOCK_N)
    pid = tl.program_id(0)
    row, column = (pid // across).to(tl.int64) * BLOCK_M, (pid % across).to(tl.int64) * BLOCK_N
    m, n = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    inside = (m < rows)[:, None] & (n < width)[None, :]
    if ELEMENT == "e2m1":
        byte = column // 2 + tl.arange(0, BLOCK_N // 2)
        within = (m < rows)[:, None] & (byte < stride)[None, :]
        codes = unpacked(tl.load(codes_ptr + m[:, None] * stride + byte[None, :], mask=within, other=0), BLOCK_M, BLOCK_N)
    else:
        codes = tl.load(codes_ptr + m[:, None] * stride + n[None, :], mask=inside, other=0)
    values = decode(codes, ELEMENT, NATIVE)
    if ROWS == 0:
        scales = decode_scale(tl.load(scales_ptr), KIND)
    else:
        ACROSS: tl.constexpr = BLOCK_N // COLS if COLS else 1
        i, j = row // ROWS + tl.arange(0, BLOCK_M // ROWS), tl.arange(0, ACROSS)
        if COLS:
            j = column // COLS + j
        tiles = (i < tl.cdiv(rows, ROWS))[:, None] & (j < wide)[None, :]
        scales = decode_scale(tl.load(scales_ptr + i[:, None] * down + j[None, :] * along, mask=tiles, other=0), KIND)
    if scale_ptr is not None:
        scales = scales * tl.load(scale_ptr)
    if ROWS == 0:
        values = values * scales
    else:
        values = times(values, scales, BLOCK_M, BLOCK_N, ROWS, COLS if COLS else BLOCK_N)
    store_exact(y_ptr + m[:, None] * width + n[None, :], values, inside)


_launch_tiles, _launch_rows, _launch_amax = launcher(_tiles), launcher(_rows), launcher(_amax)
_launch_turn, _launch_decode = launcher(_turn), launcher(_decode)


class _Made(NamedTuple):
    """Memory for the codes and scales of a side."""

    codes: Tensor
    scales: Tensor


def _sizes(x: Tensor) -> tuple[int, int]:
    """The rows and columns of x [*, K], which is not empty."""
    width = x.shape[-1]
    return x.numel() // width, width


def _room(x: Tensor, shape: Sequence[int], rows: int, columns: int, element: str, tile: tuple[int, int], kind: str) -> _Made:
    """Allocate codes and scales for so many rows and columns; `shape`: the codes' without the last dim."""
    wide, scales, dtype = _layout(rows, columns, element, tile, kind)
    return _Made(x.new_empty((*shape, wide), dtype=torch.uint8), x.new_empty(scales, dtype=dtype))


@functools.lru_cache(maxsize=4096)
def _layout(
    rows: int, columns: int, element: str, tile: tuple[int, int], kind: str
) -> tuple[int, tuple[int, ...], torch.dtype]:
    """The bytes of a row of codes, and the shape and dtype of the scales."""
    scales = cdiv(rows, tile[0] or rows), cdiv(columns, tile[1] or columns)
    dtype = torch.float32 if kind in ("pow2", "float32") else torch.uint8
    wide = cdiv(columns, 2) if element == "e2m1" else columns
    return wide, scales[::-1] if declared.by_columns(*tile, kind) else scales, dtype


def _serves(x: Tensor, rows: int, cols: int, kind: str, amax: Optional[Tensor]) -> bool:
    """Whether these kernels make such tiles. An amax given for tiles, which only e4m3 scales use, is left to the torch body, and so
    are amaxes of groups of rows."""
    if x.numel() == 0 or kind in declared.FOUR_OVER_SIX or (kind == "e4m3" and amax is None):
        return False
    if amax is not None and amax.dim() > 1:
        return False
    if (rows, cols) == (0, 0):
        return True
    return cols in TILES and rows in (1, cols) and (amax is None or kind == "e4m3")


def _run(
    x: Tensor, element: str, rows: int, cols: int, kind: str, amax: Optional[Tensor], row: Optional[_Made], col: Optional[_Made],
    epsilon: float,
) -> None:
    """Compute codes and scales of x [*, K], for the sides that have memory."""
    (high, wide), whole = _sizes(x), rows == 0
    if whole and amax is None:
        amax = _largest(x)
    if whole and col is None and element != "e2m1" and x.numel() % TILES[-1] == 0:
        high, wide = x.numel() // TILES[-1], TILES[-1]  # elementwise: rows that begin at aligned addresses
    m, n, warps = (128, 128, 8) if col is not None or rows == 128 else (32, 128, 4)
    if element == "e2m1" and col is not None:
        m, n, warps = 64, 64, 8
    codes, scales = row or (None, None)
    turned, turned_scales = col or (None, None)
    narrow = x.dtype is torch.bfloat16 and cols == declared.BLOCK
    within_rows = col is not None and element != "e2m1" and (rows, cols) == (1, m)
    four = within_rows and high % 4 == 0
    if within_rows and not four:  # codes stored one by one: registers hold half of a tile, which has no scales of rows
        if row is not None:
            _run(x, element, rows, cols, kind, amax, row, None, epsilon)
            row, codes, scales = None, None, None
        n = 64
    strides = (wide, high) if element != "e2m1" else (cdiv(wide, 2), cdiv(high, 2))  # bytes of a row of codes
    _launch_tiles(
        cdiv(high, m) * cdiv(wide, n), 1, 1, x, amax, codes, scales, turned, turned_scales, high, wide, *strides,
        "", element, kind, rows,
        cols, row is not None, col is not None, epsilon, narrow, native(), four, m, n, num_warps=warps,
    )


def _by_rows(x: Tensor, element: str, kind: str, made: _Made, epsilon: float) -> None:
    rows, width = _sizes(x)
    block = block_of(width, LONGEST) if width <= LONGEST else STEP
    _launch_rows(
        rows, 1, 1, x, *made, width, element, kind, epsilon, native(), width > LONGEST, block, num_warps=warps_of(block)
    )


@declared.quantize_row.triton
def quantize_row(
    x: Tensor, element: str, rows: int, cols: int, kind: str, amax: Optional[Tensor], key: Optional[Tensor],
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    each_row = (rows, cols) == (1, 0) and amax is None and x.numel() > 0
    if key is not None or not (each_row or _serves(x, rows, cols, kind, amax)):
        return declared.quantize_row.kernel.torch_impl(x, element, rows, cols, kind, amax, key, epsilon)  # type: ignore[no-any-return]
    t = x.contiguous()
    made = _room(x, x.shape[:-1], *_sizes(x), element, (rows, cols), kind)
    if each_row:
        _by_rows(t, element, kind, made, epsilon)
    else:
        _run(t, element, rows, cols, kind, amax, made, None, epsilon)
    return made


@declared.quantize_col.triton
def quantize_col(
    x: Tensor, element: str, rows: int, cols: int, kind: str, amax: Optional[Tensor], key: Optional[Tensor], hadamard: bool,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor]:
    if key is not None or hadamard or kind in declared.FOUR_OVER_SIX or (amax is not None and amax.dim() > 1):
        plain = declared.quantize_col.kernel.torch_impl
        return plain(x, element, rows, cols, kind, amax, key, hadamard, epsilon)  # type: ignore[no-any-return]
    if not _serves(x, rows, cols, kind, amax):  # a scale for each column is found in a transposed copy
        return quantize_row(_matrix(x).mT.contiguous(), element, rows, cols, kind, amax, None, epsilon)
    t, (high, wide) = x.contiguous(), _sizes(x)
    made = _room(x, (wide,), wide, high, element, (rows, cols), kind)
    _run(t, element, rows, cols, kind, amax, None, made, epsilon)
    return made


@declared.quantize_both.triton
def quantize_both(
    x: Tensor, element: str, rows: int, cols: int, kind: str, amax: Optional[Tensor], epsilon: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    square = rows == cols  # codes are the same both ways; Triton 3.6 stores a tile's codes wrongly if it stores both
    if square or not _serves(x, rows, cols, kind, amax):
        codes, scales = quantize_row(x, element, rows, cols, kind, amax, None, epsilon)
        if square and element != "e2m1":
            return codes, scales, transpose(codes), scales.mT.contiguous()
        return codes, scales, *quantize_col(x, element, rows, cols, kind, amax, None, False, epsilon)
    t, (high, wide) = x.contiguous(), _sizes(x)
    row = _room(x, x.shape[:-1], high, wide, element, (rows, cols), kind)
    col = _room(x, (wide,), wide, high, element, (rows, cols), kind)
    _run(t, element, rows, cols, kind, amax, row, col, epsilon)
    return *row, *col


@declared.quantize_scaled.triton
def quantize_scaled(x: Tensor, element: str, scale: Tensor) -> tuple[Tensor, Tensor]:
    if x.numel() == 0 or x.dim() == 0 or scale.dim() > 1:
        return declared.quantize_scaled.kernel.torch_impl(x, element, scale)  # type: ignore[no-any-return]
    t, largest = x.contiguous(), x.new_zeros(1, dtype=torch.float32)
    made = _room(x, x.shape[:-1], *_sizes(x), element, (0, 0), "float32")
    _run(t, element, 0, 0, "scaled", scale, made._replace(scales=largest.view(torch.int32)), None, 0.0)
    return made.codes, largest


@declared.amax.triton
def amax(x: Tensor, hadamard: bool) -> Tensor:
    return declared.amax.kernel.torch_impl(x, True) if hadamard else _largest(x)  # type: ignore[no-any-return]


def _largest(x: Tensor) -> Tensor:
    found, n = x.new_zeros(1, dtype=torch.float32), x.numel()
    if n:
        grid = min(cdiv(n, AMAX_BLOCK), AMAX_PROGRAMS)
        _launch_amax(grid, 1, 1, x.contiguous(), found.view(torch.int32), n, AMAX_BLOCK, num_warps=warps_of(AMAX_BLOCK))
    return found


@declared.retile.triton
def retile(codes: Tensor, scales: Tensor, element: str, rows: int, cols: int, epsilon: float = 0.0) -> tuple[Tensor, Tensor]:
    if codes.numel() == 0 or (rows, cols) != (1, declared.BLOCK):
        x = dequantize(codes, scales, None, element, rows, cols, "pow2", codes.shape[-1], torch.float32)
        return quantize_col(x, element, rows, cols, "pow2", None, None, False, epsilon)
    high, wide = _sizes(codes)
    made = _room(codes, (wide,), wide, high, element, (rows, cols), "pow2")
    _launch_tiles(
        cdiv(high, 128) * cdiv(wide, 128), 1, 1, codes.contiguous(), scales.mT.contiguous(), None, None, *made, high, wide, wide,
        high, element, element, "pow2", rows, cols, False, True, epsilon, False, native(), high % 4 == 0, 128, 128, num_warps=8,
    )
    return made


@declared.transpose.triton
def transpose(codes: Tensor) -> Tensor:
    t = _matrix(codes)
    (rows, width), turned = t.shape, t.new_empty(t.shape[::-1])
    if t.numel():
        _launch_turn(cdiv(rows, 128) * cdiv(width, 128), 1, 1, t, turned, rows, width, 128, 128, num_warps=8)
    return turned


@declared.dequantize.triton
def dequantize(
    codes: Tensor, scales: Tensor, scale: Optional[Tensor], element: str, rows: int, cols: int, kind: str, width: int,
    out: torch.dtype,
) -> Tensor:
    tiles = (rows, cols) in ((0, 0), (1, 0)) or (cols in TILES and rows in (1, cols))
    if codes.numel() == 0 or out is torch.float64 or not tiles or (scale is not None and scale.dim() > 1):
        return declared.dequantize.kernel.torch_impl(codes, scales, scale, element, rows, cols, kind, width, out)  # type: ignore[no-any-return]
    t, y = _matrix(codes), codes.new_empty((*codes.shape[:-1], width), dtype=out)
    m, n, warps = (128, 128, 8) if rows == 128 else (32, 128, 4)
    _launch_decode(
        cdiv(len(t), m) * cdiv(width, n), 1, 1, t, scales, scale, y, len(t), width, t.shape[1], scales.shape[1], *scales.stride(),
        element, kind, rows, cols, native(), m, n, num_warps=warps,
    )
    return y


def _matrix(x: Tensor) -> Tensor:
    return declared.matrix(x).contiguous()
