"""The backward of each call by itself, as rows."""

from __future__ import annotations

from funcops.engine.compose.fork import fork
from funcops.engine.contract.op import raw_of
from funcops.engine.program.gradients import NONE, Gradients
from funcops.engine.program.lower import Call, Join, flat
from funcops.engine.program.rows import local
from funcops.engine.program.weights import Weights


class Calls:
    """Rows of calls that run by their own ops: with the weight gradients in a whole backward, else dgrads."""

    def __init__(self, weights: Weights, gradients: Gradients) -> None:
        self.rows, self.weights, self.gradients = weights.rows, weights, gradients
        self.given = self._given()
        self.late = {reader.index for readers in self.given.values() for reader in readers}  # their weight gradients wait

    def _given(self) -> dict[int, list[Call]]:
        """The readers of each call whose y comes with its gradient, by its index; their weight gradients wait for that y."""
        if not self.weights.whole:
            return {}
        given = {piece.calls[-1] for piece in self.rows.cover.backward.values() if piece.rule.recompute}
        return {call.index: [row for row in self.rows.lowered.backward if row in call.readers] for call in given}

    def goes_on(self, call: Call) -> bool:
        """Whether its weight gradient is computed right after its input's gradient."""
        return self.weights.whole and call.index not in self.late

    def call(self, call: Call) -> None:
        if call.place is None:
            self._of_skip(call)
            return
        i = call.index
        self.weights.open_for(call)
        self.rows.at(call.path)
        self.recipe(call)
        # dparams have the structure of params, so a call without gradients gives a tree, too
        if not call.needs:
            kind, name = ("unwanted", "dparams") if self.weights.whole else ("none", "pending")
            self.rows.add(kind, call, (), (local(name, i),))
            return
        if i in self.rows.begins:
            self._begun(call)
        else:
            self.rows.add("whole tree" if call.place.scope is None else "residuals", call, (), (local("residuals", i),), "K")
            dy = self.gradients.dy(call)
            # what runs after the checks has no variant that pauses
            raw, own = (
                () if self.rows.pauses(call) else self.rows.block(self._raw, call, dy),
                self.rows.block(self._checked, call, dy),
            )
            if raw and self.weights.testable(call.residuals):
                self.rows.add("call", call, (local("residuals", i), dy, *self._filling(call)), then=raw, otherwise=own)
            else:
                self.rows.added += own
        if call.needs.x:
            self.gradients.spread(call)

    def begin(self, call: Call) -> None:
        """Begin the work that a call begins before its turn."""
        assert call.place is not None
        n, begun = local("residuals", call.index), local("begun", call.index)
        if call.needs:
            self.weights.open(call.place)
            self.rows.at(call.path)
            self.rows.add("whole tree" if call.place.scope is None else "residuals", call, (), (n,), "K")
            self._give(call)
            self.rows.add("begin backward", call, (n,), (begun,))

    def _give(self, call: Call) -> None:
        """Give the call's residuals away to its own function, if its scope's were given away."""
        if call.place.scope is not None:  # type: ignore[union-attr]
            self.rows.add("give", call, (local("residuals", call.index),), (local("residuals", call.index),))

    def _begun(self, call: Call) -> None:
        """The backward of a call that has begun."""
        given = local("begun", call.index), self.gradients.dy(call)
        if self.weights.whole:
            self.rows.add("begun bwd", call, given, (local("dparams", call.index), local("dx", call.index)))
            self.weights.flying[call] = False
        else:
            self.rows.add("begun dgrad", call, given, (local("dx", call.index), local("pending", call.index)))

    def _filling(self, call: Call) -> tuple[str, ...]:
        """The recomputed y that is put into the call's residuals."""
        reads = call.recomputed_in_bwd if self.goes_on(call) else call.recomputed_in_dgrad
        filled = call.recomputed_by is not None and reads
        return (local("recomputed", call.recomputed_by.index),) if filled else ()

    def _checked(self, call: Call, dy: str) -> None:
        """The op's own function."""
        i, needs = call.index, call.needs if self.goes_on(call) else call.kept
        self._give(call)
        pausing = "pausing " * self.rows.pauses(call)
        for a in self._filling(call):
            self.rows.add("filled", call, (local("residuals", i), a), (local("residuals", i),), call.fields, needs=needs)
        if self.goes_on(call):
            self.rows.add(f"{pausing}bwd", call, (local("residuals", i), dy), (local("dparams", i), local("dx", i)))
        else:
            self.rows.add(f"{pausing}dgrad", call, (local("residuals", i), dy), (local("dx", i), local("pending", i)))

    def _raw(self, call: Call, dy: str) -> None:
        """The function that runs after its checks; nothing if it has no such function, or no dy."""
        i, whole = call.index, self.goes_on(call)
        raw = raw_of(call.op.bwd if whole else call.op.dgrad)
        if raw is None or dy == NONE or type(call.recomputed_by) is Join:
            return
        for a in self._filling(call):
            self.rows.add(
                "twin", call, (local("residuals", i), a), (local("residuals", i),), needs=call.needs if whole else call.kept
            )
        dgrad, wgrad = raw if isinstance(raw, tuple) else (raw, None)
        given, d, p, q = (local("residuals", i), dy), local("dx", i), local("pending", i), local("dparams", i)
        if whole and not isinstance(raw, tuple):
            self.rows.add("raw bwd", call, given, (q, d), dgrad)
        else:
            # The checked function computes both as one: a profile names them alike, whichever of the two runs.
            self.rows.add(
                "raw dgrad of bwd" if whole else "raw dgrad", call, given, (d, q if whole and wgrad is None else p), dgrad
            )
        # Before the weight gradient, which reads none of it. Of residuals that were filled in, "twin" has emptied the original.
        if call.place.scope is not None and not self._filling(call):  # type: ignore[union-attr]
            self.rows.add("empty", call, (local("residuals", i),))
        if whole and wgrad is not None:
            self.rows.add("raw wgrad of bwd", call, (p,), (q,), wgrad)

    def _of_skip(self, call: Call) -> None:
        """The backward of a skip's fork, or of its sum."""
        if call.op is fork:
            # dy before the body's gradient: the order decides the bits, as in nested functions
            there = [local("gradient", value) for value in (*call.gives, call.out) if value in self.gradients.have]
            if call.needs.x and len(there) > 1:  # their sum first: it is what the skip gives to a sum around it
                self.rows.add("sum", call, there, (local("dx", call.index),))
                there = [local("dx", call.index)]
            if call.needs.x and there:
                self.gradients.give(call.main, there[0])
        elif call.out in self.gradients.have:
            for value in [call.takes[0]] * bool(call.needs.input(1)) + flat(call.main) * bool(call.needs.input(0)):
                self.gradients.give(value, local("gradient", call.out))

    def recipe(self, call: Call, held: bool = False) -> None:
        """Keep what the recomputed y is computed from, for weight gradients that read it."""
        if not self.weights.whole and call.source:
            kinds = [(kind, one) for one in call.readers for kind in ("pending", "recipe")[not one.fills_pending : 1 + one.source]]
            readers = [local(kind, reader.index) for kind, reader in kinds]  # a reader's y may be recomputed from it, too
            self.rows.add("recipe", call, [local("held", call.index)] * held + readers, (local("recipe", call.index),), readers)
