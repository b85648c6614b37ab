"""Which calls of a program run as one kernel: a cover, made of rules, that changes neither params nor residuals nor pending.

A forward rule covers some calls with one that also makes their residuals, as they would; a backward rule covers their dgrads with
one that makes their pendings. So either half may be fused without the other, a policy need not know, and `fuse=False` changes only
speed and rounding. Most rules are for devices where Triton kernels run; on the CPU only rules with `on_cpu` apply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from funcops.engine.contract.checking import when_switched
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import describe, fail, few, one_of, require, require_callable, require_flag, require_type
from funcops.engine.program.lower import Call, Lowered

__all__ = ["BACKWARD", "FEW", "FORWARD", "SIBLINGS_BACKWARD", "SIBLINGS_FORWARD", "Rule", "Saving", "Window"]
__all__ += ["register_fusion", "unregister_fusion"]

FORWARD, BACKWARD = "forward", "backward"
SIBLINGS_FORWARD, SIBLINGS_BACKWARD = "siblings forward", "siblings backward"
LONGEST = 8  # calls that a rule may cover
FEW = 1 << 15  # elements of x or dy below which, on the CPU, a rule costs more than it saves
PHASES = (FORWARD, BACKWARD, SIBLINGS_FORWARD, SIBLINGS_BACKWARD)


class Window(NamedTuple):
    """The calls that a rule may look at, each of which alone reads what the one before it wrote; and the dtype of x. For siblings,
    the first calls of a parallel's branches, which read the same x, and in `branches` the row of calls that each of them
    begins."""

    calls: tuple[Call, ...]
    dtype: torch.dtype
    branches: tuple[tuple[Call, ...], ...] = ()

    @property
    def needs(self) -> tuple[Needs, ...]:
        """The gradients that the backward of each call computes."""
        return tuple(call.needs for call in self.calls)


class Saving(NamedTuple):
    """The saving of calls that run as one instead of one by one: passes over memory, each the read or the write of a tensor with
    the rows of x, and launches. The cheapest cover saves most passes, then most launches."""

    passes: int = 0
    launches: int = 0

    def __str__(self) -> str:
        parts = [f"{n} {what}{'es' * (n != 1)}" for n, what in zip(self, ("pass", "launch"), strict=True) if n]
        return " and ".join(parts) or "nothing"


@dataclasses.dataclass(frozen=True)
class Rule:
    """`match(window)` returns how many of the window's calls the rule covers (for siblings, of each branch); or a text that says
    why it covers none, though they begin as they should; or None. `saves`, or `saves(window)` of the calls that it covers, is what
    the rule is worth: the cover of a program is the cheapest that the rules make. `run` runs them:

        forward:   run(calls, params, main, values) -> (y, residuals of each call); what a call takes is in `values`, by number, and
                   what it gives is put there
        backward:  run(calls, residuals, dy, gradients) -> (dmain, pending of each call); `gradients`, by number of the value, are
                   taken from and added to

    or returns NotImplemented for inputs that the calls one by one must take, or refuse. The fork and the sum of a `skip` are calls
    without params, residuals and pending. For siblings y and dy are tuples, with an entry for the last call of each branch.
    `wgrads(calls, pendings, into)` gives their weight gradients together, or NotImplemented; `into`: accumulators of each, or None.
    `shared(calls, pendings, into)` gives the pendings with what their weight gradients share made once, or NotImplemented.

    `on_cpu`: on the CPU too, for an x or dy of at least FEW elements. `whole`: only for a full backward, which computes the weight
    gradients at once; its pendings already hold what its own calls recompute. `recompute`: the recomputed y of its last call, which
    others read, is put into `gradients` in place of the gradient of y; their weight gradients wait for it. Such a rule may cover
    one call alone. `settle`, of a rule that is `whole`: `run` returns dmain in flight, and `settle(calls, dmain)` waits for it
    after the weight gradients; `run` may read an x that is recomputed."""

    name: str
    phase: str
    match: Callable[[Window], int | tuple[int, ...] | str | None]
    run: Callable[..., Any]
    saves: Saving | Callable[[Window], Saving] = Saving()
    on_cpu: bool = False
    whole: bool = False
    recompute: bool = False
    wgrads: Callable[..., Any] | None = None
    shared: Callable[..., Any] | None = None
    settle: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        require_type("Rule", "name", self.name, str)
        optional = {name: f for name in ("wgrads", "shared", "settle") if (f := getattr(self, name)) is not None}
        require_callable("Rule", match=self.match, run=self.run, **optional)
        require(
            isinstance(self.saves, Saving) or callable(self.saves),
            "Rule",
            "saves",
            "a Saving, or a function that gives one",
            describe(self.saves),
            TypeError,
        )
        require_flag("Rule", on_cpu=self.on_cpu, whole=self.whole, recompute=self.recompute)
        require(
            self.settle is None or self.whole,
            "Rule",
            "whole",
            "True with settle, as only a full backward waits after the weight gradients",
            self.whole,
        )
        require(self.phase in PHASES, "Rule", "phase", one_of(PHASES, self.phase), repr(self.phase))

    @property
    def joint(self) -> bool:
        """Whether the weight gradients of its calls are computed at one turn."""
        return self.wgrads is not None or self.shared is not None


class Piece(NamedTuple):
    """Calls that run as one by a rule. `siblings`: whether they begin a parallel's branches, which read the same x."""

    calls: tuple[Call, ...]
    rule: Rule
    saves: Saving
    siblings: bool = False

    @staticmethod
    def of(rule: Rule, window: Window, siblings: bool = False) -> Piece:
        return Piece(window.calls, rule, rule.saves if isinstance(rule.saves, Saving) else rule.saves(window), siblings)

    @property
    def turn(self) -> Call:
        """The call at whose turn the forward runs them: the last, as the values that it takes may be written after the first."""
        return self.calls[0] if self.siblings else self.calls[-1]

    @property
    def ends(self) -> tuple[Call, ...]:
        """The calls that write the outputs of the piece: the last one, or the last of each branch."""
        inner = {call.main for call in self.calls if call.main != self.calls[0].main}
        return tuple(call for call in self.calls if call.out not in inner)


