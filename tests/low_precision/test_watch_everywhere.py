"""The rounding of steps other than one layer of one rank: of groups, of attention, and over ranks."""

import pytest
import torch
from test_watch import RECIPES, wild

from funcops import (
    ChainConfig,
    ExpertsConfig,
    GroupedLinearConfig,
    LinearConfig,
    LinearParams,
    QLinearConfig,
    RopeConfig,
    RouteConfig,
    Step,
    chain,
    dist,
    grouped_linear,
    linear,
    quantization_report,
    random,
    value_and_grad,
)
from funcops.library.ops.grouped_qlinear import GroupedQLinearConfig, grouped_qlinear
from funcops.library.ops.qattention import QAttentionConfig, qattention
from funcops.library.ops.qlinear import qlinear
from funcops.logs import LoggedConfig, logged, logs_init, split_logs, with_logs
from funcops.logs.logged import holding
from funcops.low_precision import (
    NVFP4,
    Fp8Block,
    Fp8Current,
    quantize_params,
    quantize_tensor,
    recipe_init,
    rounding_logs,
    watch,
    weight_rounding,
    with_recipe,
)
from funcops.models import DecoderConfig, MoEConfig, decoder, decoder_x
from funcops.testing import run_ranks

GROUPS, ROWS, D = 3, 40, 128
OFFSETS = torch.tensor([0, 7, 7, 33], dtype=torch.int32)  # one group without rows, and rows in no group


def logs_of(op, cfg, params, x, dy, names):
    """The values by name of one call."""
    own = LoggedConfig(op, cfg, names)
    _, residuals = logged.fwd(holding(params, torch.zeros(own.shape), own), x, own)
    dparams, _ = logged.bwd(residuals, dy, own)
    return dict(zip(own.order, dparams.logs[0, 1:], strict=True))


def names_of(op, cfg):
    return rounding_logs(ChainConfig(steps=(Step("a", op, cfg),)))["a"]


