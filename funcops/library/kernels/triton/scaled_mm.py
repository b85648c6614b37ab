"""Products of codes with scales. 8-bit codes with float32 scales go to CUDA's library on Hopper, if it takes them; it was faster
for every shape measured (`docs/benchmarks`). Other products use tensor descriptors, one program per tile of C. Codes that a device
does not multiply are decoded to bfloat16, if that is exact, and multiplied as other tensors are.

A scale per tensor or row multiplies the sum; a scale per block of 128 along K multiplies each partial sum, in float32: on Hopper,
whose tensor cores keep some 14 bits of a sum, this promotes it; without such scales the product promotes every 128. Blackwell's
tensor cores multiply blocks of 32 and 16 themselves. The interpreter, which has neither, decodes tiles and multiplies those.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from funcops.engine.backend.launch import launcher
from funcops.engine.backend.select import gemm_provider
from funcops.engine.backend.shared import SharedMemory, shared_memory
from funcops.engine.errors import require
from funcops.library.kernels import quantize
from funcops.library.kernels import scaled_mm as declared
from funcops.library.kernels.quantize import ELEMENTS
from funcops.library.kernels.triton import scaled_library as library
from funcops.library.kernels.triton import scaled_ways as ways
from funcops.library.kernels.triton.common import IN_INTERPRETER, INTERPRETED, cdiv
from funcops.library.kernels.triton.gemm import BARRIERS, tile_of
from funcops.library.kernels.triton.gemm_table import fitting
from funcops.library.kernels.triton.low_bits import decode, decode_scale, store_exact, times, unpacked
from funcops.library.kernels.triton.matmul import PLAIN, columns_of, descriptor_of, multiply, rows_of

GROUP, ALIGN = 8, 16  # tiles of a group share reads; a descriptor's rows are multiples of so many bytes
PROMOTE = tl.constexpr(128)  # of K, after which a product without block scales is added in float32


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    warps: int
    stages: int


# the fastest tiles on an H100 that compile without spills; beyond Hopper the largest that do
WHOLE, BLOCKS = Tile(256, 128, 128, 8, 3), Tile(64, 128, 128, 4, 4)
SINCE, NATIVE = Tile(128, 128, 128, 8, 4), Tile(128, 128, 128, 4, 3)
FEW_BITS = Tile(128, 128, 256, 4, 3)


@triton.jit
def _scales(
    scales_ptr, i, size, k, wide, down, along, KIND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, COUNT: tl.constexpr
):
    """Load the scales [rows, COUNT] of rows i, from element k on."""
    j = k // COLS + tl.arange(0, COUNT)
    at = scales_ptr + (i // ROWS)[:, None] * down + j[None, :] * along
    return tl.load(at, mask=(i < size)[:, None] & (j < wide)[None, :], other=0)


@triton.jit
def _values(tile, ELEMENT: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    return decode(unpacked(tile, A, B) if ELEMENT == "e2m1" else tile, ELEMENT, False)


@triton.jit
def _product(
    a_desc, b_desc, a_scales_ptr, b_scales_ptr, a_scale_ptr, b_scale_ptr, c_ptr, M, N, K, a_wide, a_down, a_along, b_wide,
    b_down, b_along, A: tl.constexpr, B: tl.constexpr, KIND: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr,
    COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    """A tile of C = A B^T, from descriptors of codes; A and B: their elements. COLS elements along K share a scale, 0: all.
    Scales have `wide` columns, and the strides `down` and `along`."""
    tile_m, tile_n = tile_of(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    A_PACK: tl.constexpr = 2 if A == "e2m1" else 1
    B_PACK: tl.constexpr = 2 if B == "e2m1" else 1
    COUNT: tl.constexpr = BLOCK_K // COLS if COLS else 1
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, K, BLOCK_K):
        a, b = a_desc.load([tile_m * BLOCK_M, k // A_PACK]), b_desc.load([tile_n * BLOCK_N, k // B_PACK])
        if INTERPRETED:
            left, right = _values(a, A, BLOCK_M, BLOCK_K), _values(b, B, BLOCK_N, BLOCK_K)
            if COLS:
                of_a = decode_scale(_scales(a_scales_ptr, m, M, k, a_wide, a_down, a_along, KIND, A_ROWS, COLS, COUNT), KIND)
                of_b = decode_scale(_scales(b_scales_ptr, n, N, k, b_wide, b_down, b_along, KIND, B_ROWS, COLS, COUNT), KIND)
                left = times(left, of_a, BLOCK_M, BLOCK_K, 1, COLS)
                right = times(right, of_b, BLOCK_N, BLOCK_K, 1, COLS)
            total = tl.dot(left, right.T, total)
        elif COLS == 0:
            total = tl.dot(a, b.T, total, max_num_imprecise_acc=PROMOTE)
        elif COLS == BLOCK_K:
            of_a = tl.load(a_scales_ptr + m // A_ROWS * a_down + k // COLS * a_along, mask=m < M, other=0.0)
            of_b = tl.load(b_scales_ptr + n // B_ROWS * b_down + k // COLS * b_along, mask=n < N, other=0.0)
            total += tl.dot(a, b.T) * of_a[:, None] * of_b[None, :]  # not their product, which takes as many registers as a sum
        else:
            of_a = _scales(a_scales_ptr, m, M, k, a_wide, a_down, a_along, KIND, A_ROWS, COLS, COUNT)
            of_b = _scales(b_scales_ptr, n, N, k, b_wide, b_down, b_along, KIND, B_ROWS, COLS, COUNT)
            if KIND == "e4m3":
                of_a, of_b = of_a.to(tl.float8e4nv, bitcast=True), of_b.to(tl.float8e4nv, bitcast=True)
            total = tl.dot_scaled(a, of_a, A, b.T, of_b, B, total)
    if COLS == 0:
        of_a = tl.load(a_scales_ptr + (m * a_down if A_ROWS else m * 0), mask=m < M, other=0.0)
        of_b = tl.load(b_scales_ptr + (n * b_down if B_ROWS else n * 0), mask=n < N, other=0.0)
        total = total * of_a[:, None] * of_b[None, :]
    if a_scale_ptr is not None:
        total = total * tl.load(a_scale_ptr)
    if b_scale_ptr is not None:
        total = total * tl.load(b_scale_ptr)
    store_exact(c_ptr + m[:, None] * N + n[None, :], total, (m < M)[:, None] & (n < N)[None, :])


def _shared_of(m: int, n: int, bytes_of_a: int, bytes_of_b: int, scales: int, stages: int, memory: SharedMemory) -> int:
    """The bytes of shared memory: codes and `scales` for each row of both, in flight."""
    return memory.tiles(stages) * (m * (bytes_of_a + scales) + n * (bytes_of_b + scales)) + BARRIERS


def _shared_of_launch(arguments: dict[str, Any], stages: int, memory: SharedMemory) -> int:
    (m, bytes_of_a), (n, bytes_of_b) = arguments["a_desc"].block_shape, arguments["b_desc"].block_shape
    return _shared_of(m, n, bytes_of_a, bytes_of_b, _scales_of(arguments["COLS"], arguments["BLOCK_K"]), stages, memory)


def _scales_of(cols: int, k: int) -> int:
    """How many scales of a row a tile has in shared memory."""
    return k // cols if 0 < cols < k else 0


_launch_product = launcher(_product, shared=_shared_of_launch)


def _tile_of(kind: str, a: str, b: str, cols: int, capability: int) -> Optional[Tile]:
    if kind in ("e8m0", "e4m3"):
        return FEW_BITS if a == b == "e2m1" else NATIVE
    if cols not in (0, PROMOTE.value):
        return None
    return SINCE if capability >= 100 else BLOCKS if cols else WHOLE


def _runs(kind: str, a: str, b: str, emulate: bool, capability: int, name: str) -> bool:
    """Whether the device multiplies such codes; if not, they may be decoded only if `emulate`."""
    needed = _least(kind)
    if capability >= needed:
        return True
    what = {"e8m0": "MX", "e4m3": "NVFP4"}.get(kind, "8-bit")
    require(emulate, "scaled_mm", "device", f"of sm_{needed} or later for {what} products of {a} by {b} (or emulate=True)", name)
    return False


def _exact(element: str, kind: str) -> bool:
    """Whether bfloat16, which has 8 bits of a number, holds each code times its scale: a power of two has 1, e4m3 4 and e2m1 2."""
    return kind in ("pow2", "e8m0") or (element, kind) == ("e2m1", "e4m3")


def _decodes(a: str, kind: str, b: str, b_kind: str) -> bool:
    return not IN_INTERPRETER and _exact(a, kind) and _exact(b, b_kind)


def _by_decoding(a: tuple[Any, ...], b: tuple[Any, ...], width: int, out: torch.dtype) -> Tensor:
    """The product of operands (codes, scales, scale, element, rows, cols, kind), decoded to bfloat16. It is exact but for a size
    below 2^-126, half a step of bfloat16's numbers there. Scales of whole tensors and rows multiply the sum, in float32."""
    left, right = (quantize.dequantize(codes, scales, None, *how, width, torch.bfloat16) for codes, scales, _, *how in (a, b))
    factors = [scale if side or scale.dim() < 2 else scale.mT for side, scale in ((1, a[2]), (0, b[2])) if scale is not None]
    summed = out if not factors and out is torch.bfloat16 else torch.float32
    c = left.new_empty((left.numel() // width, right.shape[0]), dtype=summed)
    multiply(rows_of(left), columns_of(right), c, PLAIN)
    for factor in factors[:-1]:
        c.mul_(factor)
    if factors:
        c = torch.mul(c, factors[-1], out=c if out is summed else c.new_empty(c.shape, dtype=out))
    return c.to(out).view(*left.shape[:-1], c.shape[1])


@functools.lru_cache(maxsize=256)
def _chosen(
    kind: str, a: str, b: str, a_cols: int, b_cols: int, emulate: bool, device: int, active: Any
) -> Optional[tuple[Tile, int, int]]:
    """The tile, and the bytes along K that it takes of a and of b; None if no kernel multiplies them, such as operands with
    different tiles along K."""
    capability, name = (1000, "the interpreter") if INTERPRETED else _capability(device, active)
    tile = _tile_of(kind, a, b, a_cols, capability) if a_cols == b_cols else None
    if tile is None or not _runs(kind, a, b, emulate, capability, name):
        return None
    of_k = tile.k // (2 if a == "e2m1" else 1), tile.k // (2 if b == "e2m1" else 1)
    memory, scales = shared_memory(), _scales_of(a_cols, tile.k)
    tile = tile if memory.feeds else tile._replace(warps=8)  # factors go through registers: four warps would spill
    tile = fitting(tile, lambda part: _shared_of(part.m, part.n, *of_k, scales, part.stages, memory), memory.limit)
    return tile, *of_k


@functools.lru_cache(maxsize=64)
def _capability(device: int, active: Any) -> tuple[int, str]:
    target = active.get_current_target()
    return (int(target.arch), f"sm_{target.arch}") if target.backend == "cuda" else (0, str(target.arch))


def _library_serves(kind: str, elements: tuple[str, str], tiles: tuple[Any, Any], device: int, active: Any) -> bool:
    """Whether CUDA's library multiplies such operands here: where it was measured, and, where it was not, by request or if no
    kernel of ours runs on the device."""
    if IN_INTERPRETER:
        return False
    capability, _ = _capability(device, active)
    wanted = gemm_provider() == "cublas" or capability < _least(kind)
    return ways.serves(ways.way_of(kind, elements, tiles), capability, wanted)


def _least(kind: str) -> int:
    """The least capability of a device for our kernel."""
    return 100 if kind in ("e8m0", "e4m3") else 90


def _codes(codes: Tensor, element: str, rows: int, tile: int, wide: int) -> TensorDescriptor:
    """A descriptor of codes [*, K] as `rows` rows, zero-padded to a multiple of 16 bytes; loads are `tile` rows by `wide` bytes."""
    codes = codes.contiguous()
    if codes.shape[-1] % ALIGN:
        codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % ALIGN))
    elif codes.data_ptr() % ALIGN:
        codes = codes.clone()
    dtype, width = ELEMENTS[element].dtype, codes.shape[-1]
    return descriptor_of(codes if dtype is None or IN_INTERPRETER else codes.view(dtype), [rows, width], [width, 1], tile, wide)


