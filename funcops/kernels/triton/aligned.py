"""Rows of any length read 16 bytes at a time: what of a row lies in whole groups of the tensor's elements, and its ends."""

from __future__ import annotations

import triton
import triton.language as tl

GROUP = 8  # elements: 16 bytes of a 16-bit dtype
ALIGN = tl.constexpr(GROUP)


@triton.jit
def whole_groups(ptr, first, width, EVEN: tl.constexpr):
    """Of the `width` elements from `first`: a pointer to the first whole group of ALIGN, how many elements come before it, and how
    many lie in whole groups. EVEN: `first` and `width` are multiples of ALIGN."""
    if EVEN:
        return ptr + first // ALIGN * ALIGN, 0, width // ALIGN * ALIGN
    else:
        start = (first + (ALIGN - 1)) // ALIGN * ALIGN
        before = (start - first).to(tl.int32)
        return ptr + start, before, tl.maximum(width - before, 0) // ALIGN * ALIGN


@triton.jit
def ends(before, size, width):
    """The elements that lie in no whole group: their places from the first group's start, and which of these there are."""
    i = tl.arange(0, 2 * ALIGN)
    first, after = i < ALIGN, i - ALIGN
    return tl.where(first, i - before, size + after), tl.where(first, i < tl.minimum(before, width), after < width - before - size)
