"""Plans of decoders with experts: counted against routings, programs and kept tensors that are really there, and against published
steps and messages."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch
from committed import committed
from hypothesis import given, settings
from hypothesis import strategies as st
from predictions import check_prediction

from benchmarks import published
from funcops import ExpertsConfig, RopeConfig, RouteConfig, WithExtras, chain, dist, random, report
from funcops.engine.trees import tensors
from funcops.low_precision import MXFP8, Fp8Block, Fp8Current, with_recipe
from funcops.models import DecoderConfig, MoEConfig, decoder, decoder_x, roles
from funcops.schedule import GPU, GPUS, Decoder, Layout, Mixture, plan_parallel, predict
from funcops.schedule.layout import expert_times, layer_times, of_experts, peak, problem, rank_memory, stages_of
from funcops.schedule.predict import simulated as simulated_of
from funcops.testing import run_ranks

H100 = GPUS["H100"]
SMALL = Decoder(1024, 512, 12, 8, 32000, 2048, 48, kv_heads=4, mixture=Mixture(16, 2))


def drawn(tokens, experts, choices, seed=0):
    """[T, K]: any choices of each token."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=draw).argsort(-1)[:, :choices].to(torch.int32)


@pytest.mark.parametrize(("experts", "choices", "ep"), [(8, 2, 8), (64, 2, 8), (64, 8, 8), (128, 8, 64), (16, 4, 1), (4, 4, 2)])
def test_a_token_is_sent_to_as_many_ranks_as_routings_say(experts, choices, ep):
    indices = drawn(4096, experts, choices) // (experts // ep)
    counted = sum(len(set(row)) for row in indices.tolist()) / len(indices)
    assert Mixture(experts, choices).ranks(ep) == pytest.approx(counted, rel=0.02)


@pytest.mark.parametrize(("ep", "choices", "rows"), [(8, 2, 1.64), (64, 8, 7.5)])
def test_many_experts_send_the_rows_of_independent_choices(ep, choices, rows):
    """n - 1 other ranks, each with a chance of 1 - (1 - 1/n)^K."""
    found = Mixture(10_000 * ep, choices).ranks(ep) * (1 - 1 / ep)
    assert found == pytest.approx((ep - 1) * (1 - (1 - 1 / ep) ** choices), rel=1e-3) and found == pytest.approx(rows, abs=0.05)


def test_dispatch_sends_the_rows_that_are_counted():
    tokens, mixture, n = 512, Mixture(32, 4), 4

    def run(mesh):
        indices = drawn(tokens, mixture.experts, mixture.choices, mesh.rank)
        x = torch.ones(tokens, mixture.choices), torch.ones(tokens, 2), indices
        (_, _, _, _, sizes), _ = dist.dispatch.fwd(None, x, dist.DispatchConfig(mixture.experts, axis=mesh["ep"]))
        return sizes[0].sum().item()

    sent = run_ranks({"ep": n}, run)
    assert sum(sent) / n / tokens == pytest.approx(mixture.ranks(n), rel=0.02)


def config(layers=2, shared=0, head_size=4, experts=8, dim=16, hidden=6):
    mixture = MoEConfig(route=RouteConfig(experts, 2), experts=ExpertsConfig(experts, dim, hidden), shared=shared)
    return DecoderConfig(vocab=64, dim=dim, layers=layers, heads=4, kv_heads=2, head_size=head_size, hidden=12, context=32,
                         rope=RopeConfig(head_size), moe=mixture)  # fmt: skip


def model_of(cfg, seq=16, batch=8, **fields):
    """The sizes of a config, by hand."""
    size = None if cfg.heads * cfg.head_size == cfg.dim else cfg.head_size
    mixture = Mixture(cfg.moe.experts.experts, cfg.moe.route.top_k, cfg.moe.shared)
    fields = dict(kv_heads=cfg.kv_heads, mixture=mixture, head_size=size) | fields
    return Decoder(cfg.dim, cfg.moe.experts.hidden, cfg.layers, cfg.heads, cfg.vocab, seq, batch, **fields)


