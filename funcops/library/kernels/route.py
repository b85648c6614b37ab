"""Choice of experts from logits. logits: [S, L, E], of S sequences; weights: [S, L, K] in the wide dtype; indices: [S, L, K] int32.

    s = softmax(l) or sigmoid(l)        i = the K best of l; of s + bias, with a bias or a choice of groups
    w = c s_i / sum_i s_i, or c s_i     n_e = how often e was chosen        q = s / sum_e s_e
    loss = mean over sequences of aux E / (K L^2) sum_e n_e sum_t q_te, plus z mean_t lse_t^2

A group's score is the sum of its two best. Of equal scores the lowest index is first. The gradient, with g = c dw (0 for a dropped
choice), S = sum_i s_i and a_e = dloss aux E n_e / (K L^2) over the number of sequences:

    softmax, normalised:   dl_i = s_i / S (g_i - sum_j g_j s_j / S)                                             (term 1)
    softmax:               dl = s (d - sum_e d_e s_e), d_i = g_i                                                (term 1)
    sigmoid, normalised:   dl_i = s_i (1 - s_i) / S (g_i - sum_j g_j s_j / S);  sigmoid: s_i (1 - s_i) g_i      (term 1)
    the first loss:        dq = a;  dl = s (a - sum_e a_e s_e), or s (1 - s) (a - sum_e a_e q_e) / sum_e s_e    (term 2)
    the second:            dl = dloss 2 z lse softmax(l) / (S L), of S sequences                                (term 3)

Packed documents have other lengths, and rows behind them are padding: their counts and losses are computed by `counts_of_documents`
and the two functions behind it, whatever the backend, and the kernels above route with `aux` and `z` of 0.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide

LEAST = 1e-20  # added to a sum of sigmoids, as in DeepSeek-V3: it avoids a division by zero


@kernel(rows="pinned")
def route_fwd(
    logits: Tensor,
    bias: Optional[Tensor],
    top_k: int,
    score: str,
    normalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    aux: float,
    z: float,
    keep: bool,
) -> tuple[Tensor, Tensor, Optional[Tensor], Tensor, Tensor]:
    """Return (weights, indices, s_i [S, L, K] if `keep`, n [S, E] int32, loss [])."""
    t = logits.to(wide(logits.dtype))
    scored = bias is not None or groups > 1
    s = _scores(t, score) if scored or aux else None
    preferred = t if s is None or not scored else s if bias is None else s + bias
    indices = _best(preferred, top_k) if groups == 1 else _best_of_groups(preferred, top_k, groups, top_groups)
    weights, picked = _weighed(t, s, indices, score, normalize, scale)
    counts = counts_of(indices, logits.shape[-1])
    loss = losses_of(t, s, score, counts, top_k, aux, z)
    return weights, indices.to(torch.int32), picked if keep else None, counts, loss


@kernel(library=True, rows="pinned")
def weights_at(logits: Tensor, indices: Tensor, score: str, normalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The weights of chosen experts, and s_i: [S, L, K] each, as `route_fwd` makes them. indices: [S, L, K] int32."""
    return _weighed(logits.to(wide(logits.dtype)), None, indices.to(torch.int64), score, normalize, scale)


