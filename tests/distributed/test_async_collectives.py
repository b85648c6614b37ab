"""Communication in flight: used once, from a source that must not change, and named by a ledger."""

import copy
import re
import types

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from funcops import DonatedError, Ledger, LedgerError, StaleResidualError, graphs, trees
from funcops.distributed import (
    Axis,
    InFlight,
    Mesh,
    all_to_all_start,
    comm,
    finish,
    gather_start,
    scatter_sum_start,
    sum_over_start,
)
from funcops.engine.contract.needs import Needs
from funcops.engine.trees import tree_map
from funcops.testing import run_ranks

STARTS = {f.__name__: f for f in (gather_start, scatter_sum_start, sum_over_start, all_to_all_start)}
WANT = {  # of x = 10 rank + (0, 1), by two ranks
    "gather_start": lambda r: [0.0, 1.0, 10.0, 11.0],
    "scatter_sum_start": lambda r: [10.0 + 2 * r],
    "sum_over_start": lambda r: [10.0, 12.0],
    "all_to_all_start": lambda r: [0.0 + r, 10.0 + r],
}


def on_two(fn):
    return run_ranks({"tp": 2}, lambda mesh: fn(mesh["tp"], torch.arange(2.0) + 10 * mesh.rank))


@pytest.mark.parametrize("name", STARTS)
def test_started_collectives_arrive(name):
    def run(axis, x):
        h = STARTS[name](x, axis)
        assert type(h) is InFlight and not isinstance(h, Tensor) and h.source is x and h.value.isnan().all()
        return finish(h).tolist()

    assert on_two(run) == [WANT[name](r) for r in (0, 1)]
    x = torch.arange(2.0)
    assert finish(STARTS[name](x, Mesh.abstract({"tp": 1}, 0)["tp"])) is x, "one rank sends nothing"


def moved(h):
    """The ways in which a tree can be copied or moved."""
    return {"itself": h, "mapped": tree_map(lambda t: t, {"a": h})["a"], "a copy": copy.copy(h), "taken": taken(h)}


def taken(h):
    ledger = Ledger()
    ledger.keep("h", {"h": h})
    return ledger.take("h")["h"]


@pytest.mark.parametrize("way", ["itself", "mapped", "a copy", "taken"])
def test_used_twice_or_after_a_write_it_raises(way):
    def run(axis, x):
        h = moved(gather_start(x, axis))[way]
        finish(h)
        with pytest.raises(DonatedError, match=re.escape("finish: h must be in flight, got an InFlight that was finished")):
            finish(h)
        h = gather_start(x.clone(), axis)
        source, started = h.source, moved(h)[way]
        source.add_(0)
        with pytest.raises(StaleResidualError) as raised:
            finish(started)
        assert str(raised.value).startswith(
            "finish: h.source must be as the gather_start left it, got a tensor that was written to since (it aliases its x)"
        )
        source.add_(-1).add_(1)  # the same values again, so that this board of ranks has nothing to say
        torch.ops._c10d_functional.wait_tensor(h.value)

    on_two(run)


EDITS = {"cast": lambda t: t.double(), "cut": lambda t: t[:1], "emptied": lambda t: None}


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("edit", EDITS)
def test_one_whose_leaves_were_made_anew_names_its_source(edit, name):
    h = tree_map(EDITS[edit], STARTS[name](torch.ones(2), Mesh.abstract({"tp": 1}, 0)["tp"]))
    with pytest.raises(StaleResidualError, match=rf"^finish: h\.source must be as the {name} left it, got another tensor\."):
        finish(h)


def test_a_collective_that_is_never_finished_is_named():
    def run(axis, x):
        with pytest.raises(LedgerError, match=r"got 1 left: blocks\.3\.up, gradients"), Ledger(x) as ledger:
            ledger.keep("blocks.3.up, gradients", gather_start(x, axis))
            assert ledger.nbytes == 2 * x.nbytes  # what arrives; x is the caller's
            held = ledger._waiting["blocks.3.up, gradients"][0]
        finish(held)

    on_two(run)
    with pytest.raises(AssertionError, match=r"must be finished, got all_gather of float32\[2\] that nobody waits for on rank"):
        on_two(lambda axis, x: gather_start(x, axis) and None)


class OnDevice(Tensor):
    """A tensor that says it is on a GPU, on whose log `record_stream` and its end are written."""

    def __new__(cls, what, log):
        made = torch.Tensor._make_subclass(cls, torch.zeros(2))
        made.what, made.written = what, log
        return made

    is_cuda, device = True, torch.device("cuda", 0)

    def contiguous(self):
        return self if self.what != "strided x" else OnDevice("copy", self.written)

    def record_stream(self, stream):
        self.written.append(f"{self.what} is used on {stream}")

    def __del__(self):
        self.written.append(f"{self.what} is freed")


