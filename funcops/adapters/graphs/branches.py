"""`branch`: a part of a captured function on a stream of its own, beside the rest, until it is joined.

Within a branch operators run one after another; the first runs after everything before the branch, and what follows `join()` runs
after its last. A capture on a machine without CUDA checks that no two operators that may run at once touch one buffer, unless both
only read it, and replays each branch as late as its join allows.

A device's allocator gives the memory of a tensor that is freed to the branch that made it, which may write to it at once. So what a
branch reads of others is kept until it is joined, or its maker waits for it, and a capture without CUDA checks that too.
"""

from __future__ import annotations

import functools
import threading
from bisect import bisect_left
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.engine.backend.scopes import named_scope
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, Prefetch, wrap
from funcops.engine.contract.schema import Donated
from funcops.engine.contract.walk import Part, rewrite
from funcops.engine.errors import CaptureError, GraphOrderError, fail, require_type
from funcops.engine.trees import tensors

MAIN = ""
_streams: dict[tuple[int, str], Any] = {}  # by device and branch


class _Thread(threading.local):
    def __init__(self) -> None:
        self.at = MAIN  # the branch that runs
        self.held: _Held | None = None  # what its block keeps
        self.latest: WeakValueDictionary[str, branch] = WeakValueDictionary()  # the last block of each branch
        self.watch: Any = None  # what records this thread's forks and joins


class _Held(TorchDispatchMode):
    """Keeps every tensor that operators of a block touch and no block of its branch made. `made`: by storage, of all these blocks;
    a weak reference keeps a storage's number from being used again."""

    runs = True  # it runs every operator unchanged, so kernels need not be opaque

    def __init__(self, made: dict[int, StorageWeakRef]) -> None:
        super().__init__()
        self.made = made
        self.tensors: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = tensors((args, kwargs))
        self.keep(given)
        known = set(map(_storage, given))
        for t in tensors(out):
            if t.layout is torch.strided and _storage(t) not in known:
                self.made[_storage(t)] = StorageWeakRef(t.untyped_storage())
        return out

    def keep(self, given: list[Tensor]) -> None:
        self.tensors.update((_storage(t), t) for t in given if _storage(t) not in self.made)

    def release(self, made: dict[int, StorageWeakRef]) -> None:
        """Let go of what another branch made."""
        self.tensors = {key: t for key, t in self.tensors.items() if key not in made}


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


thread = _Thread()


def hold(*trees: Any) -> None:
    """Keep the tensors of trees, which may be donated, that other branches made, as long as the block that runs may read them: a
    kernel that is launched directly does not show what it reads."""
    if thread.held is not None:
        for tree in trees:
            thread.held.keep(tensors(tree._node if type(tree) is Donated else tree))


