"""Faults of one call of a recorded program: one output of one op or rule, or one sum of gradients, is changed in one element."""

from __future__ import annotations

import dataclasses
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.backend import notes, scopes
from funcops.engine.program import programs, run
from funcops.engine.program.rules import Rule
from funcops.engine.trees import paths, tensors, tree_map

HALF_OF = {"v": "fwd", "d": "dgrad", "q": "wgrad", "a": "recompute"}  # of a local, by the letter of its kind
SUMMED = re.compile(r"^( *)(\w+) = (\w+ \+ \w+ if type\(.*)$", re.M)  # the gradients of a value with several readers
CALLED = re.compile(r"\b([fbeyxzsr]\d+)(?:\(| if | else )|else ([fbeyxzsr]\d+)\)")


class Site(NamedTuple):
    """An output of a call: the path of the step that runs, and the half that the output belongs to."""

    path: str
    half: str


class Plan:
    """Counts the outputs of calls, in the order in which they run on one thread; `chosen`: the number of that which is changed, by
    `size` of its value, or to the next number if that is None."""

    def __init__(self, chosen: int = -1, size: float | None = None, seed: int = 0) -> None:
        self.chosen, self.size, self.draw = chosen, size, random.Random(seed)
        self.sites: list[Site] = []
        self.thread = -1
        self.changed: Site | None = None

    def follow(self, yes: bool = True) -> None:
        """Count what this thread runs, if it is the rank with the fault."""
        self.thread = threading.get_ident() if yes else self.thread

    def passed(self, value: Any, half: str, step: str = "") -> Any:
        """The output, of a step inside of the one that runs if that is named, changed if it is the chosen one."""
        if threading.get_ident() != self.thread or not any(map(_can_change, tensors(value))):
            return value
        label = scopes.label()
        site = Site(label.inside(step, "").path, scopes.RECOMPUTE if label.half == scopes.RECOMPUTE else half)
        self.sites.append(site)
        if len(self.sites) - 1 != self.chosen:
            return value
        self.changed = site
        target = self.draw.choice([t for t in tensors(value) if _can_change(t)])
        if half == "wgrad":  # it may be the caller's accumulator, or a part of one
            return self._change(target) and value
        made = target.clone()
        self._change(made)
        return tree_map(lambda leaf: made if leaf is target else leaf, value)

    def _change(self, t: Tensor) -> bool:
        place = self.draw.choice(t.nonzero().tolist()) if t.dim() else []
        old = t[tuple(place)].clone()
        new = torch.nextafter(old, old * 2) if self.size is None else old * (1 + self.size)
        t[tuple(place)] = torch.nextafter(old, old * 2) if torch.equal(new, old) else new
        return True


def _can_change(t: Tensor) -> bool:
    return t.dtype in (torch.float32, torch.float64, torch.bfloat16) and bool(t.count_nonzero()) and bool(t.isfinite().all())


_plan: list[Plan] = []


@contextmanager
def planted(plan: Plan) -> Iterator[Plan]:
    """A block in which programs that are made run with the plan's fault; so the config must be one that no program was made of
    outside of such a block."""
    real = programs.compile_source

    def compiled(where: str, text: str, names: dict[str, Any]) -> Any:
        if "notes" not in names:
            return real(where, text, names)
        summed = {"summed": lambda value: _plan[-1].passed(value, "dgrad") if _plan else value}
        return real(where, SUMMED.sub(r"\1\2 = summed(\3)", text), _wrapped(text, names) | summed)

    added, run.add = run.add, lambda *terms: _plan[-1].passed(added(*terms), "wgrad")  # of the uses of a tied param
    told, notes.tell_by_step = notes.tell_by_step, lambda *given: told(*_by_step(*given))
    programs.compile_source = compiled
    _plan.append(plan)
    try:
        yield plan
    finally:
        _plan.pop()
        programs.compile_source, run.add, notes.tell_by_step = real, added, told


def _by_step(name: str, gradients: Any, under: str = "") -> tuple[Any, ...]:
    """Gradients of several steps at once, passed to the plan before they are told."""
    for path, t in paths(gradients).items():
        if isinstance(t, Tensor):
            _plan[-1].passed(t, "wgrad", under + path.rpartition(".")[0])
    return name, gradients, under


def _wrapped(text: str, names: dict[str, Any]) -> dict[str, Any]:
    """The globals of a program, with functions that pass their outputs to the plan."""
    outputs: dict[str, list[str]] = {}
    for line in text.split("\n"):
        left, found, right = line.strip().partition(" = ")
        if found and not left.startswith(("with", "if", "try")):
            for one in CALLED.finditer(right):
                name = one[1] or one[2]
                if name[0] != "e" or left[0] == "q":
                    outputs[name] = (
                        ["q"] if name[0] == "e" else [target[0] for target in re.sub(r"^\((\w+).*?\)", r"\1", left).split(", ")]
                    )
    made = {name: _call(names[name], kinds) for name, kinds in outputs.items() if callable(names.get(name))}
    rules = {name: _rule(value) for name, value in names.items() if isinstance(value, Rule)}
    return names | made | rules


def _call(real: Any, kinds: list[str]) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if not _plan:
            return found
        if len(kinds) == 1:
            return found if _of_parts(kinds[0], found) else _plan[-1].passed(found, HALF_OF[kinds[0]])
        return tuple(
            _plan[-1].passed(one, HALF_OF[kind]) if kind in HALF_OF and not _of_parts(kind, one) else one
            for one, kind in zip(found, kinds, strict=True)
        )

    return run


def _of_parts(kind: str, found: Any) -> bool:
    """Whether these are gradients of a combinator's params, which its parts have made."""
    return kind == "q" and type(found) in (dict, tuple)


def _rule(rule: Rule) -> Rule:
    def run(*args: Any) -> Any:
        found = rule.run(*args)
        half = "fwd" if rule.phase == "forward" else "dgrad"
        plain = found is NotImplemented or rule.settle is not None or not _plan
        return found if plain else (_plan[-1].passed(found[0], half), found[1])

    def wgrads(*args: Any) -> Any:
        found = rule.wgrads(*args)  # type: ignore[misc]
        return found if found is NotImplemented or not _plan else _plan[-1].passed(found, "wgrad")

    return dataclasses.replace(rule, run=run, wgrads=rule.wgrads and wgrads)
