"""Rows of any length, read 16 bytes at a time: either one row, as the tensor's whole groups of elements in it, of 16 bytes or of a
line of the cache, and its two ends; or a span, so many rows that the next span begins with a group."""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl

from funcops.library.kernels.triton.common import cdiv

GROUP = 8  # elements: 16 bytes of a 16-bit dtype
ALIGN = tl.constexpr(GROUP)
PROGRAMS = 2048  # enough for a device: beyond that a program takes the same columns of several spans


class Spans(NamedTuple):
    """`groups` of ALIGN elements in a span; `wraps`: whether a span exceeds a period; `wide`: whether it exceeds 32 bits."""

    grid: tuple[int, int, int]
    groups: int
    wraps: bool
    wide: bool


def spans(n: int, period: int, block: int) -> Spans:
    """Divide n elements, in which something repeats every `period`, into spans for programs of `block` columns."""
    span = math.lcm(period, GROUP)
    if span % block:
        span *= max(1, 8 * block // span)
    across = cdiv(min(span, n), block)
    grid = across, max(1, min(n // span, cdiv(PROGRAMS, across))), 1
    return Spans(grid, span // GROUP, span != period, span > 2**31 - block)


@triton.jit
def columns(n, groups, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """A program's columns in every span, the size of a span, how many spans are whole, and the program's first span."""
    first = tl.program_id(0) * BLOCK
    span = groups * ALIGN
    if WIDE:
        first = first.to(tl.int64)
    return first + tl.arange(0, BLOCK), span, n // span, tl.program_id(1).to(tl.int64)


@triton.jit
def whole_groups(ptr, first, width, EVEN: tl.constexpr, OF: tl.constexpr = ALIGN):
    """For the `width` elements from `first`: a pointer to the first whole group of OF elements, how many elements come before it,
    and how many lie in whole groups. EVEN: `first` and `width` are multiples of OF."""
    if EVEN:
        return ptr + first // OF * OF, 0, width // OF * OF
    else:
        before = ((-(first % OF) + OF) % OF).to(tl.int32)
        return ptr + (first + (OF - 1)) // OF * OF, before, tl.maximum(width - before, 0) // OF * OF


@triton.jit
def ends(before, size, width, OF: tl.constexpr = ALIGN):
    """The elements outside whole groups: their positions from the first group's start, and the mask of positions that exist."""
    i = tl.arange(0, 2 * OF)
    first, after = i < OF, i - OF
    return tl.where(first, i - before, size + after), tl.where(first, i < tl.minimum(before, width), after < width - before - size)
