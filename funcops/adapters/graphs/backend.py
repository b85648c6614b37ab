"""The two backends of capture: a CUDA graph and, on machines without CUDA, a recording with the same interface and errors."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funcops.adapters.graphs.hooks import Hooks, Life, release_waiting
from funcops.adapters.graphs.timeline import TimelineEntry
from funcops.adapters.graphs.topology import GraphData, from_recording, from_torch_data
from funcops.adapters.graphs.without_gpu import recorder
from funcops.adapters.recording.captured import ToldByGraph, recorded, told_by_graph
from funcops.engine.backend import notes, scopes
from funcops.engine.backend.held import holding
from funcops.engine.errors import CaptureError, fail, require_count, require_type
from funcops.engine.trees import nbytes, tensors

Outputs = Callable[[Any], list[Tensor]]


class Captured(Protocol):
    """A captured function, which can be replayed."""

    entry: TimelineEntry

    def replay(self) -> None: ...
    def reset(self) -> None: ...
    def keep(self, *objects: Any) -> None: ...
    def kernels(self) -> int | None: ...
    def data(self) -> GraphData: ...
    def dot(self, path: str) -> None: ...
    def instantiate(self) -> None: ...

    @property
    def raw_graph(self) -> Any: ...


class Options(NamedTuple):
    """The options of a capture. `stream`: the stream to capture on; `capture_error_mode` and `keep_graph` as for
    `torch.cuda.graph`; `hooks`: of the captured function."""

    stream: Any = None
    capture_error_mode: str = "global"
    keep_graph: bool = False
    hooks: Hooks | None = None


class Backend(Protocol):
    name: str

    def pool(self) -> Any: ...
    def warm_up(self, fn: Callable[[], Any], times: int, options: Options) -> None: ...
    def capture(self, fn: Callable[[], Any], outputs: Outputs, pool: Any, options: Options) -> tuple[Captured, Any]: ...
    def capture_parts(
        self, parts: Sequence[Callable[[], Any]], outputs: Outputs, pool: Any, options: Options
    ) -> list[Captured]: ...
    def pool_bytes(self, pool: Any) -> int: ...


def backend_of(*trees: Any) -> Backend:
    """The backend for CUDA graphs if a tensor is on a CUDA device, else the recorder."""
    device = next((t.device for t in tensors(trees) if t.is_cuda), None)
    return RecorderBackend() if device is None else DeviceBackend(device)


class Capturer:
    """Captures functions into one memory pool: a new one, or the pool of a graphed function or op, or of a torch `CUDAGraph`.
    `pools`: this pool and its slots' pools."""

    def __init__(self, where: str, trees: Any, pool: Any, options: Options, warmup: int) -> None:
        modes = ("global", "thread_local", "relaxed")
        if options.capture_error_mode not in modes:
            fail(where, "capture_error_mode", " or ".join(map(repr, modes)), repr(options.capture_error_mode))
        require_count(where, 0, warmup=warmup)
        if options.hooks is not None:
            require_type(where, "hooks", options.hooks, Hooks)
            options.hooks.check(where)
        self.where, self.backend, self.options, self.warmup = where, backend_of(*trees), options, warmup
        self.given = pool  # a MemPool lives as long as the graphs that allocate from it
        if isinstance(pool, torch.cuda.MemPool):
            pool = pool.id
        found = self.backend.pool() if pool is None else getattr(pool, "pool", pool)
        self.pool = found() if callable(found) else found
        self.pools = [self.pool]

    def of_slot(self, i: int) -> Capturer:
        """The capturer of a slot: slot 0 uses this pool, every other slot a new one. A slot's results must survive the replays of
        other slots, but a graph overwrites the results of graphs captured after it into its pool."""
        if i == 0:
            return self
        found = copy.copy(self)
        found.pool = self.backend.pool()
        self.pools.append(found.pool)
        return found

    def pool_bytes(self) -> int:
        return sum(self.backend.pool_bytes(pool) for pool in self.pools)

    def warm_up(self, fn: Callable[[], Any]) -> None:
        self.backend.warm_up(fn, self.warmup, self.options)

    def capture(self, fn: Callable[[], Any], outputs: Outputs = tensors) -> tuple[Captured, Any]:
        """Capture `fn`. Returns the captured function and the result of `fn`. `outputs`: the tensors of the result that keep their
        values."""
        return self.backend.capture(fn, outputs, self.pool, self.options)

    def capture_parts(self, parts: Sequence[Callable[[], Any]], outputs: Outputs) -> list[Captured]:
        """Capture functions as a graph each, all in one pool, which are only replayed one after another: a part reads what those
        before it made, whose memory is free once it was read. `outputs`: of the last part's result."""
        return self.backend.capture_parts(parts, outputs, self.pool, self.options)


