"""The floating-point operations of kernels whose bodies read values, such as the ends of groups: those cannot run on shapes alone.

@flops(grouped_product)
def _grouped_product_flops(a, w, index): ...        # from the arguments that it names
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["flops", "flops_of"]

_formulas: dict[str, tuple[Callable[..., int], list[str]]] = {}  # by the kernel's name


def flops(call: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorator: the formula counts two operations for a product of two numbers and its sum. Every row has a group."""

    def decorate(formula: Callable[..., int]) -> Callable[..., int]:
        _formulas[call.kernel.name] = formula, list(inspect.signature(formula).parameters)
        return formula

    return decorate


def flops_of(name: str, given: dict[str, Any]) -> int | None:
    """The operations of a call with these arguments, or None for a kernel without a formula: its body runs on shapes."""
    formula, names = _formulas.get(name, (None, ()))
    return None if formula is None else formula(**{name: given[name] for name in names})
