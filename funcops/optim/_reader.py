"""The leaves of trees of one structure, fast.

Reading the leaves of a tree whose nodes are Python classes costs the tree library about a microsecond a node, and an update
reads four trees. So the walk over a structure seen before is written out as source, as dataclasses do: it checks every
container and returns the leaves, or None for a tree of any other structure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from funcops.backend import tracing
from funcops.errors import describe, fail
from funcops.trees import leaves, paths, same_structure

_readers: list[Callable[[Any], list[Any] | None]] = []
_READERS_KEPT = 8


def lists_of(where: str, trees: tuple[Any, ...], names: tuple[str, ...]) -> list[list[Any]]:
    """The leaves of trees that must have one structure; the error names the paths that differ."""
    if not tracing():
        for read in _readers:
            lists = [read(tree) for tree in trees]
            if None not in lists:
                return lists  # type: ignore[return-value]
    for other, name in zip(trees[1:], names[1:], strict=False):
        if not same_structure(trees[0], other):
            _differ(where, trees[0], other, names[0], name)
    if not tracing() and not any([read(trees[0]) for read in _readers]):
        _remember(trees[0])
    return [leaves(tree) for tree in trees]


def _differ(where: str, a: Any, b: Any, name_a: str, name_b: str) -> None:
    have, got = paths(a), paths(b)
    missing, extra = [k for k in have if k not in got], [k for k in got if k not in have]
    said = [f"{what} {', '.join(which)}" for what, which in (("without", missing), ("with also", extra)) if which]
    said = said or [f"other containers, {describe(b)} for {describe(a)}"]
    fail(where, name_b, f"a tree like {name_a}", "one " + " and ".join(said))


def _remember(tree: Any) -> None:
    read = _written_reader(tree)
    if read is not None:
        _readers.insert(0, read)
        del _readers[_READERS_KEPT:]


def _written_reader(tree: Any) -> Callable[[Any], list[Any] | None] | None:
    """A fast `leaves` for trees of this structure; None where the tree holds containers that this does not know."""
    lines: list[str] = []
    found: list[str] = []
    scope: dict[str, Any] = {"Tensor": Tensor, "known": (Tensor, bool, type(None)), "map": map, "set": set}

    def constant(value: Any) -> str:
        name = f"c{len(scope)}"
        scope[name] = value
        return name

    def walk(node: Any, expression: str) -> bool:
        if node is None or isinstance(node, (Tensor, bool)):
            found.append(expression)
            return True
        name = f"n{len(lines)}"
        test = f"type({name}) is not {constant(type(node))}"
        children: list[tuple[Any, str]] = []
        if type(node) is dict:
            if not all(isinstance(k, str) for k in node):
                return False
            test += f" or {name}.keys() != {constant(set(node))}"
            children = [(node[k], f"{name}[{k!r}]") for k in sorted(node)]
        elif isinstance(node, (tuple, list)):
            test += f" or len({name}) != {len(node)}"
            children = [(child, f"{name}[{i}]") for i, child in enumerate(node)]
        elif dataclasses.is_dataclass(node):
            for field in dataclasses.fields(node):
                if field.metadata.get("static"):
                    test += f" or {name}.{field.name} != {constant(getattr(node, field.name))}"
                elif not field.metadata.get("hidden"):
                    children.append((getattr(node, field.name), f"{name}.{field.name}"))
        else:
            return False
        lines.append(f"    {name} = {expression}\n    if {test}: return None")
        return all([walk(*child) for child in children])

    if tree is None or isinstance(tree, Tensor) or not walk(tree, "tree"):
        return None
    lines.append(f"    found = [{', '.join(found)}]")
    lines.append("    for kind in set(map(type, found)):\n        if not issubclass(kind, known): return None")
    lines.append("    return found")
    exec("def read(tree):\n" + "\n".join(lines), scope)
    read = scope["read"]
    right, expected = read(tree), leaves(tree)
    same = (
        right is not None and len(right) == len(expected) and all(a is b for a, b in zip(right, expected, strict=True))
    )
    return read if same else None
