"""Delayed scaling: its state, and the amaxes that come back with the gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.contract.configs import require_config
from funcops.engine.errors import check, describe, fail, few, require, require_callable, require_type
from funcops.engine.trees import leaf, paths, tree
from funcops.library.formats.recipes import Fp8Delayed
from funcops.library.formats.scaled import amaxes_of, unscaled
from funcops.library.kernels.quantize import ELEMENTS
from funcops.library.ops.qlinear import QLinearConfig
from funcops.low_precision.weights import check_paths, recipe_weights

T = TypeVar("T")


@tree
class ScaleState:
    """The state of one linear layer with delayed scaling: the factors that x, w and dy are multiplied by, and their amaxes of the
    last H steps, newest first."""

    scale: Tensor = leaf("[3]")
    history: Tensor = leaf("[H, 3]")


def recipe_init(cfg: Any, params: Any, *, amaxes: Mapping[str, Tensor] | None = None) -> dict[str, ScaleState]:
    """Make the state of delayed scaling: for the path of each weight with `Fp8Delayed`, scales of 1 and a history of zeros; {}
    without such weights.

    At a scale of 1 small values vanish (below 2^-10) and values above the largest saturate. `amaxes`, from `split_amaxes`, start it
    from measured ones: a first step with `quantize_params(params, cfg, {})` gives them, and `end_step` calls this. Raises
    `TypeError` for a `cfg` that is not the config of an op.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import Fp8Delayed, ScaleState, recipe_init, with_recipe
    >>> recipe = Fp8Delayed(history=16)
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 128)),)), recipe)
    >>> params = chain.init(cfg, key=random.key(0))
    >>> state = recipe_init(cfg, params)
    >>> state["up.weight"].scale, state["up.weight"].history.shape, isinstance(state["up.weight"], ScaleState)
    (tensor([1., 1., 1.]), torch.Size([16, 3]), True)
    """
    require_config("recipe_init", cfg)
    made: dict[str, ScaleState] = {}
    recipes: dict[str, Fp8Delayed] = {}
    for path, (inner, weight) in recipe_weights("recipe_init", cfg, params).items():
        if isinstance(inner.recipe, Fp8Delayed):
            zeros = weight.new_zeros(*weight.shape[:-2], inner.recipe.history, 3, dtype=torch.float32)
            made[path], recipes[path] = ScaleState(torch.ones_like(zeros[..., 0, :]), zeros), inner.recipe
    if amaxes is None:
        return made
    check_amaxes("recipe_init", amaxes, made)
    return {path: updated(s, amaxes[path], recipes[path]) for path, s in made.items()}


def recipe_update(
    state: Mapping[str, ScaleState],
    amaxes: Mapping[str, Tensor],
    recipe: Fp8Delayed,
    *,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, ScaleState]:
    """Return the state after a step: `s = largest / a / 2^margin`, where a is the maximum of the last amaxes, the newest, or what
    the recipe's `algorithm` returns for them.

    An amax of 0 means that the layer did not run: history and scale stay. They also stay if it is infinite or NaN, so that one step
    which overflows does not change the next; an infinite s becomes float32's largest. `recipe`: the config's. `reduce`: returns the
    elementwise maximum over devices of one tensor [n] (float32), such as an all-reduce; called once a step. Raises `ValueError` for
    amaxes of another model, or of some of its weights only, and for a recipe with another history than the state's. Source:
    Transformer Engine, common/recipe/delayed_scaling.cu, which keeps an infinite amax in its history.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import Fp8Delayed, recipe_init, recipe_update, with_recipe
    >>> recipe = Fp8Delayed(history=16)
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 128)),)), recipe)
    >>> params = chain.init(cfg, key=random.key(0))
    >>> state = recipe_init(cfg, params)
    >>> state = recipe_update(state, {"up.weight": torch.tensor([1.0, 0.5, 2.0])}, recipe)  # amaxes of x, w and dy
    >>> state["up.weight"].scale
    tensor([  448.,   896., 28672.])
    """
    require_type("recipe_update", "recipe", recipe, Fp8Delayed)
    require_type("recipe_update", "state", state, Mapping)
    for path, scales in state.items():
        check_scales("recipe_update", f"state[{path!r}]", scales, recipe)
    if reduce is not None:
        require_callable("recipe_update", reduce=reduce)
    check_amaxes("recipe_update", amaxes, state)
    given = dict(amaxes)
    if reduce is not None and given:
        flat = reduce(torch.cat([a.reshape(-1) for a in given.values()]))
        parts = flat.split([a.numel() for a in given.values()])
        given = {path: part.view_as(a) for (path, a), part in zip(given.items(), parts, strict=True)}
    return {path: updated(s, given[path], recipe) for path, s in state.items()}


def split_amaxes(dparams: T) -> tuple[T, dict[str, Tensor]]:
    """Split gradients into gradients like params, and the amaxes [3] (of x, w, dy) by the path of the weight; {} without delayed
    scaling. Raises `TypeError` for amaxes that were changed after the backward, such as scaled ones.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import Fp8Delayed, quantize_params, recipe_init, split_amaxes, with_recipe
    >>> recipe = Fp8Delayed(history=16)
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 128)),)), recipe)
    >>> params = chain.init(cfg, key=random.key(0))
    >>> state = recipe_init(cfg, params)
    >>> work, x = quantize_params(params, cfg, state), torch.ones(4, 128, dtype=torch.bfloat16)
    >>> y, residuals = chain.fwd(work, x, cfg)
    >>> grads, amaxes = split_amaxes(chain.bwd(residuals, 2 * x, cfg)[0])
    >>> grads["up"].weight.shape, amaxes["up.weight"][[0, 2]]
    (torch.Size([128, 128]), tensor([1., 2.]))
    """
    known = paths(dparams)
    names = [path.removesuffix(".amax") for path in known if path.endswith(".amax")]  # of nodes, in the order of the tree
    found = {name: known[f"{name}.scale"] for name in names if known.get(f"{name}.scale") is not None}
    for name, bits in found.items():
        if not isinstance(bits, Tensor) or bits.dtype is not torch.uint32:
            wanted = "the amaxes of a backward, in uint32 (scale or average gradients after this)"
            fail("split_amaxes", f"dparams.{name}.scale", wanted, describe(bits), TypeError)
    return unscaled(dparams), {name: amaxes_of(bits) for name, bits in found.items()}


def check_amaxes(where: str, amaxes: Any, state: Mapping[str, ScaleState]) -> None:
    """Check that every weight has amaxes: the scales of a weight without them would never change."""
    check_paths(where, "amaxes", amaxes, state)
    missing = [path for path in state if path not in amaxes]
    wanted = "of every weight in the state, as split_amaxes returns them if each has a gradient"
    require(not missing, where, "amaxes", wanted, f"none of {few(missing)}")
    for path, given in amaxes.items():
        check(where, f"amaxes[{path!r}]", given, tuple(state[path].scale.shape), torch.float32, state[path].scale)


def check_state(where: str, found: dict[str, tuple[QLinearConfig, Tensor]], state: Any) -> None:
    delayed = {path: inner for path, (inner, _) in found.items() if inner.recipe.delayed}
    if state is None:
        require(not delayed, where, "state", f"given, for {few(delayed)} ({{}} in a first step, then from end_step)", None)
        return
    check_paths(where, "state", state, delayed)
    for path in delayed if state else ():
        require(path in state, where, "state", f"one with {path}", f"one of {few(state) or 'nothing'}")
        check_scales(where, f"state[{path!r}]", state[path], delayed[path].recipe)


def check_scales(where: str, name: str, state: Any, recipe: Any) -> None:
    require_type(where, name, state, ScaleState)
    check(where, f"{name}.scale", state.scale, (..., 3), torch.float32)
    check(where, f"{name}.history", state.history, (..., recipe.history, 3), torch.float32, state.scale)


def _latest(history: Tensor, algorithm: Any) -> Tensor:
    """The amaxes [*, 3] that scales are made from, of a history [*, H, 3]."""
    if not callable(algorithm):
        return history.amax(-2) if algorithm == "max" else history.select(-2, 0)
    flat = history.movedim(-2, 0).flatten(1)  # [H, n]
    found = algorithm(flat)
    name = f"recipe.algorithm, {getattr(algorithm, '__name__', repr(algorithm))}(history {list(flat.shape)}),"
    check("recipe_update", name, found, (flat.shape[1],), torch.float32, flat)
    return found.reshape(history.select(-2, 0).shape)


def updated(state: ScaleState, amax: Tensor, recipe: Fp8Delayed) -> ScaleState:
    ran = (amax > 0) & (amax < torch.inf)  # False for NaN too
    history = torch.cat((amax.unsqueeze(-2), state.history[..., :-1, :]), -2)
    a = _latest(history, recipe.algorithm)
    largest = amax.new_tensor([ELEMENTS[e].largest for e in (recipe.fwd, recipe.fwd, recipe.bwd)])
    limits = torch.finfo(torch.float32)
    scale = (largest / a * 2.0**-recipe.margin).clamp(limits.tiny, limits.max)
    return ScaleState(
        torch.where(ran & (a > 0) & (a < torch.inf), scale, state.scale), torch.where(ran.unsqueeze(-2), history, state.history)
    )
