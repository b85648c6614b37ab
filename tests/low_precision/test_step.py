"""`begin_step` and `end_step`: one loop for bfloat16 and for every recipe."""

import functools
import re

import pytest
import torch
from low_precision_model import RECIPE, STATELESS, config, given, mlp

from funcops import ChainConfig, LinearConfig, Needs, Step, WithExtras, chain, dist, donate, linear, random
from funcops.adapters.graphs import graphed
from funcops.engine.trees import cast, paths, stands_for_one, tensors, tree_map_tensors
from funcops.library.ops.experts import ExpertsConfig
from funcops.library.ops.route import RouteConfig
from funcops.low_precision import (
    NVFP4,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    Scaled,
    begin_step,
    end_step,
    gradients_like,
    quantize_params,
    recipe_init,
    recipe_update,
    split_amaxes,
    with_recipe,
)
from funcops.models import MoEConfig, moe
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits

STOCHASTIC = NVFP4(stochastic=True)
TIES = (("last.weight", "first.weight"), ("last.bias", "first.bias"))


def run_step(params, state, xs, dys, cfg, key=None, dtype=torch.float32):
    """The loop: nothing in it depends on the recipe."""
    work, main_grad = begin_step(params, cfg, state, dtype=dtype, key=key)
    for x, dy in zip(xs, dys, strict=True):
        _, residuals = chain.fwd(work, x.to(dtype), cfg)
        chain.bwd(donate(residuals), dy.to(dtype), cfg, into=main_grad)
    return end_step(main_grad, cfg, state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recipe", [None, *STATELESS, STOCHASTIC, RECIPE], ids=str)
def test_the_one_loop_gives_the_bits_of_the_parts(recipe, dtype):
    """Three steps: the gradients and state of a cast or `quantize_params`, `gradients_like`, `split_amaxes`, `recipe_update`."""
    cfg = mlp() if recipe is None else with_recipe(mlp(), recipe)
    params, xs, dys = given(cfg, dtype=torch.promote_types(dtype, torch.float32))
    state, keys = {}, random.split(random.key(3), 3)
    scales = None if recipe is not RECIPE else {}
    for key in keys:
        grads, state = run_step(params, state, xs, dys, cfg, key, dtype)
        if recipe is None:
            work = cast(params, dtype)
        else:
            work = quantize_params(params, cfg, scales, dtype=dtype, key=key if recipe.stochastic else None)
        sums = gradients_like(work, torch.promote_types(dtype, torch.float32))
        for x, dy in zip(xs, dys, strict=True):
            chain.bwd(chain.fwd(work, x.to(dtype), cfg)[1], dy.to(dtype), cfg, into=sums)
        wanted, amaxes = split_amaxes(sums)
        if amaxes:
            scales = recipe_update(scales, amaxes, RECIPE) if scales else recipe_init(cfg, params, amaxes=amaxes)
        same_bits((grads, state), (wanted, scales or {}), "step")
        assert {t.dtype for t in paths(grads).values() if t is not None} == {torch.promote_types(dtype, torch.float32)}
    assert set(state) == ({"up.weight", "down.weight"} if recipe is RECIPE else set())


MODELS = {"layers": config(), "stacked": config(stacked=True), "tied": config(ties=TIES)}


@pytest.mark.parametrize("keep", ["row", "col"])
@pytest.mark.parametrize("model", MODELS)
def test_a_first_step_scales_by_what_it_measures(model, keep):
    """It has the bits of `Fp8Current`, and its state is made from amaxes that no bad scale has changed: a model whose numbers lie
    far below the least of e5m2 at a scale of 1 learns in it, too."""
    plain = MODELS[model]
    low, current = with_recipe(plain, Fp8Delayed(history=4, keep=keep)), with_recipe(plain, Fp8Current(keep=keep))
    params, xs, dys = given(plain)
    dys = [dy * 1e-7 for dy in dys]
    grads, state = run_step(params, {}, xs, dys, low)
    wanted, none = run_step(params, {}, xs, dys, current)
    same_bits(grads, wanted, "gradients")
    assert none == {} and state.keys() == recipe_init(low, params).keys()
    assert all((s.scale > 1).all() and (s.scale[..., 2] > 1e6).all() and (s.history[..., 1:, :] == 0).all() for s in state.values())
    again, _ = run_step(params, state, xs[-1:], dys[-1:], low)  # the largest microbatch: its amaxes are in the state
    one, _ = run_step(params, {}, xs[-1:], dys[-1:], low)
    for path, t in paths(one).items():
        if t is not None:
            torch.testing.assert_close(paths(again)[path], t, rtol=0.2, atol=0.2 * float(t.abs().max()), msg=path)


def test_a_first_step_of_experts_scales_each_by_what_it_measures():
    mixture = moe(MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 32, 48, bias=True)))
    params, x = chain.init(mixture, key=random.key(0), dtype=torch.float32), random.normal(random.key(3), (3, 10, 32)).bfloat16()

    def step(recipe):
        cfg = with_recipe(mixture, recipe, skip=("*gate",))
        work, main_grad = begin_step(params, cfg, {})
        y, residuals = chain.fwd(work, x, cfg)
        chain.bwd(residuals, WithExtras(x, dict.fromkeys(y.extras)), cfg, into=main_grad)
        return y.main, *end_step(main_grad, cfg, {})

    y, grads, state = step(RECIPE)
    wanted, wanted_grads, _ = step(Fp8Current())
    same_bits((y, grads), (wanted, wanted_grads), "y and gradients")
    assert state["experts.up.weight"].scale.shape == (4, 3) and (state["experts.up.weight"].scale != 1).all()


