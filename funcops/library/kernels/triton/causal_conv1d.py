"""Causal convolution of each channel by itself. A thread goes through the times of its channels, with the last W of x, and in the
backward of g = dy f'(z), in registers: it reads each number once, except for W - 1 times around its own part."""
# mypy: disable-error-code="assignment, var-annotated"
# for tuples that grow while a kernel is unrolled

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import causal_conv1d as declared
from funcops.library.kernels.triton.activation import derivative, sigmoid
from funcops.library.kernels.triton.common import block_of, cdiv, contiguous, load_wide, store_rounded

THREADS, EACH = 128, 8  # of a program in the forward, and channels of a thread: 16 bytes
CHANNELS, TIMES = 128, 32  # of a program in the backward; times of one, in the backward at least
ROWS = 8  # times that a program reads at once
NARROW = 8  # the largest W for which a thread has several channels without spilled registers; for a larger one it has one
PROGRAMS = 1716  # for the sums, 13 on each of 132 multiprocessors, which hold no more: a constant, so that sums depend on no device


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, length, channels, WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    TIMES: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    first, inside = tl.program_id(2).to(tl.int64) * length * channels, c < channels
    begin = tl.program_id(1).to(tl.int64) * TIMES
    bias = load_wide(b_ptr + c, inside) if BIAS else tl.zeros([CHANNELS], tl.float32)
    w, xs = (), ()
    for j in tl.static_range(WIDTH):  # weights as [W, C], so that a thread's lie side by side
        w = w + (load_wide(w_ptr + j * channels + c, inside),)
    for j in tl.static_range(WIDTH - 1):  # the times before the first
        at = begin + (j - (WIDTH - 1))
        xs = xs + (load_wide(x_ptr + first + at * channels + c, inside & (at >= 0) & (at < length)),)
    for start in range(begin, tl.minimum(begin + TIMES, length), ROWS):
        rows = ()
        for row in tl.static_range(ROWS):
            at = start + row
            rows = rows + (tl.load(x_ptr + first + at * channels + c, inside & (at < length), other=0.0),)
        for row in tl.static_range(ROWS):
            at = start + row
            xs = xs + (rows[row].to(tl.float32),)
            z = bias
            for j in tl.static_range(WIDTH):
                z += w[j] * xs[j]
            if SILU:
                z = z * sigmoid(z)
            store_rounded(y_ptr + first + at * channels + c, z, inside & (at < length))
            xs = xs[1:]


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, b_ptr, dx_ptr, dw_ptr, db_ptr, length, channels, of_part, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
):
    """Compute dx and the sums for dw and db, for a part of a batch's times. dx at a time is complete W - 1 times later."""
    c, part = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(1)
    first, inside, none = tl.program_id(2).to(tl.int64) * length * channels, c < channels, tl.zeros([CHANNELS], tl.float32)
    begin = part.to(tl.int64) * of_part
    end = tl.minimum(begin + of_part, length)
    bias = load_wide(b_ptr + c, inside) if BIAS else none
    w, xs, gs, d_w, d_b = (), (), (), (), none
    for j in tl.static_range(WIDTH):
        w = w + (load_wide(w_ptr + j * channels + c, inside),)
        d_w = d_w + (none,)
    for j in tl.static_range(WIDTH - 1):  # the times before the first
        at = begin + (j - (WIDTH - 1))
        xs = xs + (load_wide(x_ptr + first + at * channels + c, inside & (at >= 0) & (at < length)),)
        gs = gs + (none,)
    for start in range(begin, end + (WIDTH - 1 if DX else 0), ROWS):
        x_rows, dy_rows = (), ()
        for row in tl.static_range(ROWS):
            at = start + row
            there = inside & (at < length) & (at < end + (WIDTH - 1))
            x_rows = x_rows + (load_wide(x_ptr + first + at * channels + c, there),)
            dy_rows = dy_rows + (load_wide(dy_ptr + first + at * channels + c, there),)
        for row in tl.static_range(ROWS):
            at, g = start + row, dy_rows[row]
            xs = xs + (x_rows[row],)
            if SILU:
                z = bias
                for j in tl.static_range(WIDTH):
                    z += w[j] * xs[j]
                g = g * derivative(z, "silu")
            gs = gs + (g,)
            if DX:
                d = none
                for j in tl.static_range(WIDTH):
                    d += w[WIDTH - 1 - j] * gs[j]
                to = at - (WIDTH - 1)
                store_rounded(dx_ptr + first + to * channels + c, d, inside & (to >= begin) & (to < end))
            own = tl.where(at < end, g, 0.0)  # later times are the next part's
            if DB:
                d_b += own
            if DW:
                sums = ()
                for j in tl.static_range(WIDTH):
                    sums = sums + (d_w[j] + own * xs[j],)
                d_w = sums
            xs, gs = xs[1:], gs[1:]
    to = (part.to(tl.int64) * tl.num_programs(2) + tl.program_id(2)) * channels + c
    if DW:
        for j in tl.static_range(WIDTH):
            tl.store(dw_ptr + to * WIDTH + j, d_w[j], mask=inside)
    if DB:
        tl.store(db_ptr + to, d_b, mask=inside)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)