class NearMiss(NamedTuple):
    rule: str
    phase: str
    path: str
    reason: str


class Cover(NamedTuple):
    """The pieces of each half by the index of the call at whose turn they run; `waiting`: calls that run at another's turn."""

    forward: dict[int, Piece]
    backward: dict[int, Piece]
    waiting: frozenset[int]
    near_misses: tuple[NearMiss, ...]

    @property
    def forward_saves(self) -> Saving:
        """The saving of all pieces of the forward."""
        saves = [piece.saves for piece in self.forward.values()]
        return Saving(sum(one.passes for one in saves), sum(one.launches for one in saves))


NOTHING = Cover({}, {}, frozenset(), ())


_rules: list[Rule] = []
changes: list[Any] = []  # rules registered or taken out, twice each: a longer list makes new programs
# a program holds the test for autocast as a global of its own, and `checking` puts another in its place
when_switched(lambda on: changes.append(None) if on else changes.remove(None))


def register_fusion(rule: Rule) -> Rule:
    """Add a rule for plans. Among covers of the same cost the one that joins most calls wins, among equal ones the
    latest rule. Raises `TypeError` for anything but a `Rule`, `ValueError` for a name that is taken.

    >>> from funcops import ChainConfig, Rule, Saving, ScaleConfig, Step, plan, register_fusion, scale
    >>> def match(window):
    ...     return 2 if [call.op.name for call in window.calls[:2]] == ["scale", "scale"] else None
    ...
    >>> def run(calls, params, main, values):
    ...     return NotImplemented  # for this x: the calls run one by one
    ...
    >>> rule = register_fusion(Rule("two scales", "forward", match, run, Saving(passes=2, launches=1)))
    >>> cfg = ChainConfig(steps=(Step("a", scale, ScaleConfig(0.25)), Step("b", scale, ScaleConfig(7.0))))
    >>> [line.rule.name for line in plan(cfg).forward]
    ['two scales']
    >>> from funcops.engine.program.rules import unregister_fusion
    >>> unregister_fusion(rule)
    """
    require_type("register_fusion", "rule", rule, Rule)
    require(
        (rule.name, rule.phase) not in [(one.name, one.phase) for one in _rules],
        "register_fusion",
        "rule",
        "of a new name",
        f"{rule.name!r}, which is registered",
    )
    _rules.append(rule)
    changes.extend((rule, rule))  # an odd number of entries is for `funcops.checking`
    return rule


