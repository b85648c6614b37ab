"""`op_from_module`: unmodified modules against autograd in float64, to the bit; bytes, refusals, and changes after the trace."""

import copy
import operator
import pickle
import random

import numpy as np
import optree
import pytest
import torch
from own_models import CFG, MODELS, Scales, called, draw, made, plain, trained
from products import Products, saved_by
from torch import nn
from torch.utils.checkpoint import checkpoint

from funcops import (
    ChainConfig,
    Ledger,
    Needs,
    Policy,
    Recompute,
    RepeatConfig,
    ScaleConfig,
    SkipConfig,
    Step,
    WithExtras,
    chain,
    delayed_wgrad,
    differentiable,
    donate,
    op_from_module,
    remat,
    repeat,
    report,
    scale,
    skip,
    with_policy,
)
from funcops.engine.errors import StaleResidualError
from funcops.engine.trees import tensors
from funcops.graphs import graphed_op


def with_grads(name, seed):
    """The results of autograd: y, the gradients of the parameters and of x, buffers, and the products of its backward."""
    module, x = made(name)
    x = trained(x)
    torch.manual_seed(seed)
    ys = plain(called(module, x))
    ys = [y for y in ys if y.requires_grad]
    dys = [draw(*y.shape, seed=i) for i, y in enumerate(ys)]
    inputs = [t for t in plain(x) if t.requires_grad]
    with Products() as products:
        found = torch.autograd.grad(ys, [*module.parameters(), *inputs], dys, allow_unused=True)
    count = len(list(module.parameters()))
    names = [n for n, _ in module.named_parameters()]
    return ys, dict(zip(names, found, strict=False)), list(found[count:]), dict(module.named_buffers()), products.count


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_autograds_to_the_bit(name):
    ys, grads, dxs, buffers, products = with_grads(name, seed=3)
    module, x = made(name)
    before = copy.deepcopy(module.state_dict()), optree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, x)
    own = [*module.parameters(), *module.buffers()]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    op, params = op_from_module(module, x)
    assert torch.equal(torch.get_rng_state(), state), "a trace draws nothing"
    y, residuals = op.fwd(params, x, CFG)
    main, new = (y.main, y.extras) if isinstance(y, WithExtras) else (y, {})
    assert all(torch.equal(a, b) for a, b in zip(plain(main), ys, strict=True))
    assert {n for n in buffers if not torch.equal(buffers[n], before[0][n])} <= set(new)
    assert all(torch.equal(new[n], buffers[n]) for n in new)
    dys = iter([draw(*t.shape, seed=i) for i, t in enumerate(ys)])
    dy = optree.tree_map(lambda t: next(dys), main)
    dy = WithExtras(dy, dict.fromkeys(new)) if new else dy
    with Products() as inner:
        dx, pending = op.dgrad(residuals, dy, CFG)
    with Products() as outer:
        dparams = op.wgrad(pending, CFG)
    assert inner.count + outer.count == products, "I and W have the products of the backward"
    for n, g in grads.items():
        assert (dparams[n] is None and (g is None or not g.any())) or torch.equal(dparams[n], g), n
    assert all(torch.equal(a, b) for a, b in zip(tensors(dx), dxs, strict=True))
    assert op.fwd(params, x, CFG)[1].traced is residuals.traced, "traced once"
    whole, again = op.bwd(residuals, dy, CFG)
    assert all(torch.equal(a, b) for a, b in zip(tensors((whole, again)), tensors((dparams, dx)), strict=True))
    into = {n: torch.ones_like(t) for n, t in params.items()}
    assert op.wgrad(op.dgrad(residuals, dy, CFG)[1], CFG, into=into) is into
    assert all(torch.equal(into[n], 1 + g) for n, g in dparams.items() if g is not None)
    assert all(map(operator.is_, own, [*module.parameters(), *module.buffers()]))
    after = module.state_dict(), x
    assert all(torch.equal(a, b) for a, b in zip(tensors(before), tensors(after), strict=True)), "the module and x are as before"


SHARES = dict.fromkeys(("mlp", "block", "language", "conv", "encoder"), 0.8)  # whose norms and activations are computed again


