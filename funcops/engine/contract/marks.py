"""Marks: what a node of residuals or pending remembers about its tensors, to notice a later write,
and how marks travel with a tree. A tensor's mark is its version (`funcops.engine.contract.versions`).
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.contract.versions import SAMPLE as SAMPLE
from funcops.engine.contract.versions import Sampled as Sampled
from funcops.engine.contract.versions import Versions as Versions
from funcops.engine.contract.versions import counts_writes as counts_writes
from funcops.engine.contract.versions import mark_of as mark_of
from funcops.engine.contract.versions import mark_source as mark_source
from funcops.engine.contract.versions import version as version
from funcops.engine.contract.versions import versions as versions
from funcops.engine.errors import DonatedError, describe, join_path, short
from funcops.engine.trees import FIELDS, Aside, leaves, paths, tensors

__all__ = ["STAND_INS", "Gone", "Versions", "counts_writes", "mark_of", "version"]

STALE = -1  # the mark of a copy of a stale tensor: no version is below 0
IDLE = False  # in place of marks, in residuals without saved fields that need no gradient of x


class Gone:
    """Takes the place of a donated leaf; any use of it raises `DonatedError`, except what Python asks of any object."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        # Python and its tools probe any object for such names, and expect this error
        if name.startswith("__") and (name in _OF_ANY_OBJECT or not hasattr(Tensor, name)):
            raise AttributeError(name)
        self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise DonatedError(f"{self._path} was given away with donate(): it must not be used again")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # the leaf may be in a list, as in an argument of `torch.cat`
        next(arg for arg in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(arg, Gone))._refuse()

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)

    def __repr__(self) -> str:
        return "donated"


# comparing and pickling are uses of the values, though any object has these methods
_OF_ANY_OBJECT = {*dir(Gone), "__annotations__", "__dict__", "__weakref__"} - {
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__reduce__",
    "__reduce_ex__",
}
# numbers and lists have methods that a tensor lacks, and Python's functions look for them, too
for _name in {name for kind in (Tensor, complex, float, int, list) for name in dir(kind) if name.startswith("__")} - _OF_ANY_OBJECT:
    if callable(getattr(Tensor, _name, len)):  # Python looks these up on the type
        setattr(Gone, _name, Gone._refuse)


NODES: weakref.WeakSet[Any] = weakref.WeakSet()  # every class of residuals and pendings
on_new: list[Callable[[Any], None]] = []  # called with each class that is made later


def announce(cls: Any) -> None:
    """Make a class of nodes known."""
    NODES.add(cls)
    for each in on_new:
        each(cls)


def marks_of(node: Any) -> Any:
    """The marks of a node, some of whose tensors may have no version; None if no tensor has one, IDLE if residuals hold nothing and
    need no gradient of x."""
    found = tuple([versions(getattr(node, name), mark_of) for name in node.guarded])
    # inference tensors have no version
    if any([mark is not None for mark in _flat(found)]):
        return found
    idle = node.kind == "residuals" and not node.needs.x and not node.needs.recompute
    return IDLE if idle and all([getattr(node, name) is None for name in node.fields]) else None


def post_init(self: Any, moved: Aside | None) -> None:
    """The end of a node's `__init__`; `moved` comes from the node from which this one is made."""
    compiling = torch.compiler.is_dynamo_compiling()
    self._marks = None if compiling else marks_of(self)
    if not compiling and moved is not None and moved.value is not None:
        moved.value.to(self)


def stale_path(node: Any) -> str | None:
    """The path of a leaf that was written to since it was marked, or None."""
    marks = node._marks.marks if type(node._marks) is Unlike else node._marks
    for name, mark in zip(node.guarded, marks, strict=True) if type(marks) is tuple else ():
        value = getattr(node, name)
        if mark != versions(value, version):
            found = [i for i, (t, before) in enumerate(_pairs(value, mark)) if before != version(t)]
            inside = [path for path, t in paths(value).items() if isinstance(t, Tensor)]
            # no tensor was written to, but the tree now has others, or another number of them
            path = inside[found[0]] if found else ""
            return join_path(name, path)
    return None


def _flat(mark: Any) -> list[Any]:
    return [one for part in mark for one in _flat(part)] if type(mark) is tuple else [mark]


def _pairs(value: Any, mark: Any) -> list[tuple[Tensor, Any]]:
    """The tensors of a field and their marks."""
    return list(zip(tensors(value), _flat(mark), strict=False))


