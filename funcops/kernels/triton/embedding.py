"""The embedding's weight gradient without atomics: tokens sorted by id, and each id's rows summed in order by one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import embedding as declared
from funcops.kernels.triton.common import block_of, load_wide, store_rounded, warps_of

BLOCK = 1024


@triton.jit
def _sum_runs(dy_ptr, ids_ptr, order_ptr, dw_ptr, n, width, padding_idx, BLOCK: tl.constexpr):
    """A program for each place in the sorted ids; those that do not start a run have nothing to do."""
    first = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids_ptr + first)
    before = tl.load(ids_ptr + first - 1, mask=first > 0, other=-1)
    if (own != before) & (own != padding_idx):
        total = tl.zeros([BLOCK], tl.float32)
        at, same = first, own
        while same == own:
            total += load_wide(dy_ptr + tl.load(order_ptr + at) * width + i, i < width)
            at += 1
            same = tl.load(ids_ptr + at, mask=at < n, other=-1)
        store_rounded(dw_ptr + own * width + i, total, i < width)


_launch_sum_runs = launcher(_sum_runs)


@declared.embedding_wgrad.triton
def embedding_wgrad(dy: Tensor, ids: Tensor, vocab: int, padding_idx: int) -> Tensor:
    width = dy.shape[-1]
    dw = dy.new_zeros((vocab, width))
    if ids.numel() and width:
        ordered, order = torch.sort(ids.reshape(-1), stable=True)
        block = block_of(width, BLOCK)
        grid = ordered.numel(), triton.cdiv(width, block), 1
        _launch_sum_runs(
            *grid, dy.contiguous(), ordered, order, dw, ordered.numel(), width, padding_idx, block, num_warps=warps_of(block)
        )  # fmt: skip
    return dw
