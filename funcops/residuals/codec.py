"""Fewer bytes for a kept tensor, at an error that is stated: each codec bounds it, and tests hold it to that.

    codec   bytes an element   largest error of an element
    bf16    2                  2^-8 of its size
    fp8     1 (+ 4 a row)      2^-4 of its size, or 2^-10 * 2^-8 of the row's largest where it is that small
    int8    1 (+ 4 a row)      1/254 of the row's largest

fp8 is e4m3 with a float32 scale for each row of the last dimension, which takes the row's largest element to 448.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funcops.errors import require


class Codec(NamedTuple):
    name: str
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[..., Tensor]  # of the parts and the dtype


def _rows(t: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """t over its rows' scales, and the scales [*, 1]. A row of zeros has scale 1; one with an infinity or NaN stays so."""
    wide = t.float()
    amax = wide.abs().amax(-1, keepdim=True) if t.numel() else wide.new_ones((*t.shape[:-1], 1))
    scale = torch.where(amax > 0, amax / largest, torch.ones_like(amax))
    return wide / scale, scale


def _fp8(t: Tensor) -> tuple[Tensor, ...]:
    scaled, scale = _rows(t, 448.0)
    return scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def _int8(t: Tensor) -> tuple[Tensor, ...]:
    scaled, scale = _rows(t, 127.0)
    return scaled.round().to(torch.int8), scale


def _times_scale(parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    return (parts[0].float() * parts[1]).to(dtype)


CODECS = {
    "bf16": Codec("bf16", lambda t: (t.to(torch.bfloat16),), lambda parts, dtype: parts[0].to(dtype)),
    "fp8": Codec("fp8", _fp8, _times_scale),
    "int8": Codec("int8", _int8, _times_scale),
}


def codec(where: str, name: str) -> Codec:
    require(name in CODECS, where, "codec", f"one of {', '.join(CODECS)}", repr(name))
    return CODECS[name]


def smaller(name: str, t: Tensor) -> bool:
    """Whether the codec makes the tensor smaller: never an integer one, one of no dimension, or bf16 of 16 bits."""
    return t.is_floating_point() and t.dim() > 0 and t.element_size() > (2 if name == "bf16" else 1)
