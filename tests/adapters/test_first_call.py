"""`from_torch(model)` without an example: models of any class, traced at their first calls, and what changes after that."""

import contextlib
import copy
import itertools
import random

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import nn as fnn
from funcops import op_from_module
from funcops.low_precision import Fp8Block, Fp8Current
from tests.adapters.odd_modules import COMPUTED, DRAWS, FORMS, ODD, READS, counting, drawn
from tests.adapters.test_bytes_alive import Storages
from tests.adapters.tiny_models import UNKNOWN, batch_of, tiny

pytestmark = pytest.mark.filterwarnings("ignore:dropout1d", "ignore:alpha_dropout")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def outcome(module, x):
    """The output and gradients, or the error, of a call with fixed seeds."""
    torch.manual_seed(1)
    random.seed(1)
    try:
        y = module(x)
    except Exception as error:
        return repr(error)
    found = [y]
    first = y[0] if isinstance(y, tuple) else y
    if first.requires_grad:
        leaves = [t for t in (x, *module.parameters()) if t.requires_grad]
        found += torch.autograd.grad(
            first, leaves, torch.linspace(-1, 1, first.numel()).view(first.shape).to(first), allow_unused=True
        )
    return found


def assert_equal(module, other, shapes=(), dtype=torch.float64):
    """The outputs, gradients and errors of both in each mode, in calls that come twice."""
    for shape in ((2, 3, 4), *shapes):
        x = torch.randn(shape, dtype=dtype)
        columns = x.mT.contiguous().mT if x.dim() > 1 else x
        modes = (torch.no_grad, x), (torch.enable_grad, x.requires_grad_()), (torch.enable_grad, columns.detach())
        for (mode, given), training in itertools.product(modes, (False, True, True)):
            with mode():
                want, got = (outcome(one.train(training), given) for one in (other, module))
            assert type(want) is type(got), (want, got)
            if isinstance(want, str):
                assert want == got
            else:
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9, equal_nan=True)


def turned(on, *modules):
    """A block in which the read value is on for these modules."""
    stack = contextlib.ExitStack()
    if callable(on):
        for made in [on(module) for module in modules]:
            stack.enter_context(made if hasattr(made, "__enter__") else contextlib.nullcontext())
    return stack


CASES = list(itertools.product(FORMS, COMPUTED, (False, True)))
TURNS = 31  # prime to the numbers of the parts of a case, so that each turn has some of all; over the reads they cover all


@pytest.mark.turns("read", every=13)
@pytest.mark.parametrize("turn", [0, *[pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, 4)]])
@pytest.mark.parametrize("read", READS)
def test_a_value_that_is_changed_later(read, turn):
    """In any form of a branch, on at the swap or later, the module computes what it would have computed."""
    expression, on = READS[read]
    wrong = []
    for form, kind, first in CASES[(turn + list(READS).index(read)) % TURNS :: TURNS]:
        module = drawn(kind, FORMS[form].format(c=expression))
        other = copy.deepcopy(module)
        with turned(on, module, other) if first else contextlib.nullcontext():
            fnn.from_torch(module)
        try:
            assert_equal(module, other)
            with turned(on, module, other):
                assert_equal(module, other, [on] if isinstance(on, tuple) else [])
        except AssertionError as error:
            wrong.append((form, kind, first, str(error).split("\n")[0]))
    assert not wrong


@pytest.mark.turns("name", "first", every=13)
@pytest.mark.parametrize("first", [0.0, 0.5])
@pytest.mark.parametrize("name", DRAWS)
def test_random_draws(name, first):
    """With the same seeds the outputs are equal, whatever the probability was at the first call."""
    module = drawn("mlp", DRAWS[name], p=first)
    other = copy.deepcopy(module)
    fnn.from_torch(module)
    for p in (first, 0.5, 0.25, 0.0):
        module.p = other.p = p
        assert_equal(module, other)


