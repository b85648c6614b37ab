"""Tables on the device, with a stand-in for the device: which calls share one, and how long it lives."""

import gc
import weakref

import pytest
import torch

from funcops.engine.backend import held
from funcops.engine.backend.held import holding
from funcops.library.kernels import tables
from funcops.library.kernels.tables import Tables

CUDA = torch.device("cuda", 0)


class Device:
    """A stand-in: copies of host tensors stay on the host; `capturing` and `stream` are torch's answers."""

    capturing, stream, graph = False, 1, None

    def __init__(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.stream, raising=False)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self)
        monkeypatch.setattr(
            tables, "_copied", lambda device, host, note, pinned: tables.Table(tuple(t.clone() for t in host), note, host)
        )

    def get_currently_capturing_graph(self):
        return self.graph


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def got(shared, key=0, number=1):
    return shared.get(CUDA, key, lambda: ((torch.tensor([number]),), "note")).on_device[0]


def test_a_table_is_made_once_a_stream_and_the_oldest_goes(device):
    shared = Tables(2)
    first = got(shared)
    assert got(shared) is first
    device.stream = 2
    assert got(shared) is not first
    device.stream = 1
    assert got(shared) is first and got(shared, 1) is not first
    got(shared, 2)
    assert len(shared.cache) == 2 and got(shared) is not first


def test_a_table_made_in_a_capture_belongs_to_it(device):
    """The copy is only a node of the graph: an eager call, and another graph, must not read it."""
    shared = Tables(2)
    device.capturing = True
    with holding() as one:
        captured = got(shared)
    with holding() as other:
        assert got(shared) is not captured
    device.capturing = False
    assert got(shared) is not captured and not any(captured is t for table in shared.cache.values() for t in table.on_device)
    assert [len(held) for held in (one, other)] == [1, 1] and one[0].on_device[0] is captured


def test_a_graph_keeps_what_it_reads_and_no_longer(device):
    shared = Tables(1)
    eager = got(shared)
    device.capturing = True
    with holding() as held:
        assert got(shared) is eager
    device.capturing = False
    alive = weakref.ref(eager)
    got(shared, 1)  # which takes its place in the cache
    del eager
    gc.collect()
    assert alive() is not None
    del held
    gc.collect()
    assert alive() is None


def test_a_capture_that_is_not_ours_keeps_it_as_long_as_its_graph(device):
    class Graph:
        pass

    shared, before = Tables(1), len(held._for_good)
    device.capturing, device.graph = True, Graph()
    alive = weakref.ref(got(shared))
    gc.collect()
    assert alive() is not None and len(held._for_good) == before
    device.graph = None
    gc.collect()
    assert alive() is None
