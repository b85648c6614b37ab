"""Which kernel and tile a matrix product gets, by shape class: data, to be replaced by measurement.

No row has been tuned on a GPU. The tiles are those that compile without spills for sm_80, sm_90 and sm_100
(`python -m funcops.bench aot`); a product without an epilogue is left to cuBLAS.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    warps: int
    stages: int


class Choice(NamedTuple):
    """`library`: torch's own kernels serve, unless Triton is asked for; `descriptor`: by TMA where device and strides allow."""

    library: bool
    descriptor: bool
    tile: Tile


WIDE, SQUARE, SMALL, FP32 = Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 3), Tile(64, 64, 32, 4, 3)

# by (epilogue, dtype, size): the epilogue is "none", "fused" (bias, activation, residual) or "accumulate" (into float32)
TABLE = {
    ("none", "16-bit", "large"): Choice(True, True, WIDE),
    ("none", "16-bit", "medium"): Choice(True, True, SQUARE),
    ("none", "16-bit", "narrow"): Choice(True, False, SMALL),
    ("none", "float32", "any"): Choice(True, False, FP32),
    ("fused", "16-bit", "large"): Choice(False, True, SQUARE),
    ("fused", "16-bit", "medium"): Choice(False, True, SQUARE),
    ("fused", "16-bit", "narrow"): Choice(False, False, SMALL),
    ("fused", "float32", "any"): Choice(False, False, FP32),
    ("accumulate", "16-bit", "large"): Choice(False, True, SQUARE),
    ("accumulate", "16-bit", "medium"): Choice(False, True, SQUARE),
    ("accumulate", "16-bit", "narrow"): Choice(False, False, SMALL),
    ("accumulate", "float32", "any"): Choice(False, False, FP32),
}


def choose(epilogue: str, dtype: torch.dtype, m: int, n: int) -> Choice:
    if dtype is torch.float32:
        return TABLE[epilogue, "float32", "any"]
    size = "narrow" if min(m, n) <= 64 else "large" if m >= 1024 and n >= 1024 else "medium"
    return TABLE[epilogue, "16-bit", size]
