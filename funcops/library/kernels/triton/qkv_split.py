"""The parts of a joint projection, one program per position, in all batches that share its angles, forward or backward."""

from __future__ import annotations

from typing import Optional

import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import qkv_split as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.common import block_of, contiguous
from funcops.library.kernels.triton.rope import TILE, angles, blocks_of, grid_of, heads_of, turn, warps_of_tile


@triton.jit
def _copy(from_ptr, to_ptr, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(to_ptr + i, tl.load(from_ptr + i, mask=i < n), mask=i < n)


@triton.jit
def _part(
    joint_ptr, own_ptr, cos, sin, heads, TURN: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, COPY: tl.constexpr,
):
    """Move some heads of a position from the joint tensor to their own; with BACK, from their own to the joint one."""
    from_ptr = own_ptr if BACK else joint_ptr
    to_ptr = joint_ptr if BACK else own_ptr
    if TURN:
        turn(from_ptr, to_ptr, cos, sin, heads, DIM, HALF, HEADS, BLOCK, REST, INTERLEAVED)
    else:
        _copy(from_ptr, to_ptr, heads * DIM, COPY)


@triton.jit
def _move(
    joint_ptr, q_ptr, k_ptr, v_ptr, table_ptr, batches, heads, kv_heads, TURN: tl.constexpr, INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, COPY: tl.constexpr,
):
    position, positions = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    cos, sin = 1.0, 0.0
    if TURN:
        cos, sin = angles(table_ptr + position * 6 * HALF, HALF, BLOCK, INTERLEAVED, BACK)
    for batch in range(tl.program_id(1), batches, tl.num_programs(1)):
        row = batch * positions + position
        q_at, k_at = row * heads * DIM, row * kv_heads * DIM
        at = joint_ptr + q_at + 2 * k_at
        _part(at, q_ptr + q_at, cos, sin, heads, TURN, INTERLEAVED, BACK, DIM, HALF, HEADS, BLOCK, REST, COPY)
        at += heads * DIM
        _part(at, k_ptr + k_at, cos, sin, kv_heads, TURN, INTERLEAVED, BACK, DIM, HALF, KV_HEADS, BLOCK, REST, COPY)
        at += kv_heads * DIM
        _part(at, v_ptr + k_at, cos, sin, kv_heads, False, INTERLEAVED, BACK, DIM, HALF, KV_HEADS, BLOCK, REST, COPY)


_launch_move = launcher(_move)


def _run(joint: Tensor, q: Tensor, k: Tensor, v: Tensor, table: Optional[Tensor], interleaved: bool, back: bool) -> None:
    (heads, dim), kv_heads = q.shape[-2:], k.shape[-2]
    if not joint.numel():
        return
    rows, half = joint.numel() // joint.shape[-1], 0 if table is None else table.shape[-1] // 6
    positions = rows if table is None else table.numel() // (6 * half)
    block, rest = blocks_of(dim, half)
    at_once = heads_of(heads, block, rest)
    _launch_move(
        *grid_of(positions, rows // positions), joint, q, k, v, contiguous(table), rows // positions, heads, kv_heads,
        table is not None, interleaved, back, dim, half, at_once, heads_of(kv_heads, block, rest), block, rest,
        block_of(kv_heads * dim, TILE), num_warps=warps_of_tile(at_once * max(2 * block, rest)),
    )


@launched(declared.qkv_split_fwd)
@declared.qkv_split_fwd.triton
def qkv_split_fwd(
    qkv: Tensor, table: Optional[Tensor], heads: int, kv_heads: int, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dim = qkv.shape[-1] // (heads + 2 * kv_heads)
    q = qkv.new_empty((*qkv.shape[:-1], heads, dim))
    k, v = (qkv.new_empty((*qkv.shape[:-1], kv_heads, dim)) for _ in range(2))
    _run(qkv.contiguous(), q, k, v, table, interleaved, False)
    return q, k, v


@launched(declared.qkv_split_bwd)
@declared.qkv_split_bwd.triton
def qkv_split_bwd(dq: Tensor, dk: Tensor, dv: Tensor, table: Optional[Tensor], interleaved: bool) -> Tensor:
    dqkv = dq.new_empty((*dq.shape[:-2], (dq.shape[-2] + 2 * dk.shape[-2]) * dq.shape[-1]))
    _run(dqkv, dq.contiguous(), dk.contiguous(), dv.contiguous(), table, interleaved, True)
    return dqkv
