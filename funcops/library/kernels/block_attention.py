"""Attention in blocks of queries that begin at multiples of `Pins.queries`, in the mode of `pins`, on the CPU.

The order in which torch's kernel sums depends on how many queries and keys it gets. Here each call has the queries at positions
[b n, (b + 1) n) of one block, n = `Pins.queries`, and the keys from the first that the block may see to the end of the block;
queries and keys that do not exist are zeros, and a summand of the scores hides what a query may not see. So all sizes follow from
the position, and a position's y does not depend on what comes after it, on how many queries are computed with it, or on whether
keys come from a sequence or from a cache. The kernel takes 32 of these queries at a time by itself, so a decoding call has 32.

q: [B, T, H, D]; k: [B, S, K, D]; v: [B, S, K, V] with K dividing H; logsumexp: [B, H, T] in the wide dtype.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcops.engine.backend import wide
from funcops.engine.errors import fail
from funcops.library.kernels.pins import VECTORS, Pins, pins, require_eager, vectorized
from funcops.library.kernels.scored_attention import Score, alibi_slopes, nothing_to_see

_forward: Any = torch._scaled_dot_product_flash_attention_for_cpu
_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class Block(NamedTuple):
    """Positions [low, stop) of queries, which see keys from `begin` on."""

    low: int
    stop: int
    begin: int


def block_at(position: int, size: int, window: int, chunk: int) -> Block:
    """The block of a position. Keys begin at a multiple of its size."""
    low = position - position % size
    first = max(low - window + 1 if window else 0, low - low % chunk if chunk else 0, 0)
    return Block(low, low + size, first - first % size)


def require_plain(where: str, q: Tensor, bias: Tensor | None, softcap: float) -> None:
    """Raise for a device or a tracer, and for options that change scores otherwise than by a summand of their positions."""
    require_eager(f"{where} in invariant mode", q)
    for name, given in (("bias", bias is not None), ("softcap", bool(softcap))):
        if given:
            fail(where, f"cfg.{name}", "off in invariant mode, in which torch's kernel computes the scores", "on")


def hidden(block: Block, score: Score, chunk: int, heads: int, dtype: torch.dtype) -> Tensor:
    """The summand of a block's scores, [queries, keys] or, with ALiBi, [1, H, queries, keys]."""
    if score.window or chunk or score.alibi:
        return _summand(block, score.window, chunk, heads if score.alibi else 0, dtype)
    # of all blocks the last columns, so that one is made for all
    width = block.stop - block.begin
    return _triangle(block.stop - block.low, 1 << (width - 1).bit_length(), dtype)[:, -width:]


@functools.lru_cache(maxsize=16)
def _triangle(size: int, width: int, dtype: torch.dtype) -> Tensor:
    width = max(size, width)
    last = torch.full((size, size), float("-inf"), dtype=dtype).triu_(1)
    return torch.cat((torch.zeros(size, width - size, dtype=dtype), last), 1)


@functools.lru_cache(maxsize=64)
def _summand(block: Block, window: int, chunk: int, alibi_heads: int, dtype: torch.dtype) -> Tensor:
    i = torch.arange(block.low, block.stop).unsqueeze(-1)
    j = torch.arange(block.begin, block.stop)
    unseen = j > i
    if window:
        unseen |= j <= i - window
    if chunk:
        unseen |= j < i - i % chunk
    found = torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
    if not alibi_heads:
        return found
    return found - alibi_slopes(alibi_heads, found.device, dtype)[:, None, None] * (i - j).abs().unsqueeze(0).unsqueeze(0)


def _heads(t: Tensor, width: int) -> Tensor:
    """[B, n, H, D] as [B, H, n, width] for the kernel."""
    t = t if t.stride()[-1] == 1 else t.contiguous()
    return (t if t.shape[-1] == width else pad(t, (0, width - t.shape[-1]))).transpose(1, 2)


class _Rows(NamedTuple):
    """The rows of a tensor [B, n, *] that are in a block, and how many rows of the block are before and after them."""

    at: slice
    before: int
    after: int

    def of(self, t: Tensor) -> Tensor:
        part = t[:, self.at]
        return part if not (self.before or self.after) else pad(part, (0, 0) * (t.dim() - 2) + (self.before, self.after))

    def cut(self, t: Tensor) -> Tensor:
        """Take the rows out of a block [B, size, *]."""
        return t[:, self.before : t.shape[1] - self.after]


def _rows(low: int, stop: int, first: int, last: int) -> _Rows:
    """`_Rows` of positions [low, stop) among the positions [first, last) that a tensor has."""
    begin, end = max(low, first), min(stop, last)
    return _Rows(slice(begin - first, end - first), begin - low, stop - end)


