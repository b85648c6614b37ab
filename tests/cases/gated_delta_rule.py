import torch
from hypothesis import strategies as st

from funcops import GatedDeltaRuleConfig, gated_delta_rule, gated_delta_rule_dgrad, gated_delta_rule_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    """The recurrence, time by time."""
    q, k, v, g, beta, *state = x
    q, k = (t.repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    scale = q.shape[3] ** -0.5 if cfg.scale is None else cfg.scale
    s = state[0] if state else v.new_zeros((v.shape[0], v.shape[2], q.shape[3], v.shape[3]))
    ys = [v[:, :0]]
    for t in range(v.shape[1]):
        s = g[:, t].exp()[..., None, None] * s
        held = torch.einsum("bhdv,bhd->bhv", s, k[:, t])
        s = s + torch.einsum("bhd,bhv->bhdv", k[:, t], beta[:, t, :, None] * (v[:, t] - held))
        ys.append(scale * torch.einsum("bhdv,bhd->bhv", s, q[:, t])[:, None])
    y = torch.cat(ys, 1)
    return (y, s) if state else y


def case(b, t, keys, heads, size, width, **options):
    def x(d):
        wide = torch.promote_types(d.dtype, torch.float32)
        q, k, v = d.randn(b, t, keys, size), d.randn(b, t, keys, size), d.randn(b, t, heads, width)
        k = torch.nn.functional.normalize(k.to(wide), dim=-1).to(d.dtype)
        g, beta = -d.rand(b, t, heads).to(wide), d.rand(b, t, heads)
        state = (d.randn(b, heads, size, width).to(wide),) if options.get("state") else ()
        return q, k, v, g, beta, *state

    name = f"gated_delta_rule-{b}-{t}-{keys}-{heads}-{size}-{width}-{options}"
    cfg = GatedDeltaRuleConfig(**options)
    return Case(op=gated_delta_rule, cfg=cfg, x=x, reference=reference, name=name, casts=cfg.state)  # the state is wide


CASES = [
    case(2, 7, 2, 4, 5, 3, chunk=3),
    case(1, 9, 1, 2, 3, 4, chunk=4, state=True, scale=0.7),
    case(2, 6, 3, 3, 4, 5),
    case(2, 1, 1, 1, 1, 1, state=True),
    case(1, 0, 2, 2, 3, 3, state=True),
    case(0, 4, 1, 2, 3, 2, chunk=2),
]


@st.composite
def drawn(draw):
    b, t, keys, group, size, width = [draw(st.integers(1, high)) for high in (2, 9, 2, 2, 4, 4)]
    return case(b, t, keys, keys * group, size, width, chunk=draw(st.integers(1, 10)), state=draw(st.booleans()))


CFG, STATE = GatedDeltaRuleConfig(), GatedDeltaRuleConfig(state=True)
QK, V, G = torch.ones(2, 5, 2, 3), torch.ones(2, 5, 4, 6), torch.zeros(2, 5, 4)
X = QK, QK, V, G, G
ERRORS = [
    Error(call=lambda: GatedDeltaRuleConfig(chunk=0), match="GatedDeltaRuleConfig: chunk must be at least 1, got 0"),
    Error(call=lambda: GatedDeltaRuleConfig(scale=0.0), match="GatedDeltaRuleConfig: scale must be None or above 0, got 0.0"),
    Error(
        call=lambda: gated_delta_rule_fwd(None, X[:4], CFG),
        match="gated_delta_rule_fwd: x must be a tuple (q, k, v, g, beta)",
        error=TypeError,
    ),
    Error(
        call=lambda: gated_delta_rule_fwd(None, (QK[0], *X[1:]), CFG),
        match="gated_delta_rule_fwd: x.0 (q) must be [B, T, K, D] with K and D at least 1, got [5, 2, 3]",
    ),
    Error(
        call=lambda: gated_delta_rule_fwd(None, (QK, QK, V[:, :, :3], G[..., :3], G[..., :3]), CFG),
        match="gated_delta_rule_fwd: x.2 (v) must be [2, 5, H, V] with H a multiple of 2, got [2, 5, 3, 6]",
    ),
    Error(
        call=lambda: gated_delta_rule_fwd(None, (QK, QK, V, G[..., :1], G), CFG),
        match="gated_delta_rule_fwd: x.3 (g) must be [2, 5, 4], got [2, 5, 1]",
    ),
    Error(
        call=lambda: gated_delta_rule_fwd(None, (*X, torch.zeros(2, 4, 6, 3)), STATE),
        match="gated_delta_rule_fwd: x.5 (state) must be [2, 4, 3, 6], got [2, 4, 6, 3]",
    ),
    Error(
        call=lambda: gated_delta_rule_dgrad(gated_delta_rule_fwd(None, X, CFG)[1], V[..., :5], CFG),
        match="gated_delta_rule_dgrad: dy must be [2, 5, 4, 6], got [2, 5, 4, 5]",
    ),
    Error(
        call=lambda: gated_delta_rule_dgrad(gated_delta_rule_fwd(None, (*X, torch.zeros(2, 4, 3, 6)), STATE)[1], V, STATE),
        match="gated_delta_rule_dgrad: dy must be a tuple (dy, dlast)",
        error=TypeError,
    ),
    Error(
        call=lambda: gated_delta_rule_dgrad(
            gated_delta_rule_fwd(None, (*X, torch.zeros(2, 4, 3, 6)), STATE)[1], (None, torch.zeros(2, 4, 6, 3)), STATE
        ),
        match="gated_delta_rule_dgrad: dy.1 (last state) must be [2, 4, 3, 6], got [2, 4, 6, 3]",
    ),
]
