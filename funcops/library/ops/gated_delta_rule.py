"""The gated delta rule: linear attention whose state forgets, and corrects what it holds (Gated DeltaNet, arXiv:2412.06464).

    S' = exp(g_t) S_(t-1)        S_t = S' + beta_t k_t (v_t - S'^T k_t)^T        y_t = scale S_t^T q_t

per head of v. Head h of v reads head h // (H / K) of q and k. S_0 is 0, or with `state` the last part of x, and y is then
`(y, S_T)`: a sequence goes on from there. Keys should have length 1 (`l2_norm`), beta be from 0 to 1, and g, the logarithm of the
decay, at most 0, and finite.

x is `(q, k, v, g, beta)`. q, k: [B, T, K, D]; v, y: [B, T, H, V] with K dividing H; g, beta: [B, T, H], of the float dtype of the
others or the wide one; S: [B, H, D, V], wide: float32 (float64 for float64). Kept: the parts of x, aliases: no bytes of their own.
dgrad computes the states at the starts of chunks again, and with them the gradients, here of one chunk of one time:

    d_t = beta_t (v_t - S'^T k_t)        dS_t = exp(g_(t+1)) (I - beta_(t+1) k_(t+1) k_(t+1)^T) dS_(t+1) + scale q_t dy_t^T
    dq_t = scale S_t dy_t        dd_t = dS_t^T k_t        dv_t = beta_t dd_t        dbeta_t = dd_t . (v_t - S'^T k_t)
    dk_t = dS_t d_t - S' dv_t        dg_t = sum of S' (dS_t - k_t dv_t^T)

Computed in chunks of `chunk` times by torch's batched products and triangular solves on every device: no Triton kernel exists. Each
chunk adds three launches one after another, so a long sequence of a small batch is bound by launches on a GPU.

>>> import torch
>>> from funcops import GatedDeltaRuleConfig, gated_delta_rule_fwd
>>> q = k = torch.ones(1, 3, 1, 1)
>>> v, g, beta = torch.tensor([4.0, 8.0, 8.0]).reshape(1, 3, 1, 1), torch.zeros(1, 3, 1), torch.full((1, 3, 1), 0.5)
>>> y, residuals = gated_delta_rule_fwd(None, (q, k, v, g, beta), GatedDeltaRuleConfig())
>>> y.flatten()
tensor([2.0000, 5.0000, 6.5000])
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import FLOATS, check, describe, fail, require, require_count
from funcops.library.kernels import gated_delta_rule as kernels
from funcops.library.ops._tuples import require_tuple

__all__ = ["GatedDeltaRuleConfig", "GatedDeltaRuleResiduals"]
__all__ += ["gated_delta_rule", "gated_delta_rule_bwd", "gated_delta_rule_dgrad", "gated_delta_rule_fwd", "gated_delta_rule_init"]
__all__ += ["gated_delta_rule_wgrad"]


@config
class GatedDeltaRuleConfig(OpConfig):
    """`scale` defaults to D^(-1/2); `chunk`: how many times are computed at once; `state`: x has the first state, y the last."""

    mixes_positions = True

    scale: float | None = None
    chunk: int = 64
    state: bool = False

    def __post_init__(self) -> None:
        right = self.scale is None or (math.isfinite(self.scale) and self.scale > 0)
        require(right, "GatedDeltaRuleConfig", "scale", "None or above 0", self.scale)
        require_count("GatedDeltaRuleConfig", chunk=self.chunk)

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts of x."""
        return "q", "k", "v", "g", "beta", *(("state",) if self.state else ())

    def scale_of(self, size: int) -> float:
        return size**-0.5 if self.scale is None else self.scale


class GatedDeltaRuleResiduals(Residuals, static=("inputs",)):
    q: Tensor = saved("[B, T, K, D]", alias="x.0", needed_by=DGRAD)
    k: Tensor = saved("[B, T, K, D]", alias="x.1", needed_by=DGRAD)
    v: Tensor = saved("[B, T, H, V]", alias="x.2", needed_by=DGRAD)
    g: Tensor = saved("[B, T, H]", alias="x.3", needed_by=DGRAD)
    beta: Tensor = saved("[B, T, H]", alias="x.4", needed_by=DGRAD)
    state: Tensor | None = saved("[B, H, D, V]", alias="x.5", needed_by=DGRAD)


