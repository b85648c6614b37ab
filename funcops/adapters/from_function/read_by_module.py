"""The values that a module's forward reads beside its arguments: a trace holds for them alone.

A forward can reach all of Python, so a first run notes which functions it calls: what they name, and no more, is looked at. Every
call asks whether something has changed, so what there is to see lies in flat lists, which one pass compares by identity.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import collections.abc
import dis
import inspect
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcops.adapters.from_function.outside import CONTAINERS, HEAP, MEMBERS, PLAIN, Same, bits_of, by_identity
from funcops.engine.contract.marks import version
from funcops.engine.errors import join_path

CACHES = "_funcops_caches"  # of a class: attributes of its instances that no forward reads
_GONE = object()  # in place of what does not exist
_NO_VALUE = types.CellType()
_BAGS = (types.SimpleNamespace, argparse.Namespace, collections.abc.Mapping, collections.abc.Sequence, collections.abc.Set)
_FOLLOWED = (types.ModuleType, types.FunctionType, collections.abc.MutableMapping)  # of a foreign file
_BEHIND = ("__func__", "__self__", "__wrapped__", "fget", "func", "args", "keywords")  # of methods, properties, partials, caches
_TORCHS = ("torch.nn.modules.", "torch.nn.functional", "torch.nn.utils.parametri", "torch.nn.attention")
_FOREIGN = {*sys.stdlib_module_names, "funcops", "numpy", "torch"} - {"os"}  # os.getenv reads a dict that a program changes


def _foreign(file: str | None) -> bool:
    """Whether the functions of a file of this name are taken as they are. Torch's own are, but torch.nn's call functions that
    a program may replace, and hooks of all modules."""
    return (file or "").partition(".")[0] in _FOREIGN and not (file or "").startswith(_TORCHS)


class Reads(NamedTuple):
    """The names in a code: chains that begin with a variable, and the attributes of everything else."""

    chains: list[tuple[str, ...]]
    names: list[str]


def _reads_of(code: types.CodeType) -> Reads:
    if code not in _known:
        _known[code] = _find_reads(code)
    return _known[code]


def _find_reads(code: types.CodeType) -> Reads:
    chains: dict[tuple[str, ...], None] = {}
    names: dict[str, None] = {}
    chain: tuple[str, ...] = ()
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "IMPORT_NAME"):
            chain = (one.argval,)
            chains[chain] = None
        elif one.opname == "IMPORT_FROM":
            chains[(*chain[:1], one.argval)] = None
        elif one.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "STORE_ATTR"):
            names[one.argval] = None
            if chain:
                chain = (*chain, one.argval)
                chains[chain] = None
        elif one.opname not in ("PUSH_NULL", "EXTENDED_ARG", "STORE_FAST"):
            chain = ()
    if not {"getattr", "hasattr"}.isdisjoint(code.co_names):
        names.update(dict.fromkeys([one for one in code.co_consts if type(one) is str and one.isidentifier()]))
    return Reads(list(chains), list(names))


def _codes_in(code: types.CodeType) -> list[types.CodeType]:
    """The codes of the functions that a function makes, and of those that these make."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return [*inner, *itertools.chain.from_iterable(map(_codes_in, inner))]


_known: weakref.WeakKeyDictionary[types.CodeType, Reads] = weakref.WeakKeyDictionary()


class Scope(NamedTuple):
    """The variables of a file or class, or attributes of an object, and which of them are read."""

    label: str
    variables: Mapping[str, Any]
    foreign: bool
    named: dict[str, None]


