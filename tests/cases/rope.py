import torch
from hypothesis import strategies as st
from rotation import turned

from funcops import RopeConfig, rope, rope_fwd
from funcops.testing import Case, Error


def case(rows, t, n, dim, per_row=False, **options):
    cfg = RopeConfig(dim, **options)

    def x(d):
        return d.randn(*rows, t, n, dim), d.integers(0, 50, *(rows if per_row else ()), t)

    return Case(op=rope, cfg=cfg, x=x, reference=turned, name=f"rope-{rows}-{t}-{n}-{dim}-{per_row}-{options}")


CASES = [
    case((2,), 5, 3, 8),
    case((2,), 5, 3, 8, interleaved=True),
    case((2,), 5, 1, 10, rotary_dim=6),
    case((2,), 5, 1, 10, rotary_dim=6, interleaved=True, per_row=True),
    case((), 1, 1, 2, theta=100.0),
    case((0,), 3, 2, 4),
]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    half, extra = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    options = dict(rotary_dim=2 * half, interleaved=draw(st.booleans()))
    sizes = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    return case(rows, *sizes, 2 * half + extra, draw(st.booleans()), **options)


X = torch.ones(2, 5, 3, 8)
ERRORS = [
    Error(call=lambda: RopeConfig(7), match="RopeConfig: rotary_dim must be even, in 2..7, got 7"),
    Error(call=lambda: RopeConfig(8, rotary_dim=10), match="RopeConfig: rotary_dim must be even, in 2..8, got 10"),
    Error(
        call=lambda: rope_fwd(None, (X, torch.arange(4)), RopeConfig(8)),
        match="rope_fwd: x.1 (positions) must be [5], got [4]",
    ),
    Error(call=lambda: rope_fwd(None, X, RopeConfig(8)), match="rope_fwd: x must be a tuple", error=TypeError),
]
