"""Grouped products that read no value on the host: offsets are read on the device.

A grid of ceil(N / BLOCK_M) + E + 1 row tiles is always enough: each program finds its group in one scan of the offsets, and
programs past the last tile return at once. Rows without a group are one more group, after the others, with an empty product: 0.
A tile's rows are all of one group, and a row's sum goes over K in steps that depend on shapes alone: its bits do not depend on
where other rows go.

`gemm_table.GROUPED` says which kernel: over pointers; over tensor descriptors (TMA) where device and strides allow, persistent, its
tiles in stretches whose rows stay in the cache while the matrices pass by, so that each is read a few times; or torch's.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.engine.backend.select import gemm_provider
from funcops.library.kernels import grouped as declared
from funcops.library.kernels.pins import launched, pins, require_our_products
from funcops.library.kernels.triton.common import INTERPRETED, cdiv, contiguous, load_wide, next_power_of_2, store_rounded
from funcops.library.kernels.triton.gemm import add_product, tile_of
from funcops.library.kernels.triton.gemm_table import FP32_UNALIGNED, GROUPED, SMALL, SQUARE, UNALIGNED_FUSED, WIDE, Tile
from funcops.library.kernels.triton.matmul import GROUP, descriptor, device_facts, precision

FP32, FP32_ODD = FP32_UNALIGNED, Tile(64, 32, 16, 4, 3)  # deeper or wider tiles spill with a gated unit
HALF_CACHE = 25_000_000  # bytes of an H100's level-2 cache
FEW_ROWS = 64  # rows per group at which a tile of 128 would be half empty


@triton.jit
def locate(tile, offsets_ptr, E, N, BLOCK_M: tl.constexpr, E_BLOCK: tl.constexpr):
    """A row tile's group, its first row, and the group's end. Group E: rows without a group. An end of 0: not a tile."""
    e = tl.arange(0, E_BLOCK)
    first = tl.load(offsets_ptr + e, mask=e <= E, other=0).to(tl.int64)
    last = tl.where(e == E, N, tl.load(offsets_ptr + e + 1, mask=e < E, other=0).to(tl.int64))
    tiles = tl.where((e <= E) & (last > first), (last - first + BLOCK_M - 1) // BLOCK_M, 0)
    before = tl.cumsum(tiles, 0) - tiles
    mine = (tile >= before) & (tile < before + tiles)
    at = tl.where(mine, first + (tile - before) * BLOCK_M, 0)
    start = tl.minimum(tl.maximum(tl.sum(at, 0), 0), N).to(tl.int32)  # unchanged: the bounds show that it fits 32 bits
    return tl.sum(tl.where(mine, e, 0), 0), start, tl.sum(tl.where(mine, last, 0), 0).to(tl.int32)


@triton.jit
def place_of(n, last, index_ptr, every, A_ROWS, INDEXED: tl.constexpr):
    """The rows of A that are rows n of a group that ends at `last`; A_ROWS, which A does not have, for n beyond the end."""
    if INDEXED:
        row = tl.load(index_ptr + n, mask=n < last, other=0) // every
    else:
        row = n
    return tl.where(n < last, row, A_ROWS).to(tl.int64)


@triton.jit
def _product(
    a_ptr, w_ptr, y_ptr, bias_ptr, scales_ptr, index_ptr, offsets_ptr, tiles, rows, a_rows, E, N, K, w_k, w_n, every,
    BIAS: tl.constexpr, SCALED: tl.constexpr, INDEXED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, E_BLOCK: tl.constexpr,
):
    """y [rows, N] from A [a_rows, K] and W [E, K, N], whose matrices are dense with strides (w_k, w_n)."""
    tile_m, tile_n = tile_of(tl.program_id(0), tiles * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP)
    e, first, last = locate(tile_m, offsets_ptr, E, rows, BLOCK_M, E_BLOCK)
    if last == 0:
        return
    e, m = e.to(tl.int64), first + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = place_of(m, last, index_ptr, every, a_rows, INDEXED)
    w_ptr += e * K * N
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    length = tl.where(e < E, K, 0)
    total = add_product(total, a_ptr, w_ptr, row, n, a_rows, N, 0, length, K, 1, w_k, w_n, PRECISION, BLOCK_K)
    if BIAS:
        bias = load_wide(bias_ptr + e * N + n, (n < N) & (e < E))[None, :]
        if SCALED:
            bias = bias * load_wide(scales_ptr + m, m < last)[:, None]
        total += bias
    inside = (m < last)[:, None] & (n < N)[None, :]
    store_rounded(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], total, inside)


@triton.jit
def _wgrad(
    dy_ptr, x_ptr, dw_ptr, db_ptr, scales_ptr, dy_index_ptr, x_index_ptr, offsets_ptr, dy_rows, x_rows,
    O, I, every,  # noqa: E741 (as in the math)
    DW: tl.constexpr, SUMS: tl.constexpr, SCALED: tl.constexpr, DY_INDEXED: tl.constexpr, X_INDEXED: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    """dw [E, O, I] (+)= dy^T x over a group's rows, and with SUMS, in the first tile of a row of tiles, db [E, O] (+)= dy's sum."""
    e = tl.program_id(1).to(tl.int64)
    tile_m, tile_n = tile_of(tl.program_id(0), O, I, BLOCK_M, BLOCK_N, GROUP)
    first, last = tl.load(offsets_ptr + e), tl.load(offsets_ptr + e + 1)
    if ADD:
        if first >= last:
            return
    o = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    i = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    if DW:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(first, last, BLOCK_K):
            of_dy = place_of(start + k, last, dy_index_ptr, every, dy_rows, DY_INDEXED)
            of_x = place_of(start + k, last, x_index_ptr, every, x_rows, X_INDEXED)
            a = tl.load(dy_ptr + o[:, None] + of_dy[None, :] * O, mask=(o < O)[:, None] & (of_dy < dy_rows)[None, :], other=0.0)
            b = tl.load(x_ptr + of_x[:, None] * I + i[None, :], mask=(of_x < x_rows)[:, None] & (i < I)[None, :], other=0.0)
            if INTERPRETED:
                a, b = a.to(tl.float32), b.to(tl.float32)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        at, inside = dw_ptr + (e * O + o[:, None]) * I + i[None, :], (o < O)[:, None] & (i < I)[None, :]
        if ADD:
            total += load_wide(at, inside)
        store_rounded(at, total, inside)
    if SUMS:
        if tile_n == 0:
            sums = tl.zeros([BLOCK_M], tl.float32)
            for start in range(first, last, BLOCK_K):
                of_dy = place_of(start + k, last, dy_index_ptr, every, dy_rows, DY_INDEXED)
                part = load_wide(dy_ptr + o[:, None] + of_dy[None, :] * O, (o < O)[:, None] & (of_dy < dy_rows)[None, :])
                if SCALED:
                    part = part * load_wide(scales_ptr + start + k, start + k < last)[None, :]
                sums += tl.sum(part, 1)
            if ADD:
                sums += load_wide(db_ptr + e * O + o, o < O)
            store_rounded(db_ptr + e * O + o, sums, o < O)


@triton.jit
def _described(
    a_desc, w_desc, a_ptr, y_ptr, bias_ptr, scales_ptr, index_ptr, offsets_ptr, tiles, rows, a_rows, E, N, K, every,
    BIAS: tl.constexpr, SCALED: tl.constexpr, INDEXED: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, E_BLOCK: tl.constexpr,
):
    """`_product` over descriptors: a program takes tiles p, p + P, ... W is stored [E N, K] if TRANSPOSED, else [E K, N], and
    then K is a multiple of BLOCK_K. Gathered rows, which a descriptor does not find, are read over pointers."""
    for work in tl.range(tl.program_id(0), tiles * tl.cdiv(N, BLOCK_N), tl.num_programs(0)):
        tile_m, tile_n = tile_of(work, tiles * BLOCK_M, N, BLOCK_M, BLOCK_N, GROUP)
        e, first, last = locate(tile_m, offsets_ptr, E, rows, BLOCK_M, E_BLOCK)
        if last != 0:
            m, n, k = first + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
            row = place_of(m, last, index_ptr, every, a_rows, INDEXED)
            a_at = a_ptr + row[:, None] * K + k[None, :]
            total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in range(0, tl.where(e < E, K, 0), BLOCK_K):
                if INDEXED:
                    a = tl.load(a_at + start, mask=(row < a_rows)[:, None] & (k < K - start)[None, :], other=0.0)
                else:
                    a = a_desc.load([first, start])
                if TRANSPOSED:
                    w = w_desc.load([e * N + tile_n * BLOCK_N, start]).T
                else:
                    w = w_desc.load([e * K + start, tile_n * BLOCK_N])
                if INTERPRETED:
                    a, w = a.to(tl.float32), w.to(tl.float32)
                total = tl.dot(a, w, total)
            if BIAS:
                bias = load_wide(bias_ptr + e.to(tl.int64) * N + n, (n < N) & (e < E))[None, :]
                if SCALED:
                    bias = bias * load_wide(scales_ptr + m, m < last)[:, None]
                total += bias
            inside = (m < last)[:, None] & (n < N)[None, :]
            store_rounded(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], total, inside)


@triton.jit
def _rows_of(
    desc, ptr, index_ptr, start, last, every, rows, width, column, INDEXED: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):
    """Rows [BLOCK_K, BLOCK] from `start` on, 0 from `last` on; if WHOLE, none is beyond `last`."""
    if WHOLE and not INDEXED:
        return desc.load([start, column])
    else:
        row = place_of(start + tl.arange(0, BLOCK_K), last, index_ptr, every, rows, INDEXED)
        i = column + tl.arange(0, BLOCK)
        inside = (i < width)[None, :] if WHOLE else (row < rows)[:, None] & (i < width)[None, :]
        return tl.load(ptr + row[:, None] * width + i[None, :], mask=inside, other=0.0)


@triton.jit
def _add_rows(total, dy, x):
    if INTERPRETED:
        dy, x = dy.to(tl.float32), x.to(tl.float32)
    return tl.dot(dy.T, x, total)


@triton.jit
def _wgrad_described(
    dy_desc, x_desc, dy_ptr, x_ptr, dw_ptr, dy_index_ptr, x_index_ptr, offsets_ptr, dy_rows, x_rows, E,
    O, I, every,  # noqa: E741 (as in the math)
    DY_INDEXED: tl.constexpr, X_INDEXED: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):
    """`_wgrad` without sums: whole blocks of rows over descriptors, if rows are not gathered, and a group's last rows, behind which
    the next group's lie, over pointers. A program takes tiles p, p + P, ..., one group's after the other's."""
    tiles = tl.cdiv(O, BLOCK_M) * tl.cdiv(I, BLOCK_N)
    for work in tl.range(tl.program_id(0), E * tiles, tl.num_programs(0)):
        e = work // tiles
        tile_m, tile_n = tile_of(work % tiles, O, I, BLOCK_M, BLOCK_N, GROUP)
        first, last = tl.load(offsets_ptr + e), tl.load(offsets_ptr + e + 1)
        p, q = tile_m * BLOCK_M, tile_n * BLOCK_N
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        whole = first + tl.maximum(last - first, 0) // BLOCK_K * BLOCK_K
        for start in range(first, whole, BLOCK_K):
            dy = _rows_of(dy_desc, dy_ptr, dy_index_ptr, start, last, every, dy_rows, O, p, DY_INDEXED, True, BLOCK_K, BLOCK_M)
            x = _rows_of(x_desc, x_ptr, x_index_ptr, start, last, every, x_rows, I, q, X_INDEXED, True, BLOCK_K, BLOCK_N)
            total = _add_rows(total, dy, x)
        if whole < last:
            dy = _rows_of(dy_desc, dy_ptr, dy_index_ptr, whole, last, every, dy_rows, O, p, DY_INDEXED, False, BLOCK_K, BLOCK_M)
            x = _rows_of(x_desc, x_ptr, x_index_ptr, whole, last, every, x_rows, I, q, X_INDEXED, False, BLOCK_K, BLOCK_N)
            total = _add_rows(total, dy, x)
        o, i = p + tl.arange(0, BLOCK_M), q + tl.arange(0, BLOCK_N)
        at, inside = dw_ptr + (e.to(tl.int64) * O + o[:, None]) * I + i[None, :], (o < O)[:, None] & (i < I)[None, :]
        if ADD:
            total += load_wide(at, inside)
        store_rounded(at, total, inside)