@declared.causal_conv1d_fwd.triton
def causal_conv1d_fwd(x: Tensor, w: Tensor, b: Optional[Tensor], silu: bool) -> Tensor:
    x = x.contiguous()
    y, (batches, length, channels) = torch.empty_like(x), x.shape
    if x.numel():
        each = EACH if w.shape[1] <= NARROW else 1
        block = block_of(channels, THREADS * each)
        _launch_forward(
            cdiv(channels, block), cdiv(length, TIMES), batches, x, w.mT.contiguous(), contiguous(b), y, length, channels,
            w.shape[1], b is not None, silu, TIMES, ROWS, block, num_warps=max(1, block // (32 * each)),
        )
    return y


def number_of_splits(batches: int, length: int, channels: int) -> int:
    """The number of parts into which a batch's times are split for the sums."""
    return max(1, min(cdiv(length, TIMES), PROGRAMS // max(1, batches * cdiv(channels, CHANNELS))))


def _room(x: Tensor, w: Tensor, dx: bool, dw: bool, db: bool) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    parts = number_of_splits(*x.shape) * x.shape[0]
    return (
        torch.empty_like(x) if dx else None,
        x.new_empty((parts, w.numel()), dtype=torch.float32) if dw else None,
        x.new_empty((parts, w.shape[0]), dtype=torch.float32) if db else None,
    )


@declared.causal_conv1d_bwd.triton
def causal_conv1d_bwd(
    dy: Tensor, x: Tensor, w: Tensor, b: Optional[Tensor], silu: bool, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    dy, x, by_time, b = dy.contiguous(), x.contiguous(), w.mT.contiguous(), contiguous(b)
    (batches, length, channels), width = x.shape, w.shape[1]
    d_x, d_w, d_b = _room(x, w, dx, dw, db)
    if not x.numel():
        return d_x, None if d_w is None else d_w.zero_(), None if d_b is None else d_b.zero_()
    if dx or dw or db:
        block, parts = block_of(channels, CHANNELS if width <= NARROW else 32), number_of_splits(batches, length, channels)
        of_part = cdiv(length, parts)
        _launch_backward(
            cdiv(channels, block), parts, batches, dy, x, by_time, b, d_x, d_w, d_b, length, channels, of_part, width,
            b is not None, silu, dx, dw, db, block, ROWS, num_warps=1,
        )
    return d_x, d_w, d_b


@declared.causal_conv1d_bwd.fake
def _causal_conv1d_bwd_fake(
    x: Tensor, w: Tensor, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    return _room(x, w, dx, dw, db)
