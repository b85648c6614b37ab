"""Copies, checkpoints and moves of what holds a graph: a copy runs uncaptured, with the same numbers, or an error says why."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from test_callables import DEVICES, equal, given, mixed, of_funcops, of_torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from funcops import ScaleConfig, scale
from funcops import nn as fnn
from funcops.adapters.graphs import GraphCache, cut_rows, graphed, graphed_op, make_graphed_callables, pad_rows
from funcops.adapters.graphs.without_gpu import recorder


def swapped():
    model = of_torch()
    fnn.from_torch(model)
    return model


def doubled(module, x):
    return 2 * type(module).forward(module, x)


class Stepping(nn.Module):
    """Holds a captured method of its own."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def plain(self, x):
        return self.inner(x).tanh()

    def forward(self, x):
        return self.step(x) if "step" in vars(self) else self.plain(x)


def graph_of(make, device, **options):
    torch.manual_seed(0)
    model = make().to(device)
    return make_graphed_callables(model, (given(0, device),), **options)


def inside(make, device):
    return nn.Sequential(graph_of(make, device), nn.Linear(6, 6).to(device))


def patched(device):
    """A module whose forward was set on it before the capture."""
    module = nn.Linear(6, 6).to(device)
    module.forward = doubled.__get__(module)
    return make_graphed_callables(module, (given(0, device),))


def stepping(device):
    module = Stepping().to(device)
    with torch.no_grad():
        module.step = graphed(module.plain, given(0, device, False))
    return module


def delayed(device):
    return graph_of(of_funcops, device, delayed_wgrad=True)


HOLDERS = {
    **{f"{make.__name__}": lambda device, make=make: graph_of(make, device) for make in (of_torch, of_funcops, mixed, swapped)},
    **{f"inside {make.__name__}": lambda device, make=make: inside(make, device) for make in (of_torch, swapped)},
    "frozen": lambda device: graph_of(lambda: mixed().requires_grad_(False), device),
    "delayed": delayed,
    "patched": patched,
    "stepping": stepping,
}


def saved(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
    "twice": lambda module: copy.deepcopy(copy.deepcopy(module)),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", HOLDERS)
def test_a_copy_runs_uncaptured_with_parameters_of_its_own(kind, way, device):
    if kind == "patched" and way in ("pickle", "torch.save"):
        return  # nor without a graph: a function that is set on a module has no name to be pickled by
    module = HOLDERS[kind](device)
    x = given(1, device, False)
    with torch.no_grad():
        before = module(x)
        found = WAYS[way](module)
        equal(list(module.state_dict().values()), list(found.state_dict().values()))
        assert list(module.state_dict()) == list(found.state_dict()) and type(found) is type(module)
        for p in module.parameters():
            p.mul_(0.5)
        assert torch.equal(found(x), before) and not torch.equal(module(x), before), "each has its own parameters"
        assert found(torch.cat((x, x, x))).shape == (12, 6), "of any size: it is not captured"
    if kind not in ("frozen", "stepping"):
        kept = module(given(2, device))
        found(given(1, device)).sum().backward()
        if kind == "delayed":
            assert found.backward_dw() is None
        assert all(p.grad is not None for p in found.parameters()), "its backward reaches them"
        assert not any(p.grad is not None for p in module.parameters())
        kept.sum().backward()
    again = make_graphed_callables(found, (given(0, device),))
    with torch.no_grad():
        assert torch.equal(again(x), before), "it can be captured"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [kind for kind in HOLDERS if kind not in ("frozen", "stepping", "delayed")])
