"""Memos that a compiler may read and never writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

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


_numbered: dict[Any, int] = {}


def number_while_tracing(value: Any) -> int:
    """The number of a value among those that differ: equal ones have one. A method of what is compared: of any argument but the
    object of a method the tracer of torch 2.11 wants a constant."""
    return _numbered.setdefault(value, len(_numbered))


# What `torch.compiler.assume_constant_result` does, which would import the compiler: the tracer runs it, and takes what it gives.
number_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def equal(a: Any, b: Any) -> bool:
    """Whether two configs are equal. With `dynamic=True` the numbers in them are symbols to torch.compile, which it can compare
    with shapes and not inside of what it takes for a constant: it asks Python, and guards on the objects."""
    if not torch.compiler.is_dynamo_compiling() or not (hasattr(a, _NUMBER) and hasattr(b, _NUMBER)):
        return bool(a == b)
    id(a), id(b)  # the tracer guards on them: a method that it runs has no guard on its object
    return bool(a.number_while_tracing() == b.number_while_tracing())


_NUMBER = number_while_tracing.__name__
