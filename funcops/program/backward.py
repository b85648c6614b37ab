"""The backward of a program, whole or one of its halves, as source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from funcops.contract.op import NoneType, raw_of
from funcops.ops.fork import fork
from funcops.program import run
from funcops.program.lower import Alias, Call, Fold, Lowered, Place, Scope, Value
from funcops.program.rules import Cover, Piece, Rule
from funcops.program.source import Source, flat, total


class Backward(Source):
    """The function that `which` names: `backward(K, dy, I) -> (dparams, dx)`; its halves `dgrad(K, dy) -> (dx, pending)` and
    `wgrad(W, I) -> dparams`; or `products(W, I)`: the products of all calls, in place of the weight gradients that they make."""

    def __init__(self, lowered: Lowered, cover: Cover, traced: bool, which: str) -> None:
        super().__init__(lowered, cover, traced)
        self.which, self.whole = which, which == "backward"
        self.kept = "W" if which in ("wgrad", "products") else "K"  # the trees that it reads
        self.have: set[int] = set()  # the values that have a gradient so far
        self.computed: set[int] = set()  # the calls whose y was recomputed
        self.held: set[int] = set()  # the calls whose residuals are in locals, as a piece took them
        self.keys = {row.out for row in lowered.forward if type(row) is Fold}  # values without a gradient
        self.outer = {v: name for name, v in lowered.outputs.items()}  # outputs whose gradient is only dy so far
        # the calls whose weight gradients wait for the recomputed y
        self.late = {reader.index for readers in self._given_recomputed().values() for reader in readers}

    def write(self) -> tuple[str, dict[str, Any]]:
        if self.kept == "W":
            return self._second_half()
        low, done = self.lowered, set[int]()
        self._enter(low)
        for row in low.backward:
            if type(row) is Alias:
                if row.value in self.have:
                    self._give(row.of, f"g{row.value}")
            elif row.index not in done and row.index not in self.cover.waiting:
                piece = self.cover.backward.get(row.index)
                if piece is None:
                    self._call(row)
                else:
                    self._piece(piece)
                    done.update(call.index for call in piece.calls)
        dx = self._gradient(low.main)
        if low.extras:
            dx = f"WithExtras({dx}, {{{', '.join(f'{n!r}: {self._gradient(v)}' for n, v in low.extras.items())}}})"
        if self.whole:
            return self.written("backward", "K, dy, I", f"{self.tree('q', self.gradients)}, {dx}")
        return self.written("dgrad", "K, dy", f"{dx}, {self.tree('p', self._pending)}")

    def _given_recomputed(self) -> dict[int, list[Call]]:
        """The readers of each call whose y comes with its gradient, by its index; their weight gradients wait for that y."""
        if not self.whole:
            return {}
        given = {piece.calls[-1] for piece in self.cover.backward.values() if piece.rule.recompute}
        return {call.index: [row for row in self.lowered.backward if row in call.readers] for call in given}

    def _goes_on(self, call: Call) -> bool:
        """Whether its weight gradient is computed right after its input's gradient."""
        return self.whole and call.index not in self.late

    def _pending(self, scope: Scope, parts: str) -> str:
        if not scope.needs:
            return "None"
        i = scope.index
        self.names |= {f"W{i}": scope.pending, f"k{i}": scope.cfg, f"m{i}": scope.needs}
        sources = [(name, part) for name, part in scope.parts.items() if isinstance(part, Call) and part.source]
        recipes = "".join(f", {run.recipe_of(name)!r}: r{part.index}" for name, part in sources)
        return f"run.pending_of(W{i}, {parts[:-1]}{recipes}}}, k{i}, m{i})"

    # Gradients of values.

    def _enter(self, low: Lowered) -> None:
        """Take dy apart: the gradients of the output and of the named outputs."""
        value = low.output
        if low.outputs:
            parts = ", ".join(f"g{v}" for v in low.outputs.values())
            self.put(f"dy, {parts} = run.taken_apart({self._half!r}, dy, {tuple(low.outputs)!r})")
            self.have.update(low.outputs.values())
        if isinstance(value, tuple):
            self._take_apart("dy", value)
        else:
            self._give(value, "dy")
        self.put("del dy")

    def _take_apart(self, name: str, value: Value) -> None:
        """Unpack a tuple of gradients into the gradients of its parts."""
        numbers = flat(value)
        targets = [f"g{v}" if v not in self.have else f"part{v}" for v in numbers]
        parts = f"run.parts_of({name}, {value!r})"
        if len(numbers) == len(value):
            parts = f"{name} if type({name}) is tuple and len({name}) == {len(value)} else {parts}"
        self.put(f"{_nested(value, iter(targets))} = {parts}")
        for v, target in zip(numbers, targets, strict=True):
            if v in self.have:
                self._give(v, target)
            self.have.add(v)

    def _gradient(self, value: int) -> str:
        return f"g{value}" if value in self.have else "None"

    def _give(self, value: int, gradient: str) -> None:
        """Add to the gradient of a value."""
        if value in self.outer:
            self._meet(f"g{value}", gradient, self.outer.pop(value))
        self.put(f"g{value} = {total(f'g{value}', gradient) if value in self.have else gradient}")
        self.have.add(value)

    def _meet(self, dy: str, gradient: str, name: str) -> None:
        """Check that the caller's gradient of an output is like the gradient from its readers inside, to which it is added."""
        self.at("")
        self.put(f"run.meet({self._half!r}, {name!r}, {dy}, {gradient})")

    @property
    def _half(self) -> str:
        return f"{self.lowered.name}_{'bwd' if self.whole else 'dgrad'}"

    def _dy(self, call: Call) -> str:
        """The name of the gradient of the call's outputs, or `None`."""
        parts = [self._gradient(v) for v in (call.out, *call.gives)]
        there = [part for part in parts if part != "None"]
        if not call.gives or not there:
            return parts[0]
        dy = f"({', '.join(parts)})"
        if call.names:
            own = ", ".join(f"{name!r}: {part}" for name, part in zip(call.names, parts[1:], strict=True))
            dy = f"WithExtras({parts[0]}, {{{own}}})"
        self.put(f"dy{call.index} = None if {' and '.join(f'{part} is None' for part in there)} else {dy}")
        return f"dy{call.index}"

    def _spread(self, call: Call) -> None:
        """Add the call's dx to the gradients of the values that it read."""
        d = f"d{call.index}"
        if not call.takes:
            self._give_main(call, d)
            return
        parts = [f"{d}_{k}" for k in range(len(call.takes) + 1)]
        masks = ["main", *(f"extras.{n}" for n in call.labels)] if call.labels else [str(k) for k in range(len(parts))]
        if call.labels:
            given = [f"{d}.main", *(f"{d}.extras[{label!r}]" for label in call.labels)]
            self.put(*[f"{part} = None if {d} is None else {own}" for part, own in zip(parts, given, strict=True)])
        else:
            self.put(f"{', '.join(parts)} = {(None,) * len(parts)} if {d} is None else {d}")
        if call.needs.input(masks[0]):
            self._give_main(call, parts[0])
        for value, mask, part in zip(call.takes, masks[1:], parts[1:], strict=True):
            if call.needs.input(mask) and value not in self.keys:
                self._give(value, part)

    def _give_main(self, call: Call, name: str) -> None:
        if isinstance(call.main, tuple):
            self._take_apart(name, call.main)
        else:
            self._give(call.main, name)

    # Trees.

    def _open(self, place: Place | None) -> None:
        """Put the residuals or pending of a scope, and its accumulators, into locals."""
        scope = None if place is None else place.scope
        if scope is None or scope.index in self.opened:
            return
        self._open(scope.place)
        self.opened.add(scope.index)
        i, outer, where = scope.index, scope.place.scope, self._where(scope)
        if self.kept == "W" or scope.needs:
            self.names |= {f"R{i}": scope.residuals if self.kept == "K" else scope.pending, f"k{i}": scope.cfg}
            if outer is None:
                self.put(f"{self.kept}{i} = {self.kept}; del {self.kept}")
            else:
                self.at(scope.place.path)
                given = f"({where!r}, {self.kept}{outer.index}, {scope.place.name!r}, R{i}, k{i})"
                if self.kept == "W":
                    self.put(f"W{i} = None if W{outer.index} is None else run.opened{given}")
                else:
                    unusual = f"t{outer.index} or type(K{i}) is not R{i} or K{i}.cfg is not k{i} or K{i}.gone or K{i}.had"
                    self.put(f"K{i} = K{outer.index}[{scope.place.name!r}]", f"if {unusual}: K{i} = run.scope_of{given}")
            if self.kept == "K":
                self.put(f"t{i} = K{i}.donated")
        if self.which != "dgrad":
            self.accumulators(scope, where)

    def _where(self, scope: Scope) -> str:
        return f"{scope.kind}_{'wgrad' if self.kept == 'W' else 'bwd' if self.whole else 'dgrad'}"

    def _node(self, call: Call) -> str:
        """The residuals of a call, without taking them out of their tree."""
        assert call.place is not None
        return f"h{call.index}" if call.index in self.held else self.part("K", call.place)

    # Calls.

    def _call(self, call: Call) -> None:
        if call.place is None:
            self._of_skip(call)
            return
        i, scope, into = call.index, call.place.scope, f"into={self.part('I', call.place)}"
        self._open(call.place)
        self.at(call.path)
        self._recipe(call)
        self.names |= {f"e{i}": call.op.wgrad, f"c{i}": call.cfg}
        if not call.needs:
            self.put(f"q{i} = e{i}(None, c{i}, {into})" if self.whole else f"p{i} = None")
            return
        if scope is None:
            self.put(f"n{i} = K; del K")
        else:
            self.put(f"n{i} = run.part(K{scope.index}, {call.place.name!r}) if t{scope.index} else {self._node(call)}")
        dy, recomputed = self._dy(call), self._filling(call)
        checked, ready = self._checked(call, dy, into, recomputed), self._raw(call, dy, into)
        if ready and self.is_ready(call, f"n{i}", f" and {dy} is not None"):
            if recomputed:
                fields = [f"n{i}.{name} = {recomputed}" for name in call.fields]
                ready = [f"n{i} = n{i}.twin(); n{i}.needs = u{i}; n{i}._marks = None", *fields, *ready]
            self.put("if ok:", *["    " + line for line in ready], "else:", *["    " + line for line in checked])
        else:
            self.put(*checked)
        if call.needs.x:
            self._spread(call)

    def _checked(self, call: Call, dy: str, into: str, recomputed: str) -> list[str]:
        """The lines that call the op's own function."""
        i = call.index
        filled = [f"if n{i} is not None: n{i} = run.filled(n{i}, {call.fields!r}, {recomputed}, u{i})"] if recomputed else []
        if self._goes_on(call):
            self.names[f"b{i}"] = call.op.bwd
            return [*filled, f"q{i}, d{i} = (e{i}(None, c{i}, {into}), None) if n{i} is None else b{i}(n{i}, {dy}, c{i}, {into})"]
        self.names[f"b{i}"] = call.op.dgrad
        return [*filled, f"d{i}, p{i} = (None, None) if n{i} is None else b{i}(n{i}, {dy}, c{i})"]

    def _raw(self, call: Call, dy: str, into: str) -> list[str]:
        """The lines that call the function that runs after its checks; none if it has no such function, or no dy."""
        i, raw = call.index, raw_of(call.op.bwd if self._goes_on(call) else call.op.dgrad)
        if raw is None or dy == "None":
            return []
        dgrad, wgrad = raw if isinstance(raw, tuple) else (raw, None)
        self.names |= {f"x{i}": dgrad, f"z{i}": wgrad}
        if not self._goes_on(call):
            return [f"d{i}, p{i} = x{i}(n{i}, {dy}, c{i})"]
        if not isinstance(raw, tuple):
            return [f"q{i}, d{i} = x{i}(n{i}, {dy}, c{i}, {into})"]
        if wgrad is None:
            return [f"d{i}, q{i} = x{i}(n{i}, {dy}, c{i})"]
        added = f"q{i} = e{i}(None, c{i}, {into}) if p{i} is None else z{i}(p{i}, c{i}, {into})"
        return [f"d{i}, p{i} = x{i}(n{i}, {dy}, c{i})", added]

    def _of_skip(self, call: Call) -> None:
        """The backward of a skip's fork, or of its sum."""
        if call.op is fork:
            there = [f"g{value}" for value in (*call.gives, call.out) if value in self.have]
            if call.needs.x and len(there) > 1:  # their sum first: it is what the skip gives to a sum around it
                self.put(f"d{call.index} = {total(*there)}")
                there = [f"d{call.index}"]
            if call.needs.x and there:
                self._give(call.main, there[0])
        elif call.out in self.have:
            for value in [call.takes[0]] * bool(call.needs.input(1)) + flat(call.main) * bool(call.needs.input(0)):
                self._give(value, f"g{call.out}")

    def _second_half(self) -> tuple[str, dict[str, Any]]:
        """The weight gradients of the pendings, or their products."""
        if self.which == "products":
            self.put("found = []")
        calls = [row for row in self.lowered.backward if type(row) is Call and row.place is not None]
        together = {call.index: piece for piece in self.cover.backward.values() if piece.rule.wgrads for call in piece.calls}
        for at, call in enumerate(calls):
            self._wait(call)
            piece = together.get(call.index)
            if piece is None:
                self._wgrads([call])
            elif not any(other in piece.calls for other in calls[at + 1 :]):
                self._wgrads([other for other in calls if other in piece.calls], piece.rule)
        return self.written(self.which, "W, I", "found" if self.which == "products" else self.tree("q", self.gradients))

    def _wait(self, call: Call) -> None:
        """Put the call's pending into a local, with the recomputed y of its source."""
        place = call.place
        assert place is not None
        if call.op.params is NoneType:
            return
        self._open(place)
        self.at(call.path)
        if place.scope is None:
            self.put(f"p{call.index} = W; del W")
        else:
            k = place.scope.index
            self.put(f"p{call.index} = None if W{k} is None else run.part(W{k}, {place.name!r})")
        if call.recomputed_by is not None:
            self._fill(call, call.recomputed_by)

    def _fill(self, call: Call, source: Call) -> None:
        """Put the recomputed y of `source` into the call's pending."""
        i, recomputed = call.index, self._recomputed(source)
        self.names[f"u{i}"] = call.needs
        self.put(f"if p{i} is not None and {recomputed} is not None: p{i} = run.filled(p{i}, {call.fields!r}, {recomputed}, u{i})")

    def _wgrads(self, calls: list[Call], rule: Rule | None = None) -> None:
        """The weight gradients of pendings in locals: together if the rule can, one by one otherwise."""
        which, own = "products" if self.which == "products" else "wgrad", [c for c in calls if c.op.params is not NoneType]
        self.put(*[f"q{call.index} = None" for call in calls if call not in own])
        together = own[0].index if own and rule is not None and rule.wgrads is not None else None
        if together is not None:
            self.names |= {f"joint{together}": rule, f"own{together}": tuple(own)}
            pendings, into, found = ("".join(f"{one}, " for one in of) for of in zip(*map(self._ends, own), strict=True))
            self.put(f"j{together} = run.wgrads(joint{together}, own{together}, ({pendings}), ({into}))")
            self.put(f"if j{together} is NotImplemented:")
            self.depth += 1
        for call in own:
            i = call.index
            self.at(call.path)
            self.names |= {f"e{i}": getattr(call.op, which), f"c{i}": call.cfg}
            target = f"q{i} =" if which == "wgrad" else "found +="
            self.put(f"{target} e{i}(p{i}, c{i}, into={self._ends(call)[1]})")
        if together is not None:
            self.depth -= 1
            self.put("else:", f"    ({found}) = j{together}")

    def _ends(self, call: Call) -> tuple[str, str, str]:
        """The names of a call's pending, accumulators and weight gradients."""
        assert call.place is not None
        return f"p{call.index}", self.part("I", call.place), f"q{call.index}"

    # Recomputation.

    def _filling(self, call: Call) -> str:
        """The recomputed y that is put into the call's residuals."""
        if call.recomputed_by is None or not (self._goes_on(call) or call.recomputed_in_dgrad):
            return ""
        self.names[f"u{call.index}"] = call.needs if self._goes_on(call) else call.kept
        recomputed = self._recomputed(call.recomputed_by)
        self.at(call.path)
        return recomputed

    def _recomputed(self, source: Call) -> str:
        """The call's recomputed y, computed before its first reader."""
        k, place = source.index, source.place
        if k in self.computed:
            return f"a{k}"
        assert place is not None and place.scope is not None, "a step of a chain"
        self.computed.add(k)
        self._open(place)
        self.names |= {f"y{k}": source.op.recompute, f"c{k}": source.cfg}
        self.at(source.path)
        if self.kept == "W":
            self.put(f"a{k} = run.recomputed(y{k}, W{place.scope.index}, {place.name!r}, c{k})")
            return f"a{k}"
        raw, fn = raw_of(source.op.recompute), f"y{k}"
        self.put(f"h = {self._node(source)}")
        if raw is not None and self.is_ready(source, "h"):
            self.names[f"s{k}"] = raw
            fn = f"(s{k} if ok else y{k})"
        self.put(f"a{k} = {fn}(h, c{k})", "del h")
        return f"a{k}"

    def _recipe(self, call: Call) -> None:
        """Keep what the recomputed y is computed from, for weight gradients that read it."""
        if self.whole or not call.source:
            return
        self.names[f"o{call.index}"] = call.op
        some = " or ".join(f"p{reader.index} is not None" for reader in self.lowered.calls if reader.recomputed_by is call)
        self.put(f"r{call.index} = run.recipe(o{call.index}, {self._node(call)}) if {some} else None")

    # Pieces.

    def _piece(self, piece: Piece) -> None:
        """Calls whose dgrads run by a rule, or one by one if it declines their inputs."""
        calls, i = piece.calls, piece.calls[0].index
        in_order = [row for row in self.lowered.backward if type(row) is Call and row in calls]
        sources = [call.recomputed_by for call in calls if call.recomputed_by is not None]
        filled = {call.index: source for call in calls if (source := self._filled_from(call, piece)) is not None}
        late = self._given_recomputed().get(calls[-1].index, []) if piece.rule.recompute else []
        for call in (*calls, *sources):
            self._open(call.place)
        held = [*filled.values(), *calls[-1:] * bool(late)] if self.whole else [call for call in calls if call.source]
        self.at("")
        inside = {v for call in calls for v in call.gives}
        apart = {v: self.outer.pop(v) for call in calls for v in call.takes if v in self.outer and v not in inside}
        for v in apart:  # added after the piece: before, there is nothing to compare it with
            self.put(f"part{v} = g{v}")
            self.have.remove(v)
        self.put(*[f"h{source.index} = {self._node(source)}" for source in dict.fromkeys(held)])
        scopes = {c.place.scope.index for c in (*calls, *sources) if c.place and c.place.scope and c.place.scope.needs}
        values = sorted({v for call in calls for v in (*call.gives, *call.takes) if v in self.have})
        dys = [self._gradient(call.out) for call in piece.ends]
        dy = f"({', '.join(dys)})" if piece.siblings else dys[-1]
        where = next(self._where(call.place.scope) for call in calls if call.place and call.place.scope)
        trees = ", ".join(f"{scope}: K{scope}" for scope in sorted(scopes))
        self.names |= {f"rule{i}": piece.rule, f"calls{i}": calls}
        self.put(
            f"G{i} = {{{', '.join(f'{v}: g{v}' for v in values)}}}",
            f"out{i} = run.backward_piece(rule{i}, calls{i}, {{{trees}}}, {dy}, G{i}, {where!r})",
            f"if out{i} is NotImplemented:",
        )
        self.depth += 1
        have, computed, self.held = set(self.have), set(self.computed), {source.index for source in held}
        if late:
            self._recomputed(calls[-1])
        self.held = set()
        for call in in_order:
            self._call(call)
        self.depth -= 1
        self.put("else:")
        self.depth += 1
        after, self.have, self.computed, self.held = self.have, have, set(computed), {source.index for source in held}
        if late:
            self.put(f"a{calls[-1].index} = G{i}.pop({calls[-1].out})")
        self._after(piece, [call for call in in_order if call.place and call.index not in self.late], filled)
        self.put(*[f"g{v} = None" for v in sorted(after - self.have - {v for call in calls for v in (call.out, *call.gives)})])
        self.depth -= 1
        self.have, self.computed, self.held = after, computed, set()
        for v, name in apart.items():
            self._meet(f"part{v}", self._gradient(v), name)
            self._give(v, f"part{v}")
        if late:
            self.computed.add(calls[-1].index)
            for call in late:
                self._fill(call, calls[-1])
            self._wgrads(late, self._rule_of_wgrads(late))

    def _filled_from(self, call: Call, piece: Piece) -> Call | None:
        """The call whose recomputed y is put into the pending that the piece gave this one, or None."""
        given = call.index in self.late or (piece.rule.whole and call.recomputed_by in piece.calls)
        return call.recomputed_by if self.whole and not given else None

    def _after(self, piece: Piece, ready: list[Call], filled: dict[int, Call]) -> None:
        """Pass on the result of the rule, `(dmain, pending of each)`."""
        calls, i = piece.calls, piece.calls[0].index
        self.put(f"d{i}, ({''.join(f'p{call.index}, ' if call.place else '_, ' for call in calls)}) = out{i}")
        for call in calls:
            self._recipe(call)
        for v in sorted({v for call in calls for v in call.takes} - self.keys - {v for call in calls for v in call.gives}):
            self.put(f"g{v} = G{i}.get({v})")
            self.have.add(v)
        self._give_main(calls[0], f"d{i}")
        if self.whole:
            for call in ready:
                if call.index in filled:
                    self._fill(call, filled[call.index])
            self._wgrads(ready, self._rule_of_wgrads(ready))

    def _rule_of_wgrads(self, calls: list[Call]) -> Rule | None:
        """The rule that gives weight gradients of these together, or None."""
        pieces = self.cover.backward.values()
        return next((piece.rule for piece in pieces if piece.rule.wgrads and calls and calls[0] in piece.calls), None)


def _nested(value: Value, names: Iterator[str]) -> str:
    """Names in the form of a value, as the left side of an assignment."""
    return "(" + "".join((_nested(one, names) if isinstance(one, tuple) else next(names)) + ", " for one in value) + ")"
