"""Cross entropy from logits. logits: [N, V]; labels: [N] int64; losses: [N], logsumexp: [N, 2] in the wide dtype.

Per row, with p = softmax(logits), s = label smoothing, z = z-loss:

    loss = lse - (1 - s) logit[label] - s mean_v(logit_v) + z lse^2
    dlogits = dloss ((1 + 2 z lse) p - (1 - s) onehot - s / V)        (terms 1, 2 and 3)

A row whose label is ignore_index has loss 0 and gradient 0.

logsumexp is saved as two numbers that sum to it: the highest logit, and the logarithm of sum_v exp(logit_v - highest). Their sum
would be rounded to the spacing of numbers as large as the logits, which a shift of all logits can make any size, and a confident
row's loss is smaller than that: at 300 the spacing is 3e-5. Small differences to the highest logit are not rounded.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide


@kernel(rows="pinned")
def cross_entropy_fwd(logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
    """losses [N] and logsumexp [N, 2]."""
    highest = highest_of(logits)
    t = below(logits, highest)
    picked, mean = of_labels(t, labels, smoothing, ignore_index)
    return losses_of(t.exp_().sum(-1).log_(), highest, picked, mean, labels, smoothing, ignore_index, z_loss)


def of_labels(t: Tensor, labels: Tensor, smoothing: float, ignore_index: int) -> tuple[Tensor, Optional[Tensor]]:
    """The logits that losses read, of t below their highest: the label's own, and with smoothing the mean of all; [N] each."""
    at = labels.masked_fill(labels == ignore_index, 0).unsqueeze(-1)
    return t.gather(-1, at).squeeze(-1), t.mean(-1) if smoothing else None


