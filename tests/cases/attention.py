import torch
from hypothesis import strategies as st

from funcops import AttentionConfig, attention, attention_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    """Softmax attention written out."""
    q, k, v = x
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    scale = q.shape[-1] ** -0.5 if cfg.scale is None else cfg.scale
    scores = torch.einsum("bthd,bshd->bhts", q, k) * scale
    if cfg.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool(), float("-inf"))
    p = scores.softmax(-1) if k.shape[1] else scores
    return torch.einsum("bhts,bshd->bthd", p, v)


def case(b, t, s, h, k, d, **options):
    def x(draw):
        return draw.randn(b, t, h, d), draw.randn(b, s, k, d), draw.randn(b, s, k, d)

    name = f"attention-{b}-{t}-{s}-{h}-{k}-{d}-{options}"
    cancels = ("x.0", "x.1") if s == 1 else ()  # p is 1 whatever q and k are, and ds the difference of two equal sums
    return Case(op=attention, cfg=AttentionConfig(**options), x=x, reference=reference, name=name, cancels=cancels)


CASES = [
    case(2, 5, 5, 4, 2, 8, causal=True),
    case(2, 7, 7, 3, 1, 16, causal=True),
    case(1, 3, 69, 2, 2, 8, scale=0.3),
    case(2, 1, 1, 1, 1, 4),
    case(0, 3, 3, 2, 1, 8, causal=True),
    case(2, 0, 0, 2, 1, 8, causal=True),
    case(2, 3, 0, 2, 2, 8),
]


@st.composite
def drawn(draw):
    causal = draw(st.booleans())
    t = draw(st.integers(0, 6))
    s = t if causal else draw(st.integers(0, 6))
    k, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return case(draw(st.integers(0, 2)), t, s, k * groups, k, draw(st.sampled_from([4, 8, 5])), causal=causal)


def _call(*shapes, **options):
    return lambda: attention_fwd(None, tuple(torch.ones(s) for s in shapes), AttentionConfig(**options))


ERRORS = [
    Error(call=lambda: AttentionConfig(window=4), match="AttentionConfig: window must be None"),
    Error(call=lambda: AttentionConfig(packed=True), match="AttentionConfig: packed must be False"),
    Error(call=lambda: AttentionConfig(scale=-1.0), match="AttentionConfig: scale must be None or above 0"),
    Error(call=_call((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), match="attention_fwd: x.1 (k) must be of a number of heads"),
    Error(
        call=_call((1, 4, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8), causal=True),
        match="attention_fwd: x.1 (k) must be of length 4, as q is (cfg.causal), got 5",
    ),
    Error(call=_call((1, 4, 2, 8), (1, 4, 2, 7), (1, 4, 2, 7)), match="attention_fwd: x.1 (k) must be [1, S, K, 8]"),
    Error(call=_call((4, 2, 8), (4, 2, 8), (4, 2, 8)), match="attention_fwd: x.0 (q) must be [B, T, H, D], got [4, 2, 8]"),
]
