import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import GLUConfig, glu, glu_fwd
from funcops.testing import Case, Error

GATES = {
    "glu": torch.sigmoid,
    "reglu": F.relu,
    "squared_reglu": lambda x: F.relu(x) ** 2,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_geglu": lambda x: x * torch.sigmoid(1.702 * x),
    "swiglu": F.silu,
}


def reference(params, x, cfg):
    if cfg.paired:
        return GATES[cfg.kind](x[0]) * x[1]
    t, scales = x[:2] if cfg.scaled else (x, None)
    if cfg.gathered:
        scales = scales.reshape(-1)[x[2].long()]
    gate, linear = t.chunk(2, -1) if cfg.gate == "first" else t.chunk(2, -1)[::-1]
    if cfg.kind == "clamped_swiglu":
        gate, linear = gate.clamp(max=cfg.limit), linear.clamp(-cfg.limit, cfg.limit)
        y = gate * torch.sigmoid(cfg.alpha * gate) * (linear + cfg.offset)
    else:
        y = GATES[cfg.kind](gate) * linear
    return y if scales is None else y * scales[..., None]


def case(kind, gate, rows=(2, 3), h=5, scaled=False, **options):
    def x(d):
        return (d.randn(*rows, 2 * h), d.randn(*rows)) if scaled else d.randn(*rows, 2 * h)

    return Case(
        op=glu,
        cfg=GLUConfig(kind=kind, gate=gate, scaled=scaled, **options),
        x=x,
        reference=reference,
        name=f"glu-{kind}-{gate}-{rows}-{h}-{scaled}",
    )


def gathered(kind, tokens, choices, h=5, wide=False, **options):
    """Rows in another order than their weights."""
    cfg = GLUConfig(kind=kind, gate="first", scaled=True, gathered=True, **options)

    def x(d):
        weights = d.randn(*tokens, choices)
        rows = weights.numel()
        order = d.rand(rows).float().argsort().to(torch.int32)
        return d.randn(rows, 2 * h), weights.float() if wide and d.dtype.itemsize == 2 else weights, order

    name = f"glu-{kind}-gathered-{tokens}x{choices}-{h}-{wide}"
    return Case(op=glu, cfg=cfg, x=x, reference=reference, name=name)


def pair(kind, rows=(2, 3), h=5):
    def x(d):
        return d.randn(*rows, h), d.randn(*rows, h)

    return Case(op=glu, cfg=GLUConfig(kind=kind, paired=True), x=x, reference=reference, name=f"glu-{kind}-pair-{rows}-{h}")


CASES = [case(kind, gate) for kind in GATES for gate in ("first", "second")] + [
    case("clamped_swiglu", "first", limit=0.7),
    case("clamped_swiglu", "second", limit=0.7, scaled=True),
    case("swiglu", "first", scaled=True),
    case("reglu", "second", rows=(0,), h=3, scaled=True),
    case("swiglu", "first", rows=(), h=1),
    case("swiglu", "first", rows=(1, 69), h=69),
    *(pair(kind) for kind in GATES),
    gathered("swiglu", (2, 3), 2, wide=True),
    gathered("clamped_swiglu", (4,), 3, limit=0.7),
    gathered("geglu", (0,), 2),
    pair("swiglu", rows=(0,)),
    pair("geglu", rows=(), h=69),
    case("geglu", "first", rows=(4,), h=1),
]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    if draw(st.booleans()):
        return pair(draw(st.sampled_from(sorted(GATES))), rows, draw(st.integers(1, 6)))
    if draw(st.booleans()):
        sizes = draw(st.integers(1, 3)), draw(st.integers(1, 6))
        return gathered(draw(st.sampled_from(sorted(GATES))), rows, *sizes, draw(st.booleans()))
    kind = draw(st.sampled_from([*sorted(GATES), "clamped_swiglu"]))
    return case(kind, draw(st.sampled_from(["first", "second"])), rows, draw(st.integers(1, 6)), draw(st.booleans()))


SWIGLU = GLUConfig(kind="swiglu", gate="first")
SORTED = GLUConfig(kind="swiglu", gate="first", scaled=True, gathered=True)
INTEGERS = torch.ones(2, 4, dtype=torch.int32)
SCALED = GLUConfig(kind="swiglu", gate="first", scaled=True)
ERRORS = [
    Error(call=lambda: GLUConfig(kind="silu", gate="first"), match="GLUConfig: kind must be one of glu"),
    Error(call=lambda: GLUConfig(kind="swiglu", gate="left"), match="GLUConfig: gate must be 'first' or 'second'"),
    Error(call=lambda: GLUConfig(kind="swiglu"), match="GLUConfig: gate must be 'first' or 'second', got ''"),
    Error(call=lambda: GLUConfig(kind="swiglu", gate="first", paired=True), match="GLUConfig: gate must be '' (x is paired"),
    Error(call=lambda: GLUConfig(kind="clamped_swiglu", paired=True), match="GLUConfig: paired must be False"),
    Error(
        call=lambda: glu_fwd(None, (torch.ones(2, 3), torch.ones(3)), GLUConfig(kind="swiglu", paired=True)),
        match="glu_fwd: x.1 (linear) must be [2, 3], got [3]",
    ),
    Error(
        call=lambda: GLUConfig(kind="swiglu", gate="first", gathered=True),
        match="GLUConfig: gathered must be False for a GLU that is not scaled, got True",
    ),
    Error(
        call=lambda: glu_fwd(None, (torch.ones(6, 4), torch.ones(2, 2), torch.arange(6).int()), SORTED),
        match="glu_fwd: weights must be 6 numbers, one per row of x, got [2, 2]",
    ),
    Error(
        call=lambda: glu_fwd(None, (torch.ones(6, 4), torch.ones(3, 2), torch.arange(6)), SORTED),
        match="glu_fwd: order must be int32, got int64",
        error=TypeError,
    ),
    Error(call=lambda: GLUConfig(kind="clamped_swiglu", gate="first", limit=0), match="GLUConfig: limit must be above 0"),
    Error(call=lambda: glu_fwd(None, torch.ones(2, 3), SWIGLU), match="glu_fwd: x must be [..., 2H]"),
    Error(
        call=lambda: glu_fwd(None, torch.ones(2, 4), GLUConfig(kind="swiglu", gate="first", scaled=True)),
        match="glu_fwd: x must be a tuple (x, scales)",
        error=TypeError,
    ),
    *[
        Error(call=lambda x=x, cfg=cfg: glu_fwd(None, x, cfg), match=match, error=error)
        for x, cfg, match, error in (
            ((INTEGERS, torch.ones(2, 4)), GLUConfig(kind="swiglu", paired=True), "x.0 (gate) must be float64 or", TypeError),
            ((INTEGERS, torch.ones(2)), SCALED, "glu_fwd: x must be float64 or", TypeError),
            ((torch.ones(2, 4), torch.ones(3)), SCALED, "glu_fwd: scales must be [2], got [3]", ValueError),
            ((torch.ones(2, 4), torch.ones(2).double()), SCALED, "glu_fwd: scales must be float32, got float64", TypeError),
            ((torch.ones(2, 4), INTEGERS, INTEGERS), SORTED, "glu_fwd: weights must be float32, got int32", TypeError),
        )
    ],
]
