"""The error that each layer adds to a model's gradients, and the layers to leave wide: against float64 and real steps."""

import itertools
import math

import pytest
import torch
from policy_cases import LLAMA

from funcops import (
    ActivationConfig,
    ChainConfig,
    EmbeddingConfig,
    ExpertsConfig,
    LinearConfig,
    RepeatConfig,
    RouteConfig,
    Step,
    WithExtras,
    activation,
    chain,
    embedding,
    linear,
    quantization_report,
    random,
    repeat,
)
from funcops.engine.trees import tensors
from funcops.library.formats import E4M3_BLOCK
from funcops.low_precision import (
    MXFP8,
    NVFP4,
    AddedErrors,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    quantize_params,
    split_amaxes,
    with_recipe,
)
from funcops.models import MoEConfig, moe

PRODUCTS = ("y", "dx", "dw")


def mlp(*sizes):
    """Linear layers l0, l1, ... with a SiLU between."""
    steps = []
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        steps += [Step(f"l{i}", linear, LinearConfig(n, m)), Step(f"a{i}", activation, ActivationConfig("silu"))]
    return ChainConfig(steps=tuple(steps[:-1]))


def given(cfg, rows=40, dtype=torch.float32, scales=()):
    params = chain.init(cfg, key=random.key(0), dtype=dtype)
    for i, scale in enumerate(scales):
        params[f"l{i}"].weight[:, 0] *= scale
    width = cfg.steps[0].cfg.in_features, cfg.steps[-1].cfg.out_features
    return params, *(random.normal(random.key(i), (rows, n), dtype=dtype) for i, n in enumerate(width, 1))


def e4m3(t):
    """Rounded to e4m3 with one scale, by torch's own cast; straight through."""
    scale = 448 / t.abs().max().float()
    return (t.float() * scale).to(torch.float8_e4m3fn).double() / scale.double()


class Rounded(torch.autograd.Function):
    """A linear layer with some of its products computed from rounded operands, in float64."""

    @staticmethod
    def forward(ctx, x, w, products):
        ctx.products = products
        ctx.save_for_backward(x, w)
        return e4m3(x) @ e4m3(w).mT if "y" in products else x @ w.mT

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dx = e4m3(dy) @ e4m3(w) if "dx" in ctx.products else dy @ w
        return dx, e4m3(dy).mT @ e4m3(x) if "dw" in ctx.products else dy.mT @ x, None


def by_autograd(params, x, dy, products):
    """y and the gradients, with `products` of each layer rounded."""
    leaves = {name: (p.weight.clone().requires_grad_(), p.bias.clone().requires_grad_()) for name, p in params.items() if p}
    for i, (name, (w, b)) in enumerate(leaves.items()):
        x = Rounded.apply(x if i == 0 else torch.nn.functional.silu(x), w, products.get(name, ())) + b
    x.backward(dy)
    return x.detach(), torch.cat([t.grad.flatten() for pair in leaves.values() for t in pair])


def off(found, want):
    return float((found - want).norm() / want.norm())


def test_what_each_product_adds_equals_float64_autograd():
    cfg = mlp(32, 48, 64, 16)
    params, x, dy = given(cfg, dtype=torch.float64, scales=(1, 30, 1))
    found = quantization_report(params, x, cfg, Fp8Current(bwd="e4m3"), dy=dy, total=True)
    want_y, want = by_autograd(params, x, dy, {})
    assert [row.path for row in found.rows] == ["l0", "l1", "l2"]
    squares = 0.0
    for row in found.rows:
        for product in PRODUCTS:
            added = off(by_autograd(params, x, dy, {row.path: (product,)})[1], want)
            assert getattr(row.adds, product) == pytest.approx(added, rel=1e-5, abs=1e-12), (row.path, product)
            squares += added**2
    y, gradients = by_autograd(params, x, dy, dict.fromkeys(("l0", "l1", "l2"), PRODUCTS))
    assert found.total.gradients == pytest.approx(off(gradients, want), rel=1e-5)
    assert found.total.y == pytest.approx(off(y, want_y), rel=1e-5) and found.rows[0].adds.dx == found.rows[2].adds.y == 0
    assert found.total.expected == pytest.approx(math.sqrt(squares), rel=1e-5)
    assert found.total.gradients == pytest.approx(found.total.expected, rel=0.2), "squares add up"


