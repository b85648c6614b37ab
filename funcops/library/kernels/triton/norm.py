"""Normalisations: the choice of a kernel and its grid."""

from __future__ import annotations

import functools
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from funcops.library.kernels import norm as declared
from funcops.library.kernels.pins import launched, pins
from funcops.library.kernels.triton import norm_kernels as kernels
from funcops.library.kernels.triton import norm_odd
from funcops.library.kernels.triton.aligned import GROUP
from funcops.library.kernels.triton.common import block_of, cdiv, contiguous, flat_rows, most_warps, stages, warps_of
from funcops.library.kernels.triton.pointwise import dropout_add, threshold_and_factor

LONGEST, ODD_LONGEST = 32768, 8192  # rows that a forward keeps in registers; odd ones with a weight and a bias
LONGEST_BYTES = 32768  # of a row that a backward takes whole, at most
CHUNK = 2048  # elements of a longer row at a time
FORWARD_TILE = 2048  # elements that a program takes at a time, of several rows if they are short
ODD_PROGRAMS = 256  # in a forward of odd rows: 32 rows of 8,192 share a load of weight and bias; a multiple of GROUP, as PARTS is
PIECES = 4  # of a 16-bit row that exceeds a program's tile
TILE_BYTES, ODD_TILE_BYTES = 16384, 8192  # in a backward: a program's loads at a time, of dy and of x each
PARTS = 128  # programs, and so partial rows, of a backward; a constant, so that sums do not depend on the device
PROGRAMS = 512  # of a backward of longer rows, over parts and chunks of columns
SUM_COLUMNS, SUM_PROGRAMS = 512, 256


class Norm(NamedTuple):
    """y = (x - mean) * rstd * (w, or 1 + w if `shifted`) + b, rstd = (alpha * sum((x - mean)^2) + eps)^(-1/2), where the
    mean is 0 unless `centre`."""

    alpha: float
    centre: bool = False
    shifted: bool = False
    eps: float = 0.0


# by elements of a 16-bit row, the fastest on an H100: warps, a tile's divisor, and the factor of PARTS
MEASURED = {512: (4, 2, 2), 1024: (8, 1, 1), 2048: (8, 1, 1), 4096: (8, 1, 1)}


class Whole(NamedTuple):
    """How a backward takes whole rows: `at_once` of them, loaded `again` if no registers are left to keep them; in at most
    `parts` programs."""

    at_once: int
    block: int
    again: bool
    warps: int
    parts: int


def odd(width: int) -> bool:
    """Whether the kernels of `norm_odd` take rows of this width. Of shorter rows a tile has several."""
    return width % 16 != 0 and width > FORWARD_TILE


def from_the_start(width: int) -> bool:
    """Whether rows that `norm_odd` would cut where the tensor's groups of elements begin, which depends on a row's position, are
    taken in chunks from their start on, as longer ones are: in the mode of `pins`."""
    return odd(width) and pins() is not None


