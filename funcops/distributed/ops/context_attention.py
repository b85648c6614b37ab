"""Attention over a sequence that is sharded over an axis (context parallelism).

    as attention: y = softmax(s) v of this rank's queries, over the keys of all ranks; s = scale q k^T, with softcap c tanh(s / c)

x is `(q, k, v)`. q: [B, T/n, H, D]; k: [B, S/n, K, D], v: [B, S/n, K, V] with K dividing H; y, dy: [B, T/n, H, V]; one float
dtype. With `causal` T = S, and each rank has chunks r and 2n - 1 - r of 2n (`zigzag`): in that order all ranks compute the same
amount. Without, any order works.

    keys of rank j     queries that see them, causal
    j = r              all, causally: in zigzag order that is a causal mask too
    j < r              all see the first half, and none the second
    j > r              the second half sees all, and the first none

Keys that no query sees are skipped. The rest is merged by logsumexp: L = log(e^l + e^l'), y = y e^(l - L) + y' e^(l' - L), in the
wide dtype. In the backward each pair of queries and keys, given y and L over all keys, has its own part of dq, dk and dv. The parts
of dk and dv are sent and summed in the wide dtype.

`comm="gather"`: k and v are gathered during the attention to this rank's own; dk and dv are scattered. `comm="ring"`: k and v are
sent around the ring, each during the attention to the ones before, and dk and dv follow: k and v of two ranks at a time in memory.
`comm="heads"`: q, k and v are sent so that each rank has all tokens of its share of the heads, and y is sent back: one attention
as on one rank, in two all-to-alls of 1/n of the tensors each, and small ones of logsumexp. n must divide H and K. It serves what
attention does, except for ALiBi and a bias, of which a rank has all heads (arXiv:2309.14509).
`heads_axis`: two levels, for m ranks of a node on this axis, and n nodes on `axis`. Heads are exchanged within the node first, so
m must divide H and K; then q of m times the rows and 1/m of the heads attends over `axis` by gather or ring: between nodes go k and
v of 1/m of the heads. A rank has 1/(n m) of the sequence: zigzag over `axis`, and that over `heads_axis`, which is the order of one
axis of n m ranks (arXiv:2405.07719).
Kept: q, k, v (aliases), y (the caller's own output) and logsumexp: 1/n of what attention keeps. The backward sends k and v again.

With a window, chunks, ALiBi, a bias or packed sequences k and v are gathered first, and put in order; each half is then one
attention to the keys up to its end: of a window or chunks, only those that it reaches. These options are as in attention: ALiBi
and packed sequences need `causal`, a bias [B or 1, H or 1, T/n, S] has this rank's rows and all keys, cu_seqlens [N + 1] are the
whole sequence's, the same on all ranks. comm="ring" does not serve them, as a part of its keys has no place in one causal mask.
arXiv:2310.01889, arXiv:2407.21783.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> q, k = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8)
>>> v = torch.arange(4.0).reshape(1, 4, 1, 1).expand(1, 4, 1, 8)
>>> def each(mesh):
...     mine = tuple(dist.zigzag(t, mesh["cp"]) for t in (q, k, v))
...     cfg = dist.ContextAttentionConfig(mesh["cp"], causal=True)
...     y, residuals = dist.context_attention_fwd(None, mine, cfg)
...     dq, dk, dv = dist.context_attention_bwd(residuals, torch.ones_like(y), cfg)[1]
...     return y[..., 0].flatten(), dv.shape
...
>>> run_ranks({"cp": 2}, each)
[(tensor([0.0000, 1.5000]), torch.Size([1, 2, 1, 8])), (tensor([0.5000, 1.0000]), torch.Size([1, 2, 1, 8]))]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.by_heads import Exchange, Kept, check_heads
from funcops.distributed.checks import check_tensor, require_axis
from funcops.distributed.mesh import Axis
from funcops.distributed.zigzag import unzigzag
from funcops.engine.backend import wide
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import check, fail, require
from funcops.library.kernels import attention as kernels
from funcops.library.kernels.scored_attention import Score, nothing_to_see
from funcops.library.ops.attention import (
    AttentionConfig,
    check_bias,
    check_cu_seqlens,
    check_parts,
    check_qkv,
    indices_of,
    of_config,
)

__all__ = ["ContextAttentionConfig", "ContextAttentionResiduals"]
__all__ += ["context_attention", "context_attention_bwd", "context_attention_dgrad"]
__all__ += ["context_attention_fwd", "context_attention_init", "context_attention_wgrad"]


@config
class ContextAttentionConfig(AttentionConfig):
    """The fields of `AttentionConfig`; `axis`: the axis that shards the sequence; `comm`: "gather", "ring" or "heads";
    `heads_axis`: an axis that shards the parts of `axis` once more, and over which heads are exchanged before and after."""

    axis: Axis = field(kw_only=False)
    comm: str = "gather"
    heads_axis: Axis | None = None
    attends = False  # beyond what it communicates itself

    def __post_init__(self) -> None:
        super().__post_init__()
        where = type(self).__name__
        require_axis(where, self.axis)
        require(self.comm in ("gather", "ring", "heads"), where, "comm", "'gather', 'ring' or 'heads'", repr(self.comm))
        if self.heads_axis is not None:
            require_axis(where, self.heads_axis, "heads_axis")
            other = self.heads_axis.name != self.axis.name and self.comm != "heads"
            wanted = f"another axis than {self.axis.name!r}, with comm 'gather' or 'ring' between its groups"
            require(other, where, "heads_axis", wanted, f"{self.heads_axis.name!r} with {self.comm!r}")
        for name in ("alibi", "packed"):
            wanted = "False without causal (kernels take the last row to be at the last key)"
            require(self.causal or not getattr(self, name), where, name, wanted, True)
        in_parts = self.comm != "ring" or not self.in_order
        wanted = "'gather' or 'heads' with a window, chunks or packed sequences, 'gather' with ALiBi or a bias"
        require(in_parts and not (self.comm == "heads" and (self.alibi or self.bias)), where, "comm", wanted, repr(self.comm))
        all_heads = self.heads_axis is not None and (self.alibi or self.bias)
        require(not all_heads, where, "heads_axis", "None with ALiBi or a bias, of which a rank has all heads", self.heads_axis)

    @property
    def in_order(self) -> bool:
        """Whether keys must be in the order of the sequence."""
        return bool(self.reach) or self.alibi or self.bias or self.packed

    @property
    def ordered(self) -> bool:
        """Whether ranks have chunks in zigzag order."""
        return self.causal or self.in_order

    @property
    def exchange(self) -> Exchange | None:
        """The exchange of heads, before and after the attention over `axis`, or instead of it."""
        axis = self.axis if self.comm == "heads" else self.heads_axis
        return Exchange(axis, self.ordered) if axis is not None and axis.size > 1 else None

    @property
    def alone(self) -> bool:
        """Whether a rank has all keys of its heads, once these are exchanged."""
        return self.axis.size == 1 or self.comm == "heads"

    @property
    def ranks(self) -> int:
        """The number of ranks that share the sequence."""
        return self.axis.size * (1 if self.heads_axis is None else self.heads_axis.size)

    def nothing(self, q: Tensor, k: Tensor) -> bool:
        """Whether there is nothing to send: one rank, or no rows or keys where they are needed in the order of the sequence."""
        return self.ranks == 1 or ((self.in_order or self.exchange is not None) and nothing_to_see(q, k))

    def lowest(self, first: int) -> int:
        """A key before all those that rows from position `first` on see; the first of a chunk, from which chunks are counted."""
        if self.chunk:
            return 0 if self.packed else first - first % self.chunk
        return max(0, first - self.window + 1) if self.window else 0


class ContextAttentionResiduals(Residuals, static=("inputs",)):
    q: Tensor = saved("[B, T/n, H, D]", alias="x.0", needed_by=DGRAD)
    k: Tensor = saved("[B, S/n, K, D]", alias="x.1", needed_by=DGRAD)
    v: Tensor = saved("[B, S/n, K, V]", alias="x.2", needed_by=DGRAD)
    y: Tensor = saved("[B, T/n, H, V]", alias="y", needed_by=DGRAD)
    logsumexp: Tensor = saved("[B, H, T/n]", needed_by=DGRAD)
    more: Tensor | None = saved("[B or 1, H or 1, T/n, S] or [N + 1]", alias="x.3", needed_by=DGRAD)  # bias or cu_seqlens


@forward(ContextAttentionConfig)
def context_attention_fwd(
    params: None, x: tuple[Tensor, ...], cfg: ContextAttentionConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ContextAttentionResiduals | None]:
    """x: `(q, k, v)` of this rank, and the part that cfg adds -> y: [B, T/n, H, V]. Raises `ValueError` or `TypeError` for a wrong
    shape, dtype or device."""
    q, k, v, more = check_context_x("context_attention_fwd", x, cfg)
    y, lse = attended(q, k, v, more, cfg)
    kept = ContextAttentionResiduals.keep(cfg, needs, q=q, k=k, v=v, y=y, logsumexp=lse, more=more, inputs=Inputs.of(x))
    return y, kept


def check_context_x(where: str, x: object, cfg: ContextAttentionConfig) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Check a rank's x, and return q, k, v and the part after them, or None."""
    q, k, v, *rest = check_parts(where, x, cfg.parts)
    check_qkv(where, q, k, v, cfg.causal)
    if cfg.causal and q.shape[1] != k.shape[1]:
        fail(where, "x.1 (k)", f"as long as q, {q.shape[1]} (cfg.causal)", k.shape[1])
    for name, t in (("x.0 (q)", q), ("x.1 (k)", k), ("x.2 (v)", v)):
        check_tensor(where, name, t, (...,))
    for name, t in (("x.0 (q)", q),) * cfg.causal + (("x.1 (k)", k),) * cfg.bias:
        if cfg.ranks > 1 and t.shape[1] % 2:
            fail(where, name, "of an even length (two chunks in zigzag order)", t.shape[1])
    more = rest[0] if rest else None
    if more is not None:
        check_tensor(where, f"x.3 ({cfg.parts[3]})", more, (...,))
    if cfg.bias:
        check_bias(where, more, q, cfg.axis.size * k.shape[1])
    if cfg.packed:
        check_cu_seqlens(where, more, q, k, cfg, cfg.ranks)
    if cfg.exchange is not None:
        what = "cfg.comm is 'heads'; 'gather' takes any" if cfg.comm == "heads" else "cfg.heads_axis; without it any will do"
        check_heads(where, q, k, cfg.exchange.axis.size, what)
    return q, k, v, more


