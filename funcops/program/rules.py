"""Which calls of a program run as one kernel: a cover, made of rules, that changes neither params nor residuals nor pending.

A forward rule covers some calls with one that also makes their residuals, as they would; a backward rule their dgrads with one
that makes their pendings. So either half may be fused without the other, a policy need not know, and `fuse=False` changes speed
and rounding alone. Most rules are for devices where Triton kernels run; on the CPU those of `everywhere` hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funcops.errors import fail, require_callable, require_flag, require_type
from funcops.needs import Needs
from funcops.program.lower import Call, Lowered

FORWARD, BACKWARD = "forward", "backward"
SIBLINGS_FORWARD, SIBLINGS_BACKWARD = "siblings forward", "siblings backward"
FEW = 1 << 15  # elements of a dy below which, on the CPU, a rule costs more than it saves
PHASES = (FORWARD, BACKWARD, SIBLINGS_FORWARD, SIBLINGS_BACKWARD)


class Window(NamedTuple):
    """What a rule may look at: calls of which each reads what the one before it wrote, and nobody else does; and the dtype of x."""

    calls: tuple[Call, ...]
    dtype: torch.dtype

    @property
    def needs(self) -> tuple[Needs, ...]:
        """What the backward of each will be asked for."""
        return tuple(call.needs for call in self.calls)


@dataclasses.dataclass(frozen=True)
class Rule:
    """`match(window)` says how many of the window's calls the rule covers; or, as a text, why it does not though it begins as it
    should; or None. `run` does them:

        forward:   run(calls, params, main, values) -> (y, residuals of each call); what a call takes is in `values`, by number, and
                   what it gives is put there
        backward:  run(calls, residuals, dy, gradients) -> (dmain, pending of each call); `gradients`, by number of the value, are
                   taken from and added to

    The fork and the sum of a `skip` are calls without params, residuals and pending. For the first calls of the branches of a
    `parallel`, which read the same x (`match` must cover all of them):

        siblings forward:   run(calls, params, main) -> y of each, residuals of each
        siblings backward:  run(calls, residuals, dys) -> (dmain, pending of each call)

    or returns NotImplemented for inputs that the calls one by one must take, or refuse. `everywhere`: on the CPU too, for a dy of
    at least FEW elements. `whole`: for a backward that goes on with the weight gradients at once; its pendings hold what is
    computed again.
    """

    name: str
    phase: str
    match: Callable[[Window], int | str | None]
    run: Callable[..., Any]
    everywhere: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        require_type("Rule", "name", self.name, str)
        require_callable("Rule", match=self.match, run=self.run)
        require_flag("Rule", everywhere=self.everywhere, whole=self.whole)
        if self.phase not in PHASES:
            fail("Rule", "phase", f"one of {', '.join(PHASES)}", repr(self.phase))


class Piece(NamedTuple):
    """Calls that run as one by a rule. `siblings`: the first of a parallel's branches, which read the same x."""

    calls: tuple[Call, ...]
    rule: Rule
    siblings: bool = False


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


NOTHING = Cover({}, {}, frozenset(), ())


_rules: list[Rule] = []
changes: list[Rule] = []  # that were registered or taken out: programs are others when there are more


def register_fusion(rule: Rule) -> Rule:
    """Add a rule to those that plans are made of. Where several match, the one that covers most steps wins, of equals the
    latest. Raises `TypeError` for anything but a `Rule`, `ValueError` for a name that is taken."""
    require_type("register_fusion", "rule", rule, Rule)
    if any(known.name == rule.name and known.phase == rule.phase for known in _rules):
        fail("register_fusion", "rule", "of a new name", f"{rule.name!r}, which is registered")
    _rules.append(rule)
    changes.append(rule)
    return rule


def unregister_fusion(rule: Rule) -> None:
    """Take a rule out again; plans that were made keep it."""
    _rules.remove(rule)
    changes.append(rule)


def cover(lowered: Lowered, device_type: str | None, dtype: torch.dtype) -> Cover:
    """Pure, but for the rules that are registered. Without a device type nothing is fused."""
    if device_type is None:
        return NOTHING
    misses: list[NearMiss] = []
    waiting: set[int] = set()

    def half(phase: str, siblings_phase: str) -> dict[int, Piece]:
        found: dict[int, Piece] = {}
        taken: set[int] = set()
        for heads in lowered.siblings:
            size, rule = _best(Window(heads, dtype), siblings_phase, device_type, misses)
            if rule is not None and size == len(heads):
                first = heads[-1] if phase is BACKWARD else heads[0]
                found[first.index] = Piece(heads, rule, True)
                taken |= {call.index for call in heads}
                if phase is BACKWARD:
                    waiting.update(call.index for call in heads[:-1])
        for run in _runs(lowered, taken):
            i = 0
            while i < len(run):
                size, rule = _best(Window(run[i:], dtype), phase, device_type, misses)
                if rule is not None:
                    piece = Piece(run[i : i + size], rule)
                    found[piece.calls[-1 if phase is BACKWARD else 0].index] = piece
                i += size
        return found

    forward = half(FORWARD, SIBLINGS_FORWARD)
    return Cover(forward, half(BACKWARD, SIBLINGS_BACKWARD), frozenset(waiting), tuple(misses))


def _runs(lowered: Lowered, taken: set[int]) -> list[tuple[Call, ...]]:
    """The longest rows of calls of which each alone reads what the one before it wrote."""
    found: list[list[Call]] = []
    for call in lowered.calls:
        if not call.fuse or call.index in taken or (call.place is not None and call.place.scope is None):
            found.append([])
            continue
        last = found[-1][-1] if found and found[-1] else None
        if last is not None and call.main == last.out:
            found[-1].append(call)
        else:
            found.append([call])
    return [tuple(run) for run in found if run]


def _best(window: Window, phase: str, device_type: str, misses: list[NearMiss]) -> tuple[int, Rule | None]:
    size, rule = 1, None
    for one in reversed(_rules):
        if one.phase != phase or (device_type == "cpu" and not one.everywhere):
            continue
        answer = one.match(window)
        if isinstance(answer, str):
            misses.append(NearMiss(one.name, phase, window.calls[0].path, answer))
        elif answer is not None and answer > size:
            size, rule = answer, one
    return size, rule
