"""`op_from_module(recipe=)`: linear products of an unmodified module in low precision, and what a recipe does to each."""

import copy

import pytest
import tiny_models
import torch
from products import Products
from torch import nn

from funcops import (
    ActivationConfig,
    ChainConfig,
    LinearConfig,
    LinearParams,
    Needs,
    Step,
    TorchConfig,
    activation,
    backend,
    linear,
    op_from_module,
    op_from_torch,
    quantization_report,
    report,
)
from funcops import nn as fnn
from funcops.low_precision import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed

CFG = TorchConfig()


def mlp(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32, bias=False), nn.Linear(32, 7)).to(dtype)


RECIPES = [Fp8Current(), Fp8Block(), Fp8Block(keep="input", wgrad="high"), MXFP8(), NVFP4(stochastic=False)]


@pytest.mark.turns("recipe", "dtype", "choice", every=10)
@pytest.mark.parametrize("choice", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{type(recipe).__name__} {recipe.keep}")
def test_the_bits_of_layers_with_the_recipe_and_no_more_bytes(recipe, dtype, choice):
    model, x = mlp(dtype), torch.randn(2, 5, 32, dtype=dtype)
    swapped, given = copy.deepcopy(model), x.clone().requires_grad_()
    with backend(choice):
        op, params = op_from_module(model, x, recipe=recipe)
        y, residuals = op.fwd(params, x, CFG)
        dy = torch.randn_like(y)
        dx, pending = op.dgrad(residuals, dy, CFG)
        dparams = op.wgrad(pending, CFG)
        fnn.from_torch(swapped, recipe=recipe, only=nn.Linear)
        want = swapped(given)
        grads = torch.autograd.grad(want, [given, *swapped.parameters()], dy)
        theirs = fnn.kept_bytes(swapped, x)
    assert torch.equal(y, want) and all(map(torch.equal, (dx, *dparams.values()), grads))
    assert report(residuals, params, x).kept_bytes <= theirs
    assert not torch.equal(y, model(x))


def test_layers_that_are_skipped_or_refused_have_the_modules_bits():
    model, x = mlp(), torch.randn(6, 32)
    op, params = op_from_module(model, x, recipe=Fp8Block(), skip=("2", "3"))
    swapped = copy.deepcopy(model)
    fnn.from_torch(swapped[0], recipe=Fp8Block())
    assert torch.equal(op.fwd(params, x, CFG)[0], swapped(x))
    model[2] = nn.Linear(64, 33)
    model[3] = nn.Identity()
    op, params = op_from_module(model, x, recipe=MXFP8())  # its blocks do not divide 33
    swapped = copy.deepcopy(model)
    fnn.from_torch(swapped[0], recipe=MXFP8())
    assert torch.equal(op.fwd(params, x, CFG)[0], swapped(x))


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, dy):
        return dy


class Straight(nn.Module):
    def forward(self, x):
        return Function.apply(x)


@pytest.mark.parametrize(
    ("model", "recipe", "skip", "text"),
    [
        (mlp(), Fp8Delayed(), (), r"op_from_module: recipe must be one without state, .* got Fp8Delayed"),
        (mlp(), NVFP4(), (), r"op_from_module: recipe must be one that rounds to nearest \(stochastic=False\)"),
        (mlp(), Fp8Block(), ("head",), r"Sequential_fwd: skip must be globs over 0, 2, 3"),
        (mlp(), Fp8Block(), ("*",), r"recipe must be for a module with linear layers that take it, got products 0, 2, 3"),
        (mlp(), None, ("0",), r"op_from_module: skip must be \(\) without a recipe"),
        (nn.Sequential(nn.Linear(32, 33)), MXFP8(), (), r"recipe must be for a module .*, got 0: QLinearConfig: out_features"),
        (nn.Sequential(nn.LayerNorm(32)), Fp8Block(), (), r"recipe must be for a module with linear layers that take it"),
        (nn.Sequential(nn.Linear(32, 32), Straight()), Fp8Block(), (), r"recipe must be for a module whose backward is autograd's"),
    ],
)
def test_what_a_recipe_cannot_serve_is_refused(model, recipe, skip, text):
    with pytest.raises(ValueError, match=text):
        op_from_module(model, torch.randn(3, 32), recipe=recipe, skip=skip)


