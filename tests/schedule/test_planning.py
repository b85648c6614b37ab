"""Collectives in costs, layouts of decoders, and plans: closed forms against the simulator, and plans against all layouts."""

import dataclasses
import itertools
import re

import pytest
import torch
from committed import COMMITTED
from hypothesis import given, settings
from hypothesis import strategies as st
from predictions import check_prediction

from benchmarks import published
from funcops import (
    ChainConfig,
    EmbeddingConfig,
    ExpertsConfig,
    LinearConfig,
    RepeatConfig,
    RopeConfig,
    Step,
    WithExtras,
    chain,
    dist,
    embedding,
    linear,
    random,
    repeat,
    report,
    trees,
)
from funcops.low_precision import Fp8Current, with_recipe
from funcops.models import DecoderConfig, decoder, decoder_x, plain_experts
from funcops.models.blocks import Sizes, decoder_config, gpt2_block_config
from funcops.schedule import (
    GPU,
    GPUS,
    Collective,
    Costs,
    Decoder,
    Layout,
    Link,
    Mixture,
    Network,
    delay_w,
    draw,
    dualpipe_v,
    fold,
    gpipe,
    interleaved_1f1b,
    measure_stages,
    one_f_one_b,
    plan_parallel,
    predict,
    simulate,
    zb_h1,
    zb_v,
)
from funcops.schedule.layout import Stages, in_flight, layer_times, peak, problem, rank_memory, stages_of
from funcops.schedule.predict import bound, least_time, loads_of, schedule_of, simulate_few
from funcops.schedule.predict import simulated as simulated_of
from funcops.schedule.simulate import Model

TIMES = st.sampled_from([0.5, 1.0, 1.75, 3.0])
GENERATORS = (gpipe, one_f_one_b, zb_h1, zb_v, interleaved_1f1b, dualpipe_v)
LINKS = (Link("tp", 4, 0.125, 8.0), Link("dp", 8, 0.5, 2.0), Link("one", 1))


@given(st.integers(1, 70), st.floats(0, 2), st.floats(0.1, 9), st.floats(0, 100))
def test_collectives_take_as_many_messages_as_they_send(n, latency, bandwidth, size):
    """A message is a latency and its bytes: a ring passes a part on n - 1 times, a tree halves and doubles."""
    link = Link("tp", n, latency, bandwidth)

    def messages(count, nbytes):
        return pytest.approx(sum(latency + nbytes / bandwidth for _ in range(count)), abs=1e-9)

    assert link.time("all_gather", size) == link.time("reduce_scatter", size) == messages(n - 1, size / n)
    assert link.time("all_to_all", size) == messages(n - 1, size / n**2)
    assert link.time("p2p", size) == messages(1 if n > 1 else 0, size)
    depth = (n - 1).bit_length()
    tree = 2 * depth * latency + (2 * size / bandwidth if n > 1 else 0.0)
    assert link.time("all_reduce", size) == pytest.approx(min(2 * link.time("all_gather", size), tree))


COLLECTIVE = st.builds(
    Collective,
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "p2p"]),
    st.sampled_from(["tp", "dp", "one"]),
    st.sampled_from([0.0, 3.0, 20.0]),
    st.sampled_from([0.0, 0.5, 2.0, float("inf")]),
    st.sampled_from(["F", "I", "W", "step"]),
    st.integers(1, 3),
)


@settings(max_examples=25)
@given(st.sampled_from(GENERATORS), st.integers(1, 3), st.integers(1, 4), st.data())
def test_time_that_nothing_hides_belongs_to_the_action(generator, p, m, data):
    """The result equals a simulation of costs with that time added by hand; time once a step follows the rank's last action."""
    made = generator(p, m)
    drawn = [data.draw(st.tuples(TIMES, TIMES, TIMES, st.lists(COLLECTIVE, max_size=3))) for _ in range(made.stages)]
    costs = [Costs(f, i, w, output_bytes=4.0, collectives=tuple(said)) for f, i, w, said in drawn]
    by_name, plain, after = {link.axis: link for link in LINKS}, [], [0.0] * p
    for stage, (f, i, w, said) in enumerate(drawn):
        more = {"F": f, "I": i, "W": w, "step": 0.0}
        for one in said:
            more[one.during] += one.times * max(0.0, by_name[one.axis].time(one.kind, one.nbytes) - one.hidden_under)
        plain.append(Costs(more["F"], more["I"], more["W"], output_bytes=4.0))
        after[made.rank_of[stage]] += more["step"]
    network, bare = Network(0.25, 8.0, axes=LINKS), Network(0.25, 8.0)
    found, by_hand = simulate(made, costs, network), simulate(made, plain, bare)
    for a, b in zip(found.slots, by_hand.slots, strict=True):
        assert [x.action for x in a] == [x.action for x in b]
        assert [x.start for x in a] == pytest.approx([x.start for x in b]) and [x.end for x in a] == pytest.approx(
            [x.end for x in b]
        )
    assert found.time == pytest.approx(max(row[-1].end + more for row, more in zip(by_hand.slots, after, strict=True)))
    assert delay_w(made, 99.0, costs, network).ranks == delay_w(made, 99.0, plain, bare).ranks or any(after)
    assert fold(made, 1, costs, network).ranks == fold(made, 1, plain, bare).ranks


