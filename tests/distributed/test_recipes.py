"""Recipes of low precision over ranks: they have the codes of one process, and send codes."""

import dataclasses
import functools
import math

import pytest
import torch
from dist_cases import LAYERS, LOW
from dist_cases import ONE as ALONE
from tiers import drawn

from funcops import ChainConfig, LinearConfig, LinearParams, Needs, Step, chain, dist, linear, random
from funcops.distributed import Mesh
from funcops.engine.trees import tensors
from funcops.library.ops.qlinear import QLinearConfig, qlinear
from funcops.low_precision import (
    MXFP8,
    NVFP4,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    gradients_like,
    quantization_report,
    quantize_params,
    recipe_init,
    recipe_update,
    split_amaxes,
    with_recipe,
)
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits

RECIPES = (
    Fp8Current(),
    Fp8Current(keep="input", wgrad="high"),
    Fp8Block(),
    Fp8Block(keep="col"),
    Fp8Block(keep="input"),
    Fp8Block(scales="float32", keep="col"),
    MXFP8(),
    MXFP8(keep="input"),
    NVFP4(stochastic=False),
    Fp8Delayed(),
    Fp8Delayed(keep="col"),
)
WIDTH = 256  # of two ranks each has whole tiles
PLAIN = ChainConfig(steps=(Step("up", linear, LinearConfig(WIDTH, WIDTH)), Step("down", linear, LinearConfig(WIDTH, WIDTH))))
BOTH = {"up": "column", "down": "row"}


def given(rows, *sizes):
    """Values whose span lets codes by rows be tiled anew with the bits of quantising by columns."""
    draw = torch.Generator().manual_seed(rows)
    t = torch.rand(rows, *sizes, generator=draw, dtype=torch.float64) + 0.5
    return t * torch.randint(2, t.shape, generator=draw).mul(2).sub(1)


def state_of(cfg, params):
    """Scales other than 1, for delayed scaling."""
    amaxes = {path: torch.tensor([1.5, 0.1, 1.5]) for path in recipe_init(cfg, params)}
    return recipe_init(cfg, params, amaxes=amaxes)


def both_ways(cfg, params, x, dy, made=True):
    """y, residuals, gradients and dx, with weights quantised before or in each product."""
    work = quantize_params(params, cfg, state_of(cfg, params), dtype=torch.float64) if made else params
    y, residuals = chain.fwd(work, x, cfg)
    dparams, dx = chain.bwd(residuals, dy, cfg)
    dx_again, pending = chain.dgrad(residuals, dy, cfg)
    same_bits((dparams, dx), (chain.wgrad(pending, cfg), dx_again), "the halves")
    return y, dx, *split_amaxes(dparams), pending


WAYS = ((256, "bulk", True), (6, "none", True), (6, "bulk", False))  # rows, overlap, sequence_parallel
FAMILIES = [type(recipe).__name__ for recipe in RECIPES]


