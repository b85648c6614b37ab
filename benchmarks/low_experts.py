"""Samples of the grouped products of codes: forward, dgrad and wgrad of each recipe, with many rows per expert and with few; and of
the quantisers of groups with a scale each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_call import CODES, KernelCall, Maker
from funcops.library.kernels import quantize
from funcops.library.kernels.grouped import group_of
from funcops.library.kernels.grouped_quantize import (
    aligned_count,
    aligned_source,
    aligned_starts,
    group_amax,
    quantize_groups,
    quantize_groups_scaled,
)
from funcops.library.kernels.grouped_scaled import grouped_scaled_mm, grouped_scaled_wgrad
from funcops.library.kernels.routing import sort_by_expert

# the element of rows, the element of weights or of x's columns, the scales, the block length of rows, the tile of weights
RECIPES = (
    ("e4m3", "e4m3", "float32", 0, (0, 0)),
    ("e5m2", "e4m3", "float32", 0, (0, 0)),
    ("e4m3", "e4m3", "pow2", 128, (128, 128)),
    ("e5m2", "e4m3", "pow2", 128, (128, 128)),
    ("e4m3", "e4m3", "e8m0", 32, (1, 32)),
    ("e2m1", "e2m1", "e4m3", 16, (16, 16)),
)


def of_low_experts(make: Maker) -> Iterator[KernelCall]:
    make = type(make)(make.device, torch.bfloat16, make.shrink)
    for tokens, choices, count, width, outer in ((8192, 2, 32, 2048, 1536), (64, 2, 32, 2048, 1536)):
        yield from _products(make, tokens, choices, count, width, outer)
    yield from _quantisers(make, 8192, 2, 32, 4096)


def _quantisers(make: Maker, tokens: int, choices: int, count: int, width: int) -> Iterator[KernelCall]:
    """Rows of the gradient, sorted, and of x, gathered, with a scale for each group."""
    tokens, width = make.sizes(tokens, width)
    count = max(2, count // make.shrink)
    order, _, offsets, _ = sort_by_expert(make.ids(tokens, choices, below=count).to(torch.int32), count)
    for x, index in ((make.floats(tokens * choices, width), None), (make.floats(tokens, width), order)):
        rows = x, offsets, index, 1 if index is None else choices
        shape = f"{tokens * choices}x{width} of {count}{'' if index is None else ' gathered'}"
        yield KernelCall(group_amax, shape, (*rows, False))
        for element, cols, kind in dict.fromkeys((a, cols if kind == "e4m3" else 0, kind) for a, _, kind, cols, _ in RECIPES):
            if kind in ("float32", "e4m3"):
                yield KernelCall(quantize_groups, f"{element} {shape}", (*rows, make.wide(count + 1), None, element, cols, kind))
        yield KernelCall(quantize_groups_scaled, f"e4m3 {shape}", (*rows, "e4m3", make.wide(count)))


def _products(make: Maker, tokens: int, choices: int, count: int, width: int, outer: int) -> Iterator[KernelCall]:
    tokens, width, outer = make.sizes(tokens, width, outer)
    width, outer = (-(-size // 32) * 32 for size in (width, outer))
    count = max(2, count // make.shrink)
    indices = make.ids(tokens, choices, below=count).to(torch.int32)
    order, token, offsets, _ = sort_by_expert(indices, count)
    rows, b = order.numel(), make.floats(count, outer)
    for a, w, kind, cols, of_w in RECIPES:
        index, of_rows = (token, tokens) if cols in (32, 128) else (None, rows)  # blocks within rows need no sorted copy of x
        args: tuple[Any, ...] = (
            *_coded(make, (), of_rows, width, a, kind, (1, cols)),
            *_coded(make, (count,), outer, width, w, kind, of_w),
            b,
            None,
            offsets,
            index,
            a,
            cols,
            w,
            *of_w,
            kind,
            width,
            make.dtype,
        )
        shape, flops = f"{a} by {w} 1x{cols} {kind} {rows}x{width} by {count} to {outer}", 2.0 * rows * width * outer
        dense = _dense(make, rows, width, outer)
        yield KernelCall(grouped_scaled_mm, shape, args, product=dense, flops=flops, length=width, dtype=make.dtype, bits=CODES)
        block = cols or 16
        starts = aligned_starts(offsets, block)
        aligned = aligned_count(rows, count, block)
        filled, group = aligned_source(offsets, starts, rows, aligned) < rows, group_of(starts, aligned)
        tile = (1, cols) if cols else (0, 1)
        sides = [
            _coded(make, (), size, aligned, e, kind, tile, (filled, make.wide(count + 1)[group[:: cols or 1]]))
            for size, e in ((outer, a), (width, w))
        ]
        for out in (make.dtype, torch.float32):
            args = *sides[0], *sides[1], starts, starts[:-1] + offsets.diff(), a, w, cols or 1, kind, aligned, out
            what = f"{shape} {str(out).removeprefix('torch.')}"
            product = _dense(make, outer, rows, width)
            yield KernelCall(grouped_scaled_wgrad, what, args, product=product, flops=flops, length=rows, dtype=out, bits=CODES)


def _coded(
    make: Maker,
    lead: tuple[int, ...],
    rows: int,
    width: int,
    element: str,
    kind: str,
    tile: tuple[int, int],
    columns: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes, scales, and the scales of groups: one for each row of rows, each block of columns, each weight. `columns`: which
    columns belong to a group, and their group's scales."""
    high, wide = -(-rows // (tile[0] or rows)), -(-width // (tile[1] or width))
    codes = make.codes(*lead, rows, width // 2 if element == "e2m1" else width)
    if columns is not None and make.device != "meta":
        filled = columns[0]
        codes &= (filled[0::2] * 0x0F | filled[1::2] * 0xF0 if element == "e2m1" else filled * 0xFF).to(torch.uint8)
    if kind in ("e8m0", "e4m3"):
        scales = make.codes(*lead, high, wide, about=124 if kind == "e8m0" else 0x38)
    else:
        by_columns = not lead and quantize.by_columns(*tile, kind)
        scales = make.wide(wide, high).mT if by_columns else make.wide(*lead, high, wide)
    if columns is not None:
        whole = columns[1].unsqueeze(0)
        return codes, whole if tile == (0, 1) else scales, whole if kind == "e4m3" else None
    return codes, scales, make.wide(*(lead or (rows,)), 1) if kind == "e4m3" else None


def _dense(make: Maker, rows: int, inner: int, outer: int) -> Any:
    """A dense product of the same number of rows, in bfloat16."""

    def prepare(*_: Any) -> Any:
        left, right = make.floats(rows, inner), make.floats(inner, outer)
        return lambda: left @ right

    return prepare
