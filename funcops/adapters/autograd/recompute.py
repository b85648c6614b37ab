"""Recomputation across nodes: a node that reads the output of a recomputable op keeps its recipe, the fields for `op.recompute`.

A chain does the same within its program (`program/`); here the op and its readers are separate nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from funcops.adapters.flatten import flatten, unflatten
from funcops.contract.marks import version
from funcops.contract.needs import Needs
from funcops.contract.op import Op
from funcops.program import run
from funcops.program.rules import FEW


class Recipe(NamedTuple):
    """`op.recompute(node, node.cfg)` recomputes the output, as long as the output has this version."""

    op: Op
    node: Any
    version: int


class LeftOut(NamedTuple):
    """A recipe that a node keeps instead of an output. The node's first `own` kept tensors are its own, the recipe's tensors
    follow; the output, in the shape `size`, belongs at the indices `places`."""

    op: Op
    shape: Any
    places: list[int]
    own: int
    size: torch.Size

    def refilled(self, kept: Any) -> list[Any]:
        """The tensors that the node would have kept, with the output recomputed."""
        node = unflatten(self.shape, kept[self.own :])
        value, filled = self.op.recompute(node, node.cfg).view(self.size), list(kept[: self.own])
        for i in self.places:
            filled[i] = value
        return filled


_recipes: Any = WeakTensorKeyDictionary()  # keyed by the output, while it is alive


def large(t: Any) -> bool:
    """Whether a tensor, or the first of a tuple, is large enough for a recipe."""
    first = t[0] if type(t) is tuple and t else t
    return isinstance(first, Tensor) and first.numel() >= FEW


def forward(op: Op, params: Any, x: Any, cfg: Any, needs: Needs) -> tuple[Tensor, Any, Any]:
    """Run the forward of a recomputable op. Returns y, the residuals, and the node from which y can be recomputed."""
    y, residuals = op.fwd(params, x, cfg, needs=needs.with_recompute())
    node = run.recipe(op, residuals)
    residuals.needs = needs
    return y, residuals.copy(), node


def note(y: Tensor, op: Op, node: Any) -> None:
    """Register a recipe for y, which nodes that read y may keep instead."""
    if large(y):
        _recipes[y] = Recipe(op, node, version(y))


def left_out(x: Tensor, kept: tuple[Any, ...]) -> tuple[tuple[Any, ...], LeftOut | None]:
    """Replace x among a node's kept tensors by its recipe, or by the recipe of the tensor of which x is a view, of all elements in
    order. Returns `kept` and None if x has no recipe, or if x or the recipe's tensors were written to since."""
    recipe = _recipes.get(_whole(x) if x._is_view() else x)
    places = [] if recipe is None else [i for i, t in enumerate(kept) if t is x]
    if not places or recipe.version != version(x) or not recipe.node.fresh():
        return kept, None
    tensors: list[Tensor] = []
    shape = flatten(recipe.node, tensors)
    return (*[None if t is x else t for t in kept], *tensors), LeftOut(recipe.op, shape, places, len(kept), x.shape)


def _whole(x: Tensor) -> Tensor:
    """The tensor of which x is a view, if x has all of its elements in their order; else x. Models take such views: a slice of all
    positions before the head, rows of a batch flattened."""
    base: Any = x._base
    same = x.dtype is base.dtype and x.numel() == base.numel() and x.storage_offset() == base.storage_offset()
    return base if same and x.is_contiguous() and base.is_contiguous() else x
