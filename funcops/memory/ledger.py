"""`Ledger`: residuals and pendings that are waiting to be used, each exactly once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from funcops.engine.contract.schema import Donated
from funcops.engine.errors import LedgerError, size_of
from funcops.engine.residuals.report import storages
from funcops.engine.trees import leaves, tensors
from funcops.memory.away import Elsewhere

__all__ = ["Ledger"]


class Ledger:
    """Trees by path. Each tree is kept once and taken once; a tree left at the end is an error; the bytes that wait are counted.

    `Ledger(params, x)` does not count the storages of any number of trees that the caller holds. `close()` raises `LedgerError` if
    a tree is left. A context closes its ledger at the end, or discards the trees after an exception. A storage that two trees share
    counts once, and a tensor in a file or in the memory of another rank does not count. `nbytes` are the bytes waiting now, `sizes`
    the bytes of each tree, `peak_bytes` the most so far; `funcops.schedule.measure` reports what a `dgrad` will add.

    >>> import torch
    >>> from funcops import Ledger, SoftcapConfig, softcap
    >>> y, residuals = softcap.fwd(None, torch.ones(2), SoftcapConfig(30.0))
    >>> ledger = Ledger()
    >>> ledger.keep("microbatch 0", residuals)
    >>> ledger.take("microbatch 0") is residuals
    True
    >>> ledger.take("microbatch 0")
    Traceback (most recent call last):
        ...
    funcops.engine.errors.LedgerError: Ledger: microbatch 0 must be waiting, got one taken already
    """

    def __init__(self, *besides: Any) -> None:
        self._waiting: dict[str, tuple[Any, dict[int, int]]] = {}
        self._taken: set[str] = set()
        # the tensors are held: the address of a freed storage could be given to another
        self._besides = {t.untyped_storage()._cdata: t for tree in besides for t in tensors(tree)}
        self._users: Counter[int] = Counter()
        self.nbytes = 0
        self.peak_bytes = 0

    def keep(self, path: str, tree: Any) -> None:
        """Store a tree under a new path. Raises `LedgerError` for a path that was used before."""
        if path in self._waiting or path in self._taken:
            raise LedgerError(f"Ledger: {path} must be kept once, got it again")
        here = [one for one in leaves(tree._node if type(tree) is Donated else tree, is_leaf=_elsewhere) if not _elsewhere(one)]
        own = {key: size for key, size in storages(here).items() if key not in self._besides}
        self._waiting[path] = tree, own
        for key, size in own.items():
            self._users[key] += 1
            if self._users[key] == 1:
                self.nbytes += size
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def take(self, path: str) -> Any:
        """Remove and return the tree of a path. Raises `LedgerError` if no tree waits there."""
        if path not in self._waiting:
            state = "taken already" if path in self._taken else "never kept"
            raise LedgerError(f"Ledger: {path} must be waiting, got one {state}")
        tree, own = self._waiting.pop(path)
        self._taken.add(path)
        for key, size in own.items():
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.nbytes -= size
        return tree

    @property
    def waiting(self) -> tuple[str, ...]:
        """The paths of the trees that were kept and not taken, oldest first."""
        return tuple(self._waiting)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of each tree that waits, by path; storages that several share count for each."""
        return {path: sum(own.values()) for path, (_, own) in self._waiting.items()}

    def close(self) -> None:
        """Raise `LedgerError` with the paths of the trees that were never taken, if any."""
        if self._waiting:
            shown = [*list(self._waiting)[:5], *(["..."] if len(self._waiting) > 5 else [])]
            raise LedgerError(f"Ledger: everything must be taken by the end, got {len(self._waiting)} left: {'; '.join(shown)}")

    def discard(self) -> None:
        """Drop all trees that wait."""
        for path in self.waiting:
            self.take(path)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, path: str) -> bool:
        return path in self._waiting

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.close()
        else:
            # an error of `close` would take the place of the one that ends the block
            self.discard()

    def __repr__(self) -> str:
        return f"Ledger({len(self)} waiting, {size_of(self.nbytes)})"


def _elsewhere(node: Any) -> bool:
    return type(node) is Elsewhere
