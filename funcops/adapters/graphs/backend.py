"""The two ways to capture: a CUDA graph, and, on machines without CUDA, a recording with the same interface and errors."""

from __future__ import annotations

import contextlib
import copy
import gc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funcops.adapters.graphs import recorder
from funcops.adapters.graphs.timeline import TimelineEntry
from funcops.backend.tables import holding
from funcops.errors import CaptureError, fail, require_count
from funcops.trees import nbytes, tensors

Outputs = Callable[[Any], list[Tensor]]


class Captured(Protocol):
    """A captured function, to be run again."""

    entry: TimelineEntry

    def replay(self) -> None: ...
    def reset(self) -> None: ...
    def kernels(self) -> int | None: ...
    def dot(self, path: str) -> None: ...
    def instantiate(self) -> None: ...

    @property
    def raw_graph(self) -> Any: ...


class Options(NamedTuple):
    """How to capture. `stream`: the one to capture on; `capture_error_mode` and `keep_graph` as for `torch.cuda.graph`."""

    stream: Any = None
    capture_error_mode: str = "global"
    keep_graph: bool = False


class Backend(Protocol):
    name: str

    def pool(self) -> Any: ...
    def warm_up(self, fn: Callable[[], Any], times: int, options: Options) -> None: ...
    def capture(self, fn: Callable[[], Any], outputs: Outputs, pool: Any, options: Options) -> tuple[Captured, Any]: ...
    def pool_bytes(self, pool: Any) -> int: ...


def backend_of(*trees: Any) -> Backend:
    """CUDA graphs where the tensors are on a CUDA device, the recorder elsewhere."""
    device = next((t.device for t in tensors(trees) if t.is_cuda), None)
    return RecorderBackend() if device is None else DeviceBackend(device)


class Capturer:
    """Captures functions into one memory pool: a new one, or that of a graphed function or op, or of a torch `CUDAGraph`. `pools`:
    this and those of its slots."""

    def __init__(self, where: str, trees: Any, pool: Any, options: Options, warmup: int) -> None:
        modes = ("global", "thread_local", "relaxed")
        if options.capture_error_mode not in modes:
            fail(where, "capture_error_mode", " or ".join(map(repr, modes)), repr(options.capture_error_mode))
        require_count(where, 0, warmup=warmup)
        self.backend, self.options, self.warmup = backend_of(*trees), options, warmup
        found = self.backend.pool() if pool is None else getattr(pool, "pool", pool)
        self.pool = found() if callable(found) else found
        self.pools = [self.pool]

    def of_slot(self, i: int) -> Capturer:
        """The capturer of a slot: slot 0 has this one's pool, every other a new one. What a slot leaves must outlive the replays of
        others, and a graph writes over what was captured after it into its pool."""
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
        """The captured function, and what it returned. `outputs`: the tensors of that which keep their values."""
        return self.backend.capture(fn, outputs, self.pool, self.options)


class RecorderBackend:
    name = "recorder"

    def pool(self) -> Any:
        return recorder.Pool()

    def warm_up(self, fn: Callable[[], Any], times: int, options: Options) -> None:
        for _ in range(times):
            fn()

    def capture(self, fn: Callable[[], Any], outputs: Outputs, pool: Any, options: Options) -> tuple[Captured, Any]:
        recording, result = recorder.record(fn, pool, outputs)
        return _Recorded(recording, TimelineEntry(pool)), result

    def pool_bytes(self, pool: Any) -> int:
        lent = [one.get() for recording in pool.recordings for _, one in recording.outputs]
        return nbytes([t for t in lent if t is not None])


class _Recorded:
    def __init__(self, recording: recorder.Recording, entry: TimelineEntry) -> None:
        self.recording, self.entry = recording, entry

    def replay(self) -> None:
        self.recording.replay()
        self.entry.replayed()

    def reset(self) -> None:
        self.recording.reset()
        self.entry.leave()

    def kernels(self) -> int | None:
        return self.recording.operators

    def dot(self, path: str) -> None:
        Path(path).write_text(recorder.dot(self.recording))

    def instantiate(self) -> None:
        """A recording is always ready."""

    @property
    def raw_graph(self) -> Any:
        raise RuntimeError("raw_graph: a CUDA graph is needed, got a recording (there is no CUDA device here)")


