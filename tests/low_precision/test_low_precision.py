"""Low precision in a training step: the working tree is made once, and delayed scaling's state is the same however the step is
run."""

import math

import pytest
import torch
from low_precision_model import COUNT, RECIPE, STATELESS, begun, config, given, mlp, summed, together

import funcops as fo
from funcops import ChainConfig, LinearConfig, Step, batch_wgrads, chain, donate, linear, random, remat, with_policy
from funcops.adapters.graphs import graphed
from funcops.checkpoint import load, save
from funcops.engine.trees import paths, tensors, tree_map_tensors
from funcops.library.ops.qlinear import qlinear
from funcops.low_precision import (
    Fp8Block,
    Fp8Delayed,
    ScaleState,
    gradients_like,
    quantize_params,
    recipe_init,
    recipe_update,
    split_amaxes,
    with_recipe,
)
from funcops.memory.ledger import Ledger
from funcops.schedule import one_f_one_b, run, zb_h1

FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def later(op, work, xs, dys, cfg, order=range(COUNT)):
    sums, ledger = gradients_like(work), Ledger(work)
    for i in range(COUNT):
        _, residuals = op.fwd(work, xs[i], cfg)
        ledger.keep(f"{i}", op.dgrad(donate(residuals), dys[i], cfg)[1])
    for i in order:
        op.wgrad(donate(ledger.take(f"{i}")), cfg, into=sums)
    ledger.close()
    return sums


def batched(op, work, xs, dys, cfg, into=True):
    pendings = []
    for x, dy in zip(xs, dys, strict=True):
        _, residuals = op.fwd(work, x, cfg)
        pendings.append(op.dgrad(donate(residuals), dy, cfg)[1])
    return batch_wgrads(op, pendings, cfg, into=gradients_like(work) if into else None)


def scheduled(schedule, into):
    def way(op, work, xs, dys, cfg):
        return run(schedule, work, xs, cfg, dys, into=gradients_like(work) if into else None).dparams

    return way


def replayed(op, work, xs, dys, cfg):
    def step(work, *given):
        return together(op, work, given[:COUNT], given[COUNT:], cfg)

    return graphed(step, work, *xs, *dys)(work, *xs, *dys)


WAYS = {
    "other order": lambda *a: together(*a, order=(2, 0, 1)),
    "kept residuals": lambda *a: together(*a, keep=lambda residuals: residuals),
    "delayed": later,
    "delayed, other order": lambda *a: later(*a, order=(1, 2, 0)),
    "batched": batched,
    "batched, no accumulators": lambda *a: batched(*a, into=False),
    "summed": summed,
    "schedule 1f1b": scheduled(one_f_one_b(4, COUNT), True),
    "schedule zb": scheduled(zb_h1(4, COUNT), False),
    "remat": lambda op, *a: together(remat(op), *a),
    "policy": lambda op, *a: together(with_policy(op, "minimal"), *a),
    "recorded": replayed,
}


@pytest.fixture(scope="module", params=["listed", "stacked", "tied"])
def wanted(request):
    ties = {"last.weight": "first.weight"} if request.param == "tied" else {}
    cfg = with_recipe(config(request.param == "stacked", ties), RECIPE)
    params, xs, dys = given(cfg)
    state = begun(cfg, params)
    work = quantize_params(params, cfg, state, dtype=torch.float32)
    grads, amaxes = split_amaxes(together(chain, work, xs, dys, cfg))
    return cfg, params, xs, dys, state, work, grads, amaxes


@pytest.mark.turns("way", every=2)
@pytest.mark.parametrize("way", WAYS)
def test_amaxes_have_the_same_bits_by_every_way(way, wanted):
    cfg, _, xs, dys, state, work, grads, amaxes = wanted
    found, got = split_amaxes(WAYS[way](chain, work, xs, dys, cfg))
    assert set(got) == set(amaxes) == set(state)
    for path, a in amaxes.items():
        assert torch.equal(a, got[path]) and bool((a > 0).all()), path
    want = paths(grads)
    for path, g in paths(found).items():
        if g is not None:
            torch.testing.assert_close(g, want[path], rtol=1e-5, atol=1e-5 * float(want[path].abs().max()), msg=path)


def filled(value, rows=16):
    return torch.full((rows, 16), float(value))


def published(history, algorithm):
    """A linear layer of the published example: margin 2, and tensors of one value."""
    recipe = Fp8Delayed(margin=2, history=history, algorithm=algorithm)
    cfg = with_recipe(fo.LinearConfig(16, 16, bias=False), recipe)
    return recipe, cfg, recipe_init(cfg, fo.LinearParams(filled(2), None))


