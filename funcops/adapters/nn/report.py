"""What `from_torch` and `to_torch` say that they did."""

from __future__ import annotations

from typing import Any, NamedTuple

SHOWN = 3  # paths of a kind in the summary


class Change(NamedTuple):
    path: str
    before: str
    after: str  # the class now, or why it stayed


class Replaced(NamedTuple):
    """The modules that changed their class, the layers that were left, with the reason, and those that ran on funcops already.

    Printed, a summary: a line for each kind, with a count and the first paths. `details()` has a line for each module.
    """

    replaced: list[Change]
    left: list[Change]
    already: list[Change]

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} replaced, {len(self.left)} left, {len(self.already)} already on funcops"]
        lines += _kinds(self.replaced, "{before} -> {after}")
        lines += _kinds(self.left, "{before} left: {after}")
        lines += _kinds(self.already, "{before} already {after}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def details(self) -> str:
        """A line for each module: its path, what it was, and what it is now or why it stayed."""
        lines = [f"{c.path or '(the model)'}: {c.before} -> {c.after}" for c in self.replaced]
        lines += [f"{c.path or '(the model)'}: {c.before} left: {c.after}" for c in self.left]
        return "\n".join(lines + [f"{c.path or '(the model)'}: {c.before} already {c.after}" for c in self.already])


def _kinds(changes: list[Change], wording: str) -> list[str]:
    """A line for each kind of change, in the order of the first of each."""
    kinds: dict[Any, list[str]] = {}
    for path, before, after in changes:
        kinds.setdefault((before, after), []).append(path or "(the model)")
    lines = []
    for (before, after), paths in kinds.items():
        more = f", ... ({len(paths) - SHOWN} more)" if len(paths) > SHOWN + 1 else ""
        shown = ", ".join(paths[:SHOWN] if more else paths)
        lines.append(f"{len(paths):4} x {wording.format(before=before, after=after)}: {shown}{more}")
    return lines
