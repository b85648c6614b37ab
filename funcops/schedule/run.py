"""`run`: a schedule on one process, all of its ranks in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from funcops.engine.compose.chain import ChainConfig
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.errors import fail, require_callable, require_type
from funcops.engine.program.run import check_names
from funcops.engine.trees import WithExtras, put
from funcops.memory.ledger import Ledger
from funcops.schedule.actions import Action, Schedule
from funcops.schedule.stage import Done, Ends, Stage, check_staged, share_ties, split_inputs, told_of_ties


class Event(NamedTuple):
    """An action of a rank; the bytes of residuals and pendings, net of params and of x, that the rank holds after it; the time at
    which it ended, in seconds from the start of the run (on a GPU: at which it was launched)."""

    rank: int
    action: Action
    nbytes: int
    seconds: float


class Ran(NamedTuple):
    """y and dx of every microbatch; the gradients of params, summed over the microbatches; the actions that ran, in order."""

    ys: list[Any]
    dparams: dict[str, Any]
    dxs: list[Any]
    events: list[Event]

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most bytes after any action of a rank, by rank."""
        ranks = 1 + max(event.rank for event in self.events)
        return tuple(max(event.nbytes for event in self.events if event.rank == rank) for rank in range(ranks))


def run(
    schedule: Schedule,
    params: dict[str, Any],
    xs: Sequence[Any],
    cfg: ChainConfig,
    dys: Sequence[Any] | None = None,
    *,
    needs: Needs = Needs.ALL,
    into: dict[str, Any] | None = None,
    done: Done | None = None,
    losses: tuple[str, ...] = (),
) -> Ran:
    """Run every action of the schedule, each stage a step of the chain `cfg`. The results are the same as if `chain.fwd` and
    `chain.bwd` ran for one microbatch after another, in the schedule's order. Of several microbatches each has its number folded
    into the keys by which params of a stochastic recipe round.

    xs: x of each microbatch. dys: the gradient of each y; if y is a scalar loss, None stands for the gradient of the mean over the
    microbatches. That mean is the whole batch's loss only if each microbatch's loss is a mean over equally many labels. If they
    count n[0], n[1], ... labels (others are ignored, or microbatches differ in size), pass
    `dys=[torch.full_like(loss, n_i / sum(n)) for n_i in n]`, in the dtype of the loss, for the whole batch's gradients.
    If stages have outputs, y is `WithExtras(main, outputs)`, as the chain's y is; the sums of the outputs named in `losses` (a
    router's in all layers, say) are added to the loss, which needs dys=None.
    `into`: accumulators like params (fp32 for bf16 params, say), by default zeros like them. `done(stage, dparams)` is called after
    the last weight gradient of each stage, and of the stages that are tied to it: there a reduction over data-parallel ranks may
    begin.

    Raises `ValueError` or `TypeError` for a chain that does not fit, before anything runs; `LedgerError` if something was used
    twice or never.

    >>> import torch
    >>> from funcops import ChainConfig, ScaleConfig, Step, chain, scale
    >>> from funcops.schedule import one_f_one_b, run
    >>> cfg = ChainConfig(steps=(Step("bottom", scale, ScaleConfig(2.0)), Step("top", scale, ScaleConfig(3.0))))
    >>> xs = [torch.ones(1), torch.full((1,), 10.0)]
    >>> ran = run(one_f_one_b(2, 2), chain.init(cfg), xs, cfg, dys=[torch.ones(1), torch.ones(1)])
    >>> ran.ys, ran.dxs
    ([tensor([6.]), tensor([60.])], [tensor([6.]), tensor([6.])])
    >>> [str(event.action) for event in ran.events]
    ['0F0', '0F1', '1F0', '1B0', '1F1', '1B1', '0B0', '0B1']
    """
    return Pass("run", Ledger, schedule, params, xs, cfg, dys, needs, into, done, losses).through()


