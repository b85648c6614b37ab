"""Cross entropy, one program per row. The forward reads the logits once, with an online softmax in every lane; the backward is one
read and one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import cross_entropy as declared
from funcops.library.kernels.pins import launched, pins
from funcops.library.kernels.triton.aligned import ends, whole_groups
from funcops.library.kernels.triton.common import block_of, load_wide, rounded, store_rounded, warps_of

BLOCK = 4096
CACHED = 180_000  # bytes of a row that the cache keeps for its gradient, if a multiprocessor has one program
LINE = tl.constexpr(128)  # bytes of a line of the cache, with which a warp's loads and stores of 16 bytes a thread begin
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _gather(t, inside, highest, weights, total, seen, SMOOTHED: tl.constexpr, DEEP: tl.constexpr, LANES: tl.constexpr):
    """Update the online softmax of every lane with more logits (-inf outside the row), one exponential each. total: the sum of
    t - highest over the `seen` logits of a lane, all of which a new highest logit lowers."""
    t = tl.reshape(t, [DEEP, LANES, t.shape[0] // (DEEP * LANES)])
    top = tl.maximum(highest, tl.max(tl.max(t, 2), 0))
    below = t - top[None, :, None]
    if SMOOTHED:
        total = lowered(total, seen, highest, top)
        total += tl.sum(tl.sum(tl.where(tl.reshape(inside, t.shape), below, 0.0), 2), 0)
    weights = weights * tl.exp(highest - top) + tl.sum(tl.sum(tl.exp(below), 2), 0)
    return top, weights, total


@triton.jit
def lowered(total, seen, highest, top):
    """Turn a sum of `seen` differences to `highest` into one of differences to `top`; 0 if nothing was seen yet."""
    return tl.where(seen > 0, total + seen * (highest - top), 0.0)


@triton.jit
def seen_by_lanes(size, DEEP: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """How many of `size` logits each lane has seen."""
    EACH: tl.constexpr = BLOCK // (DEEP * LANES)
    left = size % BLOCK - tl.arange(0, LANES) * EACH
    seen = tl.full([LANES], 0, tl.int32) + size // BLOCK * (BLOCK // LANES)
    for deep in tl.static_range(DEEP):
        seen += tl.minimum(tl.maximum(left - deep * LANES * EACH, 0), EACH)
    return seen


@triton.jit
def _forward(
    logits_ptr, labels_ptr, losses_ptr, lse_ptr, vocab, ignore_index, smoothing: tl.float32, z_loss: tl.float32,
    SMOOTHED: tl.constexpr, EVEN: tl.constexpr, DEEP: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):
    OF: tl.constexpr = 8 * LINE // logits_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    logits_ptr, before, size = whole_groups(logits_ptr, row * vocab, vocab, EVEN, OF)
    label = tl.load(labels_ptr + row)
    # finite, so that a row of -inf sums to 0 and not to NaN
    highest = tl.full([LANES], LOWEST, tl.float32)
    weights, total = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    i = tl.arange(0, BLOCK)
    full = size // BLOCK * BLOCK
    for start in range(0, full, BLOCK):
        t = tl.load(logits_ptr + start + i).to(tl.float32)
        highest, weights, total = _gather(t, i >= 0, highest, weights, total, start // LANES, SMOOTHED, DEEP, LANES)
    if full < size:
        inside = full + i < size
        t = tl.load(logits_ptr + full + i, mask=inside, other=-float("inf")).to(tl.float32)
        highest, weights, total = _gather(t, inside, highest, weights, total, full // LANES, SMOOTHED, DEEP, LANES)
    top = tl.max(highest, 0)
    if EVEN:
        sum_exp = tl.sum(weights * tl.exp(highest - top), 0)
    else:
        at, inside = ends(before, size, vocab, OF)
        t = tl.load(logits_ptr + at, mask=inside, other=-float("inf")).to(tl.float32)
        top = tl.maximum(top, tl.max(t, 0))
        sum_exp = tl.sum(weights * tl.exp(highest - top), 0) + tl.sum(tl.exp(t - top), 0)
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
    tl.store(lse_ptr + 2 * row, top)
    tl.store(lse_ptr + 2 * row + 1, rest)


@triton.jit
def _descend(t, at, label, highest, at_all, at_label, scale):
    """dlogits of logits t at classes `at`."""
    return scale * tl.exp(t - highest) - tl.where(at == label, at_label, at_all)


@triton.jit
def _backward(
    dloss_ptr, dloss_step, logits_ptr, labels_ptr, lse_ptr, dlogits_ptr, classes, first, vocab, ignore_index,
    smoothing: tl.float32, z_loss: tl.float32, EVEN: tl.constexpr, BLOCK: tl.constexpr,
):
    """dlogits may be logits themselves, whose classes begin at `first` of `vocab` classes."""
    OF: tl.constexpr = 8 * LINE // logits_ptr.dtype.element_ty.primitive_bitwidth
    row = tl.program_id(0).to(tl.int64)
    logits_ptr, before, size = whole_groups(logits_ptr, row * classes, classes, EVEN, OF)
    dlogits_ptr, _, _ = whole_groups(dlogits_ptr, row * classes, classes, EVEN, OF)
    label, highest, rest = tl.load(labels_ptr + row), tl.load(lse_ptr + 2 * row), tl.load(lse_ptr + 2 * row + 1)
    d = tl.where(label == ignore_index, 0.0, tl.load(dloss_ptr + row * dloss_step).to(tl.float32))
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
        dt = _descend(t_whole, start + i, label, highest, at_all, at_label, scale)
        tl.store(dlogits_ptr + start + i, rounded(dt, dlogits_ptr.dtype.element_ty))
    if full < size:
        t_whole = tl.load(logits_ptr + full + i, mask=full + i < size, other=-float("inf")).to(tl.float32)
        dt = _descend(t_whole, full + i, label, highest, at_all, at_label, scale)
        store_rounded(dlogits_ptr + full + i, dt, full + i < size)
    if not EVEN:
        store_rounded(dlogits_ptr + at, _descend(t, at, label, highest, at_all, at_label, scale), inside)


@triton.jit
def _both(
    dloss_ptr, dloss_step, logits_ptr, labels_ptr, losses_ptr, lse_ptr, vocab, ignore_index, smoothing: tl.float32,
    z_loss: tl.float32, SMOOTHED: tl.constexpr, EVEN: tl.constexpr, DEEP: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):
    """The loss, and then the gradient over the logits of the same row, which the cache still has."""
    t, labels, lse, n = logits_ptr, labels_ptr, lse_ptr, vocab
    _forward(t, labels, losses_ptr, lse, n, ignore_index, smoothing, z_loss, SMOOTHED, EVEN, DEEP, LANES, BLOCK)
    tl.debug_barrier()  # all threads have read the row, and see the logsumexp
    _backward(dloss_ptr, dloss_step, t, labels, lse, t, n, 0, n, ignore_index, smoothing, z_loss, EVEN, BLOCK)


@triton.jit
def _forward_from_start(
    logits_ptr, labels_ptr, losses_ptr, lse_ptr, vocab, ignore_index, smoothing: tl.float32, z_loss: tl.float32,
    SMOOTHED: tl.constexpr, DEEP: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):
    """`_forward` of rows that are not aligned, from their start on."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits_ptr += row * vocab
    label = tl.load(labels_ptr + row)
    highest = tl.full([LANES], LOWEST, tl.float32)
    weights, total = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32)
    for start in range(0, vocab, BLOCK):
        t = tl.load(logits_ptr + start + i, mask=start + i < vocab, other=-float("inf")).to(tl.float32)
        highest, weights, total = _gather(t, start + i < vocab, highest, weights, total, start // LANES, SMOOTHED, DEEP, LANES)
    top = tl.max(highest, 0)
    rest = tl.log(tl.sum(weights * tl.exp(highest - top), 0))
    wanted = (label >= 0) & (label < vocab)
    picked = load_wide(logits_ptr + label, wanted) - top
    loss = rest - picked + z_loss * (top + rest) * (top + rest)
    if SMOOTHED:
        sum_t = tl.sum(lowered(total, seen_by_lanes(vocab, DEEP, LANES, BLOCK), highest, top), 0)
        loss += smoothing * (picked - sum_t / vocab)
    loss = tl.where(wanted, loss, float("nan"))
    tl.store(losses_ptr + row, tl.where(label == ignore_index, 0.0, loss))
    tl.store(lse_ptr + 2 * row, top)
    tl.store(lse_ptr + 2 * row + 1, rest)


_launch_forward, _launch_backward, _launch_both = launcher(_forward), launcher(_backward), launcher(_both)
_launch_from_start = launcher(_forward_from_start)


def on_lines(logits: Tensor) -> bool:
    """Whether every row begins with a line of the cache."""
    return logits.shape[1] * logits.element_size() % LINE.value == 0


def _from_the_start(logits: Tensor) -> bool:
    """Whether rows that begin and end anywhere in lines of the cache are read from their start on: in the mode of `pins`, as else
    the order of a row's sum depends on its position."""
    return not on_lines(logits) and pins() is not None


def tile_of(logits: Tensor, most: int) -> tuple[int, int, int, int]:
    """Lanes of the online softmax, as many as threads, each of which reads 16 bytes at a time; how often they do so in a block; the
    block, of at most `most` logits; and warps."""
    block = block_of(logits.shape[1], most)
    warps, chunks = max(1, block // 1024), block * logits.element_size() // 16
    lanes = min(32 * warps, chunks)
    return lanes, chunks // lanes, block, warps


@launched(declared.cross_entropy_fwd)
@declared.cross_entropy_fwd.triton
def cross_entropy_fwd(logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float) -> tuple[Tensor, Tensor]:
    logits, labels = logits.contiguous(), labels.contiguous()
    rows, vocab = logits.shape
    losses = logits.new_empty(rows, dtype=torch.float32)
    lse = losses.new_empty((rows, 2))
    if rows and _from_the_start(logits):
        lanes, deep, block, warps = tile_of(logits, BLOCK)
        _launch_from_start(
            rows, 1, 1, logits, labels, losses, lse, vocab, ignore_index, smoothing, z_loss, smoothing != 0.0, deep, lanes, block,
            num_warps=warps,
        )
    elif rows:
        lanes, deep, block, warps = tile_of(logits, BLOCK)
        _launch_forward(
            rows, 1, 1, logits, labels, losses, lse, vocab, ignore_index, smoothing, z_loss, smoothing != 0.0,
            on_lines(logits), deep, lanes, block, num_warps=warps,
        )
    return losses, lse


@launched(declared.cross_entropy_bwd)
@declared.cross_entropy_bwd.triton
def cross_entropy_bwd(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float,
    first: int = 0, vocab: int = 0,
) -> Tensor:
    logits = logits.contiguous()
    dlogits = torch.empty_like(logits)
    vocab = vocab or logits.shape[1]
    _gradient(dloss, logits, labels, logsumexp, dlogits, smoothing, ignore_index, z_loss, first, vocab)
    return dlogits


@launched(declared.cross_entropy_bwd_owned)
@declared.cross_entropy_bwd_owned.triton
def cross_entropy_bwd_owned(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, smoothing: float, ignore_index: int, z_loss: float,
    first: int, vocab: int,
) -> None:
    _gradient(dloss, logits, labels, logsumexp, logits, smoothing, ignore_index, z_loss, first, vocab)


@launched(declared.cross_entropy_with_gradient)
@declared.cross_entropy_with_gradient.triton
def cross_entropy_with_gradient(
    dloss: Tensor, logits: Tensor, labels: Tensor, smoothing: float, ignore_index: int, z_loss: float
) -> Tensor:
    rows, vocab = logits.shape
    if _from_the_start(logits):
        losses, lse = cross_entropy_fwd(logits, labels, smoothing, ignore_index, z_loss)
        _gradient(dloss, logits, labels, lse, logits, smoothing, ignore_index, z_loss, 0, vocab)
        return losses
    losses = logits.new_empty(rows, dtype=torch.float32)
    if rows:
        lanes, deep, block, warps = tile_of(logits, 4 * BLOCK if vocab * logits.element_size() <= CACHED else BLOCK)
        _launch_both(
            rows, 1, 1, dloss.contiguous(), int(dloss.dim() > 0), logits, labels.contiguous(), losses, losses.new_empty((rows, 2)),
            vocab, ignore_index, smoothing, z_loss, smoothing != 0.0, on_lines(logits), deep, lanes, block, num_warps=warps,
        )
    return losses


def _gradient(
    dloss: Tensor, logits: Tensor, labels: Tensor, logsumexp: Tensor, dlogits: Tensor, smoothing: float, ignore_index: int,
    z_loss: float, first: int, vocab: int,
) -> None:
    rows, classes = logits.shape
    if rows and classes:
        block = block_of(classes, BLOCK)
        _launch_backward(
            rows, 1, 1, dloss.contiguous(), int(dloss.dim() > 0), logits, labels.contiguous(), logsumexp.contiguous(),
            dlogits, classes, first, vocab, ignore_index, smoothing, z_loss, on_lines(logits), block,
            num_warps=warps_of(block),
        )
