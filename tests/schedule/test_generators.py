"""The generators against the published formulas."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcops import schedule
from funcops.schedule import Costs, Schedule, simulate

NAMES = ("gpipe", "one_f_one_b", "interleaved_1f1b", "interleaved_zb", "zb_h1", "zb_h2", "zb_v", "dualpipe_v")
gpipe, one_f_one_b, interleaved_1f1b, interleaved_zb, zb_h1, zb_h2, zb_v, dualpipe_v = (
    functools.lru_cache(maxsize=None, typed=True)(getattr(schedule, name)) for name in NAMES
)  # a schedule does not depend on the costs
ONE_STAGE = {"gpipe": gpipe, "one_f_one_b": one_f_one_b, "zb_h1": zb_h1, "zb_h2": zb_h2}
CHUNKED = {"interleaved_1f1b": interleaved_1f1b, "interleaved_zb": interleaved_zb, "zb_v": zb_v, "dualpipe_v": dualpipe_v}
GENERATORS = ONE_STAGE | CHUNKED
EVERY = [(p, m) for p in range(2, 9) for m in range(2, 33)]
COSTS = [
    Costs(),
    Costs(forward=1.0, dgrad=1.0, wgrad=0.5),
    Costs(forward=1.0, dgrad=1.25, wgrad=0.75),
    Costs(forward=1.0, dgrad=1.5, wgrad=1.0),
]


@pytest.fixture(params=[pytest.param(EVERY[::4], id="some"), pytest.param(EVERY, id="every", marks=pytest.mark.slow)])
def grid(request):
    """Ranks and microbatches."""
    return request.param


def full(grid):
    return [(p, m) for p, m in grid if m >= 2 * p and m % p == 0]


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", GENERATORS)
def test_every_schedule_of_a_grid_is_whole(name, grid):
    for p, m in grid:
        made = GENERATORS[name](p, m)
        assert made.stages == p * (1 + (name in CHUNKED)) and made.microbatches == m and len(made.ranks) == p
        assert len(list(made.order())) == sum(map(len, made.ranks))
        assert Schedule.from_csv(made.to_csv(), made.name) == made


RANKS, MORE, TIMES = st.integers(1, 7), st.integers(0, 20), st.integers(1, 20).map(lambda quarters: quarters / 4)
drawn = given(RANKS, MORE, TIMES, TIMES, TIMES)


@drawn
def test_bubbles_of_gpipe_and_1f1b(p, more, f, i, w):
    """At any m and any costs."""
    for generator in (gpipe, one_f_one_b):
        assert simulate(generator(p, 1 + more), Costs(f, i, w)).bubble == pytest.approx((p - 1) / (more + p))


@drawn
def test_idle_time_of_zb_h1(p, more, f, i, w):
    """The paper's formulas, plus the loss if weight gradients are shorter, or dgrads longer, than the gaps: as the docstrings."""
    found = simulate(zb_h1(p, p + more), Costs(f, i, w))
    assert found.idle == pytest.approx([(p - 1) * max(f, i, f + i - w)] * p)
    assert max(found.waiting) == pytest.approx((p - 1) * max(i, f + i - w))


@drawn
def test_idle_time_of_zb_h2(p, more, f, i, w):
    found = simulate(zb_h2(p, 2 * p - 1 + more), Costs(f, i, w))
    assert found.idle == pytest.approx([(p - 1) * max(f, i - f, f + i - 2 * w)] * p)
    assert max(found.waiting) == pytest.approx((p - 1) * max(0.0, i - f, f + i - 2 * w))


