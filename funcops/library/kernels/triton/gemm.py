"""C [M, N] = A [M, K] B [K, N] with an epilogue, in two kernels: over tensor descriptors (TMA), persistent, for large 16-bit
products on devices that have them; over pointers, for every shape, stride and dtype.

If the output has few tiles and the inner dimension is long (a weight gradient over many rows), the inner dimension is
split: each part writes a float32 slice of a workspace, and a second kernel sums the slices in order.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from funcops.engine.backend.launch import launcher
from funcops.engine.backend.shared import SharedMemory
from funcops.library.kernels.triton.activation import activate, derivative
from funcops.library.kernels.triton.common import INTERPRETED, load_wide, rounded, store_rounded

BARRIERS = 1024  # bytes, at most, of the barriers of a pipeline
AHEAD = tl.constexpr(1024)  # of K: so long before its end the epilogue's tensor is asked for; earlier, a cache might lose it


@triton.jit
def tile_of(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The row and column of a tile. Tiles are ordered in groups of GROUP rows, so that tiles that run together share reads."""
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = tile // (GROUP * columns)
    height = tl.minimum(rows - group * GROUP, GROUP)
    return group * GROUP + (tile % (GROUP * columns)) % height, (tile % (GROUP * columns)) // height


@triton.jit
def epilogue(
    total, bias_ptr, z_ptr, add_ptr, m, n, M, N, scale,
    BIAS: tl.constexpr, Z: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr,
):
    """t = scale total + bias; with Z "keep" t is written to z; then f(t), or with Z "derivative" t f'(z); then + add."""
    total *= scale
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    if BIAS:
        total += load_wide(bias_ptr + n, n < N)[None, :]
    if Z == "keep":
        store_rounded(z_ptr + at, total, inside)
    if Z == "derivative":
        total *= derivative(load_wide(z_ptr + at, inside), KIND)
    elif KIND != "":
        total = activate(total, KIND)
    if ADD:
        total += load_wide(add_ptr + at, inside)
    return total


