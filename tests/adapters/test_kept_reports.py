"""`kept_bytes`, `kept_report` and `preview`: the bytes that autograd's graph of a model holds, and no change of the model."""

import contextlib
import copy
import random

import numpy as np
import pytest
import torch
from alive import bytes_alive
from products import saved_by
from test_models_as_ops import NAMES, model_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from funcops import nn as fnn
from funcops.engine.trees import tensors, tree_map_tensors

pytestmark = pytest.mark.filterwarnings("ignore")
C = 8
DRAWN = random.Random(7).sample(NAMES, 45)
SMALL = ("Llama", "GPT-2", "BERT", "T5", "Qwen3-MoE", "Mamba", "ViT", "ResNet")
HOLDS = "_parameters", "_buffers", "_modules"


def state(model):
    """The attributes of a module's parts, its tensors and their values, and the states of the generators."""
    parts = [(path, type(part), {n: v for n, v in vars(part).items() if n not in HOLDS}) for path, part in model.named_modules()]
    held = [(n, id(t), t.clone()) for n, t in (*model.named_parameters(), *model.named_buffers())]
    return parts, held, torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())


def assert_same(a, b):
    assert [part[:2] for part in a[0]] == [part[:2] for part in b[0]]
    for (path, _, one), (_, _, other) in zip(a[0], b[0], strict=True):
        assert one.keys() == other.keys() and all(one[n] is other[n] for n in one), path
    assert [t[:2] for t in a[1]] == [t[:2] for t in b[1]]
    assert all(torch.equal(t, u) for (*_, t), (*_, u) in zip(a[1], b[1], strict=True))
    assert a[2:] == b[2:]


def held(model, run, batch, mode):
    """The bytes that the graph of a call holds, and not the module beside it."""

    def call():
        before = [(part, set(vars(part))) for part in model.modules()]
        with mode():
            y = run()
        for part, names in before:
            for name in set(vars(part)) - names:
                delattr(part, name)
        return y

    return bytes_alive(call, lambda: [*model.parameters(), *model.buffers(), *tensors(batch)])


def check(model, batch, mode=contextlib.nullcontext):
    """The report of a call: its bytes are those that the graph of a copy holds, and the model is as before."""
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(3)
    other, before = copy.deepcopy(model), state(model)
    with mode():
        found, table = fnn.kept_bytes(model, *args, **kwargs), fnn.kept_report(model, *args, **kwargs)
    assert_same(before, state(model))
    paths = [row.path for row in table.rows]
    assert table.kept_bytes == found and len(paths) == len(set(paths))

    assert found == held(other, lambda: other(*args, **kwargs), batch, mode)
    return table


class Plain(nn.Module):
    """Its forward is a function of the module and x."""

    def __init__(self, forward, *layers):
        super().__init__()
        self.layers, self.run = nn.ModuleList(layers), forward

    def forward(self, x):
        return self.run(self, x)


def counted(module, x):
    module.calls = getattr(module, "calls", 0) + 1
    module.last = module.layers[0](x)
    return module.last * module.calls


def buffered(module, x):
    module.register_buffer("table", torch.arange(x.shape[-1]).to(x.dtype), persistent=False)
    return module.layers[0](x) * module.table


def drawn(module, x):
    return module.layers[0](x) * random.random() * float(np.random.rand()) * torch.rand_like(x)


def dropped(module, x):
    h = module.layers[0](x)
    (h.sigmoid().exp() * h).sum()  # a loss that nobody asks for
    return h.tanh()


def checkpointed(reentrant):
    def run(module, x):
        h = module.layers[0](x)
        return module.layers[2](checkpoint(lambda h: module.layers[1](h).sigmoid().tanh(), h, use_reentrant=reentrant))

    return run


def linear():
    return nn.Linear(C, C)


MODULES = {
    "batch norm, dropout": lambda: nn.Sequential(linear(), nn.BatchNorm1d(C), nn.Dropout(0.5), nn.GELU(), linear()),
    "in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True), nn.Hardtanh(inplace=True)),
    "attributes": lambda: Plain(counted, linear()),
    "a buffer of the call": lambda: Plain(buffered, linear()),
    "other generators": lambda: Plain(drawn, linear()),
    "a dropped graph": lambda: Plain(dropped, linear()),
    "a checkpoint": lambda: Plain(checkpointed(False), linear(), linear(), linear()),
    "a reentrant checkpoint": lambda: Plain(checkpointed(True), linear(), linear(), linear()),
    "an LSTM": lambda: Plain(lambda module, x: module.layers[0](x)[0], nn.LSTM(C, C, 2, dropout=0.5)),
    "one layer twice": lambda: Plain(lambda module, x: module.layers[0](module.layers[0](x).relu()), linear()),
    "attention": lambda: nn.TransformerEncoderLayer(C, 2, 16),
    "funcops": lambda: fnn.Sequential(fnn.RMSNorm(C), fnn.Linear(C, 2 * C), fnn.SwiGLU()),
}
MODES = {
    "train": lambda model: contextlib.nullcontext,
    "eval": lambda model: model.eval() and contextlib.nullcontext,
    "frozen": lambda model: next(model.children()).requires_grad_(False) and contextlib.nullcontext,
    "no grad": lambda model: torch.no_grad,
    "autocast": lambda model: lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.turns("mode")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODULES)