def unregister_fusion(rule: Rule) -> None:
    """Remove a rule: later plans are made without it. Raises `TypeError` for anything but a `Rule`, `ValueError`
    for one that is not registered.

    >>> from funcops import ChainConfig, Rule, ScaleConfig, Step, plan, register_fusion, scale, unregister_fusion
    >>> twice = lambda window: 2 if [call.op for call in window.calls] == [scale, scale] else None
    >>> rule = register_fusion(Rule("two scales", "forward", twice, lambda calls, params, main, values: NotImplemented))
    >>> cfg = ChainConfig(steps=(Step("a", scale, ScaleConfig(2.0)), Step("b", scale, ScaleConfig(0.5))))
    >>> print(plan(cfg).forward[0])
    a + b: two scales, saves nothing
    >>> unregister_fusion(rule)
    >>> print(plan(cfg).forward[0])
    a: scale
    """
    require_type("unregister_fusion", "rule", rule, Rule)
    require(rule in _rules, "unregister_fusion", "rule", "one that is registered", repr(rule.name))
    _rules.remove(rule)
    changes.extend((rule, rule))  # an odd number of entries is for `funcops.checking`


def cover(lowered: Lowered, device_type: str | None, dtype: torch.dtype, whole: bool = True) -> Cover:
    """The cheapest cover. Pure, except for the registered rules. Without a device type nothing is fused. `whole`: for a full
    backward, which computes the weight gradients at once."""
    if device_type is None:
        return NOTHING
    # the latest first: `min` takes the first of equals
    asked = [one for one in _rules[::-1] if (one.on_cpu or device_type != "cpu") and (whole or not one.whole)]
    forward, misses = _cheapest(lowered, FORWARD, asked, dtype)
    backward, more = _cheapest(lowered, BACKWARD, asked, dtype)
    # not simply the forward reversed: the branches of a parallel are in order in both
    order = {row.index: i for i, row in enumerate(lowered.backward) if type(row) is Call}
    last = {max(piece.calls, key=lambda call: order[call.index]).index: piece for piece in backward if piece.siblings}
    waiting = frozenset(call.index for turn, piece in last.items() for call in piece.calls if call.index != turn)
    turns = {piece.calls[-1].index: piece for piece in backward if not piece.siblings}
    return Cover({piece.calls[0].index: piece for piece in forward}, turns | last, waiting, (*misses, *more))


class Cut(NamedTuple):
    """A row of calls cut into pieces; a call that runs alone is in no piece. `fewer_calls`: how many fewer run."""

    passes: int = 0
    launches: int = 0
    fewer_calls: int = 0
    pieces: tuple[Piece, ...] = ()
    misses: tuple[NearMiss, ...] = ()

    @property
    def cost(self) -> tuple[int, int, int]:
        return -self.passes, -self.launches, -self.fewer_calls

    def then(self, *others: Cut) -> Cut:
        return Cut(*(sum(parts[1:], parts[0]) for parts in zip(self, *others, strict=True)))


def _cut_of(piece: Piece, misses: tuple[NearMiss, ...] = ()) -> Cut:
    return Cut(*piece.saves, len(piece.calls) - 1, (piece,), misses)


def _cheapest(
    lowered: Lowered, phase: str, rules: list[Rule], dtype: torch.dtype
) -> tuple[tuple[Piece, ...], tuple[NearMiss, ...]]:
    """The pieces of a half, and its near misses."""
    own, of_siblings = ([one for one in rules if one.phase == name] for name in (phase, f"siblings {phase}"))
    offers: list[Piece] = []
    cuts = {row: _cut(row, own, dtype, offers) for row in _rows(lowered)}
    by_first = {row[0].index: row for row in cuts}
    found = Cut()
    for heads in lowered.siblings:
        rows = [by_first[call.index] for call in heads if call.index in by_first]
        if len(rows) < len(heads) or any(row not in cuts for row in rows):  # siblings of siblings may run as one already
            continue
        piece, misses = _piece_of(Window(heads, dtype, tuple(rows)), of_siblings, offers)
        joint = Cut(misses=misses) if piece is None else _cut_of(piece, misses)
        if piece is not None:
            left = [row[sum(call in piece.calls for call in row) :] for row in rows]
            with_it = {row: _cut(row, own, dtype, offers) for row in left if row}
            apart = [cuts[row] for row in rows]
            # siblings that run as one may break up a piece inside a branch, so both ways are priced as a whole
            if joint.then(*with_it.values()).cost <= apart[0].then(*apart[1:]).cost:
                cuts = {row: cut for row, cut in cuts.items() if row not in rows} | with_it
            else:
                joint = Cut()
        found = found.then(joint)
    found = found.then(*cuts.values())
    return found.pieces, (*found.misses, *dict.fromkeys(_lost(offers, found.pieces)))


