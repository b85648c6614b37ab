"""The tensors that a backward reads, declared once: subclasses of `Residuals` and `Pending`, their fields, guards and donation.

A field's declaration is its documentation, its row in a report, and the rule by which it is dropped if no requested gradient needs
it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from typing_extensions import dataclass_transform

from funcops.engine.backend.source import compile_source
from funcops.engine.contract.fields import DGRAD as DGRAD
from funcops.engine.contract.fields import NESTED as NESTED
from funcops.engine.contract.fields import NO_GRADIENT as NO_GRADIENT
from funcops.engine.contract.fields import RECOMPUTE as RECOMPUTE
from funcops.engine.contract.fields import WGRAD as WGRAD
from funcops.engine.contract.fields import Field as Field
from funcops.engine.contract.fields import Inputs as Inputs
from funcops.engine.contract.fields import Phase as Phase
from funcops.engine.contract.fields import saved as saved
from funcops.engine.contract.marks import (
    IDLE,
    Gone,
    Moved,
    Unlike,
    announce,
    edited,
    heard,
    mark_of,
    mark_source,
    marks_of,
    post_init,
    stale_path,
    told,
    versions,
)
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.trace_safe_cache import equal, remember
from funcops.engine.errors import DonatedError, describe, differing_parts, fail, require, stale
from funcops.engine.trees import paths, register, register_node, show, static, tensors

__all__ = ["DGRAD", "NESTED", "NO_GRADIENT", "RECOMPUTE", "WGRAD", "Donated", "Field", "Inputs", "Pending", "Phase"]
__all__ += ["Residuals", "Saved", "open_node", "residuals", "saved", "static"]

T = TypeVar("T")


_CLONE = "Run the backward first, or put a clone in its place with funcops.trees.replace"
_STATICS = ("inputs", "shape", "dtype")


class Saved:
    """Base of residuals and pending. `cfg`, `needs` and, for a tuple-valued x, `inputs` are static fields.

    A node marks every guarded tensor with its version. The same tensor object keeps its mark wherever the tree is moved:
    mapped, rebuilt from its leaves, edited, copied, given away. A copy of a fresh tensor is a value of its own, fresh from then on;
    a copy of a stale one is stale, however it was made: by a map, deep, pickled, cast there and back. A tensor that `replace` or
    an assignment puts in a field is fresh. If a leaf is missing, or has another shape, dtype or device than the forward kept, the
    backward that would read it names it.
    Reading, copying, comparing or changing the leaves of a node that was given away raises `DonatedError`. Its `cfg`, `needs` and
    repr stay; a value assigned to one of its fields is never read.
    torch does not count writes through `tensor.data` or NumPy: only `funcops.checking` notices them.
    """

    __slots__ = ("_noted",)  # the facts that `funcops.checking`, while it is on, notes of the call that made the node
    fields: ClassVar[dict[str, Field]] = {}
    guarded: ClassVar[tuple[str, ...]] = ()
    kind: ClassVar[str]
    names: ClassVar[tuple[str, ...]]  # of all fields but cfg and needs
    marks_source: ClassVar[str]  # the source of the present marks of a node `n`, as the parts of a tuple
    cfg: Any
    needs: Needs
    shape: torch.Size  # for a tensor whose shape no saved tensor tells; see `static`
    dtype: torch.dtype
    inputs: Inputs
    fresh: Callable[[], bool]
    twin: Callable[[], Any]  # a node with the same leaves and marks
    empty: Callable[[], None]  # drops every leaf
    cell: Callable[[], Any]  # `Donated(self.give())` of a fresh node, written out; None of any other
    _marks: Any  # a tuple, by guarded field; None if nothing can be guarded; Gone; Unlike; IDLE

    unwatched: ClassVar[type]  # the same class, whose instances take any assignment: for writes of our own, which are many

    __post_init__ = post_init

    def __setattr__(self, name: str, value: Any) -> None:
        """An assignment to a field is an edit in place, as `replace` is one: the value is marked as fresh, its form is compared."""
        # Not the first value of a node that is being made, and not one that nobody will read.
        moved = Moved.of(self).value if name in self.fields and hasattr(self, name) and type(self._marks) is not Gone else None
        object.__setattr__(self, name, value)
        if moved is not None:
            self._marks = marks_of(self)
            moved.edited((name,)).to(self)

    if TYPE_CHECKING:  # written out for each class

        @classmethod
        def keep(cls: type[T], cfg: Any, needs: Needs, **fields: Any) -> T | None:
            """A node with the fields that `needs` requires; None if it requires none."""

    def nothing(self) -> Any:
        """The dx without any gradient: None, or a tuple of None like x."""
        inputs = getattr(self, "inputs", None)
        return None if inputs is None else inputs.nothing()

    def unused(self, where: str) -> None:
        """Raise `DonatedError` if this node was given away."""
        if isinstance(self._marks, Gone):
            raise DonatedError(f"{where}: {self.kind} must be unused, got {type(self).__name__} given away with donate()")

    def __eq__(self, other: object) -> bool:
        """Whether it is the same node."""
        self.unused("==")
        return self is other

    # a class that defines `__eq__` has no hash otherwise
    __hash__ = object.__hash__

    def give(self) -> Any:
        """Move all leaves into a new node and leave this one empty."""
        self.unused("give")
        node = self.twin()
        self.empty()
        return node

    def copy(self: T, **changes: Any) -> T:
        """A copy of this node, which must be fresh, with `changes`."""
        self.unused("copy")  # type: ignore[attr-defined]
        given = {name: getattr(self, name) for name in self.names}  # type: ignore[attr-defined]
        # `dropping(())`, as `keep` would leave out again what a program has filled in
        made: Any = self.keep(self.cfg, self.needs.dropping(()), **given | changes)  # type: ignore[attr-defined]
        made.needs = self.needs  # type: ignore[attr-defined]  # which may leave out what a program has filled in
        return made  # type: ignore[no-any-return]

    def set(self, **changes: Any) -> None:
        """Change fields in place. The new values are marked as fresh; the other fields keep their marks."""
        self.unused("set")
        for name, value in changes.items():
            # past our own `__setattr__`: these values need no comparison with the forward's
            object.__setattr__(self, name, value)
        marks = self._marks
        if type(own := marks.marks if type(marks) is Unlike else marks) is tuple:
            pairs = zip(self.guarded, own, strict=True)
            own = tuple([versions(changes[name], mark_of) if name in changes else mark for name, mark in pairs])
            object.__setattr__(self, "_marks", marks._replace(marks=own) if type(marks) is Unlike else own)

    def stale(self) -> str | None:
        """The path of a leaf that was written to since it was marked, or None."""
        self.unused("stale")
        return stale_path(self)

    def complain(self, where: str) -> None:
        """Raise the reason why this node is not fresh. An idle one, and one that was moved to another device as a whole, raise
        nothing: their backward only takes a longer way."""
        self.unused(where)
        if self._marks is IDLE:
            return
        path = self.stale()
        if path is None and type(self._marks) is Unlike:
            path, expected, got, error = self._marks[:4]
            return fail(where, f"{self.kind}.{path}", expected, got, error) if expected else None
        path = path or self.guarded[0]
        alias = self.fields[path.partition(".")[0]].alias or "an input"
        stale(where, f"{self.kind}.{path}", hint=_CLONE, aliases=alias)

    def __copy__(self) -> Any:
        self.unused("copy.copy")
        return self.twin()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _copied(type(self), *self._parts("copy.deepcopy", lambda value: copy.deepcopy(value, memo)))

    def __reduce__(self) -> Any:
        return _copied, (type(self), *self._parts("pickle", lambda value: value))

    def _parts(self, where: str, value_of: Callable[[Any], Any]) -> tuple[Any, ...]:
        """The arguments for a copy: its fields and statics, and the facts for its marks."""
        self.unused(where)
        given = {name: getattr(self, name) for name in (*self.names, "cfg", "needs")}
        return given | {name: value_of(given[name]) for name in self.fields}, *told(self)


def _copied(cls: Any, given: dict[str, Any], *said: Any) -> Any:
    made = cls(**given)
    heard(made, *said)
    return made


class Donated:
    """A one-shot cell: residuals, pending or a cache given away. The first call that takes it empties it. Nobody else holds the
    node in it, so its leaves are freed as that call lets go of them."""

    __slots__ = ("_kind", "_node")

    def __init__(self, node: Any) -> None:
        self._node, self._kind = node, type(node).__name__

    def take(self, where: str) -> Any:
        node = self._node
        if node is None:
            raise DonatedError(f"{where}: donated {self._kind} must be unused, got one that a call took already")
        self._node = None
        return node

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # tools that probe any object, as `copy` does, expect this error
            raise AttributeError(name)
        raise DonatedError(f"{name} of donated {self._kind} must not be used, got a use beside the one call that takes it")

    def _refuse(self, *_: Any) -> Any:
        remedy = "take its parts first, and donate each"
        raise DonatedError(f"a donated node must not be looked into, got a use beside the one call that takes it: {remedy}")

    __getitem__ = __iter__ = __len__ = __contains__ = __deepcopy__ = __reduce_ex__ = _refuse

    def __copy__(self) -> Any:
        return self  # a copy that could be taken for itself would be a second shot

    def __repr__(self) -> str:
        return "Donated(spent)" if self._node is None else f"Donated({self._node!r})"


_refuse: Any = Donated._refuse
register_node(Donated, _refuse, _refuse, _refuse, _refuse)  # a walk over a tree looks into it


class _Declared(type):
    """Makes a class body with declared fields a pytree node: a slotted dataclass with `keep`, `twin`, `empty`, `cell` and `fresh`
    written out for its fields. `static`: which of `shape`, `dtype` and `inputs` it has."""

    def __new__(mcls, name: str, bases: tuple[type, ...], body: dict[str, Any], static: tuple[str, ...] = ()) -> Any:
        made = super().__new__(mcls, name, bases, body)
        # the two bases, and the class that `dataclass(slots=True)` makes anew through here, are ready
        return made if "kind" in body or "__dataclass_fields__" in body else _node_class(made, static)


@dataclass_transform(field_specifiers=(saved, static))
class Residuals(Saved, metaclass=_Declared):
    """Base of residuals: exactly the tensors that a backward reads, a field each. Make one with `Cls.keep(cfg, needs, field=...)`.
    Raises `ValueError` for a field with a name that the methods which are written for the class use themselves, as `made`.

    class LinearResiduals(Residuals, static=("dtype",)):
        x: Tensor = saved("[*, I]", alias="x", needed_by=WGRAD)
    """

    __slots__ = ()
    kind = "residuals"


@dataclass_transform(field_specifiers=(saved, static))
class Pending(Saved, metaclass=_Declared):
    """Base of a weight gradient not yet computed. Make one with `Cls.keep(cfg, needs, field=...)`."""

    __slots__ = ()
    kind = "pending"


@dataclass_transform(field_specifiers=(saved, static))
def residuals(cls: type[T]) -> Any:
    """Class decorator: the same class as a subclass of `Residuals`."""
    return _declared(cls, Residuals)


@dataclass_transform(field_specifiers=(saved, static))
def pending(cls: type[T]) -> Any:
    """Class decorator: the same class as a subclass of `Pending`."""
    return _declared(cls, Pending)


def _declared(cls: Any, base: type) -> Any:
    if isinstance(cls, _Declared):
        return cls
    # these descriptors belong to the plain class, and do not fit objects of the new one
    body = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__")}
    return _Declared(cls.__name__, (base,), body)


def _node_class(cls: Any, statics: tuple[str, ...]) -> Any:
    wrong = [name for name in statics if name not in _STATICS]
    require(not wrong, cls.__name__, "static", f"names among {', '.join(_STATICS)}", ", ".join(map(repr, wrong)))
    own = {**cls.__dict__.get("__annotations__", {}), **dict.fromkeys((*statics, "cfg", "needs", "_marks"), Any)}
    cls.__annotations__ = own | {"_moved": dataclasses.InitVar[Any]}  # from `replace` or a rebuilt tree, see Moved
    cls._moved = dataclasses.field(default=None, kw_only=True)
    for name in statics:
        setattr(cls, name, static())
    cls.cfg, cls.needs = static(), static(Needs.ALL)
    cls._marks = dataclasses.field(default=None, init=False, metadata={"hidden": True})
    # no `eq`: fields are tensors, which are compared by element
    made: Any = dataclasses.dataclass(slots=True, eq=False, repr=False)(cls)
    made.__repr__ = show
    made.fields = {f.name: f.metadata["saved"] for f in dataclasses.fields(made) if "saved" in f.metadata}
    names = [f.name for f in dataclasses.fields(made) if f.init and f.name not in ("cfg", "needs")]
    made.names = tuple(names)
    made.guarded = tuple(n for n, f in made.fields.items() if f.alias or f.tree)
    # each field is a local of the written methods
    for name in [n for n in names if n in _OWN]:
        fail(f"{cls.__name__}.{name}", "its name", "one that the methods which are written for it leave free", repr(name))
    odd = [n for n, f in made.fields.items() if made.kind == "pending" and f.needed_by is not WGRAD]
    if odd:
        fail(f"{cls.__name__}.{odd[0]}", "needed_by", "WGRAD, as only wgrad reads a pending", made.fields[odd[0]].needed_by)
    # by `type`, as `_Declared` would make a node class of it; without slots, so that a node may change to it and back
    made.unwatched = type.__new__(_Declared, cls.__name__, (made,), {"__slots__": (), "__setattr__": object.__setattr__})
    for name, method in _write_methods(made).items():
        setattr(made, name, method)
    # for programs, which write the test of a node's marks into their source
    made.marks_source = "".join([mark_source(f"n.{n}", made.fields[n].tree, "t") + ", " for n in made.guarded])
    # a flatten reads `_moved` off a node, and the rebuild passes it to `__init__`
    made._moved, made.__replace__ = property(Moved.of), edited
    register(made, aside="_moved")
    announce(made)
    return made


_OWN = frozenset(  # the names that the methods below use themselves
    "self cls compiling drop marks made given is_compiling ALL new unwatched unwanted dropped versions marks_of IDLE put Donated "
    "all_gone object type len tuple AttributeError RuntimeError".split()
)
_SOURCE = """
def keep(cfg, needs{parameters}):
    compiling = is_compiling()
    if needs is ALL:
        {plain}
    else:
        drop = dropped[needs] if not compiling and needs in dropped else unwanted(cls, needs, None if compiling else dropped)
        if drop is None:
            return None
        {drops}
        if len(drop) >= {idle} and not needs.x and not needs.recompute:
            self = object.__new__(cls) if compiling else new(unwatched)
            {assigns}
            self.cfg = cfg
            self.needs = needs
            self._marks = IDLE
            if not compiling:
                self.__class__ = cls
            return self
    self = object.__new__(cls) if compiling else new(unwatched)
    {assigns}
    self.cfg = cfg
    self.needs = needs
    if compiling:
        self._marks = None
        return self
    try:
        self._marks = ({marks})
    except (AttributeError, RuntimeError):
        self._marks = marks_of(self)
    self.__class__ = cls
    return self

