"""Helpers of combinators and programs: the sum of gradients, params by shape alone, and keys in params."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from torch import Tensor

from funcops.engine.contract.configs import Composite
from funcops.engine.contract.op import Op
from funcops.engine.trees import tensors, tree_map

__all__ = ["abstract_params", "add", "fold_keys", "has_params"]

T = TypeVar("T")


def add(a: Any, b: Any) -> Any:
    """The sum of two gradients of one structure; None is zero. A node with its own way of adding has `plus`."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, Tensor):
        return a + b
    # amaxes in a gradient are not summed, as the larger one counts: such a node adds by itself
    return a.plus(b) if hasattr(a, "plus") else tree_map(add, a, b, is_leaf=lambda node: hasattr(node, "plus"))


def has_params(op: Op, cfg: Any) -> bool:
    return bool(tensors(abstract_params(op, cfg)))


@functools.lru_cache(maxsize=1024)
def abstract_params(op: Op, cfg: Any) -> Any:
    """The op's params on the meta device: their structure and shapes. Do not change them. A combinator's config makes them from its
    parts' params, so that equal layers share theirs."""
    return cfg.abstract() if isinstance(cfg, Composite) else op.init(cfg, key=None, device="meta")


def fold_keys(tree: T, number: int) -> T:
    """The tree with `number` folded into every random key that its nodes hold; a node that may hold one has `fold_key`."""
    return tree_map(lambda node: node.fold_key(number) if hasattr(node, "fold_key") else node, tree, is_leaf=_may_hold_a_key)


def _may_hold_a_key(node: Any) -> bool:
    return hasattr(type(node), "fold_key")
