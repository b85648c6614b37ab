"""What a backward keeps, declared once: `@residuals` and `@pending` classes, their fields, guards and donation.

A field's declaration is its documentation, its row in a report and the rule by which it is dropped when the gradients
that need it are not wanted.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from typing_extensions import dataclass_transform

from funcops.errors import DonatedError, StaleResidualError, describe, fail
from funcops.needs import Needs
from funcops.trees import register, show, static

T = TypeVar("T")


class Phase(enum.Flag):
    """The halves of a backward."""

    DGRAD = enum.auto()
    WGRAD = enum.auto()


DGRAD, WGRAD = Phase.DGRAD, Phase.WGRAD


class Field(NamedTuple):
    """One kept tensor. `of` lists the gradients that need it (`"x"`, `"x.0"`, `"params.weight"`)."""

    shape: str
    alias: str | None
    needed_by: Phase
    of: tuple[str, ...]
    recompute_from: tuple[str, ...]

    def wanted(self, needs: Needs) -> bool:
        sides = {"x": (needs.x, needs.input), "params": (needs.params, needs.param)}
        for gradient in self.of:
            side, _, path = gradient.partition(".")
            whole, part = sides[side]
            if part(path) if path else whole:
                return True
        return False


def saved(
    shape: str,
    *,
    needed_by: Phase,
    alias: str | None = None,
    of: tuple[str, ...] = (),
    recompute_from: tuple[str, ...] = (),
) -> Any:
    """A kept tensor: its shape, the phase that reads it, what it aliases (`"x"`, `"params.weight"`), and from which
    other fields it could be recomputed. It is dropped when none of the gradients `of` is needed; `of` follows from
    `needed_by` (dgrad: x, wgrad: params) where it is not given."""
    sides = (("x",) if DGRAD in needed_by else ()) + (("params",) if WGRAD in needed_by else ())
    field = Field(shape, alias, needed_by, of or sides, recompute_from)
    return dataclasses.field(default=None, metadata={"saved": field})


class Inputs(NamedTuple):
    """The shape of a tuple-valued x, so that dx mirrors it: a plain tuple or a named tuple."""

    make: Callable[[Any], Any]
    parts: int

    @staticmethod
    def of(x: tuple[Any, ...]) -> Inputs:
        if type(x) is tuple and len(x) < len(_PLAIN):
            return _PLAIN[len(x)]
        return Inputs(getattr(type(x), "_make", tuple), len(x))

    def nothing(self) -> Any:
        return self.make((None,) * self.parts)


_PLAIN = tuple(Inputs(tuple, n) for n in range(5))


class Gone:
    """Stands where a donated leaf was; any use of it raises `DonatedError`."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise DonatedError(f"{self._path} was given away with donate(): it must not be used again")

    def __repr__(self) -> str:
        return "donated"


class Saved:
    """Base of residuals and pending. `cfg`, `needs` and, for a tuple-valued x, `inputs` are static fields."""

    __slots__ = ()
    fields: ClassVar[dict[str, Field]] = {}
    kind: ClassVar[str]
    names: ClassVar[tuple[str, ...]]  # of all fields but cfg and needs
    cfg: Any
    needs: Needs
    fresh: Callable[[], bool]
    _marks: Any
    _marks_now: Callable[[], tuple[Any, ...]]

    def nothing(self) -> Any:
        """dx where there is no gradient at all."""
        inputs = getattr(self, "inputs", None)
        return None if inputs is None else inputs.nothing()

    def give(self: T) -> T:
        """Move all leaves into a new node and leave this one empty."""
        node: Any = dataclasses.replace(self)  # type: ignore[type-var]
        node._marks = self._marks  # type: ignore[attr-defined]
        self.empty()  # type: ignore[attr-defined]
        return node

    def copy(self: T, **changes: Any) -> T:
        """A node like this one but for `changes`, marked anew."""
        given = {name: getattr(self, name) for name in self.names}  # type: ignore[attr-defined]
        made: T = self.keep(self.cfg, self.needs, **given | changes)  # type: ignore[attr-defined]
        return made

    def empty(self) -> None:
        """Drop every leaf."""
        if torch.compiler.is_dynamo_compiling():  # a tracer sees each use; there is nobody to warn at run time
            for name in self.fields:
                setattr(self, name, None)
            return
        where = type(self).__name__
        for name in self.fields:
            setattr(self, name, Gone(f"{where}.{name}"))
        self._marks = Gone(where)

    def complain(self, where: str) -> None:
        """Say why this node is not fresh."""
        if isinstance(self._marks, Gone):
            raise DonatedError(f"{where}: {self.kind} must be unused, got {type(self).__name__} given away with donate()")
        now = self._marks_now()
        aliases = [name for name, field in self.fields.items() if field.alias]
        for i, name in enumerate(aliases):
            if self._marks[i] != now[i]:
                raise StaleResidualError(
                    f"{where}: {self.kind}.{name} must be as the forward left it, got a tensor that was written to "
                    f"since (it aliases {self.fields[name].alias}). Run the backward first, keep a clone, or "
                    "edit with funcops.trees.replace"
                )


class Donated:
    """A one-shot cell: residuals or pending given away. The first backward that takes it empties it."""

    __slots__ = ("_node",)

    def __init__(self, node: Any) -> None:
        self._node = node

    def take(self, where: str) -> Any:
        if self._node is None:
            raise DonatedError(f"{where}: donated residuals must be unused, got ones that a backward took already")
        node, self._node = self._node, None
        return node

    def __repr__(self) -> str:
        return "Donated(spent)" if self._node is None else f"Donated({self._node!r})"


