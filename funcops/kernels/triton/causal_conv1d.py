"""Causal convolution of every channel by itself: a program takes a tile of times and channels W times, each a time later, of which
all but the first come out of a cache. Backward first g = dy f'(z) and the sums, then dx of g."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import causal_conv1d as declared
from funcops.kernels.triton.activation import derivative, sigmoid
from funcops.kernels.triton.common import block_of, cdiv, contiguous, load_wide, next_power_of_2, store_rounded, warps_of

CHANNELS, TIMES = 128, 32  # of a tile
PROGRAMS = 1024  # of the sums: a constant, so that they do not depend on the device


@triton.jit
def _before(x_ptr, w_ptr, b_ptr, t, c, channels, inside, WIDTH: tl.constexpr, BIAS: tl.constexpr):
    """z of a tile: x_ptr at the first of its batch; weights as [W, C], so that a thread's lie side by side."""
    z = tl.zeros([t.shape[0], c.shape[1]], tl.float32)
    if BIAS:
        z += load_wide(b_ptr + c, c < channels)
    for j in tl.static_range(WIDTH):
        at = t - (WIDTH - 1) + j
        x = load_wide(x_ptr + at * channels + c, inside & (at >= 0))
        z += x * load_wide(w_ptr + j * channels + c, c < channels)
    return z


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, length, channels, WIDTH: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    TIMES: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    t = tl.program_id(1).to(tl.int64) * TIMES + tl.arange(0, TIMES)[:, None]
    first, inside = tl.program_id(2).to(tl.int64) * length * channels, (t < length) & (c < channels)
    z = _before(x_ptr + first, w_ptr, b_ptr, t, c, channels, inside, WIDTH, BIAS)
    if SILU:
        z = z * sigmoid(z)
    store_rounded(y_ptr + first + t * channels + c, z, inside)


@triton.jit
def _sums(
    dy_ptr, x_ptr, w_ptr, b_ptr, g_ptr, dw_ptr, db_ptr, length, channels, of_part, WIDTH: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, TIMES: tl.constexpr, CHANNELS: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a part of a batch's times: the sums for dw and db, and, with SILU and DX, g itself."""
    c, part = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :], tl.program_id(1)
    first = tl.program_id(2).to(tl.int64) * length * channels
    place = tl.arange(0, WIDTH_BLOCK)[:, None]
    d_w, d_b = tl.zeros([WIDTH_BLOCK, CHANNELS], tl.float32), tl.zeros([1, CHANNELS], tl.float32)
    begin = part.to(tl.int64) * of_part
    for start in range(begin, tl.minimum(begin + of_part, length), TIMES):
        t = start + tl.arange(0, TIMES)[:, None]
        inside = (t < length) & (c < channels)
        at = first + t * channels + c
        g = load_wide(dy_ptr + at, inside)
        if SILU:
            g *= derivative(_before(x_ptr + first, w_ptr, b_ptr, t, c, channels, inside, WIDTH, BIAS), "silu")
            if DX:
                store_rounded(g_ptr + at, g, inside)
        if DB:
            d_b += tl.sum(g, 0)[None, :]
        if DW:
            for j in tl.static_range(WIDTH):
                then = t - (WIDTH - 1) + j
                x = load_wide(x_ptr + first + then * channels + c, inside & (then >= 0))
                d_w += tl.where(place == j, tl.sum(g * x, 0)[None, :], 0.0)
    to = (part.to(tl.int64) * tl.num_programs(2) + tl.program_id(2)) * channels + c
    if DW:
        tl.store(dw_ptr + to * WIDTH + place, d_w, mask=(c < channels) & (place < WIDTH))
    if DB:
        tl.store(db_ptr + to, d_b, mask=c < channels)


@triton.jit
def _descend(
    g_ptr, w_ptr, dx_ptr, length, channels, WIDTH: tl.constexpr, TIMES: tl.constexpr, CHANNELS: tl.constexpr
):  # fmt: skip
    c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    t = tl.program_id(1).to(tl.int64) * TIMES + tl.arange(0, TIMES)[:, None]
    first, inside = tl.program_id(2).to(tl.int64) * length * channels, (t < length) & (c < channels)
    d = tl.zeros([TIMES, CHANNELS], tl.float32)
    for j in tl.static_range(WIDTH):
        at = t + (WIDTH - 1) - j
        g = load_wide(g_ptr + first + at * channels + c, inside & (at < length))
        d += g * load_wide(w_ptr + j * channels + c, c < channels)
    store_rounded(dx_ptr + first + t * channels + c, d, inside)


_launch_forward, _launch_sums, _launch_descend = launcher(_forward), launcher(_sums), launcher(_descend)


@declared.causal_conv1d_fwd.triton
def causal_conv1d_fwd(x: Tensor, w: Tensor, b: Optional[Tensor], silu: bool) -> Tensor:
    x = x.contiguous()
    y, (batches, length, channels) = torch.empty_like(x), x.shape
    if x.numel():
        block, times = block_of(channels, CHANNELS), block_of(length, TIMES)
        _launch_forward(
            cdiv(channels, block), cdiv(length, times), batches, x, w.mT.contiguous(), contiguous(b), y, length, channels,
            w.shape[1], b is not None, silu, times, block, num_warps=warps_of(times * block),
        )  # fmt: skip
    return y


def parts_of(batches: int, length: int, channels: int) -> int:
    """Into how many the times of a batch are taken apart for the sums."""
    return max(1, min(cdiv(length, TIMES), PROGRAMS // max(1, batches * cdiv(channels, CHANNELS))))


def _room(x: Tensor, w: Tensor, dx: bool, dw: bool, db: bool) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    parts = parts_of(*x.shape) * x.shape[0]
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
    block, times = block_of(channels, CHANNELS), block_of(length, TIMES)
    g = torch.empty_like(x) if silu and dx else dy
    if silu or dw or db:
        parts = parts_of(batches, length, channels)
        of_part = cdiv(cdiv(length, parts), times) * times
        _launch_sums(
            cdiv(channels, block), parts, batches, dy, x, by_time, b, g, d_w, d_b, length, channels, of_part, width, b is not None,
            silu, dx, dw, db, times, block, next_power_of_2(width), num_warps=warps_of(times * block),
        )  # fmt: skip
    if dx:
        _launch_descend(
            cdiv(channels, block), cdiv(length, times), batches, g, by_time, d_x, length, channels, width, times, block,
            num_warps=warps_of(times * block),
        )  # fmt: skip
    return d_x, d_w, d_b


@declared.causal_conv1d_bwd.fake
def _causal_conv1d_bwd_fake(
    dy: Tensor, x: Tensor, w: Tensor, b: Optional[Tensor], silu: bool, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    return _room(x, w, dx, dw, db)
