"""Calls of torch's CUDA attention, and its own rules for them."""

import random

import torch
from torch._subclasses.fake_tensor import FakeTensor

from funcops.testing.laws import LAYOUTS

HALVES = (torch.float16, torch.bfloat16)


def refused(kernel, q, k, v, *others):
    """Why torch's kernel would not take these arguments, or would read them wrongly (mha_fwd, mha_bwd; check_supported of
    PyTorchMemEffAttention, with the alignment of its float32 and its aligned 16-bit kernels), or None."""
    if q.dtype not in (HALVES if kernel == "flash" else (*HALVES, torch.float32)):
        return f"{q.dtype}"
    step = 16 // q.itemsize
    if q.shape[-1] % step or (kernel == "flash" and q.shape[-1] > 256):
        return f"head size {q.shape[-1]}"
    if k.shape[1] != q.shape[1] and (kernel == "efficient" or q.shape[1] % k.shape[1]):
        return "heads"
    for t in (q, k, v, *others):
        start = t.storage_offset() * t.itemsize if isinstance(t, FakeTensor) else t.data_ptr()
        outer = zip(t.shape[:-1], t.stride()[:-1], strict=True)
        if t.stride(-1) != 1 or start % 16 or any(s % step for _, s in outer):
            return f"strides {t.stride()} from {start}"
    return None


def on_cuda(t):
    """A fake CUDA tensor with the strides and offset of this one."""
    room = torch.empty(t.untyped_storage().size() // t.itemsize, dtype=t.dtype, device="cuda")
    return room.as_strided(t.shape, t.stride(), t.storage_offset())


def made(make, dtype, b, t, heads, kv_heads, size, layout):
    """q, k, v: separate tensors with some layout, or the parts of one tensor as a projection returns them."""
    if layout == "packed":
        parts = make(b, t, (heads + 2 * kv_heads) * size).to(dtype).split([n * size for n in (heads, kv_heads, kv_heads)], -1)
        return [part.unflatten(-1, (-1, size)) for part in parts]
    return [LAYOUTS.get(layout, lambda t: t)(make(b, t, n, size).to(dtype)) for n in (heads, kv_heads, kv_heads)]


def drawn(seed, n):
    """Sizes, a layout and whether rows see all keys, of n calls."""
    draw = random.Random(seed)
    for _ in range(n):
        kv_heads = draw.choice((1, 2, 3))
        heads, t = kv_heads * draw.choice((1, 2, 4)), draw.choice((1, 5, 33))
        size = draw.choice((draw.randint(1, 320), 8 * draw.randint(1, 40), 64, 128, 256, 264))
        layout = draw.choice(["contiguous", "packed", *LAYOUTS])
        yield draw.randint(1, 2), t, heads, kv_heads, size, layout, draw.random() < 0.5
