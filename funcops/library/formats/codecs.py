"""The codecs of policies that keep scales, as int8 and e4m3 in blocks: `funcops.engine.residuals.codec` states their errors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from funcops.engine.residuals.codec import CODECS, Codec, Parts
from funcops.engine.residuals.policy import POLICIES, compressed
from funcops.library.kernels import quantize as kernels


def _blocks(width: int) -> tuple[Callable[[Tensor], Parts], Callable[[Parts, torch.dtype], Tensor]]:
    """e4m3 with a one-byte scale for each block of `width` elements of a row."""
    form = ("e4m3", 1, width, "e8m0")

    def encode(t: Tensor) -> Parts:
        # of float16 no number may round up to 2^16, which is infinite there: the next one below on e4m3's grid is 240 2^8
        return kernels.quantize_row(
            torch.where(t.isinf(), t, t.clamp(-61440.0, 61440.0)) if t.dtype is torch.float16 else t, *form, None, None
        )

    def decode(parts: Parts, dtype: torch.dtype) -> Tensor:
        codes, scales = parts
        return kernels.dequantize(codes, scales, None, *form, codes.shape[-1], dtype)  # type: ignore[no-any-return]

    return encode, decode


def _int8(t: Tensor) -> Parts:
    wide = t.float()
    # `amax` refuses rows without elements
    amax = wide.abs().amax(-1, keepdim=True) if t.numel() else wide.new_ones((*t.shape[:-1], 1))
    scale = (amax / 127.0).clamp(min=2.0**-149)  # NaN for a row with a NaN, so that its codes decode to NaN
    return (wide / scale).round().clamp(-127, 127).to(torch.int8), scale  # beyond 127 where a small scale was rounded down


CODECS["int8"] = Codec("int8", _int8, lambda parts, dtype: (parts[0].float() * parts[1]).to(dtype))
CODECS |= {name: Codec(name, *_blocks(width), block=width) for name, width in (("fp8", 128), ("mxfp8", 32))}
POLICIES |= {f"compress_{name}": compressed(name) for name in ("int8", "fp8")}
