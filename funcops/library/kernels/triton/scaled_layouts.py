"""The scales of codes in the layouts in which CUDA's library reads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.library.kernels.triton.scaled_ways import SMALL

SQUARE_ALIGN = 4  # scales of square blocks are padded to a multiple of it
_OF_SCALES: dict[str, Any] = {"e8m0": getattr(torch, "float8_e8m0fnu", None), "e4m3": torch.float8_e4m3fn}


def as_read(scales: Tensor, tile: tuple[int, int], kind: str = "float32", rows: int = 0) -> Tensor:
    """Scales in the library's layout: block by block for row tiles; along K, padded to fours, for square tiles; for each of `rows`
    rows and swizzled, for small ones."""
    if kind in SMALL:
        each = scales if tile[0] == 1 else scales[:, None].expand(-1, tile[0], -1).flatten(0, 1)[:rows]
        return swizzled(each).view(_OF_SCALES[kind])
    if tile == (1, 128):
        return scales.mT.contiguous().mT
    if tile != (128, 128):
        return scales.contiguous()
    pad = -scales.shape[1] % SQUARE_ALIGN
    return (torch.nn.functional.pad(scales, (0, pad)) if pad else scales.contiguous()).mT


def swizzled(scales: Tensor) -> Tensor:
    """Scales [R, C] of one byte in the order in which cuBLASLt reads them: in tiles of 128 rows and 4 columns, filled up with
    zeros, one after the other by rows; in a tile row r and column c is byte 16 (r % 32) + 4 (r / 32) + c."""
    rows, columns = scales.shape
    filled = torch.nn.functional.pad(scales, (0, -columns % 4, 0, -rows % 128))
    tiles = filled.view(filled.shape[0] // 128, 4, 32, filled.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)