def test_a_shallow_copy_shares_the_graph(kind, device):
    module = HOLDERS[kind](device)
    found, x = copy.copy(module), given(1, device)
    y = found(x)
    y.sum().backward()
    assert all(p is q for p, q in zip(module.parameters(), found.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(module(x), y)
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("kind", ["of_torch", "swapped", "inside swapped", "delayed"])
def test_an_average_of_weights_follows_the_weights(kind):
    module = HOLDERS[kind]("cpu")
    plain = copy.deepcopy(module)
    averages = [AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for one in (module, plain)]
    for step in range(3):
        for one, average in zip((module, plain), averages, strict=True):
            one(given(step, "cpu")).square().sum().backward()
            if kind == "delayed":
                one.backward_dw()
            with torch.no_grad():
                for p in one.parameters():
                    p.sub_(0.1 * p.grad)
                    p.grad = None
            average.update_parameters(one)
    equal(list(averages[0].parameters()), list(averages[1].parameters()))
    x = given(9, "cpu", False)
    assert torch.equal(averages[0](x), averages[1](x)) and not torch.equal(averages[0](x), plain(x))


def op_graph():
    return graphed_op(scale, ScaleConfig(3.0), None, torch.ones(2))


REFUSED = {
    "GraphedOp": (op_graph, "graphed scale"),
    "InFlight": (lambda: op_graph().fwd(None, torch.ones(2))[1], "graphed scale"),
    "a module with it": (lambda: vars(m := nn.Module()).update(graph=op_graph()) or m, "graphed scale"),
    "a graph": (lambda: op_graph().graphs()["fwd"], "a graph"),
    "a recording": (lambda: op_graph().graphs()["fwd"].recording, "a recording"),
    "a pool": (lambda: graphed(lambda x: 2 * x, torch.ones(2)).pools()[0], "a pool of recordings"),
    "its memory": (lambda: recorder.Lent.of(torch.ones(2)).storage, "the memory of a recording"),
}
COPIERS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps, "save": lambda one: torch.save(one, io.BytesIO())}


@pytest.mark.parametrize("way", COPIERS)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_nothing_but_a_graph_refuses_copies(kind, way):
    make, name = REFUSED[kind]
    if kind == "a module with it" and way == "copy":
        assert copy.copy(found := make()).graph is found.graph
        return
    with pytest.raises(TypeError, match=rf"^{name}: must not be copied or pickled, .*: copy the tensors, and capture again$"):
        COPIERS[way](make())


def double(x):
    return 2 * x


def test_a_copy_of_a_captured_function_is_the_function():
    captured = graphed(double, torch.ones(2))
    assert copy.copy(captured) is captured and copy.deepcopy(captured) is double
    loaded = pickle.loads(pickle.dumps(captured))
    assert torch.equal(loaded(torch.ones(3)), torch.full((3,), 2.0))
    module = nn.Linear(2, 2)
    bound = copy.deepcopy({"module": module, "step": graphed(module.forward, torch.ones(1, 2))})
    assert bound["step"].__self__ is bound["module"] is not module


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle"])
def test_a_copy_of_a_cache_captures_anew(way):
    cache = GraphCache(double, sizes=(2, 4), size_of=len, pad=pad, cut=cut_rows)
    cache.warm(torch.ones(2))
    found = {"copy": copy.copy, **WAYS}[way](cache)
    for x in (torch.ones(3), torch.arange(2.0)):
        assert torch.equal(found(x), 2 * x) and torch.equal(cache(x), 2 * x)
    assert found.report().misses == 2 and cache.report().misses == 0
    found.reset()
    assert torch.equal(cache(torch.ones(3)), torch.full((3,), 2.0))


def pad(trees, size):
    return (pad_rows(trees[0], size),)


def test_a_borrowed_result_is_copied_as_a_tensor():
    captured = graphed(double, torch.ones(2), outputs="borrow", debug=True)
    y = captured(torch.ones(2))
    made = [way(y) for way in (copy.deepcopy, WAYS["pickle"], saved)]
    captured(torch.zeros(2))
    assert all(type(one) is torch.Tensor and one.tolist() == [2.0, 2.0] for one in made)


@pytest.mark.parametrize("kind", ["of_torch", "swapped"])
def test_weights_that_are_loaded_in_place_are_used(kind):
    module, other = HOLDERS[kind]("cpu"), of_torch()
    module.load_state_dict(other.state_dict())
    x = given(1, "cpu")
    torch.testing.assert_close(module(x), other(x))


def assigned(module):
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def replaced(module):
    module[0].weight = nn.Parameter(module[0].weight.detach())


MOVES = {
    "to": lambda module: module.to(torch.float64),
    "share_memory": lambda module: module.share_memory(),
    "assign": assigned,
    "replaced": replaced,
    "data": lambda module: setattr(module[-1].weight, "data", module[-1].weight.data.clone()),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("make", [of_torch, swapped])
def test_parameters_that_moved_or_were_replaced_raise(make, move, frozen):
    """A graph would go on with the old ones."""
    module = graph_of(lambda: make().requires_grad_(not frozen), "cpu")
    MOVES[move](module)
    with pytest.raises(
        ValueError, match="module .* must have its captured submodules, parameters and buffers, where they were, got others"
    ):
        module(given(1, "cpu", requires_grad=True))


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_graphed_module_and_its_memory_are_freed(kind):
    module = HOLDERS[kind]("cpu")
    found = copy.deepcopy(module)
    refs = [weakref.ref(one) for one in (module, *module.parameters(), found, *found.parameters())]
    del module, found
    gc.collect()
    assert not any(ref() is not None for ref in refs)


CRASH = """
import copy, gc, io, pickle, sys, torch
sys.path[:0] = [{here!r}]
import test_copies
from test_copies import COPIERS, HOLDERS, REFUSED

held = [make("cpu") for make in HOLDERS.values()] + [make() for make, _ in REFUSED.values()]
for _ in range(8):
    for one in held:
        for way in COPIERS.values():
            try:
                way(one)
            except Exception:
                pass
    gc.collect()
del held, one
gc.collect()
print("lived")
"""


@pytest.mark.slow
def test_no_copy_ends_the_process():
    """A copy of a weak reference to a storage frees it a second time."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", CRASH.format(here=str(here))], capture_output=True, text=True, timeout=300, cwd=here.parent.parent
    )
    assert done.stdout == "lived\n" and done.returncode == 0, done.stderr[-2000:]
