"""Recipes in the config of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from funcops.engine.contract.configs import require_config
from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import Part, check_globs, check_selection, matches, remade, rewrite, shared_layers, steps
from funcops.engine.errors import fail, few, in_step, require
from funcops.library.formats.recipes import LOW_ATTENTION, LowForm, Recipe, low_form_of, require_recipe
from funcops.library.ops.expert_steps import by_steps
from funcops.low_precision.report import layers
from funcops.low_precision.weights import low_steps


def with_recipe(
    cfg: Any, recipe: Recipe, *, only: Sequence[str] = (), skip: Sequence[str] = (), attention: Sequence[str] = ()
) -> Any:
    """Return the config with its `linear` and `grouped_linear` steps in low precision, and with `experts` and
    `dist.parallel_experts` as the chains of their steps (`funcops.models.plain_experts`), whose `up` and `down` are in low
    precision; params keep their paths. Other steps keep their dtype: a glob that names one of these alone raises.

    `attention`: globs over the paths of `attention` steps, such as "*.mix", that become `qattention`; by default none.
    `only`, `skip`: globs over the paths of steps, such as "head" or "*.down"; by default all, and none. Steps that have a recipe
    keep it, so recipes can be mixed: `with_recipe(with_recipe(cfg, a, only=("*.mlp.*",)), b)`. The layers of a `repeat` share one
    config: a glob for some of them raises. Raises `ValueError` for a glob that matches no linear step, or no attention, and for
    sizes or options that the recipe does not support.

    >>> from funcops import ChainConfig, LinearConfig, Step, linear
    >>> from funcops.low_precision import Fp8Block, with_recipe
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)), Step("head", linear, LinearConfig(256, 128))))
    >>> [step.op for step in with_recipe(cfg, Fp8Block(), skip=("head",)).steps]
    [qlinear, linear]
    >>> from funcops import AttentionConfig, attention
    >>> with_recipe(ChainConfig(steps=(Step("mix", attention, AttentionConfig()),)), Fp8Block(), attention=("mix",)).steps[0].op
    qattention
    """
    where = "with_recipe"
    require_recipe(where, recipe)
    require_config(where, cfg)
    known = [name for part in steps(cfg) for name in _names(part)]
    check_selection(where, known, only, skip)
    _check_attention(where, cfg, attention)

    def wanted(*paths: str) -> bool:
        """Whether a step is selected, by its own path or by the path of a step around it."""
        return (not only or any(matches(path, only) for path in paths)) and not any(matches(path, skip) for path in paths)

    def low(part: Part, *around: str) -> tuple[Op, Any] | None:
        if part.cfg.linear_parts:
            return _experts(part, low)
        if part.cfg.attends and matches(part.path, attention):
            return made_low(part, LOW_ATTENTION[type(part.cfg)])
        form = low_form_of(part.cfg)
        if form is None or not wanted(part.path, *around):
            return None
        return made_low(part, form)

    def made_low(part: Part, form: LowForm) -> tuple[Op, Any]:
        try:
            source, becomes, made = form(part.cfg, recipe)
        except ValueError as error:
            in_step(error, part.path)
            raise
        return remade(where, part.op or source, source, becomes), made

    made = rewrite(cfg, low)[1]
    if known and not attention and not any(part.cfg.low_recipe is not None for part in steps(made)):
        fail(where, "skip", f"globs that leave one of the linear layers {few(known)}", f"{skip!r}, which names them all")
    low_steps(made)
    return made


def _check_attention(where: str, cfg: Any, globs: Sequence[str]) -> None:
    """Raise unless every glob matches an attention, and only such as can run in low precision."""
    check_globs(where, "attention", globs)
    known = {part.path: part for part in steps(cfg) if part.cfg.attends}
    for glob in globs:
        found = [part for path, part in known.items() if matches(path, (glob,))]
        if not found:
            fail(where, "attention", shared_layers([*known], glob) or f"globs over {few(known) or '(no attention)'}", repr(glob))
        for part in found:
            name = part.op.name if part.op else type(part.cfg).__name__
            wanted = f"globs over steps of the op attention ({name} has no form in low precision)"
            require(LOW_ATTENTION.get(type(part.cfg)) is not None, where, "attention", wanted, part.path)


def _experts(part: Part, low: Callable[..., tuple[Op, Any] | None]) -> tuple[Op, Any]:
    """The chain that replaces experts, if one of its layers is selected by its own path, or by the step's."""
    becomes, plain = by_steps("with_recipe", part.op, part.cfg)
    made = rewrite(plain.cfg, lambda inner: low(inner, part.path), path=part.path)[1]
    return (part.op, part.cfg) if made == plain.cfg else (becomes, dataclasses.replace(plain, cfg=made))


def _names(part: Part) -> list[str]:
    """The paths by which a glob may name a step; [] if the step cannot take a recipe."""
    return [*([part.path] if part.cfg.linear_parts else []), *layers(part)]
