import torch
from hypothesis import strategies as st

from funcops import ReshapeConfig, reshape, reshape_fwd
from funcops.testing import Case, Error


def case(rows, before, after):
    return Case(
        op=reshape,
        cfg=ReshapeConfig(before, after),
        x=lambda d: d.randn(*rows, *before),
        reference=lambda params, x, cfg: x.reshape(*rows, *after),
        name=f"reshape-{rows}-{before}-{after}",
    )


CASES = [case((2, 5), (6,), (2, 3)), case((), (2, 3), (6,)), case((0,), (4,), (2, 2)), case((3,), (1,), ())]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    a, b = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return case(rows, (a, b), (b, a))


ERRORS = [
    Error(call=lambda: ReshapeConfig((2, 3), (5,)), match="ReshapeConfig: out_shape must be sizes with the product of in_shape"),
    Error(call=lambda: ReshapeConfig(6, (2, 3)), match="ReshapeConfig: in_shape must be a tuple of sizes"),
    Error(
        call=lambda: reshape_fwd(None, torch.ones(2, 5), ReshapeConfig((6,), (2, 3))),
        match="reshape_fwd: x must be [..., 6], got [2, 5]",
    ),
    Error(
        call=lambda: reshape_fwd(None, torch.ones(2, 3), ReshapeConfig((2, 2), (4,))),
        match="reshape_fwd: x must be [..., 2, 2], got [2, 3]",
    ),
    Error(
        call=lambda: ReshapeConfig((2, 3), (6,)).sharded(1, 2),
        match="ReshapeConfig: in_shape must be 1 sizes, as x is sharded along dim -1, got (2, 3)",
    ),
]