class RecorderBackend:
    name = "recorder"

    def pool(self) -> Any:
        return recorder.Pool()

    def warm_up(self, fn: Callable[[], Any], times: int, options: Options) -> None:
        for _ in range(times):
            fn()

    def capture(self, fn: Callable[[], Any], outputs: Outputs, pool: Any, options: Options) -> tuple[Captured, Any]:
        captured, results = self._captured([fn], outputs, pool, options)
        return captured[0], results[0]

    def capture_parts(self, parts: Sequence[Callable[[], Any]], outputs: Outputs, pool: Any, options: Options) -> list[Captured]:
        return list(self._captured(parts, outputs, pool, options)[0])

    def _captured(
        self, parts: Sequence[Callable[[], Any]], outputs: Outputs, pool: Any, options: Options
    ) -> tuple[list[_Recorded], list[Any]]:
        recording = recorder.Recording(pool)
        captured = [_Recorded(recording, part, options, tells=bool(notes.takers)) for part in range(len(parts))]

        def call(one: _Recorded, fn: Callable[[], Any]) -> Any:
            one.tell("capture_start")
            return fn()

        calls = [functools.partial(call, one, fn) for one, fn in zip(captured, parts, strict=True)]
        results = recorder.record_parts(recording, calls, lambda found: outputs(found[-1]))
        for one in captured:
            one.entry = TimelineEntry(pool)
            one.tell("capture_end")
            if not options.keep_graph:
                one.instantiate()
        return captured, results

    def pool_bytes(self, pool: Any) -> int:
        lent = [one.get() for recording in pool.recordings for _, one in recording.outputs]
        return nbytes([t for t in lent if t is not None])


class _Recorded(Life):
    """A part of a recording, mostly the whole."""

    entry: TimelineEntry

    def __init__(self, recording: recorder.Recording, part: int, options: Options, tells: bool) -> None:
        super().__init__(options.hooks, recording.reset)
        self.recording, self.part, self.tells = recording, part, tells

    def replay(self) -> None:
        recorded(self.tells)
        self.replayed(functools.partial(self.recording.replay_part, self.part))
        self.entry.replayed()

    def reset(self) -> None:
        super().reset()
        self.entry.leave()

    def kernels(self) -> int | None:
        recording = self.recording
        return sum(recording.calls[number].moves for number in recording.numbers(self.part)) if recording.ends else 0

    def data(self) -> GraphData:
        return from_recording(self.recording)

    def dot(self, path: str) -> None:
        Path(path).write_text(self.data().dot())

    @property
    def raw_graph(self) -> Any:
        raise RuntimeError("raw_graph: a CUDA graph is needed, got a recording (this machine has no CUDA device)")


_broken: list[Any] = []  # graphs whose capture did not end: torch's allocators and its list of captures still point to them
_successors: dict[Any, Any] = {}  # the replacements of pools that a broken capture allocated from
_streams: dict[int, Any] = {}  # by device, because torch's default stream belongs to the device that captured first


