import torch.nn.functional as F
from hypothesis import strategies as st
from tally import routed, routed_reference

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
    steps=(Step("a", linear, LinearConfig(3, 3)), Step("join", add, AddConfig(), takes=("given",))), extras=("given",)
)


def outputs_reference(params, x, cfg):
    y = routed_reference(params, x)
    return WithExtras(x + y.main, y.extras)


def outputs_case(rows, dim):
    return Case(
        op=skip,
        cfg=SkipConfig(chain, routed(dim)),
        x=lambda d: d.randn(*rows, dim),
        reference=outputs_reference,
        name=f"skip-outputs-{rows}-{dim}",
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
    outputs_case((2, 4), 3),
]


@st.composite
def drawn(draw):
    make = outputs_case if draw(st.booleans()) else case
    return make(tuple(draw(st.lists(st.integers(0, 4), max_size=2))), draw(st.integers(1, 6)))


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
