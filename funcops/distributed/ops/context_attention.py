"""Attention over a sequence that is sharded over an axis (context parallelism).

    as attention: y = softmax(s) v of this rank's queries, over the keys of all ranks; s = scale q k^T, with softcap c tanh(s / c)

x is `(q, k, v)`. q, y, dy: [B, T/n, H, D]; k, v: [B, S/n, K, D] with K dividing H; one float dtype. With `causal` T = S, and each
rank has chunks r and 2n - 1 - r of 2n (`zigzag`): in that order all ranks compute the same amount. Without, any order works.

    keys of rank j     queries that see them, causal
    j = r              all, causally: in zigzag order that is a causal mask too
    j < r              all see the first half, and none the second
    j > r              the second half sees all, and the first none

Keys that no query sees are skipped. The rest is merged by logsumexp: L = log(e^l + e^l'), y = y e^(l - L) + y' e^(l' - L), in the
wide dtype. In the backward each pair of queries and keys, given y and L over all keys, has its own part of dq, dk and dv. The parts
of dk and dv are sent and summed in the wide dtype.

`comm="gather"`: k and v are gathered during the attention to this rank's own; dk and dv are scattered. `comm="ring"`: k and v are
sent around the ring, each during the attention to the ones before, and dk and dv follow: k and v of two ranks at a time in memory.
Kept: q, k, v (aliases), y (the caller's own output) and logsumexp: 1/n of what attention keeps. The backward sends k and v again.
Windows and ALiBi are not supported: with two chunks that are far apart, positions in a block do not tell distances.
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

import math
from collections.abc import Iterator
from dataclasses import field
from typing import NamedTuple

import torch
from torch import Tensor

from funcops.backend import wide
from funcops.contract.configs import OpConfig
from funcops.contract.needs import Needs
from funcops.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.distributed import comm
from funcops.distributed.checks import check_tensor, require_axis
from funcops.distributed.mesh import Axis
from funcops.errors import check, fail, require
from funcops.kernels import attention as kernels
from funcops.kernels.scored_attention import Score
from funcops.ops.attention import check_parts, check_qkv, scale_of

__all__ = ["ContextAttentionConfig", "ContextAttentionResiduals"]
__all__ += ["context_attention", "context_attention_bwd", "context_attention_dgrad"]
__all__ += ["context_attention_fwd", "context_attention_init", "context_attention_wgrad"]


@config
class ContextAttentionConfig(OpConfig):
    """`axis`: the axis that shards the sequence. `scale` defaults to D^(-1/2); `softcap` bounds the scores. `comm`: "gather" or
    "ring"."""

    axis: Axis = field(kw_only=False)
    causal: bool = False
    scale: float | None = None
    comm: str = "gather"
    softcap: float | None = None

    def __post_init__(self) -> None:
        require_axis("ContextAttentionConfig", self.axis)
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            right = value is None or (math.isfinite(value) and value > 0)
            require(right, "ContextAttentionConfig", name, "None or above 0", value)
        require(self.comm in ("gather", "ring"), "ContextAttentionConfig", "comm", "'gather' or 'ring'", repr(self.comm))

    def score(self, head_size: int, causal: bool | None = None) -> Score:
        """The `Score` of a pair of queries and keys; by default of this rank's own."""
        causal = self.causal if causal is None else causal
        return Score(causal, 0, self.softcap or 0.0, False, scale_of(head_size, self.scale))


class ContextAttentionResiduals(Residuals, static=("inputs",)):
    q: Tensor = saved("[B, T/n, H, D]", alias="x.0", needed_by=DGRAD)
    k: Tensor = saved("[B, S/n, K, D]", alias="x.1", needed_by=DGRAD)
    v: Tensor = saved("[B, S/n, K, D]", alias="x.2", needed_by=DGRAD)
    y: Tensor = saved("[B, T/n, H, D]", alias="y", needed_by=DGRAD)
    logsumexp: Tensor = saved("[B, H, T/n]", needed_by=DGRAD)