SIZES = [(8, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((0, 4), (0, 6)))]


@pytest.mark.parametrize(("shared", "head_size"), SIZES)
def test_a_decoder_with_experts_is_counted(shared, head_size):
    """Its params and kept bytes equal a forward's, and a decoder described by its sizes gives the same; but for the offsets of a
    layer's experts, four bytes each."""
    cfg = config(3, shared, head_size)
    made, ids = decoder(cfg, loss=True), torch.randint(64, (2, 16))
    x = decoder_x(cfg, ids, torch.bfloat16, labels=ids)
    found, described = Decoder.of(made, x, batch=8), model_of(cfg)
    params = chain.init(made, key=random.key(0), dtype=torch.bfloat16)
    assert found.params == sum(t.numel() for t in tensors(params))
    kept = sum(row.bytes for row in report(chain.fwd(params, x, made)[1], params, x).rows if row.path.startswith("blocks.1."))
    assert found.residual_bytes * 32 == kept
    assert dataclasses.replace(found, residual_bytes=None) == described
    assert described.kept("none") == (kept - 4 * (cfg.moe.experts.experts + 1)) / 32
    first = 2 * (2 * 2 * 6 + 2 * shared)  # two experts' gates and values, and the shared MLP's
    assert described.kept("none") - described.kept("mlp") == first and described.kept("block") == 2 * 16


