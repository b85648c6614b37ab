import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops.library.ops.linear import LinearConfig, LinearParams, linear, linear_fwd
from funcops.testing import Case, Draw, Error


def case(rows, i, o, bias=True):
    return Case(
        op=linear,
        cfg=LinearConfig(i, o, bias=bias),
        x=lambda d: d.randn(*rows, i),
        reference=lambda params, x, cfg: F.linear(x, params.weight, params.bias),
        unrounded=("params.bias",) if bias else (),  # the weight's product is rounded on the CPU
        name=f"linear-{rows}-{i}-{o}-{bias}",
    )


CASES = [case((2, 5), 69, 3), case((), 3, 1), case((0,), 4, 3), case((1,), 1, 69, bias=False), case((2, 0, 3), 5, 2)]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    return case(rows, draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.booleans()))


def _call(cfg=None, x=None, weight=None, bias=None):
    d = Draw(torch.float32)
    params = LinearParams(d.randn(3, 4) if weight is None else weight, d.randn(3) if bias is None else bias)
    return lambda: linear_fwd(params, d.randn(2, 4) if x is None else x, cfg or LinearConfig(4, 3))


def _pending():
    y, residuals = _call()()
    return linear.dgrad(residuals, y, LinearConfig(4, 3))[1]


ERRORS = [
    Error(call=_call(x=torch.ones(2, 5)), match="linear_fwd: x must be [..., 4], got [2, 5]"),
    Error(call=_call(x=[1.0]), match="linear_fwd: x must be a tensor [..., 4], got list", error=TypeError),
    Error(call=_call(weight=torch.ones(4, 3)), match="linear_fwd: params.weight must be [3, 4], got [4, 3]"),
    Error(call=_call(bias=torch.ones(1)), match="linear_fwd: params.bias must be [3], got [1]"),
    Error(call=_call(cfg=LinearConfig(4, 3, bias=False)), match="linear_fwd: params.bias must be None"),
    Error(
        call=_call(weight=torch.ones(3, 4, dtype=torch.float64)),
        match="linear_fwd: params.weight must be float32, got float64",
        error=TypeError,
    ),
    Error(call=lambda: LinearConfig(0, 3), match="LinearConfig: in_features must be at least 1, got 0"),
    Error(call=lambda: LinearConfig(3, in_feature=3), match="in_feature", error=TypeError),
    Error(
        call=lambda: linear.products(_pending(), LinearConfig(4, 3), into=LinearParams(torch.ones(3, 5), torch.ones(3))),
        match="linear_wgrad: into.weight must be [3, 4], got [3, 5]",
    ),
]
