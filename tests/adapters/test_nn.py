"""`funcops.nn` against `torch.nn`."""

import copy
import pickle
import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import funcops
from funcops import chain
from funcops import nn as fnn
from funcops.testing.tolerances import assert_close

D = 6
PAIRS = {
    "Linear": lambda lib: lib.Linear(D, 4),
    "Linear without bias": lambda lib: lib.Linear(D, 4, bias=False),
    "LayerNorm": lambda lib: lib.LayerNorm(D),
    "LayerNorm without bias": lambda lib: lib.LayerNorm(D, bias=False, eps=0.1),
    "RMSNorm": lambda lib: lib.RMSNorm(D),
    "RMSNorm eps": lambda lib: lib.RMSNorm((3, D), eps=0.1),
    "GELU": lambda lib: lib.GELU(),
    "GELU tanh": lambda lib: lib.GELU(approximate="tanh"),
    "ReLU": lambda lib: lib.ReLU(),
    "SiLU": lambda lib: lib.SiLU(),
    "Sigmoid": lambda lib: lib.Sigmoid(),
    "Tanh": lambda lib: lib.Tanh(),
    "GLU": lambda lib: lib.GLU(),
    "GLU along another": lambda lib: lib.GLU(dim=-3),
    "Softmax": lambda lib: lib.Softmax(-1),
    "Softmax along another": lambda lib: lib.Softmax(1),
    "GroupNorm": lambda lib: lib.GroupNorm(3, 3),
    "LayerNorm without weight": lambda lib: lib.LayerNorm(D, elementwise_affine=False),
    "RMSNorm without weight": lambda lib: lib.RMSNorm(D, elementwise_affine=False, eps=0.1),
    "GroupNorm without weight": lambda lib: lib.GroupNorm(1, 3, affine=False),
    "Sequential": lambda lib: lib.Sequential(lib.LayerNorm(D), lib.Linear(D, 8), lib.GELU(), lib.Linear(8, D)),
    "Sequential with others": lambda lib: lib.Sequential(
        lib.Linear(D, 8), nn.Softplus(), lib.GELU(), lib.Linear(8, D), nn.Identity()
    ),
    "Sequential with names": lambda lib: lib.Sequential(
        OrderedDict(
            {
                "z-1": lib.Linear(D, 8),
                "norm": lib.RMSNorm(8),
                "act": lib.SiLU(),
                "b": lib.Linear(8, D, bias=False),
                "a": lib.Linear(D, 2),
            }
        )
    ),
    "Sequential of many": lambda lib: lib.Sequential(*(lib.Linear(D, D) for _ in range(12))),
    "Sequential in Sequential": lambda lib: lib.Sequential(lib.Linear(D, 8), lib.Sequential(lib.ReLU(), lib.Linear(8, 2))),
}


def both(make, dtype=torch.float64):
    torch.manual_seed(0)
    want = make(nn).to(dtype)
    torch.manual_seed(0)
    return want, make(fnn).to(dtype)


def gradients(module, x):
    x = x.detach().clone().requires_grad_()
    y = module(x)
    y.square().sum().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("name", PAIRS)
def test_modules_equal_torchs(name):
    want, got = both(PAIRS[name])
    assert isinstance(got, type(want)) and repr(got).startswith(type(got).__name__)
    assert list(want.state_dict()) == list(got.state_dict())
    for a, b in zip(want.state_dict().values(), got.state_dict().values(), strict=True):
        assert torch.equal(a, b), "initialised as torch's"
    x = torch.randn(2, 3, D, dtype=torch.float64)
    assert_close(gradients(got, x), gradients(want, x), dtype=torch.float64, length=64)
    with torch.no_grad():
        assert_close(got(x), want(x), dtype=torch.float64, length=64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PAIRS)
