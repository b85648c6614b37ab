"""Attention whose scores may have a cap, ALiBi and a bias beside the product, and whose rows may see only some of the keys.

q: [B, T, H, D]; k: [B, S, K, D]; v: [B, S, K, V] with K dividing H; out: [B, T, H, V]; logsumexp: [B, H, T] in the wide dtype.

    s = scale q k^T        s = softcap tanh(s / softcap)        s = s - slope_h |j - i| + bias        out = softmax(s) v

The last row's own key is the last: row t is at position i = t + S - T. `causal`: it sees keys j <= i; `window`: only the last of
them, i - j < window. With `cu_seqlens` [N + 1], from 0 to S, the rows at positions of a sequence see only its keys. 0 means no
window, and no cap. A row that sees no key (a bias of -inf) has out 0 and logsumexp -inf.

The bodies take some rows at a time, with the keys that these may see: with a window every row costs the same. No [T, S]
matrix is saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, tracing, wide
from funcops.engine.backend.once import once

ROWS, SCORES = 128, 1 << 22  # rows at a time: at most ROWS, and so few that they have at most SCORES scores


class Score(NamedTuple):
    """How scores are computed from products, and which are masked."""

    causal: bool
    window: int
    softcap: float
    alibi: bool
    scale: float


class _Block(NamedTuple):
    """Some rows, the keys that any of them may see, and the shift from a row's number to its own key's."""

    rows: slice
    keys: slice
    shift: int


@kernel()
def scored_attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    causal: bool,
    window: int,
    softcap: float,
    alibi: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Compute out and logsumexp."""
    score, dtype = Score(causal, window, softcap, alibi, scale), wide(q.dtype)
    out, lse = q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)
    if nothing_to_see(q, k):
        return out.zero_(), lse.fill_(float("-inf"))
    groups, keys, values = q.shape[2] // k.shape[2], by_heads(k, dtype), by_heads(v, dtype)
    ids = _ids(cu_seqlens, k)
    for block in _blocks(q, k, cu_seqlens, score):
        s, _ = _scores(_rows(q, block, groups, dtype), keys, bias, ids, block, score)
        top = s.amax(-1, keepdim=True)
        top = top.masked_fill(top == float("-inf"), 0.0)
        p = s.sub_(top).exp_()
        total = p.sum(-1, keepdim=True)
        found = _unfolded(torch.matmul(_folded(p, groups), values[:, :, block.keys]), groups) / total.masked_fill(total == 0, 1.0)
        out[:, block.rows] = found.transpose(1, 2)
        lse[..., block.rows] = (top + total.log()).squeeze(-1)
    return out, lse


@scored_attention_fwd.fake
def _fake_fwd(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide(q.dtype))
    return q.new_empty((*q.shape[:3], v.shape[3])), lse


@kernel()
def scored_attention_bwd(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    out: Tensor,
    lse: Tensor,
    causal: bool,
    window: int,
    softcap: float,
    alibi: bool,
    scale: float,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    """Compute dq, dk, dv and, if `wants_bias`, dbias, from out and logsumexp: the probabilities are recomputed. As for
    `attention_bwd`, out and logsumexp may be over more keys."""
    score, dtype, groups = Score(causal, window, softcap, alibi, scale), wide(q.dtype), q.shape[2] // k.shape[2]
    dq, keys, values = q.new_zeros(q.shape), by_heads(k, dtype), by_heads(v, dtype)
    dk, dv = torch.zeros_like(keys), torch.zeros_like(values)
    dbias = bias.new_zeros(bias.shape) if bias is not None and wants_bias else None
    if not nothing_to_see(q, k):
        ids, lse = _ids(cu_seqlens, k), lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)
        along = (dy.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).unsqueeze(-1)
        for block in _blocks(q, k, cu_seqlens, score):
            rows, at = _rows(q, block, groups, dtype), block.keys
            s, t = _scores(rows, keys, bias, ids, block, score)
            p = s.sub_(lse[:, :, block.rows]).exp_()
            d = _rows(dy, block, groups, dtype)
            dv[:, :, at] += torch.matmul(_folded(p, groups).mT, d)
            ds = _unfolded(torch.matmul(d, values[:, :, at].mT), groups).sub_(along[:, :, block.rows]).mul_(p)
            if dbias is not None:
                dbias[:, :, block.rows, at] = ds.sum_to_size((*dbias.shape[:2], *ds.shape[2:])).to(dbias.dtype)
            if t is not None:
                ds = ds * (1 - t * t)
            ds = _folded(ds.mul_(scale), groups)
            dk[:, :, at] += torch.matmul(ds.mT, rows)
            dq[:, block.rows] = _unfolded(torch.matmul(ds, keys[:, :, at]), groups).transpose(1, 2)
    dk, dv = (_contiguous(t.transpose(1, 2)).to(q.dtype) for t in (dk, dv))
    return dq, dk, dv, dbias


