"""Bias and activation. In the backward a program takes a chunk of columns of rows p, p + P, ..., and sums a part of db."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import bias_activation as declared
from funcops.library.kernels.triton.activation import activate, derivative
from funcops.library.kernels.triton.common import block_of, cdiv, contiguous, flat_rows, load_wide, stages, store_rounded, warps_of
from funcops.library.kernels.triton.norm import row_sums, sums_like
from funcops.library.kernels.triton.norm_kernels import dropped
from funcops.library.kernels.triton.pointwise import add_repeated, dropout, threshold_and_factor

COLUMNS, TILE = 1024, 2048
PARTS, PROGRAMS = 256, 1024  # at most, in a backward: partial rows, and programs over parts and chunks of columns
AGAIN = 792  # programs if y is made again, 6 on each of 132 multiprocessors: more of up to 80 registers would wait for these to end


@triton.jit
def _backward(
    dy_ptr, x_ptr, b_ptr, dz_ptr, db_ptr, rows, width, KIND: tl.constexpr, BIAS: tl.constexpr, DB: tl.constexpr,
    AGAIN: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """With AGAIN, write y over dy: rows that are loaded ahead are not yet written."""
    part, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b = tl.zeros([1, BLOCK], tl.float32)
    if BIAS:
        b = load_wide(b_ptr + i, i < width)[None, :]
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for group in tl.range(part, tl.cdiv(rows, ROWS), parts, num_stages=STAGES):
        row = group * ROWS + tl.arange(0, ROWS)
        at, inside = row[:, None] * width + i[None, :], (row < rows)[:, None] & (i < width)[None, :]
        z = load_wide(x_ptr + at, inside) + b
        dz = load_wide(dy_ptr + at, inside) * derivative(z, KIND)
        store_rounded(dz_ptr + at, dz, inside)
        if AGAIN:
            store_rounded(dy_ptr + at, activate(z, KIND), inside)
        if DB:
            total += dz
    if DB:
        tl.store(db_ptr + part * width + i, tl.sum(total, 0), mask=i < width)


@triton.jit
def _dropout_sums(
    dy_ptr, key_ptr, dx_ptr, sums_ptr, rows, width, threshold, factor: tl.float32, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute dx and a part of its sums. Rows are a multiple of four long, as a Philox block has four words."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    row, i = tl.arange(0, ROWS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at, first = row.to(tl.int64)[:, None] * width + i[None, :], row * (width // 4) + tl.program_id(1) * (BLOCK // 4)
    seed, stream = tl.load(key_ptr), tl.load(key_ptr + 1)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    start, step = part.to(tl.int64) * ROWS * width, parts.to(tl.int64) * ROWS * width  # carried: saves a product per group
    for group in range(part, tl.cdiv(rows, ROWS), parts):
        inside = (group * ROWS + row < rows)[:, None] & (i < width)[None, :]
        dx = dropped(load_wide(dy_ptr + start + at, inside), start // 4 + first, seed, stream, threshold, factor, ROWS, BLOCK)
        store_rounded(dx_ptr + start + at, dx, inside)
        total += dx
        start += step
    tl.store(sums_ptr + part.to(tl.int64) * width + i, tl.sum(total, 0), mask=i < width)


_launch_backward, _launch_dropout_sums = launcher(_backward), launcher(_dropout_sums)


def _tile(width: int) -> tuple[int, int]:
    """The rows and columns that a program takes at a time."""
    block = block_of(width, COLUMNS)
    return TILE // block, block


def _parts(rows: int, width: int, recompute: bool) -> int:
    at_once, block = _tile(width)
    return max(1, min(PARTS, (AGAIN if recompute else PROGRAMS) // cdiv(width, block), cdiv(rows, at_once)))


@declared.bias_activation_fwd.triton
def bias_activation_fwd(x: Tensor, b: Tensor, kind: str) -> Tensor:
    return add_repeated(x, b, kind)


@declared.bias_activation_bwd.triton
def bias_activation_bwd(dy: Tensor, x: Tensor, b: Optional[Tensor], kind: str, db: bool) -> tuple[Tensor, Optional[Tensor]]:
    return _bwd(dy.contiguous(), x, b, kind, db, False)


@declared.activation_bwd_recompute.triton
def activation_bwd_recompute(dy: Tensor, x: Tensor, kind: str, db: bool) -> tuple[Tensor, Optional[Tensor]]:
    return _bwd(dy, x, None, kind, db, True)


def _bwd(dy: Tensor, x: Tensor, b: Optional[Tensor], kind: str, db: bool, recompute: bool) -> tuple[Tensor, Optional[Tensor]]:
    x, rows, width = flat_rows(x)
    dz, d_b, (at_once, block) = torch.empty_like(x), _room(x, recompute) if db else None, _tile(width)
    if not rows:
        return dz, None if d_b is None else d_b.zero_()
    grid = _parts(rows, width, recompute), cdiv(width, block), 1
    ahead = stages() if recompute and x.element_size() == 2 and width % 16 == 0 else 1  # of float32 enough bytes are in flight
    _launch_backward(
        *grid, dy, x, contiguous(b), dz, d_b, rows, width, kind, b is not None, db, recompute, ahead, at_once, block,
        num_warps=warps_of(TILE),
    )
    return dz, d_b


@declared.bias_activation_bwd.fake
def _bias_activation_bwd_fake(x: Tensor, db: bool) -> tuple[Tensor, Optional[Tensor]]:
    return torch.empty_like(x), _room(x) if db else None


def _room(x: Tensor, recompute: bool = False) -> Tensor:
    width = int(x.shape[-1])  # a symbolic one is fixed, as blocks are made for it
    return x.new_empty((_parts(x.numel() // width, width, recompute), width), dtype=torch.float32)


@declared.activation_bwd_recompute.fake
def _activation_bwd_recompute_fake(x: Tensor, db: bool) -> tuple[Tensor, Optional[Tensor]]:
    return torch.empty_like(x), _room(x, True) if db else None


@declared.dropout_bwd_sums.triton
def dropout_bwd_sums(dy: Tensor, key: Tensor, p: float) -> tuple[Tensor, Tensor]:
    dy, rows, width = flat_rows(dy)
    if width % 4:
        dx = dropout(dy, key, p)
        return dx, row_sums(dx)
    dx, sums, (at_once, block) = torch.empty_like(dy), _room(dy), _tile(width)
    if not rows:
        return dx, sums.zero_()
    grid = _parts(rows, width, False), cdiv(width, block), 1
    _launch_dropout_sums(
        *grid, dy, key.contiguous(), dx, sums, rows, width, *threshold_and_factor(p), at_once, block, num_warps=warps_of(TILE)
    )
    return dx, sums


@declared.dropout_bwd_sums.fake
def _dropout_bwd_sums_fake(dy: Tensor) -> tuple[Tensor, Tensor]:
    if dy.shape[-1] % 4:
        return torch.empty_like(dy), sums_like(dy)
    return torch.empty_like(dy), _room(dy)
