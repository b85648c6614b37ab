"""Mixtures of experts in low precision: `with_recipe` and the working tree, over whole models."""

import re

import pytest
import torch

from funcops import ChainConfig, GroupedLinearConfig, RepeatConfig, Step, WithExtras, chain, experts, random, remat, repeat
from funcops.engine.contract.walk import steps
from funcops.engine.trees import paths, structure
from funcops.library.ops.experts import ExpertsConfig
from funcops.library.ops.grouped_linear import grouped_linear
from funcops.library.ops.route import RouteConfig
from funcops.low_precision import (
    NVFP4,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    dense,
    gradients_like,
    quantize_params,
    recipe_init,
    recipe_update,
    split_amaxes,
    with_keys,
    with_recipe,
)
from funcops.models import MoEConfig, moe

E, H, HIDDEN = 4, 32, 48
MIXTURE = moe(MoEConfig(route=RouteConfig(E, 2), experts=ExpertsConfig(E, H, HIDDEN, bias=True)))
LAYERS = RepeatConfig(chain, ChainConfig(steps=MIXTURE.steps, outputs=MIXTURE.outputs), 2, stacked=True)
ROUTER = ("*gate",)


def step(op, params, cfg, recipe, state=None, key=None):
    """y, gradients, amaxes."""
    work = quantize_params(params, cfg, state, key=key)
    x = random.normal(random.key(3), (3, 10, H)).bfloat16()
    y, residuals = op.fwd(work, x, cfg)
    into = gradients_like(work)
    op.bwd(residuals, WithExtras(x, dict.fromkeys(y.extras)), cfg, into=into)
    return y.main, *split_amaxes(into)


@pytest.mark.parametrize("recipe", [Fp8Block(), Fp8Current(keep="input")], ids=str)
def test_experts_in_low_precision_have_the_params_of_experts(recipe):
    low, params = with_recipe(MIXTURE, recipe, skip=ROUTER), chain.init(MIXTURE, key=random.key(0), dtype=torch.float32)
    assert structure(chain.init(low, key=random.key(0))) == structure(params)
    y, grads, amaxes = step(chain, params, low, recipe)
    exact, exact_grads, _ = step(chain, params, MIXTURE, recipe)
    assert not amaxes and structure(grads) == structure(params) and grads["experts"].up.weight.shape == (E, 2 * HIDDEN, H)
    found, wanted = paths(grads), paths(exact_grads)
    for a, b in [(y, exact), *[(found[path], wanted[path]) for path in found if "experts" in path]]:
        assert (a.float() - b.float()).norm() < 0.1 * b.float().norm()
    assert not torch.equal(y, exact) and torch.equal(found["experts.down.bias"], wanted["experts.down.bias"])  # dy as it is


@pytest.mark.parametrize(
    ("held", "dtype", "wanted"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float32),
        (torch.float64, torch.bfloat16, torch.float32),
        (torch.float64, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float32),
    ],
)
def test_a_routers_bias_is_as_wide_as_it_may_be_in_the_working_tree(held, dtype, wanted):
    """Steps of 0.002 are lost in bfloat16 beside 1, and so is the choice."""
    mixture = moe(MoEConfig(route=RouteConfig(E, 2, score="sigmoid", bias=True), experts=ExpertsConfig(E, H, HIDDEN)))
    for cfg in (mixture, with_recipe(mixture, Fp8Block(), skip=ROUTER)):
        params = chain.init(cfg, key=random.key(0), dtype=held)
        params["route"].bias.copy_(1 + 0.002 * torch.arange(E))
        work = quantize_params(params, cfg, dtype=dtype)
        bias, like = work["route"].bias, params["route"].bias
        assert bias.dtype is wanted and torch.equal(bias, like.to(wanted)) and (held is not wanted or bias is like)
        x = random.normal(random.key(3), (10, H)).to(dtype)
        chain.fwd(work, x, cfg)


def low_steps(cfg):
    return [part.path for part in steps(cfg) if part.cfg.low_recipe is not None]


