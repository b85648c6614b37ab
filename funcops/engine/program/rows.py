"""A program's function as rows, one for each statement, and the passes over them: what is recomputed, and what is released."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeGuard

from funcops.engine.contract.needs import Needs
from funcops.engine.program.lower import Call, Lowered, Scope
from funcops.engine.program.rules import Cover


class Row(NamedTuple):
    """A statement. `kind`: what it does, a key of the printer's table. `of`: the call, scope or piece whose op and config it uses.
    `reads` and `writes`: locals. `path`: the step whose path an error gets; None for a row that raises nothing. `data`: whatever
    else the printer writes. One of its blocks runs, `then` or `otherwise`, if it has any."""

    kind: str
    of: Any = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    data: tuple[Any, ...] = ()
    needs: Needs | None = None
    path: str | None = None
    then: tuple[Row, ...] = ()
    otherwise: tuple[Row, ...] = ()

    def __str__(self) -> str:
        path = f" {self.path}" if self.path and isinstance(self.of, Call) else ""
        lines = [f"{', '.join(self.writes)} = " * bool(self.writes) + f"{self.kind}{path}({', '.join(self.reads)})"]
        for name, block in (("if", self.then), ("else", self.otherwise)):
            lines += [f"  {name}:"] * bool(block) + [f"    {line}" for row in block for line in str(row).split("\n")]
        return "\n".join(lines)


LETTERS = {  # of the kinds of locals, as their names begin
    "value": "v",  # of the forward
    "gradient": "g",  # of a value
    "dy": "dy",  # of a call, joined from the gradients of its outputs
    "part": "part",  # a gradient that is added to another one
    "residuals": "n",  # of a call
    "held": "h",  # residuals of a call, for later
    "tree": "N",  # residuals of a scope, as the forward makes them
    "pending": "p",  # of a call
    "dx": "d",  # of a call
    "dparams": "q",  # of a call
    "recomputed": "a",  # the y of a call
    "recipe": "r",  # what the y of a call is recomputed from
    "begun": "begun",  # the work that a call began before its turn
    "values": "E",  # that a piece reads and writes
    "gradients": "G",  # that a piece reads and adds to
    "result": "out",  # of a piece
    "joint": "j",  # the weight gradients of a piece
}


class Local(str):
    """The name of a local of a program's function: its kind, and the number of the value, call, scope or piece that it is about."""

    kind: str
    number: int


def local(kind: str, number: int) -> Local:
    name = Local(f"{LETTERS[kind]}{number}")
    name.kind, name.number = kind, number
    return name


def is_a(name: str, kind: str) -> TypeGuard[Local]:
    """Whether a name belongs to a local of this kind; `None`, and a name without a number, have none."""
    return type(name) is Local and name.kind == kind


class Group(tuple[Any, ...]):
    """Names in a tuple, as source."""

    def __str__(self) -> str:
        return f"({''.join(f'{one}, ' for one in self)})"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for one in self for name in names_of(one))


class Addends(Group):
    """The names of the two addends of a sum that is computed later, by the function that empties their list."""

    def __str__(self) -> str:
        return f"[{', '.join(self)}]"


def names_of(one: Any) -> tuple[str, ...]:
    """The locals of a name or a group."""
    return one.names if isinstance(one, Group) else (one,)


