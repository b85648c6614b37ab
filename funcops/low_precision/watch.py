"""The rounding of a model in low precision while it trains, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.configs import require_config
from funcops.engine.contract.walk import Part, check_selection, matches, steps
from funcops.engine.errors import FLOATS, check, describe, fail, require
from funcops.engine.trees import at, has, paths, stands_for_one, tree_map_tensors
from funcops.library.formats import QWeight
from funcops.library.formats.rounding import Rounding, rounding
from funcops.library.formats.scaled import Scaled
from funcops.library.ops._rounding_logs import MADE


def rounding_logs(cfg: Any, *, skip: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the logs of all steps with a recipe, for `logs.with_logs`: of x and of dy the amax, and what the rounding of this
    very step does: `x_underflow` (the share of nonzero elements that become 0), `x_saturated` (the share that is clipped) and
    `x_error` (relative, in norm), with the scales that the step has. Layers of groups, such as in experts, have these values of
    `rows`, as their x also has offsets; attention of `q`, `k` and `v`; layers over ranks of the rank's own part.

    Run the config with logs in one of n steps: each value but an amax quantises its operand once more. Weights are the same in
    all microbatches, and `weight_rounding` measures them. `skip`: globs over paths of steps to leave out. Raises `ValueError` for
    a config without such a step, for a step with a recipe that has no such logs, and for a glob that matches none. Experts over
    ranks whose tokens are sent in codes (`Fp8Block`) raise when they run: leave out their `up`.

    >>> from funcops import ChainConfig, LinearConfig, Step, linear
    >>> from funcops.low_precision import Fp8Block, rounding_logs, with_recipe
    >>> cfg = with_recipe(ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)),)), Fp8Block())
    >>> print(*rounding_logs(cfg)["up"])
    x_amax dy_amax x_underflow x_saturated x_error dy_underflow dy_saturated dy_error
    """
    where = "rounding_logs"
    require_config(where, cfg)
    logs = {part.path: _names(part) for part in steps(cfg) if part.op is not None and _names(part)}
    low = [part.path for part in steps(cfg) if part.path in logs or part.cfg.low_recipe is not None]
    check_selection(where, low, (), skip)
    wanted = [path for path in low if not matches(path, skip)]
    require(bool(wanted), where, "cfg", "one with steps in a recipe", describe(cfg))
    for path in wanted:
        require(
            path in logs, where, "cfg", "one whose steps with a recipe have logs of their rounding", f"{path} (skip leaves it out)"
        )
    return {path: logs[path] for path in wanted}


def _names(part: Part) -> tuple[str, ...]:
    """The names of the logs of a step's rounding, its amaxes among them; none for any other step."""
    own = [log.__name__ for log in part.op.logs if log in MADE] if part.op is not None else []
    if not own:
        return ()
    return (*(("x_amax",) if "x_error" in own else ()), "dy_amax", *own)


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
