"""Lowering: a config as a flat list of calls over numbered values.

A value is a number, or, as the output of a `parallel`, a tuple of values. Every call reads values and writes new ones. A scope
gives each value that it reads a new name (an alias), so that its gradients are summed inside the scope first, in the order in
which it reads. The backward has an order of its own: a chain's calls reversed, a parallel's branches in order.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from funcops.engine.compose.add import add
from funcops.engine.contract.configs import Composite
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op
from funcops.engine.errors import join_path

__all__ = ["Call", "Lowered", "Value", "lower"]

Value = Any  # int, or a tuple of Values
Extras = dict[str, int]


class Place(NamedTuple):
    """The place of a part's params, residuals and pending: under a name in a scope; without a scope, the whole tree."""

    scope: Scope | None
    name: Any
    path: str  # of its steps

    def under(self, name: Any) -> str:
        return join_path(self.path, name)


@dataclasses.dataclass(eq=False)
class Scope:
    """A chain or a parallel: its params, residuals and pending are dicts by name."""

    index: int
    place: Place
    cfg: Any
    needs: Needs
    kind: str  # "chain" or "parallel"
    residuals: type
    pending: type
    ties: tuple[tuple[str, str], ...]
    parts: dict[Any, Any] = dataclasses.field(default_factory=dict)  # calls and scopes by name

    def at(self, name: Any) -> Place:
        return Place(self, name, self.place.under(name))


@dataclasses.dataclass(eq=False)
class Call:  # equal only to itself (eq=False), as it is a key of dicts
    """One op. It reads `main` and the values that it `takes` (as extras with these `labels`, if it has any), and writes `out` and
    the values that it `gives` (as outputs with these `names`, if it has any). `place` is None for the fork and the sum of a skip,
    which have no trees. `recomputed_by`: the call that recomputes main in the backward, perhaps from an x that is recomputed, too,
    or a join of calls; the residuals lack the `fields` that hold it. `read_by_others`: whether y is an output, or read by a call
    that is neither in `readers` nor a linear layer. Without such a call the gradient of y is a new tensor. `residuals`: the class
    that the op keeps under this config, looked up here once for all runs."""

    index: int
    path: str
    place: Place | None
    op: Op
    cfg: Any
    needs: Needs
    main: Value
    takes: tuple[int, ...]
    labels: tuple[str, ...]
    out: Value
    gives: tuple[int, ...]
    names: tuple[str, ...]
    fuse: bool
    recomputed_by: Any = None  # a Call, a Join or None
    fields: tuple[str, ...] = ()
    readers: list[Call] = dataclasses.field(default_factory=list)  # the calls whose `recomputed_by` is this one
    read_by_others: bool = False
    kept: Needs = Needs.ALL  # the needs for which the forward saves tensors; known when all calls are
    residuals: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.residuals = self.op.residuals_of(self.cfg)

    @property
    def source(self) -> bool:
        """Whether another call reads the recomputed y."""
        return len(self.readers) > 0  # the tracer of torch 2.11 cannot take the bool of a list

    @property
    def sources(self) -> tuple[Call, ...]:
        """The calls that compute again what its residuals lack."""
        by = self.recomputed_by
        return () if by is None else by.calls if type(by) is Join else (by,)

    @property
    def fills_pending(self) -> bool:
        """Whether its pending may lack what is recomputed."""
        return type(self.recomputed_by) is not Join or any([name in getattr(self.op.pending, "fields", ()) for name in self.fields])

    @property
    def light(self) -> bool:
        """Whether it computes little: a view, or what could as well be recomputed. Communication does not hide behind it."""
        ops = [op for _, op, _ in self.cfg.parts()] if isinstance(self.cfg, Composite) else [self.op]
        return self.place is None or all([bool(op.recomputable) or op.view for op in ops])

    @property
    def can_recompute(self) -> bool:
        """Whether y may be recomputed: its x is in memory anyway, saved or itself recomputed, or only its `recompute` reads x."""
        of_x = [field for field in self.op.fields(self.cfg).values() if field.of_x]
        return self.op.recompute is not None and all(field.wanted(self.needs) or not field.of for field in of_x)

    @property
    def recomputed_in_bwd(self) -> bool:
        """Whether its own backward reads the recomputed x, not only the recomputation of its y."""
        fields = self.op.fields(self.cfg)
        return any([fields[name].wanted(self.needs) for name in self.fields])

    @property
    def recomputed_in_dgrad(self) -> bool:
        fields = self.op.fields(self.cfg)
        return any([fields[name].dgrad for name in self.fields])