class branch:
    """A block that runs beside what follows it, until `join()`.

        dx, pending = block.dgrad(residuals, dy, cfg)
        with branch("wgrad") as side:
            dparams = block.wgrad(pending, cfg)
        ...                                       # runs at the same time, and must not read dparams
        side.join()

    On a CUDA device it is a stream: captured, a parallel branch of the graph. Elsewhere it runs in turn, and a capture checks it.
    Branches of one name share a stream, and run one after another. `wait()` within another branch lets that one go on after the
    block, which is still to be joined. Raises `GraphOrderError` for a second `join`, or one before the end of the block; a capture
    raises `CaptureError` for a branch that is not joined, and without CUDA for two operators that may run at once and touch one
    buffer, or memory that one may get while the other still reads it.

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
        self._earlier: branch | None = None  # the block of this branch before it, if that is not joined
        self._held = _Held({})
        self._outer: _Held | None = None
        self._ends: list[Any] = []

    def __enter__(self) -> branch:
        if self.state != "new":
            raise GraphOrderError(f"branch {self.name!r}: must be entered once, got a second time: make another")
        self.outer, self.state = thread.at, "running"
        thread.at = self.name if self.outer == MAIN else f"{self.outer}/{self.name}"
        if thread.watch is not None:
            thread.watch.fork(self.outer, thread.at)
        latest = thread.latest.get(thread.at)
        if latest is not None and latest.state == "open":
            self._earlier, self._held.made = latest, latest._held.made
        thread.latest[thread.at], self._outer, thread.held = self, thread.held, self._held
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            self._stream = _stream(thread.at)
            self._stream.wait_stream(torch.cuda.current_stream())
            self._ends = [torch.cuda.stream(self._stream)]
        if self._stream is not None or thread.watch is not None:
            self._ends.append(self._held)
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
        self._ends, thread.at, thread.held, self.state = [], self.outer, self._outer, "open"

    def join(self) -> None:
        """Let what follows here run after the block."""
        if self.state != "open":
            got = {"new": "one that was not entered", "running": "one that still runs", "joined": "a second join"}[self.state]
            raise GraphOrderError(f"branch {self.name!r}: must be joined once, after its block, got {got}")
        self._follow()
        self.state, self._earlier = "joined", None
        if thread.watch is not None:
            thread.watch.open -= 1
        self._held.tensors.clear()

    def wait(self) -> None:
        """Let what follows in the branch that runs now run after the block, and after the blocks of its branch before it. It must
        still be joined. What they read of the waiting branch need not be kept any more."""
        if self.state != "open":
            got = {"new": "one that was not entered", "running": "one that still runs", "joined": "one that is joined"}[self.state]
            raise GraphOrderError(f"branch {self.name!r}: must be waited for between its block and its join, got {got}")
        self._follow()
        waiting, block = thread.held, self
        while waiting is not None and block is not None:
            block._held.release(waiting.made)
            block = block._earlier  # type: ignore[assignment]

    def _follow(self) -> None:
        if thread.watch is not None:
            thread.watch.follow(thread.at, self._last)
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(self._done)


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
        self._branches: dict[int, str] = {}  # of operators that others follow

    def fork(self, outer: str, name: str) -> None:
        self.last.setdefault(name, ())
        self.follow(name, self.last[outer])
        self.open += 1

    def leave(self, name: str) -> tuple[int, ...]:
        return self.last[name]

    def follow(self, name: str, last: tuple[int, ...]) -> None:
        """Let the next operator of a branch follow these. Of several of one branch, which runs in turn, the last is enough."""
        latest: dict[str, int] = {}
        for number in (*self.last[name], *last):
            of = self._branches[number]
            latest[of] = max(number, latest.get(of, number))
        self.last[name] = tuple(latest.values())

    def add(self, number: int, moves: bool = True) -> tuple[int, ...]:
        """The operators before the one with this number. `moves`: whether it runs on the device; if not, nothing follows it."""
        before = self.last.setdefault(thread.at, ())
        if moves:
            self.last[thread.at], self._branches[number] = (number,), thread.at
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


def check_races(calls: list[Any], freed: dict[int, int]) -> None:
    """Raise `CaptureError` for two operators that may run at once and touch one buffer, unless both only read it; and for memory
    that its branch may give to an operator while another may still run that touches it. `freed`: the number of the operator before
    which each buffer was freed."""
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
    _check_lives(calls, masks, {buffer: [i for i, _ in uses] for buffer, uses in touched.items()}, freed)


def _check_lives(calls: list[Any], masks: list[int], uses: dict[int, list[int]], freed: dict[int, int]) -> None:
    made = {buffer: numbers[0] for buffer, numbers in uses.items() if buffer not in calls[numbers[0]].reads}
    makers: dict[str, list[int]] = {}
    for number in sorted(set(made.values())):
        makers.setdefault(calls[number].branch, []).append(number)
    for buffer, at in freed.items():
        if buffer not in made:
            continue
        maker = calls[made[buffer]]
        after = makers[maker.branch]
        second = next(iter(after[bisect_left(after, at) :]), None)
        first = next((n for n in uses[buffer] if second is not None and not masks[second] >> n & 1), None)
        if first is not None and second is not None:
            a, b = calls[first], calls[second]
            raise CaptureError(
                f"{b.where}: {_said(b, True)} must not get the memory that {maker.func} ({maker.where}) made while "
                f"{_said(a, buffer in a.writes)} ({a.where}) may run: keep the tensor until its branch waits for that"
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
    latest: dict[str, int] = {}
    previous: list[set[int]] = []  # a branch runs in turn, its views too
    for number, call in enumerate(calls):
        previous.append({latest[call.branch]} if call.branch in latest else set())
        latest[call.branch] = number

    def bring(number: int) -> None:
        """Put the operators that this one needs before it, and then it."""
        todo = [number]
        while todo:
            here = todo[-1]
            missing = [n for n in sorted({*calls[here].before, *makers[here], *previous[here]}, reverse=True) if n not in done]
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
            hold(pending, into)
            dparams = op.wgrad(pending, cfg, into=into)
        return _Flying(side, dparams)

    def settle(flying: _Flying, into: Any) -> Any:
        flying.side.join()
        return flying.dparams

    ahead = Prefetch(begin=lambda given, cfg: _Ready(given), bwd=bwd, wgrad=wgrad, settle=settle)
    return wrap(op, (beside, (op,)), fwd=fwd, name=f"beside({op.name})", prefetch=ahead)
