"""Graphs as data: recordings, and torch's own description of a CUDA graph, written out by its documented format."""

import re
from collections import Counter

import pytest
import torch

from funcops import ChainConfig, LinearConfig, SoftcapConfig, Step, chain, linear, named_steps, random, softcap
from funcops.adapters.graphs import conditional as module
from funcops.adapters.graphs.topology import from_torch_data
from funcops.engine.backend.scopes import Label, labels_of
from funcops.graphs import GraphData, GraphMemory, GraphNode, branch, graph_data, graph_diff, graph_memory, graphed, when

CFG = ChainConfig(steps=(Step("up", linear, LinearConfig(4, 8)), Step("cap", softcap, SoftcapConfig(30.0))))
PARAMS = chain.init(CFG, key=random.key(0))


def torch_data():
    """Two kernels of a forked step and a copy, as `CUDAGraph.get_graph_data` of torch 2.15 describes them."""

    def node(index, kind, name=None, grid=None, before=(), after=()):
        block = (128, 1, 1) if grid else None
        ids = {"index": index, "node_type": kind, "tools_id": 9 << 32 | index + 1, "graph_id": 9, "node_id": index + 1}
        shape = {"kernel_name": name, "grid_dim": grid, "block_dim": block, "shared_mem_bytes": 0 if grid else None}
        host = {"event_ptr": 0, "host_fn_addr": 0, "host_fn_name": "callback" if kind == "host" else None}
        return {**ids, **shape, **host, "dependencies": list(before), "dependents": list(after)}

    nodes = [
        node(0, "kernel", "gemm", (4, 2, 1), after=(1, 2)),
        node(1, "kernel", "norm_bwd", (7, 1, 1), before=(0,), after=(3,)),
        node(2, "memcpy", before=(0,), after=(3,)),
        node(3, "host", before=(1, 2)),
    ]
    pairs = [(a["index"], b) for a in nodes for b in a["dependents"]]
    edges = [{"from": a, "to": b, "from_port": 0, "to_port": 0, "type": 0} for a, b in pairs]
    return {"exec_graph_id": 9, "nodes": nodes, "edges": edges}


def test_torchs_data_is_joined_with_the_paths_of_its_annotations():
    annotations = {
        9 << 32 | 1: [{"name": "up: fwd", "path": "up", "half": "fwd"}],
        9 << 32 | 2: [{"name": "norm: bwd", "path": "norm", "half": "bwd", "autograd_phase": "backward"}],
        9 << 32 | 3: ["phase_A"],
    }
    data = from_torch_data(torch_data(), labels_of(annotations))
    assert data.nodes == (
        GraphNode("kernel", "gemm", "up", "fwd", (4, 2, 1), (128, 1, 1)),
        GraphNode("kernel", "norm_bwd", "norm", "bwd", (7, 1, 1), (128, 1, 1)),
        GraphNode("memcpy", "memcpy"),
        GraphNode("host", "callback"),
    )
    assert data.edges == ((0, 1), (0, 2), (1, 3), (2, 3)) and data.width == 2
    assert from_torch_data(torch_data(), {}).nodes[0].path == ""


def test_a_cuda_graph_of_torch_is_taken():
    class CUDAGraph:
        def get_graph_data(self):
            return torch_data()

    assert len(graph_data(CUDAGraph()).nodes) == 4


def test_one_drawing_for_both():
    with named_steps():
        recorded = graph_data(graphed(lambda x: chain.fwd(PARAMS, x, CFG)[0], torch.ones(2, 4)))
    labelled = from_torch_data(torch_data(), {9 << 32 | 1: Label("up", "fwd")})
    for data in (recorded, labelled):
        text = data.dot()
        assert text.startswith("digraph graph_data {") and text.count("{") == text.count("}")
        assert len(re.findall(r"n\d+ \[label=", text)) == len(data.nodes) and text.count(" -> ") == len(data.edges)
        assert 'label="up: fwd"' in text
    assert '"gemm\\n4x2x1"' in labelled.dot()
    assert GraphData((GraphNode("kernel", 'a "quoted" \\ name'),), ()).dot().count('\\"quoted\\" \\\\ name') == 1