def test_globs_name_experts_or_a_layer_of_them():
    whole = with_recipe(MIXTURE, Fp8Block(), only=("experts",))
    assert low_steps(whole) == ["experts.up", "experts.down"]
    part = with_recipe(MIXTURE, Fp8Block(), only=("*.down",))
    assert low_steps(part) == ["experts.down"]
    assert with_recipe(MIXTURE, Fp8Block(), skip=("experts",)).steps[-1] is MIXTURE.steps[-1]
    with pytest.raises(
        ValueError, match="with_recipe: only must be globs over gate, experts, experts.up, experts.down, got 'route'"
    ):
        with_recipe(MIXTURE, Fp8Block(), only=("route",))
    blocks = ChainConfig(steps=(Step("blocks", repeat, LAYERS),), outputs=MIXTURE.outputs)
    for cfg, glob, where, shared in (
        (blocks, "blocks.1.experts.down", " blocks", "blocks.*.experts.down"),
        (blocks, "blocks.[01].*", " blocks", "blocks.*.*"),
        (LAYERS, "1.experts", "", "*.experts"),
    ):
        message = f"skip must be of all layers of the repeat{where}, which share one config, as '{shared}', got '{glob}'"
        with pytest.raises(ValueError, match=re.escape(message)):
            with_recipe(cfg, Fp8Block(), skip=(glob,))
    for glob in ("blocks.1.expert", "block.1.experts.down", "1"):
        with pytest.raises(ValueError, match="skip must be globs over blocks"):
            with_recipe(blocks, Fp8Block(), skip=(glob,))
    with pytest.raises(ValueError, match="up: with_recipe: cfg.stacked must be True"):
        apart = ChainConfig(steps=(Step("up", grouped_linear, GroupedLinearConfig(2, 4, 3, stacked=False)),))
        with_recipe(apart, Fp8Block())


def test_experts_that_are_computed_again_are_so_in_low_precision():
    again = ChainConfig(
        steps=tuple(s.with_op(remat(s.op), s.cfg) if s.op is experts else s for s in MIXTURE.steps), outputs=MIXTURE.outputs
    )
    params = chain.init(MIXTURE, key=random.key(0), dtype=torch.float32)
    found = [step(chain, params, with_recipe(cfg, Fp8Block()), Fp8Block()) for cfg in (MIXTURE, again)]
    assert all(torch.equal(a, b) for a, b in zip(*[paths(one[:2]).values() for one in found], strict=True) if a is not None)


def test_delayed_scales_of_each_layer_and_expert():
    recipe = Fp8Delayed(history=3)
    low = with_recipe(LAYERS, recipe, skip=ROUTER)
    params = repeat.init(low, key=random.key(0), dtype=torch.float32)
    state = recipe_init(low, params)
    assert {path: tuple(s.history.shape) for path, s in state.items()} == {
        f"experts.{name}.weight": (2, E, 3, 3) for name in ("up", "down")
    }
    _, grads, amaxes = step(repeat, params, low, recipe, state)
    state = recipe_update(state, amaxes, recipe)
    w = params["experts"].up.weight.bfloat16().float()
    assert torch.equal(state["experts.up.weight"].scale[..., 1], 448.0 / w.abs().amax((-2, -1)))
    assert structure(grads) == structure(params)


def test_each_expert_of_each_layer_rounds_by_a_key_of_its_own():
    recipe = NVFP4(stochastic=True, emulate=True)
    low = with_recipe(LAYERS, recipe, skip=ROUTER)
    params = repeat.init(low, key=random.key(0), dtype=torch.float32)
    work = quantize_params(params, low, key=random.key(1))
    keys = work["experts"].up.weight.key
    assert keys.shape == (2, E, 2) and len({tuple(k.tolist()) for k in keys.reshape(-1, 2)}) == 2 * E
    weights = params["experts"].up.weight
    assert work["experts"].up.weight.shape == dense(work)["experts"].up.weight.shape == weights.shape
    assert not torch.equal(with_keys(work, low, random.key(2))["experts"].up.weight.key, keys)
    assert step(repeat, params, low, recipe, key=random.key(1))[0].isfinite().all()
