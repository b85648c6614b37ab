"""Shared by the normalisations: checks of the normalised shape, views with one last dimension, and sums of partial gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from funcops.engine.errors import FLOATS, check, check_rows, fail, require, short
from funcops.library.kernels import norm as kernels

# (x, weight): the weight has x's dtype, or is a float32 master weight beside 16-bit x.
DTYPES = frozenset([(d, d) for d in FLOATS] + [(d, torch.float32) for d in FLOATS[2:]])


def check_sizes(where: str, cfg: Any) -> None:
    """Check `cfg.dim` and `cfg.eps`, and turn a single size into a tuple."""
    dim = cfg.dim if isinstance(cfg.dim, tuple) else (cfg.dim,)
    right = len(dim) > 0 and all(type(d) is int and d >= 1 for d in dim)
    require(right, where, "dim", "a size of at least 1, or a tuple of them", repr(cfg.dim))
    check_eps(where, cfg.eps)
    object.__setattr__(cfg, "dim", dim)


def check_eps(where: str, eps: Any) -> None:
    require(type(eps) in (int, float) and 0 <= eps < math.inf, where, "eps", "a finite number, at least 0", repr(eps))


def check_norm(where: str, x: Any, weight: Any, dim: tuple[int, ...]) -> None:
    """Check x: [*, *D] of a float dtype, and weight: [*D], whose dtype must be in `DTYPES` with x's."""
    if len(dim) == 1:
        check_rows(where, "x", x, dim[0])
    else:
        check(where, "x", x, (..., *dim), FLOATS)
    check_weight(where, x, weight, dim)


def check_weight(where: str, x: Tensor, weight: Any, shape: tuple[int, ...]) -> None:
    """Check the weight's shape, and that its dtype is in `DTYPES` with x's."""
    check(where, "params.weight", weight, shape, None, x)
    if weight.dtype is not x.dtype and (x.dtype, weight.dtype) not in DTYPES:
        either = " or ".join(short(w) for d, w in sorted(DTYPES, key=str) if d is x.dtype)
        got = f"{short(weight.dtype)}: cast one of them (funcops.trees.cast)"
        fail(where, "params.weight", f"{either} beside {short(x.dtype)} x", got, TypeError)


def flat(t: Tensor, dim: tuple[int, ...]) -> Tensor:
    """[*, *D] as [*, D]."""
    return t if len(dim) == 1 else t.reshape(*t.shape[: t.dim() - len(dim)], math.prod(dim))


def finish(
    parts: Tensor | None, dim: tuple[int, ...], dtype: torch.dtype, accumulator: Any = None, owned: bool = False
) -> Tensor | None:
    """Sum the partial sums [P, D] to a gradient [*D] of the given dtype; unrounded if the accumulator is as wide as they are.
    `owned`: nothing else reads the parts, so that a single one, which may be [D], may itself become the gradient."""
    if parts is None:
        return None
    dtype = _dtype_of(parts, dtype, accumulator)
    if owned and (parts.dim() == 1 or parts.shape[0] == 1):
        total = parts if parts.dim() == 1 else parts.squeeze(0)
        total = total if total.dtype is dtype else total.to(dtype)
    else:
        total = kernels.sum_parts(parts, dtype)
    return total if len(dim) == 1 else total.reshape(dim)


def finish_two(
    a: Tensor | None, b: Tensor | None, dim: tuple[int, ...], dtype: torch.dtype, into_a: Any, into_b: Any
) -> tuple[Tensor | None, Tensor | None]:
    """`finish` both, in one launch if they get the same dtype."""
    if a is None or b is None or _dtype_of(a, dtype, into_a) is not _dtype_of(b, dtype, into_b):
        return finish(a, dim, dtype, into_a), finish(b, dim, dtype, into_b)
    totals = kernels.sum_two_parts(a, b, _dtype_of(a, dtype, into_a))
    return totals if len(dim) == 1 else (totals[0].reshape(dim), totals[1].reshape(dim))


def _dtype_of(parts: Tensor, dtype: torch.dtype, accumulator: Any) -> torch.dtype:
    wide = isinstance(accumulator, Tensor) and accumulator.element_size() >= parts.element_size()
    return parts.dtype if wide else dtype
