import torch
from hypothesis import strategies as st

from funcops import QuantizeConfig, dequantize, dequantize_fwd
from funcops.engine.trees import replace
from funcops.library.formats import E2M1_NV, E4M3_BLOCK, E4M3_MX, E4M3_SQUARE, E5M2_TENSOR, Format, quantize_tensor
from funcops.testing import Case, Draw, Error

FORMATS = (E4M3_BLOCK, E5M2_TENSOR, E4M3_MX, E2M1_NV, E4M3_SQUARE, Format("e4m3", (1, 0), "float32"))
EXEMPT = ("finite_differences",)  # codes cannot be moved by a little


def back(shape, format):
    return Case(
        op=dequantize,
        cfg=QuantizeConfig(format),
        x=lambda d: quantize_tensor(d.randn(*shape), format),
        reference=lambda params, x, cfg: x * 1.0,
        exempt=EXEMPT,
        name=f"dequantize-{shape}-{format.name}",
    )


CASES = [back((2, 3, 69), E4M3_BLOCK), back((4, 0), E4M3_SQUARE), back((5, 31), E2M1_NV), back((33,), E4M3_MX)]


@st.composite
def drawn(draw):
    shape = (*draw(st.lists(st.integers(0, 4), max_size=2)), draw(st.integers(0, 40)))
    return back(shape, draw(st.sampled_from(FORMATS)))


def _decoded(**changes):
    return lambda: dequantize_fwd(
        None, replace(quantize_tensor(Draw(torch.float32).randn(2, 130), E4M3_BLOCK), **changes), QuantizeConfig(E4M3_BLOCK)
    )


ERRORS = [
    Error(call=_decoded(codes=torch.zeros(2, 9, dtype=torch.uint8)), match="dequantize_fwd: x.codes must be [2, 130], got [2, 9]"),
    Error(call=_decoded(scales=torch.ones(2, 1)), match="dequantize_fwd: x.scales must be [2, 2], got [2, 1]"),
    Error(call=_decoded(scale=torch.ones(1)), match="dequantize_fwd: x.scale must be None (e4m3 1x128 pow2), got"),
    Error(call=_decoded(format=E4M3_MX), match="dequantize_fwd: x.format must be e4m3 1x128 pow2, got e4m3 1x32 e8m0"),
    Error(call=_decoded(side="col"), match="dequantize_fwd: x.side must be 'row', got 'col'"),
]
