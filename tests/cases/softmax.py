import torch
from hypothesis import strategies as st

from funcops import SoftmaxConfig, softmax, softmax_fwd
from funcops.testing import Case, Error


def case(*shape):
    return Case(
        op=softmax,
        cfg=SoftmaxConfig(),
        x=lambda d: d.randn(*shape),
        reference=lambda params, x, cfg: (x - x.logsumexp(-1, keepdim=True)).exp(),
        free=("x",),
        name=f"softmax-{shape}",
    )


CASES = [case(2, 3, 69), case(7), case(5, 1), case(0, 3), case(3, 0)]


@st.composite
def drawn(draw):
    return case(*draw(st.lists(st.integers(0, 5), min_size=1, max_size=3)))


ERRORS = [
    Error(call=lambda: softmax_fwd(None, torch.tensor(1.0), SoftmaxConfig()), match="softmax_fwd: x must be [..., D], got []"),
    Error(
        call=lambda: softmax_fwd(None, torch.ones(3, dtype=torch.int64), SoftmaxConfig()),
        match="softmax_fwd: x must be float64 or float32 or bfloat16 or float16, got int64",
        error=TypeError,
    ),
]
