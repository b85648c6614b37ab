"""Normalisations: a program a row forward; backward, a fixed number of programs, each with rows and partial sums of its own.

Rows longer than `WHOLE` are walked in chunks of columns, so that nothing spills: the backward then takes the two row sums
first, and gets dx and the partial sums of a chunk of columns from a second pass.
"""

from __future__ import annotations

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcops.backend.launch import launcher
from funcops.kernels import norm as declared
from funcops.kernels.triton.common import block_of, flat_rows, load_wide, store_rounded, warps_of

WHOLE = 8192  # the longest row that a program keeps in registers
CHUNK = 2048
PARTS = 256  # programs, and so partial rows, of a backward; a constant, so that sums do not depend on the device


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, width, alpha: tl.float32, eps: tl.float32,
    CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) * rstd * (w or 1 + w) + b, rstd = (alpha * sum((x - mean)^2) + eps)^(-1/2)."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * width
    y_ptr += row * width
    mean = 0.0
    if CENTRE:
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            i = start + tl.arange(0, BLOCK)
            total += load_wide(x_ptr + i, i < width)
        mean = tl.sum(total, 0) / width
        tl.store(mean_ptr + row, mean)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        centred = tl.where(i < width, load_wide(x_ptr + i, i < width) - mean, 0.0)
        squares += centred * centred
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) * alpha + eps)
    tl.store(rstd_ptr + row, rstd)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        y = (load_wide(x_ptr + i, i < width) - mean) * rstd
        if WEIGHT:
            y *= load_wide(w_ptr + i, i < width) + (1.0 if SHIFTED else 0.0)
        if BIAS:
            y += load_wide(b_ptr + i, i < width)
        store_rounded(y_ptr + i, y, i < width)


@triton.jit
def _terms(dy_ptr, x_ptr, w_ptr, i, inside, mean, rstd, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr):
    """dy, n = (x - mean) * rstd, and g = dy * w, of one row."""
    dy = load_wide(dy_ptr + i, inside)
    n = tl.where(inside, (load_wide(x_ptr + i, inside) - mean) * rstd, 0.0)
    g = dy
    if WEIGHT:
        g = dy * (load_wide(w_ptr + i, inside) + (1.0 if SHIFTED else 0.0))
    return dy, n, g


