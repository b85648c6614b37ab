"""`Disk(folder)`, the place of a rule whose tensors lie in files between forward and backward.

A forward copies the tensor (on a device into pinned memory, on the stream for copies), and a thread writes the copy, which is let
go when its bytes are in the file. A second thread reads: for a layer of a repeat while the layer after it runs its backward, else
when the reader asks. The tree has a tensor without memory in the place of the bytes, so `report` counts them and guards see writes.

A file belongs to the `File` that made it, and goes with it, at the latest at exit. A process holds the lock of
`funcops-<token>.lock` as long as it has files `funcops-<token>-<number>.residual`; the next process that uses the folder takes a
lock that nobody holds for a crash, and removes the files with its token. A forked child removes nothing.
"""

from __future__ import annotations

import collections
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
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from funcops.engine.backend.declare import capturing, tracing
from funcops.engine.errors import describe, fail, require, short
from funcops.engine.residuals.offload import copies
from funcops.engine.residuals.policy import Offload
from funcops.engine.trees import leaf, leaves, static, tree

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

AHEAD = 4  # tensors that wait to be written: with more, a slow disk would keep the whole forward in memory
LOCK = re.compile(r"funcops-([0-9a-f]{16})\.lock")


@dataclasses.dataclass(frozen=True)
class Disk(Offload):
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

    def __post_init__(self) -> None:
        folder: Any = self.folder
        if not isinstance(folder, str | os.PathLike):
            fail("Disk", "folder", "a path", describe(folder), TypeError)
        require(os.fspath(folder) != "", "Disk", "folder", "a path", "''")
        # a process may change its folder between forward and backward
        object.__setattr__(self, "folder", os.path.abspath(os.fspath(folder)))

    @property
    def mover(self) -> Disk:
        return self

    def check(self, where: str, name: str) -> None:
        """Raise `ValueError` unless files can be made in the folder."""
        try:
            _run(self.folder)
        except OSError as error:
            remedy = "a folder that is there, in which files can be made and locked: make it, or name another"
            require(False, where, name, f"for {remedy}", f"{self} ({error.strerror or error})")

    def leaves(self, t: Tensor) -> bool:
        return t.numel() > 0

    def on_host(self, t: Tensor) -> InFile:
        """Begin to write the tensor, and return what stands for it."""
        compiled = torch.compiler.is_compiling() or get_proxy_mode() is not None
        shapes = not compiled and (t.is_meta or isinstance(t, FakeTensor))
        if compiled or capturing() or (tracing() and not shapes):
            got = "a compiler, a tracer or a capture, which would write the file once. Use Offload() there"
            fail("Disk", "tensors", "computed step by step", got)
        if not shapes and (t.layout is not torch.strided or is_traceable_wrapper_subclass(t)):
            fail("Disk", "tensors", "dense, with memory of their own", describe(t), TypeError)
        stub = torch.empty_like(t, device="meta", requires_grad=False)  # dense: a view is kept without what lies between
        if shapes:
            return InFile(stub, file=None)
        self.check("Disk", "a rule")
        file = File(_run(self.folder), t.detach(), stub)
        copies.elsewhere[stub.untyped_storage()._cdata] = file.begin
        weakref.finalize(stub.untyped_storage(), copies.elsewhere.pop, stub.untyped_storage()._cdata, None)
        return InFile(stub, file=file)

    def on_device(self, part: Any, device: torch.device) -> Tensor:
        """The tensor again."""
        if type(part) is not InFile:  # of a pickle
            return copies.on_device(part, device)
        if part.file is None:
            return torch.empty_like(part.bytes, device=device)
        host = part.file.read()
        return torch.empty_like(host, device=device).copy_(host, non_blocking=True)


@tree
class InFile:
    """A tensor in a file: one without memory that has its form, and the file, which a forward on shapes does not make."""

    bytes: Any = leaf("the form of the tensor")
    file: Any = static()
    place: ClassVar[str] = "file"

    def __reduce__(self) -> Any:
        # a pickle or a deep copy outlives the file
        return _same, (self.bytes if self.file is None else self.file.read(),)


def _same(t: Tensor) -> Tensor:
    return t


def let_go(kept: Any) -> None:
    """Forget what was read of these files ahead of a backward that does not read it."""
    for node in leaves(kept, is_leaf=lambda node: type(node) is InFile):
        if type(node) is InFile and node.file is not None:
            node.file.reading = None