def test_small_numbers_in_every_dtype(name, dtype):
    """Numbers whose squares are below an epsilon: also a default is torch's, in each dtype."""
    want, got = both(PAIRS[name], dtype)
    for scale in (1e-1, 1e-3):
        x = (scale * torch.randn(2, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).to(dtype)
        with torch.no_grad():
            assert_close(got(x), want(x), dtype=dtype, length=64)


@pytest.mark.parametrize("name", PAIRS)
def test_state_dicts_go_both_ways(name):
    want, got = both(PAIRS[name])
    for p in want.parameters():
        nn.init.normal_(p)
    got.load_state_dict(want.state_dict())
    again = PAIRS[name](nn).double()
    again.load_state_dict(got.state_dict())
    x = torch.randn(2, 3, D, dtype=torch.float64)
    assert_close(got(x).detach(), again(x).detach(), dtype=torch.float64, length=64)


@pytest.mark.parametrize("name", PAIRS)
def test_copies_pickles_and_meta(name):
    _, got = both(PAIRS[name])
    x = torch.randn(2, 3, D, dtype=torch.float64)
    want = got(x)  # configs and groups are cached now
    for other in (copy.deepcopy(got), pickle.loads(pickle.dumps(got))):
        assert torch.equal(other(x), want)
        for p in other.parameters():
            with torch.no_grad():
                p.add_(1.0)
    assert torch.equal(got(x), want), "a copy shares nothing"
    with torch.device("meta"):
        empty = PAIRS[name](fnn).double()
    assert empty(x.to("meta")).is_meta
    real = empty.to_empty(device="cpu")
    real.load_state_dict(got.state_dict())
    assert torch.equal(real(x), want)


def test_embedding():
    want, got = both(lambda lib: lib.Embedding(7, 3, padding_idx=2), torch.float32)
    ids = torch.tensor([[1, 2, 2], [0, 6, 1]])
    for module in (want, got):
        module(ids).square().sum().backward()
    assert torch.equal(want(ids), got(ids)) and torch.equal(want.weight.grad, got.weight.grad)
    with pytest.raises(ValueError, match="funcops.nn.Embedding: max_norm must be off"):
        fnn.Embedding(7, 3, max_norm=1.0)


def test_dropout_draws_from_torch_and_rests_in_eval():
    drop, x = fnn.Dropout(0.3), torch.ones(4000, requires_grad=True)
    torch.manual_seed(1)
    a, b = drop(x), drop(x)
    torch.manual_seed(1)
    assert torch.equal(drop(x), a) and not torch.equal(a, b)
    assert abs((a == 0).float().mean() - 0.3) < 0.05
    a.sum().backward()
    assert torch.equal(x.grad, a.detach())
    assert torch.equal(drop.eval()(x), x)


@pytest.mark.parametrize("shape", [(5, 7), (7,), (2, 7, 3)])
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1, "ignore_index": 1}], ids=str
)
def test_cross_entropy(shape, options):
    want, got = nn.CrossEntropyLoss(**options), fnn.CrossEntropyLoss(**options)
    logits = torch.randn(shape, dtype=torch.float64)
    labels = torch.randint(7, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    found = []
    for loss in (want, got):
        x = logits.clone().requires_grad_()
        y = loss(x, labels)
        y.sum().backward()
        found.append((y.detach(), x.grad))
    assert_close(found[1], found[0], dtype=torch.float64, length=64)
    if "ignore_index" not in options:  # probabilities are left to torch, which has none beside them
        assert torch.equal(got(logits, logits.softmax(-1)), want(logits, logits.softmax(-1)))


def test_linear_cross_entropy():
    loss = fnn.LinearCrossEntropyLoss(D, 11, label_smoothing=0.1, dtype=torch.float64)
    x, labels = torch.randn(5, D, dtype=torch.float64, requires_grad=True), torch.randint(11, (5,))
    loss(x, labels).backward()
    w, t = loss.linear.weight.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    nn.functional.cross_entropy(t @ w.T, labels, label_smoothing=0.1).backward()
    assert_close((x.grad, loss.linear.weight.grad), (t.grad, w.grad), dtype=torch.float64, length=64)
    assert "11" in repr(loss) and list(loss.state_dict()) == ["linear.weight"]
    old = {"weight": torch.ones(11, D)}
    loss.load_state_dict(old)  # as earlier versions saved it
    assert loss.linear.weight.eq(1).all() and list(old) == ["weight"]
    shared = nn.Parameter(torch.zeros(11, D))
    with pytest.warns(DeprecationWarning, match="set linear.weight"):
        loss.weight = shared
    assert loss.linear.weight is shared and loss.weight is None
    with pytest.raises(ValueError, match="LinearCrossEntropyConfig: in_features must be at least 1"):
        fnn.LinearCrossEntropyLoss(0, 11)


def nodes(y):
    """The names of the autograd nodes behind y."""
    found, stack = [], [y.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and "AccumulateGrad" not in type(node).__name__:
            found.append(type(node).__name__)
            stack += [n for n, _ in node.next_functions]
    return found


def test_a_sequential_is_one_node_and_ordinary_modules_split_it():
    x = torch.randn(2, D, requires_grad=True)
    _, one = both(PAIRS["Sequential"], torch.float32)
    assert nodes(one(x)) == ["_NodeBackward"]
    _, split = both(PAIRS["Sequential with others"], torch.float32)
    assert nodes(split(x)) == ["_NodeBackward", "SoftplusBackward0", "_NodeBackward"]
    for register in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ):
        handle = getattr(one[2], register)(lambda *_: None)
        assert nodes(one(x)).count("_NodeBackward") == 3, f"{register}: a hook wants to see its module called"
        handle.remove()
        assert nodes(one(x)) == ["_NodeBackward"]


def test_large_inputs_recompute_what_small_ones_keep():
    model = fnn.Sequential(fnn.RMSNorm(64), fnn.Linear(64, 8))
    for rows, kept in ((8, True), (1024, False)):
        node = model(torch.randn(rows, 64)).grad_fn
        assert bool(node.call[2]["m1"].needs.drop) != kept


def test_a_sequential_follows_its_modules():
    model = fnn.Sequential(fnn.Linear(D, D), fnn.Dropout(0.5), fnn.SwiGLU())
    x = torch.randn(3, D)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))
    model[1] = fnn.GELU()
    want = nn.functional.gelu(nn.functional.linear(x, model[0].weight, model[0].bias)).chunk(2, -1)
    torch.testing.assert_close(model(x), nn.functional.silu(want[0]) * want[1])
    assert fnn.Sequential()(x) is x