class Walk:
    """All that the functions that ran read: what modules hold; attributes of objects; attributes of classes and globals by their
    names; closures and defaults. `parts`: the modules whose parameters and modes are left out."""

    def __init__(self, parts: Sequence[nn.Module], ran: Ran, beside: frozenset[str]) -> None:
        """`parts`: the whole module first; `beside`: its attributes that are left out, too."""
        self.parts, self.ran, self.root, self.beside = {*map(id, parts)}, dict(ran), parts[0], beside
        self.seen, self.names, self.classes = dict[int, Any](), dict[str, None](), dict[type, Scope]()
        self.scopes, self.globals, self.whole = list[Scope](), dict[int, Scope](), list[tuple[str, Any]]()
        self.sized, self.views = list[Any](), list[Any]()  # containers, and what to compare of each
        self.arrays, self.typed = list[tuple[Any, Any]](), list[Any]()
        self.cells, self.owners, self.tensors = list[tuple[str, Any]](), list[tuple[str, Any, str]](), dict[int, str]()
        self.todo = collections.deque[tuple[str, Any]]([("", parts[0])])
        self.of_class(Tensor)
        for code, variables in ran.values():
            self.of_code(code, variables)
        while self.todo:
            label, value = self.todo.popleft()
            if type(value) not in _PLAIN and id(value) not in self.seen:
                self.seen[id(value)] = value  # alive, so that no other gets its id
                self.visit(label, value)

    def visit(self, label: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.tensors[id(value)] = label
        elif isinstance(value, CONTAINERS):
            self.sized.append(value)
            self.views += [value, value.values()] if isinstance(value, dict) else [value]
            self.todo += [(label, one) for one in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, nn.Module):
            self.of_module(label, value)
        elif isinstance(value, types.FunctionType):
            self.of_function(label, value)
        elif isinstance(value, types.ModuleType):
            self.scope(label, vars(value), _foreign(value.__name__))
        elif isinstance(value, type):
            self.of_class(value)
        else:
            self.of_object(label, value)

    def name(self, names: Iterable[str]) -> None:
        """The code names these attributes."""
        new = [name for name in names if name not in self.names]
        self.names.update(dict.fromkeys(new))
        for scope in self.scopes:
            self.look_up(scope, new)

    def scope(self, label: str, variables: Mapping[str, Any], foreign: bool) -> Scope:
        self.scopes.append(Scope(label, variables, foreign, {}))
        self.look_up(self.scopes[-1], list(self.names))
        return self.scopes[-1]

    def look_up(self, scope: Scope, names: Iterable[str]) -> None:
        for name in names:
            if name in scope.variables and name not in scope.named:
                scope.named[name] = None
                value = scope.variables[name]
                if not scope.foreign or (isinstance(value, _FOLLOWED) and not isinstance(value, CONTAINERS)):
                    self.todo.append((join_path(scope.label, name), value))

    def of_module(self, label: str, part: nn.Module) -> None:
        members = part._parameters, part._buffers, part._modules
        self.sized += [vars(part), *members]
        self.views += [one.values() for one in (vars(part), *members)]
        left_out = {*MEMBERS, *getattr(type(part), CACHES, ()), *(self.beside if part is self.root else ())}
        own = {n: one for n, one in vars(part).items() if n not in left_out}
        self.whole += [(label, one) for one in (own, part._buffers, part._modules)]
        if id(part) in self.parts:
            self.whole.append((label, dict.fromkeys(part._parameters)))
        else:
            self.whole += [(label, part._parameters), (label, {"training": part.training})]
        self.typed.append((label, part))
        self.of_class(type(part))
        self.todo += [(join_path(label, n), one) for held in (own, *members) for n, one in held.items()]

    def of_class(self, cls: type) -> None:
        for one in cls.__mro__:
            if one not in self.classes and one.__flags__ & HEAP:
                self.classes[one] = own = self.scope(one.__name__, vars(one), _foreign(one.__module__))
                self.look_up(own, [n for n, f in vars(one).items() if id(_code_of(f)) in self.ran])
        if issubclass(cls, torch.autograd.Function):
            for n in ("backward", "vjp"):
                self.also_runs(_function_of(getattr(cls, n, None)))

    def also_runs(self, fn: Any) -> None:
        """A function that the first run, without gradients, does not call."""
        if not isinstance(fn, types.FunctionType) or id(fn.__code__) in self.ran or _foreign(fn.__module__):
            return
        self.ran[id(fn.__code__)] = fn.__code__, fn.__globals__
        self.todo.append((fn.__name__, fn))
        self.of_code(fn.__code__, fn.__globals__)
        for first, *_ in _reads_of(fn.__code__).chains:
            self.also_runs(fn.__globals__.get(first))

    def of_code(self, code: types.CodeType, variables: dict[str, Any]) -> None:
        reads = _reads_of(code)
        for first, *rest in reads.chains:
            if first in code.co_freevars:
                continue  # of its function
            if first in variables or hasattr(builtins, first):
                self.variable("", variables, first, rest)
            elif first in sys.modules:  # imported where it is used
                self.chain(first, sys.modules[first], rest)
        self.name(reads.names)

    def of_function(self, label: str, fn: types.FunctionType) -> None:
        if id(fn.__code__) not in self.ran:
            return
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        # functions inside this one, which come and go, read its closure too
        inside = [code for code in _codes_in(fn.__code__) if id(code) in self.ran]
        for first, *rest in itertools.chain.from_iterable(_reads_of(code).chains for code in (fn.__code__, *inside)):
            if (cell := cells.get(first, _NO_VALUE)) != _NO_VALUE:
                self.cells.append((first, cell))
                self.chain(first, cell.cell_contents, rest)
        self.owners += [(label, fn, name) for name in ("__code__", "__defaults__", "__kwdefaults__") if getattr(fn, name)]
        self.todo += [(join_path(label, "default"), one) for one in (fn.__defaults__, fn.__kwdefaults__) if one]
        if vars(fn):
            self.whole.append((label, vars(fn)))
            self.todo.append((label, vars(fn)))

    def variable(self, label: str, variables: dict[str, Any], name: str, rest: Sequence[str]) -> None:
        """A variable of a file, and what is read of it."""
        foreign, value = label != "" and _foreign(variables.get("__name__")), variables.get(name)
        if not foreign or not isinstance(value, CONTAINERS):
            self.globals.setdefault(id(variables), Scope(label, variables, False, {})).named[name] = None
            if not foreign or isinstance(value, _FOLLOWED):
                self.chain(join_path(label, name), value, rest)

    def chain(self, label: str, value: Any, names: Sequence[str]) -> None:
        """Follow `value.name.name`."""
        if not isinstance(value, types.ModuleType):
            self.todo.append((label, value))
        elif names and names[0] in vars(value):
            self.variable(label, vars(value), names[0], names[1:])

    def of_object(self, label: str, value: Any) -> None:
        if (bits := bits_of(value)) is not None:
            self.arrays.append((value, bits))
            return
        kind, held = type(value), getattr(value, "__dict__", None)
        known = not _foreign(kind.__module__) or isinstance(value, _BAGS)
        left_out = getattr(kind, CACHES, ())
        slots = [name for one in kind.__mro__ for name in _slots(one) if name not in left_out]
        behind = [name for name in _BEHIND if not known and name not in left_out and (hasattr(kind, name) or name in (held or ()))]
        self.owners += [(label, value, name) for name in (*behind, *slots)]
        self.todo += [(label, getattr(value, name, None)) for name in (*behind, *slots)]
        if isinstance(value, weakref.ReferenceType):
            self.todo.append((label, value()))
        if known:
            self.typed.append((label, value))
            self.of_class(kind)
            if held is not None:
                self.sized.append(held)
                self.views.append(held.values())
                self.whole.append((label, held))
        if isinstance(value, _BAGS):
            self.todo += [(label, one) for one in (held or {}).values()]
        elif held is not None:
            self.scope(label, held, False)


def _slots(cls: type) -> Sequence[str]:
    found = vars(cls).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)