_launch_product, _launch_wgrad = launcher(_product), launcher(_wgrad)
_launch_described, _launch_wgrad_described = launcher(_described), launcher(_wgrad_described)


def tile_for(dtype: torch.dtype, rows: int, groups: int, *widths: int) -> Tile:
    """Choose the tile, by shapes alone; in the mode of `pins` not by `rows`. `widths`: the lengths of all matrices' rows, which are
    aligned if multiples of 16."""
    even = all([width % 16 == 0 for width in widths])
    if dtype is torch.float32:
        return FP32 if even else FP32_ODD
    if not even:
        return UNALIGNED_FUSED
    return SQUARE if min(widths) > FEW_ROWS and (rows > FEW_ROWS * groups or pins() is not None) else SMALL


def row_tiles(rows: int, groups: int, tile: Tile) -> int:
    return cdiv(rows, tile.m) + groups + 1


def blocks_of(groups: int) -> int:
    """The size of a scan that holds all groups, and the group of rows without one."""
    return max(16, next_power_of_2(groups + 1))


def way_of(kind: str, *operands: Tensor) -> str:
    """Which kernel multiplies rows and matrices, or rows and rows: "pointer", "descriptor" or "library". In the mode of `pins` the
    first: the others serve by addresses and numbers of rows."""
    if pins() is not None:
        require_our_products("a grouped product")
        return "pointer"
    provider = gemm_provider()
    way = {"specialised": "descriptor", "cublas": "library"}.get(provider, GROUPED[kind])
    if way == "descriptor":
        even = all([t.dtype is not torch.float32 and t.shape[-1] % 8 == 0 and t.data_ptr() % 16 == 0 for t in operands])
        return way if even and min([t.numel() for t in operands]) and device_facts()[0] else "pointer"
    served = way == "library" and provider != "triton" and operands[0].is_cuda and declared.library_serves(*operands)
    return way if served else "pointer"


