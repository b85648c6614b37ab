import torch
from hypothesis import strategies as st

from funcops import RowScaleConfig, row_scale, row_scale_fwd
from funcops.testing import Case, Error


def case(rows, width, sigmoid=False):
    return Case(
        op=row_scale,
        cfg=RowScaleConfig(sigmoid=sigmoid),
        x=lambda d: (d.randn(*rows, width), d.randn(*rows, 1)),
        reference=lambda params, x, cfg: x[0] * (torch.sigmoid(x[1]) if sigmoid else x[1]),
        free=() if rows else ("x.0",),
        name=f"row_scale-{rows}-{width}-{sigmoid}",
    )


CASES = [case((2, 3), 69, True), case((5,), 8), case((), 3), case((0,), 4, True), case((2,), 0)]


@st.composite
def drawn(draw):
    return case(tuple(draw(st.lists(st.integers(0, 4), max_size=2))), draw(st.integers(0, 9)), draw(st.booleans()))


X = torch.ones(2, 3)
ERRORS = [
    Error(
        call=lambda: row_scale_fwd(None, X, RowScaleConfig()),
        match="row_scale_fwd: x must be a tuple (x, gate), got float32[2, 3]",
        error=TypeError,
    ),
    Error(call=lambda: row_scale_fwd(None, (X, X), RowScaleConfig()), match="row_scale_fwd: x.1 (gate) must be [2, 1], got [2, 3]"),
    Error(
        call=lambda: row_scale_fwd(None, (torch.tensor(1.0), X), RowScaleConfig()),
        match="row_scale_fwd: x.0 (x) must be [..., H], got []",
    ),
]
