"""Traces of modules: nothing of the module changes, and gradients of some outputs alone are autograd's."""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from own_models import CFG, draw
from products import Products
from torch import nn

from funcops import Needs, differentiable, op_from_module
from funcops import nn as fnn

gain, calls = 1.0, []  # the names of attributes below


class Outputs(nn.Module):
    """Sums, a stack and a product of what leads to several outputs; one output twice, one without its gradient, one of ids."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        h = self.a(x)
        u, v = self.b(h), self.c(h)
        both = torch.stack([u, v, h])
        return {"loss": (u * v).sum(), "u": u, "v": v, "both": both, "again": u, "cut": u.detach(), "ids": v.argmax(-1)}


TRAINED = ("loss", "u", "v", "both", "again")


@pytest.mark.parametrize("names", [c for n in (1, 2, 5) for c in itertools.combinations(TRAINED, n)], ids="-".join)
def test_a_backward_of_some_outputs_is_autograds(names):
    torch.manual_seed(0)
    module, x = Outputs().double(), draw(2, 3)
    op, _ = op_from_module(module, x)
    found = []
    for call in (module, lambda x: differentiable(op)(dict(module.named_parameters()), x, CFG)):
        given = x.clone().requires_grad_()
        y = call(given)
        with Products() as products:
            torch.autograd.backward([y[name] for name in names], [draw(*y[name].shape, seed=3) for name in names])
        found.append(({name: p.grad for name, p in module.named_parameters()} | {"x": given.grad}, products.count))
        module.zero_grad()
    (want, count), (got, ours) = found
    assert {n for n, g in got.items() if g is None} == {n for n, g in want.items() if g is None}
    assert all(g is None or torch.equal(g, want[n]) for n, g in got.items()) and ours == count


def test_halves_of_a_backward_of_some_outputs():
    module, x = Outputs().double(), draw(2, 3)
    op, params = op_from_module(module, x)
    y, residuals = op.fwd(params, x, CFG)
    dy = dict.fromkeys(y) | {"u": draw(2, 3)}
    dx, pending = op.dgrad(residuals, dy, CFG)
    assert len(pending.kept) < len(op.dgrad(residuals, dict.fromkeys(y) | {"loss": draw()}, CFG)[1].kept)
    dparams = op.wgrad(pending, CFG)
    assert dparams["c.weight"] is None and torch.equal(dparams["b.bias"], dy["u"].sum(0))
    assert torch.equal(dx, (dy["u"] @ params["b.weight"]) @ params["a.weight"])
    whole, _ = op.bwd(residuals, {name: None for name in y} | {"loss": torch.ones((), dtype=torch.float64)}, CFG)
    assert whole["c.weight"] is not None, "the trace serves other outputs still"


def test_some_outputs_of_cuts_for_other_needs():
    """Each cut of a trace has its own backward of the same outputs."""
    module, x = Outputs().double(), draw(2, 3)
    op, params = op_from_module(module, x)
    whole = op.fwd(params, x, CFG)[1]
    cuts = [whole.traced, *(whole.traced.asking(Needs(x=False, params=[name])) for name in ("b.weight", "c.weight"))]
    left = frozenset(range(7)) - {1}  # u has a gradient
    found = [cut.other("without", *sorted(left)) for cut in cuts]
    assert [cut.other("without", *sorted(left)) for cut in cuts] == found and len({*map(id, found)}) == 3
    assert [one.graphs.kept for one in found] == [cut.graphs.kept for cut in cuts]


def test_an_op_of_a_module_is_freed():
    module, x = Outputs().double(), draw(2, 3)
    op, _ = op_from_module(module, x)
    differentiable(op)(dict(module.named_parameters()), x, CFG)["loss"].backward()
    kept = weakref.ref(module)
    del module, op
    gc.collect()
    assert kept() is None


class Averages(nn.Module):
    """Assigns its buffer a new tensor, where a batch norm writes to its own; the backward reads the new value."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        with torch.no_grad():
            self.mean = 0.5 * self.mean + x.mean(0)
        return self.layer(x) * self.mean


