import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import ExpertsConfig, experts, experts_fwd, experts_wgrad
from funcops.library.ops.experts import ExpertsParams
from funcops.library.ops.grouped_linear import GroupedLinearParams
from funcops.testing import Case, Draw, Error

GATES = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "glu": torch.sigmoid,
    "reglu": F.relu,
}


def gated(z, cfg):
    gate, linear = z.chunk(2, -1)
    if cfg.kind == "clamped_swiglu":
        gate, linear = gate.clamp(max=cfg.limit), linear.clamp(-cfg.limit, cfg.limit)
        return gate * torch.sigmoid(cfg.alpha * gate) * (linear + cfg.offset)
    return GATES[cfg.kind](gate) * linear


def reference(params, x, cfg):
    """Every expert computes every token, with weight 0 for tokens that did not choose it; the weight is applied after down, or
    before up."""
    weights, tokens, indices = x
    total = torch.zeros_like(tokens)
    for e in range(cfg.experts):
        weight = (weights * (indices == e)).sum(-1, keepdim=True)
        before = cfg.weights_on == "input"
        z = F.linear(tokens * weight if before else tokens, params.up.weight[e], params.up.bias[e] if cfg.bias else None)
        y = F.linear(gated(z, cfg), params.down.weight[e], params.down.bias[e] if cfg.bias else None)
        total = total + (y * (indices == e).any(-1, keepdim=True) if before else y * weight)
    return total


def case(tokens, choices, count, h, i, chosen=None, wide=False, **options):
    """A token's choices differ, as a router's do. They come from `chosen` if that is given: experts, and `count` for a dropped
    choice."""
    cfg = ExpertsConfig(count, h, i, **options)
    among = torch.tensor(range(count) if chosen is None else chosen, device="cpu")

    def x(d):
        shuffled = d.rand(*tokens, len(among)).float().argsort(-1)
        weights = d.rand(*tokens, choices)
        indices = among[shuffled[..., [k % len(among) for k in range(choices)]]].to(torch.int32)
        return weights.to(torch.float32) if wide and d.dtype.itemsize == 2 else weights, d.randn(*tokens, h), indices

    name = f"experts-{tokens}x{choices}-of-{count}-{h}-{i}-{chosen}-{wide}-{options}"
    return Case(op=experts, cfg=cfg, x=x, reference=reference, name=name)


CASES = [
    case((2, 5), 2, 4, 7, 3, wide=True),
    case((5,), 2, 4, 6, 3, chosen=(1, 2), kind="geglu"),  # the first and the last have no rows
    # a middle one has none; some choices are dropped
    case((6,), 2, 4, 5, 3, chosen=(0, 3, 4), kind="clamped_swiglu", limit=0.7, bias=True),
    case((3,), 1, 1, 4, 2, bias=True, wide=True),
    case((0,), 2, 4, 3, 2, bias=True),
    case((4,), 1, 64, 3, 5, chosen=(17,)),  # all tokens to one
    case((9,), 8, 64, 3, 2, kind="geglu_tanh"),
    case((5,), 2, 64, 2, 3, chosen=(0, 9, 63)),
    case((4,), 1, 4, 3, 2, chosen=(3,)),
    case((2, 5), 2, 4, 7, 3, wide=True, weights_on="input"),
    case((6,), 2, 4, 5, 3, chosen=(0, 3, 4), kind="geglu", weights_on="input"),  # some choices are dropped
]


@st.composite
def drawn(draw):
    count = draw(st.integers(1, 5))
    chosen = tuple(draw(st.lists(st.integers(0, count), min_size=1, max_size=5, unique=True)))
    choices = draw(st.integers(1, min(count, len(chosen))))
    tokens = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    options = dict(kind=draw(st.sampled_from([*sorted(GATES), "clamped_swiglu"])), bias=draw(st.booleans()))
    options |= {} if options["bias"] else {"weights_on": draw(st.sampled_from(["output", "input"]))}
    sizes = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    return case(tokens, choices, count, *sizes, chosen, draw(st.booleans()), **options)


