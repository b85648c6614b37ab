"""`run_ranks`: the ranks of a mesh as threads of this process, without a process group.

Each rank runs under a mode that takes torch's functional collectives to a board that all share. It is stricter than a network: a
result is NaN until it is waited for; a source that was written to in flight, a collective that its group does not agree on, a
collective that nobody waits for, and ranks that wait for one another raise at once. Sums are in the order of the ranks.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket, _OpNamespace
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.distributed.agreement import unexpected_rows
from funcops.distributed.handshake import Collective
from funcops.distributed.mesh import Axis, Mesh
from funcops.engine.errors import describe, fail, require, require_callable

T = TypeVar("T")


class _Stopped(BaseException):
    """Ends the other ranks once one has raised."""


class _Given(NamedTuple):
    """A rank's part in a collective: the collective's name, a copy of the tensor that it sends, and further arguments."""

    what: Collective
    sent: Tensor
    args: tuple[Any, ...]


class _Board:
    """The collectives in flight between all ranks: each member's part, by group and place in the group's order."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.given: dict[tuple[str, int], dict[int, _Given]] = {}
        self.waiting: dict[int, tuple[str, int, Axis]] = {}
        self.running = size
        self.error: tuple[int, BaseException] | None = None

    def put(self, mesh: Mesh, axis: Axis, number: int, given: _Given) -> None:
        with self.changed:
            others = self.given.setdefault((axis.group, number), {})
            for rank, other in others.items():
                if str(other.what) != str(given.what):
                    fail(
                        f"collective {number} over {axis}",
                        "it",
                        "the same on all ranks",
                        f"{other.what} on rank {rank}, {given.what} on rank {mesh.rank}",
                    )
            others[mesh.rank] = given
            if given.what.sends and len(others) == axis.size:
                fault = unexpected_rows({rank: (place, others[rank].what.entry) for place, rank in enumerate(mesh.peers(axis))})
                if fault:
                    fail(f"collective {number} over {axis}", "it", "of the rows that the other rank expects", fault)
            self.changed.notify_all()

    def take(self, mesh: Mesh, axis: Axis, number: int) -> list[_Given]:
        """Wait for the parts of all ranks of the axis, and return them in the ranks' order."""
        peers = mesh.peers(axis)
        with self.changed:
            self.waiting[mesh.rank] = axis.group, number, axis
            while len(self.given[axis.group, number]) < axis.size:
                if self.error is not None:
                    raise _Stopped
                self._check_progress()
                self.changed.wait()
            del self.waiting[mesh.rank]
            return [self.given[axis.group, number][rank] for rank in peers]

    def leave(self, rank: int, error: BaseException | None) -> None:
        with self.changed:
            self.running -= 1
            if error is not None and self.error is None and not isinstance(error, _Stopped):
                self.error = rank, error
            self.changed.notify_all()

    def _check_progress(self) -> None:
        stuck = [(rank, *w) for rank, w in self.waiting.items() if len(self.given[w[0], w[1]]) < w[2].size]
        if len(stuck) == self.running:
            said = [
                f"rank {rank} for {self.given[group, number][rank].what} ({number} over {axis})"
                for rank, group, number, axis in stuck
            ]
            fail("run_ranks", "every rank", "able to go on", f"all running ones waiting: {'; '.join(sorted(said))}", RuntimeError)


