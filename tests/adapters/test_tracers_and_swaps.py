"""A swapped model with tracers (torch.export, torch.compile with dynamic sizes), with seeds and hooks, and with tools that know
torch's own classes alone."""

import itertools

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from funcops import InterleaveConfig, RepeatConfig, interleave, random, repeat
from funcops import nn as fnn
from funcops.engine.trees import WithExtras

D = 16


class Mlp(nn.Module):
    def __init__(self, act=None, p=0.0):
        super().__init__()
        self.up, self.act, self.drop, self.down = nn.Linear(D, 2 * D), act or nn.GELU(), nn.Dropout(p), nn.Linear(2 * D, D)

    def forward(self, x):
        return self.down(self.drop(self.act(self.up(x))))


def sequential(p=0.0):
    return nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Dropout(p), nn.Linear(2 * D, D), nn.Dropout(p))


def shared(how):
    first, last = nn.Linear(D, D), nn.Linear(D, D)
    if how == "weight":
        last.weight = first.weight
    return nn.Sequential(first, nn.GELU(), first if how == "layer" else last)


MODELS = {
    "Linear": lambda: nn.Linear(D, D),
    "LayerNorm": lambda: nn.LayerNorm(D),
    "RMSNorm": lambda: nn.RMSNorm(D),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "GELU": lambda: nn.GELU(),
    "Softmax along 1": lambda: nn.Softmax(1),
    "SwiGLU": lambda: fnn.SwiGLU(),
    "Sequential": sequential,
    "MLP": Mlp,
    "shared weight": lambda: shared("weight"),
    "shared layer": lambda: shared("layer"),
}


@pytest.fixture(autouse=True)
def fresh():
    counters.clear()


def swapped(name):
    model = MODELS[name]()
    fnn.from_torch(model)
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns("name", every=8)
def test_an_exported_batch_is_of_any_size(name):
    model = swapped(name)
    sizes = {0: torch.export.Dim("rows", min=2, max=1 << 20)}
    program = torch.export.export(model, (torch.randn(6, 4, D),), dynamic_shapes=(sizes,))
    for rows in (2, 600, 5000):  # below and above the sizes from which more is recomputed
        x = torch.randn(rows, 4, D, requires_grad=True)
        got, want = program.module()(x), model(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want)))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.turns("name", every=8)
def test_dynamic_sizes_are_one_graph(name):
    model = swapped(name)
    run = torch.compile(model, dynamic=True, fullgraph=True, backend="aot_eager")
    for rows in (3, 40, 700):
        x = torch.randn(rows, 4, D, requires_grad=True)
        got, want = run(x), model(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want)))
    assert counters["stats"]["unique_graphs"] == 1


MASKED = {
    "MLP": lambda: Mlp(p=0.5),
    "MLP of ReLU": lambda: Mlp(nn.ReLU(), p=0.5),
    "Sequential": lambda: sequential(0.5),
    "in place": lambda: nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Dropout(0.5, inplace=True), nn.Linear(D, D)),
}


@pytest.mark.parametrize("name", MASKED)
def test_a_hook_does_not_change_the_mask(name):
    model, x = MASKED[name](), torch.randn(8, D)
    fnn.from_torch(model)
    torch.manual_seed(0)
    want = model(x)
    assert (want - model(x)).abs().max() > 1e-3  # another mask
    for layer in model.modules():
        handle = layer.register_forward_hook(lambda *_: None)
        torch.manual_seed(0)
        torch.testing.assert_close(model(x), want)
        handle.remove()


def test_two_dropouts_of_a_sequential_have_masks_of_their_own():
    y = fnn.Sequential(fnn.Dropout(0.5), fnn.Dropout(0.5))(torch.ones(10000))
    assert 0.2 < (y > 0).float().mean() < 0.3


@pytest.mark.parametrize("around", ["repeat", "interleave"])
def test_a_mask_of_a_swapped_layer_differs_by_the_part_around_it(around):
    op, cfg, _ = fnn.functional(fnn.Sequential(fnn.GELU(), fnn.Dropout(0.5)))
    assert cfg.keys == cfg.extras
    x = WithExtras(torch.full((2, 5000), 5.0), {key: random.key(0) for key in cfg.extras})
    if around == "repeat":
        assert 0.2 < (repeat.fwd((op.init(cfg),) * 2, x, RepeatConfig(op, cfg, 2))[0] > 0).float().mean() < 0.3
    else:
        first, second = interleave.fwd(op.init(cfg), x, InterleaveConfig(op, cfg, 2))[0]
        assert not first.equal(second)


@pytest.mark.parametrize("name", ["Linear", "Sequential", "MLP", "GELU"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch 2.14 says the second of torch.jit.script
def test_tools_for_torchs_classes_refuse_by_name(name):
    holder = nn.ModuleDict({"layer": MODELS[name]()})
    fnn.from_torch(holder)
    before = {n: type(m) for n, m in holder.named_modules()}
    with pytest.raises(
        TypeError, match=r"funcops\.nn\.\w+: the module must be of torch\.nn for torch\.jit\.script: call .*to_torch"
    ):
        torch.jit.script(holder["layer"])
    with pytest.raises(TypeError, match=r"funcops\.nn\.\w+: qconfig must be .*call funcops\.nn\.to_torch\(model\) first"):
        torch.ao.quantization.quantize_dynamic(holder, {nn.Linear}, dtype=torch.qint8)
    assert before == {n: type(m) for n, m in holder.named_modules()}
    fnn.to_torch(holder)
    torch.jit.script(holder["layer"])


def test_what_is_slower_alone_on_a_cpu_is_left_with_the_reason():
    layers = {"Dropout": lambda: nn.Dropout(0.1), "GLU": lambda: nn.GLU()}
    for (kind, make), device in itertools.product(layers.items(), ("cpu", "meta")):
        parts = {
            "a": nn.Linear(4, 4, device=device),
            "alone": make(),
            "joined": nn.Sequential(nn.Linear(4, 4, device=device), make()),
        }
        parts["beside a convolution"] = nn.Sequential(nn.Conv1d(1, 1, 1, device=device), make())
        done = fnn.from_torch(nn.ModuleDict(parts))
        left = {one.path: one.after for one in done.left if one.before == kind}
        assert set(left) == ({"alone", "beside a convolution.1"} if device == "cpu" else set())
        assert all(reason.startswith("alone on a CPU it takes longer than torch's") for reason in left.values())
        assert "joined.1" in [one.path for one in done.replaced]
