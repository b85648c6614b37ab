"""Cross entropy and the entropy of the same distribution, in one pass over the logits. Shapes and options as in `cross_entropy`;
entropies [N] in the wide dtype.

Per row, with t = logit - highest and p = softmax(logits):

    H = -sum_v p_v log p_v = log sum_v exp(t_v) - sum_v exp(t_v) t_v / sum_v exp(t_v)         (two terms, neither below 0)
    dlogits = cross entropy's, and -dH p (log p + H)

A row whose label is ignore_index has entropy 0 and gradient 0. A class of probability 0 adds nothing, also if its logit is -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.backend import kernel
from funcops.library.kernels.cross_entropy import (
    add_terms_of_labels,
    below,
    highest_of,
    losses_of,
    of_labels,
    plain_cross_entropy_bwd_owned,
    plain_cross_entropy_fwd,
)

LEAST = -1e4  # no lower t is multiplied: exp of it is 0 in every dtype, and 0 times -inf is NaN


@kernel(rows="pinned")
def entropy_fwd(
    logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """losses [N], logsumexp [N, 2] and entropies [N]; the first two have the bits of `cross_entropy_fwd`."""
    highest = highest_of(logits)
    t = below(logits, highest)
    picked, mean = of_labels(t, labels, smoothing, ignore_index)
    weights = t.exp()
    total = weights.sum(-1)
    rest = total.log()
    entropies = rest - weights.mul_(t.clamp_(min=LEAST)).sum(-1).div_(total)
    losses, lse = losses_of(rest, highest, picked, mean, labels, smoothing, ignore_index, z_loss)
    return losses, lse, entropies.masked_fill_(labels == ignore_index, 0.0)


@entropy_fwd.plain
def plain_entropy_fwd(
    logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    losses, lse = plain_cross_entropy_fwd(logits, labels, smoothing, ignore_index, z_loss)
    logs = logits - lse.sum(-1, keepdim=True)
    return losses, lse, -(logs.exp() * logs).sum(-1) * (labels != ignore_index)


@kernel(rows="each")
def entropy_bwd(
    dloss: Tensor,
    dentropy: Tensor,
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropies: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
    first: int = 0,
    vocab: int = 0,
) -> Tensor:
    """dlogits [N, C] in the dtype of logits; dloss and dentropy: [N], in the wide dtype. The C classes begin at `first` of `vocab`
    classes; `vocab` 0 means that they are all."""
    d = below(logits, logsumexp[:, :1])
    of_row = dloss, dentropy, labels, logsumexp, entropies
    _gradient_(d, *of_row, smoothing, ignore_index, z_loss, first, vocab or logits.shape[-1])
    return d.to(logits.dtype)


@entropy_bwd.plain
def plain_entropy_bwd(
    dloss: Tensor,
    dentropy: Tensor,
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropies: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
    first: int = 0,
    vocab: int = 0,
) -> Tensor:
    of_row, vocab = (labels, logsumexp, entropies), vocab or logits.shape[-1]
    return plain_entropy_bwd_owned(dloss, dentropy, logits, *of_row, smoothing, ignore_index, z_loss, first, vocab)


@kernel(mutates=("logits",), rows="each")
def entropy_bwd_owned(
    dloss: Tensor,
    dentropy: Tensor,
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropies: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
    first: int,
    vocab: int,
) -> None:
    """Write dlogits over logits [N, C], contiguous, whose C classes begin at `first` of `vocab` classes."""
    d = below(logits, logsumexp[:, :1])
    _gradient_(d, dloss, dentropy, labels, logsumexp, entropies, smoothing, ignore_index, z_loss, first, vocab)
    logits.copy_(d)


@entropy_bwd_owned.plain
def plain_entropy_bwd_owned(
    dloss: Tensor,
    dentropy: Tensor,
    logits: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropies: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
    first: int,
    vocab: int,
) -> Tensor:
    logs = logits - logsumexp.sum(-1, keepdim=True)
    slopes = -logs.exp() * (logs + entropies.unsqueeze(-1))
    of_loss = plain_cross_entropy_bwd_owned(dloss, logits, labels, logsumexp, smoothing, ignore_index, z_loss, first, vocab)
    return of_loss + (dentropy * (labels != ignore_index)).unsqueeze(-1) * slopes


def _gradient_(
    d: Tensor,
    dloss: Tensor,
    dentropy: Tensor,
    labels: Tensor,
    logsumexp: Tensor,
    entropies: Tensor,
    smoothing: float,
    ignore_index: int,
    z_loss: float,
    first: int,
    vocab: int,
) -> None:
    """Turn d, which holds logits - highest in the wide dtype, into dlogits, in place."""
    ignored, rest = labels == ignore_index, logsumexp[:, 1]
    zero = torch.zeros((), dtype=d.dtype, device=d.device)
    rows, of_entropy = (torch.where(ignored, zero, t.to(d.dtype)) for t in (dloss, dentropy))
    along_lse = rows * (1 + 2 * z_loss * logsumexp.sum(-1)) if z_loss else rows
    slopes = (d.clamp(min=LEAST) - (rest - entropies).unsqueeze(-1)).mul_(-of_entropy.unsqueeze(-1))  # -dH (log p + H)
    slopes.add_(along_lse.unsqueeze(-1)).mul_(rest.neg().exp_().unsqueeze(-1))
    d.exp_().mul_(slopes)
    add_terms_of_labels(d, rows, labels, ignored, smoothing, first, vocab)
