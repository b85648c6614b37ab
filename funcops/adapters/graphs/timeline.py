"""The replays of the graphs of one memory pool, in the order of their capture.

After its capture, a graph's temporary memory is free in its pool. A graph captured later may get that memory for its results:
residuals, borrowed outputs, autograd's saved tensors. Each replay of the earlier graph then overwrites them. The reverse cannot
happen, because memory that is held during a capture is not given to that graph.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Timeline:
    """The graphs of one pool in the order of their capture, and the number of each one's last replay. A graph that is freed stays
    in the list, because its writes remain; neighbouring freed graphs are merged."""

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


_timelines: WeakValueDictionary[Any, Timeline] = WeakValueDictionary()  # by pool, as long as a graph of it is alive


class TimelineEntry:
    """A graph's entry in the timeline of its pool. `lent`: its buffers that callers borrow."""

    def __init__(self, pool: Any) -> None:
        self.timeline = _timelines.setdefault(pool, Timeline())
        self.order = self.timeline.enter(self)
        self.lent: list[Tensor] = []

    def lend(self, tensors: list[Tensor]) -> None:
        if tensors:
            self.lent = tensors
            self.timeline.lending[self.order] = self

    def replayed(self) -> None:
        """Count a replay's writes to buffers that this and later graphs lent, because torch does not see them."""
        timeline, order = self.timeline, self.order
        timeline.last[order] = timeline.replays = timeline.replays + 1
        if timeline.lending:
            for entry in list(timeline.lending.values()):
                if entry.order >= order:
                    torch.autograd.graph.increment_version(entry.lent)

    def overwritten(self) -> bool:
        """Whether the results of the last replay may be lost, because a graph captured earlier into the same pool was replayed
        since."""
        last = self.timeline.last
        since = last.get(self.order, 0)
        for other, at in last.items():
            if other >= self.order:
                break
            if at > since:
                return True
        return False

    def leave(self) -> None:
        """Remove the freed graph."""
        self.timeline.alive.pop(self.order, None)
        self.timeline.lending.pop(self.order, None)
        self.lent = []
