"""Checks of a tensor before it is sent over an axis: a plain tensor of this rank, with sizes that divide."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcops.distributed.mesh import Axis
from funcops.engine.errors import FLOATS, Dtypes, Shape, check, describe, fail, require, require_type

_WRAPPED = {
    "AsyncCollectiveTensor": "wait for it first (.wait()), or use funcops.dist.gather_start",
    "DTensor": "pass its to_local(), and the axis in the config",
}


def check_tensor(where: str, name: str, t: Any, shape: Shape, dtype: Dtypes = None, like: Tensor | None = None) -> None:
    """`check` for a tensor of this rank: torch's wrappers of sharded tensors, and of tensors in flight, are refused by name."""
    if type(t) is not Tensor and type(t).__name__ in _WRAPPED:
        kind = type(t).__name__
        fail(where, name, f"a plain tensor ({_WRAPPED[kind]})", f"{kind} {describe(t)}", TypeError)
    check(where, name, t, shape, dtype, like)


def check_part(where: str, name: str, t: Any, dim: int, dtype: Dtypes = FLOATS) -> int:
    """Check that t is a float tensor with a dimension `dim`, and return `dim` counted from the front."""
    check_tensor(where, name, t, (...,), dtype)
    dims = t.dim()
    if not -dims <= dim < dims:
        fail(where, name, f"of more dimensions (cfg.dim is {dim})", describe(t))
    return dim % dims


def check_divides(where: str, name: str, t: Tensor, dim: int, axis: Axis) -> None:
    if t.shape[dim] % axis.size:
        fail(where, name, f"of a size along dimension {dim} that {axis} divides", describe(t))


def require_axis(where: str, axis: Any, name: str = "axis") -> None:
    require_type(where, name, axis, Axis)


def require_shares(where: str, name: str, size: int, axis: Axis) -> None:
    require(size % axis.size == 0, where, name, f"a multiple of {axis.size}, the size of axis {axis.name!r}", size)
