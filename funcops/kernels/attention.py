"""Attention on torch's own kernels, with logsumexp as a value. q: [B, T, H, D]; k, v: [B, S, K, D]; out: [B, T, H, D].

CPU: aten's flash kernel (any float dtype). CUDA: flash attention for 16-bit, memory-efficient attention for float32.
logsumexp has the layout of the kernel that made it. No [T, S] matrix is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.backend import kernel

_aten = torch.ops.aten
_CPU = _aten._scaled_dot_product_flash_attention_for_cpu.default
_CPU_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@kernel()
def attention_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out = softmax(scale q k^T) v per head, and logsumexp."""
    if q.numel() == 0 or k.numel() == 0:
        lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.promote_types(q.dtype, torch.float32))
        return torch.zeros_like(q), lse
    heads = _rows(q).transpose(1, 2), *(_grouped(t, q.shape[2] if q.is_cuda else t.shape[2]) for t in (k, v))
    if not q.is_cuda:
        out, lse = _CPU(*heads, 0.0, causal, scale=scale)
        return out.transpose(1, 2), lse
    if q.dtype is torch.float32:
        out, lse, _, _ = _aten._scaled_dot_product_efficient_attention.default(
            *heads, None, True, 0.0, causal, scale=scale
        )
        return out.transpose(1, 2), lse
    out, lse, *_ = _aten._scaled_dot_product_flash_attention.default(*heads, 0.0, causal, False, scale=scale)
    return out.transpose(1, 2), lse


@kernel()
def attention_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from out and logsumexp: the probabilities are recomputed."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    heads = _rows(q).transpose(1, 2), *(_grouped(t, q.shape[2] if q.is_cuda else t.shape[2]) for t in (k, v))
    d_y, y = _rows(dy).transpose(1, 2), out.transpose(1, 2)
    if not q.is_cuda:
        grads = _CPU_BACKWARD(d_y, *heads, y, logsumexp, 0.0, causal, scale=scale)
    elif q.dtype is torch.float32:
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        grads = _aten._scaled_dot_product_efficient_attention_backward.default(
            d_y, *heads, None, y, logsumexp, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]
    else:
        state = torch.empty((), dtype=torch.uint64, device=q.device)
        t, s = q.shape[1], k.shape[1]
        grads = _aten._scaled_dot_product_flash_attention_backward.default(
            d_y, *heads, y, logsumexp, None, None, t, s, 0.0, causal, state, state, scale=scale
        )
    dq, dk, dv = (g.transpose(1, 2) for g in grads)
    return dq, _sum_groups(dk, k.shape[2]), _sum_groups(dv, k.shape[2])


def _rows(t: Tensor) -> Tensor:
    """`t` with a last dimension of stride 1: the flash kernels read it so without looking at the stride."""
    return t if t.stride(-1) == 1 else t.contiguous()


def _grouped(t: Tensor, heads: int) -> Tensor:
    """[B, S, K, D] as [B, heads, S, D], each key head repeated for its group of query heads."""
    t = _rows(t).transpose(1, 2)
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _sum_groups(t: Tensor, heads: int) -> Tensor:
    """[B, S, H, D] summed over each group of query heads to [B, S, heads, D]."""
    if t.shape[2] == heads:
        return t
    return t.unflatten(2, (heads, t.shape[2] // heads)).sum(3)
