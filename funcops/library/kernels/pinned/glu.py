"""Gated linear units in whole vectors: the halves of x in one row."""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
from torch import Tensor

from funcops.library.kernels.activation import ACTIVATIONS
from funcops.library.kernels.glu import (
    GATES,
    clamped_swiglu_bwd,
    clamped_swiglu_fwd,
    dx_joined,
    glu_bwd,
    glu_fwd,
    glu_pair_bwd,
    glu_pair_fwd,
    halves,
    row_sums,
)
from funcops.library.kernels.pins import Pins, in_pieces, in_vectors, pinned, vectorized


def _row(gate: Tensor, linear: Tensor) -> Tensor:
    """Vectors as the halves of one row."""
    return torch.cat((gate, linear)).unsqueeze(0)


def _like(flat: Tensor, like: Tensor) -> Tensor:
    return flat[: like.numel()].view(like.shape)


def _pinned_y(x: Tensor, scales: Optional[Tensor], first: bool, run: Any) -> Tensor:
    """y by `run(row)`, which takes the halves in one row, the gate first."""
    gate, linear = halves(x, first)
    y = _like(in_pieces(lambda g, t: run(_row(g, t)).flatten(), in_vectors(gate), in_vectors(linear)), gate)
    return y if scales is None else (y * scales.unsqueeze(-1)).to(x.dtype)


def _pinned_dx(dy: Tensor, x: Tensor, first: bool, run: Any) -> Tensor:
    """dx by `run(dy, row)`."""
    gate, linear = halves(x, first)

    def both(d: Tensor, g: Tensor, t: Tensor) -> Tensor:
        return run(d.unsqueeze(0), _row(g, t)).view(2, -1)  # type: ignore[no-any-return]

    parts = [_like(half, gate) for half in in_pieces(both, *[in_vectors(t) for t in (dy, gate, linear)])]
    return torch.cat(parts if first else parts[::-1], -1)


@pinned(glu_fwd)
def _pinned_fwd(pins: Pins, x: Tensor, scales: Optional[Tensor], kind: str, first: bool) -> Tensor:
    return _pinned_y(x, scales, first, lambda row: glu_fwd.kernel.torch_impl(row, None, kind, True))


@pinned(glu_bwd)
def _pinned_bwd(
    pins: Pins, dy: Tensor, x: Tensor, scales: Optional[Tensor], kind: str, first: bool, dx: bool, dscales: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    d_scales = row_sums(dy, _pinned_fwd(pins, x, None, kind, first), scales) if dscales else None
    if not dx:
        return None, d_scales
    d = dy if scales is None else (dy * scales.unsqueeze(-1)).to(dy.dtype)
    run = functools.partial(dx_joined, f=ACTIVATIONS[GATES[kind]], first=True, recompute=False)
    return _pinned_dx(d, x, first, run), d_scales


@pinned(glu_pair_fwd)
def _pinned_pair_fwd(pins: Pins, gate: Tensor, linear: Tensor, kind: str) -> Tensor:
    return vectorized(lambda g, t: glu_pair_fwd.kernel.torch_impl(g, t, kind), gate, linear)


@pinned(glu_pair_bwd)
def _pinned_pair_bwd(pins: Pins, dy: Tensor, gate: Tensor, linear: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    def both(d: Tensor, g: Tensor, t: Tensor) -> Tensor:
        return torch.stack(glu_pair_bwd.kernel.torch_impl(d, g, t, kind))

    found = in_pieces(both, *[in_vectors(t) for t in (dy, gate, linear)])
    return _like(found[0], gate), _like(found[1], gate)


@pinned(clamped_swiglu_fwd)
def _pinned_clamped_fwd(
    pins: Pins, x: Tensor, scales: Optional[Tensor], first: bool, limit: float, alpha: float, offset: float
) -> Tensor:
    how = True, limit, alpha, offset
    return _pinned_y(x, scales, first, lambda row: clamped_swiglu_fwd.kernel.torch_impl(row, None, *how))


@pinned(clamped_swiglu_bwd)
def _pinned_clamped_bwd(
    pins: Pins,
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
    how = limit, alpha, offset
    d_scales = row_sums(dy, _pinned_clamped_fwd(pins, x, None, first, *how), scales) if dscales else None
    if not dx:
        return None, d_scales
    d = dy if scales is None else dy * scales.unsqueeze(-1)
    run = clamped_swiglu_bwd.kernel.torch_impl
    return _pinned_dx(d, x, first, lambda d, row: run(d, row, None, True, *how, True, False)[0]), d_scales
