"""Which steps of a chain run as one kernel: a plan, made of rules, that changes neither params nor residuals nor pending.

A forward rule covers some steps with one call that also makes their residuals, as they would; a backward rule their dgrads with
one call that makes their pendings. So either half may be fused without the other, a policy need not know, and `fuse=False`
changes speed and rounding alone. Most rules are for devices where Triton kernels run; on the CPU those of `everywhere` hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funcops.backend import wants_triton
from funcops.compose.step import Step
from funcops.errors import fail, require_callable, require_flag, require_type
from funcops.needs import Needs

FORWARD, BACKWARD = "forward", "backward"
SIBLINGS_FORWARD, SIBLINGS_BACKWARD = "siblings forward", "siblings backward"
FEW = 1 << 15  # elements of a dy below which, on the CPU, a rule costs more than it saves
PHASES = (FORWARD, BACKWARD, SIBLINGS_FORWARD, SIBLINGS_BACKWARD)


class Window(NamedTuple):
    """What a rule may look at: steps from one on, what their backwards will be asked for, the dtype of x, and whether the x that a
    step reads is not kept but computed again."""

    steps: tuple[Step, ...]
    needs: tuple[Needs, ...]
    dtype: torch.dtype
    again: tuple[bool, ...]

    def starting(self, first: int) -> Window:
        return Window(self.steps[first:], self.needs[first:], self.dtype, self.again[first:])


@dataclasses.dataclass(frozen=True)
class Rule:
    """`match(window)` says how many of the window's steps the rule covers; or, as a text, why it does not though it begins as it
    should; or None. `run` does them:

        forward:   run(steps, params, main, extras, needs) -> (main, residuals of each step); a name that a step gives is put
                   into extras
        backward:  run(steps, residuals, dy, gradients) -> (dmain, pending of each step); `gradients`, by name, are taken from
                   and added to

    For the first steps of the branches of a `parallel`, which read the same x (`match` must cover all of them):

        siblings forward:   run(steps, params, main, needs) -> (y, residuals) of each
        siblings backward:  run(steps, residuals, dys) -> (dmain, pending of each step)

    or returns NotImplemented for inputs that the steps one by one must take, or refuse. `everywhere`: on the CPU too, for a dy of
    at least FEW elements. `whole`: for a backward that goes on with the weight gradients at once; its pendings hold what the chain left
    out.
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


def planned_for(dy: Any) -> str | None:
    """The device type whose rules hold for a backward of dy; None where steps run one by one."""
    if type(dy) is not torch.Tensor:
        return None
    if wants_triton(dy):
        return "cuda"
    return "cpu" if dy.numel() >= FEW else None


def registry_version() -> int:
    """Another number whenever the rules are others."""
    return len(_changes)


def make_plan(whole: Window, device_type: str, fuse: bool) -> Plan:
    """Of the window of all steps. Pure, but for the rules that are registered."""
    steps = whole.steps
    misses: list[NearMiss] = []

    def cover(phase: str) -> tuple[Piece, ...]:
        found, i = [], 0
        while i < len(steps):
            size, rule = _best(whole.starting(i), phase, device_type, misses) if fuse else (1, None)
            found.append(Piece(steps[i : i + size], i, rule))
            i += size
        return tuple(found)

    return Plan(cover(FORWARD), cover(BACKWARD), tuple(misses))


def find_siblings(window: Window, phase: str, device_type: str) -> tuple[Rule | None, list[NearMiss]]:
    """The rule that covers all first steps of the branches of a parallel, if there is one."""
    misses: list[NearMiss] = []
    size, rule = _best(window, phase, device_type, misses)
    return (rule if size == len(window.steps) else None), misses


def _best(window: Window, phase: str, device_type: str, misses: list[NearMiss]) -> tuple[int, Rule | None]:
    size, rule = 1, None
    for one in reversed(_rules):
        if one.phase != phase or (device_type == "cpu" and not one.everywhere):
            continue
        answer = one.match(window)
        if isinstance(answer, str):
            misses.append(NearMiss(one.name, phase, window.steps[0].name, answer))
        elif answer is not None and answer > size:
            size, rule = answer, one
    return size, rule