def one_step(cfg, state, w, x, dy):
    work = quantize_params(fo.LinearParams(filled(w), None), cfg, state, dtype=torch.float32)
    y, residuals = qlinear.fwd(work, filled(x), cfg)
    dparams, dx = qlinear.bwd(residuals, filled(dy), cfg)
    return y, dx, *split_amaxes(dparams)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("history", [1, 31, 1024])
def test_the_published_update_example(history, algorithm):
    """Transformer Engine's test_fp8_scale_update (tests/pytorch/test_fusible_ops.py), and one more step. There a weight's scale is
    one step ahead, as a weight is quantised when it is written."""
    recipe, cfg, state = published(history, algorithm)
    seen = []
    for step in zip((2, 5, 3, 11), (7, 3, 5, 6), (1, 2, 1, 4), strict=True):
        w, x, dy = step
        y, dx, grads, amaxes = one_step(cfg, state, w, x, dy)
        torch.testing.assert_close(y, filled(16 * w * x), rtol=0.125, atol=0.0675)
        torch.testing.assert_close(dx, filled(16 * w * dy), rtol=0.25, atol=0.125)
        torch.testing.assert_close(grads.weight, filled(16 * x * dy), rtol=0.25, atol=0.125)
        state = recipe_update(state, amaxes, recipe)
        seen.append((x, w, dy))
        window = seen[-history:] if algorithm == "max" else seen[-1:]
        largest = [max(values) for values in zip(*window, strict=True)]
        want = [448.0 / largest[0] / 4, 448.0 / largest[1] / 4, 57344.0 / largest[2] / 4]
        assert torch.equal(state["weight"].scale, torch.tensor(want))
        assert state["weight"].history.shape == (history, 3)
        assert state["weight"].history[: len(seen)].tolist() == [list(one) for one in reversed(seen)][:history]


UNUSABLE = (0.0, math.inf, math.nan)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("history", [31, 1024])
def test_updates_against_a_plain_loop(history, algorithm):
    """60 drawn amaxes of three slots: missing, infinite and NaN ones, and tiny ones whose scale is float32's largest."""
    recipe = Fp8Delayed(margin=1, history=history, algorithm=algorithm)
    state = {"w": ScaleState(torch.ones(3), torch.zeros(history, 3))}
    slots, scales = [[], [], []], [1.0, 1.0, 1.0]
    g = torch.Generator().manual_seed(history)
    for _ in range(60):
        drawn = torch.randn(3, generator=g).exp2().tolist()
        for i in range(3):
            kind = int(torch.randint(8, (), generator=g))
            drawn[i] = UNUSABLE[kind] if kind < 3 else 1e-38 if kind == 3 else drawn[i]
        before = state["w"]
        state = recipe_update(state, {"w": torch.tensor(drawn)}, recipe)
        assert state["w"] is not before
        for i, amax in enumerate(torch.tensor(drawn).tolist()):
            if amax > 0 and math.isfinite(amax):
                slots[i].insert(0, amax)
                a = max(slots[i][:history]) if algorithm == "max" else amax
                scale = torch.tensor((448.0, 448.0, 57344.0)[i]) / torch.tensor(a) / 2
                scales[i] = min(float(scale), torch.finfo(torch.float32).max)
        assert state["w"].scale.tolist() == scales
        for i in range(3):
            want = (slots[i] + [0.0] * history)[:history]
            assert state["w"].history[:, i].tolist() == want


def test_the_state_is_an_ordinary_tree(tmp_path, wanted):
    """A checkpoint restores it bit by bit, by path; an update writes to none of its arguments."""
    cfg, params, _, _, state, _, _, amaxes = wanted
    before = {path: t.clone() for path, t in paths(state).items()}
    after = recipe_update(state, amaxes, RECIPE)
    assert all(torch.equal(t, before[path]) for path, t in paths(state).items())
    assert all(not torch.equal(after[path].scale, state[path].scale) for path in state)
    save({"params": params, "scales": after}, tmp_path / "s.safetensors")
    back = load(tmp_path / "s.safetensors", {"params": params, "scales": recipe_init(cfg, params)})["scales"]
    assert {p: t.tolist() for p, t in paths(back).items()} == {p: t.tolist() for p, t in paths(after).items()}
    again = recipe_update(back, amaxes, RECIPE)
    assert all(torch.equal(t, paths(recipe_update(after, amaxes, RECIPE))[path]) for path, t in paths(again).items())


