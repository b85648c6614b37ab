"""The choice of experts: a program takes some tokens of a sequence, a tile at a time, and holds all their logits.

The best of a row are found one by one. They are compared as integers in the order of the scores, and of positions for equal scores:
no two are equal, and none is chosen twice, whatever the logits are. A key of 31 bits holds a score and its position, and a
difference and a maximum find the best below the last one. Logits of 16 bits, if they are what is compared, fit in a key; of other
scores it holds how far they are below the row's best, without the last bits, and a tile in which these decide is routed again at
the end, by 64 bits. Each program writes its own counts and sums, which a second launch adds in order.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.library.kernels import route as declared
from funcops.library.kernels.pins import launched
from funcops.library.kernels.triton.common import INTERPRETED, block_of, cdiv, contiguous, load_wide, next_power_of_2, store_rounded

BITS = tl.constexpr(3)  # of a score that its key lacks
TILE, TOKENS, PROGRAMS = 2048, 64, 256  # logits of a tile; at least so many tokens of a program, at most so many programs
POSITIONS = 1 << 15  # that fit beside 16 bits of a logit
LEAST = tl.constexpr(declared.LEAST)
GONE = tl.constexpr(-(2**63))  # below every score
TAKEN = tl.constexpr(-(2**63) + 1)
LEAST_ORDER, MOST_ORDER = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)  # below every score, and NaN's


@triton.jit
def _order(v):
    """Map float32 to int32 in the same order: NaN is the highest, and both zeros are equal."""
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    return tl.where(v == v, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _number(order):
    """The float32 that `_order` maps to `order`."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _ranked(order, at, LAST: tl.constexpr):
    """int64 in the order of scores, and for equal ones in the order of their positions `at`, the first the highest."""
    return (order.to(tl.int64) << 32) | (LAST - at).to(tl.int64)


@triton.jit
def _narrow(v, at, INFINITY: tl.constexpr, LAST: tl.constexpr):
    """A key of 31 bits in the order of `_ranked`, for v of 16 bits: the logit as an integer, both zeros as 0 and NaN as the
    highest; then the position."""
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
def _below_best(order, at, LAST: tl.constexpr):
    """A key of 31 bits for LAST + 1 places: how far `order` is below its row's highest, as far as there is room; then the place."""
    FAR: tl.constexpr = (1 << 31) // (LAST + 1) - 1
    away = (tl.max(order, 1)[:, None] - order).to(tl.uint32, bitcast=True) >> BITS
    return (0x7FFFFFFF - at).to(tl.uint32, bitcast=True) - tl.minimum(away, FAR) * (LAST + 1)