def test_an_axis_that_the_network_lacks_is_named():
    costs = Costs(collectives=(Collective("all_gather", "tp", 8.0), Collective("p2p", "cp", 8.0)))
    with pytest.raises(ValueError, match=r"simulate: costs.collectives.1.axis must be an axis of the network, tp or dp, got 'cp'"):
        simulate(gpipe(2, 2), costs, Network(axes=LINKS[:2]))
    with pytest.raises(ValueError, match="must be an axis of the network, which has none, got 'tp'"):
        simulate(gpipe(2, 2), costs)
    with pytest.raises(ValueError, match="Network: axes must be a link for each axis once, got tp, tp"):
        Network(axes=(LINKS[0], LINKS[0]))


@settings(max_examples=40)
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(1, 7), st.tuples(*[st.tuples(TIMES, TIMES, st.booleans())] * 3), st.booleans()
)
def test_closed_forms_are_the_simulators(p, v, groups, drawn, same):
    """For equal stages the exact time, and the peak bytes in flight; for other stages a bound; and the time of many microbatches
    from few."""
    m, network, layout = groups * p if v > 1 else groups * 3 - 2, Network(axes=LINKS), Layout(pp=p, chunks=v)
    step = (Collective("all_gather", "dp", 6.0, during="step"),)
    costs = [Costs(f, b / 2, b / 2, residual_bytes=3.0, collectives=step if after else ()) for f, b, after in drawn]
    stages = Stages(*costs[:1] * 3 if same else costs)
    found = simulate(schedule_of(p, v, m), stages.all(p * v), network)
    least = least_time(m, loads_of(layout, Model.of(schedule_of(p, v, m), stages.all(p * v), network, "here")))
    assert least <= found.time * (1 + 1e-12) and (not same or least == pytest.approx(found.time))
    assert found.peak_bytes == tuple(3.0 * in_flight(layout, rank, m) for rank in range(p))
    assert simulate_few(layout, m, stages, network)[1] == pytest.approx(found.time)


BIG = st.builds(
    Layout,
    dp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4, 7]),
    cp=st.sampled_from([1, 2]),
    chunks=st.sampled_from([1, 1, 2, 3, 6]),
    microbatch=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    recompute=st.sampled_from(["none", "mlp", "block"]),
)
SMALL = Decoder(1024, 2816, 12, 8, 32000, 2048, 48, kv_heads=4)


@settings(max_examples=40)
@given(BIG, st.sampled_from([SMALL, dataclasses.replace(SMALL, layers=26, flash=False, gated=False)]))
def test_a_prediction_is_a_whole_simulation(layout, model):
    check_prediction(model, layout, GPUS["H100"])


