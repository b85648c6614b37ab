"""Pipelines kept level: a policy for each stage, so that ranks hold about as many bytes as each other."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rendezvous import on_threads
from staged import decoder, layered, microbatches
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcops import Needs, Policy, Recompute, chain, random
from funcops.adapters.pipelining import Pipeline
from funcops.engine.trees import tensors
from funcops.schedule import (
    Choice,
    Costs,
    Schedule,
    dualpipe_v,
    interleaved_1f1b,
    interleaved_zb,
    level,
    one_f_one_b,
    run,
    simulate,
    stage_choices,
    zb_h1,
    zb_v,
)
from funcops.schedule.run import Pass
from funcops.testing.checks import same_bits

M = 16
SCHEDULES = {f.__name__: f(4, M) for f in (one_f_one_b, zb_v, interleaved_1f1b, interleaved_zb, zb_h1)}
SCHEDULES["user"] = Schedule.from_csv(one_f_one_b(4, M).to_csv(), "user")


@functools.cache
def setup(stages):
    """Thirty-two blocks in so many stages, the choices of each, and the costs of a stage as it is."""
    cfg = layered(stages, 32 // stages)
    xs = microbatches(M, cfg)
    return (
        cfg,
        chain.init(cfg, key=random.key(1), dtype=torch.float64),
        xs,
        stage_choices(cfg, xs[0], dtype=torch.float64, count=12),
    )


def even(peaks):
    return max(peaks) * len(peaks) / sum(peaks)


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_are_level_and_nothing_else_changes(name):
    """The peaks are counted in the run: storages that wait between actions. The simulation predicts each to the byte."""
    made = SCHEDULES[name]
    cfg, params, xs, choices = setup(made.stages)
    plan = level(made, choices)
    plain, leveled = run(made, params, xs, cfg), run(plan.schedule, params, xs, plan.staged(cfg))
    assert plain.peak_bytes == plan.before.peak_bytes and even(plain.peak_bytes) > 1.15
    assert leveled.peak_bytes == plan.after.peak_bytes and even(leveled.peak_bytes) == plan.ratio <= 1.1
    same_bits((leveled.ys, leveled.dparams, leveled.dxs), (plain.ys, plain.dparams, plain.dxs), f"of {name}")
    assert max(leveled.peak_bytes) < 0.9 * max(plain.peak_bytes)
    assert -1e-9 <= plan.exposed <= max(plan.recomputing) + 0.02 * plan.before.time


def test_1f1b_from_p_to_one_microbatch():
    cfg, params, xs, choices = setup(4)
    plan = level(one_f_one_b(4, M), choices)
    assert even(plan.before.peak_bytes) > 1.55
    again = [choice.extra for choice in plan.picked]
    assert again == sorted(again, reverse=True) and again[0] > 0.3 and again[3] == 0
    assert plan.recomputing == tuple(3 * M * extra for extra in again)
    lines = str(plan).splitlines()
    assert lines[0].startswith("one_f_one_b: largest peak over mean 1.58 -> 1.0") and lines[-1].endswith("3: as it is")


class Alive(TorchDispatchMode):
    """The bytes of all storages made while it is on that are alive."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors((args, kwargs))}
        for t in tensors(found):
            if t.untyped_storage()._cdata not in given:
                self.made[t.untyped_storage()._cdata] = StorageWeakRef(t.untyped_storage()), t.untyped_storage().nbytes()
        return found

    @property
    def nbytes(self):
        return sum(size for ref, size in self.made.values() if not ref.expired())


def test_what_the_plan_saves_is_not_allocated(monkeypatch):
    """All storages alive after each action: those that wait, the sums of gradients, and values between stages."""
    cfg, params, xs, choices = setup(4)
    made = one_f_one_b(4, M)
    plan, act = level(made, choices), Pass.act
    sums = sum(t.untyped_storage().nbytes() for t in tensors(params))
    most = []
    for schedule, staged in ((made, cfg), (plan.schedule, plan.staged(cfg))):
        found = []

        def counted(self, action, found=found):
            act(self, action)
            found.append((alive.nbytes, sum(ledger.nbytes for ledger in self.ledgers)))

        monkeypatch.setattr(Pass, "act", counted)
        with Alive() as alive:
            run(schedule, params, xs, staged)
        between = 16 * xs[0].main.numel() * 8 * 8
        assert all(waiting <= nbytes <= waiting + sums + between for nbytes, waiting in found)
        most.append(max(waiting for _, waiting in found))
    assert most[1] < 0.6 * most[0]


