"""Marks: what a node of residuals or pending remembers of its tensors, to notice a write since,
and how that goes along with a tree.

A mark is a tensor's version, as torch counts writes to it and its views. A write that torch does not count, through `tensor.data`,
a NumPy array or a raw pointer, goes unnoticed here as it does in autograd. Nobody else here reads a version: nodes ask for
their marks by the source that `mark_source` writes, all others by `Versions`.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.errors import DonatedError, StaleResidualError, stale
from funcops.trees import FIELDS, Aside, leaves, paths, tensors

STALE = -1  # the mark of a copy of what was stale: no version is below 0


class Gone:
    """Stands where a donated leaf was; any use of it raises `DonatedError`. Only what Python asks of any object is answered."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and (name in _OF_ANY_OBJECT or not hasattr(Tensor, name)):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise DonatedError(f"{self._path} was given away with donate(): it must not be used again")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, Gone))._refuse()

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)

    def __repr__(self) -> str:
        return "donated"


_OF_ANY_OBJECT = {*dir(Gone), "__annotations__", "__dict__", "__weakref__"} - {
    "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__reduce__", "__reduce_ex__",
}  # fmt: skip
for _name in {name for kind in (Tensor, complex, float, int, list) for name in dir(kind) if name.startswith("__")} - _OF_ANY_OBJECT:
    if callable(getattr(Tensor, _name, len)):  # Python looks these up on the type
        setattr(Gone, _name, Gone._refuse)


_own: Callable[[Any], Any] = operator.attrgetter("_version")
_readers: dict[type, Callable[[Any], Any]] = {}  # by class of node


def versions(value: Any, read: Callable[[Any], Any] = _own) -> Any:
    """What `read` says of a tensor; of a small tree, a tuple of that for its tensors, in the tree's order."""
    kind = type(value)
    if read is _own and kind in _readers:
        return _readers[kind](value)
    if isinstance(value, Tensor):
        return read(value)
    if kind in FIELDS:
        return tuple([versions(getattr(value, name), read) for name in FIELDS[type(value)][0]])
    if type(value) is tuple:
        return tuple([versions(part, read) for part in value])
    return () if value is None else tuple([read(t) for t in tensors(value)])


def counts_writes(cls: type) -> type:
    """Class decorator of a node of which every field is a tensor, None, or such a node: it has a `_version`, as a tensor has, which
    is what `versions` says of it. Written out as source: every forward and backward asks."""
    reads = "".join([f"() if (t := n.{name}) is None else t._version, " for name in FIELDS[cls][0]])
    _readers[cls] = eval(f"lambda n: ({reads})")
    cls._version = property(_readers[cls])  # type: ignore[attr-defined]
    return cls


def version(t: Any) -> Any:
    """None for an inference tensor, which has none."""
    try:
        return t._version
    except RuntimeError:
        return None


def mark_source(tensor: str, tree: bool, name: str = "") -> str:
    """`versions` of an expression as source, where that is a tensor or None (a `tree`: anything): faster by a call. `name`: a local
    for what takes long to evaluate."""
    if tree:
        return f"versions({tensor})"
    return f"() if {f'({name} := {tensor})' if name else tensor} is None else {name or tensor}._version"


class Versions:
    """The tensors of a tree, which it holds, as they are when it is made: whoever writes to one is noticed since."""

    __slots__ = ("_marks", "_tensors", "_tree")

    def __init__(self, tree: Any, found: list[Tensor]) -> None:
        self._tree, self._tensors, self._marks = tree, found, [version(t) for t in found]

    @staticmethod
    def of(tree: Any) -> Versions:
        return Versions(tree, tensors(tree))

    def now(self) -> Versions:
        """The same tensors as they are now."""
        return Versions(self._tree, self._tensors)

    def written(self) -> list[Tensor]:
        """Those that were written to since."""
        return [t for t, mark in zip(self._tensors, self._marks, strict=True) if version(t) != mark]

    def check(
        self, where: str, what: str, by: str = "forward", hint: str = "", error: type[Exception] = StaleResidualError
    ) -> None:
        """Raise with the path of a tensor in `what`, which is the tree, if one was written to since."""
        found = self.written()
        if found:
            path = next(path for path, leaf in paths(self._tree).items() if leaf is found[0])
            stale(where, f"{what}.{path}" if path else what, by, hint, error=error)


