"""Attention with a sink over a sequence that is sharded over an axis: `context_attention` whose heads have the learned scores of
`sink_attention`.

    L = log(e^logsumexp + e^sink_h)        y = softmax(s) v e^(logsumexp - L)        dsink_h = -sum e^(sink_h - L) rowsum(dy * y)

logsumexp is over the keys of all ranks, so each rank adds the sink once, after the merge, without communication. x, shapes, dtypes
and options are context_attention's, params and what is kept sink_attention's. dsinks is in the sinks'
dtype, over a rank's own rows: sum it over the axis.

>>> import torch
>>> from funcops import SinkAttentionParams, dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.ContextSinkAttentionConfig(mesh["cp"], heads=1)
...     x = torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), torch.ones(1, 2, 1, 8)
...     y, residuals = dist.context_sink_attention_fwd(SinkAttentionParams(torch.zeros(1)), x, cfg)
...     return y[0, 0, 0, 0], dist.context_sink_attention_bwd(residuals, torch.ones_like(y), cfg)[0].sinks
...
>>> run_ranks({"cp": 2}, each)[1]
(tensor(0.8000), tensor([-2.5600]))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.distributed.ops.context_attention import ContextAttentionConfig, attended, check_context_x, context_gradients
from funcops.engine.backend import wide
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op
from funcops.engine.contract.schema import Inputs
from funcops.engine.errors import check, require
from funcops.library.ops.sink_attention import (
    SinkAttentionParams,
    SinkAttentionPending,
    SinkAttentionResiduals,
    pending_sums,
    sink_attention_wgrad,
    with_sinks,
)

__all__ = ["ContextSinkAttentionConfig", "context_sink_attention", "context_sink_attention_bwd"]
__all__ += ["context_sink_attention_dgrad", "context_sink_attention_fwd", "context_sink_attention_init"]
__all__ += ["context_sink_attention_wgrad"]


@config
class ContextSinkAttentionConfig(ContextAttentionConfig):
    """The fields of `ContextAttentionConfig`, and `heads` and `over` of `SinkAttentionConfig`."""

    heads: int
    over: str = ""
    sinks = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.heads >= 1, "ContextSinkAttentionConfig", "heads", "at least 1", self.heads)

    @property
    def specs(self) -> dict[str, Any]:
        return {"sinks": (self.over, 0)} if self.over else {}


@init_of(ContextSinkAttentionConfig)
def context_sink_attention_init(
    cfg: ContextSinkAttentionConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> SinkAttentionParams:
    """Sinks of zeros; draws nothing."""
    return SinkAttentionParams(torch.zeros(cfg.heads, device=device, dtype=dtype))


@forward(ContextSinkAttentionConfig, SinkAttentionParams)
def context_sink_attention_fwd(
    params: SinkAttentionParams, x: tuple[Tensor, ...], cfg: ContextSinkAttentionConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, SinkAttentionResiduals | None]:
    """x: `(q, k, v)` of this rank, and the part that cfg adds -> y: [B, T/n, H, D]. Raises as `context_attention_fwd`, and unless
    sinks and q have `cfg.heads` heads."""
    where, sinks = "context_sink_attention_fwd", params.sinks
    q, k, v, more = check_context_x(where, x, cfg)
    check(where, "x.0 (q)", q, (*q.shape[:2], cfg.heads, q.shape[3]))
    check(where, "params.sinks", sinks, (cfg.heads,), tuple(dict.fromkeys((q.dtype, wide(q.dtype)))), q)
    y, total = with_sinks(*attended(q, k, v, more, cfg), sinks, q)
    kept = SinkAttentionResiduals.keep(
        cfg, needs, q=q, k=k, v=v, y=y, logsumexp=total, more=more, sinks=sinks, sinks_dtype=sinks.dtype, inputs=Inputs.of(x)
    )
    return y, kept


@dgrad_of(SinkAttentionResiduals)
def context_sink_attention_dgrad(
    residuals: SinkAttentionResiduals, dy: Tensor, cfg: ContextSinkAttentionConfig
) -> tuple[tuple[Tensor, ...], SinkAttentionPending | None]:
    """The gradients of x, as `context_attention_dgrad`, and the pending sums for dsinks."""
    where = "context_sink_attention_dgrad"
    if not residuals.needs.of_gradients.any:
        return residuals.nothing(), None
    check(where, "dy", dy, residuals.y.shape, residuals.y.dtype, residuals.y)
    dx = context_gradients(where, residuals, dy, cfg) if residuals.needs.x else residuals.nothing()
    return dx, pending_sums(residuals, dy, cfg)


context_sink_attention_wgrad = sink_attention_wgrad
context_sink_attention = make_op(
    "context_sink_attention",
    ContextSinkAttentionConfig,
    init=context_sink_attention_init,
    fwd=context_sink_attention_fwd,
    dgrad=context_sink_attention_dgrad,
    wgrad=context_sink_attention_wgrad,
)
context_sink_attention_bwd = both_halves(context_sink_attention, context_sink_attention_dgrad, context_sink_attention_wgrad)