def twin(self):
    compiling = is_compiling()
    made = object.__new__(cls) if compiling else new(unwatched)
    {copies}
    made.cfg = self.cfg
    made.needs = self.needs
    made._marks = self._marks
    if not compiling:
        made.__class__ = cls
    return made

def empty(self):
    if is_compiling():  # a tracer sees each use; at run time nothing could warn
        {nones}
        return
    put(self, "__class__", unwatched)  # whose assignments are not compared, and cost less
    {gone}
    self._marks = all_gone
    self.__class__ = cls

def cell(self):
    if is_compiling():
        return None
    marks = self._marks
    try:
        if marks is not None and not (type(marks) is tuple and marks == ({own_marks})):
            return None
    except (AttributeError, RuntimeError):
        return None
    made = new(unwatched)
    {copies}
    made.cfg = self.cfg
    made.needs = self.needs
    made._marks = marks
    made.__class__ = cls
    put(self, "__class__", unwatched)
    {gone}
    self._marks = all_gone
    self.__class__ = cls
    given = new(Donated)
    given._node = made
    given._kind = kind
    return given

def fresh(self):
    marks = self._marks
    if type(marks) is not tuple:
        return marks is None
    if is_compiling():
        return True
    try:
        {reads}
        return marks == ({marks})
    except (AttributeError, RuntimeError):
        return marks == marks_of(self)
