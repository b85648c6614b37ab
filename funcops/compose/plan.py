"""Which steps of a chain run as one kernel: a plan, made of rules, that changes neither params nor residuals nor pending.

A forward rule covers some steps with one call that also makes their residuals, as they would; a backward rule their dgrads with
one call that makes their pendings. So either half may be fused without the other, a policy need not know, and `fuse=False`
changes speed and rounding alone. Rules are for devices where Triton kernels run; on the CPU steps run one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funcops.compose.step import Step
from funcops.errors import fail, require_type
from funcops.needs import Needs

FORWARD, BACKWARD = "forward", "backward"


class Window(NamedTuple):
    """What a rule may look at: steps from one on, what their backwards will be asked for, and the dtype of x."""

    steps: tuple[Step, ...]
    needs: tuple[Needs, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Rule:
    """`match(window)` says how many of the window's steps the rule covers; or, as a text, why it does not though it begins as it
    should; or None. `run` does them:

        forward:   run(steps, params, main, extras, needs) -> (main, residuals of each step); a name that a step gives is put
                   into extras
        backward:  run(steps, residuals, dy, gradients) -> (dmain, pending of each step); `gradients`, by name, are taken from
                   and added to

    or returns NotImplemented for inputs that the steps one by one must take, or refuse.
    """

    name: str
    phase: str
    match: Callable[[Window], int | str | None]
    run: Callable[..., Any]

    def __post_init__(self) -> None:
        if self.phase not in (FORWARD, BACKWARD):
            fail("Rule", "phase", f"{FORWARD!r} or {BACKWARD!r}", repr(self.phase))


class Piece(NamedTuple):
    """Steps that run as one by a rule; one step by itself has none."""

    steps: tuple[Step, ...]
    first: int
    rule: Rule | None


class NearMiss(NamedTuple):
    rule: str
    phase: str
    step: str
    reason: str


class Plan(NamedTuple):
    """The pieces of each half, in the order of the steps."""

    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...]
    near_misses: tuple[NearMiss, ...]

    def __str__(self) -> str:
        lines = [
            f"{phase:<9} {' + '.join(step.name for step in piece.steps)}: {piece.rule.name if piece.rule else piece.steps[0].op}"
            for phase, pieces in ((FORWARD, self.forward), (BACKWARD, self.backward[::-1]))
            for piece in pieces
        ]
        lines += [f"not {miss.rule} at {miss.step} ({miss.phase}): {miss.reason}" for miss in self.near_misses]
        return "\n".join(lines)


_rules: list[Rule] = []
_changes: list[Rule] = []


def register_fusion(rule: Rule) -> Rule:
    """Add a rule to those that plans are made of. Where several match, the one that covers most steps wins, of equals the
    latest. Raises `TypeError` for anything but a `Rule`, `ValueError` for a name that is taken."""
    require_type("register_fusion", "rule", rule, Rule)
    if any(known.name == rule.name and known.phase == rule.phase for known in _rules):
        fail("register_fusion", "rule", "of a new name", f"{rule.name!r}, which is registered")
    _rules.append(rule)
    _changes.append(rule)
    return rule


def unregister_fusion(rule: Rule) -> None:
    """Take a rule out again; plans that were made keep it."""
    _rules.remove(rule)
    _changes.append(rule)


def registry_version() -> int:
    """Another number whenever the rules are others."""
    return len(_changes)


def make_plan(steps: tuple[Step, ...], needs: tuple[Needs, ...], device_type: str, dtype: torch.dtype, fuse: bool) -> Plan:
    """Pure, but for the rules that are registered."""
    misses: list[NearMiss] = []

    def cover(phase: str) -> tuple[Piece, ...]:
        found, i = [], 0
        while i < len(steps):
            size, rule = 1, None
            for one in reversed(_rules) if fuse and device_type != "cpu" else ():
                answer = one.match(Window(steps[i:], needs[i:], dtype)) if one.phase == phase else None
                if isinstance(answer, str):
                    misses.append(NearMiss(one.name, phase, steps[i].name, answer))
                elif answer is not None and answer > size:
                    size, rule = answer, one
            found.append(Piece(steps[i : i + size], i, rule))
            i += size
        return tuple(found)

    return Plan(cover(FORWARD), cover(BACKWARD), tuple(misses))
