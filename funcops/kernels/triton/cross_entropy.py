"""Cross entropy: a program a row. Forward one read of the logits, an online softmax in every lane; backward one read and one
write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import cross_entropy as declared
from funcops.kernels.triton.common import block_of, load_wide, store_rounded, warps_of

BLOCK = 4096
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _forward(
    logits_ptr, labels_ptr, losses_ptr, lse_ptr, vocab, ignore_index, smoothing: tl.float32, z_loss: tl.float32,
    SMOOTHED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    label = tl.load(labels_ptr + row)
    # finite, so that a row of -inf sums to 0 and not to NaN
    highest = tl.full([BLOCK], LOWEST, tl.float32)
    weights, total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        t = load_wide(logits_ptr + i, i < vocab)
        if SMOOTHED:
            total += t
        t = tl.where(i < vocab, t, -float("inf"))
        # one exponential an element: of the two weights that meet, the higher is 1
        lower = tl.exp(-tl.abs(t - highest))
        weights = tl.where(t > highest, weights * lower + 1.0, weights + lower)
        highest = tl.maximum(highest, t)
    top = tl.max(highest, 0)
    lse = top + tl.log(tl.sum(weights * tl.exp(highest - top), 0))
    inside = (label >= 0) & (label < vocab)
    picked = load_wide(logits_ptr + label, inside)
    loss = lse - picked + z_loss * lse * lse
    if SMOOTHED:
        loss += smoothing * (picked - tl.sum(total, 0) / vocab)
    loss = tl.where(inside, loss, float("nan"))  # a label that is neither a class nor ignored
    tl.store(losses_ptr + row, tl.where(label == ignore_index, 0.0, loss))
    tl.store(lse_ptr + row, lse)


@triton.jit
def _backward(
    dloss_ptr, dloss_step, logits_ptr, labels_ptr, lse_ptr, dlogits_ptr, classes, first, vocab, ignore_index,
    smoothing: tl.float32, z_loss: tl.float32, BLOCK: tl.constexpr,
):  # fmt: skip
    """dlogits may be logits: they are the classes from `first` among `vocab`."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * classes
    dlogits_ptr += row * classes
    label, lse = tl.load(labels_ptr + row), tl.load(lse_ptr + row)
    d = tl.where(label == ignore_index, 0.0, tl.load(dloss_ptr + row * dloss_step).to(tl.float32))
    for start in range(0, classes, BLOCK):
        i = start + tl.arange(0, BLOCK)
        p = tl.exp(load_wide(logits_ptr + i, i < classes) - lse)
        target = tl.where(first + i == label, 1.0 - smoothing, 0.0) + smoothing / vocab
        store_rounded(dlogits_ptr + i, d * ((1.0 + 2.0 * z_loss * lse) * p - target), i < classes)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)


@declared.cross_entropy_fwd.triton
def cross_entropy_fwd(logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
    logits, labels = logits.contiguous(), labels.contiguous()
    rows, vocab = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    lse = torch.empty_like(losses)
    if rows:
        block = block_of(vocab, BLOCK)
        _launch_forward(
            rows, 1, 1, logits, labels, losses, lse, vocab, ignore_index, smoothing, z_loss, smoothing != 0.0, block,
            num_warps=warps_of(block),
        )  # fmt: skip
    return losses, lse


@declared.cross_entropy_bwd.triton
def cross_entropy_bwd(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> Tensor:
    logits = logits.contiguous()
    dlogits = torch.empty_like(logits)
    _gradient(dloss, logits, labels, logsumexp, dlogits, smoothing, ignore_index, z_loss, 0, logits.shape[1])
    return dlogits


@declared.cross_entropy_bwd_owned.triton
def cross_entropy_bwd_owned(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float,
    first: int, vocab: int,
) -> None:  # fmt: skip
    _gradient(dloss, logits, labels, logsumexp, logits, smoothing, ignore_index, z_loss, first, vocab)


def _gradient(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, dlogits: Tensor, smoothing: float, ignore_index: int,
    z_loss: float, first: int, vocab: int,
) -> None:  # fmt: skip
    rows, classes = logits.shape
    if rows and classes:
        block = block_of(classes, BLOCK)
        _launch_backward(
            rows, 1, 1, dloss.contiguous(), int(dloss.dim() > 0), logits, labels.contiguous(), logsumexp.contiguous(),
            dlogits, classes, first, vocab, ignore_index, smoothing, z_loss, block, num_warps=warps_of(block),
        )  # fmt: skip
