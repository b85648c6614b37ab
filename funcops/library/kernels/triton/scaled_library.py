"""Products of codes by CUDA's library (cuBLASLt, through `torch.nn.functional.scaled_mm`), whose sums are promoted to float32 every
128 along K, as ours are.

A way is how scales lie: one a tensor ("tensor"), one a row ("row"), blocks of 128 ("block"), or MX's and NVFP4's small blocks,
which the library reads in an order of its own (`swizzled`). Which device has which way is data. What no device has confirmed is
taken by request, gemm("cublas"), or where our own kernels do not run.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

import torch
from torch import Tensor

from funcops.library.kernels.scaled_mm import SERVED

_functional: Any = torch.nn.functional
_WAYS: Any = getattr(_functional, "ScalingType", None)
_SWIZZLES: Any = getattr(_functional, "SwizzleType", None)
# the capabilities of the devices on which torch multiplies so: by rows it has none for 12.0, for 8.9 one of bfloat16 results
DEVICES = {
    "tensor": (89, 90, 100, 103, 120, 121),
    "row": (90, 100, 103),
    "block": (90,),
    "mx": (100, 103, 120, 121),
    "nvfp4": (100, 103, 120, 121),
}
CONFIRMED = {"tensor": (90,), "row": (90,), "block": (90,)}  # of these, the ones that were measured (`docs/benchmarks`)
ALIGN = 16  # addresses and rows of codes are multiples of so many bytes
SQUARE_ALIGN = 4  # scales of square blocks are padded to a multiple of it
SMALL = {"e8m0": ("mx", 32), "e4m3": ("nvfp4", 16)}  # by the kind of scales: the way, and the elements that share one


@functools.lru_cache(maxsize=256)
def way_of(kind: str, elements: tuple[str, str], tiles: tuple[Any, Any]) -> Optional[str]:
    """How the library multiplies such operands on some device; None if it does on none."""
    if elements == ("e5m2", "e5m2"):
        return None
    if kind in SMALL:
        way, size = SMALL[kind]
        fits = all([tile in ((1, size), (size, size)) for tile in tiles])
        return way if fits and all([(element == "e2m1") is (way == "nvfp4") for element in elements]) else None
    if tiles[0] == tiles[1] and tiles[0] in ((0, 0), (1, 0)):
        return "row" if tiles[0][0] else "tensor"
    blocks = tiles[0] == (1, 128) and tiles[1] in ((1, 128), (128, 128)) and elements == ("e4m3", "e4m3")
    return "block" if blocks else None


def serves(way: Optional[str], capability: int, wanted: bool) -> bool:
    """Whether the library takes products of a way on a device: where one was measured, or, if `wanted`, wherever it runs."""
    devices = DEVICES if wanted else CONFIRMED
    return SERVED and way is not None and capability in devices.get(way, ())


def product(
    a: Tensor, a_scales: Tensor, b: Tensor, b_scales: Tensor, elements: tuple[str, str], tiles: tuple[Any, Any], out: torch.dtype,
    kind: str = "float32", whole: tuple[Optional[Tensor], Optional[Tensor]] = (None, None), pads: bool = False,
) -> Optional[Tensor]:
    """The product [*, N] of codes a [*, K] and b [N, K] with their scales, and float32 scales [1] of whole tensors; None if the
    library does not take it. `pads`: sizes that it does not take are filled up with zeros, which change no sum."""
    way = way_of(kind, elements, tiles)
    k, n = a.shape[-1], b.shape[0]
    rows = a.numel() // k
    if way is None or (way == "block" and rows % 4):  # blocks of rows begin at aligned addresses
        return None
    if pads and way == "tensor" and (n % ALIGN or k % ALIGN):
        along, down = -k % ALIGN, -n % ALIGN
        left, right = torch.nn.functional.pad(a, (0, along)), torch.nn.functional.pad(b, (0, along, 0, down))
        c = product(left, a_scales, right, b_scales, elements, tiles, out, kind, whole, pads)
        return c if c is None else c[..., :n].contiguous()
    if n % ALIGN or k % (32 if way == "mx" else ALIGN):
        return None
    left, right = (t.contiguous() for t in (a.reshape(rows, k), b))
    of_left, of_right = _along(a_scales, tiles[0], kind, rows), _along(b_scales, tiles[1], kind, n)
    if pads:
        left, right, of_left, of_right = (t if _aligned(t) else t.clone() for t in (left, right, of_left, of_right))
    if not _aligned(left, right, of_left, of_right):
        return None
    (left_type, right_type), (left_way, right_way) = (_DTYPES[e] for e in elements), _ways(way, tiles)
    of_right = of_right.mT if way == "row" else of_right
    how = left.view(left_type), right.view(right_type).mT
    if kind not in SMALL:
        c = _functional.scaled_mm(*how, of_left, left_way, of_right, right_way, output_dtype=out)
    else:
        c = _by_small_blocks(how, (of_left, of_right), (left_way, right_way), whole, out)
    return c if a.dim() == 2 else c.reshape(*a.shape[:-1], n)


def _by_small_blocks(
    how: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], ways: tuple[Any, Any],
    whole: tuple[Optional[Tensor], Optional[Tensor]], out: torch.dtype,
) -> Tensor:
    """With the scales of both sides swizzled, and, where the operands have them, of whole tensors."""
    given: list[Any] = []
    for of_blocks, way, of_all in zip(scales, ways, whole, strict=True):
        also = of_all is not None
        given += [[of_blocks, *([of_all] if also else [])], [way, *([_WAYS.TensorWise] if also else [])]]
    orders = [[_SWIZZLES.SWIZZLE_32_4_4, *([_SWIZZLES.NO_SWIZZLE] if one is not None else [])] for one in whole]
    c: Tensor = _functional.scaled_mm(*how, *given, *orders, output_dtype=out)
    return c


_DTYPES: dict[str, Any] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": getattr(torch, "float4_e2m1fn_x2", None)}
_OF_SCALES: dict[str, Any] = {"e8m0": getattr(torch, "float8_e8m0fnu", None), "e4m3": torch.float8_e4m3fn}


def _ways(way: str, tiles: tuple[Any, Any]) -> tuple[Any, Any]:
    if way == "block":
        return tuple([_WAYS.BlockWise1x128 if tile == (1, 128) else _WAYS.BlockWise128x128 for tile in tiles])  # type: ignore[return-value]
    names = {"tensor": "TensorWise", "row": "RowWise", "mx": "BlockWise1x32", "nvfp4": "BlockWise1x16"}
    return (getattr(_WAYS, names[way]),) * 2


def _aligned(*tensors: Tensor) -> bool:
    return not any(t.data_ptr() % ALIGN for t in tensors)


def _along(scales: Tensor, tile: tuple[int, int], kind: str = "float32", rows: int = 0) -> Tensor:
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
