"""Times and bytes of schedules, their pictures, and the placement of weight gradients."""

import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from drawn import every
from hypothesis import given, settings
from hypothesis import strategies as st
from staged import DIM, decoder, gated, microbatches

from funcops import LinearConfig, Needs, chain, linear, random
from funcops.schedule import (
    Action,
    Choice,
    Costs,
    Moved,
    Network,
    Schedule,
    delay_w,
    draw,
    dualpipe_v,
    fold,
    gpipe,
    interleaved_1f1b,
    level,
    measure,
    measure_stages,
    one_f_one_b,
    run,
    simulate,
    zb_h1,
    zb_v,
)
from funcops.schedule.delay import Delaying
from funcops.schedule.simulate import Model

GENERATORS = (gpipe, one_f_one_b, zb_h1, zb_v, interleaved_1f1b, dualpipe_v)


def test_sending_takes_time():
    assert simulate(one_f_one_b(2, 1), network=Network(latency=0.5)).time == 2 * 3 + 2 * 0.5
    assert simulate(one_f_one_b(2, 1), Costs(output_bytes=8), Network(bandwidth=16)).time == 2 * 3 + 2 * 0.5
    assert "% idle" in str(simulate(gpipe(2, 2)))


@pytest.mark.parametrize("seed", range(6))
def test_budgets_one_after_another_give_what_each_gives_alone(seed):
    draw = Random(seed)
    for made in every(seed, count=3):
        costs = Costs(wgrad=draw.choice([0.5, 1.5]), residual_bytes=draw.choice([1.0, 2.5]), pending_bytes=draw.choice([1.0, 1.7]))
        found = simulate(made, costs)
        delaying = Delaying(found, Model.of(made, costs, None, "here"))
        for _ in range(6):
            budget = max(found.peak_bytes) * draw.uniform(0.4, 1.6)
            try:
                alone = delay_w(made, budget, costs)
            except ValueError as error:
                with pytest.raises(ValueError, match=re.escape(str(error))):
                    delaying.within(budget)
            else:
                assert delaying.within(budget) == alone


@pytest.mark.parametrize("seed", range(12))
def test_bytes_at_other_ranks_count_there(seed):
    """Against the sum over all microbatches that are between forward and dgrad, at each time."""
    draw = Random(seed)
    made = draw.choice([f for f in GENERATORS])(draw.choice([2, 3, 4]), draw.randint(2, 9))
    home, ranks = made.rank_of, len(made.ranks)
    others = [draw.choice([rank for rank in range(ranks) if rank != home[stage]]) for stage in range(made.stages)]
    moved = [
        tuple(Moved(other, draw.choice([0.5, 3.0]), draw.choice([0.0, 0.2, 9.0])) for _ in range(draw.randint(0, 2)))
        for other in others
    ]
    net, together = Network(latency=0.1, bandwidth=10.0), draw.choice([None, 2.5])
    times = [[draw.choice([0.5, 1.0, 1.75]) for _ in range(3)] for _ in moved]
    costs = [Costs(*three, together, residual_bytes=2.0, moved=there) for three, there in zip(times, moved, strict=True)]
    found = simulate(made, costs, net)
    late = [sum(max(0.0, 0.1 + one.nbytes / 10 - one.hidden_under) for one in there) for there in moved]
    alone = [
        Costs(f, i + more, w, together and together + more, residual_bytes=2.0) for (f, i, w), more in zip(times, late, strict=True)
    ]
    plain = simulate(made, alone, net)
    assert (found.time, found.starts) == (plain.time, plain.starts)
    count = made.microbatches
    assert found.exposed == pytest.approx([count * sum(late[s] for s in home if home[s] == rank) for rank in range(ranks)])
    sent = [sum(one.nbytes for s in home if home[s] == rank for one in moved[s]) for rank in range(ranks)]
    assert found.moved_bytes == pytest.approx([count * nbytes for nbytes in sent])
    ends = {
        timed.action._replace(kind="I" if timed.action.kind == "B" else timed.action.kind): timed.end
        for row in found.slots
        for timed in row
    }
    spans = [
        (one.rank, one.nbytes, ends[Action(s, "F", m)], ends[Action(s, "I", m)])
        for s in home
        for one in moved[s]
        for m in range(count)
    ]
    for rank, slots in enumerate(found.slots):
        own = [0.0, *plain.held[rank]]
        guests = [sum(n for r, n, since, until in spans if r == rank and since <= slot.end < until) for slot in slots]
        assert list(found.held[rank]) == pytest.approx([mine + more for mine, more in zip(own[1:], guests, strict=True)])
        moments = sorted({*(slot.end for slot in slots), *(since for r, _, since, _ in spans if r == rank)})
        most = max(
            own[sum(slot.end <= moment for slot in slots)]
            + sum(n for r, n, since, until in spans if r == rank and since <= moment <= until)
            for moment in moments
        )
        assert max(found.held[rank], default=0.0) - 1e-9 <= found.peak_bytes[rank] <= max(most, plain.peak_bytes[rank]) + 1e-9
    assert ("to other ranks and back, exposed" in str(found)) == any(moved)