MODELS = ("repeat", "stacked", "experts", "tied")


def models():
    """(op's config, params, x) of models with repeats, stacked and not, experts, and a tie."""
    block, extras = LLAMA
    x = WithExtras(torch.randn(2, 16, 64), dict(extras))
    for stacked in (False, True):
        layers = RepeatConfig(chain, block, 2, stacked=stacked)
        cfg = ChainConfig(steps=(Step("blocks", repeat, layers), Step("head", linear, LinearConfig(64, 32))), extras=block.extras)
        yield cfg, chain.init(cfg, key=random.key(0), dtype=torch.float32), x
    mixture = moe(MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, dim=64, hidden=32)))
    cfg = ChainConfig(steps=(Step("moe", chain, mixture), Step("head", linear, LinearConfig(64, 32))), outputs=mixture.outputs)
    yield cfg, chain.init(cfg, key=random.key(0), dtype=torch.float32), torch.randn(24, 64)
    words = Step("words", embedding, EmbeddingConfig(96, 64)), Step("up", linear, LinearConfig(64, 64, bias=False))
    head = Step("head", linear, LinearConfig(64, 96, bias=False))
    cfg = ChainConfig(steps=(*words, head), ties={"head.weight": "words.weight"})
    yield cfg, chain.init(cfg, key=random.key(0), dtype=torch.float32), torch.arange(40)


def step(cfg, params, x, recipe, key, skip=None):
    """The gradients of a step, and its y; without a recipe if `skip` is None."""
    low = cfg if skip is None else with_recipe(cfg, recipe, skip=skip)
    work = params
    if skip is not None:
        own = key if recipe.stochastic else None
        work = quantize_params(params, low, {} if recipe.delayed else None, dtype=torch.float32, key=own)
    y, residuals = chain.fwd(work, x, low)
    main = y.main if type(y) is WithExtras else y
    dy = random.normal(random.key(0), main.shape, dtype=main.dtype)
    dy = WithExtras(dy, dict.fromkeys(y.extras)) if type(y) is WithExtras else dy
    grads, _ = split_amaxes(chain.bwd(residuals, dy, low)[0])
    return main.double(), torch.cat([t.double().flatten() for t in tensors(grads)])


RECIPES = {
    "block": Fp8Block(),
    "current": Fp8Current(keep="input"),
    "high dw": Fp8Block(keep="input", wgrad="high"),
    "delayed": Fp8Delayed(),
    "stochastic": NVFP4(stochastic=True),
    "nearest": NVFP4(stochastic=False),
    "mx": MXFP8(),
}


PAIRS = [(model, name) for name in RECIPES for model in MODELS if model != "tied" or name not in ("delayed", "stochastic")]


@pytest.mark.turns("pair", every=6)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_the_error_of_the_model_is_the_error_of_a_step(pair):
    """The whole error, and the error of a choice, equal the errors of steps with with_recipe and quantize_params. A tied weight has
    no key and no scales of its own: such a step raises."""
    model, recipe, key = pair[0], RECIPES[pair[1]], random.key(3)
    cfg, params, x = list(models())[MODELS.index(model)]
    found = quantization_report(params, x, cfg, recipe, key=key, total=True)
    wide_y, wide = step(cfg, params, x, recipe, key)
    y, gradients = step(cfg, params, x, recipe, key, skip=found.total.unfit)
    assert found.total.unfit == (("moe.gate",) if model == "experts" and recipe.multiple > 4 else ())
    assert found.total.gradients == pytest.approx(off(gradients, wide), rel=1e-4)
    assert found.total.y == pytest.approx(off(y, wide_y), rel=1e-4)
    assert found.total.expected == pytest.approx(found.total.gradients, rel=0.2)
    choice = found.leave_wide(0.8 * found.total.gradients)
    y, gradients = step(cfg, params, x, recipe, key, skip=choice.skip)
    assert choice.gradients == pytest.approx(off(gradients, wide), rel=1e-4) and choice.y == pytest.approx(off(y, wide_y), rel=1e-4)
    assert choice.gradients <= 0.8 * found.total.gradients and 0 < choice.weights


