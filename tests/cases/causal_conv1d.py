import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import CausalConv1dConfig, CausalConv1dParams, causal_conv1d, causal_conv1d_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    """torch's convolution with channels before times, cut off at the end."""
    if not x.numel():
        return x * 1.0
    z = F.conv1d(x.mT, params.weight.unsqueeze(1), params.bias, padding=cfg.width - 1, groups=cfg.channels)
    z = z[..., : x.shape[1]].mT
    return F.silu(z) if cfg.silu else z


def case(batches, times, channels, **options):
    return Case(
        op=causal_conv1d,
        cfg=CausalConv1dConfig(channels, **options),
        x=lambda d: d.randn(batches, times, channels),
        reference=reference,
        unrounded=("params.weight", "params.bias") if options.get("bias", True) else ("params.weight",),
        name=f"causal_conv1d-{batches}-{times}-{channels}-{options}",
    )


CASES = [
    case(2, 7, 5),
    case(1, 35, 3, width=3, bias=False),
    case(2, 2, 3, silu=False),
    case(1, 4, 2, width=1, silu=False, bias=False),
    case(1, 1, 1, width=6),
]


@st.composite
def drawn(draw):
    sizes = [draw(st.integers(1, 5)) for _ in range(3)]
    return case(*sizes, width=draw(st.integers(1, 5)), bias=draw(st.booleans()), silu=draw(st.booleans()))


PARAMS, CFG = CausalConv1dParams(torch.ones(3, 4), torch.ones(3)), CausalConv1dConfig(3)
ERRORS = [
    Error(call=lambda: CausalConv1dConfig(3, width=0), match="CausalConv1dConfig: width must be at least 1, got 0"),
    Error(
        call=lambda: causal_conv1d_fwd(PARAMS, torch.ones(5, 3), CFG), match="causal_conv1d_fwd: x must be [B, T, 3], got [5, 3]"
    ),
    Error(
        call=lambda: causal_conv1d_fwd(PARAMS, torch.ones(2, 5, 3), CausalConv1dConfig(3, bias=False)),
        match="causal_conv1d_fwd: params.bias must be None (cfg.bias is False), got float32[3]",
    ),
    Error(
        call=lambda: causal_conv1d_fwd(PARAMS, torch.ones(2, 5, 3), CausalConv1dConfig(3, width=3)),
        match="causal_conv1d_fwd: params.weight must be [3, 3], got [3, 4]",
    ),
]