class Run:
    """The files of this process in one folder, and the lock that says so as long as there are any."""

    def __init__(self, folder: str) -> None:
        self.folder, self.pid, self.numbers = folder, os.getpid(), itertools.count()
        self.waiting: collections.deque[Future[None]] = collections.deque()
        self.error: Exception | None = None  # of a file that could not be written, until a forward has raised it
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

    def put(self, file: File, copied: Any) -> None:
        """Let the thread write the file, once the copy is there."""
        while len(self.waiting) >= AHEAD:
            self.waiting.popleft().result()
        if (error := self.error) is not None:
            self.error = None
            file.refuse(*_UNWRITTEN, error)
        self.waiting.append(_threads(self.pid)[0].submit(_write, weakref.ref(file), copied))


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


_REMEDY = "run the forward again, and leave the files of a live process as they are"
_UNWRITTEN = ("written to its folder (free space there, or name another folder, and run the forward again)",)


class File:
    """The bytes of one tensor, held until they are in the file, which goes when this object does."""

    def __init__(self, run: Run, t: Tensor, like: Tensor) -> None:
        self.run, self.shape, self.stride, self.dtype = run, tuple(like.shape), like.stride(), like.dtype
        self.path = os.path.join(run.folder, f"funcops-{run.token}-{next(run.numbers)}.residual")
        self.device, self.size = t.device, int(like.untyped_storage().nbytes())
        self.error: Exception | None = None
        self.sum = 0
        self.reading: Future[Tensor] | None = None
        # a copy even on the CPU: whoever holds the tensor may write to it before the thread has read it
        self.held: Tensor | None = self.room()
        copied = None
        if copies.own_stream(t) and t.is_cuda:
            side = copies.side(t.device)
            side.wait_stream(copies.current(t.device))
            with copies.on(side):
                self.held.copy_(t, non_blocking=True)
            copies.held_by(side, t)
            copied = side.record_event()
        else:
            self.held.copy_(t)
        weakref.finalize(self, _remove, self.path, run.pid)
        run.put(self, copied)

    def room(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, pin_memory=self.device.type == "cuda")

    def begin(self) -> None:
        """Start to read the file, unless the bytes are held, or that has started."""
        if self.held is None and self.reading is None and self.error is None:
            self.reading = _threads(os.getpid())[1].submit(_read, self)

    def read(self) -> Tensor:
        """The tensor, in the host's memory."""
        held = self.held
        if self.error is not None:
            self.refuse(*_UNWRITTEN, self.error)
        if held is not None:
            return held
        if os.getpid() != self.run.pid:  # a fork has no thread that would end what the parent began
            self.reading = None
        self.begin()
        future, self.reading = self.reading, None
        try:
            return future.result()  # type: ignore[union-attr]
        except (OSError, _Changed) as error:
            self.refuse(f"as the forward wrote it ({_REMEDY})", error)
        finally:
            del future  # its error holds this frame

    def refuse(self, expected: str, error: Exception) -> NoReturn:
        got = (isinstance(error, OSError) and error.strerror) or str(error)
        fail("Disk", f"the file {self.path} ({short(self.dtype)}{list(self.shape)})", expected, got, OSError)


class _Changed(Exception):
    """A file has not the bytes that were written."""


def _bytes(t: Tensor) -> memoryview:
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage()).numpy().data


def _write(of: weakref.ref[File], copied: Any) -> None:
    file = of()
    if file is None or file.held is None:  # dropped before its turn
        return
    try:
        if copied is not None:
            copied.synchronize()
        data = _bytes(file.held)
        file.sum = zlib.crc32(data)
        with open(os.open(file.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
            out.write(data)
        file.held = None
    except Exception as error:
        # raised by the next forward that writes here, and by the backward that reads this tensor
        # without its traceback, which holds the file
        file.error = file.run.error = error.with_traceback(None)
        file.held = None
        _remove(file.path, file.run.pid)


def _read(file: File) -> Tensor:
    room = file.room()
    data = _bytes(room)
    with open(file.path, "rb") as given:
        size = os.fstat(given.fileno()).st_size
        if size != file.size or given.readinto(data) != size:
            raise _Changed(f"one of {size} bytes instead of {file.size}: it was cut off or written to")
    if zlib.crc32(data) != file.sum:
        raise _Changed("other bytes: it was written to since, or is a file of another run")
    return room
