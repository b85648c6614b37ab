"""Equal layers of a module are traced once: gradients are autograd's to the bit, and what differs among the layers is seen."""

import sys

import pytest
import torch
from own_models import CFG, Block, called, draw, plain, trained
from test_whole import Answer, assert_steps, by_loss
from test_whole import made as whole
from torch import nn
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from benchmarks.memory import peak_of
from funcops import WithExtras, op_from_module, report
from funcops.engine.trees import tensors

layers = sys.modules["funcops.adapters.from_function.layers"]


class Layer(nn.Module):
    """Its attributes, beside `number`, are read."""

    def __init__(self, number=0, **changes):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.drop = nn.Dropout(0.25)
        self.register_buffer("gain", torch.full((6,), 1.0 + number))
        self.number, self.slope, self.config = number, 0.5, {"power": 2}
        for name, value in changes.items():
            setattr(self, name, value)

    def forward(self, x, cache=None):
        if cache is not None:
            return x * self.number
        h = self.up(self.norm(x))
        h = torch.where(h > 0, h, self.slope * h) ** self.config["power"]
        return x + self.drop(self.down(h)) * self.gain


class Stack(nn.Module):
    """Calls its layers in a row."""

    def __init__(self, made, call=lambda layer, x: layer(x)):
        super().__init__()
        self.layers, self.head, self.call = nn.ModuleList(made), nn.Linear(6, 3), call

    def forward(self, x):
        for layer in self.layers:
            x = self.call(layer, x)
        return self.head(x)


class Crossed(Layer):
    """Reads a second input twice, whose gradient autograd adds in an order of its own; gives it back, and a number."""

    def forward(self, x, other):
        return super().forward(x + other * other.sin()), other, {"sum": x.sum().detach(), "none": None}


class CrossedStack(Stack):
    def forward(self, x):
        other = self.head.weight.sum(0).expand_as(x) * 1.5
        for layer in self.layers:
            x, other, extras = layer(x, other)
        return self.head(x) + extras["sum"]


class Normed(Layer):
    """Batch statistics are written in every call."""

    def __init__(self, number=0):
        super().__init__(number)
        self.batch = nn.BatchNorm1d(6)

    def forward(self, x):
        return super().forward(self.batch(x))


class InPlace(Layer):
    def forward(self, x):
        x = super().forward(1 * x)
        return x.mul_(2).add_(self.gain)


class OnInput(Layer):
    def forward(self, x):
        return super().forward(x.mul_(1.5))


class Counting(Layer):
    """Reads its number."""

    def forward(self, x):
        return super().forward(x) * (1 + self.number)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * (1 + ctx.layer.number), None


class ReadLate(Layer):
    """Reads its number in its backward alone."""

    def forward(self, x):
        return InBackward.apply(super().forward(x), self)


class Twofold(Layer):
    """Has a part by two names."""

    def __init__(self, number=0):
        super().__init__(number)
        self.again = nn.ModuleList([self.norm, self.norm])

    def forward(self, x):
        return super().forward(self.again[1](x))


class Unused(Layer):
    """Gives two results, of which the second gets no gradient."""

    def forward(self, x):
        y = super().forward(x)
        return y, self.up(y).sigmoid()


def tied():
    made = [Layer(i) for i in range(3)]
    made[2].up.weight = made[0].up.weight
    return made


def hooked():
    made = [Layer(i) for i in range(3)]
    made[1].up.register_forward_hook(lambda layer, args, out: 2 * out)
    made[2].register_forward_hook(lambda layer, args, out: 3 * out)
    return made


def replaced():
    made = [Layer(i) for i in range(3)]
    made[1].forward = lambda x: made[0].norm(x) + x
    return made


def under(context):
    def call(layer, x):
        with context():
            return layer(x)

    return call


def with_cache(layer, x):
    return layer(x) if layer.number else layer(x, cache=object())


def checkpointed(layer, x):
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


