"""Boxes: the parts of a whole leaf that a rank holds, each a block of the leaf and where it lies in the rank's tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from funcops.distributed.buckets import part_shape
from funcops.distributed.mesh import Mesh
from funcops.distributed.specs import Ranges, Spec, by_elements, within


class Box(NamedTuple):
    """A part of a whole leaf, from `offsets` on; `own`: where it starts in the rank's tensor, or, if that is flat, in the block of
    shape `rows` that its elements from `first` on make."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    own: tuple[int, ...]
    first: int = 0
    rows: tuple[int, ...] | None = None

    def within(self, t: Tensor) -> Tensor:
        """The box in the rank's tensor, as a view."""
        t = t if self.rows is None else t.narrow(0, self.first, math.prod(self.rows)).view(self.rows)
        for dim, (start, n) in enumerate(zip(self.own, self.sizes, strict=True)):
            t = t.narrow(dim, start, n)
        return t

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def own_boxes(ranges: Sequence[Ranges], spec: Spec, mesh: Mesh) -> tuple[Box, ...]:
    """The boxes of a leaf that a rank has, from its `own_ranges`."""
    shape = by_elements(spec, mesh)
    if shape is None:
        return tuple(_boxes(ranges))
    found, first = [], 0
    for starts, sizes in own_runs(shape, spec, mesh):
        there = [within(r, start, n) for r, start, n in zip(ranges, starts, sizes, strict=True)]
        found += [box._replace(first=first, rows=sizes) for box in _boxes(there)]
        first += math.prod(sizes)
    return tuple(found)


def own_runs(shape: tuple[int, ...], spec: Spec, mesh: Mesh) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Starts and sizes of the blocks in a rank's part, by elements, of a tensor of `shape`."""
    axis = mesh[spec.fsdp]
    (length,), total = part_shape(shape, axis.size), math.prod(shape)
    return list(_runs(shape, axis.rank * length, min(length, total - axis.rank * length)))


def _runs(shape: tuple[int, ...], first: int, length: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Starts and sizes of the blocks that `length` elements of a tensor make, from the `first` on, in memory order."""
    if not shape and length > 0:
        yield (), ()
        return
    while length > 0:
        row = math.prod(shape[1:])
        at, inside = divmod(first, row)
        if inside or length < row:
            n = min(length, row - inside)
            for starts, sizes in _runs(shape[1:], inside, n):
                yield (at, *starts), (1, *sizes)
        else:
            n = length // row * row
            yield (at, *[0] * len(shape[1:])), (length // row, *shape[1:])
        first, length = first + n, length - n


def _boxes(ranges: Sequence[Ranges]) -> Iterator[Box]:
    along = []
    for pieces in ranges:
        before = itertools.accumulate((n for _, n in pieces), initial=0)
        along.append([(start, n, own) for (start, n), own in zip(pieces, before, strict=False) if n])
    for box in itertools.product(*along):
        yield Box(tuple(b[0] for b in box), tuple(b[1] for b in box), tuple(b[2] for b in box))
