"""Low precision over a whole model: recipes in a config, a working tree of params, and the state of delayed scaling.

    cfg = with_recipe(cfg, Fp8Block(), skip=("head",))          # once
    work = quantize_params(params, cfg)                          # once a step, where cast(params, torch.bfloat16) would stand
    for x in microbatches:
        y, residuals = chain.fwd(work, x, cfg)
        chain.bwd(residuals, dy, cfg, into=grads)

Nothing is kept between steps but what the caller keeps: the working tree is the cache of quantised weights. `Fp8Delayed` alone has
state, a dict by path; its amaxes come back with the gradients:

    state = recipe_init(cfg, params)
    work = quantize_params(params, cfg, state)
    ...
    grads, amaxes = split_amaxes(dparams)
    state = recipe_update(state, amaxes, recipe)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops import random
from funcops.backend import wide
from funcops.compose.expert_steps import ExpertStepsConfig, by_steps
from funcops.compose.walk import Part, check_globs, matches, remade, rewrite, shared_layers, steps, ties
from funcops.configs import require_config
from funcops.errors import check, describe, fail, few, in_step, require, require_callable, require_dtype, require_type
from funcops.formats import (
    Format,
    QTensor,
    QWeight,
    dense,
    quantize_tensor,
    quantized_weight,
    turned,
    zero_gradient,
)
from funcops.kernels.quantize import ELEMENTS, amax
from funcops.names import join_path
from funcops.op import Op
from funcops.ops.experts import ExpertsConfig, experts
from funcops.ops.qlinear import QLinearConfig, op_of, scaled_tensor
from funcops.quantization import LinearErrors, Operand, QuantizationReport, layers, quantization_report, takes_recipe
from funcops.recipes import LOW_FORMS, MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed, Recipe
from funcops.scaled import Scaled, amaxes_of, unscaled
from funcops.trees import Aside, at, cast, constant_paths, has, leaf, paths, put, replace, stands_for_one, tree, tree_map

__all__ = [
    "MXFP8",
    "NVFP4",
    "Format",
    "Fp8Block",
    "Fp8Current",
    "Fp8Delayed",
    "LinearErrors",
    "Operand",
    "QTensor",
    "QWeight",
    "QuantizationReport",
    "Recipe",
    "ScaleState",
    "Scaled",
    "dense",
    "gradients_like",
    "op_of",
    "quantization_report",
    "quantize_params",
    "quantize_tensor",
    "recipe_init",
    "recipe_update",
    "split_amaxes",
    "with_keys",
    "with_recipe",
]

T = TypeVar("T")


@tree
class ScaleState:
    """Of one linear layer with delayed scaling: what x, w and dy are multiplied by, and their amaxes of the last H steps, newest
    first."""

    scale: Tensor = leaf("[3]")
    history: Tensor = leaf("[H, 3]")


def with_recipe(cfg: Any, recipe: Recipe, *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Any:
    """The config with its `linear` and `grouped_linear` steps in low precision, and `experts` as the chain of its steps
    (`funcops.models.plain_experts`), whose `up` and `down` are; params keep their paths. Other steps keep their dtype, also
    `dist.parallel_experts`: a glob that names one of these alone raises.

    `only`, `skip`: globs over the paths of steps, such as "head" or "*.down"; by default all, and none. Steps that have a recipe
    keep it, so that recipes mix: `with_recipe(with_recipe(cfg, a, only=("*.mlp.*",)), b)`. The layers of a `repeat` share one
    config: a glob of some of them raises. Raises `ValueError` for a glob that matches no linear step, and for sizes that the
    recipe does not serve.

    >>> from funcops import ChainConfig, LinearConfig, Step, linear
    >>> from funcops.low_precision import Fp8Block, with_recipe
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)), Step("head", linear, LinearConfig(256, 128))))
    >>> [step.op for step in with_recipe(cfg, Fp8Block(), skip=("head",)).steps]
    [qlinear, linear]
    """
    where = "with_recipe"
    require_type(where, "recipe", recipe, Recipe)
    require_config(where, cfg)
    known = [name for part in steps(cfg) for name in _names(part)]
    for name, globs in (("only", only), ("skip", skip)):
        check_globs(where, name, globs)
        for glob in globs:
            if not any(matches(path, (glob,)) for path in known):
                why = shared_layers(known, glob) or f"globs over {few(known)}"
                fail(where, name, why, repr(glob))

    def wanted(*paths: str) -> bool:
        """Of a step's path, and what it is a part of."""
        return (not only or any(matches(path, only) for path in paths)) and not any(matches(path, skip) for path in paths)

    def low(part: Part, *around: str) -> tuple[Op, Any] | None:
        if type(part.cfg) is ExpertsConfig:
            return _experts(part, low)
        if not takes_recipe(part.cfg) or not wanted(part.path, *around):
            return None
        try:
            source, becomes, made = LOW_FORMS[type(part.cfg)](part.cfg, recipe)
        except ValueError as error:
            in_step(error, part.path)
            raise
        return remade(where, part.op or source, source, becomes), made

    made = rewrite(cfg, low)[1]
    _low(made)
    return made


