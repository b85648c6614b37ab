"""Capture without CUDA: the operators of a function, recorded over static buffers, and rerun at each replay.

A recording imitates a graph's memory: inputs and outputs stay at their addresses, everything else exists only during a replay. If a
later recording reads a tensor of an earlier one (such as autograd's saved tensors), it becomes an output of the earlier recording.

Like a CUDA graph, a recording does not own the memory that it reads from other recordings of its pool: if no one held such a tensor
after capture, the pool may have reused its memory, and a replay raises. And because later graphs may keep their results in memory
that a graph uses for temporaries, a replay writes garbage over the results of later recordings of its pool.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcops.adapters.graphs import branches
from funcops.adapters.graphs.statics import refuse_copy
from funcops.adapters.graphs.without_gpu.faults import Line, as_if_capturing, draws, fault_of, flat_tensors, user_line
from funcops.engine.backend import scopes
from funcops.engine.backend.scopes import Label
from funcops.engine.errors import BorrowedError, CaptureError


class Value(NamedTuple):
    """A tensor that exists only during a replay: the i-th that was made."""

    i: int


class View(NamedTuple):
    """A tensor over the storage of a value that no operator made (autograd unpacks such tensors)."""

    base: Value
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Weak(StorageWeakRef):
    """A weak reference to a storage. It holds an address that it frees once, so a copy of it would free it again."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy("the memory of a recording")


class Lent(NamedTuple):
    """A tensor in the pool's memory, which someone else must hold."""

    storage: Weak
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(t: Tensor) -> Lent:
        return Lent(Weak(t.untyped_storage()), t.dtype, tuple(t.shape), t.stride(), int(t.storage_offset()))

    def get(self) -> Tensor | None:
        """The tensor, or None if its memory was freed."""
        if self.storage.expired():
            return None
        found: Any = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)  # type: ignore[attr-defined]
        return (
            None
            if found is None
            else torch.empty(0, dtype=self.dtype, device=found.device).set_(found, self.offset, self.size, self.stride)
        )


class RecordedOperator(NamedTuple):
    """An operator, its arguments with tensors replaced (by `Value`, `View`, `Lent`, or a static tensor), and the numbers of its
    results. `label`: of the step that called it; `branch`: that it runs in; `before`: the operators that run before it; `reads`,
    `writes`: the buffers that it touches; none for a view."""

    func: Any
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    where: Line
    label: Label
    branch: str
    before: tuple[int, ...]
    reads: frozenset[int]
    writes: frozenset[int]

    @property
    def moves(self) -> bool:
        """Whether it runs on the device."""
        return bool(self.reads or self.writes)


class Made(NamedTuple):
    """The first tensor that was made on a storage: its value, and its memory."""

    value: Value
    lent: Lent


class Pool:
    """The recordings that may read each other's tensors."""

    def __init__(self) -> None:
        self.recordings: list[Recording] = []

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy("a pool of recordings")

    def owner(self, t: Tensor) -> tuple[Recording, Made] | None:
        """The recording that made the storage behind t, and its first tensor there."""
        key = t.untyped_storage()._cdata
        for recording in self.recordings:
            found = recording.made.get(key)
            if found is not None and not found.lent.storage.expired():
                return recording, found
        return None


