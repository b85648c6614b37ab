"""`delay_w`: moves weight gradients to where nothing else could run, within a budget of bytes."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from funcops.engine.errors import fail, require, require_number, require_type
from funcops.schedule.actions import Action, Schedule
from funcops.schedule.moved import refuse
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
    return Delaying(simulate(schedule, costs, network), model).within(budget_bytes)


def _best(found: Sequence[Simulated | _Placed]) -> Simulated | _Placed:
    """The fastest; ties go to the least peak bytes of the largest rank, then to the least sum over the ranks, then to the first.
    Sums of the same costs in another order differ by rounding, and count as equal here."""
    for of in (lambda one: one.time, lambda one: max(one.peak_bytes), lambda one: sum(one.peak_bytes)):
        least = min(map(of, found))
        found = [one for one in found if of(one) <= least * (1 + ROUNDING)]
    return found[0]


class _Placed(NamedTuple):
    """The actions of each rank, the time of the step, and the most bytes that each rank holds: what `simulate` would find. It is
    the same within all budgets from `least` on that are smaller than `below`."""

    ranks: tuple[tuple[Action, ...], ...]
    time: float
    peak_bytes: tuple[float, ...]
    least: float
    below: float


class _Next(NamedTuple):
    """A forward or dgrad that a rank has to place."""

    action: Action
    whole: Action | None  # the backward that was split
    weight: Action | None  # the weight gradient that a dgrad leaves
    input: int  # the number of its input, -1 for one that is there from the start
    output: int  # the number of the input that it makes, -1 for none
    time: float
    time_whole: float
    send: float
    kept: float  # the bytes that it adds
    residual: float


class Delaying:
    """A simulated schedule, of which `within` makes others. What does not depend on the budget is done once."""

    def __init__(self, before: Simulated, model: Model) -> None:
        refuse("delay_w", [own.moved for own in model.costs])
        self.before, self.model = before, model
        self.known: dict[bool, list[_Placed]] = {False: [], True: []}  # by patience
        schedule = before.schedule
        count, last, size = schedule.microbatches, schedule.stages - 1, schedule.stages * schedule.microbatches
        self.todo: list[list[_Next]] = []
        for actions in schedule.ranks:
            own: list[_Next] = []
            for action in actions:
                stage, kind, m = action
                costs, index = model.costs[stage], stage * count + m
                if kind == "F":
                    ins, outs = index if stage else -1, index + count if stage < last else -1
                    send, kept = model.send[stage], costs.residual_bytes
                    own.append(_Next(action, None, None, ins, outs, costs.forward, 0.0, send, kept, costs.residual_bytes))
                elif kind != "W":
                    ins, outs = size + index if stage < last else -1, size + index - count if stage else -1
                    send, kept = model.send[stage - 1] if stage else 0.0, costs.pending_bytes - costs.residual_bytes
                    times = costs.time("I"), costs.time("B")
                    split, whole = (action, None) if kind == "I" else (Action(stage, "I", m), action)
                    own.append(_Next(split, whole, Action(stage, "W", m), ins, outs, *times, send, kept, costs.residual_bytes))
            self.todo.append(own)

    def within(self, budget: float) -> Schedule:
        """The best placement within a budget of bytes."""
        tried: list[Simulated | _Placed] = [self.before]
        refusal: ValueError | None = None
        for patient in (False, True):
            try:
                tried.append(self._placed(budget, patient))
            except ValueError as error:
                refusal = error
        fitting = [one for one in tried if max(one.peak_bytes) <= budget * (1 + ROUNDING)]
        if not fitting and refusal is not None:
            raise refusal
        best = _best(fitting)
        given = self.before.schedule
        return given if isinstance(best, Simulated) else Schedule(f"{given.name}, delayed", best.ranks)

    def _placed(self, budget: float, patient: bool) -> _Placed:
        found = next((one for one in self.known[patient] if one.least <= budget < one.below), None)
        if found is None:
            found = _Placing(self, budget, patient).run()
            self.known[patient].append(found)
        return found


class _Placing:
    """Runs all ranks in the order of time: a free rank takes its next forward or dgrad, or a weight gradient that waits.
    `patient`: it waits if its next input is known to arrive before a weight gradient would end."""

    def __init__(self, of: Delaying, budget: float, patient: bool) -> None:
        self.schedule, self.model, self.budget, self.patient = of.before.schedule, of.model, budget, patient
        self.todo, ranks = of.todo, len(of.todo)
        self.at = [0] * ranks
        self.least, self.below = 0.0, math.inf  # the largest number of bytes that fitted the budget, the smallest that did not
        self.waiting: list[deque[Action]] = [deque() for _ in range(ranks)]
        self.placed: list[list[Action]] = [[] for _ in range(ranks)]
        self.held, self.peak, self.free = [0.0] * ranks, [0.0] * ranks, [0.0] * ranks
        self.arrival: dict[int, float] = {-1: 0.0}  # by the number of an input
        self.blocked: dict[int, tuple[int, float]] = {}  # by the input that is awaited: the rank, and when it was free
        self.events = [(0.0, rank) for rank in range(ranks)]

    def run(self) -> _Placed:
        while self.events:
            now, rank = heapq.heappop(self.events)
            self._act(now, rank)
        for rank, own in enumerate(self.todo):
            if self.at[rank] < len(own):  # as a pair with its forward it could go on, split it cannot
                fail("delay_w", f"rank {rank}", f"able to go on at {own[self.at[rank]].action}", "a wait without end")
        for stage, rank in self.schedule.rank_of.items():
            self.free[rank] += self.model.after[stage]
        return _Placed(tuple(map(tuple, self.placed)), max(self.free), tuple(self.peak), self.least, self.below)

    def _act(self, now: float, rank: int) -> None:
        waiting, todo, at = self.waiting[rank], self.todo[rank], self.at[rank]
        if at == len(todo):
            if waiting:
                self._weight(now, rank)
            return
        following = todo[at]
        if waiting and self._over(self.held[rank] + following.kept):
            return self._weight(now, rank)
        comes = self.arrival.get(following.input)  # None if it is not known yet
        if comes is not None and comes <= now:
            self._take(now, rank, following)
        elif waiting and (comes is None or not self.patient or comes >= now + self.model.costs[waiting[0].stage].wgrad):
            self._weight(now, rank)
        elif comes is not None:
            heapq.heappush(self.events, (comes, rank))
        else:
            self.blocked[following.input] = rank, now

    def _over(self, need: float) -> bool:
        if need > self.budget:
            self.below = min(self.below, need)
            return True
        if need > self.least:
            self.least = need
        return False

    def _take(self, now: float, rank: int, given: _Next) -> None:
        need = self.held[rank] + given.kept
        over = self._over(need)
        if over and given.whole is not None:
            need = self.held[rank] - given.residual  # a B never holds its pending
            self.placed[rank].append(given.whole)
            end = now + given.time_whole
        else:
            if over:
                fail("delay_w", "budget_bytes", f"at least {need:g} for rank {rank} at {given.action}", f"{self.budget:g}")
            self.placed[rank].append(given.action)
            end = now + given.time
            if given.weight is not None:
                self.waiting[rank].append(given.weight)
            self.peak[rank] = max(self.peak[rank], need)
        self.held[rank] = need
        self.at[rank] += 1
        if given.output >= 0:
            self.arrival[given.output] = arrival = end + given.send
            if given.output in self.blocked:
                reader, since = self.blocked.pop(given.output)
                heapq.heappush(self.events, (max(since, arrival), reader))
        self._free(end, rank)

    def _weight(self, now: float, rank: int) -> None:
        action = self.waiting[rank].popleft()
        self.placed[rank].append(action)
        costs = self.model.costs[action.stage]
        self.held[rank] -= costs.pending_bytes
        self._free(now + costs.wgrad, rank)

    def _free(self, end: float, rank: int) -> None:
        self.free[rank] = end
        heapq.heappush(self.events, (end, rank))
