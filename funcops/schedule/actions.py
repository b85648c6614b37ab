"""The actions of each rank, and their order.

F: forward; I: input gradient (dgrad); W: weight gradient (wgrad); B: both, I then W. On stage s and microbatch m:

    F(s, m) follows F(s - 1, m)        I(s, m) or B(s, m) follows F(s, m) and I or B(s + 1, m)        W(s, m) follows I(s, m)

Stages may be placed on ranks in any way, several to a rank.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from funcops.engine.errors import fail, in_html, on_screen, require, require_type

KINDS = ("F", "I", "W", "B")


class _Fields(NamedTuple):
    stage: int
    kind: str
    microbatch: int


class Action(_Fields):
    """`2F5`: the forward of microbatch 5 on stage 2. Raises `ValueError` for a kind that is not F, I, W or B.

    >>> from funcops.schedule import Action
    >>> action = Action.parse("2F5")
    >>> action.stage, action.kind, action.microbatch, str(action)
    (2, 'F', 5, '2F5')
    """

    __slots__ = ()

    def __new__(cls, stage: int, kind: str, microbatch: int) -> Action:
        if kind not in KINDS:
            near = str(kind)[:1].upper()
            got = f"{kind!r}, nearest {near}" if near in KINDS else repr(kind)
            fail("Action", "kind", "F (forward), I (dgrad), W (wgrad) or B (both)", got)
        return tuple.__new__(cls, (stage, kind, microbatch))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        """Return the action that `"2F5"` names. Raises `ValueError` for any other form."""
        found = re.fullmatch(r"(\d+)([FIWB])(\d+)", text.strip())
        if found is None:
            fail("Action", "text", "a stage, one of F, I, W, B, and a microbatch, such as 2F5", repr(text))
        return Action(int(found[1]), found[2], int(found[3]))


@dataclasses.dataclass(frozen=True, repr=False)
class Schedule:
    """A pipeline schedule. `ranks`: the actions of each rank, in order. The constructor checks that every stage is on one rank and
    sees each microbatch once forward and once backward (B, or I and W), and that the ranks, each waiting for its inputs, finish.

    `together`: backwards that run side by side with the forward right before them: the two begin when both can.

    Raises `ValueError`, which names the rank and the action.

    >>> from funcops.schedule import Schedule
    >>> mine = Schedule.from_csv("0F0,0F1,0I0,0W0,0B1\\n1F0,1B0,1F1,1B1")
    >>> mine.stages, mine.microbatches, mine.rank_of
    (2, 2, {0: 0, 1: 1})
    >>> Schedule.from_csv("0F0,0B0\\n1B0,1F0", name="mine")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ValueError: Schedule 'mine': rank 1 must be able to go on at 1B0, got ... without end: 1B0 waits for 1F0, behind 1B0 on rank 1

    A program makes one by `Schedule(name, ranks)`, with a list of `Action(stage, kind, microbatch)` for each rank; `to_csv()`
    returns the text that `from_csv` reads, and `print` shows a table.
    """

    name: str
    ranks: tuple[tuple[Action, ...], ...]
    together: frozenset[Action] = frozenset()

    def __post_init__(self) -> None:
        require_type("Schedule", "name", self.name, str)
        require_type("Schedule", "ranks", self.ranks, tuple, list)
        require_type("Schedule", "together", self.together, frozenset, set)
        for rank, actions in enumerate(self.ranks):
            require_type("Schedule", f"ranks.{rank}", actions, tuple, list)
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))
        require(any(self.ranks), "Schedule", "ranks", "at least one action", "none")
        _check_actions(self)
        _check_once(self)
        _check_together(self)
        for _ in self.order():
            pass

    def __repr__(self) -> str:
        sizes = f"{len(self.ranks)} ranks, {self.stages} stages, {self.microbatches} microbatches"
        return on_screen(f"{self.name}: {sizes}\n{self}")

    def _repr_html_(self) -> str:
        return in_html(repr(self))

    @functools.cached_property
    def stages(self) -> int:
        return 1 + max(action.stage for actions in self.ranks for action in actions)

    @functools.cached_property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for actions in self.ranks for action in actions)

    @functools.cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {stage: rank for rank, actions in enumerate(self.ranks) for stage in {action.stage for action in actions}}

    def order(self) -> Iterator[tuple[int, Action]]:
        """Yield all actions with their ranks, in an order in which each finds its inputs. A rank is visited again only when an
        action that it may wait for is done, so the time grows linearly with the number of actions."""
        count, last, owner, together = self.microbatches, self.stages - 1, self.rank_of, self.together
        forward, dgrad = bytearray((last + 1) * count), bytearray((last + 1) * count)
        at, ready = [0] * len(self.ranks), deque(range(len(self.ranks)))
        while ready:
            rank = ready.popleft()
            actions, i = self.ranks[rank], at[rank]
            while i < len(actions):
                action = actions[i]
                stage, kind, m = action
                index = stage * count + m
                if kind == "F":
                    if stage and not forward[index - count]:
                        break
                    if (
                        together
                        and i + 1 < len(actions)
                        and actions[i + 1] in together
                        and not _can_begin(actions[i + 1], last, count, forward, dgrad)
                    ):
                        break
                    forward[index] = 1
                    reader = owner[stage + 1] if stage < last else rank
                elif kind == "W":
                    if not dgrad[index]:
                        break
                    reader = rank
                else:
                    if not forward[index] or (stage < last and not dgrad[index + count]):
                        break
                    dgrad[index] = 1
                    reader = owner[stage - 1] if stage else rank
                yield rank, action
                i += 1
                if reader != rank:
                    ready.append(reader)
            at[rank] = i
        left = {rank: actions[at[rank] :][:2] for rank, actions in enumerate(self.ranks) if at[rank] < len(actions)}
        if left:
            self._stuck(left, forward, dgrad)

    def _stuck(self, left: dict[int, tuple[Action, ...]], forward: bytearray, dgrad: bytearray) -> None:
        """Raise for ranks that wait for each other in a ring, and show the whole ring; the other ranks wait for it."""
        done, whole = {"F": forward, "I": dgrad}, {action for actions in self.ranks for action in actions if action.kind == "B"}
        found: dict[int, tuple[Action, Action]] = {}
        for rank, following in left.items():
            wanted = [need for action in following for need in needs(action, self.stages - 1)]
            missing = next(n for n in wanted if not done[n.kind][n.stage * self.microbatches + n.microbatch])
            as_whole = missing._replace(kind="B")
            found[rank] = following[0], as_whole if missing.kind == "I" and as_whole in whole else missing
        walk: list[int] = []
        rank = min(found, key=lambda rank: (self.rank_of[found[rank][1].stage] != rank, rank))
        while rank not in walk:
            walk.append(rank)
            rank = self.rank_of[found[rank][1].stage]
        ring = walk[walk.index(rank) :]
        first = ring.index(min(ring))
        waits = [self._wait(*found[rank], found) for rank in (*ring[first:], *ring[:first])]
        shown = waits if len(waits) <= 8 else [*waits[:4], "...", *waits[-4:]]
        action, missing = found[min(ring)]
        got = f"a wait for {missing} without end: {'; '.join(shown)}"
        fail(f"Schedule {self.name!r}", f"rank {min(ring)}", f"able to go on at {action}", got)

    def _wait(self, action: Action, missing: Action, left: dict[int, tuple[Action, Action]]) -> str:
        """Say what an action waits for, and which action comes before that on its rank."""
        rank = self.rank_of[missing.stage]
        ahead = left[rank][0]
        return f"{action} waits for {missing}" + (f", behind {ahead} on rank {rank}" if ahead != missing else "")

    def to_csv(self) -> str:
        """Return one line per rank, as torch.distributed.pipelining reads it with format "compute_only"."""
        return "".join(",".join(self._cells(actions)) + "\n" for actions in self.ranks)

    def _cells(self, actions: tuple[Action, ...]) -> list[str]:
        cells: list[str] = []
        for action in actions:
            cells.append(f"({cells.pop()};{action})OVERLAP_F_B" if action in self.together else str(action))
        return cells

    @staticmethod
    def from_csv(text: str | os.PathLike[str], name: str = "csv") -> Schedule:
        """Return the schedule that such a text, or a file's path (not a string), describes; empty cells, which are pauses, are
        ignored. Raises `ValueError` for a cell without an action's form, and for a string that is the name of a file."""
        require_type("Schedule.from_csv", "text", text, str, os.PathLike)
        if isinstance(text, os.PathLike):
            text = Path(text).read_text()
        if text.strip().endswith(".csv"):
            got = f"the name of one: Path({text.strip()!r}).read_text() gives its text"
            fail("Schedule.from_csv", "text", "the text of a file", got)
        ranks, together = [], set()
        for line in text.splitlines():
            actions: list[Action] = []
            for cell in filter(None, map(str.strip, line.split(","))):
                pair = re.fullmatch(r"\((.+);(.+)\)OVERLAP_F_B", cell)
                actions += [Action.parse(one) for one in (pair.groups() if pair else (cell,))]
                if pair:
                    together.add(actions[-1])
            if actions:
                ranks.append(tuple(actions))
        return Schedule(name, tuple(ranks), frozenset(together))

    def __str__(self) -> str:
        width = max(len(str(a)) for actions in self.ranks for a in actions)
        return "\n".join(f"rank {r}: " + " ".join(str(a).rjust(width) for a in actions) for r, actions in enumerate(self.ranks))