def test_the_rows_that_come_are_kept():
    """`parallel_experts` keeps them, and a row of the first product for each of their choices."""
    tokens, mixture, n, h, ffn = 512, Mixture(32, 2), 4, 8, 6

    def run(mesh):
        cfg = dist.ParallelExpertsConfig(mixture.experts, h, ffn, axis=mesh["ep"])
        params = dist.parallel_experts_init(cfg, key=random.key(0), dtype=torch.bfloat16)
        x = torch.rand(tokens, 2), torch.randn(tokens, h).bfloat16(), drawn(tokens, mixture.experts, 2, mesh.rank)
        y, kept = dist.parallel_experts_fwd(params, x, cfg)
        return report(kept, params, (x, y)).kept_bytes

    model = Decoder(h, ffn, 1, 1, 1, tokens, n, mixture=mixture)
    router = 2 * h + 8 * mixture.choices  # x of the router, and what it gave: kept before
    fixed = 4 * (mixture.experts // n + 1) + 16 * n  # offsets and sizes
    found = sum(run_ranks({"ep": n}, run)) / n
    assert found - fixed == pytest.approx(tokens * (model.kept_by_experts(n) - router), rel=0.02)
    assert model.kept("none", n) - model.kept("none") == pytest.approx(model.kept_by_experts(n) - model.kept_by_experts(1))


@pytest.mark.parametrize("sizes", [{"dp": 2, "ep": 4, "tp": 1}, {"dp": 1, "ep": 2, "tp": 2}])
def test_the_params_of_a_rank_are_those_of_a_program(sizes):
    """Norms and routers are not sharded over tp, which the plan neglects."""
    cfg, tp = config(layers=3, head_size=4), sizes["tp"]
    mesh = dist.Mesh.abstract(sizes, 0)
    own = dist.parallel(decoder(cfg, loss=True), roles(cfg, loss=True), mesh)
    held = sum(t.numel() for t in tensors(chain.init(own, device="meta")))
    layout, model = Layout(**sizes), model_of(cfg)
    said = rank_memory(model, layout, 0)
    more = 16 + 3 * (2 * 16 + 8 * 16) * (1 - 1 / tp)
    assert said.params == 2 * (held - more) and said.grads == 4 * (held - more) and said.optimiser == 12 * (held - more)
    sharded = rank_memory(model, dataclasses.replace(layout, zero=1), 0) if layout.replicas > 1 else said
    experts = 12 * 3 * model.expert_params / layout.ep
    assert sharded.optimiser == pytest.approx((said.optimiser - experts) / layout.replicas + experts / layout.expert_replicas)


LOW = (Fp8Block(), Fp8Current(), MXFP8(keep="row"), MXFP8())
RECIPES = (None, *(pytest.param(one, marks=pytest.mark.slow) for one in LOW))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: str(one and one.x.name))
def test_the_messages_of_experts_are_the_recorded_ones(recipe):
    """A program of a decoder with its experts over ranks sends as many a layer, of the same rows, and exposes as many: codes and
    scales where its recipe sends these."""
    n, layers = 4, 2
    cfg = config(layers) if recipe is None else config(layers, head_size=32, dim=128, hidden=128)
    made = decoder(cfg, loss=True)
    if recipe is not None:
        made = with_recipe(made, recipe, only=("*.proj", "*.out", "*.experts"))

    def step(mesh):
        own = dist.parallel(made, roles(cfg, loss=True), mesh)
        ids = torch.empty(2, 16, dtype=torch.int64, device="meta")
        x = decoder_x(cfg, ids, torch.bfloat16, labels=ids)
        y, kept = chain.fwd(chain.init(own, device="meta", dtype=torch.bfloat16), x, own)
        chain.bwd(kept, WithExtras(torch.empty_like(y.main), dict.fromkeys(y.extras)), own)

    program = dist.check_program(step, {"ep": n, "tp": 1}, ranks=(0,))[0]
    sent = [one for one in program.sent if "all_to_all" in str(one)]
    width = {"float32": 4, "bfloat16": 2, "int32": 4, "uint8": 1}

    def of_row(one):
        kind, shape = re.search(r"of (\w+)\[\*(?:, (\d+))?\]", str(one)).groups()
        return 8 * n * n if kind == "int64" else width[kind] * int(shape)

    model, tokens = model_of(cfg, low=recipe or False), 32
    said = of_experts(model, H100, layers, tokens, n, "none")
    rows, coded = model.mixture.ranks(n) * tokens * n, recipe in (Fp8Block(), MXFP8(keep="row"))
    assert sum(one.times for one in said) == len(sent) == (9 if coded else 8) * layers
    counts = lambda nbytes: nbytes if nbytes == 8 * n * n else nbytes / rows  # noqa: E731
    assert sorted(counts(one.nbytes) for one in said for _ in range(one.times)) == pytest.approx(sorted(map(of_row, sent)))
    exposed = [one for place, one in enumerate(program.sent) if place in program.exposed and "all_to_all" in str(one)]
    assert sum(one.times for one in said if not one.hidden_under) == len(exposed) == (6 if recipe is None else 8 + coded) * layers
    again = of_experts(model, H100, layers, tokens, n, "block")
    assert len(again) == len(said) + 5 + coded and not of_experts(model, H100, layers, tokens, 1, "none")


@pytest.mark.slow
def test_a_decoder_of_experts_with_a_recipe_is_counted():
    """A router may keep its precision; if other layers do, no codes are assumed."""
    cfg, ids = config(2, head_size=32, dim=128, hidden=128), torch.zeros(2, 16, dtype=torch.int64)
    for only, low in ((("*.proj", "*.out", "*.experts"), Fp8Block()), (("*.proj", "*.out"), True)):
        made = with_recipe(decoder(cfg, loss=True), Fp8Block(), only=only)
        found = Decoder.of(made, decoder_x(cfg, ids, torch.bfloat16, labels=ids), batch=8)
        assert dataclasses.replace(found, residual_bytes=None) == model_of(cfg, low=low)


