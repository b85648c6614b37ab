"""Schedules from the literature with several stages a rank.

Each is laid out for the next number of microbatches that fills it; the surplus microbatches are then left out. Microbatches do not
depend on each other, so the rest is a complete schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from funcops.engine.errors import require
from funcops.schedule.actions import Action, Schedule, is_count
from funcops.schedule.generators import check_sizes


def interleaved_1f1b(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """1F1B with stages r, r + p, r + 2 p, ... on rank r. If m is a multiple of p, each rank is idle for (p - 1)(F + B), with the F
    and B of one chunk; rank r keeps up to (v - 1) p + 2 (p - 1 - r) + 1 chunks. arXiv:2104.04473. Raises `ValueError` for fewer
    than one rank, microbatch or chunk.

    >>> from funcops.schedule import Costs, interleaved_1f1b, one_f_one_b, simulate
    >>> simulate(interleaved_1f1b(2, 4), Costs(0.5, 0.5, 0.5)).time, simulate(one_f_one_b(2, 4)).time
    (13.5, 15.0)
    """
    check_sizes("interleaved_1f1b", ranks, microbatches)
    require(is_count(chunks, 1), "interleaved_1f1b", "chunks", "at least 1", repr(chunks))
    whole = -(-microbatches // ranks) * ranks
    return _kept("interleaved_1f1b", microbatches, [_interleaved(r, ranks, whole, chunks, 2, None) for r in range(ranks)])


def interleaved_zb(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """ZB-H1 with several chunks a rank: half of interleaved 1F1B's lead, and weight gradients that wait for r dgrads, so that each
    rank's last ones fill its idle time at the end. arXiv:2401.10241. Raises `ValueError` for fewer than one rank, microbatch or
    chunk.

    >>> from funcops.schedule import Costs, interleaved_1f1b, interleaved_zb, simulate
    >>> half = Costs(0.5, 0.5, 0.5)
    >>> simulate(interleaved_zb(2, 4), half).bubble < simulate(interleaved_1f1b(2, 4), half).bubble
    True
    """
    check_sizes("interleaved_zb", ranks, microbatches)
    require(is_count(chunks, 1), "interleaved_zb", "chunks", "at least 1", repr(chunks))
    whole = -(-microbatches // ranks) * ranks
    return _kept("interleaved_zb", microbatches, [_interleaved(r, ranks, whole, chunks, 1, r) for r in range(ranks)])


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int, lead: int, put_off: int | None) -> Iterator[Action]:
    """Yield a rank's actions; groups of p microbatches go through all chunks in turn. `lead`: forwards ahead for each rank behind
    this one; `put_off`: dgrads before the first weight gradient, None for whole backwards."""
    groups = [range(first, first + ranks) for first in range(0, microbatches, ranks)]
    forwards = [(c * ranks + rank, m) for group in groups for c in range(chunks) for m in group]
    backwards = [(c * ranks + rank, m) for group in groups for c in reversed(range(chunks)) for m in group]
    ahead = min((chunks - 1) * ranks + lead * (ranks - 1 - rank), len(forwards))
    waiting: deque[tuple[int, int]] = deque()
    for i in range(ahead):
        yield Action(forwards[i][0], "F", forwards[i][1])
    for i, (stage, m) in enumerate(backwards):
        if i + ahead < len(forwards):
            yield Action(forwards[i + ahead][0], "F", forwards[i + ahead][1])
        yield Action(stage, "B" if put_off is None else "I", m)
        if put_off is not None:
            waiting.append((stage, m))
            if i >= put_off:
                stage, m = waiting.popleft()
                yield Action(stage, "W", m)
    for stage, m in waiting:
        yield Action(stage, "W", m)


class _Rank:
    """Builds the actions of a rank of a V: its first stage is on the way down, its second on the way back. Each call takes the next
    microbatch."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stages = rank, 2 * ranks - 1 - rank
        self.next = {(chunk, kind): 0 for chunk in (0, 1) for kind in "FI"}
        self.actions: list[Action] = []
        self.waiting: deque[Action] = deque()
        self.pairs: list[tuple[Action, Action]] = []

    def f(self, chunk: int) -> None:
        self._add(chunk, "F")

    def i(self, chunk: int) -> None:
        self._add(chunk, "I")
        self.waiting.append(self.actions[-1]._replace(kind="W"))

    def b(self, chunk: int) -> None:
        self._add(chunk, "I")
        self.actions[-1] = self.actions[-1]._replace(kind="B")

    def fb(self, forward: int, backward: int, apart: bool = False) -> None:
        self.f(forward)
        self.b(backward)
        if not apart:
            self.pairs.append((self.actions[-2], self.actions[-1]))

    def w(self, chunk: int | None = None) -> bool:
        """Add the weight gradient that waits longest, of `chunk` if given, and return whether one was waiting."""
        found = next((a for a in self.waiting if chunk is None or a.stage == self.stages[chunk]), None)
        if found is not None:
            self.waiting.remove(found)
            self.actions.append(found)
        return found is not None

    def iw(self, chunk: int) -> None:
        self._add(chunk, "I")
        self.actions.append(self.actions[-1]._replace(kind="W"))

    def _add(self, chunk: int, kind: str) -> None:
        m = self.next[chunk, kind]
        self.next[chunk, kind] = m + 1
        self.actions.append(Action(self.stages[chunk], kind, m))


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Two stages a rank, placed as a V, so that the first rank also has the last stage, and its gradient needs no way back. With
    equal times of F, I and W, and m >= 2 p - 1, no rank waits between its first and its last action. A rank keeps up to 2 p chunks,
    each half of a stage of 1F1B: every rank needs 1F1B's peak memory. arXiv:2405.15362. Raises `ValueError` for fewer than one rank
    or microbatch.

    >>> from funcops.schedule import simulate, zb_v
    >>> schedule = zb_v(2, 4)
    >>> schedule.rank_of, simulate(schedule).waiting
    ({0: 0, 3: 0, 1: 1, 2: 1}, (0.0, 0.0))
    """
    check_sizes("zb_v", ranks, microbatches)
    whole = max(2 * ranks - 1, microbatches)
    return _kept("zb_v", microbatches, [_zb_v(_Rank(r, ranks), r, ranks, whole).actions for r in range(ranks)])


def _zb_v(at: _Rank, r: int, p: int, m: int) -> _Rank:
    for _ in range(2 * (p - r) - 1):
        at.f(0)
    for _ in range(r):
        at.f(1)
        at.f(0)
    for _ in range(p - r):
        at.f(1)
        at.iw(1)
    while at.next[1, "F"] < m:
        if at.next[0, "F"] < m:
            at.f(0)
        at.iw(0)
        at.f(1)
        at.iw(1)
    for _ in range(r):
        at.i(0)
        at.i(1)
    for _ in range(p - r):
        at.i(0)
        at.w(chunk=0)
    for chunk in (1, 0):
        while at.w(chunk):
            pass
    return at


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipe folded into a V: two stages a rank, forwards of one side together with backwards of the other, so that the
    communication of each may hide behind the other's work. With F&B the time of such a pair, m >= 2 p, I = F and
    B <= F&B <= F + B, the last rank is idle for (p - 1) max(F&B + B - 3 W, F&B - W), and no other for longer; if F&B = F + B, every
    rank is idle for as long. A rank keeps up to 2 p + 1 chunks. The original, whose microbatches enter at both ends, needs each
    stage on two ranks, and has no function here. https://github.com/deepseek-ai/DualPipe, arXiv:2412.19437. Raises `ValueError` for
    fewer than one rank or microbatch.

    >>> from funcops.schedule import dualpipe_v
    >>> schedule = dualpipe_v(2, 4)
    >>> schedule.rank_of, len(schedule.together)
    ({0: 0, 3: 0, 1: 1, 2: 1}, 6)
    """
    check_sizes("dualpipe_v", ranks, microbatches)
    whole = max(2 * ranks, microbatches)
    made = [_dualpipe_v(_Rank(r, ranks), r, ranks, whole) for r in range(ranks)]
    return _kept("dualpipe_v", microbatches, [at.actions for at in made], [pair for at in made for pair in at.pairs])


