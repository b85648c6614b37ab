"""Bytes that launches request and move, counted by Triton's interpreter on a sample of each launch's programs.

Bytes that a program requests are moved, but not again while they are in the cache: until the program has requested `far` further
bytes, its share of half of the level-2 cache, which all programs that the device holds at a time divide. A tensor of at most
`SMALL` bytes is moved at most once per launch. Torch's operators between the launches are counted by their operands.
"""

from __future__ import annotations

import bisect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import BenchError
from benchmarks.traffic.calls import RequestedLaunch, intercepted
from benchmarks.traffic.interpret import interpreting, python
from funcops.engine.trees import leaves

PROCESSORS, CACHE, SMALL, SECTOR = 132, 50_000_000, 2 * 2**20, 32  # an H100's multiprocessors and level-2 cache; bytes


MADE = ("new_", "zero", "one", "full", "fill")  # operators that read nothing


class Bytes(NamedTuple):
    """Requested and moved bytes. `sectors`: like `moved`, in whole sectors."""

    asked: float = 0.0
    moved: float = 0.0
    sectors: float = 0.0


class Counted(NamedTuple):
    """A launch, or one of torch's operators, and its bytes."""

    name: str
    bytes: Bytes
    lines: dict[int, float] | None = None  # for a launch: the bytes that each line of the kernel requests


def total(counted: list[Counted]) -> Bytes:
    return Bytes(*map(sum, zip(*(one.bytes for one in counted), strict=True)))


class Memory:
    """A tensor's storage, with the program's clock at the last read and the last write of each element; 0: never."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # keep it alive, so that its address is not reused
        storage = tensor.untyped_storage()
        self.start, self.size = storage.data_ptr(), storage.nbytes()
        self._stamps: dict[tuple[bool, int], Any] = {}
        self.moved = {False: np.zeros(2), True: np.zeros(2)}

    def stamps(self, written: bool, width: int) -> Any:
        key = written, width
        if key not in self._stamps:
            self._stamps[key] = np.zeros(self.size // width + 1, np.int64)  # pages that are never touched cost nothing
        return self._stamps[key]


class Counter:
    """Counts intercepted launches by about `programs` programs of each, spread over the longest axis of its grid, and all along the
    other axes. Leaves out the first and the last program, which may do less."""

    def __init__(self, residents: Sequence[int], programs: int) -> None:
        self.residents, self.programs = iter(residents), programs
        self.found: list[Counted] = []
        self.running = False
        self._memories: dict[int, Memory] = {}
        self._starts: list[int] = []
        self._near: Memory | None = None
        self._lines: dict[int, float] = {}
        self._code: Any = None
        self._clock = self._began = self._asked = self._far = 0

    def know(self, values: Any) -> None:
        """Register tensors whose memory kernels may reach."""
        for value in leaves(values):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes():
                start = value.untyped_storage().data_ptr()
                if start not in self._memories:
                    self._memories[start] = Memory(value)
                    bisect.insort(self._starts, start)

    def _memory(self, address: int) -> Memory:
        near = self._near
        if near is None or not near.start <= address < near.start + near.size:
            place = bisect.bisect_right(self._starts, address) - 1
            near = self._near = self._memories[self._starts[max(0, place)]]
            if not near.start <= address < near.start + near.size:
                raise BenchError("bench traffic: a kernel reached memory outside of its arguments")
        return near

    def access(self, ptrs: Any, mask: Any, written: bool) -> None:
        width = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        at = ptrs.data
        if mask is not None and not mask.data.all():
            at = at[np.broadcast_to(mask.data, at.shape).astype(bool)]  # a mask of scalars may come as integers
        at = at.reshape(-1).astype(np.int64)
        if at.size > 1 and (np.diff(at) <= 0).any():
            at = np.unique(at)  # an address in many lanes is requested once
        if not at.size:
            return
        memory = self._memory(int(at[0]))
        place = (at - memory.start) // width
        last = memory.stamps(written, width)
        stamps = last[place]
        new = at[(stamps <= self._began) | (self._clock - stamps > self._far)]
        bytes_asked = at.size * width
        self._asked += bytes_asked
        line = self._line()
        self._lines[line] = self._lines.get(line, 0.0) + bytes_asked
        self._clock += bytes_asked
        last[place] = self._clock
        if written:  # a written element is cached for loads too
            memory.stamps(False, width)[place] = self._clock
        if new.size:
            sectors = 1 + np.count_nonzero(np.diff(new // SECTOR))
            memory.moved[written] += new.size * width, sectors * SECTOR

    def _line(self) -> int:
        """The current line of the running kernel, even if a helper accesses memory for it."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code is not self._code:
            frame = frame.f_back
        return frame.f_lineno

    def launch(self, call: RequestedLaunch) -> None:
        self.know(list(call.arguments.values()))
        axis = int(np.argmax(call.grid))
        length, every = call.grid[axis], [range(n) for n in call.grid]
        taken = min(length, max(2, self.programs * length // math.prod(call.grid)))
        every[axis] = [int((i + 0.5) * length / taken) for i in range(taken)]  # type: ignore[call-overload]
        self._lines, self._code = {}, python(call.kernel).__code__  # type: ignore[attr-defined]
        self._asked, self._far = 0, CACHE // 2 // (PROCESSORS * next(self.residents))
        for memory in self._memories.values():
            memory.moved = {False: np.zeros(2), True: np.zeros(2)}
        self.running = True
        try:
            with interpreting(call, self.access) as run:
                for program in itertools.product(*every):
                    self._began = self._clock = self._clock + 1
                    run(program)
        finally:
            self.running = False
        scale = length / taken
        moved = np.zeros(2)
        for memory in self._memories.values():
            for found in memory.moved.values():
                moved += np.minimum(found * scale, memory.size if memory.size <= SMALL else np.inf)
        self.found.append(Counted(call.name, Bytes(self._asked * scale, *map(float, moved)), self._lines))


class _Operators(TorchDispatchMode):
    """Counts the bytes that torch's operators read and write, except views and operators that only allocate."""

    runs = True

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self.counter = counter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func._schema.name).removeprefix("aten::")
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not (self.counter.running or view or "empty" in name or func.namespace != "aten"):
            taken = [] if name.startswith(MADE) or name.endswith("_like") else [args, list((kwargs or {}).values())]
            operands = [t for t in leaves([taken, result]) if isinstance(t, Tensor)]
            size = float(sum(t.nbytes for t in operands))
            self.counter.found.append(Counted(name, Bytes(size, size, size)))
        return result


def count(f: Callable[[], Any], arguments: Any, residents: Sequence[int], programs: int = 4) -> list[Counted]:
    """Count the bytes that f moves. `arguments`: the tensors that its kernels may reach without taking them. `residents`: for each
    launch, how many programs a multiprocessor holds at a time. f runs twice, so that its caches are filled."""
    with intercepted(lambda _: None):
        f()
    counter = Counter(residents, programs)
    counter.know(arguments)
    with intercepted(counter.launch), _Operators(counter):
        f()
    return counter.found
