"""The working tree of a step, with quantised weights, and accumulators for its gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend import wide
from funcops.engine.contract.configs import require_config
from funcops.engine.contract.needs import Needs, check_needs
from funcops.engine.errors import check, few, require, require_dtype, require_type
from funcops.engine.trees import Aside, at, cast, constant_paths, put, replace, stands_for_one, tree_map, tree_map_with_path
from funcops.library.formats import QWeight, quantized_weight, turned, zero_gradient
from funcops.library.formats.recipes import TO_ROUND, Recipe
from funcops.library.formats.scaled import Scaled
from funcops.library.kernels.quantize import amax
from funcops.library.ops._low_operands import scaled_tensor
from funcops.low_precision.delayed import ScaleState, check_state
from funcops.low_precision.weights import each_layer, low_steps, recipe_weights

T = TypeVar("T")


def quantize_params(
    params: T,
    cfg: Any,
    state: Mapping[str, ScaleState] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    columns: bool = True,
    key: Tensor | None = None,
) -> T:
    """Make the working tree of a step: `params` cast to `dtype`, the weights of steps with a recipe as `QWeight`.

    A weight is quantised after the cast, so its codes are the same as in a step that quantises it itself. Params that never have a
    gradient stay wide (float64 becomes float32), such as a router's bias, which a step moves by less than bfloat16 can represent.
    `columns`: make the transposed codes that dx reads now (as many bytes again, as a report shows), or else whenever dx is
    computed. `state`: for `Fp8Delayed`, from the step before; in a first step {}: its products then scale by the amaxes of their
    own operands, as with `Fp8Current`. `key`: for recipes that round stochastically (see `with_keys`). Raises `ValueError`
    for a state of another model, or with another history.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import Fp8Block, quantize_params, with_recipe
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),)), Fp8Block())
    >>> params = chain.init(cfg, key=random.key(0))
    >>> work = quantize_params(params, cfg)
    >>> type(work["up"].weight).__name__, work["up"].weight.row.codes.dtype, work["up"].bias.dtype
    ('QWeight', torch.uint8, torch.bfloat16)
    """
    return working_tree("quantize_params", params, cfg, state, dtype, columns, key)


def working_tree(where: str, params: T, cfg: Any, state: Any, dtype: torch.dtype, columns: bool, key: Tensor | None) -> T:
    require_dtype(where, dtype)
    require_type(where, "columns", columns, bool)
    require_config(where, cfg)
    work: Any = _cast(params, dtype)
    found = recipe_weights(where, cfg, work)
    check_state(where, found, state)
    amaxes = _amaxes_over_ranks(found, first=not state)
    for path, (inner, weight) in found.items():
        recipe, scale = inner.recipe, None
        if recipe.delayed:
            unknown = weight.new_empty(*weight.shape[:-2], 0, dtype=torch.float32)
            scale = state[path].scale if state else unknown
        layers = each_layer(weight, scale)
        pairs = zip(layers, amaxes.get(path, [None] * len(layers)), strict=True)
        make: Any = _delayed if recipe.delayed else _stateless
        made: Any = _stacked([make(w, s, one, recipe, columns) for (w, s), one in pairs], weight)
        (made.value if type(made) is Scaled else made).made_of(at(params, path))
        work = put(work, path, made)
    if key is None:
        rounding = [path for path, (inner, _) in found.items() if inner.recipe.stochastic]
        require(not rounding, where, "key", f"a random key, for {few(rounding)} ({TO_ROUND})", None)
        return work  # type: ignore[no-any-return]
    return with_keys(work, cfg, key)  # type: ignore[no-any-return]


def with_keys(work: T, cfg: Any, key: Tensor) -> T:
    """Return the working tree with other random keys, its codes the same objects: use one per microbatch, so that no two round
    alike. Every weight of a stochastic recipe gets a key of its own, by its path; weights of a stacked `repeat` by their layer too.
    Raises `ValueError` or `TypeError` if `key` is not a random key, int64[2].

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
    for path, inner in low_steps(cfg)[0].items():
        if inner.recipe.stochastic and isinstance(weight := at(work, path), QWeight):
            own: Any = random.fold_in(key, random.path_id(path))
            for size in weight.shape[:-2]:
                each: list[Any] = [random.split(one, size) for one in own.reshape(-1, 2)]
                own = torch.stack(each).reshape(*own.shape[:-1], size, 2)
            work = put(work, path, replace(weight, key=own))
    return work


