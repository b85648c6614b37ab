"""The rounding of a model in low precision while it trains, step by step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.configs import require_config
from funcops.engine.contract.walk import steps
from funcops.engine.errors import FLOATS, check, describe, fail, require
from funcops.engine.trees import at, has, paths, stands_for_one, tree_map_tensors
from funcops.library.formats import QWeight
from funcops.library.formats.rounding import Rounding, rounding
from funcops.library.formats.scaled import Scaled
from funcops.library.ops._rounding_logs import ROUNDING_LOGS


def rounding_logs(cfg: Any) -> dict[str, tuple[str, ...]]:
    """Return the logs of all linear steps with a recipe, for `logs.with_logs`: of x and of dy the amax, and what the rounding of
    this very step does: `x_underflow` (the share of nonzero elements that become 0), `x_saturated` (the share that is clipped) and
    `x_error` (relative, in norm), with the scales that the step has.

    Run the config with logs in one of n steps: each value but an amax quantises its operand once more. Weights are the same in
    all microbatches, and `weight_rounding` measures them. Layers over ranks, of groups, and attention have none. Raises
    `ValueError` for a config without such a step.

    >>> from funcops import ChainConfig, LinearConfig, Step, linear
    >>> from funcops.low_precision import Fp8Block, rounding_logs, with_recipe
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),)), Fp8Block())
    >>> print(*rounding_logs(cfg)["up"])
    x_amax dy_amax x_underflow x_saturated x_error dy_underflow dy_saturated dy_error
    """
    require_config("rounding_logs", cfg)
    names = ("x_amax", "dy_amax", *[log.__name__ for log in ROUNDING_LOGS])
    found = {part.path: names for part in steps(cfg) if part.op is not None and set(ROUNDING_LOGS) <= {*part.op.logs}}
    require(bool(found), "rounding_logs", "cfg", "one with linear steps in a recipe, on one rank", describe(cfg))
    return found


def weight_rounding(params: Any, work: Any) -> dict[str, Rounding]:
    """Measure, by path, what a working tree made of the weights: from the params themselves to the codes that the step's products
    read. Of weights that are stacked, each number is [*layers]. Raises `ValueError` or `TypeError` for params that the tree was not
    made of.

    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, random
    >>> from funcops.low_precision import Fp8Block, quantize_params, weight_rounding, with_recipe
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),)), Fp8Block())
    >>> params = chain.init(cfg, key=random.key(0))
    >>> found = weight_rounding(params, quantize_params(params, cfg))["up.weight"]
    >>> float(found.underflow), float(found.saturated), 0.01 < found.error < 0.04
    (0.0, 0.0, tensor(True))
    """
    found = {}
    for path, node in paths(work, is_leaf=stands_for_one).items():
        codes = node.value if isinstance(node, Scaled) else node
        if isinstance(codes, QWeight):
            if not has(params, path):
                fail("weight_rounding", "params", f"a tree with {path}", describe(params))
            weight = at(params, path)
            check("weight_rounding", f"params.{path}", weight, tuple(codes.shape), FLOATS)
            found[path] = _of_each(weight, codes.row)
    return found


def _of_each(weight: Tensor, codes: Any) -> Rounding:
    """The numbers of a weight [O, I], or, stacked, of each layer's."""
    if weight.dim() == 2:
        return rounding(weight, codes)
    each = [_of_each(w, tree_map_tensors(lambda t, i=i: t[i], codes)) for i, w in enumerate(weight)]
    return Rounding(*[torch.stack(numbers) for numbers in zip(*each, strict=True)])
