"""The parts of a whole value that ranks hold, found by their shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

Key = tuple[str, str, str]


class Layouts:
    """The shapes of the values on each rank, by the value; a value that has other shapes in a run of one process is cut into parts
    like them."""

    def __init__(self, ranks: Iterable[Any]) -> None:
        self.shapes: dict[Key, tuple[int, ...]] = {}
        for rank in ranks:
            self.shapes.update({row.key[:3]: row.shape for row in rank.rows if not row.part})

    def parts(self, key: Key, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The parts of a whole value in the shape that ranks have, each with its name. Along the axis that is shorter on a rank
        they lie one after the other, or, as of two projections in one weight, in two groups: both are given."""
        shape = self.shapes.get(key)
        if shape is None or shape == tuple(whole.shape) or len(shape) != whole.dim():
            return
        shorter = [axis for axis, (a, b) in enumerate(zip(shape, whole.shape, strict=True)) if a != b]
        if len(shorter) != 1 or not shape[shorter[0]] or whole.shape[shorter[0]] % shape[shorter[0]]:
            return
        (axis,), count = shorter, whole.shape[shorter[0]] // shape[shorter[0]]
        for i, part in enumerate(whole.chunk(count, axis)):
            yield f"{i + 1} of {count} along {axis}", part
        if whole.shape[axis] % (2 * count) == 0:
            pairs = zip(*(half.chunk(count, axis) for half in whole.chunk(2, axis)), strict=True)
            for i, pair in enumerate(pairs):
                yield f"{i + 1} of {count} along {axis}, in 2 groups", torch.cat(pair, axis)
