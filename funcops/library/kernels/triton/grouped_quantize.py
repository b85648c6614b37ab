"""Groups of sorted rows, each quantised with a scale of its own: a program takes some rows of one group, and all their columns.
Rows are gathered where they lie, and offsets are read on the device.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import grouped_quantize as declared
from funcops.library.kernels.quantize import FOUR_OVER_SIX
from funcops.library.kernels.triton.common import block_of, cdiv, contiguous
from funcops.library.kernels.triton.grouped import blocks_of, locate, place_of
from funcops.library.kernels.triton.low_bits import encode, load_exact, native, number, quantise, scales_of, sizes, tensor_factor
from funcops.library.kernels.triton.quantize import _store, _store_codes

COLUMNS, TILE = 1024, 8192  # of a step; elements of it


@triton.jit
def _groups(
    x_ptr, index_ptr, offsets_ptr, given_ptr, codes_ptr, scales_ptr, whole_ptr, amax_ptr, rows, x_rows, E, width, stride, every,
    ELEMENT: tl.constexpr, KIND: tl.constexpr, COLS: tl.constexpr, EPSILON: tl.constexpr, NATIVE: tl.constexpr,
    INDEXED: tl.constexpr, AMAX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, E_BLOCK: tl.constexpr,
):
    """With AMAX, join a group's largest |x| at amax_ptr. With an ELEMENT, write codes, in rows of `stride` bytes, by each group's
    `given`: the largest |x|, or with KIND "scaled" the factor, 1 for rows without a group. COLS 0: one scale for each row."""
    e, first, last = locate(tl.program_id(0), offsets_ptr, E, rows, BLOCK_M, E_BLOCK)
    if last == 0:
        return
    m, n = first + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    own = m < last
    row = place_of(m, last, index_ptr, every, x_rows, INDEXED)
    given, factor = 0.0, 0.0
    if KIND == "scaled":
        factor = tl.load(given_ptr + e, mask=e < E, other=1.0)
        tl.store(scales_ptr + m, tl.full([BLOCK_M], 0.0, tl.float32) + tl.div_rn(1.0, factor), mask=own)
    elif ELEMENT != "":
        given = tl.load(given_ptr + e)
        if COLS == 0:
            factor, stored = scales_of(given, 0.0, ELEMENT, KIND, EPSILON, False, NATIVE)
            tl.store(scales_ptr + m, tl.full([BLOCK_M], 0.0, tl.float32) + stored, mask=own)
        else:
            tl.store(whole_ptr + m, tl.full([BLOCK_M], 0.0, tl.float32) + tl.div_rn(1.0, tensor_factor(given)), mask=own)
    most, begin = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), first.to(tl.int64)
    for start in range(0, width, BLOCK_N):
        inside = own[:, None] & (start + n < width)[None, :]
        x = load_exact(x_ptr + row[:, None] * width + (start + n)[None, :], inside)
        if AMAX:
            most = tl.maximum(most, sizes(x))
        if COLS:
            codes, stored = quantise(x, given, BLOCK_M, BLOCK_N, ELEMENT, KIND, 1, COLS, EPSILON, False, NATIVE)
            _store(scales_ptr, stored, begin, start // COLS, last, tl.cdiv(width, COLS), BLOCK_M, BLOCK_N // COLS)
            _store_codes(codes_ptr, codes, begin, start, last, stride, ELEMENT, BLOCK_M, BLOCK_N)
        elif ELEMENT != "":
            _store_codes(codes_ptr, encode(x * factor, ELEMENT, NATIVE), begin, start, last, stride, ELEMENT, BLOCK_M, BLOCK_N)
    if AMAX:
        largest = number(tl.max(tl.max(most, 1), 0))
        tl.atomic_max(amax_ptr + e, largest.to(tl.int32, bitcast=True), sem="relaxed")


_launch = launcher(_groups)


def _run(
    x: Tensor, offsets: Tensor, index: Optional[Tensor], every: int, given: Optional[Tensor], codes: Optional[Tensor],
    scales: Optional[Tensor], whole: Optional[Tensor], amax: Optional[Tensor], element: str, kind: str, cols: int, epsilon: float,
) -> None:
    (count, width), rows, groups = x.shape, len(x) if index is None else len(index), len(offsets) - 1
    if not rows or not width:
        return
    columns = max(cols, block_of(width, COLUMNS))
    high = max(1, min(32, TILE // columns))
    _launch(
        cdiv(rows, high) + groups + 1, 1, 1, x.contiguous(), contiguous(index), offsets.contiguous(), given, codes, scales, whole,
        None if amax is None else amax.view(torch.int32), rows, count, groups, width, 0 if codes is None else codes.shape[1], every,
        element, kind, cols, epsilon, native(), index is not None, amax is not None, high, columns, blocks_of(groups), num_warps=8,
    )


@declared.group_amax.triton
def group_amax(x: Tensor, offsets: Tensor, index: Optional[Tensor], every: int, hadamard: bool) -> Tensor:
    if hadamard:
        return declared.group_amax.kernel.torch_impl(x, offsets, index, every, True)  # type: ignore[no-any-return]
    amax = x.new_zeros(len(offsets), dtype=torch.float32)
    _run(x, offsets, index, every, None, None, None, None, amax, "", "", 0, 0.0)
    return amax


@declared.quantize_groups.triton
def quantize_groups(
    x: Tensor, offsets: Tensor, index: Optional[Tensor], every: int, amax: Tensor, words: Optional[Tensor], element: str, cols: int,
    kind: str, epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    if words is not None or kind in FOUR_OVER_SIX or not x.shape[1]:
        plain = declared.quantize_groups.kernel.torch_impl
        return plain(x, offsets, index, every, amax, words, element, cols, kind, epsilon)  # type: ignore[no-any-return]
    rows, width = len(x) if index is None else len(index), x.shape[1]
    codes = x.new_empty((rows, cdiv(width, 2) if element == "e2m1" else width), dtype=torch.uint8)
    scales = x.new_empty((rows, cdiv(width, cols or width)), dtype=torch.uint8 if cols else torch.float32)
    whole = x.new_empty((rows, 1), dtype=torch.float32) if cols else None
    _run(x, offsets, index, every, amax.contiguous(), codes, scales, whole, None, element, kind, cols, epsilon)
    return codes, scales, whole


@declared.quantize_groups_scaled.triton
def quantize_groups_scaled(
    x: Tensor, offsets: Tensor, index: Optional[Tensor], every: int, element: str, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(x) if index is None else len(index)
    codes = x.new_empty((rows, x.shape[1]), dtype=torch.uint8)
    scales, amax = x.new_empty((rows, 1), dtype=torch.float32), x.new_zeros(len(offsets), dtype=torch.float32)
    if not x.shape[1]:
        return declared.quantize_groups_scaled.kernel.torch_impl(x, offsets, index, every, element, scale)  # type: ignore[no-any-return]
    _run(x, offsets, index, every, scale.contiguous(), codes, scales, None, amax, element, "scaled", 0, 0.0)
    return codes, scales, amax
