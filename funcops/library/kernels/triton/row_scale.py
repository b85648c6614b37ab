"""Rows times one number each, one program per row."""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import row_scale as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.activation import sigmoid as sigmoid_of
from funcops.library.kernels.triton.common import block_of, contiguous, flat_rows, load_wide, store_rounded, warps_of

BLOCK = 4096


@triton.jit
def _forward(x_ptr, gate_ptr, y_ptr, width, SIGMOID: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    s = load_wide(gate_ptr + row, True)
    if SIGMOID:
        s = sigmoid_of(s)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        store_rounded(y_ptr + row * width + i, load_wide(x_ptr + row * width + i, i < width) * s, i < width)


@triton.jit
def _backward(
    dy_ptr, x_ptr, gate_ptr, dx_ptr, dgate_ptr, width, SIGMOID: tl.constexpr, DX: tl.constexpr, DGATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    s = load_wide(gate_ptr + row, True)
    if SIGMOID:
        s = sigmoid_of(s)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        d = load_wide(dy_ptr + row * width + i, i < width)
        if DGATE:
            total += d * load_wide(x_ptr + row * width + i, i < width)
        if DX:
            store_rounded(dx_ptr + row * width + i, d * s, i < width)
    if DGATE:
        dgate = tl.sum(total, 0)
        if SIGMOID:
            dgate = dgate * (s * (1.0 - s))
        store_rounded(dgate_ptr + row, dgate, True)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)


@launched(declared.row_scale_fwd)
@declared.row_scale_fwd.triton
def row_scale_fwd(x: Tensor, gate: Tensor, sigmoid: bool) -> Tensor:
    x, rows, width = flat_rows(x)
    y, block = torch.empty_like(x), block_of(width, BLOCK)
    if y.numel():
        _launch_forward(rows, 1, 1, x, gate.contiguous(), y, width, sigmoid, block, num_warps=warps_of(block))
    return y


@launched(declared.row_scale_bwd)
@declared.row_scale_bwd.triton
def row_scale_bwd(
    dy: Tensor, x: Optional[Tensor], gate: Tensor, sigmoid: bool, dx: bool, dgate: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    dy, rows, width = flat_rows(dy)
    d_x, d_gate = torch.empty_like(dy) if dx else None, gate.new_zeros((*dy.shape[:-1], 1)) if dgate else None
    if dy.numel() and (dx or dgate):
        block = block_of(width, BLOCK)
        _launch_backward(
            rows, 1, 1, dy, contiguous(x), gate.contiguous(), d_x, d_gate, width, sigmoid, dx, dgate, block,
            num_warps=warps_of(block),
        )
    return d_x, d_gate
