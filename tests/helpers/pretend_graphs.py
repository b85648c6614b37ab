"""A stand-in for torch.cuda's captures, which records every call."""

import contextlib
import itertools
import weakref

import torch

from funcops.adapters.graphs import backend as graphs


class Stream(str):
    def synchronize(self):
        """Wait for nothing."""


class Cuda:
    """Records every call, and keeps torch's state: the current device and stream, the pools that allocators use, whether the
    generator is capturing. A capture whose work raised CUDA's error raises at its end, before any state is restored."""

    def __init__(self, monkeypatch):
        self.calls, self.stream_now, self.device_now, self.pools = [], Stream("main"), 0, itertools.count(7)
        self.device_takes_from, self.host_takes_from, self.generator_captures = [], [], False
        self.graphs = weakref.WeakSet()
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
            "device",
            "current_device",
            "is_current_stream_capturing",
        ):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(
            torch._C, "_cuda_endAllocateToPool", lambda device, pool: self.device_takes_from.remove((device, pool)), raising=False
        )
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda device, pool: self.calls.append(("release", device, pool)), raising=False
        )
        for kept in (graphs._broken, graphs._streams, graphs._successors):
            monkeypatch.setattr(graphs, next(n for n, v in vars(graphs).items() if v is kept), type(kept)())

    def synchronize(self):
        self.calls.append("synchronize")

    def Stream(self):
        return Stream(f"side {self.device_now}")

    def current_device(self):
        return self.device_now

    def is_current_stream_capturing(self):
        return self.generator_captures

    def current_stream(self):
        return self.stream_now

    def set_stream(self, stream):
        self.stream_now = stream

    @contextlib.contextmanager
    def device(self, device):
        before, self.device_now = self.device_now, self.device_now if device is None else device
        yield
        self.device_now = before

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    @contextlib.contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode="global"):
        self.calls.append(("capture", pool, stream, capture_error_mode, self.device_now))
        assert not any(pool == taken for _, taken in self.device_takes_from), "already recording to the pool"
        assert pool not in self.host_takes_from, "already recording to the pool, on the host"
        self.device_takes_from.append((self.device_now, pool))
        self.host_takes_from.append(pool)
        self.generator_captures, before, self.stream_now = True, self.stream_now, stream
        failed = None
        try:
            yield
        except Exception as error:
            failed = error
        if isinstance(failed, CudaError):
            raise RuntimeError("operation failed due to a previous error during capture") from None
        self.device_takes_from.remove((self.device_now, pool))
        self.host_takes_from.remove(pool)
        self.generator_captures, self.stream_now = False, before
        if failed is not None:
            raise failed

    def graph_pool_handle(self):
        return 0, next(self.pools)

    def memory_snapshot(self, pool):
        return [{"total_size": 512}, {"total_size": 1024}]

    def CUDAGraph(self, keep_graph=False):
        made = Graph(self, keep_graph)
        self.graphs.add(made)
        return made


class CudaError(RuntimeError):
    """The error of a call that a capture forbids."""


class Graph:
    def __init__(self, cuda, keep_graph):
        self.cuda, self.keep_graph = cuda, keep_graph

    def __getattr__(self, name):
        if name == "get_graph_data":
            return lambda: {"nodes": [{"node_type": kind} for kind in ("kernel", "memcpy", "kernel")]}
        return lambda *args: self.cuda.calls.append((name, self.cuda.device_now, *args))
