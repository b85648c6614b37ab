"""Gated linear units of an x that is saved in 8 bits: it is decoded as it is read, so no copy in its own dtype is made.

codes: uint8 [*, 2H], e4m3, with an e8m0 scale for every `cols` elements of a row: scales [R, 2H / cols].
Decoded elements are rounded to x's dtype first, so that results equal `dequantize` followed by the kernels of `glu`, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.backend import kernel
from funcops.library.kernels import glu
from funcops.library.kernels.quantize import dequantize


@kernel()
def coded_glu_fwd(codes: Tensor, scales: Tensor, cols: int, kind: str, first: bool, out: torch.dtype) -> Tensor:
    """y = f(gate) * linear, [*, H] in x's dtype, `out`."""
    return glu.glu_fwd(_decoded(codes, scales, cols, out), None, kind, first)  # type: ignore[no-any-return]


@kernel()
def coded_glu_bwd(dy: Tensor, codes: Tensor, scales: Tensor, cols: int, kind: str, first: bool) -> Tensor:
    """dx [*, 2H], see `glu_bwd`."""
    return glu.glu_bwd(dy, _decoded(codes, scales, cols, dy.dtype), None, kind, first, True, False)[0]  # type: ignore[no-any-return]


def _decoded(codes: Tensor, scales: Tensor, cols: int, out: torch.dtype) -> Tensor:
    return dequantize(codes, scales, None, "e4m3", 1, cols, "e8m0", codes.shape[-1], out)  # type: ignore[no-any-return]
