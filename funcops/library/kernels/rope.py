"""Rotary position embedding. x: [*, T, N, D]; table: [T, 1, 3R] or [*, T, 1, 3R].

With the partner of each number in a pair (x_b for x_a, x_a for x_b), a rotation is x cos + partner ∓ sin, and pairs need not be
split. So the table holds, for each of the R rotated numbers, its cos, its signed sin, and that sin negated. An implementation may
read only the entries of a pair's first number: the second's are the same, with the opposite sign.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide


def powers(theta: float, size: int, dtype: torch.dtype, device: Any) -> Tensor:
    """theta^(2i / size): [size / 2]."""
    return torch.pow(theta, torch.arange(0, size, 2, dtype=dtype, device=device) / size)


def frequencies(theta: float, size: int, dtype: torch.dtype, device: Any) -> Tensor:
    """theta^(-2i / size): [size / 2], as a quotient, which gives Hugging Face's bits."""
    return powers(theta, size, dtype, device).reciprocal()


@kernel(library=True, rows="each")
def rope_table(angle: Tensor, factor: float, interleaved: bool) -> Tensor:
    """The table for pairs' angles [*, T, R/2]: (cos, cos), (-sin, sin), (sin, -sin), in the order of x's pairs, times `factor`."""
    cos, sin = angle.cos(), angle.sin()
    if factor != 1.0:
        cos, sin = cos.mul_(factor), sin.mul_(factor)
    minus = -sin
    parts = cos, cos, minus, sin, sin, minus
    if interleaved:
        pairs = torch.stack(parts, -1).unflatten(-1, (3, 2))  # of each: the pair of its cos, its sin and that negated
        return pairs.movedim(-2, -3).flatten(-3).unsqueeze(-2)
    return torch.cat(parts, -1).unsqueeze(-2)


@kernel(rows="each")
def rope_apply(x: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate the first R of D by the angles of the table, backwards if `inverse`; a factor in the table multiplies both ways."""
    dtype, size = wide(x.dtype), table.shape[-1] // 3
    cos, sin, minus_sin = torch.unsafe_chunk(table, 3, -1)
    t = x if x.dtype is dtype else x.to(dtype)
    whole = size == t.shape[-1]
    turning = t if whole else t[..., :size]
    y = _partners(turning, size, interleaved).mul_(minus_sin if inverse else sin).addcmul_(turning, cos)
    y = y if whole else torch.cat((y, t[..., size:]), -1)
    return y if y.dtype is x.dtype else y.to(x.dtype)


@kernel()
def rope_apply_pair(q: Tensor, k: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> tuple[Tensor, Tensor]:
    """`rope_apply` of q and k, whose heads have one size and the same positions: one launch."""
    return rope_apply(q, table, interleaved, inverse), rope_apply(k, table, interleaved, inverse)


def _partners(t: Tensor, size: int, interleaved: bool) -> Tensor:
    """A new tensor with the two numbers of every pair exchanged."""
    if interleaved:
        return t.unflatten(-1, (size // 2, 2)).flip(-1).flatten(-2)
    return t.roll(size // 2, -1)
