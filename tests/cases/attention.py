import itertools
import math

import torch
from hypothesis import strategies as st

from funcops import AttentionConfig, attention, attention_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    """Softmax attention written out."""
    q, k, v, *more = x
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if cfg.scale is None else cfg.scale
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if cfg.softcap is not None:
        scores = cfg.softcap * torch.tanh(scores / cfg.softcap)
    t, s = scores.shape[-2:]
    away = torch.arange(s) - torch.arange(t)[:, None] - (s - t)
    if cfg.alibi:
        scores = scores - torch.tensor(_slopes(q.shape[2]), dtype=torch.float64)[:, None, None] * away.abs()
    if cfg.bias:
        scores = scores + more[0]
    if cfg.causal:
        scores = scores.masked_fill((away > 0) | (away <= -(cfg.window or s + t)), float("-inf"))
    if cfg.packed:
        ids = torch.repeat_interleave(torch.arange(len(more[0]) - 1), more[0].diff())
        scores = scores.masked_fill(ids[:, None] != ids, float("-inf"))
    if cfg.chunk:
        at = torch.arange(s) - (more[0][:-1][ids] if cfg.packed else 0)
        of = at // cfg.chunk
        scores = scores.masked_fill(of[s - t :, None] != of, float("-inf"))
    p = scores.softmax(-1).nan_to_num() if k.shape[1] else scores
    return torch.einsum("bhts,bshd->bthd", p, v)


def _slopes(heads):
    """The slopes of Hugging Face's build_alibi_tensor."""
    n = 2 ** math.floor(math.log2(heads))
    base, more = (2 ** (-8 / m) for m in (n, 2 * n))
    return [base**i for i in range(1, n + 1)] + [more**i for i in range(1, 2 * (heads - n), 2)]


def case(b, t, s, h, k, d, value=None, bias=None, ends=None, **options):
    """`bias`: its sizes along batch and heads; `ends`: the ends of packed sequences; `value`: v's head size."""

    def x(draw):
        q, keys, values = draw.randn(b, t, h, d), draw.randn(b, s, k, d), draw.randn(b, s, k, value or d)
        more = (() if bias is None else (draw.randn(*bias, t, s),)) + (() if ends is None else (torch.tensor(ends).int(),))
        return q, keys, values, *more

    options |= ({"bias": True} if bias else {}) | ({"packed": True} if ends else {})

    name = f"attention-{b}-{t}-{s}-{h}-{k}-{d}-{value}-{bias}-{ends}-{options}"
    alone = (
        s == 1
        or 1 in (options.get("window"), options.get("chunk"))
        or (ends and max(b - a for a, b in itertools.pairwise(ends)) <= 1)
    )
    cancels = ("x.0", "x.1", "x.3") if alone else ()  # p is 1 whatever q and k are, and ds the difference of two equal sums
    return Case(op=attention, cfg=AttentionConfig(**options), x=x, reference=reference, name=name, cancels=cancels)


CASES = [
    case(2, 5, 5, 4, 2, 8, causal=True),
    case(2, 7, 7, 3, 1, 16, causal=True),
    case(1, 3, 69, 2, 2, 8, scale=0.3),
    case(2, 1, 1, 1, 1, 4),
    case(0, 3, 3, 2, 1, 8, causal=True),
    case(2, 0, 0, 2, 1, 8, causal=True),
    case(2, 3, 0, 2, 2, 8),
    case(2, 3, 7, 4, 2, 8, causal=True),
    case(1, 21, 23, 4, 2, 8, causal=True, window=4),
    case(2, 5, 5, 2, 2, 12, value=8, causal=True),
    case(1, 9, 9, 2, 1, 8, ends=[0, 4, 4, 9], causal=True, window=3),
    case(2, 8, 8, 4, 2, 8, causal=True, chunk=4),
    case(2, 8, 11, 2, 1, 8, causal=True, chunk=4, window=3, softcap=2.0),
    case(1, 9, 9, 2, 1, 8, ends=[0, 6, 6, 9], causal=True, chunk=4),
    case(1, 9, 9, 2, 2, 8, ends=[0, 3, 9]),
    case(1, 9, 9, 2, 1, 8, ends=[0, 3, 9], causal=True, max_seqlen=6),
    case(2, 4, 6, 4, 2, 8, bias=(1, 4)),
    case(2, 5, 5, 6, 2, 8, softcap=1.5, causal=True),
    case(1, 5, 5, 3, 3, 8, alibi=True, causal=True),
    case(2, 5, 6, 4, 2, 8, value=20, bias=(2, 1), softcap=2.0, alibi=True, causal=True, window=3),
]


