"""Scaled dot-product attention.

    p = softmax(scale q k^T)        y = p v        dv = p^T dy
    ds = p * (dy v^T - rowsum(dy * y))        dq = scale ds k        dk = scale ds^T q

per head. Query head h reads key head h // (H / K) (grouped-query). The last position of q is the last of k: position t is at
i = t + S - T. With `causal`, which requires T <= S, it sees positions j <= i; with `window` only the last of these,
i - j < window; with `chunk` only those in its chunk, j // chunk = i // chunk, counted in a packed sequence from its start
(Llama 4).
Options change scores s = scale q k^T, in this order:

    softcap     c tanh(s / c)                       ds (1 - tanh^2)            arXiv:2408.00118
    alibi       s - slope_h |i - j|                 slopes by head: arXiv:2108.12409
    bias        s + bias                            dbias = ds, summed over the dims that it broadcasts

x is `(q, k, v)`, and one more part if the config says so: with `bias` a bias [B or 1, H or 1, T, S] of q's dtype, in which -inf
masks; with `packed` cu_seqlens [N + 1], int32, ascending from 0 to T: B is 1, and each sequence sees only itself. Their values are
not read on a device: rows from the last end on are then one more sequence, and one longer than `max_seqlen` is an assertion that
fails there. A chain gives the part to a step that takes it: x, and so dx, is then `((q, k, v), more)`.
q: [B, T, H, D]; k: [B, S, K, D]; v: [B, S, K, V] with K dividing H; y, dy: [B, T, H, V]; one float dtype; any strides.
Kept: q, k, v, bias, cu_seqlens (aliases), y (the caller's own output) and logsumexp: 4 bytes a row and head. No attention matrix is
kept: the backward recomputes p from logsumexp. Empty sequences give zeros, and so do rows that a bias masks entirely.
docs/kernels.md says which kernel runs when. arXiv:2205.14135, arXiv:2305.13245.

>>> import torch
>>> from funcops import AttentionConfig, attention_bwd, attention_fwd
>>> cfg = AttentionConfig(causal=True)
>>> q, k = torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 2, 8)
>>> v = torch.tensor([0.0, 1.0, 2.0]).reshape(1, 3, 1, 1).expand(1, 3, 2, 8)
>>> y, residuals = attention_fwd(None, (q, k, v), cfg)
>>> y[0, :, 0, 0]
tensor([0.0000, 0.5000, 1.0000])
>>> residuals.q is q, residuals.logsumexp.shape
(True, torch.Size([1, 4, 3]))
>>> dq, dk, dv = attention_bwd(residuals, torch.ones_like(y), cfg)[1]
>>> dq.shape, dv.shape
(torch.Size([1, 3, 4, 8]), torch.Size([1, 3, 2, 8]))
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, NESTED, Inputs, Residuals, saved
from funcops.engine.errors import FLOATS, check, fail, not_a_tuple, require
from funcops.library.kernels.attention import attend_bwd, attend_fwd
from funcops.library.kernels.scored_attention import Score, read_here

__all__ = ["AttentionConfig", "AttentionResiduals"]
__all__ += ["attention", "attention_bwd", "attention_dgrad", "attention_fwd", "attention_init", "attention_wgrad"]


@config
class AttentionConfig(OpConfig):
    """`scale` defaults to D^(-1/2). `window`, with `causal`: how many positions a position sees, itself included; `chunk`, with
    `causal`: the length of chunks, of which a position sees its own. `softcap` bounds the scores. `alibi` lowers scores with the
    distance. `bias`, `packed`: x has one more part, the bias or cu_seqlens. `max_seqlen`, with `packed`: a bound for the lengths of
    sequences; on CUDA, flash attention has blocks for so many rows of each, by default for T."""

    causal: bool = False
    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    alibi: bool = False
    bias: bool = False
    packed: bool = False
    max_seqlen: int | None = None
    attends = True
    sinks: ClassVar[bool] = False  # whether each head has a learned sink

    def __post_init__(self) -> None:
        where = type(self).__name__
        for name in ("scale", "softcap"):
            value = getattr(self, name)
            require(value is None or (math.isfinite(value) and value > 0), where, name, "None or above 0", value)
        for name in ("window", "chunk"):
            value = getattr(self, name)
            require(value is None or value >= 1, where, name, "None or at least 1", value)
            require(value is None or self.causal, where, name, "None without causal", value)
        require(self.max_seqlen is None or self.max_seqlen >= 1, where, "max_seqlen", "None or at least 1", self.max_seqlen)
        require(self.max_seqlen is None or self.packed, where, "max_seqlen", "None without packed", self.max_seqlen)
        require(not (self.bias and self.chunk), where, "bias", "False with chunk (let the bias mask with -inf)", self.bias)
        require(not (self.bias and self.packed), where, "bias", "False with packed, for which a bias is not supported", self.bias)

    @property
    def derives(self) -> bool:  # type: ignore[override]
        return self.packed

    def sharded(self, dim: int, n: int) -> Any:
        """Raise for ALiBi over sharded heads: a slope goes by the number of a head among all heads."""
        require(not self.alibi or dim != 2, type(self).__name__, "alibi", f"False over heads sharded over {n} ranks", self.alibi)

    @property
    def reach(self) -> int | None:
        """How many positions a position sees at most; None: all."""
        if self.window is None or self.chunk is None:  # torch.compile cannot follow min(..., default=None)
            return self.window or self.chunk
        return min(self.window, self.chunk)

    @property
    def limits(self) -> tuple[int, int]:
        """The lengths of chunks, and at most of packed sequences; 0: none."""
        return self.chunk or 0, self.max_seqlen or 0

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts of x."""
        return "q", "k", "v", *(("bias",) if self.bias else ()), *(("cu_seqlens",) if self.packed else ())

    def score(self, head_size: int) -> Score:
        return Score(self.causal, self.window or 0, self.softcap or 0.0, self.alibi, scale_of(head_size, self.scale))