def _lost(offers: list[Piece], pieces: tuple[Piece, ...]) -> Iterator[NearMiss]:
    """The pieces that the cheapest cover leaves out, whose calls run by other rules."""
    for piece in offers:
        others = [one for one in pieces if {call.index for call in one.calls} & {call.index for call in piece.calls}]
        if others and piece.rule not in [one.rule for one in others]:
            saved = Saving(*map(sum, zip(*[one.saves for one in others], strict=True)))
            why = f"it saves {piece.saves}, and {few(repr(one.rule.name) for one in others)} saves {saved}"
            why += " too: of equals most calls win, then the latest rule" * (saved == piece.saves)
            yield NearMiss(piece.rule.name, piece.rule.phase, piece.calls[0].path, why)


def _rows(lowered: Lowered) -> list[tuple[Call, ...]]:
    """The longest rows of calls each of which alone reads what the one before it wrote."""
    found: list[list[Call]] = []
    ends: dict[Any, list[Call]] = {}  # by the value that the last call of a row wrote
    for call in lowered.calls:
        # a call without a scope is the whole tree, and a piece looks for trees in scopes
        if not call.fuse or (call.place is not None and call.place.scope is None):
            continue
        row = ends.pop(call.main, None)
        if row is None:
            row = []
            found.append(row)
        row.append(call)
        ends[call.out] = row
    return [tuple(row) for row in found]


def _cut(row: tuple[Call, ...], rules: list[Rule], dtype: torch.dtype, offers: list[Piece]) -> Cut:
    """The cheapest cut of a row, found from its end to its beginning."""
    best = [Cut()] * (len(row) + 1)
    for i in range(len(row))[::-1]:
        found: list[Cut] = []
        misses: tuple[NearMiss, ...] = ()
        for size in range(min(LONGEST, len(row) - i), 0, -1):
            # there is nothing to fuse in one call; such a rule gives its recomputed y as well
            able = rules if size > 1 else [one for one in rules if one.recompute]
            piece, reasons = _piece_of(Window(row[i : i + size], dtype), able, offers)
            # of the longest window only, as a shorter one would give the same reason again
            misses = misses or (reasons if size == min(LONGEST, len(row) - i) else ())
            if piece is not None:
                found.append(_cut_of(piece).then(best[i + size]))
        cheapest = min([*found, best[i + 1]], key=lambda cut: cut.cost)  # of equals the first
        best[i] = Cut(misses=misses).then(cheapest)
    return best[0]


def _check_answer(rule: Rule, window: Window, answer: Any) -> None:
    """Raise `TypeError` for an answer of `match` that no cover can be made of."""
    if answer is None or isinstance(answer, str):
        return
    counts, rows = (answer, window.branches) if isinstance(answer, tuple) else ((answer,), (window.calls,))
    if (
        not (len(counts) == len(rows) and all(type(n) is int for n in counts))
        or not any(counts)
        or not all(0 <= n <= len(row) for n, row in zip(counts, rows, strict=True))
    ):
        fail(
            f"rule {rule.name!r}",
            "the result of match",
            f"how many of the {len(window.calls)} calls it covers (for siblings, of each branch), a reason, or None",
            repr(answer),
            TypeError,
        )


def _piece_of(window: Window, rules: list[Rule], offers: list[Piece]) -> tuple[Piece | None, tuple[NearMiss, ...]]:
    """The piece of all calls of a window, or of the branches' beginnings, that saves most; and the near misses. All pieces are
    added to `offers`."""
    found: list[Piece] = []
    misses: list[NearMiss] = []
    for rule in rules:
        answer = rule.match(window)
        _check_answer(rule, window, answer)
        if isinstance(answer, str):
            misses.append(NearMiss(rule.name, rule.phase, window.calls[0].path, answer))
        elif isinstance(answer, tuple):
            calls = tuple(call for row, size in zip(window.branches, answer, strict=True) for call in row[:size])
            found.append(Piece.of(rule, Window(calls, window.dtype), True))
        elif answer == len(window.calls):
            found.append(Piece.of(rule, window))
    offers += found
    return (min(found, key=lambda piece: _cut_of(piece).cost) if found else None), tuple(misses)