@scored_attention_bwd.fake
def _fake_bwd(
    q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor], wants_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Optional[Tensor]]:
    dbias = None if bias is None or not wants_bias else bias.new_empty(bias.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dbias


def nothing_to_see(q: Tensor, k: Tensor) -> bool:
    return q.numel() == 0 or k.numel() == 0


def alibi_slopes(heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """2^(-8 h / n) for the first n heads, n the last power of two; then every other slope of 2 n heads. arXiv:2108.12409."""
    n = 1 << (heads.bit_length() - 1)
    h = torch.arange(1, heads + 1, device=device, dtype=dtype)
    return torch.where(h <= n, -8 * h / n, -4 * (2 * (h - n) - 1) / n).exp2()


def read_here(cu_seqlens: Tensor) -> bool:
    """Whether the ends of sequences can be read on the host. A tracer has no numbers, and reading a device's would wait for it."""
    return cu_seqlens.is_cpu and not tracing()


def _ids(cu_seqlens: Optional[Tensor], k: Tensor) -> Optional[Tensor]:
    """The sequence of each key, if rows of all sequences are computed together; else None."""
    if cu_seqlens is None or read_here(cu_seqlens):
        return None
    return once(sequence_of, cu_seqlens, k.shape[1])


def to_the_last(cu_seqlens: Tensor, rows: int) -> Tensor:
    """The starts of sequences, with one more that ends with the rows: rows from the last end on, which nobody notices on a device,
    where the values are not read, see each other alone."""
    return torch.nn.functional.pad(cu_seqlens, (0, 1), value=rows)


def sequence_of(cu_seqlens: Tensor, rows: int) -> Tensor:
    """The sequence of each row; N for rows from the last of N ends on."""
    at = torch.arange(rows, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True)


def _blocks(q: Tensor, k: Tensor, cu_seqlens: Optional[Tensor], score: Score) -> Iterator[_Block]:
    """Yield blocks of rows of one sequence, in order."""
    (batch, t, heads, _), s = q.shape, k.shape[1]
    ends = [(0, t, 0, s)]
    if cu_seqlens is not None and read_here(cu_seqlens):
        given, before = cu_seqlens.tolist(), s - t  # the first row's position
        ends = [(max(a - before, 0), b - before, a, b) for a, b in zip(given, given[1:], strict=False) if max(a, before) < b]
    longest = min(s, ROWS + score.window) if score.window else s
    count = max(16, min(ROWS, SCORES // (batch * heads * longest)))
    for first, last, low, high in ends:
        shift = high - last
        for start in range(first, last, count):
            stop = min(start + count, last)
            begin = max(low, start + shift - score.window + 1) if score.window else low
            yield _Block(slice(start, stop), slice(begin, stop + shift if score.causal else high), shift)


def _scores(
    rows: Tensor, keys: Tensor, bias: Optional[Tensor], ids: Optional[Tensor], block: _Block, score: Score
) -> tuple[Tensor, Optional[Tensor]]:
    """Scores [B, H, rows, keys] of rows [B, K, G rows, D], with -inf for masked ones; and tanh, if there is a cap."""
    groups = rows.shape[2] // (block.rows.stop - block.rows.start)
    s, t = _unfolded(torch.matmul(rows, keys[:, :, block.keys].mT), groups).mul_(score.scale), None
    if score.softcap:
        t = torch.tanh(s / score.softcap)
        s = t * score.softcap
    if not (score.alibi or score.causal or bias is not None or ids is not None):
        return s, t
    i = torch.arange(block.rows.start, block.rows.stop, device=rows.device).unsqueeze(-1)
    j = torch.arange(block.keys.start, block.keys.stop, device=rows.device)
    away = j - i - block.shift
    if score.alibi:
        s = s - alibi_slopes(s.shape[1], s.device, s.dtype)[:, None, None] * away.abs()
    if bias is not None:
        s = s + bias[:, :, block.rows, block.keys]
    if score.causal:
        hidden = away > 0 if not score.window else (away > 0) | (away <= -score.window)
        s = s.masked_fill(hidden, float("-inf"))
    if ids is not None:
        of_rows = ids[block.rows.start + block.shift : block.rows.stop + block.shift]
        s = s.masked_fill(of_rows.unsqueeze(-1) != ids[block.keys], float("-inf"))
    return s, t


def by_heads(t: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S, K, D] as [B, K, S, D], contiguous."""
    return _contiguous(t.transpose(1, 2).to(dtype))


def _contiguous(t: Tensor) -> Tensor:
    return t if t.is_contiguous() else t.clone(memory_format=torch.contiguous_format)


def _rows(t: Tensor, block: _Block, groups: int, dtype: torch.dtype) -> Tensor:
    """Rows of [B, T, H, D] as [B, K, G rows, D]: the heads of a key head's group one after the other."""
    return _folded(by_heads(t[:, block.rows], dtype), groups)


def _folded(t: Tensor, groups: int) -> Tensor:
    """[B, H, rows, *] as [B, K, G rows, *]."""
    return t.unflatten(1, (-1, groups)).flatten(2, 3)


def _unfolded(t: Tensor, groups: int) -> Tensor:
    """[B, K, G rows, *] as [B, H, rows, *]."""
    return t.unflatten(2, (groups, -1)).flatten(1, 2)
