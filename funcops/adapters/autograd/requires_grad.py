"""The requested gradients of a call, read from `requires_grad`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.adapters.flatten import flatten, indexed_paths
from funcops.engine.contract.needs import Needs


def taken_apart(params: Any, x: Any) -> tuple[Any, Any, list[Tensor], Needs]:
    """The shapes of params and x, their tensors, and the needs given by `requires_grad`."""
    leaves: list[Tensor] = []
    params_shape = flatten(params, leaves)
    count = len(leaves)
    x_shape = flatten(x, leaves)
    needs = Needs(x=_asked(x_shape, leaves[count:], count), params=_asked(params_shape, leaves[:count], 0))
    return params_shape, x_shape, leaves, needs


def able(t: Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return t.is_floating_point() or t.is_complex()


def _asked(shape: Any, leaves: list[Tensor], first: int) -> Any:
    """The mask for `Needs` of the leaves that require a gradient."""
    asked = [t.requires_grad for t in leaves if able(t)]
    if all(asked):
        return bool(asked)
    return [path for i, path in indexed_paths(shape, "") if leaves[i - first].requires_grad] if any(asked) else False
