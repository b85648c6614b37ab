"""Values that a captured graph reads beside its inputs, such as tables of kernels: they live as long as the graph."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["holding"]

_held: list[list[Any]] = []  # the values held by each capture in progress
_for_good: list[Any] = []  # held by captures that are not ours, if torch does not say which graph is being captured


@contextmanager
def holding() -> Iterator[list[Any]]:
    """Collect the values that the capture in this block needs; the graph's owner keeps the list as long as the graph."""
    _held.append([])
    try:
        yield _held[-1]
    finally:
        _held.pop()


def hold(value: Any) -> None:
    """Keep `value` as long as the graph that is being captured."""
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
    """Release `value`: the finalizer that calls this holds it until then."""
