"""Sum, scaling, and dropout, which draws the same bits as `funcops.random.bits`."""

from __future__ import annotations

import functools
import math
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import pointwise as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.activation import activate
from funcops.library.kernels.triton.aligned import columns, spans
from funcops.library.kernels.triton.common import cdiv, contiguous, load_wide, store_rounded

BLOCK = 1024
LINE, ROWS, MOST = 64, 2, 65535  # 16-bit elements of a line of the cache; rows that a program loads at once; programs along y or z


@triton.jit
def _add(a_ptr, b_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    store_rounded(y_ptr + i, load_wide(a_ptr + i, i < n) + load_wide(b_ptr + i, i < n), i < n)


@triton.jit
def _add_repeated(
    a_ptr, b_ptr, y_ptr, n, groups, period, KIND: tl.constexpr, WRAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    """y = f(a + b), b repeated every `period` elements."""
    i, span, full, begin = columns(n, groups, WIDE, BLOCK)
    b = load_wide(b_ptr + (i % period if WRAPS else i), (i < span) & (i < n))
    for index in range(begin, full, tl.num_programs(1)):
        at = index * span + i
        z = load_wide(a_ptr + at, i < span) + b
        store_rounded(y_ptr + at, activate(z, KIND) if KIND != "" else z, i < span)
    if begin == full % tl.num_programs(1):
        at = full.to(tl.int64) * span + i
        z = load_wide(a_ptr + at, at < n) + b
        store_rounded(y_ptr + at, activate(z, KIND) if KIND != "" else z, (i < span) & (at < n))


@triton.jit
def _add_rows(a_ptr, b_ptr, y_ptr, rows, width, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """`_add_repeated` for a width that is a multiple of BLOCK. A program has ROWS rows of the same columns, and loads all at once;
    one that goes on to others waits for each."""
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    first = (tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * ROWS
    row = first + tl.arange(0, ROWS)[:, None]
    z = load_wide(a_ptr + row * width + j, row < rows) + tl.load(b_ptr + j).to(tl.float32)
    store_rounded(y_ptr + row * width + j, activate(z, KIND) if KIND != "" else z, row < rows)


@triton.jit
def _scale(x_ptr, y_ptr, n, factor: tl.float32, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    store_rounded(y_ptr + i, load_wide(x_ptr + i, i < n) * factor, i < n)


@triton.jit
def words_from(first, seed, stream, BLOCK: tl.constexpr):
    """The random words of 4 BLOCK elements: element 4 b + j gets word j of the Philox block b, b from `first`;
    key = (seed, stream)."""
    return tl.reshape(philox_words(first + tl.arange(0, BLOCK), seed, stream), [4 * BLOCK])


@triton.jit
def philox_words(block, seed, stream):
    """The four words of each Philox block, in order."""
    w0, w1, w2, w3 = tl.philox_impl(
        block.to(tl.uint32), (block >> 32).to(tl.uint32), stream.to(tl.uint32), (stream >> 32).to(tl.uint32),
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32),
    )
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def _drop(x_ptr, residual_ptr, y_ptr, at, inside, b, words, threshold, factor, BIAS: tl.constexpr, ADD: tl.constexpr):
    """y = x + b, times factor where its word is at least the threshold, else 0; then + residual."""
    x = load_wide(x_ptr + at, inside)
    if BIAS:
        x += b
    y = tl.where(words >= tl.cast(threshold, tl.uint32), x * factor, x * 0.0)
    if ADD:
        y += load_wide(residual_ptr + at, inside)
    store_rounded(y_ptr + at, y, inside)


@triton.jit
def _dropout(
    x_ptr, bias_ptr, residual_ptr, key_ptr, y_ptr, n, groups, width, threshold, factor: tl.float32, BIAS: tl.constexpr,
    ADD: tl.constexpr, WRAPS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):
    i, span, full, begin = columns(n, groups, WIDE, BLOCK)
    seed, stream = tl.load(key_ptr), tl.load(key_ptr + 1)
    b = 0.0
    if BIAS:
        b = load_wide(bias_ptr + (i % width if WRAPS else i), (i < span) & (i < n))
    words_at = tl.program_id(0).to(tl.int64) * (BLOCK // 4)
    for index in range(begin, full, tl.num_programs(1)):
        start = index * span
        words = words_from(start // 4 + words_at, seed, stream, BLOCK // 4)
        _drop(x_ptr, residual_ptr, y_ptr, start + i, i < span, b, words, threshold, factor, BIAS, ADD)
    if begin == full % tl.num_programs(1):
        start = full.to(tl.int64) * span
        words = words_from(start // 4 + words_at, seed, stream, BLOCK // 4)
        _drop(x_ptr, residual_ptr, y_ptr, start + i, (i < span) & (start + i < n), b, words, threshold, factor, BIAS, ADD)


_launch_add, _launch_add_repeated, _launch_add_rows = launcher(_add), launcher(_add_repeated), launcher(_add_rows)
_launch_scale, _launch_dropout = launcher(_scale), launcher(_dropout)


@launched(declared.add)
@declared.add.triton
def add(a: Tensor, b: Tensor) -> Tensor:
    n = a.numel()
    if b.numel() != n:
        return add_repeated(a, b, "")
    a, b = a.contiguous(), b.contiguous()
    y = torch.empty_like(a)
    if n:
        _launch_add(cdiv(n, BLOCK), 1, 1, a, b, y, n, BLOCK)
    return y


def add_repeated(a: Tensor, b: Tensor, kind: str) -> Tensor:
    """f(a + b); b has the shape of a's last dims."""
    a, b = a.contiguous(), b.contiguous()
    y, n, period = torch.empty_like(a), a.numel(), b.numel()
    block = math.gcd(period, BLOCK)
    if n and block >= LINE:
        rows, at_once = n // period, ROWS * BLOCK // block
        down = cdiv(rows, at_once)
        _launch_add_rows(period // block, min(down, MOST), cdiv(down, MOST), a, b, y, rows, period, kind, at_once, block)
    elif n:
        s = spans(n, period, BLOCK)
        _launch_add_repeated(*s.grid, a, b, y, n, s.groups, period, kind, s.wraps, s.wide, BLOCK)
    return y


@launched(declared.scale)
@declared.scale.triton
def scale(x: Tensor, factor: float) -> Tensor:
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    if n:
        _launch_scale(cdiv(n, BLOCK), 1, 1, x, y, n, factor, BLOCK)
    return y


@declared.dropout.triton
def dropout(x: Tensor, key: Tensor, p: float) -> Tensor:
    return _dropped(x, None, None, key, p)


@declared.dropout_add.triton
def dropout_add(x: Tensor, b: Optional[Tensor], residual: Tensor, key: Tensor, p: float) -> Tensor:
    return _dropped(x, b, residual, key, p)


@functools.lru_cache(maxsize=256)
def threshold_and_factor(p: float) -> tuple[int, float]:
    """The threshold of words, as 32 signed bits, and the factor of kept elements: 0 for a threshold of 2^32, which wraps to 0."""
    threshold = round(p * 2**32)
    return (threshold + 2**31) % 2**32 - 2**31, 1.0 / (1.0 - p) if threshold < 2**32 else 0.0


def _dropped(x: Tensor, b: Optional[Tensor], residual: Optional[Tensor], key: Tensor, p: float) -> Tensor:
    x, b, residual = x.contiguous(), contiguous(b), contiguous(residual)
    y, n, width = torch.empty_like(x), x.numel(), 1 if b is None else b.numel()
    if n:
        s = spans(n, width, BLOCK)
        _launch_dropout(
            *s.grid, x, b, residual, key.contiguous(), y, n, s.groups, width, *threshold_and_factor(p), b is not None,
            residual is not None, b is not None and s.wraps, s.wide, BLOCK,
        )
    return y
