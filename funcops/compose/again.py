"""What a chain does not keep because the step before can give it again: the x of a linear that follows a norm or an activation.

The output of a cheap step is left out of the next step's residuals, wherever they alias it. The chain keeps a recipe instead: what
the cheap step read, which is kept anyway. The backward runs that step's forward once more, just before what reads its output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.compose.step import Step
from funcops.errors import StaleResidualError
from funcops.needs import Needs
from funcops.op import Op
from funcops.schema import DGRAD, WGRAD, Donated, Saved, residuals, saved
from funcops.trees import tensors

Path = tuple[Any, ...]


@residuals
class Recipe:
    """What a cheap step read: its forward gives its output again."""

    params: Any = saved("the step's", needed_by=DGRAD | WGRAD)
    x: Tensor = saved("[*]", alias="x", needed_by=DGRAD | WGRAD)
    _versions: Any = dataclasses.field(default=None, init=False, metadata={"hidden": True})


class Dropped(NamedTuple):
    """The output of the step `producer`, left out of the next step's residuals at `paths`; the recipe is kept as `key`."""

    producer: Step
    key: str
    paths: tuple[Path, ...]
    in_dgrad: bool  # whether a dgrad reads it

    def cut(self, node: Any, kept: Any, params: Any, x: Any) -> None:
        """After the forward: leave the output out of `node`, and keep the recipe among the residuals of the chain."""
        if _keeps_x(kept[self.producer.name]) and any([_assign(node, path, None) for path in self.paths]):
            kept[self.key] = recipe = Recipe.keep(  # type: ignore[attr-defined]
                self.producer.cfg, node.needs, params=params, x=x
            )
            recipe._versions = _versions(params)

    def value(self, where: str, recipe: Any) -> Any:
        """The output, computed again."""
        recipe = recipe.take(where) if type(recipe) is Donated else recipe
        if not recipe.fresh():
            recipe.complain(where)
        if recipe._versions is not None and recipe._versions != _versions(recipe.params):
            raise StaleResidualError(
                f"{where}: params of step {self.producer.name!r} must be as the forward left them, got some that were written "
                "to since (its output is computed again). Run the backward first, or pass recompute=False to the chain"
            )
        return self.producer.op.fwd(recipe.params, recipe.x, self.producer.cfg, needs=Needs.NONE)[0]

    def fill(self, where: str, node: Any, value: Any) -> Any:
        """Residuals or pending with the output in its places; a node that was given away is filled itself."""
        for path in self.paths:
            if type(node) is Donated:
                _assign(node._node, path, value)
            else:
                node = _replaced(where, node, path, value)
        return node

    def copy(self, recipe: Any) -> Any:
        """The recipe for a pending, while the residuals keep theirs."""
        made = recipe.copy()
        made._marks, made._versions = recipe._marks, recipe._versions
        return made


    def emptied(self, pending: Any) -> Any:
        """A pending without the output, which a dgrad that read it has handed on."""
        for path in self.paths if self.in_dgrad else ():
            _assign(pending, path, None)
        return pending


def dropped(before: Step, step: Step) -> Dropped | None:
    """What `step` need not keep of the output of the step before it."""
    if not before.op.cheap or before.names or before.gives:
        return None
    places = list(_places(step.op, step.cfg, ()))
    if not places:
        return None
    return Dropped(before, f"{before.name}()", tuple(path for path, _ in places), any(d for _, d in places))


def _places(op: Op, cfg: Any, prefix: Path) -> Iterator[tuple[Path, bool]]:
    """Where the residuals of an op hold its main input, and whether a dgrad reads it there."""
    if hasattr(cfg, "entries"):
        for name, inner, inner_cfg in cfg.entries:
            yield from _places(inner, inner_cfg, prefix if name is None else (*prefix, name))
        return
    for name, field in getattr(op.dgrad, "node_class", Saved).fields.items():
        if field.alias in ("x", "x.0"):
            yield (*prefix, name), DGRAD in field.needed_by


def _keeps_x(node: Any) -> bool:
    fields = getattr(node, "fields", {})
    return any([field.alias == "x" and getattr(node, name) is not None for name, field in fields.items()])


def _assign(node: Any, path: Path, value: Any) -> bool:
    """Set a field in place, with new marks. With a value only where one is wanted and missing. Says whether it was set."""
    for name in path[:-1]:
        node = None if node is None else node[name]
    if not isinstance(node, Saved) or not _open(node, path[-1], value):
        return False
    setattr(node, path[-1], value)
    node.__post_init__()  # type: ignore[attr-defined]
    return True


def _replaced(where: str, node: Any, path: Path, value: Any) -> Any:
    """As `_assign`, in a copy of the nodes along the path."""
    name, *rest = path
    if node is None:
        return None
    if rest:
        copy = type(node)(node, cfg=node.cfg, needs=node.needs)
        copy[name] = _replaced(where, node[name], tuple(rest), value)
        return copy
    if not node.fresh():
        node.complain(where)
    return node.copy(**{name: value}) if _open(node, name, value) else node


def _open(node: Any, name: str, value: Any) -> bool:
    if name not in node.fields:
        return False
    return (getattr(node, name) is None) == (value is not None) and node.fields[name].wanted(node.needs)


def _versions(params: Any) -> tuple[int, ...] | None:
    """The versions of params; None where there are none: while compiling, and of inference tensors."""
    if torch.compiler.is_dynamo_compiling():
        return None
    try:
        return tuple([t._version for t in tensors(params)])
    except RuntimeError:
        return None
