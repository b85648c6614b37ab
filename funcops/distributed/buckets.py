"""Buckets: how the tensors of a tree lie in flat buffers, of which each rank of an axis gets a part.

A bucket is [n, m]: row r holds, leaf after leaf, the part of each leaf that rank r of the axis has (n = 1 where nobody has a part).
The part of a leaf [d, *] is its d / n rows; where n does not divide d, 1/n of its elements as they lie in memory, the last ones
zeros. A plan is data: the same on all ranks that have trees of one kind, and made once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.distributed.mesh import Axis
from funcops.distributed.plain import check_tensor
from funcops.errors import FLOATS, describe, fail, join_path, require_count
from funcops.trees import paths

BUCKET_BYTES = 25 * 2**20
_ALIGNED = 16  # elements: a leaf begins where kernels read many at once


class Leaf(NamedTuple):
    """A tensor of a tree by its place among the leaves; `offset` and `size`: of a rank's part, in a row of its bucket."""

    place: int
    path: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Bucket(NamedTuple):
    """Leaves of one dtype on one device that go over the same axes: `rows` parts of `width` elements each."""

    leaves: tuple[Leaf, ...]
    dtype: torch.dtype
    device: torch.device
    axes: tuple[Axis, ...]
    rows: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * self.dtype.itemsize

    def __str__(self) -> str:
        first, last = self.leaves[0].path, self.leaves[-1].path
        return first if first == last else f"{first} to {last}"

    def pack(self, given: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """[rows, width] of the leaves' tensors: one that fills a bucket by itself as it is, without a copy."""
        dtype = dtype or self.dtype
        if len(self.leaves) == 1:
            t = given[self.leaves[0].place]
            if t.numel() == self.rows * self.width and t.is_contiguous() and t.dtype is dtype:
                return t.detach().view(self.rows, self.width)
        padded = sum([leaf.numel for leaf in self.leaves]) != self.rows * self.width
        flat = torch.zeros if padded else torch.empty
        made = flat(self.rows, self.width, dtype=dtype, device=self.device)
        to, of = [], []
        for leaf in self.leaves:
            for place, part in _pieces(leaf, self.rows, given[leaf.place]):
                to.append(made[place])
                of.append(part)
        if to:
            torch._foreach_copy_(to, of)
        return made

    def pack_parts(self, given: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """[width] of a rank's parts of the leaves."""
        own = self._replace(rows=1, leaves=tuple([leaf._replace(shape=(leaf.size,)) for leaf in self.leaves]))
        return own.pack([t if t is None else t.reshape(-1) for t in given], dtype)[0]

    def parts(self, row: Tensor) -> list[tuple[int, Tensor]]:
        """Of a row [width] the parts of leaves, views of it, with their places."""
        return [(leaf.place, row.narrow(0, leaf.offset, leaf.size).view(part_shape(leaf.shape, self.rows))) for leaf in self.leaves]

    def wholes(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """Of all rows [rows * width] the leaves: views where a bucket has one row or one leaf."""
        rows = flat.view(self.rows, self.width)
        found = []
        for leaf in self.leaves:
            t = rows.narrow(1, leaf.offset, leaf.size).reshape(-1)
            found.append((leaf.place, t.narrow(0, 0, leaf.numel).view(leaf.shape)))
        return found


def _pieces(leaf: Leaf, rows: int, t: Tensor) -> list[tuple[Any, Tensor]]:
    """Where the elements of a leaf go in a bucket, as few copies: full parts, and the rest of them."""
    if not leaf.size:
        return []
    flat = t.detach().reshape(-1)
    full, rest = divmod(leaf.numel, leaf.size)
    end = leaf.offset + leaf.size
    found: list[tuple[Any, Tensor]] = []
    if full:
        found.append(((slice(0, full), slice(leaf.offset, end)), flat[: full * leaf.size].view(full, leaf.size)))
    if rest:
        found.append(((full, slice(leaf.offset, leaf.offset + rest)), flat[full * leaf.size :]))
    return found


def part_shape(shape: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Of a rank's part of a tensor: rows of it, or elements."""
    if n == 1:
        return shape
    if shape and shape[0] % n == 0:
        return (shape[0] // n, *shape[1:])
    return (-(-math.prod(shape) // n),)


class Kind(NamedTuple):
    """What a plan is made of: a tensor's place, path, shape, dtype, device, and the axes that it goes over."""

    place: int
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axes: tuple[Axis, ...]


def plan(kinds: tuple[Kind, ...], rows: int, bucket_bytes: int, divisible: bool = False) -> tuple[Bucket, ...]:
    """The tensors in buckets of at most `bucket_bytes` (a larger tensor has one to itself), in their order. `divisible`: all axes
    of a bucket share out its elements evenly."""
    make = _plan.__wrapped__ if torch.compiler.is_dynamo_compiling() else _plan
    return make(kinds, rows, bucket_bytes, divisible)


@functools.lru_cache(maxsize=1024)
def _plan(kinds: tuple[Kind, ...], rows: int, bucket_bytes: int, divisible: bool) -> tuple[Bucket, ...]:
    filling: dict[Any, list[Kind]] = {}
    made: list[tuple[int, list[Kind]]] = []

    def close(key: Any) -> None:
        found = filling.pop(key)
        made.append((found[0].place, found))

    for kind in kinds:
        key = kind.dtype, kind.device, kind.axes
        if key in filling and _bucket([*filling[key], kind], rows, divisible).nbytes > bucket_bytes:
            close(key)
        filling.setdefault(key, []).append(kind)
    for key in list(filling):
        close(key)
    return tuple([_bucket(found, rows, divisible) for _, found in sorted(made, key=lambda one: one[0])])


def _bucket(kinds: list[Kind], rows: int, divisible: bool) -> Bucket:
    leaves, width = [], 0
    for kind in kinds:
        width = -(-width // _ALIGNED) * _ALIGNED if len(kinds) > 1 else 0
        size = -(-math.prod(kind.shape) // rows)
        leaves.append(Leaf(kind.place, kind.path, kind.shape, width, size))
        width += size
    first = kinds[0]
    multiple = math.prod([axis.size for axis in first.axes]) // rows if divisible else 1
    return Bucket(tuple(leaves), first.dtype, first.device, first.axes, rows, -(-width // multiple) * multiple)


def float_leaves(where: str, name: str, tree: Any) -> dict[str, Tensor | None]:
    """The leaves by path, float tensors or None. Raises `TypeError` with the path of any other."""
    found = paths(tree)
    for path, t in found.items():
        if t is None:
            continue
        said = join_path(name, path)
        if not isinstance(t, Tensor):
            fail(where, said, "a float tensor or None", describe(t), TypeError)
        if t.dtype is torch.uint32:
            wanted = "a float tensor or None (amaxes: take them out by split_amaxes first)"
            fail(where, said, wanted, describe(t), TypeError)
        check_tensor(where, said, t, (...,), FLOATS)
    return found


def require_bytes(where: str, bucket_bytes: Any) -> None:
    require_count(where, bucket_bytes=bucket_bytes)