def _blocks(q: Tensor, k: Tensor, size: int, score: Score, chunk: int) -> list[tuple[Block, _Rows, _Rows]]:
    (t, s), found = (q.shape[1], k.shape[1]), []
    for low in range((s - t) - (s - t) % size, s, size):
        block = block_at(low, size, score.window, chunk)
        found.append((block, _rows(low, block.stop, s - t, s), _rows(block.begin, block.stop, 0, s)))
    return found


def _whole(q: Tensor, k: Tensor, score: Score) -> Tensor | None:
    """The summand of attention that is not causal, whose sizes are the sequence's own."""
    if not score.alibi:
        return None
    away = torch.arange(k.shape[1]) - torch.arange(q.shape[1]).unsqueeze(-1) - (k.shape[1] - q.shape[1])
    return (-alibi_slopes(q.shape[2], q.device, wide(q.dtype))[:, None, None] * away.abs()).unsqueeze(0)


class _Run(NamedTuple):
    """Neighbours of one length among packed sequences, which are a batch."""

    at: slice
    number: int

    def apart(self, t: Tensor) -> Tensor:
        """[1, T, *] as [number, length, *]."""
        return t[0, self.at].unflatten(0, (self.number, -1))

    def together(self, t: Tensor) -> Tensor:
        return t.flatten(0, 1)


def _runs(cu_seqlens: Tensor) -> list[_Run]:
    at, found = cu_seqlens.tolist(), list[_Run]()
    for a, b in zip(at, at[1:], strict=False):
        last = found[-1] if found else _Run(slice(0, 0), 1)
        if last.at.stop == a and (last.at.stop - last.at.start) == last.number * (b - a) > 0:
            found[-1] = _Run(slice(last.at.start, b), last.number + 1)
        elif a < b:
            found.append(_Run(slice(a, b), 1))
    return found


