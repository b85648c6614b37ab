"""The product over tensor descriptors with its warps specialised: one group loads, two multiply.

A candidate that no row of the table chooses until a GPU shows where it is faster. The compiler specialises warps only with
four of them, descriptors made on the device and loops that are not flattened (measured ahead of time with Triton 3.7; with eight
warps it silently does not). Descriptors made on the device take scratch memory from an allocator.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from funcops.engine.backend.launch import launcher
from funcops.engine.backend.shared import SharedMemory
from funcops.library.kernels.triton.gemm import finish, product, shared_of, tile_of

HANDED = 16384  # bytes, at most, that warps hand to each other


@triton.jit
def _specialised(
    a_ptr, b_ptr, c_ptr, bias_ptr, z_ptr, add_ptr, M, N, K, a_stride, b_stride, scale: tl.float32, BIAS: tl.constexpr,
    Z: tl.constexpr, KIND: tl.constexpr, ADD: tl.constexpr, A_FLIPPED: tl.constexpr, B_FLIPPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr,
):
    """`gemm._descriptor` without splits and row sums. COLUMNS of C are finished at a time."""
    if A_FLIPPED:
        a_desc = tl.make_tensor_descriptor(a_ptr, [K, M], [a_stride, 1], [BLOCK_K, BLOCK_M])
    else:
        a_desc = tl.make_tensor_descriptor(a_ptr, [M, K], [a_stride, 1], [BLOCK_M, BLOCK_K])
    if B_FLIPPED:
        b_desc = tl.make_tensor_descriptor(b_ptr, [N, K], [b_stride, 1], [BLOCK_N, BLOCK_K])
    else:
        b_desc = tl.make_tensor_descriptor(b_ptr, [K, N], [b_stride, 1], [BLOCK_K, BLOCK_N])
    c_desc = tl.make_tensor_descriptor(c_ptr, [M, N], [N, 1], [BLOCK_M, COLUMNS])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=False, warp_specialize=True):
        tile_m, tile_n = tile_of(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        total = product(a_desc, b_desc, tile_m, tile_n, 0, K, A_FLIPPED, B_FLIPPED, BLOCK_M, BLOCK_N, BLOCK_K)
        m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        finish(total, c_desc, row, column, bias_ptr, z_ptr, add_ptr, m, M, N, scale, BIAS, Z, KIND, ADD)


def specialised_shared_of(m: int, n: int, k: int, stages: int, itemsize: int, out_itemsize: int, memory: SharedMemory) -> int:
    """The bytes of shared memory of a specialised product: every stage has its tiles, on any device."""
    return shared_of(m, n, k, stages, itemsize, out_itemsize, memory._replace(feeds=True)) + HANDED


def _shared_of_launch(arguments: dict[str, Any], stages: int, memory: SharedMemory) -> int:
    m, n, k = (arguments[f"BLOCK_{x}"] for x in "MNK")
    return specialised_shared_of(m, n, k, stages, arguments["a_ptr"].itemsize, arguments["c_ptr"].itemsize, memory)


launch_specialised = launcher(_specialised, shared=_shared_of_launch)
