"""Attention of a sequence's shards by heads: an all-to-all gives each rank all tokens of its share of the heads, and another gives
y back (DeepSpeed Ulysses, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.zigzag import rezigzag, unzigzag
from funcops.errors import fail
from funcops.kernels import attention as kernels


def check_heads(where: str, q: Tensor, k: Tensor, n: int) -> None:
    for name, t in (("x.0 (q)", q), ("x.1 (k)", k)):
        if t.shape[2] % n:
            fail(where, name, f"of a number of heads that {n} divides (cfg.comm is 'heads'; 'gather' takes any)", t.shape[2])


def attended_by_heads(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, cfg: Any) -> tuple[Tensor, Tensor]:
    """y [B, T/n, H, D] and logsumexp [B, H, T/n] of this rank's rows, over the keys of all ranks."""
    q, k, v = _spread((q, k, v), cfg)
    y, lse = kernels.attend_fwd(q, k, v, None, cu_seqlens, cfg.score(q.shape[3]), *cfg.limits)
    (y,) = _collected((y,), cfg)
    (lse,) = _collected((_as_rows(lse[..., : q.shape[1]]),), cfg)
    return y, _as_rows(lse, back=True)


def gradients_by_heads(dy: Tensor, residuals: Any, cu_seqlens: Tensor | None, cfg: Any, sends: bool) -> tuple[Tensor | None, ...]:
    """dq, dk and dv of this rank's rows and keys; dk and dv are not sent back unless `sends`."""
    q, dy, y, k, v = _spread((residuals.q, dy, residuals.y, residuals.k, residuals.v), cfg)
    (rows,) = _spread((_as_rows(residuals.logsumexp),), cfg)
    lse, score = _as_rows(rows, back=True), cfg.score(q.shape[3])
    dq, dk, dv, _ = kernels.attend_bwd(dy, q, k, v, None, cu_seqlens, y, lse, score, False, *cfg.limits)
    return _collected((dq, dk, dv), cfg) if sends else (*_collected((dq,), cfg), None, None)


def _as_rows(t: Tensor, back: bool = False) -> Tensor:
    """[B, H, T] as [B, T, H, 1], or back."""
    return t.squeeze(3).transpose(1, 2).contiguous() if back else t.transpose(1, 2).unsqueeze(3)


def _spread(ts: Sequence[Tensor], cfg: Any) -> list[Tensor]:
    """Each [B, L/n, H, D] as [B, L, H/n, D], in the order of the sequence; tensors of one length travel together."""
    n, found = cfg.axis.size, dict[int, Tensor]()
    for length in dict.fromkeys(t.shape[1] for t in ts):
        places = [i for i, t in enumerate(ts) if t.shape[1] == length]
        shares = [part for parts in zip(*(ts[i].chunk(n, 2) for i in places), strict=True) for part in parts]
        every = comm.all_to_all(torch.cat(shares, 2), cfg.axis, 2, 1)
        every = unzigzag(every, cfg.axis) if cfg.ordered else every
        found |= zip(places, every.split([ts[i].shape[2] // n for i in places], 2), strict=True)
    return [found[i].contiguous() for i in range(len(ts))]


def _collected(ts: Sequence[Tensor], cfg: Any) -> tuple[Tensor, ...]:
    """Each [B, L, H/n, D] as this rank's [B, L/n, H, D]."""
    n, found = cfg.axis.size, dict[int, Tensor]()
    for length in dict.fromkeys(t.shape[1] for t in ts):
        places = [i for i, t in enumerate(ts) if t.shape[1] == length]
        every = torch.cat([ts[i] for i in places], 2)
        own = comm.all_to_all(rezigzag(every, cfg.axis) if cfg.ordered else every, cfg.axis, 1, 2)
        parts = own.unflatten(2, (n, every.shape[2])).split([ts[i].shape[2] for i in places], 3)
        found |= zip(places, (part.flatten(2, 3) for part in parts), strict=True)
    return tuple([found[i] for i in range(len(ts))])