_broken: list[Any] = []  # graphs whose capture did not end: torch's allocators and its list of captures still point to them
_successors: dict[Any, Any] = {}  # of pools that a broken capture was to allocate from
_streams: dict[int, Any] = {}  # by device: torch's own default is of whatever device captured first


class DeviceBackend:
    """On a device; None: on the current one."""

    name = "cuda"

    def __init__(self, device: Any = None) -> None:
        self.device = device

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm_up(self, fn: Callable[[], Any], times: int, options: Options) -> None:
        """On a side stream, as torch asks for, so that lazy initialisation ends up in no graph."""
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
        own: list[BaseException] = []

        def call() -> Any:
            try:
                return fn()
            except BaseException as error:
                own.append(error)
                raise

        collected = gc.isenabled()
        with torch.cuda.device(self.device), holding() as held:
            stream, side = torch.cuda.current_stream(), options.stream or _side_stream()
            try:
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode=options.capture_error_mode):
                    result = call()
            except Exception as error:
                torch.cuda.set_stream(stream)  # torch's context does not, where ending the capture raises
                if error not in own:
                    _mend(graph, pool, side)
                cause = error.__context__ or error  # ending a broken capture raises once more
                raise CaptureError(f"capture failed: {cause}") from cause
            finally:
                torch.cuda.set_stream(stream)
                if collected != gc.isenabled():
                    (gc.enable if collected else gc.disable)()
        return _Graph(graph, options.keep_graph, self.device, held, TimelineEntry(pool)), result

    def pool_bytes(self, pool: Any) -> int:
        segments = [segment for one in _pools(pool) for segment in torch.cuda.memory_snapshot(one)]
        return sum(int(segment["total_size"]) for segment in segments)


def _side_stream() -> Any:
    device = torch.cuda.current_device()
    if device not in _streams:
        _streams[device] = torch.cuda.Stream()
    return _streams[device]


def _pools(pool: Any) -> list[Any]:
    """The pool, and those that took its place."""
    found = [pool]
    while found[-1] in _successors:
        found.append(_successors[found[-1]])
    return found


def _mend(graph: Any, pool: Any, stream: Any) -> None:
    """Put right what torch leaves where the end of a capture raises: the device's allocator still takes from the pool, the host's
    too (nothing can end that, so the pool has a successor), and the generator is still capturing, until a capture ends well."""
    _broken.append(graph)
    _successors[pool] = torch.cuda.graph_pool_handle()
    device = torch.cuda.current_device()
    for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
        with contextlib.suppress(RuntimeError):  # where the capture did not even begin
            undo(device, pool)
    with contextlib.suppress(RuntimeError), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*CUDA Graph is empty")
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool=torch.cuda.graph_pool_handle(), stream=stream):
            pass


class _Graph:
    """`held`: what the graph reads at each replay, and nobody else keeps."""

    def __init__(self, graph: Any, kept: bool, device: Any, held: list[Any], entry: TimelineEntry) -> None:
        self.graph, self.kept, self.device, self.held, self.entry = graph, kept, device, held, entry

    def replay(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()
        self.entry.replayed()

    def reset(self) -> None:
        self.graph.reset()
        self.held.clear()
        self.entry.leave()

    def kernels(self) -> int | None:
        """The graph's kernel nodes, where it was kept and instantiated and the driver tells them."""
        try:
            nodes = self.graph.get_graph_data()["nodes"]
        except (AttributeError, RuntimeError, ImportError, KeyError):
            return None
        return sum(node["node_type"] == "kernel" for node in nodes)

    def dot(self, path: str) -> None:
        if not self.kept:
            raise RuntimeError("dot: the graph must be captured with keep_graph=True, got keep_graph=False")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="DEBUG: calling")
            self.graph.debug_dump(path)

    def instantiate(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.instantiate()

    @property
    def raw_graph(self) -> Any:
        return self.graph