class Recording:
    """A captured function. `replay` reruns it, into the tensors that it returned at capture."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.calls: list[RecordedOperator] = []
        self.order: list[int] = []  # in which a replay runs them
        self.ends: list[int] = []  # the number of calls at the end of each part
        self.buffers: dict[int, int] = {}  # by storage, the number by which calls name it
        self.values: dict[int, Tensor] = {}  # of a replay
        self.statics: dict[int, Tensor] = {}  # by storage: tensors that it reads and no recording made, such as inputs and params
        self.outputs: list[tuple[Any, Lent]] = []  # values, and their targets
        self.made: dict[int, Made] = {}  # by storage

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_copy("a recording")

    def replay(self) -> None:
        """Rerun all operators."""
        for part in range(len(self.ends)):
            self.replay_part(part)

    @torch.no_grad()
    def replay_part(self, part: int) -> None:
        """Rerun the operators of a part, after those before it. Results of later recordings of the pool become garbage, as they may
        on a device: the memory that this recording uses for temporaries was free when they were captured."""
        if part == 0:
            with scopes.named_scope("outputs of the graph"):
                self._spoil_later()
            self.values = {}
        values, own = self.values, self.numbers(part)
        order = [number for number in self.order if number in own]
        for label, calls in itertools.groupby(map(self.calls.__getitem__, order), key=lambda call: call.label):
            with scopes.named_scope(*label):  # of the capture
                for call in calls:
                    args, kwargs = _resolve(call.args, values), _resolve(call.kwargs, values)
                    found = call.func(*args, **kwargs)
                    results = [t for t in flat_tensors([found])] if call.results else []
                    values.update(zip(call.results, results, strict=False))
        if part < len(self.ends) - 1:
            return
        self.values = {}
        with scopes.named_scope("outputs of the graph"):
            for source, lent in self.outputs:
                target = lent.get()
                if target is not None:
                    target.copy_(_resolve(source, values))

    def numbers(self, part: int) -> range:
        """The numbers of a part's operators."""
        return range(self.ends[part - 1] if part else 0, self.ends[part])

    def static_uses(self, part: int) -> tuple[frozenset[int], frozenset[int]]:
        """The storages that no recording made, of which a part reads and writes; by identity."""
        calls = [self.calls[number] for number in self.numbers(part)]
        reads, writes = (frozenset().union(*[getattr(call, name) for call in calls]) for name in ("reads", "writes"))
        return tuple(frozenset(key for key in self.statics if self.buffers.get(key) in used) for used in (reads, writes))  # type: ignore[return-value]

    def _spoil_later(self) -> None:
        later = self.pool.recordings[self.pool.recordings.index(self) + 1 :] if self in self.pool.recordings else []
        for lent in {one.storage.cdata: one for recording in later for _, one in recording.outputs}.values():
            found = lent.get()
            if found is not None:
                _spoil(found)

    def keep(self, made: Made) -> None:
        """Make a tensor that another recording reads, perhaps through a view, an output, so that it holds its value after a
        replay."""
        if not any(lent == made.lent for _, lent in self.outputs):
            self.outputs.append(made)

    @property
    def operators(self) -> int:
        """The number of operators that a replay runs, not counting views."""
        return sum(call.moves for call in self.calls)

    def reset(self) -> None:
        self.calls, self.order, self.statics, self.outputs, self.made = [], [], {}, [], {}
        self.ends, self.values = [], {}
        if self in self.pool.recordings:
            self.pool.recordings.remove(self)


def record(fn: Callable[[], Any], pool: Pool, outputs: Callable[[Any], list[Tensor]]) -> tuple[Recording, Any]:
    """Run `fn` once and record it. See `record_into`."""
    recording = Recording(pool)
    return recording, record_into(recording, fn, outputs)


def record_into(recording: Recording, fn: Callable[[], Any], outputs: Callable[[Any], list[Tensor]]) -> Any:
    """Run `fn` once, record it, and return its result. `outputs`: the tensors of its result that keep their values. Raises
    `CaptureError`, with the line, for anything that a CUDA graph would refuse."""
    return record_parts(recording, [fn], lambda results: outputs(results[0]))[0]


def record_parts(
    recording: Recording, parts: Sequence[Callable[[], Any]], outputs: Callable[[list[Any]], list[Tensor]]
) -> list[Any]:
    """Run functions once, one after another, record them as parts that are replayed in turn, and return their results, as
    `record_into` does for one. A part may read what those before it made."""
    mode, results = _Recorder(recording), []
    outer = branches.thread.watch
    try:
        for part in parts:
            branches.thread.watch = mode.after
            with as_if_capturing(), mode:
                results.append(part())
            branches.thread.watch = outer
            recording.ends.append(len(recording.calls))
    finally:
        branches.thread.watch = outer
    mode.finish(outputs(results))
    recording.pool.recordings.append(recording)
    return results