@forward(ContextAttentionConfig)
def context_attention_fwd(
    params: None, x: tuple[Tensor, Tensor, Tensor], cfg: ContextAttentionConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ContextAttentionResiduals | None]:
    """x: `(q, k, v)` of this rank -> y: [B, T/n, H, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    where = "context_attention_fwd"
    q, k, v = check_parts(where, x, ("q", "k", "v"))
    check_qkv(where, q, k, v, cfg.causal)
    if cfg.causal and q.shape[1] != k.shape[1]:
        fail(where, "x.1 (k)", f"as long as q, {q.shape[1]} (cfg.causal)", k.shape[1])
    check(where, "x.2 (v)", v, tuple(k.shape))
    for name, t in (("x.0 (q)", q), ("x.1 (k)", k), ("x.2 (v)", v)):
        check_tensor(where, name, t, (...,))
    if cfg.axis.size == 1:
        y, lse = _forward(q, k, v, cfg.score(q.shape[3]))
    else:
        if cfg.causal and q.shape[1] % 2:
            fail(where, "x.0 (q)", "of an even length (two chunks in zigzag order)", q.shape[1])
        y, lse = _attend(q, k, v, cfg)
    kept = ContextAttentionResiduals.keep(cfg, needs, q=q, k=k, v=v, y=y, logsumexp=lse, inputs=Inputs.of(x))
    return y, kept


@dgrad_of(ContextAttentionResiduals)
def context_attention_dgrad(
    residuals: ContextAttentionResiduals, dy: Tensor, cfg: ContextAttentionConfig
) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    """`(dq, dk, dv)` of this rank. No params, so pending is None."""
    needs = residuals.needs
    if not needs.x:
        return residuals.nothing(), None
    q, k, v, y, lse = residuals.q, residuals.k, residuals.v, residuals.y, residuals.logsumexp
    check_tensor("context_attention_dgrad", "dy", dy, (...,))
    check("context_attention_dgrad", "dy", dy, q.shape, q.dtype, q)
    if cfg.axis.size == 1:
        grads = kernels.attend_bwd(dy, q, k, v, None, None, y, lse, cfg.score(q.shape[3]), False)[:3]
    else:
        backward = _Backward(dy, q, y, lse, cfg)
        sends = needs.input(1) or needs.input(2)
        grads = (_gathered_backward if cfg.comm == "gather" else _ring_backward)(backward, k, v, cfg, sends)
    return residuals.inputs.make(tuple([g if needs.input(i) else None for i, g in enumerate(grads)])), None


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


def _keys_of_ranks(parts: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """k and v, [B, ranks keys, K, D], from parts [ranks, 2, B, S/n, K, D]."""
    ranks, _, batch, _, heads, size = parts.shape
    k, v = (parts[:, i, :, :keys].movedim(0, 1).reshape(batch, ranks * keys, heads, size).contiguous() for i in (0, 1))
    return k, v


def _travelling(kv: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank and its k and v, this rank's first; the next are in flight meanwhile."""
    for step in range(axis.size):
        sent = comm.start_shift(kv, axis, 1) if step + 1 < axis.size else None
        yield (axis.rank - step) % axis.size, kv
        if sent is not None:
            kv = comm.wait(sent, axis)[0]


def _forward(q: Tensor, k: Tensor, v: Tensor, score: Score) -> tuple[Tensor, Tensor]:
    return kernels.attend_fwd(q, k, v, None, None, score)


def _attend(q: Tensor, k: Tensor, v: Tensor, cfg: ContextAttentionConfig) -> tuple[Tensor, Tensor]:
    """y and logsumexp [B, H, T/n] over the keys of all ranks."""
    axis, t, s = cfg.axis, q.shape[1], k.shape[1]
    kv = torch.stack((k, v))
    sent = comm.start_gather(kv, axis) if cfg.comm == "gather" else None
    out, lse = _forward(q, k, v, cfg.score(q.shape[3]))
    total = out.to(wide(q.dtype)), lse[..., :t].contiguous()

    def add(other: int, parts: Tensor) -> None:
        pair = _Pair.of(axis.rank, other, cfg, t, s)
        if s and t:
            k, v = _keys_of_ranks(parts, pair.keys)
            out, lse = _forward(q[:, pair.query :], k, v, cfg.score(q.shape[3], pair.causal))
            kernels.merge(total, out, lse, pair.query)

    if sent is None:
        for other, one in _travelling(kv, axis):
            if other != axis.rank:
                add(other, one[None])
    else:
        every = comm.wait(sent, axis).reshape(axis.size, *kv.shape)
        for group in _groups(cfg):
            add(group[0], every[group[0] : group[-1] + 1])
    return total[0].to(q.dtype), total[1]


