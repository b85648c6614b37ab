"""Products of codes with scales (`funcops.library.kernels.quantize`) of sorted rows, each group of rows with a matrix of its own
(`funcops.library.kernels.grouped`): operands are decoded with their scales, summed in float32 at least, and rounded once.

On the CPU the bodies loop over groups; elsewhere they read no value on the host, and compute every group's product of all rows.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide
from funcops.engine.errors import fail
from funcops.library.kernels.grouped import biased, by_groups, by_masks, wgrad_by_masks
from funcops.library.kernels.quantize import decode_tiles


@kernel(opaque=True)
def grouped_scaled_mm(
    a: Tensor,
    a_scales: Tensor,
    a_scale: Optional[Tensor],
    w: Tensor,
    w_scales: Tensor,
    w_scale: Optional[Tensor],
    b: Optional[Tensor],
    scales: Optional[Tensor],
    offsets: Tensor,
    index: Optional[Tensor],
    a_element: str,
    a_cols: int,
    w_element: str,
    w_rows: int,
    w_cols: int,
    kind: str,
    width: int,
    out: torch.dtype,
) -> Tensor:
    """y [N, O] in the dtype `out`: row n of a, or a[index[n]], times w_e^T of its group e, rounded, + b_e or scales[n] b_e; 0 for
    a row without a group.

    a: codes of rows [M, K] of `width` K, with scales [M, K / a_cols] (a_cols 0: [M, 1]) and `a_scale` [M, 1]; w: codes [E, O, K],
    with scales [E, O / w_rows, K / w_cols] (0: one for the whole dim) and `w_scale` [E, 1]; b [E, O]."""
    rows = decode_tiles(a, a_scales, a_scale, a_element, 1, a_cols, kind, width)
    rows = rows if index is None else rows.index_select(0, index)
    parts = zip(w, w_scales, w.new_empty(len(w)) if w_scale is None else w_scale, strict=True)
    each = [decode_tiles(c, s, None if w_scale is None else of, w_element, w_rows, w_cols, kind, width) for c, s, of in parts]
    product = by_groups if a.is_cpu else by_masks
    y = product(rows.to(wide(out)), torch.stack(each).to(wide(out)).mT, offsets).to(out)
    return y if b is None else biased(y, b, scales, offsets)


@grouped_scaled_mm.fake
def _grouped_scaled_mm_fake(a: Tensor, w: Tensor, index: Optional[Tensor], out: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0] if index is None else index.shape[0], w.shape[1]), dtype=out)


def _grouped_scaled_mm_flops(a: Tensor, w: Tensor, index: Optional[Tensor], width: int) -> int:
    return 2 * len(a if index is None else index) * w.shape[1] * width


grouped_scaled_mm.kernel.flops = _grouped_scaled_mm_flops


@kernel(opaque=True)
def grouped_scaled_wgrad(
    dy: Tensor,
    dy_scales: Tensor,
    dy_scale: Optional[Tensor],
    x: Tensor,
    x_scales: Tensor,
    x_scale: Optional[Tensor],
    starts: Tensor,
    ends: Tensor,
    dy_element: str,
    x_element: str,
    cols: int,
    kind: str,
    width: int,
    out: torch.dtype,
) -> Tensor:
    """dw [E, O, I] in the dtype `out`: dw_e = dy x^T over columns starts[e] to ends[e] of dy [O, P] and x [I, P]; 0 if empty.

    Codes of transposed rows, of `width` P, with scales [O, P / cols] and [I, P / cols] (cols 1: [1, P], all equal in a group),
    `dy_scale` and `x_scale` [1, P / cols]. starts [E + 1] and ends [E]: int32, ascending, starts multiples of 16 and `cols`; from
    an end to the next start codes are 0, and columns from the last start on have no group."""
    left = decode_tiles(dy, dy_scales, dy_scale, dy_element, 1, cols, kind, width).to(wide(out))
    right = decode_tiles(x, x_scales, x_scale, x_element, 1, cols, kind, width).to(wide(out))
    if not dy.is_cpu:
        return wgrad_by_masks(left.mT, right.mT, starts).to(out)
    dw = left.new_zeros((len(ends), len(left), len(right)))
    for e, (first, last) in enumerate(zip(starts.tolist(), ends.tolist(), strict=False)):
        if first < 0 or last > width:
            fail("grouped_scaled_wgrad", "starts, ends", f"within the {width} columns", (first, last))
        if first < last:
            dw[e] = left[:, first:last] @ right[:, first:last].mT
    return dw.to(out)


@grouped_scaled_wgrad.fake
def _grouped_scaled_wgrad_fake(dy: Tensor, x: Tensor, ends: Tensor, out: torch.dtype) -> Tensor:
    return dy.new_empty((ends.shape[0], dy.shape[0], x.shape[0]), dtype=out)


def _grouped_scaled_wgrad_flops(dy: Tensor, x: Tensor, width: int) -> int:
    return 2 * width * len(dy) * len(x)


grouped_scaled_wgrad.kernel.flops = _grouped_scaled_wgrad_flops
