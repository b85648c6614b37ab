"""Schedules as data: which are complete, which are refused, and their texts."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funcops.schedule import Action, Schedule, dualpipe_v, gpipe, one_f_one_b, simulate, zb_h1, zb_v


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
        (
            "0F0,0B0\n1F0\n",
            "Schedule 'csv': actions of stage 1, microbatch 0 on rank 1 must be F and B, or F, I and W, got F: add 1B0",
        ),
        ("0F0,0F1,0I0,0W0,0I1\n", "actions of stage 0, microbatch 1 on rank 0 must be F and B, or F, I and W, got F, I: add 0W1"),
        ("0F1,0B1\n", "got none: add 0F0, 0B0"),
        ("0F0,0I0,0B0\n", "got F, I, B: remove 0I0"),
        ("0I0,0B0\n", "got I, B: add 0F0, remove 0I0"),
        ("0F0,0B0,0F0\n", "Schedule 'csv': actions of rank 0 must be all different, got 0F0 twice: remove one"),
        ("0F0,1F0,0B0\n1B0\n", "rank 1 must be without stage 1, which is on rank 0, got 1B0"),
        ("0B0,0F0\n", "rank 0 must be able to go on at 0B0, got a wait for 0F0 without end: 0B0 waits for 0F0, behind 0B0"),
        ("0F0,0B0\n1B0,1F0\n", "rank 1 must be able to go on at 1B0, got a wait for 1F0 without end: 1B0 waits for 1F0, behind"),
        (
            "0F0,0I0,0W0,3F0,3B0\n1F0,2F0,2B0,1B0\n",
            "at 0I0, got a wait for 1B0 without end: 0I0 waits for 1B0, behind 2B0 on rank 1; "
            "2B0 waits for 3B0, behind 0I0 on rank 0",
        ),
        ("0F0,0W0,0I0\n", "must be able to go on at 0W0, got a wait for 0I0 without end"),
        ("0F0,0I0,0B0,0W0\n", "got F, I, W, B: remove 0B0"),
        ("0F0,0B0\n\n2F0,2B0\n", "ranks must be actions of every stage up to 2, got none of stage 1"),
        ("0X0\n", "Action: text must be a stage, one of F, I, W, B, and a microbatch, such as 2F5, got '0X0'"),
        ("\n", "Schedule: ranks must be at least one action, got none"),
    ],
)
def test_wrong_schedules_are_named(csv, text):
    with pytest.raises(ValueError) as error:
        Schedule.from_csv(csv)
    assert text in str(error.value)


def test_the_error_shows_the_whole_ring_of_waits():
    """Every rank waits for the one after it; the cause is anywhere in the ring, whichever rank was stuck first."""

    def stuck(p):  # the last stage is on rank 0 too, behind the dgrad that waits for it
        middle = [f"{r}F0,{r}B0" for r in range(1, p)]
        with pytest.raises(ValueError) as error:
            Schedule.from_csv("\n".join([f"0F0,0B0,{p}F0,{p}B0", *middle]))
        return str(error.value).partition("without end: ")[2].split("; ")

    assert stuck(3) == ["0B0 waits for 1B0", "1B0 waits for 2B0", "2B0 waits for 3B0, behind 0B0 on rank 0"]
    long = stuck(20)
    assert len(long) == 9 and long[4] == "..." and long[-1] == "19B0 waits for 20B0, behind 0B0 on rank 0"
    with pytest.raises(ValueError) as error:  # rank 0 waits for the ring, and is not part of it
        Schedule.from_csv("0F0,0B0\n3F0,1F0,1B0,3B0\n2F0,2B0")
    assert str(error.value).endswith("end: 3F0 waits for 2F0; 2F0 waits for 1F0, behind 3F0 on rank 1")


@pytest.mark.parametrize(("kind", "near"), [("FORWARD", ", nearest F"), ("w", ", nearest W"), ("X", ""), ("", ""), (1, "")])
def test_a_kind_is_one_letter(kind, near):
    with pytest.raises(ValueError) as error:
        Action(0, kind, 0)
    assert str(error.value) == f"Action: kind must be F (forward), I (dgrad), W (wgrad) or B (both), got {kind!r}{near}"


def test_actions_are_tuples_as_before():
    action = Action(stage=2, kind="F", microbatch=5)
    assert action == (2, "F", 5) and pickle.loads(pickle.dumps(action)) == copy.copy(action) == action
    assert repr(action) == "Action(stage=2, kind='F', microbatch=5)" and action._replace(kind="B") == Action.parse("2B5")
    assert type(pickle.loads(pickle.dumps(action))) is Action


def test_a_file_is_read(tmp_path):
    made = dualpipe_v(2, 4)
    (tmp_path / "mine.csv").write_text(made.to_csv())
    assert Schedule.from_csv(tmp_path / "mine.csv", made.name) == made
    with pytest.raises(FileNotFoundError, match="yours.csv"):
        Schedule.from_csv(tmp_path / "yours.csv")
    with pytest.raises(TypeError, match="Schedule.from_csv: text must be str or PathLike, got 5"):
        Schedule.from_csv(5)


def test_text():
    assert str(one_f_one_b(2, 2)) == "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1"
    assert str(Action.parse(" 12W3 ")) == "12W3"


@pytest.mark.parametrize("made", [zb_h1(2, 4), dualpipe_v(2, 4), zb_v(2, 3)], ids=lambda made: made.name)
def test_torch_reads_the_csv(made):
    """The compute-only form of torch's runtime, if this torch has it."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    for line in made.to_csv().splitlines():
        assert [str(module._Action.from_str(cell)) for cell in line.split(",")] == line.split(",")


