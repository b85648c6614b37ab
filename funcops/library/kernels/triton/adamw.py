"""AdamW in one launch for all tensors of a dtype: a program takes a chunk of one tensor, and finds tensor and chunk in a table
of addresses on the device, which is made for each new set of addresses."""

from __future__ import annotations

import functools
import math
from typing import Any, Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.engine.backend.launch import launcher
from funcops.engine.errors import require
from funcops.library.kernels import adamw as declared
from funcops.library.kernels.tables import Table, Tables
from funcops.library.kernels.triton.common import cdiv, load_wide, store_rounded

BLOCK, BLOCKS = 1024, 16  # elements that a program takes at a time, and how many times
KEPT = 32  # tables in the cache


@triton.jit
def _own(first_ptr, table_ptr, field: tl.constexpr, ALIGNED: tl.constexpr):
    """The tensor's pointer. The table holds distances in elements, as a compiler cannot see the alignment of loaded addresses."""
    distance = tl.load(table_ptr + field)
    if ALIGNED:
        distance = tl.multiple_of(distance, 16)
    return first_ptr + distance


@triton.jit
def _step(p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, i, inside, factor, new1, new2, shrink, rate, root, eps):
    p, g = load_wide(p_ptr + i, inside), load_wide(g_ptr + i, inside) * factor
    m, v = load_wide(m_ptr + i, inside), load_wide(v_ptr + i, inside)
    m += new1 * (g - m)
    v += new2 * (g * g - v)
    p = p * shrink - rate * m / (tl.sqrt(v) / root + eps)
    store_rounded(p_ptr + i, p, inside)
    store_rounded(m_ptr + i, m, inside)
    store_rounded(v_ptr + i, v, inside)
    if w_ptr is not None:
        store_rounded(w_ptr + i, p, inside)


