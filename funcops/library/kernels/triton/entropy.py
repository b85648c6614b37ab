"""Cross entropy with the entropy, one program per row. The forward reads the logits once: beside the online softmax of
`cross_entropy` every lane has a sum of exponentials times their exponents. The backward is one read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import entropy as declared
from funcops.library.kernels.triton.aligned import ends, whole_groups
from funcops.library.kernels.triton.common import block_of, load_wide, rounded, store_rounded, warps_of
from funcops.library.kernels.triton.cross_entropy import BLOCK, LINE, LOWEST, lowered, on_lines, seen_by_lanes, tile_of

LEAST = tl.constexpr(declared.LEAST)


@triton.jit
def _gather(t, inside, highest, weights, heat, total, seen, SMOOTHED: tl.constexpr, DEEP: tl.constexpr, LANES: tl.constexpr):
    """Update the sums of every lane with more logits (-inf outside the row): of exp(t - highest), of these times t - highest, and
    of t - highest over the `seen` logits."""
    t = tl.reshape(t, [DEEP, LANES, t.shape[0] // (DEEP * LANES)])
    top = tl.maximum(highest, tl.max(tl.max(t, 2), 0))
    below = t - top[None, :, None]
    if SMOOTHED:
        total = lowered(total, seen, highest, top)
        total += tl.sum(tl.sum(tl.where(tl.reshape(inside, t.shape), below, 0.0), 2), 0)
    fall, each = highest - top, tl.exp(below)
    heat = (heat + weights * tl.maximum(fall, LEAST)) * tl.exp(fall) + tl.sum(tl.sum(each * tl.maximum(below, LEAST), 2), 0)
    weights = weights * tl.exp(fall) + tl.sum(tl.sum(each, 2), 0)
    return top, weights, heat, total


@triton.jit
def _forward(
    logits_ptr, labels_ptr, losses_ptr, lse_ptr, entropies_ptr, vocab, ignore_index, smoothing: tl.float32, z_loss: tl.float32,
    SMOOTHED: tl.constexpr, EVEN: tl.constexpr, DEEP: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    OF: tl.constexpr = 8 * LINE // logits_ptr.dtype.element_ty.primitive_bitwidth
    logits_ptr, before, size = whole_groups(logits_ptr, row * vocab, vocab, EVEN, OF)
    label = tl.load(labels_ptr + row)
    highest = tl.full([LANES], LOWEST, tl.float32)  # finite, as in `cross_entropy`
    weights, heat, total = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    i = tl.arange(0, BLOCK)
    full = size // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        t = tl.load(logits_ptr + start + i).to(tl.float32)
        highest, weights, heat, total = _gather(
            t, i >= 0, highest, weights, heat, total, start // LANES, SMOOTHED, DEEP, LANES
        )
    if full < size:
        inside = full + i < size
        t = tl.load(logits_ptr + full + i, mask=inside, other=-float("inf")).to(tl.float32)
        highest, weights, heat, total = _gather(
            t, inside, highest, weights, heat, total, full // LANES, SMOOTHED, DEEP, LANES
        )
    top = tl.max(highest, 0)
    if not EVEN:
        at, inside = ends(before, size, vocab, OF)
        t = tl.load(logits_ptr + at, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(t, 0))
    fall = highest - top
    sum_exp = tl.sum(weights * tl.exp(fall), 0)
    sum_heat = tl.sum((heat + weights * tl.maximum(fall, LEAST)) * tl.exp(fall), 0)
    if not EVEN:
        each = tl.exp(t - top)
        sum_exp += tl.sum(each, 0)
        sum_heat += tl.sum(each * tl.maximum(t - top, LEAST), 0)
    rest = tl.log(sum_exp)
    wanted = (label >= 0) & (label < vocab)
    picked = load_wide(logits_ptr + (label - before), wanted) - top
    loss = rest - picked + z_loss * (top + rest) * (top + rest)
    if SMOOTHED:
        sum_t = tl.sum(lowered(total, seen_by_lanes(size, DEEP, LANES, BLOCK), highest, top), 0)
        if not EVEN:
            sum_t += tl.sum(tl.where(inside, t - top, 0.0), 0)
        loss += smoothing * (picked - sum_t / vocab)
    loss = tl.where(wanted, loss, float("nan"))  # a label that is neither a class nor ignored
    tl.store(losses_ptr + row, tl.where(label == ignore_index, 0.0, loss))
    tl.store(entropies_ptr + row, tl.where(label == ignore_index, 0.0, rest - sum_heat / sum_exp))
    tl.store(lse_ptr + 2 * row, top)
    tl.store(lse_ptr + 2 * row + 1, rest)


@triton.jit
def _descend(t, at, label, highest, at_all, at_label, scale, slope, middle):
    """dlogits of logits t at classes `at`: both along p, the entropy's also times log p + H, which is t - highest - `middle`."""
    below = t - highest
    along = scale - slope * (tl.maximum(below, LEAST) - middle)
    return along * tl.exp(below) - tl.where(at == label, at_label, at_all)


