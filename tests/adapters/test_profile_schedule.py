"""`Profile.of_schedule`: the actions of a schedule in a trace, against schedules whose times are made up, and in real profiles."""

import random as rng_of

import pytest
import torch

from funcops import ChainConfig, LinearConfig, Step, chain, linear, named_steps, profile, random
from funcops.adapters.profiler.actions import ScheduleTimes, times_of
from funcops.engine.backend.scopes import Label
from funcops.engine.trees import tree_map_tensors
from funcops.graphs import graphed, run_beside
from funcops.schedule import Costs, Schedule, gpipe, interleaved_zb, one_f_one_b, run, simulate, zb_h1, zb_h2, zb_v

MADE = [gpipe(3, 4), one_f_one_b(4, 5), zb_h1(3, 4), zb_h2(2, 6), interleaved_zb(2, 4), zb_v(2, 3)]
HALVES = {"F": "fwd", "I": "dgrad", "W": "wgrad", "B": "bwd"}


def stages(count, dim=4):
    return ChainConfig(steps=tuple(Step(f"s{i}", linear, LinearConfig(dim, dim)) for i in range(count)))


def spans_of(simulated, calls, rng):
    """Operators of each action of a simulated schedule, as a trace would have them, in any order; some are recomputed."""
    found = [(Label("elsewhere", "fwd"), 0.0, 1.0, "mm"), (Label(), 0.0, 2.0, "mm")]
    counts = {(stage, kind): rng.randint(2, 4) for stage in range(simulated.schedule.stages) for kind in "FIWB"}
    for call in range(calls):
        for action, start, end in (slot for slots in simulated.slots for slot in slots):
            count = counts[action.stage, action.kind]
            step, at = (end - start) / count, 7.0 + call * 2 * simulated.time + start
            for i in range(count):
                again = action.kind in "IB" and i < count - 1
                half = "recompute" if again else HALVES[action.kind]
                found.append(
                    (Label(f"s{action.stage}{'.inner' * (i % 2)}", half), at + i * step, at + (i + 1) * step, f"kernel {i}")
                )
    rng.shuffle(found)
    return found


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.name)
def test_actions_are_found_in_a_trace(made):
    """When they ran, and from their times what the simulator says, which is the same if it was right."""
    rng = rng_of.Random(3)
    costs = [Costs(*(rng.uniform(1, 3) for _ in range(3)), residual_bytes=0.0, pending_bytes=0.0) for _ in range(made.stages)]
    simulated = simulate(made, costs)
    found = times_of(spans_of(simulated, 2, rng), 2, made, stages(made.stages))
    for one in (found.ran, found.predicted):
        assert one.time == pytest.approx(simulated.time)
        for got, want in zip((*one.starts, *one.ends), (*simulated.starts, *simulated.ends), strict=True):
            assert list(got) == pytest.approx(list(want))
    whole = {action.kind for actions in made.ranks for action in actions} == {"F", "B"}
    for got, want in zip(found.costs, costs, strict=True):
        parts = (want.forward, want.dgrad + want.wgrad, 0.0) if whole else (want.forward, want.dgrad, want.wgrad)
        assert (got.forward, got.dgrad, got.wgrad) == pytest.approx(parts)


def profiled(made, graph, into=True):
    cfg = stages(made.stages)
    params, xs = chain.init(cfg, key=random.key(0)), torch.randn(made.microbatches, 3, 4)
    sums = tree_map_tensors(torch.zeros_like, params) if into else None
    how = run_beside if graph else run

    def step(xs):
        return how(made, params, list(xs), cfg, list(xs), into=sums).dxs

    with named_steps():
        fn = graphed(step, xs, state=sums, warmup=0) if graph else step
    return profile(fn, xs, calls=2, count=False), cfg


@pytest.mark.parametrize("graph", [True, False], ids=["graphed", "eager"])
def test_a_real_profile(graph, tmp_path):
    """A rank's actions run in its order and one after another; what was measured is what is simulated."""
    made = zb_v(2, 3)
    found, cfg = profiled(made, graph)
    times = found.of_schedule(made, cfg)
    assert isinstance(times, ScheduleTimes) and times.predicted.time == simulate(made, times.costs).time
    for slots in times.ran.slots:
        assert all(a.start < a.end <= b.start + 1e-9 for a, b in zip(slots, slots[1:], strict=False))
    assert min(slot.start for slots in times.ran.slots for slot in slots) == 0.0 and times.ran.time < found.seconds * 2 + 1
    pytest.importorskip("matplotlib")
    figure = times.draw(tmp_path / "both.svg")
    assert [axes.get_title().split(":")[0] for axes in figure.axes] == ["zb_v, measured", "zb_v, predicted"]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() and (tmp_path / "both.svg").stat().st_size > 1000


def test_what_a_trace_cannot_tell_raises():
    made = zb_v(2, 3)
    found, cfg = profiled(made, False, into=False)
    with pytest.raises(
        ValueError, match=r"Profile.of_schedule: stage 's0' must be the same operators for each of its 3 W .*: pass acc"
    ):
        found.of_schedule(made, cfg)
    with pytest.raises(ValueError, match="Profile.of_schedule: cfg must be a chain of 4 steps, its stages, got 2"):
        found.of_schedule(made, stages(2))
    mixed = Schedule.from_csv("0F0,0F1,0I0,0W0,0B1")
    with pytest.raises(ValueError, match="stage 's0' must be of whole backwards .* got some of each: make each B an I and a W"):
        profiled(mixed, False)[0].of_schedule(mixed, stages(1))
    said = "stage 's0' must be the same operators for each of its 3 F in each of 2 calls, got 0 in all"
    with pytest.raises(ValueError, match=said):
        times_of([], 2, made, cfg)
    one = gpipe(1, 4)
    spans = spans_of(simulate(one, Costs(residual_bytes=0.0)), 2, rng_of.Random(0))
    times_of(spans, 2, one, stages(1))
    number = next(i for i, span in enumerate(spans) if span[0].path.startswith("s0"))
    spans[number] = (*spans[number][:3], "another")
    with pytest.raises(
        ValueError, match="stage 's0' must be the same operators for each of its 4 . .* not alike: pass accumulators"
    ):
        times_of(spans, 2, one, stages(1))
