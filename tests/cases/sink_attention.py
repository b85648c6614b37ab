import torch
from hypothesis import strategies as st

from funcops import SinkAttentionConfig, SinkAttentionParams, sink_attention, sink_attention_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    """Softmax over a row's scores and its head's sink, as Hugging Face's eager attention of GPT-OSS."""
    q, k, v, *ends = x
    groups = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(groups, 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    t, s = scores.shape[-2:]
    away = torch.arange(s) - torch.arange(t)[:, None] - (s - t)
    if cfg.causal:
        scores = scores.masked_fill((away > 0) | (away <= -(cfg.window or s + t)), float("-inf"))
    if ends:
        ids = torch.repeat_interleave(torch.arange(len(ends[0]) - 1), ends[0].diff())
        scores = scores.masked_fill(ids[:, None] != ids, float("-inf"))
    sinks = params.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
    p = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return torch.einsum("bhts,bshd->bthd", p, v)


def case(b, t, s, h, k, d, value=None, ends=None, **options):
    def x(draw):
        given = draw.randn(b, t, h, d), draw.randn(b, s, k, d), draw.randn(b, s, k, value or d)
        return given if ends is None else (*given, torch.tensor(ends).int())

    cfg = SinkAttentionConfig(h, packed=ends is not None, **options)
    return Case(op=sink_attention, cfg=cfg, x=x, reference=reference, name=f"sinks-{b}-{t}-{s}-{h}-{k}-{d}-{ends}-{options}")


CASES = [
    case(2, 5, 5, 4, 2, 8, causal=True),
    case(1, 4, 9, 2, 1, 8, causal=True, window=3, value=12),
    case(1, 6, 6, 2, 2, 8, ends=[0, 2, 6], causal=True),
    case(2, 3, 0, 2, 2, 8),
    case(0, 3, 3, 2, 1, 8),
]


@st.composite
def drawn(draw):
    causal, t = draw(st.booleans()), draw(st.integers(1, 6))
    s = draw(st.integers(t if causal else 0, 6))
    k, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    window = draw(st.sampled_from([None, 1, 3])) if causal else None
    return case(draw(st.integers(0, 2)), t, s, k * groups, k, draw(st.sampled_from([4, 5])), causal=causal, window=window)


def _call(heads, sinks):
    x = (torch.ones(1, 4, 2, 8),) * 3
    return lambda: sink_attention_fwd(SinkAttentionParams(sinks), x, SinkAttentionConfig(heads))


ERRORS = [
    Error(call=lambda: SinkAttentionConfig(0), match="SinkAttentionConfig: heads must be at least 1, got 0"),
    Error(call=lambda: SinkAttentionConfig(2, window=3), match="SinkAttentionConfig: window must be None without causal, got 3"),
    Error(call=_call(3, torch.zeros(3)), match="sink_attention_fwd: x.0 (q) must be [1, 4, 3, 8], got [1, 4, 2, 8]"),
    Error(call=_call(2, torch.zeros(3)), match="sink_attention_fwd: params.sinks must be [2], got [3]"),
    Error(
        call=_call(2, torch.zeros(2).half()), match="sink_attention_fwd: params.sinks must be float32, got float16", error=TypeError
    ),
]