class Pass:
    """All stages, and the values between them: main values on their way forward, gradients on their way back. Made by a call of
    `where`, whose arguments it checks, before anything runs. `ledger`: the class of what keeps residuals and pendings."""

    def __init__(
        self,
        where: str,
        ledger: type[Ledger],
        schedule: Schedule,
        params: Any,
        xs: Any,
        cfg: ChainConfig,
        dys: Any,
        needs: Needs,
        into: Any,
        done: Done | None,
        losses: tuple[str, ...],
    ) -> None:
        require_type(where, "schedule", schedule, Schedule)
        check_staged(where, cfg, schedule.stages)
        check_names(where, "params", params, cfg)
        check_needs(where, needs, params, None if not isinstance(xs, (list, tuple)) or not xs else xs[0])
        if done is not None:
            require_callable(where, done=done)
        if dys is not None:
            require_type(where, "dys", dys, list, tuple)
        if into is not None:
            check_names(where, "into", into, cfg)
        mains, extras = split_inputs(where, xs, schedule.microbatches, cfg)
        if dys is not None and len(dys) != schedule.microbatches:
            fail(where, "dys", f"a list of {schedule.microbatches}, one a microbatch", len(dys))
        params, into = share_ties(where, params, into, cfg, needs)
        self.ends = Ends(where, cfg, len(mains), dys, losses)
        self.schedule, self.cfg = schedule, cfg
        self.last, self.count = schedule.stages - 1, schedule.microbatches
        self.ledgers = [ledger(params, mains, extras) for _ in schedule.ranks]
        self.stages, done = [], told_of_ties(done, cfg)
        for i, step in enumerate(cfg.steps):
            own, sums = self.ledgers[schedule.rank_of[i]], None if into is None else into[step.name]
            self.stages.append(Stage(cfg, i, params[step.name], own, needs, sums, count=self.count, done=done))
        self.extras = extras
        self.forward: dict[tuple[int, int], Any] = {(0, m): main for m, main in enumerate(mains)}
        self.gradients: dict[tuple[int, int], Any] = {}
        self.sums: list[dict[str, Any]] = [{} for _ in mains]

    def through(self, act: Callable[[int, Action], None] | None = None) -> Ran:
        """Run all actions in the schedule's order, each by `act(rank, action)`, by default as it is; return their results."""
        start, events = time.perf_counter(), []
        try:
            for rank, action in self.schedule.order():
                self.act(action) if act is None else act(rank, action)
                events.append(Event(rank, action, self.ledgers[rank].nbytes, time.perf_counter() - start))
        except BaseException:
            for ledger in self.ledgers:
                ledger.discard()
            raise
        for ledger in self.ledgers:
            ledger.close()
        dparams: Any = {stage.step.name: stage.dparams for stage in self.stages}
        for path, _ in self.cfg.ties:
            dparams = put(dparams, path, None)
        return Ran(self.ends.ys(), dparams, self.dxs(), events)

    def act(self, action: Action) -> None:
        index, kind, m = action
        stage = self.stages[index]
        if kind == "W":
            stage.wgrad(m)
        elif kind == "F":
            y, outputs = stage.forward(m, self.forward.pop((index, m)), self.extras[m])
            self.ends.note(m, outputs)
            if index == self.last:
                self.gradients[index, m] = self.ends.gradient(m, y)
            else:
                self.forward[index + 1, m] = y
        else:
            half = stage.dgrad if kind == "I" else stage.backward
            dy = stage.step.dy(self.gradients.pop((index, m)), self.ends.gradients[m])
            self.gradients[index - 1, m] = half(m, dy, self.sums[m])

    def dxs(self) -> list[Any]:
        mains, names = [self.gradients.get((-1, m)) for m in range(self.count)], self.cfg.extras
        return [WithExtras(dx, {n: sums.get(n) for n in names}) if names else dx for dx, sums in zip(mains, self.sums, strict=True)]