def _function_of(value: Any) -> Any:
    """The function of a method, property or static method of a class."""
    return getattr(value, "__func__", None) or getattr(value, "fget", None) or value


def _code_of(value: Any) -> Any:
    return getattr(_function_of(value), "__code__", None)


Ran = dict[int, tuple[types.CodeType, dict[str, Any]]]  # by their ids the codes that ran, and their globals
_PLAIN = frozenset(PLAIN)
_contents = operator.attrgetter("cell_contents")


class ReadByModule:
    """All that a module's forward reads beside its arguments. The values of its parameters are arguments."""

    def __init__(self, module: nn.Module, beside: frozenset[str] = frozenset()) -> None:
        """`beside`: attributes of the module, not of its parts, that its call reads but its forward does not."""
        self.module, self.number, self.ran, self.beside = module, 0, Ran(), beside
        self.constants: list[tuple[Tensor, Any]] = []  # tensors of whose values a trace made numbers, and their versions
        self._look()

    def values(self) -> int:
        """A number that is another one after a change."""
        if not self._same():
            before = self.frozen
            self._look()
            self.number += self.frozen != before  # not after an equal number was assigned
        if self.constants and any([version(t) != before for t, before in self.constants]):
            self.constants, self.number = [], self.number + 1
        return self.number

    @contextmanager
    def learning(self) -> Iterator[None]:
        """A block in which the module runs: what its functions read is looked at from then on."""
        ran, before, self.prints = Ran(), sys.getprofile(), False
        importing: types.FrameType | None = None  # the forward has no part in the import of a file

        def seen(frame: types.FrameType, event: str, arg: Any) -> None:
            nonlocal importing
            if importing is not None:
                importing = None if event == "return" and frame is importing else importing
            elif event == "call" and not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                importing = frame
            elif event == "call":
                ran[id(frame.f_code)] = frame.f_code, frame.f_globals
            elif arg is print and event == "c_call":
                self.prints = True

        sys.setprofile(seen)
        try:
            yield
        finally:
            sys.setprofile(before)
        self.values()
        ours = "<funcops "  # the code that this package makes has globals without a name
        own = {key: one for key, one in ran.items() if not one[0].co_filename.startswith(ours) and key not in self.ran}
        new = {key: one for key, one in own.items() if not _foreign(one[1].get("__name__"))}
        if new:
            self.ran |= new
            self._look()

    def mode(self) -> Any:
        """A part of the key of a trace, as of the last call of `values`: traces of several modes are kept side by side."""
        return tuple([part.training for part in self.parts]), tuple([p.requires_grad for p in self.params.values()])

    def names(self) -> dict[int, str]:
        """The names of the tensors that are read, by id."""
        return self.walk.tensors

    def changed(self, before: list[Any]) -> str:
        """The path of a value that has changed since `frozen` was `before`, or ""."""
        for now, then in ((self.frozen, {*before}), (before, {*self.frozen})):
            for path, value in now:
                if (path, value) not in then:
                    return str(path)
        return ""

    def restorer(self) -> Callable[[], None]:
        """A function that gives all parts the attributes, and their lists, dicts and sets the members, that they have now."""
        parts = [values for part in self.module.modules() for values in (vars(part), part._buffers, part._modules)]
        inside = _containers([one for values in parts for one in values.values()])
        before = [(one, one.copy()) for one in [*parts, *inside] if isinstance(one, (list, dict, set, collections.deque))]

        def restore() -> None:
            for one, was in before:
                one.clear()
                (one.extend if isinstance(one, (list, collections.deque)) else one.update)(was)

        return restore

    def _now(self) -> Iterator[Any]:
        gone = itertools.repeat(_GONE)
        return itertools.chain(
            itertools.chain.from_iterable(self.views),
            map(getattr, *self.attributes, gone),
            map(dict.get, *self.variables, gone),
            map(types.MappingProxyType.get, *self.of_classes, gone),
            map(_contents, self.cells),
            map(type, self.typed),
        )

    def _same(self) -> bool:
        if any(self.empty) or list(map(len, self.sized)) != self.sizes or not all(map(operator.is_, self._now(), self.live)):
            return False
        return all([bits_of(one) == before for one, before in self.walk.arrays])

    def _look(self) -> None:
        self.parts, self.params = list(self.module.modules()), dict(self.module.named_parameters())
        self.walk = walk = Walk(self.parts, self.ran, self.beside)
        self.cells, self.typed = [cell for _, cell in walk.cells], [one for _, one in walk.typed]
        self.attributes = [one for _, one, _ in walk.owners], [name for _, _, name in walk.owners]
        named = [(one, name) for one in (*walk.scopes, *walk.globals.values()) for name in one.named]
        for_dicts: list[tuple[Any, str]] = [(one.variables, name) for one, name in named if type(one.variables) is dict]
        for_classes = [(one.variables, name) for one, name in named if type(one.variables) is not dict]
        self.variables: tuple[list[Any], list[str]] = [one for one, _ in for_dicts], [name for _, name in for_dicts]
        self.of_classes: tuple[list[Any], list[str]] = [one for one, _ in for_classes], [name for _, name in for_classes]
        hiding = [vars(one) for one in walk.classes if one is Tensor or not one.__module__.startswith("torch.")]
        sized = [*walk.sized, *hiding]  # a new attribute of a class hides its base's
        # most are dicts of hooks without one, of which a call asks only whether they still have none
        self.empty, self.sized = [one for one in sized if not one], [one for one in sized if one]
        self.views = [one for one in walk.views if one]
        self.sizes, self.live = list(map(len, self.sized)), list(self._now())
        found = [(join_path(path, name), one) for path, held in walk.whole for name, one in held.items()]
        found += [(join_path(one.label, name), one.variables.get(name, _GONE)) for one, name in named]
        found += [(label, getattr(one, name, None)) for label, one, name in walk.owners]
        found += [(name, cell.cell_contents) for name, cell in walk.cells]
        self.frozen = [(path, by_identity(one)) for path, one in found]
        self.frozen += [(path, Same(type(one))) for path, one in walk.typed]
        first: dict[int, str] = {}  # a parameter is an argument, but two names of one are one argument
        tied = [(name, first.setdefault(id(p), name)) for name, p in self.module.named_parameters(remove_duplicate=False)]
        self.frozen += [(name, one) for name, one in tied if name != one]


def _containers(values: list[Any]) -> list[Any]:
    """The containers among these values, and those inside them, each once."""
    found: dict[int, Any] = {}
    todo = [one for one in values if isinstance(one, CONTAINERS)]
    while todo:
        one = todo.pop()
        if found.setdefault(id(one), one) is one:
            inner = one.values() if isinstance(one, dict) else one
            todo += [part for part in inner if isinstance(part, CONTAINERS) and id(part) not in found]
    return list(found.values())
