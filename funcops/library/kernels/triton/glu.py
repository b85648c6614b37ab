"""Gated linear units, one program per row. The clamped kind is one more kind of gate, with a limit, alpha and offset."""

from __future__ import annotations

from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import glu as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.activation import activate, derivative, saturated, sigmoid
from funcops.library.kernels.triton.common import block_of, flat_rows, load_wide, store_rounded, warps_of

BLOCK = 2048


@triton.jit
def _parts(gate, linear, limit: tl.float32, alpha: tl.float32, offset: tl.float32, KIND: tl.constexpr):
    """Return f(gate), f'(gate), the factor of f(gate), and that factor's derivative (0 where it was clamped)."""
    if KIND == "clamped_swiglu":
        g = tl.where(gate > limit, limit, gate)
        clipped = tl.where(linear > limit, limit, tl.where(linear < -limit, -limit, linear))
        s = sigmoid(alpha * g)
        d = tl.where(gate > limit, 0.0, s * (1.0 + saturated(alpha * g) * (1.0 - s)))
        return g * s, d, clipped + offset, tl.where(tl.abs(linear) > limit, 0.0, 1.0)
    else:
        return activate(gate, KIND), derivative(gate, KIND), linear, tl.full(linear.shape, 1.0, linear.dtype)


gate_parts = _parts  # for products with a gated unit in their epilogue


@triton.jit
def _forward(
    gate_ptr, linear_ptr, scales_ptr, y_ptr, width, stride, limit: tl.float32, alpha: tl.float32, offset: tl.float32,
    KIND: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):
    """`stride`: the distance between rows of gate and linear, twice the width if they are the halves of one tensor."""
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * stride
    linear_ptr += row * stride
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < width
        active, _, linear, _ = _parts(
            load_wide(gate_ptr + i, inside), load_wide(linear_ptr + i, inside), limit, alpha, offset, KIND
        )
        y = active * linear
        if SCALED:
            y = y * load_wide(scales_ptr + row, True)
        store_rounded(y_ptr + row * width + i, y, inside)


