"""What a chain does not keep because the step before can give it again: the x of a linear that follows a norm or an activation.

The output of a cheap step is left out of the next step's residuals, wherever they alias it. The chain keeps a recipe instead: what
the cheap step read, which is kept anyway. The backward runs that step's forward once more, just before what reads its output.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from funcops.compose.step import Step
from funcops.errors import StaleResidualError
from funcops.needs import Needs
from funcops.op import ALL, Op
from funcops.residuals.policy import unpack
from funcops.schema import DGRAD, WGRAD, Donated, Saved, residuals, saved

Places = dict[Any, Any]  # by name: places further down, or whether a dgrad reads the field


@residuals
class Recipe:
    """What a cheap step read: its forward gives its output again."""

    params: Any = saved("the step's", needed_by=DGRAD | WGRAD, tree=True)
    x: Any = saved("[*]", alias="x", needed_by=DGRAD | WGRAD, tree=True)


class Dropped(NamedTuple):
    """The output of the step `producer`, left out of the next step's residuals at `places`; the recipe is kept as `key`."""

    producer: Step
    key: str
    places: Places
    in_dgrad: bool  # whether a dgrad reads it
    x_fields: tuple[str, ...]  # of the producer's residuals, in the order of its x

    def applies(self, needs: Needs) -> bool:
        """Whether the producer, under these needs, keeps its x anyway."""
        fields = self.producer.op.fields()
        return all(fields[name].wanted(needs) for name in self.x_fields)

    def cut(self, node: Any, kept: Any, params: Any) -> None:
        """After the forward: leave the output out of `node`, and keep the recipe among the residuals of the chain: the producer's
        x, in the form in which that keeps it."""
        if _clear(node, self.places):
            source = kept[self.producer.name]
            found = [t for name in self.x_fields if (t := getattr(source, name)) is not None]
            x = found[0] if getattr(source, "inputs", None) is None else tuple(found)
            kept[self.key] = Recipe.keep(self.producer.cfg, node.needs, params=params, x=x)  # type: ignore[attr-defined]

    def value(self, where: str, recipe: Any) -> Any:
        """The output, computed again."""
        recipe = recipe.take(where) if type(recipe) is Donated else recipe
        if not recipe.fresh():
            if (recipe.stale() or "").startswith("params"):
                raise StaleResidualError(
                    f"{where}: params of step {self.producer.name!r} must be as the forward left them, got some that were written "
                    "to since (its output is computed again). Run the backward first, or pass recompute=False to the chain"
                )
            recipe.complain(where)
        x = tuple(map(unpack, recipe.x)) if type(recipe.x) is tuple else unpack(recipe.x)
        return self.producer.op.fwd(recipe.params, x, self.producer.cfg, needs=Needs.NONE)[0]

    def fill(self, where: str, node: Any, value: Any) -> Any:
        """Residuals or pending with the output in its places; a node that was given away is filled itself."""
        if type(node) is Donated:
            _assign(node._node, self.places, value)
            return node
        return _filled(where, node, self.places, value)

    def emptied(self, pending: Any) -> Any:
        """A pending without the output, which a dgrad that read it has handed on."""
        if self.in_dgrad:
            _clear(pending, self.places)
        return pending


def dropped(before: Step, step: Step) -> Dropped | None:
    """What `step` need not keep of the output of the step before it."""
    if not before.op.cheap or before.names or before.gives:
        return None
    places = _places(step.op, step.cfg)
    x_fields = tuple(n for n, field in before.op.fields().items() if (field.alias or "").partition(".")[0] == "x")
    if not places or not x_fields:
        return None
    return Dropped(before, f"{before.name}()", places, _any_dgrad(places), x_fields)


def _places(op: Op, cfg: Any) -> Places:
    """Where the residuals of an op hold its main input."""
    if declares_fields(op) or not hasattr(cfg, "entries"):
        return {name: DGRAD in field.needed_by for name, field in op.fields().items() if field.alias in ("x", "x.0")}
    found: Places = {}
    for name, inner, inner_cfg in cfg.entries:
        places = _places(inner, inner_cfg)
        if name is None:
            return places
        if places:
            found[name] = places
    return found


def declares_fields(op: Op) -> bool:
    """Whether the op's residuals are one node with declared fields, and not those of its parts by name."""
    return op.residuals is not None and issubclass(op.residuals, Saved)


def _any_dgrad(places: Places) -> bool:
    return any(_any_dgrad(place) if isinstance(place, dict) else place for place in places.values())


def _clear(node: Any, places: Places) -> bool:
    """Drop the fields; says whether there were any."""
    if node is None:
        return False
    if isinstance(node, dict):
        return any([_clear(node[name], further) for name, further in places.items()])
    found = [name for name in places if getattr(node, name, None) is not None]
    node.set(**dict.fromkeys(found))
    return bool(found)


def _assign(node: Any, places: Places, value: Any) -> None:
    if isinstance(node, dict):
        for name, further in places.items():
            _assign(node[name], further, value)
    elif node is not None:
        node.set(**dict.fromkeys(_missing(node, places), value))


def _filled(where: str, node: Any, places: Places, value: Any) -> Any:
    """As `_assign`, in copies of the nodes."""
    if node is None:
        return None
    if isinstance(node, dict):
        copy: Any = type(node)(node, cfg=node.cfg, needs=node.needs)  # type: ignore[attr-defined, call-arg]
        for name, further in places.items():
            copy[name] = _filled(where, node[name], further, value)
        return copy
    if not node.fresh():
        node.complain(where)
    return node.copy(**dict.fromkeys(_missing(node, places), value))


def _missing(node: Any, places: Places) -> list[str]:
    """The places where a value is wanted and left out."""
    fields, needs = node.fields, node.needs
    return [n for n in places if n in fields and getattr(node, n) is None and (needs is ALL or fields[n].wanted(needs))]