def _weighed(t: Tensor, s: Optional[Tensor], indices: Tensor, score: str, normalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The weights and the scores of the chosen experts; s: the scores of all, if they are there."""
    if score == "softmax" and not normalize:
        picked = (_scores(t, score) if s is None else s).gather(-1, indices)
    else:
        picked = _scores(t.gather(-1, indices), score)
    return picked * (scale / (picked.sum(-1, True) + LEAST) if score == "sigmoid" and normalize else scale), picked


def _scores(t: Tensor, score: str) -> Tensor:
    return torch.softmax(t, -1) if score == "softmax" else torch.sigmoid(t)


def _best(t: Tensor, count: int) -> Tensor:
    """The indices of each row's best, the best first; `torch.topk` does not promise an order of equal ones."""
    return torch.sort(t, dim=-1, descending=True, stable=True).indices[..., :count]


def _best_of_groups(t: Tensor, count: int, groups: int, top_groups: int) -> Tensor:
    size = t.shape[-1] // groups
    two = t.unflatten(-1, (groups, size)).topk(2, -1).values
    first = _best(two[..., 0] + two[..., 1], top_groups).sort(-1).values * size
    among = (first.unsqueeze(-1) + torch.arange(size, device=t.device)).flatten(-2)
    return among.gather(-1, _best(t.gather(-1, among), count))


def counts_of(indices: Tensor, experts: int) -> Tensor:
    flat = indices.flatten(1)
    ones = torch.ones((), dtype=torch.int32, device=flat.device).expand(flat.shape)
    return torch.zeros(flat.shape[0], experts, dtype=torch.int32, device=flat.device).scatter_add_(1, flat, ones)


def losses_of(t: Tensor, s: Optional[Tensor], score: str, counts: Tensor, top_k: int, aux: float, z: float) -> Tensor:
    """The loss [] of logits t in the wide dtype; s: the scores of all, if `aux` reads them and they are there."""
    sequences, length, experts = t.shape
    loss = t.new_zeros(())
    if aux and sequences and length:
        s = _scores(t, score) if s is None else s
        q = s if score == "softmax" else s / s.sum(-1, True)
        loss = loss + (counts * q.sum(1)).sum() * (aux * experts / (top_k * length * length * sequences))
    if z and sequences and length:
        loss = loss + torch.logsumexp(t, -1).square().sum() * (z / (sequences * length))
    return loss


@kernel(rows="pinned")
def route_bwd(
    dloss: Tensor,
    dweights: Optional[Tensor],
    indices: Tensor,
    kept: Optional[Tensor],
    logits: Optional[Tensor],
    counts: Optional[Tensor],
    experts: int,
    dtype: torch.dtype,
    score: str,
    normalize: bool,
    scale: float,
    aux: float,
    z: float,
) -> Tensor:
    """dlogits [S, L, E] in `dtype`; dloss: [] or [1]. An index of -1 - e is a dropped choice of e. `kept`: s_i for a normalised
    sigmoid, else w. `logits` can replace `kept`, and are required if the gradient reads whole rows; `aux` requires `counts`."""
    at = torch.where(indices < 0, -1 - indices, indices).to(torch.int64)
    d = torch.zeros(*indices.shape[:-1], experts, dtype=dloss.dtype, device=dloss.device)
    t = None if logits is None else logits.to(dloss.dtype)
    if dweights is not None:
        g = torch.where(indices < 0, torch.zeros_like(dweights), dweights * scale)
        if score == "sigmoid" or normalize:
            d.scatter_(-1, at, _of_chosen(g, at, kept, t, score, normalize, scale))
        else:
            assert t is not None
            s = torch.softmax(t, -1)
            d.scatter_(-1, at, g)
            d = s * (d - (d * s).sum(-1, True))
    if t is not None and (aux or z) and t.numel():
        d = d + _of_losses(dloss, t, counts, indices.shape[-1], score, aux, z)
    return d.to(dtype)


def _of_chosen(
    g: Tensor, at: Tensor, kept: Optional[Tensor], t: Optional[Tensor], score: str, normalize: bool, scale: float
) -> Tensor:
    """Term 1 for the chosen experts, if the others have none."""
    if t is not None:
        s = _scores(t.gather(-1, at), score)
    else:
        assert kept is not None
        s = kept if score == "sigmoid" and normalize else kept / scale
    if score == "softmax":
        return s * (g - (g * s).sum(-1, True))
    if normalize:
        total = s.sum(-1, True) + LEAST
        g = (g - (g * s).sum(-1, True) / total) / total
    return s * (1 - s) * g


def _of_losses(dloss: Tensor, t: Tensor, counts: Optional[Tensor], top_k: int, score: str, aux: float, z: float) -> Tensor:
    """Terms 2 and 3."""
    sequences, length, experts = t.shape
    d = torch.zeros_like(t)
    if aux:
        assert counts is not None
        a = (counts * (dloss * (aux * experts / (top_k * length * length * sequences)))).unsqueeze(1)
        d += _of_first_loss(a, t, score)
    if z:
        d += _of_second_loss(dloss * (2 * z / (sequences * length)), t)
    return d


def _of_first_loss(a: Tensor, t: Tensor, score: str) -> Tensor:
    s = _scores(t, score)
    if score == "softmax":
        return s * (a - (a * s).sum(-1, True))
    total = s.sum(-1, True)
    return s * (1 - s) * (a - (a * s).sum(-1, True) / total) / total


def _of_second_loss(each: Tensor, t: Tensor) -> Tensor:
    return each * torch.logsumexp(t, -1, keepdim=True) * torch.softmax(t, -1)


def document_of(ends: Tensor, at: Tensor) -> Tensor:
    """The number of the document of each position in `at` [T], int64; N behind the last one. ends: [N + 1], ascending from 0."""
    return torch.searchsorted(ends[1:].to(at.dtype).contiguous(), at, right=True)


def counts_of_documents(indices: Tensor, document: Tensor, documents: int, experts: int) -> Tensor:
    """[N, E] int32: how often each document chose each expert. indices: [T, K]; document: [T], N for padding."""
    flat = (document.unsqueeze(-1) * experts + indices).flatten()
    ones = torch.ones((), dtype=torch.int32, device=flat.device).expand(flat.shape)
    counts = torch.zeros((documents + 1) * experts, dtype=torch.int32, device=flat.device).scatter_add_(0, flat, ones)
    return counts.view(documents + 1, experts)[:documents]


def document_losses(
    logits: Tensor, counts: Tensor, document: Tensor, ends: Tensor, top_k: int, score: str, aux: float, z: float
) -> Tensor:
    """The loss [] of packed documents: the first one as the mean over those that are not empty, the second over all their rows.
    logits: [T, E]."""
    t, padding = logits.to(wide(logits.dtype)), (document >= counts.shape[0]).unsqueeze(-1)
    loss = t.new_zeros(())
    if aux:
        s = _scores(t, score)
        q = s if score == "softmax" else s / s.sum(-1, True)
        loss = loss + (_of_shares(counts, document, ends, top_k, aux, t.dtype) * q).masked_fill(padding, 0.0).sum()
    if z:
        squares = torch.logsumexp(t, -1, keepdim=True).square().masked_fill(padding, 0.0)
        loss = loss + squares.sum() * (z / ends[-1].clamp(min=1).to(t.dtype))
    return loss


def document_losses_bwd(
    dloss: Tensor,
    logits: Tensor,
    counts: Optional[Tensor],
    document: Tensor,
    ends: Tensor,
    top_k: int,
    score: str,
    aux: float,
    z: float,
) -> Tensor:
    """The gradient [T, E] of `document_losses`, in dloss's dtype; what it is in rows of padding has no meaning."""
    t = logits.to(dloss.dtype)
    d = torch.zeros_like(t)
    if aux:
        assert counts is not None
        d += _of_first_loss(dloss * _of_shares(counts, document, ends, top_k, aux, t.dtype), t, score)
    if z:
        d += _of_second_loss(dloss * (2 * z / ends[-1].clamp(min=1).to(t.dtype)), t)
    return d


def _of_shares(counts: Tensor, document: Tensor, ends: Tensor, top_k: int, aux: float, dtype: torch.dtype) -> Tensor:
    """a [T, E], the first loss's gradient for the shares q: it is sum a q. 0 for padding."""
    lengths = ends.diff().to(dtype)
    each = aux * counts.shape[-1] / (top_k * lengths.square().clamp(min=1) * (lengths > 0).sum().clamp(min=1))
    a = torch.nn.functional.pad(counts * each.unsqueeze(-1), (0, 0, 0, 1))  # a last row, of padding
    return a.index_select(0, document)