def test_bytes_at_other_ranks_are_refused_where_they_would_not_count():
    there = Costs(moved=(Moved(1, 1.0),))
    for rank in (0, 2):
        with pytest.raises(ValueError, match=rf"simulate: costs.0.moved.0.rank must be another than rank 0, below 2, got {rank}"):
            simulate(gpipe(2, 2), [Costs(moved=(Moved(rank, 1.0),)), Costs()])
    for name, call in {
        "delay_w": lambda: delay_w(gpipe(2, 2), 9.0, [there, Costs()]),
        "level": lambda: level(gpipe(2, 2), [[Choice("all")]] * 2, [there, Costs()]),
    }.items():
        with pytest.raises(ValueError, match=rf"{name}: costs.0.moved must be empty, as simulate alone counts"):
            call()


STAGE_TIMES = st.tuples(*[st.sampled_from([0.5, 1.0, 1.75])] * 3, st.sampled_from([None, 2.5]), st.sampled_from([1.0, 4.0]))


@settings(max_examples=60)
@given(st.sampled_from(GENERATORS), st.integers(2, 4), st.integers(1, 8), st.data(), st.sampled_from([0.0, 0.5, 3.0]))
def test_every_action_begins_as_soon_as_it_can_and_no_sooner(generator, p, m, data, latency):
    made = generator(p, m)
    drawn = data.draw(st.lists(STAGE_TIMES, min_size=made.stages, max_size=made.stages))
    check_times(made, [Costs(f, i, w, together, output_bytes=size) for f, i, w, together, size in drawn], latency)


@pytest.mark.parametrize("latency", [0.25, 1.0, 3.0, 9.0])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 9), (3, 8), (4, 8), (4, 20)])
def test_pairs_begin_when_both_can(p, m, latency):
    """DualPipe's pairs, of which few drawn schedules have many."""
    made = dualpipe_v(p, m)
    assert made.together
    draw = Random(p * m).choice
    for _ in range(5):
        together = draw([None, 2.5])
        costs = [Costs(*(draw([0.5, 1.0, 1.75]) for _ in range(3)), together, output_bytes=draw([1.0, 4.0])) for _ in range(2 * p)]
        check_times(made, costs, latency)


def check_times(made, costs, latency):
    """An action begins when its rank is free and its inputs have arrived; the two of a pair begin when both can, and end
    together."""
    network = Network(latency, 2.0, ranks_per_node=2, near_latency=latency / 4, near_bandwidth=8.0)
    slots = [list(row) for row in simulate(made, costs, network).slots]
    end = {slot.action: slot.end for row in slots for slot in row}
    owner, last = made.rank_of, made.stages - 1

    def sent(action, stage, kinds):
        """The time at which the results of these actions have arrived at the stage of the action."""
        ends = [end[stage, kind, action.microbatch] for kind in kinds if (stage, kind, action.microbatch) in end]
        return max(ends) + network.time(owner[stage], owner[action.stage], costs[min(stage, action.stage)].output_bytes)

    def arrival(action):
        if action.kind == "F":
            return sent(action, action.stage - 1, "F") if action.stage else 0.0
        return sent(action, action.stage + 1, "IB") if action.kind in "IB" and action.stage < last else 0.0

    for row in slots:
        free = 0.0
        while row:
            slot = row.pop(0)
            cost, wanted = costs[slot.action.stage], arrival(slot.action)
            time = {"F": cost.forward, "I": cost.dgrad, "W": cost.wgrad, "B": cost.dgrad + cost.wgrad}[slot.action.kind]
            if row and row[0].action in made.together:
                other = row.pop(0)
                own = costs[other.action.stage]
                backward = own.dgrad + (own.wgrad if other.action.kind == "B" else 0.0)
                time, wanted = own.together or time + backward, max(wanted, arrival(other.action))
                assert (other.start, other.end) == (slot.start, slot.end)
            assert slot.start == pytest.approx(max(free, wanted)) and slot.end == pytest.approx(slot.start + time)
            free = slot.end


