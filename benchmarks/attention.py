"""Samples of attention with options that not all of torch's kernels take, as models combine them, of attention over caches, and of
plain attention, which is the library's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernel_call import KernelCall, Maker, Prepared, direct, gradient
from benchmarks.measure import BenchError
from funcops.library.kernels import attention, cudnn_attention, scored_attention, slot_attention


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


def of_library_attention(make: Maker) -> Iterator[KernelCall]:
    """Causal attention of `bench step`, of Llama-3-8B at 4,096 tokens, and of heads of 64: ours, ours by cuDNN ("funcops_cudnn"),
    torch's by its own choice ("torch"), and torch's by each of its kernels ("flash", "cudnn")."""
    for batch, length, heads, kv_heads, size in ((16, 1024, 12, 4, 128), (2, 4096, 32, 8, 128), (8, 2048, 16, 16, 64)):
        (length, _), kv_heads = make.sizes(length, 16), max(1, kv_heads // make.shrink)
        heads = kv_heads * (heads // kv_heads) if make.shrink == 1 else 2 * kv_heads
        (q, dy, out), (k, v) = ([make.floats(batch, length, n, size) for _ in range(m)] for n, m in ((heads, 3), (kv_heads, 2)))
        lse, scale = make.wide(batch, heads, length) + math.log(length), size**-0.5
        shape, flops = f"{batch}x{length}x{heads}x{size} of {kv_heads}", 2.0 * batch * heads * length * length * size
        ways = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        for kernel, args, prepared, cost in (
            (attention.attention_fwd, (q, k, v), _forward_by, flops),
            (attention.attention_bwd, (dy, q, k, v, out, lse), _backward_by, 2.5 * flops),
        ):
            others = *((name, prepared(way)) for name, way in ways.items()), ("funcops_cudnn", _ours_by_cudnn(kernel))
            call, terms = (*args, True, scale), size + length
            yield KernelCall(kernel, shape, call, torch=prepared(None), flops=cost, length=terms, others=others)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _by(way: SDPBackend | None) -> Any:
    return contextlib.nullcontext() if way is None else sdpa_kernel(way)


def _forward_by(way: SDPBackend | None) -> Prepared:
    def prepare(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Callable[[], Any]:
        def call() -> Tensor:
            with _by(way):
                return _causal(q, k, v)

        return call

    return prepare


def _backward_by(way: SDPBackend | None) -> Prepared:
    def prepare(dy: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Callable[[], Any]:
        with _by(way):
            return gradient(_causal, wrt=3)(dy, q, k, v)

    return prepare


def _ours_by_cudnn(kernel: Any) -> Prepared:
    """Raises `BenchError` where flash attention would compute the call."""

    def prepare(*args: Any) -> Callable[[], Any]:
        first = int(kernel is attention.attention_bwd)  # after dy
        heads, causal = [t.transpose(1, 2) for t in args[first : first + 3]], args[-2]

        def call() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                if not cudnn_attention.cudnn_serves(*heads, causal):
                    raise BenchError("torch's chooser does not take cuDNN for this call")
                return kernel(*args)

        return call

    return prepare


def of_caches(make: Maker) -> Iterator[KernelCall]:
    """A token of Llama-3-8B with one long sequence and with many, of gpt-oss over a ring, of DeepSeek-V3 over latents, and a prompt
    of Llama-3-8B in chunks; and both with every option. All slots are filled."""
    for what, batch, tokens, heads, kv_heads, size, width, filled in (
        ("llama", 1, 1, 32, 8, 128, 128, 8192),
        ("llama", 32, 1, 32, 8, 128, 128, 4096),
        ("ring", 32, 1, 64, 8, 64, 64, 768),
        ("latents", 8, 1, 128, 1, 576, 512, 4096),
        ("every option", 8, 1, 32, 8, 128, 128, 1023),
        ("llama", 2, 256, 32, 8, 128, 128, 4096),
        ("every option", 2, 64, 16, 8, 64, 64, 1023),
    ):
        ring, every = what in ("ring", "every option"), what == "every option"
        slots, batch = max(tokens, filled // make.shrink), max(1, batch // make.shrink)
        kv_heads, heads = max(1, kv_heads // make.shrink), max(1, kv_heads // make.shrink) * (heads // kv_heads)
        q, k = make.floats(batch, tokens, heads, size), make.floats(batch, kv_heads, slots, size)
        v = None if what == "latents" else make.floats(batch, kv_heads, slots, width)
        ends = torch.full((batch,), 3 * slots if ring else slots, dtype=torch.int64, device=make.device)
        window, sinks = (slots // 3, make.floats(heads)) if ring else (0, None)
        bias = make.floats(1, heads, tokens, 3 * slots) if every else None
        args = q, k, v, ends - tokens, ends, bias, sinks, width, window, slots // 2 * every, 30.0 * every, every, size**-0.5
        shape = f"{what} {batch}x{tokens}x{heads}x{size} of {slots}x{kv_heads}"
        if tokens == 1:
            yield KernelCall(
                slot_attention.slot_attention_fwd, shape, args, None if every else direct(_of_filled), length=size + slots
            )
        else:
            flops = 2.0 * batch * heads * tokens * slots * (size + width)
            product, length = lambda q, k, v, *_: _two_products(q, k.transpose(1, 2), v.transpose(1, 2)), size + slots
            yield KernelCall(slot_attention.slot_attention_fwd, shape, args, product=product, flops=flops, length=length)


def _of_filled(q: Tensor, k: Tensor, v: Tensor | None, *rest: Any) -> Tensor:
    """Torch's attention to all slots: of a ring it sees more."""
    v = k[..., : rest[4]] if v is None else v
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, scale=rest[-1], enable_gqa=True).transpose(1, 2)


def _two_products(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Callable[[], Any]:
    """The products q k^T and p v, with all scores."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return lambda: (q @ k.mT) @ v