CASES = {  # name: (a stack of layers, the traces of a layer; None if the whole is traced)
    "equal": (lambda: Stack([Layer(i) for i in range(4)]), 1),
    "with objects of their own": (lambda: Stack([Block() for _ in range(3)]), 3),
    "another number": (lambda: Stack([Layer(i, slope=0.5 + i // 2) for i in range(4)]), 2),
    "another entry of a dict": (lambda: Stack([Layer(i, config={"power": 2 + (i == 1)}) for i in range(3)]), 2),
    "the number is read": (lambda: Stack([Counting(i) for i in range(3)]), 3),
    "another mode": (lambda: Stack([Layer(i).train(i != 1) for i in range(3)]), 1),
    "a frozen one": (lambda: Stack([Layer(i).requires_grad_(i != 1) for i in range(3)]), 2),
    "tied": (lambda: Stack(tied()), 1),
    "a part by two names": (lambda: Stack([Twofold(i) for i in range(3)]), 1),
    "hooks": (lambda: Stack(hooked()), 2),
    "another forward": (lambda: Stack(replaced()), 0),
    "called twice": (lambda: Stack([Layer(i) for i in range(2)], lambda layer, x: layer(layer(x))), 1),
    "written in place": (lambda: Stack([InPlace(i) for i in range(3)]), 1),
    "under no_grad": (lambda: Stack([Layer(i) for i in range(3)], under(torch.no_grad)), 0),
    "under autocast": (lambda: Stack([Layer(i) for i in range(3)], under(lambda: torch.autocast("cpu", torch.bfloat16))), 0),
    "an object as argument": (lambda: Stack([Layer(i) for i in range(3)], with_cache), 1),
    "results without a gradient": (lambda: Stack([Unused(i) for i in range(3)], lambda layer, x: layer(x)[0]), 1),
    "another argument": (lambda: Stack([Layer(i) for i in range(3)], lambda layer, x: layer(x[: 4 - layer.number])), 3),
    "batch statistics": (lambda: Stack([Normed(i) for i in range(3)]), 0),
    "gradients in parts": (lambda: CrossedStack([Crossed(i) for i in range(3)]), None),
    "its number is read in its backward": (lambda: Stack([ReadLate(i) for i in range(3)]), None),
    "written to the argument": (lambda: Stack([OnInput(i) for i in range(3)], lambda layer, x: layer(1 * x)), None),
}


@pytest.fixture
def traces(monkeypatch):
    """The layers of each trace that used copies."""
    used = []

    def noted(where, module, run, leaves, asked, found=None, plain=layers.trace_module):
        made = plain(where, module, run, leaves, asked, found)
        used.append(found)
        return made

    monkeypatch.setattr(layers, "trace_module", noted)
    return used


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_autograds_to_the_bit(name, traces):
    build, wanted = CASES[name]
    torch.manual_seed(0)
    module, x = build().double(), draw(4, 6)
    if name == "with objects of their own":
        x = draw(2, 5, 6)
    before = {id(part): (set(vars(part)), [*map(id, part._parameters.values())]) for part in module.modules()}
    classes = {type(part): dict(vars(type(part))) for part in module.modules()}
    op, params = op_from_module(module, x)
    made = traces[-1]
    assert (None if made is None else sum([len(first.joints) for some in made.firsts.values() for first in some])) == wanted
    assert before == {id(part): (set(vars(part)), [*map(id, part._parameters.values())]) for part in module.modules()}
    assert classes == {cls: dict(vars(cls)) for cls in classes}, "classes are as before"
    torch.manual_seed(3)
    y, residuals = op.fwd(params, x, CFG)
    main = y.main if isinstance(y, WithExtras) else y
    dx_in = x.clone().requires_grad_()
    torch.manual_seed(3)
    want = called(module, 1 * dx_in)
    assert torch.equal(main, want)
    dparams, dx = op.bwd(residuals, WithExtras(main, dict.fromkeys(y.extras)) if isinstance(y, WithExtras) else main, CFG)
    own = {n: p for n, p in module.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(want, [dx_in, *own.values()], want, allow_unused=True)
    for path, got, grad in zip(("x", *own), (dx, *[dparams[n] for n in own]), found, strict=True):
        assert (got is None or not got.any()) if grad is None else torch.equal(got, grad), path
    assert plain(trained(x))


def test_deep_models_cost_hardly_more_traced_operators(monkeypatch):
    """Beside them there is one `detach` for each parameter, and one empty tensor for each result of a call."""
    counted = []
    dispatch = ProxyTorchDispatchMode.__torch_dispatch__
    beside = "aten.detach.default", "aten.alias.default", "aten.empty_strided.default"  # the newest torch detaches by an alias

    def count(self, func, *args, **kwargs):
        counted[-1] += str(func) not in beside
        return dispatch(self, func, *args, **kwargs)

    monkeypatch.setattr(ProxyTorchDispatchMode, "__torch_dispatch__", count)
    for depth in (2, 32):
        counted.append(0)
        op_from_module(Stack([Layer(i) for i in range(depth)]).double(), draw(4, 6))
    assert 0 < counted[1] <= 1.2 * counted[0], counted


def test_residuals_have_the_names_of_their_layers():
    module, x = Stack([Layer(i) for i in range(3)]).double(), draw(4, 6)
    op, params = op_from_module(module, x)
    _, residuals = op.fwd(params, x, CFG)
    names = [name for name in residuals.kept if not name.startswith("params.")]
    for i in range(3):
        assert {name for name in names if f"layers.{i}.up" in name}, names
        assert residuals.kept[f"captured.layers.{i}.gain"] is module.layers[i].gain
    assert "layers.0-2" in str(report(residuals, params, x))
    assert len(tensors(residuals.kept)) == len({id(t) for t in tensors(residuals.kept)})


def test_an_interrupt_leaves_the_module_as_it_was():
    class Stops(Layer):
        def forward(self, x):
            if self.config.get("stop") and layers.get_proxy_mode() is not None:
                raise KeyboardInterrupt
            return super().forward(x)

    module = Stack([Stops(i, config={"power": 2, "stop": i == 1}) for i in range(2)]).double()
    before = [set(vars(part)) for part in module.modules()], dict(vars(Stops))
    with pytest.raises(KeyboardInterrupt):
        op_from_module(module, draw(4, 6))
    assert before == ([set(vars(part)) for part in module.modules()], dict(vars(Stops)))
    module.layers[1].config["stop"] = False
    op, params = op_from_module(module.eval(), draw(4, 6))
    assert torch.equal(op.fwd(params, draw(4, 6), CFG)[0], module(draw(4, 6)))


def test_a_backward_computes_again_right_before_the_reader():
    """So its peak grows by what is kept, and by gradients of parameters, not by what is computed again."""
    over = []
    for depth in (2, 10):
        module, x = Stack([Block() for _ in range(depth)]).double(), draw(16, 32, 6)
        op, params = op_from_module(module, x)
        y, residuals = op.fwd(params, x, CFG)
        kept = report(residuals, params, x).kept_bytes + sum([p.nbytes for p in params.values()])
        over.append(peak_of(lambda op=op, r=residuals, y=y: op.bwd(r, y, CFG)))
        assert over[-1] + kept < peak_of(lambda module=module, x=x: module(x.clone().requires_grad_()).sum().backward())
    assert over[1] <= 1.1 * over[0] + sum([p.nbytes for p in params.values()]), over


def test_one_pass_of_both_halves_computes_nothing_twice():
    module, x = Block().double(), draw(2, 5, 6)
    op, params = op_from_module(module, x)
    graphs = op.fwd(params, x, CFG)[1].traced.graphs

    def names(*parts):
        return sorted(
            [
                str(getattr(n.target, "__name__", n.target)).removesuffix(".default")
                for part in parts
                for n in part.graph.nodes
                if "call" in n.op
            ]
        )

    whole, halves = names(graphs.backward), names(graphs.dgrad, graphs.wgrad)
    assert whole.count("native_layer_norm") == 2 == halves.count("native_layer_norm") // 2
    assert whole.count("native_layer_norm_backward") == 2 == halves.count("native_layer_norm_backward") // 2


def test_a_trace_holds_one_of_equal_layers_at_a_time():
    peaks = []
    for depth in (4, 16):
        module, x = Stack([Layer(i) for i in range(depth)]).double().eval(), draw(64, 32, 6)
        autograd = peak_of(lambda m=module, x=x: m(x.clone().requires_grad_()).sum().backward())
        peaks.append((peak_of(lambda m=module, x=x: op_from_module(m, x)), autograd))
    (shallow, less), (deep, more) = peaks
    assert deep - shallow <= 0.25 * (more - less), peaks
    assert deep - shallow <= 1.2 * 12 * x.nbytes, "the inputs of the layers"


def test_the_elements_of_a_tuple_do_not_hold_each_other():
    """A norm's statistics are read in the backward: its y, which was in the same tuple, is freed in the forward."""
    module, x = nn.Sequential(*[nn.Sequential(nn.LayerNorm(512), nn.Tanh()) for _ in range(6)]).double(), draw(8, 512)
    op, params = op_from_module(module, x)
    order = op.named.last.cutter.order
    for i, node in enumerate(order):
        elements = [user for user in node.users if user.target is layers.operator.getitem]
        assert set(order[i + 1 : i + 1 + len(elements)]) == set(elements)


class Deep(nn.Module):
    """Equal layers, which are traced once; a result that has a gradient beside one without."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.GELU()) for _ in range(3))

    def forward(self, x):
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1]))
        return Answer(hidden[-1].sum(), [hidden[1], hidden[2].detach()])


def test_equal_layers_of_a_whole_model():
    plain, ours = whole(Deep)
    for loss in (by_loss, lambda found: found.rest[0].sum()):
        got, want = assert_steps(plain, ours, lambda m: m(draw(5, 6)), loss)
        assert [t.requires_grad for t in got.rest] == [t.requires_grad for t in want.rest] == [True, False]
