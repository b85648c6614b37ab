import torch
from hypothesis import strategies as st

from funcops import BiasConfig, BiasParams, bias, bias_fwd
from funcops.testing import Case, Error


def case(rows, dim):
    return Case(
        op=bias,
        cfg=BiasConfig(dim),
        x=lambda d: d.randn(*rows, dim),
        reference=lambda params, x, cfg: x + params.bias,
        name=f"bias-{rows}-{dim}",
    )


CASES = [case((2, 5), 69), case((), 3), case((0,), 4), case((1,), 1)]


@st.composite
def drawn(draw):
    return case(tuple(draw(st.lists(st.integers(0, 4), max_size=3))), draw(st.integers(1, 9)))


ERRORS = [
    Error(
        call=lambda: bias_fwd(BiasParams(torch.ones(1)), torch.ones(2, 3), BiasConfig(3)),
        match="bias_fwd: params.bias must be [3], got [1]",
    ),
    Error(call=lambda: BiasConfig(0), match="BiasConfig: dim must be at least 1, got 0"),
]
