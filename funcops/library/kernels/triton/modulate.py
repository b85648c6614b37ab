"""Modulation: a program takes a block of columns of some rows of a batch, whose scale and shift it reads once."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import modulate as declared
from funcops.library.kernels.triton.common import block_of, cdiv, contiguous, load_wide, store_rounded

BLOCK = 1024  # columns
ROWS = 64  # of a program, at least: with fewer, its partial sums would be over a twentieth of what it reads and writes
PROGRAMS = 2048  # a constant, so that sums do not depend on the device


@triton.jit
def _forward(x_ptr, scale_ptr, shift_ptr, y_ptr, rows, of_part, width, BLOCK: tl.constexpr):
    """Modulate `of_part` of a batch's `rows`."""
    i, batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(2).to(tl.int64)
    inside = i < width
    factor, shift = 1.0 + load_wide(scale_ptr + batch * width + i, inside), load_wide(shift_ptr + batch * width + i, inside)
    first = tl.program_id(1).to(tl.int64) * of_part
    for row in range(first, tl.minimum(first + of_part, rows)):
        at = (batch * rows + row) * width + i
        store_rounded(y_ptr + at, load_wide(x_ptr + at, inside) * factor + shift, inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr, scale_ptr, dx_ptr, dscale_ptr, dshift_ptr, rows, of_part, width, DX: tl.constexpr, DSCALE: tl.constexpr,
    DSHIFT: tl.constexpr, BLOCK: tl.constexpr,
):
    i, part, batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1), tl.program_id(2).to(tl.int64)
    inside = i < width
    if DX:
        factor = 1.0 + load_wide(scale_ptr + batch * width + i, inside)
    along_x, along = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    first = part.to(tl.int64) * of_part
    for row in range(first, tl.minimum(first + of_part, rows)):
        at = (batch * rows + row) * width + i
        d = load_wide(dy_ptr + at, inside)
        if DX:
            store_rounded(dx_ptr + at, d * factor, inside)
        if DSCALE:
            along_x += d * load_wide(x_ptr + at, inside)
        if DSHIFT:
            along += d
    to = (part.to(tl.int64) * tl.num_programs(2) + batch) * width + i
    if DSCALE:
        tl.store(dscale_ptr + to, along_x, mask=inside)
    if DSHIFT:
        tl.store(dshift_ptr + to, along, mask=inside)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)


def number_of_splits(batches: int, rows: int, width: int) -> int:
    """The number of parts into which a batch's rows are split."""
    return max(1, min(cdiv(rows, ROWS), PROGRAMS // max(1, batches * cdiv(width, BLOCK))))


@declared.modulate_fwd.triton
def modulate_fwd(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    x = x.contiguous()
    y, (batches, rows, width) = torch.empty_like(x), x.shape
    if x.numel():
        block, parts = block_of(width, BLOCK), number_of_splits(batches, rows, width)
        _launch_forward(
            cdiv(width, block), parts, batches, x, scale.contiguous(), shift.contiguous(), y, rows, cdiv(rows, parts), width, block
        )
    return y


@declared.modulate_bwd.triton
def modulate_bwd(
    dy: Tensor, x: Optional[Tensor], scale: Optional[Tensor], dx: bool, dscale: bool, dshift: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    dy, x, scale = dy.contiguous(), contiguous(x), contiguous(scale)
    (batches, rows, width), found = dy.shape, _room(dy, dx, dscale, dshift)
    if dy.numel() and (dx or dscale or dshift):
        block, parts = block_of(width, BLOCK), number_of_splits(batches, rows, width)
        _launch_backward(
            cdiv(width, block), parts, batches, dy, x, scale, *found, rows, cdiv(rows, parts), width, dx, dscale, dshift, block
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