@triton.jit
def _row_sums(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, sums_ptr, width, alpha: tl.float32,
    CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """alpha * sum(g n) and, where centred, alpha * sum(g), of each row: [rows, 2]."""
    row = tl.program_id(0).to(tl.int64)
    rstd, mean = tl.load(rstd_ptr + row), 0.0
    if CENTRE:
        mean = tl.load(mean_ptr + row)
    along, plain = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        i = start + tl.arange(0, BLOCK)
        _, n, g = _terms(
            dy_ptr + row * width, x_ptr + row * width, w_ptr, i, i < width, mean, rstd, WEIGHT, SHIFTED
        )
        along += g * n
        plain += g
    tl.store(sums_ptr + 2 * row, tl.sum(along, 0) * alpha)
    tl.store(sums_ptr + 2 * row + 1, tl.sum(plain, 0) * alpha if CENTRE else 0.0)


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, sums_ptr, dx_ptr, dw_ptr, db_ptr, rows, width, alpha: tl.float32,
    CENTRE: tl.constexpr, WEIGHT: tl.constexpr, SHIFTED: tl.constexpr, DX: tl.constexpr, DW: tl.constexpr,
    DB: tl.constexpr, SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (g - alpha sum(g) - n alpha sum(g n)) of rows p, p + P, ..., and their part of dw and db, for program p
    and a chunk of columns. With SUMS the two sums of each row are read; otherwise the chunk is the whole row."""
    part, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    dw, db = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for row in range(part, rows, parts):
        rstd, mean = tl.load(rstd_ptr + row), 0.0
        if CENTRE:
            mean = tl.load(mean_ptr + row)
        dy, n, g = _terms(
            dy_ptr + row * width, x_ptr + row * width, w_ptr, i, inside, mean, rstd, WEIGHT, SHIFTED
        )
        if DX:
            if SUMS:
                along, plain = tl.load(sums_ptr + 2 * row), tl.load(sums_ptr + 2 * row + 1)
            else:
                along = tl.sum(g * n, 0) * alpha
                plain = tl.sum(g, 0) * alpha if CENTRE else 0.0
            store_rounded(dx_ptr + row * width + i, rstd * (g - plain - n * along), inside)
        dw += dy * n
        db += dy
    if DW:
        tl.store(dw_ptr + part * width + i, dw, mask=inside)
    if DB:
        tl.store(db_ptr + part * width + i, db, mask=inside)


@triton.jit
def _column_sums(dy_ptr, parts_ptr, rows, width, BLOCK: tl.constexpr):
    part, parts = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for row in range(part, rows, parts):
        total += load_wide(dy_ptr + row * width + i, i < width)
    tl.store(parts_ptr + part * width + i, total, mask=i < width)


_launch_forward, _launch_backward = launcher(_forward), launcher(_backward)
_launch_row_sums, _launch_column_sums = launcher(_row_sums), launcher(_column_sums)


def _normalise(
    x: Tensor, w: Optional[Tensor], b: Optional[Tensor], alpha: float, eps: float, centre: bool, shifted: bool
) -> tuple[Tensor, Optional[Tensor], Tensor]:
    x, rows, width = flat_rows(x)
    y = torch.empty_like(x)
    rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    mean = torch.empty_like(rstd) if centre else None
    if rows:
        block = block_of(width, WHOLE)
        w, b = (None if t is None else t.contiguous() for t in (w, b))
        _launch_forward(
            rows, 1, 1, x, w, b, y, mean, rstd, width, alpha, eps, centre, w is not None, shifted, b is not None, block,
            num_warps=warps_of(block),
        )  # fmt: skip
    return y, mean, rstd


def _gradients(
    dy: Tensor, x: Tensor, w: Optional[Tensor], mean: Optional[Tensor], rstd: Tensor, alpha: float, shifted: bool,
    dx: bool, dw: bool, db: bool,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:  # fmt: skip
    x, rows, width = flat_rows(x)
    dy, w = dy.contiguous(), None if w is None else w.contiguous()
    parts = min(PARTS, rows)
    d_x = torch.empty_like(x) if dx else None
    d_w = x.new_empty((parts, width), dtype=torch.float32) if dw else None
    d_b = x.new_empty((parts, width), dtype=torch.float32) if db else None
    if not rows:
        return d_x, None if d_w is None else d_w.new_zeros((1, width)), None if d_b is None else d_b.new_zeros((1, width))
    chunked = width > WHOLE
    block = block_of(width, CHUNK if chunked else WHOLE)
    how = mean is not None, w is not None, shifted
    sums = x.new_empty((rows, 2), dtype=torch.float32) if chunked and dx else None
    if sums is not None:
        _launch_row_sums(
            rows, 1, 1, dy, x, w, mean, rstd, sums, width, alpha, *how, block, num_warps=warps_of(block)
        )  # fmt: skip
    _launch_backward(
        parts, triton.cdiv(width, block), 1, dy, x, w, mean, rstd, sums, d_x, d_w, d_b, rows, width, alpha,
        *how, dx, dw, db, chunked, block, num_warps=warps_of(block),
    )  # fmt: skip
    return d_x, d_w, d_b


@declared.rms_norm_fwd.triton
def rms_norm_fwd(x: Tensor, w: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    y, _, rstd = _normalise(x, w, None, 1.0 / x.shape[-1], eps, False, centred)
    return y, rstd


@declared.rms_norm_bwd.triton
def rms_norm_bwd(
    dy: Tensor, x: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    return _gradients(dy, x, w, None, rstd, 1.0 / x.shape[-1], centred, dx, dw, False)[:2]


@declared.rms_norm_bwd.fake
def _rms_norm_bwd_fake(
    dy: Tensor, x: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    return torch.empty_like(x) if dx else None, _parts_of(x) if dw else None


def _parts_of(x: Tensor) -> Tensor:
    """Partial sums as `_gradients` and `row_sums` make them, for tracing."""
    width = x.shape[-1]
    return x.new_empty((max(1, min(PARTS, x.numel() // width)), width), dtype=torch.float32)


@declared.layer_norm_fwd.triton
def layer_norm_fwd(
    x: Tensor, w: Tensor, b: Optional[Tensor], eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd = _normalise(x, w, b, 1.0 / x.shape[-1], eps, True, centred)
    assert mean is not None
    return y, mean, rstd


@declared.layer_norm_bwd.triton
def layer_norm_bwd(
    dy: Tensor, x: Tensor, w: Optional[Tensor], mean: Tensor, rstd: Tensor, centred: bool, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    return _gradients(dy, x, w, mean, rstd, 1.0 / x.shape[-1], centred, dx, dw, db)


@declared.layer_norm_bwd.fake
def _layer_norm_bwd_fake(
    dy: Tensor, x: Tensor, w: Optional[Tensor], mean: Tensor, rstd: Tensor, centred: bool, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    return torch.empty_like(x) if dx else None, _parts_of(x) if dw else None, _parts_of(x) if db else None


@declared.row_sums.fake
def _row_sums_fake(dy: Tensor) -> Tensor:
    return _parts_of(dy)


@declared.row_sums.triton
def row_sums(dy: Tensor) -> Tensor:
    dy, rows, width = flat_rows(dy)
    parts = dy.new_zeros((max(1, min(PARTS, rows)), width), dtype=torch.float32)
    if rows:
        block = block_of(width, CHUNK)
        grid = parts.shape[0], triton.cdiv(width, block), 1
        _launch_column_sums(*grid, dy, parts, rows, width, block, num_warps=warps_of(block))
    return parts


@declared.l2_norm_fwd.triton
def l2_norm_fwd(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _, rstd = _normalise(x, None, None, 1.0, eps, False, False)
    return y, rstd


@declared.l2_norm_bwd.triton
def l2_norm_bwd(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    dx = _gradients(dy, x, None, None, rstd, 1.0, False, True, False, False)[0]
    assert dx is not None
    return dx
