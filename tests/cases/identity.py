import torch
from hypothesis import strategies as st

from funcops import IdentityConfig, identity, identity_fwd
from funcops.testing import Case, Error


def case(shape):
    return Case(
        op=identity,
        cfg=IdentityConfig(),
        x=lambda d: d.randn(*shape),
        reference=lambda params, x, cfg: x * 1.0,
        free=("x",),
        name=f"identity-{shape}",
    )


CASES = [case((2, 69)), case(()), case((0,)), case((1, 3))]


@st.composite
def drawn(draw):
    return case(tuple(draw(st.lists(st.integers(0, 4), max_size=3))))


ERRORS = [
    Error(
        call=lambda: identity_fwd(None, 3.0, IdentityConfig()),
        match="identity_fwd: x must be a tensor [...], got 3.0",
        error=TypeError,
    ),
    Error(
        call=lambda: identity_fwd({}, torch.ones(2), IdentityConfig()), match="identity_fwd: params must be None", error=TypeError
    ),
]
