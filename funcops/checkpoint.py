"""Params trees in safetensors files: one entry per leaf, named by its dotted path.

    save(params, "model.safetensors", metadata={"step": "1000"})
    params = load("model.safetensors", like=params)
    read_metadata("model.safetensors")                             # {'step': '1000'}

A None leaf has no entry, and stays None. A tensor at two paths is written twice, so that each path can be read from the
file by itself. A file has a checksum of each tensor, which readers compare. Needs the safetensors package.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from funcops.engine.contract.digest import digest
from funcops.engine.errors import CheckpointError as CheckpointError
from funcops.engine.errors import describe, fail, few, require_flag, require_type, short, unwritten
from funcops.engine.trees import _by_path, tree_map_with_path

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
CHECKSUMS = "funcops.checksums"  # the metadata's entry with the checksums of tensors, and of the other metadata by the name ""
SMALL = 2**28  # bytes of a file that is compared with its checksums without a request: a fraction of a second


def save(tree: Any, path: str | os.PathLike[str], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write every tensor of a tree to `path` atomically: to a temporary file beside it, which is read back and then renamed to
    `path`.

    Raises before anything is written: `CheckpointError`, which names the path, for leaves that are neither tensors with values in
    memory nor None, dtypes that the format lacks, and paths that occur twice or cannot be written; `TypeError` for metadata that
    are not strings, `ValueError` for the name "funcops.checksums" in them; `FileNotFoundError` for a folder that does not exist,
    `FileExistsError` for a path that has something else than a file, such as a device. Raises `CheckpointWriteError`, an `OSError`,
    if the file cannot be written; a file from before then stays.

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
        require_type("save", "a name in metadata", key, str)
        require_type("save", f"metadata[{key!r}]", value, str)
        if key == CHECKSUMS:
            fail("save", "metadata", "of names that save does not write itself", repr(key))
        for text in (key, value):
            _check_text(f"metadata[{key!r}]", text)
    target = Path(os.path.realpath(path))  # a symbolic link stays one: its target is replaced
    if not target.parent.is_dir():
        raise FileNotFoundError(f"save: path must be in an existing folder, got {os.fspath(path)!r}")
    if target.is_dir():
        raise IsADirectoryError(f"save: path must be a file, got the folder {os.fspath(path)!r}")
    if target.exists() and not target.is_file():  # a rename would put a file in its place
        raise FileExistsError(f"save: path must be a new or regular file, got {os.fspath(path)!r}, such as a device or a pipe")
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
        sums = {"": _digest_of_texts(metadata or {})} | {name: f"{digest(t):016x}" for name, t in entries.items()}
        safetensors.torch.save_file(entries, str(beside), metadata={**(metadata or {}), CHECKSUMS: json.dumps(sums)})
        _sort_metadata(beside)
        _sync(beside)
        with _opened("save", beside, verify=False) as file:
            _compare("save", path, file, entries)
        os.replace(beside, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, (safetensors.SafetensorError, OSError)):
            raise unwritten("save", os.fspath(path), error) from error
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
        name = where.encode(errors="backslashreplace").decode()
        fail("save", name, "named by text that can be encoded", ascii(text), CheckpointError)


def _sort_metadata(path: Path) -> None:
    """Put a file's metadata in order: safetensors writes them as a hash map with a random seed has them, and equal trees should
    give equal files."""
    with open(path, "r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header[RESERVED] = dict(sorted(header[RESERVED].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) <= size:  # the tensors' offsets stay
            file.seek(8)
            file.write(text.ljust(size))


def _digest_of_texts(texts: Mapping[str, str]) -> str:
    return f"{zlib.crc32(json.dumps(sorted(texts.items())).encode()):08x}"


def load(path: str | os.PathLike[str], like: T, *, verify: bool | None = None) -> T:
    """Load the tree in a file, with the structure, dtypes and devices of `like` (for meta or fake tensors: on CPU).

    `verify`: whether to compare all tensors with the checksums that `save` wrote; by default if the file has at most 256 MiB. A
    file without checksums, from another writer or an older version, loads as it is.

    Raises `CheckpointError`, before any tensor is returned, for values that are not those saved, and one that lists the leaves that
    are missing, extra, or have another shape or dtype, of each kind the first ten and how many more; `FileNotFoundError` if the
    file does not exist.
    """
    wanted = _named("load", "like", like)
    if verify is not None:
        require_flag("load", verify=verify)
    with _opened("load", path, verify) as file:
        _compare("load", path, file, wanted)
        return tree_map_with_path(lambda name, t: t if wanted[name] is None else _read(file, name, t), like)


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
    """The metadata that were given to `save`. Raises `CheckpointError` if they were changed since."""
    with _opened("read_metadata", path, verify=False) as file:
        said = dict(file.metadata() or {})
        if (sums := _checksums("read_metadata", path, said)) is not None and sums.get("") != _digest_of_texts(said):
            _fail_changed("read_metadata", path, "the metadata")
        return said


def _read(file: Any, name: str, like: Tensor) -> Tensor:
    # Cloned: `get_tensor` may return a view of the memory-mapped file.
    t: Tensor = file.get_tensor(name).clone()
    return t if type(like).__name__ == "FakeTensor" or like.device.type == "meta" else t.to(like.device)


def _named(where: str, name: str, tree: Any) -> dict[str, Any]:
    found = _by_path(where, name, tree, error=CheckpointError)
    # what stands for a tensor that is elsewhere, as in residuals without params
    found = {path: None if getattr(t, "holds_nothing", False) else t for path, t in found.items()}
    for path, t in found.items():
        if t is not None and not isinstance(t, Tensor):
            raise CheckpointError(f"{where}: {name}.{path} must be a tensor or None, got {describe(t)}")
        if t is not None and not path:
            raise CheckpointError(f"{where}: {name} must be a tree whose leaves have names, got a bare tensor")
    return found


@contextlib.contextmanager
def _opened(where: str, path: str | os.PathLike[str], verify: bool | None = None) -> Any:
    """A safetensors file, after it was compared with its checksums (`verify`: as in `load`)."""
    safetensors = _safetensors()
    require_type(where, "path", path, str, os.PathLike)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{where}: path must be an existing file, got {os.fspath(path)!r}")
    try:
        opened = safetensors.safe_open(os.fspath(path), framework="pt", device="cpu")
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{where}: {os.fspath(path)} must be a safetensors file, got {error}") from error
    with opened as file:
        if verify or (verify is None and os.path.getsize(path) <= SMALL):
            _verify(where, path, file)
        yield file


def _verify(where: str, path: Any, file: Any) -> None:
    said = dict(file.metadata() or {})
    sums = _checksums(where, path, said)
    if sums is None:
        return
    names = file.keys()
    if sums.pop("", None) != _digest_of_texts(said):
        _fail_changed(where, path, "the metadata")
    if odd := sorted(sums.keys() ^ set(names)):
        _fail_changed(where, path, odd[0])
    for name in names:
        if f"{digest(file.get_tensor(name)):016x}" != sums[name]:
            _fail_changed(where, path, name)


def _checksums(where: str, path: Any, said: dict[str, str]) -> dict[str, str] | None:
    """The checksums in a file's metadata, from which they are removed; None in a file of another writer."""
    if (text := said.pop(CHECKSUMS, None)) is None:
        return None
    try:
        sums = json.loads(text)
    except (ValueError, RecursionError):
        sums = None
    if not isinstance(sums, dict):
        _fail_changed(where, path, "the list of checksums")
    return sums


def _fail_changed(where: str, path: Any, what: str) -> NoReturn:
    wanted = "as saved (use an older checkpoint, or copy the file again)"
    fail(where, os.fspath(path), wanted, f"other bits in {what}", CheckpointError)


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