@triton.jit
def finish(
    total, c_desc, row, column, bias_ptr, z_ptr, add_ptr, m, M, N, scale,
    BIAS: tl.constexpr, Z: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr,
):
    """Store a tile after its epilogue: whole, or half of its columns after the other if C's descriptor has half of them. Then
    the tensors that the epilogue reads, and what it computes, take half of the registers."""
    if c_desc.block_shape[1] == total.shape[1]:
        _finish_part(total, c_desc, row, column, bias_ptr, z_ptr, add_ptr, m, M, N, scale, BIAS, Z, KIND, ADD)
    else:
        parts = tl.permute(tl.reshape(total, (total.shape[0], 2, total.shape[1] // 2)), (0, 2, 1))
        left, right = tl.split(parts)
        _finish_part(left, c_desc, row, column, bias_ptr, z_ptr, add_ptr, m, M, N, scale, BIAS, Z, KIND, ADD)
        column += c_desc.block_shape[1]
        _finish_part(right, c_desc, row, column, bias_ptr, z_ptr, add_ptr, m, M, N, scale, BIAS, Z, KIND, ADD)


@triton.jit
def _finish_part(
    part, c_desc, row, column, bias_ptr, z_ptr, add_ptr, m, M, N, scale,
    BIAS: tl.constexpr, Z: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr,
):
    n = column.to(tl.int64) + tl.arange(0, part.shape[1])
    part = epilogue(part, bias_ptr, z_ptr, add_ptr, m, n, M, N, scale, BIAS, Z, KIND, ADD)
    c_desc.store([row, column], rounded(part, c_desc.dtype))


@triton.jit
def _row_sum(
    a_ptr, sums_ptr, tile_n, m, M, split, first, last, a_m, a_k, shares, per_share, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """sums[split, share, m] (+)= the sum of A over a share of k in [first, last): the bias gradient, if A is dy^T. Each of the
    first `shares` tiles in a row of tiles takes one share, so that none is much later than the others.
    Their reads are still in the cache."""
    # as many loads in flight as a program can hold, now that it does not hold a tile; but elements at odd addresses take
    # a register each, and more
    STEP: tl.constexpr = BLOCK_K * (4 if BLOCK_K * a_ptr.dtype.element_ty.primitive_bitwidth >= 1024 else 1)
    k = tl.arange(0, STEP)
    total = tl.zeros([BLOCK_M], tl.float32)
    first += tile_n * per_share
    last = tl.minimum(first + per_share, last)
    for start in range(first, last, STEP):
        inside = (m < M)[:, None] & (start + k < last)[None, :]
        total += tl.sum(load_wide(a_ptr + m[:, None] * a_m + (start + k)[None, :].to(tl.int64) * a_k, inside), 1)
    sums_ptr += (split * shares + tile_n).to(tl.int64) * M
    if ADD:
        total += load_wide(sums_ptr + m, (m < M) & (shares == 1))  # else a workspace
    store_rounded(sums_ptr + m, total, m < M)


@triton.jit
def add_product(
    total, a_ptr, b_ptr, m, n, M, N, first, last, a_m, a_k, b_k, b_n, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr
):
    """total + rows m of A times columns n of B, over k in [first, last)."""
    k = tl.arange(0, BLOCK_K)
    a_at = a_ptr + m[:, None] * a_m + (first + k).to(tl.int64)[None, :] * a_k
    b_at = b_ptr + (first + k).to(tl.int64)[:, None] * b_k + n[None, :] * b_n
    for start in range(first, last, BLOCK_K):
        left = last - start
        a = tl.load(a_at, mask=(m < M)[:, None] & (k < left)[None, :], other=0.0)
        b = tl.load(b_at, mask=(k < left)[:, None] & (n < N)[None, :], other=0.0)
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    return total


@triton.jit
def _pointer(
    a_ptr, b_ptr, c_ptr, bias_ptr, z_ptr, add_ptr, sums_ptr, M, N, K, a_m, a_k, b_k, b_n, per_split, shares, per_share,
    scale: tl.float32, BIAS: tl.constexpr, Z: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr, SUMS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    """Split s reads its own part of K and writes C [s, M, N] and, with SUMS, sums [s, shares, M]."""
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    split = tl.program_id(1).to(tl.int64)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = split * per_split
    last = tl.minimum(first + per_split, K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = add_product(total, a_ptr, b_ptr, m, n, M, N, first, last, a_m, a_k, b_k, b_n, PRECISION, BLOCK_K)
    total = epilogue(total, bias_ptr, z_ptr, add_ptr, m, n, M, N, scale, BIAS, Z, KIND, ADD)
    inside = (m < M)[:, None] & (n < N)[None, :]
    store_rounded(c_ptr + split * M * N + m[:, None] * N + n[None, :], total, inside)
    if SUMS:
        if tile_n < shares:
            _row_sum(a_ptr, sums_ptr, tile_n, m, M, split, first, last, a_m, a_k, shares, per_share, ADD, BLOCK_M, BLOCK_K)


@triton.jit
def _lines(ptr, tile_m, tile_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The addresses of the lines of the cache in a tile."""
    LINE: tl.constexpr = min(BLOCK_N, 1024 // ptr.dtype.element_ty.primitive_bitwidth)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N // LINE) * LINE
    return (ptr + tl.minimum(m, M - 1)[:, None] * N + tl.minimum(n, N - 1)[None, :]).to(tl.int64)


@triton.jit
def _request(lines, now):
    """Ask for lines, which then come to the L2 cache: no thread waits for them, and no register or shared memory holds them. Under
    a branch, wgmma would no longer overlap."""
    asked: tl.constexpr = "{ .reg .pred now; setp.ne.b32 now, $2, 0; @now prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
    tl.inline_asm_elementwise(asked, "=r,l,r", [lines, now.to(tl.int32)], tl.int32, is_pure=False, pack=1)


@triton.jit
def product(
    a_desc, b_desc, tile_m, tile_n, first, last, A_FLIPPED: tl.constexpr, B_FLIPPED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, more_ptr=None, M=0, N=0,
):
    """A tile of A B over k in [first, last), in float32. `more_ptr`: a tensor [M, N] of which the epilogue reads the same tile."""
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    REQUESTS: tl.constexpr = more_ptr is not None and not INTERPRETED
    if REQUESTS:
        lines = _lines(more_ptr, tile_m, tile_n, M, N, BLOCK_M, BLOCK_N)
        near = first + tl.maximum(tl.cdiv(last - first - AHEAD, BLOCK_K), 0) * BLOCK_K
        # Triton pipelines no loop of tcgen05 with a request in it, and the caches of these devices are large
        EARLY: tl.constexpr = tl.target_info.cuda_capability_geq(10)
        if EARLY:
            _request(lines, near >= first)
    for k in range(first, last, BLOCK_K):
        if REQUESTS:
            if not EARLY:
                _request(lines, k == near)
        if A_FLIPPED:
            a = a_desc.load([k, tile_m * BLOCK_M]).T
        else:
            a = a_desc.load([tile_m * BLOCK_M, k])
        if B_FLIPPED:
            b = b_desc.load([tile_n * BLOCK_N, k]).T
        else:
            b = b_desc.load([k, tile_n * BLOCK_N])
        if INTERPRETED:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total)
    return total


@triton.jit
def _descriptor(
    a_desc, b_desc, c_desc, bias_ptr, z_ptr, add_ptr, a_ptr, sums_ptr, M, N, K, a_m, a_k, per_split, splits, slice_rows,
    shares, per_share, scale: tl.float32, BIAS: tl.constexpr, Z: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr,
    SUMS: tl.constexpr,
    A_FLIPPED: tl.constexpr, B_FLIPPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    """`_pointer` over descriptors: a program takes tiles p, p + P, ... A is stored [M, K], or [K, M] if flipped; B [K, N] or [N,
    K]. Split s writes from row s slice_rows of C, a multiple of BLOCK_M, so that no tile reaches into the next split."""
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for work in tl.range(tl.program_id(0), tiles * splits, tl.num_programs(0)):
        split = work // tiles
        tile_m, tile_n = tile_of(work % tiles, M, N, BLOCK_M, BLOCK_N, GROUP)
        first = split * per_split
        last = tl.minimum(first + per_split, K)
        more_ptr = z_ptr if Z == "derivative" else add_ptr
        total = product(
            a_desc, b_desc, tile_m, tile_n, first, last, A_FLIPPED, B_FLIPPED, BLOCK_M, BLOCK_N, BLOCK_K, more_ptr, M, N
        )
        m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row, column = split * slice_rows + tile_m * BLOCK_M, tile_n * BLOCK_N
        finish(total, c_desc, row, column, bias_ptr, z_ptr, add_ptr, m, M, N, scale, BIAS, Z, KIND, ADD)
        if SUMS:
            if tile_n < shares:
                _row_sum(a_ptr, sums_ptr, tile_n, m, M, split, first, last, a_m, a_k, shares, per_share, ADD, BLOCK_M, BLOCK_K)


@triton.jit
def _sum_splits(parts_ptr, c_ptr, n, slice_size, splits, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """c (+)= the slices' sum, in order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, splits):
        total += tl.load(parts_ptr + i, mask=i < n, other=0.0)
        parts_ptr += slice_size
    if ADD:
        total += load_wide(c_ptr + i, i < n)
    store_rounded(c_ptr + i, total, i < n)


@triton.jit
def _after(
    t_ptr, c_ptr, z_ptr, add_ptr, M, N, Z: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute C from t by the rest of the epilogue; t, which may be C itself, already has scale and bias."""
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    at, inside = m[:, None] * N + n[None, :], (m < M)[:, None] & (n < N)[None, :]
    total = epilogue(load_wide(t_ptr + at, inside), None, z_ptr, add_ptr, m, n, M, N, 1.0, False, Z, KIND, ADD)
    store_rounded(c_ptr + at, total, inside)


def shared_of(m: int, n: int, k: int, stages: int, itemsize: int, out_itemsize: int, memory: SharedMemory) -> int:
    """The bytes of shared memory of a product over descriptors: tiles of both factors, and the one that is stored."""
    return memory.tiles(stages) * (m + n) * k * itemsize + m * n * out_itemsize + BARRIERS


def _shared_of_launch(arguments: dict[str, Any], stages: int, memory: SharedMemory) -> int:
    m, n, k = (arguments[f"BLOCK_{x}"] for x in "MNK")
    return shared_of(m, n, k, stages, arguments["a_desc"].base.itemsize, arguments["c_desc"].base.itemsize, memory)


launch_pointer, launch_sum_splits = launcher(_pointer), launcher(_sum_splits)
launch_descriptor = launcher(_descriptor, shared=_shared_of_launch)
launch_after = launcher(_after)