def quantize_params(
    params: T,
    cfg: Any,
    state: Mapping[str, ScaleState] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    columns: bool = True,
    key: Tensor | None = None,
) -> T:
    """The working tree of a step: `params` cast to `dtype`, the weights of steps with a recipe as `QWeight`.

    A weight is quantised once it is cast, so that its codes are those of a step that quantises it itself. What never has a gradient
    stays as it is (float64: float32), as a router's bias, which a step moves by less than bfloat16 tells apart. `columns`: make
    the transposed codes that dx reads now (as many bytes again, as a report shows), or else whenever dx is computed. `state`: of
    `recipe_init`, for `Fp8Delayed`. `key`: for recipes that round stochastically (see `with_keys`). Raises `ValueError` for a
    state of another model, or with another history.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import Fp8Block, quantize_params, with_recipe
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),)), Fp8Block())
    >>> params = chain.init(cfg, key=random.key(0))
    >>> work = quantize_params(params, cfg)
    >>> type(work["up"].weight).__name__, work["up"].weight.row.codes.dtype, work["up"].bias.dtype
    ('QWeight', torch.uint8, torch.bfloat16)
    """
    where = "quantize_params"
    require_dtype(where, dtype)
    require_type(where, "columns", columns, bool)
    require_config(where, cfg)
    work: Any = _cast(params, dtype)
    found = _weights(where, cfg, work)
    _check_state(where, found, state)
    amaxes = _amaxes_over_ranks(found)
    for path, (inner, weight) in found.items():
        made: Any
        if state is not None and inner.recipe.delayed:
            made = _stacked([_delayed(w, s, inner.recipe, columns) for w, s in _layers(weight, state[path].scale)], weight)
        else:
            layers = _layers(weight, None)
            whole = amaxes.get(path, [None] * len(layers))
            each = [quantized_weight(w, inner.recipe.w, columns, one) for (w, _), one in zip(layers, whole, strict=True)]
            made = _stacked(each, weight)
        (made.value if type(made) is Scaled else made).made_of(at(params, path))
        work = put(work, path, made)
    if key is None:
        rounding = [path for path, (inner, _) in found.items() if inner.recipe.stochastic]
        require(not rounding, where, "key", f"a random key, for {few(rounding)}", None)
        return work  # type: ignore[no-any-return]
    return with_keys(work, cfg, key)  # type: ignore[no-any-return]


