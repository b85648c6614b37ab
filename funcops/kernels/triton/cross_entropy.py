"""Cross entropy: a program a row. Forward one read of the logits (online softmax), backward one read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import cross_entropy as declared
from funcops.kernels.triton.common import block_of, load_wide, store_rounded, warps_of

BLOCK = 4096


@triton.jit
def _forward(
    logits_ptr, labels_ptr, losses_ptr, lse_ptr, vocab, ignore_index, smoothing: tl.float32, z_loss: tl.float32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    label = tl.load(labels_ptr + row)
    highest, weights, total = -float("inf"), 0.0, 0.0
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        t = load_wide(logits_ptr + i, i < vocab)
        total += tl.sum(t, 0)
        t = tl.where(i < vocab, t, -float("inf"))
        higher = tl.maximum(highest, tl.max(t, 0))
        shift = tl.where(higher == -float("inf"), 0.0, higher)  # a row of -inf: its sum is 0, not NaN
        weights = weights * tl.exp(highest - shift) + tl.sum(tl.exp(t - shift), 0)
        highest = higher
    lse = tl.where(highest == -float("inf"), highest, highest + tl.log(weights))
    inside = (label >= 0) & (label < vocab)
    picked = load_wide(logits_ptr + label, inside)
    loss = lse - picked + smoothing * (picked - total / vocab) + z_loss * lse * lse
    loss = tl.where(inside, loss, float("nan"))  # a label that is neither a class nor ignored
    tl.store(losses_ptr + row, tl.where(label == ignore_index, 0.0, loss))
    tl.store(lse_ptr + row, lse)


@triton.jit
def _backward(
    dloss_ptr, dloss_step, logits_ptr, labels_ptr, lse_ptr, dlogits_ptr, vocab, ignore_index, smoothing: tl.float32,
    z_loss: tl.float32, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    dlogits_ptr += row * vocab
    label, lse = tl.load(labels_ptr + row), tl.load(lse_ptr + row)
    d = tl.where(label == ignore_index, 0.0, tl.load(dloss_ptr + row * dloss_step).to(tl.float32))
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        p = tl.exp(load_wide(logits_ptr + i, i < vocab) - lse)
        target = tl.where(i == label, 1.0 - smoothing, 0.0) + smoothing / vocab
        store_rounded(dlogits_ptr + i, d * ((1.0 + 2.0 * z_loss * lse) * p - target), i < vocab)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)


@declared.cross_entropy_fwd.triton
def cross_entropy_fwd(
    logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor]:
    logits, labels = logits.contiguous(), labels.contiguous()
    rows, vocab = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    lse = torch.empty_like(losses)
    if rows:
        block = block_of(vocab, BLOCK)
        _launch_forward(
            rows, 1, 1, logits, labels, losses, lse, vocab, ignore_index, smoothing, z_loss, block, num_warps=warps_of(block)
        )  # fmt: skip
    return losses, lse


@declared.cross_entropy_bwd.triton
def cross_entropy_bwd(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> Tensor:
    logits, labels, dloss, logsumexp = logits.contiguous(), labels.contiguous(), dloss.contiguous(), logsumexp.contiguous()
    rows, vocab = logits.shape
    dlogits = torch.empty_like(logits)
    if rows:
        block = block_of(vocab, BLOCK)
        _launch_backward(
            rows, 1, 1, dloss, int(dloss.dim() > 0), logits, labels, logsumexp, dlogits, vocab, ignore_index, smoothing,
            z_loss, block, num_warps=warps_of(block),
        )  # fmt: skip
    return dlogits
