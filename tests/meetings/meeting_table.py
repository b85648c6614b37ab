"""The table of meetings: every pair of features, and drawn triples, as a verdict that was checked.

A cell `works` if the loss and all gradients are the plain model's, or is `refused` with the error that the library raises.
Anything else raises here: wrong numbers, and an error that does not say where it is, what was expected and what came.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from meeting_features import DOCUMENTS, FEATURES, RECIPES, SCALE, Meeting, left_out
from meeting_plain import plain_gradients
from meeting_steps import AMAXES, batches, drawn, results
from torch import Tensor

import funcops
from funcops.engine.trees import paths

SAME_BITS = (
    "save_all",
    "recompute_norms",
    "minimal",
    "offload",
    "fit",
    "recompute",
    "delayed",
    "donate",
    "graph",
    "logs",
    "recorded",
)
TRIPLES = 40
EXACT = 1e-11  # of a gradient's norm: float64, sums in any order
NEAR = dict.fromkeys(RECIPES, 0.35) | {"nvfp4": 0.7, "compress": 0.15, "moe": 0.15}  # of narrow layers; a router may choose anew
OWN_TILES = dict.fromkeys(RECIPES, 0.2) | {"nvfp4": 0.5}
NAMED = re.compile(r"^[\w.*, ]+: .+ must .+", re.DOTALL)
SRC = Path(funcops.__file__).parent


class Verdict(NamedTuple):
    """`works`, or else the sentence of the error."""

    works: bool
    said: str = ""


def pairs() -> list[tuple[str, str]]:
    return [(a, b) for a, b in itertools.combinations(FEATURES, 2) if not left_out(a, b)]


def triples(count: int, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """Drawn sets of three features that a model can have."""
    draw, found = random.Random(seed), set()
    while len(found) < count:
        names = tuple(name for name in FEATURES if name in draw.sample(list(FEATURES), 3))
        if len(names) == 3 and names not in found and not any(left_out(a, b) for a, b in itertools.combinations(names, 2)):
            found.add(names)
            yield names


@functools.cache
def plain(model: frozenset[str], microbatches: int) -> dict[str, Tensor]:
    """The loss and the gradients of the plain model."""
    meeting = Meeting(*model, microbatches=microbatches)
    lengths = DOCUMENTS if "packed" in model else ()
    return plain_gradients(meeting.sizes, paths(drawn(model)), batches(meeting), lengths, SCALE)


@functools.cache
def without(names: frozenset[str], microbatches: int) -> dict[str, Tensor]:
    """The results of fewer features, to which a model with more is compared."""
    return results(Meeting(*names, microbatches=microbatches))


def verdict(*names: str) -> Verdict:
    """Build the model with these features, run it, and check the loss and all gradients. Raises `AssertionError` for a cell that is
    wrong."""
    meeting = Meeting(*names)
    try:
        got = results(meeting)
    except Exception as error:
        return Verdict(False, sentence(error))
    count = meeting.microbatches
    check(got, plain(meeting.model, count), from_plain(meeting))
    if meeting.recipe is not None:
        check(got, without(meeting.model | (meeting.names & set(RECIPES)), count), from_recipe(meeting))
    for name in SAME_BITS:
        # other tensors are compressed, or sums are traced in another order
        other = ("compress" in names and bool({"recompute", "logs"} & meeting.names)) or {"compile", "logs"} <= meeting.names
        if name in names and len(names) > 1 and not other:
            check(got, without(frozenset(names) - {name}, count), 0.0)
    return Verdict(True)


def from_plain(meeting: Meeting) -> float:
    """How far gradients may be from the plain model's, as a part of their norm."""
    rounded = meeting.recipe is not None or "compress" in meeting
    return sum(NEAR[name] for name in NEAR if name in meeting) if rounded else EXACT


def from_recipe(meeting: Meeting) -> float:
    """How far they may be from the recipe's on one process. Tiles, and largest elements, are of a rank's own tokens over "cp", and
    for experts over "ep" of more tokens than one process has at a time."""
    name = next(name for name in RECIPES if name in meeting)
    return OWN_TILES[name] if {"cp", "ep", "compress"} & meeting.names else EXACT


def check(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    """Check that the same gradients are there, and how far each is, in norm."""
    other = [path for path in got.keys() ^ want.keys() if not path.startswith(AMAXES)]
    assert not other, f"other gradients: {sorted(other)}"
    for path, t in ((path, t) for path, t in want.items() if path in got):
        assert got[path].shape == t.shape, f"{path}: {list(got[path].shape)}, not {list(t.shape)}"
        if tolerance == 0.0:
            assert torch.equal(got[path], t), f"{path}: other bits, {distance(got[path], t):.1e} away"
        else:
            far = distance(got[path], t)
            assert far <= tolerance, f"{path}: {far:.1e} away, more than {tolerance:.0e}"


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300))


def sentence(error: Exception) -> str:
    """The first line of an error that the library raises by name. Raises `AssertionError` for any other."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).partition("\n")[0]
    ours = Path(last.filename).is_relative_to(SRC) and isinstance(error, (ValueError, TypeError, RuntimeError))
    if not ours or not NAMED.match(said):
        raise AssertionError(f"{type(error).__name__} from {last.filename}, line {last.lineno}: {said}") from error
    return said
