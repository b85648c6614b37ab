"""The leaves of trees of one structure, fast.

Reading the leaves of a tree whose nodes are Python classes costs the tree library about a microsecond a node, and an update
reads four trees: five times what its arithmetic takes on small ones. So the walk over a structure seen before is written
out as source, as dataclasses do: it checks every container and returns the leaves, or None for another structure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from funcops.backend import tracing
from funcops.errors import describe, fail
from funcops.trees import leaves, paths, same_structure

Reader = Callable[[Any], list[Any] | None]
_readers: list[Reader] = []
_READERS_KEPT = 8


def lists_of(where: str, trees: dict[str, Any]) -> list[list[Any]]:
    """The leaves of trees that must have the structure of the first; the error names the paths that differ."""
    if not tracing():
        for read in _readers:
            lists = [read(tree) for tree in trees.values()]
            if None not in lists:
                return lists  # type: ignore[return-value]
    (first, wanted), *others = trees.items()
    for name, other in others:
        if not same_structure(wanted, other):
            have, got = paths(wanted), paths(other)
            sides = {"without": [k for k in have if k not in got], "with also": [k for k in got if k not in have]}
            said = [f"{side} {', '.join(which)}" for side, which in sides.items() if which]
            said = said or [f"other containers, {describe(other)} for {describe(wanted)}"]
            fail(where, name, f"a tree like {first}", "one " + " and ".join(said))
    if not tracing() and (read := written_reader(wanted)) is not None:
        _readers[:] = [read, *_readers][:_READERS_KEPT]
    return [leaves(tree) for tree in trees.values()]


class _Unknown(Exception):
    """A container that the source below could not check."""


def written_reader(tree: Any) -> Reader | None:
    """A fast `leaves` for trees of this structure; None where the tree holds containers that this does not know."""
    scope: dict[str, Any] = {"known": (Tensor, bool, type(None))}
    lines: list[str] = []
    found: list[str] = []

    def walk(node: Any, expression: str) -> None:
        if isinstance(node, scope["known"]):
            found.append(expression)
            return
        name = f"n{len(lines)}"
        scope[f"{name}_type"] = type(node)
        children, test = _children(node, name, scope)
        lines.append(f"{name} = {expression}\n    if type({name}) is not {name}_type{test}: return None")
        for child in children:
            walk(*child)

    try:
        walk(tree, "tree")
    except _Unknown:
        return None
    lines.append(f"found = [{', '.join(found)}]")
    lines.append("if not all([issubclass(kind, known) for kind in set(map(type, found))]): return None")
    exec("\n    ".join(["def read(tree):", *lines, "return found"]), scope)
    read: Reader = scope["read"]
    right = read(tree) or []
    expected = leaves(tree)
    return read if len(right) == len(expected) and all(a is b for a, b in zip(right, expected, strict=True)) else None


def _children(node: Any, name: str, scope: dict[str, Any]) -> tuple[list[tuple[Any, str]], str]:
    """A container's children, each with the source that reads it from `name`, and the source of what else to check."""
    if type(node) is dict and all(isinstance(k, str) for k in node):
        scope[f"{name}_keys"] = set(node)
        return [(node[k], f"{name}[{k!r}]") for k in sorted(node)], f" or {name}.keys() != {name}_keys"
    if isinstance(node, (tuple, list)):
        return [(child, f"{name}[{i}]") for i, child in enumerate(node)], f" or len({name}) != {len(node)}"
    if dataclasses.is_dataclass(node) and not any(f.metadata for f in dataclasses.fields(node) if f.kw_only):
        fields = [f.name for f in dataclasses.fields(node) if not f.metadata.get("hidden")]
        return [(getattr(node, field), f"{name}.{field}") for field in fields], ""
    raise _Unknown
