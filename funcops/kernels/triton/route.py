"""The choice of experts: a program takes some tokens of a sequence, a tile at a time, and holds all their logits.

The best of a row are found one by one. They are compared as integers in the order of the scores, and of positions for equal scores:
no two are equal, and none is chosen twice, whatever the logits are. Logits of 16 bits, if they are what is compared, fit in 32
bits with their positions, and a difference and a maximum find the best below the last one; other scores take 64 bits. Each program
writes its own counts and sums, which a second launch adds in order.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import route as declared
from funcops.kernels.triton.common import block_of, cdiv, contiguous, load_wide, next_power_of_2, store_rounded

TILE, TOKENS, PROGRAMS = 2048, 64, 256  # logits of a tile; at least so many tokens of a program, at most so many programs
POSITIONS = 1 << 15  # that fit beside 16 bits of a logit
LEAST = tl.constexpr(declared.LEAST)
GONE = tl.constexpr(-(2**63))  # below every score
TAKEN = tl.constexpr(-(2**63) + 1)


@triton.jit
def _order(v):
    """Map float32 to int32 in the same order: NaN is the highest, and both zeros are equal."""
    bits = tl.where(v == 0.0, 0.0, v).to(tl.int32, bitcast=True)
    return tl.where(v == v, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _number(order):
    """The float32 that `_order` maps to `order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _ranked(v, at, LAST: tl.constexpr):
    """int64 in the order of v, and for equal v in the order of their positions `at`, the first the highest."""
    return (_order(v).to(tl.int64) << 32) | (LAST - at).to(tl.int64)


@triton.jit
def _narrow(v, at, INFINITY: tl.constexpr, LAST: tl.constexpr):
    """31 bits in the order of `_ranked`, for v of 16 bits: the logit as an integer, both zeros as 0 and NaN as the highest; then
    the position."""
    bits = v.to(tl.int16, bitcast=True).to(tl.int32)
    sign, size = bits >> 31, bits & 0x7FFF
    order = tl.where(size > INFINITY, 0x7FFF, (size ^ sign) - sign)
    return ((order << 15) + (0x40000000 + LAST - at)).to(tl.uint32, bitcast=True)


@triton.jit
def _narrow_number(key, DTYPE: tl.constexpr):
    """The float32 of the logit in a key."""
    order = (key >> 15).to(tl.int32, bitcast=True) - 0x8000
    bits = tl.where(order < 0, 0x8000 - order, order)
    return bits.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _in_best_groups(
    rank, OF: tl.constexpr, TOP: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    """The ranks of the TOP groups, out of OF, with the highest sum of their two best; GONE in the other groups."""
    rank = tl.reshape(rank, [TOKENS, GROUPS, SIZE])
    first = tl.max(rank, 2)
    second = tl.max(tl.where(rank == first[:, :, None], GONE, rank), 2)
    total = _number((first >> 32).to(tl.int32)) + _number((second >> 32).to(tl.int32))
    group = tl.arange(0, GROUPS)
    order = tl.where(group[None, :] < OF, _ranked(total, group[None, :], GROUPS - 1), GONE)
    for _ in range(0, TOP):
        order = tl.where(order == tl.max(order, 1)[:, None], TAKEN, order)
    return tl.reshape(tl.where((order == TAKEN)[:, :, None], rank, GONE), [TOKENS, GROUPS * SIZE])


@triton.jit
def _exponentials(t):
    """exp(t - max), their sum, and the max, for each row. Only the max is subtracted from t: log sum exp t, the sum's logarithm
    plus the max, is rounded at the size of t."""
    top = tl.max(t, 1)
    each = tl.exp(t - top[:, None])
    return each, tl.sum(each, 1), top


@triton.jit
def _sigmoid(t):
    return 1.0 / (1.0 + tl.exp(-t))


@triton.jit
def _chosen(logits_ptr, row, index, wanted, inside, EXPERTS: tl.constexpr):
    """The logits of the chosen experts, from the cache: -inf beyond TOP_K, and 0 in rows out of range."""
    t = tl.load(logits_ptr + row[:, None] * EXPERTS + index, mask=wanted, other=-float("inf")).to(tl.float32)
    return tl.where(inside[:, None], t, 0.0)


@triton.jit
def _load_rows(
    logits_ptr, row, inside, EXPERTS: tl.constexpr, NARROW: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, expert, real
):
    """Logits [TOKENS, BLOCK] in their own dtype. If NARROW, a thread has four parts of a row, each of 16 bytes, rather than of four
    rows: it finds the best of its own before it asks other threads."""
    if NARROW and BLOCK >= 32:
        part, j = tl.arange(0, 4)[:, None, None] * (BLOCK // 4), tl.arange(0, BLOCK // 4)[None, None, :]
        own = part + j
        v = tl.load(logits_ptr + row[None, :, None] * EXPERTS + own, mask=inside[None, :, None] & (own < EXPERTS), other=0.0)
        return tl.reshape(tl.permute(v, 1, 0, 2), [TOKENS, BLOCK])
    else:
        return tl.load(logits_ptr + row[:, None] * EXPERTS + expert[None, :], mask=inside[:, None] & real[None, :], other=0.0)


@triton.jit
def _forward(
    logits_ptr, bias_ptr, weights_ptr, indices_ptr, kept_ptr, counts_ptr, sums_ptr, squares_ptr, length, tiles,
    scale: tl.float32, EXPERTS: tl.constexpr, OF_GROUPS: tl.constexpr, TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr, SCORED: tl.constexpr, KEEP: tl.constexpr,
    AUX: tl.constexpr, Z: tl.constexpr, NARROW: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    """Route tiles of TOKENS tokens of sequence program_id(1). A tile has SIZE slots for the experts of each of GROUPS groups."""
    BLOCK: tl.constexpr = GROUPS * SIZE
    part = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    OWN: tl.constexpr = EXPERTS // OF_GROUPS
    at = tl.arange(0, BLOCK)
    expert = at
    if OWN != SIZE:
        expert = at // SIZE * OWN + at % SIZE
    real = (at % SIZE < OWN) & (at // SIZE < OF_GROUPS)
    k = tl.arange(0, K_BLOCK)
    counts, sums = tl.zeros([TOKENS, BLOCK], tl.int32), tl.zeros([TOKENS, BLOCK], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    for tile in range(tl.program_id(0) * tiles, (tl.program_id(0) + 1) * tiles):
        token = tile * TOKENS + tl.arange(0, TOKENS)
        inside = token < length
        row = tl.program_id(1).to(tl.int64) * length + token
        v = _load_rows(logits_ptr, row, inside, EXPERTS, NARROW, TOKENS, BLOCK, expert, real)
        t = tl.where(real[None, :], v.to(tl.float32), -float("inf"))
        top, total = tl.zeros([TOKENS], tl.float32), tl.full([TOKENS], 1.0, tl.float32)
        s = t
        if (SOFTMAX and (SCORED or AUX or not NORMALIZE)) or Z:
            each, total, top = _exponentials(t)
            s = each / total[:, None]
        if not SOFTMAX and (SCORED or AUX):
            s = _sigmoid(t)
        if AUX:
            q = s if SOFTMAX else s / tl.sum(s, 1)[:, None]
            sums += tl.where(inside[:, None], q, 0.0)
        if Z:
            lse = top + tl.log(total)
            squares += tl.where(inside, lse * lse, 0.0)
        preferred = s if SCORED else t
        if BIASED:
            preferred += load_wide(bias_ptr + expert, real)[None, :]
        if NARROW:
            INFINITY: tl.constexpr = 0x7F80 if logits_ptr.dtype.element_ty == tl.bfloat16 else 0x7C00
            key = _narrow(v, at[None, :], INFINITY, BLOCK - 1)
            if EXPERTS != BLOCK:
                key = tl.where(real[None, :], key, 0)
            last = tl.full([TOKENS], 0x80000000, tl.uint32)
            found = tl.zeros([TOKENS, K_BLOCK], tl.uint32)
            for n in range(0, TOP_K):
                last += tl.max(key - last[:, None], 1)  # lower keys wrap to the upper half: the highest of them is the largest
                found = tl.where(k[None, :] == n, last[:, None], found)
            index = BLOCK - 1 - (found & 0x7FFF).to(tl.int32)
            chosen = tl.where((k < TOP_K)[None, :], _narrow_number(found, logits_ptr.dtype.element_ty), -float("inf"))
            counts += (key >= tl.where(inside, last, 0x80000000)[:, None]).to(tl.int32)
        else:
            rank = tl.where(real[None, :], _ranked(preferred, at[None, :], BLOCK - 1), GONE)
            if GROUPS > 1:
                rank = _in_best_groups(rank, OF_GROUPS, TOP_GROUPS, TOKENS, GROUPS, SIZE)
            index = tl.zeros([TOKENS, K_BLOCK], tl.int32)
            chosen = tl.full([TOKENS, K_BLOCK], -float("inf"), tl.float32)
            for n in range(0, TOP_K):
                best = tl.max(rank, 1)
                rank = tl.where(rank == best[:, None], TAKEN, rank)
                place = BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32)
                index = tl.where(k[None, :] == n, (place // SIZE * OWN + place % SIZE)[:, None], index)
                if not SCORED:
                    chosen = tl.where(k[None, :] == n, _number((best >> 32).to(tl.int32))[:, None], chosen)
            counts += ((rank == TAKEN) & inside[:, None]).to(tl.int32)
        to, wanted = row[:, None] * TOP_K + k[None, :], inside[:, None] & (k < TOP_K)[None, :]
        if SCORED:
            chosen = _chosen(logits_ptr, row, index, wanted, inside, EXPERTS)
        picked, share = _weighted(chosen, top, total, SOFTMAX, NORMALIZE)
        tl.store(weights_ptr + to, picked * (scale / share)[:, None], mask=wanted)
        tl.store(indices_ptr + to, index, mask=wanted)
        if KEEP:
            tl.store(kept_ptr + to, picked, mask=wanted)
    tl.store(counts_ptr + part * EXPERTS + expert, tl.sum(counts, 0), mask=real)
    if AUX:
        tl.store(sums_ptr + part * EXPERTS + expert, tl.sum(sums, 0), mask=real)
    if Z:
        tl.store(squares_ptr + part, tl.sum(squares, 0))


@triton.jit
def _weighted(chosen, top, total, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr):
    """The scores of the chosen logits, -inf for a missing one, and their divisor. top and total: the max of all logits, and the sum
    of their exponentials, if scores are made of them."""
    if SOFTMAX and not NORMALIZE:
        return tl.exp(chosen - top[:, None]) / total[:, None], tl.full(total.shape, 1.0, tl.float32)
    if SOFTMAX:
        each, total, _ = _exponentials(chosen)
        return each, total
    picked = _sigmoid(chosen)
    if NORMALIZE:
        return picked, tl.sum(picked, 1) + LEAST
    return picked, tl.full(total.shape, 1.0, tl.float32)


@triton.jit
def _finish(
    parts_ptr, sums_ptr, squares_ptr, counts_ptr, losses_ptr, parts, experts, aux: tl.float32, z: tl.float32, AUX: tl.constexpr,
    Z: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Add a sequence's parts, in order, to its counts and its loss."""
    sequence = tl.program_id(0).to(tl.int64)
    expert, p = tl.arange(0, BLOCK), tl.arange(0, PARTS)
    counts, sums, squares = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32), 0.0
    for start in range(0, parts, PARTS):
        row, inside = sequence * parts + start + p, start + p < parts
        at, wanted = row[:, None] * experts + expert[None, :], inside[:, None] & (expert < experts)[None, :]
        counts += tl.sum(tl.load(parts_ptr + at, mask=wanted, other=0), 0)
        if AUX:
            sums += tl.sum(load_wide(sums_ptr + at, wanted), 0)
        if Z:
            squares += tl.sum(load_wide(squares_ptr + row, inside), 0)
    tl.store(counts_ptr + sequence * experts + expert, counts, mask=expert < experts)
    tl.store(losses_ptr + sequence, aux * tl.sum(counts.to(tl.float32) * sums, 0) + z * squares)


_launch_forward, _launch_finish = launcher(_forward), launcher(_finish)


@declared.route_fwd.triton
def route_fwd(
    logits: Tensor, bias: Optional[Tensor], top_k: int, score: str, normalize: bool, scale: float, groups: int, top_groups: int,
    aux: float, z: float, keep: bool,
) -> tuple[Tensor, Tensor, Optional[Tensor], Tensor, Tensor]:
    sequences, length, experts = logits.shape
    weights = logits.new_empty((sequences, length, top_k), dtype=torch.float32)
    indices, kept = torch.empty_like(weights, dtype=torch.int32), torch.empty_like(weights) if keep else None
    if not (sequences and length):
        return weights, indices, kept, indices.new_zeros((sequences, experts)), weights.new_zeros(())
    size = next_power_of_2(experts // groups)
    blocks = next_power_of_2(groups)
    scored = bias is not None or groups > 1
    narrow = not scored and logits.itemsize == 2 and size <= POSITIONS
    tokens = max(1, (2 * TILE if narrow else TILE) // (blocks * size))
    tiles = cdiv(max(TOKENS, cdiv(length, PROGRAMS)), tokens)
    programs = cdiv(length, tiles * tokens)
    parts = indices.new_empty((sequences, programs, experts))
    sums = torch.empty_like(parts, dtype=torch.float32) if aux else None
    squares = weights.new_empty((sequences, programs)) if z else None
    _launch_forward(
        programs, sequences, 1, logits.contiguous(), contiguous(bias), weights, indices, kept, parts, sums, squares, length,
        tiles, scale, experts, groups, top_k, top_groups, score == "softmax", normalize, bias is not None, scored, keep, aux != 0.0,
        z != 0.0, narrow, tokens, blocks, size, next_power_of_2(top_k), num_warps=8 if blocks * size > 256 else 4,
    )
    counts, losses = indices.new_empty((sequences, experts)), weights.new_empty(sequences)
    block = block_of(experts, experts * 2)
    a, b = aux * experts / (top_k * length * length * sequences), z / (sequences * length)
    _launch_finish(
        sequences, 1, 1, parts, sums, squares, counts, losses, programs, experts, a, b, aux != 0.0, z != 0.0,
        max(1, TILE // 2 // block), block, num_warps=4,
    )
    return weights, indices, kept, counts, losses.view(()) if sequences == 1 else losses.sum()


@triton.jit
def _spread(values, index, expert, k, TOP_K: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Put values of the chosen experts into rows of all experts, 0 elsewhere."""
    found = tl.zeros([TOKENS, BLOCK], tl.float32)
    for n in range(0, TOP_K):
        own = tl.sum(tl.where(k[None, :] == n, index, 0), 1)
        value = tl.sum(tl.where(k[None, :] == n, values, 0.0), 1)
        found = tl.where(expert[None, :] == own[:, None], value[:, None], found)
    return found


@triton.jit
def _of_chosen(g, s, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr):
    """dl of the chosen experts, from g = c dw and s, which for softmax are normalised."""
    if SOFTMAX:
        return s * (g - tl.sum(g * s, 1)[:, None])
    if NORMALIZE:
        total = (tl.sum(s, 1) + LEAST)[:, None]
        g = (g - tl.sum(g * s, 1)[:, None] / total) / total
    return s * (1.0 - s) * g


@triton.jit
def _backward(
    dloss_ptr, dweights_ptr, indices_ptr, kept_ptr, logits_ptr, counts_ptr, dlogits_ptr, length, scale: tl.float32,
    aux: tl.float32, z: tl.float32, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr,
    OF_WEIGHTS: tl.constexpr, ROWS: tl.constexpr, AUX: tl.constexpr, Z: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    row = tl.program_id(1).to(tl.int64) * length + token
    expert, k = tl.arange(0, BLOCK), tl.arange(0, K_BLOCK)
    inside = (token < length)[:, None] & (expert < EXPERTS)[None, :]
    to = row[:, None] * EXPERTS + expert[None, :]
    d = tl.zeros([TOKENS, BLOCK], tl.float32)
    t = d
    if ROWS:
        t = tl.where((expert < EXPERTS)[None, :], load_wide(logits_ptr + to, inside), -float("inf"))
    spread = d
    if OF_WEIGHTS:
        wanted = (token < length)[:, None] & (k < TOP_K)[None, :]
        at = row[:, None] * TOP_K + k[None, :]
        index = tl.load(indices_ptr + at, mask=wanted, other=-1)
        g = tl.where(index < 0, 0.0, scale * load_wide(dweights_ptr + at, wanted))  # 0 for a dropped choice
        index = tl.where(index < 0, -1 - index, index)
        if ROWS:
            chosen = _chosen(logits_ptr, row, index, wanted, token < length, EXPERTS)
            if not SOFTMAX:
                g = _of_chosen(g, _sigmoid(chosen), SOFTMAX, NORMALIZE)
            elif NORMALIZE:
                each, total, _ = _exponentials(chosen)
                g = _of_chosen(g, each / total[:, None], SOFTMAX, NORMALIZE)
        else:
            s = load_wide(kept_ptr + at, wanted)
            g = _of_chosen(g, s if NORMALIZE and not SOFTMAX else s / scale, SOFTMAX, NORMALIZE)
        spread = _spread(g, tl.where(wanted, index, -1), expert, k, TOP_K, TOKENS, BLOCK)
    if ROWS and (SOFTMAX or Z):
        each, total, top = _exponentials(t)
        p = each / total[:, None]
        if SOFTMAX and (AUX or not NORMALIZE):
            d = _of_losses(counts_ptr, dloss_ptr, expert, aux, EXPERTS, AUX, TOKENS, BLOCK)
            if not NORMALIZE:
                d += spread
            d = p * (d - tl.sum(tl.where(inside, d * p, 0.0), 1)[:, None])
        if Z:
            d += (tl.load(dloss_ptr) * z) * (top + tl.log(total))[:, None] * p
    if not SOFTMAX and AUX:
        s = _sigmoid(t)
        total = tl.sum(s, 1)[:, None]
        a = _of_losses(counts_ptr, dloss_ptr, expert, aux, EXPERTS, AUX, TOKENS, BLOCK)
        d += s * (1.0 - s) * (a - tl.sum(a * s, 1)[:, None] / total) / total
    if NORMALIZE or not SOFTMAX:
        d += spread
    store_rounded(dlogits_ptr + to, d, inside)


@triton.jit
def _of_losses(
    counts_ptr, dloss_ptr, expert, aux, EXPERTS: tl.constexpr, AUX: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """dq of the first loss, for a sequence's tokens."""
    found = tl.zeros([TOKENS, BLOCK], tl.float32)
    if AUX:
        at = counts_ptr + tl.program_id(1).to(tl.int64) * EXPERTS + expert
        found += (tl.load(at, mask=expert < EXPERTS, other=0).to(tl.float32) * (tl.load(dloss_ptr) * aux))[None, :]
    return found


_launch_backward = launcher(_backward)


@declared.route_bwd.triton
def route_bwd(
    dloss: Tensor, dweights: Optional[Tensor], indices: Tensor, kept: Optional[Tensor], logits: Optional[Tensor],
    counts: Optional[Tensor], experts: int, dtype: torch.dtype, score: str, normalize: bool, scale: float, aux: float, z: float,
) -> Tensor:
    sequences, length, top_k = indices.shape
    dlogits = dloss.new_empty((sequences, length, experts), dtype=dtype)
    if sequences and length:
        block = block_of(experts, experts * 2)
        tokens = max(1, TILE // block)
        a, b = aux * experts / (top_k * length * length * sequences), 2 * z / (sequences * length)
        _launch_backward(
            cdiv(length, tokens), sequences, 1, dloss.contiguous(), contiguous(dweights), indices.contiguous(), contiguous(kept),
            contiguous(logits), contiguous(counts), dlogits, length, scale, a, b, experts, top_k, score == "softmax", normalize,
            dweights is not None, logits is not None, aux != 0.0, z != 0.0, tokens, block, next_power_of_2(top_k),
            num_warps=8 if block > 256 else 4,
        )
    return dlogits
