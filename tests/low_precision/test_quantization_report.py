"""The report of a recipe's errors in each linear layer, checked against that layer in low precision."""

import dataclasses

import pytest
import torch
from cases.grouped_qlinear import CASES as GROUPED_CASES
from cases.grouped_qlinear import RECIPES as OF_GROUPED_CASES
from cases.qlinear import CASES as QLINEAR_CASES
from cases.qlinear import RECIPES as OF_CASES
from policy_cases import LLAMA

from funcops import (
    ChainConfig,
    EmbeddingConfig,
    ExpertsConfig,
    ExpertsParams,
    GroupedLinearConfig,
    GroupedQLinearConfig,
    LinearConfig,
    ParallelConfig,
    RepeatConfig,
    RouteConfig,
    SkipConfig,
    Step,
    WithExtras,
    chain,
    embedding,
    grouped_linear,
    linear,
    quantization_report,
    random,
    remat,
    repeat,
    skip,
    trees,
    with_policy,
)
from funcops.engine.contract.op import config
from funcops.engine.contract.walk import steps
from funcops.engine.errors import join_path
from funcops.library.formats import E2M1_NV, E4M3_BLOCK, E4M3_MX, E4M3_SQUARE, E4M3_TENSOR, Format
from funcops.library.ops.grouped_qlinear import grouped_qlinear
from funcops.library.ops.qlinear import QLinearConfig, qlinear
from funcops.low_precision import (
    MXFP8,
    NVFP4,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    QuantizationReport,
    Recipe,
    quantize_params,
    recipe_init,
    split_amaxes,
    with_recipe,
)
from funcops.models import MoEConfig, moe, plain_experts
from funcops.models.blocks import mlp_config


@dataclasses.dataclass
class Formats:
    """Formats with a recipe's attributes, but not a recipe."""

    x: Format | None = E4M3_BLOCK
    w: Format | None = E4M3_SQUARE
    dy: Format | None = E4M3_BLOCK


RECIPES = {  # and the error that normal numbers have at most
    "block": (Fp8Block(), 0.05),
    "block, ready columns": (Fp8Block(keep="col"), 0.05),
    "block, dy in e5m2": (Fp8Block(bwd="e5m2"), 0.08),
    "block, dw in high precision": (Fp8Block(keep="input", wgrad="high"), 0.05),
    "current": (Fp8Current(), 0.08),
    "mx": (MXFP8(), 0.05),
    "nvfp4": (NVFP4(stochastic=False), 0.22),
    "nvfp4 as it is": (NVFP4(stochastic=False, hadamard=False, keep="input"), 0.22),
}
LINEAR = LinearConfig(96, 160)


def layer(dtype=torch.float32):
    params = linear.init(LINEAR, key=random.key(0), dtype=dtype)
    return params, *(random.normal(random.key(i), (4, 10, n), dtype=dtype) for i, n in ((1, 96), (2, 160)))


def off(found, want):
    return float((found.double() - want).norm() / want.norm())


@pytest.mark.parametrize("name", RECIPES)
def test_errors_equal_the_layers_in_low_precision(name):
    """40 tokens: not a multiple of the block of a transform."""
    recipe, bar = RECIPES[name]
    params, x, dy = layer()
    (row,) = quantization_report(params, x, LINEAR, recipe, dy=dy).rows
    cfg = QLinearConfig(96, 160, recipe)
    op = qlinear
    y, residuals = op.fwd(params, x, cfg)
    dparams, dx = op.bwd(residuals, dy, cfg)
    x, dy, w = x.flatten(0, -2).double(), dy.flatten(0, -2).double(), params.weight.double()
    assert row.path == row.step == "" and row.shape == (160, 96) and 0 < row.worst == max(row.y, row.dx, row.dw) < bar
    assert row.y == pytest.approx(off((y - params.bias).flatten(0, -2), x @ w.mT), rel=1e-3)
    assert row.dx == pytest.approx(off(dx.flatten(0, -2), dy @ w), rel=1e-3)
    assert row.dw == pytest.approx(off(dparams.weight, dy.mT @ x), rel=1e-3, abs=1e-6)
    for key, t in (("x", x), ("w", w), ("dy", dy)):
        assert row.operands[key].amax == float(t.abs().max())
        assert (row.operands[key].zeros > 0) == (recipe.x.element == "e2m1")


