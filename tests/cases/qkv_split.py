import torch
from hypothesis import strategies as st
from rotation import turned

from funcops import QKVSplitConfig, RopeConfig, qkv_split, qkv_split_dgrad, qkv_split_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    t, positions = x if cfg.rope else (x, None)
    q, k, v = t.unflatten(-1, (-1, cfg.dim)).split((cfg.heads, cfg.kv_heads, cfg.kv_heads), -2)
    if cfg.rope:
        q, k = turned(None, (q, positions), cfg.rope), turned(None, (k, positions), cfg.rope)
    return q, k, v


def case(rows, t, n, m, dim, per_row=False, **options):
    cfg = QKVSplitConfig(n, dim, kv_heads=m, rope=RopeConfig(dim, **options) if options else None)

    def x(d):
        qkv = d.randn(*rows, t, (n + 2 * m) * dim)
        return (qkv, d.integers(0, 50, *(rows if per_row else ()), t)) if options else qkv

    return Case(op=qkv_split, cfg=cfg, x=x, reference=reference, name=f"qkv_split-{rows}-{t}-{n}-{m}-{dim}-{per_row}-{options}")


CASES = [
    case((2,), 5, 3, 1, 8),
    case((2,), 5, 3, 3, 8, theta=100.0),
    case((2,), 5, 4, 2, 10, rotary_dim=6, interleaved=True, per_row=True),
    case((), 1, 1, 1, 2, theta=10.0),
    case((0,), 3, 2, 1, 4, interleaved=True),
]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    half, extra = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    options = draw(st.sampled_from([{}, dict(rotary_dim=2 * half, interleaved=draw(st.booleans()))]))
    sizes = draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return case(rows, *sizes, 2 * half + extra, draw(st.booleans()), **options)


X, TURNED = torch.ones(2, 5, 32), QKVSplitConfig(2, 8, kv_heads=1, rope=RopeConfig(8))
ERRORS = [
    Error(call=lambda: QKVSplitConfig(0, 8), match="QKVSplitConfig: heads must be at least 1, got 0"),
    Error(call=lambda: QKVSplitConfig(2, 8, rope=RopeConfig(4)), match="QKVSplitConfig: rope must be a RopeConfig(8)"),
    Error(call=lambda: qkv_split_fwd(None, X, QKVSplitConfig(3, 8)), match="qkv_split_fwd: x must be [..., 72], got [2, 5, 32]"),
    Error(call=lambda: qkv_split_fwd(None, X, TURNED), match="qkv_split_fwd: x must be a tuple (x, positions)", error=TypeError),
    Error(
        call=lambda: qkv_split_fwd(None, (X, torch.arange(4)), TURNED), match="qkv_split_fwd: x.1 (positions) must be [5], got [4]"
    ),
    Error(
        call=lambda: qkv_split_dgrad(
            qkv_split_fwd(None, X, QKVSplitConfig(2, 8, kv_heads=1))[1], X, QKVSplitConfig(2, 8, kv_heads=1)
        ),
        match="qkv_split_dgrad: dy must be a tuple (dq, dk, dv)",
        error=TypeError,
    ),
    Error(
        call=lambda: QKVSplitConfig(2, 8).sharded(2, 2), match="QKVSplitConfig: x must be sharded along its last dim, got dim -2"
    ),
]