"""


def _write_methods(cls: Any) -> dict[str, Any]:
    """`keep`, `twin`, `empty`, `cell` and `fresh`, written out as source, as dataclasses do: they run in every forward and
    backward.

    A leaf has no mark while compiling, if it is an inference tensor, or if it is not a tensor. `keep` returns a node with
    the fields that `needs` requires, or None.
    """

    def lines(form: str, of: Iterable[str]) -> str:
        return "; ".join(form.format(n=n) for n in of) or "pass"

    names = cls.names
    source = _SOURCE.format(
        parameters="".join(f", {n}=None" for n in names),
        # under ALL a field is left out only if nothing but a recomputation reads it
        plain=lines("{n} = None", [n for n, field in cls.fields.items() if not field.wanted(Needs.ALL)]),
        drops="\n        ".join(f"if {n!r} in drop: {n} = None" for n in names) or "pass",
        # for a pending a number that it never reaches: only residuals are idle
        idle=len(cls.fields) if cls.kind == "residuals" else len(names) + 1,
        assigns=lines("self.{n} = {n}", names),
        copies=lines("made.{n} = self.{n}", names),
        reads=lines("{n} = self.{n}", cls.guarded),
        own_marks="".join([mark_source(f"self.{n}", cls.fields[n].tree) + ", " for n in cls.guarded]),
        nones=lines("put(self, {n!r}, None)", cls.fields),
        gone=lines("self.{n} = gone_{n}", cls.fields),
        marks="".join([mark_source(n, cls.fields[n].tree) + ", " for n in cls.guarded]),
    )
    scope: dict[str, Any] = dict(is_compiling=torch.compiler.is_dynamo_compiling, ALL=Needs.ALL, new=object.__new__, cls=cls)
    scope.update(unwatched=cls.unwatched, unwanted=_unwanted, dropped={}, versions=versions, marks_of=marks_of, IDLE=IDLE)
    scope.update(put=object.__setattr__, Donated=Donated, kind=cls.__name__)
    scope.update({f"gone_{n}": Gone(f"{cls.__name__}.{n}") for n in cls.fields}, all_gone=Gone(cls.__name__))
    compile_source(f"methods of {cls.__name__}", source, scope)
    scope["keep"].__qualname__ = f"{cls.__name__}.keep"  # which Python names in the error for an unknown field
    return {"keep": staticmethod(scope["keep"])} | {name: scope[name] for name in ("twin", "empty", "cell", "fresh")}


def _unwanted(cls: Any, needs: Needs, memo: dict[Needs, Any] | None) -> tuple[str, ...] | None:
    """The fields that `needs` does not require; None if it requires none at all. A tracer has no memo, as it would guard on all of
    the memo's entries."""
    # a pending serves weight gradients alone
    asked = needs.params if cls.kind == "pending" else needs
    found = tuple(n for n, field in cls.fields.items() if n in needs.drop or not field.wanted(needs)) if asked else None
    return found if memo is None else remember(memo, needs, found)


