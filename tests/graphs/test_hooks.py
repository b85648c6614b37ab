"""Hooks of captured functions: the same order on the recorder and through the CUDA backend, where torch.cuda is a stand-in."""

import gc
import weakref

import pytest
import torch
from pretend_graphs import Cuda

from funcops import LinearConfig, linear, random
from funcops.adapters.graphs import hooks as module
from funcops.adapters.graphs.backend import DeviceBackend, Options, RecorderBackend
from funcops.graphs import Hooks, graphed, graphed_op, register_hooks

EVENTS = ("capture_start", "capture_end", "instantiate", "replay_start", "replay_end", "destroy")


def noting(seen, prefix=""):
    return Hooks(**{event: lambda *graph, event=event: seen.append(prefix + event) for event in EVENTS})


@pytest.fixture(params=["recorder", "device"])
def backend(request, monkeypatch):
    if request.param == "recorder":
        return RecorderBackend()
    Cuda(monkeypatch)
    return DeviceBackend()


@pytest.mark.parametrize("keep", [False, True])
def test_hooks_run_in_the_order_of_a_graphs_life(backend, keep):
    seen = []
    hooks = noting(seen)
    captured, _ = backend.capture(
        lambda: seen.append("body"), lambda result: [], backend.pool(), Options(None, keep_graph=keep, hooks=hooks)
    )
    start = ["capture_start", "body", "capture_end"]
    assert seen == start + ["instantiate"] * (not keep)
    seen.clear()
    captured.replay()
    captured.replay()
    assert seen == ["instantiate"] * keep + ["replay_start", "replay_end"] * 2
    captured.instantiate()
    assert seen[-1] == "instantiate", "each instantiation is told"
    seen.clear()
    captured.reset()
    captured.reset()
    assert seen == ["destroy"], "once"


def test_a_graph_that_is_collected_is_destroyed_once_and_keeps_things_until_then(backend):
    seen = []
    captured, _ = backend.capture(lambda: None, lambda result: [], backend.pool(), Options(hooks=noting(seen)))
    kept = torch.ones(1)
    gone = weakref.ref(kept)
    captured.keep(kept)
    del kept
    captured.replay()
    assert gone() is not None and "destroy" not in seen
    del captured
    gc.collect()
    assert gone() is None and seen.count("destroy") == 1


def test_an_end_is_told_even_if_the_launch_raises_and_a_start_that_raises_prevents_it(backend):
    seen = []

    def failing(graph):
        raise KeyError("mine")

    captured, _ = backend.capture(lambda: None, lambda result: [], backend.pool(), Options(hooks=noting(seen)))
    captured.hooks = captured.hooks._replace(replay_start=failing)
    with pytest.raises(KeyError, match="mine"):
        captured.replay()
    assert seen[-1] == "instantiate"
    captured.hooks = noting(seen)
    with pytest.raises(ZeroDivisionError):
        captured.replayed(lambda: 1 / 0)
    assert seen[-2:] == ["replay_start", "replay_end"]


def test_an_error_of_a_hook_in_a_capture_reaches_the_caller_and_of_destroy_does_not(backend):
    def failing(*graph):
        raise KeyError("mine")

    with pytest.raises(Exception, match="mine"):
        backend.capture(lambda: None, lambda result: [], backend.pool(), Options(hooks=Hooks(capture_start=failing)))
    captured, _ = backend.capture(lambda: None, lambda result: [], backend.pool(), Options(hooks=Hooks(destroy=failing)))
    captured.reset()


def test_hooks_for_all_graphs_run_before_a_graphs_own_and_never_stop_it(backend):
    seen = []

    def failing(*graph):
        seen.append("failing")
        raise KeyError

    remove = [register_hooks(noting(seen, "all ")), register_hooks(Hooks(replay_start=failing, destroy=failing))]
    try:
        captured, _ = backend.capture(lambda: None, lambda result: [], backend.pool(), Options(hooks=noting(seen)))
        captured.replay()
        assert seen[:4] == ["all capture_start", "capture_start", "all capture_end", "capture_end"]
        assert seen[-5:] == ["all replay_start", "failing", "replay_start", "all replay_end", "replay_end"]
        seen.clear()
        captured.reset()
        assert seen == ["destroy", "all destroy", "failing"]
    finally:
        for one in remove:
            one()
            one()
    seen.clear()
    captured, _ = backend.capture(lambda: None, lambda result: [], backend.pool(), Options())
    captured.replay()
    assert seen == [] and not any(hooks.replay_start for hooks in module._everywhere.values())