def attended(q: Tensor, k: Tensor, v: Tensor, more: Tensor | None, cfg: ContextAttentionConfig) -> tuple[Tensor, Tensor]:
    """y and logsumexp over the keys of all ranks."""
    nothing, exchange = cfg.nothing(q, k), cfg.exchange

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if nothing or cfg.alone:
            return kernels.attend_fwd(q, k, v, *of_config(more, cfg), cfg.score(q.shape[3]), *cfg.limits)
        return _attend_in_order(q, k, v, more, cfg) if cfg.in_order else _attend(q, k, v, cfg)

    return attend(q, k, v) if nothing or exchange is None else exchange.fwd(attend, q, k, v)


@dgrad_of(ContextAttentionResiduals)
def context_attention_dgrad(
    residuals: ContextAttentionResiduals, dy: Tensor, cfg: ContextAttentionConfig
) -> tuple[tuple[Tensor, ...], None]:
    """`(dq, dk, dv)` of this rank, and dbias for a bias or None for cu_seqlens. No params, so pending is None."""
    if not residuals.needs.x:
        return residuals.nothing(), None
    return context_gradients("context_attention_dgrad", residuals, dy, cfg), None


def context_gradients(where: str, residuals: Any, dy: Tensor, cfg: ContextAttentionConfig) -> Any:
    """The requested gradients of the parts of x."""
    needs, at, more, q = residuals.needs, indices_of(residuals), residuals.more, residuals.q
    check_tensor(where, "dy", dy, (...,))
    check(where, "dy", dy, residuals.y.shape, q.dtype, q)
    kept = Kept(q, residuals.k, residuals.v, residuals.y, residuals.logsumexp)
    sends, wants_bias = needs.input(at[1]) or needs.input(at[2]), cfg.bias and needs.input(at[3])
    nothing, exchange = cfg.nothing(q, kept.k), cfg.exchange

    def gradients(dy: Tensor, one: Kept) -> Any:
        if nothing or cfg.alone:
            given = dy, *one[:3], *of_config(more, cfg), *one[3:]
            return kernels.attend_bwd(*given, cfg.score(q.shape[3]), wants_bias, *cfg.limits)
        if cfg.in_order:
            return _backward_in_order(dy, one, more, cfg, sends, wants_bias)
        return (_gathered_backward if cfg.comm == "gather" else _ring_backward)(_Backward(dy, one, cfg), *one[1:3], cfg, sends)

    grads: Any = gradients(dy, kept) if nothing or exchange is None else exchange.bwd(gradients, dy, kept, sends)
    grads = (*grads[:3], *((grads[3],) if cfg.bias else (None,) * cfg.packed))
    return residuals.inputs.make(tuple([g if needs.input(i) else None for i, g in zip(at, grads, strict=False)]))


