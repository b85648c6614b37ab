"""Memos that a compiler may read but never writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from funcops.engine.errors import fail

__all__ = ["reading", "remember"]

K = TypeVar("K")
V = TypeVar("V")
_frozen = 0  # how many blocks of `reading` run


@contextmanager
def reading() -> Iterator[None]:
    """A block in which nothing is put into a memo: when a compiler lets Python run while it traces, it may have noted already that
    a memo lacks an entry."""
    global _frozen
    _frozen += 1
    try:
        yield
    finally:
        _frozen -= 1


def remember(memo: dict[K, V], key: K, value: V) -> V:
    """Put the value into the memo, and return it. While torch.compile traces it is only returned: the tracer would have to write
    outside of the graph that it makes, which it refuses inside an autograd node, and cannot do with objects that it made itself."""
    if not torch.compiler.is_dynamo_compiling() and not _frozen:
        memo[key] = value
    return value


_numbered: dict[Any, int] = {}


def number_while_tracing(value: Any) -> int:
    """A number for a value, the same for equal values. It is called as a method of the value: the tracer of torch 2.11 wants every
    argument to be a constant, except the object of a method."""
    return _numbered.setdefault(value, len(_numbered))


# As `torch.compiler.assume_constant_result` does, which would import the compiler: the tracer takes its result as a constant.
number_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def given_while_tracing(value: Any, taker: str, call: Any) -> Any:
    """The result of `taken(config, call)` of the object that `takers` has by that name, which Python runs while the compiler
    traces. It is called as a method of the config, as `number_while_tracing` is; `call` is a tree of constants, and so is the
    result. Raises `ValueError` for a config that the traced function makes itself, of which Python sees no fields."""
    fields = getattr(type(value), "__dataclass_fields__", {}).values()
    if missing := [f.name for f in fields if f.init and f.name not in vars(value)]:
        wanted = "a config that is made outside of the function that torch.compile traces"
        fail("torch.compile", type(value).__name__, wanted, f"one made inside, with {', '.join(missing)}")
    return given_while_tracing.takers[taker].taken(value, call)  # type: ignore[attr-defined]


given_while_tracing.takers = WeakValueDictionary()  # type: ignore[attr-defined]
given_while_tracing._dynamo_marked_constant = True  # type: ignore[attr-defined]


def equal(a: Any, b: Any) -> bool:
    """Whether two configs are equal. With `dynamic=True` the numbers in them are symbols to torch.compile, which it can compare
    with shapes, but not inside an object that it takes as a constant: so Python compares, with guards on the objects."""
    if not torch.compiler.is_dynamo_compiling() or not (hasattr(a, _NUMBER) and hasattr(b, _NUMBER)):
        return bool(a == b)
    id(a), id(b)  # the tracer guards on them: a method that gives a constant has no guard on its object
    return bool(a.number_while_tracing() == b.number_while_tracing())


_NUMBER = number_while_tracing.__name__