def needs(action: Action, last: int) -> list[Action]:
    """The actions that must be done before this one; an I stands for a B too."""
    stage, kind, m = action
    if kind == "F":
        return [Action(stage - 1, "F", m)] if stage else []
    if kind == "W":
        return [Action(stage, "I", m)]
    return [Action(stage, "F", m), *([Action(stage + 1, "I", m)] if stage < last else [])]


def _can_begin(backward: Action, last: int, count: int, forward: bytearray, dgrad: bytearray) -> bool:
    index = backward.stage * count + backward.microbatch
    return bool(forward[index]) and (backward.stage == last or bool(dgrad[index + count]))


def _check_together(schedule: Schedule) -> None:
    if not schedule.together:
        return
    found = set()
    for actions in schedule.ranks:
        for before, action in itertools.pairwise(actions):
            if action in schedule.together and before.kind == "F" and action.kind in "IB":
                found.add(action)
    wrong = sorted(map(str, schedule.together - found))
    require(not wrong, f"Schedule {schedule.name!r}", "together", "backwards right after a forward", ", ".join(wrong))


def _check_actions(schedule: Schedule) -> None:
    """Check each action before anything is counted: a negative number would index from the end."""
    total = sum(map(len, schedule.ranks))
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if type(action) is not Action or not (is_count(action.stage, 0) and is_count(action.microbatch, 0)):
                wanted = "made of Actions whose stage and microbatch are integers, at least 0"
                fail(f"Schedule {schedule.name!r}", f"rank {rank}", wanted, repr(action))
            if max(action.stage, action.microbatch) >= total:  # a number is missing, and the next checks allocate for each
                wanted = f"of stages and microbatches below its {total} actions"
                fail(f"Schedule {schedule.name!r}", f"rank {rank}", wanted, str(action))


