"""The step benchmark: both libraries' steps do the same, ratios are paired by round, and the time limit leaves rows out."""

import math

import pytest
import torch

from benchmarks import plain, step
from benchmarks.measure import Row
from funcops.engine.trees import paths
from funcops.models.blocks import Sizes
from funcops.testing.tolerances import assert_close

SMALL = Sizes(dim=32, layers=2, heads=2, kv_heads=1, hidden=48, vocab=32, context=16, batch=2)


@pytest.mark.parametrize("clip", [0.05, 1e3], ids=["clipped", "whole"])
def test_both_steps_hand_the_optimiser_the_same_clipped_gradients(clip, monkeypatch):
    """Losses cannot show this, as Adam is invariant to a gradient's scale."""
    found = {}

    class Noting(torch.optim.AdamW):
        def step(self):
            found["torch"] = [p.grad.clone() for group in self.param_groups for p in group["params"]]
            super().step()

    def update(params, grads, *args, **kwargs):  # which multiplies the gradients by the factor
        found["funcops"] = {plain.plain_name(path): g * kwargs["factor"] for path, g in paths(grads).items() if g is not None}
        return kept(params, grads, *args, **kwargs)

    kept = step.adamw_update
    monkeypatch.setattr(torch.optim, "AdamW", Noting)
    monkeypatch.setattr(step, "adamw_update", update)
    monkeypatch.setattr(step, "CLIP", clip)
    torch.manual_seed(0)
    module = step.PlainLlama(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, hidden=48, context=16, vocab=32)
    x, labels = torch.randint(0, 32, (2, 2, 16))
    step.funcops_step(SMALL, module, x, labels, torch.float32)()
    step.torch_step(module, x, labels, torch.float32)()
    theirs = dict(zip([name for name, _ in module.named_parameters()], found["torch"], strict=True))
    assert_close({name: found["funcops"][name] for name in theirs}, theirs, dtype=torch.float32)
    norm = math.sqrt(sum(float(g.square().sum()) for g in theirs.values()))
    assert norm == pytest.approx(clip, rel=1e-4) if clip < 1 else 0.05 < norm < 1e3


def test_a_narrow_step_hands_the_optimiser_gradients_of_its_batch_alone(monkeypatch):
    """In bfloat16, at a learning rate of 0: the second step has the same gradients as the first."""
    found = []

    class Noting(torch.optim.AdamW):
        def step(self):
            found.append([p.grad.clone() for group in self.param_groups for p in group["params"]])

    monkeypatch.setattr(torch.optim, "AdamW", Noting)
    monkeypatch.setattr(step, "CLIP", 1e9)
    torch.manual_seed(0)
    module = step.PlainLlama(dim=32, n_layers=2, n_heads=2, n_kv_heads=1, hidden=48, context=16, vocab=32)
    x, labels = torch.randint(0, 32, (2, 2, 16))
    one = step.torch_step(module, x, labels, torch.bfloat16)
    one()
    one()
    assert {g.dtype for g in found[0]} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_steps_ratios_are_paired_by_round(monkeypatch):
    names = ["funcops", "funcops, save_all", "funcops, unfused", "torch eager", "torch.compile", "funcops, compiled", "jax, jitted"]
    given = {name: [1000.0 * (i + 1) * (r + 1) for r in range(4)] for i, name in enumerate(names)}
    monkeypatch.setattr(step, "steps", lambda sizes, dtype, device: dict.fromkeys(names, lambda: None))
    monkeypatch.setattr(step, "FEWEST", 4)
    monkeypatch.setattr(step, "interleaved", lambda functions, *, rounds, calls: {name: given[name] for name in functions})
    rows = {(row.provider, row.metric): row.value for row in step.measure([torch.bfloat16], SMALL, 4)}
    assert rows["funcops", "median"] == 2.5 and rows["torch eager", "quartile spread"] == 4 * 2.5
    assert rows["funcops", "ratio to funcops, unfused, median"] == pytest.approx(1 / 3)
    for label in ("median", "95 % low", "95 % high"):
        assert rows["funcops, save_all", f"ratio to torch eager, {label}"] == 0.5
        assert rows["funcops", f"ratio to torch.compile, {label}"] == 0.2
        assert rows["funcops, compiled", f"ratio to torch.compile, {label}"] == 1.2
        assert rows["funcops, compiled", f"ratio to jax, jitted, {label}"] == pytest.approx(6 / 7)


