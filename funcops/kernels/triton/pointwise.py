"""Sum, scaling, and dropout, which draws the very bits that `funcops.random.bits` draws."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import pointwise as declared
from funcops.kernels.triton.common import cdiv, contiguous, load_wide, store_rounded

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
def _words(key_ptr, BLOCK: tl.constexpr):
    """The random words of 4 BLOCK elements: element 4 b + j gets word j of the Philox block b; key = (seed, stream)."""
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
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    return tl.reshape(words, [4 * BLOCK]).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _dropout(
    x_ptr, bias_ptr, residual_ptr, key_ptr, y_ptr, n, width, threshold, factor: tl.float32, BIAS: tl.constexpr,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x + bias, times factor where its word is at least the threshold, else 0; then + residual."""
    keep = _words(key_ptr, BLOCK) >= threshold
    i = tl.program_id(0).to(tl.int64) * (4 * BLOCK) + tl.arange(0, 4 * BLOCK)
    x = load_wide(x_ptr + i, i < n)
    if BIAS:
        x += load_wide(bias_ptr + i % width, i < n)
    y = tl.where(keep, x * factor, x * 0.0)
    if ADD:
        y += load_wide(residual_ptr + i, i < n)
    store_rounded(y_ptr + i, y, i < n)


_launch_add, _launch_scale, _launch_dropout = launcher(_add), launcher(_scale), launcher(_dropout)


@declared.add.triton
def add(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    y, n, period = torch.empty_like(a), a.numel(), b.numel()
    if n:
        _launch_add(cdiv(n, BLOCK), 1, 1, a, b, y, n, period, period != n, BLOCK)
    return y


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


def _dropped(x: Tensor, b: Optional[Tensor], residual: Optional[Tensor], key: Tensor, p: float) -> Tensor:
    x, b, residual = x.contiguous(), contiguous(b), contiguous(residual)
    y, n = torch.empty_like(x), x.numel()
    if n:
        _launch_dropout(
            cdiv(n, BLOCK), 1, 1, x, b, residual, key.contiguous(), y, n, x.shape[-1] if x.dim() else 1,
            round(p * 2**32), 1.0 / (1.0 - p), b is not None, residual is not None, BLOCK // 4,
        )  # fmt: skip
    return y
