"""The CUDA backend's calls of torch.cuda, recorded by a stand-in: which, in which order, and after a failure."""

import contextlib
import gc
import sys
import types
import warnings
import weakref

import pytest
import torch
from pretend_graphs import Cuda, CudaError, Graph
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.device import CudaTimer
from funcops import named_scope, named_steps
from funcops.adapters.graphs import backend as graphs
from funcops.adapters.graphs import branch, branches, graphed
from funcops.adapters.graphs.backend import DeviceBackend, Options
from funcops.engine.backend.held import hold
from funcops.engine.errors import CaptureError


def test_capture_and_replay(monkeypatch):
    cuda, backend, options = Cuda(monkeypatch), DeviceBackend(), Options("mine", "thread_local", True)
    pool, ran = backend.pool(), []
    backend.warm_up(lambda: ran.append(cuda.stream_now), 3, options)
    assert ran == ["mine"] * 3 and cuda.calls == ["synchronize", "synchronize"]
    captured, result = backend.capture(lambda: 5, lambda result: [], pool, options)
    assert result == 5 and cuda.calls[-1] == ("capture", pool, "mine", "thread_local", 0) and cuda.stream_now == "main"
    captured.replay()
    captured.instantiate()
    captured.dot("graph.dot")
    captured.reset()
    assert cuda.calls[-4:] == [("replay", 0), ("instantiate", 0), ("debug_dump", 0, "graph.dot"), ("reset", 0)], (
        "no debug mode: it is every graph's"
    )
    assert captured.kernels() == 2 and captured.raw_graph.keep_graph and backend.pool_bytes(pool) == 1536


def test_parts_are_a_graph_each_in_one_pool(monkeypatch):
    cuda, backend = Cuda(monkeypatch), DeviceBackend()
    pool, ran = backend.pool(), []
    parts = [lambda number=number: ran.append(number) for number in range(3)]
    captured = backend.capture_parts(parts, lambda result: [], pool, Options())
    assert ran == [0, 1, 2] and len(captured) == 3
    assert [call[1] for call in cuda.calls if call[0] == "capture"] == [pool] * 3
    for one in captured:
        one.replay()
    assert len([call for call in cuda.calls if call[0] == "replay"]) == len({id(one.raw_graph) for one in captured}) == 3


def test_graphs_of_a_pool_know_which_outputs_were_overwritten(monkeypatch):
    Cuda(monkeypatch)
    backend = DeviceBackend()
    pools = [backend.pool(), backend.pool()]
    first, second, third, alone = (
        backend.capture(lambda: None, lambda result: [], pool, Options())[0] for pool in (pools[0],) * 3 + (pools[1],)
    )
    graphs = (first, second, third, alone)
    assert [g.entry.overwritten() for g in graphs] == [False] * 4
    for graph, want in [
        (third, (False, False, False, False)),
        (second, (False, False, True, False)),
        (first, (False, True, True, False)),
        (alone, (False, True, True, False)),
        (second, (False, False, True, False)),
        (third, (False, False, False, False)),
    ]:
        graph.replay()
        assert tuple(g.entry.overwritten() for g in graphs) == want
    first.replay()
    second.reset()
    first.reset()
    assert third.entry.overwritten() and not first.entry.overwritten(), "what a graph wrote over stays so when it is gone"


def test_drawing_a_graph_warns_of_nothing(monkeypatch):
    Cuda(monkeypatch)
    captured, _ = DeviceBackend().capture(lambda: None, lambda result: [], None, Options(keep_graph=True))
    monkeypatch.setattr(
        Graph, "debug_dump", lambda self, path: warnings.warn("DEBUG: calling debug_dump()", stacklevel=1), raising=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured.dot("graph.dot")


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("stream", [None, "mine"])
def test_everything_is_on_the_tensors_device(monkeypatch, device, stream):
    cuda, backend, seen = Cuda(monkeypatch), DeviceBackend(device), []
    backend.warm_up(lambda: seen.append((cuda.device_now, cuda.stream_now)), 1, Options(stream))
    captured, _ = backend.capture(lambda: seen.append((cuda.device_now, cuda.stream_now)), lambda result: [], None, Options(stream))
    assert seen == [(device, stream or f"side {device}")] * 2, "torch's own stream is of the device that captured first"
    captured.replay()
    assert cuda.calls[-1] == ("replay", device) and cuda.device_now == 0 and cuda.stream_now == "main"


def test_the_device_comes_from_the_tensors():
    with FakeTensorMode():
        trees = {"a": torch.empty(2), "b": [torch.empty(2, device="cuda:1")]}
    assert graphs.backend_of(trees).device == torch.device("cuda", 1)


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError, CudaError])
@pytest.mark.parametrize("times", [1, 3])
def test_a_failure_leaves_nothing(monkeypatch, error, times):
    """Neither do several failures: random numbers can be drawn afterwards, and the same pool takes another capture."""
    cuda, backend = Cuda(monkeypatch), DeviceBackend()
    pool = backend.pool()

    def bad():
        gc.disable()
        raise error("no such thing")

    assert gc.isenabled()
    for _ in range(times):
        with pytest.raises(CaptureError, match="capture failed: no such thing") as raised:
            backend.capture(bad, lambda result: [], pool, Options())
        assert isinstance(raised.value.__cause__, error) and cuda.stream_now == "main" and gc.isenabled()
        del raised
        assert not cuda.generator_captures and not cuda.device_takes_from
    gc.collect()
    alive = len(cuda.graphs)
    assert alive == (times if error is CudaError else 0), "torch still points to graphs whose capture did not end"
    _, result = backend.capture(lambda: 5, lambda result: [], pool, Options())
    assert result == 5 and not cuda.device_takes_from
    assert backend.pool_bytes(pool) == 1536 * (1 + times * (error is CudaError))


