"""Attention in the mode of `pins`: training and decoding go over the keys in one order.

Keys are taken KEYS at a time from position 0 on, in segments of SEGMENT positions; each segment has a softmax of its own, and what
segments found is joined in their order. A program of training, or of a long prompt, has some rows and all their segments; for few
new tokens each segment has a program, and a second launch joins them, by the same products and sums. Keys that a row does not see
add zeros: so it does not matter to its bits which of them are left out, how many rows a call has, or whether the keys lie in a
sequence or in the slots of a cache. The gradients are `scored_attention`'s, whose blocks begin at multiples of constants.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.engine.errors import fail
from funcops.library.kernels import attention as declared
from funcops.library.kernels.block_attention import runs_bwd, runs_fwd
from funcops.library.kernels.pins import at_sixteen, launched
from funcops.library.kernels.scored_attention import Score, nothing_to_see
from funcops.library.kernels.triton.common import cdiv, copies_by_itself, next_power_of_2, rounded, store_rounded
from funcops.library.kernels.triton.matmul import precision
from funcops.library.kernels.triton.scored_attention import LONGEST, Tile, _dot, _slope, scored_attention_bwd, scored_attention_fwd

SEGMENT, FEW = 512, 16  # positions; new tokens up to which each segment has a program
# by bytes of an element and head size; no build for sm_90 spills a register
TILES = {
    (2, 64): Tile(64, 64, 4, 2),
    (2, 128): Tile(64, 32, 8, 2),
    (2, 256): Tile(32, 32, 8, 2),
    (4, 64): Tile(32, 32, 8, 2),
    (4, 128): Tile(16, 16, 8, 1),
    (4, 256): Tile(16, 16, 8, 2),
}


@triton.jit
def _load_rows(ptr, at, stride, inside, size, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    return tl.load(ptr + at.to(tl.int64)[:, None] * stride + i[None, :], mask=inside[:, None] & (i < size)[None, :], other=0.0)


@triton.jit
def _weights(top, more):
    """The largest score of two parts, and the factors of what each has found; 0 for a part without keys."""
    higher = tl.maximum(top, more)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp(top - base), tl.exp(more - base)


@triton.jit
def _segments(
    q_ptr, k_ptr, v_ptr, first_ptr, ends_ptr, out_ptr, tops_ptr, totals_ptr, T, H, R, group, D, V, blocks, splits, k_batch,
    k_head, k_slot, v_batch, v_head, v_slot, window, chunk, whole, scale: tl.float32, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    ALIBI: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SEGMENT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Some rows of a group, at positions from `first` on, over ALL segments: y, and logsumexp at `tops`. Else over the one of this
    program: sums of values, largest scores and sums of exponentials [splits, B, T, H]. Position p is in slot p mod R."""
    tl.static_assert(SEGMENT % KEYS == 0)
    program, K = tl.program_id(0), H // group
    block, split, kv = program % blocks, program // blocks % splits, program // (blocks * splits) % K
    batch = program // (blocks * splits * K)
    first, end = tl.load(first_ptr + batch).to(tl.int32), tl.load(ends_ptr + batch).to(tl.int32)
    r = block * ROWS + tl.arange(0, ROWS)
    t, head, real = r // group, kv * group + r % group, r < T * group
    low, begin = first + block * ROWS // group, tl.maximum(end - R, 0)
    segment = begin // SEGMENT
    if WINDOW:
        begin = tl.maximum(begin, low - window + 1)
    if CHUNK:
        begin = tl.maximum(begin, low - low % chunk)
    stop = tl.minimum(end, first + (block * ROWS + ROWS - 1) // group + 1)
    if ALL:
        segment, after = begin // SEGMENT, (stop + SEGMENT - 1) // SEGMENT
    else:
        segment += split
        after = segment + 1
        if segment * SEGMENT >= end:
            return
    wide = batch.to(tl.int64)
    at = (wide * T + t) * H + head
    k_ptr += wide * k_batch + kv.to(tl.int64) * k_head
    v_ptr += wide * v_batch + kv.to(tl.int64) * v_head
    q, slope = _load_rows(q_ptr, at, D, real, D, BLOCK_D), _slope(head, whole)
    top, total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for number in range(segment, after):
        own_top, own_total = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
        own = tl.zeros([ROWS, BLOCK_V], tl.float32)
        from_key = tl.maximum(number * SEGMENT, begin // KEYS * KEYS)
        for start in range(from_key, tl.minimum(number * SEGMENT + SEGMENT, stop), KEYS):
            j = start + tl.arange(0, KEYS)
            held = (j >= begin) & (j < stop)
            k = _load_rows(k_ptr, j % R, k_slot, held, D, BLOCK_D)
            v = _load_rows(v_ptr, j % R, v_slot, held, V, BLOCK_V)
            away = (first + t)[:, None] - j[None, :]
            inside = real[:, None] & held[None, :] & (away >= 0)
            if WINDOW:
                inside &= away < window
            if CHUNK:
                inside &= away <= ((first + t) % chunk)[:, None]
            s = _dot(q, k.T, tl.zeros([ROWS, KEYS], tl.float32), PRECISION) * scale
            if ALIBI:
                s -= slope[:, None] * away.to(tl.float32)
            s = tl.where(inside, s, float("-inf"))
            higher = tl.maximum(own_top, tl.max(s, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            p, before = tl.exp(s - base[:, None]), tl.exp(own_top - base)
            own_total = tl.fma(own_total, before, tl.sum(p, 1))
            own = _dot(rounded(p, v.dtype), v, own * before[:, None], PRECISION)
            own_top = higher
        top, before, weight = _weights(top, own_top)
        total = tl.fma(total, before, own_total * weight)
        out = tl.fma(out, before[:, None] + tl.zeros([ROWS, BLOCK_V], tl.float32), own * weight[:, None])
    c = tl.arange(0, BLOCK_V)
    if ALL:
        some = tl.where(total == 0.0, 1.0, total)
        out /= some[:, None]
        tl.store(tops_ptr + at, top + tl.log(some), mask=real)
    else:
        at += split.to(tl.int64) * (tl.num_programs(0) // (blocks * splits * K)) * T * H
        tl.store(tops_ptr + at, top, mask=real)
        tl.store(totals_ptr + at, total, mask=real)
    store_rounded(out_ptr + at[:, None] * V + c[None, :], out, real[:, None] & (c < V)[None, :])


@triton.jit
def _join(
    parts_ptr, tops_ptr, totals_ptr, ends_ptr, y_ptr, lse_ptr, rows, per_batch, R, V, SEGMENT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Join what the segments found of a row, in their order: y, and logsumexp."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_V)
    end = tl.load(ends_ptr + row // per_batch).to(tl.int32)
    used = (end + SEGMENT - 1) // SEGMENT - tl.maximum(end - R, 0) // SEGMENT
    top, total = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
    out, at = tl.zeros([BLOCK_V], tl.float32), row
    for _ in range(0, used):
        own = tl.load(parts_ptr + at * V + c, mask=c < V, other=0.0)
        top, before, weight = _weights(top, tl.load(tops_ptr + at))
        total = tl.fma(total, before, tl.load(totals_ptr + at) * weight)
        out = tl.fma(out, before + tl.zeros([BLOCK_V], tl.float32), own * weight)
        at += rows
    some = tl.where(total == 0.0, 1.0, total)
    tl.store(lse_ptr + row, top + tl.log(some))
    store_rounded(y_ptr + row * V + c, out / some, c < V)


_launch_segments, _launch_join = launcher(_segments), launcher(_join)


def tile_of(itemsize: int, size: int) -> Tile:
    tile = TILES[itemsize, max(64, size)]
    return tile if copies_by_itself() else tile._replace(stages=1)


def over_slots(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, ends: Tensor, window: int, chunk: int, alibi: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """y and logsumexp [B, H, T] of causal attention over the slots of `kernels.slot_attention`, k and v [B, K, R, *]."""
    (batch, tokens, heads, d), (kv_heads, slots), width = q.shape, k.shape[1:3], v.shape[3]
    y, lse = q.new_zeros((batch, tokens, heads, width)), q.new_zeros((batch, tokens, heads), dtype=torch.float32)
    if nothing_to_see(q, k) or not width:
        return y, lse.transpose(1, 2)
    blocks = next_power_of_2(max(16, d)), next_power_of_2(max(16, width))
    if max(blocks) > LONGEST:
        fail("attention in invariant mode", "x (heads)", f"of at most {LONGEST} elements by Triton", max(d, width))
    q, k, v = (at_sixteen(t if t.stride(-1) == 1 else t.contiguous()) for t in (q.contiguous(), k, v))
    group, tile = heads // kv_heads, tile_of(q.dtype.itemsize, max(blocks))
    parts, splits = cdiv(tokens * group, tile.rows), cdiv(slots, SEGMENT) + 1 if tokens <= FEW else 1
    out, tops, totals = y, lse, None
    if splits > 1:
        out = q.new_empty((splits, *y.shape), dtype=torch.float32)
        tops, totals = (lse.new_empty((splits, *lse.shape)) for _ in range(2))
    _launch_segments(
        parts * splits * kv_heads * batch, 1, 1, q, k, v, first.contiguous(), ends.contiguous(), out, tops, totals, tokens, heads,
        slots, group, d, width, parts, splits, *k.stride()[:3], *v.stride()[:3], window, chunk, 1 << (heads.bit_length() - 1),
        scale, window > 0, chunk > 0, alibi, splits == 1, precision(q.dtype), tile.rows, tile.keys, SEGMENT, *blocks,
        num_warps=tile.warps, num_stages=tile.stages,
    )
    if totals is not None:
        rows = batch * tokens * heads
        _launch_join(rows, 1, 1, out, tops, totals, ends, y, lse, rows, tokens * heads, slots, width, SEGMENT, blocks[1])
    return y, lse.transpose(1, 2)


@launched(declared.attention_fwd)
def _pinned_fwd(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int = 0, alibi: bool = False, chunk: int = 0,
    cu_seqlens: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor]:
    score = Score(causal, window, 0.0, alibi, scale)

    def one(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if not causal:
            return scored_attention_fwd(*[at_sixteen(t.contiguous()) for t in (q, k, v)], None, None, *score)
        ends = torch.full((q.shape[0],), k.shape[1], device=q.device)
        return over_slots(q, k.transpose(1, 2), v.transpose(1, 2), ends - q.shape[1], ends, window, chunk, alibi, scale)

    return one(q, k, v) if cu_seqlens is None else runs_fwd(one, q, k, v, cu_seqlens)


@launched(declared.attention_bwd)
def _pinned_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, scale: float, window: int = 0,
    alibi: bool = False, chunk: int = 0, cu_seqlens: Optional[Tensor] = None,
) -> tuple[Tensor, Tensor, Tensor]:
    score = Score(causal, window, 0.0, alibi, scale)

    def one(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Any:
        if nothing_to_see(q, k):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        missing = k.shape[1] - q.shape[1] if causal else 0
        if missing:  # rows before, whose dy is 0: then a row's block of rows is its position's
            dy, q, out = (torch.nn.functional.pad(t, (0, 0, 0, 0, missing, 0)) for t in (dy, q, out))
            lse = torch.nn.functional.pad(lse, (missing, 0))
        if chunk and causal:
            found: Any = declared.chunked_bwd(dy, q, k, v, out, lse, score, chunk)
        else:
            dy, q, k, v, out, lse = [at_sixteen(t.contiguous()) for t in (dy, q, k, v, out, lse)]
            found = scored_attention_bwd(dy, q, k, v, None, None, out, lse, *score, False)
        return found[0][:, missing:], found[1], found[2]

    return one(dy, q, k, v, out, logsumexp) if cu_seqlens is None else runs_bwd(one, dy, q, k, v, cu_seqlens, out, logsumexp)
