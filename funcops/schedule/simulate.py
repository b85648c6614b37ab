"""What a schedule would take: times and peak bytes per rank, from the cost of each action."""

from __future__ import annotations

import dataclasses
from array import array
from typing import NamedTuple

from funcops.errors import require
from funcops.schedule.actions import KINDS, Action, Schedule


@dataclasses.dataclass(frozen=True)
class Costs:
    """Times of one microbatch on one stage, in any unit; `send`: of passing it to another rank; bytes that a forward keeps, and that
    a dgrad leaves of them for its wgrad."""

    forward: float = 1.0
    dgrad: float = 1.0
    wgrad: float = 1.0
    send: float = 0.0
    residual_bytes: float = 1.0
    pending_bytes: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            require(value >= 0, "Costs", name, "at least 0", value)

    def time(self, kind: str) -> float:
        return {"F": self.forward, "I": self.dgrad, "W": self.wgrad, "B": self.dgrad + self.wgrad}[kind]


class Slot(NamedTuple):
    action: Action
    start: float
    end: float


class Simulated(NamedTuple):
    """`slots`: what each rank does when. `peak_bytes`, by rank."""

    slots: tuple[tuple[Slot, ...], ...]
    time: float
    peak_bytes: tuple[float, ...]

    @property
    def idle(self) -> tuple[float, ...]:
        """By rank, the time of the step in which it does nothing."""
        return tuple(self.time - sum(slot.end - slot.start for slot in slots) for slots in self.slots)

    @property
    def waiting(self) -> tuple[float, ...]:
        """By rank, the time between its first and its last action in which it waits. Where a rank may go on with the next step
        before others end this one, this is all that is lost."""
        return tuple(s[-1].end - s[0].start - sum(slot.end - slot.start for slot in s) if s else 0.0 for s in self.slots)

    @property
    def bubble(self) -> float:
        """The part of all ranks' time that is idle."""
        return sum(self.idle) / (self.time * len(self.slots))

    def __str__(self) -> str:
        return f"{self.time:g} per step, {100 * self.bubble:.1f} % idle, peak bytes by rank: " + ", ".join(f"{b:g}" for b in self.peak_bytes)


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulated:
    """Every action as early as its rank is free and what it needs has come."""
    costs = costs or Costs()
    owner, last, count = schedule.rank_of(), schedule.stages - 1, schedule.microbatches
    forward, dgrad = (array("d", bytes(8 * (last + 1) * count)) for _ in range(2))
    times = {kind: costs.time(kind) for kind in KINDS}
    kept = {"F": costs.residual_bytes, "I": costs.pending_bytes - costs.residual_bytes, "W": 0.0, "B": 0.0}
    freed = {"F": 0.0, "I": 0.0, "W": costs.pending_bytes, "B": costs.residual_bytes}
    free, held, peak = ([0.0] * len(schedule.ranks) for _ in range(3))
    slots: list[list[Slot]] = [[] for _ in schedule.ranks]
    for rank, action in schedule.order():
        stage, kind, m = action
        start, place = free[rank], stage * count + m
        if kind == "F":
            if stage:
                start = max(start, forward[place - count] + (costs.send if owner[stage - 1] != rank else 0.0))
        elif kind != "W" and stage < last:
            start = max(start, dgrad[place + count] + (costs.send if owner[stage + 1] != rank else 0.0))
        end = start + times[kind]
        if kind == "F":
            forward[place] = end
        elif kind != "W":
            dgrad[place] = end
        slots[rank].append(Slot(action, start, end))
        free[rank] = end
        held[rank] += kept[kind]
        peak[rank] = max(peak[rank], held[rank])
        held[rank] -= freed[kind]
    return Simulated(tuple(map(tuple, slots)), max(free), tuple(peak))