def test_sharding_saves_memory_and_recompute_costs_time():
    rows = [[predict(SMALL, Layout(dp=4, tp=2, zero=z, recompute=r)) for r in ("none", "mlp", "block")] for z in range(4)]
    for way in range(3):
        parts = [row[way].memory for row in rows]
        assert [p.optimiser * 4 for p in parts[1:]] == [parts[0].optimiser] * 3
        assert [p.grads * 4 for p in parts[2:]] == [parts[0].grads] * 2 and parts[3].params * 4 == parts[0].params
    for none, mlp, block in rows:
        assert none.time < mlp.time < block.time
        assert none.memory.residuals > mlp.memory.residuals > block.memory.residuals
        assert block.memory.residuals == 12 * 2048 * 1024 * 2 / 2, "a layer's x, in two bytes, over tp"


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 4])
def test_replicas_send_every_gradient_and_param(dp, zero):
    """Without a replica nothing; gradients in four bytes, sharded params in two, with ZeRO-3 again for the backward."""
    layout = Layout(dp=dp, tp=2, zero=zero if dp > 1 else 0)
    found = {}
    for one in stages_of(SMALL, layout, GPUS["H100"]).first.collectives:
        if one.axis == "dp":
            found[one.kind] = found.get(one.kind, 0.0) + one.times * one.nbytes
    params = (SMALL.params - SMALL.hidden) / 2  # all but the last norm's
    ends = 2 * SMALL.vocab * SMALL.hidden / 2
    gradients = {"all_reduce": 4 * params} if not zero else {"reduce_scatter": 4 * params}
    gathers = {"all_gather": 2 * params + (zero == 3) * 2 * (params - ends)} if zero else {}
    assert found == pytest.approx({**gradients, **gathers} if dp > 1 else {})


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("layers", [1, 5])
def test_the_exposed_messages_of_replicas_are_the_recorded_ones(zero, layers):
    """They are as many as in a program of `data_parallel` or `zero3`."""
    fast, model = dataclasses.replace(GPUS["H100"], bandwidth=1e30, near_bandwidth=1e30), dataclasses.replace(SMALL, layers=layers)
    said = [one for one in stages_of(model, Layout(dp=4, zero=zero), fast).last.collectives if one.axis == "dp"]
    exposed = sum(one.times for one in said if not one.hidden_under)

    def step(mesh):
        small = decoder_config(Sizes(dim=16, layers=layers, heads=2, kv_heads=2, hidden=24, vocab=32))
        dp = mesh["dp"]
        own = {
            0: lambda: dist.data_parallel(small, dp, ordered=False),
            1: lambda: dist.zero3(small, dp, ordered=False, reshard_after_forward=False),
            3: lambda: dist.zero3(small, dp, ordered=False),
        }[min(zero, 1) if zero < 3 else 3]()
        ids = torch.empty(2, 8, dtype=torch.int64)
        x = WithExtras(ids, {"positions": torch.empty(8, dtype=torch.int64), "labels": ids})
        loss, kept = chain.fwd(chain.init(own, device="meta"), x, own)
        chain.bwd(kept, torch.empty_like(loss), own)

    program = dist.check_program(step, {"dp": 4}, ranks=(0,))[0]

    assert exposed == len(program.exposed)
    assert exposed == {0: 2, 1: 4, 2: 4, 3: 5}[zero]


def test_a_plan_says_what_is_exposed():
    """It is not nothing with ZeRO-3 either, of which what comes first and last is exposed."""
    plan = plan_parallel(SMALL, 8, 80e9, fixed={"tp": 1, "pp": 1, "cp": 1, "zero": 3}, show=1)
    assert 0.0 < plan.best.spent.exposed < 0.2 * plan.best.time


def test_plans_are_shown_in_notebooks():
    plan = plan_parallel(SMALL, 8, 80e9, fixed={"tp": 2, "pp": 1}, show=40)
    assert max(map(len, repr(plan).split("\n"))) <= 120 and repr(plan).split("\n")[0] == str(plan).split("\n")[0]
    for one in (plan, plan.best):
        assert one._repr_html_().startswith("<pre>") and repr(one).split()[0] in one._repr_html_()
    assert repr(plan.best) == str(plan.best)


def test_products_fill_tiles_and_waves():
    gpu = GPU("two SMs", 100.0, 0.5, 2, 1e18, 1.0, 1.0)
    tile = 2 * 256 * 128 * 10 / (50.0 / 2)  # seconds of one on its SM
    for shape, waves in (((256, 128), 1), ((512, 128), 1), ((1, 1), 1), ((512, 129), 2), ((128, 256), 1), ((768, 128), 2)):
        assert gpu.product(*shape, 10) == pytest.approx(waves * tile), shape
    slow = dataclasses.replace(gpu, memory_bandwidth=1e-3)
    assert slow.product(256, 128, 10, 4) == pytest.approx((2 * (256 + 128) * 10 + 4 * 256 * 128) / 1e-3)
    near, far = gpu.link("tp", 8, 1), gpu.link("dp", 8, 8)
    assert (near.latency, far.latency) == (gpu.near_latency, gpu.latency)


def every_layout(model, gpus):
    for dp, tp, pp, cp in itertools.product(*[[d for d in range(1, gpus + 1) if gpus % d == 0]] * 4):
        if dp * tp * pp * cp == gpus:
            for chunks, rows, zero, way in itertools.product(range(1, 7), range(1, 9), range(4), ("none", "mlp", "block")):
                layout = Layout(dp, tp, pp, cp, chunks, rows, zero, way)
                if problem(model, layout, GPUS["H100"]) is None:
                    yield layout


