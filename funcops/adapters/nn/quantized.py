"""Linear modules in low precision, each with a recipe, and weights that are quantised once per step.

Parameters and their gradients stay in high precision. A layer quantises its weight in every call, or reads the codes that
`quantize_weights(model)` has stored beside it, which become invalid when the parameter is written to.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from funcops.adapters.autocast import any_autocast, casts, is_on, outside
from funcops.adapters.autograd.differentiable import run
from funcops.adapters.nn.module import Prepared, is_plain, prepare
from funcops.engine import random
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, wrap
from funcops.engine.errors import StaleResidualError, check, describe, fail, few, require, require_dtype, require_flag, require_type
from funcops.engine.trees import replace
from funcops.library.formats import QTensor, QWeight, quantized_weight
from funcops.library.formats.recipes import TO_ROUND, require_recipe
from funcops.library.ops.linear import LinearParams
from funcops.library.ops.qlinear import qlinear

_none: Any = None
_empty = QTensor(_none, _none, None, format=_none, shape=_none, dtype=_none, side="row", hadamard=False)
NO_GRADIENT = QWeight(_empty, _empty, None)  # the gradient of codes


def take_recipe(where: str, module: Any, recipe: Any) -> None:
    """Set a recipe on an `nn.Linear`. Raises `TypeError` if it is not a recipe, `ValueError` for a recipe with state and for sizes
    that it does not support; the module is then unchanged."""
    require_recipe(where, recipe)
    if recipe.delayed:
        expected = (
            "one without state, such as Fp8Current, which has the same formats (a loop of yours holds scales: begin_step and "
            "end_step of funcops.low_precision, over with_recipe(cfg, recipe) of funcops.nn.functional or models.from_hf)"
        )
        fail(where, "recipe", expected, type(recipe).__name__)
    before = dict(vars(module))
    module.recipe, module.op = recipe, qlinear
    try:
        module.known_cfg()
    except BaseException:
        vars(module).clear()
        vars(module).update(before)
        raise


def quantize_weights(
    model: nn.Module, *, dtype: torch.dtype | None = None, columns: bool = True, key: Tensor | None = None
) -> list[str]:
    """Quantise the weight of every `funcops.nn.Linear` with a recipe in `model`: all calls until the next update read these codes.
    Call it once per step, before the first microbatch. Returns the paths of the modules.

    `dtype`: the layers' compute dtype, if it differs from the parameters' (as under autocast). `columns`: whether to make the codes
    for dx now, or in every backward. `key`: for recipes that round stochastically, another in each step, and in each microbatch
    that is to round anew; without codes a layer with such a recipe raises. The codes are not a buffer, not in `state_dict`, and not
    in a copy of the module. A call after the parameter was written to or replaced raises `StaleResidualError` with the module's
    path, also after a step of a fused optimiser; writes through `weight.data` are not noticed, as torch does not count them. A
    layer compiled by torch.compile does not read the codes: it quantises its weight in every call. Capture CUDA graphs before the
    first call of this function: they quantise in every replay.

    Raises `ValueError` for a model without such a layer, or a stochastic recipe without a key, and `TypeError` for weights that are
    not plain tensors (under `fully_shard` layers quantise the gathered weight in every call).

    >>> import torch
    >>> from funcops import nn
    >>> from funcops.low_precision import Fp8Block
    >>> model = nn.Sequential(nn.Linear(128, 128, recipe=Fp8Block()), nn.GELU())
    >>> nn.quantize_weights(model), model(torch.ones(2, 128)).shape
    (['0'], torch.Size([2, 128]))
    """
    where = "quantize_weights"
    require_type(where, "model", model, nn.Module)
    require_flag(where, columns=columns)
    require_dtype(where, dtype)
    if key is not None:
        check(where, "key", key, (2,), torch.int64)
    found = {path: module for path, module in model.named_modules() if vars(module).get("recipe") is not None}
    require(bool(found), where, "model", "one with layers that have a recipe (from_torch(model, recipe=...))", describe(model))
    for path, module in found.items():
        weight: Any = module._parameters.get("weight")
        if not is_plain(weight) or weight is None:
            fail(where, f"{path}.weight", "a parameter that is a plain tensor", describe(weight), TypeError)
    rounding = [path for path, module in found.items() if module.recipe.stochastic]
    require(key is not None or not rounding, where, "key", f"a random key, for {few(rounding)} ({TO_ROUND})", None)
    for path, module in found.items():
        own = None if path not in rounding or key is None else random.fold_in(key, random.path_id(path))
        vars(module)["forward"] = Held(path, module, dtype, columns, own)
    for module in model.modules():
        if isinstance(module, Prepared):
            prepare(module)  # a chain now calls its layers; a compiler then finds that cached
    return list(found)


class Held:
    """The forward of a module that reads codes of its weight."""

    transient = True  # not copied with the module

    def __init__(self, path: str, module: Any, dtype: torch.dtype | None, columns: bool, key: Tensor | None) -> None:
        self.path, self.module, self.parameter = path, module, module._parameters["weight"]
        self.memory = self.parameter.data_ptr()
        weight = self.parameter.detach()
        weight = weight if dtype is None else weight.to(dtype)
        made = quantized_weight(weight, module.recipe.w, columns, col=module.recipe.w_col)
        self.weight = replace(made, key=key).made_of(self.parameter)

    def __call__(self, x: Any) -> Any:
        module = self.module
        weight, bias = module._own()
        if torch.compiler.is_compiling() or not (is_plain(x) and isinstance(x, Tensor) and is_plain(weight)):
            return type(module).forward(module, x)
        if weight is not self.parameter or self.weight.stale() or weight.data_ptr() != self.memory:
            raise StaleResidualError(
                f"funcops.nn.Linear {self.path or '(the model)'}: the weight must be as quantize_weights(model) found it, got one "
                "that was written to or replaced since. Call it again after an update; capture CUDA graphs before its first call"
            )
        if not (any_autocast() and is_on(x.device.type)):
            return run(held(module.op), LinearParams(weight, bias), (x, self.weight), module.known_cfg())
        x, (bias,) = casts(module.autocast, x, x.device.type, [bias])
        with outside(x.device.type):
            return run(held(module.op), LinearParams(weight, bias), (x, self.weight), module.known_cfg())


@functools.cache
def held(op: Op) -> Op:
    """The op for x `(x, QWeight)`: it reads the codes for y and dx, and returns dw for the weight in params."""

    def fwd(params: Any, x: Any, cfg: Any, *, needs: Needs = Needs.ALL) -> Any:
        given, weight = x
        return op.fwd(LinearParams(weight, params.bias), given, cfg, needs=Needs(bool(needs.x), needs.params))

    def dgrad(residuals: Any, dy: Any, cfg: Any) -> Any:
        dx, pending = op.dgrad(residuals, dy, cfg)
        return (dx, NO_GRADIENT), pending

    def bwd(residuals: Any, dy: Any, cfg: Any, *, into: Any = None) -> Any:
        dparams, dx = op.bwd(residuals, dy, cfg, into=into)
        return dparams, (dx, NO_GRADIENT)

    return wrap(op, (held, (op,)), fwd=fwd, dgrad=dgrad, bwd=bwd)
