"""Cross entropy from logits. logits: [N, V]; labels: [N] int64; losses, logsumexp: [N] in the wide dtype.

Per row, with p = softmax(logits), s = label smoothing, z = z-loss:

    loss = lse - (1 - s) logit[label] - s mean_v(logit_v) + z lse^2
    dlogits = dloss ((1 + 2 z lse) p - (1 - s) onehot - s / V)

A row whose label is ignore_index has loss 0 and gradient 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.backend import kernel, wide


@kernel()
def cross_entropy_fwd(
    logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    """losses [N] and logsumexp [N]."""
    t = logits.to(wide(logits.dtype))
    lse = torch.logsumexp(t, -1)
    ignored = labels == ignore_index
    picked = t.gather(-1, labels.masked_fill(ignored, 0).unsqueeze(-1)).squeeze(-1)
    losses = lse - picked
    if smoothing:
        losses += smoothing * (picked - t.mean(-1))
    if z_loss:
        losses += z_loss * lse.square()
    return losses.masked_fill_(ignored, 0.0), lse


@kernel()
def cross_entropy_bwd(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> Tensor:
    """dlogits [N, V] in the dtype of logits; dloss: [N] or 0-d, in the wide dtype."""
    dtype = wide(logits.dtype)
    ignored = labels == ignore_index
    rows = torch.where(ignored, torch.zeros((), dtype=dtype, device=logits.device), dloss.to(dtype))
    d = (logits - logsumexp.unsqueeze(-1)).exp_()
    d.mul_((rows * (1 + 2 * z_loss * logsumexp) if z_loss else rows).unsqueeze(-1))
    if smoothing:
        d.sub_((rows * (smoothing / logits.shape[-1])).unsqueeze(-1))
    index = labels.masked_fill(ignored, 0).unsqueeze(-1)
    d.scatter_add_(-1, index, (rows * (smoothing - 1.0)).unsqueeze(-1))
    return d.to(logits.dtype)
