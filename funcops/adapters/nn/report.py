"""The report of `from_torch` and `to_torch`."""

from __future__ import annotations

from typing import Any, NamedTuple

SHOWN = 3  # paths of a kind in the summary


class Change(NamedTuple):
    path: str
    before: str
    after: str  # the new class, or the reason why the module was left


class Replaced(NamedTuple):
    """The modules that changed their class, the layers that were left, with the reason, and the layers already on funcops.

    `str()` gives a summary with a line per kind, its count and first paths; `details()` gives a line per module.
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
        """A line per module: its path, its old class, and its new class or the reason why it was left."""
        lines = [f"{c.path or '(the model)'}: {c.before} -> {c.after}" for c in self.replaced]
        lines += [f"{c.path or '(the model)'}: {c.before} left: {c.after}" for c in self.left]
        return "\n".join(lines + [f"{c.path or '(the model)'}: {c.before} already {c.after}" for c in self.already])


def _kinds(changes: list[Change], wording: str) -> list[str]:
    """A line per kind of change, in the order in which they first occur."""
    kinds: dict[Any, list[str]] = {}
    for path, before, after in changes:
        kinds.setdefault((before, after), []).append(path or "(the model)")
    lines = []
    for (before, after), paths in kinds.items():
        more = f", ... ({len(paths) - SHOWN} more)" if len(paths) > SHOWN + 1 else ""
        shown = ", ".join(paths[:SHOWN] if more else paths)
        lines.append(f"{len(paths):4} x {wording.format(before=before, after=after)}: {shown}{more}")
    return lines