def test_a_choice_is_as_good_as_the_best_of_all():
    """Every choice of layers of at most as many weights, each measured: the greedy one is within a tenth of the best."""
    cfg = mlp(64, 32, 96, 32, 64)
    params, x, dy = given(cfg, scales=(1, 40, 1, 1))
    found = quantization_report(params, x, cfg, NVFP4(stochastic=False), dy=dy, total=True)
    sizes = {row.step: math.prod(row.shape) for row in found.rows}
    errors = {}
    for count in range(4):
        for kept in itertools.combinations(sizes, count):
            low = [path for path in sizes if path not in kept]
            errors[kept] = found.total._errors(dict.fromkeys(low, range(3)))[0]
    for weights in (2048, 4096, 6000):
        choice = found.leave_wide(weights=weights)
        within = [error for kept, error in errors.items() if sum(sizes[path] for path in kept) <= weights]
        assert choice.weights <= weights and choice.gradients <= 1.1 * min(within)
        assert choice.gradients == pytest.approx(errors[tuple(path for path in sizes if path in choice.skip)])
    for error in (0.5, 0.7, 0.9):
        choice = found.leave_wide(error * found.total.gradients)
        assert choice.gradients <= error * found.total.gradients
        best = min(sum(sizes[path] for path in kept) for kept, one in errors.items() if one <= error * found.total.gradients)
        assert choice.weights <= 1.5 * best
    assert found.leave_wide(1.0).skip == found.leave_wide(weights=0).skip == ()


def test_error_per_weight_decides_and_what_is_not_needed_goes_back():
    cfg = mlp(64, 32, 288, 8)
    params, x, dy = given(cfg)
    found = quantization_report(params, x, cfg, Fp8Block(), dy=dy, total=True)
    found.total.expected = found.total.gradients
    for path, added in (("l0", 2.4), ("l1", 5.0), ("l2", 0.1)):  # of 2,048, 9,216 and 2,304 weights
        found.total.added[path] = AddedErrors(added, 0.0, 0.0)
    assert found.leave_wide(weights=9216).skip == ("l0", "l2") and found.leave_wide(weights=9215 + 2048).skip == ("l0", "l2")
    assert found.leave_wide(weights=9216 + 2048).skip == ("l0", "l1") and found.leave_wide(5.1).skip == ("l0",)
    assert found.leave_wide(3.0).skip == ("l1",) and found.leave_wide(0.2).skip == ("l0", "l1")


def test_the_measured_error_decides_not_the_expected_one():
    """Rounding the same numbers twice makes errors that are not independent: the choice grows until it is measured to suffice."""
    cfg = mlp(64, 64, 64)
    params, x, dy = given(cfg)
    found = quantization_report(params, x, cfg, Fp8Block(), dy=dy, total=True)
    found.total.added = {path: added._replace(y=0.0, dx=0.0, dw=0.0) for path, added in found.total.added.items()}
    assert len(found.leave_wide(0.9 * found.total.gradients).skip) == 1


