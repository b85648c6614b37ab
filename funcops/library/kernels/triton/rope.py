"""Rotary position embedding: a program takes a position, in all batches that share its angles, and rotates its heads in tiles. Both
numbers of a pair are in one thread, so that each is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import rope as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.common import cdiv, load_wide, next_power_of_2, store_rounded

TILE = 4096  # elements at a time
PROGRAMS = 2048  # enough for a device: beyond that, batches share reads of the table


@triton.jit
def angles(table_ptr, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr):
    """cos, and sin with its sign, of the first number of each pair: [1, BLOCK] each. The second's are the same, sin negated."""
    sin_ptr = table_ptr + (4 if INVERSE else 2) * HALF
    if INTERLEAVED:
        i = tl.arange(0, 2 * BLOCK)
        cos, _ = tl.split(tl.reshape(tl.load(table_ptr + i, mask=i < 2 * HALF, other=0.0), [BLOCK, 2]))
        sin, _ = tl.split(tl.reshape(tl.load(sin_ptr + i, mask=i < 2 * HALF, other=0.0), [BLOCK, 2]))
    else:
        i = tl.arange(0, BLOCK)
        cos = tl.load(table_ptr + i, mask=i < HALF, other=0.0)
        sin = tl.load(sin_ptr + i, mask=i < HALF, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def turn(
    from_ptr, to_ptr, cos, sin, heads, DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, INTERLEAVED: tl.constexpr,
):
    """Rotate HALF pairs of every head of a position, HEADS heads at a time; copy the rest of each head."""
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        if INTERLEAVED:
            i = tl.arange(0, 2 * BLOCK)[None, :]
            at, inside = head * DIM + i, (head < heads) & (i < 2 * HALF)
            a, b = tl.split(tl.reshape(load_wide(from_ptr + at, inside), [HEADS, BLOCK, 2]))
            y = tl.reshape(tl.join(a * cos + b * sin, b * cos - a * sin), [HEADS, 2 * BLOCK])
            store_rounded(to_ptr + at, y, inside)
        else:
            i = tl.arange(0, BLOCK)[None, :]
            at, inside = head * DIM + i, (head < heads) & (i < HALF)
            a, b = load_wide(from_ptr + at, inside), load_wide(from_ptr + at + HALF, inside)
            store_rounded(to_ptr + at, a * cos + b * sin, inside)
            store_rounded(to_ptr + at + HALF, b * cos - a * sin, inside)
        if REST:
            i = 2 * HALF + tl.arange(0, REST)[None, :]
            at, inside = head * DIM + i, (head < heads) & (i < DIM)
            tl.store(to_ptr + at, tl.load(from_ptr + at, mask=inside), mask=inside)


@triton.jit
def _apply(
    x_ptr, table_ptr, y_ptr, batches, heads, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):
    position, positions = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cos, sin = angles(table_ptr + position * 6 * HALF, HALF, BLOCK, INTERLEAVED, INVERSE)
    for batch in range(tl.program_id(1), batches, tl.num_programs(1)):
        at = (batch * positions + position) * heads * DIM
        turn(x_ptr + at, y_ptr + at, cos, sin, heads, DIM, HALF, HEADS, BLOCK, REST, INTERLEAVED)


@triton.jit
def _apply_pair(
    q_ptr, k_ptr, table_ptr, to_q_ptr, to_k_ptr, batches, heads, kv_heads, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):
    position, positions = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cos, sin = angles(table_ptr + position * 6 * HALF, HALF, BLOCK, INTERLEAVED, INVERSE)
    for batch in range(tl.program_id(1), batches, tl.num_programs(1)):
        row = (batch * positions + position) * DIM
        at, kv_at = row * heads, row * kv_heads
        turn(q_ptr + at, to_q_ptr + at, cos, sin, heads, DIM, HALF, HEADS, BLOCK, REST, INTERLEAVED)
        turn(k_ptr + kv_at, to_k_ptr + kv_at, cos, sin, kv_heads, DIM, HALF, KV_HEADS, BLOCK, REST, INTERLEAVED)


_launch_apply, _launch_apply_pair = launcher(_apply), launcher(_apply_pair)


def grid_of(positions: int, batches: int) -> tuple[int, int, int]:
    """The grid: one program per position for all batches, or for some of them if positions are few."""
    return positions, min(batches, cdiv(PROGRAMS, positions)), 1


def blocks_of(dim: int, half: int) -> tuple[int, int]:
    """The block sizes of a head's pairs, and of the rest of the head; 0 without a rest."""
    return next_power_of_2(half), next_power_of_2(dim - 2 * half) if dim > 2 * half else 0


def heads_of(heads: int, block: int, rest: int) -> int:
    """The number of heads of a tile."""
    return min(next_power_of_2(heads), max(1, TILE // max(2 * block, rest)))


def warps_of_tile(size: int) -> int:
    return max(1, min(8, size // 1024))


@launched(declared.rope_apply)
@declared.rope_apply.triton
def rope_apply(x: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    x, table = x.contiguous(), table.contiguous()
    y, (heads, dim) = torch.empty_like(x), x.shape[-2:]
    if x.numel():
        half = table.shape[-1] // 6
        block, rest = blocks_of(dim, half)
        positions, at_once = table.numel() // (6 * half), heads_of(heads, block, rest)
        batches = x.numel() // (positions * heads * dim)
        _launch_apply(
            *grid_of(positions, batches), x, table, y, batches, heads, interleaved, inverse, dim, half, at_once, block, rest,
            num_warps=warps_of_tile(at_once * max(2 * block, rest)),
        )
    return y


@declared.rope_apply_pair.triton
def rope_apply_pair(q: Tensor, k: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    q, k, table = q.contiguous(), k.contiguous(), table.contiguous()
    to_q, to_k, (heads, dim), kv_heads = torch.empty_like(q), torch.empty_like(k), q.shape[-2:], k.shape[-2]
    if q.numel():
        half = table.shape[-1] // 6
        block, rest = blocks_of(dim, half)
        positions, at_once = table.numel() // (6 * half), heads_of(heads, block, rest)
        batches = q.numel() // (positions * heads * dim)
        _launch_apply_pair(
            *grid_of(positions, batches), q, k, table, to_q, to_k, batches, heads, kv_heads, interleaved, inverse, dim, half,
            at_once, heads_of(kv_heads, block, rest), block, rest, num_warps=warps_of_tile(at_once * max(2 * block, rest)),
        )
    return to_q, to_k
