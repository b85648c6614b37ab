"""What a rank does, and in which order.

F: forward; I: input gradient (dgrad); W: weight gradient (wgrad); B: both, I then W. On stage s and microbatch m:

    F(s, m) follows F(s - 1, m)        I(s, m) or B(s, m) follows F(s, m) and I or B(s + 1, m)        W(s, m) follows I(s, m)
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from funcops.errors import fail, require

KINDS = ("F", "I", "W", "B")


class Action(NamedTuple):
    """`2F5`: the forward of microbatch 5 on stage 2."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """`"2F5"` as an action. Raises `ValueError`."""
        found = re.fullmatch(r"(\d+)([FIWB])(\d+)", text.strip())
        if found is None:
            fail("Action", "text", "a stage, one of F, I, W, B, and a microbatch, such as 2F5", repr(text))
        return Action(int(found[1]), found[2], int(found[3]))


@dataclasses.dataclass(frozen=True)
class Schedule:
    """`ranks`: the actions of each, in order. Making one checks it: every stage is on one rank, sees each microbatch once forward
    and once backward (B, or I and W), and the ranks, each waiting for what it needs, come to an end.

    Raises `ValueError`, which names the rank and the action.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        require(any(self.ranks), "Schedule", "ranks", "at least one action", "none")
        _check_once(self)
        for _ in self.order():
            pass

    @functools.cached_property
    def stages(self) -> int:
        return 1 + max(action.stage for actions in self.ranks for action in actions)

    @functools.cached_property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for actions in self.ranks for action in actions)

    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}

    def order(self) -> Iterator[tuple[int, Action]]:
        """All actions with their ranks, in an order in which each finds what it needs. A rank is looked at again when something
        that it may wait for is done, so the time is that of the actions."""
        count, last, owner = self.microbatches, self.stages - 1, self.rank_of()
        forward, dgrad = bytearray((last + 1) * count), bytearray((last + 1) * count)
        at, ready = [0] * len(self.ranks), deque(range(len(self.ranks)))
        while ready:
            rank = ready.popleft()
            actions, i = self.ranks[rank], at[rank]
            while i < len(actions):
                action = actions[i]
                stage, kind, m = action
                place = stage * count + m
                if kind == "F":
                    if stage and not forward[place - count]:
                        break
                    forward[place] = 1
                    reader = owner[stage + 1] if stage < last else rank
                elif kind == "W":
                    if not dgrad[place]:
                        break
                    reader = rank
                else:
                    if not forward[place] or (stage < last and not dgrad[place + count]):
                        break
                    dgrad[place] = 1
                    reader = owner[stage - 1] if stage else rank
                yield rank, action
                i += 1
                if reader != rank:
                    ready.append(reader)
            at[rank] = i
        for rank, actions in enumerate(self.ranks):
            if at[rank] < len(actions):
                self._stuck(rank, actions[at[rank]], forward, dgrad)

    def _stuck(self, rank: int, action: Action, forward: bytearray, dgrad: bytearray) -> None:
        done = {"F": forward, "I": dgrad}
        missing = next(n for n in needs(action, self.stages - 1) if not done[n.kind][n.stage * self.microbatches + n.microbatch])
        fail(f"Schedule {self.name!r}", f"rank {rank}", f"able to go on at {action}", f"a wait for {missing} without end")

    def to_csv(self) -> str:
        """A line a rank, as torch.distributed.pipelining reads it with format "compute_only"."""
        return "".join(",".join(map(str, actions)) + "\n" for actions in self.ranks)

    @staticmethod
    def from_csv(text: str, name: str = "csv") -> Schedule:
        """The schedule of such a text; empty cells are pauses, which mean nothing here."""
        lines = [line for line in text.splitlines() if line.strip()]
        return Schedule(name, tuple(tuple(Action.parse(c) for c in line.split(",") if c.strip()) for line in lines))

    def __str__(self) -> str:
        width = max(len(str(a)) for actions in self.ranks for a in actions)
        return "\n".join(f"rank {r}: " + " ".join(str(a).rjust(width) for a in actions) for r, actions in enumerate(self.ranks))


def needs(action: Action, last: int) -> list[Action]:
    """What must be done before; an I stands for a B too."""
    stage, kind, m = action
    if kind == "F":
        return [Action(stage - 1, "F", m)] if stage else []
    if kind == "W":
        return [Action(stage, "I", m)]
    return [Action(stage, "F", m), *([Action(stage + 1, "I", m)] if stage < last else [])]


def _check_once(schedule: Schedule) -> None:
    where = f"Schedule {schedule.name!r}"
    owner: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            require(action.kind in KINDS, where, f"rank {rank}", f"of the kinds {', '.join(KINDS)}", str(action))
            require(action not in seen, where, f"rank {rank}", "every action once", f"{action} again")
            seen.add(action)
            held = owner.setdefault(action.stage, rank)
            require(held == rank, where, f"rank {rank}", f"without stage {action.stage}, which is on rank {held}", str(action))
    absent = next((stage for stage in range(schedule.stages) if stage not in owner), None)
    require(absent is None, where, "ranks", f"actions of stage {absent}", "none")
    whole = schedule.stages * schedule.microbatches
    counts = {kind: sum(action.kind == kind for action in seen) for kind in KINDS}
    if counts["F"] == whole and counts["I"] == counts["W"] == whole - counts["B"] and not counts["B"]:
        return  # each once, and as many as there are
    for stage in range(schedule.stages):
        for m in range(schedule.microbatches):
            kinds = "".join(k for k in KINDS if Action(stage, k, m) in seen)
            wanted = f"F and B, or F, I and W, of stage {stage}, microbatch {m}"
            require(kinds in ("FB", "FIW"), where, f"rank {owner[stage]}", wanted, kinds or "none")