PLANNED = [(6, 0.5e9), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(4, 2e9), (8, 0.3e9), (8, 20e9)])]


@pytest.mark.parametrize(("gpus", "memory"), PLANNED)
def test_a_plan_is_the_best_of_all_layouts(gpus, memory):
    """All layouts are tried: the rows are the fastest that fit, and a mesh is out if none of its layouts fits."""
    model = Decoder(256, 640, 4, 4, 4096, 512, 8, kv_heads=2)
    plan = plan_parallel(model, gpus, memory / 0.9, show=5, margin=0.1)
    best = {}
    for layout in every_layout(model, gpus):
        known, shape = bound(model, layout, GPUS["H100"]), dataclasses.replace(layout, zero=0, recompute="none")
        if peak(model, layout)[1].total <= memory:
            best[shape] = min(best.get(shape, 9e9), simulated_of(model, layout, GPUS["H100"], known).time)
    assert [row.time for row in plan.rows] == pytest.approx(sorted(best.values())[:5])
    assert all(row.peak_bytes <= memory and row.layout.gpus == gpus for row in plan.rows)
    mesh = lambda layout: (layout.dp, layout.tp, layout.pp, layout.cp)  # noqa: E731
    refused = [mesh(one.layout) for one in plan.refused]
    assert len(set(refused)) == len(refused) and not {*refused} & {mesh(shape) for shape in best}
    every = {
        sizes for sizes in itertools.product(range(1, gpus + 1), repeat=4) if sizes[0] * sizes[1] * sizes[2] * sizes[3] == gpus
    }
    assert every == {*refused} | {mesh(shape) for shape in best}


def test_a_plan_leaves_a_margin_of_memory():
    """The first choice of a plan without one would fill the GPU."""
    full = plan_parallel(SMALL, 8, 80e9, margin=0.0, show=1).best
    assert plan_parallel(SMALL, 8, full.peak_bytes, margin=0.0, show=1).best.layout == full.layout
    plan = plan_parallel(SMALL, 8, full.peak_bytes * 1.01, show=3)
    assert plan.margin == 0.05 and all(row.peak_bytes <= 0.95 * 1.01 * full.peak_bytes for row in plan.rows)
    assert full.layout not in [row.layout for row in plan.rows] and ", 5 % left free;" in str(plan)


def test_a_plan_says_why_a_mesh_is_out():
    model = Decoder(768, 2048, 10, 12, 50257, 1008, 24)
    plan = plan_parallel(model, 16, 2e9, "A100")
    why = {
        f"{name} {size}": plan.why_not(**{name: size})[0].why
        for name, size in (("tp", 8), ("tp", 16), ("pp", 16), ("cp", 16), ("dp", 16))
    }
    assert why == {
        "tp 8": "tp must be a divisor of heads 12, got 8",
        "tp 16": "tp must be a divisor of heads 12, got 16",
        "pp 16": "pp must be at most layers 10, got 16",
        "cp 16": "cp must be a divisor of half of seq 1008, got 16",
        "dp 16": "dp must be a divisor of batch 24, got 16",
    }
    four = plan.why_not(pp=8)
    assert four and all(
        "pp must be such that pp x chunks divides layers 10, or 12 with embedding and head, got 8 x 1" in one.why for one in four
    )
    assert "pp 8 x dp 2 x cp 1 x tp 1: pp must be" in " ".join(map(str, four))
    tight = plan_parallel(model, 16, 0.25e9, "A100")
    assert any(one.why.startswith("memory must be at least ") and "zero 3, recompute block" in one.why for one in tight.refused)
    assert "meshes are out" in str(plan) and str(plan).splitlines()[1].startswith("> ") and len(str(plan).splitlines()) == 12
    assert plan.best is plan.rows[0] and plan.counted > 50 and "TFLOP/s a GPU" in str(plan.best)
    with pytest.raises(ValueError, match="Plan.why_not: sizes must be of the axes pp, dp, cp, tp, got 'ep'"):
        plan.why_not(ep=2)


