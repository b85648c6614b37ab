"""Attention with a sink: each head has a learned score of a key whose value is zero.

    L = log(e^logsumexp + e^sink_h)        y = softmax(s) v e^(logsumexp - L)        dsink_h = -sum e^(sink_h - L) rowsum(dy * y)

where logsumexp is over a row's scores s, as in attention. L is kept in its place, and attention's own backward computes dq, dk and
dv from y and L. x, shapes, options and residuals are otherwise attention's; sinks: [H], of x's dtype or float32.
dgrad reads dy and y anyway, so it returns dsinks as sums over rows [B, H].
Kept besides: sinks, an alias: no bytes of its own. arXiv:2309.17453, arXiv:2508.10925.

>>> import torch
>>> from funcops import SinkAttentionConfig, SinkAttentionParams, sink_attention_bwd, sink_attention_fwd
>>> cfg, params = SinkAttentionConfig(1), SinkAttentionParams(torch.zeros(1))
>>> q, k, v = torch.zeros(1, 1, 1, 8), torch.zeros(1, 3, 1, 8), torch.ones(1, 3, 1, 8)
>>> y, residuals = sink_attention_fwd(params, (q, k, v), cfg)
>>> y[..., 0]
tensor([[[0.7500]]])
>>> dparams, _ = sink_attention_bwd(residuals, torch.ones_like(y), cfg)
>>> dparams.sinks
tensor([-1.5000])
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, WGRAD, Inputs, Pending, Residuals, saved, static
from funcops.engine.errors import check, require
from funcops.engine.trees import leaf, tree
from funcops.library.kernels.attention import attend_fwd
from funcops.library.kernels.block_attention import with_sink
from funcops.library.ops._norm import finish
from funcops.library.ops.attention import AttentionConfig, check_x, input_gradients, of_config, scored

__all__ = ["SinkAttentionConfig", "SinkAttentionParams", "SinkAttentionPending", "SinkAttentionResiduals"]
__all__ += ["sink_attention", "sink_attention_bwd", "sink_attention_dgrad"]
__all__ += ["sink_attention_fwd", "sink_attention_init", "sink_attention_wgrad"]


@config
class SinkAttentionConfig(AttentionConfig):
    """`heads`: the number of q's heads (H); the other fields are `AttentionConfig`'s. `over`: the name of the axis that shards the
    heads, of which this rank has `heads` (`funcops.dist.parallel`)."""

    heads: int = field(kw_only=False)
    over: str = ""
    sinks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.heads >= 1, "SinkAttentionConfig", "heads", "at least 1", self.heads)
        named = not self.over or self.over.isidentifier()
        require(named, "SinkAttentionConfig", "over", "the name of an axis, or '' where no axis shards the heads", repr(self.over))

    @property
    def specs(self) -> dict[str, Any]:
        return {"sinks": (self.over, 0)} if self.over else {}

    def sharded(self, dim: int, n: int) -> Any:
        """A rank's heads, each with its sink. Raises `ValueError` if their number does not divide."""
        super().sharded(dim, n)
        right = dim == 2 and self.heads % n == 0
        require(right, "SinkAttentionConfig", "heads", f"dim -2 of x, and a multiple of {n}", f"{self.heads}, dim -{dim} sharded")
        return dataclasses.replace(self, heads=self.heads // n), dim


@tree
class SinkAttentionParams:
    sinks: Tensor = leaf("[H]")


class SinkAttentionResiduals(Residuals, static=("inputs",)):
    q: Tensor = saved("[B, T, H, D]", alias="x.0", needed_by=DGRAD)
    k: Tensor = saved("[B, S, K, D]", alias="x.1", needed_by=DGRAD)
    v: Tensor = saved("[B, S, K, V]", alias="x.2", needed_by=DGRAD)
    y: Tensor = saved("[B, T, H, V]", alias="y", needed_by=DGRAD, of=("x", "params"))
    logsumexp: Tensor = saved("[B, H, T]", needed_by=DGRAD, of=("x", "params"))
    more: Tensor | None = saved("[B or 1, H or 1, T, S] or [N + 1]", alias="x.3", needed_by=DGRAD)  # bias or cu_seqlens
    sinks: Tensor = saved("[H]", alias="params.sinks", needed_by=DGRAD, of=("params",))
    sinks_dtype: torch.dtype = static()


class SinkAttentionPending(Pending):
    parts: Tensor = saved("[B, H]", needed_by=WGRAD)  # of dsinks; float32 (float64 for float64)
    sinks_dtype: torch.dtype = static()


@init_of(SinkAttentionConfig)
def sink_attention_init(
    cfg: SinkAttentionConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> SinkAttentionParams:
    """Sinks of zeros; draws nothing."""
    return SinkAttentionParams(torch.zeros(cfg.heads, device=device, dtype=dtype))


@forward(SinkAttentionConfig, SinkAttentionParams)
def sink_attention_fwd(
    params: SinkAttentionParams, x: tuple[Tensor, ...], cfg: SinkAttentionConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, SinkAttentionResiduals | None]:
    """x: `(q, k, v)`, and the part that cfg adds -> y: [B, T, H, V]. Raises as `attention_fwd`, and unless sinks and q have
    `cfg.heads` heads."""
    where, sinks = "sink_attention_fwd", params.sinks
    q, k, v, more = check_x(where, x, cfg)
    check(where, "x.0 (q)", q, (*q.shape[:2], cfg.heads, q.shape[3]))
    check(where, "params.sinks", sinks, (cfg.heads,), tuple(dict.fromkeys((q.dtype, wide(q.dtype)))), q)
    found = attend_fwd(q, k, v, *of_config(more, cfg), cfg.score(q.shape[3]), *cfg.limits)
    y, total = with_sinks(*found, sinks, q)
    kept = SinkAttentionResiduals.keep(
        cfg, needs, q=q, k=k, v=v, y=y, logsumexp=total, more=more, sinks=sinks, sinks_dtype=sinks.dtype, inputs=Inputs.of(x)
    )
    return y, kept


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """y and logsumexp with sinks, from both without."""
    lse = lse[..., : q.shape[1]]  # some kernels return more rows
    total = with_sink(lse, sinks)
    return (out * torch.exp(lse - total).transpose(1, 2).unsqueeze(-1)).to(q.dtype), total


@dgrad_of(SinkAttentionResiduals)
def sink_attention_dgrad(
    residuals: SinkAttentionResiduals, dy: Tensor, cfg: SinkAttentionConfig
) -> tuple[tuple[Tensor, ...], SinkAttentionPending | None]:
    """The gradients of x, as `attention_dgrad`, and the pending sums for dsinks."""
    where, y = "sink_attention_dgrad", residuals.y
    if not residuals.needs.of_gradients.any:
        return residuals.nothing(), None
    check(where, "dy", dy, y.shape, y.dtype, y)
    dx = input_gradients(where, residuals, dy, cfg) if residuals.needs.x else residuals.nothing()
    return dx, pending_sums(residuals, dy, cfg)


def pending_sums(residuals: SinkAttentionResiduals, dy: Tensor, cfg: Any) -> SinkAttentionPending | None:
    """The sums for dsinks."""
    needs, parts = residuals.needs, None
    if needs.params:
        lse = residuals.logsumexp
        share = torch.exp(residuals.sinks.to(lse.dtype).unsqueeze(-1) - lse)
        parts = (dy.to(lse.dtype) * residuals.y).sum(-1).transpose(1, 2).mul_(share).sum(-1).neg_()
    return SinkAttentionPending.keep(cfg, needs, parts=parts, sinks_dtype=residuals.sinks_dtype)


@wgrad_of(SinkAttentionPending, SinkAttentionParams)
def sink_attention_wgrad(
    pending: SinkAttentionPending, cfg: SinkAttentionConfig, *, into: SinkAttentionParams | None = None
) -> SinkAttentionParams:
    """dsinks: [H], in the sinks' dtype; added to `into` if given, in float32 if `into` is."""
    dsinks: Any = finish(pending.parts, (cfg.heads,), pending.sinks_dtype, None if into is None else into.sinks)
    return accumulate("sink_attention_wgrad", SinkAttentionParams(dsinks), into)


sink_attention = make_op(
    "sink_attention",
    SinkAttentionConfig,
    init=sink_attention_init,
    fwd=sink_attention_fwd,
    dgrad=sink_attention_dgrad,
    wgrad=sink_attention_wgrad,
    mixes=scored,
)
sink_attention_bwd = both_halves(sink_attention, sink_attention_dgrad, sink_attention_wgrad)