def test_functional_access():
    model = fnn.Sequential(fnn.RMSNorm(D), fnn.Linear(D, D))
    op, cfg, params = fnn.functional(model)
    assert op is chain
    y, residuals = op.fwd(params, torch.randn(2, D), cfg)
    dparams, _ = op.bwd(residuals, torch.ones_like(y), cfg)
    assert dparams["m1"].weight.shape == (D, D)
    params["m1"].weight.zero_()
    assert not model[1].weight.any(), "params are views of the module's"
    op, cfg, params = fnn.functional(model[1])
    assert op is funcops.linear and cfg == funcops.LinearConfig(D, D)
    with pytest.raises(ValueError, match="funcops.nn.Sequential: modules must be all of funcops.nn"):
        fnn.functional(fnn.Sequential(nn.Softplus()))


def test_arguments_that_every_call_would_refuse_raise_at_construction():
    for make, text in (
        (lambda: fnn.Embedding(4, 3, max_norm=1.0), "Embedding: max_norm must be off .*use torch.nn.Embedding"),
        (lambda: fnn.Embedding(4, 3, sparse=True), "Embedding: sparse must be off"),
        (lambda: fnn.LayerNorm(D, eps=-1.0), "LayerNormConfig: eps must be"),
        (lambda: fnn.GroupNorm(1, D, eps=-1.0), "GroupNormConfig: eps must be"),
        (lambda: fnn.CrossEntropyLoss(label_smoothing=2.0), "CrossEntropyConfig: label_smoothing must be"),
        (lambda: fnn.CrossEntropyLoss(reduction="all"), "CrossEntropyConfig: reduction must be"),
    ):
        with pytest.raises(ValueError, match=text):
            make()


def test_a_module_whose_call_is_more_than_its_op_has_no_functional_form():
    weighted = fnn.CrossEntropyLoss(torch.ones(3))
    for module in (fnn.LayerNorm(D, elementwise_affine=False), fnn.ReLU(inplace=True), fnn.Softmax(0), fnn.GLU(0), weighted):
        with pytest.raises(ValueError, match="functional: module must be one whose call is its op"):
            fnn.functional(module)
    assert fnn.functional(fnn.Softmax(-1))[0] is funcops.softmax


def test_the_op_runs(monkeypatch):
    ran = []
    real = fnn.Linear.op
    monkeypatch.setattr(
        fnn.Linear,
        "op",
        real._replace(
            fwd=lambda *a, **k: ran.append("fwd") or real.fwd(*a, **k), bwd=lambda *a, **k: ran.append("bwd") or real.bwd(*a, **k)
        ),
    )
    fnn.Linear(D, D)(torch.randn(2, D)).sum().backward()
    assert ran == ["fwd", "bwd"]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dynamic"), [("eager", False), ("aot_eager", False), ("inductor", None)])
