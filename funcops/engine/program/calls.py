"""The backward of each call by itself, as rows."""

from __future__ import annotations

from funcops.engine.compose.fork import fork
from funcops.engine.contract.op import raw_of
from funcops.engine.program.gradients import NONE, Gradients
from funcops.engine.program.lower import Call, Lowered, flat
from funcops.engine.program.rules import Cover


class Calls(Gradients):
    """Rows of calls that run by their own ops: with the weight gradients in a whole backward, else dgrads."""

    def __init__(self, lowered: Lowered, cover: Cover, traced: bool, which: str) -> None:
        super().__init__(lowered, cover, traced, which)
        self.given = self._given()
        self.late = {reader.index for readers in self.given.values() for reader in readers}  # their weight gradients wait

    def _given(self) -> dict[int, list[Call]]:
        """The readers of each call whose y comes with its gradient, by its index; their weight gradients wait for that y."""
        if not self.whole:
            return {}
        given = {piece.calls[-1] for piece in self.cover.backward.values() if piece.rule.recompute}
        return {call.index: [row for row in self.lowered.backward if row in call.readers] for call in given}

    def goes_on(self, call: Call) -> bool:
        """Whether its weight gradient is computed right after its input's gradient."""
        return self.whole and call.index not in self.late

    def call(self, call: Call) -> None:
        if call.place is None:
            self._of_skip(call)
            return
        i = call.index
        self.open(call.place)
        self.at(call.path)
        self.recipe(call)
        if not call.needs:
            self.row(*(("unwanted", call, (), (f"q{i}",)) if self.whole else ("none", call, (), (f"p{i}",))))
            return
        if i in self.begins:
            self._begun(call)
        else:
            self.row("whole tree" if call.place.scope is None else "residuals", call, (), (f"n{i}",), "K")
            dy = self.dy(call)
            raw, own = () if self.pauses(call) else self.block(self._raw, call, dy), self.block(self._checked, call, dy)
            if raw and self.testable(call.residuals):
                self.row("call", call, (f"n{i}", dy, *self._filling(call)), then=raw, otherwise=own)
            else:
                self.rows += own
        if call.needs.x:
            self.spread(call)

    def begin(self, call: Call) -> None:
        """Begin the work that a call begins before its turn."""
        assert call.place is not None
        n, begun = f"n{call.index}", f"begun{call.index}"
        if call.needs:
            self.open(call.place)
            self.at(call.path)
            self.row("whole tree" if call.place.scope is None else "residuals", call, (), (n,), "K")
            self._give(call)
            self.row("begin backward", call, (n,), (begun,))

    def _give(self, call: Call) -> None:
        """Give the call's residuals away to its own function, if its scope's were given away."""
        if call.place.scope is not None:  # type: ignore[union-attr]
            self.row("give", call, (f"n{call.index}",), (f"n{call.index}",))

    def _begun(self, call: Call) -> None:
        """The backward of a call that has begun."""
        given = f"begun{call.index}", self.dy(call)
        if self.whole:
            self.row("begun bwd", call, given, (f"q{call.index}", f"d{call.index}"))
            self.flying[call] = False
        else:
            self.row("begun dgrad", call, given, (f"d{call.index}", f"p{call.index}"))

    def _filling(self, call: Call) -> tuple[str, ...]:
        """The recomputed y that is put into the call's residuals."""
        reads = call.recomputed_in_bwd if self.goes_on(call) else call.recomputed_in_dgrad
        filled = call.recomputed_by is not None and reads
        return (f"a{call.recomputed_by.index}",) if filled else ()  # type: ignore[union-attr]

    def _checked(self, call: Call, dy: str) -> None:
        """The op's own function."""
        i, needs = call.index, call.needs if self.goes_on(call) else call.kept
        self._give(call)
        pausing = "pausing " * self.pauses(call)
        for a in self._filling(call):
            self.row("filled", call, (f"n{i}", a), (f"n{i}",), call.fields, needs=needs)
        if self.goes_on(call):
            self.row(f"{pausing}bwd", call, (f"n{i}", dy), (f"q{i}", f"d{i}"))
        else:
            self.row(f"{pausing}dgrad", call, (f"n{i}", dy), (f"d{i}", f"p{i}"))

    def _raw(self, call: Call, dy: str) -> None:
        """The function that runs after its checks; nothing if it has no such function, or no dy."""
        i, whole = call.index, self.goes_on(call)
        raw = raw_of(call.op.bwd if whole else call.op.dgrad)
        if raw is None or dy == NONE:
            return
        for a in self._filling(call):
            self.row("twin", call, (f"n{i}", a), (f"n{i}",), needs=call.needs if whole else call.kept)
        dgrad, wgrad = raw if isinstance(raw, tuple) else (raw, None)
        given, d, p, q = (f"n{i}", dy), f"d{i}", f"p{i}", f"q{i}"
        if whole and not isinstance(raw, tuple):
            self.row("raw bwd", call, given, (q, d), dgrad)
        else:
            # The checked function computes both as one: a profile names them alike, whichever of the two runs.
            self.row("raw dgrad of bwd" if whole else "raw dgrad", call, given, (d, q if whole and wgrad is None else p), dgrad)
        # Before the weight gradient, which reads none of it. Of residuals that were filled in, "twin" has emptied the original.
        if call.place.scope is not None and not self._filling(call):  # type: ignore[union-attr]
            self.row("empty", call, (f"n{i}",))
        if whole and wgrad is not None:
            self.row("raw wgrad of bwd", call, (p,), (q,), wgrad)

    def _of_skip(self, call: Call) -> None:
        """The backward of a skip's fork, or of its sum."""
        if call.op is fork:
            there = [f"g{value}" for value in (*call.gives, call.out) if value in self.have]
            if call.needs.x and len(there) > 1:  # their sum first: it is what the skip gives to a sum around it
                self.row("sum", call, there, (f"d{call.index}",))
                there = [f"d{call.index}"]
            if call.needs.x and there:
                self.give(call.main, there[0])
        elif call.out in self.have:
            for value in [call.takes[0]] * bool(call.needs.input(1)) + flat(call.main) * bool(call.needs.input(0)):
                self.give(value, f"g{call.out}")

    def recipe(self, call: Call, held: bool = False) -> None:
        """Keep what the recomputed y is computed from, for weight gradients that read it."""
        if not self.whole and call.source:
            letters = [(letter, reader) for reader in call.readers for letter in "pr"[: 1 + reader.source]]
            readers = [f"{letter}{reader.index}" for letter, reader in letters]  # a reader's y may be recomputed from it, too
            self.row("recipe", call, [f"h{call.index}"] * held + readers, (f"r{call.index}",), readers)