def _call(cfg=None, x=None, up=None):
    d, cfg = Draw(torch.float32), cfg or ExpertsConfig(2, 4, 3)
    down = GroupedLinearParams(d.randn(2, 4, 3))
    given = (torch.ones(5, 1), torch.ones(5, 4), torch.zeros(5, 1, dtype=torch.int32)) if x is None else x
    return lambda: experts_fwd(ExpertsParams(GroupedLinearParams(d.randn(2, 6, 4)) if up is None else up, down), given, cfg)


def _pending():
    y, residuals = _call()()
    return experts.dgrad(residuals, y, ExpertsConfig(2, 4, 3))[1]


def _into(width):
    return ExpertsParams(GroupedLinearParams(torch.ones(2, 6, 4)), GroupedLinearParams(torch.ones(2, 4, width)))


ROWS, ONE = torch.ones(5, 4), torch.zeros(5, 1, dtype=torch.int32)
MANY = torch.ones(1, 1).expand(2**31, 1)
ERRORS = [
    Error(
        call=_call(x=(MANY, MANY.expand(-1, 4), ONE[:1].expand(2**31, 1))),
        match="experts_fwd: x.2 (indices) must be of at most 2147418112 rows, got 2147483648",
    ),
    Error(call=lambda: ExpertsConfig(2, 0, 3), match="ExpertsConfig: dim must be at least 1, got 0"),
    Error(
        call=lambda: ExpertsConfig(2, 4, 3, weights_on="up"),
        match="ExpertsConfig: weights_on must be 'output' or 'input', got 'up'",
    ),
    Error(
        call=lambda: ExpertsConfig(2, 4, 3, weights_on="input", bias=True),
        match="ExpertsConfig: bias must be False with weights_on='input', got True",
    ),
    Error(call=lambda: ExpertsConfig(2, 4, 3, kind="silu"), match="ExpertsConfig: kind must be one of glu"),
    Error(call=_call(x=ROWS), match="experts_fwd: x must be a tuple (weights, x, indices)", error=TypeError),
    Error(
        call=_call(x=(torch.ones(5, 3), ROWS, ONE)),
        match="experts_fwd: x.0 (weights) must be [5, 'K'], K in 1..2 (the experts), got [5, 3]",
    ),
    Error(
        call=_call(x=(torch.ones(5, 1), ROWS, ONE.short())),
        match="experts_fwd: x.2 (indices) must be int32 or int64, got int16",
        error=TypeError,
    ),
    Error(
        call=_call(x=(torch.ones(5, 1, dtype=torch.float64), ROWS, ONE)),
        match="experts_fwd: x.0 (weights) must be float32, got float64",
        error=TypeError,
    ),
    Error(call=_call(up=3.0), match="experts_fwd: params.up must be GroupedLinearParams, got 3.0", error=TypeError),
    Error(
        call=_call(x=(torch.ones(5, 1), ROWS, ONE + 3)),
        match="experts_fwd: x.2 (indices) must be ids from 0 to 2, got 3",
        error=IndexError,
    ),
    Error(
        call=_call(up=GroupedLinearParams(torch.ones(2, 6, 5))),
        match="experts_fwd: params.up.weight must be [2, 6, 4], got [2, 6, 5]",
    ),
    Error(
        call=_call(up=GroupedLinearParams(torch.ones(2, 6, 4), torch.ones(2, 6))),
        match="experts_fwd: params.up.bias must be None (cfg.bias is False), got a tensor",
    ),
    Error(
        call=lambda: experts_wgrad(_pending(), ExpertsConfig(2, 4, 3), into=_into(4)),
        match="experts_wgrad: into.down.weight must be [2, 4, 3], got [2, 4, 4]",
    ),
]