OF_GROUPS = [*OF_GROUPED_CASES, *[case.cfg.recipe for case in GROUPED_CASES if isinstance(case.cfg, GroupedQLinearConfig)]]
OF_GROUPS += [Fp8Delayed(), Fp8Delayed(keep="col"), Fp8Current(keep="input", wgrad="high"), MXFP8(keep="input")]
OF_GROUPS += [NVFP4(stochastic=False, hadamard=False, keep="input"), Fp8Block(bwd="e5m2", keep="col")]
OF_GROUPS = {repr(recipe): recipe for recipe in OF_GROUPS if not recipe.stochastic}


@pytest.mark.turns("name", "gathered", every=3)
@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize("gathered", [False, True])
def test_errors_of_groups_equal_the_grouped_layers_in_low_precision(name, gathered):
    """Groups of 7, 0, 14 and 3 rows, whose sizes are far apart."""
    recipe, cfg = OF_GROUPS[name], GroupedLinearConfig(4, 96, 160, bias=False, gathered=gathered)
    params = grouped_linear.init(cfg, key=random.key(0), dtype=torch.float32)
    params.weight.mul_(torch.tensor([1.0, 1e3, 1e-3, 4.0])[:, None, None])
    offsets, dy = torch.tensor([0, 7, 7, 21, 24], dtype=torch.int32), random.normal(random.key(2), (24, 160), dtype=torch.float32)
    x = random.normal(random.key(1), (12 if gathered else 24, 96), dtype=torch.float32), offsets
    if gathered:
        order = torch.arange(24, dtype=torch.int32).flip(0)
        x = *x, order, order.argsort().int().view(12, 2)
    (row,) = quantization_report(params, x, cfg, recipe, dy=dy).rows
    low = GroupedQLinearConfig(4, 96, 160, recipe, bias=False, gathered=gathered)
    work = quantize_params(params, low, {} if recipe.delayed else None, dtype=torch.float32)
    found = [
        (y, *op.bwd(kept, dy, one))
        for op, own, one in ((grouped_qlinear, work, low), (grouped_linear, params, cfg))
        for y, kept in [op.fwd(own, x, one)]
    ]
    (y, dparams, dx), (want_y, want_dparams, want_dx) = found
    assert row.shape == (4, 160, 96) and row.operands["x"].amax == float(x[0].abs().max())
    assert row.y == pytest.approx(off(y, want_y.double()), rel=1e-3)
    dw = split_amaxes(dparams)[0].weight
    assert row.dw == pytest.approx(off(dw, want_dparams.weight.double()), rel=1e-3, abs=1e-6)
    if not gathered:  # else dx is a sum over tokens' rows
        assert row.dx == pytest.approx(off(dx[0], want_dx[0].double()), rel=1e-3)


def mixture_x(tokens):
    return random.normal(random.key(3), (tokens, 64), dtype=torch.float32)


@pytest.mark.parametrize("op", [chain, remat(chain), with_policy(chain, "minimal")], ids=lambda op: op.name)
def test_no_layer_is_left_out_in_silence(op):
    """Each layer that a recipe changes has a row, or is listed as not measured."""
    mixture = moe(MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, dim=64, hidden=32)))
    cfg = ChainConfig(steps=(Step("moe", op, mixture), Step("head", linear, LinearConfig(64, 8))), outputs=mixture.outputs)
    params = chain.init(cfg, key=random.key(0), dtype=torch.float32)
    found = quantization_report(params, mixture_x(16), cfg, Fp8Block())
    assert [row.step for row in found.rows] == ["moe.gate", "moe.experts.up", "moe.experts.down", "head"]
    assert all(0.01 < row.worst < 0.06 for row in found.rows) and not found.not_measured
    some = QuantizationReport(found.rows[:2], Fp8Block(), ("moe.experts.down", "head"))
    assert str(some).splitlines()[-1] == "not measured: moe.experts.down, head"
    low = with_recipe(cfg, Fp8Block(), skip=("head",))
    message = "cfg must be a config without a recipe .*, got one with a recipe at moe.gate, moe.experts.up, moe.experts.down$"
    with pytest.raises(ValueError, match=message):
        quantization_report(params, mixture_x(16), low, Fp8Block())