class _Piece(NamedTuple):
    """Some rows, the keys that they see, and bias or cu_seqlens for these."""

    rows: slice
    keys: slice
    bias: Tensor | None
    cu_seqlens: Tensor | None

    @staticmethod
    def all_of(more: Tensor | None, cfg: ContextAttentionConfig, t: int, s: int) -> list[_Piece]:
        """A rank's rows: at once, or if causal by chunk, whose last row is at the last key."""
        bias, ends = of_config(more, cfg)
        rank, n, chunk = cfg.axis.rank, cfg.axis.size, t // 2
        spans = [(slice(None), 0, n * s)]
        if cfg.causal:
            firsts = rank * chunk, (2 * n - 1 - rank) * chunk
            spans = [(slice(i * chunk, (i + 1) * chunk), cfg.lowest(firsts[i]), firsts[i] + chunk) for i in (0, 1)]
        return [
            _Piece(
                rows,
                slice(first, last),
                None if bias is None else bias[:, :, rows, first:last],
                None if ends is None else (ends - first).clamp_(0, last - first),
            )
            for rows, first, last in spans
        ]


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """One message: the numbers of k, then the numbers of v."""
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _parts(messages: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Views of messages [*, numbers], in the shapes of k and v: [*, B, S, K, D] and [*, B, S, K, V]."""
    first, ranks = k.numel(), messages.shape[:-1]
    return messages[..., :first].view(*ranks, *k.shape), messages[..., first:].view(*ranks, *v.shape)


def _gathered(sent: Tensor, axis: Axis) -> Tensor:
    """The messages of all ranks: [n, numbers]."""
    messages = comm.wait(sent, axis)
    return messages.view(axis.size, len(messages) // axis.size)


def _in_order(k: Tensor, v: Tensor, cfg: ContextAttentionConfig) -> list[Tensor]:
    """k and v of all ranks, in the order of the sequence."""
    every = _gathered(comm.start_gather(_packed(k, v), cfg.axis), cfg.axis)
    return [unzigzag(part.movedim(0, 1).flatten(1, 2), cfg.axis, 1) for part in _parts(every, k, v)]


def _attend_in_order(q: Tensor, k: Tensor, v: Tensor, more: Tensor | None, cfg: ContextAttentionConfig) -> tuple[Tensor, Tensor]:
    (k, v), s, score = _in_order(k, v, cfg), k.shape[1], cfg.score(q.shape[3])
    found = [
        kernels.attend_fwd(q[:, one.rows], k[:, one.keys], v[:, one.keys], one.bias, one.cu_seqlens, score, *cfg.limits)
        for one in _Piece.all_of(more, cfg, q.shape[1], s)
    ]
    rows = q.shape[1] // len(found)
    return torch.cat([y for y, _ in found], 1), torch.cat([lse[..., :rows] for _, lse in found], -1)


def _backward_in_order(
    dy: Tensor, kept: Kept, more: Tensor | None, cfg: ContextAttentionConfig, sends: bool, wants_bias: bool
) -> tuple[Tensor | None, ...]:
    q, axis = kept.q, cfg.axis
    (keys, values), score = _in_order(kept.k, kept.v, cfg), cfg.score(q.shape[3])
    sums, found = [torch.zeros_like(t, dtype=wide(q.dtype)) for t in (keys, values)], []
    for one in _Piece.all_of(more, cfg, q.shape[1], kept.k.shape[1]):
        dy_rows, q_rows, y_rows = (t[:, one.rows] for t in (dy, q, kept.y))
        of_rows = kept.logsumexp[..., one.rows].contiguous()
        k, v = keys[:, one.keys], values[:, one.keys]
        given = dy_rows, q_rows, k, v, one.bias, one.cu_seqlens, y_rows, of_rows, score, wants_bias
        dq, dk, dv, dbias = kernels.attend_bwd(*given, *cfg.limits)
        for total, part in zip(sums, (dk, dv), strict=True):
            total[:, one.keys] += part
        if dbias is not None:
            dbias = torch.nn.functional.pad(dbias, (one.keys.start, keys.shape[1] - one.keys.stop))
        found.append((dq, dbias))
    own: tuple[Tensor | None, ...] = None, None
    if sends:
        chunks = [total.chunk(2 * axis.size, 1) for total in sums]
        messages = [_packed(*[torch.cat((one[r], one[-1 - r]), 1) for one in chunks]) for r in range(axis.size)]
        own = _parts(comm.scatter_sum(torch.cat(messages), axis).to(q.dtype), kept.k, kept.v)
    biases = [dbias for _, dbias in found if dbias is not None]
    return torch.cat([dq for dq, _ in found], 1), *own, torch.cat(biases, 2) if biases else None


class _Pair(NamedTuple):
    """The queries from `query` on see the keys before `keys` of each rank in a group."""

    query: int
    keys: int
    causal: bool

    @staticmethod
    def of(rank: int, other: int, cfg: ContextAttentionConfig, t: int, s: int) -> _Pair:
        if not cfg.causal or other == rank:
            return _Pair(0, s, cfg.causal)
        return _Pair(0, s // 2, False) if other < rank else _Pair(t // 2, s, False)


def _groups(cfg: ContextAttentionConfig) -> list[range]:
    """The other ranks, grouped by which queries see their keys."""
    rank, n = cfg.axis.rank, cfg.axis.size
    return [group for group in (range(rank), range(rank + 1, n)) if group]


def _keys_of_ranks(messages: Tensor, keys: int, k: Tensor, v: Tensor) -> list[Tensor]:
    """k and v, [B, ranks keys, K, D or V], from the messages of ranks, in the shapes of k and v: of each the first keys."""
    return [part[:, :, :keys].movedim(0, 1).flatten(1, 2).contiguous() for part in _parts(messages, k, v)]


def _travelling(kv: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank and its k and v, this rank's first; the next are in flight meanwhile."""
    for step in range(axis.size):
        sent = comm.start_shift(kv, axis, 1) if step + 1 < axis.size else None
        yield (axis.rank - step) % axis.size, kv
        if sent is not None:
            kv = comm.wait(sent, axis)[0]


def _score(cfg: ContextAttentionConfig, q: Tensor, causal: bool) -> Score:
    return cfg.score(q.shape[3])._replace(causal=causal)


def _forward(q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    return kernels.attend_fwd(q, k, v, None, None, score)


def _attend(q: Tensor, k: Tensor, v: Tensor, cfg: ContextAttentionConfig) -> tuple[Tensor, Tensor]:
    """y and logsumexp [B, H, T/n] over the keys of all ranks."""
    axis, t, s = cfg.axis, q.shape[1], k.shape[1]
    kv = _packed(k, v)
    sent = comm.start_gather(kv, axis) if cfg.comm == "gather" else None
    out, lse = _forward(q, k, v, _score(cfg, q, cfg.causal))
    total = out.to(wide(q.dtype)), lse[..., :t].contiguous()

    def add(other: int, messages: Tensor) -> None:
        pair = _Pair.of(axis.rank, other, cfg, t, s)
        if s and t:
            keys, values = _keys_of_ranks(messages, pair.keys, k, v)
            out, lse = _forward(q[:, pair.query :], keys, values, _score(cfg, q, pair.causal))
            kernels.merge(total, out, lse, pair.query)

    if sent is None:
        for other, one in _travelling(kv, axis):
            if other != axis.rank:
                add(other, one[None])
    else:
        every = _gathered(sent, axis)
        for group in _groups(cfg):
            add(group[0], every[group[0] : group[-1] + 1])
    return total[0].to(q.dtype), total[1]


class _Backward:
    """Sums dq in the wide dtype over the pairs with which it is called."""

    def __init__(self, dy: Tensor, kept: Kept, cfg: ContextAttentionConfig) -> None:
        self.dy, self.q, self.y, self.lse, self.cfg = dy, kept.q, kept.y, kept.logsumexp, cfg
        self.dq = torch.zeros_like(self.q, dtype=wide(self.q.dtype), memory_format=torch.contiguous_format)

    def __call__(self, pair: _Pair, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """dk and dv in the wide dtype."""
        at = pair.query
        lse = self.lse[..., at:].contiguous()
        dy, q, y = (t[:, at:] for t in (self.dy, self.q, self.y))
        score = _score(self.cfg, q, pair.causal)
        dq, dk, dv, _ = kernels.attend_bwd(dy, q, k, v, None, None, y, lse, score, False)
        self.dq[:, at:] += dq
        return dk.to(self.dq.dtype), dv.to(self.dq.dtype)

    def result(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.dq.to(self.q.dtype), dk.to(self.q.dtype), dv.to(self.q.dtype)


def _gathered_backward(
    backward: _Backward, k: Tensor, v: Tensor, cfg: ContextAttentionConfig, sends: bool
) -> tuple[Tensor, Tensor, Tensor]:
    axis, t, s = cfg.axis, backward.q.shape[1], k.shape[1]
    sent = comm.start_gather(_packed(k, v), axis)
    own = backward(_Pair.of(axis.rank, axis.rank, cfg, t, s), k, v)
    every = _gathered(sent, axis)
    messages = own[0].new_zeros(every.shape)
    sums = _parts(messages, k, v)
    for total, part in zip(sums, own, strict=True):
        total[axis.rank] = part
    for group in _groups(cfg):
        pair = _Pair.of(axis.rank, group[0], cfg, t, s)
        chosen = slice(group[0], group[-1] + 1)
        found = backward(pair, *_keys_of_ranks(every[chosen], pair.keys, k, v))
        for total, part in zip(sums, found, strict=True):
            total[chosen, :, : pair.keys] = part.unflatten(1, (len(group), pair.keys)).movedim(1, 0)
    return backward.result(*(_parts(comm.scatter_sum(messages.flatten(), axis), k, v) if sends else own))


def _ring_backward(
    backward: _Backward, k: Tensor, v: Tensor, cfg: ContextAttentionConfig, sends: bool
) -> tuple[Tensor, Tensor, Tensor]:
    axis, t, s = cfg.axis, backward.q.shape[1], k.shape[1]
    sent: Tensor | None = None
    for other, one in _travelling(_packed(k, v), axis):
        pair = _Pair.of(axis.rank, other, cfg, t, s)
        found = backward(pair, *_keys_of_ranks(one[None], pair.keys, k, v))
        if not sends:
            continue
        if sent is None:
            message = _packed(*found)
        else:  # the sum over the ranks that had these keys before
            message = comm.wait(sent, axis)[0]
            for total, part in zip(_parts(message, k, v), found, strict=True):
                total[:, : pair.keys] += part
        sent = comm.start_shift(message, axis, 1)
    return backward.result(*(found if sent is None else _parts(comm.wait(sent, axis)[0], k, v)))


context_attention = make_op("context_attention", ContextAttentionConfig, fwd=context_attention_fwd, dgrad=context_attention_dgrad)
context_attention_init, context_attention_bwd, context_attention_wgrad = no_params(context_attention, context_attention_dgrad)