def with_keys(work: T, cfg: Any, key: Tensor) -> T:
    """The working tree with other random keys, its codes the same objects: for each microbatch one, so that none rounds as another.
    Every weight of a stochastic recipe gets a key of its own, by its path; those of a stacked `repeat` by their layer too.
    Raises `ValueError` or `TypeError` for what is no key, int64[2].

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import NVFP4, quantize_params, with_keys, with_recipe
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 128)),)), NVFP4(stochastic=True))
    >>> work = quantize_params(chain.init(cfg, key=random.key(0)), cfg, key=random.key(1))
    >>> other = with_keys(work, cfg, random.key(2))
    >>> other["up"].weight.row is work["up"].weight.row, other["up"].weight.key.equal(work["up"].weight.key)
    (True, False)
    """
    check("with_keys", "key", key, (2,), torch.int64)
    require_config("with_keys", cfg)
    for path, inner in _low(cfg)[0].items():
        if inner.recipe.stochastic and isinstance(weight := at(work, path), QWeight):
            own: Any = random.fold_in(key, random.path_id(path))
            for size in weight.shape[:-2]:
                each: list[Any] = [random.split(one, size) for one in own.reshape(-1, 2)]
                own = torch.stack(each).reshape(*own.shape[:-1], size, 2)
            work = put(work, path, replace(weight, key=own))
    return work


def recipe_init(cfg: Any, params: Any, *, amaxes: Mapping[str, Tensor] | None = None) -> dict[str, ScaleState]:
    """The state of delayed scaling: by the path of each weight with `Fp8Delayed`, scales of 1 and a history of zeros; {} without
    any.

    At a scale of 1 small values vanish (below 2^-10) and those above the largest saturate. `amaxes`, of `split_amaxes` after one
    step that is thrown away, start it from measured ones. Raises `TypeError` for a `cfg` that is not the config of an op.

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
    for path, (inner, weight) in _weights("recipe_init", cfg, params).items():
        if isinstance(inner.recipe, Fp8Delayed):
            zeros = weight.new_zeros(*weight.shape[:-2], inner.recipe.history, 3, dtype=torch.float32)
            made[path], recipes[path] = ScaleState(torch.ones_like(zeros[..., 0, :]), zeros), inner.recipe
    if amaxes is None:
        return made
    _check_amaxes("recipe_init", amaxes, made)
    return {path: _updated(s, amaxes[path], recipes[path]) for path, s in made.items()}


def recipe_update(
    state: Mapping[str, ScaleState],
    amaxes: Mapping[str, Tensor],
    recipe: Fp8Delayed,
    *,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, ScaleState]:
    """The state after a step: `s = largest / a / 2^margin`, where a is the maximum of the last amaxes, or the last of them.

    An amax of 0 says that nothing ran: history and scale stay. They do too where it is infinite or NaN, so that one step which
    overflows says nothing about the next; an infinite s is float32's largest. `recipe`: the one of the config. `reduce`: the
    elementwise maximum over devices of one tensor [n] (float32), such as an all-reduce: one a step. Raises `ValueError` for amaxes
    of another model, or of some of its weights only, and for a recipe with another history than the state's. Source: Transformer
    Engine, common/recipe/delayed_scaling.cu, which keeps an infinite amax in its history.

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
        _check_scales("recipe_update", f"state[{path!r}]", scales, recipe)
    if reduce is not None:
        require_callable("recipe_update", reduce=reduce)
    _check_amaxes("recipe_update", amaxes, state)
    given = dict(amaxes)
    if reduce is not None and given:
        flat = reduce(torch.cat([a.reshape(-1) for a in given.values()]))
        parts = flat.split([a.numel() for a in given.values()])
        given = {path: part.view_as(a) for (path, a), part in zip(given.items(), parts, strict=True)}
    return {path: _updated(s, given[path], recipe) for path, s in state.items()}


