import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import ActivationConfig, activation, activation_fwd
from funcops.testing import Case, Error

REFERENCES = {
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def case(kind, shape):
    return Case(
        op=activation,
        cfg=ActivationConfig(kind),
        x=lambda d: d.randn(*shape),
        reference=lambda params, x, cfg: REFERENCES[kind](x),
        free=("x",),
        name=f"activation-{kind}-{shape}",
    )


CASES = [case(kind, (2, 69)) for kind in REFERENCES] + [case("silu", s) for s in ((), (0,), (1, 1), (3, 0, 2))]


@st.composite
def drawn(draw):
    return case(draw(st.sampled_from(sorted(REFERENCES))), draw(st.lists(st.integers(0, 5), max_size=3)))


ERRORS = [
    Error(call=lambda: ActivationConfig("swish"), match="ActivationConfig: kind must be one of relu"),
    Error(
        call=lambda: activation_fwd(None, torch.ones(3, dtype=torch.int64), ActivationConfig("relu")),
        match="activation_fwd: x must be float64 or float32 or bfloat16 or float16",
        error=TypeError,
    ),
]