def test_a_recording_is_in_order_without_views():
    def body(x):
        y = x.t().reshape(-1)
        return (y + 1).view(2, 2) * 2

    data = graph_data(graphed(body, torch.ones(2, 2)))
    assert [node.name for node in data.nodes][-2:] == ["aten.add.Tensor", "aten.mul.Tensor"]
    assert all("view" not in node.name and ".t." not in node.name for node in data.nodes)
    assert data.edges == tuple((i, i + 1) for i in range(len(data.nodes) - 1)) and data.width == 1


def test_branches_are_edges():
    def body(x):
        a = x + 1
        with branch("b") as side:
            b = a * 2
        c = a * 3
        side.join()
        return b + c

    data = graph_data(graphed(body, torch.ones(2)))
    names = [node.name.split(".")[1] for node in data.nodes]
    assert names == ["add", "mul", "mul", "add"] and sorted(data.edges) == [(0, 1), (0, 2), (1, 3), (2, 3)] and data.width == 2


def test_a_diff_says_what_came_and_went():
    with named_steps():
        before = graph_data(graphed(lambda x: chain.fwd(PARAMS, x, CFG)[0], torch.ones(2, 4)))
        after = graph_data(graphed(lambda x: chain.fwd(PARAMS, x, CFG)[0].relu(), torch.ones(2, 4)))
    assert graph_diff(before, before) == "" and graph_diff(before, after).split() == ["+", "aten.relu.default"]
    back = graph_diff(after, before)
    assert back.startswith("- ") and after.counts() - before.counts() == Counter({("", "", "aten.relu.default"): 1})
    with pytest.raises(TypeError, match="graph_diff: before must be"):
        graph_diff(3, before)
    with pytest.raises(TypeError, match="graph_diff: after must be"):
        graph_diff(before, 3)


class Peak:
    """The most that the CPU's allocator held at once in a call, from the profiler's own record of it."""

    def of(self, fn, *args):
        with torch.profiler.profile(profile_memory=True) as profiler, torch.no_grad():
            result = fn(*args)
        held = most = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most, result


def bodies():
    def freed(x):
        a = x * 2
        b = a + 1
        del a
        return b.exp() - 1

    def two(x):
        return x + 1, (x @ x.T).relu()

    def step(x):
        y, kept = chain.fwd(PARAMS, x, CFG)
        return chain.bwd(kept, y, CFG)

    return {"freed": (freed, (64, 64)), "two": (two, (64, 64)), "views": (lambda x: x.t()[1:], (64, 64)), "step": (step, (256, 4))}


