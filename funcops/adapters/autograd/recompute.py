"""The output of a cheap op is not kept by the nodes that read it: they keep its recipe, what `op.recompute` makes it of.

So it is within a chain (`program/`); here the op and its readers are nodes of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from funcops.adapters.flatten import flatten, unflatten
from funcops.contract.marks import version
from funcops.contract.needs import Needs
from funcops.contract.op import Op
from funcops.program import run
from funcops.program.rules import FEW


class Recipe(NamedTuple):
    """`op.recompute(node, node.cfg)` is the output, as long as that has this version."""

    op: Op
    node: Any
    version: int


class LeftOut(NamedTuple):
    """What a node keeps instead of an output: its recipe without tensors, which lie behind the first `own` that the node keeps;
    the output belongs at `places`."""

    op: Op
    shape: Any
    places: list[int]
    own: int

    def refilled(self, kept: Any) -> list[Any]:
        """What the node would have kept."""
        node = unflatten(self.shape, kept[self.own :])
        value, filled = self.op.recompute(node, node.cfg), list(kept[: self.own])
        for i in self.places:
            filled[i] = value
        return filled


_recipes: Any = WeakTensorKeyDictionary()  # by the output, while it lives


def large(t: Any) -> bool:
    """Whether a tensor, or the first of a tuple, is worth a recipe."""
    first = t[0] if type(t) is tuple and t else t
    return isinstance(first, Tensor) and first.numel() >= FEW


def forward(op: Op, params: Any, x: Any, cfg: Any, needs: Needs) -> tuple[Tensor, Any, Any]:
    """The forward of a cheap op, and what gives its y again."""
    y, residuals = op.fwd(params, x, cfg, needs=needs.with_recompute())
    node = run.recipe(op, residuals)
    residuals.needs = needs
    return y, residuals.copy(), node


def note(y: Tensor, op: Op, node: Any) -> None:
    """Nodes that read y may keep the node instead."""
    if large(y):
        _recipes[y] = Recipe(op, node, version(y))


def left_out(x: Tensor, kept: tuple[Any, ...]) -> tuple[tuple[Any, ...], LeftOut | None]:
    """What a node keeps where x has a recipe, and how to have x again; all that it kept where x, or what it is made of, was written
    to since."""
    recipe = _recipes.get(x)
    places = [] if recipe is None else [i for i, t in enumerate(kept) if t is x]
    if not places or recipe.version != version(x) or not recipe.node.fresh():
        return kept, None
    tensors: list[Tensor] = []
    shape = flatten(recipe.node, tensors)
    return (*[None if t is x else t for t in kept], *tensors), LeftOut(recipe.op, shape, places, len(kept))
