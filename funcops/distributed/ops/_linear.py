"""Checks, and the init, that the linear layers over an axis share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.distributed.checks import check_tensor, require_axis, require_shares
from funcops.distributed.init import init_part
from funcops.errors import check_rows, describe, fail, require
from funcops.ops.linear import LinearConfig, LinearParams, linear_init

OVERLAPS = ("none", "bulk", "ring")


def check_config(cfg: Any, shared: str) -> None:
    """Check a config whose features `shared` are sharded over the axis."""
    where = type(cfg).__name__
    require(cfg.in_features >= 1, where, "in_features", "at least 1", cfg.in_features)
    require(cfg.out_features >= 1, where, "out_features", "at least 1", cfg.out_features)
    require_axis(where, cfg.axis)
    require_shares(where, shared, getattr(cfg, shared), cfg.axis)
    require_overlap(where, cfg.overlap)
    whole = "'none' or 'bulk' without sequence_parallel, as rows are not sharded"
    require(cfg.overlap != "ring" or cfg.sequence_parallel, where, "overlap", whole, "'ring'")


def require_overlap(where: str, overlap: Any) -> None:
    require(overlap in OVERLAPS, where, "overlap", " or ".join(map(repr, OVERLAPS)), repr(overlap))


def check_parts(cfg: Any) -> None:
    """Check the sizes of packed outputs."""
    where, parts, total = type(cfg).__name__, cfg.parts, cfg.out_features
    right = isinstance(parts, tuple) and all(type(n) is int and n >= 1 for n in parts) and sum(parts) in (0, total)
    require(right, where, "parts", f"a tuple of sizes whose sum is {total}, the out_features, or ()", describe(parts))
    for n in parts:
        require_shares(where, "parts", n, cfg.axis)


def by_ring(cfg: Any) -> bool:
    return cfg.overlap == "ring" and cfg.axis.size > 1


def check_x(where: str, x: Any, width: int, sequence_parallel: bool) -> None:
    check_tensor(where, "x", x, (..., width))
    check_rows(where, "x", x, width)
    if sequence_parallel and x.dim() < 2:
        fail(where, "x", f"[m, ..., {width}], as its first dim is sharded", describe(x))


def check_params(where: str, params: LinearParams, weight: tuple[int, int], bias: tuple[int] | None, x: Tensor) -> None:
    check_tensor(where, "params.weight", params.weight, weight, x.dtype, x)
    if bias is not None:
        check_tensor(where, "params.bias", params.bias, bias, x.dtype, x)
    elif params.bias is not None:
        fail(where, "params.bias", "None (cfg.bias is False)", "a tensor")


def init_linear(cfg: Any, key: Any, device: Any, dtype: torch.dtype | None) -> LinearParams:
    """This rank's part of the params that `linear_init` draws."""
    plain = LinearConfig(cfg.in_features, cfg.out_features, bias=cfg.bias)
    return init_part(cfg, lambda: linear_init(plain, key=key, device=device, dtype=dtype))  # type: ignore[no-any-return]
