"""Samples of attention whose q, k, v and dy are codes, as Llama-3-8B and packed sequences of smaller heads have it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.attention import _two_products
from benchmarks.kernel_call import CODES, KernelCall, Maker
from funcops.library.kernels import scaled_attention
from funcops.library.kernels.quantize import BLOCK


def _signed(make: Maker, *shape: int) -> Tensor:
    """Codes of numbers around 1 and -1."""
    return make.codes(*shape) | (make.ids(*shape, below=2).to(torch.uint8) << 7)


def of_low_attention(make: Maker) -> Iterator[KernelCall]:
    for what, size, window, low, blocks in (("", 128, 0, True, True), ("window packed, p unrounded", 64, 512, False, False)):
        packed, (t, _), kv_heads = window > 0, make.sizes(4096, 16), max(1, 8 // make.shrink)
        batch, heads = 1 if packed else 2, 4 * kv_heads
        shape = f"{batch}x{t}x{heads}x{size} {'blocks' if blocks else 'heads'} {what}".strip()
        dtype = "e4m3", BLOCK if blocks else 0, "pow2", 0.0
        yield KernelCall(scaled_attention.quantize_heads, shape, (make.floats(batch, t, heads, size), *dtype))
        number = -(-t // BLOCK) if blocks else 1
        q, dy, k, v = (
            (_signed(make, batch, n, t, size), make.wide(batch, n, number, 1) * 0.5) for n in (heads, heads, kv_heads, kv_heads)
        )
        ends = torch.tensor([0, t // 4, t], dtype=torch.int32, device=make.device) if packed else None
        flops, score, length = 2.0 * batch * heads * t * t * size, (True, window, size**-0.5), size + t
        given = (*q, *k, *v, ends)
        yield KernelCall(
            scaled_attention.scaled_attention_fwd,
            shape,
            (*given, "e4m3", *score, low, make.dtype),
            product=lambda q, _, k, __, v, *rest: _two_products(*(t.transpose(1, 2).to(make.dtype) for t in (q, k, v))),
            flops=flops,
            length=length,
            bits=CODES,
        )
        yield KernelCall(
            scaled_attention.scaled_attention_bwd,
            shape,
            (*dy, *given, "e4m3", "e4m3", *score, make.dtype),
            product=lambda _, __, q, ___, k, ____, v, *rest: _two_products(*(t.transpose(1, 2).to(make.dtype) for t in (q, k, v))),
            flops=3.5 * flops,
            length=length,
            bits=CODES,
        )
