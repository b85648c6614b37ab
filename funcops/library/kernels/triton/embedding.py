"""The embedding's weight gradient without atomics: tokens are sorted by id, and each id's rows summed in that order.

A program walks RUN sorted tokens. It writes the rows of ids that begin and end there; for an id that goes on beyond, it stores a
partial sum, and a second launch adds these in order. So no program takes longer for an id that fills the batch. A third launch
writes zeros for ids that no token has: no row is written twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import embedding as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.common import block_of, cdiv, load_wide, store_rounded

BLOCK, RUN, ROWS = 2048, 32, 8


@triton.jit
def _put(ptr, total, inside, INTO: tl.constexpr):
    """Write a row of dw, or add to it."""
    if INTO:
        total += load_wide(ptr, inside)
    store_rounded(ptr, total, inside)


@triton.jit
def _sum_runs(
    dy_ptr, ids_ptr, order_ptr, dw_ptr, parts_ptr, n, width, padding_idx, INTO: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr
):
    """parts [tokens / RUN, 2, D]: sums for the id that began before this program's tokens, and for the id that goes on after."""
    chunk = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = chunk * RUN
    last = tl.minimum(first + RUN, n)
    parts_ptr += chunk * 2 * width + i
    own, row = tl.load(ids_ptr + first), tl.load(order_ptr + first)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1) == own
    total = tl.zeros([BLOCK], tl.float32)
    for at in range(first, last):
        total += load_wide(dy_ptr + row * width + i, i < width)
        after = tl.load(ids_ptr + at + 1, mask=at + 1 < n, other=-1)
        row = tl.load(order_ptr + at + 1, mask=at + 1 < n, other=0)  # one step before it is needed
        if (after != own) | (at + 1 == last):
            if before:
                tl.store(parts_ptr, total, mask=i < width)
            elif after == own:
                tl.store(parts_ptr + width, total, mask=i < width)
            elif own != padding_idx:
                _put(dw_ptr + own * width + i, total, i < width, INTO)
            total = tl.zeros([BLOCK], tl.float32)
            before = after != after
        own = after


@triton.jit
def _sum_parts(ids_ptr, dw_ptr, parts_ptr, n, width, padding_idx, INTO: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr):
    """Add the parts of the last id of every chunk, if it began in the chunk and goes on after it."""
    chunk = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids_ptr + chunk * RUN + RUN - 1, mask=(chunk + 1) * RUN <= n, other=-1)
    earlier = tl.load(ids_ptr + chunk * RUN - 1, mask=chunk > 0, other=-1)
    if (own >= 0) & (_first(ids_ptr, chunk + 1, n, RUN) == own) & (own != earlier) & (own != padding_idx):
        total = tl.load(parts_ptr + (2 * chunk + 1) * width + i, mask=i < width, other=0.0)
        while _first(ids_ptr, chunk + 1, n, RUN) == own:
            chunk += 1
            total += tl.load(parts_ptr + 2 * chunk * width + i, mask=i < width, other=0.0)
        _put(dw_ptr + own * width + i, total, i < width, INTO)


@triton.jit
def _first(ids_ptr, chunk, n, RUN: tl.constexpr):
    """The id at the start of a chunk; -1 after the last chunk."""
    return tl.load(ids_ptr + chunk * RUN, mask=chunk * RUN < n, other=-1)


@triton.jit
def _zero_rest(ids_ptr, dw_ptr, n, steps, vocab, width, padding_idx, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zero the rows of ids that no token has, and of the padding. ROWS ids are found by bisection, in `steps`: 2^steps > n."""
    own = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    low = own * 0
    high = low + n
    for _ in range(0, steps):
        middle = (low + high) // 2
        found = tl.load(ids_ptr + middle, mask=low < high, other=0)
        low, high = tl.where((low < high) & (found < own), middle + 1, low), tl.where((low < high) & (found >= own), middle, high)
    unused = (tl.load(ids_ptr + low, mask=low < n, other=-1) != own) | (own == padding_idx)
    inside = (unused & (own < vocab))[:, None] & (i < width)[None, :]
    tl.store(dw_ptr + own[:, None] * width + i[None, :], tl.zeros([ROWS, BLOCK], dw_ptr.dtype.element_ty), mask=inside)


_launch_sum_runs, _launch_sum_parts, _launch_zero_rest = launcher(_sum_runs), launcher(_sum_parts), launcher(_zero_rest)


@launched(declared.embedding_wgrad)
@declared.embedding_wgrad.triton
def embedding_wgrad(dy: Tensor, ids: Tensor, vocab: int, padding_idx: int) -> Tensor:
    width, n = dy.shape[-1], ids.numel()
    if not (n and width):
        return dy.new_zeros((vocab, width))
    dw = dy.new_empty((vocab, width))
    ordered, block = _sum(dy, ids, padding_idx, dw, False), block_of(width, BLOCK)
    grid = cdiv(vocab, ROWS), cdiv(width, block), 1
    _launch_zero_rest(*grid, ordered, dw, n, n.bit_length(), vocab, width, padding_idx, ROWS, block)
    return dw


@launched(declared.embedding_wgrad_into)
@declared.embedding_wgrad_into.triton
def embedding_wgrad_into(dy: Tensor, ids: Tensor, padding_idx: int, dw: Tensor) -> None:
    if ids.numel() and dy.shape[-1]:
        _sum(dy, ids, padding_idx, dw, True)


def _sum(dy: Tensor, ids: Tensor, padding_idx: int, dw: Tensor, into: bool) -> Tensor:
    """Write the ids' rows of dw, or add to them if `into`; return the sorted ids."""
    width, n = dy.shape[-1], ids.numel()
    ordered, order = torch.sort(ids.reshape(-1), stable=True)
    block, chunks = block_of(width, BLOCK), cdiv(n, RUN)
    grid, options = (chunks, cdiv(width, block), 1), {"num_warps": max(1, block // 1024)}
    parts = dy.new_empty((chunks, 2, width), dtype=torch.float32)
    _launch_sum_runs(*grid, dy.contiguous(), ordered, order, dw, parts, n, width, padding_idx, into, RUN, block, **options)
    _launch_sum_parts(*grid, ordered, dw, parts, n, width, padding_idx, into, RUN, block, **options)
    return ordered
