"""Linear layers over an axis: the fields of their configs, their checks and init, and the axis over which rows are sharded."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_tensor, require_axis, require_shares
from funcops.distributed.init import init_part
from funcops.distributed.mesh import Axis
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config
from funcops.engine.errors import check_rows, describe, fail, require
from funcops.library.kernels import linear as kernels
from funcops.library.ops.linear import LinearConfig, LinearParams, check_linear_into, linear_init, wants_bias
from funcops.library.ops.linear_layer import LinearLayer

OVERLAPS = ("none", "bulk", "ring")
ALONE = Axis("alone", 1, 0)


@config
class OverAxisConfig(OpConfig):
    """The fields of every linear layer over an axis. `shards_features`: whether a rank has a part of y's features (of w's rows), or
    else of x's (of w's columns)."""

    in_features: int = field(kw_only=False)
    out_features: int = field(kw_only=False)
    axis: Axis
    bias: bool = True
    sequence_parallel: bool = True
    overlap: str = "none"
    linear_weights = ("weight",)

    def __post_init__(self) -> None:
        where, shared = type(self).__name__, self.shared
        require(self.in_features >= 1, where, "in_features", "at least 1", self.in_features)
        require(self.out_features >= 1, where, "out_features", "at least 1", self.out_features)
        require_axis(where, self.axis)
        require_shares(where, shared, getattr(self, shared), self.axis)
        require_overlap(where, self.overlap)
        whole = "'none' or 'bulk' without sequence_parallel, as rows are not sharded"
        require(self.overlap != "ring" or self.sequence_parallel, where, "overlap", whole, "'ring'")
        own = getattr(self, shared) // self.axis.size
        object.__setattr__(self, "weight_shape", (own, self.in_features) if self.shards_features else (self.out_features, own))
        object.__setattr__(self, "bias_shape", self.weight_shape[:1] if self.bias else None)

    weight_shape: ClassVar[tuple[int, int]]  # of this rank's part
    bias_shape: ClassVar[tuple[int] | None]

    @property
    def shared(self) -> str:
        """The name of the features of which each rank has a part."""
        return "out_features" if self.shards_features else "in_features"

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.weight_shape[1], self.weight_shape[0]


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


def rows_axis(cfg: Any) -> Axis:
    """The axis over which rows are sharded: rows of x before a column layer, rows of y after a row layer."""
    return cfg.axis if cfg.sequence_parallel else ALONE


def start_sum(part: Tensor, cfg: Any) -> Tensor:
    """The sum over the ranks of their parts, in flight; with sequence parallelism this rank's rows of it."""
    return comm.start_scatter_sum(part, cfg.axis) if cfg.sequence_parallel else comm.start_sum(part, cfg.axis)


class OverAxis(LinearLayer):
    """A linear layer over an axis: its checks and init are the plain layer's, of this rank's parts."""

    def init(self, cfg: Any, key: Tensor | None, device: Any, dtype: torch.dtype | None) -> LinearParams:
        """This rank's part of the params that `linear_init` draws."""
        plain = LinearConfig(cfg.in_features, cfg.out_features, bias=cfg.bias)
        return init_part(cfg, lambda: linear_init(plain, key=key, device=device, dtype=dtype))  # type: ignore[no-any-return]

    def check_x(self, where: str, x: Any, cfg: Any) -> None:
        check_x(where, x, cfg.weight_shape[1], cfg.sequence_parallel)

    def check_dy(self, where: str, dy: Tensor, residuals: Any, like: Tensor | None) -> None:
        check_tensor(where, "dy", dy, residuals.y_shape, residuals.dtype, like)


class DenseOverAxis(OverAxis):
    """A linear layer over an axis in high precision."""

    def check(self, params: Any, x: Any, cfg: Any) -> None:
        where, bias = f"{self.name}_fwd", params.bias
        check_tensor(where, "params.weight", params.weight, cfg.weight_shape, x.dtype, x)
        if cfg.bias:
            check_tensor(where, "params.bias", bias, cfg.bias_shape, x.dtype, x)
        elif bias is not None:
            fail(where, "params.bias", "None (cfg.bias is False)", "a tensor")

    def kept(self, cfg: Any, needs: Needs, x: Tensor, weight: Tensor, y: Tensor) -> Any:
        return self._residuals.keep(cfg, needs, x=x, weight=weight, y_shape=y.shape, dtype=y.dtype)

    def check_backward(self, where: str, residuals: Any, dy: Tensor, cfg: Any, into: LinearParams | None) -> None:
        """Check dy, and the accumulators, before anything is sent."""
        x, weight = residuals.x, residuals.weight
        self.check_dy(where, dy, residuals, weight if x is None else x)
        if into is not None:
            check_linear_into(where, dy, x, wants_bias(cfg, residuals.needs), into)

    def part(self, dy: Tensor, residuals: Any, cfg: Any) -> Tensor:
        return kernels.linear_dgrad(dy, residuals.weight)


def check_x(where: str, x: Any, width: int, sequence_parallel: bool) -> None:
    check_tensor(where, "x", x, (..., width))
    check_rows(where, "x", x, width)
    if sequence_parallel and x.dim() < 2:
        fail(where, "x", f"[m, ..., {width}], as its first dim is sharded", describe(x))
