"""A whole step in low precision: compiled, recorded, with two models, and how often it quantises."""

import contextlib
import itertools
import time

import pytest
import torch
from low_precision_model import COUNT, RECIPE, STATELESS, D, begun, config, given, mlp, whole_step

import funcops as fo
from funcops import ChainConfig, LinearConfig, Needs, Step, chain, linear, random
from funcops.adapters.graphs import graphed
from funcops.engine.trees import cast, paths, stands_for_one, tensors
from funcops.library.kernels import quantize as kernels
from funcops.library.ops.qlinear import QLinearConfig, qlinear
from funcops.low_precision import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed, Scaled, quantize_params, recipe_init, with_recipe


def test_two_models_in_one_process_do_not_touch_each_other():
    """Two interleaved steps of each give the same as two steps of each alone."""
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


@pytest.mark.parametrize(
    "recipe", [Fp8Block(), Fp8Current(), RECIPE, MXFP8(), NVFP4(stochastic=False)], ids=lambda r: type(r).__name__
)
def test_a_cast_leaves_codes_and_scales_alone(recipe):
    """Casting a working tree changes nothing; of leaves that are not quantised yet only the values are cast."""
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


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [Fp8Block(), RECIPE], ids=lambda r: type(r).__name__)
def test_a_whole_step_compiles_as_one_graph(recipe):
    """The working tree, two microbatches and the update of the state: gradients are close, amaxes within the last bit: a
    compiler takes activations apart, and not every CPU's `exp` gives both forms the same one."""
    cfg = with_recipe(mlp(), recipe)
    params, xs, dys = given(cfg)
    state = recipe_init(cfg, params)
    want, want_state = whole_step(params, state, xs[:2], dys[:2], cfg, recipe)
    step = torch.compile(whole_step, fullgraph=True, dynamic=False, backend="aot_eager")
    found, found_state = step(params, state, xs[:2], dys[:2], cfg, recipe)
    for path, t in paths(want).items():
        if t is not None:
            torch.testing.assert_close(paths(found)[path], t, rtol=1e-4, atol=0.02 * float(t.abs().max()), msg=path)
    for path, t in paths(want_state).items():
        torch.testing.assert_close(paths(found_state)[path][..., :2], t[..., :2], rtol=2**-22, atol=0, msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [RECIPE, STATELESS[int(time.time() // 86400) % 4]], ids=lambda r: type(r).__name__)
def test_a_whole_step_compiles_by_the_default_backend(recipe):
    """One linear layer, as the compiler is slow; another recipe without state each day."""
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
    """Calls of the quantisers' kernels by what they read: each weight once a step, for 1 microbatch and for 8."""
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
    """dy is rounded by a scale or a key beside the weight, and the weight is not kept if no dx is requested."""
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
def test_a_backward_without_the_rounding_of_dy_raises(recipe):
    """Residuals made by hand lack it, and rounding dy in another way would silently give other gradients."""
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
def test_a_working_tree_has_columns_if_requested(recipe, columns):
    cfg = with_recipe(fo.LinearConfig(32, 48), recipe)
    params = qlinear.init(cfg, key=random.key(0))
    state = recipe_init(cfg, params) if recipe.delayed else None
    weight = quantize_params(params, cfg, state, columns=columns, dtype=torch.float32).weight
    value = weight.value if recipe.delayed else weight
    assert (value.col is not None) == columns and (value.row.side == "row")
