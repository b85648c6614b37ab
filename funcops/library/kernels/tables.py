"""Small tables that kernels read on a device: made on the host, copied to the device asynchronously, and cached by key.

Under capture, a copy to the device is a node of the graph: it runs at each replay, from the host's memory, and not before. So a
table made under capture belongs to its graph: no other code may read it, and it lives as long as the graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.backend.declare import tracing
from funcops.engine.backend.held import hold

__all__ = ["Table", "Tables"]


class Table(NamedTuple):
    """`on_device`: the tensors. `note`: any data of their maker. `host`: the memory that a captured copy reads."""

    on_device: tuple[Tensor, ...]
    note: Any
    host: tuple[Tensor, ...]


class Tables:
    """A cache of the `kept` most recently used tables of one kind. Each stream has its own tables, because it does not wait for
    another stream's copies."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.cache: OrderedDict[Hashable, Table] = OrderedDict()

    def get(self, device: torch.device, key: Hashable, make: Callable[[], tuple[tuple[Tensor, ...], Any]]) -> Table:
        """The table of `key` on `device`; `make()` returns its tensors, on the host, and a note."""
        on_cuda = device.type == "cuda"
        if tracing():
            # made under a tracer a table may be fake, and must not get into the cache
            return _copied(device, *make(), pinned=False)
        key = device, key, torch._C._cuda_getCurrentRawStream(device.index) if on_cuda else 0
        capturing = on_cuda and torch.cuda.is_current_stream_capturing()
        table = self.cache.pop(key, None)
        if table is None:
            table = _copied(device, *make(), pinned=on_cuda)
            if capturing:
                hold(table)
                return table
        elif capturing:
            hold(table)
        # at the end, as the one used last: `popitem` takes the oldest
        self.cache[key] = table
        if len(self.cache) > self.kept:
            self.cache.popitem(last=False)
        return table


def _copied(device: torch.device, host: tuple[Tensor, ...], note: Any, *, pinned: bool) -> Table:
    if pinned:
        host = tuple([t.pin_memory() for t in host])
    return Table(tuple([t.to(device, non_blocking=True) for t in host]), note, host)
