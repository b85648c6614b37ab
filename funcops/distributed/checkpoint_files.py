"""The folder of a checkpoint among its neighbours: what may be replaced, a save that has it to itself, a folder put in place whole,
found after a save that was killed, and checked."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path

from funcops.distributed.checkpoint_index import INDEX
from funcops.engine.errors import CheckpointError, fail, few

try:
    import fcntl
except ImportError:  # not on Windows, where saves to one path are not kept apart
    fcntl = None  # type: ignore[assignment]


LONGEST = 232  # bytes of a folder's name: what is beside it has 23 more, and file systems allow 255


class Part:
    """The hidden folder to which a save writes, beside its target, and a locked file beside it, which says that it does so: the
    lock of a process that was killed is gone."""

    def __init__(self, target: Path) -> None:
        self.target = target
        check_replaceable(target)
        self.folder = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
        self.claim = self.folder.with_suffix(".lock")
        descriptor = os.open(self.claim, os.O_RDWR | os.O_CREAT)
        self.release = weakref.finalize(self, os.close, descriptor)
        try:
            _lock(descriptor)
            # After its own lock: of two that begin at once, the second to lock sees the first. A save that ends meanwhile may
            # have taken this one's file, not locked yet, for a killed one's.
            others = [one for one in hidden(target, "lock") if one != self.claim]
            if any(map(_is_locked, others)) or not self.claim.exists():
                wanted = "one that no other save writes to (finish() that save first, or choose another path)"
                fail("save", "path", wanted, repr(os.fspath(target)), CheckpointError)
            self.folder.mkdir()
        except BaseException:
            self.drop()
            raise

    def put_in_place(self) -> None:
        """Rename the folder to its target, then delete the old target and what killed saves left. If a save is killed between the
        two renames, `folder_of` finds the new one."""
        target, old = self.target, self.folder.with_suffix(".old")
        check_replaceable(target)
        try:
            if target.exists():
                with contextlib.suppress(OSError):
                    shutil.copymode(target, self.folder)
                os.replace(target, old)
            os.replace(self.folder, target)
        except BaseException:  # Ctrl-C between the two, too: `drop` deletes the new
            if old.exists() and not target.exists():
                os.replace(old, target)
            raise
        # Before the lock is released: then each of these is of a save that was killed.
        for left in [one for suffix in ("old", "part", "lock") for one in hidden(target, suffix) if one != self.claim]:
            if left.is_dir():
                shutil.rmtree(left)
            elif not _is_locked(left):
                left.unlink(missing_ok=True)
        self.release()
        self.claim.unlink(missing_ok=True)

    def drop(self) -> None:
        """Delete what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.release()
        with contextlib.suppress(OSError):
            self.claim.unlink()


def _lock(descriptor: int) -> bool:
    """Lock an open file, unless somebody else has. A file system without locks does not keep saves apart."""
    if fcntl is not None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass
    return True


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # deleted meanwhile
        return False
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def check_replaceable(target: Path) -> None:
    """Raise `CheckpointError` if something else than a checkpoint is at the path: a save would delete it."""
    wanted = "new, an empty folder, or the folder of a checkpoint and of nothing else (choose another path)"
    if not target.exists():
        return
    if not target.is_dir():
        fail("save", "path", wanted, f"the file {os.fspath(target)!r}", CheckpointError)
    here = Path.cwd()
    if target in (here, *here.parents):
        fail("save", "path", wanted, f"the folder in which the process works, {os.fspath(target)!r}", CheckpointError)
    with os.scandir(target) as entries:
        kinds = {one.name: one.is_file(follow_symlinks=False) for one in entries}
    others = sorted(name for name, file in kinds.items() if not (file and (name == INDEX or name.endswith((".distcp", INDEX)))))
    if others or (kinds and INDEX not in kinds):
        got = f"{os.fspath(target)!r} with {few(others, 3)}" if others else f"{os.fspath(target)!r} without an index"
        fail("save", "path", wanted, got, CheckpointError)


def hidden(target: Path, suffix: str) -> list[Path]:
    """The hidden files and folders of saves to a target, the latest first."""
    found = target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * 16}.{suffix}")
    return sorted(found, key=lambda one: one.lstat().st_mtime, reverse=True)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """The folder to read: `path`, or beside it a complete one that a save was killed before it could rename."""
    target = Path(os.path.realpath(path))
    for folder in (target, *(() if target.exists() else hidden(target, "part"))):
        if (folder / INDEX).is_file():
            return folder
    raise FileNotFoundError(f"load: path must be the folder of a checkpoint, got {os.fspath(path)!r}")


def stamp(folder: Path) -> tuple[int, int]:
    """Numbers that tell a checkpoint from another that was put in its place. Raises `CheckpointError` if its index is a link."""
    _check_no_link("load", folder / INDEX)
    index = (folder / INDEX).stat()
    return index.st_ino, index.st_mtime_ns


def _check_no_link(where: str, file: Path) -> None:
    """Raise `CheckpointError` if a file of a checkpoint is a link: it may lead out of the folder."""
    if file.is_symlink():
        fail(where, os.fspath(file), "a file of the folder (copy it there)", f"a link to {os.readlink(file)}", CheckpointError)


def check_same(where: str, folder: Path, before: tuple[int, int]) -> None:
    """Raise `CheckpointError` if a save has replaced the checkpoint since: what was read may be of both."""
    try:
        same = stamp(folder) == before
    except OSError:
        same = False
    if not same:
        wanted = "left alone while it is read (load it again)"
        fail(where, os.fspath(folder), wanted, "one that a save has replaced meanwhile", CheckpointError)


def check_files(where: str, folder: Path, ends: Mapping[str, int], files: Iterable[str]) -> None:
    """Raise `CheckpointError` if a file is missing, cut short or too long, or is a link out of the folder. `ends`: by name, the
    bytes of a file."""
    for name in sorted(files):
        file, end = folder / name, ends[name]
        _check_no_link(where, file)
        size = file.stat().st_size if file.is_file() else None
        if size != end:
            least = "" if size is not None and size > end else "at least "
            whole = f"a file of {least}{end} bytes (use an older checkpoint, or copy the file again)"
            fail(where, os.fspath(file), whole, "no file" if size is None else f"{size} bytes", CheckpointError)