@pytest.mark.turns("name", every=8)
@pytest.mark.parametrize("name", ODD)
def test_a_module_of_any_class(name):
    """In float32, and in float16 after that, on its own and behind a layer that is known."""
    for around in (lambda m: m, lambda m: nn.Sequential(nn.Linear(6, 6), m)):
        module = around(copy.deepcopy(ODD[name]))
        other = copy.deepcopy(module)
        if name == "a state outside":  # which copies share
            counting.__defaults__[0][:] = range(4)
        fnn.from_torch(module)
        for dtype in (torch.float32, torch.float16):
            both = module.to(dtype), other.to(dtype)
            for size, training in itertools.product((1.0, 1e4, 0.0), (True, False, True)):
                x = size * torch.randn(3, 6, dtype=dtype)
                want, got = (outcome(one.train(training), x.clone()) for one in reversed(both))
                assert type(want) is type(got), (want, got)
                tolerance = dict(rtol=2e-3, atol=2e-3) if dtype is torch.float16 else dict(rtol=1e-5, atol=1e-5 * max(size, 1.0))
                assert (
                    want == got
                    if isinstance(want, str)
                    else torch.testing.assert_close(got, want, equal_nan=True, **tolerance) is None
                )


def test_a_forward_that_prints(capsys):
    module = drawn("mlp", "print('once a call')\nreturn y")
    fnn.from_torch(module)
    x = torch.ones(2, 4, dtype=torch.float64)
    module(x), capsys.readouterr()
    for _ in range(3):
        module(x)
    assert capsys.readouterr().out == 3 * "once a call\n"
    with pytest.raises(ValueError, match="Drawn must be a module whose forward prints nothing"):
        op_from_module(drawn("mlp", "print('once a call')\nreturn y"), x)