def test_dense_layers_and_experts_have_replicas_of_their_own():
    """Gradients of experts are summed over dp, cp and tp; the others over dp, ep and cp."""
    layouts = {Layout(dp=2, ep=4, tp=2): (8, 4), Layout(tp=2): (1, 2), Layout(ep=4): (4, 1), Layout(2, ep=2, cp=2, zero=3): (8, 4)}
    for layout, replicas in layouts.items():
        assert (layout.replicas, layout.expert_replicas) == replicas
        found = {"dp": 0.0, "edp": 0.0}
        for one in stages_of(SMALL, layout, H100).last.collectives:
            if one.kind in ("all_reduce", "reduce_scatter") and one.axis in found:
                found[one.axis] += one.times * one.nbytes
        experts = SMALL.layers * SMALL.expert_params
        dense = SMALL.params - SMALL.hidden - experts
        assert found["dp"] == pytest.approx(4 * dense / layout.tp * (layout.replicas > 1)), layout
        assert found["edp"] == pytest.approx(4 * experts / layout.ep * (layout.expert_replicas > 1)), layout


@pytest.mark.parametrize("head_size", [None, 64, 256])
def test_the_first_product_is_as_wide_as_all_heads(head_size):
    """Heads need not be as wide as the model together."""
    model = dataclasses.replace(SMALL, head_size=head_size)
    n, k, _ = model.products[0]
    times = H100.product(2048, k, n), H100.product(n, k, 2048, 8)
    assert layer_times(model, H100, 1, 1, 1, "none").column[0] == times


def test_grouped_products_fill_tiles_together():
    gpu = GPU("two SMs", 100.0, 0.5, 2, 1e18, 1.0, 1.0)
    tile = 2 * 256 * 128 * 10 / (50.0 / 2)
    for groups, shape, waves in ((2, (256, 128), 1), (3, (256, 128), 2), (8, (1, 1), 4), (2, (256, 129), 2)):
        assert gpu.product(*shape, 10, groups=groups) == pytest.approx(waves * tile), (groups, shape)
    slow = dataclasses.replace(gpu, memory_bandwidth=1e-3)
    assert slow.product(256, 128, 10, 4, groups=3) == pytest.approx(3 * slow.product(256, 128, 10, 4))
    few, many = (expert_times(dataclasses.replace(SMALL, mixture=Mixture(experts, 2)), H100, 8192, 1) for experts in (4, 256))
    assert few.forward < many.forward, "the same rows, of more experts, have more partial tiles, and weights to read"


def test_an_exchange_between_nodes_uses_a_port_alone():
    gpu = dataclasses.replace(H100, near_bandwidth=300e9, bandwidth=50e9)
    for n, far, near in ((8, 0, 7), (16, 8, 7), (64, 56, 7)):
        link = gpu.link("ep", n, 1, direct=True)
        seconds = max(far / 50e9, near / 300e9) * 1e9
        assert (n - 1) * 1e9 / link.bandwidth == pytest.approx(seconds)
        assert link.latency == (gpu.latency if far else gpu.near_latency)
    assert gpu.link("dp", 16, 1).bandwidth == 300e9


LAYOUTS = st.builds(
    Layout,
    dp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4, 7]),
    cp=st.sampled_from([1, 2]),
    chunks=st.sampled_from([1, 1, 2, 3]),
    microbatch=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(["none", "mlp", "block"]),
    ep=st.sampled_from([1, 2, 4, 8]),
)


@settings(max_examples=40)
@given(LAYOUTS, st.sampled_from([SMALL, dataclasses.replace(SMALL, layers=26, mixture=Mixture(16, 4, shared=512))]))
def test_a_prediction_is_a_whole_simulation(layout, model):
    check_prediction(model, layout, H100)