class DeviceBackend:
    """CUDA graphs on a device; None: on the current device."""

    name = "cuda"

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, fn: Callable[[], Any], times: int, options: Options) -> None:
        """Run `fn` on a side stream, as torch requires, so that no lazy initialisation is captured."""
        with torch.cuda.device(self.device):
            stream = options.stream or torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(times):
                    fn()
            torch.cuda.synchronize()

    def capture(self, fn: Callable[[], Any], outputs: Outputs, pool: Any, options: Options) -> tuple[Captured, Any]:
        pool = self.pool() if pool is None else _pools(pool)[-1]
        graph = torch.cuda.CUDAGraph(keep_graph=options.keep_graph)
        captured = _Graph(graph, self.device, options)
        own: list[BaseException] = []

        def call() -> Any:
            try:
                captured.tell("capture_start")
                result = fn()
                if captured.told is not None:
                    captured.told.end()
                return result
            except BaseException as error:
                own.append(error)
                raise

        collected = gc.isenabled()
        with torch.cuda.device(self.device), holding() as held, told_by_graph() as captured.told:
            stream, side = torch.cuda.current_stream(), options.stream or _side_stream()
            try:
                with torch.cuda.graph(graph, pool, side, options.capture_error_mode, **_annotating()):
                    result = call()
            except Exception as error:
                captured.disown()
                torch.cuda.set_stream(stream)  # torch's context does not restore it if ending the capture raises
                if error not in own:
                    _mend(graph, pool, side)
                cause = error.__context__ or error  # ending a broken capture raises a second error
                raise CaptureError(f"capture failed: {cause}") from cause
            finally:
                torch.cuda.set_stream(stream)
                if collected != gc.isenabled():
                    (gc.enable if collected else gc.disable)()
                release_waiting()
        captured.keep(held)
        captured.entry = TimelineEntry(pool)
        captured.tell("capture_end")
        if not options.keep_graph:  # torch has instantiated it
            captured.instantiate()
        return captured, result

    def capture_parts(self, parts: Sequence[Callable[[], Any]], outputs: Outputs, pool: Any, options: Options) -> list[Captured]:
        return [self.capture(part, outputs, pool, options)[0] for part in parts]

    def pool_bytes(self, pool: Any) -> int:
        segments = [segment for one in _pools(pool) for segment in torch.cuda.memory_snapshot(one)]
        return sum(int(segment["total_size"]) for segment in segments)


def _side_stream() -> Any:
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


def _pools(pool: Any) -> list[Any]:
    """The pool and its replacements, in order."""
    found = [pool]
    while found[-1] in _successors:
        found.append(_successors[found[-1]])
    return found


def _mend(graph: Any, pool: Any, stream: Any) -> None:
    """Clean up torch's state if the end of a capture raises: the device's allocator still allocates from the pool, and so does the
    host's (which cannot be stopped, so the pool is replaced), and the generator is still capturing, until another capture ends."""
    _broken.append(graph)
    _successors[pool] = torch.cuda.graph_pool_handle()
    device = torch.cuda.current_device()
    for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # raised if the capture did not even begin
            undo(device, pool)
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=torch.cuda.graph_pool_handle(), stream=stream):
            pass


def _annotating() -> dict[str, Any]:
    """The arguments of a capture whose kernels are annotated with the steps that launch them, in `named_steps()`."""
    if not scopes.on:
        return {}
    try:
        from torch.cuda.graph_annotations import is_available
    except ImportError:
        if scopes.on == scopes.NAMED:  # a recording tells of a graph's steps by itself
            warnings.warn("named_steps: kernels of CUDA graphs get the names of steps from torch 2.15 on", stacklevel=6)
        return {}
    return {"enable_annotations": is_available()}


class _Graph(Life):
    """A CUDA graph."""

    entry: TimelineEntry
    told: ToldByGraph | None

    def __init__(self, graph: Any, device: Any, options: Options) -> None:
        super().__init__(options.hooks, graph.reset)
        self.graph, self.kept, self.device = graph, options.keep_graph, device

    def replay(self) -> None:
        told = self.told if recorded(self.told is not None) else None
        if told is not None:
            told.check()
        with torch.cuda.device(self.device):
            self.release.streams.add(torch.cuda.current_stream())
            self.replayed(self.graph.replay)
            if told is not None:
                told.tell()
        self.entry.replayed()

    def reset(self) -> None:
        super().reset()
        self.entry.leave()

    def kernels(self) -> int | None:
        """The number of kernel nodes, if the graph was kept and instantiated and the driver reports them; else None."""
        try:
            nodes = self.graph.get_graph_data()["nodes"]
        except (AttributeError, RuntimeError, ImportError, KeyError):
            return None
        return sum(node["node_type"] == "kernel" for node in nodes)

    def data(self) -> GraphData:
        return from_torch_data(self.graph.get_graph_data(), scopes.node_labels())

    def dot(self, path: str) -> None:
        if not self.kept:
            raise RuntimeError("dot: the graph must be captured with keep_graph=True, got keep_graph=False")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="DEBUG: calling")
            self.graph.debug_dump(path)

    def instantiate(self) -> None:
        if self.kept:
            with torch.cuda.device(self.device):
                self.graph.instantiate()
        super().instantiate()

    @property
    def raw_graph(self) -> Any:
        return self.graph
