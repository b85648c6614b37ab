"""`Pipeline`: a schedule over a staged chain, on the ranks of a process group, without autograd."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from funcops.adapters.pipelining.boundaries import Boundaries, looks
from funcops.adapters.pipelining.captured import Given, PipelineGraphs
from funcops.adapters.pipelining.messages import Messages, Values, from_all
from funcops.adapters.pipelining.words import RAISED, Words
from funcops.engine.compose.chain import ChainConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import describe, fail, require, require_flag, require_type
from funcops.engine.trees import WithExtras, leaves, put, with_leaves
from funcops.memory.ledger import Ledger
from funcops.precision import nonfinite
from funcops.schedule import Action, Schedule
from funcops.schedule.exchange import Exchange, message_of, program, reader_of, taken_by
from funcops.schedule.stage import Done, Ends, Stage, check_staged, check_ties, share_ties, split_inputs, told_of_ties

Results = tuple[list[Any], dict[str, Any], list[Any]]  # ys, dparams and dxs of a rank
Begun = Callable[[], tuple[Results, int]]  # a step that is checked; its results and peak bytes
_numbers = itertools.count()


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
            else:
                self.act(step, work, self.messages, here)
        self.messages.finish()

    def act(self, action: Action, work: Work, messages: Any, here: dict[Action, Values]) -> None:
        """Run one action. `here`: messages to stages of this rank."""
        stage, kind, m = action
        if kind == "W":
            work.wgrad(stage, m)
            return
        taken, reader = taken_by(action, self.count), reader_of(action, self.count)
        given: Values | None = None
        if taken is not None and self.owner[taken.stage] == self.rank:
            given = here.pop(taken)
        elif taken is not None:
            given, sent = messages.take(taken)
            if sent:
                messages.forget(self.program.arrived.get(action, ()))
        half = work.forward if kind == "F" else work.dgrad if kind == "I" else work.backward
        gives = half(stage, m, given)
        if reader is not None and self.owner[reader] == self.rank:
            here[message_of(action)] = gives
        elif reader is not None:
            messages.put(message_of(action), gives)


class Stepped(NamedTuple):
    """Results of a step on this rank. `ys`: y of each microbatch if the rank has the last stage, else None. `dparams`: the
    gradients of its stages' params, by stage. `dxs`: dx of each microbatch (the main value's if the rank has the first stage; for
    extras, this rank's part). `peak_bytes`: the most bytes of residuals and pendings held, without params and x. A chain with
    outputs has ys on every rank, with the main value if it has the last stage, and with the outputs of its stages; other entries
    are None."""

    ys: list[Any] | None
    dparams: dict[str, Any]
    dxs: list[Any]
    peak_bytes: int


class Pipeline:
    """A schedule over the chain `cfg`, whose steps are the stages, on the ranks of a process group.

        pipeline = Pipeline(zb_v(2, 8), cfg, x)            # on every rank
        ys, dparams, dxs, _ = pipeline.step(params, xs)    # params of this rank's stages

    Messages are sent by `torch.distributed.batch_isend_irecv` (Gloo, NCCL), in an order that follows from the schedule and cannot
    deadlock. x: an example of one microbatch, which gives the shapes. dtype: the dtype of params, by default torch's. `group`: as
    many processes as the schedule has ranks. Ties between stages of one rank are supported; others are refused.

    `graphed`: the first step captures each rank's part as graphs between messages, one wherever the schedule waits, and every step
    replays them, with the same bits. On a machine without CUDA they are recordings, whose order, races and buffers are checked.
    Params and accumulators must stay where they are.

    All ranks must make it together: they compare their schedules and shapes. Raises `ValueError` or `TypeError` if these do not
    fit, on all ranks if they differ; `RuntimeError` if another rank could not make it.
    """

    def __init__(
        self,
        schedule: Schedule,
        cfg: ChainConfig,
        x: Any,
        *,
        dtype: torch.dtype | None = None,
        device: Any = "cpu",
        group: Any = None,
        needs: Needs = Needs.ALL,
        graphed: bool = False,
    ) -> None:
        require_type("Pipeline", "schedule", schedule, Schedule)
        ranks, size = len(schedule.ranks), dist.get_world_size(group)
        require(size == ranks, "Pipeline", "group", f"of {ranks} processes, one a rank of {schedule.name}", size)
        self.schedule, self.cfg, self.needs, self.group, self.device = schedule, cfg, needs, group, torch.device(device)
        require_flag("Pipeline", graphed=graphed)
        self._failed = self._begun = False
        self._graphed = graphed
        self._graphs: PipelineGraphs | None = None
        fault: Exception | None = None
        try:
            self._prepare(x, dtype or torch.get_default_dtype())
        except Exception as error:
            fault = error
        self._compare(fault)

    def _prepare(self, x: Any, dtype: torch.dtype) -> None:
        check_staged("Pipeline", self.cfg, self.schedule.stages)
        check_ties("Pipeline", self.cfg, self.schedule.rank_of)
        self._example = Boundaries(self.cfg, x, dtype)
        self.boundaries = self._example.trees
        values = [tuple(leaves(tree)) for tree in self.boundaries]
        asked = [bool(one) for one in self.cfg.needs_of_steps(self.needs)]
        messages = Messages(values, (False, *asked), self.device, self.group)
        self.runtime = Runtime(self.schedule, dist.get_rank(self.group), messages)
        self.names = tuple(self.cfg.steps[index].name for index in self.runtime.stages)

    def _compare(self, fault: Exception | None) -> None:
        """Compare the schedule and boundaries with the other ranks, before any message: an unexpected message would hang."""
        said = ("", "")
        if fault is None:
            between = [looks(tree) for tree in self.boundaries[1:-1]], self.runtime.messages.gradients
            said = f"{self.schedule.ranks}{sorted(self.schedule.together)}", str(between)
        digests = [int.from_bytes(hashlib.blake2b(one.encode(), digest_size=7).digest(), "little") for one in said]
        rows = self._raise_on_all("Pipeline", "make it", fault, *digests, next(_numbers))
        self._words = Words(self.group, rows[0][-1])
        for i, what in enumerate(("schedule", "boundaries of stages (from cfg, x, dtype and needs)"), 1):
            other = next((rank for rank, row in enumerate(rows) if row[i] != rows[0][i]), None)
            if other is not None:
                fail("Pipeline", what, "the same on all ranks", f"different ones on rank {other} and rank 0")

    def _raise_on_all(self, where: str, what: str, fault: Exception | None, *numbers: int) -> list[list[int]]:
        """Raise on all ranks if one has a fault; else return the numbers of all, each rank's after a 0."""
        rows = from_all((fault is not None, *numbers), self.device, self.group)
        if fault is not None:
            raise fault
        for rank, row in enumerate(rows):
            if row[0]:
                raise RuntimeError(f"{where}: every rank must be able to {what}, got an error on rank {rank}: see its message")
        return rows

    def step(
        self,
        params: dict[str, Any],
        xs: Sequence[Any],
        dys: Sequence[Any] | None = None,
        *,
        into: dict[str, Any] | None = None,
        done: Done | None = None,
        check_finite: bool = True,
        losses: tuple[str, ...] = (),
    ) -> Stepped:
        """Run the schedule once. `params` and `into`: dicts by stage, in which only this rank's stages (`names`) are read; xs, dys,
        `into`, `done` and `losses` are as in `funcops.schedule.run`; the main value of an x is read on the rank of the first stage,
        extras on all. Without dys, the gradients are of the mean of the microbatches' losses: pass dys if microbatches count
        different numbers of labels, as in `run`.

        Raises `ValueError` for params or a microbatch whose shapes or dtypes differ from the example's, with its number, and for
        accumulators that do not fit, before any action: in the first step, all ranks raise if one does (`RuntimeError`). Later, and
        for an error in a stage, its rank alone raises; the others then wait for the process group's timeout, and raise
        `RuntimeError`, which says who raised what, or which rank gave no word. `check_finite`: if a loss or a gradient is not
        finite, all ranks raise `FloatingPointError`; it costs a small all-reduce and a host sync. With `graphed`, also raises for
        what differs from the captured step, and for `done` without `into`.
        """
        if self._failed:
            said = "must not be used after a step that failed: its messages may still be in flight. Make a new one"
            raise RuntimeError(f"Pipeline: {said}")
        fault: Exception | None = None
        try:
            begun = self._checked(params, xs, dys, into, done, losses)
        except Exception as error:
            fault = error
        if not self._begun:  # afterwards arguments are mostly as in the first step, and it would cost a sync
            self._raise_on_all("Pipeline.step", "begin", fault)
            self._begun = True
        elif fault is not None:
            self._words.tell(f"{RAISED}{type(fault).__name__}: {fault}")
            raise fault
        self._failed = True
        try:
            with torch.no_grad():
                (ys, dparams, dxs), peak_bytes = begun()
        except Exception as error:
            peer = self.runtime.messages.lost
            if peer is None:
                self._words.tell(f"{RAISED}{type(error).__name__}: {error}")
                raise
            self._words.tell(f"waits for rank {peer}")
            expected = f"Pipeline.step: rank {peer} must send and take its messages"
            raise RuntimeError(f"{expected}, got {self._words.who()} ({error})") from error
        self._failed = False
        self._words.forget()
        if check_finite:
            self._check_finite(ys, dparams)
        last = self.schedule.rank_of[self.schedule.stages - 1] == self.runtime.rank
        return Stepped(ys if self.cfg.outputs or last else None, dparams, dxs, peak_bytes)

    def _checked(self, params: Any, xs: Any, dys: Any, into: Any, done: Done | None, losses: tuple[str, ...]) -> Begun:
        """Check a step's arguments before anything is sent; return a function that runs it. The first step of a graphed pipeline
        is captured here."""
        for name in self.names:
            for what, tree in (("params", params), ("into", into)):
                if tree is not None and name not in tree:
                    fail("Pipeline.step", what, f"a dict with the stages {', '.join(self.names)}", f"one without {name}")
        mains, extras = split_inputs("Pipeline.step", xs, self.schedule.microbatches, self.cfg)
        if dys is not None and len(dys) != len(mains):
            fail("Pipeline.step", "dys", f"a list of {len(mains)}, one a microbatch", len(dys))
        self._example.check_params("Pipeline.step", {name: params[name] for name in self.names})
        self._example.check_inputs("Pipeline.step", mains, extras, 0 in self.runtime.stages)
        own = {name: params[name] for name in self.names}
        if not self._graphed:
            return self._work(Given(own, mains, extras, dys, into), losses, done).run
        here = None if into is None else {name: into[name] for name in self.names}
        given = Given(own, mains if 0 in self.runtime.stages else [None] * len(mains), extras, dys, here)
        if self._graphs is None:
            make = lambda given, done: self._work(given, losses, done)  # noqa: E731
            self._graphs = PipelineGraphs(self.runtime, self.cfg, given, losses, make)
        graphs, values = self._graphs, self._graphs.begin(given, losses, done)
        return lambda: (graphs.step(values, done), graphs.peak_bytes)

    def _work(self, given: Given, losses: tuple[str, ...], done: Done | None) -> _Work:
        ends = Ends("Pipeline.step", self.cfg, len(given.xs), given.dys, losses)
        return _Work(self, given.params, given.xs, given.extras, ends, given.into, done)

    def _check_finite(self, ys: list[Any], dparams: Any) -> None:
        where = nonfinite({"ys": tuple(ys), "dparams": dparams})
        rank = dist.get_rank(self.group)
        rows = from_all((where is not None,), self.device, self.group)
        ranks = [r for r, (found,) in enumerate(rows) if found]
        if ranks:
            shown = f"{where} on this rank, {rank}" if where is not None else f"others on rank {', '.join(map(str, ranks))}"
            raise FloatingPointError(f"Pipeline.step: ys and gradients must be finite, got {shown}")