def test_a_call_changes_nothing_and_its_graph_has_these_bytes(name, mode):
    torch.manual_seed(0)
    if (name, mode) == ("funcops", "autocast"):
        pytest.skip("an op's node holds the cast bias, which its backward does not read")
    model = MODULES[name]()
    table = check(model, (torch.randn(64, C, requires_grad=mode == "frozen"),), MODES[mode](model))
    assert bool(table.rows) == (mode != "no grad")
    assert all(row.needed_by or name in ("in place", "a checkpoint") for row in table.rows), "every reader has a name"


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_kept_bytes_of_architectures(name):
    """Models of seven projects keep what the graph holds, to the byte."""
    table = check(*model_of(name))
    modules = {path for path, _ in model_of(name)[0].named_modules()}
    assert {row.path.rpartition(".")[0] for row in table.rows} <= modules


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eval", "frozen", "autocast", "checkpoint"])
@pytest.mark.parametrize("name", SMALL)
def test_modes_of_architectures(name, mode):
    model, batch = model_of(name)
    plain = fnn.kept_report(model, **batch).kept_bytes
    if mode == "checkpoint":  # its closures hold positions and masks, beside what autograd holds
        if not model.supports_gradient_checkpointing:
            pytest.skip("the model has none")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        own = [*model.parameters(), *model.buffers(), *tensors(batch)]
        assert (
            fnn.kept_bytes(model, **batch) == fnn.kept_report(model, **batch).kept_bytes == saved_by(lambda: model(**batch), own)[1]
        )
        assert fnn.kept_bytes(model, **batch) < plain
        return
    if mode == "autocast":
        model.float()
        batch = tree_map_tensors(lambda t: t.float() if t.is_floating_point() else t, batch)
    check(model, batch, MODES[mode](model))


def ways(model, batch):
    """The report of the model after `from_torch`, once all is traced that can be."""
    fnn.from_torch(model)
    for _ in range(8):
        model(**batch)
    return fnn.kept_report(model, **batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SMALL, "Mixtral"])
def test_a_preview_is_the_report_after_from_torch(name):
    """Mixtral's experts run in a loop, so that its parts are traced in their places."""
    model, batch = model_of(name)
    if name == "Mixtral":
        model.config._experts_implementation = "eager"
    before, plain = state(model), fnn.kept_report(model, **batch)
    ours = fnn.preview(model, **batch)
    assert_same(before, state(model))
    assert ours.kept_bytes < plain.kept_bytes
    assert str(ours) == str(ways(model, batch))


def test_a_preview_of_layers_shares_the_weights():
    model = nn.Sequential(nn.Linear(C, 4 * C), nn.LayerNorm(4 * C), nn.GELU(), nn.Linear(4 * C, C))
    x, before = torch.randn(4096, C), state(model)
    ours = fnn.preview(model, x)
    assert_same(before, state(model))
    assert {row.alias_of for row in ours.rows} >= {"x.0", "params.3.weight"}
    assert ours.kept_bytes == fnn.preview(model, x).kept_bytes < fnn.kept_bytes(model, x)
    model.cached = (model[0].weight * 2).sum()
    with pytest.raises(ValueError, match="preview: module must be one that copy.deepcopy copies .*from_torch.*, got"):
        fnn.preview(model, x)


def test_a_raise_in_the_call_puts_the_module_back():
    def fails(module, x):
        counted(module, x)
        module.norm = nn.BatchNorm1d(C)
        random.random()
        raise KeyError("in the forward")

    model, x = Plain(fails, nn.BatchNorm1d(C)), torch.randn(4, C)
    before = state(model)
    for run in (fnn.kept_bytes, fnn.kept_report):
        with pytest.raises(KeyError, match="in the forward"):
            run(model, x)
        assert_same(before, state(model))
    with pytest.raises(ValueError, match="kept_report: module must be a module whose parameters are made .*, got .* weight"):
        fnn.kept_report(nn.LazyLinear(3), x)
