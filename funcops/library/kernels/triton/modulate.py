"""Modulation: a program takes a block of columns of some rows of a batch, several rows at a time."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import modulate as declared
from funcops.library.kernels.triton.common import cdiv, columns_of, contiguous, load_wide, store_rounded

BLOCK = 1024  # columns of a program, at most
TILE, TILE_BACK = 4096, 2048  # elements that it takes at a time: more, and 2 bytes a thread of scale and shift are a smaller share
ROWS = 64  # of a program with sums, at least: with fewer, these would be over a twentieth of what it reads and writes
PROGRAMS = 4096  # a constant, so that sums do not depend on the device


@triton.jit
def _forward(x_ptr, scale_ptr, shift_ptr, y_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    i, batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(2).to(tl.int64)
    factor = 1.0 + load_wide(scale_ptr + batch * width + i, i < width)
    shift = load_wide(shift_ptr + batch * width + i, i < width)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at, inside = (batch * rows + row)[:, None] * width + i[None, :], (row < rows)[:, None] & (i < width)[None, :]
    store_rounded(y_ptr + at, load_wide(x_ptr + at, inside) * factor[None, :] + shift[None, :], inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr, scale_ptr, dx_ptr, dscale_ptr, dshift_ptr, rows, of_part, width, DX: tl.constexpr, DSCALE: tl.constexpr,
    DSHIFT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """A program has `of_part` of a batch's rows."""
    i, part, batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2).to(tl.int64)
    if DX:
        factor = 1.0 + load_wide(scale_ptr + batch * width + i, i < width)
    along_x, along = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    first = part * of_part
    last = tl.minimum(first + of_part, rows)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        at, inside = (batch * rows + row)[:, None] * width + i[None, :], (row < last)[:, None] & (i < width)[None, :]
        d = load_wide(dy_ptr + at, inside)
        if DSCALE:
            along_x += d * load_wide(x_ptr + at, inside)
        if DX:
            store_rounded(dx_ptr + at, d * factor[None, :], inside)
        if DSHIFT:
            along += d
    to = (part.to(tl.int64) * tl.num_programs(2) + batch) * width + i
    if DSCALE:
        tl.store(dscale_ptr + to, tl.sum(along_x, 0), mask=i < width)
    if DSHIFT:
        tl.store(dshift_ptr + to, tl.sum(along, 0), mask=i < width)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)


def number_of_splits(batches: int, rows: int, width: int) -> int:
    """The number of parts into which a batch's rows are split."""
    return max(1, min(cdiv(rows, ROWS), PROGRAMS // max(1, batches * cdiv(width, columns_of(width, BLOCK)))))


@declared.modulate_fwd.triton
def modulate_fwd(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    x = x.contiguous()
    y, (batches, rows, width) = torch.empty_like(x), x.shape
    if x.numel():
        block = columns_of(width, BLOCK)
        at_once = TILE // block
        _launch_forward(
            cdiv(width, block), cdiv(rows, at_once), batches, x, scale.contiguous(), shift.contiguous(), y, rows, width, at_once,
            block,
        )
    return y


@declared.modulate_bwd.triton
def modulate_bwd(
    dy: Tensor, x: Optional[Tensor], scale: Optional[Tensor], dx: bool, dscale: bool, dshift: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    dy, x, scale = dy.contiguous(), contiguous(x), contiguous(scale)
    (batches, rows, width), found = dy.shape, _room(dy, dx, dscale, dshift)
    if dy.numel() and (dx or dscale or dshift):
        block, parts = columns_of(width, BLOCK), number_of_splits(batches, rows, width)
        _launch_backward(
            cdiv(width, block), parts, batches, dy, x, scale, *found, rows, cdiv(rows, parts), width, dx, dscale, dshift,
            TILE_BACK // block, block,
        )
    elif not dy.numel():
        for sums in found[1:]:
            if sums is not None:
                sums.zero_()
    return found


def _room(dy: Tensor, dx: bool, dscale: bool, dshift: bool) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    batches, rows, width = dy.shape
    shape = (number_of_splits(batches, rows, width), batches * width)
    dscale_parts = dy.new_empty(shape, dtype=torch.float32) if dscale else None
    return torch.empty_like(dy) if dx else None, dscale_parts, dy.new_empty(shape, dtype=torch.float32) if dshift else None


@declared.modulate_bwd.fake
def _modulate_bwd_fake(
    dy: Tensor, dx: bool, dscale: bool, dshift: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    return _room(dy, dx, dscale, dshift)