def _dualpipe_v(at: _Rank, r: int, p: int, m: int) -> _Rank:
    for _ in range(2 * (p - r - 1)):
        at.f(0)
    for _ in range(r + 1):
        at.f(0)
        at.f(1)
    for _ in range(p - r - 1):
        at.iw(1)
        at.f(1)
    for i in range(m - 2 * p + r + 1):
        at.fb(0, 1, apart=i == 0 and r == p - 1)  # this pair would wait for its own forward alone
        at.fb(1, 0)
    for _ in range(p - r - 1):
        at.b(1)
        at.fb(1, 0)
    split = False
    for i in range(r + 1):
        split = split or (i == (r + 1) // 2 and r % 2 == 1)
        (at.i if split else at.b)(1)
        split = split or (i == (r + 1) // 2 and r % 2 == 0)
        (at.i if split else at.b)(0)
    for _ in range(p - r - 1):
        at.w()
        at.i(0)
    while at.waiting:
        at.w()
    return at


def _kept(name: str, microbatches: int, ranks: list[Any], pairs: Iterable[tuple[Action, Action]] = ()) -> Schedule:
    together = frozenset(b for f, b in pairs if f.microbatch < microbatches and b.microbatch < microbatches)
    return Schedule(name, tuple(tuple([a for a in actions if a.microbatch < microbatches]) for actions in ranks), together)
