"""Low precision in a training step: the working tree is made once, and delayed scaling's state is the same by every way that a
step may go."""

import contextlib
import itertools
import math
import time

import pytest
import torch

import funcops as fo
from funcops import ChainConfig, LinearConfig, Needs, Step, batch_wgrads, chain, donate, linear, random, remat, with_policy
from funcops.adapters.graphs import graphed
from funcops.checkpoint import load, save
from funcops.kernels import quantize as kernels
from funcops.low_precision import (
    MXFP8,
    NVFP4,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    Scaled,
    ScaleState,
    gradients_like,
    quantize_params,
    recipe_init,
    recipe_update,
    split_amaxes,
    with_recipe,
)
from funcops.ops.qlinear import QLinearConfig, qlinear
from funcops.program.values import add
from funcops.residuals import Ledger
from funcops.schedule import one_f_one_b, run, zb_h1
from funcops.trees import cast, paths, stands_for_one, tensors, tree_map_tensors

D, COUNT = 32, 3
RECIPE = Fp8Delayed(history=4)
STATELESS = Fp8Block(), Fp8Current(), MXFP8(), NVFP4()
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def mlp(hidden=2 * D):
    steps = (
        Step("norm", fo.rms_norm, fo.RMSNormConfig(D)),
        Step("up", fo.linear, fo.LinearConfig(D, hidden)),
        Step("act", fo.activation, fo.ActivationConfig("gelu")),
        Step("down", fo.linear, fo.LinearConfig(hidden, D, bias=False)),
    )
    return ChainConfig(steps=steps)


def config(stacked=False, ties=(), op=fo.skip, cfg=None):
    """Four stages: a projection, a repeat of MLPs, a parallel, a projection."""
    inner = fo.SkipConfig(chain, mlp()) if cfg is None else cfg
    branches = tuple(Step(name, fo.linear, fo.LinearConfig(D, D)) for name in "qk")
    heads = (Step("fan", fo.parallel, fo.ParallelConfig(branches=branches)), Step("sum", fo.add, fo.AddConfig()))
    steps = (
        Step("first", fo.linear, fo.LinearConfig(D, D)),
        Step("blocks", fo.repeat, fo.RepeatConfig(op, inner, 2, stacked=stacked)),
        Step("heads", chain, ChainConfig(steps=heads)),
        Step("last", fo.linear, fo.LinearConfig(D, D)),
    )
    return ChainConfig(steps=steps, ties=ties)


def given(cfg, seed=0, dtype=torch.float32):
    params = chain.init(cfg, key=random.key(seed), dtype=dtype)
    g = torch.Generator().manual_seed(seed)
    xs, dys = ([torch.randn(5, D, generator=g) * 2.0**i for i in range(COUNT)] for _ in range(2))
    return params, [t.to(dtype) for t in xs], [t.to(dtype) for t in dys]


def begun(cfg, params):
    """A state that is not the first one: every scale another."""
    g = torch.Generator().manual_seed(1)
    return {
        path: ScaleState(2.0 ** torch.randint(0, 6, s.scale.shape, generator=g), s.history)
        for path, s in recipe_init(cfg, params).items()
    }


def together(op, work, xs, dys, cfg, order=range(COUNT), keep=donate):
    sums = gradients_like(work)
    for i in order:
        _, residuals = op.fwd(work, xs[i], cfg)
        op.bwd(keep(residuals), dys[i], cfg, into=sums)
    return sums


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


def summed(op, work, xs, dys, cfg):
    """Trees of gradients, added as those of a shared tensor are."""
    total = None
    for x, dy in zip(xs, dys, strict=True):
        _, pull = fo.vjp(op, work, x, cfg)
        total = add(total, pull(dy)[0])
    return total


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
    """A linear layer of the published example: margin 2, values that are the same all over."""
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
    """Transformer Engine's test_fp8_scale_update (tests/pytorch/test_fusible_ops.py), and one step more. There a weight's scale is
    one step ahead, as it is quantised when it is written."""
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
    """60 drawn amaxes of three slots: slots that did not run, infinite and NaN ones, tiny ones whose scale is float32's largest."""
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
    """It comes back from a checkpoint bit by bit, by path; an update writes to none of what it was given."""
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


def whole_step(params, state, xs, dys, cfg, recipe):
    work = quantize_params(params, cfg, state, dtype=torch.float32)
    grads, amaxes = split_amaxes(summed(chain, work, xs, dys, cfg))
    return grads, recipe_update(state, amaxes, recipe) if amaxes else state


def test_two_models_in_one_process_do_not_touch_each_other():
    """Two steps of each, interleaved, are those of each alone."""
    alone, mixed = {}, {}
    models = {seed: (with_recipe(config(), RECIPE), *given(config(), seed)) for seed in (0, 1)}
    for seed, (cfg, params, xs, dys) in models.items():
        state = recipe_init(cfg, params)
        for _ in range(2):
            alone[seed], state = whole_step(params, state, xs, dys, cfg, RECIPE)
        alone[seed] = alone[seed], state
    states = {seed: recipe_init(cfg, params) for seed, (cfg, params, _, _) in models.items()}
    for _ in range(2):
        for seed, (cfg, params, xs, dys) in models.items():
            mixed[seed], states[seed] = whole_step(params, states[seed], xs, dys, cfg, RECIPE)
    for seed in models:
        want, found = paths(alone[seed]), paths((mixed[seed], states[seed]))
        assert all(t is None or torch.equal(t, found[path]) for path, t in want.items())


