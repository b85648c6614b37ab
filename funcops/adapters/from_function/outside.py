"""The values that a function reads beside its arguments: a trace holds for them alone."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from funcops.contract.marks import mark_of, version

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


Read = tuple[str, Callable[[], Any]]  # a name, and the function that returns its present value


def read_outside(fn: Any, seen: set[Any]) -> Iterator[Read]:
    """Yield what `fn` reads: a variable of its closure, a global, a default, a method's object, a partial's arguments; and what a
    function reads that it finds there, which is put into `seen`. Torch's functions are left out."""
    bound: tuple[Any, ...] = (fn.__func__, fn.__self__) if isinstance(fn, types.MethodType) else ()
    if isinstance(fn, functools.partial):
        bound = fn.func, *fn.args, *fn.keywords.values()
    elif callable(fn) and isinstance(type(fn).__call__, types.FunctionType):
        bound = (getattr(type(fn), "forward", type(fn).__call__),)
        if not seen:  # not one that a function has read
            yield type(fn).__name__, itertools.repeat(fn).__next__
    for part in bound:
        yield getattr(part, "__name__", type(part).__name__), itertools.repeat(part).__next__
        yield from read_outside(part, seen)
    if not isinstance(fn, types.FunctionType) or fn in seen or (fn.__module__ or "").partition(".")[0] in ("torch", "funcops"):
        return
    seen.add(fn)
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    reads: list[Read] = [(name, functools.partial(getattr, cell, "cell_contents", None)) for name, cell in cells]
    reads += [(name, functools.partial(fn.__globals__.get, name)) for name in sorted(names_in(fn.__code__) & fn.__globals__.keys())]
    reads += [(name, functools.partial(getattr, fn, name)) for name in ("__defaults__", "__kwdefaults__") if getattr(fn, name)]
    for name, read in reads:
        value = read()
        if not isinstance(value, (types.ModuleType, type)):
            yield name, read
            yield from read_outside(value, seen)


def names_in(code: types.CodeType) -> frozenset[str]:
    """The names that the code and the functions written inside it look up."""
    return frozenset(code.co_names).union(*[names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)])


def names_of_tensors(reads: list[Read]) -> dict[int, str]:
    """The names of the tensors that are read, and of the params and buffers of modules that are, by id."""
    found = {}
    for name, read in reads:
        value = read()
        if isinstance(value, nn.Module):
            every = (*value.named_parameters(), *value.named_buffers())
            found.update({id(t): f"{name}.{path}" for path, t in every})
        elif isinstance(value, Tensor):
            found[id(value)] = name
    return found


def values_of(reads: list[Read]) -> tuple[Any, ...]:
    return tuple([_frozen(read()) for _, read in reads])


class Noted(NamedTuple):
    """The values that a forward read beside its arguments, for another run of it."""

    reads: tuple[Read, ...]
    names: frozenset[str]  # of the attributes of objects that count
    values: tuple[Any, ...]
    tensors: tuple[tuple[str, Same, Any], ...]  # the captured ones, with their marks

    @staticmethod
    def of(reads: list[Read], names: frozenset[str], captured: dict[str, Tensor]) -> Noted:
        values = tuple([_frozen(read(), names) for _, read in reads])
        return Noted(tuple(reads), names, values, tuple([(name, Same(t), mark_of(t)) for name, t in captured.items()]))

    def changed(self) -> str | None:
        """The name of a value that is not what it was, or None."""
        for name, t, mark in self.tensors:
            if mark != version(t.it):
                return name
        for (name, read), value in zip(self.reads, self.values, strict=True):
            if _frozen(read(), self.names) != value:
                return name
        return None


def _frozen(value: Any, names: frozenset[str] | None = None, seen: frozenset[int] = frozenset()) -> Any:
    """A value that equals another one exactly if a trace with either is the same, as far as that can be known. With `names`, which
    takes longer, that also holds for long lists and arrays, and for the attributes of objects that have these names."""
    kind = type(value)
    if kind in PLAIN:
        return kind, repr(value)  # distinguishes 1, 1.0 and True, and 0.0 and -0.0
    if isinstance(value, Tensor) or id(value) in seen or (kind in (list, tuple, dict) and len(value) > LONGEST and names is None):
        return Same(value)
    if names is not None:
        seen |= {id(value)}
    if kind in (list, tuple):
        return kind, tuple([_frozen(one, names, seen) for one in value])
    if kind is dict:
        return kind, tuple([(_frozen(key, names, seen), _frozen(one, names, seen)) for key, one in value.items()])
    if isinstance(value, nn.Module):  # in another mode it computes something else
        modes = tuple([part.training for part in value.modules()])
        return Same(value), modes, names and tuple([_frozen(_plain_of(part), names, seen) for part in value.modules()])
    if names is None or isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return Same(value)
    own = {name: one for name, one in getattr(value, "__dict__", {}).items() if name in names}
    content = value.tobytes() if hasattr(value, "tobytes") else None  # of an array
    return Same(value), content, _frozen(own, names, seen)


def _plain_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if type(value) in PLAIN}
