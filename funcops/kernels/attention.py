"""Attention on torch's own kernels, with logsumexp as a value. q: [B, T, H, D]; k, v: [B, S, K, D]; out: [B, T, H, D].

CPU: aten's flash kernel (any float dtype). CUDA: flash attention for 16-bit, memory-efficient attention for float32.
logsumexp has the layout of the kernel that made it. No [T, S] matrix is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.backend import kernel

_aten = torch.ops.aten
_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@kernel(library=True)
def attention_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out = softmax(scale q k^T) v per head, and logsumexp."""
    if q.numel() == 0 or k.numel() == 0:
        lse = q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.promote_types(q.dtype, torch.float32))
        return torch.zeros_like(q), lse
    if q.is_cuda:
        out, lse = _cuda_fwd(_heads(q), _repeated(k, q.shape[2]), _repeated(v, q.shape[2]), causal, scale)
    else:
        out, lse = torch._scaled_dot_product_flash_attention_for_cpu(_heads(q), _heads(k), _heads(v), 0.0, causal, scale=scale)
    return out.transpose(1, 2), lse


@kernel(library=True)
def attention_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv from out and logsumexp: the probabilities are recomputed."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_y, y = _heads(dy), _heads(out)
    if not q.is_cuda:
        dq, dk, dv = _cpu_backward(d_y, _heads(q), _heads(k), _heads(v), y, logsumexp, 0.0, causal, scale=scale)
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    heads = _heads(q), _repeated(k, q.shape[2]), _repeated(v, q.shape[2])
    dq, dk, dv = (g.transpose(1, 2) for g in _cuda_bwd(d_y, *heads, y, logsumexp, causal, scale))
    return dq, _sum_groups(dk, k.shape[2]), _sum_groups(dv, k.shape[2])


def _cuda_fwd(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.dtype is torch.float32:
        return _aten._scaled_dot_product_efficient_attention.default(q, k, v, None, True, 0.0, causal, scale=scale)[:2]
    return _aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _cuda_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, logsumexp: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.dtype is torch.float32:
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        return _aten._scaled_dot_product_efficient_attention_backward.default(
            dy, q, k, v, None, y, logsumexp, seed, seed, 0.0, [True, True, True, False], causal, scale=scale
        )[:3]
    state = torch.empty((), dtype=torch.uint64, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward.default(
        dy, q, k, v, y, logsumexp, None, None, q.shape[2], k.shape[2], 0.0, causal, state, state, scale=scale
    )


def _heads(t: Tensor) -> Tensor:
    """[B, T, H, D] as [B, H, T, D] with a last dimension of stride 1: the flash kernels read it so without looking."""
    return (t if t.stride()[-1] == 1 else t.contiguous()).transpose(1, 2)


def _repeated(t: Tensor, heads: int) -> Tensor:
    """[B, S, K, D] as [B, heads, S, D], each key head repeated for its group of query heads."""
    t = _heads(t)
    return t if t.shape[1] == heads else t.repeat_interleave(heads // t.shape[1], 1)


def _sum_groups(t: Tensor, heads: int) -> Tensor:
    """[B, S, H, D] summed over each group of query heads to [B, S, heads, D]."""
    if t.shape[2] == heads:
        return t
    return t.unflatten(2, (heads, t.shape[2] // heads)).sum(3)