@pytest.mark.parametrize(("recipe", "way"), drawn(RECIPES, WAYS, families=FAMILIES))
def test_ranks_have_the_codes_of_one_process(recipe, way):
    """A column layer and a row layer alone: y, dx and dw within the rounding of sums in float64, far below a code's step. A rank's
    rows are whole tiles or not, and codes or values are sent accordingly."""
    rows, overlap, sequence = way
    made = rows > 6 or recipe.delayed
    for name, (_, config) in LOW.items():
        op, plain = qlinear, QLinearConfig(WIDTH, WIDTH, recipe)
        cfg = ChainConfig(steps=(Step("one", op, plain),))
        whole = chain.init(cfg, key=random.key(1), dtype=torch.float64)
        x, dy = given(rows, WIDTH), given(rows + 1, WIDTH)[:rows]
        y, dx, wanted, amaxes, _ = both_ways(cfg, whole, x, dy, made)

        def run(mesh, name=name, config=config, whole=whole, x=x, dy=dy):
            tp = mesh["tp"]
            cut = functools.partial(lambda t, dim: t.chunk(2, dim)[tp.rank].contiguous())
            own = config(WIDTH, WIDTH, recipe=recipe, axis=tp, overlap=overlap, sequence_parallel=sequence)
            layer = ChainConfig(steps=(Step("one", LOW[name][0], own),))
            specs = dist.specs_of(chain, layer)
            rows_of, part = (lambda t: cut(t, 0) if sequence else t), functools.partial(cut, dim=-1)
            mine, dmine = (rows_of(x), part(dy)) if name == "column" else (part(x), rows_of(dy))
            y, dx, dparams, found, _ = both_ways(layer, dist.shard(whole, specs, mesh), mine, dmine, made)
            bias = dparams["one"].bias
            if name == "row" and sequence:  # of this rank's rows alone
                bias = dist.finish(dist.sum_over_start(bias, tp))
            dparams = dist.unshard({"one": LinearParams(dparams["one"].weight, bias)}, specs, mesh)
            return y, dx, dparams["one"], dist.amaxes_over(found, tp)

        ys, dxs, found, joined = zip(*run_ranks({"tp": 2}, run), strict=True)
        of_rows = (lambda ts: torch.cat(ts)) if sequence else (lambda ts: ts[0])
        ys, dxs = (torch.cat(ys, -1), of_rows(dxs)) if name == "column" else (of_rows(ys), torch.cat(dxs, -1))
        close = functools.partial(torch.testing.assert_close, rtol=1e-12, atol=1e-11)
        close(ys, y)
        close(dxs, dx)
        for one, amax in zip(found, joined, strict=True):
            close(one.weight, wanted["one"].weight)
            close(one.bias, wanted["one"].bias)
            same_bits(amax, amaxes, "amaxes")


HIGH = [made(keep="input", wgrad="high") for made in (Fp8Current, Fp8Block, MXFP8)]
HIGH.append(NVFP4(keep="input", wgrad="high", stochastic=False))
DIMS = {"column": (0, -1), "row": (-1, 0)}  # of x and dy, sharded over ranks


@pytest.mark.parametrize("recipe", HIGH, ids=repr)
@pytest.mark.parametrize("name", LOW)
def test_a_dw_in_high_precision_is_of_the_values_of_all_ranks(name, recipe):
    """Whatever the codes of y and dx: the product of dy and x themselves."""
    (op, config), x, dy = LOW[name], given(6, WIDTH), given(8, WIDTH)[:6]

    def run(mesh):
        tp = mesh["tp"]
        cfg = config(WIDTH, WIDTH, recipe=recipe, axis=tp)
        params = op.init(cfg, key=random.key(0), dtype=torch.float64)
        mine, dmine = (t.chunk(2, dim)[tp.rank].contiguous() for t, dim in zip((x, dy), DIMS[name], strict=True))
        return op.bwd(op.fwd(params, mine, cfg)[1], dmine, cfg)[0].weight

    dw = torch.cat(run_ranks({"tp": 2}, run), 0 if name == "column" else 1)
    torch.testing.assert_close(dw, dy.mT @ x, rtol=1e-12, atol=1e-11)


def bytes_gathered(cfg, params, x, dy):
    """The bytes that a rank sends to all-gathers in a step."""

    def step(params, x, dy):
        y, residuals = chain.fwd(params, x, cfg)
        return chain.bwd(residuals, dy, cfg)

    sent = [one for one in dist.record(step, params, x, dy).sent if one.op == "all_gather"]
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in sent)


