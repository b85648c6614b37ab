"""`Pipeline(graphed=True)`: a rank's step as graphs between messages, captured by its first step and replayed by all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from funcops.adapters.graphs.backend import Captured, Capturer, Options
from funcops.adapters.graphs.borrowed import Outputs
from funcops.adapters.graphs.graphed_op import check_states, states_of
from funcops.adapters.graphs.lease import Lease
from funcops.adapters.graphs.statics import Inputs, restored
from funcops.adapters.pipelining.messages import Messages, Values
from funcops.adapters.pipelining.segments import Segment, Touched, buffers_of, check_buffers, turns_of
from funcops.engine.compose.chain import chain
from funcops.engine.errors import fail
from funcops.engine.trees import leaves, tensors
from funcops.schedule.actions import Action
from funcops.schedule.exchange import Exchange
from funcops.schedule.stage import Done

WHERE = "Pipeline.step"


class Given(NamedTuple):
    """The arguments of a rank's step: the params of its stages, x and extras of each microbatch (x on the first stage's rank
    alone), the gradients of ys, and accumulators."""

    params: Any
    xs: Any
    extras: Any
    dys: Any
    into: Any


class StaticMessages:
    """Messages for a capture: what an action takes is copied out of a buffer, and what it sends into one."""

    def __init__(self, buffers: dict[Action, Values]) -> None:
        self.buffers = buffers

    def take(self, message: Action) -> tuple[Values, bool]:
        return tuple(None if t is None else t.clone() for t in self.buffers[message]), False

    def put(self, message: Action, values: Values) -> None:
        for to, t in zip(self.buffers[message], values, strict=True):
            if to is not None:
                to.zero_() if t is None else to.copy_(t)


class PipelineGraphs:
    """The graphs of a rank. `act(action, work, messages, here)` runs an action, as `Runtime.act` does; `work(given, done)` makes a
    step's work. A stage's accumulators are `given.into`, or buffers that a step clears and whose values it returns as copies."""

    def __init__(self, runtime: Any, cfg: Any, given: Given, losses: tuple[str, ...], make: Callable[..., Any]) -> None:
        self.messages: Messages = runtime.messages
        self.losses, self.states = losses, states_of(chain, cfg)
        self.turns = turns_of(runtime.program, runtime.owner, runtime.rank)
        self.buffers = buffers_of(self.turns, self.messages)
        for t in tensors(list(self.buffers.values())):
            t.zero_()
        fixed = {"params": "pinned", "into": "donated"}
        policies = {f"0.{name}": policy for name, policy in fixed.items() if leaves(getattr(given, name))}
        self.inputs = Inputs(WHERE, (given._asdict(),), policies)  # a dict, for the paths of errors
        self.done: list[tuple[int, int, Any]] = []  # the graph after which a stage's gradients are whole, the stage, and these
        capturer = Capturer(WHERE, (given, list(self.buffers.values())), None, Options(), warmup=1)
        with torch.no_grad(), restored(self.inputs.donated):
            capturer.warm_up(lambda: [part() for part in self._parts(runtime, make)])
            self.graphs = capturer.capture_parts(list(self._parts(runtime, make)), lambda _: tensors(self.results))
        self.inputs.check_unwritten()
        self._check()
        for graph in self.graphs:
            graph.keep(tensors((self.inputs.trees, list(self.buffers.values()), self.results)))
        statics = [leaf.static for leaf in self.inputs.leaves]
        self.outputs = Outputs(WHERE, self.results, statics, "clone", False, Lease())

    def _parts(self, runtime: Any, make: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
        """The functions of the segments, and after the last one the step's results. They share one work, and run once."""
        segments = [turn for turn in self.turns if isinstance(turn, Segment)]
        at, here = 0, dict[Action, Values]()
        self.done = []
        work = make(Given(**self.inputs.trees[0]), lambda stage, dparams: self.done.append((at, stage, dparams)))
        static = StaticMessages(self.buffers)

        def run(number: int, segment: Segment) -> None:
            nonlocal at
            at = number
            for action in segment.actions:
                runtime.act(action, work, static, here)
            if number == len(segments) - 1:
                self.results, self.peak_bytes = work.results(), work.ledger.peak_bytes

        return iter([functools.partial(run, number, segment) for number, segment in enumerate(segments)])

    def _check(self) -> None:
        """Check the buffers of messages against what each graph touches, if it is a recording."""
        touched = [_touched(graph) for graph in self.graphs]
        if None not in touched:
            check_buffers(self.turns, self.buffers, touched)  # type: ignore[arg-type]

    def begin(self, given: Given, losses: tuple[str, ...], done: Done | None) -> list[Any]:
        """Check a step's arguments against the captured ones, and copy them. Returns their leaves."""
        if done is not None and given.into is None:
            remedy = "None: a reduction must write to memory of yours, and a graph's own is copied when its step ends"
            fail(WHERE, "into", "given where done is, with graphed=True", remedy)
        if losses != self.losses:
            fail(WHERE, "losses", f"{self.losses}, as captured by the first step", losses)
        check_states(WHERE, self.states)
        return self.inputs.take((given._asdict(),))

    def step(self, values: list[Any], done: Done | None) -> Any:
        """Replay the graphs, with the messages between them; return the results."""
        graphs, number = iter(self.graphs), 0
        self.messages.into = self.buffers
        for turn in self.turns:
            if isinstance(turn, Exchange):
                self.messages.start(turn)
                continue
            if turn.takes is not None:
                _, sent = self.messages.take(turn.takes)
                if sent:
                    self.messages.forget(turn.arrived)
            next(graphs).replay()
            for message in turn.sends:
                self.messages.put(message, self.buffers[message])
            for at, stage, dparams in self.done if done is not None else ():
                if at == number:
                    done(stage, dparams)  # type: ignore[misc]
            number += 1
        self.messages.finish()
        torch.autograd.graph.increment_version(self.inputs.donated)
        return self.outputs.give(values)

    @property
    def number(self) -> int:
        return len(self.graphs)


def _touched(graph: Captured) -> Touched | None:
    """The storages that a part of a recording reads and writes; None of a graph on a device."""
    recording = getattr(graph, "recording", None)
    if recording is None:
        return None
    return Touched(*recording.static_uses(graph.part))  # type: ignore[attr-defined]
