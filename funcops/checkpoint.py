"""Params trees in safetensors files: one entry per leaf, named by its dotted path.

    save(params, "model.safetensors", metadata={"step": "1000"})
    params = load("model.safetensors", like=params)
    read_metadata("model.safetensors")                             # {'step': '1000'}

A None leaf has no entry, and stays None. A tensor at two paths is written twice, so that each path can be read from the
file by itself. Needs the safetensors package.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from funcops.errors import CheckpointError as CheckpointError
from funcops.errors import describe, fail, few, require_type, short
from funcops.trees import leaves, paths, tree_map_with_path

__all__ = ["CheckpointError", "load", "read_metadata", "save"]

T = TypeVar("T")
CODES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
}
RESERVED = "__metadata__"  # a name that the format reserves


def save(tree: Any, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write every tensor of a tree to `path` atomically: to a temporary file beside it, which is read back and then renamed to
    `path`.

    Raises before anything is written: `CheckpointError`, which names the path, for leaves that are neither tensors with values in
    memory nor None, dtypes that the format lacks, and paths that occur twice or cannot be written; `TypeError` for metadata that
    are not strings; `FileNotFoundError` for a folder that does not exist. Raises `OSError` if the file cannot be written.

    >>> import tempfile, torch
    >>> from funcops.checkpoint import load, read_metadata, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/model.safetensors"
    ...     save({"w": torch.ones(2), "bias": None}, path, metadata={"step": "1000"})
    ...     load(path, like={"w": torch.empty(2, device="meta"), "bias": None}), read_metadata(path)
    ...
    ({'w': tensor([1., 1.]), 'bias': None}, {'step': '1000'})
    """
    safetensors = _safetensors()
    require_type("save", "path", path, str, os.PathLike)
    if metadata is not None:
        require_type("save", "metadata", metadata, Mapping)
    for key, value in (metadata or {}).items():
        require_type("save", "metadata", key, str)
        require_type("save", f"metadata[{key!r}]", value, str)
        for text in (key, value):
            _check_text(f"metadata[{key!r}]", text)
    target = Path(os.path.realpath(path))  # a symbolic link stays one: its target is replaced
    if not target.parent.is_dir():
        raise FileNotFoundError(f"save: path must be in an existing folder, got {os.fspath(path)!r}")
    if target.is_dir():
        raise IsADirectoryError(f"save: path must be a file, got the folder {os.fspath(path)!r}")
    found = {name: t for name, t in _named("save", "tree", tree).items() if t is not None}
    for name, t in found.items():
        _check_writable(name, t)
    entries: dict[str, Tensor] = {}
    taken: dict[int, list[tuple[int, int]]] = {}  # by storage
    for name, t in found.items():
        try:
            kept = t.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        except (RuntimeError, NotImplementedError) as error:  # such as a negative view of a dtype without a negation
            fail("save", f"tree.{name}", "a tensor that torch can copy", error, CheckpointError)
        start, others = kept.data_ptr(), taken.setdefault(kept.untyped_storage().data_ptr(), [])
        span = start, start + kept.nbytes
        if any([first < span[1] and span[0] < last for first, last in others]):  # the format holds no memory twice
            kept = kept.clone()
        others.append(span)
        entries[name] = kept
    beside = target.with_name(f".{secrets.token_hex(8)}.part")  # without the target's name, which may have the maximum length
    try:
        safetensors.torch.save_file(entries, str(beside), metadata=dict(metadata or {}) or None)
        _sync(beside)
        with _opened("save", beside) as file:
            _compare("save", path, file, entries)
        os.replace(beside, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, safetensors.SafetensorError):
            raise OSError(f"save: {os.fspath(path)!r} could not be written: {error}") from error
        raise
    if os.name == "posix":
        _sync(target.parent)  # the rename itself