def test_ranks_begin_with_the_scales_of_one_process():
    """Each rank measures a part: the first step has the codes, gradients and state of one process. One message joins the
    amaxes, and none is sent without a recipe that has state."""
    size, calls = 256, []
    plain = ChainConfig(steps=tuple(Step(name, linear, LinearConfig(size, size, bias=False)) for name in ("up", "down")))
    params = chain.init(plain, key=random.key(1), dtype=torch.float64)
    x, dy = (random.normal(random.key(seed), (128, size)).double() for seed in (2, 3))
    for t in (x, dy, params["up"].weight, params["down"].weight):
        t[-1, -1] = 9.0  # in the last rank's part
    wanted, state = run_step(params, {}, [x], [dy], with_recipe(plain, RECIPE), dtype=torch.float64)

    def run(mesh):
        tp = mesh["tp"]
        own = with_recipe(dist.parallel(plain, {"up": "column", "down": "row"}, mesh), RECIPE)
        specs = dist.specs_of(chain, own)
        work, main_grad = begin_step(dist.shard(params, specs, mesh), own, {}, dtype=torch.float64)
        _, residuals = chain.fwd(work, x.chunk(2)[tp.rank], own)
        chain.bwd(residuals, dy.chunk(2)[tp.rank], own, into=main_grad)

        def over_ranks(amaxes):
            calls.append(sorted(amaxes))
            return dist.amaxes_over(amaxes, tp)

        grads, after = end_step(main_grad, own, {}, over_ranks=over_ranks)
        return dist.unshard(grads, specs, mesh), after

    for grads, after in run_ranks({"tp": 2}, run):
        for path, t in paths(grads).items():
            if t is not None:
                torch.testing.assert_close(t, paths(wanted)[path], rtol=1e-12, atol=1e-10, msg=path)
        torch.testing.assert_close(*({k: s.scale for k, s in one.items()} for one in (after, state)), rtol=1e-6, atol=0)
    assert calls == [["down.weight", "up.weight"]] * 2
    for recipe in (None, *STATELESS):
        cfg = mlp() if recipe is None else with_recipe(mlp(), recipe)
        grads = gradients_like(begin_step(given(cfg)[0], cfg, {})[0])
        assert end_step(grads, cfg, {}, over_ranks=calls.append)[1] == {} and len(calls) == 2


@pytest.mark.slow
def test_the_first_step_and_the_later_ones_compile_as_one_graph_each():
    cfg = with_recipe(mlp(), RECIPE)
    params, xs, dys = given(cfg)
    step = torch.compile(run_step, fullgraph=True, dynamic=False, backend="aot_eager")
    state = {}
    for _ in range(2):
        (_, want), (_, found) = (one(params, state, xs[:2], dys[:2], cfg) for one in (run_step, step))
        state = want
        for path, t in paths(want).items():
            torch.testing.assert_close(paths(found)[path], t, rtol=0.05, atol=0, msg=path)


