"""Recordings of ranks, threads or processes: against each other, and against one process by the parts of whole values."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_planted_faults import Plan, ran

from funcops import compare, recording
from funcops.adapters.recording import Recording
from funcops.adapters.recording.parts import Layouts

sys.path.insert(0, str(Path(__file__).parents[1] / "meetings"))
from meeting_features import Meeting
from meeting_steps import of_rank

SCRIPT = Path(__file__).with_name("two_processes.py")


def whole(ranks):
    with recording(like=ranks) as found:
        of_rank(Meeting(), None)
    return found


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", ["tp", "sp", "zero3"])
def test_ranks_hold_parts_of_one_process(name):
    """Every value of two ranks is a part of one process's, or is equal to it: also gate and up, in two groups of one weight."""
    ranks = ran(Meeting(name), Plan(), 0)
    one = whole(ranks)
    found = compare(one, ranks, tolerance=1e-9)
    if name == "zero3":  # each rank has a microbatch of its own
        assert {row.a.turn for row in found.matched} == {0} and found.first.a.path == "embed" and found.first.rank == 1
        return
    assert found.first is None and not [row for row in found.only_b if row.half != "recompute"]
    sums = {one.place for one in found.matched if one.b.part}
    assert ("norm: wgrad, sums.weight" in sums) == (name == "sp"), "of a norm each rank has its own tokens"
    parts = {one.a.part for one in found.matched if one.a.part}
    assert {"1 of 2 along 0, in 2 groups", "2 of 2 along 0", "1 of 2 along 1"} <= parts
    faulty = ran(Meeting(name), Plan(60, 1e-3), 1)
    site = next(one for one in found.matched if one.rank == 1)
    assert site is not None and compare(one, faulty, tolerance=1e-9).first.rank == 1


def test_layouts_are_found_by_shapes():
    import torch

    def recorded(**values):
        from funcops import named_scope, note

        with recording() as found, named_scope("a", "fwd"):
            note(**values)
        return found

    t = torch.arange(24.0).view(4, 6)
    layouts = Layouts([recorded(x=t[:, :3], y=t[:2, :3], z=t)])
    names = [name for name, _ in layouts.parts(("a", "fwd", "x"), t)]
    assert names == ["1 of 2 along 1", "2 of 2 along 1"], "three columns a rank are an odd number, so not of two groups"
    assert not list(layouts.parts(("a", "fwd", "y"), t)), "two axes differ"
    assert not list(layouts.parts(("a", "fwd", "z"), t)) and not list(layouts.parts(("b", "fwd", "x"), t))


@pytest.mark.slow
def test_two_processes(tmp_path):
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=600)
    texts = [(tmp_path / f"rank{rank}{suffix}").read_text() for rank in range(2) for suffix in (".out", ".err")]
    assert done.returncode == 0 and json.loads(done.stdout) == {"rank0": 0, "rank1": 0}, (done.stderr, texts)
    right, wrong = ([Recording.load(tmp_path / f"{name}{i}.jsonl") for i in range(2)] for name in ("right", "wrong"))
    assert compare(right, ran(Meeting("tp"), Plan(), 0)).first is None, "processes are as threads"
    assert compare(whole(right), right, tolerance=1e-9).first is None
    path, half = json.loads(texts[2])
    first = compare(right, wrong).first
    assert (first.rank, first.a.path, first.a.half) == (1, path, half)
