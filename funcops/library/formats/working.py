"""Working trees by shape alone."""

from __future__ import annotations

from typing import Any

import torch

from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import steps
from funcops.engine.errors import join_path
from funcops.engine.trees import at, put, replace, tree_map_tensors
from funcops.library.formats.qtensor import quantized_weight
from funcops.library.formats.scaled import Scaled


def working_like(op: Op, cfg: Any, params: Any) -> Any:
    """Params without values, with what `quantize_params` puts beside the weights of recipes that have state or random keys."""
    for part in steps(cfg, op=op, layers=True):
        recipe, path = part.cfg.low_recipe, join_path(part.path, "weight")
        if recipe is None or not (recipe.delayed or recipe.stochastic) or (weight := at(params, path)) is None:
            continue
        lead = weight.shape[:-2]
        if recipe.delayed:
            params = put(params, path, Scaled(weight, weight.new_empty(*lead, 3, dtype=torch.float32), None))
            continue
        largest = weight.new_empty(1, dtype=torch.float32)
        one = quantized_weight(weight.new_empty(weight.shape[-2:]), recipe.w, True, largest, recipe.w_col)
        one = tree_map_tensors(lambda t, lead=lead: t.new_empty(*lead, *t.shape), one)
        params = put(params, path, replace(one, key=weight.new_empty(*lead, 2, dtype=torch.int64)))
    return params
