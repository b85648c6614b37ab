"""The graphs of one rank of a pipeline: its actions between two waits or messages are one graph, a segment.

All segments are captured one after another in one memory pool and only ever replayed in that order, so a residual made in one is
read in a later one, and its memory goes to the next microbatch. Messages lie in buffers outside the pool: an action copies what it
takes out of one, and what it sends into one. Buffers go round by the schedule: one is free for another message once its reader has
copied it, or once its message is known to have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from funcops.adapters.pipelining.messages import Messages, Values
from funcops.engine.errors import CaptureError
from funcops.schedule.actions import Action
from funcops.schedule.exchange import Exchange, Program, message_of, reader_of, taken_by


class Segment(NamedTuple):
    """Actions of one graph. `takes`: the message from another rank that the first one waits for; `arrived`: what is then known to
    have arrived; `sends`: the messages to other ranks that the actions make."""

    actions: tuple[Action, ...]
    takes: Action | None
    arrived: tuple[Action, ...]
    sends: tuple[Action, ...]

    def __str__(self) -> str:
        return f"graph of {self.actions[0]} to {self.actions[-1]}"


Turn = Segment | Exchange


def turns_of(program: Program, owner: Mapping[int, int], rank: int) -> list[Turn]:
    """A rank's program as graphs and exchanges, cut where it starts messages and where it waits for one."""
    stages, found, actions = len(owner), list[Turn](), list[Action]()

    def close() -> None:
        if actions:
            takes = taken_by(actions[0], stages)
            takes = takes if takes is not None and owner[takes.stage] != rank else None
            sends = [message_of(a) for a in actions if (reader := reader_of(a, stages)) is not None and owner[reader] != rank]
            found.append(Segment(tuple(actions), takes, program.arrived.get(actions[0], ()) if takes else (), tuple(sends)))
            actions.clear()

    for step in program.steps:
        if isinstance(step, Exchange):
            close()
            found.append(step)
            continue
        taken = taken_by(step, stages)
        if taken is not None and owner[taken.stage] != rank:
            close()
        actions.append(step)
    close()
    return found


def buffers_of(turns: Sequence[Turn], messages: Messages) -> dict[Action, Values]:
    """The buffer of each message, as few as the turns allow."""
    found: dict[Action, Values] = {}
    free: dict[tuple[Any, ...], list[Values]] = {}

    def kind(message: Action) -> tuple[Any, ...]:
        return message.kind, message.stage

    def take(message: Action) -> None:
        own = free.setdefault(kind(message), [])
        found[message] = own.pop() if own else messages.memory(message)

    def give(message: Action) -> None:
        free.setdefault(kind(message), []).append(found[message])

    for turn in turns:
        if isinstance(turn, Exchange):
            for message in turn.receives:
                take(message)
            continue
        # without a tensor nothing was waited for, so nothing is known
        for message in turn.arrived if turn.takes is not None and _sent(found[turn.takes]) else ():
            give(message)
        for message in turn.sends:
            take(message)
        if turn.takes is not None:
            give(turn.takes)
    return found


def _sent(values: Values) -> bool:
    return any(t is not None and t.numel() for t in values)


class Touched(NamedTuple):
    """The storages that a graph reads, and those that it writes."""

    reads: frozenset[int]
    writes: frozenset[int]


def check_buffers(turns: Sequence[Turn], buffers: Mapping[Action, Values], touched: Sequence[Touched]) -> None:
    """Raise `CaptureError` for a graph that touches a buffer while its message is on its way, for a message that is sent before it
    was made or after another took its place, and for one that is received where another still waits. `touched`: by each graph."""
    state: dict[int, tuple[str, Action]] = {}  # of a storage: "coming", "here" or "going", and the message
    graphs = iter(touched)

    def storages(message: Action) -> list[int]:
        return [t.untyped_storage()._cdata for t in buffers[message] if isinstance(t, Tensor)]

    def require(turn: Turn | str, message: Action, wanted: tuple[str, Action] | None) -> None:
        for key in storages(message):
            if state.get(key) != wanted:
                expected = f"{'nothing' if wanted is None else f'{wanted[1]}, {wanted[0]}'}"
                got = "nothing" if key not in state else f"{state[key][1]}, {state[key][0]}"
                raise CaptureError(f"Pipeline: {turn}: the buffer of message {message} must hold {expected}, got {got}")

    def put(message: Action, now: str | None) -> None:
        for key in storages(message):
            state.pop(key, None)
            if now is not None:
                state[key] = now, message

    for turn in turns:
        if isinstance(turn, Exchange):
            for message in turn.sends:
                require(f"exchange with rank {turn.peer}", message, ("here", message))
                put(message, "going")
            for message in turn.receives:
                require(f"exchange with rank {turn.peer}", message, None)
                put(message, "coming")
            continue
        graph = next(graphs)
        if turn.takes is not None:
            require(turn, turn.takes, ("coming", turn.takes))
            put(turn.takes, "here")
        for message in turn.arrived if turn.takes is not None and _sent(buffers[turn.takes]) else ():
            require(turn, message, ("going", message))
            put(message, None)
        for message in turn.sends:
            require(turn, message, None)
        for key, (now, message) in state.items():
            if (now == "coming" and key in graph.reads | graph.writes) or key in graph.writes:
                raise CaptureError(f"Pipeline: {turn}: the buffer of message {message}, {now}, must be left alone, got a use of it")
        if turn.takes is not None:
            put(turn.takes, None)
        for message in turn.sends:
            put(message, "here")