def test_experts_are_measured_as_the_chain_of_their_steps():
    cfg = ExpertsConfig(4, dim=64, hidden=32)
    indices = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(9)]).int()
    weights, tokens, params = torch.rand(9, 2), mixture_x(9), chain.init(plain_experts(cfg), key=random.key(0), dtype=torch.float32)
    x = WithExtras(weights, {"tokens": tokens, "indices": indices})
    want = quantization_report(params, x, plain_experts(cfg), Fp8Block()).rows
    from_op = ExpertsParams(params["up"], params["down"])
    assert quantization_report(from_op, (weights, tokens, indices), cfg, Fp8Block()).rows == want
    assert [row.path for row in want] == ["up", "down"]


def test_operands_may_stay_as_they_are():
    params, x, dy = layer()
    want = quantization_report(params, x, LINEAR, Formats(), dy=dy).rows[0]
    found = {name: quantization_report(params, x, LINEAR, Formats(**{name: None}), dy=dy).rows[0] for name in ("x", "w", "dy")}
    whole = quantization_report(params, x, LINEAR, Formats(None, None, None), dy=dy).rows[0]
    assert whole.worst == 0 and all(0 < found[name].y < want.y for name in ("x", "w")) and 0 < found["dy"].dx < want.dx
    assert found["x"].dx == want.dx and found["w"].dw == want.dw and found["dy"].y == want.y
    same = quantization_report(params, x, LINEAR, E4M3_BLOCK, dy=dy).rows
    assert same == quantization_report(params, x, LINEAR, Formats(w=E4M3_BLOCK), dy=dy).rows


def test_values_on_the_grid_are_exact_and_others_are_counted():
    cfg = LinearConfig(128, 4)
    params = linear.init(cfg, key=random.key(0))
    params.weight.copy_(torch.arange(512).reshape(4, 128) % 9 - 4.0)
    x, dy = torch.ones(2, 128), torch.full((2, 4), -3.0)
    (row,) = quantization_report(params, x, cfg, E4M3_BLOCK, dy=dy).rows
    assert row.worst == 0 and all(one[1:] == (0, 0) for one in row.operands.values())
    x[0, :32] = 2.0**-20  # a quarter of a row, under half of the least step beside an outlier
    x[0, 64] = 448.0
    (row,) = quantization_report(params, x, cfg, E4M3_BLOCK, dy=dy).rows
    assert row.operands["x"].zeros == 32 / 256 and row.operands["x"].saturated == 0 and row.operands["x"].amax == 448
    x = torch.zeros(2, 128)
    x[0, 0], x[0, 16] = 6 * 448.0, 6.3  # the scale of the second is 1.05, rounded down to 1: 6 is its largest
    (row,) = quantization_report(params, x, cfg, Formats(x=E2M1_NV), dy=dy).rows
    assert row.operands["x"] == (6 * 448.0, 0.0, 1 / 256)
    x = torch.zeros(2, 128)
    x[0, 0], x[1, 0] = 1.99 * 2.0**15, 1.75 * 2.0**15  # with the scale 1 the second is the largest element, the first is clipped
    (row,) = quantization_report(params, x, cfg, Formats(x=Format("e5m2", (1, 32), "e8m0", scaling_mode="floor")), dy=dy).rows
    assert row.operands["x"].saturated == 1 / 256
    (row,) = quantization_report(params, torch.full((2, 128), torch.nan), cfg, E4M3_BLOCK, dy=dy).rows
    assert row.y != row.y and row.dx == 0 and row.worst != row.worst