@functools.lru_cache(maxsize=1024)
def whole_rows(width: int, itemsize: int) -> Optional[Whole]:
    """How a backward takes whole rows of this width; None if they are too long."""
    if odd(width):
        block = block_of(width // GROUP * GROUP, ODD_LONGEST)
        fits = width <= ODD_LONGEST and block * itemsize <= TILE_BYTES
        return Whole(1, block, False, min(8, warps_of(block)), PARTS) if fits else None
    tile = (TILE_BYTES if width % 16 == 0 else ODD_TILE_BYTES) // itemsize
    block = block_of(width, 2 * LONGEST_BYTES)
    if block * itemsize > LONGEST_BYTES:
        return None
    at_once = max(1, tile // block)
    warps, share, times = max(8, warps_of(at_once * block)), 1, 1
    if itemsize == 2 and width % 16 == 0:
        warps, share, times = MEASURED.get(block, (warps, share, times))
    return Whole(at_once // share, block, block > tile, warps, PARTS * times)


def number_of_parts(rows: int, width: int, whole: Optional[Whole]) -> int:
    if whole is None:
        return max(1, min(PROGRAMS // cdiv(width, CHUNK), rows))
    return max(1, min(whole.parts, cdiv(rows, whole.at_once)))


def parts_like(x: Tensor) -> Tensor:
    """Allocate the partial sums of `gradients`, for x [*, D]."""
    width = int(x.shape[-1])  # a symbolic one is fixed, as blocks are made for it
    whole = whole_rows(width, x.itemsize)
    return room(x, number_of_parts(x.numel() // width, width, whole), whole is not None and odd(width))


def stride_of(width: int) -> int:
    """The stride of parts that `room` lays apart, each of which begins at a multiple of 16 bytes."""
    return cdiv(width, 16) * 16


def room(x: Tensor, parts: int, apart: bool) -> Tensor:
    """Allocate partial sums for x [*, D]; with `apart`, they are `stride_of` apart."""
    width = x.shape[-1]
    if apart:
        return x.new_empty((parts, stride_of(width)), dtype=torch.float32)[:, :width]
    return x.new_empty(parts, width, dtype=torch.float32)


def rows_of(*parts: Tensor) -> tuple[tuple[Tensor, ...], int]:
    """Return the parts, all [P, D], and the width to sum: beyond D, up to their stride, if `room` laid them apart, so that each
    begins at a multiple of 16 bytes."""
    count, width = parts[0].shape
    stride = stride_of(width)
    if stride != width and all(p.stride() == (stride, 1) and _holds(p, count * stride) for p in parts):
        return parts, stride
    return tuple([p.contiguous() for p in parts]), width


def _holds(t: Tensor, size: int) -> bool:
    """Whether the memory has so many elements from t's first on."""
    return (t.storage_offset() + size) * t.itemsize <= t.untyped_storage().nbytes()


def normalise(
    x: Tensor, w: Optional[Tensor], b: Optional[Tensor], how: Norm, residual: Optional[Tensor] = None,
    key: Optional[Tensor] = None, p: float = 0.0,
) -> tuple[Tensor, Optional[Tensor], Tensor, Optional[Tensor]]:
    """Return y, mean, rstd, and with `residual` the sum that was normalised: residual + x or, with a key, residual + dropout(x)."""
    x, rows, width = flat_rows(x)
    long = width > (FORWARD_TILE if width % 16 else ODD_LONGEST)  # rows for the other kernels of a forward
    if key is not None and (width % 4 or long) and residual is not None:
        x, key, residual = dropout_add(x, None, residual, key, p), None, None  # dropout's words are laid out by fours
        y, mean, rstd, _ = normalise(x, w, b, how)
        return y, mean, rstd, x
    y = torch.empty_like(x)
    stream = None if residual is None else torch.empty_like(x)
    rstd = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    mean = torch.empty_like(rstd) if how.centre else None
    w, b, residual = contiguous(w), contiguous(b), contiguous(residual)
    flags = residual is not None, how.centre, w is not None, how.shifted, b is not None
    tensors = w, b, y, stream, mean, rstd
    if not rows:
        pass
    elif width > (LONGEST if width % 16 == 0 else ODD_LONGEST) or from_the_start(width):
        kernels.launch_forward_long(
            rows, 1, 1, x, residual, *tensors, width, how.alpha, how.eps, *flags, CHUNK, num_warps=warps_of(CHUNK)
        )
    elif odd(width):
        block = block_of(width // GROUP * GROUP, ODD_LONGEST)
        norm_odd.launch_forward(
            min(rows, ODD_PROGRAMS), 1, 1, x, residual, *tensors, rows, width, how.alpha, how.eps, *flags, stages(), block,
            num_warps=warps_of(block),
        )
    else:
        block = block_of(width, LONGEST)
        at_once = max(1, FORWARD_TILE // block)
        kernels.launch_forward(
            cdiv(rows, at_once), 1, 1, x, residual, contiguous(key), *tensors, rows, width, how.alpha, how.eps,
            *threshold_and_factor(p), flags[0], key is not None, *flags[1:], at_once, block,
            num_warps=warps_of(at_once * block) if block <= ODD_LONGEST else most_warps() if block == LONGEST else 8,
        )
    return y, mean, rstd, stream


def gradients(
    dy: Tensor, x: Tensor, w: Optional[Tensor], mean: Optional[Tensor], rstd: Tensor, how: Norm, dx: bool, dw: bool,
    db: bool, add: Optional[Tensor] = None, b: Optional[Tensor] = None, recomputed: Optional[Tensor] = None,
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    """Return dx + `add`, and the partial sums of dw and db. `recomputed` receives the forward's y, which has the bias b."""
    x, rows, width = flat_rows(x)
    dy, w, add, b = dy.contiguous(), contiguous(w), contiguous(add), contiguous(b)
    mean, rstd = contiguous(mean), rstd.contiguous()
    d_x = torch.empty_like(x) if dx else None
    whole = None if from_the_start(width) else whole_rows(width, x.itemsize)
    parts, apart = number_of_parts(rows, width, whole), whole is not None and odd(width)
    d_w, d_b = room(x, parts, apart) if dw else None, room(x, parts, apart) if db else None
    flags = add is not None, how.centre, w is not None, how.shifted
    tensors, normed = (mean, rstd, add), (b is not None, recomputed is not None)
    if not rows:
        return d_x, None if d_w is None else d_w.zero_(), None if d_b is None else d_b.zero_()
    if whole is not None and apart:
        norm_odd.launch_backward(
            parts, 1, 1, dy, x, w, b, *tensors, d_x, recomputed, d_w, d_b, rows, width, stride_of(width), how.alpha,
            *flags, *normed, dx, dw, db, min(stages(), 2 if db or add is not None else 3),  # fewer stages leave registers
            whole.block, num_warps=whole.warps,
        )
        return d_x, d_w, d_b
    if whole is not None and whole.again and x.itemsize == 2 and (dw or db or how.centre):
        kernels.launch_backward_row(
            parts, 1, 1, dy, x, w, b, *tensors, d_x, recomputed, d_w, d_b, rows, width, how.alpha, *flags, *normed, dx, dw, db,
            dx and dw and db,  # two partial sums leave no registers to keep the row
            PIECES, whole.block // PIECES, num_warps=whole.warps,
        )
        return d_x, d_w, d_b
    if whole is not None:
        twice = whole.again and dx and x.itemsize == 4
        kernels.launch_backward(
            parts, 1, 1, dy, x, w, b, *tensors, d_x, recomputed, d_w, d_b, rows, width, how.alpha, *flags, *normed, dx, dw, db,
            twice, 1 if whole.again or width % 16 else stages(), whole.at_once, whole.block,
            num_warps=most_warps() if twice else whole.warps,  # 16 would spill float32
        )
        return d_x, d_w, d_b
    sums = x.new_empty((rows, 2), dtype=torch.float32) if dx else None
    if dx:
        kernels.launch_row_sums(
            rows, 1, 1, dy, x, w, mean, rstd, sums, width, how.alpha, *flags[1:], CHUNK, num_warps=warps_of(CHUNK)
        )
    kernels.launch_backward_long(
        parts, cdiv(width, CHUNK), 1, dy, x, w, b, *tensors, sums, d_x, recomputed, d_w, d_b, rows, width, *flags, *normed,
        dx, dw, db, CHUNK,
        num_warps=warps_of(CHUNK),
    )
    return d_x, d_w, d_b


@launched(declared.rms_norm_fwd)
@declared.rms_norm_fwd.triton
def rms_norm_fwd(x: Tensor, w: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    y, _, rstd, _ = normalise(x, w, None, Norm(1.0 / x.shape[-1], False, centred, eps))
    return y, rstd


@launched(declared.rms_norm_bwd)
@declared.rms_norm_bwd.triton
def rms_norm_bwd(
    dy: Tensor, x: Tensor, w: Optional[Tensor], rstd: Tensor, centred: bool, dx: bool, dw: bool
) -> tuple[Optional[Tensor], Optional[Tensor]]:
    return gradients(dy, x, w, None, rstd, Norm(1.0 / x.shape[-1], False, centred), dx, dw, False)[:2]


@declared.rms_norm_bwd.fake
def _rms_norm_bwd_fake(x: Tensor, dx: bool, dw: bool) -> tuple[Optional[Tensor], Optional[Tensor]]:
    return torch.empty_like(x) if dx else None, parts_like(x) if dw else None


@launched(declared.layer_norm_fwd)
@declared.layer_norm_fwd.triton
def layer_norm_fwd(x: Tensor, w: Tensor, b: Optional[Tensor], eps: float, centred: bool) -> tuple[Tensor, Tensor, Tensor]:
    y, mean, rstd, _ = normalise(x, w, b, Norm(1.0 / x.shape[-1], True, centred, eps))
    assert mean is not None
    return y, mean, rstd


@launched(declared.layer_norm_bwd)
@declared.layer_norm_bwd.triton
def layer_norm_bwd(
    dy: Tensor, x: Tensor, w: Optional[Tensor], mean: Tensor, rstd: Tensor, centred: bool, dx: bool, dw: bool, db: bool
) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    return gradients(dy, x, w, mean, rstd, Norm(1.0 / x.shape[-1], True, centred), dx, dw, db)


@declared.layer_norm_bwd.fake
def _layer_norm_bwd_fake(x: Tensor, dx: bool, dw: bool, db: bool) -> tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]:
    return torch.empty_like(x) if dx else None, parts_like(x) if dw else None, parts_like(x) if db else None


@functools.lru_cache(maxsize=1024)
def sums_tile(width: int, itemsize: int) -> tuple[int, int, int]:
    """The largest number of parts of column sums, and the rows and columns that a program takes at a time."""
    block = block_of(width, SUM_COLUMNS)
    at_once = (TILE_BYTES if width % 16 == 0 else ODD_TILE_BYTES) // itemsize // block
    if odd(width):  # a multiple of GROUP, or a row each
        return cdiv(SUM_PROGRAMS // cdiv(width // GROUP * GROUP, block), GROUP) * GROUP, at_once, block
    return SUM_PROGRAMS // cdiv(width, block), at_once, block


@declared.row_sums.fake
def sums_like(dy: Tensor) -> Tensor:
    """Allocate the partial sums of dy's columns, for dy [*, D]."""
    width = int(dy.shape[-1])  # as in `parts_like`; rows may be symbolic
    rows, (most, at_once, _) = dy.numel() // width, sums_tile(width, dy.itemsize)
    return room(dy, max(1, min(most, rows if odd(width) else cdiv(rows, at_once))), odd(width))


@launched(declared.row_sums)
@declared.row_sums.triton
def row_sums(dy: Tensor) -> Tensor:
    width = dy.shape[-1]
    dy = dy.reshape(-1, width) if width else dy
    dy = dy.contiguous() if dy.stride(-1) != 1 or odd(width) else dy
    rows = dy.shape[0]
    parts, (_, at_once, block) = sums_like(dy), sums_tile(width, dy.itemsize)
    if not rows:
        return parts.zero_()
    count = parts.shape[0]
    if odd(width):
        across = cdiv(width // GROUP * GROUP, block) + 1  # the last program: both ends of the rows
        norm_odd.launch_column_sums(
            count, across, 1, dy, parts, rows, width, stride_of(width), stages(), at_once, block, num_warps=4
        )
        return parts
    kernels.launch_column_sums(
        count, cdiv(width, block), 1, dy, parts, rows, width, dy.stride(0), stages(), at_once, block, num_warps=4
    )
    return parts


@launched(declared.sum_parts)
@declared.sum_parts.triton
def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    (parts,), stride, width = *rows_of(parts), parts.shape[1]
    total = parts.new_empty(stride, dtype=dtype)
    _launch_sum(parts, None, total, None, stride, False)
    return total if stride == width else total[:width]


def add_parts(parts: Tensor, total: Tensor, add: bool) -> None:
    """Write the sum of parts [P, D] to total [D]; with `add`, add it."""
    _launch_sum(parts.contiguous(), None, total, None, parts.shape[1], add)


def _launch_sum(
    parts: Tensor, others: Optional[Tensor], total: Tensor, other_total: Optional[Tensor], width: int, add: bool
) -> None:
    rows, block = 32, 64
    grid = cdiv(width, block), 1 if others is None else 2, 1
    tensors = parts, others, total, other_total
    kernels.launch_sum_parts(*grid, *tensors, parts.shape[0], width, add, others is not None, rows, block, num_warps=4)


@launched(declared.sum_two_parts)
@declared.sum_two_parts.triton
def sum_two_parts(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if a.shape != b.shape:
        return sum_parts(a, dtype), sum_parts(b, dtype)
    (a, b), stride, width = *rows_of(a, b), a.shape[1]
    totals = a.new_empty(stride, dtype=dtype), a.new_empty(stride, dtype=dtype)
    _launch_sum(a, b, *totals, stride, False)
    return totals if stride == width else (totals[0][:width], totals[1][:width])


@launched(declared.l2_norm_fwd)
@declared.l2_norm_fwd.triton
def l2_norm_fwd(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, _, rstd, _ = normalise(x, None, None, Norm(1.0, eps=eps))
    return y, rstd


@launched(declared.l2_norm_bwd)
@declared.l2_norm_bwd.triton
def l2_norm_bwd(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    dx = gradients(dy, x, None, None, rstd, Norm(1.0), True, False, False)[0]
    assert dx is not None
    return dx