def runs_fwd(one: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """y and logsumexp of packed sequences, by `one(q, k, v)` of each run. The ends are read on the host, on a device too: a block
    of keys begins where its sequence does."""
    y = q.new_zeros((*q.shape[:3], v.shape[3]))
    of_rows = q.new_zeros(q.shape[:3], dtype=wide(q.dtype))
    for run in _runs(cu_seqlens):
        out, own = one(run.apart(q), run.apart(k), run.apart(v))
        y[0, run.at], of_rows[0, run.at] = run.together(out), run.together(own.transpose(1, 2))
    return y, of_rows.transpose(1, 2).contiguous()


def runs_bwd(
    one: Any, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, y: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of packed sequences, by `one(dy, q, k, v, y, lse)` of each run."""
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for run in _runs(cu_seqlens):
        d, *parts, out, own = [run.apart(t) for t in (dy, q, k, v, y, lse.transpose(1, 2))]
        for whole, part in zip((dq, dk, dv), one(d, *parts, out, own.transpose(1, 2)), strict=True):
            whole[0, run.at] = run.together(part)
    return dq, dk, dv


def block_fwd(
    pins: Pins, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, score: Score, chunk: int
) -> tuple[Tensor, Tensor]:
    """y and logsumexp."""
    dtype, width = wide(q.dtype), max(q.shape[3], v.shape[3])
    y, lse = q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)
    if nothing_to_see(q, k):
        return y, lse
    if cu_seqlens is not None:
        return runs_fwd(lambda q, k, v: block_fwd(pins, q, k, v, None, score, chunk), q, k, v, cu_seqlens)
    if not score.causal:
        out, lse = _forward(*[_heads(t, width) for t in (q, k, v)], 0.0, False, attn_mask=_whole(q, k, score), scale=score.scale)
        return out.transpose(1, 2)[..., : v.shape[3]], lse
    for block, of_q, of_k in _blocks(q, k, pins.queries, score, chunk):
        given = _heads(of_q.of(q), width), _heads(of_k.of(k), width), _heads(of_k.of(v), width)
        mask = hidden(block, score, chunk, q.shape[2], dtype)
        out, found = _forward(*given, 0.0, False, attn_mask=mask, scale=score.scale)
        y[:, of_q.at] = of_q.cut(out.transpose(1, 2))[..., : v.shape[3]]
        lse[..., of_q.at] = of_q.cut(found.transpose(1, 2)).transpose(1, 2)
    return y, lse


def block_bwd(
    pins: Pins,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    y: Tensor,
    lse: Tensor,
    score: Score,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv. dk and dv of a position are sums over the queries after it, in their order: of queries whose dy is 0 the terms
    are 0."""
    dq, dk, dv = torch.zeros_like(q), k.new_zeros(k.shape, dtype=wide(k.dtype)), v.new_zeros(v.shape, dtype=wide(v.dtype))
    width = max(q.shape[3], v.shape[3])
    if nothing_to_see(q, k):
        return dq, dk.to(k.dtype), dv.to(v.dtype)
    if cu_seqlens is not None:

        def one(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return block_bwd(pins, dy, q, k, v, None, y, lse, score, chunk)

        return runs_bwd(one, dy, q, k, v, cu_seqlens, y, lse)
    if not score.causal:
        given = [_heads(t, width) for t in (dy, q, k, v, y)]
        found = _backward(*given, lse.contiguous(), 0.0, False, attn_mask=_whole(q, k, score), scale=score.scale)
        return tuple([t.transpose(1, 2)[..., : of.shape[3]] for t, of in zip(found, (q, k, v), strict=True)])  # type: ignore[return-value]
    of_rows = lse.transpose(1, 2)
    for block, of_q, of_k in _blocks(q, k, pins.queries, score, chunk):
        given = [_heads(t, width) for t in (of_q.of(dy), of_q.of(q), of_k.of(k), of_k.of(v), of_q.of(y))]
        mask, own = hidden(block, score, chunk, q.shape[2], wide(q.dtype)), of_q.of(of_rows).transpose(1, 2).contiguous()
        d_q, d_k, d_v = (t.transpose(1, 2) for t in _backward(*given, own, 0.0, False, attn_mask=mask, scale=score.scale))
        dq[:, of_q.at] = of_q.cut(d_q)[..., : q.shape[3]]
        dk[:, of_k.at] += of_k.cut(d_k)[..., : k.shape[3]]
        dv[:, of_k.at] += of_k.cut(d_v)[..., : v.shape[3]]
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def slots_fwd(
    pins: Pins, q: Tensor, k: Tensor, v: Tensor, first: Tensor, ends: Tensor, score: Score, chunk: int
) -> tuple[Tensor, Tensor]:
    """y and logsumexp of new tokens over the slots of a cache: see `slot_attention`. k, v: [B, K, R, *]. Rows that are padding get
    0. The values of `first` and `ends` are read."""
    dtype, width, ring = wide(q.dtype), max(q.shape[3], v.shape[3]), k.shape[2]
    y, lse = q.new_zeros((*q.shape[:3], v.shape[3])), q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=dtype)
    for at, (sequences, number, row, token) in _pieces(first.tolist(), ends.tolist(), q.shape[1]).items():
        block = block_at(at, pins.queries, score.window, chunk)
        mask = hidden(block, score, chunk, q.shape[2], dtype)[..., at - block.low : at - block.low + VECTORS, :]
        of = torch.tensor(sequences)
        part = q.new_zeros((len(sequences), VECTORS, *q.shape[2:]))
        part[number, row] = q[of[number], token]
        given = [t if len(sequences) == len(q) else t[of] for t in (k, v)]
        keys, values = (_heads(_slots(t, block, ring).transpose(1, 2), width) for t in given)
        out, found = _forward(_heads(part, width), keys, values, 0.0, False, attn_mask=mask, scale=score.scale)
        y[of[number], token] = out.transpose(1, 2)[number, row][..., : v.shape[3]]
        lse.transpose(1, 2)[of[number], token] = found.transpose(1, 2)[number, row]
    return y, lse


def _pieces(first: list[int], ends: list[int], tokens: int) -> dict[int, tuple[list[int], Tensor, Tensor, Tensor]]:
    """The new tokens by blocks of 32 positions: the sequences that have some there and, of each token, the number of its sequence
    among these, its row in the block, and its number in the call."""
    found: dict[int, tuple[list[int], list[tuple[int, int, int]]]] = {}
    for b, (low, end) in enumerate(zip(first, ends, strict=True)):
        for position in range(low, min(end, low + tokens)):
            at = position - position % VECTORS
            sequences, rows = found.setdefault(at, ([], []))
            if not sequences or sequences[-1] != b:
                sequences.append(b)
            rows.append((len(sequences) - 1, position - at, position - low))
    made = {}
    for at, (sequences, rows) in found.items():
        number, row, token = torch.tensor(rows).unbind(1)
        made[at] = sequences, number, row, token
    return made


def _slots(t: Tensor, block: Block, ring: int) -> Tensor:
    """The keys of a block out of [B, K, R, *]. A slot whose position is not in the block has another one's key, which is hidden."""
    if block.stop <= ring:
        return t[:, :, block.begin : block.stop]
    return t[:, :, torch.arange(block.begin, block.stop) % ring]


def with_sink(lse: Tensor, sinks: Tensor) -> Tensor:
    """logsumexp [B, H, T] with a sink [H] for each head, in whole vectors in the mode."""
    both = lse, sinks.to(lse.dtype).unsqueeze(-1)
    return torch.logaddexp(*both) if pins() is None else vectorized(torch.logaddexp, *torch.broadcast_tensors(*both))