def test_the_bench_goes_on_where_a_call_cannot_be_captured(monkeypatch):
    cuda = Cuda(monkeypatch)
    timer = CudaTimer()
    monkeypatch.setattr(timer, "_event_us", lambda calls: 1000.0)
    calls = []

    def call():
        calls.append(cuda.stream_now)
        if cuda.generator_captures:
            raise CudaError("no")

    replay = timer.replay([call])
    assert not replay.captured and cuda.stream_now == "main" and not cuda.generator_captures
    cuda.generator_captures = False
    replay.run()
    assert calls[-1] == "main"
    assert timer.replay([lambda: None]).captured


def test_a_graph_that_was_not_kept_cannot_be_drawn(monkeypatch):
    Cuda(monkeypatch)
    captured, _ = DeviceBackend().capture(lambda: None, lambda result: [], None, Options())
    with pytest.raises(RuntimeError, match="dot: the graph must be captured with keep_graph=True, got keep_graph=False"):
        captured.dot("graph.dot")


@pytest.mark.slow
def test_tensors_that_a_graph_reads_live_as_long_as_the_graph(monkeypatch):
    Cuda(monkeypatch)

    class Read:
        pass

    def fn():
        made = Read()
        hold(made)
        return weakref.ref(made)

    captured, alive = DeviceBackend().capture(fn, lambda result: [], None, Options())
    gc.collect()
    assert alive() is not None
    captured.reset()
    gc.collect()
    assert alive() is None


def test_a_mempool_is_taken_and_kept(monkeypatch):
    """The graph takes its id, and keeps it until the graph is freed."""

    class MemPool:
        id = (0, 77)

    cuda = Cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "MemPool", MemPool)
    monkeypatch.setattr(graphs, "backend_of", lambda *trees: DeviceBackend())
    pool = MemPool()
    gone = weakref.ref(pool)
    step = graphed(lambda x: x, torch.ones(2), pool=pool, warmup=0)
    assert cuda.calls[-1][:2] == ("capture", (0, 77)) and step.pools() == [(0, 77)]
    del pool
    gc.collect()
    assert gone() is not None
    step.reset()
    del step
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("torch_knows", [True, False])
def test_a_capture_of_named_steps_annotates_its_kernels(monkeypatch, torch_knows):
    """From torch 2.15 on; before, a warning says so, and the capture goes on."""
    cuda, seen, entered = Cuda(monkeypatch), [], []
    annotations = types.ModuleType("torch.cuda.graph_annotations")
    annotations.is_available = lambda: True
    annotations.mark_kernels = lambda given: entered.append(given) or contextlib.nullcontext()
    annotations.get_kernel_annotations = dict
    monkeypatch.setitem(sys.modules, annotations.__name__, annotations if torch_knows else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    graph = cuda.graph

    @contextlib.contextmanager
    def noting(*args, enable_annotations=False, **options):
        seen.append(enable_annotations)
        with graph(*args, **options):
            yield

    monkeypatch.setattr(torch.cuda, "graph", noting)

    def body():
        with named_scope("up", "fwd"):
            return 5

    backend = DeviceBackend()
    backend.capture(body, lambda result: [], None, Options())
    assert seen == [False] and not entered
    with named_steps(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backend.capture(body, lambda result: [], None, Options())
    assert seen == [False, torch_knows]
    assert entered == [{"name": "up: fwd", "path": "up", "half": "fwd"}] * torch_knows
    said = "named_steps: kernels of CUDA graphs get the names of steps from torch 2.15 on"
    assert [str(one.message) for one in caught] == [said] * (not torch_knows)


def test_a_branch_is_a_stream_with_an_event_at_its_end(monkeypatch):
    cuda, calls = Cuda(monkeypatch), []
    stream = type(cuda.stream_now)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(branches, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream("side"))
    for name in ("wait_stream", "record_event", "wait_event"):
        monkeypatch.setattr(
            stream, name, lambda self, *of, name=name: calls.append((str(self), name, *map(str, of))) or "event", raising=False
        )
    x = torch.ones(2)
    with branch("b") as side:
        y = x + 1
        y.add_(1)
        assert cuda.stream_now == "side"
    assert cuda.stream_now == "main" and [*map(id, side._held.tensors.values())] == [id(x)], "y is its own"
    side.join()
    assert calls == [("side", "wait_stream", "main"), ("side", "record_event"), ("main", "wait_event", "event")]
    assert not side._held.tensors
    with branch("b"):
        pass
    assert len(branches._streams) == 1, "branches of one name share a stream"
