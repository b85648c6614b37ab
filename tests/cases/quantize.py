import torch
from hypothesis import strategies as st

from funcops import QuantizeConfig, dequantize, dequantize_fwd, quantize, quantize_fwd
from funcops.formats import E2M1_NV, E4M3_BLOCK, E4M3_MX, E4M3_SQUARE, E5M2_TENSOR, Format, quantize_tensor
from funcops.testing import Case, Draw, Error
from funcops.trees import replace

FORMATS = (E4M3_BLOCK, E5M2_TENSOR, E4M3_MX, E2M1_NV, E4M3_SQUARE, Format("e4m3", (1, 0), "float32"))
EXEMPT = ("finite_differences",)  # straight-through gradients are not those of a step function


def rounded(params, x, cfg):
    return x + (quantize_tensor(x.detach(), cfg.format).dequantize() - x.detach())


def there(shape, format):
    return Case(
        op=quantize, cfg=QuantizeConfig(format), x=lambda d: d.randn(*shape), reference=rounded, free=("x",), exempt=EXEMPT,
        name=f"quantize-{shape}-{format.name}",
    )  # fmt: skip


def back(shape, format):
    return Case(
        op=dequantize, cfg=QuantizeConfig(format), x=lambda d: quantize_tensor(d.randn(*shape), format),
        reference=lambda params, x, cfg: x * 1.0, exempt=EXEMPT, name=f"dequantize-{shape}-{format.name}",
    )  # fmt: skip


CASES = [there((2, 3, 69), E4M3_BLOCK), there((0, 3), E4M3_MX), there((5, 31), E2M1_NV), there((7,), E5M2_TENSOR)]
CASES += [back((2, 3, 69), E4M3_BLOCK), back((4, 0), E4M3_SQUARE), back((5, 31), E2M1_NV), back((33,), E4M3_MX)]


@st.composite
def drawn(draw):
    shape = (*draw(st.lists(st.integers(0, 4), max_size=2)), draw(st.integers(0, 40)))
    return draw(st.sampled_from((there, back)))(shape, draw(st.sampled_from(FORMATS)))


def _decoded(**changes):
    return lambda: dequantize_fwd(
        None, replace(quantize_tensor(Draw(torch.float32).randn(2, 130), E4M3_BLOCK), **changes), QuantizeConfig(E4M3_BLOCK)
    )


ERRORS = [
    Error(call=lambda: QuantizeConfig("fp8"), match="QuantizeConfig: format must be Format, got", error=TypeError),
    Error(call=lambda: Format("fp8"), match="Format: element must be one of e4m3, e5m2, e2m1, got 'fp8'"),
    Error(call=lambda: Format("e4m3", (1, 64)), match="Format: tile must be one of (0, 0), (1, 0), (1, 128), (128, 128)"),
    Error(call=lambda: Format("e4m3", (1, 16), "e4m3"), match="Format: element must be e2m1 with e4m3 scales"),
    Error(
        call=lambda: quantize_fwd(None, torch.ones(2, dtype=torch.int64), QuantizeConfig(E4M3_BLOCK)),
        match="quantize_fwd: x must be", error=TypeError,
    ),
    Error(call=_decoded(codes=torch.zeros(2, 9, dtype=torch.uint8)), match="dequantize_fwd: x.codes must be [2, 130], got [2, 9]"),
    Error(call=_decoded(scales=torch.ones(2, 1)), match="dequantize_fwd: x.scales must be [2, 2], got [2, 1]"),
    Error(call=_decoded(scale=torch.ones(1)), match="dequantize_fwd: x.scale must be None (e4m3 1x128 pow2), got"),
    Error(call=_decoded(format=E4M3_MX), match="dequantize_fwd: x.format must be e4m3 1x128 pow2, got e4m3 1x32 e8m0"),
    Error(call=_decoded(side="col"), match="dequantize_fwd: x.side must be 'row', got 'col'"),
]  # fmt: skip
