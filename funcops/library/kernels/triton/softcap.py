"""Soft cap: one read, one write; the backward reads dy and x."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import softcap as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.activation import tanh
from funcops.library.kernels.triton.common import cdiv, load_wide, store_rounded

BLOCK = 1024


@triton.jit
def _forward(x_ptr, y_ptr, n, cap: tl.float32, inverse: tl.float32, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    store_rounded(y_ptr + i, cap * tanh(load_wide(x_ptr + i, i < n) * inverse), i < n)


@triton.jit
def _backward(dy_ptr, x_ptr, dx_ptr, n, inverse: tl.float32, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    t = tanh(load_wide(x_ptr + i, i < n) * inverse)
    store_rounded(dx_ptr + i, load_wide(dy_ptr + i, i < n) * (1.0 - t * t), i < n)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)


@launched(declared.softcap_fwd)
@declared.softcap_fwd.triton
def softcap_fwd(x: Tensor, cap: float) -> Tensor:
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    if n:
        _launch_forward(cdiv(n, BLOCK), 1, 1, x, y, n, cap, 1.0 / cap, BLOCK)
    return y


@launched(declared.softcap_bwd)
@declared.softcap_bwd.triton
def softcap_bwd(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    x, dy = x.contiguous(), dy.contiguous()
    dx, n = torch.empty_like(x), x.numel()
    if n:
        _launch_backward(cdiv(n, BLOCK), 1, 1, dy, x, dx, n, 1.0 / cap, BLOCK)
    return dx