@triton.jit
def _backward(
    dy_ptr, gate_ptr, linear_ptr, scales_ptr, dgate_ptr, dlinear_ptr, dscales_ptr, width, stride,
    limit: tl.float32, alpha: tl.float32, offset: tl.float32, KIND: tl.constexpr, SCALED: tl.constexpr, DX: tl.constexpr,
    DSCALES: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):
    """With AGAIN, write y over dy."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        inside = i < width
        d = load_wide(dy_ptr + row * width + i, inside)
        gate, half = load_wide(gate_ptr + row * stride + i, inside), load_wide(linear_ptr + row * stride + i, inside)
        active, d_active, linear, d_linear = _parts(gate, half, limit, alpha, offset, KIND)
        if DSCALES:
            total += d * active * linear
        if DX:
            if SCALED:
                d = d * load_wide(scales_ptr + row, True)
            store_rounded(dgate_ptr + row * stride + i, d * linear * d_active, inside)
            store_rounded(dlinear_ptr + row * stride + i, d * active * d_linear, inside)
        if AGAIN:
            store_rounded(dy_ptr + row * width + i, active * linear, inside)
    if DSCALES:
        store_rounded(dscales_ptr + row, tl.sum(total, 0), True)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)


def _halves(x: Optional[Tensor], first: bool) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """The gate and linear halves of contiguous rows."""
    if x is None:
        return None, None
    a, b = x.chunk(2, -1)  # an index takes longer
    return (a, b) if first else (b, a)


def gated(x: Tensor, scales: Optional[Tensor], kind: str, first: bool, *constants: float) -> Tensor:
    x, rows, width = flat_rows(x)
    width //= 2
    y = x.new_empty((*x.shape[:-1], width))
    scales = None if scales is None else scales.contiguous()
    if y.numel():
        block = block_of(width, BLOCK)
        _launch_forward(
            rows, 1, 1, *_halves(x, first), scales, y, width, 2 * width, *constants, kind, scales is not None, block,
            num_warps=warps_of(block),
        )
    return y


def gate_gradients(
    dy: Tensor,
    x: Tensor,
    scales: Optional[Tensor],
    kind: str,
    first: bool,
    constants: Any,
    dx: bool,
    dscales: bool,
    recompute: bool = False,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    x, rows, width = flat_rows(x)
    width //= 2
    dy, scales = dy.contiguous(), None if scales is None else scales.contiguous()
    d_x = torch.empty_like(x) if dx else None
    d_scales = (x if scales is None else scales).new_zeros(x.shape[:-1]) if dscales else None
    if rows and width and (dx or dscales):
        block = block_of(width, BLOCK)
        _launch_backward(
            rows, 1, 1, dy, *_halves(x, first), scales, *_halves(d_x, first), d_scales, width, 2 * width, *constants, kind,
            scales is not None, dx, dscales, recompute, block, num_warps=warps_of(block),
        )
    return d_x, d_scales


@launched(declared.glu_fwd)
@declared.glu_fwd.triton
def glu_fwd(x: Tensor, scales: Optional[Tensor], kind: str, first: bool) -> Tensor:
    return gated(x, scales, declared.GATES[kind], first, 0.0, 0.0, 0.0)


@launched(declared.glu_bwd)
@declared.glu_bwd.triton
def glu_bwd(
    dy: Tensor, x: Tensor, scales: Optional[Tensor], kind: str, first: bool, dx: bool, dscales: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    return gate_gradients(dy, x, scales, declared.GATES[kind], first, (0.0, 0.0, 0.0), dx, dscales)


@declared.glu_bwd_recompute.triton
def glu_bwd_recompute(dy: Tensor, x: Tensor, kind: str, first: bool) -> Tensor:
    dx, _ = gate_gradients(dy, x, None, declared.GATES[kind], first, (0.0, 0.0, 0.0), True, False, recompute=True)
    assert dx is not None
    return dx


def _even_rows(t: Tensor) -> tuple[Tensor, int, int]:
    """Contiguous `t`, its number of rows and their length, with sixteen rows taken for one if that makes the length a multiple of
    16: the kernels are elementwise."""
    t, rows, width = flat_rows(t)
    return (t, rows // 16, 16 * width) if width % 16 and rows % 16 == 0 else (t, rows, width)


@launched(declared.glu_pair_fwd)
@declared.glu_pair_fwd.triton
def glu_pair_fwd(gate: Tensor, linear: Tensor, kind: str) -> Tensor:
    gate, rows, width = _even_rows(gate)
    y, block = torch.empty_like(gate), block_of(width, BLOCK)
    if y.numel():
        _launch_forward(
            rows, 1, 1, gate, linear.contiguous(), None, y, width, width, 0.0, 0.0, 0.0, declared.GATES[kind], False, block,
            num_warps=warps_of(block),
        )
    return y


def _pair_bwd(dy: Tensor, gate: Tensor, linear: Tensor, kind: str, recompute: bool) -> tuple[Tensor, Tensor]:
    gate, rows, width = _even_rows(gate)
    d_gate, d_linear, block = torch.empty_like(gate), torch.empty_like(gate), block_of(width, BLOCK)
    if gate.numel():
        _launch_backward(
            rows, 1, 1, dy.contiguous(), gate, linear.contiguous(), None, d_gate, d_linear, None, width, width, 0.0, 0.0, 0.0,
            declared.GATES[kind], False, True, False, recompute, block, num_warps=warps_of(block),
        )
    return d_gate, d_linear


@launched(declared.glu_pair_bwd)
@declared.glu_pair_bwd.triton
def glu_pair_bwd(dy: Tensor, gate: Tensor, linear: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return _pair_bwd(dy, gate, linear, kind, False)


@declared.glu_pair_bwd_recompute.triton
def glu_pair_bwd_recompute(dy: Tensor, gate: Tensor, linear: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    return _pair_bwd(dy, gate, linear, kind, True)


@launched(declared.clamped_swiglu_fwd)
@declared.clamped_swiglu_fwd.triton
def clamped_swiglu_fwd(x: Tensor, scales: Optional[Tensor], first: bool, limit: float, alpha: float, offset: float) -> Tensor:
    return gated(x, scales, "clamped_swiglu", first, limit, alpha, offset)


@launched(declared.clamped_swiglu_bwd)
@declared.clamped_swiglu_bwd.triton
def clamped_swiglu_bwd(
    dy: Tensor,
    x: Tensor,
    scales: Optional[Tensor],
    first: bool,
    limit: float,
    alpha: float,
    offset: float,
    dx: bool,
    dscales: bool,
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    return gate_gradients(dy, x, scales, "clamped_swiglu", first, (limit, alpha, offset), dx, dscales)