@pytest.mark.slow
def test_a_whole_model_and_its_equal_layers():
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=64)
    model = tiny_models.tiny("Llama", **sizes)
    ids = torch.randint(1, 64, (1, 8))
    batch = dict(input_ids=ids, labels=ids, use_cache=False)
    op, params = op_from_module(model, batch, output=lambda out: out.loss, recipe=Fp8Current(), skip=("lm_head",))
    loss, residuals = op.fwd(params, batch, CFG, needs=Needs(x=False, params=True))
    dparams, _ = op.bwd(residuals, torch.ones(()), CFG)
    swapped = copy.deepcopy(model)
    fnn.from_torch(swapped, recipe=Fp8Current(), only=nn.Linear, skip="lm_head")
    want = swapped(**batch).loss
    want.backward()
    torch.testing.assert_close(loss, want.detach())
    for name, p in swapped.named_parameters():
        torch.testing.assert_close(dparams[name], p.grad)
    found = quantization_report(params, batch, op, Fp8Current())
    inside = [f"model.layers.{i}.{name}" for i in range(2) for name in NAMES]
    assert [row.path for row in found.rows] == [*inside, "lm_head"]


NAMES = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 7, bias=False)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def test_a_report_of_a_module_is_the_report_of_the_same_config():
    torch.manual_seed(0)
    model, x, dy = Mlp(), torch.randn(6, 32), torch.randn(6, 7)
    op, params = op_from_module(model, x, recipe=Fp8Block())
    steps = [Step("up", linear, LinearConfig(32, 64)), Step("act", activation, ActivationConfig("gelu"))]
    cfg = ChainConfig(steps=(*steps, Step("down", linear, LinearConfig(64, 7, bias=False))))
    own = {
        "up": LinearParams(params["up.weight"], params["up.bias"]),
        "act": None,
        "down": LinearParams(params["down.weight"], None),
    }
    for recipe in (Fp8Block(), NVFP4()):
        want = quantization_report(own, x, cfg, recipe, dy=dy)
        found = quantization_report(params, x, op, recipe, dy=dy)
        assert [row.path for row in found.rows] == ["up", "down"] == [row.path for row in want.rows]
        for ours, theirs in zip(found.rows, want.rows, strict=True):
            assert ours.shape == theirs.shape and ours.operands.keys() == theirs.operands.keys()
            assert [ours.y, ours.dx, ours.dw] == pytest.approx([theirs.y, theirs.dx, theirs.dw], rel=1e-2)
    with pytest.raises(ValueError, match="total must be False for an op of a module"):
        quantization_report(params, x, op, Fp8Block(), total=True)
    with pytest.raises(TypeError, match="cfg must be a config, or an op that op_from_module made"):
        quantization_report(None, x, op_from_torch(lambda params, x, cfg: x), Fp8Block())


@pytest.mark.slow
def test_adapters_of_peft_beside_layers_in_low_precision():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model, x, skip = peft.get_peft_model(mlp(), config), torch.randn(6, 32), ("*lora_*", "*.3")
    op, params = op_from_module(model, x, recipe=Fp8Current(), skip=skip)
    with Products() as forward:
        y, residuals = op.fwd(params, x, CFG, needs=Needs(x=False, params=True))
    dparams, _ = op.bwd(residuals, torch.ones_like(y), CFG)
    swapped = copy.deepcopy(model)
    fnn.from_torch(swapped, recipe=Fp8Current(), only="*.base_layer")
    want = swapped(x)
    want.sum().backward()
    assert torch.equal(y, want) and forward.count == 7, "x, a and b of two adapters are never one weight"
    for name, p in swapped.named_parameters():
        assert (dparams[name] is None) == (p.grad is None) == ("lora" not in name), name
        assert p.grad is None or torch.equal(dparams[name], p.grad)
    rows = quantization_report(params, x, op, Fp8Current()).rows
    layers = [f"{i}.{name}" for i in (0, 2) for name in ("base_layer", "lora_A.default", "lora_B.default")]
    assert [row.path.rpartition("model.")[2] for row in rows] == [*layers, "3"]