@st.composite
def drawn(draw):
    causal, packed, t = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 6))
    s = t if packed else draw(st.integers(t if causal else 0, 6))
    b, k, groups, d = 1 if packed else draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), [4, 8, 5]
    options = {"causal": causal, "alibi": draw(st.booleans()), "softcap": draw(st.sampled_from([None, 2.0]))}
    if causal:
        options["window"] = draw(st.sampled_from([None, 1, 3, 9]))
        options["chunk"] = draw(st.sampled_from([None, 1, 3, 9]))
    if packed:
        options["ends"] = [0, *sorted(draw(st.lists(st.integers(0, t), max_size=3))), t]
    elif not options.get("chunk") and draw(st.booleans()):
        options["bias"] = draw(st.sampled_from([1, max(1, b)])), draw(st.sampled_from([1, k * groups]))
    return case(b, t, s, k * groups, k, draw(st.sampled_from(d)), value=draw(st.sampled_from(d)), **options)


def _call(*shapes, ends=None, **options):
    more = () if ends is None else (torch.tensor(ends, dtype=torch.int32),)
    return lambda: attention_fwd(None, (*(torch.ones(s) for s in shapes), *more), AttentionConfig(**options))


SAME = ((1, 4, 2, 8),) * 3
ERRORS = [
    Error(call=lambda: AttentionConfig(window=4), match="AttentionConfig: window must be None without causal, got 4"),
    Error(call=lambda: AttentionConfig(window=0, causal=True), match="AttentionConfig: window must be None or at least 1, got 0"),
    Error(call=lambda: AttentionConfig(chunk=4), match="AttentionConfig: chunk must be None without causal, got 4"),
    Error(call=lambda: AttentionConfig(chunk=0, causal=True), match="AttentionConfig: chunk must be None or at least 1, got 0"),
    Error(call=lambda: AttentionConfig(chunk=4, bias=True, causal=True), match="AttentionConfig: bias must be False with chunk"),
    Error(call=lambda: AttentionConfig(max_seqlen=4), match="AttentionConfig: max_seqlen must be None without packed, got 4"),
    Error(
        call=lambda: AttentionConfig(max_seqlen=0, packed=True),
        match="AttentionConfig: max_seqlen must be None or at least 1, got 0",
    ),
    Error(call=lambda: AttentionConfig(softcap=0.0), match="AttentionConfig: softcap must be None or above 0, got 0.0"),
    Error(call=lambda: AttentionConfig(packed=True, bias=True), match="AttentionConfig: bias must be False with packed"),
    Error(call=lambda: AttentionConfig(scale=-1.0), match="AttentionConfig: scale must be None or above 0"),
    Error(call=_call((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), match="attention_fwd: x.1 (k) must be of a number of heads"),
    Error(
        call=_call((1, 5, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8), causal=True),
        match="attention_fwd: x.1 (k) must be at least as long as q, 5 (cfg.causal), got 4",
    ),
    Error(call=_call((1, 4, 2, 8), (1, 4, 2, 7), (1, 4, 2, 7)), match="attention_fwd: x.1 (k) must be [1, S, K, 8]"),
    Error(call=_call(*SAME[1:], (1, 3, 2, 8)), match="attention_fwd: x.2 (v) must be [1, 4, 2, V], got [1, 3, 2, 8]"),
    Error(call=_call((4, 2, 8), (4, 2, 8), (4, 2, 8)), match="attention_fwd: x.0 (q) must be [B, T, H, D], got [4, 2, 8]"),
    Error(call=_call(*SAME, bias=True), match="attention_fwd: x must be a tuple (q, k, v, bias), got tuple of 3", error=TypeError),
    Error(
        call=_call(*SAME, (1, 3, 4, 4), bias=True),
        match="attention_fwd: x.3 (bias) must be [1 or 1, 2 or 1, 4, 4], got [1, 3, 4, 4]",
    ),
    Error(
        call=_call(*SAME, ends=[0, 3], packed=True),
        match="attention_fwd: x.3 (cu_seqlens) must be ascending, from 0 to q's length 4, got [0, 3]",
    ),
    Error(
        call=_call(*SAME, ends=[0, 3, 2, 4], packed=True),
        match="attention_fwd: x.3 (cu_seqlens) must be ascending, from 0 to q's length 4, got [0, 3, 2, 4]",
    ),
    Error(
        call=_call(*SAME, ends=[0, 3, 4], packed=True, max_seqlen=2),
        match="attention_fwd: x.3 (cu_seqlens) must be of sequences of at most 2 (cfg.max_seqlen), got one of 3",
    ),
    Error(
        call=_call(*SAME, (2,), packed=True), match="attention_fwd: x.3 (cu_seqlens) must be int32, got float32", error=TypeError
    ),
    Error(
        call=_call(*((2, 4, 2, 8),) * 3, ends=[0, 4], packed=True),
        match="attention_fwd: x.0 (q) must be of batch size 1 (cfg.packed): concatenate the sequences, got 2",
    ),
    Error(
        call=_call((1, 4, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8), ends=[0, 4], packed=True),
        match="attention_fwd: x.1 (k) must be as long as q, 4 (cfg.packed), got 5",
    ),
    Error(
        call=lambda: attention_fwd(None, (*map(torch.ones, SAME), torch.ones(1, 2, 4, 4).double()), AttentionConfig(bias=True)),
        match="attention_fwd: x.3 (bias) must be float32, got float64",
        error=TypeError,
    ),
]