@pytest.mark.parametrize("recipe", [Fp8Current(), Fp8Block(), Fp8Delayed(), MXFP8(), NVFP4(stochastic=False)], ids=repr)
def test_half_the_bytes_are_gathered(recipe):
    """x for y, x for dw, dy for dx and dw: 2 bytes an element each in bfloat16, 1 or 0.5 and scales in codes. If codes by columns
    cannot be made from codes by rows, dy is sent twice."""
    mesh = Mesh.abstract({"dp": 1, "tp": 2}, 1)
    plain = dist.parallel(PLAIN, BOTH, mesh, overlap="bulk")
    cfg = dist.parallel(with_recipe(PLAIN, recipe), BOTH, mesh, overlap="bulk")
    x, dy = (torch.zeros(128, 4, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    params = chain.init(plain, device="meta")
    work = [quantize_params(params, made, recipe_init(made, params)) for made in (plain, cfg)]
    high, low = bytes_gathered(plain, work[0], x, dy), bytes_gathered(cfg, work[1], x, dy)
    assert high == 3 * 2 * x.numel()
    element = 0.5 + 1 / 16 if isinstance(recipe, NVFP4) else 1 + {Fp8Block: 4 / 128, MXFP8: 1 / 32}.get(type(recipe), 0)
    assert low == (3 if recipe.x.turns else 4) * element * x.numel()


def test_a_recipe_before_or_after():
    """The same config; one communication finds the largest elements of all weights on all ranks."""
    recipe = Fp8Current()
    whole = chain.init(PLAIN, key=random.key(0), dtype=torch.float32)
    want = quantize_params(whole, with_recipe(PLAIN, recipe))

    def run(mesh):
        cfg = dist.parallel(with_recipe(PLAIN, recipe), BOTH, mesh)
        assert cfg == with_recipe(dist.parallel(PLAIN, BOTH, mesh), recipe) and cfg.steps[0].op is dist.column_qlinear
        own = dist.shard(whole, dist.specs_of(chain, cfg), mesh)
        sent = dist.record(lambda params: quantize_params(params, cfg), own).sent
        return quantize_params(own, cfg), [str(one) for one in sent]

    (a, sent), (b, _) = run_ranks({"tp": 2}, run)
    assert sent == ["all_reduce (max) of int32[2]"]
    for name, dim in (("up", 0), ("down", 1)):
        codes = [work[name].weight.row.codes for work in (a, b)]
        same_bits(torch.cat(codes, dim), want[name].weight.row.codes, name)


def test_delayed_scaling_learns_of_all_ranks():
    """After a step all ranks have the state of one process; reducing gradients that still hold amaxes raises, with the remedy."""
    recipe = Fp8Delayed(history=2)
    whole = chain.init(PLAIN, key=random.key(0), dtype=torch.float32)
    x = given(8, WIDTH).float()
    x[5, 3] = 77.0  # one rank alone has it

    def after(cfg, params, x, over=()):
        state = recipe_init(cfg, params)
        work = quantize_params(params, cfg, state, dtype=torch.float32)
        into = gradients_like(work)
        y, residuals = chain.fwd(work, x, cfg)
        chain.bwd(residuals, x, cfg, into=into)
        if over:
            with pytest.raises(TypeError, match=r"reduce_start: dparams\..*take amaxes out with split_amaxes first"):
                dist.reduce_start(into, over)
        return recipe_update(state, dist.amaxes_over(split_amaxes(into)[1], over), recipe)

    want = after(with_recipe(PLAIN, recipe), whole, x)

    def run(mesh):
        cfg = dist.parallel(with_recipe(PLAIN, recipe), BOTH, mesh)
        own = dist.shard(whole, dist.specs_of(chain, cfg), mesh)
        return after(cfg, own, x.chunk(4)[mesh.rank], (mesh["dp"], mesh["tp"]))

    for found in run_ranks({"dp": 2, "tp": 2}, run):
        assert want["up.weight"].history[0, 0] == 77.0
        same_bits(found["up.weight"].history[:, 0], want["up.weight"].history[:, 0], "of x")
        for path, one in found.items():
            assert torch.equal(one.history[0, 1:2], want[path].history[0, 1:2]), "of w"
            torch.testing.assert_close(one.history, want[path].history, rtol=0.05, atol=0)  # y and dx are sums of parts


def test_a_report_says_which_layers_over_ranks_it_leaves_out():
    up, down, head = (Step(name, linear, LinearConfig(32, 32)) for name in ("up", "down", "head"))

    def run(mesh):
        for steps in ((up, down, head), (up, down)):
            cfg = dist.parallel(ChainConfig(steps=steps), {"up": "column", "down": "row"}, mesh)
            params = chain.init(cfg, key=random.key(0), dtype=torch.float32)
            if head in steps:
                found = quantization_report(params, torch.ones(4, 32), cfg, Fp8Block())
                assert [row.path for row in found.rows] == ["head"] and found.not_measured == ("up", "down")
            else:
                with pytest.raises(ValueError, match="got ChainConfig, of which up, down cannot be measured"):
                    quantization_report(params, torch.ones(4, 32), cfg, Fp8Block())

    run_ranks({"tp": 2}, run)


def test_a_nan_is_the_largest():
    """Its sign and payload do not matter: on x86 0 / 0 has the sign bit set. The other rank has a number, or infinity."""
    nans = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -0x400000, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    nans = torch.cat((nans, torch.zeros(1) / torch.zeros(1)))
    others = torch.tensor([0.0, -0.0, 1.0, 2.0, 3.0, math.inf, math.inf])

    def run(mesh):
        amaxes = {"a": torch.tensor([3.0, 1.0 + mesh.rank]), "nan": nans if mesh.rank == 1 else others, "zero": torch.tensor(-0.0)}
        return dist.amaxes_over(amaxes, mesh["tp"])

    for found in run_ranks({"tp": 3}, run):
        assert found["a"].tolist() == [3.0, 3.0] and found["nan"].isnan().all() and found["zero"] == 0.0
    assert dist.amaxes_over({}, Mesh.abstract({"tp": 2}, 0)["tp"]) == {}


def test_keys_differ_by_rank_where_parts_do():
    """Equal rows of dy on ranks of a row layer are rounded differently; the same key rounds the same way twice."""
    recipe = NVFP4(stochastic=True)

    def run(mesh):
        cfg = dist.RowQLinearConfig(32, 16, axis=mesh["tp"], recipe=recipe, bias=False)
        layer = ChainConfig(steps=(Step("one", dist.row_qlinear, cfg),))
        params = chain.init(layer, key=random.key(0), dtype=torch.float32)
        work = quantize_params(params, layer, dtype=torch.float32, key=random.key(1))
        y, residuals = chain.fwd(work, torch.ones(32, 16), layer)
        dy = torch.linspace(0.1, 1.3, 256).reshape(16, 16)
        found = chain.dgrad(residuals, dy, layer)[1]["one"].dy
        same_bits(chain.dgrad(residuals, dy, layer)[1]["one"].dy, found, "again")
        return found

    a, b = run_ranks({"tp": 2}, run)
    same_bits(a, b, "on all ranks")
    first, second = a.dequantize().chunk(2)
    assert not torch.equal(first, second)


BAD = {
    "ColumnQLinearConfig: overlap must be 'none' or 'bulk' with a recipe, whose codes are sent as one, got 'ring'": (
        dist.ColumnQLinearConfig,
        (64, 64, Fp8Block()),
        "ring",
    ),
    "ColumnQLinearConfig: out_features must be a multiple of 64 (MXFP8 on axis 'tp' of 2), got 96": (
        dist.ColumnQLinearConfig,
        (64, 96, MXFP8()),
        "none",
    ),
    "ColumnQLinearConfig: in_features must be a multiple of 32 (MXFP8), got 48": (
        dist.ColumnQLinearConfig,
        (48, 64, MXFP8()),
        "none",
    ),
    "RowQLinearConfig: in_features must be a multiple of 32 (NVFP4 on axis 'tp' of 2), got 48": (
        dist.RowQLinearConfig,
        (48, 64, NVFP4(stochastic=False)),
        "none",
    ),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_configs_raise(said):
    config, sizes, overlap = BAD[said]
    with pytest.raises(ValueError) as raised:
        config(*sizes, axis=Mesh.abstract({"tp": 2}, 0)["tp"], overlap=overlap)
    assert str(raised.value) == said


CODES = Fp8Block().x
WRONG_CODES = {
    "format must be e4m3 1x128 pow2, got e4m3 128x128 pow2": {"format": dataclasses.replace(CODES, tile=(128, 128))},
    "format must be e4m3 1x128 pow2, got e4m3 allxall float32": {"format": Fp8Current().x},
    "side must be 'row', got 'col'": {"side": "col"},
}


@pytest.mark.parametrize("said", WRONG_CODES)
def test_codes_of_x_that_were_changed_before_they_are_sent_are_refused(said):
    cfg = dist.ColumnQLinearConfig(128, 128, Fp8Block(keep="row"), axis=ALONE)
    y, kept = dist.column_qlinear.fwd(dist.column_qlinear.init(cfg, key=random.key(0)), torch.ones(2, 128), cfg)
    _, pending = dist.column_qlinear.dgrad(kept, y, cfg)
    changed = dataclasses.replace(pending, x=dataclasses.replace(pending.x, **WRONG_CODES[said]))
    with pytest.raises(ValueError) as raised:
        dist.column_qlinear.wgrad(changed, cfg)
    assert str(raised.value) == f"column_qlinear_wgrad: pending.x.{said}"


def test_a_recipe_that_the_ranks_do_not_take_raises_with_its_path():
    tp = Mesh.abstract({"tp": 2}, 0)["tp"]
    for name, (op, config) in LAYERS.items():
        for overlap, width in (("ring", 64), ("none", 96)):
            cfg = ChainConfig(steps=(Step(name, op, config(width, width, axis=tp, overlap=overlap)),))
            with pytest.raises(ValueError, match=f"^{name}: {name.capitalize()}QLinearConfig: .* must be"):
                with_recipe(cfg, MXFP8())


def test_quantised_inputs_are_checked_before_anything_is_sent():
    cfg = dist.ColumnQLinearConfig(32, 32, Fp8Block(), axis=Mesh.abstract({"tp": 2}, 0)["tp"])
    assert len(tensors(dist.column_qlinear.init(cfg, key=random.key(0)))) == 2
    params = dist.column_qlinear.init(cfg, key=random.key(0))
    for x, said in ((torch.ones(2, 31), r"x must be \[\.\.\., 32\]"), (torch.ones(32), "x must be .*as its first dim is sharded")):
        with pytest.raises(ValueError, match=f"^column_qlinear_fwd: {said}"):
            dist.column_qlinear.fwd(params, x, cfg)
    with pytest.raises(ValueError, match=r"^column_qlinear_fwd: params.weight must be \[16, 32\], got \[32, 32\]"):
        dist.column_qlinear.fwd(linear.init(LinearConfig(32, 32), key=random.key(0)), torch.ones(2, 32), cfg)


def test_a_frozen_quantised_layer_takes_accumulators_of_none():
    def on_rank(mesh):
        cfg = dist.ColumnQLinearConfig(32, 32, Fp8Block(), axis=mesh["tp"])
        params, into = dist.column_qlinear.init(cfg, key=random.key(0)), LinearParams(None, None)
        y, residuals = dist.column_qlinear.fwd(params, torch.ones(4, 32), cfg, needs=Needs(params=False))
        return dist.column_qlinear.bwd(residuals, y, cfg, into=into)

    for n in (1, 2):
        for dparams, dx in run_ranks({"tp": n}, on_rank):
            assert dparams.weight is dparams.bias is None and dx.shape == (4, 32)


def test_accumulators_are_checked_before_dx_is_computed(monkeypatch):
    cfg = dist.ColumnQLinearConfig(32, 32, Fp8Block(), axis=Mesh.abstract({"tp": 1}, 0)["tp"])
    y, residuals = dist.column_qlinear.fwd(dist.column_qlinear.init(cfg, key=random.key(0)), torch.ones(4, 32), cfg)
    monkeypatch.setattr(type(dist.column_qlinear.layer), "dx_of", None)
    with pytest.raises(ValueError, match=r"^column_qlinear_bwd: into.weight must be \[32, 32\], got \[32, 33\]"):
        dist.column_qlinear.bwd(residuals, y, cfg, into=LinearParams(torch.zeros(32, 33), torch.zeros(32)))