@pytest.mark.parametrize("recipe", [Fp8Block(), Fp8Current(), RECIPE, MXFP8(), NVFP4()], ids=lambda r: type(r).__name__)
def test_a_cast_leaves_what_is_quantised_and_scales(recipe):
    """A working tree that is cast is itself; of what is not quantised yet, only the values are cast."""
    cfg = with_recipe(mlp(), recipe)
    params, xs, _ = given(cfg)
    work = quantize_params(params, cfg, recipe_init(cfg, params) or None)
    weights = [node for path, node in paths(work, is_leaf=stands_for_one).items() if stands_for_one(node)]
    for before, after in zip(tensors(work), tensors(cast(work, torch.bfloat16)), strict=True):
        assert before is after
    assert weights and all(w.zero_gradient(torch.float32) is not None for w in weights)
    bare = Scaled(torch.ones(2, 3), torch.ones(3), None)
    made = cast({"a": bare, "b": weights[0]}, torch.float64)
    assert (made["a"].value.dtype, made["a"].scale.dtype) == (torch.float64, torch.float32)
    assert all(a is b for a, b in zip(tensors(made["b"]), tensors(weights[0]), strict=True))
    y, _ = chain.fwd(cast(work, torch.bfloat16), xs[0].bfloat16(), cfg)
    assert y.dtype is torch.bfloat16


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
    """Leaf by leaf gradients cannot be summed or averaged while they hold amaxes; after `split_amaxes` they can."""
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


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Fp8Block(), RECIPE], ids=lambda r: type(r).__name__)
def test_a_whole_step_compiles_as_one_graph(recipe):
    """The working tree, two microbatches, the update of the state: gradients close, amaxes of the same bits."""
    cfg = with_recipe(mlp(), recipe)
    params, xs, dys = given(cfg)
    state = recipe_init(cfg, params)
    want, want_state = whole_step(params, state, xs[:2], dys[:2], cfg, recipe)
    step = torch.compile(whole_step, fullgraph=True, dynamic=False, backend="aot_eager")
    found, found_state = step(params, state, xs[:2], dys[:2], cfg, recipe)
    for path, t in paths(want).items():
        if t is not None:
            torch.testing.assert_close(paths(found)[path], t, rtol=1e-4, atol=0.02 * float(t.abs().max()), msg=path)
    assert all(torch.equal(t[..., :2], paths(found_state)[path][..., :2]) for path, t in paths(want_state).items())


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RECIPE, STATELESS[int(time.time() // 86400) % 4]], ids=lambda r: type(r).__name__)
def test_a_whole_step_compiles_by_the_default_backend(recipe):
    """One linear layer, as a compiler is slow; of the recipes without state another each day."""
    cfg = with_recipe(ChainConfig(steps=(Step("up", fo.linear, fo.LinearConfig(D, D)),)), recipe)
    params, xs, dys = given(cfg)
    state = begun(cfg, params)
    want = paths(whole_step(params, state, xs[:1], dys[:1], cfg, recipe))
    found = paths(torch.compile(whole_step, fullgraph=True, dynamic=False)(params, state, xs[:1], dys[:1], cfg, recipe))
    assert set(found) == set(want) and (len(state) == 1) == recipe.delayed
    for path, t in want.items():
        if path.startswith("1."):
            assert torch.equal(found[path], t), path
        else:
            torch.testing.assert_close(found[path], t, rtol=1e-5, atol=1e-6 * float(t.abs().max()), msg=path)


@pytest.mark.parametrize(
    "recipe", [RECIPE, *[pytest.param(r, marks=pytest.mark.slow) for r in STATELESS]], ids=lambda r: type(r).__name__
)
def test_a_recorded_step_gives_the_same_bits(recipe):
    """The working tree and the update are in the graph, the state is one of its buffers: three replays are three steps."""
    cfg = with_recipe(mlp(), recipe)
    params, xs, dys = given(cfg)
    state = want_state = recipe_init(cfg, params)

    def step(params, state, *batch):
        grads, new = whole_step(params, state, batch[:2], batch[2:], cfg, recipe)
        for old, now in zip(tensors(state), tensors(new), strict=True):
            old.copy_(now)
        return grads, state

    captured = graphed(step, params, state, *xs[:2], *dys[:2], inputs={"1": "donated"} if state else {})
    for i in range(3):
        batch = [x * (i + 1) for x in xs[:2]], [dy * (i + 1) for dy in dys[:2]]
        want, want_state = whole_step(params, want_state, *batch, cfg, recipe)
        found, state = captured(params, state, *batch[0], *batch[1])
        for a, b in zip(tensors((want, want_state)), tensors((found, state)), strict=True):
            assert torch.equal(a, b)


QUANTISERS = ("quantize_row", "quantize_col", "quantize_both", "quantize_scaled")


@pytest.mark.parametrize("recipe", [RECIPE, *STATELESS], ids=lambda r: type(r).__name__)
def test_weights_are_quantised_once_a_step(recipe, monkeypatch):
    """Calls of the quantisers' kernels by what they read: of each weight one a step, for 1 microbatch and for 8."""
    cfg = with_recipe(mlp(), recipe)
    params, xs, dys = given(cfg)
    state = recipe_init(cfg, params)
    read = []
    for name in QUANTISERS:
        plain = getattr(kernels, name)
        monkeypatch.setattr(kernels, name, lambda x, *rest, plain=plain: read.append(tuple(x.shape)) or plain(x, *rest))
    counts = {}
    for microbatches in (1, 8):
        read.clear()
        batch = [xs[i % COUNT] for i in range(microbatches)], [dys[i % COUNT] for i in range(microbatches)]
        whole_step(params, state, *batch, cfg, recipe)
        counts[microbatches] = [shape for shape in read if shape in ((2 * D, D), (D, 2 * D))], len(read)
    assert counts[1][0] == counts[8][0] and sorted(counts[1][0]) == [(D, 2 * D), (2 * D, D)]
    weights = len(counts[1][0])
    assert counts[8][1] - weights == 8 * (counts[1][1] - weights) > 0


@pytest.mark.parametrize(
    "recipe",
    [Fp8Delayed(), Fp8Delayed(keep="col"), NVFP4(stochastic=True), NVFP4(stochastic=True, keep="input"), Fp8Block()],
    ids=str,
)
def test_gradients_do_not_depend_on_which_others_are_asked(recipe):
    """dy is rounded by a scale or a key that stand beside the weight, which is not kept where no dx is asked."""
    layer = ChainConfig(steps=(Step("a", linear, LinearConfig(16, 32)),))
    cfg = with_recipe(layer, recipe)
    params, x, dy = chain.init(layer, key=random.key(0)), torch.randn(4, 16), torch.randn(4, 32)
    state = recipe_init(cfg, params) if recipe.delayed else None
    work = quantize_params(params, cfg, state, dtype=torch.float32, key=random.key(1) if recipe.stochastic else None)
    whole, dx = chain.bwd(chain.fwd(work, x, cfg)[1], dy, cfg)
    for needs in (Needs(x=False), Needs(params=False), Needs(params=("a.weight",), x=False), Needs(params=("a.bias",), x=False)):
        some, found = chain.bwd(chain.fwd(work, x, cfg, needs=needs)[1], dy, cfg)
        assert found is None or torch.equal(found, dx)
        for path, gradient in paths(some).items():
            assert gradient is None or torch.equal(gradient, paths(whole)[path]), (needs, path)


@pytest.mark.parametrize(
    "recipe",
    [Fp8Delayed(keep="col"), NVFP4(stochastic=True), *[NVFP4(stochastic=True, keep="input", wgrad=w) for w in ("low", "high")]],
    ids=str,
)
def test_a_backward_without_what_dy_is_rounded_by_raises(recipe):
    """Residuals made by hand, which never had it: a dy that is rounded anyhow would give other gradients in silence."""
    cfg, op = QLinearConfig(16, 32, recipe), qlinear
    params, x, dy = linear.init(LinearConfig(16, 32), key=random.key(0)), torch.randn(4, 16), torch.randn(4, 32)
    state = recipe_init(cfg, params) if recipe.delayed else None
    work = quantize_params(params, cfg, state, dtype=torch.float32, key=random.key(1) if recipe.stochastic else None)
    raised = 0
    for dx, asked in itertools.product((True, False), (True, ("weight",), ("bias",))):
        node = op.fwd(work, x, cfg, needs=Needs(x=dx, params=asked))[1].copy(rounding=None)
        rounded = dx or (asked != ("bias",) and recipe.wgrad == "low")
        raised += rounded
        said = rf"^{op.name}_dgrad: residuals.rounding must be kept .*, got None"
        for backward in (op.bwd, op.dgrad):
            with pytest.raises(ValueError, match=said) if rounded else contextlib.nullcontext():
                backward(node, dy, cfg)
    assert raised == (5 if recipe.wgrad == "low" else 3)


@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("recipe", [RECIPE, Fp8Delayed(margin=1), Fp8Block(), Fp8Current()], ids=lambda r: type(r).__name__)
def test_a_working_tree_has_columns_where_they_are_asked_for(recipe, columns):
    cfg = with_recipe(fo.LinearConfig(32, 48), recipe)
    params = qlinear.init(cfg, key=random.key(0))
    state = recipe_init(cfg, params) if recipe.delayed else None
    weight = quantize_params(params, cfg, state, columns=columns, dtype=torch.float32).weight
    value = weight.value if recipe.delayed else weight
    assert (value.col is not None) == columns and (value.row.side == "row")
