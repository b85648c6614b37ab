"""Runs the actions of a rank, in order, and the messages between them; a `Work` says what an action does."""

from __future__ import annotations

from typing import Protocol

from funcops.adapters.pipelining.messages import Messages, Values
from funcops.schedule import Action, Schedule
from funcops.schedule.exchange import Exchange, message_of, program, reader_of, taken_by


class Work(Protocol):
    """The work of a rank's stages; values are the leaves of a stage boundary."""

    def forward(self, stage: int, m: int, values: Values | None) -> Values: ...
    def dgrad(self, stage: int, m: int, gradients: Values | None) -> Values: ...
    def wgrad(self, stage: int, m: int) -> None: ...
    def backward(self, stage: int, m: int, gradients: Values | None) -> Values: ...


class Runtime:
    """A rank's part of a schedule. A message to a stage of the same rank is passed directly; a sent message is dropped as soon as
    it is known to have arrived."""

    def __init__(self, schedule: Schedule, rank: int, messages: Messages) -> None:
        self.messages, self.owner, self.rank, self.count = messages, schedule.rank_of, rank, schedule.stages
        self.stages = tuple(sorted(stage for stage, owner in self.owner.items() if owner == rank))
        self.program = program(schedule, rank)

    def step(self, work: Work) -> None:
        """Run all actions of this rank once."""
        here: dict[Action, Values] = {}
        for step in self.program.steps:
            if isinstance(step, Exchange):
                self.messages.start(step)
            elif step.kind == "W":
                work.wgrad(step.stage, step.microbatch)
            else:
                self._act(step, work, here)
        self.messages.finish()

    def _act(self, action: Action, work: Work, here: dict[Action, Values]) -> None:
        stage, kind, m = action
        taken, reader = taken_by(action, self.count), reader_of(action, self.count)
        given: Values | None = None
        if taken is not None and self.owner[taken.stage] == self.rank:
            given = here.pop(taken)
        elif taken is not None:
            given, sent = self.messages.take(taken)
            if sent:
                self.messages.forget(self.program.arrived.get(action, ()))
        half = work.forward if kind == "F" else work.dgrad if kind == "I" else work.backward
        gives = half(stage, m, given)
        if reader is not None and self.owner[reader] == self.rank:
            here[message_of(action)] = gives
        elif reader is not None:
            self.messages.put(message_of(action), gives)
