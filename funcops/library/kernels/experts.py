"""A gated unit of each expert, between two grouped products (`kernels.grouped`). T tokens, K choices each, N = T K rows
sorted by expert: row n belongs to token order[n] // K, and its weight s_n is weights.flat[order[n]].

    z = x[token] up_e^T + bias_e        a = f(g) l of z = (g, l)        scaled = s a
    da = dy[token] down_e      dz = s (da l f'(g), da f(g))     ds = rowsum(da a)

With `before` the weight multiplies z instead:

    scaled = f(g) l of s z = (g, l)        d(s z) = (da l f'(g), da f(g))        dz = s d(s z)        ds = rowsum(d(s z) z)

x, dy: [T, H]; up: [E, 2I, H], gate rows first; down: [E, H, I]; weights: [T, K], of x's dtype or the wide one; z, dz: [N, 2I];
order: [N], offsets: [E + 1]. kind: one of `funcops.library.kernels.glu`, or "clamped_swiglu" with limit, alpha and offset.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide
from funcops.library.kernels import glu
from funcops.library.kernels.grouped import grouped_product
from funcops.library.kernels.linear import linear_fwd
from funcops.library.kernels.pins import own


@kernel(opaque=True, rows="each")
def experts_up(
    x: Tensor,
    up: Tensor,
    bias: Optional[Tensor],
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    kind: str,
    limit: float,
    alpha: float,
    offset: float,
    before: bool,
) -> tuple[Tensor, Tensor]:
    """Compute z [N, 2I] and scaled [N, I]; both are 0 from row offsets[E] on."""
    z = own(grouped_product)(x, up, bias, offsets, order, weights.shape[1], None, True)
    s, whole = _row_weights(weights, order).unsqueeze(-1), z.to(wide(z.dtype))
    a = _gated(whole * s, kind, limit, alpha, offset) if before else _gated(whole, kind, limit, alpha, offset).mul_(s)
    return z, a.to(z.dtype)


@experts_up.fake
def _experts_up_fake(x: Tensor, up: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    rows, width = order.shape[0], up.shape[1]
    return x.new_empty((rows, width)), x.new_empty((rows, width // 2))


def _experts_up_flops(up: Tensor, order: Tensor) -> int:
    return 2 * len(order) * up.shape[1] * up.shape[2]


experts_up.kernel.flops = _experts_up_flops


@kernel(opaque=True, rows="each")
def experts_dgrad(
    dy: Tensor,
    down: Optional[Tensor],
    z: Tensor,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    place: Optional[Tensor],
    bias: Optional[Tensor],
    indices: Optional[Tensor],
    kind: str,
    limit: float,
    alpha: float,
    offset: float,
    before: bool,
    dz: bool,
    dweights: bool,
    scaled: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Compute, each if requested: dz [N, 2I]; d weights [T, K], which is ds gathered by `place` [T, K], plus, with the second
    product's bias [E, H], dy[t] . bias_e for the expert e = indices[t, k] (e = E was dropped, and adds 0); and scaled [N, I],
    recomputed. dz and ds are 0 from row offsets[E] on. `scaled` alone does not need `down`."""
    s, whole = _row_weights(weights, order).unsqueeze(-1), z.to(wide(z.dtype))
    given = whole * s if before else whole
    a = _gated(given, kind, limit, alpha, offset) if scaled or (dweights and not before) else given
    da = ds = d_z = recomputed = None
    if down is not None:
        da = own(grouped_product)(dy, down, None, offsets, order, weights.shape[1], None, False).to(whole.dtype)
    if dweights and da is not None and not before:
        ds = (a * da).sum(-1)
    if scaled:
        recomputed = (a if before else a.mul_(s)).to(z.dtype)
    if da is not None and (dz or (dweights and before)):
        found = _of_gated(da if before else da.mul_(s), given, kind, limit, alpha, offset)
        if before and dweights:
            ds = (found * whole).sum(-1)
        d_z = (found.mul_(s) if before else found).to(z.dtype) if dz else None
    d_weights = None
    if ds is not None and place is not None:
        d_weights = _by_place(ds, place, dy, bias, indices).to(weights.dtype)
    return d_z, d_weights, recomputed


@experts_dgrad.fake
def _experts_dgrad_fake(
    dy: Tensor, z: Tensor, weights: Tensor, dz: bool, dweights: bool, scaled: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    rows, width = z.shape
    d_z, recomputed = dy.new_empty((rows, width)) if dz else None, dy.new_empty((rows, width // 2)) if scaled else None
    return d_z, weights.new_empty(weights.shape) if dweights else None, recomputed


def _experts_dgrad_flops(down: Optional[Tensor], order: Tensor) -> int:
    return 0 if down is None else 2 * len(order) * down.shape[1] * down.shape[2]


experts_dgrad.kernel.flops = _experts_dgrad_flops


def _by_place(ds: Tensor, place: Tensor, dy: Tensor, bias: Optional[Tensor], indices: Optional[Tensor]) -> Tensor:
    found = ds.index_select(0, place.reshape(-1)).view(place.shape)
    if bias is None or indices is None:
        return found
    each = own(linear_fwd)(dy.to(ds.dtype), bias.to(ds.dtype), None)  # [T, E]
    return found + torch.cat((each, each.new_zeros((len(each), 1))), 1).gather(1, indices.long())


def _row_weights(weights: Tensor, order: Tensor) -> Tensor:
    """The weight of each row, [N] in the wide dtype."""
    return weights.reshape(-1).index_select(0, order).to(wide(weights.dtype))


def _gated(z: Tensor, kind: str, limit: float, alpha: float, offset: float) -> Tensor:
    if kind == "clamped_swiglu":
        return own(glu.clamped_swiglu_fwd)(z, None, True, limit, alpha, offset)  # type: ignore[no-any-return]
    return own(glu.glu_fwd)(z, None, kind, True)  # type: ignore[no-any-return]


def _of_gated(da: Tensor, z: Tensor, kind: str, limit: float, alpha: float, offset: float) -> Tensor:
    """The gradient of z."""
    if kind == "clamped_swiglu":
        return own(glu.clamped_swiglu_bwd)(da, z, None, True, limit, alpha, offset, True, False)[0]  # type: ignore[no-any-return]
    return own(glu.glu_bwd)(da, z, None, kind, True, True, False)[0]  # type: ignore[no-any-return]
