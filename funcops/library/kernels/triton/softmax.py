"""Softmax: a program takes some short rows whole, or a long one in two passes, an online softmax and the quotients. Of a long row
the first chunks stay in registers between the passes, in their own dtype; the others are read again, soon, from the cache."""
# mypy: disable-error-code="assignment, var-annotated"
# for tuples that grow while a kernel is unrolled

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import softmax as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.common import anew, block_of, cdiv, flat_rows, load_wide, stages, store_rounded, warps_of

TILE = 2048  # elements of short rows that a program takes
LONGEST, LONGEST_BACK = 32768, 16384  # of a row taken whole; in the backward of two of them
CHUNK = 8192  # elements of a longer row at a time
KEPT = 2**17  # bytes of a longer row that stay in registers: half of what a multiprocessor has
LOWEST = tl.constexpr(-3.4028234663852886e38)  # not -inf, as a row's first elements may be, too: the difference would be NaN


@triton.jit
def _forward(x_ptr, y_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    at, inside = row * width + i, (row < rows) & (i < width)
    t = tl.where(i < width, load_wide(x_ptr + at, inside), -float("inf"))
    weights = tl.exp(t - tl.maximum(tl.max(t, 1), LOWEST)[:, None])
    store_rounded(y_ptr + at, weights * (1.0 / tl.sum(weights, 1))[:, None], inside)


@triton.jit
def _forward_long(x_ptr, y_ptr, width, KEPT: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    first, i = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    highest, total, none = tl.full([], LOWEST, tl.float32), tl.zeros([BLOCK], tl.float32), (width < 0).to(tl.int32)
    kept = ()
    for part in tl.static_range(KEPT):
        kept = kept + (tl.load(x_ptr + first + part * BLOCK + i, part * BLOCK + i < width, other=-float("inf")),)
    for part in tl.static_range(KEPT):
        highest, total = _gather(kept[part].to(tl.float32), highest, total)
    for start in tl.range(KEPT * BLOCK, width, BLOCK, num_stages=STAGES):
        t = tl.load(x_ptr + first + start + i, start + i < width, other=-float("inf"))
        highest, total = _gather(t.to(tl.float32), highest, total)
    factor = 1.0 / tl.sum(total, 0)
    for start in tl.range(KEPT * BLOCK, width, BLOCK, num_stages=STAGES):
        t = load_wide(x_ptr + first + start + i, start + i < width)
        store_rounded(y_ptr + first + start + i, tl.exp(t - highest) * factor, start + i < width)
    for part in tl.static_range(KEPT):
        y = tl.exp(anew(kept[part], none).to(tl.float32) - highest) * factor
        store_rounded(y_ptr + first + part * BLOCK + i, y, part * BLOCK + i < width)


@triton.jit
def _gather(t, highest, total):
    """Update the online softmax with more elements."""
    higher = tl.maximum(highest, tl.max(t, 0))
    return higher, total * tl.exp(highest - higher) + tl.exp(t - higher)


@triton.jit
def _backward(dy_ptr, y_ptr, dx_ptr, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    at, inside = row * width + i, (row < rows) & (i < width)
    dy, y = load_wide(dy_ptr + at, inside), load_wide(y_ptr + at, inside)
    store_rounded(dx_ptr + at, y * (dy - tl.sum(dy * y, 1)[:, None]), inside)


@triton.jit
def _backward_long(dy_ptr, y_ptr, dx_ptr, width, KEPT: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr):
    first, i = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    total, none = tl.full([], 0.0, tl.float32), (width < 0).to(tl.int32)
    dys, ys = (), ()
    for part in tl.static_range(KEPT):
        at, inside = first + part * BLOCK + i, part * BLOCK + i < width
        dys, ys = dys + (tl.load(dy_ptr + at, inside, other=0.0),), ys + (tl.load(y_ptr + at, inside, other=0.0),)
    for part in tl.static_range(KEPT):
        total += tl.sum(dys[part].to(tl.float32) * ys[part].to(tl.float32), 0)
    for start in tl.range(KEPT * BLOCK, width, BLOCK, num_stages=STAGES):
        at, inside = first + start + i, start + i < width
        total += tl.sum(load_wide(dy_ptr + at, inside) * load_wide(y_ptr + at, inside), 0)
    for start in tl.range(KEPT * BLOCK, width, BLOCK, num_stages=STAGES):
        at, inside = first + start + i, start + i < width
        store_rounded(dx_ptr + at, load_wide(y_ptr + at, inside) * (load_wide(dy_ptr + at, inside) - total), inside)
    for part in tl.static_range(KEPT):
        dx = anew(ys[part], none).to(tl.float32) * (anew(dys[part], none).to(tl.float32) - total)
        store_rounded(dx_ptr + first + part * BLOCK + i, dx, part * BLOCK + i < width)


_launch_forward, _launch_forward_long = launcher(_forward), launcher(_forward_long)
_launch_backward, _launch_backward_long = launcher(_backward), launcher(_backward_long)


def tile_of(width: int) -> tuple[int, int]:
    """The rows that a program takes at a time, and the block that holds one."""
    block = block_of(width, LONGEST)
    return max(1, TILE // block), block


def kept_of(width: int, size: int) -> int:
    """The chunks of a long row that stay in registers, if an element is `size` bytes."""
    return min(cdiv(width, CHUNK), KEPT // (CHUNK * size))


@launched(declared.softmax_fwd)
@declared.softmax_fwd.triton
def softmax_fwd(x: Tensor) -> Tensor:
    x, rows, width = flat_rows(x)
    y = torch.empty_like(x)
    if rows and width > LONGEST:
        kept = kept_of(width, x.element_size())
        _launch_forward_long(rows, 1, 1, x, y, width, kept, stages(), CHUNK, num_warps=warps_of(CHUNK))
    elif rows:
        at_once, block = tile_of(width)
        _launch_forward(cdiv(rows, at_once), 1, 1, x, y, rows, width, at_once, block, num_warps=warps_of(at_once * block))
    return y


@launched(declared.softmax_bwd)
@declared.softmax_bwd.triton
def softmax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    y, rows, width = flat_rows(y)
    dy, dx = dy.contiguous(), torch.empty_like(y)
    if rows and width > LONGEST_BACK:
        kept = kept_of(width, y.element_size() + dy.element_size())
        in_flight = min(stages(), 1 + 4 // y.element_size())  # two 16-bit chunks of each, or one of float32
        _launch_backward_long(rows, 1, 1, dy, y, dx, width, kept, in_flight, CHUNK, num_warps=warps_of(CHUNK))
    elif rows:
        at_once, block = tile_of(width)
        _launch_backward(cdiv(rows, at_once), 1, 1, dy, y, dx, rows, width, at_once, block, num_warps=warps_of(at_once * block))
    return dx
