import torch
from hypothesis import strategies as st

from funcops import AddConfig, add, add_fwd
from funcops.testing import Case, Error


def case(shape):
    return Case(
        op=add,
        cfg=AddConfig(),
        x=lambda d: (d.randn(*shape), d.randn(*shape)),
        reference=lambda params, x, cfg: x[0] + x[1],
        name=f"add-{shape}",
    )


CASES = [case((2, 69)), case(()), case((0,)), case((1, 3))]


@st.composite
def drawn(draw):
    return case(tuple(draw(st.lists(st.integers(0, 4), max_size=3))))


ERRORS = [
    Error(call=lambda: add_fwd(None, (torch.ones(2), torch.ones(1)), AddConfig()), match="add_fwd: x.1 must be [2], got [1]"),
    Error(
        call=lambda: add_fwd(None, torch.ones(2), AddConfig()),
        match="add_fwd: x must be a tuple (a, b), got float32[2]",
        error=TypeError,
    ),
]