def gradients_like(work: T, dtype: torch.dtype | None = torch.float32, needs: Needs = Needs.ALL) -> T:
    """Make zero accumulators for the gradients of a working tree: `into` of a backward. They are dense for quantised weights;
    amaxes are uint32, for `split_amaxes`. Params whose gradient `needs` does not request get None, as in the backward's result.
    Raises `TypeError` or `ValueError` if `dtype` is not a float dtype, `needs` is no Needs, or a path of it is missing.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import Fp8Block, gradients_like, quantize_params, with_recipe
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),)), Fp8Block())
    >>> params = chain.init(cfg, key=random.key(0))
    >>> main_grad = gradients_like(quantize_params(params, cfg))
    >>> main_grad["up"].weight.shape, main_grad["up"].weight.dtype
    (torch.Size([256, 128]), torch.float32)
    """
    return accumulators("gradients_like", work, dtype, needs)


def accumulators(where: str, work: T, dtype: torch.dtype | None, needs: Needs) -> T:
    require_dtype(where, dtype)
    require_type(where, "needs", needs, Needs)
    check_needs(where, Needs(x=False, params=needs.params), work, None)

    def zeros(path: str, node: Any) -> Any:
        return zero_gradient(node, dtype) if needs.param(path) else None

    return tree_map_with_path(zeros, work, is_leaf=stands_for_one)


def _cast(params: Any, dtype: torch.dtype) -> Any:
    """Cast like `cast`, except that params that never have a gradient stay as wide as ops take them beside `dtype`."""
    work, wider = cast(params, dtype), wide(dtype)
    for path in constant_paths(params):
        if isinstance(t := at(params, path), Tensor) and t.is_floating_point():
            work = put(work, path, t if t.dtype in (dtype, wider) else t.to(wider))
    return work


def _amaxes_over_ranks(found: Mapping[str, tuple[Any, Tensor]], first: bool) -> dict[str, list[Tensor]]:
    """The amaxes of weights that are sharded over ranks, for recipes with one scale for the whole: by path, one per layer. Each
    axis communicates once. Recipes with state need them in a first step alone."""
    groups: dict[Any, dict[str, list[Tensor]]] = {}
    for path, (inner, weight) in found.items():
        if inner.largest is not None and (inner.recipe.w.whole or inner.recipe.w_col.whole) and (first or not inner.recipe.delayed):
            groups.setdefault(inner.axis, {})[path] = [amax(w, False) for w, _ in each_layer(weight, None)]
    made: dict[str, list[Tensor]] = {}
    for by_path in groups.values():
        largest = found[next(iter(by_path))][0].largest
        whole = list(largest(torch.cat([one for row in by_path.values() for one in row])).split(1))
        for path, row in by_path.items():
            made[path], whole = whole[: len(row)], whole[len(row) :]
    return made


def _stacked(made: list[Any], like: Tensor) -> Any:
    """Stack the results for the layers of `each_layer(like)` as `like` is stacked."""
    lead = like.shape[:-2]
    if not lead:
        return made[0]
    return tree_map(lambda *parts: parts[0] if parts[0] is None else torch.stack(parts).unflatten(0, lead), made[0], *made[1:])


def _stateless(weight: Tensor, _: None, largest: Tensor | None, recipe: Recipe, columns: bool) -> QWeight:
    return quantized_weight(weight, recipe.w, columns, largest, recipe.w_col)


def _delayed(weight: Tensor, scale: Tensor, largest: Tensor | None, recipe: Recipe, columns: bool) -> Scaled:
    row, amax = scaled_tensor(weight, recipe.w, scale[1:2], None if largest is None else lambda _: largest)
    return Scaled(QWeight(row, turned(row) if columns else None, None, Aside()), scale, amax)