def split_amaxes(dparams: T) -> tuple[T, dict[str, Tensor]]:
    """Gradients like params, and the amaxes [3] (of x, w, dy) by the path of the weight; {} without delayed scaling. Raises
    `TypeError` for amaxes that are not as a backward left them, such as scaled ones.

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


def gradients_like(work: T, dtype: torch.dtype | None = torch.float32) -> T:
    """Accumulators for the gradients of a working tree, zero: `into` of a backward. Dense where a weight is quantised; amaxes are
    uint32, for `split_amaxes`. Raises `TypeError` or `ValueError` for what is no float dtype.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import Fp8Block, gradients_like, quantize_params, with_recipe
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),)), Fp8Block())
    >>> params = chain.init(cfg, key=random.key(0))
    >>> main_grad = gradients_like(quantize_params(params, cfg))
    >>> main_grad["up"].weight.shape, main_grad["up"].weight.dtype
    (torch.Size([256, 128]), torch.float32)
    """
    require_dtype("gradients_like", dtype)
    return tree_map(lambda node: zero_gradient(node, dtype), work, is_leaf=stands_for_one)


def _cast(params: Any, dtype: torch.dtype) -> Any:
    """As `cast`, but for what never has a gradient: as wide as ops take it beside `dtype`."""
    work, wider = cast(params, dtype), wide(dtype)
    for path in constant_paths(params):
        if isinstance(t := at(params, path), Tensor) and t.is_floating_point():
            work = put(work, path, t if t.dtype in (dtype, wider) else t.to(wider))
    return work


def _low(cfg: Any) -> tuple[dict[str, QLinearConfig], dict[str, str]]:
    """By the path of its weight, the config of every step with a recipe; and what tied paths are tied to. Found once a config: a
    tracer reads it, and would trace every config that a walk makes."""
    found = getattr(cfg, "_low", None)
    if found is None:
        low = {join_path(part.path, "weight"): part.cfg for part in steps(cfg, layers=True) if part.cfg.low_recipe is not None}
        found = low, ties(cfg)
        if not torch.compiler.is_dynamo_compiling():
            object.__setattr__(cfg, "_low", found)
    return found  # type: ignore[no-any-return]


def _experts(part: Part, low: Callable[..., tuple[Op, Any] | None]) -> tuple[Op, Any]:
    """The chain in the place of `experts`, if one of its layers is wanted: by its own path, or by the step's."""
    becomes, plain = by_steps("with_recipe", part.op or experts, part.cfg)
    made = rewrite(plain.cfg, lambda inner: low(inner, part.path), path=part.path)[1]
    return (part.op, part.cfg) if made == plain.cfg else (becomes, ExpertStepsConfig(made))


def _names(part: Part) -> list[str]:
    """What a glob may name of a step: nothing of one that takes no recipe."""
    return [*([part.path] if type(part.cfg) is ExpertsConfig else []), *layers(part)]


