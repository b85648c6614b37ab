"""The values that a function reads beside its arguments: a trace holds for them alone."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

LONGEST = 64  # of the lists and dicts whose values are compared at every call
PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Same:
    """An object, equal to nothing but itself. The key that holds it keeps it alive, so that no other object gets its address."""

    __slots__ = ("it",)

    def __init__(self, it: Any) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.it is self.it

    def __hash__(self) -> int:
        return id(self.it)


def read_outside(fn: Any, seen: set[Any] | None = None) -> Iterator[Callable[[], Any]]:
    """Yield functions that return the present value of what `fn` reads: a variable of its closure, a global, a method's object, a
    partial's arguments; and of what a function reads that it finds there. Torch's functions are left out."""
    seen = set() if seen is None else seen
    bound: tuple[Any, ...] = (fn.__func__, fn.__self__) if isinstance(fn, types.MethodType) else ()
    if isinstance(fn, functools.partial):
        bound = fn.func, *fn.args, *fn.keywords.values()
    for part in bound:
        yield itertools.repeat(part).__next__
        yield from read_outside(part, seen)
    if not isinstance(fn, types.FunctionType) or fn in seen or (fn.__module__ or "").partition(".")[0] in ("torch", "funcops"):
        return
    seen.add(fn)
    cells = [functools.partial(getattr, cell, "cell_contents", None) for cell in fn.__closure__ or ()]
    names = [name for name in _names(fn.__code__) if name in fn.__globals__]
    for read in (*cells, *[functools.partial(fn.__globals__.get, name) for name in names]):
        value = read()
        if not isinstance(value, (types.ModuleType, type)):
            yield read
            yield from read_outside(value, seen)


def _names(code: types.CodeType) -> set[str]:
    """The names that the code and the functions written inside it look up."""
    return set(code.co_names).union(*[_names(one) for one in code.co_consts if isinstance(one, types.CodeType)])


def values_of(reads: list[Callable[[], Any]]) -> tuple[Any, ...]:
    return tuple([_frozen(read()) for read in reads])


def _frozen(value: Any) -> Any:
    """A value that equals another one exactly if a trace with either is the same, as far as that can be known."""
    kind = type(value)
    if kind in PLAIN:
        return kind, repr(value)  # distinguishes 1, 1.0 and True, and 0.0 and -0.0
    if kind in (list, tuple, dict) and len(value) > LONGEST:
        return Same(value)
    if kind in (list, tuple):
        return kind, tuple([_frozen(one) for one in value])
    if isinstance(value, nn.Module):  # in another mode it computes something else
        return Same(value), tuple([part.training for part in value.modules()])
    if kind is dict:
        return kind, tuple([(_frozen(key), _frozen(one)) for key, one in value.items()])
    return Same(value)
