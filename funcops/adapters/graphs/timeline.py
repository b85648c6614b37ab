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
    """Of one pool: its graphs in the order of their capture, and the number of each one's last replay. What a graph wrote over
    stays so when it is gone, so it is remembered; those with none between them as one."""

    def __init__(self) -> None:
        self.captured = self.replays = 0
        self.last: dict[int, int] = {}
        self.alive: WeakValueDictionary[int, TimelineEntry] = WeakValueDictionary()
        self.lending: WeakValueDictionary[int, TimelineEntry] = WeakValueDictionary()

    def enter(self, entry: TimelineEntry) -> int:
        found: dict[int, int] = {}
        gone = 0
        for order, at in self.last.items():
            if order in self.alive:
                found[order], gone = at, 0
            else:
                found[order], gone = max(at, found.pop(gone, 0)), order
        self.captured += 1
        self.last = {**found, self.captured: self.replays}
        self.alive[self.captured] = entry
        return self.captured


_timelines: WeakValueDictionary[Any, Timeline] = WeakValueDictionary()  # by pool, for as long as a graph of it lives


class TimelineEntry:
    """A graph's entry in the timeline of its pool. `lent`: those of its buffers that callers hold."""

    def __init__(self, pool: Any) -> None:
        self.timeline = _timelines.setdefault(pool, Timeline())
        self.order = self.timeline.enter(self)
        self.lent: list[Tensor] = []

    def lend(self, tensors: list[Tensor]) -> None:
        if tensors:
            self.lent = tensors
            self.timeline.lending[self.order] = self

    def replayed(self) -> None:
        """It wrote over what it lends, and over what later graphs lend. torch does not see that, so it is counted."""
        timeline, order = self.timeline, self.order
        timeline.last[order] = timeline.replays = timeline.replays + 1
        if timeline.lending:
            for entry in list(timeline.lending.values()):
                if entry.order >= order:
                    torch.autograd.graph.increment_version(entry.lent)

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
        self.timeline.alive.pop(self.order, None)
        self.timeline.lending.pop(self.order, None)
        self.lent = []
