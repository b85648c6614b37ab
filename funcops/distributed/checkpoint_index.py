"""The index of a checkpoint, torch's `.metadata`: which leaves there are, and where each chunk of them lies.

torch's reader unpickles the file, which runs what a stranger wrote into it. Here a pickle is read as data: each class that torch's
own indices name becomes a record without methods, and any other name is an error. Then each field is checked. Behind the pickle,
where torch does not read, `save` writes checksums of the pickle and of each chunk.
"""

from __future__ import annotations

import copyreg
import io
import json
import os
import pickle
import pickletools
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcops.engine.errors import CheckpointError, fail

INDEX = ".metadata"  # torch's name of it
MARK = b"\nfuncops checksums: "
Key = tuple[str, tuple[int, ...]]  # a chunk's leaf and offsets


class Chunk(NamedTuple):
    """A block of a leaf, from `offsets` on, and where its bytes lie: `length` of them from `start` on, in a file of the folder."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int
    checksum: str | None = None


class Leaf(NamedTuple):
    """A leaf; without a dtype, one that is not a tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype | None
    chunks: tuple[Chunk, ...]


class Index(NamedTuple):
    leaves: dict[str, Leaf]
    ends: dict[str, int]  # of each file, its size


def read_index(folder: Path, data: bytes) -> Index:
    """Read an index. Raises `CheckpointError` for anything that torch or `save` would not have written."""
    try:
        return _index(data)
    except Exception as error:  # a file may be broken, or made, in any way
        whole = "a whole index of a checkpoint (use an older checkpoint, or copy the file again)"
        fail("load", os.fspath(folder / INDEX), whole, f"{type(error).__name__}: {error}", CheckpointError)


def seal(folder: Path, sums: Mapping[Key, str]) -> None:
    """Add the checksums to an index that torch has written: the file is whole before and after it."""
    index, beside = folder / INDEX, folder / f"{INDEX}.sealed"
    data = index.read_bytes()
    parts = [[name, list(offsets), found] for (name, offsets), found in sums.items()]
    with beside.open("wb") as file:
        file.write(data + MARK + json.dumps({"index": _crc(data), "parts": parts}).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, index)


def _crc(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"


def _index(data: bytes) -> Index:
    stream = io.BytesIO(data)
    read = _Unpickler(stream).checked(data)
    pickled, behind = data[: stream.tell()], data[stream.tell() :]  # not the first mark: a leaf may have it in its name
    sums: dict[Key, str] | None = None
    if behind:
        seal = json.loads(behind.removeprefix(MARK))
        if not behind.startswith(MARK) or seal["index"] != _crc(pickled):
            raise ValueError("other bits than were saved")
        sums = {(name, tuple(offsets)): found for name, offsets, found in seal["parts"]}
    state = _record(read, "Metadata")
    places = dict(_places(state["storage_data"]))
    leaves = {name: _leaf(name, one, places, sums) for name, one in _typed(state["state_dict_metadata"], dict).items()}
    ends: dict[str, int] = {}
    for file, start, length in places.values():
        ends[file] = max(ends.get(file, 0), start + length)
    return Index(leaves, ends)


class _Record:
    """The data of an object of torch's, without its class."""

    __slots__ = ("state",)

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}
_VALUES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): str,
    **{("torch", name): one for name, one in vars(torch).items() if isinstance(one, torch.dtype)},
}


class _Unpickler(pickle.Unpickler):
    """Each call, global or extension of a pickle asks `find_class`; a persistent id is an error, as nothing here serves one."""

    def checked(self, data: bytes) -> Any:
        """The object. If extensions are registered, `pickle` may have some in a cache, for which it does not ask."""
        if copyreg._extension_registry and any(op.name.startswith("EXT") for op, *_ in pickletools.genops(data)):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("an extension, which no index has")
        self.classes: dict[str, type] = {}  # of this file alone: a pickle can set attributes of a class
        return self.load()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return self.classes.setdefault(name, type(name, (_Record,), {"__slots__": ()}))
        if (module, name) in _VALUES:
            return _VALUES[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index has")


def _record(one: Any, kind: str) -> Any:
    """The fields of a record, which must be of this class."""
    if not isinstance(one, _Record) or type(one).__name__ != kind:
        raise ValueError(f"{type(one).__name__} where {kind} is expected")
    return getattr(one, "state", {})


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} where {kind.__name__} is expected")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if type(value) is not tuple or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r:.60} where sizes are expected")
    return value


def _places(stored: Any) -> Iterator[tuple[Key, tuple[str, int, int]]]:
    for index, info in _typed(stored, dict).items():
        key, place = _record(index, "MetadataIndex"), _record(info, "_StorageInfo")
        name, offset = _typed(key["fqn"], str), key.get("offset")
        file, start, length = _typed(place["relative_path"], str), *_sizes((place["offset"], place["length"]))
        if file in ("", ".", "..") or {"/", "\\", "\0", ":"} & set(file):
            raise ValueError(f"{file!r} for {name}, which is not the name of a file in the folder")
        if place.get("transform_descriptors"):
            raise ValueError(f"{name} in a form that only torch reads (load it with torch, and save it again)")
        yield (name, _sizes(() if offset is None else offset)), (file, start, length)


def _leaf(name: Any, one: Any, places: Mapping[Key, tuple[str, int, int]], sums: Mapping[Key, str] | None) -> Leaf:
    def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
        key = _typed(name, str), offsets
        if key not in places:
            raise ValueError(f"no file for {name} at {list(offsets)}")
        return Chunk(offsets, sizes, *places[key], None if sums is None else sums[key])

    if type(one).__name__ == "BytesStorageMetadata":
        return Leaf((), None, (chunk((), ()),))
    state = _record(one, "TensorStorageMetadata")
    size, dtype = _sizes(state["size"]), _record(state["properties"], "TensorProperties")[0]
    found = []
    for each in _typed(state["chunks"], list):
        block = _record(each, "ChunkStorageMetadata")
        offsets, sizes = _sizes(block["offsets"]), _sizes(block["sizes"])
        if not len(offsets) == len(sizes) == len(size) or any(a + n > m for a, n, m in zip(offsets, sizes, size, strict=True)):
            raise ValueError(f"a chunk of {name} that is not a part of {list(size)}")
        found.append(chunk(offsets, sizes))
    return Leaf(size, _typed(dtype, torch.dtype), tuple(found))
