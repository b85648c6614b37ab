"""Codecs that keep a tensor in fewer bytes, with a bounded error that the tests check.

    codec   bytes per element     largest error of an element
    bf16    2                     2^-8 of its size
    fp8     1 (+ 1 per 128)       2^-4 of its size or 2^-17 of its block's largest element, whichever is more
    mxfp8   1 (+ 1 per 32)        the same, with a smaller block
    int8    1 (+ 4 per row)       1/254 of the row's largest element

fp8 and mxfp8 are e4m3 in blocks of 128 and of 32 along the last dimension (the last block of a row may be shorter). A block's scale
is one byte, the smallest power of two that clips nothing: see `library.kernels.quantize`. An outlier costs precision only in its
own block. A NaN stays NaN; an infinity stays infinite, and the rest of its block becomes 0. In blocks whose largest element is
below 2^-118, errors are at most 2^-137. An element above 2^128 (1 - 2^-5), which float32 nearly lacks, becomes infinite.

In int8 a row with an infinity or a NaN becomes NaN. In rows whose largest element is below 2^-135, errors are at most 2^-143.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funcops.engine.errors import one_of, require

__all__ = ["CODECS", "Codec", "Parts"]

Parts = tuple[Tensor, ...]


class Codec(NamedTuple):
    """`encode(t)` gives the tensors that are kept, `decode(parts, dtype)` the tensor again. `block`: the number of elements of a
    row that share a scale of one byte, if kernels can read its parts as they are; else 0."""

    name: str
    encode: Callable[[Tensor], Parts]
    decode: Callable[[Parts, torch.dtype], Tensor]
    block: int = 0


# those with scales are registered by `funcops.library.formats.codecs`
CODECS = {"bf16": Codec("bf16", lambda t: (t.to(torch.bfloat16),), lambda parts, dtype: parts[0].to(dtype))}


def codec(where: str, name: str) -> Codec:
    require(name in CODECS, where, "codec", one_of(CODECS, name), repr(name))
    return CODECS[name]


def smaller(name: str, t: Tensor) -> bool:
    """Whether the codec makes the tensor smaller: never an integer or 0-d tensor, nor 16 bits by bf16."""
    return t.is_floating_point() and t.dim() > 0 and t.element_size() > (2 if name == "bf16" else 1)