MOST = ("Exaone4", "Cohere", "Glm4", "Olmo3", "SeedOss")


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in MOST else pytest.mark.slow) for name in UNKNOWN])
def test_models_without_a_row(name):
    """Loss and gradients are Hugging Face's in float64, norms in float32 aside."""
    pytest.importorskip("transformers")
    model = tiny(name, num_hidden_layers=1).double().eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    other, batch = copy.deepcopy(model), batch_of(model, 2, 8)
    fnn.from_torch(other)
    assert list(other.state_dict()) == list(model.state_dict())
    found = []
    for one in (model, other):
        loss = one(**batch).loss
        loss.backward()
        found.append((loss.detach(), {path: p.grad for path, p in one.named_parameters()}))
    (want_loss, want), (got_loss, got) = found
    assert abs(got_loss - want_loss) <= 1e-6 * abs(want_loss)
    for path, gradient in want.items():
        assert (got[path] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-12, path
    assert graphs(other) == {""}


@pytest.mark.slow
@pytest.mark.parametrize("cast", [False, True], ids=["bfloat16", "autocast"])
def test_the_bytes_that_models_without_a_row_keep(cast):
    over = []
    for name in UNKNOWN:
        model = tiny(name) if cast else tiny(name).to(torch.bfloat16)
        other, batch = copy.deepcopy(model), batch_of(model)
        fnn.from_torch(other)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            share = fnn.kept_bytes(other, **batch) / fnn.kept_bytes(model, **batch)
        print(f"{name:16} {share:6.2f}")
        over += [(name, share)] if share > 0.7 else []
    assert not over, over


def graphs(model):
    """The paths of the modules that ran on a graph."""
    found = {path: vars(part)["_whole"] for path, part in model.named_modules() if "_whole" in vars(part)}
    return {path for path, whole in found.items() if whole.traces is not None and whole.op.traces()}


class Block(nn.Module):
    """An unknown norm and an unknown MLP."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = copy.deepcopy(ODD["a little more"]), copy.deepcopy(ODD["a sum beside"])

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Blocks(nn.Module):
    """Two blocks, around which `how` is put."""

    def __init__(self, how=lambda block, x: block(x)):
        super().__init__()
        self.layers, self.how = nn.ModuleList([Block(), Block()]), how

    def forward(self, x):
        for layer in self.layers:
            x = self.how(layer, x)
        return x


def branching(block, x):
    return block(x) if float(x.detach().sum()) < 1e9 else x


def hooked(model):
    model.layers[1].norm.register_forward_hook(lambda m, given, y: 2 * y)


def full_hooked(model):
    model.layers[0].register_full_backward_hook(lambda m, dx, dy: (2 * dx[0],))


DOWN = {  # what cannot be traced, and the modules that are
    "nothing": (Blocks, lambda m: None, {""}),
    "a step that depends on values": (lambda: Blocks(branching), lambda m: None, {"layers.0", "layers.1"}),
    "a hook on a part": (Blocks, hooked, {"layers.0", "layers.1.norm", "layers.1.mlp"}),
    "a hook on a block": (Blocks, full_hooked, {"layers.0", "layers.1"}),
}


@pytest.mark.parametrize("name", DOWN)
def test_parts_are_traced_where_a_whole_cannot_be(name):
    make, change, traced = DOWN[name]
    module = make()
    change(module)
    other = copy.deepcopy(module)
    fnn.from_torch(other)
    for _ in range(3):
        x = torch.randn(3, 6)
        want, got = (outcome(one, x.clone().requires_grad_()) for one in (module, other))
        torch.testing.assert_close(got, want)
    assert graphs(other) == traced
    done = fnn.to_torch(other)
    assert not any("_whole" in vars(part) or "_swap" in vars(part) for part in other.modules()) and not done.left


def test_gradients_come_by_blocks_inside_distributed_data_parallel():
    """A bucket is reduced while the blocks before it run backward."""
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        module = Blocks()
        other = copy.deepcopy(module)
        fnn.from_torch(other)
        parallel, x = nn.parallel.DistributedDataParallel(other), torch.randn(3, 6)
        for _ in range(2):
            torch.testing.assert_close(outcome(parallel, x), outcome(module, x))
        assert graphs(other) == {"layers.0", "layers.1"}
        other(x)
        assert graphs(other) == {"", "layers.0", "layers.1"}, "outside of it"
    finally:
        torch.distributed.destroy_process_group()


def test_a_recurrent_model_is_left_to_torch():
    """Its graph would have nodes for each time step."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.rnn(x)[0])

    model, x = Tagger(), torch.randn(5, 2, 4)
    fnn.from_torch(model)
    model(x).sum().backward()
    assert not graphs(model)
    with pytest.raises(ValueError, match="its part 'rnn' is recurrent, and torch runs all its steps at once"):
        fnn.from_torch(Tagger(), example=x)


def test_a_length_is_traced_when_it_comes_again():
    model = Blocks()
    fnn.from_torch(model)
    counts = []
    for length in (3, 4, 5, 6, 3, 5, 5, 4):
        model(torch.randn(length, 6))
        counts.append(model.forward.traces.tries)
    assert counts == [1, 1, 1, 1, 1, 2, 2, 3]
    with torch.autocast("cpu", torch.bfloat16):  # of a length that is known
        model(torch.randn(5, 6))
    assert model.forward.traces.tries == 4


def test_what_from_torch_leaves_to_layers():
    """With a policy, a recipe, `trace=False`, or patterns that leave the model out, and of layers that all run on ops."""
    policy, recipe = dict(policy="minimal"), dict(recipe=Fp8Current())
    for more in (policy, recipe, dict(trace=False), dict(only="*.first"), dict(skip="Blocks")):
        model = Blocks()
        with contextlib.suppress(ValueError):
            fnn.from_torch(model, **more)
        assert "_whole" not in vars(model), more
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.GELU(), nn.Linear(4, 4)))
    fnn.from_torch(model)
    assert "_whole" not in vars(model)


class Headed(nn.Module):
    """A block whose layers take a recipe, one that takes none, and a step between them."""

    def __init__(self):
        super().__init__()
        self.block, self.head = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}), ScaledLinear()

    def forward(self, x):
        return self.head(self.block["down"](torch.relu(self.block["up"](x))))


class ScaledLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = copy.deepcopy(ODD["a little more"]), nn.Linear(32, 6)
        self.norm.weight = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return self.out(self.norm(x))


