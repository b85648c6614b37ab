"""Modules with a recipe: parameters stay in high precision; codes of weights are made in every call, or once a step."""

import copy
import pickle

import pytest
import torch
import torch_writes
from torch import nn
from torch.distributed.pipelining import ScheduleZBVZeroBubble

from funcops import StaleResidualError, delayed_wgrad, linear, random
from funcops import nn as fnn
from funcops.adapters import pipelining
from funcops.adapters.graphs import make_graphed_callables
from funcops.adapters.nn.quantized import take_recipe
from funcops.engine.trees import paths
from funcops.library.kernels import quantize as kernels
from funcops.low_precision import (
    MXFP8,
    NVFP4,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    QWeight,
    begin_step,
    end_step,
    quantize_params,
    with_recipe,
)

RECIPES = [Fp8Block(), Fp8Block(keep="input", wgrad="high"), Fp8Current(), MXFP8(), NVFP4(stochastic=False)]
IDS = [f"{type(r).__name__}-{r.keep}" for r in RECIPES]
D = 32


def mlp(recipe):
    torch.manual_seed(0)
    return fnn.Sequential(fnn.RMSNorm(D), fnn.Linear(D, 2 * D, recipe=recipe), fnn.SiLU(), fnn.Linear(2 * D, D, recipe=recipe))


