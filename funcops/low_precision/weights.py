"""The weights that have a recipe in a model's config, by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from funcops.engine.contract.configs import found_once
from funcops.engine.contract.walk import steps, ties
from funcops.engine.errors import describe, fail, few, join_path, require, require_type
from funcops.engine.trees import at, has
from funcops.library.ops.qlinear import QLinearConfig


def low_steps(cfg: Any) -> tuple[dict[str, QLinearConfig], dict[str, str]]:
    """Return the config of every step with a recipe, by the path of its weight, and the sources of tied paths."""

    def find() -> tuple[dict[str, QLinearConfig], dict[str, str]]:
        low = [part for part in steps(cfg, layers=True) if part.cfg.low_recipe is not None]
        return {join_path(part.path, "weight"): part.cfg for part in low}, ties(cfg)

    return found_once(cfg, "low", find)


def recipe_weights(where: str, cfg: Any, params: Any) -> dict[str, tuple[QLinearConfig, Tensor]]:
    """The config and weight of every step with a recipe, by the weight's path; weights that are tied to another are left out."""
    found, sources = low_steps(cfg)
    weights = {path: _weight(where, params, path) for path in found}
    for path, inner in found.items():
        source = path
        while source in sources:
            source = sources[source]
        if weights[path] is None and inner.recipe.delayed and (source not in found or found[source].recipe != inner.recipe):
            wanted = "between weights of one recipe, as they share the source's scales"
            fail(where, f"the tie of {path}", wanted, f"one to {source}")
    return {path: (inner, weights[path]) for path, inner in found.items() if weights[path] is not None}  # type: ignore[misc]


def _weight(where: str, params: Any, path: str) -> Tensor | None:
    if not has(params, path):
        fail(where, "params", f"a tree with {path}", describe(params))
    found = at(params, path)
    if found is not None and not (isinstance(found, Tensor) and found.dim() >= 2 and found.is_floating_point()):
        fail(where, f"params.{path}", "a float tensor [O, I], not quantised yet", describe(found), TypeError)
    return found  # type: ignore[no-any-return]


def each_layer(weight: Tensor, scale: Tensor | None) -> list[tuple[Tensor, Any]]:
    """Split a weight, stacked over layers, groups or both, or not stacked, into each [O, I] with its scales [3]."""
    if weight.dim() == 2:
        return [(weight, scale)]
    return [pair for i, w in enumerate(weight) for pair in each_layer(w, None if scale is None else scale[i])]


def check_paths(where: str, name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    require_type(where, name, given, Mapping)
    for path in given:
        require(path in known, where, name, f"of weights among {few(known) or '(none)'}", repr(path))
