"""Messages of a schedule: no ranks wait for each other in a ring, and results have the bits of one process."""

import dataclasses
import random

import pytest
import torch
from drawn import GENERATORS, disturbed, every
from exchanged import check_exchanged, exchange, exchanged
from rendezvous import on_threads
from staged import linears

from funcops import Needs, schedule
from funcops.adapters.pipelining import Pipeline
from funcops.schedule import Schedule, gpipe, one_f_one_b, run, zb_v
from funcops.schedule.exchange import Exchange, Program, message_of, program, reader_of, taken_by
from funcops.testing.checks import same_bits

DIM = 2


def check_bits(made, whole):
    """Compare every rank's part of a step with `run`."""
    cfg, params, xs, dys = linears(made)
    want = run(made, params, xs, cfg, dys)

    def work(rank):
        pipeline = Pipeline(made, cfg, xs[0])
        return pipeline.step({name: params[name] for name in pipeline.names}, xs, dys)

    parts, _ = on_threads(len(made.ranks), work, whole)
    first, last = (parts[made.rank_of[stage]] for stage in (0, made.stages - 1))
    dparams = {name: part.dparams[name] for name in want.dparams for part in parts if name in part.dparams}
    assert sum(len(part.dparams) for part in parts) == made.stages
    same_bits((last.ys, dparams, first.dxs), (want.ys, want.dparams, want.dxs), f"of {made}")


def test_drawn_schedules_give_the_bits_of_one_process():
    """All generators, folded and delayed ones, and any stages and orders of actions, on ranks that wait for each message."""
    for i, made in enumerate(every(seed=1, count=9)):
        check_bits(made, whole=i % 2 == 0)


@pytest.mark.slow
def test_more_drawn_schedules_give_the_bits_of_one_process():
    for i, made in enumerate(every(seed=2, count=63)):
        check_bits(made, whole=i % 2 == 0)


def strict(made):
    """Run the programs of all ranks as on a network that moves a rank's messages one batch at a time, each when its peer has
    reached the same batch. Returns the most messages that a rank waits to receive at once."""
    rows = [program(made, rank) for rank in range(len(made.ranks))]
    at, queues, moved, let_go, most = [0] * len(rows), [[] for _ in rows], set(), set(), 0
    progress = True
    while progress:
        progress = False
        for rank, own in enumerate(rows):
            while at[rank] < len(own.steps):
                step = own.steps[at[rank]]
                if isinstance(step, Exchange):
                    assert {made.rank_of[one.stage] for one in step.sends} <= {rank}, "a rank sends what it made"
                    queues[rank].append(step)
                    most = max(most, sum(len(one.receives) for one in queues[rank]))
                else:
                    needed = taken_by(step, made.stages)
                    if needed is not None and made.rank_of[needed.stage] != rank and needed not in moved:
                        break
                    gone = set(own.arrived.get(step, ()))
                    assert gone <= moved and not gone & let_go, "what is let go has come, and is let go once"
                    let_go |= gone
                at[rank], progress = at[rank] + 1, True
        for rank, queue in enumerate(queues):
            while queue and queues[queue[0].peer] and queues[queue[0].peer][0].peer == rank:
                mine = queue.pop(0)
                theirs = queues[mine.peer].pop(0)
                assert (mine.sends, mine.receives) == (theirs.receives, theirs.sends), "both start the same batch"
                moved.update(mine.sends, mine.receives)
                progress = True
    assert [len(own.steps) for own in rows] == at and not any(queues), f"stuck at {at}: {made}"
    wanted = {message_of(a) for row in made.ranks for a in row if crosses(made, a)}
    for row, own in zip(made.ranks, rows, strict=True):
        for before, action in zip(row, row[1:], strict=False):
            if action in made.together and crosses(made, before):
                steps = own.steps[: own.steps.index(action)]
                assert any(isinstance(one, Exchange) and before in one.sends for one in steps), "sent while the other runs"
    assert moved == wanted
    return most


def crosses(made, action):
    reader = reader_of(action, made.stages)
    return reader is not None and made.rank_of[reader] != made.rank_of[action.stage]


def test_no_drawn_schedule_waits_in_a_ring():
    for made in every(seed=5, count=90):
        strict(made)
    assert strict(gpipe(4, 20)) == 2


def shown(made, rank):
    """`+` sends, `-` receives."""
    signs = (("+", "sends"), ("-", "receives"))
    return [
        " ".join(f"{sign}{one}" for sign, of in signs for one in getattr(step, of)) if isinstance(step, Exchange) else str(step)
        for step in program(made, rank).steps
    ]


def test_messages_of_one_time_are_one_batch():
    """A rank starts to receive before the action that runs meanwhile."""
    made = one_f_one_b(2, 3)
    assert shown(made, 0) == ["0F0", "+0F0", "0F1", "+0F1", "-1I0", "0B0", "0F2", "+0F2 -1I1", "-1I2", "0B1", "0B2"]
    assert shown(made, 1) == ["-0F0", "-0F1", "1F0", "1B0", "+1I0", "1F1", "1B1", "+1I1 -0F2", "1F2", "1B2", "+1I2"]


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_no_schedule_of_a_grid_waits_in_a_ring(generator):
    """And no rank needs memory for more than a few messages in advance, for any number of microbatches."""
    for p in range(1, 9):
        for m in (*range(1, 13), 3 * p, 4 * p + 1):
            assert strict(generator(p, m)) <= 5


