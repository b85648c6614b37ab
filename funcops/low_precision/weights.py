"""The weights that a model's config gives a recipe, by path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcops.compose.walk import steps, ties
from funcops.errors import describe, fail, few, join_path, require, require_type
from funcops.ops.qlinear import QLinearConfig
from funcops.trees import at, has


def low_steps(cfg: Any) -> tuple[dict[str, QLinearConfig], dict[str, str]]:
    """By the path of its weight, the config of every step with a recipe; and what tied paths are tied to. Found once a config: a
    tracer reads it, and would trace every config that a walk makes."""
    found = getattr(cfg, "_low", None)
    if found is None:
        low = {join_path(part.path, "weight"): part.cfg for part in steps(cfg, layers=True) if part.cfg.low_recipe is not None}
        found = low, ties(cfg)
        if not torch.compiler.is_dynamo_compiling():
            object.__setattr__(cfg, "_low", found)
    return found  # type: ignore[no-any-return]


def recipe_weights(where: str, cfg: Any, params: Any) -> dict[str, tuple[QLinearConfig, Tensor]]:
    """Config and weight of every step with a recipe, by the weight's path; without those that are tied to another."""
    found, sources = low_steps(cfg)
    weights = {path: _weight(where, params, path) for path in found}
    for path, inner in found.items():
        source = path
        while source in sources:
            source = sources[source]
        if weights[path] is None and inner.recipe.delayed and (source not in found or found[source].recipe != inner.recipe):
            wanted = "between weights of one recipe, as scales are those of the source"
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
    """A weight [O, I] and its scales [3], or of stacked ones, of layers, groups or both, each one's."""
    if weight.dim() == 2:
        return [(weight, scale)]
    return [pair for i, w in enumerate(weight) for pair in each_layer(w, None if scale is None else scale[i])]


def check_paths(where: str, name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    require_type(where, name, given, Mapping)
    for path in given:
        require(path in known, where, name, f"of weights among {few(known) or '(none)'}", repr(path))
