"""`lend`: ranks of an axis keep bytes for each other, whether or not they run the same program.

Each pair of ranks has a connection in each direction, by TCP: the rank that asks has a thread that sends what is put and dropped,
and fetches what is taken, in order; the rank that lends has a thread that answers. A message is a `HEAD`: what, the number of the
tensor, its bytes. PUT is answered by YES (then the bytes follow), FULL (with the bytes held and lent) or NONE (no memory), TAKE by
YES and the bytes, DROP and BYE by nothing. A connection that ends frees what was kept for its rank.
"""

from __future__ import annotations

import functools
import hmac
import itertools
import json
import os
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from funcops.distributed import Axis, Mesh, comm
from funcops.engine.errors import fail, require, require_count, require_type, size_of
from funcops.memory.away import Kept, Waiting, data

HEAD = struct.Struct("!BQQ")
PUT, TAKE, DROP, BYE, YES, FULL, NONE = range(7)
WAIT = timedelta(minutes=5)


class Lent:
    """The memory that this rank lends to the others along an axis, and its connections to theirs, of `lend`. `held`: the bytes that
    it keeps now, by the rank that they belong to; `nbytes`: their sum; `peak_bytes`: the most so far; `limit`: the bytes that it
    lends."""

    def __init__(self, axis: Axis, limit: int, wait: float) -> None:
        self.axis, self.limit, self.wait, self.pid = axis, limit, wait, os.getpid()
        self.peak_bytes = 0
        self._held = dict.fromkeys([rank for rank in range(axis.size) if rank != axis.rank], 0)
        self._lines: dict[int, Line] = {}
        self._serving: dict[int, threading.Thread] = {}
        self._sockets: list[socket.socket] = []
        self._changing = threading.Lock()

    @property
    def held(self) -> dict[int, int]:
        with self._changing:
            return dict(self._held)

    @property
    def nbytes(self) -> int:
        return sum(self.held.values())

    def close(self) -> None:
        """End the connections. All ranks must call it: a rank keeps what it holds for others until they close, too. A backward of
        theirs that needs it afterwards raises. Raises `RuntimeError` for ranks that do not close in time."""
        if _open.pop((self.axis, self.pid), None) is None:
            return
        end = time.monotonic() + self.wait
        for line in self._lines.values():
            line.jobs.put(None)
        for thread in (*[line.thread for line in self._lines.values()], *self._serving.values()):
            thread.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, thread in self._serving.items() if thread.is_alive()]
        self._hang_up()
        if late:
            fail("Lent.close", str(self.axis), "closed by all its ranks", f"no answer from {late}", RuntimeError)

    def _hang_up(self) -> None:
        for line in self._lines.values():
            line.broken = line.broken or "memory that was closed"
            line.jobs.put(None)
        for one in self._sockets:
            try:
                one.shutdown(socket.SHUT_RDWR)  # `close` alone does not wake a thread that reads
            except OSError:
                pass
            one.close()

    def __enter__(self) -> Lent:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            return self.close()
        # others need not come to their end: they are told by the ends of their connections
        _open.pop((self.axis, self.pid), None)
        self._hang_up()

    def __repr__(self) -> str:
        return f"Lent({self.axis}, holds {size_of(self.nbytes)} of {size_of(self.limit)})"

    def _serve(self, one: socket.socket, rank: int) -> None:
        """Answer a rank until it says goodbye, or its connection ends."""
        kept: dict[int, Tensor] = {}
        try:
            while True:
                one.settimeout(None)  # until its next request
                what, key, size = _head(one)
                one.settimeout(self.wait)
                if what == PUT and (room := self._room(one, rank, size)) is not None:
                    kept[key] = room
                    _receive(one, data(room))
                elif what == TAKE:
                    _send(one, YES, key, size)
                    one.sendall(data(kept[key]))
                elif what == DROP and key in kept:  # one that was refused is dropped, too
                    self._count(rank, -kept.pop(key).numel())
                elif what == BYE:
                    return
        except OSError:  # the rank has ended: it says so itself
            return
        finally:
            kept.clear()
            self._count(rank, -self.held[rank])

    def _room(self, one: socket.socket, rank: int, size: int) -> Tensor | None:
        """Memory for so many bytes, if that is within the limit. The rank is told."""
        with self._changing:
            before = sum(self._held.values())
            if fits := before + size <= self.limit:
                self._held[rank] += size
                self.peak_bytes = max(self.peak_bytes, before + size)
        if not fits:
            _send(one, FULL, before, self.limit)
            return None
        try:
            room = torch.empty(size, dtype=torch.uint8)
        except (RuntimeError, MemoryError):
            self._count(rank, -size)
            _send(one, NONE, 0, 0)
            return None
        _send(one, YES, 0, size)
        return room

    def _count(self, rank: int, more: int) -> None:
        with self._changing:
            self._held[rank] += more


