"""Rows to their experts and back: one program per token and block of columns, which it reads once, or writes once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import routing as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.common import block_of, cdiv, contiguous, load_wide, store_rounded, warps_of

BLOCK = 2048


@triton.jit
def _scatter(x_ptr, place_ptr, end_ptr, rows_ptr, width, choices, CUT: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a token to its rows; with CUT, rows from the end on are zero."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * width + i, mask=i < width)
    end = tl.load(end_ptr) if CUT else 0
    for k in range(0, choices):
        at = tl.load(place_ptr + token * choices + k).to(tl.int64)
        row = x
        if CUT:
            row = tl.where(at < end, x, 0.0).to(x.dtype)
        tl.store(rows_ptr + at * width + i, row, mask=i < width)


@triton.jit
def _gather(rows_ptr, place_ptr, end_ptr, y_ptr, width, choices, CUT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum a token's rows; with CUT, rows from the end on count as zero, whatever they hold."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    end = tl.load(end_ptr) if CUT else 0
    for k in range(0, choices):
        at = tl.load(place_ptr + token * choices + k).to(tl.int64)
        inside = i < width
        if CUT:
            inside &= at < end
        total += load_wide(rows_ptr + at * width + i, inside)
    store_rounded(y_ptr + token * width + i, total, i < width)


_launch_scatter, _launch_gather = launcher(_scatter), launcher(_gather)


@launched(declared.scatter_rows)
@declared.scatter_rows.triton
def scatter_rows(x: Tensor, place: Tensor, offsets: Optional[Tensor]) -> Tensor:
    rows = x.new_empty((place.numel(), x.shape[-1]))
    _launch(_launch_scatter, x, place, offsets, rows)
    return rows


@launched(declared.gather_rows)
@declared.gather_rows.triton
def gather_rows(rows: Tensor, place: Tensor, offsets: Optional[Tensor]) -> Tensor:
    y = rows.new_empty((place.shape[0], rows.shape[-1]))
    _launch(_launch_gather, rows, place, offsets, y)
    return y


def _launch(launch: Callable[..., None], given: Tensor, place: Tensor, offsets: Optional[Tensor], out: Tensor) -> None:
    (tokens, choices), width = place.shape, given.shape[-1]
    if tokens and width:
        block = block_of(width, BLOCK)
        end = None if offsets is None else offsets[-1:]
        launch(
            tokens, cdiv(width, block), 1, given.contiguous(), place.contiguous(), contiguous(end), out, width, choices,
            end is not None, block, num_warps=warps_of(block),
        )
