"""NF4 to numbers: a program reads 512 bytes of a row and their absmaxes, and writes 1,024 elements. The levels are constants, among
which the bits of a code choose, so that no table is read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import nf4 as declared
from funcops.kernels.triton.common import cdiv, store_rounded

BLOCK = 1024
LEVELS = tl.constexpr(declared.LEVELS)
GROUP = tl.constexpr(declared.BLOCK)


@triton.jit
def _choose(code, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """LEVELS[FIRST + code % COUNT], by halves."""
    if COUNT == 1:
        return tl.full(code.shape, LEVELS[FIRST], tl.float32)
    else:
        HALF: tl.constexpr = COUNT // 2
        return tl.where((code & HALF) != 0, _choose(code, FIRST + HALF, HALF), _choose(code, FIRST, HALF))


@triton.jit
def _decode(codes_ptr, absmax_ptr, y_ptr, chunks, width, BLOCK: tl.constexpr):
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    i = chunk * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    packed = tl.load(codes_ptr + row * tl.cdiv(width, 2) + i, mask=2 * i < width, other=0).to(tl.int32)
    pairs = tl.reshape(tl.join(_choose(packed >> 4, 0, 16), _choose(packed & 15, 0, 16)), [BLOCK // GROUP, GROUP])
    j = chunk * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    blocks = tl.cdiv(width, GROUP)
    absmax = tl.load(absmax_ptr + row * blocks + j, mask=j < blocks, other=0.0)
    k = j[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    store_rounded(y_ptr + row * width + k, pairs * absmax[:, None], k < width)


_launch = launcher(_decode)


@declared.nf4_dequantize.triton
def nf4_dequantize(codes: Tensor, absmax: Tensor, width: int, out: torch.dtype) -> Tensor:
    if codes.numel() == 0 or out is torch.float64:
        return declared.nf4_dequantize.kernel.torch_impl(codes, absmax, width, out)  # type: ignore[no-any-return]
    y, chunks = codes.new_empty((*codes.shape[:-1], width), dtype=out), cdiv(width, BLOCK)
    _launch(codes.shape[:-1].numel() * chunks, 1, 1, codes.contiguous(), absmax.contiguous(), y, chunks, width, BLOCK)
    return y
