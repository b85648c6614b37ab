"""`Disk(folder)`, the place of a rule whose tensors lie in files between forward and backward: one thread writes, another reads.

A file belongs to the `File` that made it, and goes with it, at the latest at exit. A process holds the lock of
`funcops-<token>.lock` as long as it has files `funcops-<token>-<number>.residual`; the next process that uses the folder takes a
lock that nobody holds for a crash, and removes the files with its token. A forked child removes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import secrets
import threading
import weakref
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

from torch import Tensor

from funcops.engine.errors import describe, fail, require
from funcops.memory.away import Away, Kept, Waiting, data

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = re.compile(r"funcops-([0-9a-f]{16})\.lock")


@dataclasses.dataclass(frozen=True)
class Disk(Away):
    """Keep the tensor (for a step, every tensor that it keeps) in a file of `folder` until the backward has read it. The bits are
    the same. `Compress(codec) | Disk(folder)` keeps the codes of the codec there.

    A thread writes a copy while the forward goes on, at most four tensors behind it; another reads before the backward, for a layer
    of a repeat while the layer after it runs its backward. A file has the bytes of its tensor, which `report(residuals).places`
    counts as `file`. It is removed when its residuals are used up or dropped, at exit, and after a crash by the next process that
    uses the folder. A pickle or a deep copy has the bytes.

    Raises `TypeError` for a `folder` that is not a path, `ValueError` at a policy's first use for a folder that is missing or
    cannot be written to, and for a tensor under a compiler or a capture. `OSError`, by the path of the tensor, the file and the
    remedy, is raised by the next forward or backward after a disk is full, and by the backward for a file that is missing,
    truncated or has other bytes.

    >>> import tempfile, torch
    >>> from funcops import Disk, Policy, SoftcapConfig, report, softcap, with_policy
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     op = with_policy(softcap, Policy({"x": Disk(folder)}))
    ...     y, residuals = op.fwd(None, torch.zeros(2), SoftcapConfig(30.0))
    ...     print(report(residuals).places)
    ...     dx = op.bwd(residuals, torch.ones(2), SoftcapConfig(30.0))[1]
    ...     del residuals
    ...
    {'here': 0, 'host': 0, 'file': 8}
    >>> dx
    tensor([1., 1.])
    """

    folder: str
    once: ClassVar[str] = "write the file"
    where: ClassVar[str] = "file"  # type: ignore[assignment]

    def __post_init__(self) -> None:
        folder: Any = self.folder
        if not isinstance(folder, str | os.PathLike):
            fail("Disk", "folder", "a path", describe(folder), TypeError)
        require(os.fspath(folder) != "", "Disk", "folder", "a path", "''")
        # a process may change its folder between forward and backward
        object.__setattr__(self, "folder", os.path.abspath(os.fspath(folder)))

    def check(self, where: str, name: str) -> None:
        """Raise `ValueError` unless files can be made in the folder."""
        try:
            _run(self.folder)
        except OSError as error:
            remedy = "a folder that is there, in which files can be made and locked: make it, or name another"
            require(False, where, name, f"for {remedy}", f"{self} ({error.strerror or error})")

    def keep(self, t: Tensor, like: Tensor) -> File:
        self.check("Disk", "a rule")
        return File(_run(self.folder), t, like)


class Run(Waiting):
    """The files of this process in one folder, and the lock that says so as long as there are any."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.pid, self.numbers = folder, os.getpid(), itertools.count()
        if fcntl is None:
            raise OSError("this system has no locks of files")
        while True:
            self.token = secrets.token_hex(8)
            path = os.path.join(folder, f"funcops-{self.token}.lock")
            lock = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            self.close = weakref.finalize(self, _unlock, lock, path, self.pid)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # another process may have taken it for a crash, between the two calls above
            if os.path.exists(path):
                break
            self.close()

    def put(self, file: File) -> None:
        """Let the thread write the file, once the copy is there."""
        self.admit(file)
        self.waiting.append(_threads(self.pid)[0].submit(_write, weakref.ref(file)))


_runs: weakref.WeakValueDictionary[tuple[str, int], Run] = weakref.WeakValueDictionary()
_swept: set[tuple[str, int]] = set()
_making = threading.Lock()


def _run(folder: str) -> Run:
    key = folder, os.getpid()
    with _making:
        run = _runs.get(key)
        if run is None:
            run = _runs[key] = Run(folder)
            if key not in _swept:
                _sweep(folder)
                _swept.add(key)
    return run


def _sweep(folder: str) -> None:
    """Remove the files of processes that have crashed: those whose lock nobody holds."""
    names = os.listdir(folder)
    for found in filter(None, map(LOCK.fullmatch, names)):
        path = os.path.join(folder, found[0])
        try:
            lock = os.open(path, os.O_RDWR)
        except OSError:  # another user's, or gone
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # of a live process
            os.close(lock)
            continue
        own = re.compile(rf"funcops-{found[1]}-[0-9]+\.residual")
        for name in filter(own.fullmatch, names):
            _remove(os.path.join(folder, name), os.getpid())
        _unlock(lock, path, os.getpid())


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:
        try:
            os.unlink(path)
        except OSError:  # somebody was faster, or the folder is gone
            return


def _unlock(lock: int, path: str, pid: int) -> None:
    _remove(path, pid)  # first: who gets the lock must not find the file
    os.close(lock)


@functools.lru_cache(maxsize=1)
def _threads(pid: int) -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    """The thread that writes, and the one that reads, of this process."""
    return ThreadPoolExecutor(1, "funcops-write"), ThreadPoolExecutor(1, "funcops-read")


class _Changed(Exception):
    """A file has not the bytes that were written."""


class File(Kept):
    """The bytes of one tensor in a file, which goes when this object does."""

    faults = (OSError, _Changed)
    lost = "as the forward wrote it (run the forward again, and leave the files of a live process as they are)"
    refused = "written to its folder (free space there, or name another folder, and run the forward again)"

    def __init__(self, run: Run, t: Tensor, like: Tensor) -> None:
        super().__init__(t, like)
        self.run, self.sum = run, 0
        self.path = os.path.join(run.folder, f"funcops-{run.token}-{next(run.numbers)}.residual")
        weakref.finalize(self, _remove, self.path, run.pid)
        run.put(self)

    @property
    def named(self) -> tuple[str, str]:
        return "Disk", f"the file {self.path} ({self.shown()})"

    def ask(self) -> Future[Tensor]:
        return _threads(os.getpid())[1].submit(_read, self)

    def read(self) -> Tensor:
        if os.getpid() != self.run.pid:  # a fork has no thread that would end what the parent began
            self.reading = None
        return super().read()


def _write(of: weakref.ref[File]) -> None:
    file = of()
    if file is None or file.held is None:  # dropped before its turn
        return
    try:
        if file.copied is not None:
            file.copied.synchronize()
        written = data(file.held)
        file.sum = zlib.crc32(written)
        with open(os.open(file.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
            out.write(written)
        file.held = None
    except Exception as error:
        # raised by the next forward that writes here, and by the backward that reads this tensor
        # without its traceback, which holds the file
        file.error = file.run.error = error.with_traceback(None)
        file.held = None
        _remove(file.path, file.run.pid)


def _read(file: File) -> Tensor:
    room = file.room()
    read = data(room)
    with open(file.path, "rb") as given:
        size = os.fstat(given.fileno()).st_size
        if size != file.size or given.readinto(read) != size:
            raise _Changed(f"one of {size} bytes instead of {file.size}: it was cut off or written to")
    if zlib.crc32(read) != file.sum:
        raise _Changed("other bytes: it was written to since, or is a file of another run")
    return room