@given(RANKS, MORE, st.integers(1, 4), TIMES, TIMES, TIMES)
def test_idle_time_of_interleaved_1f1b(p, more, chunks, f, i, w):
    found = simulate(interleaved_1f1b(p, p * (1 + more // 5), chunks), Costs(f, i, w))
    assert found.idle == pytest.approx([(p - 1) * (f + i + w)] * p)


@given(RANKS, MORE, TIMES)
def test_zb_v_never_waits_from_2p_minus_1_microbatches_on(p, more, time):
    found = simulate(zb_v(p, 2 * p - 1 + more), Costs(time, time, time))
    assert found.waiting == pytest.approx([0.0] * p) and max(found.idle) == pytest.approx((p - 1) * time)
    if p > 1:
        assert max(simulate(zb_v(p, 1 + more % (2 * p - 2)), Costs(time, time, time)).waiting) >= time


@given(RANKS, MORE, TIMES, TIMES, st.integers(0, 4).map(lambda quarters: quarters / 4))
def test_idle_time_of_dualpipe_v(p, more, f, w, hidden):
    """DeepSeek's table says (p - 1)(F&B + B - 3 W). `hidden`: the part of the shorter of F and B that runs beside the other."""
    b = f + w
    together = f + b - hidden * f
    made, wanted = dualpipe_v(p, 2 * p + more), (p - 1) * max(together + b - 3 * w, together - w)
    found = simulate(made, Costs(f, f, w, together)).idle
    assert [found[-1], max(found)] == pytest.approx([wanted] * 2)
    assert simulate(made, Costs(f, f, w)).idle == pytest.approx([(p - 1) * max(f + b + b - 3 * w, f + b - w)] * p)


@pytest.mark.parametrize("costs", COSTS, ids=str)
def test_bubbles_of_interleaved_schedules(costs, grid):
    """Megatron's table: the bubble is 1F1B's over the number of chunks."""
    f, i, w = costs.forward, costs.dgrad, costs.wgrad
    for p, m in full(grid):
        found = simulate(interleaved_1f1b(p, m), costs)
        assert found.bubble == pytest.approx((p - 1) / (2 * m + p - 1))
        assert simulate(interleaved_1f1b(p, m, 4), costs).bubble == pytest.approx((p - 1) / (4 * m + p - 1))
        assert simulate(interleaved_zb(p, m), costs).idle == pytest.approx([(p - 1) * (f + i - w)] * p)


def test_activations_in_flight(grid):
    """A chunk is one unit; the papers' tables."""
    for p, m in grid:
        assert simulate(gpipe(p, m)).peak_bytes == (m,) * p
        assert simulate(one_f_one_b(p, m)).peak_bytes == tuple(min(p - r, m) for r in range(p))
        assert max(simulate(zb_h1(p, m)).peak_bytes) == min(p, m)
        assert max(simulate(zb_h2(p, m)).peak_bytes) == min(2 * p - 1, m)
        if m >= 2 * p:
            assert simulate(zb_v(p, m)).peak_bytes == (2 * p,) * p
            assert simulate(dualpipe_v(p, m)).peak_bytes == (2 * p + 1,) * p
    for p, m in full(grid):
        assert simulate(interleaved_1f1b(p, m)).peak_bytes == tuple(p + 2 * (p - 1 - r) + 1 for r in range(p))
        assert max(simulate(interleaved_zb(p, m)).peak_bytes) == 2 * p
    small = Costs(residual_bytes=10, pending_bytes=4)
    assert simulate(zb_h1(4, 8), small).peak_bytes == (40, 34, 28, 22), "a pending is less than residuals"


TORCHS = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}


@pytest.mark.parametrize("name", TORCHS)
def test_schedules_are_torchs(name, grid):
    """The same actions as torch.distributed.pipelining's class of that schedule."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    for p, m in full(grid):
        torchs = object.__new__(getattr(module, TORCHS[name]))  # to make one takes a process group
        torchs.pp_group_size = torchs.microbatches_per_round = p
        torchs.n_local_stages, torchs.num_stages, torchs._n_microbatches = 2, 2 * p, m
        for rank, line in enumerate(GENERATORS[name](p, m).to_csv().splitlines()):
            torchs.rank = rank
            assert [str(a) for a in torchs._calculate_single_rank_operations(rank) if a is not None] == line.split(",")


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("sizes", [(0, 4), (2, 0), (-1, 1), (1.5, 2), (True, 0)])
def test_bad_sizes(name, sizes):
    with pytest.raises(ValueError, match=f"{name}: (ranks|microbatches) must be at least 1"):
        GENERATORS[name](*sizes)


def test_bad_chunks():
    with pytest.raises(ValueError, match="interleaved_zb: chunks must be at least 1, got 0"):
        interleaved_zb(2, 2, 0)


def test_one_rank():
    for name, generator in GENERATORS.items():
        assert simulate(generator(1, 3)).bubble == 0.0, name


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("wrong", [-1, 0, True, False, 2.0, "2", None], ids=repr)
def test_sizes_are_counts(name, wrong):
    for sizes in ((wrong, 4), (2, wrong)):
        with pytest.raises(ValueError, match=f"{name}: (ranks|microbatches) must be at least 1, got {wrong!r}"):
            GENERATORS[name](*sizes)
    if name.startswith("interleaved"):
        with pytest.raises(ValueError, match=f"{name}: chunks must be at least 1, got {wrong!r}"):
            GENERATORS[name](2, 4, wrong)
