"""Attention over a cache with the keys split over programs (flash-decoding): each reads some slots once for all heads of a key
head's group, and a second launch merges what they found. Programs of empty slots end at once: the lengths are read on the device.

Few tokens take 256 to 512 slots a program (`split_of`), whatever the batch, the room in the cache or the device, so that a sequence
has the same bits beside any others; more than `FEW` (a prompt) take all slots one after another, without a second launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.engine.backend.shared import SharedMemory, shared_memory
from funcops.library.kernels import slot_attention as declared
from funcops.library.kernels.attention import by_elements
from funcops.library.kernels.block_attention import require_plain
from funcops.library.kernels.pins import launched
from funcops.library.kernels.scored_attention import nothing_to_see
from funcops.library.kernels.triton.activation import tanh
from funcops.library.kernels.triton.attention import over_slots
from funcops.library.kernels.triton.common import cdiv, contiguous, next_power_of_2, rounded, store_rounded
from funcops.library.kernels.triton.matmul import precision
from funcops.library.kernels.triton.scored_attention import Tile, _dot, _slope

FEW, MANY, MERGED = 16, 64, 16  # tokens; rows of a group; splits that are merged at once
LONGEST = 512  # the largest block of a head
SUMS = 1024  # bytes, at most, of barriers and of what warps add


# by bytes of an element and block of a head, for fewer rows than MANY and for more: no build for sm_90 spills a
# register (64 rows of 512: none without options)
TILES = {
    (2, 64): (Tile(16, 64, 4, 3), Tile(64, 64, 8, 2)),
    (2, 128): (Tile(16, 64, 4, 3), Tile(64, 32, 8, 2)),
    (2, 256): (Tile(16, 32, 4, 2), Tile(32, 32, 8, 2)),
    (2, 512): (Tile(16, 32, 8, 2), Tile(64, 32, 8, 2)),
    (4, 64): (Tile(16, 32, 8, 2), Tile(32, 32, 4, 2)),
    (4, 128): (Tile(16, 16, 4, 2), Tile(16, 32, 8, 1)),
    (4, 256): (Tile(16, 16, 8, 2), Tile(16, 16, 8, 2)),
    (4, 512): (Tile(16, 16, 8, 1), Tile(16, 16, 16, 1)),
}


@triton.jit
def _part(ptr, at, stride, inside, begin, end, BLOCK: tl.constexpr):
    """Load elements `begin` to `end` of rows `at`, as [rows, BLOCK]."""
    i = begin + tl.arange(0, BLOCK)
    return tl.load(ptr + at.to(tl.int64)[:, None] * stride + i[None, :], mask=inside[:, None] & (i < end)[None, :], other=0.0)


@triton.jit
def _scores(
    s, first, end, R, j, t, head, wide, slope, real, stop, bias_ptr, bias_batch, bias_head, bias_row, positions, window, chunk,
    softcap, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr,
):
    """Scores of rows and filled slots j, capped and biased; -inf where a row does not see the position that a slot holds."""
    if CAP:
        s = tanh(s * (1.0 / softcap)) * softcap
    held = tl.where(end > R, end - 1 - (end - 1 - j) % R, j)  # the position that a filled slot holds
    away = (first + t)[:, None] - held[None, :]
    inside = real[:, None] & (j < stop)[None, :] & (away >= 0)
    if WINDOW:
        inside &= away < window
    if CHUNK:
        inside &= away <= ((first + t) % chunk)[:, None]
    if ALIBI:
        s -= slope[:, None] * away.to(tl.float32)
    if bias_ptr is not None:
        place = tl.minimum(held, positions - 1)
        of_rows = wide * bias_batch + head.to(tl.int64) * bias_head + t.to(tl.int64) * bias_row
        s += tl.load(bias_ptr + of_rows[:, None] + place[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, s, float("-inf"))


@triton.jit
def _slots(
    q_ptr, k_ptr, v_ptr, first_ptr, ends_ptr, bias_ptr, sinks_ptr, out_ptr, lse_ptr, T, H, R, group, D, V, main, blocks, splits,
    k_batch, k_head, k_slot, v_batch, v_head, v_slot, bias_batch, bias_head, bias_row, positions, window, chunk, whole,
    scale: tl.float32, softcap: tl.float32, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr,
    LATENTS: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Compute attention of some rows of a group over a split of the slots. With WHOLE, all slots are one split, and y is stored;
    else float32 and logsumexp. A head has `main` elements in a block of BLOCK_D, and the others in one of BLOCK_E."""
    program, K = tl.program_id(0), H // group
    block, split, kv = program % blocks, program // blocks % splits, program // (blocks * splits) % K
    batch = program // (blocks * splits * K)
    first, end = tl.load(first_ptr + batch).to(tl.int32), tl.load(ends_ptr + batch).to(tl.int32)
    filled = tl.minimum(end, R)
    begin, stop = split * 0, filled
    if not WHOLE:
        begin, stop = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, filled)
        if begin >= stop:
            return
    r = block * ROWS + tl.arange(0, ROWS)
    t, head, real = r // group, kv * group + r % group, r < T * group
    wide = batch.to(tl.int64)
    at = (wide * T + t) * H + head
    k_ptr += wide * k_batch + kv.to(tl.int64) * k_head
    v_ptr += wide * v_batch + kv.to(tl.int64) * v_head
    q = _part(q_ptr, at, D, real, 0, main, BLOCK_D)
    if BLOCK_E:
        rest = _part(q_ptr, at, D, real, main, D, BLOCK_E)
    slope = _slope(head, whole)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for start in range(begin, stop, KEYS):
        j = start + tl.arange(0, KEYS)
        k = _part(k_ptr, j, k_slot, j < stop, 0, main, BLOCK_D)
        s = _dot(q, k.T, tl.zeros([ROWS, KEYS], tl.float32), PRECISION)
        if BLOCK_E:
            s = _dot(rest, _part(k_ptr, j, k_slot, j < stop, main, D, BLOCK_E).T, s, PRECISION)
        s = _scores(
            s * scale, first, end, R, j, t, head, wide, slope, real, stop, bias_ptr, bias_batch, bias_head, bias_row, positions,
            window, chunk, softcap, WINDOW, CHUNK, CAP, ALIBI,
        )
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p, before = tl.exp(s - base[:, None]), tl.exp(top - base)
        total = total * before + tl.sum(p, 1)
        v = k if LATENTS else _part(v_ptr, j, v_slot, j < stop, 0, V, BLOCK_V)
        out = _dot(rounded(p, v.dtype), v, out * before[:, None], PRECISION)
        top = higher
    base = tl.where(top == float("-inf"), 0.0, top)
    if WHOLE and sinks_ptr is not None:
        total += tl.exp(tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) - base)
    some = tl.where(total == 0.0, 1.0, total)
    if q_ptr.dtype.element_ty == tl.float32:
        out /= some[:, None]  # by a reciprocal a build for sm_90 spills
    else:
        out *= (1.0 / some)[:, None]
    c = tl.arange(0, BLOCK_V)
    if not WHOLE:
        at += split.to(tl.int64) * (tl.num_programs(0) // (blocks * splits * K)) * T * H
        tl.store(lse_ptr + at, tl.where(total == 0.0, float("-inf"), base + tl.log(some)), mask=real)
    store_rounded(out_ptr + at[:, None] * V + c[None, :], out, real[:, None] & (c < V)[None, :])


@triton.jit
def _merge(
    out_ptr, lse_ptr, ends_ptr, sinks_ptr, y_ptr, rows, per_batch, H, R, V, SPLIT: tl.constexpr, MERGED: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Merge what the splits of the filled slots have found of a row, and its sink."""
    row = tl.program_id(0)
    at = row.to(tl.int64)
    filled = tl.minimum(tl.load(ends_ptr + row // per_batch), R).to(tl.int32)
    used, c = (filled + SPLIT - 1) // SPLIT, tl.arange(0, BLOCK_V)
    top = tl.full([MERGED], float("-inf"), tl.float32)
    for start in range(0, used, MERGED):
        i = start + tl.arange(0, MERGED)
        top = tl.maximum(top, tl.load(lse_ptr + i.to(tl.int64) * rows + at, mask=i < used, other=float("-inf")))
    base = tl.max(top, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    total = 0.0
    y = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, used, MERGED):
        i = start + tl.arange(0, MERGED)
        place = i.to(tl.int64) * rows + at
        weight = tl.exp(tl.load(lse_ptr + place, mask=i < used, other=float("-inf")) - base)
        part = tl.load(out_ptr + place[:, None] * V + c[None, :], mask=(i < used)[:, None] & (c < V)[None, :], other=0.0)
        total += tl.sum(weight, 0)
        y += tl.sum(weight[:, None] * part, 0)
    if sinks_ptr is not None:
        total += tl.exp(tl.load(sinks_ptr + row % H).to(tl.float32) - base)
    y *= 1.0 / tl.where(total == 0.0, 1.0, total)
    store_rounded(y_ptr + at * V + c, y, c < V)


def shared_of(
    rows: int, keys: int, blocks: Sequence[int], latents: bool, itemsize: int, stages: int, memory: SharedMemory
) -> int:
    """The bytes of shared memory: rows of q, keys and values in flight, scores and weights, and the rows that are stored where
    matrices are multiplied out of shared memory. A device that does not copy there by itself has one factor there at a time."""
    d, e, v = blocks
    if not memory.copies:
        return max(max(rows, keys) * max(blocks) * itemsize, rows * keys * 4)
    of_keys = d + e + (0 if latents else v)
    elements = rows * (d + e) + memory.tiles(stages) * keys * of_keys + rows * (keys + v * memory.feeds)
    return elements * itemsize + rows * keys * 4 + SUMS


def _shared_of_launch(arguments: dict[str, Any], stages: int, memory: SharedMemory) -> int:
    blocks = [arguments[f"BLOCK_{x}"] for x in "DEV"]
    of = arguments["ROWS"], arguments["KEYS"], blocks, arguments["LATENTS"], arguments["q_ptr"].itemsize
    return shared_of(*of, stages, memory)


_launch_slots, _launch_merge = launcher(_slots, shared=_shared_of_launch), launcher(_merge)


def _blocks(size: int, width: int, latents: bool) -> tuple[int, int, int, int]:
    """The elements of a head in the main block; and the blocks of these, of the others and of a value. Two blocks hold 192 or 576
    elements with fewer zeros than one. Latents have all of a value in the main one."""
    main = width if latents else 1 << (size.bit_length() - 1)
    rest = max(16, next_power_of_2(size - main)) if size > main else 0
    return main, max(16, next_power_of_2(main)), rest, max(16, next_power_of_2(width))


def split_of(rows: int, width: int, slot: int) -> int:
    """The slots that a program takes, of `slot` bytes: so many that to store results of `rows` rows and read them again takes a
    twentieth of the bytes of the slots, but at most 512."""
    return max(256, min(512, cdiv(20 * 8 * rows * width, 128 * slot) * 128))


def _of_bias(bias: Optional[Tensor]) -> tuple[int, ...]:
    """The strides of a bias, 0 where it is the same for all, and its number of positions."""
    if bias is None:
        return 0, 0, 0, 1
    return *(bias.stride(i) if bias.shape[i] > 1 else 0 for i in (0, 1)), bias.stride(2), bias.shape[3]


def tile_of(itemsize: int, blocks: Sequence[int], many: bool, latents: bool) -> Tile:
    """The table's tile, with one stage if the device does not copy by itself, or with fewer rows if it holds not even one."""
    tile, memory = TILES[itemsize, max(64, *blocks)][many], shared_memory()
    tile = tile if memory.copies else tile._replace(stages=1)
    while tile.rows > 16 and shared_of(tile.rows, tile.keys, blocks, latents, itemsize, 1, memory) > memory.limit:
        tile = tile._replace(rows=tile.rows // 2)
    return tile


@declared.slot_attention_fwd.triton
def slot_attention_fwd(
    q: Tensor, k: Tensor, v: Optional[Tensor], first: Tensor, ends: Tensor, bias: Optional[Tensor], sinks: Optional[Tensor],
    width: int, window: int, chunk: int, softcap: float, alibi: bool, scale: float,
) -> Tensor:
    (batch, tokens, heads, size), (_, kv_heads, slots, _) = q.shape, k.shape
    main, *blocks = _blocks(size, width, v is None)
    if nothing_to_see(q, k) or not width or max(blocks) > LONGEST:
        return declared.slot_attention_fwd.kernel.torch_impl(  # type: ignore[no-any-return]
            q, k, v, first, ends, bias, sinks, width, window, chunk, softcap, alibi, scale
        )
    q, k, first, ends = q.contiguous(), by_elements(k), first.contiguous(), ends.contiguous()
    bias, sinks = contiguous(bias), contiguous(sinks)
    values = k if v is None else by_elements(v)
    group = heads // kv_heads
    tile = tile_of(q.dtype.itemsize, blocks, tokens * group >= MANY, v is None)
    parts = cdiv(tokens * group, tile.rows)
    split = split_of(tokens * group, width, (size + width * (v is not None)) * q.itemsize)
    splits = cdiv(slots, split) if tokens <= FEW else 1
    y = q.new_empty((batch, tokens, heads, width))
    out, lse = y, None
    if splits > 1:
        out = q.new_empty((splits, batch, tokens, heads, width), dtype=torch.float32)
        lse = q.new_empty((splits, batch, tokens, heads), dtype=torch.float32)
    _launch_slots(
        parts * splits * kv_heads * batch, 1, 1, q, k, values, first, ends, bias, sinks, out, lse, tokens, heads, slots, group,
        size, width, main, parts, splits, *k.stride()[:3], *values.stride()[:3], *_of_bias(bias), window, chunk,
        1 << (heads.bit_length() - 1), scale, softcap or 1.0, window > 0, chunk > 0, softcap > 0, alibi, v is None, splits == 1,
        precision(q.dtype), tile.rows, tile.keys, split, *blocks, num_warps=tile.warps, num_stages=tile.stages,
    )
    if lse is not None:
        rows = batch * tokens * heads
        _launch_merge(
            rows, 1, 1, out, lse, ends, sinks, y, rows, tokens * heads, heads, slots, width, split, MERGED, blocks[2], num_warps=4
        )
    return y


@launched(declared.slot_attention_fwd)
def _pinned_fwd(
    q: Tensor, k: Tensor, v: Optional[Tensor], first: Tensor, ends: Tensor, bias: Optional[Tensor], sinks: Optional[Tensor],
    width: int, window: int, chunk: int, softcap: float, alibi: bool, scale: float,
) -> Tensor:
    require_plain("slot_attention_fwd", q, bias, softcap)
    y, lse = over_slots(q, k, k[..., :width] if v is None else v, first, ends, window, chunk, alibi, scale)
    return declared.with_sinks(y, lse, sinks).to(q.dtype)
