"""Split of a joint projection into q, k and v, with rotary position embedding of q and k: one kernel each way.

    (q, k, v) = split(x)        q, k = rope(q), rope(k)        dx = (rope^-1(dq), rope^-1(dk), dv)

x, dx: [*, T, (N + 2M) D]: N heads of q, then M of k, then M of v; q, dq: [*, T, N, D]; k, v, dk, dv: [*, T, M, D]; one float
dtype. With `rope`, x is `(x, positions)` as in `rope`, or `(x, table)`. Kept: positions or table, an alias; without `rope` nothing.

Use it if one weight projects to q, k and v, as in GPT-2's checkpoints. If q, k and v have a weight each, as in Llama's, write three
`linear` branches of a `parallel`: fusion rules then share their products, and each weight keeps its own path.

>>> import torch
>>> from funcops import QKVSplitConfig, RopeConfig, qkv_split_bwd, qkv_split_fwd
>>> cfg = QKVSplitConfig(4, 8, kv_heads=2, rope=RopeConfig(8))
>>> positions = torch.arange(5)
>>> (q, k, v), residuals = qkv_split_fwd(None, (torch.ones(1, 5, 64), positions), cfg)
>>> q.shape, k.shape, v.shape, residuals.positions is positions
(torch.Size([1, 5, 4, 8]), torch.Size([1, 5, 2, 8]), torch.Size([1, 5, 2, 8]), True)
>>> dx, _ = qkv_split_bwd(residuals, (q, k, v), cfg)[1]
>>> dx.shape
torch.Size([1, 5, 64])
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import check, check_rows, describe, fail, not_a_tuple, require
from funcops.library.kernels import qkv_split as kernels
from funcops.library.ops.rope import RopeConfig, check_rotation, table_of

__all__ = ["QKVSplitConfig", "QKVSplitResiduals"]
__all__ += ["qkv_split", "qkv_split_bwd", "qkv_split_dgrad", "qkv_split_fwd", "qkv_split_init", "qkv_split_wgrad"]


@config
class QKVSplitConfig(OpConfig):
    """`heads` (N) of q, of size `dim` (D); `kv_heads` (M) of k and of v (default: N); `rope`: the rotary embedding of q and k, if
    any."""

    heads: int = field(kw_only=False)
    dim: int = field(kw_only=False)
    kv_heads: int | None = None
    rope: RopeConfig | None = None
    reruns = True

    def __post_init__(self) -> None:
        for name in ("heads", "dim", "kv_heads"):
            value = getattr(self, name)
            if value is None and name == "kv_heads":
                object.__setattr__(self, name, self.heads)
                continue
            require(isinstance(value, int) and value >= 1, "QKVSplitConfig", name, "at least 1", value)
        if self.rope is not None:
            right = isinstance(self.rope, RopeConfig) and self.rope.dim == self.dim
            require(right, "QKVSplitConfig", "rope", f"a RopeConfig({self.dim})", self.rope)

    @property
    def derives(self) -> bool:  # type: ignore[override]
        return self.rope is not None

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return (self.heads + 2 * (self.kv_heads or self.heads)) * self.dim, None

    def packed_parts(self, width: int) -> tuple[int, ...]:
        """The sizes of the parts side by side in x's last dimension."""
        heads, kv = self.heads * self.dim, (self.kv_heads or self.heads) * self.dim
        return heads, kv, kv

    def sharded(self, dim: int, n: int) -> tuple[QKVSplitConfig, int]:
        """The config if heads are sharded over n ranks, and the dim of the heads in q, k and v, counted from the end."""
        require(dim == 1, "QKVSplitConfig", "x", "sharded along its last dim", f"dim -{dim}")
        for name in ("heads", "kv_heads"):
            value = getattr(self, name)
            require(value % n == 0, "QKVSplitConfig", name, f"a multiple of {n}, the number of ranks", value)
        return QKVSplitConfig(self.heads // n, self.dim, kv_heads=(self.kv_heads or self.heads) // n, rope=self.rope), 2


class QKVSplitResiduals(Residuals, static=("inputs", "shape", "dtype")):
    positions: Tensor = saved("[*, T] or [*, T, 1, 3R]", alias="x.1", needed_by=DGRAD, of=("x.0",))


@forward(QKVSplitConfig)
def qkv_split_fwd(
    params: None, x: Any, cfg: QKVSplitConfig, *, needs: Needs = Needs.ALL
) -> tuple[tuple[Tensor, Tensor, Tensor], QKVSplitResiduals | None]:
    """x: [*, T, (N + 2M) D], or `(x, positions or table)` -> `(q, k, v)`. Raises `ValueError` or `TypeError` for a wrong shape,
    dtype or device."""
    if cfg.rope is not None and (not isinstance(x, tuple) or len(x) != 2):
        not_a_tuple("qkv_split_fwd", x, "x", "positions", why=", as cfg.rope says")
    positions: Any
    t, positions = (x, None) if cfg.rope is None else x
    heads, kv_heads = cfg.heads, cfg.kv_heads
    assert kv_heads is not None
    check_rows("qkv_split_fwd", "x" if cfg.rope is None else "x.0", t, (heads + 2 * kv_heads) * cfg.dim)
    table, interleaved = None, False
    if cfg.rope is not None:
        check_rotation("qkv_split_fwd", t.unflatten(-1, (-1, cfg.dim)), positions, cfg.rope)
        table, interleaved = table_of(positions, cfg.rope, t.dtype), cfg.rope.interleaved
    inputs = None if cfg.rope is None else Inputs.of(x)
    kept = QKVSplitResiduals.keep(cfg, needs, positions=positions, inputs=inputs, shape=t.shape, dtype=t.dtype)
    return kernels.qkv_split_fwd(t, table, heads, kv_heads, interleaved), kept


@dgrad_of(QKVSplitResiduals)
def qkv_split_dgrad(residuals: QKVSplitResiduals, dy: Any, cfg: QKVSplitConfig) -> tuple[Any, None]:
    """dy: `(dq, dk, dv)`, None for zero -> dx. No params, so pending is None."""
    if not isinstance(dy, tuple) or len(dy) != 3:
        fail("qkv_split_dgrad", "dy", "a tuple (dq, dk, dv)", describe(dy), TypeError)
    needs, shape = residuals.needs, residuals.shape
    if not (needs.x if cfg.rope is None else needs.input(0)) or all(d is None for d in dy):
        return residuals.nothing(), None
    parts = _parts(dy, (*shape[:-1], cfg.heads, cfg.dim), (*shape[:-1], cfg.kv_heads, cfg.dim), residuals.dtype)
    table, interleaved = None, False
    if cfg.rope is not None:
        table, interleaved = table_of(residuals.positions, cfg.rope, residuals.dtype), cfg.rope.interleaved
    dx = kernels.qkv_split_bwd(*parts, table, interleaved)
    return dx if cfg.rope is None else residuals.inputs.make((dx, None)), None


def _parts(dy: Any, q_shape: Any, kv_shape: Any, dtype: torch.dtype) -> list[Tensor]:
    like = next(d for d in dy if d is not None)
    shapes = (q_shape, kv_shape, kv_shape)
    for i, (d, shape) in enumerate(zip(dy, shapes, strict=True)):
        if d is not None:
            check("qkv_split_dgrad", f"dy.{i}", d, shape, dtype, like if isinstance(like, Tensor) else None)
    return [like.new_zeros(shape) if d is None else d for d, shape in zip(dy, shapes, strict=True)]


qkv_split = make_op("qkv_split", QKVSplitConfig, fwd=qkv_split_fwd, dgrad=qkv_split_dgrad, mixes="")
qkv_split_init, qkv_split_bwd, qkv_split_wgrad = no_params(qkv_split, qkv_split_dgrad)
