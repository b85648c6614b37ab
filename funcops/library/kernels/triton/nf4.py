"""NF4 to numbers: a program reads 1,024 bytes of a row with their absmaxes and writes 2,048 elements. Levels are read from a table
of one cache line: to choose each among constants would take 15 instructions, more than the memory leaves time for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import nf4 as declared
from funcops.library.kernels.tables import Tables
from funcops.library.kernels.triton.common import cdiv, store_rounded

BLOCK = 2048
GROUP = tl.constexpr(declared.BLOCK)
_levels = Tables(16)


@triton.jit
def _decode(codes_ptr, absmax_ptr, levels_ptr, y_ptr, chunks, width, BLOCK: tl.constexpr):
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    i = chunk * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
    packed = tl.load(codes_ptr + row * tl.cdiv(width, 2) + i, mask=2 * i < width, other=0).to(tl.int32)
    pairs = tl.join(tl.load(levels_ptr + (packed >> 4)), tl.load(levels_ptr + (packed & 15)))
    j = chunk * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    blocks = tl.cdiv(width, GROUP)
    absmax = tl.load(absmax_ptr + row * blocks + j, mask=j < blocks, other=0.0)
    k = j[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    y = tl.reshape(pairs, [BLOCK // GROUP, GROUP]) * absmax[:, None]
    store_rounded(y_ptr + row * width + k, y, k < width)


_launch = launcher(_decode)


def _made() -> tuple[tuple[Tensor, ...], None]:
    return (torch.tensor(declared.LEVELS, device="cpu"),), None


@declared.nf4_dequantize.triton
def nf4_dequantize(codes: Tensor, absmax: Tensor, width: int, out: torch.dtype) -> Tensor:
    if codes.numel() == 0 or out is torch.float64:
        return declared.nf4_dequantize.kernel.torch_impl(codes, absmax, width, out)  # type: ignore[no-any-return]
    ((levels,), _, _) = _levels.get(codes.device, (), _made)
    y, chunks = codes.new_empty((*codes.shape[:-1], width), dtype=out), cdiv(width, BLOCK)
    programs = codes.shape[:-1].numel() * chunks
    _launch(programs, 1, 1, codes.contiguous(), absmax.contiguous(), levels, y, chunks, width, BLOCK)
    return y
