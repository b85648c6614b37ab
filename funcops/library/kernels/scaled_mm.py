"""Products of codes with scales (`funcops.library.kernels.quantize`): c = a b^T, both with K last."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor, dtype

from funcops.engine.backend import kernel, wide
from funcops.library.kernels.quantize import decode_tiles, matrix

# whether torch has CUDA's library for products of codes: of version 12.9 or later, by `torch.nn.functional.scaled_mm`
SERVED = (
    hasattr(torch.nn.functional, "ScalingType")
    and torch.version.cuda is not None
    and tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9)
)


@kernel()
def scaled_mm(
    a: Tensor,
    a_scales: Tensor,
    a_scale: Optional[Tensor],
    b: Tensor,
    b_scales: Tensor,
    b_scale: Optional[Tensor],
    a_element: str,
    a_rows: int,
    a_cols: int,
    b_element: str,
    b_rows: int,
    b_cols: int,
    kind: str,
    width: int,
    out: dtype,
    emulate: bool = False,
    b_kind: str = "",
) -> Tensor:
    """c [*, N] in the dtype `out`, from a [*, K] and b [N, K] of `width` K: operands are decoded with their scales, summed in
    float32 at least, and rounded once. Tiles of a and b as quantised; `a_scale` and `b_scale`: float32 [1] for whole tensors, or
    [rows, 1]. A device that cannot multiply such codes raises `ValueError`, unless `emulate`, which decodes them, as here; so it is
    for operands whose scales are of two kinds, `kind` and `b_kind`."""
    left = decode_tiles(matrix(a), a_scales, a_scale, a_element, a_rows, a_cols, kind, width)
    right = decode_tiles(b, b_scales, b_scale, b_element, b_rows, b_cols, b_kind or kind, width)
    c = (left.to(wide(out)) @ right.to(wide(out)).mT).to(out)
    return c if a.dim() == 2 else c.reshape(*a.shape[:-1], c.shape[-1])
