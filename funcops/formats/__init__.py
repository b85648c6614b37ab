"""Low-precision tensors as data: a `Format`, and a `QTensor` of codes and scales in it.

    q = quantize_tensor(x, E4M3_BLOCK)          # codes uint8 [*, K], scales float32 [R, K / 128]
    x_again = q.dequantize()                    # in the dtype of x, within 2^-4 of each element's size

Arithmetic is in `funcops.kernels.quantize`; ops of it are `funcops.quantize`, `funcops.dequantize` and `funcops.qlinear`.
"""

from funcops.formats.format import E2M1_NV as E2M1_NV
from funcops.formats.format import E2M1_NV_SQUARE as E2M1_NV_SQUARE
from funcops.formats.format import E4M3_BLOCK as E4M3_BLOCK
from funcops.formats.format import E4M3_MX as E4M3_MX
from funcops.formats.format import E4M3_SQUARE as E4M3_SQUARE
from funcops.formats.format import E4M3_TENSOR as E4M3_TENSOR
from funcops.formats.format import E5M2_BLOCK as E5M2_BLOCK
from funcops.formats.format import E5M2_TENSOR as E5M2_TENSOR
from funcops.formats.format import FORMATS as FORMATS
from funcops.formats.format import Format as Format
from funcops.formats.qtensor import QTensor as QTensor
from funcops.formats.qtensor import QWeight as QWeight
from funcops.formats.qtensor import by_tiles as by_tiles
from funcops.formats.qtensor import check_quantized as check_quantized
from funcops.formats.qtensor import dense as dense
from funcops.formats.qtensor import quantize_sides as quantize_sides
from funcops.formats.qtensor import quantize_tensor as quantize_tensor
from funcops.formats.qtensor import quantized_weight as quantized_weight
from funcops.formats.qtensor import stacked as stacked
from funcops.formats.qtensor import turned as turned
from funcops.formats.qtensor import zero_gradient as zero_gradient