def _check_paths(where: str, name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    require_type(where, name, given, Mapping)
    for path in given:
        require(path in known, where, name, f"of weights among {few(known) or '(none)'}", repr(path))


def _check_amaxes(where: str, amaxes: Any, state: Mapping[str, ScaleState]) -> None:
    """Those of every weight: scales of one without would stay what they are, step after step."""
    _check_paths(where, "amaxes", amaxes, state)
    missing = [path for path in state if path not in amaxes]
    wanted = "of every weight in the state, as split_amaxes gives them where each has a gradient"
    require(not missing, where, "amaxes", wanted, f"none of {few(missing)}")
    for path, given in amaxes.items():
        check(where, f"amaxes[{path!r}]", given, tuple(state[path].scale.shape), torch.float32, state[path].scale)


def _check_state(where: str, found: dict[str, tuple[QLinearConfig, Tensor]], state: Any) -> None:
    delayed = {path: inner for path, (inner, _) in found.items() if inner.recipe.delayed}
    if state is None:
        require(not delayed, where, "state", f"given, for {few(delayed)} (recipe_init makes it)", None)
        return
    _check_paths(where, "state", state, delayed)
    for path in delayed:
        require(path in state, where, "state", f"one with {path}", f"one of {few(state) or 'nothing'}")
        _check_scales(where, f"state[{path!r}]", state[path], delayed[path].recipe)


def _weights(where: str, cfg: Any, params: Any) -> dict[str, tuple[QLinearConfig, Tensor]]:
    """Config and weight of every step with a recipe, by the weight's path; without those that are tied to another."""
    found, sources = _low(cfg)
    weights = {path: _weight(where, params, path) for path in found}
    for path, inner in found.items():
        source = path
        while source in sources:
            source = sources[source]
        if weights[path] is None and inner.recipe.delayed and (source not in found or found[source].recipe != inner.recipe):
            wanted = "between weights of one recipe, as scales are those of the source"
            fail(where, f"the tie of {path}", wanted, f"one to {source}")
    return {path: (inner, weights[path]) for path, inner in found.items() if weights[path] is not None}  # type: ignore[misc]


def _check_scales(where: str, name: str, state: Any, recipe: Any) -> None:
    require_type(where, name, state, ScaleState)
    check(where, f"{name}.scale", state.scale, (..., 3), torch.float32)
    check(where, f"{name}.history", state.history, (..., recipe.history, 3), torch.float32, state.scale)


def _weight(where: str, params: Any, path: str) -> Tensor | None:
    if not has(params, path):
        fail(where, "params", f"a tree with {path}", describe(params))
    found = at(params, path)
    if found is not None and not (isinstance(found, Tensor) and found.dim() >= 2 and found.is_floating_point()):
        fail(where, f"params.{path}", "a float tensor [O, I], not quantised yet", describe(found), TypeError)
    return found  # type: ignore[no-any-return]


def _layers(weight: Tensor, scale: Tensor | None) -> list[tuple[Tensor, Any]]:
    """A weight [O, I] and its scales [3], or of stacked ones, of layers, groups or both, each one's."""
    if weight.dim() == 2:
        return [(weight, scale)]
    return [pair for i, w in enumerate(weight) for pair in _layers(w, None if scale is None else scale[i])]


def _amaxes_over_ranks(found: Mapping[str, tuple[Any, Tensor]]) -> dict[str, list[Tensor]]:
    """The amaxes of weights that ranks have in parts, of recipes with a scale of the whole, by path one a layer: of an axis in one
    communication."""
    groups: dict[Any, dict[str, list[Tensor]]] = {}
    for path, (inner, weight) in found.items():
        if hasattr(inner, "largest") and inner.recipe.w.whole and not inner.recipe.delayed:
            groups.setdefault(inner.axis, {})[path] = [amax(w, False) for w, _ in _layers(weight, None)]
    made: dict[str, list[Tensor]] = {}
    for by_path in groups.values():
        largest = found[next(iter(by_path))][0].largest
        whole = list(largest(torch.cat([one for row in by_path.values() for one in row])).split(1))
        for path, row in by_path.items():
            made[path], whole = whole[: len(row)], whole[len(row) :]
    return made


def _stacked(made: list[Any], like: Tensor) -> Any:
    """What was made of each of `_layers(like)`, stacked as these are."""
    lead = like.shape[:-2]
    if not lead:
        return made[0]
    return tree_map(lambda *parts: parts[0] if parts[0] is None else torch.stack(parts).unflatten(0, lead), made[0], *made[1:])


def _delayed(weight: Tensor, scale: Tensor, recipe: Recipe, columns: bool) -> Scaled:
    row, amax = scaled_tensor(weight, recipe.w, scale[1:2])
    return Scaled(QWeight(row, turned(row) if columns else None, None, Aside()), scale, amax)


def _updated(state: ScaleState, amax: Tensor, recipe: Fp8Delayed) -> ScaleState:
    ran = (amax > 0) & (amax < torch.inf)  # not of a NaN either
    history = torch.cat((amax.unsqueeze(-2), state.history[..., :-1, :]), -2)
    a = history.amax(-2) if recipe.algorithm == "max" else amax
    largest = amax.new_tensor([ELEMENTS[e].largest for e in (recipe.fwd, recipe.fwd, recipe.bwd)])
    limits = torch.finfo(torch.float32)
    scale = (largest / a * 2.0**-recipe.margin).clamp(limits.tiny, limits.max)
    return ScaleState(torch.where(ran, scale, state.scale), torch.where(ran.unsqueeze(-2), history, state.history))