def test_a_plan_says_why_any_mesh_is_not_listed():
    plan = plan_parallel(SMALL, 8, 80e9, fixed={"chunks": 1, "cp": 1}, show=3)
    assert [str(one) for one in plan.why_not(pp=7)] == ["pp 7 x dp 1 x cp 1 x tp 1: pp must be a divisor of gpus 8, got 7"]
    assert plan.why_not(pp=4, tp=4)[0].why == "pp x tp must be a divisor of gpus 8, got 16"
    assert plan.why_not(cp=2, pp=4)[0].why == "cp must be 1 (fixed), got 2"
    best = plan.best.layout
    (first,) = plan.why_not(pp=best.pp, dp=best.dp, cp=1, tp=best.tp)
    assert first.why == f"it is listed: row 1, {plan.best.time:.4g} s"
    listed = {(row.layout.pp, row.layout.dp, row.layout.tp) for row in plan.rows}
    unlisted = [(1, 8, 1), (2, 4, 1), (1, 4, 2), (2, 2, 2), (8, 1, 1), (4, 2, 1)]
    slower = [one for pp, dp, tp in unlisted if (pp, dp, tp) not in listed for one in plan.why_not(pp=pp, dp=dp, tp=tp, cp=1)]
    fits = [one for one in slower if "fits" in one.why]
    assert fits
    for one in fits:
        at = {name: getattr(one.layout, name) for name in ("pp", "dp", "cp", "tp")}
        found = plan_parallel(SMALL, 8, 80e9, fixed={**at, "chunks": 1}).best
        assert found.time > plan.rows[-1].time
        assert one.why == f"it fits, and is slower: {found.time:.4g} s (row 3, the last: {plan.rows[-1].time:.4g} s)"
    alone = plan_parallel(SMALL, 2, 80e9, fixed={"zero": 1})
    assert [one.why for one in alone.why_not(tp=2)] == ["zero must be 0 if params have one replica, got 1"]


