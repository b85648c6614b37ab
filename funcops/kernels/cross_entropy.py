"""Cross entropy from logits. logits: [N, V]; labels: [N] int64; losses, logsumexp: [N] in the wide dtype.

Per row, with p = softmax(logits), s = label smoothing, z = z-loss:

    loss = lse - (1 - s) logit[label] - s mean_v(logit_v) + z lse^2
    dlogits = dloss ((1 + 2 z lse) p - (1 - s) onehot - s / V)        (terms 1, 2 and 3)

A row whose label is ignore_index has loss 0 and gradient 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.backend import kernel, wide


@kernel()
def cross_entropy_fwd(logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
    """losses [N] and logsumexp [N]."""
    t = logits.to(wide(logits.dtype))
    ignored = labels == ignore_index
    picked = t.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    mean = t.mean(-1) if smoothing else None
    lse = torch.logsumexp(t, -1) if t is logits else _logsumexp_(t)
    losses = lse - picked
    if mean is not None:
        losses += smoothing * (picked - mean)
    if z_loss:
        losses += z_loss * lse.square()
    return losses.masked_fill_(ignored, 0.0), lse


@cross_entropy_fwd.plain
def plain_cross_entropy_fwd(
    logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    lse = logits.exp().sum(-1).log()
    at_label = (logits * _onehot(labels, 0, logits)).sum(-1)
    losses = lse - (1 - smoothing) * at_label - smoothing * logits.mean(-1) + z_loss * lse**2
    return losses * (labels != ignore_index), lse


def _onehot(labels: Tensor, first: int, logits: Tensor) -> Tensor:
    """1 where the label is the class, counted from `first`, else 0."""
    classes = torch.arange(first, first + logits.shape[-1], device=labels.device)
    return (labels.unsqueeze(-1) == classes).to(logits.dtype)


def _logsumexp_(t: Tensor) -> Tensor:
    """torch.logsumexp over the last dimension, bit for bit, without a second tensor of that size: t is written over."""
    top = t.amax(-1, True)
    top = top.masked_fill_(top.abs() == float("inf"), 0.0)
    return t.sub_(top).exp_().sum(-1).log_().add_(top.squeeze(-1))


@kernel()
def cross_entropy_bwd(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float,
    first: int = 0, vocab: int = 0,
) -> Tensor:  # fmt: skip
    """dlogits [N, C] in the dtype of logits; dloss: [N] or 0-d, in the wide dtype. The classes are those from `first` among
    `vocab`; with `vocab` 0 they are all there are."""
    d = logits - logsumexp.unsqueeze(-1) if logits.dtype is logsumexp.dtype else _centred(logits, logsumexp)
    _gradient_(d, dloss, labels, logsumexp, smoothing, ignore_index, z_loss, first, vocab or logits.shape[-1])
    return d.to(logits.dtype)


@cross_entropy_bwd.plain
def plain_cross_entropy_bwd(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float,
    first: int = 0, vocab: int = 0,
) -> Tensor:  # fmt: skip
    vocab = vocab or logits.shape[-1]
    return plain_cross_entropy_bwd_owned(dloss, logits, labels, logsumexp, smoothing, ignore_index, z_loss, first, vocab)


@kernel(mutates=("logits",))
def cross_entropy_bwd_owned(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float,
    first: int, vocab: int,
) -> None:  # fmt: skip
    """dlogits written over logits [N, C], contiguous, which are those of the classes from `first` among `vocab`."""
    inside = logits.dtype is wide(logits.dtype)
    d = logits.sub_(logsumexp.unsqueeze(-1)) if inside else _centred(logits, logsumexp)
    _gradient_(d, dloss, labels, logsumexp, smoothing, ignore_index, z_loss, first, vocab)
    if not inside:
        logits.copy_(d)


@cross_entropy_bwd_owned.plain
def plain_cross_entropy_bwd_owned(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float,
    first: int, vocab: int,
) -> Tensor:  # fmt: skip
    lse = logsumexp.unsqueeze(-1)
    along_lse = (1 + 2 * z_loss * lse) * (logits - lse).exp()  # term 1: through logsumexp, whose gradient is p, and its square
    along_label = -(1 - smoothing) * _onehot(labels, first, logits)  # term 2: through the label's own logit
    along_mean = -smoothing / vocab  # term 3: through the mean of all logits
    return (dloss * (labels != ignore_index)).unsqueeze(-1) * (along_lse + along_label + along_mean)


def _centred(logits: Tensor, logsumexp: Tensor) -> Tensor:
    """logits - logsumexp in the wide dtype; widened first, since torch's subtraction of mixed dtypes is slower than both."""
    return logits.to(logsumexp.dtype).sub_(logsumexp.unsqueeze(-1))


def _gradient_(
    d: Tensor, dloss: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float,
    first: int, vocab: int,
) -> None:  # fmt: skip
    """d, which holds logits - logsumexp in the wide dtype, becomes dlogits."""
    ignored = labels == ignore_index
    rows = torch.where(ignored, torch.zeros((), dtype=d.dtype, device=d.device), dloss.to(d.dtype))
    d.exp_()
    d.mul_((rows * (1 + 2 * z_loss * logsumexp) if z_loss else rows).unsqueeze(-1))  # term 1
    if smoothing:  # term 3
        d.sub_((rows * (smoothing / vocab)).unsqueeze(-1))
    index, at_label = labels - first, rows * (smoothing - 1.0)
    elsewhere = ignored if d.shape[-1] == vocab else ignored | (index < 0) | (index >= d.shape[-1])
    at_label, index = at_label.masked_fill(elsewhere, 0.0), index.masked_fill(elsewhere, 0)
    d.scatter_add_(-1, index.unsqueeze(-1), at_label.unsqueeze(-1))  # term 2
