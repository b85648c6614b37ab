"""What the ops over a vocabulary that an axis shares out have in common: whose an id is, and the losses of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.backend import wide
from funcops.dist import comm
from funcops.dist.mesh import Axis
from funcops.kernels import cross_entropy as kernels

NO_LABEL = -(2**62)  # an ignore_index that no place is


def places_of(ids: Tensor, size: int, axis: Axis, fill: int = 0) -> tuple[Tensor, Tensor]:
    """The places of ids among this rank's `size` rows, and where they are another rank's: `fill` is there. An id that is no
    rank's stays outside, so that kernels refuse it as they do in the plain op."""
    places = ids - axis.rank * size
    elsewhere = ((places < 0) | (places >= size)) & (ids >= 0) & (ids < size * axis.size)
    return places.masked_fill(elsewhere, fill), elsewhere


def parts_of_rows(logits: Tensor, labels: Tensor, cfg: Any) -> Tensor:
    """[2, N], in the wide dtype, of this rank's logits [N, V/n]: their logsumexp, and the label's own where it is among them, else
    0; with label smoothing [3, N], with their mean."""
    places, elsewhere = places_of(labels, logits.shape[-1], cfg.axis)
    ignored = labels == cfg.ignore_index
    losses, lse = kernels.cross_entropy_fwd(logits, places.masked_fill_(ignored, 0), 0.0, NO_LABEL, 0.0)
    found = [lse, (lse - losses).masked_fill_(elsewhere | ignored, 0.0)]
    if cfg.label_smoothing:
        found.append(logits.mean(-1, dtype=wide(logits.dtype)))
    return torch.stack(found)


def losses_of_rows(parts: Tensor, labels: Tensor, cfg: Any) -> tuple[Tensor, Tensor]:
    """losses [N] and logsumexp [N] over the classes of all ranks, from the parts of each: one gather, and the same bits on every
    rank. A maximum over the ranks first, and sums of exponentials after it, would be two collectives, of which Gloo's first one
    may lose a NaN."""
    smoothing, n = cfg.label_smoothing, cfg.axis.size
    every = comm.gather(parts, cfg.axis).reshape(n, *parts.shape)
    lse, picked = torch.logsumexp(every[:, 0], 0), every[:, 1].sum(0)
    losses = lse - picked
    if smoothing:
        losses += smoothing * (picked - every[:, 2].mean(0))
    if cfg.z_loss:
        losses += cfg.z_loss * lse.square()
    return losses.masked_fill_(labels == cfg.ignore_index, 0.0), lse
