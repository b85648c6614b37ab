import torch
from hypothesis import strategies as st

from funcops import BMMConfig, bmm, bmm_fwd
from funcops.testing import Case, Error


def case(rows, m, k, n, transposed=False):
    return Case(
        op=bmm,
        cfg=BMMConfig(transposed),
        x=lambda d: (d.randn(*rows, m, k), d.randn(*rows, *((n, k) if transposed else (k, n)))),
        reference=lambda params, x, cfg: torch.einsum("...mk,...nk->...mn" if transposed else "...mk,...kn->...mn", *x),
        name=f"bmm-{rows}-{m}-{k}-{n}-{transposed}",
    )


CASES = [case((2,), 3, 4, 5, True), case((2, 2), 1, 6, 3), case((), 3, 2, 1), case((0,), 2, 3, 2), case((2,), 0, 3, 2, True)]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    return case(rows, *[draw(st.integers(1, 5)) for _ in range(3)], draw(st.booleans()))


A, B = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
ERRORS = [
    Error(call=lambda: bmm_fwd(None, (A, A), BMMConfig()), match="bmm_fwd: x.1 (b) must be [2, 4, N], got [2, 3, 4]"),
    Error(call=lambda: bmm_fwd(None, (A, B), BMMConfig(True)), match="bmm_fwd: x.1 (b) must be [2, N, 4], got [2, 4, 5]"),
    Error(call=lambda: bmm_fwd(None, (A, B[0]), BMMConfig()), match="bmm_fwd: x.1 (b) must be [2, 4, N], got [4, 5]"),
    Error(call=lambda: bmm_fwd(None, (A[0, 0], B), BMMConfig()), match="bmm_fwd: x.0 (a) must be [..., M, K], got [4]"),
    Error(
        call=lambda: bmm_fwd(None, (A, B.double()), BMMConfig()),
        match="bmm_fwd: x.1 (b) must be float32, got float64",
        error=TypeError,
    ),
]
