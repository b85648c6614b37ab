"""Buckets: the layout of a tree's tensors in flat buffers, which may be sharded over the ranks of an axis.

A bucket is [n, m]: row r holds, leaf after leaf, rank r's part of each leaf (n = 1 if nothing is sharded). The part of a leaf [d,
*] is d / n of its rows; if n does not divide d, it is 1/n of its elements in memory order, zero-padded. A plan is data, made once,
and the same on all ranks whose trees have the same leaves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.distributed.checks import check_tensor
from funcops.distributed.mesh import Axis
from funcops.engine.errors import FLOATS, describe, fail, join_path, require_count
from funcops.engine.trees import paths

BUCKET_BYTES = 25 * 2**20
_ALIGNED = 16  # elements: a leaf starts where kernels can read several at once


class BucketLeaf(NamedTuple):
    """A tensor of a tree, by its number among the leaves; `offset` and `size`: of a rank's part in a row of the bucket."""

    number: int
    path: str
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Bucket(NamedTuple):
    """Leaves of one dtype on one device that are sent over the same axes: `rows` parts of `width` elements each."""

    leaves: tuple[BucketLeaf, ...]
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
        """Pack the leaves' tensors into [rows, width]; a tensor that fills the bucket by itself is not copied."""
        dtype = dtype or self.dtype
        if len(self.leaves) == 1:
            t = given[self.leaves[0].number]
            if t.numel() == self.rows * self.width and t.is_contiguous() and t.dtype is dtype:
                return t.detach().view(self.rows, self.width)
        padded = sum([leaf.numel for leaf in self.leaves]) != self.rows * self.width
        flat = torch.zeros if padded else torch.empty
        made = flat(self.rows, self.width, dtype=dtype, device=self.device)
        to, of = [], []
        for leaf in self.leaves:
            for index, part in _pieces(leaf, self.rows, given[leaf.number]):
                to.append(made[index])
                of.append(part)
        if to:
            torch._foreach_copy_(to, of)
        return made

    def pack_parts(self, given: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """Pack a rank's parts of the leaves into [width]."""
        own = self._replace(rows=1, leaves=tuple([leaf._replace(shape=(leaf.size,)) for leaf in self.leaves]))
        return own.pack([t if t is None else t.reshape(-1) for t in given], dtype)[0]

    def parts(self, row: Tensor) -> list[tuple[int, Tensor]]:
        """The number and the part of each leaf in a row [width], as views."""
        parts = [(leaf, row.narrow(0, leaf.offset, leaf.size)) for leaf in self.leaves]
        return [(leaf.number, part.view(part_shape(leaf.shape, self.rows))) for leaf, part in parts]

    def wholes(self, flat: Tensor) -> list[tuple[int, Tensor]]:
        """The number and the tensor of each leaf in all rows [rows * width], as views if the bucket has one row or one leaf."""
        rows = flat.view(self.rows, self.width)
        found = []
        for leaf in self.leaves:
            t = rows.narrow(1, leaf.offset, leaf.size).reshape(-1)
            found.append((leaf.number, t.narrow(0, 0, leaf.numel).view(leaf.shape)))
        return found


def _pieces(leaf: BucketLeaf, rows: int, t: Tensor) -> list[tuple[Any, Tensor]]:
    """The copies that put a leaf into a bucket, each an index and the elements for it: the full parts, and the rest."""
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
    """The shape of a rank's part of a tensor: some of its rows, or of its elements."""
    if n == 1:
        return shape
    if shape and shape[0] % n == 0:
        return (shape[0] // n, *shape[1:])
    return (-(-math.prod(shape) // n),)


class Kind(NamedTuple):
    """A tensor as a plan sees it: its number, path, shape, dtype, device, and the axes over which it is sent."""

    number: int
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axes: tuple[Axis, ...]


def plan(kinds: tuple[Kind, ...], rows: int, bucket_bytes: int, divisible: bool = False) -> tuple[Bucket, ...]:
    """Put the tensors, in order, into buckets of at most `bucket_bytes` (a larger tensor gets one to itself). `divisible`: all axes
    of a bucket together divide its elements evenly."""
    make = _plan.__wrapped__ if torch.compiler.is_dynamo_compiling() else _plan
    return make(kinds, rows, bucket_bytes, divisible)


@functools.lru_cache(maxsize=1024)
def _plan(kinds: tuple[Kind, ...], rows: int, bucket_bytes: int, divisible: bool) -> tuple[Bucket, ...]:
    filling: dict[Any, list[Kind]] = {}
    made: list[tuple[int, list[Kind]]] = []

    def close(key: Any) -> None:
        found = filling.pop(key)
        made.append((found[0].number, found))

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
        leaves.append(BucketLeaf(kind.number, kind.path, kind.shape, width, size))
        width += size
    first = kinds[0]
    multiple = math.prod([axis.size for axis in first.axes]) // rows if divisible else 1
    return Bucket(tuple(leaves), first.dtype, first.device, first.axes, rows, -(-width // multiple) * multiple)


def float_leaves(where: str, name: str, tree: Any) -> dict[str, Tensor | None]:
    """The leaves by path, float tensors or None. Raises `TypeError` with the path of any other leaf."""
    found = paths(tree)
    for path, t in found.items():
        if t is None:
            continue
        said = join_path(name, path)
        if not isinstance(t, Tensor):
            fail(where, said, "a float tensor or None", describe(t), TypeError)
        if t.dtype is torch.uint32:
            fail(where, said, "a float tensor or None (take amaxes out with split_amaxes first)", describe(t), TypeError)
        check_tensor(where, said, t, (...,), FLOATS)
    return found


def require_bytes(where: str, bucket_bytes: Any) -> None:
    require_count(where, bucket_bytes=bucket_bytes)
