"""Sum, scaling, and dropout, which draws the very bits that `funcops.random.bits` draws."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import pointwise as declared
from funcops.kernels.triton.common import load_wide, store_rounded

BLOCK = 1024


@triton.jit
def _add(a_ptr, b_ptr, y_ptr, n, period, REPEATED: tl.constexpr, BLOCK: tl.constexpr):
    """y = a + b, b repeated every `period` elements."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = i % period if REPEATED else i
    store_rounded(y_ptr + i, load_wide(a_ptr + i, i < n) + load_wide(b_ptr + at, i < n), i < n)


@triton.jit
def _scale(x_ptr, y_ptr, n, factor: tl.float32, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    store_rounded(y_ptr + i, load_wide(x_ptr + i, i < n) * factor, i < n)


@triton.jit
def _kept(x_ptr, y_ptr, i, word, n, threshold, factor: tl.float32):
    """One of four: x times factor where its word is at least the threshold, else 0."""
    keep = (word.to(tl.int64) & 0xFFFFFFFF) >= threshold
    x = load_wide(x_ptr + i, i < n)
    store_rounded(y_ptr + i, tl.where(keep, x * factor, x * 0.0), i < n)


@triton.jit
def _dropout(x_ptr, key_ptr, y_ptr, n, threshold, factor: tl.float32, BLOCK: tl.constexpr):
    """Element 4 b + j gets word j of the Philox block b; key = (seed, stream)."""
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    seed, stream = tl.load(key_ptr), tl.load(key_ptr + 1)
    zero = block * 0
    w0, w1, w2, w3 = tl.philox_impl(
        (block & 0xFFFFFFFF).to(tl.uint32),
        ((block >> 32) & 0xFFFFFFFF).to(tl.uint32),
        ((zero + stream) & 0xFFFFFFFF).to(tl.uint32),
        (((zero + stream) >> 32) & 0xFFFFFFFF).to(tl.uint32),
        ((zero + seed) & 0xFFFFFFFF).to(tl.uint32),
        (((zero + seed) >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    i = 4 * block
    _kept(x_ptr, y_ptr, i, w0, n, threshold, factor)
    _kept(x_ptr, y_ptr, i + 1, w1, n, threshold, factor)
    _kept(x_ptr, y_ptr, i + 2, w2, n, threshold, factor)
    _kept(x_ptr, y_ptr, i + 3, w3, n, threshold, factor)


_launch_add, _launch_scale, _launch_dropout = launcher(_add), launcher(_scale), launcher(_dropout)


@declared.add.triton
def add(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    y, n, period = torch.empty_like(a), a.numel(), b.numel()
    if n:
        _launch_add(triton.cdiv(n, BLOCK), 1, 1, a, b, y, n, period, period != n, BLOCK)
    return y


@declared.scale.triton
def scale(x: Tensor, factor: float) -> Tensor:
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    if n:
        _launch_scale(triton.cdiv(n, BLOCK), 1, 1, x, y, n, factor, BLOCK)
    return y


@declared.dropout.triton
def dropout(x: Tensor, key: Tensor, p: float) -> Tensor:
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    if n:
        grid = triton.cdiv(n, BLOCK)
        _launch_dropout(grid, 1, 1, x, key.contiguous(), y, n, round(p * 2**32), 1.0 / (1.0 - p), BLOCK // 4)
    return y
