"""`branch`: a part of a captured function on a stream of its own, beside the rest, until it is joined.

Within a branch operators run one after another; the first runs after everything before the branch, and what follows `join()` runs
after its last. A capture on a machine without CUDA checks that no two operators that may run at once touch one buffer, unless both
only read it, and replays each branch as late as its join allows. Tensors that a branch touches are kept until it is joined, so the
memory that it reads is not given to others meanwhile.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.engine.backend.scopes import named_scope
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, Prefetch, wrap
from funcops.engine.contract.walk import Part, rewrite
from funcops.engine.errors import CaptureError, GraphOrderError, fail, require_type
from funcops.engine.trees import tensors

MAIN = ""
_streams: dict[tuple[int, str], Any] = {}  # by device and branch


class _Thread(threading.local):
    def __init__(self) -> None:
        self.at = MAIN  # the branch that runs
        self.watch: Any = None  # what records this thread's forks and joins


thread = _Thread()


class _Held(TorchDispatchMode):
    """Keeps every tensor that operators touch."""

    runs = True  # it runs every operator unchanged, so kernels need not be opaque

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.tensors.update((id(t), t) for t in tensors((args, kwargs, out)))
        return out


class branch:
    """A block that runs beside what follows it, until `join()`.

        dx, pending = block.dgrad(residuals, dy, cfg)
        with branch("wgrad") as side:
            dparams = block.wgrad(pending, cfg)
        ...                                       # runs at the same time, and must not read dparams
        side.join()

    On a CUDA device it is a stream: captured, a parallel branch of the graph. Elsewhere it runs in turn, and a capture checks it.
    Branches of one name share a stream, and run one after another. Raises `GraphOrderError` for a second `join`, or one before the
    end of the block; a capture raises `CaptureError` for a branch that is not joined, and without CUDA for two operators that may
    run at once and touch one buffer.

    >>> import torch
    >>> from funcops.graphs import branch, graphed
    >>> def double_and_square(x):
    ...     with branch("square") as side:
    ...         square = x * x
    ...     double = 2 * x
    ...     side.join()
    ...     return double + square
    ...
    >>> graphed(double_and_square, torch.ones(1))(torch.tensor([3.0]))
    tensor([15.])
    """

    def __init__(self, name: str = "side") -> None:
        require_type("branch", "name", name, str)
        self.name, self.outer, self.state = name, MAIN, "new"
        self._stream: Any = None
        self._done: Any = None  # the event after its last kernel
        self._last: tuple[int, ...] = ()  # its last operator, in a recording
        self._held = _Held()
        self._ends: list[Any] = []

    def __enter__(self) -> branch:
        if self.state != "new":
            raise GraphOrderError(f"branch {self.name!r}: must be entered once, got a second time: make another")
        self.outer, self.state = thread.at, "running"
        thread.at = self.name if self.outer == MAIN else f"{self.outer}/{self.name}"
        if thread.watch is not None:
            thread.watch.fork(self.outer, thread.at)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._stream = _stream(thread.at)
            self._stream.wait_stream(torch.cuda.current_stream())
            self._ends = [torch.cuda.stream(self._stream), self._held]
            for one in self._ends:
                one.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._done = self._stream.record_event()
        for one in reversed(self._ends):
            one.__exit__(*error)
        if thread.watch is not None:
            self._last = thread.watch.leave(thread.at)
        self._ends, thread.at, self.state = [], self.outer, "open"

    def join(self) -> None:
        """Let what follows here run after the block."""
        if self.state != "open":
            got = {"new": "one that was not entered", "running": "one that still runs", "joined": "a second join"}[self.state]
            raise GraphOrderError(f"branch {self.name!r}: must be joined once, after its block, got {got}")
        self.state = "joined"
        if thread.watch is not None:
            thread.watch.join(thread.at, self._last)
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._held.tensors.clear()


def _stream(name: str) -> Any:
    key = torch.cuda.current_device(), name
    if key not in _streams:
        _streams[key] = torch.cuda.Stream()
    return _streams[key]


class Order:
    """Which operators of a recording must run after which. An operator gets the numbers of those before it; an order follows them
    through."""

    def __init__(self) -> None:
        self.last: dict[str, tuple[int, ...]] = {MAIN: ()}  # by branch: what the next operator must follow
        self.open = 0  # branches that are not joined

    def fork(self, outer: str, name: str) -> None:
        self.last[name] = tuple(dict.fromkeys((*self.last[outer], *self.last.get(name, ()))))
        self.open += 1

    def leave(self, name: str) -> tuple[int, ...]:
        return self.last[name]

    def join(self, outer: str, last: tuple[int, ...]) -> None:
        self.last[outer] = tuple(dict.fromkeys((*self.last[outer], *last)))
        self.open -= 1

    def add(self, number: int, moves: bool = True) -> tuple[int, ...]:
        """The operators before the one with this number. `moves`: whether it runs on the device; if not, nothing follows it."""
        before = self.last.setdefault(thread.at, ())
        if moves:
            self.last[thread.at] = (number,)
        return before

    def finish(self) -> None:
        if self.open:
            raise CaptureError(f"branch: all must be joined before the capture ends, got {self.open} that are not: call join()")


def reached(before: list[tuple[int, ...]]) -> list[int]:
    """For each operator the set of those that must run before it, as the bits of a number."""
    found: list[int] = []
    for numbers in before:
        mask = 0
        for number in numbers:
            mask |= found[number] | 1 << number
        found.append(mask)
    return found


def check_races(calls: list[Any]) -> None:
    """Raise `CaptureError` for two operators that may run at once and touch one buffer, unless both only read it."""
    if all(call.branch == MAIN for call in calls):
        return
    masks = reached([call.before for call in calls])
    touched: dict[int, list[tuple[int, bool]]] = {}
    for i, call in enumerate(calls):
        for buffer in call.reads | call.writes:
            touched.setdefault(buffer, []).append((i, buffer in call.writes))
    for uses in touched.values():
        for at, (second, writes) in enumerate(uses):
            for first, wrote in uses[:at]:
                if (writes or wrote) and not masks[second] >> first & 1:
                    a, b = calls[first], calls[second]
                    raise CaptureError(
                        f"{b.where}: {_said(b, writes)} must not touch a buffer while {_said(a, wrote)} ({a.where}) may run: "
                        "join the branch before, or give them buffers of their own"
                    )


def _said(call: Any, writes: bool) -> str:
    step = f" of {call.label}" if call.label.path else ""
    return f"{call.func}{step}, which {'writes' if writes else 'reads'} it in {call.branch or 'the main branch'!r},"


def late(calls: list[Any], makers: list[set[int]]) -> list[int]:
    """An order of the operators in which each branch runs as late as its join allows. `makers`: the operators whose results each
    one takes."""
    if all(call.branch == MAIN for call in calls):
        return list(range(len(calls)))
    order, done = list[int](), set[int]()

    def bring(number: int) -> None:
        """Put the operators that this one needs before it, and then it."""
        todo = [number]
        while todo:
            here = todo[-1]
            missing = [n for n in sorted({*calls[here].before, *makers[here]}, reverse=True) if n not in done]
            if missing:
                todo += missing
            else:
                todo.pop()
                if here not in done:
                    done.add(here)
                    order.append(here)

    for number, call in enumerate(calls):
        if call.branch == MAIN:
            bring(number)
    for number in range(len(calls)):
        bring(number)
    return order


class _Flying:
    """Weight gradients that a branch computes."""

    def __init__(self, side: branch, dparams: Any) -> None:
        self.side, self.dparams = side, dparams


class _Ready:
    def __init__(self, given: Any) -> None:
        self.given = given

    def ready(self) -> Any:
        return self.given


def wgrads_beside(cfg: Any) -> Any:
    """The config with the weight gradients of each layer of its repeats in a branch, beside the dgrad of the layer before it.

    Params, residuals and results are the same, to the bit. For `graphed` steps on a device; elsewhere, it changes nothing but what
    a capture checks. Accumulators that are given (`into`) are written by the branch. Raises `ValueError` for a repeat whose layers
    overlap work by themselves: of `zero3`, or from this function.

    >>> from funcops import LinearConfig, RepeatConfig, linear
    >>> from funcops.graphs import wgrads_beside
    >>> wgrads_beside(RepeatConfig(linear, LinearConfig(4, 4), times=3)).op
    beside(linear)
    """

    def body(path: str, op: Op, inner: Any) -> tuple[Op, Any]:
        if op.prefetch is not None:
            wanted = f"one whose layers do not overlap work by themselves, as {op.name} does"
            fail("wgrads_beside", "cfg", wanted, f"a repeat of it at {path!r}")
        return beside(op), inner

    def step(part: Part) -> tuple[Op, Any] | None:
        repeats = part.composite and part.cfg.times is not None
        return (part.op, part.cfg.with_parts(lambda _, op, inner: body(part.path, op, inner))) if repeats else None

    return rewrite(cfg, step)[1]


@functools.lru_cache(maxsize=256)
def beside(op: Op) -> Op:
    """The op for a repeat's body that computes its weight gradients in a branch, until the next layer's backward has run."""

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
        return op.fwd(params, x, cfg, needs=needs)

    def bwd(residuals: Any, dy: Any, cfg: Any, into: Any) -> tuple[Any, Any]:
        dx, pending = op.dgrad(residuals, dy, cfg)
        return wgrad(pending, cfg, into), dx

    def wgrad(pending: Any, cfg: Any, into: Any) -> _Flying:
        with branch("wgrad") as side, named_scope("", "wgrad"):
            dparams = op.wgrad(pending, cfg, into=into)
        return _Flying(side, dparams)

    def settle(flying: _Flying, into: Any) -> Any:
        flying.side.join()
        return flying.dparams

    ahead = Prefetch(begin=lambda given, cfg: _Ready(given), bwd=bwd, wgrad=wgrad, settle=settle)
    return wrap(op, (beside, (op,)), fwd=fwd, name=f"beside({op.name})", prefetch=ahead)
