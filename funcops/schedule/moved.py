"""`Moved`: residuals that a stage keeps in the memory of another rank between forward and backward, for `simulate`."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from array import array
from collections.abc import Callable, Sequence

from funcops.engine.errors import require, require_count, require_number
from funcops.schedule.actions import Schedule


@dataclasses.dataclass(frozen=True)
class Moved:
    """Bytes of the residuals of one microbatch under a rule `At`, which `report(residuals).places` counts at another rank. `rank`:
    the rank of the schedule that keeps them, from the end of the forward to the end of the dgrad. `nbytes`: of each way.
    `hidden_under`: the time of other work that the way back overlaps with, such as the backward of the layers after; the rest is
    added to the dgrad. The way there runs beside the stage's next action, and takes no time.

    >>> from funcops.schedule import Costs, Moved, Network, one_f_one_b, simulate
    >>> plain, moved = Costs(), Costs(residual_bytes=0.5, moved=(Moved(1, nbytes=0.5),))
    >>> found = simulate(one_f_one_b(2, 4), [moved, plain], Network(bandwidth=2.0))
    >>> found.peak_bytes, found.moved_bytes, found.exposed
    ((1.0, 2.0), (2.0, 0.0), (1.0, 0.0))
    """

    rank: int
    nbytes: float
    hidden_under: float = 0.0

    def __post_init__(self) -> None:
        require_count("Moved", 0, rank=self.rank)
        require_number("Moved", 0, nbytes=self.nbytes)
        require_number("Moved", 0, finite=False, hidden_under=self.hidden_under)


def waits(
    where: str, schedule: Schedule, moved: Sequence[tuple[Moved, ...]], time: Callable[[int, int, float], float]
) -> list[float]:
    """For each stage the time that its dgrad waits for what comes back, `time(rank, home, nbytes)` of each less what hides it.
    Raises `ValueError` for a rank that cannot keep it."""
    found = []
    for stage, own in enumerate(moved):
        home = schedule.rank_of[stage]
        for i, one in enumerate(own):
            wanted = f"another than rank {home}, below {len(schedule.ranks)}"
            require(one.rank < len(schedule.ranks) and one.rank != home, where, f"costs.{stage}.moved.{i}.rank", wanted, one.rank)
        found.append(sum([max(0.0, time(one.rank, home, one.nbytes) - one.hidden_under) for one in own]))
    return found


def refuse(where: str, moved: Sequence[tuple[Moved, ...]]) -> None:
    """Raise for bytes at another rank, where only the own ones are counted."""
    for stage, own in enumerate(moved):
        require(not own, where, f"costs.{stage}.moved", "empty, as simulate alone counts the bytes of other ranks", own)


def with_guests(
    schedule: Schedule, moved: Sequence[tuple[Moved, ...]], ends: Sequence[array[float]], held: Sequence[array[float]]
) -> tuple[tuple[float, ...], tuple[array[float], ...]]:
    """The peaks, and the bytes after each action, with what each rank keeps for others. At one time, bytes come before some go."""
    guests: list[list[tuple[float, float]]] = [[] for _ in schedule.ranks]
    for actions, times in zip(schedule.ranks, ends, strict=True):
        for (stage, kind, _), end in zip(actions, times, strict=True):
            for one in moved[stage] if kind != "W" else ():
                guests[one.rank].append((end, one.nbytes if kind == "F" else -one.nbytes))
    peaks, after = [], []
    for times, own, came in zip(ends, held, guests, strict=True):
        changes = [(end, now - before) for end, before, now in zip(times, [0.0, *own[:-1]], own, strict=True)] if own else []
        timeline = sorted([*changes, *came], key=lambda one: (one[0], -one[1]))
        peaks.append(max(itertools.accumulate([more for _, more in timeline]), default=0.0))
        came.sort()
        sums, moments = [0.0, *itertools.accumulate([more for _, more in came])], [moment for moment, _ in came]
        after.append(array("d", [now + sums[bisect.bisect_right(moments, end)] for end, now in zip(times, own, strict=True)]))
    return tuple(peaks), tuple(after)
