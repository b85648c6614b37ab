"""`with_lora` of an op of an unmodified module: its linear layers with adapters, by path."""

import pytest
import torch
import torch.nn.functional as F
from products import Products
from torch import nn

from funcops import Needs, TorchConfig, backend, op_from_module, op_from_torch, random, report
from funcops.lora import lora_init, with_lora
from funcops.low_precision import Fp8Current

CFG = TorchConfig()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)

    def forward(self, ids, adapters=None):
        x = self.norm(self.embed(ids))
        return self.adapted("down", F.silu(self.adapted("up", x, adapters)), adapters)

    def adapted(self, name, x, adapters):
        y = getattr(self, name)(x)
        if adapters is None or f"{name}.lora.a" not in adapters:
            return y
        return y + 2.0 * F.linear(F.linear(x, adapters[f"{name}.lora.a"]), adapters[f"{name}.lora.b"])


def made(targets=("*",), frozen=True, recipe=None):
    model, ids = Model(), torch.arange(10).view(2, 5)
    if frozen:
        model.requires_grad_(False)
    op, params = op_from_module(model, ids, recipe=recipe)
    op = with_lora(op, 4, targets, alpha=8.0)
    params = lora_init(params, op, key=random.key(0))
    return model, ids, op, params


@pytest.mark.parametrize("choice", ["torch", "triton"])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("targets", [("*",), ("up",)])
def test_results_and_gradients_by_path(targets, frozen, choice):
    with backend(choice):
        model, ids, op, params = made(targets, frozen)
        new = [name for name in params if "lora" in name]
        assert new == [f"{path}.lora.{leaf}" for path in ("up", "down") if targets != ("up",) or path == "up" for leaf in "ab"]
        torch.testing.assert_close(op.fwd(params, ids, CFG)[0], model(ids))
        params |= {name: torch.randn_like(params[name]) / 4 for name in new if name.endswith("b")}
        needs = Needs(x=False, params=True)
        with Products() as forward:
            y, residuals = op.fwd(params, ids, CFG, needs=needs)
        dy = torch.randn_like(y)
        dx, pending = op.dgrad(residuals, dy, CFG)
        dparams = op.wgrad(pending, CFG)
    assert dx is None and (choice == "triton" or forward.count == 2 + len(new))
    own = {name: params[name].clone().requires_grad_() for name in new}
    want = model(ids, own)
    trained = own if frozen else dict(model.named_parameters()) | own
    grads = dict(zip(trained, torch.autograd.grad(want, list(trained.values()), dy), strict=True))
    torch.testing.assert_close(y, want.detach())
    assert {name for name, g in dparams.items() if g is not None} == set(trained)
    torch.testing.assert_close({name: dparams[name] for name in trained}, grads)


def test_no_product_of_the_weights_is_kept_or_made():
    _, ids, op, params = made()
    _, residuals = op.fwd(params, ids, CFG, needs=Needs(x=False, params=True))
    assert report(residuals, params, ids).kept_bytes <= 4 * 10 * (16 + 32 + 32 + 4 + 4 + 16)


def test_adapters_beside_layers_in_low_precision():
    _, ids, op, params = made(recipe=Fp8Current())
    y, residuals = op.fwd(params, ids, CFG, needs=Needs(x=False, params=True))
    dparams, _ = op.bwd(residuals, torch.ones_like(y), CFG)
    plain, same = op_from_module(Model(), ids, recipe=Fp8Current())
    assert torch.equal(y, plain.fwd(same, ids, CFG)[0]) and dparams["up.lora.b"].any() and dparams["up.weight"] is None


def test_one_after_the_other_and_other_orders_of_params():
    _, ids, op, params = made(("up",))
    twice = with_lora(op, 2, ("down",))
    more = lora_init(params, twice, key=random.key(1))
    assert more["up.lora.a"] is params["up.lora.a"] and more["down.lora.a"].shape == (2, 32)
    y = twice.fwd(more, ids, CFG)[0]
    assert torch.equal(y, twice.fwd(dict(reversed(more.items())), ids, CFG)[0])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda op: with_lora(op, 4, ("head",)), "with_lora: only must be globs over up, down, got 'head'"),
        (lambda op: with_lora(op, 4, ()), "with_lora: targets must be at least one glob"),
        (lambda op: with_lora(op, 0, ("up",)), "with_lora: rank must be"),
        (lambda op: with_lora(op, 4, ("up",), dropout=0.1), "with_lora: dropout must be 0 for an op of a module"),
        (
            lambda op: with_lora(with_lora(op, 4, ("up",)), 4, ("*",)),
            "targets must be globs over layers without an adapter, got up",
        ),
        (
            lambda op: lora_init({}, with_lora(op, 4, ("up",)), key=random.key(0)),
            "lora_init: params must be the module's parameters",
        ),
    ],
)
def test_wrong_arguments_raise(call, text):
    op, _ = op_from_module(Model(), torch.arange(10).view(2, 5))
    with pytest.raises(ValueError, match=text):
        call(op)


def test_ops_that_no_module_made_have_no_layers():
    op = op_from_torch(lambda params, x, cfg: x)
    with pytest.raises(TypeError, match="cfg must be a config, or an op that op_from_module made"):
        with_lora(op, 4, ("up",))
    with pytest.raises(TypeError, match="cfg must be a config, or an op that with_lora made"):
        lora_init({}, op, key=random.key(0))
