"""What the linear layers over an axis share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from funcops.dist import comm
from funcops.dist.mesh import Axis
from funcops.dist.plain import check_tensor
from funcops.errors import check_rows, describe, fail, require
from funcops.ops.linear import LinearConfig, LinearParams, linear_init

OVERLAPS = ("none", "bulk")


def require_overlap(where: str, overlap: str) -> None:
    require(overlap in OVERLAPS, where, "overlap", " or ".join(map(repr, OVERLAPS)), repr(overlap))


def check_x(where: str, x: Any, width: int, sequence_parallel: bool) -> None:
    check_tensor(where, "x", x, (..., width))
    check_rows(where, "x", x, width)
    if sequence_parallel and x.dim() < 2:
        fail(where, "x", f"[m, ..., {width}], of a first dimension to share out", describe(x))


def check_params(where: str, params: LinearParams, weight: tuple[int, int], bias: tuple[int] | None, x: Tensor) -> None:
    check_tensor(where, "params.weight", params.weight, weight, x.dtype, x)
    if bias is not None:
        check_tensor(where, "params.bias", params.bias, bias, x.dtype, x)
    elif params.bias is not None:
        fail(where, "params.bias", "None (cfg.bias is False)", "a tensor")


def init_part(cfg: Any, dim: int, key: Any, device: Any, dtype: torch.dtype | None) -> LinearParams:
    """This rank's part, along `dim` of the weight, of what `linear_init` draws: the parts of all ranks are its bits."""
    whole = linear_init(LinearConfig(cfg.in_features, cfg.out_features, bias=cfg.bias), key=key, device=device, dtype=dtype)
    axis: Axis = cfg.axis
    if axis.size == 1:
        return whole
    bias = whole.bias if dim or whole.bias is None else comm.own_slice(whole.bias, axis).clone()
    return LinearParams(comm.own_slice(whole.weight, axis, dim).clone(memory_format=torch.contiguous_format), bias)