def test_every_linear_layer_has_a_row_by_its_path():
    block, extras = LLAMA
    six = [f"attn.qkv.{n}.proj" for n in "qkv"] + ["attn.out", "mlp.up", "mlp.down"]
    x = WithExtras(torch.randn(2, 16, 64), dict(extras))
    for cfg, op, want in (
        (block, chain, six),
        (RepeatConfig(chain, block, 2), repeat, [f"{i}.{path}" for i in range(2) for path in six]),
        (RepeatConfig(chain, block, 2, stacked=True), repeat, [f"{i}.{path}" for i in range(2) for path in six]),
        (SkipConfig(chain, block), skip, six),
    ):
        found = quantization_report(op.init(cfg, key=random.key(0)), x, cfg, Fp8Block())
        assert sorted(row.path for row in found.rows) == sorted(want)
        assert all(0.01 < row.y < 0.05 for row in found.rows)
        worst = max(found.rows, key=lambda row: row.worst)
        (skipped,) = found.over(sorted({max(r.worst for r in found.rows if r.step == step) for step in found.over(0)})[-2])
        assert skipped == worst.step
        assert with_recipe(cfg, Fp8Block(), skip=(skipped,)) != with_recipe(cfg, Fp8Block()), "the paths serve with_recipe"
    words = Step("words", embedding, EmbeddingConfig(7, 6)), Step("head", linear, LinearConfig(6, 7, bias=False))
    tied = ChainConfig(steps=words, ties={"head.weight": "words.weight"})
    (row,) = quantization_report(chain.init(tied, key=random.key(0)), torch.tensor([1, 2]), tied, E4M3_MX).rows
    assert row.path == "head" and row.shape == (7, 6), "a tied weight is there"


def test_the_table_the_picture_and_layers_to_skip(tmp_path):
    cfg = mlp_config(64, 96)
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(32, 64)
    x[:, 0] *= 1e6
    before = x.clone()
    found = quantization_report(params, x, cfg, E4M3_TENSOR)
    assert torch.equal(x, before) and [row["path"] for row in found.dicts()] == ["up", "down"]
    lines = str(found).splitlines()
    assert len(lines) == 5 and lines[0].split()[0] == "path" and lines[1].startswith("up") and f"{found.rows[0].y:.2%}" in lines[1]
    assert lines[-2].startswith("2 linear layers in e4m3 allxall float32: the worst error is ") and "<pre>" in found._repr_html_()
    columns = [f"{name} {what}" for name in ("x", "w", "dy") for what in ("to 0", "clipped")]
    some = {
        f"{one} {what}"
        for row in found.rows
        for one, seen in row.operands.items()
        for what, share in zip(("to 0", "clipped"), seen[1:], strict=True)
        if f"{share:.2%}" != "0.00%"
    }
    assert lines[-1] == f"0.00% in every layer: {', '.join(one for one in columns if one not in some)}" and "x to 0" in some
    assert all((one in lines[0]) == (one in some) for one in columns)
    errors = sorted(row.worst for row in found.rows)
    assert [len(found.over(error)) for error in (0.0, errors[0], errors[1])] == [2, 1, 0]
    assert [row.worst for row in found.worst()] == errors[::-1] and found.worst(1) == found.worst()[:1]
    nan = found.rows[0]._replace(dx=float("nan"))
    assert QuantizationReport([*found.rows, nan], found.recipe).worst(1) == [nan]
    figure = found.plot(str(tmp_path / "errors.png"))
    (axes,) = figure.axes
    assert len(axes.patches) == 6 and [t.get_text() for t in axes.get_yticklabels()] == ["up", "down"]
    assert axes.patches[0].get_width() == found.rows[0].y and (tmp_path / "errors.png").stat().st_size > 5000
    width = int.from_bytes((tmp_path / "errors.png").read_bytes()[16:20], "big")
    assert width == 960, "8 inches of 120 dots"