class _Recorder(TorchDispatchMode):
    runs = True  # it runs every operator unchanged, so kernels need not be opaque
    records = True  # for `capturing`

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording
        self.count = 0
        self.known: dict[int, tuple[weakref.ref[Tensor], Value]] = {}  # by id: the number of a tensor made here
        self.storages: dict[int, tuple[Made, weakref.ref[Tensor]]] = {}  # by storage: the first tensor made on it
        self.lent: set[int] = set()  # storages of other recordings
        self.after = branches.Order()
        self.buffers = recording.buffers
        self.living: dict[int, Weak] = {}  # by number; what is weakly held keeps the address of its storage from being used again
        self.freed: dict[int, tuple[int, Weak]] = {}  # by number: the operator before which the memory was freed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        found = fault_of(func, args, kwargs)
        if found is not None:
            raise CaptureError(f"{user_line()}: {found[0]}: {found[1]}")
        if draws(func, args, kwargs) and kwargs.get("generator") is not None:
            raise CaptureError(
                f"{user_line()}: generator: a custom generator is not registered with the graph: use a key (funcops.random)"
            )
        if len(self.after.last) > 1:  # without a branch, memory is used in turn
            self._free()
        out = func(*args, **kwargs)
        given = {id(t) for t in flat_tensors([args, kwargs])}
        taken_args, taken_kwargs = self._take(args), self._take(kwargs)
        results = list(flat_tensors([out]))
        numbers = tuple(self._number(t, given) for t in results)
        reads, writes = self._touched(func, args, kwargs, results)
        before = self.after.add(len(self.recording.calls), bool(reads or writes))
        at = scopes.label(), branches.thread.at, before, reads, writes
        self.recording.calls.append(RecordedOperator(func, taken_args, taken_kwargs, numbers, user_line(), *at))
        return out

    def _touched(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> tuple[frozenset[int], frozenset[int]]:
        """The buffers that an operator reads, and those that it writes: of its results, and of arguments that it changes."""
        schema = func._schema.arguments
        given = dict(zip([a.name for a in schema], args, strict=False)) | kwargs
        changed = [given.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write]
        reads = frozenset(map(self._buffer, flat_tensors([args, kwargs])))
        made = frozenset(map(self._buffer, flat_tensors([results]))) - reads
        writes = made | frozenset(map(self._buffer, flat_tensors([changed])))
        return (frozenset(), writes) if results and not writes else (reads, writes)  # a view reads nothing

    def _buffer(self, t: Tensor) -> int:
        storage = t.untyped_storage()
        number = self.buffers.setdefault(storage._cdata, len(self.buffers))
        if number not in self.living:
            self.living[number] = Weak(storage)
        return number

    def _free(self) -> None:
        """Note which memory was freed since the last operator."""
        for number in [number for number, one in self.living.items() if one.expired()]:
            self.freed[number] = len(self.recording.calls), self.living.pop(number)

    def _number(self, t: Tensor, given: set[int]) -> int:
        """A new number for a result; an argument that was written in place and returned keeps its number."""
        number, self.count = self.count, self.count + 1
        if id(t) in given:
            return number
        key = t.untyped_storage()._cdata
        value = Value(number)
        if key in self.storages or not self._outside(t):
            self.known[id(t)] = weakref.ref(t), value
            if key not in self.storages:
                self.storages[key] = Made(value, Lent.of(t)), weakref.ref(t)
        return number

    def _outside(self, t: Tensor) -> bool:
        """Whether t is a view of static memory, and so needs no number."""
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
        """The source from which a replay gets t: its number, a view of a numbered storage, or the static tensor itself."""
        known = self._known(t)
        if known is not None:
            return known
        made = self.storages.get(t.untyped_storage()._cdata)
        if made is not None:
            return _over(made[0].value, t)
        key = t.untyped_storage()._cdata
        owner = self.recording.pool.owner(t)
        if owner is None:
            self.recording.statics.setdefault(key, t)
            return t
        owner[0].keep(owner[1])
        self.lent.add(key)
        return Lent.of(t)

    def _known(self, t: Tensor) -> Value | None:
        """The number of a tensor made here; another may have had its id."""
        ref, value = self.known.get(id(t), (None, None))
        return value if ref is not None and ref() is t else None

    def finish(self, outputs: list[Tensor]) -> None:
        """Register the results as outputs, and remember all other storages weakly. Raises `CaptureError` for branches that are not
        joined, or that race."""
        calls = self.recording.calls
        self.after.finish()
        branches.check_races(calls, {number: at for number, (at, _) in self.freed.items()})
        makers = {number: i for i, call in enumerate(calls) for number in call.results}
        took = [{makers[n] for n in numbers_in([call.args, call.kwargs])} for call in calls]
        self.recording.order = branches.late(calls, took)
        for t in outputs:
            made = self.storages.get(t.untyped_storage()._cdata)
            if made is not None and 0 in t.stride():  # an expanded tensor cannot be written to, so all of its memory is
                self.recording.outputs.append(_now(*made))
            elif made is not None:
                self.recording.outputs.append((self._known(t) or _over(made[0].value, t), Lent.of(t)))
        self.recording.made = {key: _now(*made) for key, made in self.storages.items() if not made[0].lent.storage.expired()}
        self.known.clear()
        self.storages.clear()
        self.living.clear()
        self.freed.clear()


def _spoil(t: Tensor) -> None:
    """Fill the whole storage of t with garbage: NaN, numbers that are not an index, inverted masks."""
    if t.dtype is torch.bool:
        t.new_empty(0).set_(t.untyped_storage()).logical_not_()
    else:
        loud = 0xFF if t.dtype.is_floating_point or t.dtype.is_complex else 0x7F
        torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage()).fill_(loud)


def _now(made: Made, ref: weakref.ref[Tensor]) -> Made:
    """The same tensor, with the shape that it has by now."""
    t = ref()
    return made if t is None else Made(made.value, Lent.of(t))


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
                "a graph reads memory that was given back to its pool after capture, and may be reused by now: "
                "keep the captured tensors alive"
            )
        return found
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(v, values) for v in value)
    if isinstance(value, dict):
        return {k: _resolve(v, values) for k, v in value.items()}
    return value


def numbers_in(value: Any) -> list[int]:
    if type(value) is Value:
        return [value.i]
    if type(value) is View:
        return [value.base.i]
    if isinstance(value, (list, tuple)):
        return [n for v in value for n in numbers_in(v)]
    return [n for v in value.values() for n in numbers_in(v)] if isinstance(value, dict) else []
