"""Attention on codes by blocks of rows, then its gradients by blocks of rows (dq) and by blocks of keys (dk, dv), without atomics.

The products q k^T, dy v^T and, with rounded probabilities, p v multiply codes where the device can (NATIVE). The others multiply
decoded codes, exact in bfloat16 and float32 (WIDE), with the scales in the other operand. A program of `_by_rows` goes over its
keys twice: for logsumexp and rowsum(p dp), which `_by_keys` reads, too, and for dq.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import scaled_attention as declared
from funcops.library.kernels.scaled_attention import KEYS, LARGEST, rows_of_scale
from funcops.library.kernels.scored_attention import nothing_to_see
from funcops.library.kernels.triton.common import INTERPRETED, cdiv, copies_by_itself, next_power_of_2, rounded, store_rounded
from funcops.library.kernels.triton.low_bits import decode, encode, load_exact, native, number, scales_of, sizes
from funcops.library.kernels.triton.matmul import precision
from funcops.library.kernels.triton.scored_attention import _bounds, _bounds_of, _keys_of

LEAST = 32  # elements of a head that a product of codes sums over


class Tile(NamedTuple):
    rows: int
    keys: int
    warps: int
    stages: int


# by pass, bytes of an element and head size: no build for sm_90 spills a register
TILES = {
    ("forward", 2): {64: Tile(128, KEYS, 8, 3), 128: Tile(128, KEYS, 8, 3)},
    ("forward, p high", 2): {64: Tile(128, KEYS, 8, 3), 128: Tile(128, KEYS, 8, 3)},
    ("by rows", 2): {64: Tile(64, KEYS, 4, 2), 128: Tile(64, KEYS, 8, 2)},
    ("by keys", 2): {64: Tile(32, KEYS, 4, 2), 128: Tile(32, KEYS, 8, 2)},
    ("forward", 4): {64: Tile(16, KEYS, 8, 1), 128: Tile(16, KEYS, 16, 1)},
    ("forward, p high", 4): {64: Tile(16, 32, 8, 1), 128: Tile(16, 32, 8, 1)},
    ("by rows", 4): {64: Tile(32, 32, 8, 2), 128: Tile(16, 32, 8, 2)},
    ("by keys", 4): {64: Tile(16, 32, 8, 1), 128: Tile(16, 16, 8, 1)},
}


def tile_of(which: str, dtype: torch.dtype, size: int) -> Tile:
    tile = TILES[which, dtype.itemsize][max(64, size)]
    if not native() and dtype.itemsize == 2:  # decoded codes take registers
        tile = tile._replace(rows=tile.rows // 2, warps=8)
    return tile if copies_by_itself() else tile._replace(stages=1)


@triton.jit
def _quantize_heads(
    x_ptr, codes_ptr, scales_ptr, T, H, D, N, rows, x_batch, x_row, x_head, ELEMENT: tl.constexpr, KIND: tl.constexpr,
    EPSILON: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Write the codes of the rows of one head that share a scale, and the scale."""
    n, of = tl.program_id(0) % N, (tl.program_id(0) // N).to(tl.int64)
    x_ptr += of // H * x_batch + of % H * x_head
    c = tl.arange(0, BLOCK_D)
    first, last = n * rows, tl.minimum(n * rows + rows, T)
    found = tl.zeros([1, 1], tl.float32)
    for start in range(first, last, ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i < last)[:, None] & (c < D)[None, :]
        x = load_exact(x_ptr + i.to(tl.int64)[:, None] * x_row + c[None, :], inside)
        found = tl.maximum(found, number(tl.max(tl.max(sizes(x), 1), 0)))
    factor, stored = scales_of(found, 0.0, ELEMENT, KIND, EPSILON, NARROW, NATIVE)
    tl.store(scales_ptr + of * N + n + tl.zeros([1, 1], tl.int32), stored)
    for start in range(first, last, ROWS):
        i = start + tl.arange(0, ROWS)
        inside = (i < last)[:, None] & (c < D)[None, :]
        x = load_exact(x_ptr + i.to(tl.int64)[:, None] * x_row + c[None, :], inside)
        tl.store(codes_ptr + (of * T + i)[:, None] * D + c[None, :], encode(x * factor, ELEMENT, NATIVE), mask=inside)


@triton.jit
def _load(ptr, at, limit, size, BLOCK_D: tl.constexpr):
    """Load the codes of rows `at` of a head, as [rows, BLOCK_D]."""
    c = tl.arange(0, BLOCK_D)
    inside = (at < limit)[:, None] & (c < size)[None, :]
    return tl.load(ptr + at.to(tl.int64)[:, None] * size + c[None, :], mask=inside, other=0)


@triton.jit
def _product(a, b, A: tl.constexpr, B: tl.constexpr, NATIVE: tl.constexpr):
    """The product of codes [M, K] and [K, N], in float32."""
    if NATIVE:
        return tl.dot(_low(a, A), _low(b, B))
    else:
        a, b = decode(a, A, False), decode(b, B, False)
        if INTERPRETED:
            return tl.dot(a, b, input_precision="ieee")
        else:
            return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))


