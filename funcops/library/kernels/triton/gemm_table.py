"""The kernel and tile of a matrix product, by shape class: data, measured on an H100 with Triton 3.6.

cuBLAS multiplies, and one kernel after it does the rest, unless that would read another tensor: then our kernel with TMA is faster,
whose wide tile comes within 5 % of cuBLAS (8192 x 4096 x 4096, bfloat16: 373 us against 357 with a bias, 414 against 444 with an
added tensor). Over pointers ours takes up to three times as long, in float32 six times. The tiles compile without spills for
sm_90, within the shared memory of every target (`python -m benchmarks aot`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

AnyTile = TypeVar("AnyTile", bound=Any)  # with m, n and stages


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    warps: int
    stages: int
    specialised: bool = False


def fitting(tile: AnyTile, need: Callable[[AnyTile], int], limit: int) -> AnyTile:
    """The tile itself, or the largest part of it that needs at most `limit` bytes of shared memory: with fewer stages, but two at
    least; then with half of its longer side, its columns first. It has the same K at a time, so that sums have the same bits."""
    part = tile
    while part.m * part.n > 1:
        for stages in range(part.stages, min(2, part.stages) - 1, -1):
            if need(part._replace(stages=stages)) <= limit:
                return part._replace(stages=stages)
        part = part._replace(n=part.n // 2) if part.n >= part.m else part._replace(m=part.m // 2)
    return tile


class Choice(NamedTuple):
    """`library`: torch's kernels serve, unless Triton is requested; if False, ours with TMA does, and torch's where that cannot.
    `descriptor`: the tile of the kernel with TMA, which needs the device and strides for it; `pointer`: of the other kernel."""

    library: bool
    descriptor: Tile | None
    pointer: Tile


WIDE, SQUARE, DEEP = Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 4)
# for gemm("specialised"): wide without an epilogue, square with one, which takes registers
SPECIALISED = Tile(128, 256, 64, 4, 3, True), Tile(128, 128, 64, 4, 3, True)
SMALL, FP32 = Tile(64, 64, 64, 4, 3), Tile(64, 64, 32, 8, 3)  # with 4 warps Triton 3.8 spills on sm_90
# strides without known divisors cost registers, and an epilogue costs more
UNALIGNED, UNALIGNED_FUSED, FP32_UNALIGNED = Tile(64, 64, 32, 4, 3), Tile(64, 64, 32, 8, 3), Tile(64, 64, 16, 8, 3)

# three products in one kernel, one per branch: Triton 3.8 gives each branch its own shared memory, and they must fit together
THREE, FP32_THREE = SMALL._replace(stages=2), FP32._replace(stages=2)

# by (epilogue, dtype, size): the epilogue is "none", "fused" (bias, activation), "added" (the same and another tensor), "kept"
# (the activation's input is written or read: a wide tile would spill), "three", "accumulate" (into float32) or "split" (a part of
# the inner dimension, into a float32 workspace: a wide tile of float32 would not fit)
FUSED = "fused", "added", "kept"
TABLE = {
    ("none", "16-bit", "large"): Choice(True, WIDE, SQUARE),
    ("none", "16-bit", "medium"): Choice(True, SQUARE, SQUARE),
    ("none", "16-bit", "narrow"): Choice(True, None, SMALL),
    ("none", "float32", "any"): Choice(True, None, FP32),
    ("fused", "16-bit", "large"): Choice(True, WIDE, SMALL),
    ("fused", "16-bit", "medium"): Choice(True, WIDE, SMALL),
    ("fused", "16-bit", "narrow"): Choice(True, None, SMALL),
    ("fused", "float32", "any"): Choice(True, None, FP32),
    ("added", "16-bit", "large"): Choice(False, WIDE, SMALL),
    ("added", "16-bit", "medium"): Choice(False, WIDE, SMALL),
    ("added", "16-bit", "narrow"): Choice(True, None, SMALL),
    ("added", "float32", "any"): Choice(True, None, FP32),
    ("kept", "16-bit", "large"): Choice(True, DEEP, SMALL),
    ("kept", "16-bit", "medium"): Choice(True, DEEP, SMALL),
    ("kept", "16-bit", "narrow"): Choice(True, None, SMALL),
    ("kept", "float32", "any"): Choice(True, None, FP32),
    ("three", "16-bit", "large"): Choice(True, None, THREE),
    ("three", "16-bit", "medium"): Choice(True, None, THREE),
    ("three", "16-bit", "narrow"): Choice(True, None, THREE),
    ("three", "float32", "any"): Choice(True, None, FP32_THREE),
    ("accumulate", "16-bit", "large"): Choice(True, DEEP, SMALL),
    ("accumulate", "16-bit", "medium"): Choice(True, DEEP, SMALL),
    ("accumulate", "16-bit", "narrow"): Choice(True, None, SMALL),
    ("accumulate", "float32", "any"): Choice(True, None, FP32),
    ("split", "16-bit", "large"): Choice(False, SQUARE, SQUARE),
    ("split", "16-bit", "medium"): Choice(False, SQUARE, SQUARE),
    ("split", "16-bit", "narrow"): Choice(False, None, SMALL),
    ("split", "float32", "any"): Choice(False, None, FP32),
}

# which kernel takes grouped products of 16 bits, of experts too: "pointer", "descriptor" (TMA, persistent) or "library"
# (torch's); after the other two the gated unit of experts is a kernel of its own. No GPU has measured them: gemm("specialised")
# and gemm("cublas") request them
GROUPED = {"product": "pointer", "wgrad": "pointer"}


def choose(epilogue: str, dtype: torch.dtype, m: int, n: int, aligned: bool) -> Choice:
    """`aligned`: whether the strides of A and B, except the one that is 1, are multiples of 16 elements; n tells the output's.
    Unaligned output rows take registers, too."""
    if dtype is torch.float32:
        choice = TABLE[epilogue, "float32", "any"]
        return choice if aligned and n % 16 == 0 else choice._replace(pointer=FP32_UNALIGNED)
    if not aligned:
        return TABLE[epilogue, "16-bit", "narrow"]._replace(pointer=UNALIGNED_FUSED if epilogue in FUSED else UNALIGNED)
    size = "narrow" if min(m, n) <= 64 else "large" if m >= 1024 and n >= 1024 else "medium"
    choice = TABLE[epilogue, "16-bit", size]
    return choice if epilogue not in FUSED or n % 16 == 0 else choice._replace(pointer=UNALIGNED_FUSED)