@pytest.mark.turns("recipe")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("gathered", [False, True])
def test_of_groups_it_says_what_the_report_says(recipe, gathered):
    plain = GroupedLinearConfig(GROUPS, D, D, bias=False, gathered=gathered)
    cfg = GroupedQLinearConfig(GROUPS, D, D, bias=False, gathered=gathered, recipe=recipe)
    params = grouped_linear.init(plain, key=random.key(0), dtype=torch.bfloat16)
    rows, dy = wild(ROWS // 2 if gathered else ROWS, D), wild(ROWS, D, seed=1)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(2)).to(torch.int32)
    x = (rows, OFFSETS, order, order.argsort().to(torch.int32).view(-1, 2)) if gathered else (rows, OFFSETS)
    work = quantize_params(params, cfg, {})
    found = logs_of(grouped_qlinear, cfg, work, x, dy, names_of(grouped_qlinear, cfg))
    (row,) = quantization_report(params, x, plain, recipe, dy=dy).rows
    for name, ours in (("x", "rows"), ("dy", "dy")):
        one = row.operands[name]
        # a row of x that is gathered twice is rounded once, unless groups have scales of their own
        near = {"rel": 0.3, "abs": 0.02} if gathered and name == "x" else {"rel": 1e-5}
        assert float(found[f"{ours}_underflow"]) == pytest.approx(one.zeros, **near)
        assert float(found[f"{ours}_saturated"]) == pytest.approx(one.saturated, **near)
        assert 0 < found[f"{ours}_error"] < 0.2
    assert gathered or float(found["rows_amax"]) == row.operands["x"].amax
    assert weight_rounding(params, work)["weight"].error.shape == (GROUPS,)


def test_rows_that_were_sent_in_codes_are_refused():
    cfg = GroupedQLinearConfig(GROUPS, D, D, bias=False, recipe=Fp8Block())
    params, codes = grouped_qlinear.init(cfg, key=random.key(0)), quantize_tensor(torch.ones(ROWS, D), Fp8Block().x)
    with pytest.raises(TypeError, match=r"x\.0 must be a tensor, .*, got codes, .*rounding_logs\(skip=\)"):
        logs_of(grouped_qlinear, cfg, params, (codes, OFFSETS), torch.ones(ROWS, D), ("rows_error",))


@pytest.mark.parametrize("recipe", [Fp8Block(), Fp8Current()], ids=lambda r: type(r).__name__)
def test_of_attention_it_says_what_the_codes_are(recipe):
    cfg = QAttentionConfig(recipe, causal=True)
    q, k, v, dy = (wild(2, 9, 2, 64, seed=i).float() for i in range(4))
    names = names_of(qattention, cfg)
    found = logs_of(qattention, cfg, None, (q, k, v), dy, names)
    _, residuals = qattention.fwd(None, (q, k, v), cfg)
    for name, t in {"q": q, "k": k, "v": v}.items():
        codes = getattr(residuals, name).dequantize(torch.float32).transpose(1, 2)
        torch.testing.assert_close(found[f"{name}_error"], (codes - t).norm() / t.norm())
        torch.testing.assert_close(found[f"{name}_underflow"], ((codes == 0) & (t != 0)).float().mean())
        assert found[f"{name}_amax"] == t.abs().max() and found[f"{name}_saturated"] == 0
    assert {"dy_amax", "dy_underflow", "dy_saturated", "dy_error"} <= found.keys() and 0 < found["dy_error"] < 0.2


@pytest.mark.turns("recipe")
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_ranks_have_the_numbers_of_their_parts(recipe, sequence, kind):
    """The squares of errors, and the shares, of the parts make up the ones of a single process."""
    size, rows = 2 * D, 2 * D  # whole tiles on each rank
    cfg = QLinearConfig(size, size, recipe=recipe, bias=False)
    params = linear.init(LinearConfig(size, size, bias=False), key=random.key(0), dtype=torch.bfloat16)
    x, dy = wild(rows, size), wild(rows, size, seed=1)
    names = (*names_of(qlinear, cfg), "x_norm", "dy_norm")
    state = recipe_init(cfg, params) if recipe.delayed else None
    want = logs_of(qlinear, cfg, quantize_params(params, cfg, state), x, dy, names)

    def run(mesh):
        axis = mesh["tp"]
        made = dist.ColumnQLinearConfig if kind == "column" else dist.RowQLinearConfig
        own = made(size, size, recipe=recipe, bias=False, axis=axis, sequence_parallel=sequence)
        column = kind == "column"

        def part(t, dim):
            return t.chunk(2, dim)[axis.rank].contiguous()

        held = type(params)(part(params.weight, 0 if column else 1), None)
        # rows of x before a column layer, and of dy after a row layer, belong to the rank
        whole, split = (x, part(dy, 1)) if column else (dy, part(x, 1))
        whole = part(whole, 0) if sequence else whole
        given = (whole, split) if column else (split, whole)
        op = dist.column_qlinear if column else dist.row_qlinear
        return logs_of(op, own, quantize_params(held, own, state), *given, (*names_of(op, own), "x_norm", "dy_norm"))

    ranks = run_ranks({"tp": 2}, run)
    for name in ("x", "dy"):
        split = sequence or name == ("dy" if kind == "column" else "x")
        norms = torch.stack([one[f"{name}_norm"] for one in ranks]) ** 2
        errors = torch.stack([one[f"{name}_error"] for one in ranks]) ** 2
        whole = (errors * norms).sum() / norms.sum() if split else errors[0]
        torch.testing.assert_close(whole.sqrt(), want[f"{name}_error"], rtol=1e-4, atol=1e-7)
        for what in ("underflow", "saturated"):
            mean = torch.stack([one[f"{name}_{what}"] for one in ranks]).mean()
            torch.testing.assert_close(mean, want[f"{name}_{what}"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("kind", "sequence"), [("column", False), ("row", True), ("row", False)])
def test_ranks_round_stochastically_as_their_products_do(kind, sequence):
    """With a weight of ones on the diagonal, dx is the rounded dy."""
    size, column = 2 * D, kind == "column"
    dy, whole = torch.randn(size, size, generator=torch.Generator().manual_seed(0)), torch.eye(size)

    def run(mesh):
        axis = mesh["tp"]
        made = dist.ColumnQLinearConfig if column else dist.RowQLinearConfig
        own = made(size, size, recipe=NVFP4(), bias=False, axis=axis, sequence_parallel=sequence)
        held = LinearParams(whole.chunk(2, 0 if column else 1)[axis.rank].contiguous(), None)
        work = quantize_params(held, own, dtype=torch.float32, key=random.key(3))
        given = dy.chunk(2, 1)[axis.rank] if column else dy.chunk(2, 0)[axis.rank] if sequence else dy
        logging = LoggedConfig(dist.column_qlinear if column else dist.row_qlinear, own, ("dy_error",))
        x = torch.ones(size, size if column else D)
        _, residuals = logged.fwd(holding(work, torch.zeros(logging.shape), logging), x, logging)
        dparams, dx = logged.bwd(residuals, given.contiguous(), logging)
        return dx, dparams.logs[0, 1]

    (first, one), (second, other) = run_ranks({"tp": 2}, run)
    rounded = first if column else torch.cat((first, second), 1)
    parts = [slice(None)] * 2 if kind == "row" and not sequence else [slice(D), slice(D, size)]
    for part, error in zip(parts, (one, other), strict=True):
        at = (slice(None), part) if column else (part,)
        torch.testing.assert_close(error, (rounded[at] - dy[at]).norm() / dy[at].norm())


SIZES = DecoderConfig(
    vocab=32,
    dim=D,
    layers=2,
    heads=2,
    kv_heads=1,
    head_size=64,
    hidden=D,
    context=8,
    rope=RopeConfig(64),
    moe=MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, D, D)),
)