@pytest.mark.parametrize("name", [name for name in MODELS if name != "lazy view"])
def test_fewer_bytes_than_autograd(name):
    module, x = made(name)
    own = [*module.parameters(), *module.buffers(), *plain(x)]
    y, autograd = saved_by(lambda: called(module, x), own)
    op, params = op_from_module(*made(name))
    _, residuals = op.fwd(params, x, CFG)
    ours = report(residuals, params, x)
    kept = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(residuals.kept)}
    given = {t.untyped_storage()._cdata for t in [*tensors((params, x)), *own]}
    assert ours.kept_bytes == sum(size for key, size in kept.items() if key not in given)
    assert ours.kept_bytes <= SHARES.get(name, 1) * autograd
    del y


class Loss(nn.Module):
    def forward(self, x):
        return nn.functional.cross_entropy(x.mean((2, 3)), torch.arange(len(x)))


class Between(nn.Module):
    """A layer between two products; what it reads is kept for another function."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer = nn.Conv2d(3, 4, 3), layer
        self.second = nn.Identity() if isinstance(layer, Loss) else nn.Conv2d(1 if isinstance(layer, nn.PixelShuffle) else 4, 2, 1)

    def forward(self, x):
        h = self.first(x)
        return self.second(self.layer(h)), h.square()


@pytest.mark.parametrize(
    "layer",
    [
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ReflectionPad2d(1),
        nn.ReplicationPad2d(1),
        nn.Softmax(1),
        nn.LogSoftmax(1),
        nn.PixelShuffle(2),
        Loss(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_one_pass_over_memory_is_computed_again(layer):
    torch.manual_seed(0)
    module, x = Between(layer).double(), draw(2, 3, 6, 6)
    op, params = op_from_module(module, x)
    y, residuals = op.fwd(params, x, CFG)
    assert report(residuals, params, x).kept_bytes == y[1].nbytes
    found = torch.autograd.grad(module(x), [*module.parameters()], y)
    assert all(map(torch.equal, op.bwd(residuals, y, CFG)[0].values(), found))


@pytest.mark.parametrize(("name", "inner", "outer"), [("block", 4 + 1, 4), ("conv", 2, 2), ("encoder", 4 + 1, 4)])
def test_each_product_is_in_its_half(name, inner, outer):
    """A linear layer or convolution has its dx in I and its dW in W; attention's backward is in I."""
    module, x = made(name)
    op, params = op_from_module(module, x)
    y, residuals = op.fwd(params, x, CFG)
    with Products() as first:
        _, pending = op.dgrad(residuals, y if name != "conv" else WithExtras(y.main, dict.fromkeys(y.extras)), CFG)
    with Products() as second:
        op.wgrad(pending, CFG)
    assert (first.count, second.count) == (inner, outer)


def test_residuals_have_the_names_of_modules():
    op, params = op_from_module(*made("block"))
    y, residuals = op.fwd(params, draw(2, 5, 6), CFG)
    assert "mlp.norm.input" in residuals.kept and "params.mlp.down.weight" in residuals.kept and "x" in residuals.kept
    assert "mlp.up.addmm" in str(report(residuals, params, draw(2, 5, 6)))
    _, pending = op.dgrad(residuals, y, CFG)
    assert set(op.wgrad(pending, CFG)) == {n for n, _ in made("block")[0].named_parameters()}


def test_needs_and_frozen_parameters():
    module, x = made("block")
    module.mlp.up.requires_grad_(False)
    op, params = op_from_module(module, x)
    y, residuals = op.fwd(params, x, CFG)
    dparams, dx = op.bwd(residuals, y, CFG)
    assert dparams["mlp.up.weight"] is None is dparams["mlp.up.bias"] and dparams["qkv.weight"] is not None
    assert "mlp.norm.input" in residuals.kept
    y, fewer = op.fwd(params, x, CFG, needs=Needs(x=False, params=["out.weight"]))
    only, none = op.bwd(fewer, y, CFG)
    assert none is None and torch.equal(only["out.weight"], dparams["out.weight"]) and only["qkv.weight"] is None
    assert report(fewer, params, x).kept_bytes < report(residuals, params, x).kept_bytes
    module.mlp.up.requires_grad_(True)
    whole, _ = op.bwd(op.fwd(params, x, CFG)[1], y, CFG)
    assert whole["mlp.up.weight"] is not None, "another set of trained parameters is another trace"


