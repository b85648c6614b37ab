"""Recordings of CUDA graphs: a graph has the digests of what it computes in memory of its own, and each replay tells them."""

import contextlib
import math

import pytest
import torch
from pretend_graphs import Cuda
from test_compare import BASE, IDS, MODEL, PARAMS, faulty, of, step, x_of

from funcops import chain, compare, named_scope, note, recording
from funcops.adapters.graphs import backend as graphs
from funcops.adapters.graphs import conditional
from funcops.adapters.graphs.without_gpu import recorder
from funcops.adapters.recording import digest as digests
from funcops.engine.backend import notes, scopes
from funcops.graphs import graphed, graphed_op, when


class Replayed(recorder._Recorder):
    """Records what a capture on a device would: the work of digests too, and not what is told."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.funcops.note.default:
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


class Graph:
    """A graph whose replay computes everything again, into all memory that someone still holds."""

    def __init__(self, keep_graph=False):
        self.replay = self.reset = lambda: None


@pytest.fixture
def device(monkeypatch):
    """The CPU in the place of a device."""
    cuda = Cuda(monkeypatch)

    @contextlib.contextmanager
    def capture(graph, pool=None, stream=None, capture_error_mode="global", enable_annotations=False):
        found = recorder.Recording(recorder.Pool())
        mode = Replayed(found)
        with cuda.graph(graph, pool, stream, capture_error_mode), mode:
            yield
        found.ends.append(len(found.calls))
        mode.finish([t for made, _ in mode.storages.values() if (t := made.lent.get()) is not None])
        graph.replay, graph.reset = found.replay, found.reset

    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(digests, "_known_finite", lambda flat, largest: False)
    monkeypatch.setattr(graphs, "backend_of", lambda *trees: graphs.DeviceBackend())
    return cuda


@pytest.mark.slow
def test_each_replay_tells_what_it_computed(device):
    """In any order of recordings and plain replays, with other params each time."""
    with recording() as around:
        graph = graphed(step, PARAMS, x_of(), warmup=1)
    assert compare(BASE, around).first is None and len(around) == len(BASE), "the warm-up, and nothing of the capture"
    assert compare(BASE, of(graph, PARAMS, x_of())).first is None
    graph(faulty("blocks.1.mlp.down.weight"), x_of(IDS.roll(1, 0)))
    found = compare(BASE, of(graph, faulty("blocks.0.mlp.up.weight"), x_of()))
    assert found.first.place == "blocks.0.mlp.up: fwd, y" and len(found.matched) == len(BASE) == len(found.matched)
    twice, eager = (_twice(fn) for fn in (graph, step))
    assert compare(eager, twice).first is None and {row.turn for row in twice.rows} == {0, 1} and len(twice) == len(eager)
    assert compare(BASE, of(step, PARAMS, x_of())).first is None and not notes.thread.captured


def _twice(fn):
    with recording() as found:
        fn(PARAMS, x_of())
        fn(faulty("blocks.0.mlp.up.weight"), x_of())
    return found


@pytest.mark.slow
def test_halves_in_graphs_of_their_own(device):
    def in_halves(op):
        _, residuals = op.fwd(PARAMS, x_of())
        _, pending = op.dgrad(residuals, torch.ones(()))
        return op.wgrad(pending)

    with recording():
        op = graphed_op(chain, MODEL, PARAMS, x_of(), warmup=1)

    def eager():
        _, residuals = chain.fwd(PARAMS, x_of(), MODEL)
        chain.wgrad(chain.dgrad(residuals, torch.ones(()), MODEL)[1], MODEL)

    for _ in range(2):
        found = compare(of(eager), of(in_halves, op))
        assert found.first is None and not found.only_a and not found.only_b


def test_parts_of_whole_values(device):
    """A graph tells the parts that the recording around its capture asks for, and no others."""
    half = of(lambda: _noted(torch.arange(2.0)))
    with recording(like=[half, half]):
        graph = graphed(_noted, torch.arange(4.0))
    with recording(like=[half, half]) as found:
        graph(torch.arange(4.0) + 1)
    assert [(row.part, row.digest.largest) for row in found.rows] == [("1 of 2 along 0", 2.0), ("2 of 2 along 0", 4.0)] + [
        ("1 of 2 along 0, in 2 groups", 3.0),
        ("2 of 2 along 0, in 2 groups", 4.0),
        ("", 4.0),
    ]
    with pytest.raises(RuntimeError, match="recording: like must be as in the recording around the graph's capture"), recording():
        graph(torch.arange(4.0))


def _noted(x):
    with named_scope("a", "fwd"):
        note(x=x)
    return x.clone()


def test_a_replay_does_not_stop(device):
    with recording():
        graph = graphed(_noted, torch.ones(2))
    replays = []
    real, graph._slots[0].graphs["call"].graph.replay = graph._slots[0].graphs["call"].graph.replay, lambda: replays.append(1)
    wanted = "recording: stop_at_nonfinite must be False for a CUDA graph"
    with pytest.raises(RuntimeError, match=wanted), recording(stop_at_nonfinite=True):
        graph(torch.full((2,), math.inf))
    graph._slots[0].graphs["call"].graph.replay = real
    with recording() as found:
        graph(torch.full((2,), math.inf))
    assert found.first_nonfinite().place == "a: fwd, x" and not replays


@pytest.mark.parametrize("where", ["recorder", "device"])
def test_a_graph_that_was_captured_without_a_recording_is_refused(where, request):
    if where == "device":
        request.getfixturevalue("device")
    graph = graphed(_noted, torch.ones(2))
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="recording: a graph must be one that was captured in a recording, got one captured"):
        of(graph, x)
    assert not notes.takers


def test_another_capture_is_refused(monkeypatch):
    """One of torch itself, of which nobody asks what its replays compute."""

    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with recording(), pytest.raises(RuntimeError, match="recording: a step must be in a capture of funcops.graphs, got torch"):
        notes._told(scopes._token, [torch.ones(2).as_subclass(OnDevice)], [""], ["fwd"], ["y"])


def test_a_node_that_is_left_out_would_tell_old_values(monkeypatch):
    """So in a recording `when` runs its update either way, and puts back what it wrote."""
    calls = []

    class Node:
        def begin_capture_to_if_node(self, flag):
            calls.append("begin")

        def end_capture_to_conditional_node(self):
            calls.append("end")

    class OnDevice(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(conditional, "_capturing", Node)
    y, flag = torch.zeros(2), torch.tensor(False).as_subclass(OnDevice)
    with recording():
        when(flag, lambda y: y.add_(1), y)
    assert not calls and not y.any()
    when(flag, lambda y: y.add_(1), y)
    assert calls == ["begin", "end"]
