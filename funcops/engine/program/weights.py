"""The weight gradients of a program's calls, as rows: in a whole backward, or as its second half."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcops.engine.contract.op import NoneType, raw_of
from funcops.engine.contract.schema import Saved
from funcops.engine.program.lower import Call, Join, Place, Scope, recomputing
from funcops.engine.program.rows import Group, Local, Row, Rows, local, part_names, recomputed, released
from funcops.engine.program.rules import Piece, Rule, Saving


class Weights:
    """Rows that open trees, `K` of residuals or `W` of pendings, and compute weight gradients and recomputed ys from them."""

    def __init__(self, rows: Rows, which: str) -> None:
        self.rows = rows
        self.opened = set[int]()  # the scopes whose trees are in locals
        self.which, self.whole = which, which == "backward"
        self.bare = set[Call]()  # calls whose pendings are in locals without a cell, though their tree may have been given away
        self.flying: dict[Call, bool] = {}  # calls whose weight gradients are sums in flight; whether they advanced
        self.trees = "W" if which in ("wgrad", "products") else "K"

    def where(self, scope: Scope) -> str:
        """The function that an error about a scope's trees names."""
        return f"{scope.kind}_{'wgrad' if self.trees == 'W' else 'bwd' if self.whole else 'dgrad'}"

    def open(self, place: Place | None) -> None:
        """Put the residuals or pending of a scope, and its accumulators, into locals."""
        scope = None if place is None else place.scope
        if scope is None or scope.index in self.opened:
            return
        self.open(scope.place)
        self.opened.add(scope.index)
        outer, what = scope.place.scope, "residuals" if self.trees == "K" else "pending"
        if self.trees == "W" or scope.needs:
            if outer is None:
                self.rows.add(f"open outer {what}", scope)
            else:
                self.rows.at(scope.place.path)
                self.rows.add(f"open {what}", scope, (), (), self.where(scope))
        if self.which != "dgrad":
            self.rows.accumulators(scope, self.where(scope))

    def open_for(self, call: Call) -> None:
        """Open the trees of a call, and of those that recompute what it reads."""
        for one in (call, *recomputing(call.sources)):
            self.open(one.place)

    def fill(self, call: Call, source: Call) -> None:
        """Put the recomputed y of `source` into the call's pending."""
        p = local("pending", call.index)
        self.rows.add(
            "fill own" if call in self.bare else "fill", call, (p, local("recomputed", source.index)), (p,), needs=call.needs
        )

    def recompute(self, name: Local, held: bool = False) -> list[Row]:
        """The rows that recompute a y: from the residuals in their tree, or `held` in a local."""
        index = name.number
        if (join := self.rows.lowered.joins.get(index)) is not None:
            reads = [local("recomputed", call.index) for call in join.calls]
            # the last part of x may be absent
            items = [(f"{n!r}: ", reads[join.calls.index(call)], at) for n, call, at in join.parts]
            made = ", ".join([f"{n}{y if at is None else f'(*{y}, None)[{at}]'}" for n, y, at in items])
            return [Row("joined", None, tuple(reads), (name,), (made,))]
        call = next(call for call in self.rows.lowered.calls if call.index == index)
        given = () if call.recomputed_by is None else (local("recomputed", call.recomputed_by.index),)
        if self.trees == "W":
            # the residuals are gone by then: the pending of the scope holds what this y is made of
            return [Row("recompute from a recipe", call, given, (name,), path=call.path)]
        raw = raw_of(call.op.recompute)
        fast = raw is not None and self.testable(call.residuals)
        node = Row("node", call, (local("held", index),) * held, path=call.path)
        if not given:
            return [node, Row("recompute unchecked" if fast else "recompute", call, (), (name,), (raw,), path=call.path)]
        checked = Row("recompute from x", call, ("h", *given), (name,), (call.fields,), path=call.path)
        if not fast or type(call.recomputed_by) is Join:
            return [node, checked]
        puts = [Row("put", call, ("h", *given), (), (field,)) for field in call.fields]
        quick = (Row("twin to fill"), *puts, Row("raw recompute", call, (), (name,), (raw,)))
        return [node, Row("call", call, ("h", *given), (name,), then=quick, otherwise=(checked,), path=call.path)]

    def testable(self, cls: Any) -> bool:
        """Whether a test can be written that residuals or a pending of this class pass all checks of their op."""
        return not self.rows.traced and isinstance(cls, type) and issubclass(cls, Saved)

    def wgrads(self, calls: Sequence[Call], rule: Rule | None = None) -> None:
        """The weight gradients of pendings in locals: together if the rule can, one by one otherwise."""
        own = [call for call in calls if call.op.params is not NoneType]
        for call in calls:
            if call not in own:
                self.rows.add("none", None, (), (local("dparams", call.index),))
        if not own or rule is None or not rule.joint:
            self._one_by_one(own)
            return
        j, found = local("joint", own[0].index), Group(local("dparams", call.index) for call in own)
        waiting, kind = [local("pending", call.index) for call in own], "products" if self.which == "products" else "wgrads"
        self.rows.add(f"joint {kind}", Piece(tuple(own), rule, Saving()), waiting, (j,))
        unpacked = (*self.rows.block(self.rows.add, "unpack", None, (j,), found.names, found), *self.rows.block(self._empty, own))
        self.rows.add("choice", None, (j,), (), path=None, then=self.rows.block(self._one_by_one, own), otherwise=unpacked)

    def _empty(self, calls: Sequence[Call]) -> None:
        for call in calls:
            if call in self.bare:
                self.rows.add("empty", call, (local("pending", call.index),))

    def _one_by_one(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.rows.at(call.path)
            if self.which == "products":
                self.rows.add("products", call, (local("pending", call.index),))
            elif call.index in self.rows.begins:
                self.rows.add("begun wgrad", call, (local("pending", call.index),), (local("dparams", call.index),))
                self.flying[call] = False
            elif call in self.bare:
                self._bare(call)
            else:
                self.rows.add("wgrad", call, (local("pending", call.index),), (local("dparams", call.index),))

    def _bare(self, call: Call) -> None:
        """The weight gradient of a pending without a cell: without its op's checks, if a test says that it would pass them."""
        p, q = (local("pending", call.index),), (local("dparams", call.index),)
        checked = Row("give", call, p, p, path=call.path), Row("wgrad", call, p, q, path=call.path)
        raw = raw_of(call.op.wgrad)
        if raw is None or not self.testable(call.op.pending):
            self.rows.added += checked
            return
        then = Row("raw wgrad", call, p, q, (raw,), path=call.path), Row("empty", call, p)
        self.rows.add("waiting", call, p, then=then, otherwise=checked)

    def settle(self, after: Call | None = None) -> None:
        """Go on with the sums that were in flight beside a call that computes much; at the end complete all."""
        if after is not None and after.light:
            return
        # over a copy, as a call that settles leaves the dict
        for call, advanced in [(call, advanced) for call, advanced in self.flying.items() if call is not after]:
            kind = "settle sums" if advanced or call.op.prefetch.advance is None else "advance sums"
            self.rows.at(call.path)
            self.rows.add(kind, call, (local("dparams", call.index),), (local("dparams", call.index),))
            if kind == "settle sums":
                del self.flying[call]
            else:
                self.flying[call] = True
        # sums that have just advanced settle in a second round
        if after is None and self.flying:
            self.settle()

    def joint_wgrads(self, calls: Sequence[Call]) -> None:
        """The weight gradients of these: calls of a piece with a joint rule together, the others one by one."""
        pieces = [piece for piece in self.rows.cover.backward.values() if piece.rule.joint]
        piece = next((piece for piece in pieces if any(call in piece.calls for call in calls)), None)
        joint = [] if piece is None else [call for call in calls if call in piece.calls]
        if piece is not None:
            self.wgrads(joint, piece.rule)
        self.wgrads([call for call in calls if call not in joint])

    @property
    def finished(self) -> tuple[Row, ...]:
        """The rows after all passes."""
        return released(recomputed(self.rows.added, self.recompute))


class SecondHalf:
    """`wgrad(W, I) -> dparams`; or `products(W, I)`: the products of all calls, in place of the weight gradients that they make."""

    def __init__(self, rows: Rows, which: str) -> None:
        self.rows, self.weights = rows, Weights(rows, which)

    def write(self) -> tuple[Row, ...]:
        if self.weights.which == "products":
            self.rows.add("no products")
        calls = [row for row in self.rows.lowered.backward if type(row) is Call and row.place is not None]
        together = {call.index: piece for piece in self.rows.cover.backward.values() if piece.rule.joint for call in piece.calls}
        for at, call in enumerate(calls):
            self._wait(call)
            piece = together.get(call.index)
            if piece is None:
                self.weights.wgrads([call])
            # at the turn of the last one, when all of their pendings are in locals
            elif not any(other in piece.calls for other in calls[at + 1 :]):
                self.weights.wgrads([other for other in calls if other in piece.calls], piece.rule)
            self.weights.settle(call)
        self.weights.settle()
        root = self.rows.lowered.root
        self.rows.add(f"return {self.weights.which}", root, part_names("dparams", root, True))
        return self.weights.finished

    def _wait(self, call: Call) -> None:
        """Put the call's pending into a local, with the recomputed y of its source."""
        assert call.place is not None
        if call.op.params is NoneType:
            return
        fills = call.recomputed_by is not None and call.fills_pending
        self.weights.open_for(call) if fills else self.weights.open(call.place)
        self.rows.at(call.path)
        kind = "whole tree" if call.place.scope is None else "pending"
        if kind == "pending" and self.weights.which == "wgrad" and call.index not in self.rows.begins:
            kind = "own pending"  # no other function gets it, so nothing but its own row can take it twice
            self.weights.bare.add(call)
        self.rows.add(kind, call, (), (local("pending", call.index),), "W")
        if fills:
            self.weights.fill(call, call.recomputed_by)
