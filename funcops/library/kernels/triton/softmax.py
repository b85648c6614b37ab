"""Softmax: a program takes some short rows whole, or a long one in two passes, an online softmax and the quotients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import softmax as declared
from funcops.library.kernels.triton.common import block_of, cdiv, flat_rows, load_wide, most_warps, store_rounded, warps_of

TILE = 2048  # elements of short rows that a program takes
LONGEST, LONGEST_BACK = 32768, 16384  # of a row taken whole; in the backward of two of them
CHUNK, CHUNK_BACK = 16384, 4096  # elements of a longer row: in the forward many, so that the few rows in flight stay in the cache
LOWEST = tl.constexpr(-3.4028234663852886e38)  # not -inf, as a row's first elements may be, too: the difference would be NaN


@triton.jit
def _forward(x_ptr, y_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    at, inside = row * width + i, (row < rows) & (i < width)
    t = tl.where(i < width, load_wide(x_ptr + at, inside), -float("inf"))
    weights = tl.exp(t - tl.maximum(tl.max(t, 1), LOWEST)[:, None])
    store_rounded(y_ptr + at, weights / tl.sum(weights, 1)[:, None], inside)


@triton.jit
def _forward_long(x_ptr, y_ptr, width, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * width
    highest, total = tl.full([], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        t = tl.where(i < width, load_wide(x_ptr + first + i, i < width), -float("inf"))
        higher = tl.maximum(highest, tl.max(t, 0))
        total = total * tl.exp(highest - higher) + tl.exp(t - higher)
        highest = higher
    factor = 1.0 / tl.sum(total, 0)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        t = load_wide(x_ptr + first + i, i < width)
        store_rounded(y_ptr + first + i, tl.exp(t - highest) * factor, i < width)


@triton.jit
def _backward(dy_ptr, y_ptr, dx_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    at, inside = row * width + i, (row < rows) & (i < width)
    dy, y = load_wide(dy_ptr + at, inside), load_wide(y_ptr + at, inside)
    store_rounded(dx_ptr + at, y * (dy - tl.sum(dy * y, 1)[:, None]), inside)


@triton.jit
def _backward_long(dy_ptr, y_ptr, dx_ptr, width, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * width
    along = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        along += load_wide(dy_ptr + first + i, i < width) * load_wide(y_ptr + first + i, i < width)
    total = tl.sum(along, 0)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        dy, y = load_wide(dy_ptr + first + i, i < width), load_wide(y_ptr + first + i, i < width)
        store_rounded(dx_ptr + first + i, y * (dy - total), i < width)


_launch_forward, _launch_forward_long = launcher(_forward), launcher(_forward_long)
_launch_backward, _launch_backward_long = launcher(_backward), launcher(_backward_long)


def tile_of(width: int) -> tuple[int, int]:
    """The rows that a program takes at a time, and the block that holds one."""
    block = block_of(width, LONGEST)
    return max(1, TILE // block), block


@declared.softmax_fwd.triton
def softmax_fwd(x: Tensor) -> Tensor:
    x, rows, width = flat_rows(x)
    y = torch.empty_like(x)
    if rows and width > LONGEST:
        _launch_forward_long(rows, 1, 1, x, y, width, CHUNK, num_warps=most_warps())
    elif rows:
        at_once, block = tile_of(width)
        _launch_forward(cdiv(rows, at_once), 1, 1, x, y, rows, width, at_once, block, num_warps=warps_of(at_once * block))
    return y


@declared.softmax_bwd.triton
def softmax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    y, rows, width = flat_rows(y)
    dy, dx = dy.contiguous(), torch.empty_like(y)
    if rows and width > LONGEST_BACK:
        _launch_backward_long(rows, 1, 1, dy, y, dx, width, CHUNK_BACK, num_warps=warps_of(CHUNK_BACK))
    elif rows:
        at_once, block = tile_of(width)
        _launch_backward(cdiv(rows, at_once), 1, 1, dy, y, dx, rows, width, at_once, block, num_warps=warps_of(at_once * block))
    return dx