def test_delayed_weight_gradients():
    module, x = made("block")
    op, _ = op_from_module(module, x)
    params = dict(module.named_parameters())
    with delayed_wgrad() as store:
        differentiable(op)(params, x, CFG).square().sum().backward()
        assert all(p.grad is None for p in params.values())
    store.run()
    got = {n: p.grad for n, p in params.items()}
    module.zero_grad()
    module(x).square().sum().backward()
    assert all(torch.equal(got[n], p.grad) for n, p in params.items())


def test_buffers_as_values():
    module, x = made("conv")
    op, params = op_from_module(module, x)
    first, _ = op.fwd(params, x, CFG)
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    second, _ = op.fwd(params, WithExtras(x, first.extras), CFG)
    assert all(torch.equal(b, buffers[n]) for n, b in module.named_buffers()), "the module's own stay"
    module(x)
    module(x)
    assert all(torch.equal(second.extras[n], b) for n, b in module.named_buffers() if n in second.extras)
    module.eval()
    y, _ = op.fwd(params, x, CFG)
    assert torch.equal(y, module(x)), "in eval mode nothing is written"


def test_a_part_with_other_buffers():
    """It takes the place of one without, in the same mode and with the same parameters."""
    module, x = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)).double(), draw(5, 6)
    op, params = op_from_module(module, x)
    module[1] = nn.BatchNorm1d(6).double()
    before = copy.deepcopy(module.state_dict())
    y, _ = op.fwd(params, x, CFG)
    assert set(y.extras) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert torch.equal(y.main, module(x)) and all(torch.equal(t, y.extras[n]) for n, t in module.named_buffers())
    with pytest.raises(ValueError, match="Sequential_fwd: x.extras must be a key, or buffers of the module by name .*, got 1.mean"):
        op.fwd(params, WithExtras(x, {"1.mean": torch.zeros(6)}), CFG)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Asks()

    def forward(self, x):
        return self.inner(2 * x)


class Asks(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Listed(nn.Module):
    def forward(self, x):
        return x * x.tolist()[0]


class Counted(nn.Module):
    def forward(self, x):
        return x[x > 0]


class Constant(nn.Module):
    """A value that no input decides is a constant."""

    def forward(self, x):
        return x * torch.arange(4.0, dtype=x.dtype).sum().item()


class Drawn(nn.Module):
    """Leaves a layer out at random."""

    def __init__(self, below):
        super().__init__()
        self.below = below

    def forward(self, x):
        return x if torch.rand([]) < self.below else 2 * x


class Chance(nn.Module):
    """Leaves a layer out at random, by numbers of another generator than torch's."""

    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return x if self.draw() < 0.5 else 2 * x


class Table(nn.Module):
    """Makes a table for the length of its input, which stays."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x):
        if len(self.table) != len(x):
            self.table = torch.arange(len(x), dtype=x.dtype)
        return self.table * x


class Calls(nn.Module):
    """Counts in Python, which a trace would fix."""

    def __init__(self, most):
        super().__init__()
        self.calls, self.most = 0, most

    def forward(self, x):
        self.calls = min(self.calls + 1, self.most)
        return self.calls * x


class Again(nn.Module):
    """Its backward runs a part again, with the part's own parameters."""

    def __init__(self, trained):
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 7), nn.GELU()).requires_grad_(trained)
        self.double()

    def forward(self, x):
        return checkpoint(self.b, self.a(x), use_reentrant=False)


class Writes(nn.Module):
    def forward(self, x):
        return x.mul_(2)


class Overwrites(nn.Module):
    """Its backward reads the first value of a counter that a second call has written to."""

    def __init__(self):
        super().__init__()
        self.inner = Counts()

    def forward(self, x):
        return self.inner(self.inner(x))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.steps += 1
        return x * self.steps


class Objects(nn.Module):
    def forward(self, x):
        return {"y": x, "cache": object()}


