"""Attention of a sequence's shards by heads: an all-to-all gives each rank all tokens of its share of the heads, and another gives
y back (DeepSpeed Ulysses, arXiv:2309.14509). What attends to these tokens may communicate over another axis (arXiv:2405.07719)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.mesh import Axis
from funcops.distributed.zigzag import rezigzag, unzigzag
from funcops.engine.errors import fail


class Kept(NamedTuple):
    """The tensors that the backward of an attention reads: of a rank's rows, or of more rows and its share of the heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    logsumexp: Tensor


class Exchange(NamedTuple):
    """Heads against tokens over `axis`; `ordered`: tokens are in zigzag order."""

    axis: Axis
    ordered: bool

    def fwd(self, attend: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """y [B, T/n, H, V] and logsumexp [B, H, T/n] of this rank's rows."""
        q, k, v = self.spread((q, k, v))
        y, lse = attend(q, k, v)
        (y,) = self.collected((y,))
        (lse,) = self.collected((_as_rows(lse[..., : q.shape[1]]),))
        return y, _as_rows(lse, back=True)

    def bwd(self, gradients: Callable[..., Sequence[Tensor]], dy: Tensor, kept: Kept, sends: bool) -> tuple[Tensor | None, ...]:
        """dq, dk and dv of this rank's rows and keys; dk and dv are not sent back unless `sends`."""
        q, dy, y, k, v = self.spread((kept.q, dy, kept.y, kept.k, kept.v))
        (rows,) = self.spread((_as_rows(kept.logsumexp),))
        dq, dk, dv, *_ = gradients(dy, Kept(q, k, v, y, _as_rows(rows, back=True)))
        return self.collected((dq, dk, dv)) if sends else (*self.collected((dq,)), None, None)

    def spread(self, ts: Sequence[Tensor]) -> list[Tensor]:
        """Each [B, L/n, H, D] as [B, L, H/n, D], in the order of the sequence; tensors of one length and D travel together."""
        n, found = self.axis.size, list(ts)
        for places in _alike(ts):
            shares = [part for parts in zip(*(ts[i].chunk(n, 2) for i in places), strict=True) for part in parts]
            every = comm.all_to_all(torch.cat(shares, 2), self.axis, 2, 1)
            every = unzigzag(every, self.axis) if self.ordered else every
            for i, part in zip(places, every.split([ts[i].shape[2] // n for i in places], 2), strict=True):
                found[i] = part.contiguous()
        return found

    def collected(self, ts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Each [B, L, H/n, D] as this rank's [B, L/n, H, D]."""
        n, found = self.axis.size, list(ts)
        for places in _alike(ts):
            every = torch.cat([ts[i] for i in places], 2)
            own = comm.all_to_all(rezigzag(every, self.axis) if self.ordered else every, self.axis, 1, 2)
            parts = own.unflatten(2, (n, every.shape[2])).split([ts[i].shape[2] for i in places], 3)
            for i, part in zip(places, parts, strict=True):
                found[i] = part.flatten(2, 3)
        return tuple(found)


def check_heads(where: str, q: Tensor, k: Tensor, n: int, remedy: str) -> None:
    for name, t in (("x.0 (q)", q), ("x.1 (k)", k)):
        if t.shape[2] % n:
            fail(where, name, f"of a number of heads that {n} divides ({remedy})", t.shape[2])


def _alike(ts: Sequence[Tensor]) -> list[list[int]]:
    """The places of tensors of one length and one last size, for each such pair."""
    sizes = [(t.shape[1], t.shape[3]) for t in ts]
    return [[i for i, size in enumerate(sizes) if size == one] for one in dict.fromkeys(sizes)]


def _as_rows(t: Tensor, back: bool = False) -> Tensor:
    """[B, H, T] as [B, T, H, 1], or back."""
    return t.squeeze(3).transpose(1, 2).contiguous() if back else t.transpose(1, 2).unsqueeze(3)
