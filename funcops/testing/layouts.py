"""Memory layouts of equal tensors. A result depends on values alone, so no layout may change it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Layout = Callable[[Tensor], Tensor]
FAR = 977  # a stride that no code expects


def column_major(t: Tensor) -> Tensor:
    """Lay t out with stride 1 in the first dimension."""
    back = list(reversed(range(t.dim())))
    return t.permute(back).clone(memory_format=torch.contiguous_format).permute(back)


def transposed(t: Tensor) -> Tensor:
    """Exchange the last two dimensions in memory."""
    return t if t.dim() < 2 else t.mT.clone(memory_format=torch.contiguous_format).mT


def rolled(t: Tensor) -> Tensor:
    """Make the last dimension the outermost one in memory."""
    return t if t.dim() < 2 else t.movedim(-1, 0).clone(memory_format=torch.contiguous_format).movedim(0, -1)


def spread(t: Tensor) -> Tensor:
    """Lay t out as every second element of a row."""
    return _within(t, (*t.shape, 2), (..., 0))


def sliced(t: Tensor) -> Tensor:
    """Lay the rows out within rows that are longer by 3: with an offset, and unaligned addresses."""
    if t.dim() == 0:
        return spread(t)
    return _within(t, (*t.shape[:-1], t.shape[-1] + 3), (..., slice(1, -2)))


def odd_ones(t: Tensor) -> Tensor:
    """Change the strides of dimensions of size 1 of a contiguous tensor, which have no effect."""
    t = t.contiguous()
    strides = [FAR if n == 1 else s for n, s in zip(t.shape, t.stride(), strict=True)]
    return t.as_strided(t.shape, strides, t.storage_offset())


def _within(t: Tensor, shape: tuple[int, ...], place: Any) -> Tensor:
    """Lay t out in a part of a larger tensor, whose other elements are NaN (of integers: 0)."""
    room = t.new_full(shape, float("nan") if t.is_floating_point() else 0)
    room[place] = t
    return room[place]


LAYOUTS: dict[str, Layout] = {f.__name__: f for f in (column_major, transposed, rolled, spread, sliced, odd_ones)}


def expanded(t: Tensor, dim: int) -> Tensor:
    """Repeat the first values of t along `dim`, with stride 0; this layout changes the values."""
    return t.narrow(dim, 0, min(1, t.shape[dim])).expand(t.shape) if t.dim() else t