def test_a_disturbed_schedule_is_refused_or_whole():
    """Two actions of a rank are exchanged: Schedule names the ring, or the schedule finishes on every network."""
    rng, refused, whole = random.Random(3), 0, 0
    for made in every(seed=4, count=180):
        if all(len(row) < 2 for row in made.ranks):
            continue
        try:
            changed = Schedule("changed", disturbed(made, rng))
        except ValueError as error:
            assert "Schedule 'changed': rank " in str(error) and "without end" in str(error)
            refused += 1
        else:
            strict(changed)
            whole += 1
    assert min(refused, whole) > 40


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", ["one_f_one_b", "zb_h1", "interleaved_1f1b", "zb_v", "dualpipe_v"])
def test_sent_tensors_are_released(name):
    """The number of live message tensors does not grow with the microbatches."""

    def most(count):
        made = getattr(schedule, name)(3, count)
        cfg, params, xs, dys = linears(made)

        def work(rank):
            pipeline = Pipeline(made, cfg, xs[0])
            pipeline.step({name: params[name] for name in pipeline.names}, xs, dys, check_finite=False)
            return pipeline

        pipelines, network = on_threads(3, work)
        assert all(not p.runtime.messages._sent and not p.runtime.messages._coming for p in pipelines)
        return network.most

    assert most(24) == most(12)


@pytest.mark.parametrize("whole", [False, True])
def test_leaves_of_any_kind_come_as_they_were_sent(whole):
    """Any shapes and dtypes are sent, also no leaves at all; a gradient of None arrives as zeros, and integers have no gradient."""
    for case in range(25):
        drawn = exchanged(random.Random(case))
        found, _ = on_threads(2, lambda rank, drawn=drawn: exchange(rank, drawn), whole)
        for rank in range(2):
            check_exchanged(rank, drawn, found[rank])


DIFFERENT = {
    "schedule": {"schedule": one_f_one_b(3, 3)},
    "x": {"x": torch.ones(2, DIM)},
    "dtype": {"x": torch.ones(3, DIM, dtype=torch.float64), "dtype": torch.float64},
    "needs": {"needs": Needs(x=False, params=("s2",))},
    "error": {"x": torch.ones(3, DIM + 1)},
}


@pytest.mark.parametrize("what", DIFFERENT)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_ranks_that_differ_are_told_before_any_message(odd, what):
    """All ranks raise, whichever differs."""
    made = one_f_one_b(3, 2)
    cfg, _, xs, _ = linears(made)

    def work(rank):
        given = {"schedule": made, "cfg": cfg, "x": xs[0]} | (DIFFERENT[what] if rank == odd else {})
        with pytest.raises((ValueError, RuntimeError)) as caught:
            Pipeline(**given)
        return str(caught.value)

    found, network = on_threads(3, work)
    assert not any(network.most)
    if what == "error":
        assert "linear" in found.pop(odd)
        assert set(found) == {f"Pipeline: every rank must be able to make it, got an error on rank {odd}: see its message"}
    else:
        said = "schedule" if what == "schedule" else "boundaries of stages (from cfg, x, dtype and needs)"
        assert set(found) == {f"Pipeline: {said} must be the same on all ranks, got different ones on rank {odd or 1} and rank 0"}


def test_a_tie_between_ranks_is_refused_on_all():
    made = one_f_one_b(2, 2)
    cfg, _, xs, _ = linears(made)
    tied = dataclasses.replace(cfg, ties=(("s1.weight", "s0.weight"),))

    def work(_):
        said = r"Pipeline: cfg\.ties must be between stages of one rank .*, got s1\.weight on rank 1 and s0\.weight on rank 0"
        with pytest.raises(ValueError, match=said):
            Pipeline(made, tied, xs[0])

    on_threads(2, work)


def test_a_wrong_microbatch_sends_nothing():
    """In the first step all ranks raise. Later the rank that gets it raises at once, without a message. All can go on with the next
    step."""
    made = one_f_one_b(3, 2)
    cfg, params, xs, dys = linears(made)

    def work(rank):
        pipeline = Pipeline(made, cfg, xs[0])
        own = {name: params[name] for name in pipeline.names}
        error, said = (ValueError, "microbatch 1 of xs must be") if rank == 0 else (RuntimeError, "got an error on rank 0: see its")
        with pytest.raises(error, match=f"Pipeline.step: .*{said}"):
            pipeline.step(own, [xs[0], xs[1][:2]] if rank == 0 else xs, dys)
        pipeline.step(own, xs, dys)
        if rank == 0:
            with pytest.raises(error, match=f"Pipeline.step: {said}"):
                pipeline.step(own, [xs[0], xs[1][:2]], dys)
        return pipeline.step(own, xs, dys)

    found, _ = on_threads(3, work)
    same_bits(found[2].ys, run(made, params, xs, cfg, dys).ys, "afterwards")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_that_raises_says_where(stage):
    """The error is on its rank; the pipeline is not used afterwards."""
    made = zb_v(2, 2)
    cfg, params, xs, dys = linears(made)

    def work(rank):
        pipeline = Pipeline(made, cfg, xs[0])
        own = {name: params[name] for name in pipeline.names}
        if f"s{stage}" in own:
            own[f"s{stage}"] = type(own[f"s{stage}"])(torch.ones(1, 1), None)
        pipeline.step(own, xs, dys)

    with pytest.raises(ValueError, match=r"linear_fwd: params.weight must be \[2, 2\]") as caught:
        on_threads(2, work)
    assert any(f"stage {stage} " in note for note in getattr(caught.value, "__notes__", [f"stage {stage} "]))


def test_a_rank_s_program_is_data():
    """It can be compared, and nothing in it can be replaced in place."""
    one = Program((), {})
    assert one == Program((), {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.steps = ()