def test_models_without_a_report_raise():
    params, x, _ = layer()
    for args, error, message in (
        (((params, x, LINEAR, "fp8")), TypeError, "quantization_report: recipe must be a recipe or a Format, got 'fp8'"),
        (((params, x, EmbeddingConfig(3, 4), E4M3_MX)), TypeError, "cfg must be ChainConfig or .*, got EmbeddingConfig"),
        (((None, x, linear, E4M3_MX)), TypeError, "quantization_report: cfg must be"),
    ):
        with pytest.raises(error, match=message):
            quantization_report(*args)
    cfg = ChainConfig(steps=(Step("words", embedding, EmbeddingConfig(7, 6)),))
    with pytest.raises(ValueError, match="cfg must be a config with linear layers whose weights get gradients, got ChainConfig"):
        quantization_report(chain.init(cfg, key=random.key(0)), torch.tensor([1]), cfg, E4M3_MX)
    pair = ParallelConfig(branches=(Step("a", linear, LINEAR), Step("b", linear, LINEAR)))
    with pytest.raises(ValueError, match=r"quantization_report: dy must be given for a y that is (a )?tuple.*, got None"):
        quantization_report({"a": params, "b": params}, x, pair, E4M3_MX)
    found = quantization_report(params, x, LINEAR, E4M3_MX)
    assert repr(found) == "\n".join(line[:160] for line in str(found).split("\n"))
    with pytest.raises(ValueError, match="over: error must be at least 0, got -1"):
        quantization_report(params, x, LINEAR, E4M3_MX).over(-1)
    with pytest.raises(ValueError, match="worst: n must be at least 1, got 0"):
        quantization_report(params, x, LINEAR, E4M3_MX).worst(0)


@config
class OtherByColumns(Recipe):
    """Elements with fewer bits by columns."""

    keep: str = "col"

    def __post_init__(self):
        e5m2 = dict(x_col=Format("e5m2", (1, 128), "pow2"), w_col=Format("e5m2", (128, 128), "pow2"))
        self.settle(E4M3_BLOCK, E4M3_SQUARE, E4M3_BLOCK, **e5m2, dy_col=Format("e5m2", (1, 128), "pow2"))


EVERY = [
    *OF_CASES,  # of the cases of qlinear
    *[case.cfg.recipe for case in QLINEAR_CASES],
    *[recipe(keep="col") for recipe in (Fp8Block, Fp8Current, Fp8Delayed)],
    *[recipe(keep="input", wgrad=wgrad) for recipe in (Fp8Block, Fp8Current, MXFP8) for wgrad in ("low", "high")],
    *[Fp8Block(scales="float32", keep=keep, bwd="e5m2") for keep in ("input", "col")],
    *[Fp8Current(pow2=True, keep=keep) for keep in ("row", "input", "col")],
    *[NVFP4(stochastic=s, hadamard=h, keep=keep) for s in (True, False) for h in (True, False) for keep in ("input", "col")],
    *[NVFP4(stochastic=s, keep="input", wgrad="high") for s in (True, False)],
    Fp8Block(x_tile=(128, 128), w_tile=(1, 128), dy_tile=(128, 128), emulate=True, amax_epsilon=0.1),
    Fp8Block(keep="col", dy_tile=(128, 128), emulate=True),
    *[MXFP8(scaling_mode=mode, w_tile=(32, 32)) for mode in ("floor", "even", "ceil")],
    NVFP4(stochastic=False, w_tile=(1, 16), row_scaled=True, hadamard=False),
    NVFP4(stochastic=True, row_scaled=True, keep="input"),
    NVFP4(stochastic=True, four_over_six="all", error="mae"),
    *[OtherByColumns(keep=keep) for keep in ("col", "input")],
]
EVERY = {repr(recipe): recipe for recipe in EVERY}  # each once


def working(params, cfg, found, recipe, key):
    """The working tree of a step; with scales from the amaxes of the rows' operands if the recipe has a state."""
    if not recipe.delayed:
        return quantize_params(params, cfg, dtype=torch.float32, key=key if recipe.stochastic else None)
    amaxes = {
        join_path(row.path, "weight"): torch.tensor([row.operands[name].amax for name in ("x", "w", "dy")]) for row in found.rows
    }
    for path, state in recipe_init(cfg, params).items():
        if state.scale.dim() > 1:  # stacked
            inner = path.removeprefix("layers.")
            amaxes[path] = torch.stack([amaxes.pop(f"layers.{i}.{inner}") for i in range(len(state.scale))])
    return quantize_params(params, cfg, recipe_init(cfg, params, amaxes=amaxes), dtype=torch.float32)