@pytest.mark.parametrize("sent", ["x", "copy"])
def test_the_memory_of_what_is_sent_waits_for_the_stream_that_finishes(sent, monkeypatch):
    """NCCL lets go of what it sends at the wait, for which only the stream that waits has waited."""
    log, work = [], {}

    def gather(x, size, group):
        value = OnDevice("value", log)
        work[id(value)] = x
        return value

    def wait_tensor(value):
        log.append("wait")
        del work[id(value)]
        return value

    fakes = types.SimpleNamespace(all_gather_into_tensor=gather, wait_tensor=wait_tensor)
    monkeypatch.setattr(comm, "ops", fakes)
    monkeypatch.setattr(comm, "_group", lambda x, axis: "group")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: "the other stream")
    axis, x = Mesh.abstract({"tp": 2}, 0)["tp"], OnDevice("x" if sent == "x" else "strided x", log)
    h = InFlight.keep(axis, Needs.ALL, value=comm.start_gather(x, axis), source=x, what="gather")
    del x
    value = finish(h)
    assert value.what == "value"
    used = [f"{sent} is used on the other stream", "value is used on the other stream", f"{sent} is freed"]
    assert [line for line in log if not line.startswith("strided")] == ["wait", *used]
    del value
    assert log[-1] == "value is freed" and not len(comm._sent)


def test_traced_a_start_and_a_wait_stay_where_they_are():
    axis = Mesh.abstract({"tp": 2}, 0)["tp"]

    def step(x, w):
        h = gather_start(x, axis)
        y = x @ w
        return finish(h), y

    graph = make_fx(step, tracing_mode="fake")(torch.ones(2, 3), torch.ones(3, 3))
    ops = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert ops == ["_c10d_functional.all_gather_into_tensor.default", "aten.mm.default", "_c10d_functional.wait_tensor.default"]


def test_no_graph_takes_or_returns_a_collective_in_flight():
    one, x = Mesh.abstract({"tp": 1}, 0)["tp"], torch.ones(2)
    with pytest.raises(TypeError, match=re.escape("graphed: input 1.a must be finished, got an InFlight (gather)")):
        graphs.graphed(lambda x, tree: x, x, {"a": gather_start(x, one)})
    with pytest.raises(TypeError, match=re.escape("graphed: output 0.b must be finished, got an InFlight (sum_over)")):
        graphs.graphed(lambda x: ({"b": sum_over_start(x, one)}, x), x)
    step = graphs.graphed(lambda x: finish(gather_start(x, one)) + 1, x)
    assert torch.equal(step(x), torch.full((2,), 2.0))


BAD = {
    "finish: h must be an InFlight, from gather_start or another *_start, got float32[2]": lambda axis: finish(torch.ones(2)),
    "gather_start: axis must be Axis, got 'tp'": lambda axis: gather_start(torch.ones(2), "tp"),
    "gather_start: x must be a tensor [...], got list": lambda axis: gather_start([1.0], axis),
    "gather_start: x must be of at least 1 dimension, got float32[]": lambda axis: gather_start(torch.ones(()), axis),
    "scatter_sum_start: x must be of a size along dimension 0 that axis 'tp' of 2 divides, got float32[3]": lambda axis: (
        scatter_sum_start(torch.ones(3), axis)
    ),
    "all_to_all_start: x must be of a size along dimension 0 that axis 'tp' of 2 divides, got float32[5, 2]": lambda axis: (
        all_to_all_start(torch.ones(5, 2), axis)
    ),
    "sum_over_start: x must be a tensor that does not require grad": lambda axis: sum_over_start(
        torch.ones(2, requires_grad=True), axis
    ),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_calls_raise_on_every_rank(said):
    def run(axis, x):
        with pytest.raises((ValueError, TypeError, RuntimeError)) as raised:
            BAD[said](axis)
        return str(raised.value)

    assert all(said in message for message in on_two(run))


def test_a_tree_of_it_keeps_its_static_parts():
    h = gather_start(torch.ones(2), Mesh.abstract({"tp": 1}, 0)["tp"])
    assert list(trees.paths({"h": h})) == ["h.value", "h.source"] and repr(h).startswith("InFlight(value=float32[2]")
    assert tree_map(lambda t: t, h).what == "gather"


def test_a_wait_that_nobody_answers_names_the_axis(monkeypatch):
    axis, t = Axis("tp", 2, 1, "a group"), torch.ones(2)
    said = ["Connection closed by peer [::1]:4", "no kernel for this dtype"]

    def wait_tensor(t):
        raise RuntimeError(said[0])

    monkeypatch.setattr(comm, "ops", types.SimpleNamespace(wait_tensor=wait_tensor))
    monkeypatch.setattr(comm, "_in_flight", {})
    for match in (r"^all_gather over axis 'tp'.* must be called by all its ranks, got no answer on rank 1", "^no kernel"):
        comm._in_flight[axis.group] = t, torch.ops._c10d_functional.all_gather_into_tensor
        with pytest.raises(RuntimeError, match=match):
            comm.wait(t, axis)
        del said[0]