def test_one_collective_a_step_for_scales_and_none_without(wanted):
    cfg, _, _, _, state, _, _, amaxes = wanted
    calls = []

    def reduce(flat):
        calls.append(flat.clone())
        return flat * 2

    found = recipe_update(state, amaxes, RECIPE, reduce=reduce)
    assert [tuple(flat.shape) for flat in calls] == [(sum(a.numel() for a in amaxes.values()),)]
    doubled = recipe_update(state, {path: 2 * a for path, a in amaxes.items()}, RECIPE)
    assert all(torch.equal(t, paths(doubled)[path]) for path, t in paths(found).items())
    for recipe in STATELESS:
        cfg = with_recipe(config(), recipe)
        params, xs, dys = given(cfg)
        grads, none = split_amaxes(
            together(chain, quantize_params(params, cfg, dtype=torch.float32), xs[:1], dys[:1], cfg, order=[0])
        )
        assert none == {} == recipe_init(cfg, params) == recipe_update({}, none, RECIPE, reduce=reduce) and len(calls) == 1


SUMS = {
    "add": lambda a, b: tree_map_tensors(torch.add, a, b),
    "sub": lambda a, b: tree_map_tensors(torch.sub, a, b),
    "in place": lambda a, b: tree_map_tensors(lambda s, t: s.add_(t), a, b),
    "foreach": lambda a, b: torch._foreach_add_(tensors(a), tensors(b)),
    "lerp": lambda a, b: tree_map_tensors(lambda s, t: torch.lerp(s, t, 0.5), a, b),
    "mean": lambda a, b: split_amaxes(tree_map_tensors(lambda s, t: torch.stack((s, t)).float().mean(0), a, b)),
    "scaled": lambda a, b: split_amaxes(tree_map_tensors(lambda s: s * 0.5, a)),
    "cast": lambda a, b: split_amaxes(tree_map_tensors(lambda s: s.float(), a)),
}


@pytest.mark.parametrize("how", SUMS)
def test_amaxes_are_not_added_up_in_silence(how):
    """Gradients cannot be summed or averaged leaf by leaf while they hold amaxes; after `split_amaxes` they can."""
    cfg = with_recipe(mlp(), RECIPE)
    params, xs, dys = given(cfg)
    work = quantize_params(params, cfg, recipe_init(cfg, params), dtype=torch.float32)
    a, b = (chain.bwd(chain.fwd(work, x, cfg)[1], dy, cfg)[0] for x, dy in zip(xs[:2], dys[:2], strict=True))
    (left, of_a), (right, of_b) = split_amaxes(a), split_amaxes(b)
    with pytest.raises(
        (NotImplementedError, TypeError), match=r"UInt32|dparams\..*\.scale must be the amaxes of a backward, in uint32"
    ):
        SUMS[how](a, b)
    assert all(t.dtype is torch.float32 and t.min() > 0 for t in (*of_a.values(), *of_b.values()))
    tree_map_tensors(torch.add, left, right)


def test_scales_are_updated_by_the_recipe_that_made_them():
    recipe = Fp8Delayed(history=2)
    cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(16, 16)),)), recipe)
    state = recipe_init(cfg, chain.init(cfg, key=random.key(0)))
    amaxes = {"up.weight": torch.ones(3)}
    for wrong in (Fp8Block(), None, Fp8Delayed):
        with pytest.raises(TypeError, match="recipe_update: recipe must be Fp8Delayed, got"):
            recipe_update(state, amaxes, wrong)
    assert recipe_update(state, amaxes, recipe).keys() == state.keys()


@pytest.mark.parametrize("wrong", [None, LinearConfig, "cfg", {}], ids=repr)
def test_a_state_is_made_for_a_config_alone(wrong):
    with pytest.raises(TypeError, match="recipe_init: cfg must be the config of an op .*, got"):
        recipe_init(wrong, {})


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("columns", [True, False])
def test_stacked_weights_are_quantised_one_by_one(times, columns):
    one = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(32, 32)),)), Fp8Block())
    cfg = ChainConfig(steps=(Step("layers", fo.repeat, fo.RepeatConfig(chain, one, times, stacked=True)),))
    params = chain.init(cfg, key=random.key(0))
    params = tree_map_tensors(lambda t: t * torch.logspace(-3, 3, times).view(-1, *[1] * (t.dim() - 1)), params)
    work = quantize_params(params, cfg, columns=columns)["layers"]["up"].weight
    for i in range(times):
        layer = tree_map_tensors(lambda t: t[i], params["layers"])  # noqa: B023 (called at once)
        alone = quantize_params(layer, one, columns=columns)["up"].weight
        for side in ("row", "col"):
            whole, own = getattr(work, side), getattr(alone, side)
            assert (whole is None) == (own is None) == (side == "col" and not columns)
            if own is not None:
                assert torch.equal(whole.codes[i], own.codes) and torch.equal(whole.scales[i], own.scales)
