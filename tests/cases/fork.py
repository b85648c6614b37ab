import torch
from hypothesis import strategies as st

from funcops import ForkConfig, fork, fork_bwd, fork_fwd
from funcops.testing import Case, Error


def case(shape):
    return Case(
        op=fork,
        cfg=ForkConfig(),
        x=lambda d: d.randn(*shape),
        reference=lambda params, x, cfg: (x * 1.0, x * 1.0),
        free=("x",),
        name=f"fork-{shape}",
    )


CASES = [case((2, 69)), case(()), case((0,)), case((1, 3))]


@st.composite
def drawn(draw):
    return case(tuple(draw(st.lists(st.integers(0, 4), max_size=3))))


ERRORS = [
    Error(
        call=lambda: fork_bwd(fork_fwd(None, torch.ones(2), ForkConfig())[1], torch.ones(2), ForkConfig()),
        match="fork_dgrad: dy must be a tuple of 2",
        error=TypeError,
    )
]