def test_ranks_of_one_node_are_near():
    far = Network(latency=1.0)
    near = Network(latency=1.0, ranks_per_node=2, near_latency=0.25)
    costs = Costs(0.0, 0.0, 0.0)
    assert simulate(gpipe(4, 1), costs, far).time == 6
    assert simulate(gpipe(4, 1), costs, near).time == 2 * (0.25 + 1 + 0.25)
    assert simulate(zb_v(2, 1), costs, far).time == 4, "the two middle stages are on one rank"


def test_costs_may_differ_by_stage():
    unequal = [Costs(1, 1, 1, residual_bytes=5), Costs(2, 2, 2, residual_bytes=7)]
    found = simulate(gpipe(2, 2), unequal)
    assert found.busy == (6, 12) and found.peak_bytes == (10, 14)
    assert found.time == 1 + 4 + 8 + 2
    with pytest.raises(ValueError, match="simulate: costs must be one Costs, or 2, one a stage, got 1"):
        simulate(gpipe(2, 2), [Costs()])
    with pytest.raises(TypeError, match="simulate: costs must be"):
        simulate(gpipe(2, 2), [1.0, 2.0])


@pytest.mark.parametrize("bad", [{"latency": -1}, {"bandwidth": 0}, {"ranks_per_node": 0}, {"near_bandwidth": -2}])
def test_bad_networks(bad):
    with pytest.raises(ValueError, match=f"Network: {next(iter(bad))} must be"):
        Network(**bad)


def test_bad_costs():
    with pytest.raises(ValueError, match="Costs: dgrad must be at least 0, got -1"):
        Costs(dgrad=-1)


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    with pytest.raises(ImportError, match="^draw needs matplotlib: pip install matplotlib$"):
        draw(simulate(dualpipe_v(2, 4)))


