"""Capture without CUDA: the operators of a function, recorded over static buffers, and run again at each replay.

What a graph does with memory is done here with values: inputs and outputs stay where they are, everything else exists only while a
replay runs. A tensor of an earlier recording that a later one reads (autograd's saved tensors, say)
becomes an output of the earlier.

As a CUDA graph does not own the memory that it reads, neither does a recording own what other recordings of its pool made: where
nobody held it after capture, the pool may have given it to others, and a replay raises. And as later graphs may keep what they
leave in memory that a graph needs for itself, a replay writes garbage over what later recordings of its pool left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.adapters.graphs.faults import Line, draws, fault_of, flat_tensors, user_line
from funcops.errors import BorrowedError, CaptureError


class Value(NamedTuple):
    """A tensor that exists during a replay alone: number `i` in the order of making."""

    i: int


class View(NamedTuple):
    """A tensor over the storage of a value, that no operator made (autograd unpacks such)."""

    base: Value
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Lent(NamedTuple):
    """A tensor in memory of the pool, that somebody else must hold."""

    storage: StorageWeakRef
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(t: Tensor) -> Lent:
        return Lent(StorageWeakRef(t.untyped_storage()), t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset()))

    def get(self) -> Tensor | None:
        """The tensor, or None where its memory was given back."""
        if self.storage.expired():
            return None
        found: Any = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # type: ignore[attr-defined]
        return (
            None
            if found is None
            else torch.empty(0, dtype=self.dtype, device=found.device).set_(found, self.offset, self.size, self.stride)
        )


class RecordedOperator(NamedTuple):
    """An operator, its arguments with tensors replaced (`Value`, `View`, `Lent`, or a static tensor),
    and the numbers of its results."""

    func: Any
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    where: Line


class Made(NamedTuple):
    """The first tensor that was made on a storage: its value, and where it lies."""

    value: Value
    lent: Lent


class Pool:
    """The recordings that may read each other's tensors."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []

    def owner(self, t: Tensor) -> tuple[Recording, Made] | None:
        """The recording that made the storage behind t, and what it made there."""
        key = t.untyped_storage()._cdata
        for recording in self.recordings:
            found = recording.made.get(key)
            if found is not None and not found.lent.storage.expired():
                return recording, found
        return None


