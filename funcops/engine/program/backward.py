"""The backward of a program, whole or its first half, as rows."""

from __future__ import annotations

from typing import Any

from funcops.engine.contract.op import NoneType
from funcops.engine.program.calls import Calls
from funcops.engine.program.gradients import Gradients
from funcops.engine.program.lower import Alias, Call, Scope, begun_before, recomputing
from funcops.engine.program.rows import Group, Row, Rows, local, part_names
from funcops.engine.program.rules import Piece
from funcops.engine.program.weights import Weights


class Backward:
    """`backward(K, dy, I) -> (dparams, dx)`, or its first half, `dgrad(K, dy) -> (dx, pending)`."""

    def __init__(self, rows: Rows, which: str) -> None:
        self.rows, self.weights = rows, Weights(rows, which)
        self.gradients = Gradients(rows, f"{rows.lowered.name}_{'bwd' if self.weights.whole else 'dgrad'}")
        self.calls = Calls(self.weights, self.gradients)

    def write(self) -> tuple[Row, ...]:
        low, done = self.rows.lowered, set[int]()
        ahead = begun_before([row for row in low.backward if type(row) is Call], self.rows.begins)
        self.gradients.enter()
        for row in low.backward:
            for call in ahead.get(row.index, ()) if type(row) is Call else ():
                self.calls.begin(call)
            if type(row) is Alias:
                if row.value in self.gradients.have:
                    self.gradients.give(row.of, local("gradient", row.value))
            # siblings run at the turn of the last of them, when every dy is known
            elif row.index not in done and row.index not in self.rows.cover.waiting:
                piece = self.rows.cover.backward.get(row.index)
                if piece is None:
                    self.calls.call(row)
                else:
                    self._piece(piece)
                    done.update(call.index for call in piece.calls)
                self.weights.settle(row)
        self.weights.settle()
        main, extras = self.gradients.gradient(low.main), [self.gradients.gradient(v) for v in low.extras.values()]
        # dparams mirror params, so every call is in them; a pending holds only what waits
        trees = (
            part_names("dparams", low.root, True) if self.weights.whole else [*part_names("pending", low.root), *_recipes(low.root)]
        )
        self.rows.add(f"return {self.weights.which}", low.root, (main, *extras, *trees), (), main, extras, tuple(low.extras))
        return self.weights.finished

    def _piece(self, piece: Piece) -> None:
        """Calls whose dgrads run by a rule, or one by one if it declines their inputs."""
        calls, i = piece.calls, piece.calls[0].index
        every = piece.rule.settle is not None
        early = [call.recomputed_by for call in calls if call.recomputed_by and (every or call.recomputed_in_dgrad)]
        early = list(dict.fromkeys(early))
        filled = {call.index: source for call in calls if (source := self._filled_from(call, piece)) is not None}
        late = self.calls.given.get(calls[-1].index, []) if piece.rule.recompute else []
        sources = recomputing(filled.values())
        for call in (*calls, *sources):
            self.weights.open(call.place)
        # the rule may empty the residuals, so what is recomputed after it reads them from a local
        held = [*sources, *calls[-1:] * bool(late)] if self.weights.whole else [call for call in calls if call.source]
        self.rows.at("")
        inside = {v for call in calls for v in call.gives}
        apart = {
            v: self.gradients.outer.pop(v) for call in calls for v in call.takes if v in self.gradients.outer and v not in inside
        }
        for v in apart:  # added after the piece: before, there is nothing to compare it with
            self.rows.add("copy", None, (local("gradient", v),), (local("part", v),))
            self.gradients.have.remove(v)
        for source in dict.fromkeys(held):
            self.rows.add("held", source, (), (local("held", source.index),))
        values = sorted({v for call in calls for v in (*call.gives, *call.takes) if v in self.gradients.have})
        self.rows.add("values", piece, [local("gradient", v) for v in values], (local("gradients", i),), values)
        dys = [self.gradients.gradient(call.out) for call in piece.ends]
        dy = (dys[0], dys[1:]) if piece.siblings else (dys[-1], [])
        scopes = {c.place.scope.index for c in calls if c.place and c.place.scope and c.place.scope.needs}
        where = next(self.weights.where(call.place.scope) for call in calls if call.place and call.place.scope)
        reads = (*dys, local("gradients", i), *(local("recomputed", source.index) for source in early))
        self.rows.add("backward piece", piece, reads, (local("result", i),), *dy, (), sorted(scopes), where, bool(early))
        self._either_way(piece, late, held, filled)
        for v, name in apart.items():
            self.gradients.meet(local("part", v), self.gradients.gradient(v), name)
            self.gradients.give(v, local("part", v))
        if late:
            for call in late:
                self.weights.fill(call, calls[-1])
            self.weights.joint_wgrads(late)

    def _either_way(self, piece: Piece, late: list[Call], held: list[Call], filled: dict[int, Call]) -> None:
        """Both blocks: the calls one by one, or what the rule gave. Both know the same gradients at their ends."""
        calls = piece.calls
        again = [source for source in recomputing(filled.values()) if any(reader not in calls for reader in source.readers)]
        given = [local("recomputed", call.index) for call in (*calls[-1:] * bool(late), *again)]
        in_order = [row for row in self.rows.lowered.backward if type(row) is Call and row in calls]
        before = set(self.gradients.have)
        one_by_one = self.rows.block(self._one_after_another, in_order, late)
        # both blocks begin with the gradients that were there before the piece
        after, self.gradients.have = self.gradients.have, before
        ready = [call for call in in_order if call.place and call.index not in self.calls.late]
        together = self.rows.block(self._after, piece, ready, filled, held, late, after)
        self.gradients.have = after
        names = tuple(local("held", source.index) for source in held)
        self.rows.add(
            "choice", None, (local("result", calls[0].index),), given, names, path=None, then=one_by_one, otherwise=together
        )

    def _one_after_another(self, calls: list[Call], late: list[Call]) -> None:
        for reader in late[:1]:
            self.rows.add("recomputed", None, (local("recomputed", reader.recomputed_by.index),))  # type: ignore[union-attr]
        for call in calls:
            self.calls.call(call)

    def _filled_from(self, call: Call, piece: Piece) -> Call | None:
        """The call whose recomputed y is put into the pending that the piece gave this one, or None."""
        given = call.index in self.calls.late or (piece.rule.whole and call.recomputed_by in piece.calls)
        return call.recomputed_by if self.weights.whole and not given and call.op.params is not NoneType else None

    def _after(
        self, piece: Piece, ready: list[Call], filled: dict[int, Call], held: list[Call], late: list[Call], after: set[int]
    ) -> None:
        """Pass on the result of the rule, `(dmain, pending of each)`."""
        calls, i = piece.calls, piece.calls[0].index
        if late:
            self.rows.add("given", None, (local("gradients", i),), (local("recomputed", calls[-1].index),), calls[-1].out)
        pendings = Group(local("pending", call.index) if call.place else "_" for call in calls)
        self.rows.add("results", None, (local("result", i),), (local("dx", i), *pendings), local("dx", i), pendings)
        for call in reversed(calls):  # what another is recomputed from asks whether that one has a recipe
            self.calls.recipe(call, call in held)
        gives = {v for call in calls for v in call.gives}
        for v in sorted({v for call in calls for v in call.takes} - self.gradients.keys - gives):
            self.rows.add("gradient", None, (local("gradients", i),), (local("gradient", v),), v)
            self.gradients.have.add(v)
        in_flight = piece.rule.settle is not None
        if not in_flight:  # siblings read one x, each perhaps by another name, whose sum comes after them all
            self.gradients.give(calls[0].main, local("dx", i))
        if self.weights.whole:
            for call in ready:
                if call.index in filled:
                    self.weights.fill(call, filled[call.index])
            self.weights.joint_wgrads(ready)
        if in_flight:
            self.rows.add("settle", piece, (local("dx", i),), (local("dx", i),))
            self.gradients.give(calls[0].main, local("dx", i))
        # the rows behind read what the calls one by one would have given, so here it is None
        for v in sorted(after - self.gradients.have - gives - {call.out for call in calls}):
            self.rows.add("none", None, (), (local("gradient", v),))


def _recipes(part: Any) -> list[str]:
    """The locals of the recipes that the pending of a part holds."""
    if not isinstance(part, Scope) or not part.needs:
        return [local("recipe", part.index)] * part.source if isinstance(part, Call) else []
    return [name for one in part.parts.values() for name in _recipes(one)]