def test_stages_placed_as_one_likes():
    made = Schedule.from_csv("0F0,2F0,2B0,0B0\n\n1F0, ,1I0,1W0\n", "mine")
    assert made.rank_of == {0: 0, 2: 0, 1: 1} and made.stages == 3 and made.microbatches == 1


def test_pairs_begin_together():
    pair = Schedule.from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,(1F1;1B0)OVERLAP_F_B,1F2,1B1,1B2")
    assert pair.together == {Action(1, "B", 0)} and "(1F1;1B0)OVERLAP_F_B" in pair.to_csv()
    assert Schedule.from_csv(pair.to_csv(), pair.name) == pair
    forward, backward = simulate(pair).slots[1][1:3]
    assert forward.start == backward.start == 2 and forward.end == backward.end == 5
    with pytest.raises(ValueError, match="'x': together must be backwards right after a forward, got 0B1"):
        Schedule("x", gpipe(1, 2).ranks, frozenset({Action(0, "B", 1)}))


def test_a_pair_that_would_wait_for_itself_is_refused():
    with pytest.raises(ValueError, match="rank 0 must be able to go on at 0F0, got a wait for 0F0 without end"):
        Schedule.from_csv("(0F0;0B0)OVERLAP_F_B")


@pytest.mark.parametrize("made", [gpipe(2, 3), zb_h1(2, 3), zb_v(2, 4), dualpipe_v(2, 4)], ids=lambda s: s.name)
@pytest.mark.parametrize(
    "change", [lambda i: -1 - i, lambda i: i - 1, float, bool, str], ids=["negative", "from -1", "float", "bool", "str"]
)
@pytest.mark.parametrize("field", ["stage", "microbatch"])
def test_stages_and_microbatches_are_counted_from_0(made, change, field):
    """Whatever stands for a number in one action, or in all."""
    for every in (True, False):
        actions = [list(rank) for rank in made.ranks]
        for rank in actions if every else actions[:1]:
            for i in range(len(rank)) if every else (0,):
                rank[i] = rank[i]._replace(**{field: change(getattr(rank[i], field))})
        with pytest.raises(ValueError, match="rank . must be made of Actions whose stage and microbatch are integers"):
            Schedule("x", tuple(map(tuple, actions)))


def test_lists_of_actions_make_the_schedule_that_tuples_make():
    made = zb_h1(2, 3)
    lists = [list(actions) for actions in made.ranks]
    other = Schedule(made.name, lists)
    lists[0].clear()  # the caller's own
    assert other == made and hash(other) == hash(made) and other.ranks == made.ranks
