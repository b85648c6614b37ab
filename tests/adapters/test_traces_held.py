"""The traces that an op holds: at most a number, listed, and none that a residual needs is lost."""

import gc
import itertools
import warnings
import weakref

import pytest
import torch
from own_models import CFG, Mlp, draw
from test_traced_compiled import same
from torch import nn

from funcops import Policy, Recompute, chain, op_from_module, op_from_torch, remat, stages_from_module, with_policy
from funcops.adapters.from_function import traced
from funcops.contract import OpConfig, config


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(traced, "TRACES", 3)


def function():
    return op_from_torch(lambda params, x, cfg: (x * x).tanh(), name="squared"), None


def module():
    torch.manual_seed(0)
    return op_from_module(Mlp().double(), draw(1, 6))


@pytest.mark.filterwarnings("ignore:.*more than 3 traces:RuntimeWarning")
@pytest.mark.parametrize("build", [function, module])
def test_the_one_used_longest_ago_goes_and_residuals_stay(few, build):
    op, params = build()
    first = draw(1, 6)
    y, residuals = op.fwd(params, first, CFG)
    want = op.bwd(residuals, y, CFG)
    pending = op.dgrad(residuals, y, CFG)[1]
    known = residuals.traced
    for rows in (2, 3):
        op.fwd(params, draw(rows, 6), CFG)
    assert op.fwd(params, first, CFG)[1].traced is known
    op.fwd(params, draw(4, 6), CFG)
    assert [t.x[""] for t in op.traces()] == ["float64[3, 6]", "float64[1, 6]", "float64[4, 6]"], "2 rows were used longest ago"
    assert op.fwd(params, first, CFG)[1].traced is known
    for rows in (5, 6, 7, 8):
        op.fwd(params, draw(rows, 6), CFG)
    assert len(op.traces()) == 3
    assert same(op.bwd(residuals, y, CFG), want), "its own trace"
    assert params is None or same(op.wgrad(pending, CFG), want[0])
    again = op.fwd(params, first, CFG)[1]
    assert again.traced is not known and same(op.bwd(again, y, CFG), want)


@pytest.mark.filterwarnings("ignore:.*more than 3 traces:RuntimeWarning")
def test_what_nobody_needs_is_freed(few):
    op, _ = function()
    graphs = []
    for rows in range(1, 9):
        graphs.append(weakref.ref(op.fwd(None, draw(rows, 6), CFG)[1].traced))
    gc.collect()
    assert [ref() is not None for ref in graphs] == [False] * 5 + [True] * 3


@pytest.mark.parametrize("build", [function, module])
def test_a_trace_that_is_dropped_is_said(few, build):
    op, params = build()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (1, 2, 3, 3, 2, 1):
            op.fwd(params, draw(rows, 6), CFG)
    with pytest.warns(RuntimeWarning, match=rf"{op.name}_fwd: it has more than 3 traces, .* is dropped: pad inputs to few lengths"):
        op.fwd(params, draw(4, 6), CFG)


@config
class Power(OpConfig):
    by: int = 2


def test_they_are_listed_by_what_they_hold_for():
    net = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)).double()
    op, params = op_from_module(net, draw(2, 6))
    net.eval()
    op.fwd(params, draw(2, 6), CFG)
    net[0].bias.requires_grad_(False)
    op.fwd(params, draw(6, 2).mT, CFG)
    net[1].train()
    op.fwd(params, (draw(2, 6),), CFG)
    modes = ["training", "eval", "eval, 1 of 2 parameters require grad", "a part in training, 1 of 2 parameters require grad"]
    assert [t.mode for t in op.traces()] == modes
    plain = {"": "float64[2, 6]"}
    assert [t.x for t in op.traces()] == [plain, plain, {"": "float64[2, 6] with strides [1, 2]"}, {"0": "float64[2, 6]"}]
    assert all(t.params == {"0.weight": "float64[6, 6]", "0.bias": "float64[6]"} for t in op.traces())
    power = op_from_torch(lambda params, x, cfg: x["x"] ** cfg.by * x["n"], config=Power)
    assert power.traces() == []
    for by in (2, 3):
        power.fwd(None, {"x": draw(2), "n": 3}, Power(by=by))
    assert [(t.cfg, t.x) for t in power.traces()] == [(Power(by=by), {"n": "3", "x": "float64[2]"}) for by in (2, 3)]
    assert with_policy(op, Policy({"kept.*": Recompute()}, optional=True)).traces() == op.traces() == remat(op).traces()


def test_places_in_memory_are_one_line_each(few):
    op = op_from_torch(lambda params, x, cfg: x.as_strided((2,), (1,)) * x.as_strided((1,), (1,), x.storage_offset()))
    line = draw(9)
    for i in (0, 1, 1, 0):
        op.fwd(None, line[i : i + 2], CFG)
    assert [t.x for t in op.traces()] == [{"": "float64[2]"}] * 2


@pytest.mark.filterwarnings("ignore:.*more than 3 traces:RuntimeWarning")
def test_stages_go_together(few):
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(3)]).double()
    cfg, params = stages_from_module(net, draw(2, 6), ["1", "2"])
    held = {}
    for rows in (2, 3, 4, 5, 6):
        y, residuals = chain.fwd(params, draw(rows, 6), cfg)
        held[rows] = residuals, y, chain.bwd(residuals, y, cfg)
    for i, step in enumerate(cfg.steps):
        assert [next(iter(t.x.values())) for t in step.op.traces()] == [f"float64[{rows}, 6]" for rows in (4, 5, 6)], i
    assert all(same(chain.bwd(residuals, y, cfg), want) for residuals, y, want in held.values())
    assert same(chain.fwd(params, draw(2, 6), cfg)[0], net(draw(2, 6)))


@pytest.mark.filterwarnings("ignore:.*more than 3 traces:RuntimeWarning")
def test_compiled_code_keeps_its_trace(few):
    op, params = module()

    def step(params, x):
        y, residuals = op.fwd(params, x, CFG)
        return op.bwd(residuals, y, CFG)

    compiled = torch.compile(step, fullgraph=True, backend="eager", dynamic=False)
    xs = [draw(rows, 6) for rows in (1, 2, 3, 4, 5)]
    for x in itertools.chain(xs, xs):
        assert same(compiled(params, x), step(params, x))
    assert len(op.traces()) == 3
