"""The choice of experts, with sigmoids in whole vectors."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcops.library.kernels.pins import ALONE, VECTORS, Pins, pinned
from funcops.library.kernels.route import counts_of, route_bwd, route_fwd, weights_at


def _parts(t: Tensor) -> list[Tensor]:
    """[S, L, E] as [1, n, E], in whole vectors, and in pieces that torch leaves to one thread."""
    flat = t.reshape(1, -1, t.shape[-1])
    whole = pad(flat, (0, 0, 0, -flat.shape[1] % VECTORS))
    return list(whole.split(max(VECTORS, ALONE // t.shape[-1] // VECTORS * VECTORS), 1)) or [whole]


def _whole(parts: list[Tensor], like: Tensor) -> Tensor:
    """The rows of pieces, for the sequences of [S, L, E]."""
    return torch.cat(parts, 1)[:, : like.shape[0] * like.shape[1]].reshape(*like.shape[:2], -1)


@pinned(route_fwd)
def _pinned_fwd(
    pins: Pins, logits: Tensor, bias: Optional[Tensor], top_k: int, *how: Any
) -> tuple[Tensor, Tensor, Optional[Tensor], Tensor, Tensor]:
    """With zeros for rows up to whole vectors, which are not counted."""
    found = [route_fwd.kernel.torch_impl(part, bias, top_k, *how) for part in _parts(logits)]
    weights, indices = (_whole([one[i] for one in found], logits) for i in (0, 1))
    kept = None if found[0][2] is None else _whole([one[2] for one in found], logits)
    return weights, indices, kept, counts_of(indices.long(), logits.shape[-1]), found[0][4]


@pinned(weights_at)
def _pinned_weights(pins: Pins, logits: Tensor, indices: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    chosen = _parts(indices)
    found = [weights_at.kernel.torch_impl(*each, *how) for each in zip(_like(logits, chosen), chosen, strict=True)]
    weights, picked = (_whole([one[i] for one in found], logits) for i in (0, 1))
    return weights, picked


@pinned(route_bwd)
def _pinned_bwd(
    pins: Pins,
    dloss: Tensor,
    dweights: Optional[Tensor],
    indices: Tensor,
    kept: Optional[Tensor],
    logits: Optional[Tensor],
    counts: Optional[Tensor],
    *how: Any,
) -> Tensor:
    chosen = _parts(indices)
    rows = [[None] * len(chosen) if t is None else _like(t, chosen) for t in (dweights, kept, logits)]
    parts = zip(rows[0], chosen, rows[1], rows[2], strict=True)
    return _whole([route_bwd.kernel.torch_impl(dloss, *each, counts, *how) for each in parts], indices)


def _like(t: Tensor, parts: list[Tensor]) -> list[Tensor]:
    """[S, L, *] in pieces of as many rows as others."""
    flat, count = t.reshape(1, -1, t.shape[-1]), sum(one.shape[1] for one in parts)
    return list(pad(flat, (0, 0, 0, count - flat.shape[1])).split([one.shape[1] for one in parts], 1))
