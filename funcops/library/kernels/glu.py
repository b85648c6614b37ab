"""Gated linear units. x, dx: [*, 2H], y, dy: [*, H], scales, dscales: [*] or absent, of x's dtype or the wide one.

y = f(gate) * linear * scale, where gate and linear are the halves of x.
"""

from __future__ import annotations

import math
from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide
from funcops.library.kernels.activation import ACTIVATIONS, Activation, saturated_

GATES = {
    "glu": "sigmoid",
    "reglu": "relu",
    "squared_reglu": "squared_relu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "quick_geglu": "quick_gelu",
    "swiglu": "silu",
}


@kernel(rows="pinned")
def glu_pair_fwd(gate: Tensor, linear: Tensor, kind: str) -> Tensor:
    """y = f(gate) * linear, from two tensors [*, H]."""
    return ACTIVATIONS[GATES[kind]].forward(gate).mul_(linear)


@kernel(rows="pinned")
def glu_pair_bwd(dy: Tensor, gate: Tensor, linear: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """d gate and d linear, see `glu_bwd`."""
    f = ACTIVATIONS[GATES[kind]]
    active = f.forward(gate)
    return f.backward(dy * linear, gate, active), active.mul_(dy) if not f.reads_y else active * dy


@kernel(mutates=("dy",))
def glu_pair_bwd_recompute(dy: Tensor, gate: Tensor, linear: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return d gate and d linear, and write y over dy, which is contiguous: f(gate) is computed once for all."""
    f = ACTIVATIONS[GATES[kind]]
    active, d = f.forward(gate), dy * linear
    found = f.backward(d, gate, active), torch.mul(active, dy, out=d)
    torch.mul(active, linear, out=dy)
    return found


@glu_pair_bwd_recompute.plain
def plain_glu_pair_bwd_recompute(dy: Tensor, gate: Tensor, linear: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    f = ACTIVATIONS[GATES[kind]]
    active = f.forward(gate)
    return dy * f.backward(torch.ones_like(gate), gate, active) * linear, dy * active, active * linear


VECTORS = 64  # a part has a multiple of so many elements, as torch's loops compute their remainder with another exp
AT_ONCE = 1 << 15  # elements of dy per thread for which there are buffers beside dx
FEW = 1 << 12  # elements of dy below which the number of operators counts, above it the passes over memory


def halves(x: Tensor, first: bool) -> tuple[Tensor, Tensor]:
    a, b = torch.unsafe_chunk(x, 2, -1)
    return (a, b) if first else (b, a)


@kernel(rows="pinned")
def glu_fwd(x: Tensor, scales: Optional[Tensor], kind: str, first: bool) -> Tensor:
    """y = f(gate) * linear (* scales per row)."""
    gate, linear = halves(x, first)
    y = ACTIVATIONS[GATES[kind]].forward(gate).mul_(linear)
    return y if scales is None else (y * scales.unsqueeze(-1)).to(x.dtype)  # scales may be wide


@kernel(rows="pinned")
def glu_bwd(
    dy: Tensor, x: Tensor, scales: Optional[Tensor], kind: str, first: bool, dx: bool, dscales: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """d gate = dy scale linear f'(gate), d linear = dy scale f(gate); dscales = sum over H of dy f(gate) linear."""
    f, d_scales = ACTIVATIONS[GATES[kind]], None
    if dscales:
        gate, linear = halves(x, first)
        d_scales = row_sums(dy, f.forward(gate).mul_(linear), scales)
    if not dx:
        return None, d_scales
    return _dx(dy if scales is None else (dy * scales.unsqueeze(-1)).to(dy.dtype), x, f, first, False), d_scales


@glu_bwd.plain
def plain_glu_bwd(
    dy: Tensor, x: Tensor, scales: Optional[Tensor], kind: str, first: bool, dx: bool, dscales: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the three factors of y = f(gate) * linear * scale."""
    gate, linear = halves(x, first)
    f, scale = ACTIVATIONS[GATES[kind]], 1.0 if scales is None else scales.unsqueeze(-1)
    active = f.forward(gate)
    slope = f.backward(torch.ones_like(gate), gate, active)
    d_gate, d_linear, d_scales = dy * slope * linear * scale, dy * active * scale, (dy * active * linear).sum(-1)
    return torch.cat((d_gate, d_linear) if first else (d_linear, d_gate), -1), d_scales


@kernel(mutates=("dy",))
def glu_bwd_recompute(dy: Tensor, x: Tensor, kind: str, first: bool) -> Tensor:
    """Return dx, and write y over dy, which is contiguous: f(gate) is computed once for both."""
    return _dx(dy, x, ACTIVATIONS[GATES[kind]], first, True)


@glu_bwd_recompute.plain
def plain_glu_bwd_recompute(dy: Tensor, x: Tensor, kind: str, first: bool) -> tuple[Tensor, Tensor]:
    gate, linear = halves(x, first)
    return plain_glu_bwd(dy, x, None, kind, first, True, False)[0], ACTIVATIONS[GATES[kind]].forward(gate) * linear


def _dx(dy: Tensor, x: Tensor, f: Activation, first: bool, recompute: bool) -> Tensor:
    """Return dx as a new tensor; if `recompute`, write y over dy. More than AT_ONCE elements are computed in parts of AT_ONCE per
    thread, so that buffers are small and stay in the cache; a compiler makes one kernel of it, which needs no parts. All ways give
    the same bits."""
    if torch.compiler.is_compiling() or dy.numel() < FEW:
        return dx_joined(dy, x, f, first, recompute)
    d_x, width = torch.empty_like(x, memory_format=torch.contiguous_format), dy.shape[-1]
    if dy.numel() <= AT_ONCE:
        _write_dx(d_x, dy, x, f, first, recompute)
        return d_x
    whole = VECTORS // math.gcd(width, VECTORS)
    rows = max(1, AT_ONCE * torch.get_num_threads() // width // whole) * whole
    parts = (t.reshape(-1, t.shape[-1]).split(rows) for t in (d_x, dy, x))
    for found, d_y, part in zip(*parts, strict=True):
        _write_dx(found, d_y, part, f, first, recompute)
    return d_x


def dx_joined(dy: Tensor, x: Tensor, f: Activation, first: bool, recompute: bool) -> Tensor:
    """`_dx` without writes to parts of a tensor, which a compiler does not see."""
    gate, linear = halves(x, first)
    active = f.forward(gate)
    parts = f.backward(dy * linear, gate, active), dy * active
    if recompute:
        dy.copy_(active.mul_(linear))
    return torch.cat(parts if first else parts[::-1], -1)


def _write_dx(d_x: Tensor, dy: Tensor, x: Tensor, f: Activation, first: bool, recompute: bool) -> None:
    gate, linear = halves(x, first)
    d_gate, d_linear = halves(d_x, first)
    active = f.forward(gate)
    torch.mul(dy, active, out=d_linear)
    d_gate.copy_(f.backward(dy * linear, gate, active))
    if recompute:
        dy.copy_(active.mul_(linear))


@kernel(rows="pinned")
def clamped_swiglu_fwd(x: Tensor, scales: Optional[Tensor], first: bool, limit: float, alpha: float, offset: float) -> Tensor:
    """g = min(gate, limit), l = clamp(linear, ±limit): y = g sigmoid(alpha g) (l + offset) (* scales)."""
    gate, linear = halves(x.to(wide(x.dtype)), first)
    gate = gate.clamp(max=limit)
    y = torch.sigmoid(gate * alpha).mul_(gate).mul_(linear.clamp(-limit, limit).add_(offset))
    return (y if scales is None else y.mul_(scales.unsqueeze(-1))).to(x.dtype)


@clamped_swiglu_fwd.plain
def plain_clamped_swiglu_fwd(x: Tensor, scales: Optional[Tensor], first: bool, limit: float, alpha: float, offset: float) -> Tensor:
    gate, linear = halves(x, first)
    g, l = gate.clamp(max=limit), linear.clamp(-limit, limit)  # noqa: E741 (as in the math)
    return g / (1 + (-alpha * g).exp()) * (l + offset) * (1.0 if scales is None else scales.unsqueeze(-1))


@kernel(rows="pinned")
def clamped_swiglu_bwd(
    dy: Tensor, x: Tensor, scales: Optional[Tensor], first: bool, limit: float, alpha: float, offset: float, dx: bool, dscales: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """(g sigmoid(alpha g))' = silu'(alpha g). The gradient is zero where a half was clamped."""
    dtype = wide(x.dtype)
    raw_gate, raw_linear = halves(x.to(dtype), first)
    gate, linear = raw_gate.clamp(max=limit), raw_linear.clamp(-limit, limit).add_(offset)
    active = (gate * alpha).sigmoid_().mul_(gate)
    d = dy.to(dtype)
    d_scales = (active * linear).mul_(d).sum(-1).to((x if scales is None else scales).dtype) if dscales else None
    if not dx:
        return None, d_scales
    if scales is not None:
        d = d * scales.unsqueeze(-1)
    d_gate = torch.ops.aten.silu_backward.default(linear.mul_(d), saturated_(gate.mul_(alpha))).mul_(raw_gate <= limit).to(x.dtype)
    d_linear = active.mul_(d).mul_(raw_linear.abs() <= limit).to(x.dtype)
    return torch.cat((d_gate, d_linear) if first else (d_linear, d_gate), -1), d_scales


@clamped_swiglu_bwd.plain
def plain_clamped_swiglu_bwd(
    dy: Tensor, x: Tensor, scales: Optional[Tensor], first: bool, limit: float, alpha: float, offset: float, dx: bool, dscales: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the halves and the scale in y = g s (l + offset) scale with s = sigmoid(alpha g)."""
    gate, linear = halves(x, first)
    g, l = gate.clamp(max=limit), linear.clamp(-limit, limit)  # noqa: E741 (as in the math)
    s, scale = 1 / (1 + (-alpha * g).exp()), 1.0 if scales is None else scales.unsqueeze(-1)
    along_g = s  # term 1: through g itself
    along_s = g * alpha * s * (1 - s)  # term 2: through s
    d_gate = dy * scale * (l + offset) * (along_g + along_s) * (gate <= limit)
    d_linear = dy * scale * g * s * (linear.abs() <= limit)
    return torch.cat((d_gate, d_linear) if first else (d_linear, d_gate), -1), (dy * g * s * (l + offset)).sum(-1)


def row_sums(dy: Tensor, y: Tensor, like: Optional[Tensor]) -> Tensor:
    dtype = wide(dy.dtype)
    return (dy.to(dtype) * y.to(dtype)).sum(-1).to((dy if like is None else like).dtype)
