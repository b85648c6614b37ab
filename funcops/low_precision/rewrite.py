"""Recipes in the config of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from funcops.compose.expert_steps import by_steps
from funcops.contract.configs import require_config
from funcops.contract.op import Op
from funcops.contract.walk import Part, check_selection, matches, remade, rewrite, steps
from funcops.errors import fail, few, in_step
from funcops.formats.recipes import Recipe, low_form_of, require_recipe
from funcops.low_precision.report import layers
from funcops.low_precision.weights import low_steps


def with_recipe(cfg: Any, recipe: Recipe, *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Any:
    """Return the config with its `linear` and `grouped_linear` steps in low precision, and with `experts` and
    `dist.parallel_experts` as the chains of their steps (`funcops.models.plain_experts`), whose `up` and `down` are in low
    precision; params keep their paths. Other steps keep their dtype: a glob that names one of these alone raises.

    `only`, `skip`: globs over the paths of steps, such as "head" or "*.down"; by default all, and none. Steps that have a recipe
    keep it, so recipes can be mixed: `with_recipe(with_recipe(cfg, a, only=("*.mlp.*",)), b)`. The layers of a `repeat` share one
    config: a glob for some of them raises. Raises `ValueError` for a glob that matches no linear step, and for sizes that the
    recipe does not support.

    >>> from funcops import ChainConfig, LinearConfig, Step, linear
    >>> from funcops.low_precision import Fp8Block, with_recipe
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)), Step("head", linear, LinearConfig(256, 128))))
    >>> [step.op for step in with_recipe(cfg, Fp8Block(), skip=("head",)).steps]
    [qlinear, linear]
    """
    where = "with_recipe"
    require_recipe(where, recipe)
    require_config(where, cfg)
    known = [name for part in steps(cfg) for name in _names(part)]
    check_selection(where, known, only, skip)

    def wanted(*paths: str) -> bool:
        """Whether a step is selected, by its own path or by the path of a step around it."""
        return (not only or any(matches(path, only) for path in paths)) and not any(matches(path, skip) for path in paths)

    def low(part: Part, *around: str) -> tuple[Op, Any] | None:
        if part.cfg.linear_parts:
            return _experts(part, low)
        form = low_form_of(part.cfg)
        if form is None or not wanted(part.path, *around):
            return None
        try:
            source, becomes, made = form(part.cfg, recipe)
        except ValueError as error:
            in_step(error, part.path)
            raise
        return remade(where, part.op or source, source, becomes), made

    made = rewrite(cfg, low)[1]
    if known and not any(part.cfg.low_recipe is not None for part in steps(made)):
        fail(where, "skip", f"globs that leave one of the linear layers {few(known)}", f"{skip!r}, which names them all")
    low_steps(made)
    return made


def _experts(part: Part, low: Callable[..., tuple[Op, Any] | None]) -> tuple[Op, Any]:
    """The chain that replaces experts, if one of its layers is selected by its own path, or by the step's."""
    becomes, plain = by_steps("with_recipe", part.op, part.cfg)
    made = rewrite(plain.cfg, lambda inner: low(inner, part.path), path=part.path)[1]
    return (part.op, part.cfg) if made == plain.cfg else (becomes, dataclasses.replace(plain, cfg=made))


def _names(part: Part) -> list[str]:
    """The paths by which a glob may name a step; [] if the step cannot take a recipe."""
    return [*([part.path] if part.cfg.linear_parts else []), *layers(part)]
