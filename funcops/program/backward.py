"""The backward of a program, whole or its first half, as source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from funcops.op import NoneType, raw_of
from funcops.ops.fork import fork
from funcops.program import run
from funcops.program.lower import Alias, Call, Fold, Lowered, Place, Scope, Value
from funcops.program.rules import Cover, Piece
from funcops.program.source import Source, flat, total


class Backward(Source):
    """`backward(K, dy, I) -> (dparams, dx)`; where not `whole`, `dgrad(K, dy) -> (dx, pending)`."""

    def __init__(self, lowered: Lowered, cover: Cover, traced: bool, whole: bool) -> None:
        super().__init__(lowered, cover, traced)
        self.whole = whole
        self.have: set[int] = set()  # the values that have a gradient by now
        self.computed: set[int] = set()  # the calls whose y was computed again
        self.to_read: dict[int, int] = {}  # by such a call, how many are still to read it
        self.keys = {row.out for row in lowered.forward if type(row) is Fold}  # which have no gradient

    def write(self) -> tuple[str, dict[str, Any]]:
        low = self.lowered
        self._enter(low.output)
        for call in low.calls:
            if call.again is not None and self._reads_again(call):
                self.to_read[call.again.index] = self.to_read.get(call.again.index, 0) + 1
        done: set[int] = set()
        for row in low.backward:
            if type(row) is Alias:
                if row.value in self.have:
                    self._give(row.of, f"g{row.value}")
                    self._drop([row.value])
            elif row.index not in done and row.index not in self.cover.waiting:
                piece = self.cover.backward.get(row.index)
                if piece is None or (piece.rule.whole and not self.whole):
                    self._call(row)
                    done.add(row.index)
                else:
                    self._piece(piece)
                    done.update(call.index for call in piece.calls)
        dx = self._gradient(low.main)
        if low.extras:
            dx = f"WithExtras({dx}, {{{', '.join(f'{n!r}: {self._gradient(v)}' for n, v in low.extras.items())}}})"
        if self.whole:
            return self.written("backward", "K, dy, I", f"{self.tree('q', self.gradients)}, {dx}")
        return self.written("dgrad", "K, dy", f"{dx}, {self.tree('p', self._pending)}")

    def _pending(self, scope: Scope, parts: str) -> str:
        if not scope.needs:
            return "None"
        i = scope.index
        self.names |= {f"W{i}": scope.pending, f"k{i}": scope.cfg, f"m{i}": scope.needs}
        sources = [(name, part) for name, part in scope.parts.items() if isinstance(part, Call) and part.source]
        recipes = "".join(f", {run.recipe_of(name)!r}: r{part.index}" for name, part in sources)
        return f"run.pending_of(W{i}, {parts[:-1]}{recipes}}}, k{i}, m{i})"

    # Gradients of values.

    def _enter(self, value: Value) -> None:
        """dy is the gradient of the output."""
        if isinstance(value, tuple):
            self._take_apart("dy", value)
        else:
            self.put(f"g{value} = dy")
            self.have.add(value)
        self.put("del dy")

    def _take_apart(self, name: str, value: Value) -> None:
        """A tuple of gradients to those of its parts."""
        numbers = flat(value)
        targets = [f"g{v}" if v not in self.have else f"d_{v}" for v in numbers]
        if len(numbers) == len(value):
            parts = f"{name} if type({name}) is tuple and len({name}) == {len(value)} else run.parts_of({name}, {len(value)})"
        else:
            parts = f"run.nested_parts({name}, {value!r})"
        self.put(f"{_nested(value, iter(targets))} = {parts}")
        for v, target in zip(numbers, targets, strict=True):
            if v in self.have:
                self._give(v, target)
                self.put(f"del {target}")
            self.have.add(v)

    def _gradient(self, value: int) -> str:
        return f"g{value}" if value in self.have else "None"

    def _give(self, value: int, gradient: str) -> None:
        """Add to the gradient of a value."""
        self.put(f"g{value} = {total(f'g{value}', gradient) if value in self.have else gradient}")
        self.have.add(value)

    def _drop(self, values: Iterable[int]) -> None:
        gone = [v for v in values if v in self.have]
        self.have.difference_update(gone)
        if gone:
            self.put("del " + ", ".join(f"g{v}" for v in gone))

    def _dy(self, call: Call) -> str:
        """The gradient of what the call gave; a name, which `None` is, too."""
        if not call.gives:
            return self._gradient(call.out)
        parts = [self._gradient(v) for v in (call.out, *call.gives)]
        there = [part for part in parts if part != "None"]
        if not there:
            return "None"
        self.put(f"dys = None if {' and '.join(f'{part} is None' for part in there)} else ({', '.join(parts)})")
        return "dys"

    def _spread(self, call: Call) -> None:
        """What the call's dx, in `d`, gives to the values that it read."""
        if not call.takes:
            self._spread_main(call, "d")
            return
        parts = [f"d{k}" for k in range(len(call.takes) + 1)]
        masks = ["main", *(f"extras.{n}" for n in call.labels)] if call.labels else [str(k) for k in range(len(parts))]
        wanted = [
            bool(call.needs.input(mask)) and value not in self.keys for mask, value in zip(masks, (-1, *call.takes), strict=True)
        ]
        if call.labels:
            given = ["d.main", *(f"d.extras[{label!r}]" for label in call.labels)]
            self.put(*[f"{part} = None if d is None else {own}" for part, own in zip(parts, given, strict=True)])
        else:
            self.put(f"{', '.join(parts)} = {(None,) * len(parts)} if d is None else d")
        if wanted[0]:
            self._spread_main(call, "d0")
        for value, asked, part in zip(call.takes, wanted[1:], parts[1:], strict=True):
            if asked:
                self._give(value, part)
        self.put(f"del {', '.join(parts)}")

    def _spread_main(self, call: Call, name: str) -> None:
        if isinstance(call.main, tuple):
            self._take_apart(name, call.main)
        else:
            self._give(call.main, name)

    # Trees.

    def _open(self, place: Place | None) -> None:
        """The residuals and accumulators of a scope."""
        scope = None if place is None else place.scope
        if scope is None or scope.index in self.opened:
            return
        self._open(scope.place)
        self.opened.add(scope.index)
        i, outer, where = scope.index, scope.place.scope, self._where(scope)
        if scope.needs:
            self.names |= {f"R{i}": scope.residuals, f"k{i}": scope.cfg}
            if outer is None:
                self.put(f"K{i} = K; del K")
            else:
                self.at(scope.place.path)
                unusual = f"t{outer.index} or type(K{i}) is not R{i} or K{i}.cfg is not k{i} or K{i}.gone or K{i}.had"
                self.put(
                    f"K{i} = K{outer.index}[{scope.place.name!r}]",
                    f"if {unusual}: K{i} = run.scope_of({where!r}, K{outer.index}, {scope.place.name!r}, R{i}, k{i})",
                )
            self.put(f"t{i} = K{i}.donated")
        if self.whole:
            self.accumulators(scope, where)

    def _where(self, scope: Scope) -> str:
        return f"{scope.kind}_{'bwd' if self.whole else 'dgrad'}"

    def _node(self, call: Call) -> str:
        """The residuals of a call, which stay where they are."""
        assert call.place is not None
        return self.part("K", call.place)

    # Calls.

    def _call(self, call: Call) -> None:
        if call.place is None:
            self._of_skip(call)
            return
        i, op, into = call.index, call.op, f"into={self.part('I', call.place)}"
        self._open(call.place)
        self.at(call.path)
        self._recipe(call)
        self.names |= {f"e{i}": op.wgrad, f"c{i}": call.cfg}
        if not call.needs:
            self.put(f"q{i} = e{i}(None, c{i}, {into})" if self.whole else f"p{i} = None")
            self._drop([call.out, *call.gives])
            return
        if call.place.scope is None:
            self.put(f"n{i} = K; del K")
        else:
            k = call.place.scope.index
            self.put(f"n{i} = run.part(K{k}, {call.place.name!r}) if t{k} else {self._node(call)}")
        dy, filled = self._dy(call), self._filling(call)
        ready = self._raw(call, dy, into)
        if ready is not None and self.is_ready(call, f"n{i}", f" and {dy} is not None"):
            self.put("if ok:")
            self.depth += 1
            if filled:
                self.put(f"n{i} = n{i}.twin(); n{i}.needs = u{i}; n{i}._marks = None")
                self.put(*[f"n{i}.{name} = a{filled}" for name in call.fields])
            self.put(*ready)
            self.depth -= 1
            self.put("else:")
            self.depth += 1
            self._checked(call, dy, into, filled)
            self.depth -= 1
        else:
            self._checked(call, dy, into, filled)
        if filled:
            self.to_read[int(filled)] -= 1
            if not self.to_read[int(filled)]:
                self.put(f"del a{filled}")
        self.put(f"del n{i}" + (", dys" if dy == "dys" else ""))
        self._drop([call.out, *call.gives])
        if call.needs.x:
            self._spread(call)
        self.put("del d")

    def _checked(self, call: Call, dy: str, into: str, filled: str) -> None:
        """By the op's own function."""
        i = call.index
        if filled:
            self.put(f"if n{i} is not None: n{i} = run.filled(n{i}, {call.fields!r}, a{filled}, u{i})")
        if self.whole:
            self.names[f"b{i}"] = call.op.bwd
            self.put(f"q{i}, d = (e{i}(None, c{i}, {into}), None) if n{i} is None else b{i}(n{i}, {dy}, c{i}, {into})")
        else:
            self.names[f"b{i}"] = call.op.dgrad
            self.put(f"d, p{i} = (None, None) if n{i} is None else b{i}(n{i}, {dy}, c{i})")

    def _raw(self, call: Call, dy: str, into: str) -> list[str] | None:
        """By what that runs after its checks; None where there is no such thing."""
        i = call.index
        raw = raw_of(call.op.bwd if self.whole else call.op.dgrad)
        if raw is None or dy == "None":
            return None
        if not self.whole:
            self.names[f"x{i}"] = raw
            return [f"d, p{i} = x{i}(n{i}, {dy}, c{i})"]
        if not isinstance(raw, tuple):
            self.names[f"x{i}"] = raw
            return [f"q{i}, d = x{i}(n{i}, {dy}, c{i}, {into})"]
        self.names |= {f"x{i}": raw[0], f"z{i}": raw[1]}
        if raw[1] is None:
            return [f"d, q{i} = x{i}(n{i}, {dy}, c{i})"]
        return [
            f"d, p = x{i}(n{i}, {dy}, c{i})",
            f"q{i} = e{i}(None, c{i}, {into}) if p is None else z{i}(p, c{i}, {into})",
            "del p",
        ]

    def _of_skip(self, call: Call) -> None:
        """The fork of a skip, or its sum."""
        if call.op is fork:
            there = [f"g{value}" for value in (*call.gives, call.out) if value in self.have]
            if call.needs.x and there:  # their sum first: it is what the skip gives to a sum around it
                if len(there) > 1:
                    self.put(f"d = {total(*there)}")
                self._give(call.main, "d" if len(there) > 1 else there[0])
                self.put(*["del d"] * (len(there) > 1))
            self._drop([*call.gives, call.out])
        elif call.out in self.have:
            targets = [call.takes[0]] * bool(call.needs.input(1)) + flat(call.main) * bool(call.needs.input(0))
            for value in targets:
                self._give(value, f"g{call.out}")
            self._drop([call.out])

    # What is computed again.

    def _reads_again(self, call: Call) -> bool:
        return self.whole or call.again_in_dgrad

    def _filling(self, call: Call) -> str:
        """The number of the y that is put into the call's residuals, computed now if nobody has read it yet."""
        source = call.again
        if source is None or not self._reads_again(call):
            return ""
        self.names[f"u{call.index}"] = call.needs if self.whole else call.kept
        self._again(source, "a", self._open_node(source))
        self.at(call.path)
        return str(source.index)

    def _open_node(self, source: Call) -> str:
        self._open(source.place)
        return self._node(source)

    def _again(self, source: Call, name: str, node: str) -> None:
        k = source.index
        if k in self.computed and name == "a":
            return
        self.computed |= {k} if name == "a" else set()
        self.names |= {f"y{k}": source.op.again, f"c{k}": source.cfg}
        raw, fn = raw_of(source.op.again), f"y{k}"
        self.at(source.path)
        self.put(f"h = {node}")
        if raw is not None and self.is_ready(source, "h"):
            self.names[f"s{k}"] = raw
            fn = f"(s{k} if ok else y{k})"
        self.put(f"{name}{k} = {fn}(h, c{k})", "del h")

    def _recipe(self, call: Call, node: str = "") -> None:
        """For the weight gradients that read y again: what it is made of, before it goes."""
        if self.whole or not call.source:
            return
        self.names[f"o{call.index}"] = call.op
        some = " or ".join(f"p{reader.index} is not None" for reader in self.lowered.calls if reader.again is call)
        self.put(f"r{call.index} = run.recipe(o{call.index}, {node or self._node(call)}) if {some} else None")

    # Pieces.

    def _piece(self, piece: Piece) -> None:
        """Calls whose dgrads run by a rule, or one by one where that will not have their inputs."""
        calls, i = piece.calls, piece.calls[0].index
        for call in (*calls, *(call.again for call in calls if call.again is not None)):
            self._open(call.place)
        held = self._held(piece)
        self.at("")
        self.put(*[f"h{source.index} = {self._node(source)}" for source in held])
        scopes = {call.place.scope for call in (*calls, *held) if call.place is not None and call.place.scope is not None}
        trees = ", ".join(f"{scope.index}: K{scope.index}" for scope in sorted(scopes, key=lambda s: s.index) if scope.needs)
        sources = {call.again.place.scope for call in calls if call.again is not None and call.again.place is not None}
        trees += "".join(f", {s.index}: K{s.index}" for s in sources - scopes if s is not None)
        values = sorted({v for call in calls for v in (*call.gives, *call.takes) if v in self.have})
        dys = [self._gradient(call.out) for call in calls]
        dy = f"({', '.join(dys)})" if piece.siblings else dys[-1]
        where = next(self._where(call.place.scope) for call in calls if call.place is not None and call.place.scope is not None)
        self.names |= {f"rule{i}": piece.rule, f"calls{i}": calls}
        self.put(
            f"G = {{{', '.join(f'{v}: g{v}' for v in values)}}}",
            f"r = run.backward_piece(rule{i}, calls{i}, {{{trees}}}, {dy}, G, {where!r})",
            "if r is NotImplemented:",
        )
        self.depth += 1
        before = set(self.have), set(self.computed), dict(self.to_read)
        for call in calls if piece.siblings else calls[::-1]:
            self._call(call)
        after = self.have
        self.have, self.computed, self.to_read = before
        self.depth -= 1
        self.put("else:")
        self.depth += 1
        self._after(piece)
        self.put(*[f"del g{v}" for v in sorted(self.have - after)], *[f"g{v} = None" for v in sorted(after - self.have)])
        self.have = after
        self.depth -= 1
        self.put("del " + ", ".join(["r", "G", *[f"h{source.index}" for source in held]]))

    def _held(self, piece: Piece) -> list[Call]:
        """The calls of which y is had again after the piece."""
        if self.whole:
            sources: Iterator[Any] = iter(()) if piece.rule.whole else (call.again for call in piece.calls)
        else:
            sources = (call if call.source else None for call in piece.calls)
        return list(dict.fromkeys(call for call in sources if call is not None))

    def _after(self, piece: Piece) -> None:
        """What the rule gave, `(dmain, pending of each)`, to where it goes."""
        calls = piece.calls
        self.put(f"d, ({''.join(f'p{call.index}, ' if call.place else '_, ' for call in calls)}) = r")
        for call in calls:
            self._recipe(call, f"h{call.index}")
        self._drop([v for call in calls for v in (call.out, *call.gives)])
        for v in sorted({v for call in calls for v in call.takes} - self.keys - {v for call in calls for v in call.gives}):
            self.put(f"g{v} = G.get({v})")
            self.have.add(v)
        self._spread_main(calls[0], "d")
        self.put("del d")
        computed: set[int] = set()
        for call in (calls if piece.siblings else calls[::-1]) if self.whole else ():
            if call.place is None:
                continue
            i, source = call.index, None if piece.rule.whole else call.again
            if source is not None:
                if source.index not in computed:
                    self._again(source, "w", f"h{source.index}")
                    computed.add(source.index)
                self.names[f"u{i}"] = call.needs
                self.put(f"if p{i} is not None: p{i} = run.filled(p{i}, {call.fields!r}, w{source.index}, u{i})")
            self.at(call.path)
            self.names |= {f"e{i}": call.op.wgrad, f"c{i}": call.cfg}
            self.put(f"q{i} = e{i}(p{i}, c{i}, into={self.part('I', call.place)})", f"del p{i}")
        if computed:
            self.put("del " + ", ".join(f"w{k}" for k in computed))