def test_later_steps_are_recorded_as_a_graph():
    """The state is one of its buffers, from an eager first step on."""
    cfg = with_recipe(mlp(), RECIPE)
    params, xs, dys = given(cfg)
    _, state = run_step(params, {}, xs[:2], dys[:2], cfg)
    want_state = tree_map_tensors(torch.clone, state)

    def step(params, state, *batch):
        grads, new = run_step(params, state, batch[:2], batch[2:], cfg)
        for old, now in zip(tensors(state), tensors(new), strict=True):
            old.copy_(now)
        return grads, state

    captured = graphed(step, params, state, *xs[:2], *dys[:2], inputs={"1": "donated"})
    for i in range(2):
        batch = [(i + 1) * t for t in (*xs[:2], *dys[:2])]
        want, want_state = run_step(params, want_state, batch[:2], batch[2:], cfg)
        found, state = captured(params, state, *batch)
        same_bits((found, state), (want, want_state), f"replay {i}")


def test_recipes_with_other_histories_are_updated_each_by_its_own():
    recipes = {"up": Fp8Delayed(history=2, margin=1), "down": Fp8Delayed(history=3, algorithm="most_recent")}
    cfg = mlp()
    for name, recipe in recipes.items():
        cfg = with_recipe(cfg, recipe, only=(name,))
    params, xs, dys = given(cfg)
    state = {}
    for scale in (4.0, 1.0):
        before = state
        grads, state = run_step(params, state, [scale * x for x in xs], dys, cfg)
    assert {path: s.history.shape[0] for path, s in state.items()} == {"up.weight": 2, "down.weight": 3}
    for name, recipe in recipes.items():
        path = f"{name}.weight"
        wanted = recipe_update({path: before[path]}, {path: state[path].history[0]}, recipe)
        same_bits(wanted[path], state[path], path)


def test_the_state_is_not_written_to_and_needs_leave_accumulators_out():
    cfg = with_recipe(mlp(), RECIPE)
    params, xs, dys = given(cfg)
    _, state = run_step(params, {}, xs, dys, cfg)
    held = {path: t.clone() for path, t in paths(state).items()}
    grads, after = run_step(params, state, [2 * x for x in xs], dys, cfg)
    same_bits(paths(state), held, "state")
    assert not torch.equal(after["up.weight"].scale, state["up.weight"].scale)
    work, main_grad = begin_step(params, with_recipe(mlp(), Fp8Block()), {}, needs=Needs(params=("up.weight",)))
    assert {path for path, t in paths(main_grad).items() if t is not None} == {"up.weight"}
    one = paths(begin_step(params, cfg, state)[0], is_leaf=stands_for_one)["up.weight"]
    assert isinstance(one, Scaled) and one.scale.shape == (3,)


def test_errors_name_what_is_missing():
    cfg, stochastic = with_recipe(mlp(), RECIPE), with_recipe(mlp(), STOCHASTIC)
    params, xs, dys = given(cfg)
    grads, state = run_step(params, {}, xs, dys, cfg)
    with pytest.raises(ValueError, match=r"begin_step: key must be a random key, for (up|down)\.weight"):
        begin_step(params, stochastic, {})
    with pytest.raises(TypeError, match="begin_step: state must be"):
        begin_step(params, cfg, None)
    for fn in (functools.partial(begin_step, params), functools.partial(end_step, begin_step(params, cfg, state)[1])):
        with pytest.raises(ValueError, match=r"(begin|end)_step: state must be one with down\.weight, got one of up\.weight"):
            fn(cfg, {"up.weight": state["up.weight"]})
        with pytest.raises(ValueError, match=r"(begin|end)_step: state must be of weights among"):
            fn(cfg, {**state, "other.weight": state["up.weight"]})
    wanted = "end_step: main_grad must be with amaxes of every weight with Fp8Delayed"
    for known in ({}, state):
        with pytest.raises(ValueError, match=re.escape(wanted)):
            end_step(grads, cfg, known)  # split already
    with pytest.raises(ValueError, match=r"end_step: amaxes must be of every weight"):
        end_step(begin_step(params, cfg, state)[1], cfg, state, over_ranks=lambda amaxes: dict(list(amaxes.items())[:1]))
