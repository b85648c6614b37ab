import torch
from hypothesis import strategies as st

from funcops import ScaleConfig, scale, scale_fwd
from funcops.testing import Case, Error


def case(shape, factor=-2.5):
    return Case(
        op=scale,
        cfg=ScaleConfig(factor),
        x=lambda d: d.randn(*shape),
        reference=lambda params, x, cfg: factor * x,
        free=("x",),
        name=f"scale-{shape}",
    )


CASES = [case((2, 69)), case(()), case((0,)), case((1, 3))]


@st.composite
def drawn(draw):
    return case(tuple(draw(st.lists(st.integers(0, 4), max_size=3))))


ERRORS = [
    Error(call=lambda: ScaleConfig(float("nan")), match="ScaleConfig: factor must be a number, got nan"),
    Error(
        call=lambda: scale_fwd(None, torch.ones(2, dtype=torch.int64), ScaleConfig(2.0)),
        match="scale_fwd: x must be float64 or float32 or bfloat16 or float16, got int64",
        error=TypeError,
    ),
]
