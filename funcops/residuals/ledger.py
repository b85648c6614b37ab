"""`Ledger`: residuals and pendings that wait, each to be used exactly once."""

from __future__ import annotations

from collections import Counter
from typing import Any

from funcops.contract.schema import Donated
from funcops.errors import LedgerError, size_of
from funcops.trees import tensors


class Ledger:
    """Trees by path. What was kept is taken once; what is left at the end is an error; bytes are counted as they come and go.

    `Ledger(params, x)`: storages of these trees, any number of them, are not counted, as the caller has them. `close()` raises
    `LedgerError` while anything waits. As a context it closes itself, or after an exception forgets what waits. A storage that two
    trees share counts once. `nbytes` is what waits now, `peak_bytes` the most that has: what a `dgrad` is about to add is for
    `funcops.schedule.measure` to say.

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
    funcops.errors.LedgerError: Ledger: microbatch 0 must be waiting, got one taken already
    """

    def __init__(self, *besides: Any) -> None:
        self._waiting: dict[str, tuple[Any, dict[int, int]]] = {}
        self._taken: set[str] = set()
        self._besides = {t.untyped_storage()._cdata: t for tree in besides for t in tensors(tree)}
        self._users: Counter[int] = Counter()
        self.nbytes = 0
        self.peak_bytes = 0

    def keep(self, path: str, tree: Any) -> None:
        """Put a tree under a path that was never used before. Raises `LedgerError`."""
        if path in self._waiting or path in self._taken:
            raise LedgerError(f"Ledger: {path} must be kept once, got it again")
        storages = {key: size for key, size in _storages(tree).items() if key not in self._besides}
        self._waiting[path] = tree, storages
        for key, size in storages.items():
            self._users[key] += 1
            if self._users[key] == 1:
                self.nbytes += size
        self.peak_bytes = max(self.peak_bytes, self.nbytes)

    def take(self, path: str) -> Any:
        """The tree of this path, which is gone from here. Raises `LedgerError` where there is none."""
        if path not in self._waiting:
            state = "taken already" if path in self._taken else "never kept"
            raise LedgerError(f"Ledger: {path} must be waiting, got one {state}")
        tree, storages = self._waiting.pop(path)
        self._taken.add(path)
        for key, size in storages.items():
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self.nbytes -= size
        return tree

    @property
    def waiting(self) -> tuple[str, ...]:
        """The paths of what was kept and not taken, oldest first."""
        return tuple(self._waiting)

    def close(self) -> None:
        """Raises `LedgerError` with the paths of what was never taken."""
        if self._waiting:
            shown = [*list(self._waiting)[:5], *(["..."] if len(self._waiting) > 5 else [])]
            raise LedgerError(f"Ledger: everything must be taken by the end, got {len(self._waiting)} left: {'; '.join(shown)}")

    def discard(self) -> None:
        """Forget what waits."""
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
            self.discard()

    def __repr__(self) -> str:
        return f"Ledger({len(self)} waiting, {size_of(self.nbytes)})"


def _storages(tree: Any) -> dict[int, int]:
    found = {}
    for t in tensors(tree._node if type(tree) is Donated else tree):
        storage = t.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return found
