import torch
from hypothesis import strategies as st

from funcops import RowScaleConfig, row_scale, row_scale_fwd
from funcops.testing import Case, Error


def case(rows, width, sigmoid=False, wide=False, gathered=False, constant=False, by_position=False):
    """`wide`: 16-bit x with numbers in float32; `by_position`: numbers that are the same along the first dimensions."""
    cfg = RowScaleConfig(sigmoid=sigmoid, gathered=gathered, constant=constant)

    def x(d):
        gate = d.randn(*rows, 2) if gathered else d.randn(*(rows[-1:] if by_position else rows), 1)
        gate = gate.to(torch.float32) if wide and d.dtype.itemsize == 2 else gate
        if not gathered:
            return d.randn(*rows, width), gate
        return d.randn(gate.numel(), width), gate, d.rand(gate.numel()).float().argsort().to(torch.int32)

    def reference(params, x, cfg):
        gate = x[1].flatten()[x[2].long()].unsqueeze(-1) if gathered else x[1]
        gate = gate.detach() if constant else gate
        return x[0] * (torch.sigmoid(gate) if sigmoid else gate)

    return Case(
        op=row_scale,
        cfg=cfg,
        x=x,
        reference=reference,
        free=() if rows or gathered else ("x.0",),
        exempt=("mirror", "finite_differences") if constant else (),  # constants are floats, of which y is a function
        name=f"row_scale-{rows}-{width}-{sigmoid}-{wide}-{gathered}-{constant}-{by_position}",
    )


CASES = [
    case((2, 3), 69, True),
    case((5,), 8),
    case((), 3),
    case((0,), 4, True),
    case((2,), 0),
    case((3,), 8, wide=True, gathered=True),
    case((2, 3), 8, wide=True, constant=True),
    case((2, 1, 3), 8, constant=True, by_position=True),
]


@st.composite
def drawn(draw):
    rows, flags = tuple(draw(st.lists(st.integers(0, 4), max_size=2))), [draw(st.booleans()) for _ in range(3)]
    return case(rows, draw(st.integers(0, 9)), *flags)


X, ORDER = torch.ones(2, 3), torch.tensor([1, 0], dtype=torch.int32)
GATHERED = RowScaleConfig(gathered=True)
ERRORS = [
    Error(
        call=lambda: row_scale_fwd(None, X, RowScaleConfig()),
        match="row_scale_fwd: x must be a tuple (x, gate), got float32[2, 3]",
        error=TypeError,
    ),
    Error(call=lambda: row_scale_fwd(None, (X, X), RowScaleConfig()), match="row_scale_fwd: x.1 (gate) must be [2, 1], got [2, 3]"),
    Error(
        call=lambda: row_scale_fwd(None, (X, X, ORDER), GATHERED),
        match="row_scale_fwd: x.1 (weights) must be 2 numbers, one per row of x, got [2, 3]",
    ),
    Error(
        call=lambda: row_scale_fwd(None, (X, X[:, 0], ORDER.long()), GATHERED),
        match="row_scale_fwd: x.2 (order) must be int32, got int64",
        error=TypeError,
    ),
    Error(
        call=lambda: row_scale_fwd(None, (torch.tensor(1.0), X), RowScaleConfig()),
        match="row_scale_fwd: x.0 (x) must be [..., H], got []",
    ),
    Error(
        call=lambda: row_scale_fwd(None, (X, ORDER, ORDER), GATHERED),
        match="row_scale_fwd: x.1 (weights) must be float32, got int32",
        error=TypeError,
    ),
]
