"""Reading chunks of leaves from the files of a checkpoint into the boxes that a rank has of them."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.checkpoint import SMALL
from funcops.distributed.boxes import Box
from funcops.distributed.checkpoint_files import check_files
from funcops.distributed.checkpoint_index import Chunk, Index, Leaf
from funcops.engine.contract.digest import digest
from funcops.engine.errors import CheckpointError, describe, fail, short

DATA = (bool, int, float, str)  # the types of leaves that are not tensors


class _Piece(NamedTuple):
    """The part of a chunk that goes to a view of the same shape: where it starts in the chunk, and the view."""

    starts: tuple[int, ...]
    into: Tensor


def read_tensors(
    folder: Path, index: Index, wanted: Mapping[str, tuple[Tensor, Sequence[Box]]], values: Iterable[str], verify: bool | None
) -> dict[str, Any]:
    """Read the boxes of each tensor into it, and return the leaves that are not tensors. Files are checked before any is read."""
    by_file: dict[str, list[tuple[str, Leaf, Chunk, list[_Piece]]]] = {}
    for name in values:
        leaf = index.leaves[name]
        by_file.setdefault(leaf.chunks[0].file, []).append((name, leaf, leaf.chunks[0], []))
    for name, (t, boxes) in wanted.items():
        leaf = index.leaves[name]
        _check_apart(name, leaf.chunks)
        pieces = {chunk: [one for box in boxes if (one := _piece(chunk, box, t)) is not None] for chunk in leaf.chunks}
        count, there = sum(box.numel for box in boxes), sum(one.into.numel() for each in pieces.values() for one in each)
        if there != count:
            fail("load", name, f"complete, with {count} values", there, CheckpointError)
        for chunk, each in pieces.items():
            if each:
                by_file.setdefault(chunk.file, []).append((name, leaf, chunk, each))
    check_files("load", folder, index.ends, by_file)
    found = {}
    for file, inside in by_file.items():
        summed = verify or (verify is None and index.ends[file] <= SMALL)
        with (folder / file).open("rb") as stream:
            for name, leaf, chunk, pieces_of in inside:
                where = f"{name} in {os.fspath(folder / file)}"
                value = _value(where, stream, leaf, chunk, summed)
                if leaf.dtype is None:
                    found[name] = value
                for starts, into in pieces_of:
                    part = value
                    for dim, (start, n) in enumerate(zip(starts, into.shape, strict=True)):
                        part = part.narrow(dim, start, n)
                    into.copy_(part)
    return found


def _check_apart(name: str, chunks: Sequence[Chunk]) -> None:
    """Raise `CheckpointError` if two chunks have an element in common: then as many values do not fill a box."""
    before: list[Chunk] = []
    for one in sorted((chunk for chunk in chunks if math.prod(chunk.sizes)), key=lambda chunk: chunk.offsets):
        before = [chunk for chunk in before if not one.offsets or chunk.offsets[0] + chunk.sizes[0] > one.offsets[0]]
        for chunk in before:
            if all(a < b + m and b < a + n for a, n, b, m in zip(*chunk[:2], *one[:2], strict=True)):
                got = f"two that have the value at {list(map(max, chunk.offsets, one.offsets))}"
                fail("load", name, "in chunks without a common value", got, CheckpointError)
        before.append(one)


def _piece(chunk: Chunk, box: Box, t: Tensor) -> _Piece | None:
    """The values that a chunk and a box of the tensor share, or None."""
    low = [max(a, b) for a, b in zip(chunk.offsets, box.offsets, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(*chunk[:2], box.offsets, box.sizes, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return None
    into = box.within(t)
    for dim, (start, end, first) in enumerate(zip(low, high, box.offsets, strict=True)):
        into = into.narrow(dim, start - first, end - start)
    return _Piece(tuple(a - b for a, b in zip(low, chunk.offsets, strict=True)), into)


def _value(where: str, stream: Any, leaf: Leaf, chunk: Chunk, summed: bool) -> Any:
    """The tensor or other value of a chunk. Raises `CheckpointError` unless the bytes hold what the index says."""
    try:
        value = torch.load(io.BufferedReader(_Window(stream, chunk)), map_location="cpu", weights_only=True)
    except Exception as error:  # a file may be broken, or made, in any way
        said = " ".join(str(error).split())
        fail("load", where, "as torch writes it (use an older checkpoint, or copy the file again)", f"{said:.200}", CheckpointError)
    if leaf.dtype is None:
        if type(value) not in DATA:
            fail("load", where, "a number, a bool or a string", describe(value), CheckpointError)
    elif type(value) is not Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        fail("load", where, "a dense tensor", describe(value), CheckpointError)
    elif value.dtype is not leaf.dtype or value.shape != chunk.sizes:
        fail("load", where, f"{short(leaf.dtype)}{list(chunk.sizes)}, as the index says", describe(value), CheckpointError)
    if summed and chunk.checksum is not None and checksum(value) != chunk.checksum:
        wanted = "as saved (use an older checkpoint, or copy the file again)"
        fail("load", where, wanted, "other bits", CheckpointError)
    return value


class _Window(io.RawIOBase):
    """The bytes of a chunk as a file, which torch reads without a copy of them."""

    def __init__(self, stream: Any, chunk: Chunk) -> None:
        self.stream, self.start, self.length, self.at = stream, chunk.start, chunk.length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        self.stream.seek(self.start + self.at)
        count: int = self.stream.readinto(memoryview(buffer)[: max(0, self.length - self.at)])
        self.at += count
        return count


def checksum(value: Any) -> str:
    """The checksum of a chunk, or of a leaf that is not a tensor."""
    t = value if isinstance(value, Tensor) else torch.tensor(list(f"{type(value).__name__} {value!r}".encode()), dtype=torch.uint8)
    return f"{digest(t):016x}"