_open: dict[tuple[Axis, int], Lent] = {}  # by axis and process


def line_to(axis: Axis, rank: int) -> Line:
    """This rank's connection to a rank of an axis. Raises `ValueError` unless the ranks lend memory."""
    lent = _open.get((axis, os.getpid()))
    if lent is None:
        fail("At", "axis", f"one whose ranks lend memory (call lend(mesh, {axis.name!r}, nbytes) on all of them first)", axis)
    return lent._lines[rank]


class Line(Waiting):
    """A connection to a rank that lends memory, and the thread that does its jobs in order. It ends with the first that fails."""

    def __init__(self, one: socket.socket, axis: Axis, rank: int, wait: float) -> None:
        super().__init__()
        one.settimeout(wait)
        self.socket, self.axis, self.rank, self.pid = one, axis, rank, os.getpid()
        self.numbers = itertools.count()
        # its put may be called at any place of the program, by a garbage collection
        self.jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self.broken = ""  # why it has ended
        self.thread = threading.Thread(target=self._work, name=f"funcops-at-{rank}", daemon=True)
        self.thread.start()

    def put(self, guest: Guest) -> None:
        """Let the thread send the bytes."""
        self.admit(guest)
        if self.broken:
            guest.refuse(guest.refused, OSError(self.broken))
        self.waiting.append(self._do(functools.partial(self._put, weakref.ref(guest), guest.key)))

    def take(self, key: int, room: Tensor) -> Future[Tensor]:
        """Let the thread fetch the bytes."""
        if os.getpid() != self.pid:
            raise OSError("a fork, which has no connections: run the forward and backward there, or send it a pickle")
        return self._do(functools.partial(self._take, key, room))

    def drop(self, key: int) -> None:
        if os.getpid() == self.pid:
            self._do(functools.partial(_send, self.socket, DROP, key, 0))

    def _do(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.put((future, job))
        if self.broken:  # else the thread finds the job, or ends after this and refuses it
            self._refuse_all()
        return future

    def _work(self) -> None:
        try:
            while (job := self.jobs.get()) is not None:
                future, call = job
                try:
                    future.set_result(call())
                except Exception as error:
                    self.broken = self.broken or getattr(error, "strerror", None) or str(error) or type(error).__name__
                    future.set_exception(OSError(self.broken))  # a new one, without the frames that hold the tensor
                    return
                del job, future, call  # and the tensor
            _send(self.socket, BYE, 0, 0)
            self.broken = self.broken or "memory that was closed"
        except OSError as error:  # the rank that lends is gone, and nothing is lost with it
            self.broken = self.broken or error.strerror or str(error)
        finally:
            self._refuse_all()

    def _refuse_all(self) -> None:
        while True:
            try:
                job = self.jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job[0].set_exception(OSError(self.broken))

    def _put(self, of: weakref.ref[Guest], key: int) -> None:
        guest = of()
        if guest is None or guest.held is None:  # dropped before its turn
            return
        if guest.copied is not None:
            guest.copied.synchronize()
        _send(self.socket, PUT, key, guest.size)
        what, held, limit = _head(self.socket)
        if what == YES:
            self.socket.sendall(data(guest.held))
        else:
            said = f"{size_of(held)} of {size_of(limit)} in use" if what == FULL else "no memory left there"
            guest.error = self.error = OSError(f"{said}, and {size_of(guest.size)} more to keep")
        guest.held = None  # if the connection ends before, it serves a backward that has begun

    def _take(self, key: int, room: Tensor) -> Tensor:
        _send(self.socket, TAKE, key, 0)
        _head(self.socket)
        _receive(self.socket, data(room))
        return room


class Guest(Kept):
    """The bytes of one tensor in the memory of another rank, which are freed there when this object goes."""

    lost = "kept until it is read (look for the first error among the ranks, and run the forward again)"
    refused = "taken by that rank (lend more there, or drop residuals sooner; or look for the first error among the ranks)"

    def __init__(self, line: Line, t: Tensor, like: Tensor) -> None:
        super().__init__(t, like)
        self.line, self.key = line, next(line.numbers)
        line.put(self)
        weakref.finalize(self, line.drop, self.key)

    @property
    def named(self) -> tuple[str, str]:
        return "At", f"{self.shown()} at rank {self.line.rank} of {self.line.axis}"

    def ask(self) -> Future[Tensor]:
        return self.line.take(self.key, self.room())


def _send(one: socket.socket, what: int, key: int, size: int) -> None:
    one.sendall(HEAD.pack(what, key, size))


def _head(one: socket.socket) -> tuple[int, int, int]:
    head = bytearray(HEAD.size)
    _receive(one, memoryview(head))
    return HEAD.unpack(head)  # type: ignore[return-value]


def _receive(one: socket.socket, room: memoryview) -> None:
    """Fill the room. Raises `OSError` if the connection ends before."""
    while room:
        n = one.recv_into(room)
        if not n:
            raise ConnectionResetError("a connection that has ended, as its process is gone or has closed")
        room = room[n:]


def lend(mesh: Mesh, axis: str, nbytes: int | Mapping[int, int], *, host: str | None = None, wait: timedelta = WAIT) -> Lent:
    """Lend memory of the host to the other ranks along an axis of the mesh, for residuals under a rule `At(rank, mesh[axis])`. All
    ranks of the axis call it, and close what it returns, a context, when no residuals are at another rank. In between a rank need
    not take part: threads answer for it.

    `nbytes`: the most bytes that this rank keeps for all others together, or a dict with the bytes of each rank along the axis (0
    for a rank that it lacks). `host`: the name or address under which the others reach this rank; by default this machine's,
    or the loopback if all ranks are on it. `wait`: how long a rank waits for an answer.

    Raises `RuntimeError` for a rank that cannot be reached, `ValueError` for an axis that lends already.

    >>> import torch
    >>> from funcops import Policy, SoftcapConfig, report, softcap, with_policy
    >>> from funcops.schedule import At, lend
    >>> from funcops.testing import run_ranks
    >>> def step(mesh):
    ...     with lend(mesh, "pp", {1: 1 << 20}):  # rank 1 lends 1 MiB
    ...         if mesh.rank == 1:
    ...             return None
    ...         op = with_policy(softcap, Policy({"x": At(1, mesh["pp"])}))
    ...         y, residuals = op.fwd(None, torch.zeros(2), SoftcapConfig(30.0))
    ...         places = report(residuals).places
    ...         return places, op.bwd(residuals, torch.ones(2), SoftcapConfig(30.0))[1]
    ...
    >>> run_ranks({"pp": 2}, step)[0]
    ({'here': 0, 'host': 0, 'file': 0, 'rank 1 of pp': 8}, tensor([1., 1.]))
    """
    require_type("lend", "mesh", mesh, Mesh)
    require_type("lend", "axis", axis, str)
    along = mesh[axis]
    require_type("lend", "nbytes", nbytes, int, Mapping)
    given = nbytes if isinstance(nbytes, Mapping) else {along.rank: nbytes}
    for rank, size in given.items():
        require_count("lend", 0, rank=rank)
        require(rank < along.size, "lend", "nbytes", f"of ranks of {along}", f"rank {rank}")
        require_count("lend", 0, nbytes=size)
    require_type("lend", "host", host, str, type(None))
    require_type("lend", "wait", wait, timedelta)
    require(wait > timedelta(0), "lend", "wait", "above 0 seconds", wait)
    key = along, os.getpid()
    require(key not in _open, "lend", "axis", "one that lends no memory yet", f"{along}: close() it first")
    lent = Lent(along, given.get(along.rank, 0), wait.total_seconds())
    if along.size > 1:
        _connect(lent, host, mesh.device)
    return _open.setdefault(key, lent)


def _connect(lent: Lent, host: str | None, device: str) -> None:
    """Open the connections to and from each other rank. Each shows a secret of the rank that it reaches, which answers with the
    secret of the rank that it comes from: so none meets a stranger who listens at an address that several machines have."""
    axis, name = lent.axis, socket.gethostname()
    names = comm.all_bytes((host or name).encode(), axis, device)
    if host is None:
        host = "127.0.0.1" if len(set(names)) == 1 else name
    error, listening, secret = "", socket.socket(), secrets.token_hex(16)
    port = 0
    try:
        listening.bind((host, 0))
        listening.listen(axis.size + 128)  # strangers may come first
        port = listening.getsockname()[1]
    except OSError as caught:
        error = f"rank {axis.rank} cannot listen at {host!r} ({caught.strerror or caught})"
    said = [json.loads(one) for one in comm.all_bytes(json.dumps([host, port, secret, error]).encode(), axis, device)]
    tokens = [one[2].encode() for one in said]
    error = next((one[3] for one in said if one[3]), "")
    if not error:
        error = _meet(lent, listening, [(one[0], one[1]) for one in said], tokens)
    listening.close()
    # all know before the first tensor is put whether all are connected
    every = [one.decode() for one in comm.all_bytes(error.encode(), axis, device)]
    error = next(filter(None, every), "")
    if error:
        lent._hang_up()
        wanted = "reachable from all others of the axis (pass its address as host=)"
        fail("lend", "every rank", wanted, error, RuntimeError)


def _meet(lent: Lent, listening: socket.socket, addresses: list[tuple[str, int]], tokens: list[bytes]) -> str:
    """Make the connections. Returns what went wrong, or ""."""
    axis, end = lent.axis, time.monotonic() + lent.wait
    others, out, said = [rank for rank in range(axis.size) if rank != axis.rank], dict[int, socket.socket](), ""
    try:
        for rank in others:
            said = f"rank {axis.rank} cannot reach rank {rank} at {addresses[rank][0]!r}"
            out[rank] = one = socket.create_connection(addresses[rank], lent.wait)
            lent._sockets.append(one)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.sendall(tokens[rank] + HEAD.pack(0, axis.rank, 0))
        said = f"rank {axis.rank} was not reached by all"
        while len(lent._serving) < len(others):
            listening.settimeout(max(0.01, end - time.monotonic()))
            one, _ = listening.accept()
            came = _greeted(one, tokens[axis.rank])
            if came not in others:
                one.close()
                continue
            lent._sockets.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.sendall(tokens[came])
            lent._serving[came] = threading.Thread(target=lent._serve, args=(one, came), name=f"funcops-lend-{came}", daemon=True)
            lent._serving[came].start()
        for rank, one in out.items():
            said = f"rank {axis.rank} met a stranger in the place of rank {rank} at {addresses[rank][0]!r}"
            answer = bytearray(len(tokens[axis.rank]))
            _receive(one, memoryview(answer))
            if not hmac.compare_digest(bytes(answer), tokens[axis.rank]):
                return said
            lent._lines[rank] = Line(one, axis, rank, lent.wait)
    except OSError as error:
        return f"{said} ({error.strerror or error})"
    return ""


def _greeted(one: socket.socket, token: bytes) -> int:
    """The rank that has connected; -1 for a stranger."""
    one.settimeout(10.0)  # a rank greets as it connects
    shown = bytearray(len(token))
    try:
        _receive(one, memoryview(shown))
        rank = _head(one)[1]
    except OSError:
        return -1
    return rank if hmac.compare_digest(bytes(shown), token) else -1