@pytest.mark.parametrize("name", bodies())
def test_memory_ahead_of_a_capture_is_what_the_allocator_will_hold(name):
    """Against the profiler's events of the CPU's allocator, up to the rounding of each tensor."""
    fn, shape = bodies()[name]
    x = torch.randn(*shape)
    found = graph_memory(fn, x)
    most, result = Peak().of(fn, x)
    assert found.inputs == x.nbytes and abs(found.pool - most) <= 16 * 512, (found, most)
    assert isinstance(found, GraphMemory) and "workspace" in str(found)
    report = graphed(fn, x).report()
    assert report.input_bytes == found.inputs and report.workspace_bytes >= 0
    if name != "views":
        assert abs(report.output_bytes - found.outputs) <= 8 * 512


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 1024, 1 << 20])
def test_each_tensor_takes_whole_blocks_of_memory(size):
    """A block has 512 bytes, as in torch's allocator; a copied input has its own bytes."""
    whole = -(-size // 512) * 512
    found = graph_memory(lambda x: (x + 1) * 2, torch.zeros(size, dtype=torch.uint8))
    assert found == GraphMemory(size, whole, whole)


def test_memory_of_what_is_no_function():
    with pytest.raises(TypeError, match="graph_memory: fn must be"):
        graph_memory(3)


@pytest.mark.parametrize("flag", [False, True])
def test_an_update_by_a_value_on_the_device(flag):
    """In a recording and outside, for the flag of each replay; what is left out keeps its bits, NaN too."""

    def update(tree):
        tree["a"].add_(1)
        tree["b"].mul_(2).div_(0)

    def tree():
        return {"a": torch.tensor([1.0, float("nan")]), "b": torch.tensor([3, 4], dtype=torch.float64)}

    want = tree()
    if flag:
        update(want)
    got = tree()
    when(torch.tensor(flag), update, got)
    static = tree()
    captured = graphed(lambda flag, tree: when(flag, update, tree), torch.tensor(not flag), static, inputs={"1": "donated"})
    captured(torch.tensor(flag), static)
    for found in (got, static):
        assert all(torch.equal(found[name].view(torch.int32), want[name].view(torch.int32)) for name in want)


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize(
    "update",
    [lambda tree: tree["p"] + 1, lambda tree: tree.update(p=tree["p"] + 1), lambda tree: ELSEWHERE.add_(1)],
    ids=["returned", "in the tree", "elsewhere"],
)
def test_an_update_must_write_to_its_tensors(update, flag):
    """Its result is dropped, and writes elsewhere are not undone: the flag would mean nothing."""
    for tree in ({"p": torch.zeros(2)}, {"p": torch.zeros(2), "q": {}}):
        with pytest.raises(ValueError, match="when: update must be a function that writes to tensors of its trees, in place, got"):
            when(torch.tensor(flag), update, tree)
    with pytest.raises(ValueError, match="got no write that torch counts: in_place=True, or after"):
        when(torch.tensor(flag), lambda: ELSEWHERE.add_(1))


ELSEWHERE = torch.zeros(2)


def test_an_update_is_a_conditional_node_where_torch_has_them(monkeypatch):
    calls = []

    class CUDAGraph:
        @staticmethod
        def get_currently_capturing_graph():
            return CUDAGraph()

        def begin_capture_to_if_node(self, flag):
            calls.append("begin")

        def end_capture_to_conditional_node(self):
            calls.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert module._capturing() is not None
    monkeypatch.setattr(module, "check", lambda *args: None)

    class Flag:
        is_cuda = True

    p = torch.zeros(2)
    when(Flag(), lambda p: calls.append("update") or p.add_(1), p)
    assert calls == ["begin", "update", "end"]
    with pytest.raises(ZeroDivisionError):
        when(Flag(), lambda p: 1 / 0, p)
    assert calls[-2:] == ["begin", "end"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert module._capturing() is None


@pytest.mark.parametrize("flag", [True, 1, torch.ones(1, dtype=torch.bool), torch.tensor(1.0)])
def test_a_flag_is_a_bool_tensor_of_no_dimension(flag):
    with pytest.raises((TypeError, ValueError), match="when: flag must be"):
        when(flag, lambda p: None, torch.ones(1))
    with pytest.raises(TypeError, match="when: update must be"):
        when(torch.tensor(True), 3)


def test_a_topology_is_shown_as_a_table():
    data = GraphData((GraphNode("kernel", "gemm", "up", "fwd"), GraphNode("kernel", "gemm", "up", "fwd")), ((0, 1),))
    assert str(data).startswith("2 nodes, 1 edges, at most 1 at once\n") and "gemm" in str(data)
    assert repr(data) == str(data).rstrip("\n")
    assert data._repr_html_().startswith("<pre") and "2 nodes, 1 edges" in data._repr_html_()


def test_a_topology_is_of_what_was_captured():
    with pytest.raises(TypeError, match="graph_data: captured must be what graphed captured, or a CUDAGraph, got 3"):
        graph_data(3)
