"""A lease: memory that someone relies on, and whether it may still be used."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.adapters.graphs.timeline import TimelineEntry
from funcops.engine.contract.marks import Versions
from funcops.engine.errors import BorrowedError, StaleResidualError
from funcops.engine.trees import leaves

SHARED = "a graph that was captured earlier into the same memory pool"


class Lease:
    """The tensors of trees, at their addresses, with the values that `renew` finds. `graph`: whose replay made the values; None for
    memory of a caller. The lease is lost when a tensor is written to, as far as torch counts writes; when its owner renews or ends
    it, as `number` tells; and when another graph of the pool overwrites the values."""

    __slots__ = ("_held", "addresses", "graph", "number")

    def __init__(self, graph: TimelineEntry | None = None) -> None:
        self.graph, self.number = graph, 0
        self.addresses: list[int | None] = []
        self._held: list[tuple[Versions, str, type[Exception]]] = []

    def hold(self, tree: Any, path: str = "", error: type[Exception] = StaleResidualError) -> Lease:
        """Add the tensors of a tree. `path` and `error`: how to name one that was written to."""
        self.addresses += [t.data_ptr() if isinstance(t, Tensor) else None for t in leaves(tree)]
        self._held.append((Versions.of(tree), path, error))
        return self

    def renew(self) -> None:
        self.number += 1
        self._held = [(versions.now(), path, error) for versions, path, error in self._held]

    def end(self) -> None:
        self.number += 1

    def written(self) -> list[Tensor]:
        """The tensors that were written to since."""
        return [t for versions, _, _ in self._held for t in versions.written()]

    def at(self, i: int, value: Any) -> bool:
        """Whether `value` is a tensor in the memory of leaf `i`."""
        return isinstance(value, Tensor) and value.data_ptr() == self.addresses[i]

    def overwritten(self) -> bool:
        """Whether another graph of the pool may have overwritten the values."""
        return self.graph is not None and self.graph.overwritten()

    def check(self, where: str, what: str, by: str = "forward", hint: str = "") -> None:
        """Raise if a tensor was written to or overwritten since. `what`: a name for all of them."""
        if self.overwritten():
            raise BorrowedError(f"{where}: {what} must be untouched, got a replay of {SHARED} since: capture without pool=")
        for versions, path, error in self._held:
            versions.check(where, path, by, hint, error=error)