def test_compiles(backend, dynamic):
    model = fnn.Sequential(fnn.RMSNorm(D), fnn.Linear(D, 16), fnn.SwiGLU(), fnn.Linear(8, D), nn.Softplus(), fnn.LayerNorm(D))
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    for rows in (3, 5):
        x = torch.randn(rows, 2, D)
        got = gradients(compiled, x)  # before any eager call
        model.zero_grad()
        want = gradients(model, x)
        model.zero_grad()
        assert_close(got[:2], want[:2], dtype=torch.float32, length=256)
        assert_close(list(got[2].values()), list(want[2].values()), dtype=torch.float32, length=256)


@pytest.mark.slow
def test_a_frozen_part_compiles():
    layer, x = fnn.Linear(D, D), torch.randn(3, D)
    layer.weight.requires_grad_(False)
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert layer.weight.grad is None and torch.equal(layer.bias.grad, torch.full((D,), 3.0))


def test_export_for_inference():
    model = fnn.Sequential(fnn.RMSNorm(D), fnn.Linear(D, 16), fnn.SwiGLU(), fnn.Linear(8, D)).eval()
    x = torch.randn(3, D)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        torch.testing.assert_close(exported.module()(x), model(x))


def test_a_module_that_is_there_twice_and_weights_that_are_shared():
    def made(lib):
        layer, head = lib.Linear(D, D), lib.Linear(D, D)
        head.weight = layer.weight
        return lib.Sequential(layer, lib.Tanh(), layer, head)

    compare_on_a_line(made)


def test_parametrized_weights():
    compare_on_a_line(lambda lib: lib.Sequential(nn.utils.parametrizations.weight_norm(lib.Linear(D, D)), lib.Tanh()))


def compare_on_a_line(make):
    x = torch.linspace(-1, 1, 2 * D, dtype=torch.float64).view(2, D)
    want, got = both(make)
    assert_close(gradients(got, x), gradients(want, x), dtype=torch.float64, length=256)


def test_a_bias_that_is_taken_away_is_gone():
    """The config follows the parameters, too."""
    layer, x = fnn.Linear(3, 2), torch.randn(4, 3)
    layer(x)
    layer.bias = None
    torch.testing.assert_close(layer(x), x @ layer.weight.t())
    layer.bias = torch.nn.Parameter(torch.ones(2))
    torch.testing.assert_close(layer(x), x @ layer.weight.t() + 1)


@pytest.mark.parametrize("change", ["made", "eval", "to"])
def test_a_module_has_its_config_before_its_first_call(change):
    """torch.compile needs it, and cannot make it."""
    modules = [fnn.Linear(4, 4), fnn.GELU(), fnn.Dropout(0.5), fnn.Softmax(-1), fnn.LayerNorm(4), fnn.Embedding(5, 4)]
    for module in modules:
        module = {"made": lambda m: m, "eval": lambda m: m.eval(), "to": lambda m: m.to(torch.bfloat16)}[change](module)
        assert vars(module)["_cfg"] == module.make_cfg(), module


def test_a_sequential_that_is_exported_is_its_operators(monkeypatch):
    """Each kind of fake tensor meets the forward alone, whose operators have gradients; what runs meets a node."""
    net, x = fnn.Sequential(fnn.Linear(4, 4), fnn.GELU()), torch.randn(3, 4)
    assert "_Exported" not in net(x).grad_fn.name()
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert "_Exported" in net(mode.from_tensor(x)).grad_fn.name()


@pytest.mark.parametrize("name", ["a layer", "a sequential"])
def test_autocast_of_another_device_changes_nothing(name):
    layer, x = fnn.Linear(4, 4), torch.randn(3, 4)
    net = layer if name == "a layer" else fnn.Sequential(layer, fnn.GELU())
    want = net(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a build without that device
        autocast = torch.autocast("xpu", dtype=torch.bfloat16)
    autocast._enabled = True
    with autocast:
        assert torch.is_autocast_enabled("xpu")
        got = net(x)
    assert got.dtype is torch.float32 and torch.equal(got, want)
