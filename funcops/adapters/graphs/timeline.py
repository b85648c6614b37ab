"""The replays of the graphs of one memory pool, in the order of their capture.

What a graph needs for itself is free in its pool once its capture ended. A graph captured later may be given that memory for what
it leaves: residuals, borrowed outputs, what autograd saves. Each replay of the earlier then writes over it. The other way round
nothing is lost, as what is held while a graph is captured is not given to it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Timeline:
    """Of one pool. By graph, in the order of capture: the number of its last replay, and the tensors that it lends. A graph that is
    `gone` is remembered, as what it wrote over stays so; those with none between them as one."""

    def __init__(self) -> None:
        self.captured = self.replays = 0
        self.last: dict[int, int] = {}
        self.gone: set[int] = set()
        self.lent: dict[int, list[Tensor]] = {}


_timelines: WeakValueDictionary[Any, Timeline] = WeakValueDictionary()  # by pool, for as long as a graph of it lives


class Place:
    """A graph's place in the timeline of its pool."""

    def __init__(self, pool: Any) -> None:
        self.timeline = _timelines.setdefault(pool, Timeline())
        self.order = self.timeline.captured = self.timeline.captured + 1
        self.timeline.last[self.order] = self.timeline.replays

    def __del__(self) -> None:
        self.leave()

    def lend(self, tensors: list[Tensor]) -> None:
        """Of the graph's own buffers, those that callers hold."""
        if tensors:
            self.timeline.lent[self.order] = tensors

    def replayed(self) -> None:
        """It wrote over what it lends, and over what later graphs lend. torch does not see that, so it is counted."""
        timeline, order = self.timeline, self.order
        timeline.last[order] = timeline.replays = timeline.replays + 1
        for other, lent in timeline.lent.items():
            if other >= order:
                torch.autograd.graph.increment_version(lent)

    def overwritten(self) -> bool:
        """Whether what the last replay left may be gone: a graph captured earlier into the same pool has been replayed since."""
        last = self.timeline.last
        since = last.get(self.order, 0)
        for other, at in last.items():
            if other >= self.order:
                break
            if at > since:
                return True
        return False

    def leave(self) -> None:
        """The graph is no more."""
        last, gone = self.timeline.last, self.timeline.gone
        if self.order in gone or self.order not in last:
            return
        self.timeline.lent.pop(self.order, None)
        gone.add(self.order)
        self.timeline.last, before = {}, 0
        for order, at in last.items():
            if order in gone and before in gone:
                gone.remove(before)
                at = max(at, self.timeline.last.pop(before))
            self.timeline.last[order], before = at, order