@declared.scaled_mm.triton
def scaled_mm(
    a: Tensor, a_scales: Tensor, a_scale: Optional[Tensor], b: Tensor, b_scales: Tensor, b_scale: Optional[Tensor],
    a_element: str, a_rows: int, a_cols: int, b_element: str, b_rows: int, b_cols: int, kind: str, width: int, out: torch.dtype,
    emulate: bool = False, b_kind: str = "",
) -> Tensor:
    active = None if IN_INTERPRETER else driver.active
    device = 0 if active is None else active.get_current_device()
    size, n, b_kind, chosen = a.numel(), b.shape[0], b_kind or kind, None
    elements, tiles = (a_element, b_element), ((a_rows, a_cols), (b_rows, b_cols))
    served = b_kind == kind and gemm_provider() != "triton" and _library_serves(kind, elements, tiles, device, active)
    if b_kind == kind:
        chosen = _chosen(kind, a_element, b_element, a_cols, b_cols, emulate or served, device, active)
    else:
        require(emulate, "scaled_mm", "emulate", f"True for a product of {kind} scales by {b_kind}, which is decoded", emulate)
    if (chosen is None and not served) or not size * n or out is torch.float64:
        if size * n and out is not torch.float64 and _decodes(a_element, kind, b_element, b_kind):
            of_a = a, a_scales, a_scale, a_element, a_rows, a_cols, kind
            return _by_decoding(of_a, (b, b_scales, b_scale, b_element, b_rows, b_cols, b_kind), width, out)
        return declared.scaled_mm.kernel.torch_impl(  # type: ignore[no-any-return]
            a, a_scales, a_scale, b, b_scales, b_scale, a_element, a_rows, a_cols, b_element, b_rows, b_cols, kind, width, out,
            True, b_kind,
        )
    left = None if a_scale is None or a_scale.dim() < 2 else a_scale
    right = None if b_scale is None or b_scale.dim() < 2 else b_scale
    if left is not None or right is not None:  # a scale for each row: it multiplies the sums
        c: Tensor = scaled_mm(
            a, a_scales, a_scale if left is None else None, b, b_scales, b_scale if right is None else None, a_element, a_rows,
            a_cols, b_element, b_rows, b_cols, kind, width, torch.float32, emulate,
        )
        flat = c.view(-1, n)
        flat = flat if left is None else flat * left
        return (flat if right is None else flat * right.mT).view(c.shape).to(out)
    if served:
        found = library.product(a, a_scales, b, b_scales, elements, tiles, out, kind, (a_scale, b_scale), chosen is None)
        if found is not None:
            return found
    assert chosen is not None  # else the library takes what `_library_serves` says, with any sizes
    tile, of_left, of_right = chosen
    m, y = size // a.shape[-1], a.new_empty((*a.shape[:-1], n), dtype=out)
    _launch_product(
        cdiv(m, tile.m) * cdiv(n, tile.n), 1, 1, _codes(a, a_element, m, tile.m, of_left),
        _codes(b, b_element, n, tile.n, of_right), a_scales, b_scales, a_scale, b_scale, y, m, n, width, a_scales.shape[1],
        *a_scales.stride(), b_scales.shape[1], *b_scales.stride(), a_element, b_element, kind, a_rows, b_rows, a_cols, tile.m,
        tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=tile.stages,
    )
    return y
