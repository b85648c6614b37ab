"""Rotary position embedding: a program a position, all heads; the partner of each number is read from its own place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import rope as declared
from funcops.kernels.triton.common import block_of, load_wide, store_rounded, warps_of


@triton.jit
def _apply(
    x_ptr, table_ptr, y_ptr, table_rows, heads, dim, rotary, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    turns = i < rotary
    table_ptr += (row % table_rows) * 3 * rotary
    cos = tl.load(table_ptr + i, mask=turns, other=1.0)
    sin = tl.load(table_ptr + (2 * rotary if INVERSE else rotary) + i, mask=turns, other=0.0)
    partner = i ^ 1 if INTERLEAVED else tl.where(i < rotary // 2, i + rotary // 2, i - rotary // 2)
    for head in range(0, heads):
        at = (row * heads + head) * dim
        y = load_wide(x_ptr + at + i, i < dim) * cos + load_wide(x_ptr + at + partner, turns) * sin
        store_rounded(y_ptr + at + i, y, i < dim)


_launch_apply = launcher(_apply)


@declared.rope_apply.triton
def rope_apply(x: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    x, table = x.contiguous(), table.contiguous()
    y, (heads, dim) = torch.empty_like(x), x.shape[-2:]
    if x.numel():
        block, rotary = block_of(dim, 65536), table.shape[-1] // 3
        _launch_apply(
            x.numel() // (heads * dim), 1, 1, x, table, y, table.numel() // (3 * rotary), heads, dim, rotary,
            interleaved, inverse, block, num_warps=warps_of(block),
        )  # fmt: skip
    return y
