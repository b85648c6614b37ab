"""Rotary position embedding.

    (y_a, y_b) = (x_a cos - x_b sin, x_b cos + x_a sin)        angle = position * theta^(-2i / R)

over pairs (a, b) of the first R = rotary_dim of D: half-split (i, i + R/2), or interleaved (2i, 2i + 1); the rest of D
passes through. The backward is the inverse rotation, so no activation is kept.

x is `(x, positions)`. x, y, dy, dx: [*, T, N, D] (sequence, heads, head size) of one float dtype; positions: [T] or
[*, T], int64, or in their place the table that `rope_table` makes of them: float32 (float64 for float64), [T, 1, 3R]
or [*, T, 1, 3R]. A model makes the table once and gives it to every layer. Kept: positions or table, an alias. arXiv:2104.09864.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.backend import wide
from funcops.errors import check, check_rows, describe, fail, require, require_type
from funcops.kernels import rope as kernels
from funcops.needs import Needs
from funcops.op import config, dgrad_of, forward, make_op, no_params
from funcops.schema import DGRAD, Inputs, Residuals, saved

__all__ = ["RopeConfig", "RopeResiduals", "rope", "rope_bwd", "rope_dgrad", "rope_fwd", "rope_init", "rope_table", "rope_wgrad"]


@config
class RopeConfig:
    """`dim`: the head size D; `rotary_dim`: the even part of it that turns (default: all)."""

    dim: int = field(kw_only=False)
    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False

    def __post_init__(self) -> None:
        require(isinstance(self.dim, int) and self.dim >= 1, "RopeConfig", "dim", "at least 1", self.dim)
        require(0 < self.theta < math.inf, "RopeConfig", "theta", "above 0, and finite", self.theta)
        r = self.rotary_dim if self.rotary_dim is not None else self.dim
        object.__setattr__(self, "rotating", r)
        object.__setattr__(self, "table_size", 3 * r)
        require(r % 2 == 0 and 0 < r <= self.dim, "RopeConfig", "rotary_dim", f"even, in 2..{self.dim}", r)

    rotating: ClassVar[int]  # R
    table_size: ClassVar[int]

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.dim, self.dim


class RopeResiduals(Residuals, static=("inputs", "shape", "dtype")):
    positions: Tensor = saved("[*, T] or [*, T, 1, 3R]", alias="x.1", needed_by=DGRAD, of=("x.0",))


def rope_table(positions: Tensor, cfg: RopeConfig, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """What `rope` multiplies with at `positions` ([*, T], int64), to be given as its x.1: cosines and signed sines, [*, T, 1, 3R].

    `dtype`: float32, or float64 for float64 x. Raises `TypeError` for another dtype or for positions that are not int64.
    """
    require_type("rope_table", "cfg", cfg, RopeConfig)
    check("rope_table", "positions", positions, (...,), torch.int64)
    if dtype not in (torch.float32, torch.float64):
        fail("rope_table", "dtype", "float32 or float64", describe(dtype), TypeError)
    return kernels.rope_table(positions, cfg.theta, cfg.rotating, cfg.interleaved, dtype)


def check_rotation(where: str, t: Tensor, positions: Any, cfg: RopeConfig) -> None:
    """t: [*, T, N, D]; positions: [T] or [*, T], int64; or their table, [T, 1, 3R] or [*, T, 1, 3R]."""
    shape = t.shape
    if len(shape) < 3:
        fail(where, "x.0", f"[..., T, N, {cfg.dim}]", list(shape))
    if isinstance(positions, Tensor) and positions.is_floating_point():
        rows = (shape[-3],) if positions.dim() <= 3 else shape[:-2]
        check(where, "x.1 (table)", positions, (*rows, 1, cfg.table_size), wide(t.dtype), t)
    else:
        wanted = (shape[-3],) if getattr(positions, "ndim", 1) <= 1 else shape[:-2]
        check(where, "x.1 (positions)", positions, wanted, torch.int64, t)


def table_of(positions: Tensor, cfg: RopeConfig, dtype: torch.dtype) -> Tensor:
    """The table for numbers of `dtype`, from positions or as it was given."""
    if positions.is_floating_point():
        return positions
    return kernels.rope_table(positions, cfg.theta, cfg.rotating, cfg.interleaved, wide(dtype))


def rope_kept(cfg: RopeConfig, needs: Needs, x: tuple[Tensor, Tensor]) -> RopeResiduals | None:
    return RopeResiduals.keep(cfg, needs, positions=x[1], inputs=Inputs.of(x), shape=x[0].shape, dtype=x[0].dtype)


@forward(RopeConfig)
def rope_fwd(
    params: None, x: tuple[Tensor, Tensor], cfg: RopeConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, RopeResiduals | None]:
    """x: `(x, positions or table)` -> y: [*, T, N, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    if not isinstance(x, tuple) or len(x) != 2:
        fail("rope_fwd", "x", "a tuple (x, positions)", describe(x), TypeError)
    t, positions = x
    check_rows("rope_fwd", "x.0", t, cfg.dim)
    check_rotation("rope_fwd", t, positions, cfg)
    y = kernels.rope_apply(t, table_of(positions, cfg, t.dtype), cfg.interleaved, False)
    return y, rope_kept(cfg, needs, x)


@dgrad_of(RopeResiduals)
def rope_dgrad(residuals: RopeResiduals, dy: Tensor, cfg: RopeConfig) -> tuple[tuple[Tensor, None], None]:
    """`(dx, None)`: the inverse rotation of dy. There is no weight gradient: pending is None."""
    check("rope_dgrad", "dy", dy, residuals.shape, residuals.dtype, residuals.positions)
    if residuals.needs.x is not True and not residuals.needs.input(0):
        return residuals.nothing(), None
    table = table_of(residuals.positions, cfg, dy.dtype)
    return residuals.inputs.make((kernels.rope_apply(dy, table, cfg.interleaved, True), None)), None


rope = make_op("rope", RopeConfig, fwd=rope_fwd, dgrad=rope_dgrad)
rope_init, rope_bwd, rope_wgrad = no_params(rope, rope_dgrad)