BAD = {
    "plan_parallel: gpus must be at least 1, got 0": lambda: plan_parallel(SMALL, 0, 80e9),
    "plan_parallel: memory must be at least 0, got -1": lambda: plan_parallel(SMALL, 8, -1),
    "plan_parallel: memory must be above 0, got 0": lambda: plan_parallel(SMALL, 8, 0),
    "plan_parallel: gpu must be A100 or H100, or a GPU of your own, got 'V100'": lambda: plan_parallel(SMALL, 8, 80e9, "V100"),
    "predict: layout.tp must be a divisor of heads 8, got 3": lambda: predict(SMALL, Layout(tp=3)),
    "predict: layout.tp must be a divisor or a multiple of kv_heads 4, got 6": lambda: predict(
        Decoder(12, 12, 1, 12, 8, 12, 1, kv_heads=4), Layout(tp=6)
    ),
    "predict: layout.tp must be a divisor of ffn 6, got 4": lambda: predict(Decoder(8, 6, 1, 4, 8, 8, 1), Layout(tp=4)),
    "predict: layout.tp must be a divisor of the 6 tokens that cp 2 leaves of seq 12, got 4": lambda: predict(
        Decoder(8, 8, 1, 4, 8, 12, 1), Layout(tp=4, cp=2)
    ),
    "plan_parallel: fixed must be of the fields dp, tp, pp, cp, chunks, microbatch, zero, recompute, ep, got 'vp'": lambda: (
        plan_parallel(SMALL, 8, 80e9, fixed={"vp": 2})
    ),
    "plan_parallel: fixed must be sizes whose product divides gpus 8, got {'tp': 3}": lambda: plan_parallel(
        SMALL, 8, 80e9, fixed={"tp": 3}
    ),
    "tp 3: tp must be a divisor of heads 8, got 3), got 9": lambda: plan_parallel(SMALL, 9, 80e9, fixed={"tp": 3}),
    "plan_parallel: memory must be at least 505,075,712 bytes": lambda: plan_parallel(SMALL, 8, 1e6, margin=0.0),
    "plan_parallel: memory must be at least 1,010,151,424 bytes": lambda: plan_parallel(SMALL, 8, 1e6, margin=0.5),
    "plan_parallel: margin must be below 1, got 1": lambda: plan_parallel(SMALL, 8, 80e9, margin=1),
    "Decoder: window must be at least 1, got 0": lambda: dataclasses.replace(SMALL, window=0),
    "Decoder: window must be None without flash, which writes out all pairs, got 4": lambda: dataclasses.replace(
        SMALL, window=4, flash=False
    ),
    "Decoder: heads must be a divisor of hidden 10, got 3": lambda: Decoder(10, 8, 1, 3, 8, 8, 8),
    "Decoder: kv_heads must be a divisor of heads 2, got 3": lambda: Decoder(8, 8, 1, 2, 8, 8, 8, kv_heads=3),
    "Layout: zero must be 0, 1, 2 or 3, got 4": lambda: Layout(zero=4),
    "Collective: kind must be all_gather or reduce_scatter or": lambda: Collective("gather", "tp", 1.0),
    "Decoder.of: cfg must be a chain of an embedding, a repeat of blocks": lambda: Decoder.of(
        gpt2_block_config(8, 2, 8, 0.0), torch.zeros(1, 2, dtype=torch.int64), 3
    ),
    "Decoder.of: x must be tokens [B, T], with the chain's extras, got float32[1, 2]": lambda: Decoder.of(
        decoder_config(Sizes(dim=8, layers=2, heads=2, kv_heads=2, hidden=8, vocab=8)), torch.zeros(1, 2), 3
    ),
    "one MLP or experts, and a head, got a block of 0 attentions, 1 linear layers and 0 steps of experts": lambda: Decoder.of(
        ChainConfig(
            steps=(
                Step("embed", embedding, EmbeddingConfig(8, 4)),
                Step("blocks", repeat, RepeatConfig(chain, ChainConfig(steps=(Step("up", linear, LinearConfig(4, 4)),)), 2)),
            )
        ),
        torch.zeros(1, 2, dtype=torch.int64),
        3,
    ),
    "Decoder.of: batch must be at least 1, got 0": lambda: Decoder.of(gpt2_block_config(8, 2, 8, 0.0), tokens(1, 2), 0),
    "GPU: efficiency must be at most 1, got 1.5": lambda: dataclasses.replace(GPUS["H100"], efficiency=1.5),
    "GPU: attention must be at most 1, got 1.5": lambda: dataclasses.replace(GPUS["H100"], attention=1.5),
    "Mixture.ranks: ep must be at least 1, got 0": lambda: Mixture(8, 2).ranks(0),
    "Link.time: kind must be all_gather or reduce_scatter or all_reduce or all_to_all or p2p, got 'gather'": lambda: LINKS[0].time(
        "gather", 1.0
    ),
    "Link.time: nbytes must be at least 0, got -1.0": lambda: LINKS[0].time("p2p", -1.0),
    "measure_stages: stage 'sort' must be without gives that another stage takes: extras come from the caller alone, got": lambda: (
        measure_stages(None, None, plain_experts(ExpertsConfig(4, dim=8, hidden=16)))
    ),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_calls_are_named(said):
    with pytest.raises(ValueError) as error:
        BAD[said]()
    assert said in str(error.value)


def tokens(rows, seq):
    ids = torch.zeros(rows, seq, dtype=torch.int64)
    return WithExtras(ids, {"positions": torch.arange(seq), "labels": ids})


@pytest.mark.parametrize("window", [1, 2, 300, 2048, 5000, None])
def test_a_window_is_counted(window):
    model = dataclasses.replace(SMALL, window=window)
    seen = sum(min(t + 1, window or SMALL.seq) for t in range(SMALL.seq)) / SMALL.seq
    assert abs(model.keys - seen) <= 0.5  # a query's own key counts for a half, as in published tables
    least = dataclasses.replace(SMALL, window=1)
    pairs = (model.keys - least.keys) * 12 * SMALL.batch * SMALL.seq * SMALL.layers * SMALL.hidden
    assert model.flops - least.flops == pytest.approx(pairs)
    faster = predict(model, Layout(pp=1), "H100").time - predict(SMALL, Layout(pp=1), "H100").time
    assert faster < 0 if (window or SMALL.seq) < SMALL.seq else faster == 0


@pytest.mark.turns("sizes")
@pytest.mark.parametrize("sizes", [(64, 3, 4, 2, 96, 128), (48, 5, 3, 3, 80, 50), (32, 2, 4, 1, 64, 64)])
def test_a_decoder_of_ours_is_counted(sizes):
    """Its params and kept bytes equal a forward's; a decoder described by its sizes gives the same."""
    dim, layers, heads, kv_heads, hidden, vocab = sizes
    named = Sizes(dim=dim, layers=layers, heads=heads, kv_heads=kv_heads, hidden=hidden, vocab=vocab)
    cfg, x = decoder_config(named), tokens(2, 16)
    found = Decoder.of(cfg, x, batch=6)
    params = chain.init(cfg, key=random.key(0), dtype=torch.bfloat16)
    assert found.params == sum(t.numel() for t in trees.tensors(params))
    rows = [row for row in report(chain.fwd(params, x, cfg)[1], params, x).rows if row.path.startswith("blocks.1.")]
    assert found.residual_bytes * 2 * 16 == sum(row.bytes for row in rows)
    described = Decoder(dim, hidden, layers, heads, vocab, 16, 6, kv_heads=kv_heads)
    assert dataclasses.replace(found, residual_bytes=None) == described and found.kept("none") == described.kept("none")


def test_a_tied_head_is_counted_once():
    """Its params equal the model's; a rank with both ends has one table, and each end of a pipeline a copy."""
    found = []
    for tied in (False, True):
        sizes = dict(vocab=96, dim=64, layers=4, heads=4, kv_heads=2, head_size=16, hidden=96, context=64)
        cfg = DecoderConfig(**sizes, rope=RopeConfig(16), tied=tied)
        model, ids = decoder(cfg, loss=True), torch.zeros(2, 32, dtype=torch.int64)
        found.append(Decoder.of(model, decoder_x(cfg, ids, torch.bfloat16, labels=ids), batch=4))
        params = {id(t): t.numel() for t in trees.tensors(chain.init(model, device="meta"))}
        assert found[-1].params == sum(params.values()) and found[-1].tied == tied
    for layout, tables in ((Layout(), 1), (Layout(dp=2, zero=1), 1), (Layout(pp=2), 0), (Layout(tp=2), 1 / 2)):
        plain, tied = (rank_memory(model, layout, 0) for model in found)
        assert plain.params - tied.params == 2 * 96 * 64 * tables and plain.grads - tied.grads == 4 * 96 * 64 * tables
    sent = [[one for one in stages_of(m, Layout(dp=2), GPUS["H100"]).first.collectives if one.axis == "dp"] for m in found]
    assert sum(one.nbytes * one.times for one in sent[0]) - sum(one.nbytes * one.times for one in sent[1]) == 4 * 96 * 64


def test_the_best_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    few = dataclasses.replace(SMALL, batch=4)
    plan = plan_parallel(few, 8, 80e9, fixed={"pp": 2, "tp": 4, "chunks": 2, "microbatch": 1}, show=1)
    figure = plan.draw(tmp_path / "best.svg")
    assert (tmp_path / "best.svg").stat().st_size > 1_000
    assert len(figure.axes[0].collections) == sum(map(len, plan.best.simulated.starts)) == 2 * 4 * 4
    assert f"the whole step {plan.best.time:.4g} s" in figure.axes[0].get_title(), "as the table says"


def test_a_recipe_is_as_fast_as_measured():
    """A block with FP8 over bfloat16, against the committed measurement on an H100; the head and attention stay as they are."""
    figures = (COMMITTED / "figures.md").read_text()
    (line,) = re.findall(r"\| blocks in low precision: time over bfloat16 .*NVIDIA H100 80GB.*", figures)
    fastest, slowest = (float(number) for number in re.findall(r"\| (0\.\d+) \(", line))
    wide = Decoder(4096, 14336, 1, 32, 128256, 2048, 4, kv_heads=8)
    low = dataclasses.replace(wide, low=True)
    times = [sum(layer_times(model, GPUS["H100"], 1, 1, 4, "none")[:3]) for model in (low, wide)]
    assert fastest - 0.02 <= times[0] / times[1] <= slowest
    ends = [predict(model, Layout()).time - predict(dataclasses.replace(model, layers=2), Layout()).time for model in (low, wide)]
    assert ends[0] / ends[1] < 0.9
    tall = [layer_times(model, GPUS["H100"], 1, 1, 4, "block").column for model in (low, wide)]
    assert all(a < b for one, other in zip(*tall, strict=True) for a, b in zip(one, other, strict=True))
    with pytest.raises(ValueError, match=r"predict: gpu must be one with products in 8 bits \(flops8\) .*, got A100"):
        predict(low, Layout(), "A100")


@pytest.mark.slow
def test_a_config_with_a_recipe_is_counted():
    cfg = decoder_config(Sizes(dim=64, layers=3, heads=4, kv_heads=4, hidden=128, vocab=64))
    plain, low = (Decoder.of(one, tokens(2, 32), batch=6) for one in (cfg, with_recipe(cfg, Fp8Current(), only=("blocks.*",))))
    assert low.low == low.recipe == Fp8Current() and not plain.low and low.residual_bytes != plain.residual_bytes
    assert dataclasses.replace(low, low=False, residual_bytes=None) == dataclasses.replace(plain, residual_bytes=None)


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_labels_of_an_interleaved_schedule_can_be_read(chunks):
    """A box has its microbatch and the letter of its rank's stage, in a size that fits into it and is not below five points."""
    pytest.importorskip("matplotlib")
    made = one_f_one_b(4, 8) if chunks == 1 else interleaved_1f1b(4, 8, chunks)
    step = simulate(made, Costs(1.0, 1.5, 0.5))
    figure = draw(step)
    labels = [text for text in figure.axes[0].texts]
    count = sum(map(len, step.starts))
    assert 0.9 * count <= len(labels) <= count and min(text.get_fontsize() for text in labels) >= 5.0
    letters = {text.get_text().lstrip("0123456789") for text in labels}
    assert letters == ({""} if chunks == 1 else set("abcde"[:chunks]))
    points = 66 * figure.get_figwidth() / step.time
    spans = {(text.get_position()[0], round(text.get_position()[1])): text for text in labels}
    for rank, slots in enumerate(step.slots):
        for slot in slots:
            text = spans.get(((slot.start + slot.end) / 2, rank))
            assert text is None or 0.64 * text.get_fontsize() * len(text.get_text()) <= points * (slot.end - slot.start)
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert ("a: stages 0 to 3" in said) == (chunks > 1) and 10 <= figure.get_figwidth() <= 40


def counted(monkeypatch):
    """The number of actions that are simulated from here on."""
    seen = []
    whole = simulate.__globals__["Simulated"]
    monkeypatch.setitem(
        simulate.__globals__,
        "Simulated",
        lambda schedule, *rest: seen.append(sum(map(len, schedule.ranks))) or whole(schedule, *rest),
    )
    return seen


def test_nothing_is_recomputed_where_all_fits():
    """A layout that fits without is the fastest of its ways, so the others are not examined."""
    model = dataclasses.replace(SMALL, batch=64)
    every, one = plan_parallel(model, 8, 1e15, "A100"), plan_parallel(model, 8, 1e15, "A100", fixed={"recompute": "none"})
    assert every.counted == one.counted and [row.layout for row in every.rows] == [row.layout for row in one.rows]


def test_work_does_not_grow_with_gpus(monkeypatch):
    """The work to predict does not depend on the number of replicas or microbatches."""
    model, seen = dataclasses.replace(SMALL, batch=2**14), counted(monkeypatch)
    for dp in (1, 64, 2048):
        predict(model, Layout(dp=dp, pp=4, chunks=3))
    assert len(seen) == 5 and max(seen) <= 2 * 4 * 3 * 3 * 4 and seen[:2] == seen[2:4]


@pytest.mark.slow
def test_sixteen_thousand_gpus_are_planned_with_little_simulated(monkeypatch):
    llama, seen = published.PUBLISHED[5].model, counted(monkeypatch)
    plan = plan_parallel(llama, 16_384, 80e9)
    assert len(plan.rows) == 10 and plan.counted > 10_000 and len(plan.refused) > 100
    assert sum(seen) < 500_000 and len(seen) < 100
    assert plan.best.time < predict(llama, published.PUBLISHED[5].layout).time * (1 + 1e-12)


@pytest.mark.parametrize("batch", [4, 8, 12])
def test_a_prediction_counts_the_tokens_of_a_step(batch):
    found = predict(dataclasses.replace(SMALL, batch=batch), Layout(pp=1), "H100")
    assert found.tokens_per_second * found.time == pytest.approx(batch * SMALL.seq)
    assert f"{found.flops * found.layout.gpus * found.time:.6e}" == f"{found.model.flops:.6e}"


def test_a_weight_gradient_reads_and_writes_its_float32_sums():
    """On a GPU whose memory limits everything: 2 bytes an element of an operand, 8 of main_grad."""
    gpu = dataclasses.replace(GPUS["H100"], memory_bandwidth=1.0)
    model = SMALL
    found = layer_times(model, gpu, 1, 1, 1, "none")
    rows, products = model.seq, model.products
    assert found.wgrad == pytest.approx(sum(2 * rows * (n + k) + 8 * n * k for n, k, _ in products))


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout(dp=2, tp=2, pp=2)], ids=str)
def test_rates_of_a_prediction_follow_from_its_time(layout):
    found = predict(SMALL, layout)
    assert found.tokens_per_second * found.time == pytest.approx(SMALL.batch * SMALL.seq)
    assert found.flops * layout.gpus * found.time == pytest.approx(SMALL.flops)
    assert found.mfu * found.gpu.flops == pytest.approx(found.flops)