class _Work:
    """A step on this rank: its stages, and the runtime's values as trees."""

    def __init__(
        self, of: Pipeline, params: Any, mains: list[Any], extras: list[dict[str, Any]], ends: Ends, into: Any, done: Done | None
    ) -> None:
        self.of, self.mains, self.extras, self.ends = of, mains, extras, ends
        self.last, self.count = of.schedule.stages - 1, len(mains)
        own = {name: params[name] for name in of.names}
        self.ledger = Ledger(own, mains, extras)
        own, into = share_ties("Pipeline.step", own, into, of.cfg, of.needs)
        self.stages, done = {}, told_of_ties(done, of.cfg)
        for index in of.runtime.stages:
            name = of.cfg.steps[index].name
            sums = None if into is None else into[name]
            self.stages[index] = Stage(of.cfg, index, own[name], self.ledger, of.needs, sums, count=self.count, done=done)
        self.gradients: dict[int, Any] = {}
        self.sums: list[dict[str, Any]] = [{} for _ in mains]

    def run(self) -> tuple[Results, int]:
        self.of.runtime.step(self)
        return self.results(), self.ledger.peak_bytes

    def results(self) -> Results:
        """ys, dparams and dxs, once everything was taken."""
        self.ledger.close()
        return self.ends.ys(), self.dparams(), self.dxs()

    def forward(self, index: int, m: int, values: Values | None) -> Values:
        main = self.mains[m] if values is None else with_leaves(self.of.boundaries[index], values)
        y, outputs = self.stages[index].forward(m, main, self.extras[m])
        self.ends.note(m, outputs)
        if index == self.last:
            self.gradients[m] = self.ends.gradient(m, y)
            return ()
        return self._sent(f"y of stage {index}", y, self.of.boundaries[index + 1])

    def wgrad(self, index: int, m: int) -> None:
        self.stages[index].wgrad(m)

    def dgrad(self, index: int, m: int, gradients: Values | None) -> Values:
        return self._backward(self.stages[index].dgrad, index, m, gradients)

    def backward(self, index: int, m: int, gradients: Values | None) -> Values:
        return self._backward(self.stages[index].backward, index, m, gradients)

    def _backward(self, half: Any, index: int, m: int, gradients: Values | None) -> Values:
        main = self.gradients.pop(m) if gradients is None else with_leaves(self.of.boundaries[index + 1], gradients)
        dx = half(m, self.of.cfg.steps[index].dy(main, self.ends.gradients[m]), self.sums[m])
        if index == 0:
            self.gradients[m] = dx
            return ()
        if dx is None:
            return (None,) * len(leaves(self.of.boundaries[index]))
        return self._sent(f"dx of stage {index}", dx, self.of.boundaries[index])

    def _sent(self, what: str, tree: Any, example: Any) -> Values:
        """Check that the receiver expects the leaves of `tree`, and return them contiguous, ready to send."""
        found = leaves(tree)
        for t, want in zip(found, leaves(example), strict=True):
            if t is not None and (t.shape != want.shape or t.dtype != want.dtype):
                fail("Pipeline.step", what, f"{describe(want)}, as with the example x", describe(t))
        return tuple(None if t is None else t.contiguous() for t in found)

    def dparams(self) -> dict[str, Any]:
        found: Any = {stage.step.name: stage.dparams for stage in self.stages.values()}
        for path, _ in self.of.cfg.ties:
            if path.partition(".")[0] in found:
                found = put(found, path, None)
        return found

    def dxs(self) -> list[Any]:
        mains = [self.gradients.get(m) if 0 in self.stages else None for m in range(self.count)]
        names = self.of.cfg.extras
        return [WithExtras(dx, {n: sums.get(n) for n in names}) if names else dx for dx, sums in zip(mains, self.sums, strict=True)]