def test_every_step_of_a_mixture_has_its_rounding():
    """In a model, by path and layer: the experts' products are steps of their own there."""
    cfg = with_recipe(decoder(SIZES, loss=True), Fp8Block(), attention=("*.mix",))
    asked, params = rounding_logs(cfg), chain.init(cfg, key=random.key(0))
    paths = {f"blocks.*.{name}" for name in ("attn.mix", "attn.out", "mlp.experts.up", "mlp.experts.down", "mlp.gate")}
    assert paths <= asked.keys() and set(rounding_logs(cfg, skip=("*.experts.*", "head"))) == asked.keys() - {
        "blocks.*.mlp.experts.up",
        "blocks.*.mlp.experts.down",
        "head",
    }
    logging, work = with_logs(cfg, asked), quantize_params(params, cfg)
    ids = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    x = decoder_x(SIZES, ids, torch.bfloat16, labels=ids.roll(-1, 1))
    want, (loss, grads, *_) = value_and_grad(chain)(work, x, cfg)[:2], value_and_grad(chain)(logs_init(work, logging), x, logging)
    grads, found = split_logs(grads, logging)
    assert torch.equal(loss.main, want[0].main) and found.keys() == asked.keys()
    for path, named in found.items():
        errors = [value for name, value in named.items() if name.endswith("_error")]
        assert len(errors) in (2, 4) and all(0 < e < 0.1 for value in errors for e in value.reshape(-1).tolist()), path
    torch.testing.assert_close(grads["blocks"][0]["mlp"]["experts"].up.weight, want[1]["blocks"][0]["mlp"]["experts"].up.weight)
    measured = {path.removesuffix(".weight").replace("blocks.0", "blocks.*") for path in weight_rounding(params, work)}
    assert {path for path in asked if not path.endswith("mix")} <= measured


def test_a_step_without_such_logs_is_named(monkeypatch):
    cfg = with_recipe(decoder(SIZES, loss=True), Fp8Block(), attention=("*.mix",))
    monkeypatch.setattr(watch, "MADE", {*qlinear.logs})
    wanted = r"one whose steps with a recipe have logs of their rounding, got blocks\.\*\.mlp\.experts\.up \(skip leaves it out\)"
    with pytest.raises(ValueError, match=wanted):
        rounding_logs(cfg)
    assert rounding_logs(cfg, skip=("*.experts.*",)).keys() >= {"head"}
    with pytest.raises(ValueError, match="rounding_logs: skip must be globs over"):
        rounding_logs(cfg, skip=("*.nothing",))