class Rows:
    """The rows of one function, as they are added. `pausing`: whether the function yields while communication of a call whose op
    can pause is in flight."""

    def __init__(self, lowered: Lowered, cover: Cover, traced: bool = False, pausing: bool = False) -> None:
        self.lowered, self.cover, self.traced, self.pausing = lowered, cover, traced, pausing
        self.added: list[Row] = []
        pieces = *cover.forward.values(), *cover.backward.values()
        inside = {call.index for piece in pieces for call in piece.calls}
        # a rule takes the trees as they are, so a call in a piece begins nothing early
        self.begins = {call.index for call in lowered.calls if call.op.prefetch is not None} - inside
        self.path = ""

    def add(
        self, kind: str, of: Any = None, reads: Iterable[str] = (), writes: Iterable[str] = (), *data: Any, **more: Any
    ) -> None:
        made = Row(kind, of, tuple(reads), tuple(writes), data, path=self.path)
        self.added.append(made._replace(**more) if more else made)

    def pauses(self, call: Call) -> bool:
        return self.pausing and call.op.pausing is not None

    def at(self, path: str) -> None:
        """Errors of the rows to come get the path of this step."""
        self.path = path

    def block(self, write: Callable[..., None], *arguments: Any) -> tuple[Row, ...]:
        """The rows that `write(*arguments)` adds, as a block."""
        outer, self.added = self.added, []
        write(*arguments)
        found, self.added = tuple(self.added), outer
        return found

    def accumulators(self, scope: Scope, where: str) -> None:
        """Put the accumulators of a scope, by name, into a local: None for each if none are given."""
        self.add("accumulators", scope)
        if scope.ties and scope.place.scope is not None:
            self.add("tied accumulators", scope, (), (), where)


def locals_of(row: Row) -> set[str]:
    """The locals of a row and of its blocks. The names of arguments have no number."""
    own = {name for name in (*row.reads, *row.writes) if name[-1].isdigit()}
    return own.union(*[locals_of(inner) for inner in (*row.then, *row.otherwise)])


def recomputed(
    rows: Iterable[Row], recompute: Callable[[Local, bool], list[Row]], known: Iterable[str] = (), held: Any = ()
) -> Any:
    """The rows, with `recompute(name, held)` before the first reader of each recomputed y, in each block by itself. `held`: the
    recomputed ys whose residuals are in locals, as a piece took the trees."""
    found: list[Row] = []
    known = set(known)

    def bring(row: Row) -> None:
        """Put the recomputation of each y that a row reads before it, in the order in which they read each other."""
        for name in row.reads:
            if not is_a(name, "recomputed") or name in known:
                continue
            known.add(name)
            rows = recompute(name, local("held", name.number) in held or row.kind == "recomputed")
            for one in rows:
                bring(one)
            found.extend(rows)

    for row in rows:
        bring(row)
        # a row with blocks writes inside of them, where its locals are not known yet
        known.update(row.writes if not row.then else ())
        if row.then:
            # only the second block follows a piece that took the residuals; the first finds them in the trees (not "recomputed")
            inside = row.data[0] if row.kind == "choice" and row.data else ()
            blocks = recomputed(row.then, recompute, known), recomputed(row.otherwise, recompute, known, inside)
            row = row._replace(then=blocks[0], otherwise=blocks[1])
            known.update(row.writes)
        # that kind only asks for a y, and runs nothing
        found += [row] * (row.kind != "recomputed")
    return tuple(found)


def released(rows: tuple[Row, ...], held: Iterable[str] = ()) -> tuple[Row, ...]:
    """The rows of a block, in which each local is released after the last row that names it, unless it is `held` around the block;
    in each block of a row by itself, if no other row names it."""
    named = [locals_of(row) for row in rows]
    last = {name: i for i, own in enumerate(named) for name in own}
    times = Counter(name for own in named for name in own)
    held, found = set(held), list[Row]()
    for i, (row, own) in enumerate(zip(rows, named, strict=True)):
        shared = {name for name in own if name in held or times[name] > 1}.union(own.intersection((*row.reads, *row.writes)))
        if row.then:
            row = row._replace(then=released(row.then, shared), otherwise=released(row.otherwise, shared))
        found.append(row)
        gone = sorted(name for name in shared - held if last[name] == i)
        if gone and not row.kind.startswith("return"):
            found.append(Row("release", reads=tuple(gone)))
    return tuple(found)


def part_names(kind: str, part: Any, whole: bool = False) -> list[Local]:
    """The locals of a kind of the calls in the tree of a part. Scopes that need nothing are left out, unless `whole`."""
    if not isinstance(part, Scope):
        return [local(kind, part.index)]
    return [name for one in part.parts.values() for name in part_names(kind, one, whole)] if whole or part.needs else []
