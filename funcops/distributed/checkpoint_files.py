"""The folder of a checkpoint among its neighbours: it is put in place whole, found after a save that was killed, and checked."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from funcops.errors import CheckpointError, fail

INDEX = ".metadata"  # torch's name of it


def put_in_place(beside: Path, target: Path) -> None:
    """Rename a folder to its target, then delete the old target and what killed saves left. If a save is killed between the two
    renames, `folder_of` finds the new one."""
    old = beside.with_suffix(".old")
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(beside, target)
    except BaseException:
        if old.exists():
            os.replace(old, target)
        raise
    for left in [one for suffix in ("old", "part") for one in hidden(target, suffix)]:
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def hidden(target: Path, suffix: str) -> list[Path]:
    """The hidden folders of saves to a target, the latest first."""
    found = target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 16}.{suffix}")
    return sorted(found, key=lambda one: one.stat().st_mtime, reverse=True)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder to read: `path`, or beside it a complete one that a save was killed before it could rename."""
    target = Path(os.path.realpath(path))
    for folder in (target, *(() if target.exists() else hidden(target, "part"))):
        if (folder / INDEX).is_file():
            return folder
    raise FileNotFoundError(f"load: path must be the folder of a checkpoint, got {os.fspath(path)!r}")


def index_of(reader: Any, folder: Path) -> Any:
    try:
        return reader.read_metadata()
    except Exception as error:
        whole = "a whole index of a checkpoint (use an older checkpoint, or copy the file again)"
        fail("load", os.fspath(folder / INDEX), whole, f"{type(error).__name__}: {error}", CheckpointError)


def check_files(folder: Path, stored: Mapping[Any, Any], items: Iterable[Any]) -> None:
    """Raise `CheckpointError` if a file that has a part of the items is missing or cut short."""
    ends: dict[str, int] = {}
    for item in items:
        info = stored[item.storage_index]
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        file = folder / name
        size = file.stat().st_size if file.is_file() else None
        if size is None or size < end:
            whole = f"a file of at least {end} bytes (use an older checkpoint, or copy the file again)"
            fail("load", os.fspath(file), whole, "no file" if size is None else f"{size} bytes", CheckpointError)