def open_node(where: str, node: Any, cls: Any, cfg: Any, phase: Phase | None = None, dy: Any = None) -> Any:
    """Check the class, config, staleness and donation of residuals or a pending, that they hold what `phase` reads, and that
    residuals which were moved are where dy is; return the node."""
    if type(node) is Donated:
        node = node.take(where)
    if type(node) is not cls:
        got = f"{node.kind} {type(node).__name__}" if isinstance(node, Saved) else describe(node)
        hint = " (a forward with needs=Needs.NONE keeps nothing)" if node is None else ""
        if getattr(node, "kind", None) == cls.kind:  # with_policy and remat return an op with a class of its own
            hint = ": call the backward of the op that ran the forward"
        fail(where, cls.kind, f"{cls.__name__} or donate() of it", got + hint, TypeError)
    if not node.fresh():
        node.complain(where)
        # `complain` lets a node pass that was moved as a whole
        if dy is not None and type(node._marks) is Unlike:
            _check_moved(where, node, dy)
    if node.cfg is not cfg and not equal(node.cfg, cfg):
        expected, got = differing_parts(node.cfg, cfg)
        fail(where, "cfg", f"the config of the forward, {expected}", got)
    # without a phase the caller completes the node itself, as remat and packing do
    if phase is not None and node.needs.drop:
        _check_whole(where, node, phase)
    return node


def _check_moved(where: str, node: Any, dy: Any) -> None:
    """Raise `ValueError` unless dy is on the device to which all of `node` was moved. Every tensor counts: a chain may have
    filled in one that it recomputed on the other device."""
    for path, t, given in [(path, t, given) for path, t in paths(node).items() for given in tensors(dy)]:
        if isinstance(t, torch.Tensor) and t.device != given.device:
            fail(where, f"{node.kind}.{path}", f"on device {given.device}, as dy is", f"one on {t.device}: move both to one device")


def _check_whole(where: str, node: Any, phase: Phase) -> None:
    """Raise `ValueError` if `node` lacks a field that `phase` reads and that the chain which made the node recomputes."""
    needs, fields = node.needs, node.fields
    for name in needs.drop:
        field = fields.get(name)
        if field and field.needed_by & phase and getattr(node, name) is None and field.wanted(needs):
            outer = "chain.wgrad on its whole pending" if node.kind == "pending" else "chain.bwd on its whole residuals"
            remedy = f"run {outer}, or make the chain with recompute=False, so that each part has all that it reads"
            fail(where, f"{node.kind}.{name}", "a tensor", f"None, as the chain of this step recomputes it: {remedy}")