@pytest.mark.slow
def test_four_processes_allocate_alike(tmp_path):
    """Each process counts what its allocator gives; the ranks compare the losses and gradients with the plain schedule's bits."""
    script = Path(__file__).with_name("two_ranks.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path), "4:allocated"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    errors = [(tmp_path / f"allocated-{rank}.err").read_text()[-3000:] for rank in range(4)]
    assert json.loads(done.stdout) == {f"allocated-{rank}": 0 for rank in range(4)}, errors
    texts = [(tmp_path / f"allocated-{rank}.out").read_text() for rank in range(4)]
    assert len(set(texts)) == 1
    ratios = {name: (float(plain), float(leveled)) for name, plain, leveled in map(str.split, texts[0].splitlines()[1:])}
    least = {"one_f_one_b": 1.5, "zb_v": 1.25, "interleaved_1f1b": 1.3}
    assert {name for name, (plain, leveled) in ratios.items() if plain > least[name] and leveled <= 1.1} == set(least), ratios


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v"])
def test_pipeline_runs_the_plan(name):
    """Four ranks, each a thread: the bytes and the bits of one process."""
    made = SCHEDULES[name]
    cfg, params, xs, choices = setup(made.stages)
    plan, want = level(made, choices), run(made, params, xs, cfg)

    def work(rank):
        pipeline = Pipeline(plan.schedule, plan.staged(cfg), xs[0], dtype=torch.float64)
        return pipeline.step({stage: params[stage] for stage in pipeline.names}, xs)

    parts, _ = on_threads(4, work)
    dparams = {stage: part.dparams[stage] for stage in want.dparams for part in parts if stage in part.dparams}
    ys = parts[plan.schedule.rank_of[made.stages - 1]].ys
    same_bits((ys, dparams), (want.ys, want.dparams), f"of {name}")
    assert tuple(part.peak_bytes for part in parts) == plan.after.peak_bytes


def test_choices_that_cannot_be_level_raise_with_the_ratio():
    coarse = [Choice("all"), Choice("half", "minimal", 0.3, 0.5)]
    said = (
        "level: choices must be such that the largest peak of a rank of one_f_one_b is at most 1.1 times the mean, got 1.23 times"
    )
    said += " at best, where rank 0 holds 2 and rank 3 1: give stage 0 choices that keep less, or more of them, or pass most=1.24"
    with pytest.raises(ValueError, match=re.escape(said)):
        level(one_f_one_b(4, M), [coarse] * 4)
    assert level(one_f_one_b(4, M), [coarse] * 4, most=1.24).ratio == pytest.approx(16 / 13)
    with pytest.raises(ValueError, match=r"level: choices must be of 4 stages, got 3"):
        level(one_f_one_b(4, M), [coarse] * 3)
    with pytest.raises(ValueError, match=r"Leveled.staged: cfg must be a chain of 4 steps"):
        level(one_f_one_b(4, M), [coarse] * 4, most=1.3).staged(decoder(3))


def test_the_least_added_time_among_all_plans():
    """Every plan is tried by hand: none that is as even has a shorter step."""
    own = [Choice(str(again), None, again / 12, 1 - again / 5) for again in range(5)]
    cost = Costs(forward=1.0, dgrad=1.2, wgrad=0.9)
    made = one_f_one_b(3, 6)
    times = {}
    for first in own:
        for second in own:
            for third in own:
                found = simulate(made, [one.costs(cost) for one in (first, second, third)])
                if even(found.peak_bytes) <= 1.2:
                    times[first.name, second.name, third.name] = found.time
    plan = level(made, [own] * 3, cost, most=1.2)
    assert plan.after.time == pytest.approx(min(times.values())) and len(times) > 3
    assert times[tuple(one.name for one in plan.picked)] == plan.after.time


def test_pairs_side_by_side_stay():
    own = [Choice("all", None, 0.0, 1.0, 2.0), Choice("half", None, 0.2, 0.5, 2.0)]
    made = dualpipe_v(2, 8)
    costs = Costs(together=1.5)
    plan = level(made, [own] * made.stages, costs, most=2.0)
    assert plan.schedule is made and own[1].costs(costs).together == pytest.approx(1.5 + 0.6)


def test_frozen_stages_and_bytes_over_time():
    cfg, params, xs, _ = setup(4)
    choices = stage_choices(cfg, xs[0], dtype=torch.float64, needs=Needs(x=False, params=("s2", "s3")), count=2)
    assert [len(own) for own in choices[:2]] == [1, 1] and choices[0][0].residual_bytes == 0
    ran, found = (
        run(one_f_one_b(4, M), params, xs, cfg),
        simulate(one_f_one_b(4, M), [one[0].costs(Costs()) for one in setup(4)[3]]),
    )
    for rank in range(4):
        assert [event.nbytes for event in ran.events if event.rank == rank] == list(found.held[rank])


def test_a_plan_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    own = [Choice("all"), Choice("half", Policy({"*.x": Recompute()}), 0.3, 0.5)]
    figure = level(one_f_one_b(2, 4), [own] * 2).draw(tmp_path / "held.svg")
    assert (tmp_path / "held.svg").stat().st_size > 0
    before, after = figure.axes
    assert [line.get_ydata().max() for line in before.get_lines()] == [2.0, 1.0]
    assert [line.get_ydata().max() for line in after.get_lines()] == [1.0, 1.0]
