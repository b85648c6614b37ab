"""The values that a function reads beside its arguments: a trace holds for them alone. `read_by_module.py` has a module's."""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

HEAP = 1 << 9  # a flag of classes that Python code defines, whose attributes can change
LONGEST = 64  # of the lists and dicts of plain values whose values are compared by their reprs at every call
LARGEST = 2**20  # of the arrays whose bytes are compared
CONTAINERS = (list, tuple, dict, set, frozenset, collections.deque)
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


class Alike(Same):
    """An object, equal to itself and to one of its class that held the same then."""

    __slots__ = ("held",)

    def __init__(self, it: Any) -> None:
        super().__init__(it)
        self.held = [(name, frozen(one)) for name, one in vars(it).items()]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Alike):
            return False
        return other.it is self.it or (type(other.it) is type(self.it) and other.held == self.held)

    def __hash__(self) -> int:
        return hash(type(self.it))


class Each(Same):
    """A tuple of immutable objects, equal to a tuple of the very same objects: quick to compare if they are many."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Each) and len(other.it) == len(self.it) and all(map(operator.is_, other.it, self.it))

    __hash__ = Same.__hash__


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
    found = sorted(_names_in(fn.__code__) & fn.__globals__.keys())
    reads += [(name, functools.partial(fn.__globals__.get, name)) for name in found]
    reads += [(name, functools.partial(getattr, fn, name)) for name in ("__defaults__", "__kwdefaults__") if getattr(fn, name)]
    for name, read in reads:
        value = read()
        if not isinstance(value, (types.ModuleType, type)):
            yield name, read
            yield from read_outside(value, seen)


def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names that the code and the functions written inside it look up, without the names of attributes."""
    own = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own).union(*[_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)])


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
    return tuple([frozen(read()) for _, read in reads])


def frozen(value: Any, around: frozenset[int] = frozenset()) -> Any:
    """A value that equals another one exactly if a trace with either is the same, as far as that can be known."""
    kind = type(value)
    if kind in PLAIN:
        return kind, repr(value)  # distinguishes 1, 1.0 and True, and 0.0 and -0.0
    if isinstance(value, CONTAINERS) and id(value) not in around:
        around |= {id(value)}  # one may contain itself
        every = (*value, *(value.values() if isinstance(value, dict) else ()))
        if len(value) > LONGEST and {*map(type, every)} <= {*PLAIN}:
            return kind, Each(every)
        if isinstance(value, dict):
            return kind, tuple([(frozen(key, around), frozen(one, around)) for key, one in value.items()])
        found = [frozen(one, around) for one in value]
        return kind, frozenset(found) if isinstance(value, (set, frozenset)) else tuple(found)
    if isinstance(value, nn.Module):  # in another mode, or with another part, it computes something else
        return tuple([(Same(part), part.training, *map(Same, _held(part))) for part in value.modules()])
    return Same(value) if (bits := bits_of(value)) is None else (kind, *bits)


def bits_of(value: Any) -> tuple[Any, ...] | None:
    """The contents of an array of numbers; None for a large one, and for any other value."""
    try:
        view = memoryview(value)
        return (view.format, view.shape, view.tobytes()) if view.nbytes <= LARGEST else None
    except (TypeError, ValueError, BufferError):
        return None


def _held(part: nn.Module) -> Iterator[Any]:
    return itertools.chain(part._parameters.values(), part._buffers.values(), part._modules.values())


class ReadByFunction:
    """All that a function reads beside its arguments."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.reads = list(read_outside(fn, set()))

    def values(self) -> Any:
        return values_of(self.reads)

    def mode(self) -> Any:
        """A part of the key of a trace: traces of several modes are kept side by side."""
        return ()

    def names(self) -> dict[int, str]:
        return names_of_tensors(self.reads)


# the last two are what a recurrent module makes of its parameters whenever one is swapped
MEMBERS = ("training", "_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs")


def by_identity(value: Any) -> Any:
    """`frozen`, for what is looked into anyway: of a module its identity, and of another object of Python's that, or what it holds,
    as some libraries make a new one for each state."""
    kind = type(value)
    if isinstance(value, nn.Module):
        return Same(value)
    of_python = kind not in PLAIN and not isinstance(value, type) and all([one.__flags__ & HEAP for one in kind.__mro__[:-1]])
    return Alike(value) if of_python and hasattr(value, "__dict__") else frozen(value)
