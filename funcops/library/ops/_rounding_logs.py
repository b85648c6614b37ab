"""The logs of a linear layer in low precision: what rounding does to the x and dy of a step, with the scales of that step.

Each value rounds its operand once more, as the products did: eight values of a layer take about as long as six quantisations more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from funcops.library.formats.rounding import Rounding, rounding
from funcops.library.formats.scaled import Scaled
from funcops.library.ops._low_operands import of_gradient, quantized, scaled_tensor

WHAT = ("underflow", "saturated", "error")  # of `Rounding`; an amax is a log of every op


def _of_x(what: str) -> Callable[..., Tensor]:
    def log(params: Any, x: Tensor, y: Tensor, cfg: Any) -> Tensor:
        recipe, weight = cfg.recipe, params.weight
        q = scaled_tensor(x, recipe.x, weight.scale[0:1])[0] if isinstance(weight, Scaled) else quantized(x, recipe.x, None)
        return getattr(rounding(x, q), what)  # type: ignore[no-any-return]

    return _named(log, "x", what)


def _of_dy(what: str) -> Callable[..., Tensor]:
    def log(residuals: Any, dy: Tensor, cfg: Any) -> Tensor:
        recipe, given = cfg.recipe, residuals.rounding
        if recipe.delayed or recipe.stochastic:
            if given is None:  # no product reads dy
                return torch.full((), torch.nan, device=dy.device)
            q = scaled_tensor(dy, recipe.dy, given[2:3])[0] if recipe.delayed else of_gradient(dy, recipe, given, True, False)[0]
        else:
            q = quantized(dy, recipe.dy, None)
        return getattr(rounding(dy, q), what)  # type: ignore[arg-type, no-any-return]

    return _named(log, "dy", what)


def _named(log: Callable[..., Tensor], operand: str, what: str) -> Callable[..., Tensor]:
    log.__name__ = log.__qualname__ = f"{operand}_{what}"
    log.__doc__ = f"`{what}` of {operand}, as in `{Rounding.__name__}`."
    return log


ROUNDING_LOGS = (*map(_of_x, WHAT), *map(_of_dy, WHAT))
