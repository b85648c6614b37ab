"""What the CUDA backend asks of torch.cuda, with a stand-in for torch.cuda: the calls, their order, and what a failure leaves."""

import contextlib
import gc

import pytest
import torch

from funcops.adapters.graphs.backend import DeviceBackend, Options
from funcops.errors import CaptureError

POOL = (0, 7)


class Cuda:
    """Notes every call."""

    def __init__(self, monkeypatch):
        self.calls, self.stream_now = [], "main"
        for name in (
            "synchronize",
            "set_stream",
            "current_stream",
            "stream",
            "graph",
            "graph_pool_handle",
            "memory_snapshot",
            "Stream",
            "CUDAGraph",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))

    def synchronize(self):
        self.calls.append("synchronize")

    def Stream(self):
        return "side"

    def current_stream(self):
        return self.stream_now

    def set_stream(self, stream):
        self.stream_now = stream

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    @contextlib.contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        """As torch's: where the capture fails, ending it raises too, and the stream stays."""
        self.calls.append(("capture", pool, stream, capture_error_mode))
        before, self.stream_now = self.stream_now, "capturing"
        try:
            yield
        except Exception:
            raise RuntimeError("operation failed due to a previous error during capture") from None
        self.stream_now = before

    def graph_pool_handle(self):
        return POOL

    def memory_snapshot(self, pool):
        assert pool == POOL
        return [{"total_size": 512}, {"total_size": 1024}]

    def CUDAGraph(self, keep_graph=False):
        return Graph(self, keep_graph)


class Graph:
    def __init__(self, cuda, keep_graph):
        self.cuda, self.keep_graph = cuda, keep_graph

    def __getattr__(self, name):
        if name == "get_graph_data":
            return lambda: {"nodes": [{"node_type": kind} for kind in ("kernel", "memcpy", "kernel")]}
        return lambda *args: self.cuda.calls.append((name, *args))


def test_capture_and_replay(monkeypatch):
    cuda, backend, options = Cuda(monkeypatch), DeviceBackend(), Options("mine", "thread_local", True)
    pool, ran = backend.pool(), []
    backend.warm_up(lambda: ran.append(cuda.stream_now), 3, options)
    assert ran == ["mine"] * 3 and cuda.calls == ["synchronize", "synchronize"]
    captured, result = backend.capture(lambda: 5, lambda result: [], pool, options)
    assert result == 5 and cuda.calls[-1] == ("capture", POOL, "mine", "thread_local") and cuda.stream_now == "main"
    captured.replay()
    captured.instantiate()
    captured.dot("graph.dot")
    captured.reset()
    assert cuda.calls[-5:] == [("replay",), ("instantiate",), ("enable_debug_mode",), ("debug_dump", "graph.dot"), ("reset",)]
    assert captured.kernels() == 2 and captured.raw_graph.keep_graph and backend.pool_bytes(pool) == 1536


def test_a_failure_leaves_nothing(monkeypatch):
    cuda, backend = Cuda(monkeypatch), DeviceBackend()

    def bad():
        gc.disable()
        raise ValueError("no such thing")

    assert gc.isenabled()
    with pytest.raises(CaptureError, match="capture failed: no such thing") as error:
        backend.capture(bad, lambda result: [], POOL, Options())
    assert isinstance(error.value.__cause__, ValueError) and cuda.stream_now == "main" and gc.isenabled()


def test_a_graph_that_was_not_kept_cannot_be_drawn(monkeypatch):
    Cuda(monkeypatch)
    captured, _ = DeviceBackend().capture(lambda: None, lambda result: [], POOL, Options())
    with pytest.raises(RuntimeError, match="dot: the graph must be captured with keep_graph=True, got keep_graph=False"):
        captured.dot("graph.dot")