class Recording:
    """A captured function. `replay` runs it again, into the tensors that it returned when it was captured."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.calls: list[RecordedOperator] = []
        self.statics: dict[int, Tensor] = {}  # by storage: what it reads and nobody in the pool made, as inputs and params
        self.outputs: list[tuple[Any, Lent]] = []  # values, and where they go
        self.made: dict[int, Made] = {}  # by storage

    @torch.no_grad()
    def replay(self) -> None:
        """Run again. What later recordings of the pool left is garbage then, as on a device it may be: what this one needs for
        itself was free when they were captured."""
        self._spoil_later()
        values: dict[int, Tensor] = {}
        for call in self.calls:
            args, kwargs = _resolve(call.args, values), _resolve(call.kwargs, values)
            found = call.func(*args, **kwargs)
            results = [t for t in flat_tensors([found])] if call.results else []
            values.update(zip(call.results, results, strict=False))
        for source, lent in self.outputs:
            target = lent.get()
            if target is not None:
                target.copy_(_resolve(source, values))

    def _spoil_later(self) -> None:
        later = self.pool.recordings[self.pool.recordings.index(self) + 1 :] if self in self.pool.recordings else []
        for lent in {one.storage.cdata: one for recording in later for _, one in recording.outputs}.values():
            found = lent.get()
            if found is not None:
                _spoil(found)

    def keep(self, made: Made) -> None:
        """Let what another recording reads, of which it may see a view alone, hold its value after each replay."""
        if not any(lent == made.lent for _, lent in self.outputs):
            self.outputs.append(made)

    @property
    def operators(self) -> int:
        """How many a replay runs, views aside."""
        return sum(not _is_view(call.func) for call in self.calls)

    def reset(self) -> None:
        self.calls, self.statics, self.outputs, self.made = [], {}, [], {}
        if self in self.pool.recordings:
            self.pool.recordings.remove(self)


def record(fn: Callable[[], Any], pool: Pool, outputs: Callable[[Any], list[Tensor]]) -> tuple[Recording, Any]:
    """Run `fn` once and record it. `outputs`: the tensors, of what it returns, that keep their values. Raises `CaptureError`, with
    the line, for what a CUDA graph would refuse."""
    recording = Recording(pool)
    mode = _Recorder(recording)
    with mode:
        result = fn()
    mode.finish(outputs(result))
    pool.recordings.append(recording)
    return recording, result


class _Recorder(TorchDispatchMode):
    runs = True  # every operator as it is: kernels need not be opaque to it

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self.count = 0
        self.known: dict[int, Any] = {}  # by id: the number of a tensor made here
        self.storages: dict[int, tuple[Value, Tensor]] = {}  # by storage: the first tensor made on it
        self.lent: set[int] = set()  # storages of other recordings
        self.alive: list[Tensor] = []  # so that no id, and no storage, is used twice while this records

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        found = fault_of(func, args, kwargs)
        if found is not None:
            raise CaptureError(f"{user_line()}: {found[0]}: {found[1]}")
        if draws(func, args, kwargs) and kwargs.get("generator") is not None:
            raise CaptureError(
                f"{user_line()}: generator: a generator of one's own is not registered with the graph: use a key (funcops.random)"
            )
        out = func(*args, **kwargs)
        given = {id(t) for t in flat_tensors([args, kwargs])}
        taken_args, taken_kwargs = self._take(args), self._take(kwargs)
        results = list(flat_tensors([out]))
        numbers = tuple(self._number(t, given) for t in results)
        self.recording.calls.append(RecordedOperator(func, taken_args, taken_kwargs, numbers, user_line()))
        return out

    def _number(self, t: Tensor, given: set[int]) -> int:
        """A new number for a result; that of an argument written in place and returned stays what it was."""
        number, self.count = self.count, self.count + 1
        if id(t) in given:
            return number
        self.alive.append(t)
        key = t.untyped_storage()._cdata
        value = Value(number)
        if key in self.storages or not self._outside(t):
            self.known[id(t)] = value
            self.storages.setdefault(key, (value, t))
        return number

    def _outside(self, t: Tensor) -> bool:
        """Whether t is a view of something static: it needs no number, it stays where it is."""
        key = t.untyped_storage()._cdata
        return key in self.recording.statics or key in self.lent

    def _take(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._source(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._take(v) for v in value)
        if isinstance(value, dict):
            return {k: self._take(v) for k, v in value.items()}
        return value

    def _source(self, t: Tensor) -> Any:
        """How a replay gets at t: by number, over a number's storage, or as the static tensor that it is."""
        if id(t) in self.known:
            return self.known[id(t)]
        made = self.storages.get(t.untyped_storage()._cdata)
        if made is not None:
            self.alive.append(t)
            return _over(made[0], t)
        key = t.untyped_storage()._cdata
        owner = self.recording.pool.owner(t)
        if owner is None:
            self.recording.statics.setdefault(key, t)
            return t
        owner[0].keep(owner[1])
        self.alive.append(t)
        self.lent.add(key)
        return Lent.of(t)

    def finish(self, outputs: list[Tensor]) -> None:
        """Say where the results stay, and remember weakly what else was made."""
        for t in outputs:
            made = self.storages.get(t.untyped_storage()._cdata)
            if made is not None:
                self.recording.outputs.append((self.known.get(id(t), _over(made[0], t)), Lent.of(t)))
        for key, (value, t) in self.storages.items():
            self.recording.made[key] = Made(value, Lent.of(t))
        self.alive.clear()
        self.known.clear()
        self.storages.clear()


def _spoil(t: Tensor) -> None:
    """Garbage in the whole storage of t: NaN, numbers that are no index, masks turned round."""
    if t.dtype is torch.bool:
        t.new_empty(0).set_(t.untyped_storage()).logical_not_()
    else:
        loud = 0xFF if t.dtype.is_floating_point or t.dtype.is_complex else 0x7F
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).fill_(loud)


def _over(value: Value, t: Tensor) -> View:
    return View(value, tuple(t.shape), t.stride(), int(t.storage_offset()))


def _resolve(value: Any, values: dict[int, Tensor]) -> Any:
    if type(value) is Value:
        return values[value.i]
    if type(value) is View:
        return values[value.base.i].as_strided(value.size, value.stride, value.offset)
    if type(value) is Lent:
        found = value.get()
        if found is None:
            raise BorrowedError(
                "a graph reads memory that was given back to its pool after capture, and may be another's by now: "
                "hold what was captured"
            )
        return found
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(v, values) for v in value)
    if isinstance(value, dict):
        return {k: _resolve(v, values) for k, v in value.items()}
    return value


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def dot(recording: Recording) -> str:
    """The recorded operators as a Graphviz graph: an edge for each value that one makes and another reads."""
    makers: dict[int, int] = {}
    lines = ["digraph recording {", "  node [shape=box, fontsize=10];"]
    for i, call in enumerate(recording.calls):
        lines.append(f'  n{i} [label="{call.func}", tooltip="{call.where}"];')
        for number in _numbers([call.args, call.kwargs]):
            if number in makers:
                lines.append(f"  n{makers[number]} -> n{i};")
        makers.update(dict.fromkeys(call.results, i))
    return "\n".join([*lines, "}"]) + "\n"


def _numbers(value: Any) -> list[int]:
    if type(value) is Value:
        return [value.i]
    if type(value) is View:
        return [value.base.i]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in _numbers(v)]
    return [n for v in value.values() for n in _numbers(v)] if isinstance(value, dict) else []