@pytest.mark.turns("name", "seed", "stacked", every=8)
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("name", EVERY)
def test_rows_are_the_errors_of_the_step(name, seed, stacked):
    """Two layers of a repeat and a head: the errors of the step's own ops on the operands that the model has there."""
    recipe, key = EVERY[name], None if seed is None else random.key(seed)
    body = ChainConfig(steps=(Step("up", linear, LinearConfig(64, 128)), Step("down", linear, LinearConfig(128, 64))))
    layers = Step("layers", repeat, RepeatConfig(skip, SkipConfig(chain, body), 2, stacked=stacked))
    cfg = ChainConfig(steps=(layers, Step("head", linear, LinearConfig(64, 32))))
    params = chain.init(cfg, key=random.key(1), dtype=torch.float32)
    x, dy = (random.normal(random.key(i), (4, 10, n), dtype=torch.float32) for i, n in ((2, 64), (3, 32)))
    found = quantization_report(params, x, cfg, recipe, dy=dy, key=key)
    low = with_recipe(cfg, recipe)
    work = working(params, low, found, recipe, key if key is not None else random.key(0))
    whole = with_policy(chain, "save_all")
    _, residuals = whole.fwd(params, x, cfg)
    _, pending = whole.dgrad(residuals, dy, cfg)
    assert [row.path for row in found.rows] == ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "head"]
    at = {part.path.replace(".*", ""): part.cfg for part in steps(low)}

    def own_params(tree, path):
        """The params of a layer, which may be one of a stack."""
        if not stacked or path == "head":
            return trees.at(tree, path)
        first, number, step = path.split(".")
        return trees.tree_map_tensors(lambda t: t[int(number)], trees.at(tree, f"{first}.{step}"))

    for row in found.rows:
        waiting, weight = trees.at(pending, row.path), own_params(params, row.path).weight
        op, own_cfg = qlinear, at[".".join([name for name in row.path.split(".") if not name.isdigit()])]
        own = trees.replace(own_params(work, row.path), bias=torch.zeros(weight.shape[0]))
        y, kept = op.fwd(own, waiting.x, own_cfg)
        dparams, dx = op.bwd(kept, waiting.dy, own_cfg)
        dw = split_amaxes(dparams)[0].weight
        wide = [t.flatten(0, -2).double() for t in (waiting.x, waiting.dy)]
        assert row.y == pytest.approx(off(y.flatten(0, -2), wide[0] @ weight.double().mT), rel=1e-5)
        assert row.dx == pytest.approx(off(dx.flatten(0, -2), wide[1] @ weight.double()), rel=1e-5)
        assert row.dw == pytest.approx(off(dw, wide[1].mT @ wide[0]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("recipe", [NVFP4(stochastic=True), NVFP4(stochastic=True, keep="input")], ids=["columns", "input"])
def test_rows_of_groups_round_stochastically_as_the_grouped_layer(recipe):
    cfg = GroupedLinearConfig(4, 96, 160, bias=False)
    params = grouped_linear.init(cfg, key=random.key(0), dtype=torch.float32)
    offsets, dy = torch.tensor([0, 7, 7, 21, 24], dtype=torch.int32), random.normal(random.key(2), (24, 160), dtype=torch.float32)
    x = random.normal(random.key(1), (24, 96), dtype=torch.float32), offsets
    (row,) = quantization_report(params, x, cfg, recipe, dy=dy, key=random.key(5)).rows
    low = GroupedQLinearConfig(4, 96, 160, recipe, bias=False)
    work = quantize_params(params, low, dtype=torch.float32, key=random.key(5))
    (y, dparams, dx), (want_y, want_dparams, want_dx) = [
        (y, *op.bwd(kept, dy, one))
        for op, p, one in ((grouped_qlinear, work, low), (grouped_linear, params, cfg))
        for y, kept in [op.fwd(p, x, one)]
    ]
    assert row.y == pytest.approx(off(y, want_y.double()), rel=1e-4)
    assert row.dw == pytest.approx(off(dparams.weight, want_dparams.weight.double()), rel=1e-4)
    assert row.dx == pytest.approx(off(dx[0], want_dx[0].double()), rel=1e-4)
