"""The forward of a program, as source."""

from __future__ import annotations

from typing import Any

from funcops.contract.op import NoneType, raw_of
from funcops.ops.fork import fork
from funcops.program.lower import Call, Fold, Place, Scope
from funcops.program.rules import Piece
from funcops.program.run import joined
from funcops.program.source import Source


class Forward(Source):
    """`forward(P, main, extras) -> (y, residuals)`."""

    def write(self) -> tuple[str, dict[str, Any]]:
        low = self.lowered
        self.put(f"v{low.main} = main; del main", *[f"v{v} = extras[{name!r}]" for name, v in low.extras.items()])
        turn = {call.index: i for i, piece in self.cover.forward.items() for call in piece.calls}
        done = set[int]()
        for row in low.forward:
            if type(row) is Fold:
                self._fold(row, done)
            elif turn.get(row.index, row.index) == row.index:
                piece = self.cover.forward.get(row.index)
                if piece is None:
                    self._call(row)
                else:
                    self._piece(piece, done)
        y = self.of(low.output)
        if low.outputs:
            y = f"WithExtras({y}, {{{', '.join(f'{name!r}: {self.of(v)}' for name, v in low.outputs.items())}}})"
        return self.written("forward", "P, main, extras", f"{y}, {self.tree('n', self._kept)}")

    def _kept(self, scope: Scope, parts: str) -> str:
        if not scope.needs:
            return "None"
        i = scope.index
        self.names |= {f"K{i}": scope.residuals, f"k{i}": scope.cfg, f"m{i}": scope.needs}
        return f"K{i}({parts}, cfg=k{i}, needs=m{i})"

    def _fold(self, row: Fold, done: set[int]) -> None:
        if row.out not in done:
            self.put(f"v{row.out} = fold_in({self.of(row.of)}, {row.data})")
            done.add(row.out)

    def _open(self, place: Place | None) -> None:
        """Put the params of a scope into a local, after a check of their names."""
        if place is None or place.scope is None or place.scope.index in self.opened:
            return
        scope = place.scope
        self._open(scope.place)
        self.opened.add(scope.index)
        i, names, where = scope.index, self.const("names", scope.index, scope.cfg.names), f"{scope.kind}_fwd"
        self.names[f"k{i}"] = scope.cfg
        self.at(scope.place.path)
        self.put(
            f"P{i} = {self.part('P', scope.place)}",
            f"if type(P{i}) is not dict or P{i}.keys() != {names}.keys(): run.check_names({where!r}, 'params', P{i}, k{i})",
        )
        if scope.ties:
            self.put(f"P{i} = run.tied({where!r}, P{i}, {self.const('ties', i, scope.ties)})")

    def _call(self, call: Call) -> None:
        if call.place is None:
            self._of_skip(call)
            return
        i, raw = call.index, raw_of(call.op.fwd)
        self._open(call.place)
        self.at(call.path)
        self.names |= {f"f{i}": call.op.fwd, f"c{i}": call.cfg, f"w{i}": call.kept}
        y = f"({', '.join(f'v{v}' for v in (call.out, *call.gives))})" if call.gives and not call.names else f"v{call.out}"
        fn = f"f{i}"
        if raw is not None and not self.traced:
            self.names |= {f"r{i}": raw, f"T{i}": call.op.params or NoneType}
            self.put(f"p = {self.part('P', call.place)}")
            fn = f"(r{i} if fast and type(p) is T{i} else f{i})"
        params = "p" if fn != f"f{i}" else self.part("P", call.place)
        self.put(f"{y}, n{i} = {fn}({params}, {self._x(call)}, c{i}, needs=w{i})")
        if call.names:
            self.put(*[f"v{v} = {y}.extras[{name!r}]" for v, name in zip(call.gives, call.names, strict=True)], f"{y} = {y}.main")

    def _of_skip(self, call: Call) -> None:
        """The fork of a skip, or its sum."""
        if call.op is fork:
            self.put(*[f"v{value} = {self.of(call.main)}" for value in (call.out, *call.gives)])
            return
        self.at(call.path)
        a, b = self.of(call.takes[0]), self.of(call.main)
        self.put(f"if {b}.shape != {a}.shape or {b}.dtype is not {a}.dtype: run.unlike({a}, {b})", f"v{call.out} = {a} + {b}")

    def _x(self, call: Call) -> str:
        main = self.of(call.main)
        if call.labels:
            given = ", ".join(f"{name!r}: {self.of(v)}" for name, v in zip(call.labels, call.takes, strict=True))
            return f"WithExtras({main}, {{{given}}})"
        return f"({main}, {', '.join(self.of(v) for v in call.takes)})" if call.takes else main

    def _piece(self, piece: Piece, done: set[int]) -> None:
        """Calls that run by a rule, or one by one if it declines their inputs."""
        calls, i = piece.calls, piece.calls[0].index
        for row in self.lowered.forward:
            if type(row) is Fold and any(row.out in call.takes for call in calls):
                self._fold(row, done)
        for call in calls:
            self._open(call.place)
        self.at(joined(calls))
        params = "".join((self.part("P", call.place) if call.place else "None") + ", " for call in calls)
        outside = {v for call in calls for v in call.takes} - {v for call in calls for v in call.gives}
        self.names |= {f"rule{i}": piece.rule, f"calls{i}": calls}
        self.put(
            f"E{i} = {{{', '.join(f'{v}: {self.of(v)}' for v in sorted(outside))}}}",
            f"out{i} = run.forward_piece(rule{i}, calls{i}, ({params}), {self.of(calls[0].main)}, E{i})",
            f"if out{i} is NotImplemented:",
        )
        self.depth += 1
        for call in calls:
            self._call(call)
        self.depth -= 1
        self.put("else:")
        self.depth += 1
        nodes = "".join(f"n{call.index}, " if call.place else "_, " for call in calls)
        out = f"({''.join(f'v{call.out}, ' for call in piece.ends)})" if piece.siblings else f"v{calls[-1].out}"
        self.put(f"{out}, ({nodes}) = out{i}", *[f"v{v} = E{i}[{v}]" for call in calls for v in call.gives])
        self.depth -= 1
