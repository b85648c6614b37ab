"""The device code of normalisations: programs of whole rows, or of one row in chunks of columns if it is too long to be kept.

The backward runs a fixed number of programs, each with its own rows and partial sums. If rows leave no registers for their partial
sums, it loads the inputs of the two sums once more, from the cache. For a still longer row it computes the two sums first, and dx
and the partial sums of a chunk of columns in a second pass.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from funcops.engine.backend.launch import launcher
from funcops.engine.backend.shared import SharedMemory
from funcops.library.kernels.triton.common import load_wide, rounded, store_rounded
from funcops.library.kernels.triton.pointwise import philox_words

SUMS, SUMMED = 1024, 8192  # bytes, at most, in which warps add sums of rows; numbers of sums over rows that they exchange


@triton.jit
def _forward(
    x_ptr, residual_ptr, key_ptr, w_ptr, b_ptr, y_ptr, stream_ptr, mean_ptr, rstd_ptr, rows, width, alpha: tl.float32,
    eps: tl.float32, threshold, factor: tl.float32, ADD: tl.constexpr, DROP: tl.constexpr, CENTRE: tl.constexpr,
    WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """y = (x - mean) * rstd * (w or 1 + w) + b, rstd = (alpha * sum((x - mean)^2) + eps)^(-1/2), for ROWS whole rows. With ADD,
    x is first x + residual, or with DROP dropout(x) + residual, rounded and written to stream."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)[None, :]
    at = row[:, None] * width + i
    inside = (row < rows)[:, None] & (i < width)
    x = load_wide(x_ptr + at, inside)
    if DROP:
        x = dropped(x, row * (width // 4), tl.load(key_ptr), tl.load(key_ptr + 1), threshold, factor, ROWS, BLOCK)
    if ADD:
        x = add_rounded(x, residual_ptr, stream_ptr, at, inside)
    mean = tl.zeros([ROWS], tl.float32)
    if CENTRE:
        mean = tl.sum(x, 1) / width
        tl.store(mean_ptr + row, mean, mask=row < rows)
    centred = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) * alpha + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < rows)
    y = centred * rstd[:, None]
    each = tl.broadcast_to(i, [ROWS, BLOCK])  # else the threads share short rows of w and b, by narrow accesses
    if WEIGHT:
        y *= load_wide(w_ptr + each, each < width) + (1.0 if SHIFTED else 0.0)
    if BIAS:
        y += load_wide(b_ptr + each, each < width)
    store_rounded(y_ptr + at, y, inside)


