"""Splitting of a tree into its tensors and a shape with their indices, and the reverse.

In plain Python, although `trees` uses optree: the shape must survive a traced `autograd.Function`, and an optree spec made outside
of a compiled function cannot be used in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from funcops.engine.backend.source import exact
from funcops.engine.errors import join_path
from funcops.engine.residuals.nested import Nested
from funcops.engine.trees import FIELDS


class TensorIndex(NamedTuple):
    """Stands in a shape for tensor number `i`."""

    i: int


class Shape(NamedTuple):
    """A dataclass node: the shapes of its leaves by name, and its other fields."""

    cls: type
    leaves: dict[str, Any]
    statics: dict[str, Any]
    hidden: dict[str, Any]


def flatten(node: Any, found: list[Tensor]) -> Any:
    """The shape of a tree; its tensors are appended to `found`."""
    if isinstance(node, Tensor):
        found.append(node)
        return TensorIndex(len(found) - 1)
    if isinstance(node, Nested):
        shape: Any = {name: flatten(child, found) for name, child in node.items()}
        return type(node)(shape, cfg=node.cfg, needs=node.needs)
    if isinstance(node, dict):
        return {name: flatten(child, found) for name, child in node.items()}
    if isinstance(node, (tuple, list)):
        parts = [flatten(child, found) for child in node]
        return type(node)._make(parts) if hasattr(node, "_make") else type(node)(parts)
    if type(node) in FIELDS:
        leaves, statics, hidden = FIELDS[type(node)]
        return Shape(
            type(node),
            {name: flatten(getattr(node, name), found) for name in leaves},
            {name: getattr(node, name) for name in statics},
            {name: getattr(node, name) for name in hidden if name != "_marks"},  # autograd has its own guard against writes
        )
    return node


def unflatten(shape: Any, tensors: Sequence[Any]) -> Any:
    """The tree of a shape, with `tensors` at their indices."""
    if type(shape) is TensorIndex:
        return tensors[shape.i]
    if type(shape) is Shape:
        node = shape.cls(**{name: unflatten(child, tensors) for name, child in shape.leaves.items()}, **shape.statics)
        for name, value in shape.hidden.items():
            setattr(node, name, value)
        return node
    if isinstance(shape, Nested):
        parts: Any = {name: unflatten(child, tensors) for name, child in shape.items()}
        return type(shape)(parts, cfg=shape.cfg, needs=shape.needs)
    if isinstance(shape, dict):
        return {name: unflatten(child, tensors) for name, child in shape.items()}
    if isinstance(shape, (tuple, list)):
        parts = [unflatten(child, tensors) for child in shape]
        return type(shape)._make(parts) if hasattr(shape, "_make") else type(shape)(parts)
    return shape


def gradients(shape: Any, tree: Any, found: list[Any]) -> list[Any]:
    """The gradients for each tensor of the shape that a tree of gradients mirrors, in order; None if the tree lacks that leaf."""
    if type(shape) is TensorIndex:
        found.append(tree)
    elif type(shape) is Shape:
        for name, child in shape.leaves.items():
            gradients(child, getattr(tree, name, None), found)
    elif isinstance(shape, dict):
        for name, child in shape.items():
            gradients(child, None if tree is None else tree[name], found)
    elif isinstance(shape, (tuple, list)):
        for i, child in enumerate(shape):
            gradients(child, None if tree is None else tree[i], found)
    return found


def indexed_paths(shape: Any, path: str) -> Iterator[tuple[int, str]]:
    """The number and the path of each tensor, in order."""
    if type(shape) is TensorIndex:
        yield shape.i, path
        return
    parts: Any = shape.leaves if type(shape) is Shape else shape
    if isinstance(parts, dict):
        named: Any = parts.items()
    elif isinstance(parts, (tuple, list)):
        named = enumerate(parts)
    else:
        return
    for name, child in named:
        name = exact(name)
        yield from indexed_paths(child, join_path(path, name))
