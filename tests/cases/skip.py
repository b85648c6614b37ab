import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    LinearConfig,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    add,
    chain,
    linear,
    skip,
)
from funcops.testing import Case, Error


def case(rows, dim):
    return Case(
        op=skip,
        cfg=SkipConfig(linear, LinearConfig(dim, dim)),
        x=lambda d: d.randn(*rows, dim),
        reference=lambda params, x, cfg: x + F.linear(x, params.weight, params.bias),
        name=f"skip-{rows}-{dim}",
    )


GIVEN = ChainConfig(
    steps=(Step("a", linear, LinearConfig(3, 3)), Step("join", add, AddConfig(), takes=("given",))),
    extras=("given",),
)
CASES = [
    case((2, 5), 7),
    case((0,), 3),
    case((), 1),
    Case(
        op=skip,
        cfg=SkipConfig(chain, GIVEN),
        x=lambda d: WithExtras(d.randn(2, 3), {"given": d.randn(2, 3)}),
        reference=lambda p, x, cfg: x.main + F.linear(x.main, p["a"].weight, p["a"].bias) + x.extras["given"],
        name="skip-extras",
    ),
]


@st.composite
def drawn(draw):
    return case(tuple(draw(st.lists(st.integers(0, 4), max_size=2))), draw(st.integers(1, 6)))


ERRORS = [
    Error(
        call=lambda: SkipConfig(linear, ActivationConfig("relu")),
        match="SkipConfig: cfg must be LinearConfig, got ActivationConfig",
        error=TypeError,
    ),
    Error(
        call=lambda: skip.fwd(None, 3.0, SkipConfig(activation, ActivationConfig("relu"))),
        match="activation_fwd: x must be a tensor",
        error=TypeError,
    ),
]
