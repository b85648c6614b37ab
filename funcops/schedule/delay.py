"""`delay_w`: moves weight gradients to where nothing else could run, within a budget of bytes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from funcops.engine.errors import fail, require, require_number, require_type
from funcops.schedule.actions import Action, Schedule
from funcops.schedule.simulate import ROUNDING, Costs, Model, Network, Simulated, simulate


def delay_w(
    schedule: Schedule, budget_bytes: float, costs: Costs | Sequence[Costs] | None = None, network: Network | None = None
) -> Schedule:
    """Return the schedule with its weight gradients moved: forwards and dgrads keep their order; pairs are split, and whole
    backwards where a pending has room; a weight gradient runs where its rank would wait, or where the next action would exceed
    `budget_bytes` (of residuals and pendings, on each rank). Of two such placements (not of all that exist), and the schedule
    itself if it is within the budget, the fastest by `simulate` is returned; of equally fast ones, the one whose ranks hold the
    fewest bytes, and the schedule itself before others. A larger budget may be used up without being faster: try several to see
    from where.

    Raises `ValueError` if the budget is too small for a rank, with the bytes that it needs.

    >>> from funcops.schedule import delay_w, one_f_one_b, simulate
    >>> simulate(one_f_one_b(2, 4)).time, simulate(delay_w(one_f_one_b(2, 4), budget_bytes=2)).time
    (15.0, 13.0)
    """
    require_type("delay_w", "schedule", schedule, Schedule)
    require_number("delay_w", 0, finite=False, budget_bytes=budget_bytes)
    require(budget_bytes > 0, "delay_w", "budget_bytes", "above 0", budget_bytes)
    model = Model.of(schedule, costs, network, "delay_w")
    tried = [schedule]
    refusal: ValueError | None = None
    for patient in (False, True):
        try:
            tried.append(_Placing(schedule, model, budget_bytes, patient).run())
        except ValueError as error:
            refusal = error
    within = [
        one for one in (simulate(each, costs, network) for each in tried) if max(one.peak_bytes) <= budget_bytes * (1 + ROUNDING)
    ]
    if not within and refusal is not None:
        raise refusal
    return _best(within).schedule


def _best(found: list[Simulated]) -> Simulated:
    """The fastest; ties go to the least peak bytes of the largest rank, then to the least sum over the ranks, then to the first.
    Sums of the same costs in another order differ by rounding, and count as equal here."""
    for of in (lambda one: one.time, lambda one: max(one.peak_bytes), lambda one: sum(one.peak_bytes)):
        least = min(map(of, found))
        found = [one for one in found if of(one) <= least * (1 + ROUNDING)]
    return found[0]


class _Placing:
    """Runs all ranks in the order of time: a free rank takes its next forward or dgrad, or a weight gradient that waits.
    `patient`: it waits if its next input is known to arrive before a weight gradient would end."""

    def __init__(self, schedule: Schedule, model: Model, budget: float, patient: bool) -> None:
        self.schedule, self.model, self.budget, self.patient = schedule, model, budget, patient
        self.todo = [[a._replace(kind="I") if a.kind == "B" else a for a in actions if a.kind != "W"] for actions in schedule.ranks]
        self.whole = {a._replace(kind="I") for actions in schedule.ranks for a in actions if a.kind == "B"}
        self.at = [0] * len(self.todo)
        self.waiting: list[deque[Action]] = [deque() for _ in self.todo]
        self.placed: list[list[Action]] = [[] for _ in self.todo]
        self.held = [0.0] * len(self.todo)
        self.arrival: dict[tuple[int, str, int], float] = {}  # of a stage's input: x for F, dy for I
        self.blocked: dict[Action, tuple[int, float]] = {}  # by the action whose input is awaited: the rank, and when it was free
        self.events = [(0.0, rank) for rank in range(len(self.todo))]

    def run(self) -> Schedule:
        while self.events:
            now, rank = heapq.heappop(self.events)
            self._act(now, rank)
        for rank, actions in enumerate(self.todo):
            if self.at[rank] < len(actions):  # as a pair with its forward it could go on, split it cannot
                fail("delay_w", f"rank {rank}", f"able to go on at {actions[self.at[rank]]}", "a wait without end")
        return Schedule(f"{self.schedule.name}, delayed", tuple(map(tuple, self.placed)))

    def _act(self, now: float, rank: int) -> None:
        waiting = self.waiting[rank]
        if self.at[rank] == len(self.todo[rank]):
            if waiting:
                self._weight(now, rank)
            return
        action = self.todo[rank][self.at[rank]]
        if waiting and self.held[rank] + self._kept(action) > self.budget:
            return self._weight(now, rank)
        comes = self._comes(action)
        if comes is not None and comes <= now:
            self._take(now, rank, action)
        elif waiting and (comes is None or not self.patient or comes >= now + self.model.costs[waiting[0].stage].wgrad):
            self._weight(now, rank)
        elif comes is not None:
            heapq.heappush(self.events, (comes, rank))
        else:
            self.blocked[action] = rank, now

    def _comes(self, action: Action) -> float | None:
        """The time at which the action's input from another stage arrives; None if it is not known yet."""
        first = action.stage == (0 if action.kind == "F" else self.schedule.stages - 1)
        return 0.0 if first else self.arrival.get(action)

    def _kept(self, action: Action) -> float:
        own = self.model.costs[action.stage]
        return own.residual_bytes if action.kind == "F" else own.pending_bytes - own.residual_bytes

    def _take(self, now: float, rank: int, action: Action) -> None:
        stage, kind, m = action
        need = self.held[rank] + self._kept(action)
        if whole := need > self.budget and action in self.whole:
            need = self.held[rank] - self.model.costs[stage].residual_bytes  # a B never holds its pending
        elif need > self.budget:
            fail("delay_w", "budget_bytes", f"at least {need:g} for rank {rank} at {action}", f"{self.budget:g}")
        self.held[rank], self.at[rank] = need, self.at[rank] + 1
        self.placed[rank].append(action._replace(kind="B") if whole else action)
        end = now + self.model.costs[stage].time("B" if whole else kind)
        if kind == "I" and not whole:
            self.waiting[rank].append(Action(stage, "W", m))
        after = stage + 1 if kind == "F" else stage - 1
        if 0 <= after < self.schedule.stages:
            told = Action(after, kind, m)
            self.arrival[told] = end + self.model.send[min(stage, after)]
            if told in self.blocked:
                reader, since = self.blocked.pop(told)
                heapq.heappush(self.events, (max(since, self.arrival[told]), reader))
        heapq.heappush(self.events, (end, rank))

    def _weight(self, now: float, rank: int) -> None:
        action = self.waiting[rank].popleft()
        self.placed[rank].append(action)
        self.held[rank] -= self.model.costs[action.stage].pending_bytes
        heapq.heappush(self.events, (now + self.model.costs[action.stage].wgrad, rank))
