import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from funcops import LayerNormConfig, LayerNormParams, Needs, layer_norm, layer_norm_dgrad, layer_norm_fwd
from funcops.testing import Case, Error


def reference(params, x, cfg):
    w = params.weight + 1 if cfg.zero_centered_gamma else params.weight
    return F.layer_norm(x, cfg.dim, w, params.bias, cfg.eps)


def case(rows, dim, master=False, **options):
    """`master`: bfloat16 x beside float32 params."""
    cfg = LayerNormConfig(dim, **options)
    extra = {}
    if master:
        extra["params"] = lambda d: LayerNormParams(d.randn(*cfg.dim).float(), d.randn(*cfg.dim).float())
        extra["dtypes"] = (torch.bfloat16,)
    return Case(
        op=layer_norm,
        cfg=cfg,
        x=lambda d: d.randn(*rows, *cfg.dim),
        reference=reference,
        unrounded=("params.weight", "params.bias") if options.get("bias", True) else ("params.weight",),
        name=f"layer_norm-{rows}-{dim}-{options}{'-master' * master}",
        **extra,
    )


CASES = [
    case((2, 5), 69),
    case((), 3),
    case((0,), 4),
    case((1,), 5, eps=0.3, bias=False),
    case((2,), (3, 5), zero_centered_gamma=True),
    case((3,), 512),
    case((2, 3), (2, 8), master=True, zero_centered_gamma=True),
]


@st.composite
def drawn(draw):
    rows = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dim = tuple(draw(st.lists(st.integers(2, 7), min_size=1, max_size=2)))
    return case(rows, dim, eps=0.1, bias=draw(st.booleans()), zero_centered_gamma=draw(st.booleans()))


PLANE, OF_BIAS = torch.ones(3, 4), Needs(x=False, params=("bias",))
ERRORS = [
    Error(
        call=lambda: layer_norm_fwd(LayerNormParams(torch.ones(4)), torch.ones(2, 4), LayerNormConfig(4)),
        match="layer_norm_fwd: params.bias must be a tensor [4], got None",
        error=TypeError,
    ),
    Error(
        call=lambda: layer_norm_fwd(
            LayerNormParams(torch.ones(4), torch.ones(4)), torch.ones(2, 4), LayerNormConfig(4, bias=False)
        ),
        match="layer_norm_fwd: params.bias must be None",
    ),
    Error(call=lambda: LayerNormConfig(()), match="LayerNormConfig: dim must be a size of at least 1"),
    Error(
        call=lambda: layer_norm_fwd(LayerNormParams(PLANE, PLANE), torch.ones(2, 4, 3), LayerNormConfig((3, 4))),
        match="layer_norm_fwd: x must be [..., 3, 4], got [2, 4, 3]",
    ),
    Error(
        call=lambda: layer_norm_dgrad(
            layer_norm_fwd(LayerNormParams(PLANE, PLANE), PLANE, LayerNormConfig((3, 4)), needs=OF_BIAS)[1],
            PLANE[:2],
            LayerNormConfig((3, 4)),
        ),
        match="layer_norm_dgrad: dy must be [3, 4], got [2, 4]",
    ),
]