def trained(model, x, autocast=False, store=None):
    """y, and the gradients of parameters and x."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    if store is None:
        y.float().square().sum().backward()
    else:
        with store:
            y.float().square().sum().backward()
        store.run()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_codes_of_weights_give_the_bits_of_quantising_in_every_call(recipe):
    """With and without codes, delayed weight gradients and autocast; the functional interface gives the same bits."""
    model, x = mlp(recipe), torch.randn(4, D)
    for autocast in (False, True):
        want = trained(model, x, autocast)
        assert all(t.dtype is torch.float32 and bool(t.any()) for t in want[2:])
        assert same(want, trained(model, x, autocast, delayed_wgrad()))
        for columns in (True, False):
            paths = fnn.quantize_weights(model, dtype=torch.bfloat16 if autocast else None, columns=columns)
            assert paths == ["1", "3"]
            assert same(want, trained(model, x, autocast)) and same(want, trained(model, x, autocast, delayed_wgrad()))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(model(x), want[0])
        model = mlp(recipe)
    op, cfg, params = fnn.functional(model)
    work = quantize_params(params, cfg, dtype=torch.float32)
    assert isinstance(work["m1"].weight, QWeight) and torch.equal(op.fwd(work, x, cfg)[0], model(x))


def test_codes_are_made_once_for_all_microbatches(monkeypatch):
    made = []
    plain = kernels.quantize_row
    monkeypatch.setattr(kernels, "quantize_row", lambda x, *rest: made.append(tuple(x.shape)) or plain(x, *rest))
    for held in (False, True):
        model = mlp(Fp8Block())
        if held:
            fnn.quantize_weights(model)
        for _ in range(3):
            trained(model, torch.randn(4, D))
        counted = [shape for shape in made if shape in ((D, 2 * D), (2 * D, D))]
        assert len(counted) == (2 if held else 6)
        made.clear()


WRITES = {
    **{
        name: lambda m, write=write: write(list(m.parameters()))
        for name, write in (torch_writes.WRITES | torch_writes.REPLACES).items()
    },
    "a state_dict": lambda m: m.load_state_dict(mlp(Fp8Block()).state_dict()),
    "another parameter": lambda m: setattr(m[1], "weight", nn.Parameter(m[1].weight.detach().clone())),
}


@pytest.mark.parametrize("write", WRITES)
def test_codes_of_a_weight_that_changed_raise(write):
    model, x = mlp(Fp8Block()), torch.randn(4, D)
    fnn.quantize_weights(model)
    trained(model, x)
    WRITES[write](model)
    with pytest.raises(StaleResidualError, match=r"funcops.nn.Linear \d: the weight must be as quantize_weights\(model\) found it"):
        model(x)
    fnn.quantize_weights(model)
    fresh = mlp(Fp8Block())
    fresh.load_state_dict(model.state_dict())
    assert same(trained(model, x), trained(fresh, x))


def test_codes_are_not_in_copies_or_state():
    model, x = mlp(Fp8Block()), torch.randn(4, D)
    want = trained(model, x)
    keys = list(model.state_dict())
    fnn.quantize_weights(model)
    assert list(model.state_dict()) == keys == ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias"]
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            model[1].weight.add_(0.0)  # the copy has a weight of its own
        assert same(want, trained(made, x)) and made[1].recipe == Fp8Block()
        assert "forward" not in vars(made[1])


def test_from_torch_gives_recipes_and_takes_them_back():
    model = nn.Sequential(nn.Linear(D, 48), nn.GELU(), nn.Linear(48, D), nn.Linear(D, 64))
    done = fnn.from_torch(model, recipe=MXFP8(), skip="3")
    left = [(c.path, c.after) for c in done.left]
    assert left == [(p, f"{name}_features must be a multiple of 32 (MXFP8), got 48") for p, name in (("0", "out"), ("2", "in"))]
    assert type(model[0]) is nn.Linear and type(model[3]) is nn.Linear
    fnn.from_torch(model, recipe=Fp8Block(), skip="3")
    fnn.from_torch(model)
    assert [getattr(m, "recipe", None) for m in model] == [Fp8Block(), None, Fp8Block(), None]
    again = fnn.from_torch(model, recipe=Fp8Current(), only="3")
    assert again.already[-1].after == "funcops.nn.Linear (recipe given)" and model[3].recipe == Fp8Current()
    fnn.quantize_weights(model)
    fnn.to_torch(model)
    assert all(type(m) is nn.Linear and not {"recipe", "op", "forward"} & set(vars(m)) for m in (model[0], model[2], model[3]))
    assert torch.equal(model(torch.ones(2, D)), model[3](model[2](model[1](model[0](torch.ones(2, D))))))


def test_mlps_of_hugging_face_are_chains_by_the_recipe_of_all_their_layers():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = modeling.LlamaConfig(hidden_size=D, intermediate_size=64)
    torch.manual_seed(0)
    model, x = modeling.LlamaMLP(config), torch.randn(2, 4, D)
    exact = model(x).detach()
    fnn.from_torch(model, recipe=Fp8Block())
    cfg = model.known_cfg()
    assert cfg == with_recipe(cfg, Fp8Block()) and model(x).grad_fn.name() == "_NodeBackward"
    assert 0.001 < float((model(x).detach() - exact).norm() / exact.norm()) < 0.08
    want = trained(model, x)
    fnn.quantize_weights(model)
    for a, b in zip(want, trained(model, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=0.02 * float(a.abs().max()))
    mixed = modeling.LlamaMLP(config)
    fnn.from_torch(mixed, recipe=Fp8Block(), only="gate_proj")
    fnn.from_torch(mixed)
    y = mixed.down_proj(mixed.act_fn(mixed.gate_proj(x)) * mixed.up_proj(x))
    assert torch.equal(mixed(x), y) and mixed.up_proj.__dict__.get("recipe") is None


BAD = [
    (lambda: fnn.Linear(D, D, recipe="fp8"), TypeError, "funcops.nn.Linear: recipe must be a recipe, such as Fp8Current()"),
    (lambda: fnn.Linear(33, D, recipe=MXFP8()), ValueError, "in_features must be a multiple of 32 (MXFP8), got 33"),
    (
        lambda: fnn.Linear(D, D, recipe=Fp8Delayed()),
        ValueError,
        "recipe must be one without state, such as Fp8Current, which has the same formats (a loop of yours holds scales: begin_",
    ),
    (lambda: fnn.from_torch(nn.Linear(D, D), recipe=Fp8Delayed()), ValueError, "from_torch: recipe must be one without state"),
    (
        lambda: fnn.Linear(D, D, recipe=NVFP4(stochastic=True))(torch.ones(1, D)),
        TypeError,
        "a QWeight with a key, from quantize_params(params, cfg, key=key), or quantize_weights(model, key=key)",
    ),
    (lambda: fnn.quantize_weights(mlp(NVFP4(stochastic=True))), ValueError, "quantize_weights: key must be a random key, for 1, 3"),
    (lambda: fnn.from_torch(nn.LayerNorm(D), recipe=Fp8Block()), ValueError, "from_torch: recipe must be None for a model without"),
    (
        lambda: fnn.quantize_weights(fnn.Linear(D, D)),
        ValueError,
        "quantize_weights: model must be one with layers that have a reci",
    ),
    (lambda: fnn.quantize_weights(3), TypeError, "quantize_weights: model must be"),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD, ids=range(len(BAD)))
def test_bad_recipes_raise(call, error, text):
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_keys_round_the_gradients_of_modules():
    """The same key gives the same bits, another key others; y does not depend on it, and each layer has a key of its own."""
    model, x = mlp(NVFP4(stochastic=True)), torch.randn(4, D)
    found = []
    for seed in (0, 0, 1):
        fnn.quantize_weights(model, key=random.key(seed))
        found.append(trained(model, x))
    assert same(found[0], found[1]) and not any(torch.equal(found[0][i], found[2][i]) for i in (1, 3))
    assert torch.equal(found[0][0], found[2][0])
    keys = [vars(model[i])["forward"].weight.key for i in (1, 3)]
    assert not torch.equal(*keys)
    nearest = mlp(NVFP4(stochastic=False))
    assert torch.equal(nearest(x), found[0][0]) and not torch.equal(trained(nearest, x)[1], found[0][1])


@pytest.mark.parametrize("recipe", [Fp8Delayed(history=4), NVFP4(stochastic=True), Fp8Block()], ids=repr)
def test_a_loop_over_the_functions_of_modules_takes_every_recipe(recipe):
    """The error for `Fp8Delayed` says so."""
    model = mlp(None)
    op, cfg, params = fnn.functional(model)
    cfg, state, x = with_recipe(cfg, recipe), {}, torch.randn(4, D)
    for seed in range(2):
        work, main_grad = begin_step(params, cfg, state, dtype=torch.float32, key=random.key(seed))
        y, residuals = op.fwd(work, x, cfg)
        op.bwd(residuals, 2 * y, cfg, into=main_grad)
        grads, state = end_step(main_grad, cfg, state)
    trained(model, x)
    found = paths(grads)
    for name, p in model.named_parameters():
        assert (found[f"m{name}"] - p.grad).norm() < 0.4 * p.grad.norm(), name
    assert sorted(state) == (["m1.weight", "m3.weight"] if recipe.delayed else [])


def stepped(model, x):
    found = trained(model, x)
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    return found


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_a_graph_quantises_in_every_replay(recipe):
    """So its codes are never stale, with or without codes from `quantize_weights`. A capture raises if codes exist already, and for
    parameters that do not belong to the graph."""
    plain, captured = mlp(recipe), mlp(recipe)
    make_graphed_callables(captured, (torch.randn(4, D, requires_grad=True),))
    for _ in range(3):
        x = torch.randn(4, D)
        assert same(stepped(plain, x), stepped(captured, x))
        fnn.quantize_weights(captured)
    with pytest.raises(StaleResidualError, match=r"funcops.nn.Linear 1: the weight must be .* capture CUDA graphs before"):
        held = mlp(recipe)
        fnn.quantize_weights(held)
        make_graphed_callables(held, (torch.randn(4, D, requires_grad=True),))


@pytest.fixture
def alone(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_stages_of_a_pipeline_read_the_codes_of_a_step(alone, monkeypatch):
    """Two stages by torch's schedule, dw at its W: gradients equal the microbatches' sums, one by one; weights are quantised
    once."""
    made, plain = [], kernels.quantize_row
    for recipe in (Fp8Block(), Fp8Current(), NVFP4(stochastic=False)):
        model, count = nn.Sequential(mlp(recipe), mlp(recipe)), 4
        xs, targets = torch.randn(2, 2 * count, D)
        for x, target in zip(xs.chunk(count), targets.chunk(count), strict=True):
            ((model(x) - target).square().mean() / count).backward()
        want = [p.grad for p in model.parameters()]
        model.zero_grad()
        stages = [pipelining.split_stage(m, i, 2, "cpu") for i, m in enumerate(model)]
        schedule = ScheduleZBVZeroBubble(stages, count, loss_fn=lambda y, t: (y - t).square().mean())
        for _ in range(2):
            model.zero_grad()
            fnn.quantize_weights(model)
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "quantize_row", lambda x, *rest: made.append(tuple(x.shape)) or plain(x, *rest))
                schedule.step(xs, target=targets)
            for p, grad in zip(model.parameters(), want, strict=True):
                torch.testing.assert_close(p.grad, grad, rtol=1e-5, atol=1e-6 * float(grad.abs().max()))
    assert made and not [shape for shape in made if shape in ((D, 2 * D), (2 * D, D))]


@pytest.mark.slow
def test_a_step_with_an_optimiser_compiles_whole():
    """A compiled layer reads no codes, so it cannot read stale ones. The recipe is the one with most to trace."""
    recipe = NVFP4(stochastic=False)
    model, x = mlp(recipe), torch.randn(4, D)
    want = trained(copy.deepcopy(model), x)
    fnn.quantize_weights(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for t, w in zip(trained(compiled, x), want, strict=True):
        torch.testing.assert_close(t, w, rtol=1e-5, atol=1e-5 * float(w.abs().max()))
    with torch.no_grad():
        model[1].weight.mul_(2.0)
    fresh = mlp(recipe)
    fresh.load_state_dict(model.state_dict())
    torch.testing.assert_close(compiled(x), fresh(x))


def test_a_recipe_that_does_not_fit_leaves_the_module_as_it_was():
    layer = fnn.Linear(20, 3)
    before, x = dict(vars(layer)), torch.randn(2, 20)
    want = layer(x)
    before = dict(vars(layer))
    with pytest.raises(ValueError, match="in_features"):
        take_recipe("test", layer, MXFP8())
    assert vars(layer) == before and layer.op is linear and torch.equal(layer(x), want)


def test_an_mlp_has_its_config_before_its_first_call():
    """With its recipe, as a compiler cannot make one."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaMLP

    model = LlamaMLP(transformers.LlamaConfig(hidden_size=32, intermediate_size=64))
    fnn.from_torch(model, recipe=Fp8Current())
    key, cfg = vars(model)["_made"]
    assert key[2] == Fp8Current() and cfg == model.known_cfg() and cfg.low_recipe is None
    assert [step.cfg.low_recipe for step in cfg.steps[0].cfg.branches] == [Fp8Current()] * 2


