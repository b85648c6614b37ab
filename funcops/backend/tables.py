"""Small tables that kernels read on a device: made on the host, copied there without waiting, and kept by what they are made of.

Under capture a copy to the device is a node of the graph: it happens at each replay, from the host's memory, and not before. So a
table that is made there belongs to that graph: nobody else may read it, and it lives as long as the graph does.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.backend.declare import tracing

_held: list[list[Any]] = []  # by the captures under way
_for_good: list[Any] = []  # by captures that are not ours, where torch does not tell which


class Table(NamedTuple):
    """`on_device`: the tensors. `note`: what the maker has to say of them. `host`: what a captured copy reads."""

    on_device: tuple[Tensor, ...]
    note: Any
    host: tuple[Tensor, ...]


class Tables:
    """The tables of one kind, of which the `kept` used last are kept. Each stream has its own,
    as it waits for no other's copies."""

    def __init__(self, kept: int) -> None:
        self.kept = kept
        self.cache: OrderedDict[Hashable, Table] = OrderedDict()

    def get(self, device: torch.device, key: Hashable, make: Callable[[], tuple[tuple[Tensor, ...], Any]]) -> Table:
        """The table of `key` on `device`; `make()` gives its tensors, on the host, and a note."""
        on_cuda = device.type == "cuda"
        if tracing():
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
        self.cache[key] = table
        if len(self.cache) > self.kept:
            self.cache.popitem(last=False)
        return table


def _copied(device: torch.device, host: tuple[Tensor, ...], note: Any, *, pinned: bool) -> Table:
    if pinned:
        host = tuple([t.pin_memory() for t in host])
    return Table(tuple([t.to(device, non_blocking=True) for t in host]), note, host)


@contextmanager
def holding() -> Iterator[list[Any]]:
    """What is made for the capture in this block, for its owner to keep as long as the graph."""
    _held.append([])
    try:
        yield _held[-1]
    finally:
        _held.pop()


def hold(value: Any) -> None:
    """Keep it as long as the graph that is being captured."""
    if _held:
        _held[-1].append(value)
        return
    find: Any = getattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph", None)
    graph = find() if find is not None else None
    if graph is None:
        _for_good.append(value)
    else:
        weakref.finalize(graph, _let_go, value)


def _let_go(value: Any) -> None:
    """Until it is called, the value is held."""
