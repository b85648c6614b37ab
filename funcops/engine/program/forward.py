"""The forward of a program, as rows."""

from __future__ import annotations

from typing import Any

from funcops.engine.compose.fork import fork
from funcops.engine.contract.op import NoneType, raw_of
from funcops.engine.program.lower import Call, Fold, Place, Scope, Value, begun_before
from funcops.engine.program.rows import Addends, Group, Row, Rows, local, names_of, released
from funcops.engine.program.rules import Piece
from funcops.engine.program.run import joined


class Forward:
    """`forward(P, main, extras) -> (y, residuals)`."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.opened = set[int]()  # the scopes whose params are in locals

    def write(self) -> tuple[Row, ...]:
        low = self.rows.lowered
        # in a forward that was cut, the sum that ended the layer before is the first call
        first = low.calls[0]
        kind, given = ("addends", (first.main, *first.takes)) if low.begins else ("main", (low.main,))
        self.rows.add(kind, None, (), [local("value", v) for v in given])
        for name, v in low.extras.items():
            self.rows.add("extra", None, (), (local("value", v),), name)
        piece_of = {call: piece for piece in self.rows.cover.forward.values() for call in piece.calls}
        ahead = begun_before(low.calls, self.rows.begins)
        done = set[int]()
        for row in low.forward:
            if type(row) is Fold:
                self._fold(row, done)
                continue
            for call in ahead.get(row.index, ()):
                self._open(call.place)
                self.rows.at(call.path)
                self.rows.add("begin", call, (), (local("begun", call.index),))
            if (piece := piece_of.get(row)) is None:
                self._call(row)
            elif row is piece.turn:
                self._piece(piece, done)
        others = [self._of(v) for v in low.outputs.values()]
        main: Any = self._addends(low.total) if low.ends else self._of(low.output)
        self.rows.add(
            "return forward", low.root, (*names_of(main), *others, self._kept(low.root)), (), main, others, tuple(low.outputs)
        )
        return released(tuple(self.rows.added))

    def _of(self, value: Value) -> Any:
        """The local of a value of the forward; a group for a tuple."""
        return Group(map(self._of, value)) if isinstance(value, tuple) else local("value", self.rows.lowered.resolve(value))

    def _kept(self, part: Scope | Call) -> str:
        """The local that holds the residuals of a part; `None` for a scope that needs nothing."""
        if isinstance(part, Call):
            return local("residuals", part.index)
        if not part.needs:
            return "None"
        own = [self._kept(one) for one in part.parts.values()]
        self.rows.add("traced kept" if self.rows.traced else "kept", part, own, (local("tree", part.index),))
        return local("tree", part.index)

    def _addends(self, total: Call) -> Addends:
        """The addends of the last sum, which is computed in the next layer; checked here, where they are made."""
        found = Addends((self._of(total.main), self._of(total.takes[0])))
        self.rows.at(total.path)
        self.rows.add("alike", total, found[::-1])
        return found

    def _fold(self, row: Fold, done: set[int]) -> None:
        # a piece folds the keys of its calls when it runs, which may be before this turn
        if row.out not in done:
            self.rows.add("fold", None, (self._of(row.of),), (local("value", row.out),), row.data)
            done.add(row.out)

    def _open(self, place: Place | None) -> None:
        """Put the params of a scope into a local, after a check of their names."""
        if place is None or place.scope is None or place.scope.index in self.opened:
            return
        scope = place.scope
        self._open(scope.place)
        self.opened.add(scope.index)
        self.rows.at(scope.place.path)
        self.rows.add("open params", scope, (), (), f"{scope.kind}_fwd")
        if scope.ties:
            self.rows.add("tied params", scope, (), (), f"{scope.kind}_fwd")

    def _call(self, call: Call) -> None:
        if call.place is None:
            self._of_skip(call)
            return
        raw = raw_of(call.op.fwd)
        self._open(call.place)
        self.rows.at(call.path)
        y, n = local("value", call.out), local("residuals", call.index)
        written = (y, n) if call.names else (y, *(local("value", v) for v in call.gives), n)
        main, takes = self._of(call.main), [self._of(v) for v in call.takes]
        kind, raws = ("fwd", ()) if raw is None or self.rows.traced else ("raw fwd", (raw, call.op.params or NoneType))
        kind, raws = ("pausing fwd", ()) if self.rows.pauses(call) else (kind, raws)
        begun: tuple[str, ...] = ()
        if call.index in self.rows.begins:
            kind, raws, begun = "begun fwd", (), (local("begun", call.index),)
        self.rows.add(kind, call, (*begun, *names_of(main), *takes), written, main, takes, call.labels, *raws, needs=call.kept)
        if call.names:
            for v, name in zip(call.gives, call.names, strict=True):
                self.rows.add("output", None, (y,), (local("value", v),), f".extras[{name!r}]")
            self.rows.add("output", None, (y,), (y,), ".main")

    def _of_skip(self, call: Call) -> None:
        """The fork of a skip, or its sum."""
        if call.op is fork:
            for value in (call.out, *call.gives):
                self.rows.add("is", None, names_of(self._of(call.main)), (local("value", value),), self._of(call.main))
            return
        self.rows.at(call.path)
        self.rows.add("sum of skip", call, (self._of(call.takes[0]), self._of(call.main)), (local("value", call.out),))

    def _piece(self, piece: Piece, done: set[int]) -> None:
        """Calls that run by a rule, or one by one if it declines their inputs."""
        calls, i = piece.calls, piece.calls[0].index
        for row in self.rows.lowered.forward:
            if type(row) is Fold and any(row.out in call.takes for call in calls):
                self._fold(row, done)
        for call in calls:
            self._open(call.place)
        self.rows.at(joined(calls))
        # what a call of the piece gives to another one, the rule puts there by itself
        outside = sorted({v for call in calls for v in call.takes} - {v for call in calls for v in call.gives})
        self.rows.add("values", piece, [self._of(v) for v in outside], (local("values", i),), outside)
        main = self._of(calls[0].main)
        self.rows.add("forward piece", piece, (*names_of(main), local("values", i)), (local("result", i),), main)
        one_by_one = self.rows.block(self._one_by_one, calls)
        self.rows.add(
            "choice", None, (local("result", i),), path=None, then=one_by_one, otherwise=self.rows.block(self._after, piece)
        )

    def _one_by_one(self, calls: tuple[Call, ...]) -> None:
        for call in calls:
            self._call(call)

    def _after(self, piece: Piece) -> None:
        """Pass on the result of the rule, `(y, residuals of each)`."""
        calls, i = piece.calls, piece.calls[0].index
        nodes = Group(local("residuals", call.index) if call.place else "_" for call in calls)
        out = Group(local("value", call.out) for call in piece.ends) if piece.siblings else local("value", calls[-1].out)
        self.rows.add("results", None, (local("result", i),), (*names_of(out), *nodes), out, nodes)
        for v in (v for call in calls for v in call.gives):
            self.rows.add("taken", None, (local("values", i),), (local("value", v),), v)
