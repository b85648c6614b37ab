"""Gated linear units. x, dx: [*, 2H], y, dy: [*, H], scales, dscales: [*] or absent.

y = f(gate) * linear * scale, where gate and linear are the halves of x.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.backend import kernel, wide
from funcops.kernels.activation import ACTIVATIONS, Activation

GATES = {
    "glu": "sigmoid",
    "reglu": "relu",
    "squared_reglu": "squared_relu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "quick_geglu": "quick_gelu",
    "swiglu": "silu",
}


@kernel()
def glu_pair_fwd(gate: Tensor, linear: Tensor, kind: str) -> Tensor:
    """y = f(gate) * linear, of two tensors [*, H]."""
    return ACTIVATIONS[GATES[kind]].forward(gate).mul_(linear)


@kernel()
def glu_pair_bwd(dy: Tensor, gate: Tensor, linear: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """d gate and d linear, as in `glu_bwd`."""
    f = ACTIVATIONS[GATES[kind]]
    active = f.forward(gate)
    return f.backward(dy * linear, gate, active), active.mul_(dy) if not f.reads_y else active * dy


AT_ONCE = 1 << 16  # elements for which there is one more buffer than dx


def _halves(x: Tensor, first: bool) -> tuple[Tensor, Tensor]:
    a, b = torch.unsafe_chunk(x, 2, -1)
    return (a, b) if first else (b, a)


@kernel()
def glu_fwd(x: Tensor, scales: Optional[Tensor], kind: str, first: bool) -> Tensor:
    """y = f(gate) * linear (* scales per row)."""
    gate, linear = _halves(x, first)
    y = ACTIVATIONS[GATES[kind]].forward(gate).mul_(linear)
    return y if scales is None else y * scales.unsqueeze(-1)


@kernel()
def glu_bwd(
    dy: Tensor, x: Tensor, scales: Optional[Tensor], kind: str, first: bool, dx: bool, dscales: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """d gate = dy scale linear f'(gate), d linear = dy scale f(gate); dscales = sum over H of dy f(gate) linear."""
    gate, linear = _halves(x, first)
    f = ACTIVATIONS[GATES[kind]]
    d_scales = _row_sums(dy, f.forward(gate).mul_(linear)) if dscales else None
    if not dx:
        return None, d_scales
    d = dy if scales is None else dy * scales.unsqueeze(-1)
    if torch.compiler.is_compiling():
        return _traced(d, gate, linear, f.forward(gate), f, first), d_scales
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_gate, d_linear = _halves(d_x, first)
    active = f.forward(gate, out=d_linear)  # each half of d_x is the only scratch of its own gradient
    f.backward(torch.mul(d, linear, out=d_gate), gate, active, out=d_gate)
    d_linear.mul_(d)
    return d_x, d_scales


def _traced(d: Tensor, gate: Tensor, linear: Tensor, active: Tensor, f: Activation, first: bool) -> Tensor:
    """dx as a compiler wants it, which makes one kernel of it and saves memory by itself."""
    parts = (f.backward(d * linear, gate, active), d * active)
    return torch.cat(parts if first else parts[::-1], -1)


@kernel(mutates=("dy",))
def glu_bwd_again(dy: Tensor, x: Tensor, kind: str, first: bool) -> Tensor:
    """dx; y is written over dy, which is contiguous: f(gate) is computed once for both."""
    f = ACTIVATIONS[GATES[kind]]
    gate, linear = _halves(x, first)
    if torch.compiler.is_compiling():
        active = f.forward(gate)
        d_x = _traced(dy, gate, linear, active, f, first)
        dy.copy_(active * linear)
        return d_x
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_gate, d_linear = _halves(d_x, first)
    active = f.forward(gate, out=d_linear)
    f.backward(torch.mul(dy, linear, out=d_gate), gate, active, out=d_gate)
    rows = max(1, AT_ONCE // max(1, dy.shape[-1]))
    parts = (t.reshape(-1, t.shape[-1]).split(rows) for t in (dy, linear, d_linear))
    held = dy.new_empty((rows, dy.shape[-1]))
    for d, linear, active in zip(*parts, strict=True):  # dy becomes y, and active d_linear
        d_active = torch.mul(d, active, out=held[: d.shape[0]])
        torch.mul(active, linear, out=d)
        active.copy_(d_active)
    return d_x


@kernel()
def clamped_swiglu_fwd(x: Tensor, scales: Optional[Tensor], first: bool, limit: float, alpha: float, offset: float) -> Tensor:
    """g = min(gate, limit), l = clamp(linear, ±limit): y = g sigmoid(alpha g) (l + offset) (* scales)."""
    gate, linear = _halves(x.to(wide(x.dtype)), first)
    gate = gate.clamp(max=limit)
    y = torch.sigmoid(gate * alpha).mul_(gate).mul_(linear.clamp(-limit, limit).add_(offset))
    return (y if scales is None else y.mul_(scales.unsqueeze(-1))).to(x.dtype)


@kernel()
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
    """(g sigmoid(alpha g))' = silu'(alpha g). The gradient is zero where a half was clamped."""
    dtype = wide(x.dtype)
    raw_gate, raw_linear = _halves(x.to(dtype), first)
    gate, linear = raw_gate.clamp(max=limit), raw_linear.clamp(-limit, limit).add_(offset)
    scaled_gate = gate * alpha
    active = torch.sigmoid(scaled_gate).mul_(gate)
    d = dy.to(dtype)
    d_scales = (active * linear).mul_(d).sum(-1).to(x.dtype) if dscales else None
    if not dx:
        return None, d_scales
    if scales is not None:
        d = d * scales.unsqueeze(-1)
    d_gate = torch.ops.aten.silu_backward.default(linear.mul_(d), scaled_gate).mul_(raw_gate <= limit).to(x.dtype)
    d_linear = active.mul_(d).mul_(raw_linear.abs() <= limit).to(x.dtype)
    return torch.cat((d_gate, d_linear) if first else (d_linear, d_gate), -1), d_scales


def _row_sums(dy: Tensor, y: Tensor) -> Tensor:
    dtype = wide(dy.dtype)
    return (dy.to(dtype) * y.to(dtype)).sum(-1).to(dy.dtype)