@pytest.mark.parametrize(("gpus", "memory"), [(4, 1e9), pytest.param(8, 0.6e9, marks=pytest.mark.slow)])
def test_a_plan_is_the_best_of_all_layouts(gpus, memory):
    model = Decoder(256, 256, 4, 4, 4096, 512, 8, kv_heads=2, mixture=Mixture(4, 2))
    best, sizes = {}, [d for d in range(1, gpus + 1) if gpus % d == 0]
    for dp, tp, pp, cp, ep in itertools.product(sizes, repeat=5):
        if dp * tp * pp * cp * ep == gpus:
            for chunks, rows, zero, way in itertools.product(range(1, 7), range(1, 9), range(4), ("none", "mlp", "block")):
                layout = Layout(dp, tp, pp, cp, chunks, rows, zero, way, ep)
                if problem(model, layout, H100) is None and peak(model, layout)[1].total <= memory:
                    shape = dataclasses.replace(layout, zero=0, recompute="none")
                    best[shape] = min(best.get(shape, 9e9), simulated_of(model, layout, H100).time)
    for fixed in ({}, {"ep": 2}):
        plan = plan_parallel(model, gpus, memory, show=5, margin=0.0, fixed=fixed)
        times = [time for shape, time in best.items() if fixed.get("ep", shape.ep) == shape.ep]
        assert [row.time for row in plan.rows] == pytest.approx(sorted(times)[:5]) and len(plan.rows) == 5


@pytest.mark.slow
def test_a_plan_of_experts_says_so(tmp_path):
    model = published.EXPERTS[0].model
    plan = plan_parallel(model, 32, 80e9, show=1, fixed={"cp": 1, "tp": 1, "zero": 1})
    assert plan.best.layout.ep > 1 and " ep " in str(plan).splitlines()[0] and "of a layer on a GPU" in str(plan.best)
    sent = model.mixture.ranks(plan.best.layout.ep) * (1 - 1 / plan.best.layout.ep)
    assert f"a token is sent to {sent:.2f} other ranks" in str(plan.best)
    assert plan.why_not(ep=3)[0].why == "ep must be a divisor of gpus 32, got 3"
    (listed,) = plan.why_not(**{name: getattr(plan.best.layout, name) for name in ("pp", "dp", "ep", "cp", "tp")})
    assert listed.why.startswith("it is listed: row 1,")
    odd = dataclasses.replace(SMALL, mixture=Mixture(6, 2))
    assert "ep must be a divisor of experts 6, got 8" in str(plan_parallel(odd, 8, 80e9, show=1).why_not(ep=8)[0])
    fewer = dataclasses.replace(SMALL, batch=4)
    assert any("dp x ep must be a divisor of batch 4, got 2 x 4" in one.why for one in plan_parallel(fewer, 8, 80e9).refused)
    pytest.importorskip("matplotlib")
    plan.draw(tmp_path / "best.svg")
    assert (tmp_path / "best.svg").stat().st_size > 1_000


DENSE = dataclasses.replace(SMALL, mixture=None)
BAD = {
    "predict: layout.ep must be 1 without experts, got 2": lambda: predict(DENSE, Layout(ep=2)),
    "predict: layout.ep must be a divisor of experts 16, got 3": lambda: predict(SMALL, Layout(ep=3)),
    "predict: layout.dp x ep must be a divisor of batch 48, got 2 x 16": lambda: predict(SMALL, Layout(dp=2, ep=16)),
    "predict: layout.tp must be a divisor of shared 6, got 4": lambda: predict(
        dataclasses.replace(SMALL, mixture=Mixture(16, 2, 6)), Layout(tp=4)
    ),
    "plan_parallel: fixed must be without ep for a model without experts, got {'ep': 2}": lambda: plan_parallel(
        DENSE, 8, 80e9, fixed={"ep": 2}
    ),
    "Plan.why_not: sizes must be of the axes pp, dp, cp, tp, got 'ep'": lambda: plan_parallel(DENSE, 2, 80e9).why_not(ep=2),
    "Plan.why_not: tp must be at least 1, got 0": lambda: plan_parallel(DENSE, 2, 80e9).why_not(tp=0),
    "Plan.why_not: pp must be at least 1, got -2": lambda: plan_parallel(DENSE, 2, 80e9).why_not(dp=1, pp=-2),
    "Plan.why_not: dp must be int": lambda: plan_parallel(DENSE, 2, 80e9).why_not(dp=2.0),
    "Mixture: choices must be at most experts 4, got 5": lambda: Mixture(4, 5),
    "Mixture: shared must be at least 0, got -1": lambda: Mixture(4, 2, -1),
    "Mixture.ranks: ep must be a divisor of experts 8, got 3": lambda: Mixture(8, 2).ranks(3),
    "Decoder: mixture must be Mixture or None": lambda: dataclasses.replace(SMALL, mixture=8),
    "Decoder: head_size must be at least 1, got 0": lambda: dataclasses.replace(SMALL, head_size=0),
    "Layout: ep must be at least 1, got 0": lambda: Layout(ep=0),
    "Decoder.of: cfg must be a chain of an embedding, a repeat of blocks of attention and one MLP or experts, and a head, got": (
        lambda: Decoder.of(decoder(dataclasses.replace(config(), moe=dataclasses.replace(config().moe, dense=(0,)))), IDS, 8)
    ),
}
IDS = decoder_x(config(), torch.zeros(1, 16, dtype=torch.int64), torch.bfloat16)