def is_count(value: object, least: int) -> bool:
    """Whether `value` is an int (not a bool) of at least `least`."""
    return type(value) is int and value >= least


_BITS = {kind: 1 << i for i, kind in enumerate(KINDS)}
_WHOLE = (_BITS["F"] | _BITS["B"], _BITS["F"] | _BITS["I"] | _BITS["W"])


def _check_once(schedule: Schedule) -> None:
    where, count, owner = f"Schedule {schedule.name!r}", schedule.microbatches, dict[int, int]()
    seen = bytearray(schedule.stages * count)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            stage, kind, m = action
            bit, index = _BITS.get(kind), stage * count + m
            if bit is None:
                fail(where, f"rank {rank}", f"of the kinds {', '.join(KINDS)}", str(action))
            if seen[index] & bit:
                fail(where, f"actions of rank {rank}", "all different", f"{action} twice: remove one")
            seen[index] |= bit
        for stage in {action[0] for action in actions}:
            if owner.setdefault(stage, rank) != rank:
                first = next(action for action in actions if action.stage == stage)
                fail(where, f"rank {rank}", f"without stage {stage}, which is on rank {owner[stage]}", str(first))
    absent = next((stage for stage in range(schedule.stages) if stage not in owner), None)
    require(absent is None, where, "ranks", f"actions of every stage up to {schedule.stages - 1}", f"none of stage {absent}")
    broken = next((index for index, bits in enumerate(seen) if bits not in _WHOLE), None)
    if broken is not None:
        stage, m = divmod(broken, count)
        _fail_broken(where, f"actions of stage {stage}, microbatch {m} on rank {owner[stage]}", stage, m, seen[broken])


def _fail_broken(where: str, name: str, stage: int, m: int, bits: int) -> NoReturn:
    """Raise for actions of these kinds, and say which fewest additions and removals make them whole."""

    def shown(bits: int, prefix: str = "", suffix: str = "") -> str:
        return ", ".join(f"{prefix}{kind}{suffix}" for kind, bit in _BITS.items() if bits & bit)

    whole = min(_WHOLE, key=lambda whole: (whole ^ bits).bit_count())
    changes = {"add": whole & ~bits, "remove": bits & ~whole}
    remedy = ", ".join(f"{verb} {shown(some, str(stage), str(m))}" for verb, some in changes.items() if some)
    fail(where, name, "F and B, or F, I and W", f"{shown(bits) or 'none'}: {remedy}")
