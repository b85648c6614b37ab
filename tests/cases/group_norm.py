import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import GroupNormConfig, GroupNormParams, group_norm, group_norm_fwd
from funcops.testing import Case, Error


def case(batches, groups, of_group, *places, master=False, **options):
    """`master`: bfloat16 x beside float32 params."""
    channels, extra = groups * of_group, {}
    if master:
        extra["params"] = lambda d: GroupNormParams(d.randn(channels).float(), d.randn(channels).float())
        extra["dtypes"] = (torch.bfloat16,)
    return Case(
        op=group_norm,
        cfg=GroupNormConfig(groups, channels, **options),
        x=lambda d: d.randn(batches, channels, *places),
        reference=lambda params, x, cfg: F.group_norm(x, cfg.groups, params.weight, params.bias, cfg.eps),
        unrounded=("params.weight", "params.bias"),
        **extra,
        name=f"group_norm-{batches}-{groups}-{of_group}-{places}-{options}{'-master' * master}",
    )


CASES = [
    case(2, 3, 4, 5, 3),
    case(3, 1, 6, 7, eps=0.1),
    case(1, 5, 3),
    case(2, 2, 1, 69),
    case(0, 2, 3, 4),
    case(2, 2, 3, 4, master=True),
]


@st.composite
def drawn(draw):
    sizes = [draw(st.integers(1, 4)) for _ in range(3)]
    return case(*sizes, *draw(st.lists(st.integers(2, 5), min_size=1, max_size=2)), eps=0.1)


CFG, PARAMS = GroupNormConfig(2, 4), GroupNormParams(torch.ones(4), torch.zeros(4))
ERRORS = [
    Error(call=lambda: GroupNormConfig(3, 4), match="GroupNormConfig: channels must be a multiple of groups (3), got 4"),
    Error(call=lambda: group_norm_fwd(PARAMS, torch.ones(2, 3), CFG), match="group_norm_fwd: x must be [B, 4, ...], got [2, 3]"),
    Error(
        call=lambda: group_norm_fwd(GroupNormParams(torch.ones(4).bfloat16(), torch.zeros(4)), torch.ones(2, 4, 3), CFG),
        match="group_norm_fwd: params.weight must be float32 beside float32 x, got bfloat16",
        error=TypeError,
    ),
]