@pytest.mark.parametrize("first", [True, False], ids=["the recipe first", "the recipe after a trace"])
def test_layers_with_a_recipe_stay_layers_in_any_order_of_calls(first):
    """The docs set a recipe by one call, and leave the head out by a second one. Each step reads its own codes."""
    model, x = Headed(), torch.randn(16, 32)
    layers = copy.deepcopy(model)
    low = dict(recipe=Fp8Block(), skip="head")
    if first:
        fnn.from_torch(model, **low)
    fnn.from_torch(model)
    model(x).sum().backward()
    if not first:
        assert graphs(model) == {""}
        fnn.from_torch(model, **low)
    fnn.from_torch(layers, **low)
    fnn.from_torch(layers, trace=False)
    for _ in range(3):
        for one in (model, layers):
            fnn.quantize_weights(one)
        assert torch.equal(model(x), layers(x))
        with torch.no_grad():
            for p in (*model.parameters(), *layers.parameters()):
                p.mul_(0.9)
    assert "head" in graphs(model) and "has a recipe" in str(model.forward.said)


def test_a_second_call_and_an_example_after_it():
    model = Blocks()
    assert [c.after for c in fnn.from_torch(model).replaced if c.path == ""] == ["its joint graph"]
    assert [c.after for c in fnn.from_torch(model).already if c.path == ""] == ["on its joint graph"]
    assert [c.after for c in fnn.from_torch(model, example=torch.ones(3, 6)).replaced] == ["its joint graph"]
    assert graphs(model) == {""} and not model.forward.lazy
    assert [c.after for c in fnn.from_torch(model, example=torch.ones(3, 6)).already] == ["on its joint graph"]
    assert fnn.to_torch(model).replaced and "forward" not in vars(model)


def test_copies_and_pickles():
    model = Blocks()
    fnn.from_torch(model)
    x = torch.randn(3, 6)
    want = model(x)
    again = copy.deepcopy(model)
    assert graphs(again) == set() and again.forward.lazy
    torch.testing.assert_close(again(x), want)
    assert graphs(again) == {""}


class Each(TorchDispatchMode):
    """Calls a function before each operator."""

    def __init__(self, call):
        super().__init__()
        self.call = call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.call(func)
        return func(*args, **(kwargs or {}))


class Stepping(nn.Module):
    """Counts where no attribute changes."""

    def __init__(self):
        super().__init__()
        self.scale, self.count = nn.Parameter(torch.ones(6)), itertools.count()

    def forward(self, x):
        next(self.count)
        return torch.nn.functional.softplus(x * self.scale).square()


def test_a_trace_runs_the_forward_and_later_calls_do_not():
    model, x = Stepping(), torch.randn(3, 6)
    fnn.from_torch(model)
    model(x)
    runs = next(model.count)
    model(x)
    assert 1 < runs <= 5 and next(model.count) == runs + 1  # the trace's, and one that counts torch's bytes


def test_memory_falls_within_the_backward_of_a_graph():
    """Unless the graph is retained, which a second backward reads."""
    model, x, last = Blocks(), torch.randn(64, 6), {}
    fnn.from_torch(model)
    model(x).sum().backward()
    for retain in (True, False):
        model.zero_grad()
        with Storages(model.parameters()) as noted:
            y, alive = model(x).sum(), []
            with Each(lambda func, a=alive, n=noted: a.append(n.alive()) if func is torch.ops.aten.mm.default else None):
                y.backward(retain_graph=retain)
        last[retain] = alive[-1]  # before the product of the first layer
        if retain:
            y.backward()
        else:
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                y.backward()
    assert last[False] < 0.6 * last[True], last


def test_the_gradients_of_a_graph_come_together():
    model = Blocks()
    fnn.from_torch(model)
    y = model(torch.randn(3, 6))
    leaves = [node.variable for node, _ in y.grad_fn.next_functions if node is not None]
    assert {*map(id, leaves)} == {*map(id, model.parameters())}
