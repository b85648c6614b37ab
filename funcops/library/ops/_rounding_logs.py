"""The logs of a step in low precision: what rounding does to the operands of its products, with the scales of that step.

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
MADE: set[Callable[..., Tensor]] = set()  # the logs of all ops


def forward_logs(operand: str, measured: Callable[[Any, Any, Any], Rounding], also: tuple[str, ...] = ()) -> tuple[Any, ...]:
    """The logs of an operand that a forward rounds: `measured(params, x, cfg)`."""

    def made(what: str) -> Callable[..., Tensor]:
        def log(params: Any, x: Any, y: Any, cfg: Any) -> Tensor:
            return getattr(measured(params, x, cfg), what)  # type: ignore[no-any-return]

        return _named(log, operand, what)

    return tuple(map(made, (*also, *WHAT)))


def backward_logs(measured: Callable[[Any, Tensor, Any], Rounding | None]) -> tuple[Any, ...]:
    """The logs of dy: `measured(residuals, dy, cfg)`, None if no product reads dy."""

    def made(what: str) -> Callable[..., Tensor]:
        def log(residuals: Any, dy: Tensor, cfg: Any) -> Tensor:
            found = measured(residuals, dy, cfg)
            return torch.full((), torch.nan, device=dy.device) if found is None else getattr(found, what)

        return _named(log, "dy", what)

    return tuple(map(made, WHAT))


def _named(log: Callable[..., Tensor], operand: str, what: str) -> Callable[..., Tensor]:
    log.__name__ = log.__qualname__ = f"{operand}_{what}"
    log.__doc__ = f"`{what}` of {operand}, as in `{Rounding.__name__}`."
    MADE.add(log)
    return log


def _of_x(params: Any, x: Tensor, cfg: Any) -> Rounding:
    recipe, weight = cfg.recipe, params.weight
    if isinstance(weight, Scaled):
        return rounding(x, scaled_tensor(x, recipe.x, weight.scale[0:1], cfg.largest)[0])
    return rounding(x, quantized(x, recipe.x, cfg.largest))


def _of_dy(residuals: Any, dy: Tensor, cfg: Any) -> Rounding | None:
    recipe, given = cfg.recipe, residuals.rounding
    if given is None and (recipe.delayed or recipe.stochastic):
        return None
    if recipe.delayed:
        return rounding(dy, scaled_tensor(dy, recipe.dy, given[2:3], cfg.largest)[0])
    row = of_gradient(dy, recipe, cfg.key_of_rank(given) if recipe.stochastic else None, True, False, cfg.largest)[0]
    return None if row is None else rounding(dy, row)


ROUNDING_LOGS = (*forward_logs("x", _of_x), *backward_logs(_of_dy))  # of a linear layer, on one rank or over ranks