@pytest.mark.turns("suffix")
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_draw(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"dualpipe.{suffix}"
    figure = draw(simulate(dualpipe_v(2, 4)), str(path))
    assert path.stat().st_size > 1_000
    assert len(figure.axes[0].collections) == sum(map(len, dualpipe_v(2, 4).ranks))
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said == ["forward", "dgrad", "wgrad", "dgrad and wgrad", "a: stages 0, 1", "b: stages 2, 3"]
    assert "unit" in figure.axes[0].get_xlabel() and "% idle" in figure.axes[0].get_title()
    assert figure.axes[0].title.get_fontsize() == 10
    timed = draw(simulate(dualpipe_v(2, 4)), unit="seconds").axes[0]
    assert "seconds per step" in timed.get_title() and timed.get_xlabel() == "time, in seconds"
    with pytest.raises(TypeError, match="draw: simulated must be"):
        draw("gpipe")
    alone = draw(gpipe(4, 2))
    assert [text.get_text() for text in alone.legends[0].get_texts()] == ["forward", "dgrad and wgrad"], "no shade to explain"
    assert draw(gpipe(2, 2)).axes[0].get_title() == draw(simulate(gpipe(2, 2))).axes[0].get_title()
    with pytest.raises(ValueError, match="of at most 100,000 actions"):
        draw(simulate(gpipe(250, 201)))


def test_two_schedules_share_a_figure(tmp_path):
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    above, below = figure.subplots(2, 1)
    assert draw(gpipe(2, 4), ax=above) is draw(zb_v(2, 4), tmp_path / "both.png", ax=below) is figure
    assert len(figure.axes) == 2 and not figure.legends and (tmp_path / "both.png").stat().st_size > 1_000
    assert [len(ax.collections) for ax in figure.axes] == [16, 48]
    assert [text.get_text() for text in below.get_legend().get_texts()] == [
        "forward",
        "dgrad",
        "wgrad",
        "a: stages 0, 1",
        "b: stages 2, 3",
    ]
    with pytest.raises(TypeError, match="draw: ax must be Axes, got"):
        draw(gpipe(2, 4), ax=figure)


BIG = """
from pathlib import Path
from funcops.schedule import Costs, Network, simulate, zb_h1

def most():  # of this program alone: getrusage also counts its parent's memory
    (found,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(found) / 2**20

before = most()  # torch's own memory: 0.3 GiB with the CPU's build, 0.6 with a build for CUDA
found = simulate(zb_h1(500, 500), Costs(1.0, 1.1, 0.9), Network(latency=0.01, ranks_per_node=8))
print(most() - before, found.time)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
def test_hundreds_of_ranks():
    """Planning for machines that one does not have. The limit in GiB follows from 0.5 GiB for a thousand ranks, which take four
    times as much."""
    done = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True, check=True)
    gib, total = map(float, done.stdout.split())
    assert 0.05 < gib < 0.125 and total > 1_500


def lines_run(call):
    """The number of Python lines that a call runs."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("generator", [zb_h1, zb_v], ids=lambda g: g.__name__)
def test_work_grows_as_the_number_of_actions(generator):
    def lines_an_action(n):
        return lines_run(lambda: simulate(generator(n, n), Costs(1.0, 1.1, 0.9), Network(latency=0.01))) / (3 * n * n)

    assert lines_an_action(48) < 1.1 * lines_an_action(12)


def test_delay_reaches_zb_h1_at_its_memory():
    for p in range(2, 9):
        for m in range(p, 25, 3):
            made = delay_w(one_f_one_b(p, m), p)
            found = simulate(made)
            assert found.time <= simulate(zb_h1(p, m)).time + 1e-9
            assert max(found.peak_bytes) <= p


def test_more_bytes_never_cost_time():
    times = [simulate(delay_w(one_f_one_b(4, 12), budget)).time for budget in (4, 5, 6, 8, 12)]
    assert times == sorted(times, reverse=True) and times[-1] < simulate(one_f_one_b(4, 12)).time


@settings(max_examples=60)
@given(
    st.sampled_from(GENERATORS),
    st.integers(1, 4),
    st.integers(1, 9),
    st.floats(1, 40),
    st.lists(st.floats(0.25, 2), min_size=5, max_size=5),
    st.sampled_from((0.5, 1.5, 2)),
)
def test_delayed_schedules_keep_their_budget(generator, p, m, budget, drawn, pending):
    """Complete (a Schedule checks itself), within the budget, and not slower than before if the original fits; otherwise refused by
    name."""
    forward, dgrad, wgrad, residual, latency = drawn
    costs, network = (
        Costs(forward, dgrad, wgrad, residual_bytes=residual, pending_bytes=residual * pending),
        Network(latency=latency),
    )
    before = generator(p, m)
    was = simulate(before, costs, network)
    try:
        made = delay_w(before, budget, costs, network)
    except ValueError as error:
        assert "delay_w: budget_bytes must be at least" in str(error)
        assert max(was.peak_bytes) > budget
        return
    found = simulate(made, costs, network)
    assert max(found.peak_bytes) <= budget * (1 + 1e-6)
    assert {(a.stage, a.microbatch) for row in made.ranks for a in row} == {
        (a.stage, a.microbatch) for row in before.ranks for a in row
    }
    if max(was.peak_bytes) <= budget:
        assert found.time <= was.time + 1e-9


def test_a_schedule_that_is_within_the_budget_is_not_refused():
    """Its whole backwards never hold a pending, which is larger here than the residuals; the last rank has room to split some."""
    costs = Costs(1, 1, 1, residual_bytes=1, pending_bytes=3)
    assert delay_w(one_f_one_b(1, 5), 1, costs) == one_f_one_b(1, 5)
    made = delay_w(one_f_one_b(3, 8), 3, costs)
    assert all(action.kind in "FB" for row in made.ranks[:1] for action in row[:-4])
    assert simulate(made, costs).time < simulate(one_f_one_b(3, 8), costs).time


def test_a_weight_gradient_makes_room_for_its_pending():
    """With room for five pendings a rank waits only for the first microbatch: (p - 1) forwards, then m times F, I and W."""
    made = delay_w(one_f_one_b(3, 8), 7.5, costs := Costs(1, 1, 0.5, residual_bytes=1, pending_bytes=1.5))
    assert simulate(made, costs).time == 2 * 1 + 8 * 2.5


def test_the_smallest_of_equally_fast_schedules_is_taken():
    """Times that differ by the order of sums alone are equal; what is not faster must not hold more."""
    three = Costs(1, 1.1, 0.7, residual_bytes=1, pending_bytes=1.4, output_bytes=1)
    costs, network = [three] * 3 + [Costs(1.5, 1.6, 0.9, residual_bytes=1.3, pending_bytes=1.8)], Network(0.05, 20)
    for before in (zb_v(2, 6), zb_v(2, 7), interleaved_1f1b(2, 6)):
        was = simulate(before, costs, network)
        for budget in (max(was.peak_bytes) + more for more in (0.01, 0.1, 0.2, 0.7, 1.2, 2.2)):
            found = simulate(delay_w(before, budget, costs, network), costs, network)
            if found.time == pytest.approx(was.time):
                assert max(found.peak_bytes) <= max(was.peak_bytes) + 1e-9, (before.name, budget)
                assert sum(found.peak_bytes) <= sum(was.peak_bytes) + 1e-9 or max(found.peak_bytes) < max(was.peak_bytes) - 1e-9
    assert delay_w(made := zb_v(2, 6), 5, costs, network) is made


def test_a_rank_that_never_waits_waits_exactly_0():
    """Sums in two orders differ in their last bits, and yet no time is below 0."""
    for wgrad in (0.6, 1.0, 1.2):
        for made in (zb_h1(4, 16), zb_v(3, 9), gpipe(3, 7)):
            found = simulate(made, Costs(1.0, 1.1, wgrad))
            assert all(t == 0.0 or t > 1e-3 for t in (*found.waiting, *found.idle)), made.name
    assert simulate(zb_h1(4, 16), Costs(1.0, 1.0, 1.2)).waiting[3] == 0.0


def test_too_small_a_budget_is_named():
    with pytest.raises(ValueError, match=r"delay_w: budget_bytes must be at least 2 for rank 0 at 0F1, got 1"):
        delay_w(gpipe(2, 2), 1)
    with pytest.raises(ValueError, match="delay_w: budget_bytes must be above 0, got 0"):
        delay_w(gpipe(2, 2), 0)
    with pytest.raises(TypeError, match="delay_w: schedule must be"):
        delay_w("gpipe", 3)


@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 8), (3, 7), (6, 12)])
def test_backwards_stay_whole_where_their_pendings_do_not_fit(p, m):
    """At 1F1B's budget rank 0 has no room for a pending beside p residuals; the others have."""
    costs = Costs(pending_bytes=1.5)
    found = simulate(delay_w(one_f_one_b(p, m), p, costs), costs)
    rows = [
        [a._replace(kind=k) for a in row for k in ("IW" if a.kind == "B" and r else a.kind)]
        for r, row in enumerate(one_f_one_b(p, m).ranks)
    ]
    by_hand = simulate(Schedule("all but rank 0 split", rows), costs)
    assert max(found.peak_bytes) <= p and found.time <= by_hand.time < simulate(one_f_one_b(p, m)).time
    if (p, m) == (4, 4):
        assert found.time <= 18.0


