"""Helpers of combinators and programs: the sum of gradients, and params by shape alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from funcops.contract.configs import Composite
from funcops.contract.op import Op
from funcops.contract.walk import steps
from funcops.errors import join_path
from funcops.formats import quantized_weight
from funcops.formats.scaled import Scaled
from funcops.trees import at, put, replace, tensors, tree_map, tree_map_tensors


def add(a: Any, b: Any) -> Any:
    """The sum of two gradients of one structure; None is zero. A node with its own way of adding has `plus`."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, Tensor):
        return a + b
    return a.plus(b) if hasattr(a, "plus") else tree_map(add, a, b, is_leaf=lambda node: hasattr(node, "plus"))


def has_params(op: Op, cfg: Any) -> bool:
    return bool(tensors(abstract_params(op, cfg)))


@functools.lru_cache(maxsize=1024)
def abstract_params(op: Op, cfg: Any) -> Any:
    """The op's params on the meta device: their structure and shapes. Do not change them. A combinator's config makes them from its
    parts' params, so that equal layers share theirs."""
    return cfg.abstract() if isinstance(cfg, Composite) else op.init(cfg, key=None, device="meta")


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