@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        (Branches(), ValueError, "Branches must be a module whose .* do not depend on values .* in its module 'inner'"),
        (Listed(), ValueError, "Listed must be a module whose shapes and steps do not depend on values .*, got Tensor.tolist"),
        (Counted(), ValueError, "Counted must be a module whose shapes and steps do not depend on values .*, got aten.index"),
        (Drawn(0.5), ValueError, "Drawn must be a module whose shapes and steps do not depend on .* random numbers"),
        (Chance(random.random), ValueError, "draws its random numbers with torch, got one that draws some with Python's random"),
        (Chance(np.random.rand), ValueError, "draws its random numbers with torch, got one that draws some with .* numpy.random"),
        (nn.Sequential(Calls(100)), ValueError, "leaves its attributes as they are, .* got one that assigns 0.calls"),
        (
            Again(True),
            ValueError,
            "Again must be a module whose backward reads no parameter again .*, got one that reads b.0.weight",
        ),
        (
            Again(False),
            ValueError,
            "Again must be a module whose backward reads no parameter again .*, got one that reads b.0.weight",
        ),
        (Overwrites(), ValueError, "Overwrites must be a module that writes to nothing that its backward reads"),
        (Writes(), ValueError, "Writes must be a module that writes neither to its inputs nor to its parameters"),
        (Objects(), TypeError, r"y.cache must be a tensor \(output= chooses a part of the result\), got object"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_what_cannot_be_traced_is_refused_before_anything_is_changed(module, error, text):
    x = draw(4)
    before = x.clone()
    with pytest.raises(error, match=text):
        op_from_module(module, x)
    assert torch.equal(x, before)


def test_a_table_that_the_first_call_makes_stays():
    module = Table()
    op, params = op_from_module(module, draw(4))
    table = module.table
    assert torch.equal(table, torch.arange(4.0, dtype=torch.float64))
    y, residuals = op.fwd(params, draw(4), CFG)
    assert torch.equal(y, table * draw(4)) and module.table is table
    y, _ = op.fwd(params, draw(5), CFG)
    assert torch.equal(y, torch.arange(5.0) * draw(5)) and len(module.table) == 5
    assert torch.equal(op.bwd(residuals, torch.ones_like(table), CFG)[1], table)


def test_a_value_of_no_input_is_a_constant():
    op, params = op_from_module(Constant(), draw(4))
    assert torch.equal(op.fwd(params, draw(4, seed=2), CFG)[0], 6 * draw(4, seed=2))
    op, params = op_from_module(Drawn(0.0), draw(4))
    assert torch.equal(op.fwd(params, draw(4, seed=2), CFG)[0], 2 * draw(4, seed=2)), "never below 0"
    op, params = op_from_module(Calls(1), draw(4))
    assert torch.equal(op.fwd(params, draw(4, seed=2), CFG)[0], draw(4, seed=2)), "set by the first call alone"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # newer torch calls torch.jit deprecated
def test_wrong_arguments():
    module, x = made("mlp")
    with pytest.raises(TypeError, match="op_from_module: module must be"):
        op_from_module(lambda x: x, x)
    with pytest.raises(TypeError, match="op_from_module: module must be a module in Python, got .*torch.jit"):
        op_from_module(torch.jit.trace(nn.Linear(6, 6).double(), x), x)
    op, params = op_from_module(module, x)
    with pytest.raises(ValueError, match="Mlp_fwd: params must be the module's parameters by name"):
        op.fwd({n: p for n, p in params.items() if n != "up.bias"}, x, CFG)
    with pytest.raises(TypeError, match="Mlp_fwd: params must be a dict of the module's parameters by name"):
        op.fwd(None, x, CFG)
    with pytest.raises(RuntimeError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        op.fwd(params, x, CFG)


def test_equal_values_are_not_traced_anew():
    module, x = made("mlp")
    op, params = op_from_module(module, x)
    _, first = op.fwd(params, x, CFG)
    module.slope = float("0.5")
    module.parts = [1.0]
    _, second = op.fwd(params, x, CFG)
    assert first.traced is second.traced
    module.eval()
    op.fwd(params, x, CFG)
    module.train()
    _, third = op.fwd(params, x, CFG)
    assert third.traced is first.traced, "the traces of both modes stay"


def test_other_shapes_and_modes_are_other_traces():
    module, x = made("block")
    op, params = op_from_module(module, x)
    traces = set()
    for shape in ((2, 5, 6), (2, 7, 6), (1, 5, 6), (0, 5, 6)):
        given = draw(*shape)
        y, residuals = op.fwd(params, given, CFG)
        assert torch.equal(y, module(given))
        dx = op.bwd(residuals, y, CFG)[1]
        traces.add(id(residuals.traced))
        given.requires_grad_()
        want = module(given)
        assert torch.equal(dx, torch.autograd.grad(want, given, want)[0])
    y, residuals = op.fwd({n: p.float() for n, p in params.items()}, x.float(), CFG)
    traces.add(id(residuals.traced))
    module.eval()
    traces.add(id(op.fwd(params, x, CFG)[1].traced))
    assert y.dtype is torch.float32 and len(traces) == 6


def test_a_buffer_that_was_written_to_is_noticed():
    module = nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1)).double()
    module.register_buffer("gain", draw(6))
    scaled = Scales(module).double()
    x = draw(3, 6)
    op, params = op_from_module(scaled, x)
    y, residuals = op.fwd(params, x, CFG)
    module.gain.mul_(2)
    with pytest.raises(StaleResidualError, match="residuals.kept.captured.inner.gain must be as the forward left it"):
        op.bwd(residuals, y, CFG)
    assert torch.equal(op.fwd(params, x, CFG)[0], scaled(x))