def test_a_failing_from_torch_takes_recipes_back():
    """From modules that ran on funcops before, too."""
    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, 64))
    fnn.from_torch(model, recipe=Fp8Block())
    before = [dict(vars(module)) for module in model]
    with pytest.raises(ValueError, match="from_torch: policy must be left out for a model without a known MLP"):
        fnn.from_torch(model, policy="minimal", recipe=Fp8Current())
    assert [module.recipe for module in (model[0], model[2])] == [Fp8Block()] * 2
    assert [vars(module).keys() for module in model] == [own.keys() for own in before]


class OfTheirOwn(torch.Tensor):
    pass


@pytest.mark.parametrize("weight", [torch.ones(32, 32).as_subclass(OfTheirOwn), None], ids=["a subclass", "none"])
def test_codes_of_what_is_no_plain_weight_are_refused(weight):
    model = fnn.Sequential(fnn.Linear(32, 32, recipe=Fp8Block()))
    model[0].weight = None if weight is None else nn.Parameter(weight)
    with pytest.raises(TypeError, match="quantize_weights: 0.weight must be a parameter that is a plain tensor, got"):
        fnn.quantize_weights(model)


def test_a_layer_that_a_recipe_does_not_fit_is_reported_with_the_reason():
    model = fnn.Sequential(fnn.Linear(32, 16), fnn.Linear(17, 16))
    said = fnn.from_torch(model, recipe=NVFP4())
    assert [one.after for one in said.already if one.path] == [
        "funcops.nn.Linear (recipe given)",
        "funcops.nn.Linear without the recipe: in_features must be a multiple of 16 (NVFP4), got 17",
    ]
    assert [layer.recipe for layer in model] == [NVFP4(), None]