def test_stages_that_wait_for_each_other_are_delayed_too():
    made = Schedule.from_csv("0F0,2F0,2B0,0B0\n1F0,1B0\n")
    assert simulate(delay_w(made, 2)).time <= simulate(made).time


def test_costs_are_measured():
    cfg = decoder(4)
    params, x = chain.init(cfg, key=random.key(0)), microbatches(1, cfg, rows=64)[0]
    costs = measure_stages(params, x, cfg, repeats=2)
    assert len(costs) == 4 and all(c.forward > 0 and c.dgrad > 0 and c.wgrad > 0 for c in costs)
    ran = run(gpipe(4, 1), params, [x], cfg)
    held = [event.nbytes for event in ran.events[:3]]  # a rank each; h, the first's y, is kept by the second alone
    assert [c.residual_bytes for c in costs[:3]] == held
    assert costs[1].output_bytes == x.main.numel() * DIM * 4 and costs[3].output_bytes == 4
    assert simulate(gpipe(4, 2), costs).time > sum(c.forward for c in costs)
    whole = measure(chain, params, x, cfg, needs=Needs(x=False), repeats=1)
    assert whole.forward > 0 and whole.pending_bytes > 0
    assert measure(chain, params, x, cfg, needs=Needs.NONE, repeats=1).dgrad == 0
    with pytest.raises(ValueError, match="measure: repeats must be at least 1, got 0"):
        measure(chain, params, x, cfg, repeats=0)