def test_steps_that_are_skipped_anyway_and_sizes_that_do_not_fit():
    cfg = mlp(64, 64, 64, 7)
    params, x, dy = given(cfg)
    found = quantization_report(params, x, cfg, MXFP8(), dy=dy, total=True)
    assert found.total.unfit == ("l2",) and [row.adds is None for row in found.rows] == [False, False, True]
    assert str(found).splitlines()[-1] == "wide, as MXFP8 does not take their sizes: l2"
    choice = found.leave_wide(1.0, skip=("l0",))
    assert choice.skip == ("l0", "l2") and choice.weights == 0 and choice.expected == found.rows[1].adds.error
    assert choice.gradients == pytest.approx(found.rows[1].adds.error, rel=0.2)
    with_recipe(cfg, MXFP8(), skip=choice.skip)
    with pytest.raises(ValueError, match="recipe must be one that takes the sizes of a layer, such as l0, got MXFP8"):
        quantization_report(*given(mlp(64, 7))[:2], mlp(64, 7), MXFP8(), total=True)


def test_the_table_the_picture_and_over_go_by_what_is_added(tmp_path):
    cfg = mlp(32, 48, 16)
    params, x, dy = given(cfg, scales=(1, 50))
    found = quantization_report(params, x, cfg, Fp8Current(), dy=dy, total=True)
    alone = quantization_report(params, x, cfg, Fp8Current(), dy=dy)
    assert [row._replace(adds=None) for row in found.rows] == alone.rows
    lines, first = str(found).splitlines(), found.rows[0]
    assert lines[0].split("  ")[-1].strip() == "adds by dw" and lines[1].endswith(f"{first.adds.dw:.2%}")
    assert lines[-2].startswith(f"2 linear layers in Fp8Current: the gradients' error is {found.total.gradients:.1%} (")
    assert found.dicts()[0]["adds.y"] == first.adds.y and "adds.y" not in alone.dicts()[0]
    small, large = sorted(found.rows, key=lambda row: row.adds.error)
    assert found.over((small.adds.error + large.adds.error) / 2) == (large.step,) and found.worst(1) == [large]
    (axes,) = found.plot(str(tmp_path / "errors.png")).axes
    assert axes.patches[0].get_width() == first.adds.y and "model's gradients" in axes.get_xlabel()


def test_what_cannot_be_chosen_raises():
    cfg = mlp(64, 64, 64)
    params, x, dy = given(cfg)
    found = quantization_report(params, x, cfg, Fp8Block(), dy=dy, total=True)
    for call, error, message in (
        (lambda: quantization_report(params, x, cfg, E4M3_BLOCK, total=True), TypeError, "recipe must be a recipe, such as"),
        (lambda: quantization_report(params, x, cfg, Fp8Block(), total=1), TypeError, "total must be"),
        (lambda: quantization_report(params, x, cfg, Fp8Block()).leave_wide(0.1), ValueError, r"made by .*total=True\)"),
        (lambda: found.leave_wide(), ValueError, "error must be given, or weights, but not both, got None"),
        (lambda: found.leave_wide(0.1, weights=1), ValueError, "error must be given, or weights, but not both, got 0.1"),
        (lambda: found.leave_wide(weights=-1), ValueError, "leave_wide: weights must be at least 0, got -1"),
        (lambda: found.leave_wide(-1), ValueError, "leave_wide: error must be at least 0, got -1"),
        (lambda: found.leave_wide(1e-6), ValueError, r"error must be at least 0\.0\d+, with l[01] alone in Fp8Block, got 1e-06"),
        (lambda: found.leave_wide(weights=9000), ValueError, "weights must be below 8,192, of all layers, got 9,000"),
        (lambda: found.leave_wide(0.1, skip=("l2",)), ValueError, "skip must be globs over l0, l1, got 'l2'"),
        (lambda: found.leave_wide(0.1, skip=("l*",)), ValueError, "skip must be globs that leave one of the layers"),
        (lambda: found.leave_wide(0.1, skip="l0"), TypeError, "skip must be a tuple of globs"),
    ):
        with pytest.raises(error, match=message):
            call()
