"""`run_beside`: a schedule whose ranks are branches of a captured step, so that one graph runs a whole pipeline on one device.

An action follows the one before it on its rank, and what it needs of other ranks, and nothing else: so a dgrad of one rank runs
beside a wgrad of another, as the schedule says. What a rank gets from another it first copies, as a message: then residuals and
pendings are made, read and freed in one branch, whose memory the next microbatch takes; and the sender's memory is free once its
rank waits for anything later of its reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcops.adapters.graphs.branches import branch, hold
from funcops.engine.compose.chain import ChainConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.trees import tree_map_tensors
from funcops.memory.ledger import Ledger
from funcops.schedule.actions import Action, Schedule
from funcops.schedule.actions import needs as needs_of
from funcops.schedule.exchange import message_of, taken_by
from funcops.schedule.run import Pass, Ran
from funcops.schedule.stage import Done, check_ties


def run_beside(
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
    """Run a schedule as `funcops.schedule.run` does, with the same arguments and the same bits, each rank in a branch of its own;
    a backward side by side with a forward in another. For a function that `graphed` captures: a whole step, optimiser included,
    is one graph.

        def step(params, state, sums, x, labels, lr):
            xs = [WithExtras(main, {"labels": own}) for main, own in zip(x, labels)]
            ran = run_beside(zb_v(2, 8), params, xs, cfg, into=sums)
            ...

    Pass the microbatches as one tensor with a first dimension, and take them apart inside: a replay then checks as many inputs
    however many there are.

    Raises as `run` does, and `ValueError` for a tie between two ranks, which would add to one sum at once.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.graphs import graph_data, graphed, run_beside
    >>> from funcops.schedule import run, zb_h1
    >>> cfg = ChainConfig(steps=tuple(Step(name, linear, LinearConfig(4, 4)) for name in "ab"))
    >>> params, xs = chain.init(cfg, key=random.key(0)), torch.randn(3, 2, 4)
    >>> step = graphed(lambda params, xs: run_beside(zb_h1(2, 3), params, list(xs), cfg, list(xs)).dparams, params, xs)
    >>> want = run(zb_h1(2, 3), params, list(xs), cfg, list(xs)).dparams
    >>> torch.equal(step(params, xs)["a"].weight, want["a"].weight), graph_data(step).width
    (True, 2)
    """
    at = Pass("run_beside", _Held, schedule, params, xs, cfg, dys, needs, into, done, losses)
    check_ties("run_beside", cfg, schedule.rank_of)
    ranks = _Ranks(at)
    try:
        return at.through(ranks.act)
    finally:
        for block in ranks.blocks:
            block.join()


class _Held(Ledger):
    """A ledger whose trees stay until the branch that takes them is done, if another made them."""

    def take(self, path: str) -> Any:
        tree = super().take(path)
        hold(tree)
        return tree


class _Ranks:
    """The branches of a pass. `blocks`: one an action, in order."""

    def __init__(self, at: Pass) -> None:
        self.at, self.blocks = at, list[branch]()
        self.of: dict[Action, branch] = {}  # of the action that sends a message
        self.tails: list[list[branch]] = [[] for _ in at.schedule.ranks]  # what the next action of a rank follows
        self.before: list[list[branch]] = [[] for _ in at.schedule.ranks]  # what the last one followed

    def act(self, rank: int, action: Action) -> None:
        paired = action in self.at.schedule.together
        block = branch(f"rank {rank}, beside" if paired else f"rank {rank}")
        follows = self.before[rank] if paired else self.tails[rank]
        with block:
            for other in (*follows, *[self.of[need] for need in needs_of(action, self.at.last)]):
                if other.name != block.name:
                    other.wait()
            self._receive(action, block)
            self.at.act(action)
        self.blocks.append(block)
        if action.kind != "W":
            self.of[message_of(action)] = block
        self.before[rank], self.tails[rank] = follows, [*self.tails[rank], block] if paired else [block]

    def _receive(self, action: Action, block: branch) -> None:
        """Copy what an action takes from another branch; keep what it reads of others besides."""
        at, key = self.at, (action.stage, action.microbatch)
        if action.kind in "IB":
            hold(at.sums[action.microbatch], at.ends.gradients[action.microbatch])
        message = taken_by(action, at.schedule.stages)
        if message is not None and self.of[message].name != block.name:
            values = at.forward if action.kind == "F" else at.gradients
            values[key] = tree_map_tensors(_copied, values[key])


def _copied(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.preserve_format)