@triton.jit
def _in_best_groups(
    order, OF: tl.constexpr, TOP: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    """The scores of the TOP groups, out of OF, with the highest sum of their two best; LEAST_ORDER in the other groups."""
    order = tl.reshape(order, [TOKENS, GROUPS, SIZE])
    first = tl.max(order, 2)
    best = order == first[:, :, None]
    second = tl.max(tl.where(best, LEAST_ORDER, order), 2)
    second = tl.where(tl.sum(best.to(tl.int32), 2) > 1, first, second)
    total = _number(first) + _number(second)
    group = tl.arange(0, GROUPS)
    rank = tl.where(group[None, :] < OF, _ranked(_order(total), group[None, :], GROUPS - 1), GONE)
    for _ in range(0, TOP):
        rank = tl.where(rank == tl.max(rank, 1)[:, None], TAKEN, rank)
    return tl.reshape(tl.where((rank == TAKEN)[:, :, None], order, LEAST_ORDER), [TOKENS, GROUPS * SIZE])


@triton.jit
def _best(key, k, TOP_K: tl.constexpr, TOKENS: tl.constexpr, K_BLOCK: tl.constexpr):
    """The TOP_K highest keys of each row, the one after each of them, and the last."""
    last = tl.full([TOKENS], 0x80000000, tl.uint32)
    found, after = tl.zeros([TOKENS, K_BLOCK], tl.uint32), tl.zeros([TOKENS, K_BLOCK], tl.uint32)
    for n in range(0, TOP_K):
        last += tl.max(key - last[:, None], 1)  # lower keys wrap to the upper half: the highest of them is the largest
        found = tl.where(k[None, :] == n, last[:, None], found)
        after = tl.where(k[None, :] == n - 1, last[:, None], after)
    return found, after, last


@triton.jit
def _choose(order, at, k, TOP_K: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr):
    """The places of the TOP_K best of `order` [TOKENS, BLOCK], in order; the place after each; which they are; and whether a score
    beside the chosen is higher than one of them."""
    LAST: tl.constexpr = BLOCK - 1
    found, after, last = _best(_below_best(order, at, LAST), k, TOP_K, TOKENS, K_BLOCK)
    taken = _below_best(order, at, LAST) >= last[:, None]
    beside, lowest = tl.max(tl.where(taken, LEAST_ORDER, order), 1), tl.min(tl.where(taken, order, MOST_ORDER), 1)
    return LAST - (found & LAST).to(tl.int32), LAST - (after & LAST).to(tl.int32), taken.to(tl.int32), beside > lowest


@triton.jit
def _choose_whole(order, at, k, top_k, TOKENS: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr):
    """The places of the `top_k` best, in order, by whole scores; and which they are."""
    rank = tl.where(order == LEAST_ORDER, GONE, _ranked(order, at, BLOCK - 1))
    place = tl.zeros([TOKENS, K_BLOCK], tl.int32)
    for n in range(0, top_k):
        best = tl.max(rank, 1)
        rank = tl.where(rank == best[:, None], TAKEN, rank)
        place = tl.where(k[None, :] == n, (BLOCK - 1 - (best & 0xFFFFFFFF).to(tl.int32))[:, None], place)
    return place, (rank == TAKEN).to(tl.int32)


@triton.jit
def _choose_logits(
    v, real, at, k, TOP_K: tl.constexpr, MASKED: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, K_BLOCK: tl.constexpr
):
    """The places of the TOP_K best of logits of 16 bits, in order, their logits in float32, and which they are."""
    INFINITY: tl.constexpr = 0x7F80 if v.dtype == tl.bfloat16 else 0x7C00
    key = _narrow(v, at, INFINITY, BLOCK - 1)
    if MASKED:
        key = tl.where(real[None, :], key, 0)
    found, _, last = _best(key, k, TOP_K, TOKENS, K_BLOCK)
    chosen = tl.where((k < TOP_K)[None, :], _narrow_number(found, v.dtype), -float("inf"))
    return BLOCK - 1 - (found & 0x7FFF).to(tl.int32), chosen, (key >= last[:, None]).to(tl.int32)


@triton.jit
def _exponentials(t):
    """exp(t - max), their sum, and the max, for each row. Only the max is subtracted from t: log sum exp t, the sum's logarithm
    plus the max, is rounded at the size of t."""
    top = tl.max(t, 1)
    each = tl.exp(t - top[:, None])
    return each, tl.sum(each, 1), top


@triton.jit
def _sigmoid(t):
    if INTERPRETED:
        return 1.0 / (1.0 + tl.exp(-t))
    else:  # the same in half the instructions: a quotient, and exp, also serve numbers that do not occur here
        root = tl.rsqrt(1.0 + tl.exp2(t * -1.4426950408889634))
        return root * root


@triton.jit
def _score(t, top, total, SOFTMAX: tl.constexpr, SCORED: tl.constexpr):
    """The scores of logits, or, if they are not SCORED, the logits."""
    if not SCORED:
        return t
    elif SOFTMAX:
        return tl.exp(t - top[:, None]) / total[:, None]
    else:
        return _sigmoid(t)


@triton.jit
def _chosen(logits_ptr, row, index, wanted, inside, EXPERTS: tl.constexpr):
    """The logits of the chosen experts, from the cache: -inf beyond TOP_K, and 0 in rows out of range."""
    t = tl.load(logits_ptr + row[:, None] * EXPERTS + index, mask=wanted, other=-float("inf")).to(tl.float32)
    return tl.where(inside[:, None], t, 0.0)


@triton.jit
def _load_rows(
    logits_ptr, row, inside, EXPERTS: tl.constexpr, IN_PARTS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, expert, real
):
    """Logits [TOKENS, BLOCK] in their own dtype. If IN_PARTS, a thread has four parts of a row, each of 16 bytes, rather than
    of four rows: it finds the best of its own before it asks other threads."""
    if IN_PARTS and BLOCK >= 32:
        part, j = tl.arange(0, 4)[:, None, None] * (BLOCK // 4), tl.arange(0, BLOCK // 4)[None, None, :]
        own = part + j
        v = tl.load(logits_ptr + row[None, :, None] * EXPERTS + own, mask=inside[None, :, None] & (own < EXPERTS), other=0.0)
        return tl.reshape(tl.permute(v, 1, 0, 2), [TOKENS, BLOCK])
    else:
        return tl.load(logits_ptr + row[:, None] * EXPERTS + expert[None, :], mask=inside[:, None] & real[None, :], other=0.0)


@triton.jit
def _scores(
    t, inside, sums, squares, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, SCORED: tl.constexpr, AUX: tl.constexpr,
    Z: tl.constexpr, TOKENS: tl.constexpr,
):
    """The scores of a tile's logits, if they are read, and of each row the largest logit and the sum of exponentials; and the sums
    of both losses with the tile's."""
    top, total = tl.zeros([TOKENS], tl.float32), tl.full([TOKENS], 1.0, tl.float32)
    s = t
    if (SOFTMAX and (SCORED or AUX or not NORMALIZE)) or Z:
        each, total, top = _exponentials(t)
        s = each / total[:, None]
    if not SOFTMAX and (SCORED or AUX):
        s = _score(t, top, total, False, True)
    if AUX:
        q = s if SOFTMAX else s / tl.sum(s, 1)[:, None]
        sums += tl.where(inside[:, None], q, 0.0)
    if Z:
        lse = top + tl.log(total)
        squares += tl.where(inside, lse * lse, 0.0)
    return s, top, total, sums, squares


@triton.jit
def _route(
    logits_ptr, bias_ptr, weights_ptr, indices_ptr, kept_ptr, row, inside, expert, real, sums, squares, top_k, scale,
    EXPERTS: tl.constexpr, OF_GROUPS: tl.constexpr, TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr, SOFTMAX: tl.constexpr,
    NORMALIZE: tl.constexpr, BIASED: tl.constexpr, SCORED: tl.constexpr, KEEP: tl.constexpr, AUX: tl.constexpr, Z: tl.constexpr,
    NARROW: tl.constexpr, IN_PARTS: tl.constexpr, WHOLE: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
):
    """Route rows; return which experts were chosen, the sums of both losses, and whether to route again, by WHOLE scores."""
    BLOCK: tl.constexpr = GROUPS * SIZE
    OWN: tl.constexpr = EXPERTS // OF_GROUPS
    at, k = tl.arange(0, BLOCK)[None, :], tl.arange(0, K_BLOCK)
    v = _load_rows(logits_ptr, row, inside, EXPERTS, IN_PARTS, TOKENS, BLOCK, expert, real)
    t = v.to(tl.float32)
    if EXPERTS != BLOCK:
        t = tl.where(real[None, :], t, -float("inf"))
    s, top, total, sums, squares = _scores(t, inside, sums, squares, SOFTMAX, NORMALIZE, SCORED, AUX, Z, TOKENS)
    to, wanted = row[:, None] * TOP_K + k[None, :], inside[:, None] & (k < TOP_K)[None, :]
    wrong = tl.zeros([TOKENS], tl.int1)
    if NARROW:
        index, chosen, taken = _choose_logits(v, real, at, k, TOP_K, EXPERTS != BLOCK, TOKENS, BLOCK, K_BLOCK)
    else:
        preferred = s if SCORED else t
        if BIASED:
            preferred += load_wide(bias_ptr + expert, real)[None, :]
        order = _order(preferred)
        if EXPERTS != BLOCK:
            order = tl.where(real[None, :], order, LEAST_ORDER)
        if GROUPS > 1:
            order = _in_best_groups(order, OF_GROUPS, TOP_GROUPS, TOKENS, GROUPS, SIZE)
        if WHOLE:
            place, taken = _choose_whole(order, at, k, top_k, TOKENS, BLOCK, K_BLOCK)
        else:
            place, after, taken, wrong = _choose(order, at, k, TOP_K, TOKENS, BLOCK, K_BLOCK)
        index = place // SIZE * OWN + place % SIZE
        chosen = _chosen(logits_ptr, row, index, wanted, inside, EXPERTS)
        if not WHOLE:
            other = after // SIZE * OWN + after % SIZE
            followed = wanted & (k < TOP_K - 1)[None, :]
            next = _chosen(logits_ptr, row, other, followed, inside, EXPERTS)
            one, next = _score(chosen, top, total, SOFTMAX, SCORED), _score(next, top, total, SOFTMAX, SCORED)
            if BIASED:
                one += load_wide(bias_ptr + index, wanted)
                next += load_wide(bias_ptr + other, followed)
            rising = (_order(one) < _order(next)) & followed
            wrong |= tl.max(rising.to(tl.int32), 1) > 0
    picked, share = _weighted(chosen, top, total, SOFTMAX, NORMALIZE)
    tl.store(weights_ptr + to, picked * (scale / share)[:, None], mask=wanted)
    tl.store(indices_ptr + to, index, mask=wanted)
    if KEEP:
        tl.store(kept_ptr + to, picked, mask=wanted)
    again = tl.max((wrong & inside).to(tl.int32), 0)
    return tl.where(inside[:, None] & (again == 0), taken, 0), sums, squares, again


@triton.jit
def _forward(
    logits_ptr, bias_ptr, weights_ptr, indices_ptr, kept_ptr, counts_ptr, sums_ptr, squares_ptr, length, tiles, top_k,
    scale: tl.float32, EXPERTS: tl.constexpr, OF_GROUPS: tl.constexpr, TOP_K: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BIASED: tl.constexpr, SCORED: tl.constexpr, KEEP: tl.constexpr,
    AUX: tl.constexpr, Z: tl.constexpr, NARROW: tl.constexpr, IN_PARTS: tl.constexpr, TOKENS: tl.constexpr, FEW: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
):
    """Route tiles of TOKENS tokens of sequence program_id(1). A tile has SIZE slots for the experts of each of GROUPS groups."""
    BLOCK: tl.constexpr = GROUPS * SIZE
    OWN: tl.constexpr = EXPERTS // OF_GROUPS
    expert, sequence = tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    real = (expert % SIZE < OWN) & (expert // SIZE < OF_GROUPS)
    if OWN != SIZE:
        expert = expert // SIZE * OWN + expert % SIZE
    counts, sums = tl.zeros([TOKENS, BLOCK], tl.int32), tl.zeros([TOKENS, BLOCK], tl.float32)
    squares = tl.zeros([TOKENS], tl.float32)
    begin, again = tl.program_id(0) * tiles * TOKENS, tl.full([], 0, tl.int64)  # a bit of `again` for each tile, or for all others
    for tile in range(0, tiles):
        token = begin + tile * TOKENS + tl.arange(0, TOKENS)
        taken, sums, squares, wrong = _route(
            logits_ptr, bias_ptr, weights_ptr, indices_ptr, kept_ptr, sequence * length + token, token < length, expert, real, sums,
            squares, top_k, scale, EXPERTS, OF_GROUPS, TOP_K, TOP_GROUPS, SOFTMAX, NORMALIZE, BIASED, SCORED, KEEP, AUX, Z, NARROW,
            IN_PARTS, False, TOKENS, GROUPS, SIZE, K_BLOCK,
        )
        counts += taken
        again |= wrong.to(tl.int64) << tl.minimum(tile, 62)
    part = sequence * tl.num_programs(0) + tl.program_id(0)
    if AUX:
        tl.store(sums_ptr + part * EXPERTS + expert, tl.sum(sums, 0), mask=real)
    if Z:
        tl.store(squares_ptr + part, tl.sum(squares, 0))
    number = tl.sum(counts, 0)
    if not NARROW:
        if again != 0:
            none, nothing = tl.zeros([FEW, BLOCK], tl.float32), tl.zeros([FEW], tl.float32)
            for few in range(0, tiles * (TOKENS // FEW)):
                if (again >> tl.minimum(few // (TOKENS // FEW), 62)) & 1:
                    token = begin + few * FEW + tl.arange(0, FEW)
                    taken, _, _, _ = _route(
                        logits_ptr, bias_ptr, weights_ptr, indices_ptr, kept_ptr, sequence * length + token, token < length, expert,
                        real, none, nothing, top_k, scale, EXPERTS, OF_GROUPS, TOP_K, TOP_GROUPS, SOFTMAX, NORMALIZE, BIASED,
                        SCORED, KEEP, False, False, False, False, True, FEW, GROUPS, SIZE, K_BLOCK,
                    )
                    number += tl.sum(taken, 0)
    tl.store(counts_ptr + part * EXPERTS + expert, number, mask=real)


@triton.jit
def _weighted(chosen, top, total, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr):
    """The scores of the chosen logits, -inf for a missing one, and their divisor. top and total: the max of all logits, and the sum
    of their exponentials, if scores are made of them."""
    if SOFTMAX and NORMALIZE:
        each, total, _ = _exponentials(chosen)
        return each, total
    picked = _score(chosen, top, total, SOFTMAX, True)
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


@launched(declared.route_fwd)
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
    in_parts = narrow or (experts == blocks * size and logits.itemsize == 2)
    tokens = max(1, (2 * TILE if in_parts else TILE) // (blocks * size))
    tiles = cdiv(max(TOKENS, cdiv(length, PROGRAMS)), tokens)
    programs = cdiv(length, tiles * tokens)
    parts = indices.new_empty((sequences, programs, experts))
    sums = torch.empty_like(parts, dtype=torch.float32) if aux else None
    squares = weights.new_empty((sequences, programs)) if z else None
    _launch_forward(
        programs, sequences, 1, logits.contiguous(), contiguous(bias), weights, indices, kept, parts, sums, squares, length,
        tiles, top_k, scale, experts, groups, top_k, top_groups, score == "softmax", normalize, bias is not None, scored, keep,
        aux != 0.0, z != 0.0, narrow, in_parts, tokens, max(1, tokens // 8), blocks, size, next_power_of_2(top_k),
        num_warps=8 if blocks * size > 256 else 4,
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
    a = d  # dq of the first loss
    if AUX:
        counts = tl.load(counts_ptr + tl.program_id(1).to(tl.int64) * EXPERTS + expert, mask=expert < EXPERTS, other=0)
        a += (counts.to(tl.float32) * (tl.load(dloss_ptr) * aux))[None, :]
    if ROWS and SOFTMAX and (AUX or not NORMALIZE):
        if not NORMALIZE:
            a += spread
        d = p * (a - tl.sum(tl.where(inside, a * p, 0.0), 1)[:, None])
    if ROWS and Z:
        d += (tl.load(dloss_ptr) * z) * (top + tl.log(total))[:, None] * p
    if not SOFTMAX and AUX:
        s = _sigmoid(t)
        total = tl.sum(s, 1)[:, None]
        d += s * (1.0 - s) * (a - tl.sum(a * s, 1)[:, None] / total) / total
    if NORMALIZE or not SOFTMAX:
        d += spread
    store_rounded(dlogits_ptr + to, d, inside)


_launch_backward = launcher(_backward)


@launched(declared.route_bwd)
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