@triton.jit
def _low(code, ELEMENT: tl.constexpr):
    return code.to(tl.float8e4nv if ELEMENT == "e4m3" else tl.float8e5, bitcast=True)


@triton.jit
def _wide_product(a, code, total, ELEMENT: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b, of float32 a [M, K] and codes b [K, N], both in WIDE, which holds codes exactly."""
    a, b = rounded(a, WIDE), decode(code, ELEMENT, NATIVE).to(WIDE)
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _masked(s, i, j, T, S, low, high, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr):
    """Scores of rows i and keys j, of two dims each, -inf where masked."""
    inside, away = (i < T) & (j < S), j - i - (S - T)
    if CAUSAL:
        inside &= away <= 0
    if WINDOW:
        inside &= away > -window
    if PACKED:
        inside &= (j >= low) & (j < high)
    return tl.where(inside, s, float("-inf"))


@triton.jit
def _place(of, n, H, group):
    """The batch, the head, and the heads before its key head, of program `of` for each n."""
    head, batch = (of // n) % H, (of // n // H).to(tl.int64)
    return batch, head, batch * (H // group) + head // group


@triton.jit
def _forward(
    q_ptr, q_scales_ptr, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, bounds_ptr, out_ptr, T, S, H, group, D, V, q_blocks, k_blocks,
    q_rows, k_rows, window, scale: tl.float32, ELEMENT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    PACKED: tl.constexpr, LOW: tl.constexpr, LARGEST: tl.constexpr, NATIVE: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Compute out of a block of rows of one head."""
    n = tl.cdiv(T, ROWS)
    first = tl.program_id(0) % n * ROWS
    batch, head, kv = _place(tl.program_id(0), n, H, group)
    i, low, high, begin, end = _keys_of(bounds_ptr, first, T, S, window, ROWS, CAUSAL, WINDOW, PACKED)
    q = _load(q_ptr + (batch * H + head) * T * D, i, T, D, BLOCK_D)
    of_q = tl.load(q_scales_ptr + (batch * H + head) * q_blocks + i // q_rows, mask=i < T, other=0.0) * scale
    k_ptr += kv * S * D
    v_ptr += kv * S * V
    c = tl.arange(0, BLOCK_V)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_V], tl.float32)
    for start in range(begin // KEYS * KEYS, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k, v = _load(k_ptr, j, S, D, BLOCK_D), _load(v_ptr, j, S, V, BLOCK_V)
        of_k = tl.load(k_scales_ptr + kv * k_blocks + j // k_rows, mask=j < S, other=0.0)
        of_v = tl.load(v_scales_ptr + kv * k_blocks + (start + c * 0) // k_rows)  # a vector, of one scale
        s = _product(q, k.T, ELEMENT, ELEMENT, NATIVE) * of_q[:, None] * of_k[None, :]
        s = _masked(s, i[:, None], j[None, :], T, S, low[:, None], high[:, None], window, CAUSAL, WINDOW, PACKED)
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p, before = tl.exp(s - base[:, None]), tl.exp(top - base)
        total = total * before + tl.sum(p, 1)
        if LOW:
            more = _product(encode(p * LARGEST, "e4m3", NATIVE), v, "e4m3", ELEMENT, NATIVE) * of_v[None, :]
            out = out * before[:, None] + more
        else:
            more = _wide_product(p, v, tl.zeros([ROWS, BLOCK_V], tl.float32), ELEMENT, NATIVE, WIDE, PRECISION)
            out = out * before[:, None] + more * of_v[None, :]
        top = higher
    out *= (1.0 / (tl.where(total == 0.0, 1.0, total) * (LARGEST if LOW else 1.0)))[:, None]
    at = out_ptr + ((batch * T + i)[:, None] * H + head) * V + c[None, :]
    store_rounded(at, out, (i < T)[:, None] & (c < V)[None, :])


@triton.jit
def _by_rows(
    dy_ptr, dy_scales_ptr, q_ptr, q_scales_ptr, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, bounds_ptr, lse_ptr, along_ptr, dq_ptr,
    T, S, H, group, D, V, q_blocks, k_blocks, q_rows, k_rows, window, scale: tl.float32, DY_ELEMENT: tl.constexpr,
    ELEMENT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, NATIVE: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute logsumexp, rowsum(p dp) and dq of a block of rows of one head."""
    n = tl.cdiv(T, ROWS)
    first = tl.program_id(0) % n * ROWS
    batch, head, kv = _place(tl.program_id(0), n, H, group)
    i, low, high, begin, end = _keys_of(bounds_ptr, first, T, S, window, ROWS, CAUSAL, WINDOW, PACKED)
    of = batch * H + head
    q, dy = _load(q_ptr + of * T * D, i, T, D, BLOCK_D), _load(dy_ptr + of * T * V, i, T, V, BLOCK_V)
    of_q = tl.load(q_scales_ptr + of * q_blocks + i // q_rows, mask=i < T, other=0.0) * scale
    of_dy = tl.load(dy_scales_ptr + of * q_blocks + i // q_rows, mask=i < T, other=0.0)
    k_ptr += kv * S * D
    v_ptr += kv * S * V
    k_scales_ptr += kv * k_blocks
    v_scales_ptr += kv * k_blocks
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total, along = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    for start in range(begin // KEYS * KEYS, end, KEYS):
        j = start + tl.arange(0, KEYS)
        of_k = tl.load(k_scales_ptr + j // k_rows, mask=j < S, other=0.0)
        of_v = tl.load(v_scales_ptr + j // k_rows, mask=j < S, other=0.0)
        s = _product(q, _load(k_ptr, j, S, D, BLOCK_D).T, ELEMENT, ELEMENT, NATIVE) * of_q[:, None] * of_k[None, :]
        s = _masked(s, i[:, None], j[None, :], T, S, low[:, None], high[:, None], window, CAUSAL, WINDOW, PACKED)
        dp = _product(dy, _load(v_ptr, j, S, V, BLOCK_V).T, DY_ELEMENT, ELEMENT, NATIVE) * of_dy[:, None] * of_v[None, :]
        higher = tl.maximum(top, tl.max(s, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        p, before = tl.exp(s - base[:, None]), tl.exp(top - base)
        total, along, top = total * before + tl.sum(p, 1), along * before + tl.sum(p * dp, 1), higher
    some = tl.where(total == 0.0, 1.0, total)
    lse, along = tl.where(total == 0.0, 0.0, top + tl.log(some)), along / some  # all scores of an empty row are -inf
    tl.store(lse_ptr + of * T + i, lse, mask=i < T)
    tl.store(along_ptr + of * T + i, along, mask=i < T)
    dq = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(begin // KEYS * KEYS, end, KEYS):
        j = start + tl.arange(0, KEYS)
        k, v = _load(k_ptr, j, S, D, BLOCK_D), _load(v_ptr, j, S, V, BLOCK_V)
        of_k = tl.load(k_scales_ptr + j // k_rows, mask=j < S, other=0.0)
        of_v = tl.load(v_scales_ptr + j // k_rows, mask=j < S, other=0.0)
        s = _product(q, k.T, ELEMENT, ELEMENT, NATIVE) * of_q[:, None] * of_k[None, :]
        s = _masked(s, i[:, None], j[None, :], T, S, low[:, None], high[:, None], window, CAUSAL, WINDOW, PACKED)
        dp = _product(dy, v.T, DY_ELEMENT, ELEMENT, NATIVE) * of_dy[:, None] * of_v[None, :]
        ds = tl.exp(s - lse[:, None]) * (dp - along[:, None])
        dq = _wide_product(ds * of_k[None, :], k, dq, ELEMENT, NATIVE, WIDE, PRECISION)
    c = tl.arange(0, BLOCK_D)
    where = dq_ptr + ((batch * T + i)[:, None] * H + head) * D + c[None, :]
    store_rounded(where, dq * scale, (i < T)[:, None] & (c < D)[None, :])


@triton.jit
def _by_keys(
    dy_ptr, dy_scales_ptr, q_ptr, q_scales_ptr, k_ptr, k_scales_ptr, v_ptr, v_scales_ptr, bounds_ptr, lse_ptr, along_ptr, dk_ptr,
    dv_ptr, T, S, H, group, D, V, q_blocks, k_blocks, q_rows, k_rows, window, scale: tl.float32, DY_ELEMENT: tl.constexpr,
    ELEMENT: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PACKED: tl.constexpr, NATIVE: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Compute dk and dv of a block of keys of one key head, over the heads of its group in order."""
    n, K = tl.cdiv(S, KEYS), H // group
    first, kv, batch = tl.program_id(0) % n * KEYS, (tl.program_id(0) // n) % K, (tl.program_id(0) // n // K).to(tl.int64)
    j = first + tl.arange(0, KEYS)
    of = batch * K + kv
    k, v = _load(k_ptr + of * S * D, j, S, D, BLOCK_D), _load(v_ptr + of * S * V, j, S, V, BLOCK_V)
    of_k = tl.load(k_scales_ptr + of * k_blocks + j // k_rows, mask=j < S, other=0.0) * scale
    of_v = tl.load(v_scales_ptr + of * k_blocks + j // k_rows, mask=j < S, other=0.0)
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
        head = batch * H + kv * group + member
        for start in range(begin, end, ROWS):
            i = start + tl.arange(0, ROWS)
            low, high = i, i
            if PACKED:
                low, high = _bounds_of(bounds_ptr, i, T)
            q, dy = _load(q_ptr + head * T * D, i, T, D, BLOCK_D), _load(dy_ptr + head * T * V, i, T, V, BLOCK_V)
            of_q = tl.load(q_scales_ptr + head * q_blocks + i // q_rows, mask=i < T, other=0.0)
            of_dy = tl.load(dy_scales_ptr + head * q_blocks + i // q_rows, mask=i < T, other=0.0)
            lse = tl.load(lse_ptr + head * T + i, mask=i < T, other=0.0)
            along = tl.load(along_ptr + head * T + i, mask=i < T, other=0.0)
            s = _product(k, q.T, ELEMENT, ELEMENT, NATIVE) * of_k[:, None] * of_q[None, :]  # keys by rows
            s = _masked(s, i[None, :], j[:, None], T, S, low[None, :], high[None, :], window, CAUSAL, WINDOW, PACKED)
            p = tl.exp(s - lse[None, :])
            dp = _product(v, dy.T, ELEMENT, DY_ELEMENT, NATIVE) * of_v[:, None] * of_dy[None, :]
            dv = _wide_product(p * of_dy[None, :], dy, dv, DY_ELEMENT, NATIVE, WIDE, PRECISION)
            ds = p * (dp - along[None, :])
            dk = _wide_product(ds * of_q[None, :], q, dk, ELEMENT, NATIVE, WIDE, PRECISION)
    c, d = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    at = (batch * S + j)[:, None] * K + kv
    store_rounded(dk_ptr + at * D + c[None, :], dk * scale, (j < S)[:, None] & (c < D)[None, :])
    store_rounded(dv_ptr + at * V + d[None, :], dv, (j < S)[:, None] & (d < V)[None, :])


_launch_heads = launcher(_quantize_heads)
_launch_forward, _launch_by_rows, _launch_by_keys = launcher(_forward), launcher(_by_rows), launcher(_by_keys)


@declared.quantize_heads.triton
def quantize_heads(x: Tensor, element: str, block: int, kind: str, epsilon: float) -> tuple[Tensor, Tensor]:
    (batch, t, heads, size), rows = x.shape, block or max(x.shape[1], 1)
    number = cdiv(t, rows)
    found = x.new_empty((batch, heads, t, size), dtype=torch.uint8)
    scales = x.new_empty((batch, heads, number, 1), dtype=torch.float32)
    if not x.numel():
        return found, scales
    x = x if x.stride(-1) == 1 else x.contiguous()
    narrow = block > 0 and x.dtype is torch.bfloat16
    _launch_heads(
        batch * heads * number, 1, 1, x, found, scales, t, heads, size, number, rows, *x.stride()[:3], element, kind, epsilon,
        narrow, native(), 64, next_power_of_2(size), num_warps=4,
    )
    return found, scales


def _serves(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Optional[Tensor], out: torch.dtype) -> bool:
    if out is torch.float64 or nothing_to_see(q, k) or (cu_seqlens is not None and q.shape[2] != k.shape[2]):
        return False
    return 0 < v.shape[3] <= declared.LONGEST and q.shape[3] <= declared.LONGEST


def _arguments(q: Tensor, q_scales: Tensor, k: Tensor, k_scales: Tensor, v: Tensor, window: int, scale: float) -> tuple[Any, ...]:
    """The sizes and numbers that the three kernels of attention take."""
    (_, heads, t, size), s = q.shape, k.shape[2]
    blocks = q_scales.shape[2], k_scales.shape[2]
    rows = rows_of_scale(q_scales, t), rows_of_scale(k_scales, s)
    return t, s, heads, heads // k.shape[1], size, v.shape[3], *blocks, *rows, window, scale


def _heads_of(*sizes: int) -> list[int]:
    return [next_power_of_2(max(LEAST, size)) for size in sizes]


def _numbers(out: torch.dtype) -> tuple[bool, Any, str]:
    """Whether codes are multiplied, the type of decoded codes, and the precision of their products."""
    return native(), tl.float32 if out is torch.float32 else tl.bfloat16, precision(out)


@declared.scaled_attention_fwd.triton
def scaled_attention_fwd(
    q: Tensor, q_scales: Tensor, k: Tensor, k_scales: Tensor, v: Tensor, v_scales: Tensor, cu_seqlens: Optional[Tensor],
    element: str, causal: bool, window: int, scale: float, low: bool, out: torch.dtype,
) -> Tensor:
    if not _serves(q, k, v, cu_seqlens, out):
        return declared.scaled_attention_fwd.kernel.torch_impl(  # type: ignore[no-any-return]
            q, q_scales, k, k_scales, v, v_scales, cu_seqlens, element, causal, window, scale, low, out
        )
    given = [each.contiguous() for each in (q, q_scales, k, k_scales, v, v_scales)]
    (batch, heads, t, size), bounds = q.shape, _bounds(cu_seqlens, q.shape[2])
    y, blocks = q.new_empty((batch, t, heads, v.shape[3]), dtype=out), _heads_of(size, v.shape[3])
    tile = tile_of("forward" if low else "forward, p high", out, max(blocks))
    _launch_forward(
        cdiv(t, tile.rows) * batch * heads, 1, 1, *given, bounds, y, *_arguments(q, q_scales, k, k_scales, v, window, scale),
        element, causal, window > 0, bounds is not None, low, LARGEST, *_numbers(out), tile.rows, tile.keys, *blocks,
        num_warps=tile.warps, num_stages=tile.stages,
    )
    return y


@declared.scaled_attention_bwd.triton
def scaled_attention_bwd(
    dy: Tensor, dy_scales: Tensor, q: Tensor, q_scales: Tensor, k: Tensor, k_scales: Tensor, v: Tensor, v_scales: Tensor,
    cu_seqlens: Optional[Tensor], dy_element: str, element: str, causal: bool, window: int, scale: float, out: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _serves(q, k, v, cu_seqlens, out):
        return declared.scaled_attention_bwd.kernel.torch_impl(  # type: ignore[no-any-return]
            dy, dy_scales, q, q_scales, k, k_scales, v, v_scales, cu_seqlens, dy_element, element, causal, window, scale, out
        )
    given = [each.contiguous() for each in (dy, dy_scales, q, q_scales, k, k_scales, v, v_scales)]
    (batch, heads, t, size), (_, groups, s, width), bounds = q.shape, v.shape, _bounds(cu_seqlens, q.shape[2])
    lse, along = (q.new_empty((batch, heads, t), dtype=torch.float32) for _ in range(2))
    shapes = (batch, t, heads, size), (batch, s, groups, size), (batch, s, groups, width)
    dq, dk, dv = (q.new_empty(shape, dtype=out) for shape in shapes)
    arguments, blocks = _arguments(q, q_scales, k, k_scales, v, window, scale), _heads_of(size, width)
    options = dy_element, element, causal, window > 0, bounds is not None, *_numbers(out)
    tile = tile_of("by rows", out, max(blocks))
    _launch_by_rows(
        cdiv(t, tile.rows) * batch * heads, 1, 1, *given, bounds, lse, along, dq, *arguments, *options, tile.rows, tile.keys,
        *blocks, num_warps=tile.warps, num_stages=tile.stages,
    )
    tile = tile_of("by keys", out, max(blocks))
    _launch_by_keys(
        cdiv(s, tile.keys) * batch * groups, 1, 1, *given, bounds, lse, along, dk, dv, *arguments, *options, tile.rows, tile.keys,
        *blocks, num_warps=tile.warps, num_stages=tile.stages,
    )
    return dq, dk, dv
