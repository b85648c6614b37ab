import torch
from hypothesis import strategies as st

from funcops import L2NormConfig, l2_norm, l2_norm_fwd
from funcops.testing import Case, Error


def case(rows, dim, eps=1e-6):
    return Case(
        op=l2_norm,
        cfg=L2NormConfig(dim, eps=eps),
        x=lambda d: d.randn(*rows, dim),
        reference=lambda params, x, cfg: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + cfg.eps),
        name=f"l2_norm-{rows}-{dim}",
    )


CASES = [case((2, 5), 69), case((), 3), case((0,), 4), case((1,), 1, 0.3)]


@st.composite
def drawn(draw):
    return case(tuple(draw(st.lists(st.integers(0, 4), max_size=3))), draw(st.integers(1, 9)), 0.1)


ERRORS = [
    Error(call=lambda: L2NormConfig(0), match="L2NormConfig: dim must be a size of at least 1, got 0"),
    Error(call=lambda: L2NormConfig(4, eps=-1.0), match="L2NormConfig: eps must be a finite number, at least 0, got -1.0"),
    Error(call=lambda: l2_norm_fwd(None, torch.ones(2, 3), L2NormConfig(4)), match="l2_norm_fwd: x must be [..., 4], got [2, 3]"),
]
