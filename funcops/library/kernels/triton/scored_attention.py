"""Attention by blocks of rows, then its gradients by blocks of rows (dq, dbias) and by blocks of keys (dk, dv): no atomics, so that
the same call gives the same bits.

A program goes over the keys that any of its rows may see, or over the rows that may see any of its keys, for every head of the key
head's group. For packed sequences these keys are given by two numbers per row, its first key and its end.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import MOST, launcher
from funcops.engine.backend.once import once
from funcops.library.kernels import scored_attention as declared
from funcops.library.kernels.scored_attention import Score, nothing_to_see, sequence_of, to_the_last
from funcops.library.kernels.triton.activation import tanh
from funcops.library.kernels.triton.common import (
    INTERPRETED,
    cdiv,
    contiguous,
    copies_by_itself,
    next_power_of_2,
    rounded,
    store_rounded,
)
from funcops.library.kernels.triton.matmul import precision

LONGEST = 256  # the largest head size of rows that a program holds


class Tile(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int


# by pass, bytes of an element and head size: with any options no build for sm_90 spills a register
TILES = {
    ("forward", 2): {64: Tile(64, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    ("by rows", 2): {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 2)},
    ("by keys", 2): {64: Tile(32, 64, 4, 2), 128: Tile(32, 64, 8, 2), 256: Tile(16, 32, 8, 2)},
    ("forward", 4): {64: Tile(32, 32, 4, 2), 128: Tile(16, 32, 8, 1), 256: Tile(16, 32, 8, 1)},
    ("by rows", 4): {64: Tile(32, 32, 8, 2), 128: Tile(16, 32, 8, 2), 256: Tile(16, 16, 8, 2)},
    ("by keys", 4): {64: Tile(16, 32, 4, 1), 128: Tile(16, 16, 8, 1), 256: Tile(16, 16, 16, 1)},
}


def tile_of(which: str, dtype: torch.dtype, size: int) -> Tile:
    tile = TILES[which, dtype.itemsize][max(64, size)]
    return tile if copies_by_itself() else tile._replace(stages=1)


@triton.jit
def _load(ptr, at, row_stride, limit, size, BLOCK: tl.constexpr):
    """Load rows `at` of `size` elements, as [rows, BLOCK]."""
    i = tl.arange(0, BLOCK)
    inside = (at < limit)[:, None] & (i < size)[None, :]
    return tl.load(ptr + at.to(tl.int64)[:, None] * row_stride + i[None, :], mask=inside, other=0.0)


@triton.jit
def _dot(a, b, total, PRECISION: tl.constexpr):
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _slope(head, whole):
    """The ALiBi slope of a head; `whole`: the last power of two up to the number of heads."""
    h = (head + 1).to(tl.float32)
    return tl.exp2(tl.where(h <= whole, -8.0 * h / whole, -4.0 * (2.0 * (h - whole) - 1.0) / whole))


@triton.jit
def _scored(
    s, bias_ptr, i, j, T, S, low, high, slope, scale, softcap, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
):
    """Scores [rows i, keys j] from products, -inf where masked; and tanh, or without a cap the scaled products."""
    s *= scale
    t = s
    if CAP:
        t = tanh(s * (1.0 / softcap))
        s = t * softcap
    away = j[None, :] - i[:, None] - (S - T)
    if ALIBI:
        s -= slope * tl.abs(away).to(tl.float32)
    inside = (i < T)[:, None] & (j < S)[None, :]
    if BIAS:
        at = bias_ptr + i.to(tl.int64)[:, None] * S + j[None, :]
        s += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if CAUSAL:
        inside &= away <= 0
    if WINDOW:
        inside &= away > -window
    if PACKED:
        inside &= (j[None, :] >= low[:, None]) & (j[None, :] < high[:, None])
    return tl.where(inside, s, float("-inf")), t


@triton.jit
def _bounds_of(bounds_ptr, i, T):
    """The first row and the end of each row's sequence; rows from T on are not in one."""
    low, high = tl.load(bounds_ptr + i, mask=i < T, other=T), tl.load(bounds_ptr + T + i, mask=i < T, other=0)
    return low.to(tl.int64), high.to(tl.int64)