def test_memory_is_freed_after_the_last_replay_and_in_order(monkeypatch):
    """The streams of all replays are waited for, then hooks, then the graph, then what it keeps."""
    cuda, seen = Cuda(monkeypatch), []
    backend = DeviceBackend()

    class Kept:
        def __del__(self):
            seen.append("kept")

    stream = type(cuda.stream_now)
    monkeypatch.setattr(stream, "synchronize", lambda self: seen.append(f"wait for {self}"))
    captured, _ = backend.capture(
        lambda: None, lambda result: [], backend.pool(), Options(hooks=Hooks(destroy=lambda: seen.append("destroy")))
    )
    captured.keep(Kept())
    captured.replay()
    cuda.set_stream(stream("other"))
    captured.replay()
    cuda.calls.clear()
    captured.reset()
    assert sorted(seen[:2]) == ["wait for main", "wait for other"] and seen[2:] == ["destroy", "kept"]
    assert cuda.calls == [("reset", 0)]


def test_a_graph_that_dies_during_a_capture_is_freed_after_it(monkeypatch):
    cuda, seen = Cuda(monkeypatch), []
    backend = DeviceBackend()
    old, _ = backend.capture(
        lambda: None, lambda result: [], backend.pool(), Options(hooks=Hooks(destroy=lambda: seen.append("destroy")))
    )
    old.replay()
    holder = [old]
    del old

    def body():
        holder.clear()
        gc.collect()
        seen.append("body ended")

    backend.capture(body, lambda result: [], backend.pool(), Options())
    assert seen == ["body ended", "destroy"] and ("reset", 0) in cuda.calls


def test_a_failed_capture_is_left_to_torch(monkeypatch):
    cuda = Cuda(monkeypatch)
    with pytest.raises(Exception, match="division"):
        DeviceBackend().capture(lambda: 1 / 0, lambda result: [], None, Options())
    gc.collect()
    assert ("reset", 0) not in cuda.calls


def test_hooks_through_graphed_and_graphed_op():
    seen = []
    step = graphed(lambda x: 2 * x, torch.ones(2), slots=2, outputs="borrow", hooks=noting(seen))
    assert seen.count("capture_end") == 2 and len(step.pools()) == 2
    step(torch.ones(2))
    step.reset()
    assert seen.count("replay_end") == 1 and seen.count("destroy") == 2
    seen.clear()
    cfg = LinearConfig(4, 4)
    graph = graphed_op(linear, cfg, linear.init(cfg, key=random.key(0)), torch.ones(2, 4), hooks=noting(seen))
    assert seen.count("capture_end") == 4 and len(graph.pools()) == 1
    graph.reset()
    assert seen.count("destroy") == 4


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("outputs", ["clone", "borrow"])
def test_a_reset_destroys_graphs_that_a_hook_holds(slots, outputs):
    seen, held = [], []
    hooks = noting(seen)._replace(capture_start=held.append)
    step = graphed(lambda x: 2 * x, torch.ones(2), slots=slots, outputs=outputs, hooks=hooks)
    cfg = LinearConfig(4, 4)
    graph = graphed_op(linear, cfg, linear.init(cfg, key=random.key(0)), torch.ones(2, 4), slots=slots, hooks=hooks)
    assert len(held) == 5 * slots and "destroy" not in seen
    step.reset()
    assert seen.count("destroy") == slots
    graph.reset()
    assert seen.count("destroy") == 5 * slots


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda: graphed(lambda x: x + 1, torch.ones(2), hooks={"destroy": print}), TypeError, "graphed: hooks must be"),
        (
            lambda: graphed(lambda x: x + 1, torch.ones(2), hooks=Hooks(destroy=3)),
            TypeError,
            "graphed: hooks.destroy must be a function",
        ),
        (lambda: register_hooks(print), TypeError, "register_hooks: hooks must be"),
        (lambda: register_hooks(Hooks(replay_end="x")), TypeError, "register_hooks: hooks.replay_end must be a function or None"),
    ],
)
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_a_captured_function_is_instantiated_in_all_of_its_slots():
    seen = []
    captured = graphed(lambda x: x + 1, torch.ones(2), slots=3, hooks=noting(seen))
    seen.clear()
    captured.instantiate()
    assert seen == ["instantiate"] * 3
