import torch
from hypothesis import strategies as st

from funcops import LogDecayConfig, LogDecayParams, log_decay, log_decay_dgrad, log_decay_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    z = x + params.dt_bias
    return -params.a_log.exp() * (1 + z.exp()).log()


def case(*shape):
    return Case(
        op=log_decay,
        cfg=LogDecayConfig(shape[-1]),
        x=lambda d: d.randn(*shape),
        reference=reference,
        casts=True,
        unrounded=("params.a_log", "params.dt_bias"),
        name=f"log_decay-{shape}",
    )


CASES = [case(2, 7, 3), case(5, 1), case(4), case(0, 3), case(2, 3, 69)]


@st.composite
def drawn(draw):
    return case(*draw(st.lists(st.integers(0, 4), max_size=2)), draw(st.integers(1, 5)))


PARAMS, CFG = LogDecayParams(torch.zeros(3), torch.zeros(3)), LogDecayConfig(3)
ERRORS = [
    Error(call=lambda: LogDecayConfig(0), match="LogDecayConfig: heads must be at least 1, got 0"),
    Error(call=lambda: log_decay_fwd(PARAMS, torch.ones(2, 4), CFG), match="log_decay_fwd: x must be [..., 3], got [2, 4]"),
    Error(
        call=lambda: log_decay_fwd(LogDecayParams(torch.zeros(3), torch.zeros(2)), torch.ones(2, 3), CFG),
        match="log_decay_fwd: params.dt_bias must be [3], got [2]",
    ),
    Error(
        call=lambda: log_decay_dgrad(log_decay_fwd(PARAMS, torch.ones(2, 3).bfloat16(), CFG)[1], torch.ones(2, 3).bfloat16(), CFG),
        match="log_decay_dgrad: dy must be float32, got bfloat16",
        error=TypeError,
    ),
]