@triton.jit
def _backward(
    dloss_ptr, dentropy_ptr, logits_ptr, labels_ptr, lse_ptr, entropies_ptr, dlogits_ptr, classes, first, vocab, ignore_index,
    smoothing: tl.float32, z_loss: tl.float32, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):
    """dlogits may be logits themselves, whose classes begin at `first` of `vocab` classes."""
    row = tl.program_id(0).to(tl.int64)
    OF: tl.constexpr = 8 * LINE // logits_ptr.dtype.element_ty.primitive_bitwidth
    logits_ptr, before, size = whole_groups(logits_ptr, row * classes, classes, EVEN, OF)
    dlogits_ptr, _, _ = whole_groups(dlogits_ptr, row * classes, classes, EVEN, OF)
    label, highest, rest = tl.load(labels_ptr + row), tl.load(lse_ptr + 2 * row), tl.load(lse_ptr + 2 * row + 1)
    ignored = label == ignore_index
    d = tl.where(ignored, 0.0, tl.load(dloss_ptr + row).to(tl.float32))
    slope = tl.where(ignored, 0.0, tl.load(dentropy_ptr + row).to(tl.float32)) * tl.exp(-rest)
    middle = rest - tl.load(entropies_ptr + row)
    at_all, scale = d * (smoothing / vocab), d * (1.0 + 2.0 * z_loss * (highest + rest)) * tl.exp(-rest)
    at_label = d * (1.0 - smoothing) + at_all
    # a label outside these classes becomes an index that matches none
    label = tl.where((label >= first) & (label < first + classes), label - first - before, -1 - before).to(tl.int32)
    i = tl.arange(0, BLOCK)
    if not EVEN:  # read first, so that nothing is read that other threads have written
        at, inside = ends(before, size, classes, OF)
        t = tl.load(logits_ptr + at, mask=inside, other=-float("inf")).to(tl.float32)
    full = size // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        t_whole = tl.load(logits_ptr + start + i).to(tl.float32)
        dt = _descend(t_whole, start + i, label, highest, at_all, at_label, scale, slope, middle)
        tl.store(dlogits_ptr + start + i, rounded(dt, dlogits_ptr.dtype.element_ty))
    if full < size:
        t_whole = tl.load(logits_ptr + full + i, mask=full + i < size, other=-float("inf")).to(tl.float32)
        dt = _descend(t_whole, full + i, label, highest, at_all, at_label, scale, slope, middle)
        store_rounded(dlogits_ptr + full + i, dt, full + i < size)
    if not EVEN:
        store_rounded(dlogits_ptr + at, _descend(t, at, label, highest, at_all, at_label, scale, slope, middle), inside)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)


@declared.entropy_fwd.triton
def entropy_fwd(
    logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits, labels = logits.contiguous(), labels.contiguous()
    rows, vocab = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    lse, entropies = losses.new_empty((rows, 2)), torch.empty_like(losses)
    if rows:
        lanes, deep, block, warps = tile_of(logits, BLOCK)
        _launch_forward(
            rows, 1, 1, logits, labels, losses, lse, entropies, vocab, ignore_index, smoothing, z_loss, smoothing != 0.0,
            on_lines(logits), deep, lanes, block, num_warps=warps,
        )
    return losses, lse, entropies


@declared.entropy_bwd.triton
def entropy_bwd(
    dloss: Tensor, dentropy: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, entropies: Tensor, smoothing: float,
    ignore_index: int, z_loss: float, first: int = 0, vocab: int = 0,
) -> Tensor:
    logits = logits.contiguous()
    dlogits = torch.empty_like(logits)
    vocab = vocab or logits.shape[1]
    _gradient(dloss, dentropy, logits, labels, logsumexp, entropies, dlogits, smoothing, ignore_index, z_loss, first, vocab)
    return dlogits


@declared.entropy_bwd_owned.triton
def entropy_bwd_owned(
    dloss: Tensor, dentropy: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, entropies: Tensor, smoothing: float,
    ignore_index: int, z_loss: float, first: int, vocab: int,
) -> None:
    _gradient(dloss, dentropy, logits, labels, logsumexp, entropies, logits, smoothing, ignore_index, z_loss, first, vocab)


def _gradient(
    dloss: Tensor, dentropy: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, entropies: Tensor, dlogits: Tensor,
    smoothing: float, ignore_index: int, z_loss: float, first: int, vocab: int,
) -> None:
    rows, classes = logits.shape
    if rows and classes:
        block, of_row = block_of(classes, BLOCK), (t.contiguous() for t in (labels, logsumexp, entropies))
        _launch_backward(
            rows, 1, 1, dloss.contiguous(), dentropy.contiguous(), logits, *of_row, dlogits, classes, first, vocab, ignore_index,
            smoothing, z_loss, on_lines(logits), block, num_warps=warps_of(block),
        )
