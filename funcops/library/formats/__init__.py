"""Low-precision tensors as data: a `Format`, and a `QTensor` of codes and scales in it.

    q = quantize_tensor(x, E4M3_BLOCK)          # codes uint8 [*, K], scales float32 [R, K / 128]
    x_again = q.dequantize()                    # in the dtype of x, within 2^-4 of each element's size

Arithmetic is in `funcops.library.kernels.quantize`; ops of it are `funcops.quantize`, `funcops.dequantize` and `funcops.qlinear`.
"""

from funcops.engine.trees import dense
from funcops.library.formats import codecs as codecs  # which registers them
from funcops.library.formats.format import (
    E2M1_NV,
    E2M1_NV_SQUARE,
    E4M3_BLOCK,
    E4M3_MX,
    E4M3_SQUARE,
    E4M3_TENSOR,
    E5M2_BLOCK,
    E5M2_TENSOR,
    FORMATS,
    Format,
)
from funcops.library.formats.nf4 import NF4, NF4Tensor, nf4_tensor
from funcops.library.formats.qtensor import (
    IN_CODES,
    QTensor,
    QWeight,
    as_made,
    by_tiles,
    check_quantized,
    quantize_sides,
    quantize_tensor,
    quantized_weight,
    stacked,
    turned,
    zero_gradient,
)

__all__ = ["E2M1_NV", "E2M1_NV_SQUARE", "E4M3_BLOCK", "E4M3_MX", "E4M3_SQUARE", "E4M3_TENSOR"]
__all__ += ["E5M2_BLOCK", "E5M2_TENSOR", "FORMATS", "IN_CODES", "NF4", "Format", "NF4Tensor", "QTensor", "QWeight"]
__all__ += ["as_made", "by_tiles", "check_quantized", "dense", "nf4_tensor", "quantize_sides", "quantize_tensor"]
__all__ += ["quantized_weight", "stacked", "turned", "zero_gradient"]