def test_a_buffer_that_is_assigned_comes_out_as_a_value():
    module, x = Averages().double(), draw(2, 3)
    other, before = copy.deepcopy(module), module.mean
    op, params = op_from_module(module, x)
    y, residuals = op.fwd(params, x, CFG)
    assert module.mean is before and not before.any()
    given = x.clone().requires_grad_()
    want = other(given)
    assert torch.equal(y.main, want) and torch.equal(y.extras["mean"], other.mean)
    before.copy_(y.extras["mean"])  # a caller puts it in its place, and the backward reads a copy of its own
    dy = type(y)(torch.ones_like(want), {"mean": None})
    assert torch.equal(op.bwd(residuals, dy, CFG)[1], torch.autograd.grad(want.sum(), given)[0])


class Grows(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x[:1, 0]])
        return x * 2


class Notes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.log, self.by_name, self.calls = nn.Linear(3, 3), [], {"n": []}, 0
        self.register_buffer("last", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.log.append(self.calls)
        self.by_name["n"].append(x)
        self.last = x[0]
        return self.layer(x)


@pytest.mark.parametrize(
    ("build", "text"),
    [(Notes, "leaves its attributes as they are"), (Grows, r"the new value of its buffer seen must be \[1\], got \[2\]")],
)
def test_a_module_that_is_refused_is_as_before(build, text):
    module, x = build().double(), draw(2, 3)
    before = {path: dict(vars(part)) for path, part in module.named_modules()}
    buffers, lists = dict(module.named_buffers()), copy.deepcopy([getattr(module, n, None) for n in ("log", "by_name")])
    with pytest.raises(ValueError, match=text):
        op_from_module(module, x)
    assert {path: dict(vars(part)) for path, part in module.named_modules()} == before
    assert all(b is buffers[name] for name, b in module.named_buffers())
    assert [getattr(module, n, None) for n in ("log", "by_name")] == lists


class Settles(nn.Module):
    """Its first call sets an attribute, as transformers' losses set the kind of a problem."""

    def __init__(self):
        super().__init__()
        self.layer, self.gain, self.table = nn.Linear(3, 3), 2.0, None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(3, dtype=x.dtype)
        return self.layer(x) * self.gain * self.table


def test_what_a_first_call_sets_is_no_second_trace():
    module, x = Settles().double(), draw(2, 3)
    op, params = op_from_module(module, x)
    _, first = op.fwd(params, x, CFG)
    (own,) = (cell.cell_contents for cell in op.fwd.__closure__ if hasattr(cell.cell_contents, "memo"))
    assert [traced for traced, _ in own.memo.traces.values()] == [first.traced]


def test_an_attribute_with_the_name_of_a_global_is_no_global(monkeypatch):
    module, x = Settles().double(), draw(2, 3)
    op, params = op_from_module(module, x)
    _, first = op.fwd(params, x, CFG)
    monkeypatch.setitem(globals(), "gain", 3.0)
    assert op.fwd(params, x, CFG)[1].traced is first.traced


def test_layers_of_this_library_are_traced_once():
    module, x = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), draw(2, 3).float()
    fnn.from_torch(module)
    op, params = op_from_module(nn.ModuleList([module])[0], x)
    assert op.fwd(params, x, CFG)[1].traced is op.fwd(params, x, CFG)[1].traced
    assert torch.allclose(op.fwd(params, x, CFG)[0], module(x))


class Parted(nn.Module):
    """The gradient of `only` is dy of the first result; the gradient of its bias has a part from the second, too."""

    def __init__(self):
        super().__init__()
        self.bias, self.only = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))

    def forward(self, x):
        return x + self.bias + self.only, x * self.bias.sin()


@pytest.mark.parametrize("missing", [0, 1])
def test_a_pending_shares_no_memory_with_gradients_of_some_outputs(missing):
    module, x = Parted().double(), draw(4, 3)
    op, params = op_from_module(module, x)
    ys, residuals = op.fwd(params, x, CFG)
    dy = tuple([None if i == missing else torch.ones_like(y) for i, y in enumerate(ys)])
    _, pending = op.dgrad(residuals, dy, CFG)
    first = op.wgrad(pending, CFG)["bias"].clone()
    op.wgrad(pending, CFG)["bias"].mul_(5)
    assert torch.equal(op.wgrad(pending, CFG)["bias"], first)
    only = op.wgrad(pending, CFG)["only"]
    assert torch.equal(only, dy[0]) if missing else only is None
    assert torch.equal(first, torch.ones(4, 3) if missing else x * params["bias"].cos())
    assert torch.equal(dy[1 - missing], torch.ones_like(ys[0]))
