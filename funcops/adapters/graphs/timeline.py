"""The replays of the graphs of one memory pool, in the order of their capture.

What a graph needs for itself is free in its pool once its capture ended. A graph captured later may be given that memory for what
it leaves: residuals, borrowed outputs, what autograd saves. Each replay of the earlier then writes over it. The other way round
nothing is lost, as what is held while a graph is captured is not given to it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary


class Timeline:
    """Of one pool: for each graph, in the order of capture, the number of its last replay."""

    def __init__(self) -> None:
        self.captured = self.replays = 0
        self.last: dict[int, int] = {}


_timelines: WeakValueDictionary[Any, Timeline] = WeakValueDictionary()  # by pool, for as long as a graph of it lives


class Timed:
    """A graph in the timeline of its pool."""

    def __init__(self, pool: Any) -> None:
        self._timeline = _timelines.setdefault(pool, Timeline())
        self._order = self._timeline.captured = self._timeline.captured + 1
        self._timeline.last[self._order] = 0

    def _replayed(self) -> None:
        timeline = self._timeline
        timeline.last[self._order] = timeline.replays = timeline.replays + 1

    def _gone(self) -> None:
        self._timeline.last.pop(self._order, None)

    def overwritten(self) -> bool:
        """Whether what the last replay left may be gone: a graph captured earlier into the same pool has been replayed since."""
        last = self._timeline.last
        since = last.get(self._order, 0)
        for order, at in last.items():
            if order >= self._order:
                break
            if at > since:
                return True
        return False