@triton.jit
def _adamw(
    table_ptr, chunks_ptr, p_ptr, g_ptr, m_ptr, v_ptr, t_ptr, w_ptr, lr_ptr, factor_ptr, lr: tl.float32,
    new1: tl.float32, new2: tl.float32, log1: tl.float32,
    log2: tl.float32, eps: tl.float32, weight_decay: tl.float32, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """`chunks[c]` is (tensor, chunk of that tensor); a row of the table is (distances of p, g, m, v, t and w from the first
    tensor's, number of elements, whether decayed). A beta b is passed as 1 - b and log b, which float32 cannot compute from b."""
    program = tl.program_id(0).to(tl.int64)
    table_ptr += tl.load(chunks_ptr + 2 * program) * 8
    start = tl.load(chunks_ptr + 2 * program + 1) * (BLOCK * BLOCKS)
    own_p, own_g = _own(p_ptr, table_ptr, 0, ALIGNED), _own(g_ptr, table_ptr, 1, ALIGNED)
    own_m, own_v = _own(m_ptr, table_ptr, 2, ALIGNED), _own(v_ptr, table_ptr, 3, ALIGNED)
    step = tl.load(_own(t_ptr, table_ptr, 4, False)).to(tl.float64)
    own_w = None if w_ptr is None else _own(w_ptr, table_ptr, 5, ALIGNED)
    n, decays = tl.load(table_ptr + 6), tl.load(table_ptr + 7)
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(tl.float32)
    factor = 1.0 if factor_ptr is None else tl.load(factor_ptr).to(tl.float32)
    # b^t is close to 1 at first, so 1 - b^t takes more digits than float32 has
    rate = lr / (1.0 - tl.exp(step * log1)).to(tl.float32)
    root = tl.sqrt((1.0 - tl.exp(step * log2)).to(tl.float32))
    shrink = tl.where(decays != 0, 1.0 - lr * weight_decay, 1.0)
    for at in range(start, tl.minimum(start + BLOCK * BLOCKS, n), BLOCK):
        i = at + tl.arange(0, BLOCK)
        if at + BLOCK <= n:  # no mask, so that loads and stores are whole vectors
            inside = tl.full([BLOCK], True, tl.int1)
            _step(own_p, own_g, own_m, own_v, own_w, i, inside, factor, new1, new2, shrink, rate, root, eps)
        else:
            _step(own_p, own_g, own_m, own_v, own_w, i, i < n, factor, new1, new2, shrink, rate, root, eps)


_launch = launcher(_adamw)


def _log(beta: float) -> float:
    return math.log(beta) if beta else -float("inf")


_tables, _chunks = Tables(KEPT), Tables(KEPT)


@declared.adamw.triton
def adamw(
    params: list[Tensor], grads: list[Tensor], exp_avg: list[Tensor], exp_avg_sq: list[Tensor], steps: list[Tensor],
    work: list[Tensor], decayed: list[bool], lr: float, lr_tensor: Optional[Tensor], factor: Optional[Tensor], beta1: float,
    beta2: float, eps: float, weight_decay: float,
) -> None:
    if lr_tensor is not None and lr_tensor.device != params[0].device:
        lr, lr_tensor = float(lr_tensor), None
    rows: list[Any] = [params, grads, exp_avg, exp_avg_sq, steps, work or [None] * len(params), decayed]
    for _, (p, g, m, v, t, w, decays) in declared.grouped(rows, [g.dtype for g in grads]):
        g = [one.contiguous() for one in g]
        sizes = tuple([one.numel() for one in p])
        (table,), aligned, _ = _table_of((p, g, m, v, t, *((w,) if work else ())), sizes, decays)
        (chunks,), _, _ = _chunks.get(p[0].device, sizes, functools.partial(_chunks_of, sizes))
        if chunks.shape[0]:
            one_width = len({row[0].itemsize for row in (p, g, *((w,) if work else ()))}) == 1
            _launch(
                chunks.shape[0], 1, 1, table, chunks, p[0], g[0], m[0], v[0], t[0], w[0], lr_tensor, factor, lr,
                1.0 - beta1, 1.0 - beta2, _log(beta1), _log(beta2), eps, weight_decay, aligned, BLOCK, BLOCKS,
                num_warps=4 if one_width else 8,  # 4 elements a thread: vectors of two widths have one layout, so none is moved
            )


def _table_of(rows: tuple[Any, ...], sizes: tuple[int, ...], decays: Any) -> Table:
    """The table of these addresses, a new one if gradients have moved, as in most steps. Its note: whether every distance except
    the steps' is a multiple of 16."""
    addresses = tuple([tuple([one.data_ptr() for one in row]) for row in rows])
    widths = tuple([row[0].itemsize for row in rows])
    return _tables.get(
        rows[0][0].device, (addresses, sizes, widths, tuple(decays)), lambda: _new_table(addresses, widths, sizes, decays)
    )


def _new_table(addresses: Any, widths: Any, sizes: tuple[int, ...], decays: Any) -> tuple[tuple[Tensor, ...], bool]:
    (p, grads, *others), (width, grad_width, *other_widths) = addresses, widths
    fixed, aligned = _without_grads((p, *others), (width, *other_widths), sizes, tuple(decays))
    distances, even = _distances(grads, grad_width)
    rows = fixed.clone()
    rows[:, 1] = distances
    return (rows,), aligned and even


@functools.lru_cache(KEPT)
def _without_grads(addresses: Any, widths: Any, sizes: tuple[int, ...], decays: tuple[bool, ...]) -> tuple[Tensor, bool]:
    """The table but for its column of gradients, which alone are elsewhere in most steps; and the note of the rest."""
    columns, even = zip(*[_distances(row, width) for row, width in zip(addresses, widths, strict=True)], strict=True)
    p, m, v, t, *w = columns
    own = [torch.tensor(column, dtype=torch.int64, device="cpu") for column in (sizes, decays)]
    rows = torch.stack((p, torch.zeros_like(p), m, v, t, *(w or [torch.zeros_like(p)]), *own), 1)
    return rows, all([*even[:3], *even[4:]])


def _distances(row: tuple[int, ...], width: int) -> tuple[Tensor, bool]:
    """Distances from the first address in elements, and whether all are multiples of 16."""
    apart = torch.tensor(row, dtype=torch.int64, device="cpu") - row[0]
    even = not (apart % (16 * width)).any()
    odd = not even and bool((apart % width).any())
    require(not odd, "adamw", "tensors", "at addresses that are multiples of their element size", "some that are not")
    return apart // width, even


def _chunks_of(sizes: tuple[int, ...]) -> tuple[tuple[Tensor, ...], None]:
    counts = torch.tensor([cdiv(n, BLOCK * BLOCKS) for n in sizes], dtype=torch.int64, device="cpu")
    tensor = torch.repeat_interleave(torch.arange(len(sizes), device="cpu"), counts)
    before = (counts.cumsum(0) - counts)[tensor]
    return (torch.stack((tensor, torch.arange(tensor.numel(), device="cpu") - before), 1),), None
