"""A word of each rank about a step that failed, so that those that only wait can say whom they waited for."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

GRACE = 3.0  # seconds in which the other ranks are expected to fail too, and to say how
RAISED = "raised "


class Words:
    """A word of each rank, in the store by which the group met; without a group, or with a torch whose groups do not give their
    store, nobody hears of it. `number`: of the pipeline, the same on all ranks."""

    def __init__(self, group: Any, number: int) -> None:
        self.prefix, self.store, self.told = f"funcops.pipeline.{number}", None, False
        if dist.is_available() and dist.is_initialized():
            own: Any = dist.group.WORLD if group is None else group
            self.store = own.get_group_store() if hasattr(own, "get_group_store") else None
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def tell(self, text: str) -> None:
        if self.store is not None:
            self.told = True
            try:
                self.store.set(f"{self.prefix}.{self.rank}", text)
            except RuntimeError:  # the process that holds the store is gone
                self.store = None

    def forget(self) -> None:
        """Take the word back, if there is one, as a step has succeeded since."""
        if self.told:
            self.tell("")
            self.told = False

    def who(self) -> str:
        """Who is at fault: the ranks that raised, and else those that say nothing while all others wait."""
        others = [rank for rank in range(self.size) if rank != self.rank] if self.store is not None else []
        end = time.time() + GRACE
        found: dict[int, str] = {}
        while others:
            try:
                found |= {rank: word for rank in others if rank not in found and (word := self._word(rank))}
            except RuntimeError:
                others = []
            raised = [f"rank {rank} {word}" for rank, word in sorted(found.items()) if word.startswith(RAISED)]
            if raised:
                return "; ".join(raised)
            if len(found) == len(others) or time.time() > end:
                break
            time.sleep(0.05)
        silent = [str(rank) for rank in others if rank not in found]
        if not others:
            return "no word of any rank: the store by which they met is gone, with its process"
        if not silent:
            return "word of all others that they wait"
        return f"no word of rank {', '.join(silent)}, which stopped or still runs"

    def _word(self, rank: int) -> str:
        key = f"{self.prefix}.{rank}"
        return self.store.get(key).decode() if self.store is not None and self.store.check([key]) else ""
