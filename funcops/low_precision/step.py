"""The two ends of a training step, the same for bfloat16 and for every recipe.

    state = {}                                                       # what a recipe remembers; saved with the params
    for batch in batches:
        work, main_grad = begin_step(params, cfg, state)             # the place of cast(params, torch.bfloat16)
        for x in batch:
            y, residuals = chain.fwd(work, x, cfg)
            chain.bwd(residuals, dy, cfg, into=main_grad)
        grads, state = end_step(main_grad, cfg, state)               # grads are like params, in float32

They put `quantize_params`, `gradients_like`, `split_amaxes`, `recipe_init` and `recipe_update` together, and hold nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.configs import require_config
from funcops.engine.contract.needs import Needs
from funcops.engine.errors import few, require, require_callable, require_type
from funcops.low_precision.delayed import ScaleState, check_amaxes, check_state, recipe_init, split_amaxes, updated
from funcops.low_precision.params import accumulators, working_tree
from funcops.low_precision.weights import low_steps

T = TypeVar("T")
Amaxes = Mapping[str, Tensor]


def begin_step(
    params: T,
    cfg: Any,
    state: Mapping[str, ScaleState],
    *,
    dtype: torch.dtype = torch.bfloat16,
    columns: bool = True,
    key: Tensor | None = None,
    needs: Needs = Needs.ALL,
) -> tuple[T, T]:
    """Make the working tree of a step (`quantize_params`), and zero accumulators for its gradients (`gradients_like`), in float32,
    or in float64 beside it. Weights without a recipe are cast to `dtype`, so a config without any recipe is trained in that.

    `state`: {} in the first step, then from `end_step`. In a first step with `Fp8Delayed` each product scales by the amaxes of its
    own operands, so no step is lost to measure them; a graph or a compiled function of a first step cannot serve the others.
    `key`: for recipes that round stochastically, another in each step; other recipes ignore it. Further microbatches take
    `with_keys(work, cfg, key)`. `needs`: the gradients that the backward will be asked for. Raises `ValueError` or `TypeError` for
    a state of another model, or with another history, and for a stochastic recipe without a key.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import Fp8Delayed, begin_step, end_step, with_recipe
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),)), Fp8Delayed(history=16))
    >>> params, state = chain.init(cfg, key=random.key(0)), {}
    >>> for x in torch.ones(2, 4, 128, dtype=torch.bfloat16):
    ...     work, main_grad = begin_step(params, cfg, state)
    ...     y, residuals = chain.fwd(work, x, cfg)
    ...     _ = chain.bwd(residuals, y, cfg, into=main_grad)
    ...     grads, state = end_step(main_grad, cfg, state)
    ...
    >>> grads["up"].weight.dtype, state["up.weight"].scale[0]
    (torch.float32, tensor(448.))
    """
    require_type("begin_step", "state", state, Mapping)
    work = working_tree("begin_step", params, cfg, state, dtype, columns, key)
    return work, accumulators("begin_step", work, wide(dtype), needs)


def end_step(
    main_grad: T, cfg: Any, state: Mapping[str, ScaleState], *, over_ranks: Callable[[dict[str, Tensor]], Amaxes] | None = None
) -> tuple[T, dict[str, ScaleState]]:
    """Return the gradients like params, and the state of the next step; {} for a config without `Fp8Delayed`. `main_grad`: the
    accumulators of `begin_step`, or what one backward returned. It is not written to; gradients are the same tensors.

    `over_ranks`: returns the maxima of the amaxes, by path, over all ranks, such as `partial(dist.amaxes_over, over=(dp, tp))`,
    which communicates once per axis; it is not called without amaxes. A layer that did not run, and one whose amax is infinite or
    NaN, keeps its state (see `recipe_update`), after a first step a scale of 1.

    Raises `ValueError` for gradients without the amaxes of a weight with `Fp8Delayed`, or a state of another model; `TypeError` for
    amaxes that were changed after the backward, such as scaled ones.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import Fp8Block, begin_step, end_step, with_recipe
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),)), Fp8Block())
    >>> work, main_grad = begin_step(chain.init(cfg, key=random.key(0)), cfg, {})
    >>> end_step(main_grad, cfg, {})[1]
    {}
    """
    where = "end_step"
    require_config(where, cfg)
    require_type(where, "state", state, Mapping)
    if over_ranks is not None:
        require_callable(where, over_ranks=over_ranks)
    steps: Any
    steps, sources = low_steps(cfg)
    delayed: Any = {path: (inner, None) for path, inner in steps.items() if inner.recipe.delayed and path not in sources}
    check_state(where, delayed, state)
    grads, amaxes = split_amaxes(main_grad)
    if not delayed:
        return grads, {}
    missing = [path for path in delayed if path not in amaxes]
    wanted = "with amaxes of every weight with Fp8Delayed (begin_step's accumulators, or the gradients of its working tree)"
    require(not missing, where, "main_grad", wanted, f"none of {few(missing)}")
    if over_ranks is not None:
        amaxes = dict(over_ranks(amaxes))
    if not state:
        return grads, recipe_init(cfg, grads, amaxes=amaxes)
    check_amaxes(where, amaxes, state)
    return grads, {path: updated(state[path], amaxes[path], steps[path].recipe) for path in state}
