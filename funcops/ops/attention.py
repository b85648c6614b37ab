"""Scaled dot-product attention.

    p = softmax(scale q k^T)        y = p v        dv = p^T dy
    ds = p * (dy v^T - rowsum(dy * y))        dq = scale ds k        dk = scale ds^T q

per head; with `causal`, position t sees positions up to t. Query head h reads key head h // (H / K) (grouped-query).
x is `(q, k, v)`. q, y, dy: [B, T, H, D]; k, v: [B, S, K, D] with K dividing H; one float dtype; any strides.
Kept: q, k, v (aliases), y (the caller's own output) and logsumexp: 4 bytes a row and head. No attention matrix is kept: the
backward recomputes p from logsumexp. Causal with T != S is refused, because conventions differ on where the diagonal
starts. A sliding window and packed sequences are not in torch's CPU kernel and are refused. Zero-length sequences give
zeros. arXiv:2205.14135, arXiv:2305.13245.
"""

from __future__ import annotations

import math

from torch import Tensor

from funcops.errors import FLOATS, check, describe, fail, require
from funcops.kernels import attention as kernels
from funcops.needs import Needs
from funcops.op import config, dgrad_of, forward, make_op, no_params
from funcops.schema import DGRAD, Inputs, Residuals, saved

__all__ = [
    "AttentionConfig",
    "AttentionResiduals",
    "attention",
    "attention_bwd",
    "attention_dgrad",
    "attention_fwd",
    "attention_init",
    "attention_wgrad",
]


@config
class AttentionConfig:
    """`scale` defaults to D^(-1/2). `window` and `packed` must be None and False: torch's kernels for explicit
    residuals do not have them on every device."""

    causal: bool = False
    scale: float | None = None
    window: int | None = None
    packed: bool = False

    def __post_init__(self) -> None:
        right = self.scale is None or (math.isfinite(self.scale) and self.scale > 0)
        require(right, "AttentionConfig", "scale", "None or above 0", self.scale)
        require(self.window is None, "AttentionConfig", "window", "None (no sliding window in torch's CPU kernel)", self.window)
        require(not self.packed, "AttentionConfig", "packed", "False (no cu_seqlens in torch's CPU kernel)", self.packed)


class AttentionResiduals(Residuals, static=("inputs",)):
    q: Tensor = saved("[B, T, H, D]", alias="x.0", needed_by=DGRAD)
    k: Tensor = saved("[B, S, K, D]", alias="x.1", needed_by=DGRAD)
    v: Tensor = saved("[B, S, K, D]", alias="x.2", needed_by=DGRAD)
    y: Tensor = saved("[B, T, H, D]", alias="y", needed_by=DGRAD, recompute_from=("q", "k", "v"))
    logsumexp: Tensor = saved("[B, H, T]", needed_by=DGRAD, recompute_from=("q", "k"))


def scale_of(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def check_qkv(where: str, x: object, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x as `(q, k, v)`, after every check."""
    if not isinstance(x, tuple) or len(x) != 3:
        fail(where, "x", "a tuple (q, k, v)", describe(x), TypeError)
    q, k, v = x
    check(where, "x.0 (q)", q, (...,), FLOATS)
    check(where, "x.1 (k)", k, (...,), q.dtype, q)
    q_shape, k_shape = q.shape, k.shape
    if len(q_shape) != 4:
        fail(where, "x.0 (q)", "[B, T, H, D]", list(q_shape))
    if len(k_shape) != 4 or k_shape[0] != q_shape[0] or k_shape[3] != q_shape[3]:
        fail(where, "x.1 (k)", f"[{q_shape[0]}, S, K, {q_shape[3]}]", list(k_shape))
    if k_shape[2] == 0 or q_shape[2] % k_shape[2] != 0:
        fail(where, "x.1 (k)", f"of a number of heads that divides {q_shape[2]}", k_shape[2])
    if causal and q_shape[1] != k_shape[1]:
        fail(where, "x.1 (k)", f"of length {q_shape[1]}, as q is (cfg.causal)", k_shape[1])
    check(where, "x.2 (v)", v, k_shape, q.dtype, q)
    return q, k, v


@forward(AttentionConfig)
def attention_fwd(
    params: None, x: tuple[Tensor, Tensor, Tensor], cfg: AttentionConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, AttentionResiduals | None]:
    """x: `(q, k, v)` -> y: [B, T, H, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    q, k, v = check_qkv("attention_fwd", x, cfg.causal)
    y, logsumexp = kernels.attention_fwd(q, k, v, cfg.causal, scale_of(q, cfg.scale))
    kept = AttentionResiduals.keep(cfg, needs, q=q, k=k, v=v, y=y, logsumexp=logsumexp, inputs=Inputs.of(x))
    return y, kept


@dgrad_of(AttentionResiduals)
def attention_dgrad(residuals: AttentionResiduals, dy: Tensor, cfg: AttentionConfig) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    """`(dq, dk, dv)`. There is no weight gradient: pending is None."""
    needs = residuals.needs
    if not needs.x:
        return residuals.nothing(), None
    q, k, v, y = residuals.q, residuals.k, residuals.v, residuals.y
    check("attention_dgrad", "dy", dy, q.shape, q.dtype, q)
    grads = kernels.attention_bwd(dy, q, k, v, y, residuals.logsumexp, cfg.causal, scale_of(q, cfg.scale))
    if needs.x is not True:
        grads = tuple([g if needs.input(i) else None for i, g in enumerate(grads)])
    return residuals.inputs.make(grads), None


attention = make_op("attention", AttentionConfig, fwd=attention_fwd, dgrad=attention_dgrad)
attention_init, attention_bwd, attention_wgrad = no_params(attention, attention_dgrad)