class _Backward:
    """Sums dq in the wide dtype over the pairs with which it is called."""

    def __init__(self, dy: Tensor, q: Tensor, y: Tensor, lse: Tensor, cfg: ContextAttentionConfig) -> None:
        self.dy, self.q, self.y, self.lse, self.cfg = dy, q, y, lse, cfg
        self.dq = torch.zeros_like(q, dtype=wide(q.dtype), memory_format=torch.contiguous_format)

    def __call__(self, pair: _Pair, k: Tensor, v: Tensor) -> Tensor:
        """dk and dv, [2, B, S, K, D] in the wide dtype."""
        at = pair.query
        lse = self.lse[..., at:].contiguous()
        dy, q, y = (t[:, at:] for t in (self.dy, self.q, self.y))
        score = self.cfg.score(q.shape[3], pair.causal)
        dq, dk, dv, _ = kernels.attend_bwd(dy, q, k, v, None, None, y, lse, score, False)
        self.dq[:, at:] += dq
        return torch.stack((dk, dv)).to(self.dq.dtype)

    def result(self, dkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, (dk, dv) = self.dq.to(self.q.dtype), dkv.to(self.q.dtype)
        return dq, dk, dv


def _gathered_backward(
    backward: _Backward, k: Tensor, v: Tensor, cfg: ContextAttentionConfig, sends: bool
) -> tuple[Tensor, Tensor, Tensor]:
    axis, t, s = cfg.axis, backward.q.shape[1], k.shape[1]
    kv = torch.stack((k, v))
    sent = comm.start_gather(kv, axis)
    own = backward(_Pair.of(axis.rank, axis.rank, cfg, t, s), k, v)
    every = comm.wait(sent, axis).reshape(axis.size, *kv.shape)
    dkv = own.new_zeros(every.shape)
    dkv[axis.rank] = own
    for group in _groups(cfg):
        pair = _Pair.of(axis.rank, group[0], cfg, t, s)
        chosen = slice(group[0], group[-1] + 1)
        found = backward(pair, *_keys_of_ranks(every[chosen], pair.keys))
        dkv[chosen, :, :, : pair.keys] = found.unflatten(2, (len(group), pair.keys)).movedim(2, 0)
    return backward.result(comm.scatter_sum(dkv.flatten(0, 1), axis) if sends else own)


def _ring_backward(
    backward: _Backward, k: Tensor, v: Tensor, cfg: ContextAttentionConfig, sends: bool
) -> tuple[Tensor, Tensor, Tensor]:
    axis, t, s = cfg.axis, backward.q.shape[1], k.shape[1]
    sent: Tensor | None = None
    dkv = None
    for other, one in _travelling(torch.stack((k, v)), axis):
        pair = _Pair.of(axis.rank, other, cfg, t, s)
        found = backward(pair, *_keys_of_ranks(one[None], pair.keys))
        if not sends:
            continue
        if sent is None:
            dkv = found
        else:  # the sum over the ranks that had these keys before
            dkv = comm.wait(sent, axis)[0]
            dkv[:, :, : pair.keys] += found
        sent = comm.start_shift(dkv, axis, 1)
    return backward.result(found if sent is None else comm.wait(sent, axis)[0])


context_attention = make_op("context_attention", ContextAttentionConfig, fwd=context_attention_fwd, dgrad=context_attention_dgrad)
context_attention_init, context_attention_bwd, context_attention_wgrad = no_params(context_attention, context_attention_dgrad)
