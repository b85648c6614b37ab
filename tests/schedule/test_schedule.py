"""Schedules against the formulas that were published for them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcops.schedule import Action, Costs, Schedule, gpipe, one_f_one_b, simulate, zb_h1, zb_h2

GENERATORS = {"gpipe": gpipe, "one_f_one_b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2}
GRID = [(p, m) for p in range(2, 9) for m in range(2, 33)]
COSTS = [Costs(), Costs(forward=1.0, dgrad=1.0, wgrad=0.5), Costs(forward=1.0, dgrad=1.25, wgrad=0.75), Costs(forward=1.0, dgrad=1.5, wgrad=1.0)]


@pytest.mark.parametrize("name", GENERATORS)
def test_every_schedule_of_a_grid_is_whole(name):
    for p, m in GRID:
        made = GENERATORS[name](p, m)
        assert made.stages == p and made.microbatches == m
        assert len(list(made.order())) == sum(map(len, made.ranks))
        assert Schedule.from_csv(made.to_csv(), made.name) == made


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_bubbles_of_gpipe_and_1f1b(costs):
    for p, m in GRID:
        for generator in (gpipe, one_f_one_b):
            assert simulate(generator(p, m), costs).bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_bubbles_of_zero_bubble_schedules(costs):
    f, i, w = costs.forward, costs.dgrad, costs.wgrad
    for p, m in GRID:
        if m >= p:
            assert simulate(zb_h1(p, m), costs).idle == pytest.approx([(p - 1) * (f + i - w)] * p)
        if m >= 2 * p - 1:
            assert max(simulate(zb_h2(p, m), costs).waiting) == pytest.approx((p - 1) * max(0.0, f + i - 2 * w))


def test_activations_in_flight():
    for p, m in GRID:
        assert simulate(gpipe(p, m)).peak_bytes == (m,) * p
        assert simulate(one_f_one_b(p, m)).peak_bytes == tuple(min(p - r, m) for r in range(p))
        assert max(simulate(zb_h1(p, m)).peak_bytes) == min(p, m)
        assert max(simulate(zb_h2(p, m)).peak_bytes) == min(2 * p - 1, m)
    small = Costs(residual_bytes=10, pending_bytes=4)
    assert simulate(zb_h1(4, 8), small).peak_bytes == (40, 34, 28, 22), "a pending is less than residuals"


def test_sending_takes_time():
    assert simulate(one_f_one_b(2, 1), Costs(send=0.5)).time == 2 * 3 + 2 * 0.5
    assert "% idle" in str(simulate(gpipe(2, 2)))


@given(st.integers(1, 5), st.integers(1, 6), st.randoms())
def test_a_schedule_with_two_actions_exchanged_is_whole_or_refused(p, m, random):
    """Whatever is accepted obeys every dependency."""
    ranks = [list(actions) for actions in zb_h1(p, m).ranks]
    rank = random.choice(ranks)
    i, j = random.randrange(len(rank)), random.randrange(len(rank))
    rank[i], rank[j] = rank[j], rank[i]
    try:
        made = Schedule("drawn", ranks)
    except ValueError as error:
        assert "Schedule 'drawn': rank" in str(error)
        return
    ends = {slot.action: slot for slots in simulate(made).slots for slot in slots}
    for (stage, kind, mb), slot in ends.items():
        before = {"F": [(stage - 1, "F", mb)], "I": [(stage, "F", mb), (stage + 1, "I", mb)], "W": [(stage, "I", mb)]}[kind]
        assert all(ends[Action(*need)].end <= slot.start for need in before if Action(*need) in ends)


@pytest.mark.parametrize(
    ("csv", "text"),
    [
        ("0F0,0B0\n1F0\n", "Schedule 'csv': rank 1 must be F and B, or F, I and W, of stage 1, microbatch 0, got F"),
        ("0F0,0B0,0F0\n", "rank 0 must be every action once, got 0F0 again"),
        ("0F0,1F0\n1B0,0B0\n", "rank 1 must be without stage 1, which is on rank 0, got 1B0"),
        ("0B0,0F0\n", "rank 0 must be able to go on at 0B0, got a wait for 0F0 without end"),
        ("0F0,0B0\n1B0,1F0\n", "must be able to go on at"),
        ("0F0,0W0,0I0\n", "must be able to go on at 0W0, got a wait for 0I0 without end"),
        ("0F0,0I0,0B0,0W0\n", "got FIWB"),
        ("0F0,0B0\n\n2F0,2B0\n", "ranks must be actions of stage 1, got none"),
        ("0X0\n", "Action: text must be a stage, one of F, I, W, B, and a microbatch, such as 2F5, got '0X0'"),
        ("\n", "Schedule: ranks must be at least one action, got none"),
    ],
)
def test_what_is_wrong_is_named(csv, text):
    with pytest.raises(ValueError) as error:
        Schedule.from_csv(csv)
    assert text in str(error.value)


def test_bad_numbers():
    with pytest.raises(ValueError, match="zb_h1: ranks must be at least 1, got 0"):
        zb_h1(0, 4)
    with pytest.raises(ValueError, match="Costs: dgrad must be at least 0, got -1"):
        Costs(dgrad=-1)


def test_text():
    assert str(one_f_one_b(2, 2)) == "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1"
    assert str(Action.parse(" 12W3 ")) == "12W3"


def test_torch_reads_the_csv(tmp_path):
    """The compute-only form of torch's runtime, if this torch has it."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    path = tmp_path / "schedule.csv"
    path.write_text(zb_h1(2, 4).to_csv())
    read = [[module._Action.from_str(cell) for cell in line.split(",")] for line in path.read_text().splitlines()]
    assert [[str(action) for action in row] for row in read] == [[str(a) for a in row] for row in zb_h1(2, 4).ranks]