@pytest.mark.parametrize(("compiling", "seconds", "left_out"), [(60, 110, 3), (60, 400, 0), (15, 110, 0), (200, 110, 3), (1, 0, 4)])
def test_a_compilation_that_would_end_too_late_is_named_and_not_begun(compiling, seconds, left_out, monkeypatch, capsys):
    """Steps without a compiler come first, in every dtype, whatever the time; the rest of the time sets the number of rounds."""
    now, ran = [0.0], []

    def one(name, seen):
        def run():
            now[0] += compiling if name in step.COMPILED and name not in seen else 0.1
            seen.append(name)

        return run

    def steps(sizes, dtype, device):
        ran.append([])
        names = "funcops", "funcops, save_all", "funcops, unfused", "torch eager", *step.COMPILED
        return {name: one(name, ran[-1]) for name in names}

    monkeypatch.setattr(step, "steps", steps)
    monkeypatch.setattr(step, "interval", lambda ratios: (1.0, 1.0, 1.0))
    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(step.time, clock, lambda: now[0])
    rows = list(step.measure([torch.float32, torch.bfloat16], SMALL, 40, seconds=seconds))
    said = capsys.readouterr().err
    assert said.count("is left out, for want of time (see --seconds)") == left_out
    medians = [(row.case, row.provider) for row in rows if row.metric == "median"]
    assert [case for case, _ in medians[:8]] == ["float32"] * 4 + ["bfloat16"] * 4
    assert len(medians) == len(set(medians)) == 12 - left_out and all(f"{row.metric}: " in said for row in rows)
    ratios = [(row.case, row.provider, row.metric) for row in rows if row.metric.startswith("ratio")]
    assert len(ratios) == len(set(ratios)) and (("float32", "funcops", "ratio to torch.compile, median") in ratios) == (
        left_out < 4
    )
    assert ran[0].count("torch eager") == {0: 2 + step.FEWEST, 110: 3 + 13, 400: 3 + 40}[seconds], (
        "rounds, what warms up, and a trial"
    )


@pytest.mark.parametrize("part", step.PARTS)
def test_each_part_of_the_steps_is_measured_and_profiled_apart(part, monkeypatch, capsys):
    """A profile follows its steps' rows, so that it does not wait for a compiler; a step that fails keeps none from running."""
    given = {name: lambda: torch.zeros(()) for name in ("funcops", "funcops, save_all", "torch eager", *step.COMPILED)}
    monkeypatch.setattr(step, "steps", lambda sizes, dtype, device: given | {"funcops, graphed": lambda: 1 / 0})
    monkeypatch.setattr(step, "interval", lambda ratios: (1.0, 1.0, 1.0))
    monkeypatch.setattr(
        step, "profiled", lambda bench, case, steps: iter([Row(bench, case, n, "profile", None, "") for n in steps])
    )
    rows = list(step.measure([torch.bfloat16], SMALL, 3, seconds=1e6, profile=True, part=part))
    found = [(row.provider, row.metric) for row in rows if row.metric in ("median", "profile")]
    eager, compared = [name for name in given if name not in step.COMPILED], ["funcops", "funcops, save_all"]
    groups = {"eager": [eager], "compiled": [[*compared, step.COMPILED[0], step.COMPILED[1]]]}
    groups["all"] = groups["eager"] + [list(step.COMPILED)]
    assert found == [(name, metric) for names in groups[part] for metric in ("median", "profile") for name in names]
    assert "funcops, graphed failed: ZeroDivisionError: division by zero" in capsys.readouterr().err


def test_an_interval_leaves_a_fortieth_on_each_side():
    values = [float(i) for i in range(101)]
    median, low, high = step.interval(values, draws=2000)
    assert median == 50 and 30 < low < 42 and 58 < high < 70, "2 * 1.2533 * 29.2 / sqrt(101) = 7.3 on each side, and as many again"


@pytest.mark.parametrize("fuse", [True, False])
def test_a_step_is_fused_unless_it_is_to_be_unfused(fuse, monkeypatch):
    asked = []
    monkeypatch.setattr(step, "unfused", lambda cfg: asked.append(cfg) or cfg)
    sizes = SMALL.dim, SMALL.layers, SMALL.heads, SMALL.kv_heads, SMALL.hidden, SMALL.context, SMALL.vocab
    names = "dim", "n_layers", "n_heads", "n_kv_heads", "hidden", "context", "vocab"
    plain = step.PlainLlama(**dict(zip(names, sizes, strict=True)))
    x, labels = torch.zeros((2, 1, 4), dtype=torch.int64)
    step.funcops_step(SMALL, plain, x, labels, torch.float32, fuse=fuse)
    assert len(asked) == (not fuse)
