"""Layers of a repeat under different rules: a policy that names layers divides a repeat into bodies, one for each set of rules."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import Part, layer_ranges, rewrite
from funcops.engine.errors import fail, join_path
from funcops.engine.residuals.policy import Policy
from funcops.memory.parts import has_parts, kept_paths, within


def named_layers(numbers: Sequence[int]) -> str:
    """The numbers of layers, rising, as a part of a path."""
    # a number less its place is the same all along a run
    runs = [[i for _, i in run] for _, run in itertools.groupby(enumerate(numbers), key=lambda one: one[1] - one[0])]
    return ",".join([f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs])


def any_layer(path: str) -> str:
    """The path with `*` for the numbers of layers."""
    return ".".join(["*" if layer_ranges(part) else part for part in path.split(".")])


def laid_out(op: Op, cfg: Any, policy: Policy) -> Any:
    """The config, in which the layers of a repeat that have other rules than the others are a part of their own. Raises
    `ValueError` for a rule that names layers which no repeat has."""
    told = [i for i, (pattern, _) in enumerate(policy.rules) if re.search(r"[\d?[]", pattern)]
    for pattern in [policy.rules[i][0] for i in told]:
        _check_ranges(pattern)
        if not policy.optional:
            _check_numbers(pattern, op, cfg)
    if not told:
        return cfg

    def divided(part: Part) -> Any:
        if not has_parts(part.op, part.cfg):
            return part.op, part.cfg
        if part.cfg.times is None or part.cfg.bodies:
            return None
        groups: dict[Any, list[int]] = {}
        for i in range(part.cfg.times):
            inside = [(join_path(part.path, i), False)]
            inside += [(join_path(part.path, f"{i}.{path}"), waits) for path, waits in _by_number(part.cfg.op, part.cfg.cfg)]
            rules = [(at, rule) for at, path in enumerate(inside) for rule in told if policy.applies(rule, *path)]
            groups.setdefault(tuple(rules), []).append(i)
        if len(groups) == 1:
            return None
        bodies = tuple([(named_layers(numbers), part.cfg.op, part.cfg.cfg) for numbers in groups.values()])
        return rewrite(dataclasses.replace(part.cfg, bodies=bodies), divided, op=part.op, path=part.path)

    return rewrite(cfg, divided, op=op)[1]


def _by_number(op: Op, cfg: Any) -> Iterator[tuple[str, bool]]:
    """The paths of the steps and their fields, with each layer of a repeat inside; and whether only a pending has the field."""
    times = _times(op, cfg)
    for kept in kept_paths(op, cfg):
        layers = [range(times[here]) for here in _stars(kept.path)]
        for numbers in itertools.product(*layers):
            yield _numbered(kept.path, numbers), kept.waits


def _times(op: Op, cfg: Any) -> dict[str, int]:
    """The numbers of layers of the repeats, by the path of their body."""
    found = [part for part in within(op, cfg) if has_parts(part.op, part.cfg)]
    return {join_path(part.path, "*"): part.cfg.times for part in found if part.cfg.times is not None}


def _stars(path: str) -> list[str]:
    """The paths of the bodies of repeats on the way to a path."""
    parts = path.split(".")
    return [".".join(parts[: at + 1]) for at, part in enumerate(parts) if part == "*"]


def _numbered(path: str, numbers: Any) -> str:
    """The path with these numbers for its layers."""
    left = iter(numbers)
    return ".".join([str(next(left)) if part == "*" else part for part in path.split(".")])


def _check_ranges(pattern: str) -> None:
    """Raise `ValueError` for what is meant as layers and names none."""
    where = f"rules at {pattern!r}"
    meant = re.sub(r"(?<![^.])(\d+)(?:\.\.\.?|:)(\d+)(?![^.])", r"\1-\2", pattern)
    if meant != pattern:
        fail("with_policy", where, f"a glob with ranges of layers as first-last (did you mean {meant!r}?)", repr(pattern))
    for part in pattern.split("."):
        ranges = layer_ranges(part)
        if ranges is None and re.fullmatch(r"(?=.*\d)[\d,-]+", part):
            fail("with_policy", where, "a glob with layers as a number from 0, or a range, such as 3 or 0-9", repr(part))
        if ranges and not all(ranges):
            meant = re.sub(r"(\d+)-(\d+)", lambda m: "-".join(sorted(m.groups(), key=int)), pattern)
            fail(
                "with_policy", where, f"a glob with ranges that do not end before they begin (did you mean {meant!r}?)", repr(part)
            )


def _check_numbers(pattern: str, op: Op, cfg: Any) -> None:
    """Raise `ValueError` if a number in a pattern, or an end of a range, is beyond the layers of every repeat that it may mean."""
    parts, times = pattern.split("."), _times(op, cfg)
    for at, ranges in enumerate(map(layer_ranges, parts)):
        if ranges is None:
            continue
        others = ["*" if layer_ranges(part) else part for part in parts]
        last = max(one[-1] for one in ranges)
        # the repeats of which this part may number the layers: it takes the place of their `*`, and of no other part
        glob = ".".join([*others[:at], "#", *others[at + 1 :]])
        found = dict.fromkeys(
            here
            for kept in kept_paths(op, cfg)
            for here in _stars(kept.path)
            if fnmatchcase(f"{here[:-1]}#{kept.path[len(here) :]}", glob)
        )
        most = max((times[here] for here in found), default=last + 1)
        if last >= most:
            body = next(here for here in found if times[here] == most)
            inside = [f"{one[0]}-{min(one[-1], most - 1)}" for one in ranges if one[0] < most]
            near = ".".join([*parts[:at], inside[0] if inside else str(most - 1), *parts[at + 1 :]])
            wanted = f"of layers 0 to {most - 1} of the repeat {body[:-2] or '(the whole)'} (did you mean {near!r}?)"
            fail("with_policy", f"rules at {pattern!r}", wanted, parts[at])
