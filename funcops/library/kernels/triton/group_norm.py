"""Normalisation of groups of channels. A group's numbers are contiguous. In the forward one program takes a group, whole or in two
passes; the backward first sums every channel, then computes dx from these sums over a group."""

from __future__ import annotations

import math
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import group_norm as declared
from funcops.library.kernels.triton.common import block_of, cdiv, contiguous, load_wide, next_power_of_2, store_rounded, warps_of

LONGEST = 8192  # elements of a group taken whole, at most
CHUNK = 4096  # elements of a larger group at a time
TILE = 4096  # elements of several channels, which a program sums
STEP = 1024  # elements of a channel at a time


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, groups, channels, size, eps: tl.float32, WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`channels`: the number per group, each of `size` elements."""
    group = tl.program_id(0).to(tl.int64)
    length = channels * size
    first, first_channel = group * length, (group % groups) * channels
    i = tl.arange(0, BLOCK)
    if WHOLE:
        x = load_wide(x_ptr + first + i, i < length)
        mean = tl.sum(x, 0) / length
        centred = tl.where(i < length, x - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centred * centred, 0) / length + eps)
        c = first_channel + i // size
        y = centred * rstd * load_wide(w_ptr + c, i < length) + load_wide(b_ptr + c, i < length)
        store_rounded(y_ptr + first + i, y, i < length)
    else:
        # sums of differences to the mean of the first numbers, which is near the mean of all, so that little cancels
        near = tl.sum(load_wide(x_ptr + first + i, True), 0) / BLOCK
        total, squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, length, BLOCK):
            left = tl.where(start + i < length, load_wide(x_ptr + first + start + i, start + i < length) - near, 0.0)
            total += left
            squares += left * left
        more = tl.sum(total, 0) / length
        mean = near + more
        rstd = tl.rsqrt(tl.maximum(tl.sum(squares, 0) / length - more * more, 0.0) + eps)
        for start in range(0, length, BLOCK):
            at, inside = start + i, start + i < length
            c = first_channel + at // size
            n = (load_wide(x_ptr + first + at, inside) - mean) * rstd
            store_rounded(y_ptr + first + at, n * load_wide(w_ptr + c, inside) + load_wide(b_ptr + c, inside), inside)
    tl.store(mean_ptr + group, mean)
    tl.store(rstd_ptr + group, rstd)


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


_launch_forward, _launch_channel_sums, _launch_descend = launcher(_forward), launcher(_channel_sums), launcher(_descend)


@declared.group_norm_fwd.triton
def group_norm_fwd(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    batches, channels, size = *x.shape[:2], math.prod(x.shape[2:])
    mean = x.new_zeros((batches, groups), dtype=torch.float32)
    rstd, length = torch.zeros_like(mean), channels // groups * size
    if x.numel():
        whole = length <= LONGEST
        block = block_of(length, LONGEST) if whole else CHUNK
        _launch_forward(
            batches * groups, 1, 1, x, w.contiguous(), b.contiguous(), y, mean, rstd, groups, channels // groups, size, eps,
            whole, block, num_warps=warps_of(block),
        )
    return y, mean, rstd


@declared.group_norm_bwd.triton
def group_norm_bwd(
    dy: Tensor, x: Optional[Tensor], w: Optional[Tensor], mean: Optional[Tensor], rstd: Optional[Tensor], groups: int,
    dx: bool, dw: bool, db: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    dy, x, w, mean, rstd = dy.contiguous(), contiguous(x), contiguous(w), contiguous(mean), contiguous(rstd)
    batches, channels, size = *dy.shape[:2], math.prod(dy.shape[2:])
    d_b = dy.new_zeros((batches, channels), dtype=torch.float32)
    d_w, d_x = torch.zeros_like(d_b) if dw or dx else None, torch.empty_like(dy) if dx else None
    if dy.numel():
        block, of_group = block_of(size, STEP), channels // groups
        at_once = max(1, TILE // block)
        _launch_channel_sums(
            cdiv(batches * channels, at_once), 1, 1, dy, x, mean, rstd, d_w, d_b, batches * channels, of_group, size,
            d_w is not None, at_once, block, num_warps=warps_of(at_once * block),
        )
        if dx:
            block = block_of(of_group * size, CHUNK)
            _launch_descend(
                batches * groups, cdiv(of_group * size, block), 1, dy, x, w, mean, rstd, d_w, d_b, d_x, groups, of_group, size,
                next_power_of_2(of_group), block, num_warps=warps_of(block),
            )
    return d_x, d_w if dw else None, d_b if db else None


@declared.group_norm_bwd.fake
def _group_norm_bwd_fake(dy: Tensor, dx: bool, dw: bool, db: bool) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    parts = dy.new_empty(dy.shape[:2], dtype=torch.float32)
    return torch.empty_like(dy) if dx else None, parts if dw else None, parts.clone() if db else None