def marks_of(node: Any) -> tuple[Any, ...] | None:
    """The marks of a node of which some tensors have no version; None where none has one."""
    found = tuple([versions(getattr(node, name), version) for name in node.guarded])
    return found if any([mark is not None for mark in _flat(found)]) else None


def post_init(self: Any, moved: Aside | None) -> None:
    """The end of a node's `__init__`; `moved` is of the node of which it is made."""
    compiling = torch.compiler.is_dynamo_compiling()
    self._marks = None if compiling else marks_of(self)
    if not compiling and moved is not None and moved.value is not None:
        moved.value.to(self)


def stale_path(node: Any) -> str | None:
    """The path of a leaf that was written to since it was marked."""
    for name, mark in zip(node.guarded, node._marks, strict=True):
        value = getattr(node, name)
        if mark != versions(value, version):
            found = [i for i, (t, before) in enumerate(_pairs(value, mark)) if before != version(t)]
            inside = [path for path, t in paths(value).items() if isinstance(t, Tensor)]
            path = inside[found[0]] if found else ""
            return f"{name}.{path}" if path else name
    return None


def _flat(mark: Any) -> list[Any]:
    return [one for part in mark for one in _flat(part)] if type(mark) is tuple else [mark]


def _pairs(value: Any, mark: Any) -> list[tuple[Tensor, Any]]:
    """The tensors of a field and their marks."""
    return list(zip(tensors(value), _flat(mark), strict=False))


def _holes(value: Any) -> int:
    """How many leaves are None."""
    return 0 if isinstance(value, Tensor) else sum([leaf is None for leaf in leaves(value)])


def _storage(t: Tensor) -> int | None:
    """What a tensor shares with its views, with the count of writes; None for a wrapper, which has none."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


class Missing(NamedTuple):
    """Stands for the marks of a node that lacks what its backward reads: the first such path, the marks that it would have, and how
    many leaves of each field the forward left out."""

    path: str
    marks: Any
    holes: dict[str, int]


class Moved(NamedTuple):
    """What a node hands to one that is made of its leaves, by a walk over a tree, `replace` or a copy: how its tensors were marked
    (by identity; none is kept alive), and how many leaves of each field were None.
    One that was given away has no leaves to walk over."""

    marks: list[tuple[Any, Any]]
    holes: dict[str, int]

    @staticmethod
    def of(node: Any) -> Aside:
        if torch.compiler.is_dynamo_compiling():
            return _NOTHING
        marks = node._marks
        if isinstance(marks, Gone):
            marks._refuse()
        holes = {name: _holes(getattr(node, name)) for name in node.fields}
        if type(marks) is Missing:
            marks, holes = marks.marks, marks.holes
        found = [] if marks is None else [p for n, m in zip(node.guarded, marks, strict=True) for p in _pairs(getattr(node, n), m)]
        return Aside(Moved([(weakref.ref(t), mark) for t, mark in found], holes))

    def to(self, node: Any) -> None:
        """Mark the new node: a tensor that is the very same, or a view of it, keeps its mark; any other is a value of its own,
        as it is now."""
        alive = [(t, mark) for ref, mark in self.marks if (t := ref()) is not None]
        known = {id(t): mark for t, mark in alive}
        views: dict[Any, Any] = {(storage, version(t)): mark for t, mark in alive if (storage := _storage(t)) is not None}

        def read(t: Any) -> Any:
            now = version(t)
            return known[id(t)] if id(t) in known else views.get((_storage(t), now), now)

        if known:
            node._marks = tuple([versions(getattr(node, name), read) for name in node.guarded])
        for name, before in self.holes.items():
            if _holes(getattr(node, name)) > before and node.fields[name].wanted(node.needs):
                path = next(p for p, value in paths(getattr(node, name)).items() if value is None)
                node._marks = Missing(f"{name}.{path}" if path else name, node._marks, self.holes)
                return


_NOTHING = Aside()