def test_only_an_op_with_its_config_is_measured():
    cfg = LinearConfig(DIM, DIM)
    params, x = linear.init(cfg, key=random.key(0)), torch.ones(2, DIM)
    with pytest.raises(TypeError, match="measure: op must be Op, got"):
        measure(linear.fwd, params, x, cfg)
    with pytest.raises(TypeError, match="measure: cfg must be LinearConfig, got"):
        measure(linear, params, x, None)


@pytest.mark.parametrize("made", [gpipe(2, 3), one_f_one_b(2, 3), zb_h1(2, 3)], ids=lambda made: made.name)
def test_simulated_bytes_equal_a_runs(made):
    """One stage keeps what the caller gave, its x and an extra; another keeps the y of the stage before."""
    cfg, params, xs, dys = gated(3)
    costs = measure_stages(params, xs[0], cfg, repeats=1)
    assert costs[0].residual_bytes == 0 < costs[1].residual_bytes < costs[1].pending_bytes
    assert simulate(made, costs).peak_bytes == run(made, params, xs, cfg, [dy.clone() for dy in dys]).peak_bytes


def test_costs_are_medians_without_the_first_run(monkeypatch):
    """The clock is told how long each call takes: forward, dgrad and wgrad of a first run and of three others."""
    runs = [(100.0, 100.0, 100.0), (1.0, 3.0, 7.0), (9.0, 3.0, 5.0), (2.0, 4.0, 6.0)]
    ticks = iter([tick for run in runs for seconds in run for tick in (50.0, 50.0 + seconds)])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    cfg = LinearConfig(DIM, 3)
    x = torch.randn(6, DIM)
    found = measure(linear, linear.init(cfg, key=random.key(0)), x, cfg, repeats=3)
    assert (found.forward, found.dgrad, found.wgrad) == (2, 3, 6)
    assert (found.residual_bytes, found.output_bytes) == (x.nbytes, 6 * 3 * 4)
    assert found.pending_bytes == x.nbytes + 6 * 3 * 4, "x and dy"


def test_costs_count_what_a_device_has_yet_to_do(monkeypatch):
    """A device whose calls return at once, before their work: the clock goes on when it is waited for."""
    waiting, clock = [5.0], [0.0]  # seconds of work, some of it from before

    def wait():
        clock[0] += sum(waiting)
        waiting.clear()

    def later(name, seconds):
        return lambda *args, **kwargs: waiting.append(seconds) or getattr(linear, name)(*args, **kwargs)

    monkeypatch.setitem(measure.__globals__, "_synchronizer", lambda x: wait)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    slow = linear._replace(fwd=later("fwd", 1.0), dgrad=later("dgrad", 2.0), wgrad=later("wgrad", 3.0))
    cfg = LinearConfig(DIM, 3)
    found = measure(slow, linear.init(cfg, key=random.key(0)), torch.randn(6, DIM), cfg, repeats=3)
    assert (found.forward, found.dgrad, found.wgrad) == (1.0, 2.0, 3.0)


def test_fold_keeps_order_and_dependencies():
    for generator in (gpipe, one_f_one_b, zb_h1):
        made = fold(generator(8, 6), 2)
        assert len(made.ranks) == 2 and made.rank_of == {stage: stage // 4 for stage in range(8)}
        assert simulate(made).time <= 48 * 3
    assert fold(gpipe(4, 3), 4).ranks == gpipe(4, 3).ranks
    with pytest.raises(ValueError, match="fold: ranks must be a divisor of 4, got 3"):
        fold(gpipe(4, 3), 3)
