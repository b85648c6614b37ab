"""Which messages a rank starts, and when: derived from the schedule, so that no two ranks wait for each other.

A message is the output of a forward for the stage after, or of a backward for the stage before, if that stage is on another rank. A
backend may run the messages of a rank one at a time, in the order in which the rank starts them, and hold each until its peer has
started it too (NCCL does). So all ranks start messages in one order, sorted by the times at which `simulate` ends the actions that
send them:

    an action ends before the messages that it sends, and an action that takes a message begins after it

Both relations go forward in time, hence no ring of waits is possible for a schedule that finishes, whatever the actions really
cost. Messages of one time between the same two ranks are one exchange, which both start as one batch.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

from funcops.schedule.actions import Action, Schedule
from funcops.schedule.simulate import Costs, Simulated, simulate


class Exchange(NamedTuple):
    """Messages between this rank and `peer` that start together, each named by the action that sends it (a B as an I)."""

    peer: int
    sends: tuple[Action, ...]
    receives: tuple[Action, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """Actions and exchanges of a rank, in the order in which it starts them. `arrived[action]`: the messages from here that must
    have arrived when `action` has its input from another rank, because that rank took them before it sent the input."""

    steps: tuple[Action | Exchange, ...]
    arrived: Mapping[Action, tuple[Action, ...]]


def message_of(action: Action) -> Action:
    """The name of the message that an action sends."""
    return action._replace(kind="I") if action.kind == "B" else action


def taken_by(action: Action, stages: int) -> Action | None:
    """The message that an action takes: None for a W, for the first forward and for the last stage's backward."""
    stage, kind, m = action
    if kind == "W" or stage == (0 if kind == "F" else stages - 1):
        return None
    return Action(stage - 1, "F", m) if kind == "F" else Action(stage + 1, "I", m)


def reader_of(action: Action, stages: int) -> int | None:
    """The stage that takes the message that an action sends; None without a message."""
    stage, kind, _ = action
    if kind == "W" or stage == (stages - 1 if kind == "F" else 0):
        return None
    return stage + 1 if kind == "F" else stage - 1


def program(schedule: Schedule, rank: int) -> Program:
    """Return the actions and exchanges of a rank.

    It starts to receive before the action that it runs while its peer computes the message, so that the message arrives during that
    action: it needs memory for a few messages in advance, however many microbatches there are.

    >>> from funcops.schedule import Action, Schedule
    >>> from funcops.schedule.exchange import program
    >>> first = program(Schedule.from_csv("0F0,0B0\\n1F0,1B0"), rank=0)
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
    before, actions = _exchanges(schedule, rank), schedule.ranks[rank]
    steps: list[Action | Exchange] = []
    for i, action in enumerate(actions):
        steps += [*before.get(i, ()), action]
    steps += before.get(len(actions), ())
    return Program(tuple(steps), _arrived(schedule, rank))


def _exchanges(schedule: Schedule, rank: int) -> dict[int, list[Exchange]]:
    """The exchanges before the i-th action, by i."""
    simulated = simulate(schedule)
    found = _messages(simulated, rank)
    before: dict[int, list[Exchange]] = {}
    at, starts = 0, simulated.starts[rank]
    for key in sorted(found):
        time, _, low, high = key
        sent = [(i, message) for sender, i, message in found[key] if sender == rank]
        received = tuple(message for sender, _, message in found[key] if sender != rank)
        at = max([at, *(i + 1 for i, _ in sent)])
        if received:
            at = max(at, bisect_left(starts, time) - 1)
        before.setdefault(at, []).append(Exchange(low + high - rank, tuple(message for _, message in sent), received))
    return before


def _messages(simulated: Simulated, rank: int) -> dict[tuple[float, int, int, int], list[tuple[int, int, Action]]]:
    """The messages that a rank sends or receives, by time and ranks, each as (sender, index of the action on the sender,
    message)."""
    schedule = simulated.schedule
    owner, stages = schedule.rank_of, schedule.stages
    found: dict[tuple[float, int, int, int], list[tuple[int, int, Action]]] = {}
    for sender in _peers(schedule, rank) | {rank}:
        actions, starts, ends = schedule.ranks[sender], simulated.starts[sender], simulated.ends[sender]
        beside = (*(action in schedule.together for action in actions[1:]), False)
        for i, action in enumerate(actions):
            reader = reader_of(action, stages)
            if reader is None or owner[reader] == sender or rank not in (sender, owner[reader]):
                continue
            # a forward beside a backward ends first: its message is sent while the backward runs
            time = starts[i] + Costs().forward if beside[i] else ends[i]
            low, high = sorted((sender, owner[reader]))
            # pairs with an even lower rank, then with an odd one: a row of ranks exchanges in two rounds, not one after another
            found.setdefault((time, low % 2, low, high), []).append((sender, i, message_of(action)))
    return found


def _peers(schedule: Schedule, rank: int) -> set[int]:
    """The ranks of the stages before and after a rank's stages."""
    owner = schedule.rank_of
    near = {stage + by for stage, one in owner.items() if one == rank for by in (-1, 1)}
    return {owner[stage] for stage in near if stage in owner} - {rank}


def _arrived(schedule: Schedule, rank: int) -> dict[Action, tuple[Action, ...]]:
    owner, stages = schedule.rank_of, schedule.stages
    index = {message_of(action): i for peer in _peers(schedule, rank) for i, action in enumerate(schedule.ranks[peer])}
    under_way: dict[int, list[tuple[int, Action]]] = {}
    found = {}
    for action in schedule.ranks[rank]:
        message = taken_by(action, stages)
        if message is not None and owner[message.stage] != rank:
            peer, given = owner[message.stage], index[message]
            waiting = under_way.get(peer, [])
            known = tuple(sent for read, sent in waiting if read <= given)
            if known:
                found[action] = known
                under_way[peer] = [one for one in waiting if one[0] > given]
        reader = reader_of(action, stages)
        if reader is not None and owner[reader] != rank:
            sent = message_of(action)
            under_way.setdefault(owner[reader], []).append((index[sent._replace(stage=reader)], sent))
    return found
