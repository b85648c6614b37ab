"""Normalisation of groups of channels. A group's numbers are contiguous. One program takes a group, which stays in registers
between two passes, in its own dtype. Of a group too large for them the forward reads x twice; and the backward first sums every
channel, then computes dx from these sums."""
# mypy: disable-error-code="assignment, misc, var-annotated"
# for tuples that grow while a kernel is unrolled

from __future__ import annotations

import functools
import math
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import group_norm as declared
from funcops.library.kernels.triton.common import (
    anew,
    block_of,
    cdiv,
    contiguous,
    load_wide,
    next_power_of_2,
    stages,
    store_rounded,
    warps_of,
)

EACH = 8  # elements of a thread at a time: 16 bytes
KEPT, OF_THREAD = 2**17, 640  # bytes of a group that stays in registers, at most, and of them bytes of a thread
CHUNK = 4096  # elements of a larger group at a time
TILE = 4096  # elements of several channels, which a program sums
STEP = 1024  # elements of a channel at a time


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, groups, channels, size, eps: tl.float32, KEPT: tl.constexpr,
    STAGES: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
):
    """`channels`: the number per group, each of `size` elements, a multiple of EACH. The first KEPT blocks stay in registers."""
    group = tl.program_id(0).to(tl.int64)
    length = channels * size
    x_ptr += group * length
    y_ptr += group * length
    first_channel = (group % groups).to(tl.int32) * channels
    start = tl.arange(0, BLOCK // EACH) * EACH
    i = start[:, None] + tl.arange(0, EACH)[None, :]
    kept = ()
    for part in tl.static_range(KEPT):
        kept = kept + (tl.load(x_ptr + part * BLOCK + i, _inside(part, start, length, KEPT, BLOCK), other=0.0),)
    # sums of differences to the mean of the first numbers, which is near the mean of all, so that little cancels
    near = tl.sum(kept[0].to(tl.float32)) / tl.minimum(length, BLOCK)
    total, squares = tl.zeros([BLOCK // EACH, EACH], tl.float32), tl.zeros([BLOCK // EACH, EACH], tl.float32)
    for part in tl.static_range(KEPT):
        left = kept[part].to(tl.float32) - near
        if part == KEPT - 1:
            left = tl.where(_inside(part, start, length, KEPT, BLOCK), left, 0.0)
        total += left
        squares += left * left
    for at in tl.range(KEPT * BLOCK, length, BLOCK, num_stages=STAGES):
        inside = (at + start < length)[:, None]
        left = tl.where(inside, load_wide(x_ptr + at + i, inside) - near, 0.0)
        total += left
        squares += left * left
    more = tl.sum(total) / length
    mean = near + more
    rstd = tl.rsqrt(tl.maximum(tl.sum(squares) / length - more * more, 0.0) + eps)
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, rstd)
    none = (length < 0).to(tl.int32)
    for at in tl.range(KEPT * BLOCK, length, BLOCK, num_stages=STAGES):
        inside = (at + start < length)[:, None]
        w, b = _of_channels(w_ptr, b_ptr, first_channel, at + start, length, size, rstd)
        store_rounded(y_ptr + at + i, (load_wide(x_ptr + at + i, inside) - mean) * w + b, inside)
    for part in tl.static_range(KEPT):
        w, b = _of_channels(w_ptr, b_ptr, first_channel, part * BLOCK + start, length, size, rstd)
        y = (anew(kept[part], none).to(tl.float32) - mean) * w + b
        store_rounded(y_ptr + part * BLOCK + i, y, _inside(part, start, length, KEPT, BLOCK))


@triton.jit
def _inside(part, start, length, KEPT: tl.constexpr, BLOCK: tl.constexpr):
    """The mask of a part that is kept: of these the last alone may be longer than the rest of the group."""
    if part == KEPT - 1:
        return (part * BLOCK + start < length)[:, None]
    else:
        return (start >= 0)[:, None]


@triton.jit
def _of_channels(w_ptr, b_ptr, first_channel, at, length, size, rstd):
    """The weight times rstd, and the bias, of the channels of a group's elements `at`, one for all EACH elements from there."""
    c = first_channel + at // size
    return load_wide(w_ptr + c, at < length)[:, None] * rstd, load_wide(b_ptr + c, at < length)[:, None]


@triton.jit
def _channel_sums(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, rows, channels, size, NORMED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute, for every channel of every batch (a row), the sums of dy n, with NORMED, and of dy."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    along_n, along = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    if NORMED:
        mean, rstd = load_wide(mean_ptr + row // channels, inside), load_wide(rstd_ptr + row // channels, inside)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at, there = row[:, None] * size + i[None, :], inside[:, None] & (i < size)[None, :]
        d = load_wide(dy_ptr + at, there)
        along += d
        if NORMED:
            along_n += d * ((load_wide(x_ptr + at, there) - mean[:, None]) * rstd[:, None])
    tl.store(db_ptr + row, tl.sum(along, 1), mask=inside)
    if NORMED:
        tl.store(dw_ptr + row, tl.sum(along_n, 1), mask=inside)


@triton.jit
def _descend(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, dx_ptr, groups, channels, size, CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute dx of a part of a group, from the sums of its channels."""
    group = tl.program_id(0).to(tl.int64)
    length, first_channel = channels * size, (group % groups) * channels
    each = tl.arange(0, CHANNELS)
    w = load_wide(w_ptr + first_channel + each, each < channels)
    mean_g = tl.sum(w * load_wide(db_ptr + group * channels + each, each < channels), 0) / length
    mean_gn = tl.sum(w * load_wide(dw_ptr + group * channels + each, each < channels), 0) / length
    mean, rstd = tl.load(mean_ptr + group), tl.load(rstd_ptr + group)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, inside = group * length + i, i < length
    n = (load_wide(x_ptr + at, inside) - mean) * rstd
    g = load_wide(dy_ptr + at, inside) * load_wide(w_ptr + first_channel + i // size, inside)
    store_rounded(dx_ptr + at, rstd * (g - mean_g - n * mean_gn), inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dw_ptr, db_ptr, dx_ptr, groups, size, DW: tl.constexpr, DB: tl.constexpr,
    CHANNELS: tl.constexpr, PIECES: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr,
):
    """dx and sums of a group whose x and dy stay in registers, in PIECES of each of its CHANNELS. A warp sums its own numbers."""
    group = tl.program_id(0).to(tl.int64)
    dy_ptr += group * CHANNELS * size
    x_ptr += group * CHANNELS * size
    dx_ptr += group * CHANNELS * size
    w_ptr += (group % groups) * CHANNELS
    BLOCK: tl.constexpr = WARPS * 32 * EACH
    i = tl.arange(0, WARPS)[:, None] * (32 * EACH) + tl.arange(0, 32 * EACH)[None, :]
    mean, rstd = tl.load(mean_ptr + group), tl.load(rstd_ptr + group)
    dys, xs = (), ()
    for part in tl.static_range(CHANNELS * PIECES):
        at, inside = part // PIECES * size + part % PIECES * BLOCK + i, part % PIECES * BLOCK + i < size
        dys, xs = dys + (tl.load(dy_ptr + at, inside, other=0.0),), xs + (tl.load(x_ptr + at, inside, other=0.0),)
    along, along_n = tl.zeros([WARPS], tl.float32), tl.zeros([WARPS], tl.float32)
    for channel in tl.static_range(CHANNELS):
        of_channel, of_channel_n = tl.zeros([WARPS, 32 * EACH], tl.float32), tl.zeros([WARPS, 32 * EACH], tl.float32)
        for piece in tl.static_range(PIECES):
            d = dys[channel * PIECES + piece].to(tl.float32)
            of_channel += d
            of_channel_n += d * ((xs[channel * PIECES + piece].to(tl.float32) - mean) * rstd)
        to = ((group // groups * WARPS + tl.arange(0, WARPS)) * groups + group % groups) * CHANNELS + channel
        sums, sums_n, w = tl.sum(of_channel, 1), tl.sum(of_channel_n, 1), tl.load(w_ptr + channel).to(tl.float32)
        if DW:
            tl.store(dw_ptr + to, sums_n)
        if DB:
            tl.store(db_ptr + to, sums)
        along += w * sums
        along_n += w * sums_n
    length = CHANNELS * size
    none = (size < 0).to(tl.int32)
    mean_g, mean_gn = tl.sum(along) / length, tl.sum(along_n) / length
    for part in tl.static_range(CHANNELS * PIECES):
        at, inside = part // PIECES * size + part % PIECES * BLOCK + i, part % PIECES * BLOCK + i < size
        g = anew(dys[part], none).to(tl.float32) * tl.load(w_ptr + part // PIECES).to(tl.float32)
        n = (anew(xs[part], none).to(tl.float32) - mean) * rstd
        store_rounded(dx_ptr + at, rstd * (g - mean_g - n * mean_gn), inside)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)
_launch_channel_sums, _launch_descend = launcher(_channel_sums), launcher(_descend)


@functools.lru_cache(maxsize=4096)
def kept_of(length: int, size: int) -> tuple[int, int, int]:
    """The blocks of a group that stay in registers, all or one; the elements of a block; the warps. `size`: bytes of an element."""
    if length * size > KEPT:
        return 1, CHUNK, warps_of(CHUNK)
    warps = max(2, next_power_of_2(cdiv(length * size, 32 * OF_THREAD)))
    block = 32 * warps * EACH
    return cdiv(length, block), block, warps


@declared.group_norm_fwd.triton
def group_norm_fwd(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    batches, channels, size = *x.shape[:2], math.prod(x.shape[2:])
    mean = x.new_zeros((batches, groups), dtype=torch.float32)
    rstd, length = torch.zeros_like(mean), channels // groups * size
    if x.numel():
        kept, block, warps = kept_of(length, x.element_size())
        _launch_forward(
            batches * groups, 1, 1, x, w.contiguous(), b.contiguous(), y, mean, rstd, groups, channels // groups, size, eps,
            kept, stages(), EACH if size % EACH == 0 else 1, block, num_warps=warps,
        )
    return y, mean, rstd


@functools.lru_cache(maxsize=4096)
def warps_at_once(channels: int, size: int, itemsize: int) -> int:
    """The warps that keep dy and x of a group of so many channels in registers; 0 if these are too long, or a channel too short."""
    for warps in (2, 4, 8):
        block = 32 * warps * EACH
        if size >= block and 2 * channels * cdiv(size, block) * EACH * itemsize <= OF_THREAD:
            return warps
    return 0


def _room(
    dy: Tensor, groups: int, dx: bool, dw: bool, db: bool
) -> tuple[int, Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """The warps that take a group at once, and dx, dw and db, with a partial sum for each of these warps, or for a batch."""
    batches, channels, size = *dy.shape[:2], math.prod(dy.shape[2:])
    warps = warps_at_once(int(channels) // groups, int(size), dy.element_size()) if dx else 0
    d_w, d_b = (dy.new_empty((batches * max(1, warps), channels), dtype=torch.float32) if wanted else None for wanted in (dw, db))
    return warps, torch.empty_like(dy) if dx else None, d_w, d_b


@declared.group_norm_bwd.triton
def group_norm_bwd(
    dy: Tensor, x: Optional[Tensor], w: Optional[Tensor], mean: Optional[Tensor], rstd: Optional[Tensor], groups: int,
    dx: bool, dw: bool, db: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    dy, x, w, mean, rstd = dy.contiguous(), contiguous(x), contiguous(w), contiguous(mean), contiguous(rstd)
    batches, channels, size = *dy.shape[:2], math.prod(dy.shape[2:])
    of_group, (warps, d_x, d_w, d_b) = channels // groups, _room(dy, groups, dx, dw, db)
    if not dy.numel():
        return d_x, None if d_w is None else d_w.zero_(), None if d_b is None else d_b.zero_()
    if warps:
        _launch_backward(
            batches * groups, 1, 1, dy, x, w, mean, rstd, d_w, d_b, d_x, groups, size, dw, db, of_group,
            cdiv(size, 32 * warps * EACH), warps, EACH, num_warps=warps,
        )
        return d_x, d_w, d_b
    block = block_of(size, STEP)
    at_once = max(1, TILE // block)
    of_w, of_b = (dy.new_empty((batches, channels), dtype=torch.float32) if t is None else t for t in (d_w, d_b))
    _launch_channel_sums(
        cdiv(batches * channels, at_once), 1, 1, dy, x, mean, rstd, of_w, of_b, batches * channels, of_group, size, dw or dx,
        at_once, block, num_warps=warps_of(at_once * block),
    )
    if dx:
        block = block_of(of_group * size, CHUNK)
        _launch_descend(
            batches * groups, cdiv(of_group * size, block), 1, dy, x, w, mean, rstd, of_w, of_b, d_x, groups, of_group, size,
            next_power_of_2(of_group), block, num_warps=warps_of(block),
        )
    return d_x, d_w, d_b


@declared.group_norm_bwd.fake
def _group_norm_bwd_fake(
    dy: Tensor, groups: int, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    return _room(dy, groups, dx, dw, db)[1:]
