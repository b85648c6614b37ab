"""Shared by the ops over a sharded vocabulary: which rank has an id, and the losses of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.mesh import Axis
from funcops.library.kernels import cross_entropy as kernels
from funcops.library.kernels.entropy import entropy_fwd

NO_LABEL = -(2**62)  # an ignore_index that no label equals


def own_rows_of(ids: Tensor, size: int, axis: Axis, fill: int = 0) -> tuple[Tensor, Tensor]:
    """The rows of ids among this rank's `size` rows, `fill` for ids of other ranks, and a mask of the latter. An id that no rank
    has stays out of range, so that kernels refuse it as in the plain op."""
    rows = ids - comm.place(axis, ids) * size
    elsewhere = ((rows < 0) | (rows >= size)) & (ids >= 0) & (ids < size * axis.size)
    return rows.masked_fill(elsewhere, fill), elsewhere


def parts_of_rows(logits: Tensor, labels: Tensor, cfg: Any) -> Tensor:
    """[3, N], in the wide dtype, from this rank's logits [N, V/n]: both numbers of their logsumexp, and the label's logit if this
    rank has it, else 0; with label smoothing one more, the highest logit minus their mean; with entropy one more, theirs."""
    rows, elsewhere = own_rows_of(labels, logits.shape[-1], cfg.axis)
    rows.masked_fill_(labels == cfg.ignore_index, 0)
    # with label_smoothing 1 a loss is logsumexp minus the mean
    forward = entropy_fwd if cfg.entropy else kernels.cross_entropy_fwd
    losses, lse, *own = forward(logits, rows, 1.0 if cfg.label_smoothing else 0.0, NO_LABEL, 0.0)
    highest, rest = lse.unbind(-1)
    inside = rows.clamp(0, logits.shape[-1] - 1)
    picked = logits.gather(-1, inside.unsqueeze(-1)).squeeze(-1).to(lse.dtype).masked_fill_(inside != rows, float("nan"))
    found = [highest, rest, picked.masked_fill_(elsewhere | (labels == cfg.ignore_index), 0.0)]
    return torch.stack([*found, *((losses - rest,) if cfg.label_smoothing else ()), *own])


def losses_of_rows(parts: Tensor, labels: Tensor, cfg: Any) -> tuple[Tensor, ...]:
    """losses [N], logsumexp [N, 2] and, if the config asks for them, entropies [N] over the classes of all ranks, from the parts of
    each: one gather, and the same bits on every rank. A maximum over the ranks and then a sum of exponentials would be two
    collectives, and Gloo's maximum may drop a NaN."""
    smoothing, n = cfg.label_smoothing, cfg.axis.size
    every = comm.gather(parts, cfg.axis).reshape(n, *parts.shape)
    highest = every[:, 0].amax(0)
    lower = highest - every[:, 0]  # how far a rank's highest is below the highest of all
    rest = (every[:, 1] - lower).exp_().sum(0).log_()
    below = highest - every[:, 2].sum(0)
    losses = rest + below
    if smoothing:
        losses += smoothing * ((every[:, 3] + lower).mean(0) - below)
    lse = torch.stack((highest, rest), -1)
    if cfg.z_loss:
        losses += cfg.z_loss * lse.sum(-1).square_()
    ignored = labels == cfg.ignore_index
    losses.masked_fill_(ignored, 0.0)
    if not cfg.entropy:
        return losses, lse
    logs = every[:, 1] - lower - rest  # an entropy has two parts: of a class's rank, and of the class on its rank
    shares = logs.exp()
    entropies = (shares * (every[:, -1] - logs)).masked_fill_(shares == 0, 0.0).sum(0)
    return losses, lse, entropies.masked_fill_(ignored, 0.0)
