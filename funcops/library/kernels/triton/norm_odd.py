"""The device code of normalisations of rows of odd width: they are read 16 bytes at a time, as rows of other widths.

A row may begin anywhere. It is read as its whole groups of 16 bytes and its two ends. Weight, bias and partial sums are offset to
these groups, but equally for rows a multiple of ALIGN apart: a program takes such rows, and keeps the others in registers.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from funcops.engine.backend.launch import launcher
from funcops.engine.backend.shared import SharedMemory
from funcops.library.kernels.triton.aligned import ALIGN, ends, whole_groups
from funcops.library.kernels.triton.common import load_wide, store_rounded
from funcops.library.kernels.triton.norm_kernels import add_rounded

SUMS = 1024  # bytes, at most, in which warps add their sums
HOLD = tl.constexpr(4096)  # for longer rows a backward has no registers for the bias, and loads it for each


@triton.jit
def _forward(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, stream_ptr, mean_ptr, rstd_ptr, rows, width, alpha: tl.float32, eps: tl.float32,
    ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr,
    STAGES: tl.constexpr, BLOCK: tl.constexpr,
):
    """`norm_kernels._forward` for whole rows, one at a time, each as many rows after the last as there are programs."""
    first, step = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    _, before, size = whole_groups(x_ptr, first * width, width, False)
    i = tl.arange(0, BLOCK)
    inside = i < size
    j, at_end = ends(before, size, width)
    w, w_end = _held(w_ptr, before, i, inside, j, at_end, 1.0 if SHIFTED else 0.0, WEIGHT)
    b, b_end = _held(b_ptr, before, i, inside, j, at_end, 0.0, BIAS)
    for row in tl.range(first, rows, step, num_stages=STAGES):
        at = (row * width + before) // ALIGN * ALIGN
        x = load_wide(x_ptr + at + i, inside)
        x_end = load_wide(x_ptr + at + j, at_end)
        if ADD:
            x = add_rounded(x, residual_ptr, stream_ptr, at + i, inside)
            x_end = add_rounded(x_end, residual_ptr, stream_ptr, at + j, at_end)
        mean = 0.0
        if CENTRE:
            mean = (tl.sum(x, 0) + tl.sum(x_end, 0)) / width
            tl.store(mean_ptr + row, mean)
        x, x_end = tl.where(inside, x - mean, 0.0), tl.where(at_end, x_end - mean, 0.0)
        rstd = 1.0 / tl.sqrt_rn((tl.sum(x * x, 0) + tl.sum(x_end * x_end, 0)) * alpha + eps)
        tl.store(rstd_ptr + row, rstd)
        y, y_end = x * rstd, x_end * rstd
        if WEIGHT:
            y, y_end = y * w, y_end * w_end
        if BIAS:
            y, y_end = y + b, y_end + b_end
        store_rounded(y_ptr + at + i, y, inside)
        store_rounded(y_ptr + at + j, y_end, at_end)


@triton.jit
def _held(ptr, before, i, inside, j, at_end, more, HAS: tl.constexpr):
    """The numbers at `ptr` for the columns of a row's whole groups, and of its ends, plus `more`; zeros unless HAS."""
    body, end = tl.zeros_like(i).to(tl.float32), tl.zeros_like(j).to(tl.float32)
    if HAS:
        body, end = load_wide(ptr + before + i, inside) + more, load_wide(ptr + before + j, at_end) + more
    return body, end


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, b_ptr, mean_ptr, rstd_ptr, add_ptr, dx_ptr, y_ptr, dw_ptr, db_ptr, rows, width, stride,
    alpha: tl.float32, ADD: tl.constexpr, CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr,
    BIAS: tl.constexpr, NORMED: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`norm_kernels._backward` for such rows, with partial sums `stride` apart."""
    part, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    _, before, size = whole_groups(x_ptr, part * width, width, False)
    i = tl.arange(0, BLOCK)
    inside = i < size
    j, at_end = ends(before, size, width)
    w, b = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    if WEIGHT:
        w = load_wide(w_ptr + before + i, inside) + (1.0 if SHIFTED else 0.0)
    if BIAS and BLOCK <= HOLD:
        b = load_wide(b_ptr + before + i, inside)
    dw, dw_end = tl.zeros([BLOCK], tl.float32), tl.zeros([2 * ALIGN], tl.float32)
    db, db_end = dw, dw_end
    for row in tl.range(part, rows, parts, num_stages=STAGES):
        at = (row * width + before) // ALIGN * ALIGN
        rstd, mean = tl.load(rstd_ptr + row), 0.0
        if CENTRE:
            mean = tl.load(mean_ptr + row)
        dy = load_wide(dy_ptr + at + i, inside)  # each load on its own line: the ends' accesses are narrow
        n = tl.where(inside, (load_wide(x_ptr + at + i, inside) - mean) * rstd, 0.0)
        dy_end = load_wide(dy_ptr + at + j, at_end)
        n_end = tl.where(at_end, (load_wide(x_ptr + at + j, at_end) - mean) * rstd, 0.0)
        g, g_end = dy, dy_end
        w_end = 0.0
        if WEIGHT:
            w_end = load_wide(w_ptr + before + j, at_end) + (1.0 if SHIFTED else 0.0)
            g, g_end = g * w, g_end * w_end
        if DW:
            dw, dw_end = dw + dy * n, dw_end + dy_end * n_end
        if DB:
            db, db_end = db + dy, db_end + dy_end
        if NORMED:
            y, y_end = n * w, n_end * w_end
            if BIAS:
                if BLOCK > HOLD:
                    b = load_wide(b_ptr + before + i, inside)
                y, y_end = y + b, y_end + load_wide(b_ptr + before + j, at_end)
            store_rounded(y_ptr + at + i, y, inside)
            store_rounded(y_ptr + at + j, y_end, at_end)
        if DX:
            along, plain = (tl.sum(g * n, 0) + tl.sum(g_end * n_end, 0)) * alpha, 0.0
            if CENTRE:
                plain = (tl.sum(g, 0) + tl.sum(g_end, 0)) * alpha
            dx, dx_end = rstd * (g - plain - n * along), rstd * (g_end - plain - n_end * along)
            if ADD:
                dx += load_wide(add_ptr + at + i, inside)
                dx_end += load_wide(add_ptr + at + j, at_end)
            store_rounded(dx_ptr + at + i, dx, inside)
            store_rounded(dx_ptr + at + j, dx_end, at_end)
    at = part * stride + before
    if DW:
        tl.store(dw_ptr + at + i, dw, mask=inside)
        tl.store(dw_ptr + at + j, dw_end, mask=at_end)
    if DB:
        tl.store(db_ptr + at + i, db, mask=inside)
        tl.store(db_ptr + at + j, db_end, mask=at_end)


@triton.jit
def _column_sums(dy_ptr, parts_ptr, rows, width, stride, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """`norm_kernels._column_sums` for ROWS rows at a time, each as many rows after the last as there are parts. The last program of
    a part takes the ends of its rows."""
    part, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    _, before, size = whole_groups(dy_ptr, part * width, width, False)
    first, step = (part * width + before) // ALIGN * ALIGN, (parts // ALIGN).to(tl.int64) * width * ALIGN
    count = tl.cdiv(rows - part, parts)
    if tl.program_id(1) < tl.num_programs(1) - 1:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for start in tl.range(0, count, ROWS, num_stages=STAGES):
            row = start + tl.arange(0, ROWS)
            inside = (row < count)[:, None] & (i < size)[None, :]
            total += load_wide(dy_ptr + first + row[:, None] * step + i[None, :], inside)
        tl.store(parts_ptr + part * stride + before + i, tl.sum(total, 0), mask=i < size)
    else:
        TALL: tl.constexpr = 8 * ROWS
        j, at_end = ends(before, size, width)
        ends_total = tl.zeros([TALL, 2 * ALIGN], tl.float32)
        for start in range(0, count, TALL):
            row = start + tl.arange(0, TALL)
            inside = (row < count)[:, None] & at_end[None, :]
            ends_total += load_wide(dy_ptr + first + row[:, None] * step + j[None, :], inside)
        tl.store(parts_ptr + part * stride + before + j, tl.sum(ends_total, 0), mask=at_end)


def _shared_of_forward(arguments: dict[str, Any], stages: int, memory: SharedMemory) -> int:
    """A row of each tensor, with its ends, for each load in flight."""
    rows, block, itemsize = 1 + arguments["ADD"], arguments["BLOCK"] + 2 * ALIGN.value, arguments["x_ptr"].itemsize
    return int((stages - 1) * rows * block * itemsize + SUMS)


launch_forward = launcher(_forward, shared=_shared_of_forward)
launch_backward, launch_column_sums = launcher(_backward), launcher(_column_sums)