@pytest.mark.parametrize("said", BAD)
def test_bad_calls_are_named(said):
    with pytest.raises((ValueError, TypeError)) as error:
        BAD[said]()
    assert str(error.value).startswith(said)


def test_the_page_has_the_ranks_of_a_token():
    assert f"64 experts over 8 ranks, two each, a token goes to {Mixture(64, 2).ranks(8):.2f} ranks" in PAGE


PAGE = re.sub(r"\s+", " ", (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text())


@pytest.mark.parametrize("row", published.EXPERTS, ids=lambda row: row.name)
def test_published_steps_with_experts_are_predicted(row):
    """Within 15 %, and nothing was fitted to them; the page quotes these figures."""
    said = row.predicted()
    assert abs(row.error()) <= 0.15
    quoted = committed("cpu-schedule")[row.name, "funcops.schedule.predict", "seconds per step"]
    assert said.time == pytest.approx(quoted, rel=1e-3)
    assert f"{row.name.replace(',', ' on')} takes {row.seconds:.2f} s, predicted {said.time:.2f} s" in PAGE


@pytest.mark.parametrize("row", published.MESSAGES, ids=lambda row: row.gpu.name)
def test_exposed_communication_is_as_published(row):
    """Within a quarter: of a layer in Megatron's order, by the measured times of its messages; and each message for itself."""
    found, wanted = published.exposed_of_layer(row)
    assert found == pytest.approx(wanted, rel=0.25)
    link, nbytes = row.gpu.link("tp", 8, 1), 2 * row.tokens * row.hidden
    for kind, seconds in (("all_gather", row.gather), ("reduce_scatter", row.scatter)):
        assert link.time(kind, nbytes) == pytest.approx(seconds, rel=0.25)


def test_the_page_says_how_much_less_is_predicted():
    below = [100 * (1 - found / wanted) for found, wanted in map(published.exposed_of_layer, published.MESSAGES)]
    assert f"is {below[0]:.0f} % and {below[1]:.0f} % below the sum" in PAGE.replace("prediction is", "is")


@pytest.mark.parametrize("ranks", published.DISPATCH_BANDWIDTHS)
def test_an_exchange_of_tokens_is_as_fast_as_published(ranks):
    """Within a quarter, on the slowest link: of a node, or of a GPU's port."""
    gpu = published.narrow(H100)
    slowest = gpu.near_bandwidth if ranks <= gpu.per_node else gpu.bandwidth
    assert slowest == pytest.approx(published.DISPATCH_BANDWIDTHS[ranks], rel=0.25)
    far = max(0, ranks - gpu.per_node)
    link = gpu.link("ep", ranks, 1, direct=True)
    assert (ranks - 1) / link.bandwidth == pytest.approx((far or ranks - 1) / slowest)