def _holes(value: Any) -> int:
    """The number of leaves that are None."""
    return 0 if isinstance(value, Tensor) else sum([leaf is None for leaf in leaves(value)])


def _storage(t: Tensor) -> int | None:
    """The address of the storage that a tensor shares with its views; None for a wrapper, which has none."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


class Form(NamedTuple):
    """The form that a backward expects of a saved tensor, or of a node that stands for one in fewer bits, which has `parts`. A part
    other than a tensor has its type in place of a dtype."""

    dtype: Any
    shape: Any
    device: torch.device | None
    parts: tuple[Form, ...] = ()

    @staticmethod
    def of(t: Any) -> Form:
        if isinstance(t, Tensor):
            return Form(t.dtype, t.shape, t.device)
        parts = [] if _stood_in(t) else [part for part in leaves(t) if part is not None]  # parts that are away have no form
        known = [Form.of(part) if isinstance(part, Tensor) else Form(type(part), (), None) for part in parts]
        return Form(t.dtype, t.shape, t.device, tuple(known))

    def fits(self, other: Form) -> bool:
        """Whether `other` can take its place. A size that a tracer left open fits any: a comparison would fix it. A tensor fits a
        node that stands for it."""
        if other.dtype is not self.dtype or other.device != self.device or len(other.shape) != len(self.shape):
            return False
        if any([type(a) is type(b) is int and a != b for a, b in zip(self.shape, other.shape, strict=True)]):
            return False
        if not self.parts or not other.parts:
            return True
        return len(self.parts) == len(other.parts) and all([a.fits(b) for a, b in zip(self.parts, other.parts, strict=True)])

    def at(self, device: torch.device | None) -> Form:
        """The same form on another device."""
        return Form(self.dtype, self.shape, device, tuple([part._replace(device=device) for part in self.parts]))

    def said(self, other: Form) -> str:
        """This form as text, to be shown beside `other`: with the device if it differs, or its first part that does not fit."""
        if self[:3] == other[:3] and self.parts:
            unlike = [a.said(b) for a, b in zip(self.parts, other.parts, strict=False) if not a.fits(b)]
            return unlike[0] if unlike else f"{len(self.parts)} parts"
        if not isinstance(self.dtype, torch.dtype):
            return str(self.dtype.__name__)
        return f"{short(self.dtype)}{list(self.shape)}{f' on {self.device}' if self.device != other.device else ''}"


def _stands_for_a_tensor(node: Any) -> bool:
    kind = type(node)
    return kind in FIELDS and hasattr(kind, "shape") and hasattr(kind, "dtype") and hasattr(kind, "device")


def _kept(value: Any) -> dict[str, Any]:
    """The leaves of a field that are not None, by path; a node that stands for a tensor is one leaf."""
    if isinstance(value, Tensor):
        return {"": value}
    return {} if value is None else {p: v for p, v in paths(value, is_leaf=_stands_for_a_tensor).items() if v is not None}


def _form(leaf: Any) -> Form | None:
    try:
        return Form.of(leaf) if isinstance(leaf, Tensor) or _stands_for_a_tensor(leaf) else None
    except AttributeError:  # a node that stands for a tensor but lacks its codes
        return None


STAND_INS: set[type] = set()  # classes of what takes a leaf's place for a while, until the leaf is put back before a backward


def _stood_in(leaf: Any) -> bool:
    """Whether something has the place of the leaf, or of a part of a node that stands for a tensor."""
    return not isinstance(leaf, Tensor) and any([type(part) in STAND_INS for part in leaves(leaf)])


class Unlike(NamedTuple):
    """Takes the place of a node's marks if a leaf has not the form that the forward gave it: the error that its backward raises,
    the marks that it would have, and what is known of the node before. The error is empty if all leaves were moved together."""

    path: str
    expected: str
    got: str
    error: type[Exception]
    marks: Any
    before: Moved


_BACK = "Put back what the forward kept, with funcops.trees.replace, or run the forward again"
_RECOMPUTED = (
    "None, because the chain recomputes it in the backward from what",
    "Keep it, with Save() for it in a policy or the policy 'save_all', or edit the residual from which it is recomputed",
)


class Known(NamedTuple):
    """A tensor (held weakly), its mark, and whether it had been written to when its node was walked over."""

    ref: Any
    mark: Any
    stale: bool

    @staticmethod
    def of(t: Tensor, mark: Any) -> Known:
        return Known(weakref.ref(t), mark, bool(version(t) != mark))

    def written(self) -> bool:
        """Whether it was written to; for a tensor that is gone, before the walk."""
        return self.stale or ((t := self.ref()) is not None and bool(version(t) != self.mark))


class Moved(NamedTuple):
    """The facts that a node passes to one made from its leaves, by a walk over a tree, `replace`, an assignment or a copy: by
    field, what is known of its guarded tensors, and, as the forward left them, the forms of leaves and the number of leaves that
    are None. `others`: tensors that an edit replaced, which keep their marks if they come back. No tensor is kept alive.
    A node that was given away has no leaves to walk over."""

    known: dict[str, list[Known]]
    forms: dict[str, list[Form | None]]
    holes: dict[str, int]
    others: tuple[Known, ...] = ()

    @staticmethod
    def of(node: Any) -> Aside:
        # a traced node has no marks to hand on
        if torch.compiler.is_dynamo_compiling():
            return _NOTHING
        marks = node._marks
        if isinstance(marks, Gone):
            marks._refuse()
        forms: dict[str, list[Form | None]] = {}
        holes: dict[str, int] = {}
        others: tuple[Known, ...] = ()
        # the forms of the forward, not of an edit: however many edits follow, each is compared with the forward
        if type(marks) is Unlike:
            before, marks = marks.before, marks.marks
            forms, holes = before.forms, before.holes
            others = (*before.others, *[one for own in before.known.values() for one in own])
        else:
            for name in node.fields:
                value = getattr(node, name)
                # the usual field, without a walk: every flatten of a node comes here
                if type(value) is Tensor:
                    forms[name], holes[name] = [Form(value.dtype, value.shape, value.device)], 0
                else:
                    forms[name], holes[name] = [_form(leaf) for leaf in _kept(value).values()], _holes(value)
        known = {
            name: [Known.of(*pair) for pair in _pairs(getattr(node, name), mark)]
            for name, mark in zip(node.guarded, marks or (), strict=False)
        }
        return Aside(Moved(known, forms, holes, others))

    def edited(self, names: Iterable[str]) -> Moved:
        """The facts for a node with other values in these fields: a tensor that is not made from the ones there before is fresh."""
        gone = [one for name in names for one in self.known.get(name, ())]
        known = {name: [] if name in names else own for name, own in self.known.items()}
        return self._replace(known=known, others=(*self.others, *gone))

    def to(self, node: Any) -> None:
        """Mark the new node. The very same tensor, or a view of it, keeps its mark. Any other was copied, or made in another way,
        from the tensor in its place: it is stale if that is stale, otherwise fresh as it is now."""
        every = [*self.others, *[one for own in self.known.values() for one in own]]
        alive = [(t, one.mark) for one in every if (t := one.ref()) is not None]
        same = {id(t): mark for t, mark in alive}
        views: dict[Any, Any] = {}

        def of_a_view(t: Any, otherwise: Any) -> Any:
            # collected for the first leaf that is another: most walks move the tensors themselves
            if not views:
                views.update({(storage, version(one)): mark for one, mark in alive if (storage := _storage(one)) is not None})
            return views.get((_storage(t), version(t)), otherwise)

        def marks(name: str) -> Any:
            value, sources = getattr(node, name), self.known.get(name, [])
            stale = [one.written() for one in sources]
            if len(sources) != len(tensors(value)):  # taken apart, or packed: places do not correspond
                turn = itertools.repeat(any(stale))
            else:
                turn = iter(stale)  # type: ignore[assignment]

            def read(t: Any) -> Any:
                copied = next(turn)
                return same[id(t)] if id(t) in same else of_a_view(t, STALE if copied else mark_of(t))

            return versions(value, read)

        # else no tensor had a version, and `post_init` has marked what is in the node now
        if any([one.mark is not None for one in every]):
            found = tuple([marks(name) for name in node.guarded])
            node._marks = found if any([mark is not None for mark in _flat(found)]) else None
        self._compare(node)

    def _compare(self, node: Any) -> None:
        """Note the first leaf that is missing, or has not the form that the forward gave it. All leaves of a node may be moved to
        another device together: its backward then runs there. A cast is never right: the backward also knows the
        dtypes of x and dy, which are not among the leaves."""
        # most nodes only moved: they need no list of their leaves
        if all([_as_before(getattr(node, name), forms) for name, forms in self.forms.items()]):
            return
        rows: list[tuple[str, Form, Any]] = []
        found: tuple[str, str, str, type[Exception]] | None = None
        for name, forms in self.forms.items():
            value, field = getattr(node, name), node.fields[name]
            if field.wanted(node.needs) and _holes(value) > self.holes[name]:
                path = join_path(name, next(p for p, leaf in paths(value).items() if leaf is None))
                found = path, f"a tensor ({field.shape}), as the forward kept it", "None", TypeError
                break
            kept = _kept(value)
            dropped = not kept and _holes(value)  # a field that no requested gradient needs
            # a field that a program recomputes is overwritten: a value in it would be ignored in silence
            if (forms or name in node.needs.drop) and len(kept) != len(forms) and not dropped:
                one = f"{forms[0].said(forms[0])}, as" if len(forms) == 1 and forms[0] else f"{len(forms)} leaves, as"
                # a stand-in describes itself, and so does what fills an empty field
                got = next((describe(leaf) for leaf in kept.values() if not forms or _form(leaf) is None), f"{len(kept)} leaves")
                wanted, remedy = (one, _BACK) if forms else _RECOMPUTED
                found = name, f"{wanted} the forward kept", f"{got}. {remedy}", TypeError if forms else ValueError
                break
            pairs = [(path, form, leaf) for (path, leaf), form in zip(kept.items(), forms, strict=False)]
            rows += [(join_path(name, path), form, leaf) for path, form, leaf in pairs if form and not _stood_in(leaf)]
        found = found or _unlike(rows)
        if found or any([got is not None and not form.fits(got) for _, form, leaf in rows for got in [_form(leaf)]]):
            node._marks = Unlike(*(found or ("", "", "", TypeError)), node._marks, self)


def _as_before(value: Any, forms: list[Form | None]) -> bool:
    """Whether a field has the form that it had, as far as a quick look tells."""
    if type(value) is not Tensor or len(forms) != 1 or (form := forms[0]) is None:
        return value is None and not forms
    return value.dtype is form.dtype and value.shape == form.shape and value.device == form.device


def _unlike(rows: list[tuple[str, Form, Any]]) -> tuple[str, str, str, type[Exception]] | None:
    """The path of the first leaf without its form, what it must be, what it is, and the error to raise; else None."""
    # all on one device: the node was moved as a whole, so devices are not compared
    moved = len({got.device for _, _, leaf in rows if (got := _form(leaf))}) == 1
    for path, form, leaf in rows:
        got = _form(leaf)
        wanted = form.at(got.device) if got is not None and moved else form
        if got is None or not wanted.fits(got):
            error = TypeError if got is None or got.dtype is not form.dtype else ValueError
            odd = [part for part in (*leaves(leaf), leaf) if part is not None and not isinstance(part, Tensor)]
            expected, said = (
                (form.said(form), describe(odd[0] if odd else leaf)) if got is None else (form.said(got), got.said(form))
            )
            return path, f"{expected}, as the forward kept it", f"{said}. {_BACK}", error
    return None


def edited(node: Any, **changes: Any) -> Any:
    """`replace` of a node: a node with other values in some fields, which count as fresh, not as copies of the old values."""
    moved = Moved.of(node)
    # while a compiler traces, no facts exist
    if moved.value is not None:
        moved = Aside(moved.value.edited(changes))
    return dataclasses.replace(node, **{"_moved": moved, **changes})


def told(node: Any) -> tuple[Any, ...]:
    """The facts that a deep copy or a pickle of a node needs: which fields are stale, and which leaf has not its form."""
    unlike = node._marks if type(node._marks) is Unlike else None
    marks = unlike.marks if unlike else node._marks
    now = [versions(getattr(node, name), version) for name in node.guarded]
    stale = [name for name, mark, new in zip(node.guarded, marks or (), now, strict=False) if mark != new]
    # nothing about tensors: a copy has others, and weak references cannot be pickled
    return stale, unlike and (*unlike[:4], Moved({}, unlike.before.forms, unlike.before.holes))


def heard(node: Any, stale: list[str], unlike: Any) -> None:
    """Mark a copy with the facts of `told`."""
    if stale:
        every = zip(node.guarded, node._marks or (None,) * len(node.guarded), strict=True)
        node._marks = tuple([versions(getattr(node, n), lambda _: STALE) if n in stale else mark for n, mark in every])
    if unlike is not None:
        path, expected, got, error, before = unlike
        node._marks = Unlike(path, expected, got, error, node._marks, before)


_NOTHING = Aside()
