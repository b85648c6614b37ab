"""Products of 8-bit codes by CUDA's library (cuBLASLt, through `torch.nn.functional.scaled_mm`), whose sums are promoted to float32
every 128 along K, as ours are."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

_functional: Any = torch.nn.functional
_WAYS: Any = getattr(_functional, "ScalingType", None)
SERVED = _WAYS is not None and torch.version.cuda is not None and tuple(map(int, torch.version.cuda.split(".")[:2])) >= (12, 9)
CAPABILITY = 90  # the only one on which it multiplies blocks, and was measured
ALIGN = 16  # addresses and rows of codes are multiples of so many bytes
SQUARE_ALIGN = 4  # scales of square blocks are padded to a multiple of it
KINDS = "pow2", "float32"


def product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, elements: tuple[str, str], tiles: tuple[Any, Any], out: torch.dtype
) -> Optional[Tensor]:
    """The product [*, N] of codes a [*, K] and b [N, K] with their scales; None if the library does not take it."""
    k, n = a.shape[-1], b.shape[0]
    rows = a.numel() // k
    ways = _ways(rows, n, k, elements, tiles)
    if ways is None:
        return None
    left, right = (t.contiguous() for t in (a.reshape(rows, k), b))
    of_left, of_right = _along(a_scales, tiles[0]), _along(b_scales, tiles[1])
    if not _aligned(left, right, of_left, of_right):
        return None
    (left_type, right_type), (left_way, right_way) = (_DTYPES[e] for e in elements), ways
    c = _functional.scaled_mm(
        left.view(left_type), right.view(right_type).mT, of_left, left_way, of_right.mT if tiles[1] == (1, 0) else of_right,
        right_way, output_dtype=out,
    )
    return c if a.dim() == 2 else c.reshape(*a.shape[:-1], n)


_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def _ways(rows: int, n: int, k: int, elements: tuple[str, str], tiles: tuple[Any, Any]) -> Optional[tuple[Any, Any]]:
    if n % ALIGN or k % ALIGN or elements == ("e5m2", "e5m2"):
        return None
    if tiles == ((0, 0), (0, 0)):
        return _WAYS.TensorWise, _WAYS.TensorWise
    if tiles == ((1, 0), (1, 0)):
        return _WAYS.RowWise, _WAYS.RowWise
    if tiles[0] != (1, 128) or elements != ("e4m3", "e4m3") or rows % 4:  # blocks of rows begin at aligned addresses
        return None
    square = {(1, 128): _WAYS.BlockWise1x128, (128, 128): _WAYS.BlockWise128x128}.get(tiles[1])
    return None if square is None else (_WAYS.BlockWise1x128, square)


def _aligned(*tensors: Tensor) -> bool:
    return not any(t.data_ptr() % ALIGN for t in tensors)


def _along(scales: Tensor, tile: tuple[int, int]) -> Tensor:
    """Scales in the library's layout: block by block for row tiles; along K, padded to fours, for square tiles."""
    if tile == (1, 128):
        return scales.mT.contiguous().mT
    if tile != (128, 128):
        return scales.contiguous()
    pad = -scales.shape[1] % SQUARE_ALIGN
    return (torch.nn.functional.pad(scales, (0, pad)) if pad else scales.contiguous()).mT
