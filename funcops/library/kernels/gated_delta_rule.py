"""The gated delta rule in chunks of C times. q, k: [B, T, K, D]; v, y: [B, T, H, V]; g, beta: [B, T, H]; state: [B, H, D, V].

Within a chunk whose state at the start is S, with c_i = g_1 + .. + g_i and P_ij = exp(c_i - c_j) for j <= i, else 0:

    e_i = v_i - exp(c_i) S^T k_i        (I + L) d = beta e        L_ij = beta_i P_ij k_i.k_j for j < i
    y_i = exp(c_i) S^T q_i + sum over j of P_ij q_i.k_j d_j        S' = exp(c_C) S + sum over j of exp(c_C - c_j) k_j d_j^T

All chunks at once are batched products and triangular solves; only S goes from chunk to chunk, by two products each. Everything is
in the wide dtype and rounded once. A chunk of one time is the recurrence itself. arXiv:2412.06464, section 3.3.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from funcops.engine.backend import kernel, wide


class _Chunks(NamedTuple):
    """The N chunks of all G = B H heads. `u` and `w` give d = u - w S."""

    q: Tensor  # [G, N, C, D], scaled
    k: Tensor
    v: Tensor  # [G, N, C, V]
    beta: Tensor  # [G, N, C, 1]
    since: Tensor  # [G, N, C, 1], the decay since the start of the chunk
    until: Tensor  # [G, N, C, 1], the decay until its end
    total: Tensor  # [G, N, 1, 1], the decay over it
    pair: Tensor  # [G, N, C, C], P
    system: Tensor  # [G, N, C, C], L in its lower triangle
    u: Tensor  # [G, N, C, V]
    w: Tensor  # [G, N, C, D]


def _chunked(t: Tensor, heads: int, size: int) -> Tensor:
    """[B, T, K or H, *] as [G, N, C, *] in the wide dtype: heads repeated for their groups, T filled up with zeros, which change no
    state."""
    b, length, own, *rest = t.shape
    count = -(-length // size)
    t = F.pad(t.to(wide(t.dtype)), (0, 0) * len(rest) + (0, 0, 0, count * size - length))
    t = t if own == heads else t.repeat_interleave(heads // own, 2)
    return t.transpose(1, 2).reshape(b * heads, count, size, *rest)


def _whole(t: Tensor, like: Tensor, heads: int) -> Tensor:
    """The gradient of `like` from [G, N, C, *]: cut off at T, and summed over the heads of a group."""
    b, length, own, *rest = like.shape
    t = t.reshape(b, own, heads // own, t.shape[1] * t.shape[2], *rest)[:, :, :, :length].sum(2)
    return t.transpose(1, 2).to(like.dtype, memory_format=torch.contiguous_format)


def _prepared(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, size: int) -> _Chunks:
    heads = v.shape[2]
    qs, ks, vs, gs, rate = (_chunked(t, heads, size) for t in (q, k, v, g, beta))
    c, rate = gs.cumsum(-1), rate.unsqueeze(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    pair = (c.unsqueeze(-1) - c.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    since, last = c.unsqueeze(-1).exp(), c[..., -1:]
    system = rate * (ks @ ks.mT) * pair
    right = torch.cat((rate * vs, rate * since * ks), -1)
    u, w = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split((v.shape[3], k.shape[3]), -1)
    until, total = (last - c).exp().unsqueeze(-1), last.exp().unsqueeze(-1)
    return _Chunks(qs * scale, ks, vs, rate, since, until, total, pair, system, u, w)


def _states(of: _Chunks, first: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    """The states at the starts of the chunks [G, N, D, V], and the last one [G, D, V]."""
    (groups, count, _, width), size = of.u.shape, of.k.shape[3]
    s = of.u.new_zeros((groups, size, width)) if first is None else first.reshape(groups, size, width)
    written, found = (of.until * of.k).mT, []
    for n in range(count):
        found.append(s)
        d = torch.baddbmm(of.u[:, n], of.w[:, n], s, alpha=-1)
        s = torch.baddbmm(of.total[:, n] * s, written[:, n], d)
    return torch.stack(found, 1) if found else of.u.new_zeros((groups, 0, size, width)), s


@kernel(library=True)
def gated_delta_rule_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Optional[Tensor], scale: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Returns y and the state after the last time, in the wide dtype."""
    of = _prepared(q, k, v, g, beta, scale, max(min(chunk, q.shape[1]), 1))
    states, last = _states(of, state)
    d = of.u - of.w @ states
    y = (of.since * of.q) @ states + (of.pair * (of.q @ of.k.mT)) @ d
    b, _, heads, width = v.shape
    last = last.reshape(b, heads, k.shape[3], width)
    return _whole(y, v, heads), last.clone() if not v.shape[1] else last