@dataclasses.dataclass(frozen=True, eq=False)
class Join:
    """The calls that recompute several fields of another: for each field its name, the call, and the index in that y or None."""

    index: int
    parts: tuple[tuple[str, Call, int | None], ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(dict.fromkeys([call for _, call, _ in self.parts]))


class Fold(NamedTuple):
    """A random key on its way down: `fold_in(of, data)`."""

    out: int
    of: int
    data: int


class Alias(NamedTuple):
    """In a backward: the gradient of `value`, from inside a scope, is added to the gradient of `of`."""

    value: int
    of: int


Back = list[Any]  # of Call and Alias
Parts = tuple[Value, tuple[int, ...], Back]  # a combinator's output, its named outputs in order, and its backward


class Lowered:
    """A program's calls, which a combinator's `lower(cfg, rows, place, needs, main, extras, recomputed_by)` writes into `rows`; it
    returns its `Parts`."""

    name: str  # of the combinator
    main: int
    extras: Extras
    output: Value
    outputs: Extras
    backward: Back
    begins = ends = False  # whether x, or y, is two addends in a list, which their reader empties (`cut`)
    total: Call  # their sum

    def __init__(self) -> None:
        self.forward: list[Any] = []  # of Call and Fold
        self.scopes: list[Scope] = []
        self.origin: dict[int, int] = {}  # what an alias stands for
        self.joins = dict[int, Join]()
        self.siblings: list[tuple[Call, ...]] = []  # the first calls of a parallel's branches, where they read nothing but its x
        self._values = 0

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(row for row in self.forward if type(row) is Call)

    @property
    def root(self) -> Scope | Call:
        """The outermost part that has trees."""
        return self.scopes[0] if self.scopes else next(call for call in self.calls if call.place)

    def resolve(self, value: int) -> int:
        while value in self.origin:
            value = self.origin[value]
        return value

    def reads(self, call: Call, value: Value) -> bool:
        """Whether the call's main is this value, perhaps by other names."""
        main = call.main
        while main != value and main in self.origin:
            main = self.origin[main]
        return bool(main == value)

    def value(self) -> int:
        self._values += 1
        return self._values - 1

    def alias(self, of: Value) -> tuple[Value, list[Alias]]:
        """Another name of a value, and the rows that pass on its gradient."""
        if isinstance(of, tuple):
            pairs = [self.alias(one) for one in of]
            return tuple(value for value, _ in pairs), [row for _, rows in pairs for row in rows]
        value = self.value()
        self.origin[value] = of
        return value, [Alias(value, of)]

    def aliases(self, extras: Extras) -> tuple[Extras, list[Alias]]:
        pairs = {name: self.alias(value) for name, value in extras.items()}
        return {name: value for name, (value, _) in pairs.items()}, [row for _, rows in pairs.values() for row in rows]

    def scope(self, place: Place, kind: str, cfg: Any, needs: Needs, classes: tuple[type, type]) -> Scope:
        found = Scope(len(self.scopes), place, cfg, needs, kind, *classes, cfg.ties)
        self.scopes.append(found)
        if place.scope is not None:
            place.scope.parts[place.name] = found
        return found

    def step(self, step: Any, scope: Scope, needs: Needs, main: Value, extras: Extras, recomputed_by: Call | None = None) -> Any:
        """Write a named part. Returns its output, its named outputs, and its backward."""
        given: Extras = {}
        for name in step.names:
            given[name] = extras[name]
            if name in step.keys and step.folds:
                given[name] = self.value()
                self.forward.append(Fold(given[name], extras[name], step.fold))
        place = scope.at(step.name)
        fuse = scope.cfg.fuse
        out, gives, back = self.body(step.op, step.cfg, place, needs, main, given, recomputed_by, len(step.given), fuse)
        return out, dict(zip(step.given, gives, strict=True)), back

    def body(
        self,
        op: Op,
        cfg: Any,
        place: Place,
        needs: Needs,
        main: Value,
        extras: Extras,
        recomputed_by: Call | None = None,
        gives: int = 0,
        fuse: bool = True,
    ) -> Parts:
        """Write an op: its calls if it is a combinator, else one call."""
        if op.lower is not None:
            return op.lower(cfg, self, place, needs, main, extras, recomputed_by)  # type: ignore[no-any-return]
        labels, names = tuple(extras) if cfg.extras else (), cfg.outputs
        call = self.call(op, cfg, place, needs, main, tuple(extras.values()), labels, len(names) or gives, fuse, names=names)
        call.recomputed_by = recomputed_by
        return call.out, call.gives, [call]

    def call(
        self,
        op: Op,
        cfg: Any,
        place: Place | None,
        needs: Needs,
        main: Value,
        takes: Iterable[int] = (),
        labels: tuple[str, ...] = (),
        gives: int = 0,
        fuse: bool = True,
        path: str = "",
        names: tuple[str, ...] = (),
    ) -> Call:
        takes = tuple(takes)
        # the sum of two branches: with one as an extra, it can be in one row with the calls of the other
        if op is add and isinstance(main, tuple) and all(type(one) is int for one in main):
            main, *beside = main
            takes = tuple(beside)
            self._beside(main)
        out, given = self.value(), tuple(self.value() for _ in range(gives))
        where = place.path if place else path
        found = Call(len(self.forward), where, place, op, cfg, needs, main, takes, labels, out, given, names, fuse)
        self.forward.append(found)
        if place is not None and place.scope is not None:
            place.scope.parts[place.name] = found
        return found

    def heads_last(self, heads: list[Any], first: int) -> None:
        """Put the calls that need what these siblings write after the others, from the forward's row `first` on: siblings may run
        as one with the calls after them, which read what stands beside a sibling."""
        written: set[int] = set()
        before, after = list[Any](), list[Any]()
        for row in self.forward[first:]:
            read = [self.resolve(value) for one in (row.main, *row.takes) for value in flat(one)] if type(row) is Call else []
            late = row in heads or any(value in written for value in read)
            written.update((row.out, *row.gives) if late else ())
            (after if late else before).append(row)
        self.forward[first:] = before + after

    def cut(self, begins: bool, ends: bool) -> bool:
        """Let the sum that ends a layer begin the forward of the next one, where it may run with what reads it. Returns False, and
        changes nothing, if the layer does not end with the sum of a skip."""
        total = next((call for call in self.calls if call.out == self.output), None)
        # an add that is a step has its place in the trees; the sum of a skip has none, and can move
        if total is None or total.op is not add or total.place is not None or type(total.main) is not int:
            return False
        self.begins, self.ends, self.total = begins, ends, total
        if ends:
            self.forward.remove(total)
        if begins:
            # a number that no other row has, also after the sum at the end was taken out
            index, x, branch = len(self.forward) + ends, self.value(), self.value()
            self.forward.insert(0, dataclasses.replace(total, index=index, main=branch, takes=(x,), out=self.main))
        return True

    def _beside(self, main: int) -> None:
        """Put the call that writes `main` after the calls of the other branch, to which a sum adds it: the sum goes on with the row
        of `main`, and reads the other branch as an extra. So an adapter stands beside the row of its linear layer."""
        at = next((i for i, row in enumerate(self.forward) if type(row) is Call and row.out == main), None)
        if at is not None and not self.forward[at].gives:
            self.forward.append(self.forward.pop(at))


def _leave_out(rows: Lowered) -> None:
    """Note which fields each call leaves out, as another call recomputes them. From the last call to the first: an x that a call
    reads only to recompute its y is left out if another call reads that y."""
    calls = rows.calls
    read = Counter(rows.resolve(value) for one in (rows.output, *rows.outputs.values()) for value in flat(one))
    # linear layers do not count: their dx is a new tensor in any case
    others = [call for call in calls if call.op.layer is None]
    read.update(rows.resolve(value) for call in others for one in (call.main, *call.takes) for value in flat(one))
    for call in calls[::-1]:
        source, kept = call.recomputed_by, call.needs.with_recompute() if call.source else call.needs
        if source is not None:
            fields = call.op.fields(call.cfg)
            # main is x, or the first part of x if the call takes extras
            call.fields = tuple(n for n, f in fields.items() if f.alias in ("x", "x.0") and f.wanted(kept))
            call.recomputed_by = source if call.fields else None
            # before the others, as this walk goes from the last call to the first
            source.readers[:0] = [call] * bool(call.fields)
        if again := call.op.again and call.op.again(call, kept, rows):
            # behind the numbers of all calls
            index = len(rows.forward) + 2 + call.index
            call.recomputed_by = rows.joins[index] = Join(index, (*[(name, source, None) for name in call.fields], *again))
            for one in call.sources:
                one.readers[:0] = [call] * (one is not source)
            call.fields = tuple([name for name, _, _ in call.recomputed_by.parts])
        call.kept = kept.dropping(call.fields) if call.fields else kept
        call.read_by_others = read[call.out] > sum(one.op.layer is None for one in call.readers)  # which come after it


def recomputing(calls: Iterable[Call]) -> list[Call]:
    """These calls, and those that recompute what they read, each once."""
    found = dict[Call, None]()
    for call in calls:
        found |= dict.fromkeys([call, *recomputing(call.sources)])
    return list(found)


def flat(value: Value) -> list[int]:
    """The numbers of a value."""
    return [number for one in value for number in flat(one)] if isinstance(value, tuple) else [value]


def begun_before(calls: Iterable[Call], begins: set[int]) -> dict[int, list[Call]]:
    """The calls, in this order, that begin work before their turn, by the index of the call before which they do: the last one
    that computes much, or the first."""
    found: dict[int, list[Call]] = {}
    before: Call | None = None
    for call in calls:
        before = before or call
        if call.index in begins:
            found.setdefault(before.index, []).append(call)
        before = before if call.light else call
    return found


def calls_below(part: Scope | Call) -> list[Call]:
    """The calls of a part, in order."""
    return [part] if isinstance(part, Call) else [call for one in part.parts.values() for call in calls_below(one)]


def lower(op: Op, cfg: Any, needs: Needs) -> Lowered:
    """The calls of a combinator under `needs`."""
    rows = Lowered()
    rows.name, rows.main = op.name, rows.value()
    rows.extras = {name: rows.value() for name in cfg.extras}
    rows.output, given, rows.backward = op.lower(cfg, rows, Place(None, None, ""), needs, rows.main, rows.extras, None)
    rows.outputs = dict(zip(cfg.outputs, given, strict=True))
    _leave_out(rows)
    return rows