class _Rank(TorchDispatchMode):
    """Runs every operator unchanged, except collectives."""

    runs = reads = True  # see `tracing` and `readable` of funcops.engine.backend.declare

    def __init__(self, mesh: Mesh, board: _Board) -> None:
        super().__init__()
        self.mesh, self.board = mesh, board
        self.axes = {axis.group: axis for axis in mesh.axes if axis.size > 1}
        self.counts = dict.fromkeys(self.axes, 0)
        self.flying: dict[int, tuple[Tensor, Tensor, Axis, int, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
        if first.is_meta or isinstance(first, FakeTensor):
            return func(*args, **(kwargs or {}))
        what = Collective.of(func, args)
        if what is None:
            return self._wait(args[0])
        require(what.op in _RESULTS and not func._schema.is_mutable, "run_ranks", "fn", f"one that sends by {_SERVED}", func)
        axis = self.axes.get(what.group)
        if axis is None:
            fail(what.op, "group", f"of an axis of the mesh ({', '.join(self.axes)})", repr(what.group))
        x, number = args[0], self.counts[axis.group]
        if not x.is_contiguous():
            fail(what.op, "x", "contiguous", describe(x))
        self.counts[axis.group] += 1
        self.board.put(self.mesh, axis, number, _Given(what, x.clone(), args[1:]))
        out = _RESULTS[what.op](x, axis, args)
        self.flying[id(out)] = out, x, axis, number, what
        return out

    def _wait(self, t: Tensor) -> Tensor:
        if id(t) not in self.flying:
            return t
        out, x, axis, number, what = self.flying.pop(id(t))
        given = self.board.take(self.mesh, axis, number)
        if not torch.equal(_bits(x), _bits(given[axis.rank].sent)):
            fail(what.op, "x", "left unchanged until it is waited for", "one that was written to", AssertionError)
        return out.copy_(_VALUES[what.op](given, axis))

    def check_finished(self) -> None:
        for _, _, axis, number, what in self.flying.values():
            fail(
                f"collective {number} over {axis}",
                "it",
                "finished",
                f"{what} that nobody waits for on rank {self.mesh.rank}",
                AssertionError,
            )


def _bits(t: Tensor) -> Tensor:
    return t.flatten().view(torch.uint8)


def _empty(x: Tensor, *shape: int) -> Tensor:
    wrong = float("nan") if x.is_floating_point() or x.is_complex() else 0 if x.dtype is torch.bool else torch.iinfo(x.dtype).min
    return x.new_full(shape, wrong)


_RESULTS: dict[str, Callable[[Tensor, Axis, Any], Tensor]] = {
    "all_gather": lambda x, axis, args: _empty(x, axis.size * x.shape[0], *x.shape[1:]),
    "reduce_scatter": lambda x, axis, args: _empty(x, x.shape[0] // axis.size, *x.shape[1:]),
    "all_reduce": lambda x, axis, args: _empty(x, *x.shape),
    "all_to_all": lambda x, axis, args: _empty(x, sum(args[1]), *x.shape[1:]),
}


_SERVED = ", ".join(_RESULTS)


def _sum(given: list[_Given]) -> Tensor:
    return functools.reduce(torch.add, [one.sent for one in given])


def _max(given: list[_Given]) -> Tensor:
    return functools.reduce(torch.maximum, [one.sent for one in given])


_REDUCED: dict[str, Callable[[list[_Given]], Tensor]] = {"sum": _sum, "max": _max}

_VALUES: dict[str, Callable[[list[_Given], Axis], Tensor]] = {
    "all_gather": lambda given, axis: torch.cat([one.sent for one in given]),
    "reduce_scatter": lambda given, axis: _sum(given).chunk(axis.size)[axis.rank],
    "all_reduce": lambda given, axis: _REDUCED[given[0].what.how](given),
    "all_to_all": lambda given, axis: torch.cat([one.sent.split(one.args[1])[axis.rank] for one in given]),
}


_ASSERTS = torch.__version__ < "2.13"  # that one thread alone makes the object of an operator


class _Operators:
    """While it is open, threads that use an operator for the first time get one Python object of it. By itself torch makes one for
    each such thread, calls modes with the first, and frees all but the last: a crash, some operators later. Before 2.13 torch also
    asserts that no thread comes while another makes one: there a thread gives way only where it waits."""

    def __init__(self) -> None:
        self.lock, self.open = threading.RLock(), 0
        self.interval = sys.getswitchinterval()
        self.made = {cls: cls.__getattr__ for cls in (OpOverloadPacket, _OpNamespace)}

    def __enter__(self) -> None:
        with self.lock:
            if not self.open and _ASSERTS:
                self.interval = sys.getswitchinterval()
                sys.setswitchinterval(1e3)  # seconds: a thread that computes is not interrupted
            self.open += 1
            for cls, made in self.made.items():
                cls.__getattr__ = self.once(made)  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.open -= 1
            if not self.open and _ASSERTS:
                sys.setswitchinterval(self.interval)
            for cls, made in self.made.items():
                if not self.open:
                    cls.__getattr__ = made  # type: ignore[method-assign]

    def once(self, made: Callable[..., Any]) -> Any:
        def of_name(of: Any, name: str) -> Any:
            with self.lock:
                return vars(of)[name] if name in vars(of) else made(of, name)

        return of_name


_OPERATORS = _Operators()


def run_ranks(sizes: Mapping[str, int], fn: Callable[[Mesh], T]) -> list[T]:
    """Run `fn(mesh)` on every rank of a mesh of these sizes, each a thread, and return the ranks' results, in their order.

    Raises the error that a rank raises, with a note that names the rank; the other ranks end.

    >>> from funcops.testing import run_ranks
    >>> run_ranks({"dp": 2, "tp": 2}, lambda mesh: (mesh.rank, mesh["dp"].rank, mesh["tp"].rank))
    [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    """
    require_callable("run_ranks", fn=fn)
    first = Mesh.abstract(sizes, 0)
    meshes = [first, *[Mesh.abstract(sizes, rank) for rank in range(1, first.size)]]
    board, results = _Board(len(meshes)), [None] * len(meshes)

    def run(mesh: Mesh) -> None:
        error: BaseException | None = None
        try:
            with _Rank(mesh, board) as mode:
                results[mesh.rank] = fn(mesh)  # type: ignore[call-overload]
            mode.check_finished()
        except BaseException as caught:
            error = caught
        board.leave(mesh.rank, error)

    threads = [threading.Thread(target=run, args=(mesh,), daemon=True) for mesh in meshes]
    with _OPERATORS:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if board.error is not None:
        rank, error = board.error
        if hasattr(error, "add_note"):
            error.add_note(f"on rank {rank}")
        raise error
    return results  # type: ignore[return-value]