@dataclass_transform(field_specifiers=(saved, static))
def residuals(cls: type[T]) -> Any:
    """Class decorator: exactly what a backward reads. Make one with `Cls.keep(cfg, needs, field=...)`."""
    return _saved_class(cls, "residuals")


@dataclass_transform(field_specifiers=(saved, static))
def pending(cls: type[T]) -> Any:
    """Class decorator: a weight gradient not yet computed. Make one with `Cls.keep(cfg, needs, field=...)`."""
    return _saved_class(cls, "pending")


def derive_pending(name: str, residuals_class: Any, dy: str) -> Any:
    """The usual pending: the residual fields that wgrad reads, and dy of the given shape."""
    body: dict[str, Any] = {"__annotations__": {}, "__module__": residuals_class.__module__}
    for field_name, field in residuals_class.fields.items():
        if WGRAD in field.needed_by:
            body["__annotations__"][field_name] = torch.Tensor
            of = tuple(g for g in field.of if g.startswith("params"))
            body[field_name] = saved(field.shape, alias=f"residuals.{field_name}", needed_by=WGRAD, of=of)
    body["__annotations__"]["dy"] = torch.Tensor
    body["dy"] = saved(dy, alias="dy", needed_by=WGRAD)
    body["__doc__"] = f"What the second half of the backward reads: the residuals of the weight gradient, and dy {dy}."
    return pending(type(name, (), body))


def _saved_class(cls: Any, kind: str) -> Any:
    cls.__annotations__ = {**cls.__dict__.get("__annotations__", {}), "cfg": Any, "needs": Any, "_marks": Any}
    cls.cfg, cls.needs = static(), static(Needs.ALL)
    cls._marks = dataclasses.field(default=None, init=False, metadata={"hidden": True})
    body = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    made: Any = dataclasses.dataclass(slots=True, eq=False, repr=False)(type(cls.__name__, (Saved,), body))
    made.__repr__ = show
    made.kind = kind
    made.fields = {f.name: f.metadata["saved"] for f in dataclasses.fields(made) if "saved" in f.metadata}
    names = [f.name for f in dataclasses.fields(made) if f.init and f.name not in ("cfg", "needs")]
    made.names = tuple(names)
    written = _write_methods(made, names, [n for n, f in made.fields.items() if f.alias])
    for name in ("fresh", "_marks_now", "__post_init__"):
        setattr(made, name, written[name])
    made.keep = staticmethod(written["keep"])
    register(made)
    return made


_SOURCE = """
def keep(cfg, needs{parameters}):
    if needs is not ALL:
        drop = dropped[needs] if needs in dropped else unwanted(cls, needs, dropped)
        if drop is None:
            return None
        {drops}
    self = new(cls)
    {assigns}
    self.cfg = cfg
    self.needs = needs
    if is_compiling():
        self._marks = None
        return self
    try:
        self._marks = ({marks})
    except (AttributeError, RuntimeError):
        self._marks = None
    return self

def _marks_now(self):
    {reads}
    return ({marks})

def __post_init__(self):
    try:
        self._marks = None if is_compiling() else self._marks_now()
    except (AttributeError, RuntimeError):
        self._marks = None

def fresh(self):
    marks = self._marks
    if type(marks) is not tuple:
        return marks is None
    if is_compiling():
        return True
    {reads}
    return marks == ({marks})
"""


def _write_methods(cls: Any, names: list[str], aliases: list[str]) -> dict[str, Any]:
    """`keep`, `fresh` and the marks, written out as source, as dataclasses do: they run in every forward and backward.

    A mark is the version of each alias. There is none while compiling, for inference tensors and for
    leaves that are no tensors. `keep` returns a node with the fields that `needs` asks for, or None.
    """

    def lines(form: str, of: list[str]) -> str:
        return "; ".join(form.format(n=n) for n in of) or "pass"

    source = _SOURCE.format(
        parameters="".join(f", {n}=None" for n in names),
        drops="\n        ".join(f"if {n!r} in drop: {n} = None" for n in names) or "pass",
        assigns=lines("self.{n} = {n}", names),
        reads=lines("{n} = self.{n}", aliases),
        marks="".join(f"None if {n} is None else {n}._version, " for n in aliases),
    )
    scope: dict[str, Any] = dict(
        is_compiling=torch.compiler.is_dynamo_compiling, ALL=Needs.ALL, new=object.__new__, unwanted=_unwanted
    )
    scope.update(cls=cls, dropped={})
    exec(source, scope)
    return scope


def _unwanted(cls: Any, needs: Needs, memo: dict[Needs, Any]) -> tuple[str, ...] | None:
    """The fields that `needs` does not ask for; None where nothing at all will be asked for."""
    asked = needs.params if cls.kind == "pending" else needs
    memo[needs] = tuple(n for n, field in cls.fields.items() if not field.wanted(needs)) if asked else None
    return memo[needs]


def open_node(where: str, node: Any, cls: Any, cfg: Any) -> Any:
    """The residuals or pending behind `node`, after every check: their class, their config, staleness, donation."""
    if type(node) is Donated:
        node = node.take(where)
    if type(node) is not cls:
        got = f"{node.kind} {type(node).__name__}" if isinstance(node, Saved) else describe(node)
        hint = " (a forward with needs=Needs.NONE keeps nothing)" if node is None else ""
        fail(where, cls.kind, f"{cls.__name__} or donate() of it", got + hint, TypeError)
    if not node.fresh():
        node.complain(where)
    if node.cfg is not cfg and node.cfg != cfg:
        fail(where, "cfg", f"the config of the forward, {node.cfg}", cfg)
    return node
