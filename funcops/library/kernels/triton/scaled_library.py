"""Products of codes by CUDA's library (cuBLASLt, through `torch.nn.functional.scaled_mm`), whose sums are promoted to float32 every
128 along K, as ours are.

`scaled_ways.py` says on which device it has which way, `scaled_layouts.py` how it reads their scales.
"""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from funcops.library.kernels.triton.scaled_layouts import as_read
from funcops.library.kernels.triton.scaled_ways import SMALL, way_of

_functional: Any = torch.nn.functional
_WAYS: Any = getattr(_functional, "ScalingType", None)
_SWIZZLES: Any = getattr(_functional, "SwizzleType", None)
ALIGN = 16  # addresses and rows of codes are multiples of so many bytes


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
    of_left, of_right = as_read(a_scales, tiles[0], kind, rows), as_read(b_scales, tiles[1], kind, n)
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


def _ways(way: str, tiles: tuple[Any, Any]) -> tuple[Any, Any]:
    if way == "block":
        return tuple([_WAYS.BlockWise1x128 if tile == (1, 128) else _WAYS.BlockWise128x128 for tile in tiles])  # type: ignore[return-value]
    names = {"tensor": "TensorWise", "row": "RowWise", "mx": "BlockWise1x32", "nvfp4": "BlockWise1x16"}
    return (getattr(_WAYS, names[way]),) * 2


def _aligned(*tensors: Tensor) -> bool:
    return not any(t.data_ptr() % ALIGN for t in tensors)