def stretch(length: int, tile: Tile) -> int:
    """How many row tiles, of rows of `length` 16-bit numbers, all column tiles follow: as many as fit in half of the cache."""
    return max(GROUP, min(64, 1 << max(0, (HALF_CACHE // (2 * tile.m * length)).bit_length() - 1)))


def _flat(t: Tensor) -> Tensor:
    return t.contiguous().view(-1, t.shape[-1])


@launched(declared.grouped_product)
@declared.grouped_product.triton
def grouped_product(
    a: Tensor, w: Tensor, b: Optional[Tensor], offsets: Tensor, index: Optional[Tensor], every: int, scales: Optional[Tensor],
    transposed: bool,
) -> Tensor:
    (groups, outer, inner), rows = w.shape, a.shape[0] if index is None else index.shape[0]
    width, length, w_k, w_n = (outer, inner, 1, inner) if transposed else (inner, outer, inner, 1)
    y = a.new_empty((rows, width))
    if not rows:
        return y
    way, tile = way_of("product", a, w), tile_for(a.dtype, rows, groups, width, length)
    tiles = row_tiles(rows, groups, tile)
    if way == "library":
        plain = declared.grouped_product.kernel.torch_impl
        return plain(a, w, b, offsets, index, every, scales, transposed)  # type: ignore[no-any-return]
    if way == "descriptor" and (transposed or length % tile.k == 0):
        # a device whose factors go through registers has none left for the wide sum
        tile = WIDE if tile is SQUARE and width > SQUARE.n and device_facts().memory.feeds else tile
        w_desc = descriptor(_flat(w), tile.n if transposed else tile.k, tile.k if transposed else tile.n)
        _launch_described(
            min(device_facts()[1], tiles * cdiv(width, tile.n)), 1, 1,
            descriptor(a.contiguous(), tile.m, tile.k) if index is None else None, w_desc, a.contiguous(), y, contiguous(b),
            contiguous(scales), contiguous(index), offsets.contiguous(), tiles, rows, a.shape[0], groups, width, length, every,
            b is not None, scales is not None, index is not None, transposed, tile.m, tile.n, tile.k, stretch(length, tile),
            blocks_of(groups), num_warps=tile.warps, num_stages=tile.stages,
        )
        return y
    _launch_product(
        tiles * cdiv(width, tile.n), 1, 1, a.contiguous(), w.contiguous(), y, contiguous(b), contiguous(scales), contiguous(index),
        offsets.contiguous(), tiles, rows, a.shape[0], groups, width, length, w_k, w_n, every, b is not None, scales is not None,
        index is not None, precision(a.dtype), tile.m, tile.n, tile.k, GROUP, blocks_of(groups), num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y


@launched(declared.grouped_wgrad)
@declared.grouped_wgrad.triton
def grouped_wgrad(
    dy: Tensor, x: Optional[Tensor], offsets: Tensor, dy_index: Optional[Tensor], x_index: Optional[Tensor], every: int,
    scales: Optional[Tensor], bias: bool,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    if x is not None and way_of("wgrad", dy, x) == "library":
        plain = declared.grouped_wgrad.kernel.torch_impl
        return plain(dy, x, offsets, dy_index, x_index, every, scales, bias)  # type: ignore[no-any-return]
    groups, outer = offsets.shape[0] - 1, dy.shape[-1]
    dw = None if x is None else dy.new_empty((groups, outer, x.shape[-1]))
    db = dy.new_empty((groups, outer)) if bias else None
    _wgrads(dy, x, offsets, dy_index, x_index, every, scales, dw, db, False)
    return dw, db


@launched(declared.grouped_wgrad_into)
@declared.grouped_wgrad_into.triton
def grouped_wgrad_into(
    dy: Tensor, x: Optional[Tensor], offsets: Tensor, dy_index: Optional[Tensor], x_index: Optional[Tensor], every: int,
    scales: Optional[Tensor], dw: Optional[Tensor], db: Optional[Tensor],
) -> None:
    _wgrads(dy, None if dw is None else x, offsets, dy_index, x_index, every, scales, dw, db, True)


def _wgrads(
    dy: Tensor, x: Optional[Tensor], offsets: Tensor, dy_index: Optional[Tensor], x_index: Optional[Tensor], every: int,
    scales: Optional[Tensor], dw: Optional[Tensor], db: Optional[Tensor], add: bool,
) -> None:
    groups, outer, inner = offsets.shape[0] - 1, dy.shape[-1], 1 if x is None else x.shape[-1]
    tile = tile_for(dy.dtype, dy.shape[0], 0, outer, outer if x is None else inner)
    if x is not None and db is None and way_of("wgrad", dy, x) == "descriptor":
        dy, x = dy.contiguous(), x.contiguous()
        _launch_wgrad_described(
            min(device_facts()[1], groups * cdiv(outer, tile.m) * cdiv(inner, tile.n)), 1, 1,
            descriptor(dy, tile.k, tile.m) if dy_index is None else None,
            descriptor(x, tile.k, tile.n) if x_index is None else None, dy, x, dw, contiguous(dy_index), contiguous(x_index),
            offsets.contiguous(), dy.shape[0], x.shape[0], groups, outer, inner, every, dy_index is not None, x_index is not None,
            add, tile.m, tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=tile.stages,
        )
        return
    _launch_wgrad(
        cdiv(outer, tile.m) * cdiv(inner, tile.n), groups, 1, dy.contiguous(), contiguous(x), dw, db, contiguous(scales),
        contiguous(dy_index), contiguous(x_index), offsets.contiguous(), dy.shape[0], 0 if x is None else x.shape[0], outer, inner,
        every, x is not None, db is not None, scales is not None, dy_index is not None, x_index is not None, add,
        precision(dy.dtype), tile.m, tile.n, tile.k, GROUP, num_warps=tile.warps, num_stages=tile.stages,
    )
