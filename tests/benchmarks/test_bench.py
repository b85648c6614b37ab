"""The exact benches keep their promises; timings are not tested."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import compiled, graph, invariant, memory, moe_step, residuals, schedule, step
from benchmarks import decode as decoding
from benchmarks.measure import BenchError, NoDevice
from funcops import RopeConfig, chain, random
from funcops.models import DecoderConfig, decoder, generate
from funcops.models.blocks import Sizes

COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "cpu-schedule.json"


@pytest.mark.slow
def test_peak_memory_is_no_higher_than_autograds():
    rows = memory.run()
    ratios = {row.case: row.value for row in rows if row.metric == "ratio to autograd"}
    net = {row.case: row.value for row in rows if row.metric == "ratio to autograd, net"}
    assert len(ratios) == 3 and all(0.2 < ratio <= 0.75 for ratio in ratios.values())
    assert 0.2 < net["4 llama blocks, 8192 tokens, bfloat16"] <= 0.6
    assert 0.2 < net["4 llama blocks, 8192 tokens, float32"] <= 0.6


@pytest.mark.slow
def test_a_block_keeps_less_than_autograd():
    """The exact counts: the input h, q, k, v, mix, after attention, and gate and up or the pre-activation; and statistics."""
    kept = {(row.case, row.provider): row.value for row in residuals.run(rivals=False)}
    assert 20 < kept["llama block", "funcops"] <= 23.2 and kept["llama block", "autograd"] > 50
    assert 20 < kept["gpt-2 block", "funcops"] <= 20.3 and kept["gpt-2 block", "autograd"] > 36
    packed = [kept[block, "funcops, compress_fp8"] for block in ("llama block", "gpt-2 block")]
    assert packed[0] <= 11.9 and packed[1] <= 10.4, "half of each activation, attention's output once, and scales"


@pytest.mark.slow
def test_a_mixture_of_experts_keeps_less_than_hugging_faces():
    """4 K I of z and 16 K of indices and weights a token, and the offsets: 4.4 times less than their grouped products."""
    pytest.importorskip("transformers")
    kept = {row.provider: row.value for row in residuals._mixture(**residuals.MIXTURE)}
    assert kept["funcops"] <= 4 * 8 * 96 + 16 * 8 + 8
    assert kept["transformers, grouped_mm"] >= 4.4 * kept["funcops"] and kept["transformers, eager"] >= 5.5 * kept["funcops"]


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)], ids=str)
def test_the_providers_of_a_step_do_the_same_work(dtype, rel):
    sizes = Sizes(dim=32, layers=2, heads=2, kv_heads=1, hidden=48, vocab=32, context=16, batch=2)
    steps = step.steps(sizes, dtype)
    del steps["torch.compile"], steps["funcops, compiled"]
    losses = {name: [float(one()) for _ in range(5)] for name, one in steps.items()}
    ours, plain = losses["funcops"], losses["torch eager"]
    assert ours == pytest.approx(losses["funcops, packed"], rel=rel)
    assert ours == losses["funcops, save_all"] == losses["funcops, unfused"], "at this size the CPU fuses nothing"
    assert ours[-1] < ours[0] and ours == pytest.approx(plain, rel=rel)


@pytest.mark.slow
def test_the_providers_of_a_mixtures_step_do_the_same_work():
    pytest.importorskip("transformers")
    sizes = Sizes(dim=32, layers=2, heads=2, kv_heads=1, hidden=24, vocab=32, context=16, batch=2)
    losses = {name: [float(one()) for _ in range(4)] for name, one in moe_step.steps(sizes, 4, 2).items()}
    assert list(losses) == ["funcops", "transformers, eager", "transformers, grouped_mm"]
    assert all(found == pytest.approx(losses["funcops"], rel=1e-5) for found in losses.values())
    assert losses["funcops"][-1] < losses["funcops"][0]


def test_a_step_on_a_device_ends_when_the_device_has(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("waited"))
    step.finished(lambda: calls.append("ran"))()
    assert calls == ["ran", "waited"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchError, match="--device: expected cpu, as there is no CUDA device, got cuda"):
        step.run("cuda")


def test_an_interval_holds_its_median():
    median, low, high = step.interval([0.9, 1.0, 1.1, 1.0, 0.95])
    assert median == 1.0 and 0.9 <= low <= median <= high <= 1.1


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch's own split takes no autograd.Function")
def test_a_split_backward_does_no_work_twice_and_holds_less():
    """torch's own split of custom functions runs each backward twice; its split of torch.nn keeps every saved tensor until W."""
    pytest.importorskip("torch.distributed.pipelining")
    rows = schedule.run()
    products = {row.provider: row.value for row in rows if row.metric == "matrix products in the backward"}
    ours, split = products["funcops, unsplit"], products["funcops, split"]
    assert ours == split == products["torch.nn, unsplit"] == 2 * 6 * schedule.LAYERS
    assert products["funcops.nn (custom functions), unsplit"] == ours
    assert products["funcops.nn (custom functions), torch's split"] == 2 * ours
    ratios = {row.metric: row.value for row in rows if "ratio" in row.metric}
    assert ratios["live bytes between I and W, ratio to torch's split"] <= 0.6
    committed = {(row["case"], row["provider"], row["metric"]): row["value"] for row in json.loads(COMMITTED.read_text())["rows"]}
    for row in rows:  # counted, not measured
        if row.provider == "funcops" and "ratio" not in row.metric:
            assert row.value == pytest.approx(committed[row.case, row.provider, row.metric], rel=1e-3), row


