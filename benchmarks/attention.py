"""Samples of attention that none of torch's kernels supports in every dtype, with options as models combine them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_call import KernelCall, Maker
from funcops.kernels import scored_attention


def of_attention(make: Maker) -> Iterator[KernelCall]:
    score = scored_attention.Score(causal=True, window=0, softcap=0.0, alibi=False, scale=0.0)
    for what, size, value, chosen, extra in (
        ("softcap", 128, 128, score._replace(softcap=50.0), ""),
        ("softcap alibi window packed", 192, 256, score._replace(softcap=50.0, alibi=True, window=1024), "packed"),
        ("bias", 64, 64, score._replace(causal=False), "bias"),
    ):
        chosen = chosen._replace(scale=size**-0.5)
        batch, (t, _), kv_heads = 1 if extra == "packed" else 2, make.sizes(2048, 16), max(1, 16 // make.shrink)
        heads, shape = 2 * kv_heads, f"{batch}x{t}x{2 * kv_heads}x{size} {what}"
        (q, dy), (k, v) = ([make.floats(batch, t, n, d) for d in (size, value)] for n in (heads, kv_heads))
        bias = make.floats(1, heads, t, t) if extra == "bias" else None
        ends = torch.tensor([0, t // 4, t], dtype=torch.int32, device=make.device) if extra == "packed" else None
        out, lse = make.floats(batch, t, heads, value), make.wide(batch, heads, t) + math.log(t)
        flops = 2.0 * batch * heads * t * t * (size + value) * (0.5 if chosen.causal else 1.0)
        args, length = (q, k, v, bias, ends, *chosen), size + t  # the terms of a score, then of a row
        yield KernelCall(scored_attention.scored_attention_fwd, shape, args, product=_two_products, flops=flops, length=length)
        yield KernelCall(
            scored_attention.scored_attention_bwd,
            shape,
            (dy, q, k, v, bias, ends, out, lse, *chosen, bias is not None),
            product=lambda _, *qkv: _two_products(*qkv),
            flops=2.5 * flops,
            length=length,
        )


def _two_products(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Callable[[], Any]:
    """The products q k^T and p v, with all scores."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return lambda: (q @ k.mT) @ v