@kernel(library=True)
def gated_delta_rule_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Optional[Tensor],
    dy: Optional[Tensor],
    dlast: Optional[Tensor],
    scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v, g, beta and the first state. dy or the gradient of the last state may be None, for zero."""
    heads, size = v.shape[2], max(min(chunk, q.shape[1]), 1)
    of = _prepared(q, k, v, g, beta, scale, size)
    states, _ = _states(of, state)
    out = torch.zeros_like(of.v) if dy is None else _chunked(dy, heads, size)
    d, gram, scores = of.u - of.w @ states, of.k @ of.k.mT, of.q @ of.k.mT
    read, written = of.since * of.q, of.until * of.k
    ends, dd, dstate = _states_bwd(of, (of.pair * scores).mT @ out, read.mT @ out, written, dlast)
    # through d = (I + L)^-1 beta e
    dr = torch.linalg.solve_triangular(of.system.mT, dd, upper=True, unitriangular=True)
    seen, de = of.k @ states, of.beta * dr
    dseen = -of.since * de
    dlower = (dr @ d.mT).tril_(-1).neg_() * of.pair  # of beta_i k_i.k_j
    dgram, dscores = of.beta * dlower, (out @ d.mT) * of.pair
    dread, dwritten = out @ states.mT, d @ ends.mT
    dq = of.since * dread + dscores @ of.k
    dk = dseen @ states.mT + (dgram + dgram.mT) @ of.k + dscores.mT @ of.q + of.until * dwritten
    dbeta = (dr * (of.v - of.since * seen)).sum(-1) + (dlower * gram).sum(-1)
    # each decay is an exponential of c: its gradient is the gradient of c
    pairs, ended = dgram * gram + dscores * scores, (written * dwritten).sum(-1)
    dc = (dseen * seen).sum(-1) + (read * dread).sum(-1) + pairs.sum(-1) - pairs.sum(-2) - ended
    dc[..., -1] += ended.sum(-1) + of.total[..., 0, 0] * (states * ends).sum((-1, -2))
    dg = dc.flip(-1).cumsum(-1).flip(-1)
    found = [_whole(t, like, heads) for t, like in ((dq * scale, q), (dk, k), (de, v), (dg, g), (dbeta, beta))]
    return found[0], found[1], found[2], found[3], found[4], dstate.reshape(v.shape[0], heads, k.shape[3], v.shape[3])


def _states_bwd(
    of: _Chunks, dd_of_y: Tensor, ds_of_y: Tensor, written: Tensor, dlast: Optional[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the states at the ends of the chunks [G, N, D, V], of d [G, N, C, V], and of the first state [G, D, V]."""
    groups, count, size, width = ds_of_y.shape
    ds = ds_of_y.new_zeros((groups, size, width)) if dlast is None else dlast.reshape(groups, size, width).clone()
    ends, dds = [], []
    for n in reversed(range(count)):
        ends.append(ds)
        dds.append(torch.baddbmm(dd_of_y[:, n], written[:, n], ds))
        ds = torch.baddbmm(torch.addcmul(ds_of_y[:, n], of.total[:, n], ds), of.w[:, n].mT, dds[-1], alpha=-1)
    if not count:
        return ds_of_y, dd_of_y, ds
    return torch.stack(ends[::-1], 1), torch.stack(dds[::-1], 1), ds
