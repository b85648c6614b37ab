import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import RMSNormConfig, RMSNormParams, rms_norm, rms_norm_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    w = params.weight + 1 if cfg.zero_centered_gamma else params.weight
    return F.rms_norm(x, cfg.dim, w, cfg.eps)


def case(rows, dim, master=False, **options):
    """`master`: bfloat16 x beside a float32 weight."""
    cfg = RMSNormConfig(dim, **options)
    extra = {}
    if master:
        extra["params"] = lambda d: RMSNormParams(d.randn(*cfg.dim).float())
        extra["dtypes"] = (torch.bfloat16,)
    return Case(
        op=rms_norm,
        cfg=cfg,
        x=lambda d: d.randn(*rows, *cfg.dim),
        reference=reference,
        unrounded=("params.weight",),
        name=f"rms_norm-{rows}-{dim}-{options}{'-master' * master}",
        **extra,
    )


CASES = [
    case((2, 5), 69),
    case((), 3),
    case((0,), 4),
    case((1,), 1, eps=0.3),
    case((2,), (3, 5), zero_centered_gamma=True),
    case((3,), 512),
    case((32,), 512),  # 2^14 elements, from which on the CPU takes another way
    case((2, 3), (2, 8), master=True, zero_centered_gamma=True),
]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dim = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    return case(rows, dim, eps=0.1, zero_centered_gamma=draw(st.booleans()))


CFG = RMSNormConfig(4)
ERRORS = [
    Error(
        call=lambda: rms_norm_fwd(RMSNormParams(torch.ones(4)), torch.ones(2, 3), CFG),
        match="rms_norm_fwd: x must be [..., 4], got [2, 3]",
    ),
    Error(
        call=lambda: rms_norm_fwd(RMSNormParams(torch.ones(4, dtype=torch.float64)), torch.ones(2, 4), CFG),
        match="rms_norm_fwd: params.weight must be float32 beside float32 x, got float64",
        error=TypeError,
    ),
    Error(call=lambda: RMSNormConfig(0), match="RMSNormConfig: dim must be a size of at least 1"),
    Error(call=lambda: RMSNormConfig(4, eps=-1.0), match="RMSNormConfig: eps must be a finite number, at least 0, got -1.0"),
    Error(
        call=lambda: RMSNormConfig((4, 0)), match="RMSNormConfig: dim must be a size of at least 1, or a tuple of them, got (4, 0)"
    ),
    Error(call=lambda: RMSNormConfig(4.0), match="RMSNormConfig: dim must be a size of at least 1, or a tuple of them, got 4.0"),
    Error(
        call=lambda: rms_norm_fwd(RMSNormParams(torch.ones(4)), torch.ones(2, 4).long(), CFG),
        match="rms_norm_fwd: x must be float64 or float32 or bfloat16 or float16, got int64",
        error=TypeError,
    ),
]
