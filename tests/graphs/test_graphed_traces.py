"""`graphed_op` of traced modules: buffers as extras, gradients of some outputs, and changes of the module after the capture."""

import pytest
import torch
from torch import nn

from funcops import ChainConfig, Needs, Step, TorchConfig, WithExtras, chain, op_from_module, op_from_torch, remat
from funcops.engine.trees import tensors, tree_map_tensors
from funcops.graphs import graphed_op

CFG = TorchConfig()


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(a, b):
    a, b = tensors(a), tensors(b)
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()


def with_ids():
    """Results of which one has no gradient, as it has integers, and one that nothing of the other reads."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 3)

        def forward(self, x):
            h = self.a(x)
            return {"h": h, "ids": h.argmax(-1), "other": self.b(x).sin()}

    torch.manual_seed(0)
    return Both().double()


@pytest.mark.parametrize("outputs", ["clone", "borrow"])
@pytest.mark.parametrize("halves", [True, False])
def test_running_statistics_go_from_step_to_step(outputs, halves):
    """They are extras of x and of y, with several microbatches in flight, and the op itself gives the same."""
    module = normed()
    op, params = op_from_module(module, draw(5, 6))
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    graph = graphed_op(op, CFG, params, WithExtras(draw(5, 6), buffers), slots=2, outputs=outputs)
    ours = theirs = buffers
    for step in range(3):
        flying = []
        for i in range(2):
            x = draw(5, 6, seed=10 * step + i)
            y, residuals = op.fwd(params, WithExtras(x, theirs), CFG)
            dy = WithExtras(draw(5, 2, seed=step), dict.fromkeys(y.extras))
            want = op.bwd(residuals, dy, CFG)
            theirs = y.extras
            got, kept = graph.fwd(params, WithExtras(x, ours))
            assert same(got, y)
            ours = tree_map_tensors(torch.clone, got.extras)
            flying.append((kept, dy, want))
        for kept, dy, want in flying:
            if halves:
                dx, pending = graph.dgrad(kept, dy)
                found = graph.wgrad(pending), dx
            else:
                found = graph.bwd(kept, dy)
            assert same(found[0], want[0]) and same(found[1].main, want[1].main)
    assert not torch.equal(ours["1.running_mean"], buffers["1.running_mean"]) and ours["1.num_batches_tracked"] == 6


def test_a_module_that_is_brought_up_to_date_in_place():
    module, x = normed(), draw(5, 6)
    op, params = op_from_module(module, x)
    graph = graphed_op(op, CFG, params, x)
    means = []
    for _ in range(3):
        y, kept = graph.fwd(params, x)
        for name, value in y.extras.items():
            module.get_buffer(name).copy_(value)
        dparams, _ = graph.bwd(kept, WithExtras(torch.ones(5, 2).double(), dict.fromkeys(y.extras)))
        means.append(y.extras["1.running_mean"].clone())
        assert dparams["0.weight"].isfinite().all()
    other = normed()
    for _ in range(3):
        other(x)
    assert torch.equal(means[-1], other[1].running_mean) and not torch.equal(means[0], means[1])


@pytest.mark.parametrize("given", ["h", "other", "both", "none"])
def test_a_gradient_of_none(given):
    op, params = op_from_module(with_ids(), draw(5, 6))
    x = draw(5, 6)
    graph, y = graphed_op(op, CFG, params, x), op.fwd(params, x, CFG)[0]
    dy = {name: draw(*t.shape) if given in (name, "both") and name != "ids" else None for name, t in y.items()}
    zeros = {name: None if name == "ids" else torch.zeros_like(t) if dy[name] is None else dy[name] for name, t in y.items()}
    for dys in (dy, zeros | {"h": draw(5, 4, seed=7), "other": draw(5, 3, seed=7)}, dy):  # no value of another call is left
        want = op.bwd(op.fwd(params, x, CFG)[1], {n: zeros[n] if d is None else d for n, d in dys.items()}, CFG)
        y, kept = graph.fwd(params, x)
        assert same(graph.bwd(kept, dys), want)
        y, kept = graph.fwd(params, x)
        dx, pending = graph.dgrad(kept, dys)
        assert same((graph.wgrad(pending), dx), want)
    y, kept = graph.fwd(params, x)
    with pytest.raises(ValueError, match=r"input 0.ids must be None, the captured value"):
        graph.bwd(kept, zeros | {"ids": torch.zeros(5)})
    with pytest.raises(TypeError, match=r"input 0.h must be float64\[5, 4\], got float32\[5, 4\]"):
        graph.bwd(kept, zeros | {"h": torch.zeros(5, 4)})


def test_a_whole_gradient_of_none():
    op, params = op_from_module(nn.Linear(6, 2).double(), draw(5, 6))
    graph = graphed_op(op, CFG, params, draw(5, 6))
    _, kept = graph.fwd(params, draw(5, 6))
    dparams, dx = graph.bwd(kept, None)
    assert not any(t.any() for t in tensors((dparams, dx))) and len(tensors((dparams, dx))) == 3
    with pytest.raises(TypeError, match="input 1 must be float64"):
        graph.fwd(params, None)


CHANGES = {
    "mode": lambda module: module.eval(),
    "buffer": lambda module: setattr(module[1], "running_mean", torch.ones(4).double()),
    "attribute": lambda module: setattr(module[1], "momentum", 0.5),
    "layer": lambda module: module.__setitem__(2, nn.ReLU()),
}


@pytest.mark.parametrize("form", ["op", "remat", "chain"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_has_changed_is_refused(change, form):
    module, x = normed(), draw(5, 6)
    op, params = op_from_module(module, x)
    cfg = CFG
    if form == "remat":
        op = remat(op)
    elif form == "chain":
        module = nn.Sequential(*normed().eval())
        inner, params = op_from_module(module, x)
        op, cfg, params = chain, ChainConfig(steps=(Step("one", inner, CFG),)), {"one": params}
    needs = Needs(x=False, params=True)
    graph = graphed_op(op, cfg, params, x, needs=needs)
    graph.release(graph.fwd(params, x)[1])
    if form == "chain" and change == "mode":
        module.train()
    else:
        CHANGES[change](module)
    with pytest.raises(ValueError, match=r"graphed .*_fwd: Sequential must be in the state and mode .* capture again"):
        graph.fwd(params, x)


def test_a_function_whose_closure_has_changed_is_refused():
    factor = 2.0
    op = op_from_torch(lambda params, x, cfg: x * factor)
    graph = graphed_op(op, CFG, None, draw(3))
    y, kept = graph.fwd(None, draw(3))
    graph.release(kept)
    assert torch.equal(y, 2 * draw(3))
    factor = 3.0
    with pytest.raises(ValueError, match="must be in the state"):
        graph.fwd(None, draw(3))