@triton.jit
def _keys_of(bounds_ptr, first, T, S, window, ROWS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr):
    """The rows from `first`, their first keys and ends; and the first key and the end over all these rows."""
    i = first + tl.arange(0, ROWS)
    low, high = i * 0, i * 0 + S
    begin, end = first * 0, first * 0 + S
    if CAUSAL:
        end = tl.minimum(S, first + ROWS + S - T)
    if WINDOW:
        begin = tl.maximum(0, first + S - T - window + 1)
    if PACKED:
        low, high = _bounds_of(bounds_ptr, i, T)
        begin, end = tl.maximum(begin, tl.min(low, 0)), tl.minimum(end, tl.max(high, 0))
    return i, low, high, begin, end


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, bias_ptr, bounds_ptr, out_ptr, lse_ptr, T, S, H, group, D, V, bias_batch, bias_head, window, whole,
    scale: tl.float32, softcap: tl.float32, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr,
    BIAS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Compute out and logsumexp of a block of rows of one head."""
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1) % H, (tl.program_id(1) // H).to(tl.int64)
    K, kv = H // group, head // group
    q_ptr += (batch * T * H + head) * D
    k_ptr += (batch * S * K + kv) * D
    v_ptr += (batch * S * K + kv) * V
    if BIAS:
        bias_ptr += batch * bias_batch + head.to(tl.int64) * bias_head
    i, low, high, begin, end = _keys_of(bounds_ptr, first, T, S, window, ROWS, CAUSAL, WINDOW, PACKED)
    q = _load(q_ptr, i, H * D, T, D, BLOCK_D)
    slope = _slope(head, whole)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k, v = _load(k_ptr, j, K * D, S, D, BLOCK_D), _load(v_ptr, j, K * V, S, V, BLOCK_V)
        s = _dot(q, k.T, tl.zeros([ROWS, KEYS], tl.float32), PRECISION)
        s, _ = _scored(s, bias_ptr, i, j, T, S, low, high, slope, scale, softcap, window, CAUSAL, WINDOW, CAP, ALIBI, BIAS, PACKED)
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p, before = tl.exp(s - base[:, None]), tl.exp(top - base)
        total = total * before + tl.sum(p, 1)
        out = _dot(rounded(p, v.dtype), v, out * before[:, None], PRECISION)
        top = higher
    some = tl.where(total == 0.0, 1.0, total)
    out *= (1.0 / some)[:, None]
    c = tl.arange(0, BLOCK_V)
    at = out_ptr + ((batch * T + i)[:, None] * H + head) * V + c[None, :]
    store_rounded(at, out, (i < T)[:, None] & (c < V)[None, :])
    lse = tl.where(total == 0.0, float("-inf"), top + tl.log(some))
    tl.store(lse_ptr + (batch * H + head) * T + i, lse, mask=i < T)


@triton.jit
def _of_rows(lse_ptr, at, inside):
    """Load logsumexp; 0 for rows that see no key, whose scores are -inf."""
    lse = tl.load(lse_ptr + at, mask=inside, other=0.0)
    return tl.where(lse == float("-inf"), 0.0, lse)


@triton.jit
def _by_rows(
    dy_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, bounds_ptr, out_ptr, lse_ptr, along_ptr, dq_ptr, dbias_ptr, T, S, H, group, D, V,
    bias_batch, bias_head, window, whole, scale: tl.float32, softcap: tl.float32, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, DBIAS: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Compute dq of a block of rows of one head, and rowsum(dy * out), which `_by_keys` reads; with DBIAS, ds [B, H, T, S]."""
    first, head, batch = tl.program_id(0) * ROWS, tl.program_id(1) % H, (tl.program_id(1) // H).to(tl.int64)
    K, kv = H // group, head // group
    of_row = (batch * T * H + head) * V
    q_ptr += (batch * T * H + head) * D
    k_ptr += (batch * S * K + kv) * D
    v_ptr += (batch * S * K + kv) * V
    if BIAS:
        bias_ptr += batch * bias_batch + head.to(tl.int64) * bias_head
    if DBIAS:
        dbias_ptr += (batch * H + head) * T * S
    i, low, high, begin, end = _keys_of(bounds_ptr, first, T, S, window, ROWS, CAUSAL, WINDOW, PACKED)
    q = _load(q_ptr, i, H * D, T, D, BLOCK_D)
    dy = _load(dy_ptr + of_row, i, H * V, T, V, BLOCK_V)
    along = tl.sum(dy.to(tl.float32) * _load(out_ptr + of_row, i, H * V, T, V, BLOCK_V).to(tl.float32), 1)
    at = (batch * H + head) * T + i
    tl.store(along_ptr + at, along, mask=i < T)
    lse, slope = _of_rows(lse_ptr, at, i < T), _slope(head, whole)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(begin, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k, v = _load(k_ptr, j, K * D, S, D, BLOCK_D), _load(v_ptr, j, K * V, S, V, BLOCK_V)
        s = _dot(q, k.T, tl.zeros([ROWS, KEYS], tl.float32), PRECISION)
        s, t = _scored(s, bias_ptr, i, j, T, S, low, high, slope, scale, softcap, window, CAUSAL, WINDOW, CAP, ALIBI, BIAS, PACKED)
        dp = _dot(dy, v.T, tl.zeros([ROWS, KEYS], tl.float32), PRECISION)
        ds = tl.exp(s - lse[:, None]) * (dp - along[:, None])
        if DBIAS:
            where = dbias_ptr + i.to(tl.int64)[:, None] * S + j[None, :]
            store_rounded(where, ds, (i < T)[:, None] & (j < S)[None, :])
        if CAP:
            ds *= 1.0 - t * t
        dq = _dot(rounded(ds, k.dtype), k, dq, PRECISION)
    c = tl.arange(0, BLOCK_D)
    where = dq_ptr + ((batch * T + i)[:, None] * H + head) * D + c[None, :]
    store_rounded(where, dq * scale, (i < T)[:, None] & (c < D)[None, :])


@triton.jit
def _by_keys(
    dy_ptr, q_ptr, k_ptr, v_ptr, bias_ptr, bounds_ptr, lse_ptr, along_ptr, dk_ptr, dv_ptr, T, S, H, group, D, V, bias_batch,
    bias_head, window, whole, scale: tl.float32, softcap: tl.float32, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Compute dk and dv of a block of keys of one key head, over the heads of its group in order."""
    K = H // group
    first, kv, batch = tl.program_id(0) * KEYS, tl.program_id(1) % K, (tl.program_id(1) // K).to(tl.int64)
    j = first + tl.arange(0, KEYS)
    k = _load(k_ptr + (batch * S * K + kv) * D, j, K * D, S, D, BLOCK_D)
    v = _load(v_ptr + (batch * S * K + kv) * V, j, K * V, S, V, BLOCK_V)
    begin, end = first * 0, first * 0 + T
    if CAUSAL:
        begin = tl.maximum(0, first - (S - T))
    if WINDOW:
        end = tl.minimum(T, first + KEYS - 1 - (S - T) + window)
    if PACKED:  # in a row of sequences keys are rows
        firsts, ends = _bounds_of(bounds_ptr, j, T)
        begin, end = tl.maximum(begin, tl.min(firsts, 0)), tl.minimum(end, tl.max(ends, 0))
    dk, dv = tl.zeros([KEYS, BLOCK_D], tl.float32), tl.zeros([KEYS, BLOCK_V], tl.float32)
    for member in range(0, group):
        head = kv * group + member
        slope, of_head, of_bias = _slope(head, whole), batch * T * H + head, bias_ptr
        if BIAS:
            of_bias += batch * bias_batch + head.to(tl.int64) * bias_head
        for start in range(begin, end, ROWS):
            i = start + tl.arange(0, ROWS)
            low, high = i, i
            if PACKED:
                low, high = _bounds_of(bounds_ptr, i, T)
            q = _load(q_ptr + of_head * D, i, H * D, T, D, BLOCK_D)
            dy = _load(dy_ptr + of_head * V, i, H * V, T, V, BLOCK_V)
            at = (batch * H + head) * T + i
            lse, along = _of_rows(lse_ptr, at, i < T), tl.load(along_ptr + at, mask=i < T, other=0.0)
            s = _dot(q, k.T, tl.zeros([ROWS, KEYS], tl.float32), PRECISION)
            s, t = _scored(
                s, of_bias, i, j, T, S, low, high, slope, scale, softcap, window, CAUSAL, WINDOW, CAP, ALIBI, BIAS, PACKED
            )
            p = tl.exp(s - lse[:, None])
            dv = _dot(rounded(p, dy.dtype).T, dy, dv, PRECISION)
            ds = p * (_dot(dy, v.T, tl.zeros([ROWS, KEYS], tl.float32), PRECISION) - along[:, None])
            if CAP:
                ds *= 1.0 - t * t
            dk = _dot(rounded(ds, q.dtype).T, q, dk, PRECISION)
    c, d = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    at = (batch * S + j)[:, None] * K + kv
    store_rounded(dk_ptr + at * D + c[None, :], dk * scale, (j < S)[:, None] & (c < D)[None, :])
    store_rounded(dv_ptr + at * V + d[None, :], dv, (j < S)[:, None] & (d < V)[None, :])


_launch_forward, _launch_by_rows, _launch_by_keys = launcher(_forward), launcher(_by_rows), launcher(_by_keys)


def _bounds(cu_seqlens: Optional[Tensor], rows: int) -> Optional[Tensor]:
    """The first row and the end of each row's sequence: [2, T]."""
    if cu_seqlens is None:
        return None
    of, ends = once(sequence_of, cu_seqlens, rows), to_the_last(cu_seqlens, rows)
    return torch.stack((ends[of], ends[of + 1]))


def _serves(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Optional[Tensor]) -> bool:
    if nothing_to_see(q, k) or (cu_seqlens is not None and q.shape[1] != k.shape[1]):
        return False
    return v.shape[3] > 0 and max(q.shape[3], v.shape[3]) <= LONGEST


def _parts(batch: int, heads: int) -> list[slice]:
    """Parts of a batch, each of at most as many heads as a grid takes."""
    return [slice(i, i + MOST // heads) for i in range(0, batch, MOST // heads)]


def _of_part(bias: Optional[Tensor], at: slice) -> Optional[Tensor]:
    return bias if bias is None or bias.shape[0] == 1 else bias[at]


def _arguments(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], score: Score) -> tuple[Any, ...]:
    """The sizes and numbers that all three kernels take."""
    heads, s = q.shape[2], k.shape[1]
    of_bias = (0, 0)
    if bias is not None:
        of_bias = (bias.stride(0) if bias.shape[0] > 1 else 0), (bias.stride(1) if bias.shape[1] > 1 else 0)
    whole = 1 << (heads.bit_length() - 1)
    sizes = q.shape[1], s, heads, heads // k.shape[2], q.shape[3], v.shape[3]
    return *sizes, *of_bias, score.window, whole, score.scale, score.softcap or 1.0


def _options(q: Tensor, bias: Optional[Tensor], bounds: Optional[Tensor], score: Score) -> tuple[bool, ...]:
    return score.causal, score.window > 0, score.softcap > 0, score.alibi, bias is not None, bounds is not None


@declared.scored_attention_fwd.triton
def scored_attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], cu_seqlens: Optional[Tensor], causal: bool, window: int,
    softcap: float, alibi: bool, scale: float,
) -> tuple[Tensor, Tensor]:
    score = Score(causal, window, softcap, alibi, scale)
    if not _serves(q, k, v, cu_seqlens):
        return declared.scored_attention_fwd.kernel.torch_impl(q, k, v, bias, cu_seqlens, *score)  # type: ignore[no-any-return]
    (batch, t, heads, d), bounds = q.shape, _bounds(cu_seqlens, q.shape[1])
    if heads <= MOST < batch * heads:

        def part(at: slice) -> tuple[Tensor, Tensor]:
            return scored_attention_fwd(q[at], k[at], v[at], _of_part(bias, at), None, *score)

        outs, lses = zip(*map(part, _parts(batch, heads)), strict=True)
        return torch.cat(outs), torch.cat(lses)
    q, k, v, bias = q.contiguous(), k.contiguous(), v.contiguous(), contiguous(bias)
    out, lse = q.new_empty((batch, t, heads, v.shape[3])), q.new_empty((batch, heads, t), dtype=torch.float32)
    blocks = next_power_of_2(max(16, d)), next_power_of_2(max(16, v.shape[3]))
    tile = tile_of("forward", q.dtype, max(blocks))
    _launch_forward(
        cdiv(t, tile.rows), batch * heads, 1, q, k, v, bias, bounds, out, lse, *_arguments(q, k, v, bias, score),
        *_options(q, bias, bounds, score), precision(q.dtype), tile.rows, tile.keys, *blocks, num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out, lse


@declared.scored_attention_bwd.triton
def scored_attention_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], cu_seqlens: Optional[Tensor], out: Tensor, lse: Tensor,
    causal: bool, window: int, softcap: float, alibi: bool, scale: float, wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    score = Score(causal, window, softcap, alibi, scale)
    if not _serves(q, k, v, cu_seqlens):
        return declared.scored_attention_bwd.kernel.torch_impl(  # type: ignore[no-any-return]
            dy, q, k, v, bias, cu_seqlens, out, lse, *score, wants_bias
        )
    (batch, t, heads, d), s, bounds = q.shape, k.shape[1], _bounds(cu_seqlens, q.shape[1])
    if heads <= MOST < batch * heads:

        def part(at: slice) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
            given = dy[at], q[at], k[at], v[at], _of_part(bias, at), None, out[at], lse[at]
            return scored_attention_bwd(*given, *score, wants_bias)

        dqs, dks, dvs, dbiases = zip(*map(part, _parts(batch, heads)), strict=True)
        dbias = None if dbiases[0] is None else torch.cat(dbiases)
        if dbias is not None and bias is not None and bias.shape[0] == 1:
            dbias = dbias.sum(0, keepdim=True)
        return torch.cat(dqs), torch.cat(dks), torch.cat(dvs), dbias
    dy, q, k, v, out, lse = (each.contiguous() for each in (dy, q, k, v, out, lse))
    bias, along = contiguous(bias), torch.empty_like(lse)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dbias = None
    if bias is not None and wants_bias:  # entries that no program visits are 0
        dbias = q.new_zeros((batch, heads, t, s), dtype=bias.dtype if bias.shape[:2] == (batch, heads) else torch.float32)
    arguments, options = _arguments(q, k, v, bias, score), _options(q, bias, bounds, score)
    blocks = next_power_of_2(max(16, d)), next_power_of_2(max(16, v.shape[3]))
    tile = tile_of("by rows", q.dtype, max(blocks))
    _launch_by_rows(
        cdiv(t, tile.rows), batch * heads, 1, dy, q, k, v, bias, bounds, out, lse, along, dq, dbias, *arguments, *options,
        dbias is not None, precision(q.dtype), tile.rows, tile.keys, *blocks, num_warps=tile.warps, num_stages=tile.stages,
    )
    tile = tile_of("by keys", q.dtype, max(blocks))
    _launch_by_keys(
        cdiv(s, tile.keys), batch * k.shape[2], 1, dy, q, k, v, bias, bounds, lse, along, dk, dv, *arguments, *options,
        precision(q.dtype), tile.rows, tile.keys, *blocks, num_warps=tile.warps, num_stages=tile.stages,
    )
    if dbias is not None and bias is not None and dbias.shape != bias.shape:
        dbias = dbias.sum_to_size(bias.shape)
    return dq, dk, dv, None if dbias is None else dbias.to(q.dtype)
