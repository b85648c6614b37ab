"""What the normalisation operators share: the normalised shape, its checks, and views with one last dimension."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from funcops.errors import check, fail, require, short

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# (x, weight): the weight has x's dtype, or is a float32 master weight beside 16-bit x.
DTYPES = frozenset([(d, d) for d in FLOATS] + [(d, torch.float32) for d in FLOATS[2:]])


def normalized(cfg: Any, where: str) -> None:
    """Turn `cfg.dim` into a tuple of sizes, after checking it and eps."""
    dim = (cfg.dim,) if isinstance(cfg.dim, int) else cfg.dim
    right = isinstance(dim, tuple) and len(dim) > 0 and all(isinstance(d, int) and d >= 1 for d in dim)
    require(right, where, "dim", "a size of at least 1, or a tuple of them", cfg.dim)
    require(cfg.eps >= 0, where, "eps", "at least 0", cfg.eps)
    object.__setattr__(cfg, "dim", dim)


def check_norm(where: str, x: Any, dim: tuple[int, ...], weight: Any, name: str = "params.weight") -> None:
    check(where, "x", x, (..., *dim))
    check(where, name, weight, dim, None, x)
    if (x.dtype, weight.dtype) not in DTYPES:
        wanted = f"{short(x.dtype)} or float32" if x.dtype in FLOATS else "float, as x must be"
        fail(where, name, f"of dtype {wanted}", short(weight.dtype), TypeError)


def flat(t: Tensor, dim: tuple[int, ...]) -> Tensor:
    """[*, *D] as [*, D]."""
    return t if len(dim) == 1 else t.reshape(*t.shape[: t.dim() - len(dim)], math.prod(dim))
