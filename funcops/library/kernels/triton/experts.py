"""The gated unit of experts in the epilogues of the two products around it (`kernels.experts`); or a kernel of its own
after a grouped product over tensor descriptors or of torch, if the table says so (`gemm_table.GROUPED`)."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import experts as declared
from funcops.library.kernels.glu import GATES
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.common import INTERPRETED, cdiv, contiguous, load_wide, rounded, store_rounded
from funcops.library.kernels.triton.gemm import add_product, tile_of
from funcops.library.kernels.triton.gemm_table import Tile
from funcops.library.kernels.triton.glu import gate_gradients, gate_parts, gated
from funcops.library.kernels.triton.grouped import blocks_of, grouped_product, locate, place_of, row_tiles, tile_for, way_of
from funcops.library.kernels.triton.matmul import GROUP, precision
from funcops.library.kernels.triton.row_scale import row_scale_fwd

FEW_CHOICES, MANY_CHOICES, COLUMNS = 32, 256, 128  # choices of a program, with dots of a bias and without; columns at a time


@triton.jit
def _up(
    x_ptr, up_ptr, bias_ptr, weights_ptr, z_ptr, scaled_ptr, order_ptr, offsets_ptr, tiles, rows, tokens, E,
    I, H, every,  # noqa: E741 (as in the math)
    limit: tl.float32, alpha: tl.float32, offset: tl.float32, BEFORE: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    E_BLOCK: tl.constexpr,
):
    """Compute z and scaled. A program has two sums: of gate columns, and of the linear columns that belong to them."""
    tile_m, tile_n = tile_of(tl.program_id(0), tiles * BLOCK_M, I, BLOCK_M, BLOCK_N, GROUP)
    e, first, last = locate(tile_m, offsets_ptr, E, rows, BLOCK_M, E_BLOCK)
    if last == 0:
        return
    e, m = e.to(tl.int64), first + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # rows and columns out of range read others, and are not stored: fewer masks take fewer registers
    row = tl.where(m < last, place_of(m, last, order_ptr, every, tokens, True), 0)
    a_at = x_ptr + row[:, None] * H + k[None, :]
    up_ptr += e * 2 * I * H
    b_at = up_ptr + tl.where(n < I, n, 0)[None, :] * H + k[:, None]
    c_at = b_at + tl.full([], I, tl.int64) * H
    gate, linear = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, tl.where(e < E, H, 0), BLOCK_K):
        left = H - start
        a = tl.load(a_at, mask=(k < left)[None, :], other=0.0)
        b = tl.load(b_at, mask=(k < left)[:, None], other=0.0)
        c = tl.load(c_at, mask=(k < left)[:, None], other=0.0)
        if INTERPRETED:
            a, b, c = a.to(tl.float32), b.to(tl.float32), c.to(tl.float32)
        gate = tl.dot(a, b, gate, input_precision=PRECISION)
        linear = tl.dot(a, c, linear, input_precision=PRECISION)
        a_at += BLOCK_K
        b_at += BLOCK_K
        c_at += BLOCK_K
    if BIAS:
        own = (n < I) & (e < E)
        gate += load_wide(bias_ptr + e * 2 * I + n, own)[None, :]
        linear += load_wide(bias_ptr + e * 2 * I + I + n, own)[None, :]
    inside, at = (m < last)[:, None] & (n < I)[None, :], m.to(tl.int64)[:, None] * I
    kept_gate, kept_linear = rounded(gate, z_ptr.dtype.element_ty), rounded(linear, z_ptr.dtype.element_ty)
    tl.store(z_ptr + 2 * at + n[None, :], kept_gate, mask=inside)
    tl.store(z_ptr + 2 * at + I + n[None, :], kept_linear, mask=inside)
    # from the rounded z, which the backward reads
    gate, linear = kept_gate.to(tl.float32), kept_linear.to(tl.float32)
    s = load_wide(weights_ptr + tl.load(order_ptr + m, mask=m < last, other=0), m < last)[:, None]
    if BEFORE:
        gate *= s
        linear *= s
    active, _, factor, _ = gate_parts(gate, linear, limit, alpha, offset, KIND)
    scaled = active * factor if BEFORE else active * factor * s
    store_rounded(scaled_ptr + at + n[None, :], scaled, inside)


@triton.jit
def _columns(t, M: tl.constexpr, N: tl.constexpr):
    """Split [M, N] into its left and right halves."""
    return tl.split(tl.permute(tl.reshape(t, (M, 2, N // 2)), (0, 2, 1)))


@triton.jit
def _down_part(
    da, s, z_ptr, dz_ptr, scaled_ptr, m, n, last, I,  # noqa: E741 (as in the math)
    limit: tl.float32, alpha: tl.float32, offset: tl.float32,
    BEFORE: tl.constexpr, KIND: tl.constexpr, DZ: tl.constexpr, AGAIN: tl.constexpr,
):
    """Write dz and scaled for some columns of da; return their part of ds."""
    inside, at = (m < last)[:, None] & (n < I)[None, :], m.to(tl.int64)[:, None] * I + n[None, :]
    of_z = m.to(tl.int64)[:, None] * 2 * I + n[None, :]
    gate, linear = load_wide(z_ptr + of_z, inside), load_wide(z_ptr + of_z + I, inside)
    if BEFORE:
        active, d_active, factor, d_factor = gate_parts(gate * s[:, None], linear * s[:, None], limit, alpha, offset, KIND)
        if AGAIN:
            store_rounded(scaled_ptr + at, active * factor, inside)
        d_gate, d_linear = da * factor * d_active, da * active * d_factor
        sums = tl.sum(d_gate * gate + d_linear * linear, 1)
        if DZ:
            store_rounded(dz_ptr + of_z, d_gate * s[:, None], inside)
            store_rounded(dz_ptr + of_z + I, d_linear * s[:, None], inside)
    else:
        active, d_active, factor, d_factor = gate_parts(gate, linear, limit, alpha, offset, KIND)
        a = active * factor
        if AGAIN:
            store_rounded(scaled_ptr + at, a * s[:, None], inside)
        sums = tl.sum(da * a, 1)
        if DZ:
            da = da * s[:, None]
            store_rounded(dz_ptr + of_z, da * factor * d_active, inside)
            store_rounded(dz_ptr + of_z + I, da * active * d_factor, inside)
    return sums


@triton.jit
def _down_dgrad(
    dy_ptr, down_ptr, z_ptr, weights_ptr, dz_ptr, scaled_ptr, parts_ptr, order_ptr, offsets_ptr, tiles, rows, tokens, E,
    I, H, every,  # noqa: E741 (as in the math)
    limit: tl.float32, alpha: tl.float32, offset: tl.float32, BEFORE: tl.constexpr, KIND: tl.constexpr, DZ: tl.constexpr,
    DWEIGHTS: tl.constexpr, AGAIN: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, E_BLOCK: tl.constexpr,
):
    """Compute dz, scaled, and a part of ds per column tile, [column tiles, rows]. The epilogue takes a quarter of the columns at a
    time: all at once would spill registers."""
    tile_m, tile_n = tile_of(tl.program_id(0), tiles * BLOCK_M, I, BLOCK_M, BLOCK_N, GROUP)
    e, first, last = locate(tile_m, offsets_ptr, E, rows, BLOCK_M, E_BLOCK)
    if last == 0:
        return
    e, m = e.to(tl.int64), first + tl.arange(0, BLOCK_M)
    n = tile_n.to(tl.int64) * BLOCK_N
    row = place_of(m, last, order_ptr, every, tokens, True)
    da = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    w_ptr = down_ptr + e * H * I
    length = tl.where(e < E, H, 0)
    da = add_product(
        da, dy_ptr, w_ptr, row, n + tl.arange(0, BLOCK_N), tokens, I, 0, length, H, 1, I, 1, PRECISION, BLOCK_K
    )
    s = load_wide(weights_ptr + tl.load(order_ptr + m, mask=m < last, other=0), m < last)
    PART: tl.constexpr = BLOCK_N // 4
    left, right = _columns(da, BLOCK_M, BLOCK_N)
    a, b = _columns(left, BLOCK_M, BLOCK_N // 2)
    c, d = _columns(right, BLOCK_M, BLOCK_N // 2)
    n += tl.arange(0, PART)
    sums = _down_part(a, s, z_ptr, dz_ptr, scaled_ptr, m, n, last, I, limit, alpha, offset, BEFORE, KIND, DZ, AGAIN)
    sums += _down_part(b, s, z_ptr, dz_ptr, scaled_ptr, m, n + PART, last, I, limit, alpha, offset, BEFORE, KIND, DZ, AGAIN)
    sums += _down_part(c, s, z_ptr, dz_ptr, scaled_ptr, m, n + 2 * PART, last, I, limit, alpha, offset, BEFORE, KIND, DZ, AGAIN)
    sums += _down_part(d, s, z_ptr, dz_ptr, scaled_ptr, m, n + 3 * PART, last, I, limit, alpha, offset, BEFORE, KIND, DZ, AGAIN)
    if DWEIGHTS:
        tl.store(parts_ptr + tile_n.to(tl.int64) * rows + m, sums, mask=m < last)


@triton.jit
def _dweights(
    parts_ptr, place_ptr, dy_ptr, bias_ptr, indices_ptr, dweights_ptr, parts, rows, E, H, every, BIAS: tl.constexpr,
    BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Compute d weights [rows], by token and choice: the sum of its row's parts [parts, rows], in order, + dy . bias_e."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(place_ptr + j, mask=j < rows, other=0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(0, parts):
        total += tl.load(parts_ptr + row, mask=j < rows, other=0.0)
        parts_ptr += rows
    if BIAS:
        e = tl.load(indices_ptr + j, mask=j < rows, other=E).to(tl.int64)
        dots = tl.zeros([BLOCK, COLUMNS], tl.float32)
        for start in range(0, H, COLUMNS):
            h = start + tl.arange(0, COLUMNS)
            inside = (e < E)[:, None] & (h < H)[None, :]
            d = load_wide(dy_ptr + (j // every)[:, None] * H + h[None, :], inside)
            dots += d * load_wide(bias_ptr + e[:, None] * H + h[None, :], inside)
        total += tl.sum(dots, 1)
    store_rounded(dweights_ptr + j, total, j < rows)


_launch_up, _launch_down_dgrad, _launch_dweights = launcher(_up), launcher(_down_dgrad), launcher(_dweights)


@launched(declared.experts_up)
@declared.experts_up.triton
def experts_up(
    x: Tensor, up: Tensor, bias: Optional[Tensor], weights: Tensor, order: Tensor, offsets: Tensor, kind: str, limit: float,
    alpha: float, offset: float, before: bool,
) -> tuple[Tensor, Tensor]:
    (groups, width, length), rows = up.shape, order.shape[0]
    width //= 2
    if rows and not before and way_of("product", x, up) != "pointer":
        z = grouped_product(x, up, bias, offsets, order, weights.shape[1], None, True)
        return z, gated(z, _row_weights(weights, order), GATES.get(kind, kind), True, limit, alpha, offset)
    z, scaled = x.new_empty((rows, 2 * width)), x.new_empty((rows, width))
    if not rows:
        return z, scaled
    tile = tile_for(x.dtype, rows, groups, width, length)
    tile = paired(x.dtype, tile)
    tiles = row_tiles(rows, groups, tile)
    _launch_up(
        tiles * cdiv(width, tile.n), 1, 1, x.contiguous(), up.contiguous(), contiguous(bias), weights.contiguous(), z, scaled,
        order.contiguous(), offsets.contiguous(), tiles, rows, x.shape[0], groups, width, length, weights.shape[1], limit, alpha,
        offset, before, bias is not None, GATES.get(kind, kind), precision(x.dtype), tile.m, tile.n, tile.k, GROUP,
        blocks_of(groups), num_warps=tile.warps, num_stages=tile.stages,
    )
    return z, scaled


def paired(dtype: torch.dtype, tile: Tile) -> Tile:
    """The tile for a program with two sums."""
    return tile._replace(n=tile.n // 2)


@launched(declared.experts_dgrad)
@declared.experts_dgrad.triton
def experts_dgrad(
    dy: Tensor, down: Optional[Tensor], z: Tensor, weights: Tensor, order: Tensor, offsets: Tensor, place: Optional[Tensor],
    bias: Optional[Tensor], indices: Optional[Tensor], kind: str, limit: float, alpha: float, offset: float, before: bool, dz: bool,
    dweights: bool, scaled: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    groups, width, rows = offsets.shape[0] - 1, z.shape[1] // 2, order.shape[0]
    length = 0 if down is None else down.shape[1]  # the product's; 0 for `scaled` alone
    d_weights = weights.new_empty(weights.shape) if dweights else None
    how, every = (GATES.get(kind, kind), limit, alpha, offset), weights.shape[1]
    if down is not None and (dz or dweights) and not before and rows and way_of("product", dy, down) != "pointer":
        da, s = grouped_product(dy, down, None, offsets, order, every, None, False), _row_weights(weights, order)
        d_z, parts = gate_gradients(da, z, s, how[0], True, how[1:], dz, dweights, recompute=scaled)
        recomputed, columns = row_scale_fwd(da, s.unsqueeze(-1), False) if scaled else None, 1  # da is now f(g) l
    else:
        tile = tile_for(dy.dtype, rows, groups, width, dy.shape[1])
        tiles, columns = row_tiles(rows, groups, tile), cdiv(width, tile.n)
        d_z, recomputed = dy.new_empty((rows, 2 * width)) if dz else None, dy.new_empty((rows, width)) if scaled else None
        if not rows:
            return d_z, d_weights, recomputed
        parts = dy.new_empty((columns, rows), dtype=torch.float32) if dweights else None
        _launch_down_dgrad(
            tiles * columns, 1, 1, dy.contiguous(), (z if down is None else down).contiguous(), z.contiguous(),
            weights.contiguous(), d_z, recomputed, parts, order.contiguous(), offsets.contiguous(), tiles, rows, dy.shape[0],
            groups, width, length, every, *how[1:], before, how[0], dz, dweights, scaled, precision(dy.dtype), tile.m, tile.n,
            tile.k, GROUP, blocks_of(groups), num_warps=tile.warps, num_stages=tile.stages,
        )
    if d_weights is not None:
        block = MANY_CHOICES if bias is None else FEW_CHOICES
        _launch_dweights(
            cdiv(rows, block), 1, 1, parts, contiguous(place), dy.contiguous(), contiguous(bias), contiguous(indices), d_weights,
            columns, rows, groups, length, every, bias is not None, block, COLUMNS,
        )
    return d_z, d_weights, recomputed


def _row_weights(weights: Tensor, order: Tensor) -> Tensor:
    """The weight of each row [N], in float32."""
    return weights.reshape(-1).index_select(0, order).float()