def test_the_graphed_step_is_the_eager_one():
    """It runs on the recorder; only a GPU can tell what it saves."""
    small = Sizes(dim=32, layers=2, heads=2, kv_heads=1, hidden=48, vocab=32, context=16, batch=2)
    steps = graph.steps(small, torch.float32, "cpu")
    del steps[graph.COMPILED]
    losses = {name: [float(one()) for _ in range(4)] for name, one in steps.items()}
    eager, plain, packed = losses["funcops eager"], losses["torch eager"], losses["funcops eager, packed"]
    assert eager == losses["funcops graphed"] and packed == losses["funcops graphed, packed"]
    assert eager[-1] < eager[0] and eager == pytest.approx(plain, rel=1e-5) and packed == pytest.approx(plain, rel=1e-5)


def test_packed_and_graphed_steps_of_a_device_do_the_same_work():
    """In bfloat16 AdamW writes the weights that the next passes read, where they lie."""
    sizes = Sizes(dim=32, layers=2, heads=2, kv_heads=1, hidden=48, vocab=32, context=16, batch=2)
    torch.manual_seed(0)
    module = step.PlainLlama(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, hidden=48, context=16, vocab=32)
    x, labels = torch.randint(0, 32, (2, 2, 16))
    ways = [{}, dict(packed=True), dict(captured=True), dict(packed=True, captured=True)]
    made = [step.funcops_step(sizes, module, x, labels, torch.bfloat16, **way) for way in ways]
    plain, packed, graphed, both = ([float(one()) for _ in range(3)] for one in made)
    assert plain == graphed and packed == both and plain[-1] < plain[0]
    assert plain == pytest.approx(packed, rel=5e-3)


@pytest.mark.slow
def test_providers_of_decoding_give_the_same_tokens(monkeypatch):
    pytest.importorskip("transformers")
    small = decoding.SETTINGS["cpu"]._replace(
        sizes=decoding.sizes_of(64, 64, 96, 2, 1, 1), prompt=5, tokens=4, batches=(2,), rounds=1
    )
    monkeypatch.setitem(decoding.SETTINGS, "cpu", small)
    rows = decoding.run()
    assert {row.provider for row in rows} == {"funcops", "transformers"} and all(row.value > 0 for row in rows)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NoDevice, match="--device: expected cpu"):
        decoding.run(device="cuda")


@pytest.mark.slow
def test_captured_decoding_gives_the_tokens_of_generate():
    """It is called more than once, each time from an empty cache."""
    small = decoding.SETTINGS["cpu"]._replace(prompt=300, tokens=6)
    cfg = DecoderConfig(vocab=64, dim=32, layers=2, heads=4, kv_heads=2, head_size=8, hidden=48, context=320, rope=RopeConfig(8))
    params, ids = chain.init(decoder(cfg), key=random.key(0)), torch.randint(64, (2, 300))
    want = torch.stack(list(generate(params, cfg, ids, 6)), 1)
    run = decoding.captured_decoding(params, cfg, ids, small)
    assert torch.equal(run(), want) and torch.equal(run(), want)


def test_the_committed_cost_of_the_same_bits_is_within_its_bounds():
    rows = json.loads((COMMITTED.parent / "cpu-invariant.json").read_text())["rows"]
    ratios = {(row["case"], row["provider"]): row["value"] for row in rows if row["metric"] == "ratio to free"}
    trained = {case: [ratio for (of, _), ratio in ratios.items() if of == case] for case, _ in ratios if case.startswith("forward")}
    assert len(trained) == 4 and all(len(each) == 2 for each in trained.values())
    assert all(max(each) <= (1.25 if case.endswith("float32") else 1.7) for case, each in trained.items())
    assert sum(case.startswith("a token") for case, _ in ratios) == 8


@pytest.mark.slow
def test_the_bench_of_the_same_bits_runs():
    rows = list(invariant.run(rounds=1, batches=((1, 64),)))
    assert {row.metric for row in rows} == {"median", "ratio to free"} and all(row.value > 0 for row in rows)


@pytest.mark.slow
def test_a_compiler_gets_little_of_a_step():
    """Before the optimiser was one operator, and a label's gradient no scatter: 279 nodes, 25 loops and 1,343 lines."""
    step, args = compiled.our_step()
    found = compiled.counted(step, *args)
    assert found["graphs"] == 1 and found["nodes"] <= 0.6 * 279 and found["loops"] <= 0.6 * 25 and found["lines"] <= 0.6 * 1343
