"""Memos that a compiler may read and never writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

K = TypeVar("K")
V = TypeVar("V")
_frozen = 0  # how many blocks of `reading` run


@contextmanager
def reading() -> Iterator[None]:
    """Inside the block nothing is put into a memo: where a compiler, while it traces, lets Python run, it may have noted already
    what a memo lacks."""
    global _frozen
    _frozen += 1
    try:
        yield
    finally:
        _frozen -= 1


def remember(memo: dict[K, V], key: K, value: V) -> V:
    """The value, put into the memo. While torch.compile traces it is not put there: the tracer would have to write outside of the
    graph that it makes, which it refuses inside an autograd node, and cannot do with objects that it has made itself."""
    if not torch.compiler.is_dynamo_compiling() and not _frozen:
        memo[key] = value
    return value