class AttentionResiduals(Residuals, static=("inputs",)):
    q: Tensor = saved("[B, T, H, D]", alias="x.0", needed_by=DGRAD)
    k: Tensor = saved("[B, S, K, D]", alias="x.1", needed_by=DGRAD)
    v: Tensor = saved("[B, S, K, V]", alias="x.2", needed_by=DGRAD)
    y: Tensor = saved("[B, T, H, V]", alias="y", needed_by=DGRAD)
    logsumexp: Tensor = saved("[B, H, T]", needed_by=DGRAD)
    more: Tensor | None = saved("[B or 1, H or 1, T, S] or [N + 1]", alias="x.3", needed_by=DGRAD)  # bias or cu_seqlens


def scale_of(head_size: int, scale: float | None) -> float:
    return head_size**-0.5 if scale is None else scale


def check_parts(where: str, x: object, parts: tuple[str, ...]) -> Any:
    """Check that x is a tuple of these parts, and return it; of four, the first three may be a tuple."""
    if isinstance(x, tuple) and len(x) == 2 and type(x[0]) is tuple:
        x = (*x[0], x[1])
    if not isinstance(x, tuple) or len(x) != len(parts):
        not_a_tuple(where, x, *parts)
    return x


def _right(q: Any, k: Any, v: Any, causal: bool) -> bool:
    """Whether `check_qkv` finds nothing: its usual answer, by fewer steps."""
    try:
        (b, t, heads, size), (b_k, s, groups, size_k), (b_v, s_v, groups_v, _), dtype = q.shape, k.shape, v.shape, q.dtype
        return bool(
            b == b_k == b_v
            and s == s_v
            and groups == groups_v
            and size == size_k > 0
            and groups > 0
            and heads % groups == 0
            and not (causal and t > s)
            and dtype in FLOATS
            and k.dtype is dtype
            and v.dtype is dtype
            and ((q.is_cpu and k.is_cpu and v.is_cpu) or q.device == k.device == v.device)
            and not ((q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled())
        )
    except (AttributeError, ValueError):
        return False


def check_qkv(where: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> None:
    """Check the shapes, dtypes and devices of q, k and v."""
    if _right(q, k, v, causal):
        return
    check(where, "x.0 (q)", q, (...,), FLOATS)
    check(where, "x.1 (k)", k, (...,), q.dtype, q)
    q_shape, k_shape = q.shape, k.shape
    if len(q_shape) != 4:
        fail(where, "x.0 (q)", "[B, T, H, D]", list(q_shape))
    if not q_shape[3]:  # the default scale would be infinite
        fail(where, "x.0 (q)", "[B, T, H, D] with D at least 1", list(q_shape))
    if len(k_shape) != 4 or k_shape[0] != q_shape[0] or k_shape[3] != q_shape[3]:
        fail(where, "x.1 (k)", f"[{q_shape[0]}, S, K, {q_shape[3]}]", list(k_shape))
    if k_shape[2] == 0 or q_shape[2] % k_shape[2] != 0:
        fail(where, "x.1 (k)", f"of a number of heads that divides {q_shape[2]}", k_shape[2])
    if causal and q_shape[1] > k_shape[1]:
        fail(where, "x.1 (k)", f"at least as long as q, {q_shape[1]} (cfg.causal)", k_shape[1])
    check(where, "x.2 (v)", v, (...,), q.dtype, q)
    if v.dim() != 4 or v.shape[:3] != k_shape[:3]:
        fail(where, "x.2 (v)", f"[{', '.join(map(str, k_shape[:3]))}, V]", list(v.shape))


def check_x(where: str, x: object, cfg: AttentionConfig) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Check x, and return q, k, v and the part after them, or None."""
    q, k, v, *rest = check_parts(where, x, cfg.parts)
    check_qkv(where, q, k, v, cfg.causal)
    more = rest[0] if rest else None
    if cfg.bias:
        check_bias(where, more, q, k.shape[1])
    if cfg.packed:
        check_cu_seqlens(where, more, q, k, cfg)
    return q, k, v, more


def of_config(more: Tensor | None, cfg: AttentionConfig) -> tuple[Tensor | None, Tensor | None]:
    """The part of x after q, k and v as `(bias, cu_seqlens)`."""
    return more if cfg.bias else None, more if cfg.packed else None


def indices_of(residuals: Any) -> tuple[int, int, int, int]:
    """The index in x of each part, or of the tuple that holds it."""
    return (0, 0, 0, 1) if residuals.inputs is NESTED else (0, 1, 2, 3)


def check_bias(where: str, bias: Any, q: Tensor, s: int) -> None:
    """Check a bias of `s` keys."""
    check(where, "x.3 (bias)", bias, (...,), q.dtype, q)
    batch, heads, t = q.shape[0], q.shape[2], q.shape[1]
    shape = bias.shape
    if len(shape) != 4 or shape[0] not in (1, batch) or shape[1] not in (1, heads) or tuple(shape[2:]) != (t, s):
        fail(where, "x.3 (bias)", f"[{batch} or 1, {heads} or 1, {t}, {s}]", list(shape))


def check_cu_seqlens(where: str, ends: Any, q: Tensor, k: Tensor, cfg: AttentionConfig, ranks: int = 1) -> None:
    """Check cu_seqlens, over the rows of all ranks; the values only on the CPU, and not while tracing."""
    check(where, "x.3 (cu_seqlens)", ends, (...,), torch.int32, q)
    if q.shape[0] != 1:
        fail(where, "x.0 (q)", "of batch size 1 (cfg.packed): concatenate the sequences", q.shape[0])
    if q.shape[1] != k.shape[1]:
        fail(where, "x.1 (k)", f"as long as q, {q.shape[1]} (cfg.packed)", k.shape[1])
    if ends.dim() != 1 or ends.shape[0] < 1:
        fail(where, "x.3 (cu_seqlens)", "[N + 1]", list(ends.shape))
    if read_here(ends):
        found, rows = ends.tolist(), ranks * q.shape[1]
        if found[0] != 0 or found[-1] != rows or any(a > b for a, b in zip(found, found[1:], strict=False)):
            fail(where, "x.3 (cu_seqlens)", f"ascending, from 0 to q's length {rows}", found)
        most, longest = cfg.max_seqlen, max((b - a for a, b in zip(found, found[1:], strict=False)), default=0)
        if most is not None and longest > most:
            fail(where, "x.3 (cu_seqlens)", f"of sequences of at most {most} (cfg.max_seqlen)", f"one of {longest}")


@forward(AttentionConfig)
def attention_fwd(
    params: None, x: tuple[Tensor, ...], cfg: AttentionConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, AttentionResiduals | None]:
    """x: `(q, k, v)`, and the part that cfg adds -> y: [B, T, H, V]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or
    device, and on the CPU for cu_seqlens that do not ascend from 0 to T."""
    q, k, v, more = check_x("attention_fwd", x, cfg)
    bias, ends = (None, None) if more is None else of_config(more, cfg)
    y, logsumexp = attend_fwd(q, k, v, bias, ends, cfg.score(q.shape[3]), *cfg.limits)
    kept = AttentionResiduals.keep(cfg, needs, q=q, k=k, v=v, y=y, logsumexp=logsumexp, more=more, inputs=Inputs.of(x))
    return y, kept


def input_gradients(where: str, residuals: Any, dy: Tensor, cfg: AttentionConfig) -> Any:
    """The requested gradients of the parts of x."""
    needs, q, y = residuals.needs, residuals.q, residuals.y
    check(where, "dy", dy, y.shape, y.dtype, y)
    at = indices_of(residuals)
    wants_bias, score = cfg.bias and needs.input(at[3]), cfg.score(q.shape[3])
    dq, dk, dv, dbias = attend_bwd(
        dy, q, residuals.k, residuals.v, *of_config(residuals.more, cfg), y, residuals.logsumexp, score, wants_bias, *cfg.limits
    )
    grads: list[Tensor | None] = [dq, dk, dv]
    if cfg.bias or cfg.packed:
        grads += [dbias] * cfg.bias + [None] * cfg.packed
    if needs.x is not True:
        grads = [g if needs.input(i) else None for i, g in zip(at, grads, strict=False)]
    return residuals.inputs.make(tuple(grads))


@dgrad_of(AttentionResiduals)
def attention_dgrad(residuals: AttentionResiduals, dy: Tensor, cfg: AttentionConfig) -> tuple[tuple[Tensor, ...], None]:
    """`(dq, dk, dv)`, and dbias for a bias or None for cu_seqlens. No params, so pending is None."""
    if not residuals.needs.x:
        return residuals.nothing(), None
    return input_gradients("attention_dgrad", residuals, dy, cfg), None


def scored(cfg: AttentionConfig) -> str:
    """The options that keep scores from torch's kernel, whose blocks a mode may fix: `Op.mixes`."""
    return "; ".join([f"{name}, which that mode has no kernel for" for name in ("softcap", "bias") if getattr(cfg, name)])


def largest_logsumexp(residuals: AttentionResiduals, dy: Tensor, cfg: AttentionConfig) -> Tensor:
    """The largest log of a sum of exponentials over the keys: it grows where logits do. A value of `funcops.logs`."""
    return residuals.logsumexp.amax()


attention = make_op("attention", AttentionConfig, fwd=attention_fwd, dgrad=attention_dgrad, logs=(largest_logsumexp,), mixes=scored)
attention_init, attention_bwd, attention_wgrad = no_params(attention, attention_dgrad)
