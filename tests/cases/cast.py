import torch
from hypothesis import strategies as st

from funcops import CastConfig, cast, cast_fwd
from funcops.testing import Case, Error


def case(shape):
    return Case(
        op=cast,
        cfg=CastConfig(torch.float64),
        casts=True,
        x=lambda d: d.randn(*shape),
        reference=lambda params, x, cfg: x.to(torch.float64),
        free=("x",),
        name=f"cast-{shape}",
    )


CASES = [case((2, 69)), case(()), case((0,)), case((1, 3))]


@st.composite
def drawn(draw):
    return case(tuple(draw(st.lists(st.integers(0, 4), max_size=3))))


ERRORS = [
    Error(call=lambda: CastConfig(torch.int64), match="CastConfig: dtype must be one of float64"),
    Error(
        call=lambda: cast_fwd(None, torch.ones(2, dtype=torch.int64), CastConfig(torch.float64)),
        match="cast_fwd: x must be float64 or float32 or bfloat16 or float16, got int64",
        error=TypeError,
    ),
]
