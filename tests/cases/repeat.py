import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from tally import routed, routed_reference

from funcops import (
    AddConfig,
    ChainConfig,
    LinearConfig,
    RepeatConfig,
    SkipConfig,
    Step,
    WithExtras,
    add,
    chain,
    linear,
    repeat,
    repeat_fwd,
    skip,
)
from funcops.engine.trees import tree_map
from funcops.testing import Case, Error


def reference(params, x, cfg):
    for i in range(cfg.times):
        w, b = (params.weight[i], params.bias[i]) if cfg.stacked else (params[i].weight, params[i].bias)
        x = x + F.linear(x, w, b)
    return x


def case(rows, dim, times, stacked=False):
    return Case(
        op=repeat,
        cfg=RepeatConfig(skip, SkipConfig(linear, LinearConfig(dim, dim)), times, stacked=stacked),
        x=lambda d: d.randn(*rows, dim),
        reference=reference,
        exempt=("frugal",) if stacked else (),  # residuals are views of the stacked leaves
        name=f"repeat-{rows}-{dim}-{times}-{stacked}",
    )


def given_reference(params, x, cfg):
    h = x.main
    for layer in params:
        h = F.linear(h, layer["a"].weight, layer["a"].bias) + x.extras["given"]
    return h


GIVEN = ChainConfig(
    steps=(Step("a", linear, LinearConfig(3, 3)), Step("join", add, AddConfig(), takes=("given",))), extras=("given",)
)


def outputs_reference(params, x, cfg):
    """The reference of `repeat(skip(chain))`: the layers' outputs are stacked."""
    found = []
    for i in range(cfg.times):
        y = routed_reference(tree_map(lambda t, i=i: None if t is None else t[i], params) if cfg.stacked else params[i], x)
        x = x + y.main
        found.append(y.extras)
    return WithExtras(x, {name: torch.stack([one[name] for one in found]) for name in cfg.outputs})


def outputs_case(rows, dim, times, stacked=False):
    return Case(
        op=repeat,
        cfg=RepeatConfig(skip, SkipConfig(chain, routed(dim)), times, stacked=stacked),
        x=lambda d: d.randn(*rows, dim),
        reference=outputs_reference,
        exempt=("frugal",) if stacked else (),  # residuals are views of the stacked leaves
        name=f"repeat-outputs-{rows}-{dim}-{times}-{stacked}",
    )


CASES = [
    case((2, 5), 7, 3),
    case((2, 5), 4, 2, stacked=True),
    case((0,), 3, 2),
    case((), 1, 1),
    Case(
        op=repeat,
        cfg=RepeatConfig(chain, GIVEN, 2),
        x=lambda d: WithExtras(d.randn(2, 3), {"given": d.randn(2, 3)}),
        reference=given_reference,
        name="repeat-extras",
    ),
    outputs_case((2, 4), 3, 2),
    outputs_case((3,), 4, 2, stacked=True),
]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=2)))
    make = outputs_case if draw(st.booleans()) else case
    return make(rows, draw(st.integers(1, 6)), draw(st.integers(1, 3)))


CFG = RepeatConfig(linear, LinearConfig(2, 2), 2)
ERRORS = [
    Error(call=lambda: RepeatConfig(linear, LinearConfig(2, 2), 0), match="RepeatConfig: times must be an int of at least 1"),
    Error(call=lambda: repeat_fwd((), torch.ones(2), CFG), match="repeat_fwd: params must be a tuple of 2 layers", error=TypeError),
]
