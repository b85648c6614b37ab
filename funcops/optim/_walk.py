"""Leaves of trees that come again at each step, by straight-line code for their structure: quicker than a general walk.

A tree of dicts with names, lists, tuples and nodes with named fields has such code, made the first time that it is seen. The code
checks every node that it passes; a tree of another structure, or with another leaf than a tensor, a bool or None, is walked in the
general way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from funcops.engine.backend import tracing
from funcops.engine.backend.source import compile_source
from funcops.engine.trees import FIELDS, leaves

LEAVES = (Tensor, bool, type(None))
ROOTS, EACH = 64, 4  # how many roots have code, and how many structures of a root: more would be compiled in vain
Walk = Callable[[Any], list[Any]]
_known: dict[Any, list[Walk]] = {}


class _Unlike(Exception):
    """A node of another kind than the code was made for."""


def rows_of(*trees: Any) -> list[list[Any]] | None:
    """The leaves of each tree, None included, in optree's order, if all have the structure of the first and leaves of the kinds
    above; None if not, or if no code is made for it."""
    if tracing():
        return None
    first = trees[0]
    root = tuple(first) if type(first) is dict else (type(first), len(first)) if type(first) in (list, tuple) else type(first)
    for walk in _walks(root, first):
        try:
            found = [walk(tree) for tree in trees]
        except (_Unlike, KeyError):
            continue
        if only_leaves(found):
            return found
    return None


def only_leaves(rows: list[list[Any]]) -> bool:
    """Whether all that stands in rows is of a kind that an optimiser takes, not a subtree where another row has a leaf."""
    return all([issubclass(kind, LEAVES) for kind in {type(leaf) for row in rows for leaf in row}])


def leaves_of(tree: Any) -> list[Any]:
    """All leaves of a tree, as `funcops.trees.leaves` gives them."""
    found = rows_of(tree)
    return leaves(tree) if found is None else found[0]


def _walks(root: Any, tree: Any) -> Iterator[Walk]:
    """The code of each structure with such a root, made for this tree's if there is room, and none of the others was right."""
    known = _known.get(root)
    if known is not None:
        yield from known
    elif len(_known) < ROOTS:
        known = _known[root] = []
    if known is not None and len(known) < EACH:
        known.append(_made(tree) or _none)  # either way it counts: a tree that has no code is not tried at every step
        yield known[-1]


def _none(tree: Any) -> list[Any]:
    raise _Unlike


def _made(tree: Any) -> Walk | None:
    lines, found, names = list[str](), list[str](), {"_Unlike": _Unlike}
    count = itertools.count()

    def visit(node: Any, expression: str) -> bool:
        """Write the lines for a node; whether it is of a kind that code is made for."""
        kind = type(node)
        if isinstance(node, LEAVES):
            found.append(expression)
            return True
        here = f"n{next(count)}"
        names[f"T{here}"] = kind
        lines.append(f"    {here} = {expression}")
        test = f"type({here}) is not T{here}"
        if kind is dict and all(type(key) is str for key in node):
            lines.append(f"    if {test} or len({here}) != {len(node)}: raise _Unlike")
            return all([visit(node[key], f"{here}[{key!r}]") for key in sorted(node)])
        if kind in (list, tuple):
            lines.append(f"    if {test} or len({here}) != {len(node)}: raise _Unlike")
            return all([visit(child, f"{here}[{i}]") for i, child in enumerate(node)])
        if kind in FIELDS and not FIELDS[kind][1]:  # static fields would have to be compared
            lines.append(f"    if {test}: raise _Unlike")
            return all([visit(getattr(node, name), f"{here}.{name}") for name in FIELDS[kind][0]])
        return False

    if not visit(tree, "tree") or not lines:
        return None
    text = "\n".join(["def walk(tree):", *lines, f"    return [{', '.join(found)}]", ""])
    return compile_source("walk over a tree", text, names)["walk"]  # type: ignore[no-any-return]
