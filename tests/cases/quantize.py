import torch
from hypothesis import strategies as st

from funcops import QuantizeConfig, quantize, quantize_fwd
from funcops.library.formats import E2M1_NV, E4M3_BLOCK, E4M3_MX, E4M3_SQUARE, E5M2_TENSOR, Format, quantize_tensor
from funcops.testing import Case, Error

FORMATS = (E4M3_BLOCK, E5M2_TENSOR, E4M3_MX, E2M1_NV, E4M3_SQUARE, Format("e4m3", (1, 0), "float32"))
EXEMPT = ("finite_differences",)  # straight-through gradients differ from a step function's


def rounded(params, x, cfg):
    return x + (quantize_tensor(x.detach(), cfg.format).dequantize() - x.detach())


def there(shape, format):
    return Case(
        op=quantize,
        cfg=QuantizeConfig(format),
        casts=True,
        x=lambda d: d.randn(*shape),
        reference=rounded,
        free=("x",),
        exempt=EXEMPT,
        name=f"quantize-{shape}-{format.name}",
    )


CASES = [there((2, 3, 69), E4M3_BLOCK), there((0, 3), E4M3_MX), there((5, 31), E2M1_NV), there((7,), E5M2_TENSOR)]


@st.composite
def drawn(draw):
    shape = (*draw(st.lists(st.integers(0, 4), max_size=2)), draw(st.integers(0, 40)))
    return there(shape, draw(st.sampled_from(FORMATS)))


ERRORS = [
    Error(call=lambda: QuantizeConfig("fp8"), match="QuantizeConfig: format must be Format, got", error=TypeError),
    Error(call=lambda: Format("fp8"), match="Format: element must be one of e4m3, e5m2, e2m1, got 'fp8'"),
    Error(call=lambda: Format("e4m3", (1, 64)), match="Format: tile must be one of (0, 0), (1, 0), (1, 128), (128, 128)"),
    Error(call=lambda: Format("e4m3", (1, 16), "e4m3"), match="Format: element must be e2m1 with e4m3 scales"),
    Error(
        call=lambda: quantize_fwd(None, torch.ones(2, dtype=torch.int64), QuantizeConfig(E4M3_BLOCK)),
        match="quantize_fwd: x must be",
        error=TypeError,
    ),
]
