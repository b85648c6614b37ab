"""What the ops over a vocabulary that an axis shares out have in common: whose an id is, and the losses of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.mesh import Axis
from funcops.kernels import cross_entropy as kernels

NO_LABEL = -(2**62)  # an ignore_index that no place is


def own_rows_of(ids: Tensor, size: int, axis: Axis, fill: int = 0) -> tuple[Tensor, Tensor]:
    """The rows of ids among this rank's `size` rows, and where they are another rank's: `fill` is there. An id that is no
    rank's stays outside, so that kernels refuse it as they do in the plain op."""
    rows = ids - axis.rank * size
    elsewhere = ((rows < 0) | (rows >= size)) & (ids >= 0) & (ids < size * axis.size)
    return rows.masked_fill(elsewhere, fill), elsewhere


def parts_of_rows(logits: Tensor, labels: Tensor, cfg: Any) -> Tensor:
    """[3, N], in the wide dtype, of this rank's logits [N, V/n]: both numbers of their logsumexp, and the label's own where it is
    among them, else 0; with label smoothing [4, N], with how far their mean is below the highest."""
    rows, elsewhere = own_rows_of(labels, logits.shape[-1], cfg.axis)
    rows.masked_fill_(labels == cfg.ignore_index, 0)
    # with all of the smoothing a loss is logsumexp less the mean
    losses, lse = kernels.cross_entropy_fwd(logits, rows, 1.0 if cfg.label_smoothing else 0.0, NO_LABEL, 0.0)
    highest, rest = lse.unbind(-1)
    inside = rows.clamp(0, logits.shape[-1] - 1)
    picked = logits.gather(-1, inside.unsqueeze(-1)).squeeze(-1).to(lse.dtype).masked_fill_(inside != rows, float("nan"))
    found = [highest, rest, picked.masked_fill_(elsewhere | (labels == cfg.ignore_index), 0.0)]
    return torch.stack([*found, losses - rest] if cfg.label_smoothing else found)


def losses_of_rows(parts: Tensor, labels: Tensor, cfg: Any) -> tuple[Tensor, Tensor]:
    """losses [N] and logsumexp [N, 2] over the classes of all ranks, from the parts of each: one gather, and the same bits on every
    rank. A maximum over the ranks first, and sums of exponentials after it, would be two collectives, of which Gloo's first one
    may lose a NaN."""
    smoothing, n = cfg.label_smoothing, cfg.axis.size
    every = comm.gather(parts, cfg.axis).reshape(n, *parts.shape)
    highest = every[:, 0].amax(0)
    lower = highest - every[:, 0]  # what a rank's own highest is below that of all
    rest = (every[:, 1] - lower).exp_().sum(0).log_()
    below = highest - every[:, 2].sum(0)
    losses = rest + below
    if smoothing:
        losses += smoothing * ((every[:, 3] + lower).mean(0) - below)
    lse = torch.stack((highest, rest), -1)
    if cfg.z_loss:
        losses += cfg.z_loss * lse.sum(-1).square_()
    return losses.masked_fill_(labels == cfg.ignore_index, 0.0), lse