class Wgrad(Source):
    """`wgrad(W, I) -> dparams`, or `products(W, I) -> those of all calls`."""

    def __init__(self, lowered: Lowered, cover: Cover, traced: bool, which: str) -> None:
        super().__init__(lowered, cover, traced)
        self.which = which

    def write(self) -> tuple[str, dict[str, Any]]:
        left: dict[int, int] = {}
        if self.which == "products":
            self.put("found = []")
        for call in self.lowered.calls:
            if call.again is not None:
                left[call.again.index] = left.get(call.again.index, 0) + 1
        computed: set[int] = set()
        for row in self.lowered.backward:
            if type(row) is Call and row.place is not None:
                self._call(row, left, computed)
        return self.written(self.which, "W, I", self.tree("q", self.gradients) if self.which == "wgrad" else "found")

    def _open(self, place: Place) -> None:
        scope = place.scope
        if scope is None or scope.index in self.opened:
            return
        self._open(scope.place)
        self.opened.add(scope.index)
        i, outer, where = scope.index, scope.place.scope, f"{scope.kind}_wgrad"
        if outer is None:
            self.put(f"W{i} = W; del W")
        else:
            self.at(scope.place.path)
            self.names |= {f"S{i}": scope.pending, f"k{i}": scope.cfg}
            own = f"run.opened({where!r}, W{outer.index}, {scope.place.name!r}, S{i}, k{i})"
            self.put(f"W{i} = None if W{outer.index} is None else {own}")
        self.accumulators(scope, where)

    def _call(self, call: Call, left: dict[int, int], computed: set[int]) -> None:
        i, place, source = call.index, call.place, call.again
        assert place is not None
        if call.op.params is NoneType:
            self.put(f"q{i} = None")
            return
        self._open(place)
        self.at(call.path)
        if place.scope is None:
            self.put(f"p{i} = W; del W")
        else:
            self.put(f"p{i} = None if W{place.scope.index} is None else run.part(W{place.scope.index}, {place.name!r})")
        if source is not None and source.place is not None and source.place.scope is not None:
            k, tree = source.index, f"W{source.place.scope.index}"
            if k not in computed:
                computed.add(k)
                self._open(source.place)
                self.at(source.path)
                self.names |= {f"y{k}": source.op.again, f"c{k}": source.cfg}
                self.put(f"a{k} = run.again(y{k}, {tree}, {source.place.name!r}, c{k})")
                self.at(call.path)
            self.names[f"u{i}"] = call.needs
            self.put(f"if p{i} is not None and a{k} is not None: p{i} = run.filled(p{i}, {call.fields!r}, a{k}, u{i})")
            left[k] -= 1
            if not left[k]:
                self.put(f"del a{k}")
        self.names |= {f"e{i}": getattr(call.op, self.which), f"c{i}": call.cfg}
        target = f"q{i} =" if self.which == "wgrad" else "found +="
        self.put(f"{target} e{i}(p{i}, c{i}, into={self.part('I', place)})", f"del p{i}")


def _nested(value: Value, names: Iterator[str]) -> str:
    """Names in the form of a value, as the left side of an assignment."""
    return "(" + "".join((_nested(one, names) if isinstance(one, tuple) else next(names)) + ", " for one in value) + ")"
