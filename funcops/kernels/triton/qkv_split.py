"""The parts of a joint projection: a program a position, all heads, forward or backward."""

from __future__ import annotations

from typing import Optional

import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import qkv_split as declared
from funcops.kernels.triton.common import block_of, contiguous, load_wide, store_rounded, warps_of


@triton.jit
def _move(
    joint_ptr, q_ptr, k_ptr, v_ptr, table_ptr, table_rows, heads, kv_heads, dim, rotary,
    TURN: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every head of a position, between its place in the joint tensor and its own; backwards with BACK."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    turns = i < rotary
    partner = i ^ 1 if INTERLEAVED else tl.where(i < rotary // 2, i + rotary // 2, i - rotary // 2)
    if TURN:
        table_ptr += (row % table_rows) * 3 * rotary
        cos = tl.load(table_ptr + i, mask=turns, other=1.0)
        sin = tl.load(table_ptr + (2 * rotary if BACK else rotary) + i, mask=turns, other=0.0)
    joint_ptr += row * (heads + 2 * kv_heads) * dim
    q_ptr += row * heads * dim
    k_ptr += row * kv_heads * dim
    v_ptr += row * kv_heads * dim
    for head in range(0, heads + 2 * kv_heads):
        own = head - heads
        part_ptr = q_ptr + head * dim
        if head >= heads:
            part_ptr = k_ptr + own * dim
        if head >= heads + kv_heads:
            part_ptr = v_ptr + (own - kv_heads) * dim
        from_ptr = part_ptr if BACK else joint_ptr + head * dim
        to_ptr = joint_ptr + head * dim if BACK else part_ptr
        y = load_wide(from_ptr + i, i < dim)
        if TURN:
            turned = y * cos + load_wide(from_ptr + partner, turns) * sin
            y = tl.where(head < heads + kv_heads, turned, y)
        store_rounded(to_ptr + i, y, i < dim)


_launch_move = launcher(_move)


def _run(joint: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Optional[Tensor], interleaved: bool, back: bool) -> None:
    (heads, dim), kv_heads = q.shape[-2:], k.shape[-2]
    if not joint.numel():
        return
    block, rotary = block_of(dim, 65536), 0 if table is None else table.shape[-1] // 3
    _launch_move(
        joint.numel() // joint.shape[-1], 1, 1, joint, q, k, v, contiguous(table),
        1 if table is None else table.numel() // (3 * rotary), heads, kv_heads, dim, rotary,
        table is not None, interleaved, back, block, num_warps=warps_of(block),
    )  # fmt: skip


@declared.qkv_split_fwd.triton
def qkv_split_fwd(
    qkv: Tensor, table: Optional[Tensor], heads: int, kv_heads: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    q = qkv.new_empty((*qkv.shape[:-1], heads, dim))
    k, v = (qkv.new_empty((*qkv.shape[:-1], kv_heads, dim)) for _ in range(2))
    _run(qkv.contiguous(), q, k, v, table, interleaved, False)
    return q, k, v


@declared.qkv_split_bwd.triton
def qkv_split_bwd(dq: Tensor, dk: Tensor, dv: Tensor, table: Optional[Tensor], interleaved: bool) -> Tensor:
    dqkv = dq.new_empty((*dq.shape[:-2], (dq.shape[-2] + 2 * dk.shape[-2]) * dq.shape[-1]))
    _run(dqkv, dq.contiguous(), dk.contiguous(), dv.contiguous(), table, interleaved, True)
    return dqkv
