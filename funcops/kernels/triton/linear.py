"""Matrix products by one kernel over any strides: y = x w^T + b, dx = dy w, dw = dy^T x.

Where the output has few tiles and the inner dimension is long (a weight gradient over many rows), the inner dimension is
split: each part writes a float32 slice of a workspace, and a second kernel sums the slices in order.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import linear as declared
from funcops.kernels.triton.common import INTERPRETED, load_wide, store_rounded
from funcops.kernels.triton.norm import row_sums

FEW_TILES, LONG, MOST_SPLITS, SUM_BLOCK = 128, 4096, 8, 1024


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    warps: int
    stages: int


WIDE_TILE = Tile(128, 256, 64, 8, 3)  # 16-bit, large
TILE = Tile(128, 128, 64, 8, 3)  # 16-bit
NARROW_TILE = Tile(64, 64, 32, 4, 3)  # float32, and anything small


@triton.jit
def _matmul(
    a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K, a_m, a_k, b_k, b_n, per_split,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """C [splits, M, N] = A [M, K] B [K, N] (+ bias [N]), split s over its own part of K. Tiles go in groups of GROUP rows, so
    that those that run together share what they read."""
    tile = tl.program_id(0)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP * columns)
    height = tl.minimum(rows - group * GROUP, GROUP)
    tile_m = group * GROUP + (tile % (GROUP * columns)) % height
    tile_n = (tile % (GROUP * columns)) // height
    split = tl.program_id(1).to(tl.int64)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    first = split * per_split
    last = tl.minimum(first + per_split, K)
    a_at = a_ptr + m[:, None] * a_m + (first + k)[None, :] * a_k
    b_at = b_ptr + (first + k)[:, None] * b_k + n[None, :] * b_n
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_K):
        left = last - start
        a = tl.load(a_at, mask=(m < M)[:, None] & (k < left)[None, :], other=0.0)
        b = tl.load(b_at, mask=(k < left)[:, None] & (n < N)[None, :], other=0.0)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    if BIAS:
        total += load_wide(bias_ptr + n, n < N)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    store_rounded(c_ptr + split * M * N + m[:, None] * N + n[None, :], total, inside)


@triton.jit
def _sum_splits(parts_ptr, c_ptr, n, splits, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, splits):
        total += tl.load(parts_ptr + i, mask=i < n, other=0.0)
        parts_ptr += n
    store_rounded(c_ptr + i, total, i < n)


_launch_matmul, _launch_sum_splits = launcher(_matmul), launcher(_sum_splits)


def _tile(m: int, n: int, dtype: torch.dtype) -> Tile:
    if dtype is torch.float32 or min(m, n) <= 64:
        return NARROW_TILE
    return WIDE_TILE if n >= 256 and m >= 2048 else TILE


def _splits(tiles: int, k: int) -> int:
    """How many parts of the inner dimension: a function of the shape alone, so that the order of a sum is, too."""
    if tiles >= FEW_TILES or k < LONG:
        return 1
    return min(MOST_SPLITS, triton.cdiv(FEW_TILES, tiles), k // (LONG // 4))


def matmul(a: Tensor, b: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    """A [M, K] B [K, N] + bias in the dtype of A, any strides."""
    (m, k), n = a.shape, b.shape[1]
    c = a.new_empty((m, n))
    if m == 0 or n == 0:
        return c
    tile = _tile(m, n, a.dtype)
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    splits = 1 if bias is not None else _splits(tiles, k)
    out = c if splits == 1 else a.new_empty((splits, m, n), dtype=torch.float32)
    per_split = max(1, triton.cdiv(triton.cdiv(k, splits), tile.k)) * tile.k
    _launch_matmul(
        tiles, splits, 1, a, b, bias, out, m, n, k, *a.stride(), *b.stride(), per_split, bias is not None,
        tile.m, tile.n, tile.k, 8, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if splits > 1:
        _launch_sum_splits(triton.cdiv(m * n, SUM_BLOCK), 1, 1, out, c, m * n, splits, SUM_BLOCK)
    return c


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])


@declared.linear_fwd.triton
def linear_fwd(x: Tensor, w: Tensor, b: Optional[Tensor]) -> Tensor:
    return matmul(_rows(x), w.mT, None if b is None else b.contiguous()).view(*x.shape[:-1], w.shape[0])


@declared.linear_dgrad.triton
def linear_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    return matmul(_rows(dy), w).view(*dy.shape[:-1], w.shape[1])


@declared.linear_wgrad.triton
def linear_wgrad(dy: Tensor, x: Optional[Tensor], bias: bool) -> tuple[Optional[Tensor], Optional[Tensor]]:
    rows = _rows(dy)
    dw = None if x is None else matmul(rows.mT, _rows(x))
    return dw, row_sums(rows).sum(0).to(dy.dtype) if bias else None


@declared.linear_bwd.triton
def linear_bwd(
    dy: Tensor, x: Optional[Tensor], w: Tensor, bias: bool
) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    return linear_dgrad(dy, w), *linear_wgrad(dy, x, bias)
