import torch
from hypothesis import strategies as st

from funcops import SoftcapConfig, softcap, softcap_fwd
from funcops.testing import Case, Error


def case(cap, *shape):
    return Case(
        op=softcap,
        cfg=SoftcapConfig(cap),
        x=lambda d: 2 * d.randn(*shape),
        reference=lambda params, x, cfg: cap * torch.tanh(x / cap),
        free=("x",),
        name=f"softcap-{cap}-{shape}",
    )


CASES = [case(1.5, 2, 69), case(30.0, 3), case(0.5, 3, 0, 2), case(2.0)]


@st.composite
def drawn(draw):
    return case(draw(st.sampled_from([0.3, 2.0, 50.0])), *draw(st.lists(st.integers(0, 5), max_size=3)))


ERRORS = [
    Error(call=lambda: SoftcapConfig(0.0), match="SoftcapConfig: cap must be above 0, and finite, got 0.0"),
    Error(
        call=lambda: softcap_fwd(None, torch.ones(3, dtype=torch.int64), SoftcapConfig(2.0)),
        match="softcap_fwd: x must be float64 or float32 or bfloat16 or float16",
        error=TypeError,
    ),
]