@triton.jit
def dropped(x, first, seed, stream, threshold, factor, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """x times factor where its random word is at least the threshold, else 0. A row's words begin with its block `first`."""
    block = first[:, None] + tl.arange(0, BLOCK // 4)[None, :]
    words = tl.reshape(philox_words(block, seed, stream), [ROWS, BLOCK])
    return tl.where(words >= tl.cast(threshold, tl.uint32), x * factor, x * 0.0)


@triton.jit
def add_rounded(x, residual_ptr, stream_ptr, at, inside):
    """Write x + residual to stream, rounded, and return the rounded sum."""
    stream = rounded(x + load_wide(residual_ptr + at, inside), stream_ptr.dtype.element_ty)
    tl.store(stream_ptr + at, stream, mask=inside)
    return stream.to(tl.float32)


@triton.jit
def _forward_long(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, stream_ptr, mean_ptr, rstd_ptr, width, alpha: tl.float32, eps: tl.float32,
    ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_forward` for one row, in chunks of columns."""
    start_of_row = tl.program_id(0).to(tl.int64) * width
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    mean = 0.0
    if CENTRE or ADD:
        for start in range(0, width, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = load_wide(x_ptr + start_of_row + i, i < width)
            if ADD:
                x = add_rounded(x, residual_ptr, stream_ptr, start_of_row + i, i < width)
            total += x
        if CENTRE:
            mean = tl.sum(total, 0) / width
            tl.store(mean_ptr + tl.program_id(0), mean)
    if ADD:
        x_ptr = stream_ptr
        tl.debug_barrier()  # a thread may read what another wrote: loads and stores differ in layout if rows are not aligned
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        centred = tl.where(i < width, load_wide(x_ptr + start_of_row + i, i < width) - mean, 0.0)
        squares += centred * centred
    rstd = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) * alpha + eps)
    tl.store(rstd_ptr + tl.program_id(0), rstd)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        y = (load_wide(x_ptr + start_of_row + i, i < width) - mean) * rstd
        if WEIGHT:
            y *= load_wide(w_ptr + i, i < width) + (1.0 if SHIFTED else 0.0)
        if BIAS:
            y += load_wide(b_ptr + i, i < width)
        store_rounded(y_ptr + start_of_row + i, y, i < width)


@triton.jit
def _terms(dy_ptr, x_ptr, w, at, inside, mean, rstd, WEIGHT: tl.constexpr):
    """dy, n = (x - mean) * rstd, and g = dy * w."""
    dy = load_wide(dy_ptr + at, inside)
    n = tl.where(inside, (load_wide(x_ptr + at, inside) - mean) * rstd, 0.0)
    g = dy
    if WEIGHT:
        g = dy * w
    return dy, n, g


@triton.jit
def _weight(w_ptr, i, inside, SHIFTED: tl.constexpr):
    """w, or 1 + w."""
    return load_wide(w_ptr + i, inside) + (1.0 if SHIFTED else 0.0)


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, add_ptr, dx_ptr, y_ptr, dw_ptr, db_ptr, rows, width, alpha: tl.float32,
    ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr,
    NORMED: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, AGAIN: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """dx = rstd * (g - alpha sum(g) - n alpha sum(g n)) + add, and a part of dw and db: whole rows, ROWS at a time, with
    STAGES - 1 loads in flight while one is used. With AGAIN, dy, x and w are loaded for the sums, and once more for the rest. With
    NORMED, y is recomputed, too."""
    part, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i = tl.arange(0, BLOCK)[None, :]
    within = tl.arange(0, ROWS)[:, None] * width + i
    w = tl.zeros([1, BLOCK], tl.float32)
    if WEIGHT and not AGAIN:
        w = _weight(w_ptr, i, i < width, SHIFTED)
    dw, db = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    for group in tl.range(part, tl.cdiv(rows, ROWS), parts, num_stages=STAGES):
        row, at = group * ROWS + tl.arange(0, ROWS), group * ROWS * width
        inside = (row < rows)[:, None] & (i < width)
        rstd, mean = tl.load(rstd_ptr + row, mask=row < rows, other=0.0)[:, None], 0.0
        if CENTRE:
            mean = tl.load(mean_ptr + row, mask=row < rows, other=0.0)[:, None]
        first_w = w
        if WEIGHT and AGAIN:
            first_w = _weight(w_ptr, i, i < width, SHIFTED)
        dy, n, g = _terms(dy_ptr + at, x_ptr + at, first_w, within, inside, mean, rstd, WEIGHT)
        if DX:
            along, plain = (tl.sum(g * n, 1) * alpha)[:, None], 0.0
            if CENTRE:
                plain = (tl.sum(g, 1) * alpha)[:, None]
        if AGAIN:
            tl.debug_barrier()  # else the compiler keeps what it has loaded
            dy, n, g = _terms(dy_ptr + at, x_ptr + at, w, within, inside, mean, rstd, False)
        if DW:
            dw += dy * n
        if DB:
            db += dy
        if NORMED:
            y = n * w
            if AGAIN:
                y = n * _weight(w_ptr, i, i < width, SHIFTED)
            if BIAS:
                y += load_wide(b_ptr + i, i < width)
            store_rounded(y_ptr + at + within, y, inside)
        if DX:
            if WEIGHT and AGAIN:
                g = dy * _weight(w_ptr, i, i < width, SHIFTED)
            dx = rstd * (g - plain - n * along)
            if ADD:
                dx += load_wide(add_ptr + at + within, inside)
            store_rounded(dx_ptr + at + within, dx, inside)
    i = tl.arange(0, BLOCK)
    if DW:
        tl.store(dw_ptr + part * width + i, tl.sum(dw, 0), mask=i < width)
    if DB:
        tl.store(db_ptr + part * width + i, tl.sum(db, 0), mask=i < width)


@triton.jit
def _backward_row(
    dy_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, add_ptr, dx_ptr, y_ptr, dw_ptr, db_ptr, rows, width, alpha: tl.float32,
    ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr,
    NORMED: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, AGAIN: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`_backward` for one row at a time, in PIECES of 16-bit elements. A branch encloses the rest of each piece: else the compiler
    holds all pieces in float32 at a time, and lacks the registers. w is loaded for each pass, which takes fewer registers, too."""
    part, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i = tl.arange(0, BLOCK)
    dw, db = (), ()
    for _ in tl.static_range(PIECES):
        dw, db = dw + (tl.zeros([BLOCK], tl.float32),), db + (tl.zeros([BLOCK], tl.float32),)  # type: ignore[assignment]
    for row in tl.range(part, rows, parts, num_stages=1):
        at = row * width + i
        rstd, mean = tl.load(rstd_ptr + row), 0.0
        if CENTRE:
            mean = tl.load(mean_ptr + row)
        dy, x, add = (), (), ()
        for k in tl.static_range(PIECES):
            inside = k * BLOCK + i < width
            dy = dy + (tl.load(dy_ptr + at + k * BLOCK, mask=inside, other=0.0),)  # type: ignore[assignment]
            x = x + (tl.load(x_ptr + at + k * BLOCK, mask=inside, other=0.0),)  # type: ignore[assignment]
        along, plain = 0.0, 0.0
        if DX:
            along, plain = _sums_of_row(dy, x, w_ptr, width, mean, rstd, CENTRE, WEIGHT, SHIFTED, PIECES, BLOCK)
            along, plain = along * alpha, plain * alpha
        if AGAIN:
            tl.debug_barrier()  # else the compiler keeps what it has loaded
        if ADD:
            for k in tl.static_range(PIECES):
                add = add + (tl.load(add_ptr + at + k * BLOCK, mask=k * BLOCK + i < width, other=0.0),)  # type: ignore[assignment]
        new_dw, new_db = (), ()
        for k in tl.static_range(PIECES):
            to_dw, to_db = dw[k], db[k]  # type: ignore[var-annotated]
            if k * BLOCK < width:
                inside = k * BLOCK + i < width
                if AGAIN:
                    each_dy, n, g = _terms(dy_ptr + k * BLOCK, x_ptr + k * BLOCK, 0.0, at, inside, mean, rstd, False)
                else:
                    each_dy, n = dy[k].to(tl.float32), (x[k].to(tl.float32) - mean) * rstd
                if DW:
                    to_dw += each_dy * n
                if DB:
                    to_db += each_dy
                w = 1.0
                if WEIGHT:
                    w = _weight(w_ptr + k * BLOCK, i, inside, SHIFTED)
                if NORMED:
                    y = n * w
                    if BIAS:
                        y += load_wide(b_ptr + k * BLOCK + i, inside)
                    store_rounded(y_ptr + at + k * BLOCK, y, inside)
                if DX:
                    g = each_dy * w
                    dx = rstd * (g - plain - n * along)
                    if ADD:
                        dx += add[k].to(tl.float32)
                    store_rounded(dx_ptr + at + k * BLOCK, dx, inside)
            new_dw, new_db = new_dw + (to_dw,), new_db + (to_db,)  # type: ignore[assignment]
        dw, db = new_dw, new_db
    for k in tl.static_range(PIECES):
        at, inside = part * width + k * BLOCK + i, k * BLOCK + i < width
        if DW:
            tl.store(dw_ptr + at, dw[k], mask=inside)
        if DB:
            tl.store(db_ptr + at, db[k], mask=inside)


@triton.jit
def _sums_of_row(
    dy, x, w_ptr, width, mean, rstd, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """sum(g n) and, if CENTRE, sum(g) of a row in PIECES; the 8 elements that one thread has are added first."""
    i = tl.arange(0, BLOCK)
    along, plain = tl.zeros([BLOCK // 8], tl.float32), tl.zeros([BLOCK // 8], tl.float32)
    for k in tl.static_range(PIECES):
        g, n = dy[k].to(tl.float32), (x[k].to(tl.float32) - mean) * rstd
        if WEIGHT:
            g *= _weight(w_ptr + k * BLOCK, i, k * BLOCK + i < width, SHIFTED)
        along += tl.sum(tl.reshape(g * n, [BLOCK // 8, 8]), 1)
        if CENTRE:
            plain += tl.sum(tl.reshape(g, [BLOCK // 8, 8]), 1)
    return tl.sum(along, 0), tl.sum(plain, 0)


@triton.jit
def _row_sums(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, sums_ptr, width, alpha: tl.float32,
    CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
):
    """alpha * sum(g n) and, if CENTRE, alpha * sum(g) of each row: [rows, 2]."""
    row = tl.program_id(0).to(tl.int64)
    rstd, mean = tl.load(rstd_ptr + row), 0.0
    if CENTRE:
        mean = tl.load(mean_ptr + row)
    w, along, plain = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        if WEIGHT:
            w = _weight(w_ptr, i, i < width, SHIFTED)
        _, n, g = _terms(dy_ptr, x_ptr, w, row * width + i, i < width, mean, rstd, WEIGHT)
        along += g * n
        plain += g
    tl.store(sums_ptr + 2 * row, tl.sum(along, 0) * alpha)
    tl.store(sums_ptr + 2 * row + 1, tl.sum(plain, 0) * alpha if CENTRE else 0.0)


@triton.jit
def _backward_long(
    dy_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, add_ptr, sums_ptr, dx_ptr, y_ptr, dw_ptr, db_ptr, rows, width,
    ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr,
    NORMED: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, BLOCK: tl.constexpr,
):
    """`_backward` for program p and a chunk of columns of rows p, p + P, ..., whose sums are known."""
    part, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    w = tl.zeros([BLOCK], tl.float32)
    if WEIGHT:
        w = _weight(w_ptr, i, inside, SHIFTED)
    dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for row in range(part, rows, parts):
        rstd, mean = tl.load(rstd_ptr + row), 0.0
        if CENTRE:
            mean = tl.load(mean_ptr + row)
        at = row * width + i
        dy, n, g = _terms(dy_ptr, x_ptr, w, at, inside, mean, rstd, WEIGHT)
        if NORMED:
            y = n * w
            if BIAS:
                y += load_wide(b_ptr + i, inside)
            store_rounded(y_ptr + at, y, inside)
        if DX:
            dx = rstd * (g - tl.load(sums_ptr + 2 * row + 1) - n * tl.load(sums_ptr + 2 * row))
            if ADD:
                dx += load_wide(add_ptr + at, inside)
            store_rounded(dx_ptr + at, dx, inside)
        if DW:
            dw += dy * n
        if DB:
            db += dy
    if DW:
        tl.store(dw_ptr + part * width + i, dw, mask=inside)
    if DB:
        tl.store(db_ptr + part * width + i, db, mask=inside)


@triton.jit
def _column_sums(dy_ptr, parts_ptr, rows, width, stride, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a part of the sums of some columns, ROWS rows at a time, as in `_backward`; `stride`: the distance between rows."""
    part, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for group in tl.range(part, tl.cdiv(rows, ROWS), parts, num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS)
        total += load_wide(dy_ptr + row[:, None] * stride + i[None, :], (row < rows)[:, None] & (i < width)[None, :])
    tl.store(parts_ptr + part * width + i, tl.sum(total, 0), mask=i < width)


@triton.jit
def _sum_parts(
    parts_ptr, others_ptr, total_ptr, other_total_ptr, parts, width, ADD: tl.constexpr, TWO: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum a few columns per program: there are many parts, and few columns. With ADD, add to the total; with TWO, a second row of
    programs sums the others."""
    if TWO:
        if tl.program_id(1) == 1:
            parts_ptr = others_ptr
            total_ptr = other_total_ptr
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, parts, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < parts)[:, None] & (i < width)[None, :]
        total += tl.load(parts_ptr + row[:, None] * width + i[None, :], mask=inside, other=0.0)
    found = tl.sum(total, 0)
    if ADD:
        found += load_wide(total_ptr + i, i < width)
    store_rounded(total_ptr + i, found, i < width)


def _shared_of_backward(arguments: dict[str, Any], stages: int, memory: SharedMemory) -> int:
    """Rows of each tensor, and a bias, for each load in flight, and the sums that warps exchange."""
    rows, block = arguments["ROWS"], arguments["BLOCK"]
    in_flight = (stages - 1) * (rows * (2 + arguments["ADD"]) + (arguments["BIAS"] and arguments["NORMED"]))
    return int(in_flight * block * arguments["x_ptr"].itemsize + min(rows * block, SUMMED) * 4 + SUMS)


launch_forward, launch_forward_long = launcher(_forward), launcher(_forward_long)
launch_backward = launcher(_backward, shared=_shared_of_backward)
launch_backward_row, launch_backward_long = launcher(_backward_row), launcher(_backward_long)
launch_row_sums = launcher(_row_sums)
launch_column_sums, launch_sum_parts = launcher(_column_sums), launcher(_sum_parts)
