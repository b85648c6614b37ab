"""A gated unit of each expert, between two grouped products (`funcops.kernels.grouped`). T tokens, K choices each, N = T K rows
sorted by expert: row n belongs to token order[n] // K, and its weight s_n is weights.flat[order[n]].

    z = x[token] up_e^T + bias_e        a = f(g) l of z = (g, l)        scaled = s a
    da = dy[token] down_e      dz = s (da l f'(g), da f(g))     ds = rowsum(da a)

x, dy: [T, H]; up: [E, 2I, H], gate rows first; down: [E, H, I]; weights: [T, K], of x's dtype or the wide one; z, dz: [N, 2I];
order: [N], offsets: [E + 1]. kind: one of `funcops.kernels.glu`, or "clamped_swiglu" with limit, alpha and offset.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.backend import kernel, wide
from funcops.kernels import glu
from funcops.kernels.grouped import grouped_product


@kernel(opaque=True)
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
) -> tuple[Tensor, Tensor]:
    """Compute z [N, 2I] and scaled [N, I]; both are 0 from row offsets[E] on."""
    z = grouped_product.kernel.torch_impl(x, up, bias, offsets, order, weights.shape[1], None, True)
    return z, _scaled(z, _row_weights(weights, order), kind, limit, alpha, offset)


@experts_up.fake
def _experts_up_fake(
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
) -> tuple[Tensor, Tensor]:
    rows, width = order.shape[0], up.shape[1]
    return x.new_empty((rows, width)), x.new_empty((rows, width // 2))


@kernel(opaque=True)
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
    dz: bool,
    dweights: bool,
    scaled: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Compute, each if requested: dz [N, 2I]; d weights [T, K], which is ds gathered by `place` [T, K], plus, with the second
    product's bias [E, H], dy[t] . bias_e for the expert e = indices[t, k] (e = E was dropped, and adds 0); and scaled [N, I],
    recomputed. dz and ds are 0 from row offsets[E] on. `scaled` alone does not need `down`."""
    s, whole = _row_weights(weights, order), z.to(wide(z.dtype))
    a = _gated(whole, kind, limit, alpha, offset) if dweights or scaled else whole
    da = d_weights = d_z = recomputed = None
    if down is not None:
        da = grouped_product.kernel.torch_impl(dy, down, None, offsets, order, weights.shape[1], None, False).to(whole.dtype)
    if dweights and place is not None and da is not None:
        d_weights = _by_place((a * da).sum(-1), place, dy, bias, indices).to(weights.dtype)
    if scaled:
        recomputed = a.mul_(s.unsqueeze(-1)).to(z.dtype)
    if dz and da is not None:
        da.mul_(s.unsqueeze(-1))
        if kind == "clamped_swiglu":
            found, _ = glu.clamped_swiglu_bwd.kernel.torch_impl(da, whole, None, True, limit, alpha, offset, True, False)
        else:
            found, _ = glu.glu_bwd.kernel.torch_impl(da, whole, None, kind, True, True, False)
        d_z = found.to(z.dtype)
    return d_z, d_weights, recomputed


@experts_dgrad.fake
def _experts_dgrad_fake(
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
    dz: bool,
    dweights: bool,
    scaled: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    rows, width = z.shape
    d_z, recomputed = dy.new_empty((rows, width)) if dz else None, dy.new_empty((rows, width // 2)) if scaled else None
    return d_z, weights.new_empty(weights.shape) if dweights else None, recomputed


def _by_place(ds: Tensor, place: Tensor, dy: Tensor, bias: Optional[Tensor], indices: Optional[Tensor]) -> Tensor:
    found = ds.index_select(0, place.reshape(-1)).view(place.shape)
    if bias is None or indices is None:
        return found
    each = dy.to(ds.dtype) @ bias.to(ds.dtype).mT  # [T, E]
    return found + torch.cat((each, each.new_zeros((len(each), 1))), 1).gather(1, indices.long())


def _row_weights(weights: Tensor, order: Tensor) -> Tensor:
    """The weight of each row, [N] in the wide dtype."""
    return weights.reshape(-1).index_select(0, order).to(wide(weights.dtype))


def _gated(z: Tensor, kind: str, limit: float, alpha: float, offset: float) -> Tensor:
    if kind == "clamped_swiglu":
        return glu.clamped_swiglu_fwd.kernel.torch_impl(z, None, True, limit, alpha, offset)  # type: ignore[no-any-return]
    return glu.glu_fwd.kernel.torch_impl(z, None, kind, True)  # type: ignore[no-any-return]


def _scaled(z: Tensor, s: Tensor, kind: str, limit: float, alpha: float, offset: float) -> Tensor:
    return _gated(z.to(wide(z.dtype)), kind, limit, alpha, offset).mul_(s.unsqueeze(-1)).to(z.dtype)
