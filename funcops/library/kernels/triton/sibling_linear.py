"""Linear layers of one input: one program per tile of any of their outputs; and one sum over all their output gradients."""

from __future__ import annotations

from typing import Optional

import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import sibling_linear as declared
from funcops.library.kernels.triton.common import cdiv, contiguous, load_wide, store_rounded
from funcops.library.kernels.triton.gemm import add_product, tile_of
from funcops.library.kernels.triton.gemm_table import choose
from funcops.library.kernels.triton.matmul import GROUP, PLAIN, left_to_library, matmul, precision, rows_of


@triton.jit
def _output_tile(
    x_ptr, w_ptr, b_ptr, y_ptr, tile_m, tile_n, M, N, K, BIAS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = add_product(total, x_ptr, w_ptr, m, n, M, N, 0, K, K, 1, 1, K, PRECISION, BLOCK_K)
    if BIAS:
        total += load_wide(b_ptr + n, n < N)[None, :]
    store_rounded(y_ptr + m[:, None] * N + n[None, :], total, (m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _fwd(
    x_ptr, w0_ptr, w1_ptr, w2_ptr, b0_ptr, b1_ptr, b2_ptr, y0_ptr, y1_ptr, y2_ptr, M, N0, N1, N2, K,
    BIAS0: tl.constexpr, BIAS1: tl.constexpr, BIAS2: tl.constexpr, THIRD: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    """Compute the tiles of all outputs side by side: tiles in one row of tiles read the same x."""
    first, second = tl.cdiv(N0, BLOCK_N), tl.cdiv(N0, BLOCK_N) + tl.cdiv(N1, BLOCK_N)
    columns = second + tl.cdiv(N2, BLOCK_N)
    tile_m, tile_n = tile_of(tl.program_id(0), M, columns * BLOCK_N, BLOCK_M, BLOCK_N, GROUP)
    if tile_n < first:
        _output_tile(x_ptr, w0_ptr, b0_ptr, y0_ptr, tile_m, tile_n, M, N0, K, BIAS0, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    elif tile_n < second:
        _output_tile(x_ptr, w1_ptr, b1_ptr, y1_ptr, tile_m, tile_n - first, M, N1, K, BIAS1, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
    elif THIRD:
        _output_tile(x_ptr, w2_ptr, b2_ptr, y2_ptr, tile_m, tile_n - second, M, N2, K, BIAS2, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)


@triton.jit
def _dgrad(
    dy0_ptr, dy1_ptr, dy2_ptr, w0_ptr, w1_ptr, w2_ptr, dx_ptr, M, N, K0, K1, K2, THIRD: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = add_product(total, dy0_ptr, w0_ptr, m, n, M, N, 0, K0, K0, 1, N, 1, PRECISION, BLOCK_K)
    total = add_product(total, dy1_ptr, w1_ptr, m, n, M, N, 0, K1, K1, 1, N, 1, PRECISION, BLOCK_K)
    if THIRD:
        total = add_product(total, dy2_ptr, w2_ptr, m, n, M, N, 0, K2, K2, 1, N, 1, PRECISION, BLOCK_K)
    store_rounded(dx_ptr + m[:, None] * N + n[None, :], total, (m < M)[:, None] & (n < N)[None, :])


_launch_fwd, _launch_dgrad = launcher(_fwd), launcher(_dgrad)


@declared.sibling_linear_fwd.triton
def sibling_linear_fwd(
    x: Tensor, w0: Tensor, w1: Tensor, w2: Optional[Tensor], b0: Optional[Tensor], b1: Optional[Tensor], b2: Optional[Tensor]
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    m, k = x.numel() // max(1, x.shape[-1]), x.shape[-1]
    n0, n1, n2 = w0.shape[0], w1.shape[0], 0 if w2 is None else w2.shape[0]
    if left_to_library("three", x.dtype, m, n0):
        return declared.sibling_linear_fwd.kernel.torch_impl(x, w0, w1, w2, b0, b1, b2)  # type: ignore[no-any-return]
    y0, y1 = x.new_empty(*x.shape[:-1], n0), x.new_empty(*x.shape[:-1], n1)
    y2 = x.new_empty(*x.shape[:-1], n2) if w2 is not None else None
    if m:
        rows = x.contiguous()
        weights = w0.contiguous(), w1.contiguous(), contiguous(w2)
        tile = choose("fused" if w2 is None else "three", x.dtype, m, n0, k % 16 == 0).pointer
        columns = cdiv(n0, tile.n) + cdiv(n1, tile.n) + cdiv(n2, tile.n)
        _launch_fwd(
            cdiv(m, tile.m) * columns, 1, 1, rows, *weights, contiguous(b0), contiguous(b1), contiguous(b2), y0, y1, y2,
            m, n0, n1, n2, k, b0 is not None, b1 is not None, b2 is not None, w2 is not None, precision(x.dtype),
            tile.m, tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=tile.stages,
        )
    return y0, y1, y2


@declared.joined_linear_dgrad.triton
def joined_linear_dgrad(dy: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    if left_to_library("none", dy.dtype, dy.numel() // dy.shape[-1], w0.shape[1]):
        return declared.joined_linear_dgrad.kernel.torch_impl(dy, w0, w1, w2)  # type: ignore[no-any-return]
    dx = dy.new_empty(*dy.shape[:-1], w0.shape[1])
    if dx.numel():
        matmul(rows_of(dy), rows_of(declared.joined(w0, w1, w2)), dx, PLAIN)
    return dx


@declared.sibling_linear_dgrad.triton
def sibling_linear_dgrad(dy0: Tensor, dy1: Tensor, dy2: Optional[Tensor], w0: Tensor, w1: Tensor, w2: Optional[Tensor]) -> Tensor:
    m, n = dy0.numel() // w0.shape[0], w0.shape[1]
    if left_to_library("three", dy0.dtype, m, n):
        return declared.sibling_linear_dgrad.kernel.torch_impl(dy0, dy1, dy2, w0, w1, w2)  # type: ignore[no-any-return]
    dx = dy0.new_empty(*dy0.shape[:-1], n)
    if m:
        rows = dy0.contiguous(), dy1.contiguous(), contiguous(dy2)
        weights = w0.contiguous(), w1.contiguous(), contiguous(w2)
        inner = [0 if w is None else w.shape[0] for w in weights]
        tile = choose("fused", dy0.dtype, m, n, all([size % 16 == 0 for size in (n, *inner)])).pointer
        _launch_dgrad(
            cdiv(m, tile.m) * cdiv(n, tile.n), 1, 1, *rows, *weights, dx, m, n, *inner, w2 is not None, precision(dy0.dtype),
            tile.m, tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=tile.stages,
        )
    return dx
