"""Each pair of features works, with the plain model's gradients, or raises the sentence that docs/what-meets-what.md says.

The first tier has a drawn part, in which most features meet once; the second has all pairs and drawn triples without a compiler,
and two of the compiled ones each day: a compiler takes up to a minute for one. The page's command checks all pairs.
"""

import itertools
import time

import pytest
from meeting_features import FEATURES, Meeting, left_out
from meeting_page import PAGE, committed, page
from meeting_table import TRIPLES, Verdict, pairs, sentence, triples, verdict

from funcops.distributed import Mesh
from funcops.engine.errors import fail
from funcops.models import decoder

COSTLY = {"compile", "graph", "fit", "ep", "moe"}  # seconds each
COMPILED = [pair for pair in pairs() if "compile" in pair]


def first():
    """Pairs in which every feature that costs little is once."""
    found, met = [], set(COSTLY)
    for a, b in sorted(pairs(), key=lambda pair: hash_of(pair)):
        if not {a, b} & met:
            found.append((a, b))
            met |= {a, b}
    return found


def hash_of(pair):
    return sum(ord(c) * 7**i for i, c in enumerate("-".join(pair))) % 1009


def cells():
    early, tested = first(), [pair for pair in pairs() if pair not in COMPILED]
    return [pytest.param(pair, id="-".join(pair), marks=() if pair in early else pytest.mark.slow) for pair in tested]


@pytest.mark.turns("pair", every=2)
@pytest.mark.parametrize("pair", cells())
def test_a_pair_is_what_the_page_says(pair):
    assert verdict(*pair) == committed()[pair]


def meets_as_its_pairs(*names):
    """If every two of the features work, all do; a refusal is a pair's."""
    refused = [cell.said for pair in itertools.combinations(names, 2) if not (cell := committed()[pair]).works]
    found = verdict(*names)
    assert found.works == (not refused) and (found.works or found.said in refused), names


@pytest.mark.slow
@pytest.mark.parametrize("place", range(2))
def test_a_compiled_set_of_the_day_is_what_the_page_says(place):
    sets = [*COMPILED, *[names for names in triples(TRIPLES) if "compile" in names]]
    meets_as_its_pairs(*sets[(2 * int(time.time() // 86400) + place) % len(sets)])


UNCOMPILED = [names for names in triples(TRIPLES) if "compile" not in names]


@pytest.mark.slow
@pytest.mark.parametrize("names", [pytest.param(names, id="-".join(names)) for names in UNCOMPILED])
def test_three_features_meet_as_their_pairs_do(names):
    meets_as_its_pairs(*names)


def test_the_page_is_what_the_table_makes():
    cells = committed()
    assert list(cells) == pairs() and PAGE.read_text() == page(cells)


REWRITTEN = [
    ("fp8_current", "lora", "tp", "zero3"),
    ("fp8_delayed", "lora", "sp"),
    ("fp8_block", "lora", "cp", "zero3"),
    ("mxfp8", "recompute", "sp", "packed"),
    ("nvfp4", "moe", "zero3"),
    ("lora", "ep", "zero3", "window"),
]


@pytest.mark.turns("names", every=2)
@pytest.mark.parametrize("names", [pytest.param(names, id="-".join(names)) for names in REWRITTEN])
def test_rewrites_commute(names):
    """In whatever order a config is rewritten, it is the same."""
    meeting, found = Meeting(*names), set()
    mesh = Mesh.abstract({"tp": 1, **meeting.mesh}, 1)
    for order in itertools.permutations(meeting.rewrites(mesh).values()):
        cfg = decoder(meeting.sizes, loss=True)
        for rewrite in order:
            cfg = rewrite(cfg)
        found.add(cfg)
    assert len(found) == 1


def test_few_pairs_are_refused():
    refused = [pair for pair, cell in committed().items() if not cell.works]
    assert len(refused) <= 0.04 * len(pairs())


def test_a_cell_that_is_wrong_raises(monkeypatch):
    """Wrong numbers, other bits, and an error without a name are neither of the two verdicts."""
    import meeting_table

    real = meeting_table.results

    def scaled(meeting):
        found = dict(real(meeting))
        return found | {"norm.weight": found["norm.weight"] * (1 + 1e-9 * ("window" in meeting))}

    monkeypatch.setattr(meeting_table, "results", scaled)
    with pytest.raises(AssertionError, match=r"norm.weight: 1.0e-09 away, more than 1e-11"):
        verdict("window")

    def broken(meeting):
        return {}["absent"]

    monkeypatch.setattr(meeting_table, "results", broken)
    with pytest.raises(AssertionError, match="KeyError from .*test_meetings.py"):
        verdict("window")


def test_only_errors_with_a_name_are_refusals():
    def said(call):
        try:
            call()
        except Exception as error:
            return sentence(error)

    assert said(lambda: fail("here", "x", "2", 3)) == "here: x must be 2, got 3"
    with pytest.raises(AssertionError, match="ValueError from"):
        said(lambda: int("x"))


def test_pairs_are_left_out_by_one_rule():
    assert left_out("fp8_block", "mxfp8") and left_out("ep", "moe") and left_out("pipeline", "donate")
    assert not left_out("tp", "cp") and not left_out("minimal", "recompute")
    assert Meeting("ep").sizes.moe is not None and Meeting("cp", "zero3").mesh == {"dp": 2, "cp": 2}
    assert Verdict(True).said == "" and set(FEATURES) == {name for pair in pairs() for name in pair}
