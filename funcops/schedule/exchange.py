"""Which messages a rank starts, and when: derived from the schedule, so that no two ranks wait for each other.

A message is what a forward gives to the stage after, or a backward to the stage before, where that stage is on another rank. A
backend may run the messages of a rank one at a time, in the order in which the rank starts them, and hold each until its peer has
started it too (NCCL does). So all ranks start messages in one order, that of the times at which `simulate` ends the actions that
give them:

    an action ends before the messages that it gives, and what takes a message begins after it

Both relations go forward in time, hence no ring of waits is possible for a schedule that comes to an end, whatever the actions
really cost. Messages of one time between the same two ranks are one exchange, which both start as one batch.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from funcops.schedule.actions import Action, Schedule
from funcops.schedule.simulate import Costs, simulate


class Exchange(NamedTuple):
    """Messages between this rank and `peer` that start together, each named by the action that gives it (a B as an I)."""

    peer: int
    sends: tuple[Action, ...]
    receives: tuple[Action, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """Actions and exchanges of a rank, in the order in which it starts them. `arrived[action]`: messages sent from here that have
    reached their reader when `action` has what it takes from another rank, as that was given by the same reader later on."""

    steps: tuple[Action | Exchange, ...]
    arrived: Mapping[Action, tuple[Action, ...]]


def message_of(action: Action) -> Action:
    """The name of what an action gives."""
    return action._replace(kind="I") if action.kind == "B" else action


def taken_by(action: Action, stages: int) -> Action | None:
    """The message that an action takes: None for a W, for the first forward and for the last stage's backward."""
    stage, kind, m = action
    if kind == "W" or stage == (0 if kind == "F" else stages - 1):
        return None
    return Action(stage - 1, "F", m) if kind == "F" else Action(stage + 1, "I", m)


def reader_of(action: Action, stages: int) -> int | None:
    """The stage that takes what an action gives, if one does."""
    stage, kind, _ = action
    if kind == "W" or stage == (stages - 1 if kind == "F" else 0):
        return None
    return stage + 1 if kind == "F" else stage - 1


def programs(schedule: Schedule) -> tuple[Program, ...]:
    """The program of each rank.

    A rank starts to receive before the action that it runs while the message is made: it has memory for what it takes next and for
    the one after.

    >>> from funcops.schedule import Action, Schedule
    >>> from funcops.schedule.exchange import programs
    >>> first, last = programs(Schedule.from_csv("0F0,0B0\\n1F0,1B0"))
    >>> for step in first.steps:
    ...     print(step if isinstance(step, Action) else [*map(str, step.sends), "|", *map(str, step.receives)])
    ...
    0F0
    ['0F0', '|']
    ['|', '1I0']
    0B0
    >>> [(str(action), str(*sent)) for action, sent in first.arrived.items()]
    [('0B0', '0F0')]
    """
    before = _exchanges(schedule)
    made = []
    for rank, actions in enumerate(schedule.ranks):
        steps: list[Action | Exchange] = []
        for i, action in enumerate(actions):
            steps += [*before[rank].get(i, ()), action]
        steps += before[rank].get(len(actions), ())
        made.append(Program(tuple(steps), _arrived(schedule, rank)))
    return tuple(made)


def _exchanges(schedule: Schedule) -> list[dict[int, list[Exchange]]]:
    """By rank, the exchanges that come before its i-th action."""
    owner, stages, simulated = schedule.rank_of, schedule.stages, simulate(schedule)
    found: dict[tuple[float, int, int, int], list[tuple[int, int, Action]]] = {}
    for rank, slots in enumerate(simulated.slots):
        following = (*(action in schedule.together for action in schedule.ranks[rank][1:]), False)
        for i, (action, start, end) in enumerate(slots):
            reader = reader_of(action, stages)
            if reader is not None and owner[reader] != rank:
                # a forward beside a backward comes first: its message goes while the other runs
                time = start + Costs().forward if following[i] else end
                low, high = sorted((rank, owner[reader]))
                # neighbours of even ranks, then of odd ones: a row of ranks exchanges in two rounds, not one after another
                found.setdefault((time, low % 2, low, high), []).append((rank, i, message_of(action)))
    before: list[dict[int, list[Exchange]]] = [{} for _ in schedule.ranks]
    at = [0] * len(schedule.ranks)
    for time, _, low, high in sorted(found):
        messages = found[time, low % 2, low, high]
        for rank, peer in ((low, high), (high, low)):
            sent = [(i, message) for sender, i, message in messages if sender == rank]
            received = tuple(message for sender, _, message in messages if sender == peer)
            at[rank] = max([at[rank], *(i + 1 for i, _ in sent)])
            if received:
                at[rank] = max(at[rank], bisect_left(simulated.starts[rank], time) - 1)
            before[rank].setdefault(at[rank], []).append(Exchange(peer, tuple(message for _, message in sent), received))
    return before


def _arrived(schedule: Schedule, rank: int) -> dict[Action, tuple[Action, ...]]:
    owner, stages = schedule.rank_of, schedule.stages
    place = {message_of(action): i for actions in schedule.ranks for i, action in enumerate(actions)}
    under_way: dict[int, list[tuple[int, Action]]] = {}
    found = {}
    for action in schedule.ranks[rank]:
        message = taken_by(action, stages)
        if message is not None and owner[message.stage] != rank:
            peer = owner[message.stage]
            waiting = under_way.get(peer, [])
            known = tuple(sent for read, sent in waiting if read <= place[message])
            if known:
                found[action] = known
                under_way[peer] = [one for one in waiting if one[0] > place[message]]
        reader = reader_of(action, stages)
        if reader is not None and owner[reader] != rank:
            read = place[message_of(action)._replace(stage=reader)]
            under_way.setdefault(owner[reader], []).append((read, message_of(action)))
    return found
