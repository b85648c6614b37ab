"""The norms, alone and with the residual sum before them, as rows of `kernel_calls`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_call import KernelCall, Maker, direct, gradient
from funcops.library.kernels import add_norm, group_norm, norm


def _rms_norm(x: Tensor, w: Tensor, *_: Any) -> Tensor:
    return F.rms_norm(x, w.shape, w, 1e-6)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor, *_: Any) -> Tensor:
    return F.layer_norm(x, w.shape, w, b, 1e-6)


def of_norms(make: Maker) -> Iterator[KernelCall]:
    for rows, width in ((131072, 256), (8192, 4096), (4096, 16384)):
        yield from norms(make, *make.sizes(rows, width))


def norms(make: Maker, rows: int, width: int) -> Iterator[KernelCall]:
    shape = f"{rows}x{width}"
    x, dy, w, b = make.floats(rows, width), make.floats(rows, width), make.floats(width), make.floats(width)
    rstd, mean = make.wide(rows, 1), make.wide(rows, 1)
    yield KernelCall(norm.rms_norm_fwd, shape, (x, w, 1e-6, False), direct(_rms_norm))
    yield KernelCall(norm.rms_norm_bwd, shape, (dy, x, w, rstd, False, True, True), gradient(_rms_norm, wrt=2))
    yield KernelCall(norm.layer_norm_fwd, shape, (x, w, b, 1e-6, False), direct(_layer_norm))
    yield KernelCall(
        norm.layer_norm_bwd,
        shape,
        (dy, x, w, mean, rstd, False, True, True, True),
        lambda dy, x, w, *_: gradient(_layer_norm, wrt=3)(dy, x, w, w),
    )
    yield KernelCall(norm.l2_norm_fwd, shape, (x, 1e-6), direct(lambda x, _: F.normalize(x, dim=-1)))
    yield KernelCall(norm.l2_norm_bwd, shape, (dy, x, rstd), gradient(lambda x, _: F.normalize(x, dim=-1), wrt=1))
    yield KernelCall(norm.row_sums, shape, (dy,), direct(lambda dy: dy.sum(0)))
    parts, others = (make.wide(256, -(-width // 16) * 16)[:, :width] for _ in range(2))  # as kernels lay them out
    yield KernelCall(norm.sum_parts, f"256x{width}", (parts, make.dtype))
    yield KernelCall(norm.sum_two_parts, f"256x{width}", (parts, others, make.dtype))
    yield from _add_norms(make, rows, width)


def of_group_norms(make: Maker) -> Iterator[KernelCall]:
    """Group norms of images, as in a diffusion model."""
    batches, size = make.sizes(16, 4096)
    batches = batches if make.shrink == 1 else max(2, batches // 4)
    for channels, groups in ((320, 32), (512, 256)):  # groups larger and smaller than one program can hold
        x, dy, w, b = (
            make.floats(batches, channels, size),
            make.floats(batches, channels, size),
            make.floats(channels),
            make.floats(channels),
        )
        mean, rstd = make.wide(batches, groups), make.wide(batches, groups)
        shape = f"{batches}x{channels}x{size} by {groups}"
        yield KernelCall(
            group_norm.group_norm_fwd,
            shape,
            (x, w, b, groups, 1e-5),
            direct(lambda x, w, b, groups, eps: F.group_norm(x, groups, w, b, eps)),
        )
        yield KernelCall(group_norm.group_norm_bwd, shape, (dy, x, w, mean, rstd, groups, True, True, True))


def _add_norms(make: Maker, rows: int, width: int) -> Iterator[KernelCall]:
    shape = f"{rows}x{width}"
    x, residual, dy, dstream = (make.floats(rows, width) for _ in range(4))
    w, b, rstd, mean = make.floats(width), make.floats(width), make.wide(rows, 1), make.wide(rows, 1)
    yield KernelCall(add_norm.add_rms_norm_fwd, shape, (x, residual, w, 1e-6, False))
    yield KernelCall(add_norm.add_rms_norm_bwd, shape, (dy, dstream, x, w, rstd, False, True, True))
    yield KernelCall(add_norm.add_layer_norm_fwd, shape, (x, residual, w, b, 1e-6, False))
    yield KernelCall(add_norm.add_layer_norm_bwd, shape, (dy, dstream, x, w, mean, rstd, False, True, True, True))
    yield KernelCall(add_norm.add_rms_norm_bwd_recompute, shape, (dy, dstream, x, w, rstd, False, True))
    yield KernelCall(add_norm.add_layer_norm_bwd_recompute, shape, (dy, dstream, x, w, b, mean, rstd, False, True, True))
    yield KernelCall(add_norm.dropout_add_rms_norm_fwd, shape, (x, residual, w, make.key(), 0.1, 1e-6, False))
    yield KernelCall(add_norm.dropout_add_layer_norm_fwd, shape, (x, residual, w, b, make.key(), 0.1, 1e-6, False))