def check_delta_rule(where: str, x: Any, cfg: GatedDeltaRuleConfig) -> Any:
    """Check x, and return it."""
    q, k, v, g, beta, *state = require_tuple(where, x, *cfg.parts)
    check(where, "x.0 (q)", q, (...,), FLOATS)
    if q.dim() != 4 or 0 in q.shape[2:]:
        fail(where, "x.0 (q)", "[B, T, K, D] with K and D at least 1", list(q.shape))
    check(where, "x.1 (k)", k, tuple(q.shape), q.dtype, q)
    check(where, "x.2 (v)", v, (...,), q.dtype, q)
    if v.dim() != 4 or v.shape[:2] != q.shape[:2] or not v.shape[2] or v.shape[2] % q.shape[2]:
        fail(where, "x.2 (v)", f"[{q.shape[0]}, {q.shape[1]}, H, V] with H a multiple of {q.shape[2]}", list(v.shape))
    either = tuple(dict.fromkeys((q.dtype, wide(q.dtype))))
    check(where, "x.3 (g)", g, tuple(v.shape[:3]), either, q)
    check(where, "x.4 (beta)", beta, tuple(v.shape[:3]), either, q)
    if state:
        check(where, "x.5 (state)", state[0], (q.shape[0], v.shape[2], q.shape[3], v.shape[3]), wide(q.dtype), q)
    return x


@forward(GatedDeltaRuleConfig)
def gated_delta_rule_fwd(
    params: None, x: tuple[Tensor, ...], cfg: GatedDeltaRuleConfig, *, needs: Needs = Needs.ALL
) -> tuple[Any, GatedDeltaRuleResiduals | None]:
    """x: `(q, k, v, g, beta)` -> y: [B, T, H, V]; with `cfg.state` x has the first state too, and y is `(y, last state)`. Raises
    `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    q, k, v, g, beta, *rest = check_delta_rule("gated_delta_rule_fwd", x, cfg)
    state = rest[0] if rest else None
    y, last = kernels.gated_delta_rule_fwd(q, k, v, g, beta, state, cfg.scale_of(q.shape[3]), cfg.chunk)
    kept = GatedDeltaRuleResiduals.keep(cfg, needs, q=q, k=k, v=v, g=g, beta=beta, state=state, inputs=Inputs.of(x))
    return (y, last) if cfg.state else y, kept


@dgrad_of(GatedDeltaRuleResiduals)
def gated_delta_rule_dgrad(residuals: GatedDeltaRuleResiduals, dy: Any, cfg: GatedDeltaRuleConfig) -> tuple[tuple[Any, ...], None]:
    """dy: as y, None for zero -> `(dq, dk, dv, dg, dbeta)`, and the gradient of the first state. No params, so pending is None."""
    where, needs = "gated_delta_rule_dgrad", residuals.needs
    if cfg.state and (not isinstance(dy, tuple) or len(dy) != 2):
        fail(where, "dy", "a tuple (dy, dlast)", describe(dy), TypeError)
    if not needs.x:
        return residuals.nothing(), None
    q, k, v, state = residuals.q, residuals.k, residuals.v, residuals.state
    out, last = dy if cfg.state else (dy, None)
    if out is not None or not cfg.state:
        check(where, "dy.0 (y)" if cfg.state else "dy", out, tuple(v.shape), v.dtype, v)
    if last is not None:
        check(where, "dy.1 (last state)", last, (v.shape[0], v.shape[2], q.shape[3], v.shape[3]), wide(v.dtype), v)
    if out is None and last is None:
        return residuals.nothing(), None
    found = kernels.gated_delta_rule_bwd(
        q, k, v, residuals.g, residuals.beta, state, out, last, cfg.scale_of(q.shape[3]), cfg.chunk
    )[: len(cfg.parts)]
    return residuals.inputs.make(tuple([t if needs.input(i) else None for i, t in enumerate(found)])), None


gated_delta_rule = make_op(
    "gated_delta_rule",
    GatedDeltaRuleConfig,
    fwd=gated_delta_rule_fwd,
    dgrad=gated_delta_rule_dgrad,
    mixes="the chunks of positions that it computes at a time, which decoding takes one by one",
)
gated_delta_rule_init, gated_delta_rule_bwd, gated_delta_rule_wgrad = no_params(gated_delta_rule, gated_delta_rule_dgrad)