def losses_of(
    rest: Tensor,
    highest: Tensor,
    picked: Tensor,
    mean: Optional[Tensor],
    labels: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """losses [N] and logsumexp [N, 2], from log sum_v exp(logit_v - highest) in `rest` [N]."""
    losses = rest - picked
    if mean is not None:
        losses += smoothing * (picked - mean)
    lse = torch.stack((highest.squeeze(-1), rest), -1)
    if z_loss:
        losses += z_loss * lse.sum(-1).square_()
    return losses.masked_fill_(labels == ignore_index, 0.0), lse


@cross_entropy_fwd.plain
def plain_cross_entropy_fwd(
    logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    lse, highest = logits.exp().sum(-1).log(), logits.amax(-1)
    at_label = (logits * _onehot(labels, 0, logits)).sum(-1)
    losses = lse - (1 - smoothing) * at_label - smoothing * logits.mean(-1) + z_loss * lse**2
    return losses * (labels != ignore_index), torch.stack((highest, lse - highest), -1)


def _onehot(labels: Tensor, first: int, logits: Tensor) -> Tensor:
    """1 where the label is the class, else 0; the classes begin at `first`."""
    classes = torch.arange(first, first + logits.shape[-1], device=labels.device)
    return (labels.unsqueeze(-1) == classes).to(logits.dtype)


def highest_of(logits: Tensor) -> Tensor:
    """The highest logit of each row, [N, 1] in the wide dtype, finite, so that an infinite logit minus it is not NaN."""
    ends = torch.finfo(wide(logits.dtype))
    return logits.amax(-1, True).to(wide(logits.dtype)).clamp_(ends.min, ends.max)


def below(logits: Tensor, highest: Tensor) -> Tensor:
    """logits - highest, a new tensor in the wide dtype; cast first, as torch's subtraction of mixed dtypes is slower than both."""
    return logits - highest if logits.dtype is highest.dtype else logits.to(highest.dtype).sub_(highest)


@kernel(rows="each")
def cross_entropy_bwd(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
    first: int = 0,
    vocab: int = 0,
) -> Tensor:
    """dlogits [N, C] in the dtype of logits; dloss: [N] or 0-d, in the wide dtype. The C classes begin at `first` of
    `vocab` classes; `vocab` 0 means that they are all."""
    d = below(logits, logsumexp[:, :1])
    _gradient_(d, dloss, labels, logsumexp, smoothing, ignore_index, z_loss, first, vocab or logits.shape[-1])
    return d.to(logits.dtype)


@cross_entropy_bwd.plain
def plain_cross_entropy_bwd(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
    first: int = 0,
    vocab: int = 0,
) -> Tensor:
    vocab = vocab or logits.shape[-1]
    return plain_cross_entropy_bwd_owned(dloss, logits, labels, logsumexp, smoothing, ignore_index, z_loss, first, vocab)


@kernel(mutates=("logits",), rows="each")
def cross_entropy_bwd_owned(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
    first: int,
    vocab: int,
) -> None:
    """Write dlogits over logits [N, C], contiguous, whose C classes begin at `first` of `vocab` classes."""
    inside = logits.dtype is wide(logits.dtype)
    highest = logsumexp[:, :1]
    d = logits.sub_(highest) if inside else below(logits, highest)
    _gradient_(d, dloss, labels, logsumexp, smoothing, ignore_index, z_loss, first, vocab)
    if not inside:
        logits.copy_(d)


@cross_entropy_bwd_owned.plain
def plain_cross_entropy_bwd_owned(
    dloss: Tensor,
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
    first: int,
    vocab: int,
) -> Tensor:
    lse = logsumexp.sum(-1, keepdim=True)
    along_lse = (1 + 2 * z_loss * lse) * (logits - lse).exp()  # term 1: through logsumexp, whose gradient is p, and its square
    along_label = -(1 - smoothing) * _onehot(labels, first, logits)  # term 2: through the label's own logit
    along_mean = -smoothing / vocab  # term 3: through the mean of all logits
    return (dloss * (labels != ignore_index)).unsqueeze(-1) * (along_lse + along_label + along_mean)


@kernel(mutates=("logits",), rows="pinned")
def cross_entropy_with_gradient(
    dloss: Tensor, logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> Tensor:
    """losses [N] of contiguous logits, over which dlogits are written: one read and one write, where a loss and then its gradient
    are two reads and a write. The losses do not wait for a dloss: it must be known before them."""
    losses, lse = cross_entropy_fwd.kernel.torch_impl(logits, labels, smoothing, ignore_index, z_loss)
    cross_entropy_bwd_owned.kernel.torch_impl(dloss, logits, labels, lse, smoothing, ignore_index, z_loss, 0, logits.shape[-1])
    return losses  # type: ignore[no-any-return]


@cross_entropy_with_gradient.plain
def plain_cross_entropy_with_gradient(
    dloss: Tensor, logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    losses, lse = plain_cross_entropy_fwd(logits, labels, smoothing, ignore_index, z_loss)
    vocab = logits.shape[-1]
    return losses, plain_cross_entropy_bwd_owned(dloss, logits, labels, lse, smoothing, ignore_index, z_loss, 0, vocab)


def _gradient_(
    d: Tensor,
    dloss: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
    first: int,
    vocab: int,
) -> None:
    """Turn d, which holds logits - highest in the wide dtype, into dlogits, in place."""
    ignored = labels == ignore_index
    rows = torch.where(ignored, torch.zeros((), dtype=d.dtype, device=d.device), dloss.to(d.dtype))
    along_lse = rows * logsumexp[:, 1].neg().exp_()  # p = exp(logits - highest) exp(highest - lse): one product for both factors
    if z_loss:
        along_lse *= 1 + 2 * z_loss * logsumexp.sum(-1)
    d.exp_()
    d.mul_(along_lse.unsqueeze(-1))  # term 1
    add_terms_of_labels(d, rows, labels, ignored, smoothing, first, vocab)


def add_terms_of_labels(d: Tensor, rows: Tensor, labels: Tensor, ignored: Tensor, smoothing: float, first: int, vocab: int) -> None:
    """Add terms 2 and 3 to d, in place. rows [N]: dloss, and 0 for a row that is ignored."""
    if smoothing:  # term 3
        d.sub_((rows * (smoothing / vocab)).unsqueeze(-1))
    index, at_label = labels - first, rows * (smoothing - 1.0)
    elsewhere = ignored if d.shape[-1] == vocab else ignored | (index < 0) | (index >= d.shape[-1])
    at_label, index = at_label.masked_fill(elsewhere, 0.0), index.masked_fill(elsewhere, 0)
    index, at_label = index.unsqueeze(-1), at_label.unsqueeze(-1)  # term 2
    if torch.compiler.is_compiling():  # which cannot join a scatter with the loop of the other terms
        d.copy_(torch.where(torch.arange(d.shape[-1], device=d.device) == index, d + at_label, d))
    else:
        d.scatter_add_(-1, index, at_label)
