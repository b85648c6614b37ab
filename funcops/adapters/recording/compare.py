"""`compare`: the first place where two recordings differ, by how much, and where the difference grows."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from funcops.adapters.recording.recorded import AGAIN, Recorded, Recording
from funcops.engine.errors import fail, in_html, on_screen, require_number, require_type

ROUNDING = {"float64": 1e-11, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}  # of a run, by the coarser dtype
GROWS = 4.0  # times the largest error before it


class Difference(NamedTuple):
    """A value of both runs, `a` and `b`, that differs. `error`: |a - b| / |a| in the 2-norm, estimated from the sketches within a
    factor of two or so; infinite if the shapes differ, or something is not finite. `rank`: whose value it is, if there are
    several."""

    a: Recorded
    b: Recorded
    error: float
    rank: int | None = None

    @property
    def place(self) -> str:
        return self.a.place

    def __str__(self) -> str:
        ran = {row.ran for row in (self.a, self.b) if row.ran != row.path}
        by = f" (ran as {' and '.join(sorted(ran))})" * bool(ran)
        kinds = "" if self.a.dtype == self.b.dtype else f", {self.a.dtype} and {self.b.dtype}"
        shapes = "" if self.a.shape == self.b.shape else f", shapes {list(self.a.shape)} and {list(self.b.shape)}"
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return f"{self.place}{by}{rank}: {_said(self.error)}{kinds}{shapes}"


class Comparison:
    """The result of `compare`. `matched`: every value that both runs have, in the first run's order, as a `Difference`, whose
    error is 0.0 if the bits are equal; `differing`: those that differ by more than the tolerance; `only_a`, `only_b`: values of
    one run alone."""

    def __init__(
        self, matched: list[Difference], differing: list[Difference], only_a: list[Recorded], only_b: list[Recorded]
    ) -> None:
        self.matched, self.differing, self.only_a, self.only_b = matched, differing, only_a, only_b

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of execution, or None."""
        return self.differing[0] if self.differing else None

    @property
    def grows(self) -> list[Difference]:
        """The first difference, and each that is several times as large as all before it."""
        found: list[Difference] = []
        for one in self.differing:
            if not found or one.error > GROWS * found[-1].error:
                found.append(one)
        return found

    def __str__(self) -> str:
        count = f"{len(self.differing)} of {len(self.matched)} values differ"
        lines = [f"first: {self.first}" if self.first else "no difference", count if self.first else f"{len(self.matched)} values"]
        if len(self.grows) > 1:
            lines += ["the difference grows at", *(f"  {one}" for one in self.grows[1:])]
        for which, rows in (("the first", self.only_a), ("the second", self.only_b)):
            if rows:
                places = list(dict.fromkeys(re.sub(r"(?<![^.+])\d+(?![^.])", "*", row._replace(turn=0).place) for row in rows))
                lines += [f"{len(rows)} values of {which} run alone, as", *(f"  {place}" for place in places)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return on_screen(str(self), rows=60)

    def _repr_html_(self) -> str:
        return in_html(str(self))

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Plot the error of every value in the order of execution: the forward upwards, the backward downwards, on a logarithmic
        axis. Writes PNG, SVG, ... to `path` if given, and returns matplotlib's figure. Raises `ImportError` without matplotlib (the
        extra `docs`)."""
        from funcops.adapters.recording.picture import plot

        return plot(self, path)


def compare(
    a: Recording | Sequence[Recording],
    b: Recording | Sequence[Recording],
    *,
    tolerance: float | str | None = None,
    names: Mapping[str, str] | None = None,
) -> Comparison:
    """Compare two runs, value by value: by path, half, name and turn. `a` is the reference: the order is its order of execution, in
    which the first difference names its cause, or the call that was given something else; errors are relative to its values.

    `tolerance`: None: values must be equal to the bit, but within the rounding of the coarsest dtype if the runs differ in
    dtypes; "rounding": within the rounding of their dtype (float64 1e-11, float32 1e-4, float16 2e-2, bfloat16 1e-1); or a
    relative error. Both may be the recordings of all ranks; or `b` alone, each of which is then compared with its own parts of
    the values of `a` (`recording(like=ranks)`). `names`: paths of b, with * for any part, by what they are called in a, as from a
    model of another library: `{"model.layers.*.mlp.down_proj": "blocks.*.mlp.down"}`.

    Values that only one run has, such as those inside of a fused call, are listed, not compared. Raises `ValueError` if no value
    is in both runs, `TypeError` for anything but recordings.

    >>> import torch
    >>> from funcops import ChainConfig, ScaleConfig, Step, chain, compare, recording, scale
    >>> def run(factor):
    ...     cfg = ChainConfig(steps=(Step("double", scale, ScaleConfig(2.0)), Step("more", scale, ScaleConfig(factor))))
    ...     with recording() as found:
    ...         y, residuals = chain.fwd({"double": None, "more": None}, torch.ones(8), cfg)
    ...         chain.bwd(residuals, y, cfg)
    ...     return found
    ...
    >>> print(compare(run(3.0), run(3.0)))
    no difference
    6 values
    >>> print(compare(run(3.0), run(4.0)).first.place)
    more: fwd, y
    """
    firsts, ranks = _ranks("a", a), _ranks("b", b)
    if len(firsts) not in (1, len(ranks)):
        fail("compare", "b", f"recordings of {len(firsts)} ranks, as a is", len(ranks))
    if isinstance(tolerance, str):
        if tolerance != "rounding":
            fail("compare", "tolerance", "None, 'rounding' or a number", repr(tolerance))
    elif tolerance is not None:
        require_number("compare", 0.0, tolerance=tolerance)
    if names is not None:
        require_type("compare", "names", names, dict)
        for theirs, ours in names.items():
            require_type("compare", f"names[{theirs!r}]", ours, str)
            if theirs.count("*") != ours.count("*"):
                fail("compare", f"names[{theirs!r}]", "a path with as many *", repr(ours))
    rows = [[_renamed(row, names or {}) for row in rank.rows] for rank in ranks]
    found, left, used = _matched(firsts, rows)
    matched = [one for _, one in sorted(found, key=lambda pair: pair[0])]
    if not matched:
        fail("compare", "b", f"a run with values of a, such as {_example(firsts[0])}", f"one with {_example(ranks[0])}")
    tolerated = _tolerated(matched, tolerance)
    differing = [one for one in matched if _differs(one, tolerated)]
    only_b = [row for i, own in enumerate(rows) for row in own if (i, row.key) not in used and not row.part]
    return Comparison(matched, differing, left, only_b)


def _ranks(name: str, given: Any) -> list[Recording]:
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    for one in found:
        require_type("compare", name, one, Recording)
    if not found:
        fail("compare", name, "a recording, or the recordings of all ranks", "none")
    return found


def _matched(
    firsts: list[Recording], rows: list[list[Recorded]]
) -> tuple[list[tuple[Any, Difference]], list[Recorded], set[tuple[int, Any]]]:
    """The values of both runs, each with its place in the order of execution and its rank; the first run's others; and which of the
    second run's there were."""
    found, left, used = list[tuple[Any, Difference]](), list[Recorded](), set[tuple[int, Any]]()
    known = [{row.key: row for row in own} for own in rows]
    for rank, first in enumerate(firsts):
        theirs = range(len(rows)) if len(firsts) == 1 else (rank,)
        for at, (key, own) in enumerate(_wholes(first).items()):
            pairs = [(i, other) for i in theirs if (other := _alike(known[i], key)) is not None]
            used.update((i, other.key) for i, other in pairs)
            several = len(rows) > 1
            new = [_nearest(own, other, i, len(theirs))._replace(rank=i if several else None) for i, other in pairs]
            if len(theirs) > 1 and len(pairs) == len(theirs):
                new = _summed(own[0], new)
            found += [((at, one.rank or 0), one) for one in new]
            left += [] if pairs else own[:1]
    # what only the second run recomputed again is compared with the first time
    for i, (others, first) in enumerate(zip(rows, firsts * (len(rows) // len(firsts)), strict=True)):
        wholes = {key: (at, own[0]) for at, (key, own) in enumerate(_wholes(first).items())}
        for other in others:
            base = wholes.get(_first_time(other.key[:4]))
            if AGAIN in other.name and (i, other.key) not in used and base is not None:
                used.add((i, other.key))
                found.append(((base[0], i), Difference(base[1], other, _error(base[1], other), i if len(rows) > 1 else None)))
    return found, left, used


def _first_time(key: Any) -> Any:
    """The key of a value when it was recomputed first in its turn."""
    path, half, name, turn = key
    return path, half, name.partition(AGAIN)[0], turn


def _alike(known: dict[Any, Recorded], key: Any) -> Recorded | None:
    """The value with that key, or what it was when it was recomputed first."""
    return known.get((*key, ""), known.get((*_first_time(key), "")))


def _summed(own: Recorded, found: list[Difference]) -> list[Difference]:
    """The differences of all ranks. Each may have a part of a sum, as of a norm's weight gradient over its own tokens: then the
    difference of their sum, which is nearer than all of them. The sketch of a sum is the sum of the sketches."""
    others = [one.b for one in found]
    if own.half != "wgrad" or {other.shape for other in others} != {own.shape}:
        return found
    sketch = tuple(sum(parts) for parts in zip(*[other.digest.sketch for other in others], strict=True))
    total = others[0]._replace(part="sum over ranks", digest=others[0].digest._replace(hash=-1, sketch=sketch))
    error = _error(own, total)
    return [Difference(own, total, error)] if error < min(one.error for one in found) else found


def _example(run: Recording) -> str:
    return run.rows[0].place if run.rows else "nothing recorded"


def _wholes(a: Recording) -> dict[Any, list[Recorded]]:
    """The rows of each value of the reference: the whole, then its parts, in the order of execution."""
    found: dict[Any, list[Recorded]] = {}
    for row in a.rows:
        found.setdefault(row.key[:4], []).insert(0 if not row.part else len(found[row.key[:4]]), row)
    return found


def _nearest(own: list[Recorded], other: Recorded, rank: int, ranks: int) -> Difference:
    """The difference of a value, or of one rank's part of it: of each layout the part of that rank, of which the nearest counts."""
    mine = [row for row in own if row.shape == other.shape]
    parts = [row for row in mine if row.part]
    if parts:
        # ranks of several axes hold the same parts
        numbers = [(row, int(row.part.split()[0]) - 1, int(row.part.split()[2])) for row in parts]
        mine = [row for row, i, count in numbers if i == rank * count // ranks] or parts
    found = [Difference(row, other, _error(row, other)) for row in mine or own[:1]]
    return min(found, key=lambda one: one.error)


def _renamed(row: Recorded, names: Mapping[str, str]) -> Recorded:
    for theirs, ours in names.items():
        met = re.fullmatch(re.escape(theirs).replace(r"\*", "([^.]*)"), row.path)
        if met:
            # each * is the text that the other one met, in order
            pairs = zip(ours.split("*"), [*met.groups(), ""], strict=True)
            return row._replace(path="".join(text for pair in pairs for text in pair))
    return row


def _error(a: Recorded, b: Recorded) -> float:
    """|a - b| / |a|, estimated; exactly 0.0 for equal bits."""
    if a.shape != b.shape:
        return math.inf
    x, y = a.digest, b.digest
    if a.dtype == b.dtype and x.hash == y.hash:
        return 0.0
    if not (math.isfinite(x.largest) and math.isfinite(y.largest)):
        return math.inf
    count = math.prod(a.shape) or 1
    squares = [(p - q) ** 2 for p, q in zip(x.sketch, y.sketch, strict=True)]
    distance, norm = math.sqrt(sum(squares) / len(squares)), math.sqrt(x.mean_square * count)
    if norm == 0.0:
        return math.inf if distance else 0.0
    return distance / norm


def _tolerated(matched: list[Difference], tolerance: float | str | None) -> float | str | None:
    """The tolerance of each value: of runs in different dtypes the rounding of the coarsest, also for what both have in one
    dtype."""
    kinds = {kind for one in matched if one.a.dtype != one.b.dtype for kind in (one.a.dtype, one.b.dtype)}
    return max([ROUNDING.get(kind, 0.0) for kind in kinds]) if tolerance is None and kinds else tolerance


def _differs(one: Difference, tolerance: float | str | None) -> bool:
    if one.error == 0.0:
        return tolerance is None and one.a.digest.hash != one.b.digest.hash
    if tolerance is None:
        return True
    if isinstance(tolerance, str):
        tolerance = max(ROUNDING.get(kind, 0.0) for kind in (one.a.dtype, one.b.dtype))
    return not one.error <= tolerance


def _said(error: float) -> str:
    if error == 0.0:
        return "other bits, no distance that the sketches show"
    return "by a shape or by values that are not finite" if math.isinf(error) else f"a relative error of about {error:.1e}"