def _check_writable(name: str, t: Tensor) -> None:
    where = f"tree.{name}"
    if t.layout is not torch.strided or t.is_nested:
        fail("save", where, "a dense tensor", f"one of layout {t.layout}", CheckpointError)
    if t.is_meta or is_traceable_wrapper_subclass(t) or type(t).__name__ == "FakeTensor":
        got = f"{type(t).__name__} on {t.device}"
        fail("save", where, "a tensor with values of its own (for a DTensor pass its full_tensor())", got, CheckpointError)
    if t.dtype not in CODES.values():
        fail("save", where, f"of a dtype among {', '.join(map(short, CODES.values()))}", short(t.dtype), CheckpointError)
    if name == RESERVED:
        fail("save", where, "another name (the format reserves this one)", repr(name), CheckpointError)
    _check_text(where, name)


def _check_text(where: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        fail("save", repr(where), "named by text that can be encoded", ascii(text), CheckpointError)


def load(path: str | os.PathLike[str], like: T) -> T:
    """Load the tree in a file, with the structure, dtypes and devices of `like` (for meta or fake tensors: on CPU).

    Raises `CheckpointError`, before any tensor is read, listing the leaves that are missing, extra, or have another shape or
    dtype, of each kind the first ten and how many more; `FileNotFoundError` if the file does not exist.
    """
    wanted = _named("load", "like", like)
    with _opened("load", path) as file:
        _compare("load", path, file, wanted)
        return tree_map_with_path(lambda name, t: None if t is None else _read(file, name, t), like)


def _compare(where: str, path: Any, file: Any, wanted: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` unless the file holds these tensors, by name, shape and dtype."""
    there = set(file.keys())
    wrong: dict[str, list[str]] = {"missing": [], "extra": [], "mis-shaped": [], "mis-typed": []}
    for name, t in wanted.items():
        if t is None:
            continue
        if name not in there:
            wrong["missing"].append(f"{name} {describe(t)}")
            continue
        entry = file.get_slice(name)
        shape, code = list(entry.get_shape()), entry.get_dtype()
        if shape != list(t.shape):
            wrong["mis-shaped"].append(f"{name} {list(t.shape)}, got {shape}")
        if CODES.get(code) is not t.dtype:
            got = short(CODES[code]) if code in CODES else code
            wrong["mis-typed"].append(f"{name} {short(t.dtype)}, got {got}")
    wrong["extra"] = sorted(name for name in there if wanted.get(name) is None)
    said = "".join(f"\n  {kind}: {few(names, 10, '; ')}" for kind, names in wrong.items() if names)
    if said:
        raise CheckpointError(f"{where}: {os.fspath(path)} must hold the tree of like, got{said}")


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata that were given to `save`."""
    with _opened("read_metadata", path) as file:
        return dict(file.metadata() or {})


def _read(file: Any, name: str, like: Tensor) -> Tensor:
    # Cloned: `get_tensor` may return a view of the memory-mapped file.
    t: Tensor = file.get_tensor(name).clone()
    return t if type(like).__name__ == "FakeTensor" or like.device.type == "meta" else t.to(like.device)


def _named(where: str, name: str, tree: Any) -> dict[str, Any]:
    found = paths(tree)
    if len(found) != len(leaves(tree)):
        every: list[str] = []
        tree_map_with_path(lambda path, _: every.append(path), tree)
        twice = ", ".join(sorted(path for path, count in Counter(every).items() if count > 1))
        fail(
            where,
            name,
            "a tree with one leaf per path",
            f"keys with dots, or of two types, that give two leaves the same path: {twice}",
            CheckpointError,
        )
    for path, t in found.items():
        if t is not None and not isinstance(t, Tensor):
            raise CheckpointError(f"{where}: {name}.{path} must be a tensor or None, got {describe(t)}")
        if t is not None and not path:
            raise CheckpointError(f"{where}: {name} must be a tree whose leaves have names, got a bare tensor")
    return found


@contextlib.contextmanager
def _opened(where: str, path: str | os.PathLike[str]) -> Any:
    safetensors = _safetensors()
    require_type(where, "path", path, str, os.PathLike)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{where}: path must be an existing file, got {os.fspath(path)!r}")
    try:
        opened = safetensors.safe_open(os.fspath(path), framework="pt", device="cpu")
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{where}: {os.fspath(path)} must be a safetensors file, got {error}") from error
    with opened as file:
        yield file


def _sync(path: Path) -> None:
    """Wait until a file, or a directory's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError("funcops.checkpoint needs safetensors: pip install safetensors") from error
    return safetensors