def in_a_chain(op, params, x, dy):
    cfg = ChainConfig(steps=(Step("one", op, CFG), Step("skipped", skip, SkipConfig(scale, ScaleConfig(0.0)))))
    y, residuals = chain.fwd({"one": params, "skipped": None}, x, cfg)
    assert any(row.path.startswith("one.kept.mlp.up") for row in report(residuals, params, x).rows)
    dparams, dx = chain.bwd(residuals, dy, cfg)
    return y, dparams["one"], dx


def in_a_repeat(op, params, x, dy):
    cfg = RepeatConfig(op=op, cfg=CFG, times=1)
    y, residuals = repeat.fwd((params,), x, cfg)
    (dparams,), dx = repeat.bwd(residuals, dy, cfg)
    return y, dparams, dx


def recomputed(op, params, x, dy):
    y, residuals = remat(op).fwd(params, x, CFG)
    assert report(residuals, params, x).kept_bytes == 0
    return y, *remat(op).bwd(residuals, dy, CFG)


def by_policy(op, params, x, dy):
    cfg = ChainConfig(steps=(Step("one", op, CFG),))
    lean = with_policy(chain, Policy([("one", Recompute())]))
    y, residuals = lean.fwd({"one": params}, x, cfg)
    assert report(residuals, {"one": params}, x).kept_bytes == 0
    dparams, dx = lean.bwd(residuals, dy, cfg)
    return y, dparams["one"], dx


def donated(op, params, x, dy):
    y, residuals = op.fwd(params, x, CFG)
    return y, *op.bwd(donate(residuals), dy, CFG)


def captured(op, params, x, dy):
    graph = graphed_op(op, CFG, params, x)
    y, residuals = graph.fwd(params, x)
    dx, pending = graph.dgrad(residuals, dy)
    return y, graph.wgrad(pending), dx


def pickled(op, params, x, dy):
    y, residuals = op.fwd(params, x, CFG)
    return y, *op.bwd(pickle.loads(pickle.dumps(residuals)), dy, CFG)


def in_a_ledger(op, params, x, dy):
    y, residuals = op.fwd(params, x, CFG)
    ledger = Ledger(params, x)
    ledger.keep("one", residuals)
    assert ledger.nbytes == report(residuals, params, x).kept_bytes
    return y, *op.bwd(ledger.take("one"), dy, CFG)


def compiled(op, params, x, dy):
    def step(params, x, dy):
        y, residuals = op.fwd(params, x, CFG)
        return y, *op.bwd(residuals, dy, CFG)

    return torch.compile(step, backend="eager", fullgraph=True)(params, x, dy)


WAYS = (in_a_chain, in_a_repeat, recomputed, by_policy, donated, captured, pickled, in_a_ledger, compiled)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_rest_of_the_library_takes_it(way):
    module, x = made("block")
    op, params = op_from_module(module, x)
    dy = draw(2, 5, 6, seed=5)
    y, residuals = op.fwd(params, x, CFG)
    want = y, *op.bwd(residuals, dy, CFG)
    got = way(op, params, x, dy)
    assert len(tensors(got)) == len(tensors(want)) > 5
    assert all(torch.equal(a, b) for a, b in zip(tensors(got), tensors(want), strict=True))
