"""Rotary position embedding.

    (y_a, y_b) = (x_a cos - x_b sin, x_b cos + x_a sin)        angle = position * theta^(-2i / R)

over pairs (a, b) of the first R = rotary_dim of D: half-split (i, i + R/2), or interleaved (2i, 2i + 1); the rest of D
passes through. A `scaling` changes the frequencies, and may multiply cos and sin by a factor (`library.ops.rope_scaling`). The
backward is the transpose: the inverse rotation, times that factor. So no activation is kept.

x is `(x, positions)`. x, y, dy, dx: [*, T, N, D] (sequence, heads, head size) of one float dtype; positions: [T] or
[*, T], int64, or instead the table that `rope_table` makes from them: float32 (float64 for float64), [T, 1, 3R]
or [*, T, 1, 3R]. Kept: positions or table, an alias. Inside a combinator the table is made from the same positions once in the
forward and once in the backward, for all steps and layers; a table that is passed serves both. A short table on the CPU is kept for
the next calls with equal positions. arXiv:2104.09864.

With `sections` a token has a position on each of A axes (time, height, width), and each pair rotates by one of them:
positions are [A, T] or [A, *, T]. arXiv:2409.12191.

>>> import torch
>>> from funcops import RopeConfig, rope_bwd, rope_fwd, rope_table
>>> cfg, positions = RopeConfig(4), torch.arange(3)
>>> x = torch.ones(1, 3, 2, 4)
>>> y, residuals = rope_fwd(None, (x, positions), cfg)
>>> y[0, 0].equal(x[0, 0]), residuals.positions is positions
(True, True)
>>> dx, _ = rope_bwd(residuals, y, cfg)[1]
>>> torch.allclose(dx, x)
True
>>> table = rope_table(positions, cfg)
>>> table.shape, rope_fwd(None, (x, table), cfg)[0].equal(y)
(torch.Size([3, 1, 12]), True)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.backend.declare import watched
from funcops.engine.backend.once import once
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import FLOATS, check, check_rows, describe, fail, not_a_tuple, one_of, require, require_type
from funcops.library.kernels import rope as kernels
from funcops.library.ops.rope_scaling import SCALINGS, DynamicScaling, LongRopeScaling, Scaling, YarnScaling

__all__ = ["RopeConfig", "RopeResiduals", "rope", "rope_bwd", "rope_dgrad", "rope_fwd", "rope_init", "rope_table", "rope_wgrad"]

_transform = torch._C._functorch.maybe_current_level
_SHORT = 2**16  # numbers in a table that is kept: 256 KiB in float32
LAYOUTS = ("blocks", "interleaved", "axial")


@config
class RopeConfig(OpConfig):
    """`dim`: the head size D; `rotary_dim`: how many features of a head rotate, an even number (default: all); `scaling`:
    LinearScaling, DynamicScaling, YarnScaling, LongRopeScaling or Llama3Scaling.

    `sections`: how many pairs rotate by each axis, R/2 in all. `layout`: "blocks", an axis's pairs side by side (Qwen2-VL);
    "interleaved", pair i by axis i mod A while that axis has pairs left, then by the first (Qwen3-VL); "axial", blocks whose
    frequencies each start anew, theta^(-i / section) (vision encoders)."""

    dim: int = field(kw_only=False)
    theta: float = 10000.0
    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None
    sections: tuple[int, ...] | None = None
    layout: str = "blocks"
    reruns = True

    def __post_init__(self) -> None:
        require(isinstance(self.dim, int) and self.dim >= 1, "RopeConfig", "dim", "at least 1", self.dim)
        require(0 < self.theta < math.inf, "RopeConfig", "theta", "above 0, and finite", self.theta)
        least = 1e-30  # an angle, up to 1 / theta, must be finite in float32
        require(self.theta >= least, "RopeConfig", "theta", f"at least {least}", self.theta)
        r = self.rotary_dim if self.rotary_dim is not None else self.dim
        object.__setattr__(self, "rotating", r)
        object.__setattr__(self, "table_size", 3 * r)
        require(r % 2 == 0 and 0 < r <= self.dim, "RopeConfig", "rotary_dim", f"even, in 2..{self.dim}", r)
        require(self.layout in LAYOUTS, "RopeConfig", "layout", one_of(LAYOUTS, self.layout), repr(self.layout))
        self._check_sections(r // 2)
        self._check_scaling(r)

    rotating: ClassVar[int]  # R
    table_size: ClassVar[int]
    derives = True

    def _check_sections(self, pairs: int) -> None:
        sections = self.sections
        if sections is None:
            require(self.layout == "blocks", "RopeConfig", "layout", "'blocks' without sections", repr(self.layout))
            return
        right = isinstance(sections, tuple) and all(type(n) is int and n >= 1 for n in sections) and sum(sections) == pairs
        require(right, "RopeConfig", "sections", f"a tuple of counts of at least 1, {pairs} in all", sections)
        if self.layout == "interleaved":
            axes = len(sections)
            fits = all(axis + axes * (n - 1) < pairs for axis, n in enumerate(sections) if axis > 0)
            wanted = f"counts that fit at every {axes}th of {pairs} pairs (layout 'interleaved')"
            require(fits, "RopeConfig", "sections", wanted, sections)

    def _check_scaling(self, r: int) -> None:
        scaling = self.scaling
        if scaling is None:
            return
        require_type("RopeConfig", "scaling", scaling, *SCALINGS)
        require(self.layout != "axial", "RopeConfig", "scaling", "None for layout 'axial'", type(scaling).__name__)
        if isinstance(scaling, LongRopeScaling):
            count = len(scaling.short_factor)
            require(count == r // 2, "RopeConfig", "scaling.short_factor", f"of {r // 2} numbers, one a pair", count)
        if isinstance(scaling, YarnScaling):
            require(self.theta > 1, "RopeConfig", "theta", "above 1 for YarnScaling", self.theta)
        if isinstance(scaling, DynamicScaling):
            require(r > 2, "RopeConfig", "rotary_dim", "above 2 for DynamicScaling", r)

    @property
    def factor(self) -> float:
        """The factor of cos and sin."""
        return 1.0 if self.scaling is None else self.scaling.table_factor()

    def frequencies(self, dtype: torch.dtype, device: Any = None) -> Tensor:
        """The frequency of each pair, by which positions are multiplied: [R/2]."""
        if self.scaling is not None:
            return self.scaling.frequencies(self.theta, self.rotating, dtype, device)
        if self.layout == "axial":
            return torch.cat([kernels.frequencies(self.theta, 2 * n, dtype, device) for n in self.sections or ()])
        return kernels.frequencies(self.theta, self.rotating, dtype, device)

    def angles(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        """The angle of each pair at `positions` ([*, T], or [A, *, T] for A axes): [*, T, R/2]."""
        found = positions.to(dtype).unsqueeze(-1) * self.frequencies(dtype, positions.device)
        if self.sections is None:
            return found
        if self.layout == "interleaved":
            axes, pairs = len(self.sections), self.rotating // 2
            turn_by = [i % axes if i < axes * self.sections[i % axes] else 0 for i in range(pairs)]
            return torch.stack([found[axis, ..., i] for i, axis in enumerate(turn_by)], -1)
        of_axes = torch.split(found, list(self.sections), -1)
        return torch.cat([part[axis] for axis, part in enumerate(of_axes)], -1)

    @property
    def known_to(self) -> int | None:
        """The longest sequence for which the frequencies are known: beyond it they depend on the scaling's missing `length`. None
        without such a limit."""
        scaling: Any = self.scaling
        return scaling.original_context if getattr(scaling, "length", 0) is None else None

    def at_length(self, longest: int) -> RopeConfig:
        """The config for sequences of up to `longest` positions, if its scaling depends on that and lacks it."""
        if self.known_to is None:
            return self
        return dataclasses.replace(self, scaling=dataclasses.replace(self.scaling, length=longest))  # type: ignore[type-var]

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.dim, self.dim


class RopeResiduals(Residuals, static=("inputs", "shape", "dtype")):
    positions: Tensor = saved("[*, T], [A, *, T] or [*, T, 1, 3R]", alias="x.1", needed_by=DGRAD, of=("x.0",))


def rope_table(positions: Tensor, cfg: RopeConfig, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make the table that `rope` takes as x.1: cosines and signed sines at `positions` ([*, T], or [A, *, T] for A axes, int64),
    [*, T, 1, 3R].

    `dtype`: float32, or float64 for float64 x. Raises `TypeError` for another dtype or for positions that are not int64,
    `ValueError` for another number of axes than the config's.
    """
    require_type("rope_table", "cfg", cfg, RopeConfig)
    check("rope_table", "positions", positions, (...,), torch.int64)
    if cfg.sections is not None and (positions.dim() < 2 or positions.shape[0] != len(cfg.sections)):
        fail("rope_table", "positions", f"[{len(cfg.sections)}, ..., T], one for each of sections", list(positions.shape))
    if dtype not in (torch.float32, torch.float64):
        fail("rope_table", "dtype", "float32 or float64", describe(dtype), TypeError)
    return _table_at(positions, cfg, dtype)


def _table_at(positions: Tensor, cfg: RopeConfig, dtype: torch.dtype) -> Tensor:
    return kernels.rope_table(cfg.angles(positions, dtype), cfg.factor, cfg.interleaved)


@functools.lru_cache(16)
def _last_made(cfg: RopeConfig, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """The positions and the table of the last call, once there was one."""
    return []


def _table_again(positions: Tensor, cfg: RopeConfig, dtype: torch.dtype) -> Tensor:
    """The table at `positions`. The last short one on the CPU serves as long as the positions are equal, as they are from step to
    step, and in both halves of one: to compare them takes a tenth of the time of its fifteen operators. On a device the host would
    wait. What watches operators, such as a capture, must see it made, and what is made in a transform is wrapped by it."""
    short = type(positions) is Tensor and positions.is_cpu and positions.numel() * cfg.table_size <= _SHORT
    if not short or watched() or _transform() is not None:
        return _table_at(positions, cfg, dtype)
    kept = _last_made(cfg, dtype)
    for known, table in kept:
        if torch.equal(known, positions):
            return table
    with torch.inference_mode(False):  # calls outside of it will read them, too
        made = positions.clone(), _table_at(positions, cfg, dtype)  # a copy: who owns the positions may write to them
    kept[:] = [made]
    return made[1]


def check_rotation(where: str, t: Tensor, positions: Any, cfg: RopeConfig) -> None:
    """Check t: [*, T, N, D], and positions: [T] or [*, T], for A axes [A, T] or [A, *, T], int64; or their table, [T, 1, 3R] or
    [*, T, 1, 3R]."""
    shape = t.shape
    if len(shape) < 3:
        fail(where, "x.0", f"[..., T, N, {cfg.dim}]", list(shape))
    if isinstance(positions, Tensor) and positions.is_floating_point() and positions.dim() < 3:
        said = f"positions of int64, or their table (rope_table) [{shape[-3]}, 1, {cfg.table_size}]"
        fail(where, "x.1", said, describe(positions), TypeError)
    if isinstance(positions, Tensor) and positions.is_floating_point():
        rows = (shape[-3],) if positions.dim() <= 3 else shape[:-2]
        check(where, "x.1 (table)", positions, (*rows, 1, cfg.table_size), wide(t.dtype), t)
    else:
        axes = () if cfg.sections is None else (len(cfg.sections),)
        wanted = (shape[-3],) if getattr(positions, "ndim", 1) <= 1 + len(axes) else shape[:-2]
        check(where, "x.1 (positions)", positions, (*axes, *wanted), torch.int64, t)


def table_of(positions: Tensor, cfg: RopeConfig, dtype: torch.dtype) -> Tensor:
    """The table for an x of `dtype`: the given one, or one made from positions, once a call."""
    if positions.is_floating_point():
        return positions
    return once(_table_again, positions, cfg, wide(dtype))


def rope_kept(cfg: RopeConfig, needs: Needs, x: tuple[Tensor, Tensor]) -> RopeResiduals | None:
    return RopeResiduals.keep(cfg, needs, positions=x[1], inputs=Inputs.of(x), shape=x[0].shape, dtype=x[0].dtype)


@forward(RopeConfig)
def rope_fwd(
    params: None, x: tuple[Tensor, Tensor], cfg: RopeConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, RopeResiduals | None]:
    """x: `(x, positions or table)` -> y: [*, T, N, D]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    if not isinstance(x, tuple) or len(x) != 2:
        not_a_tuple("rope_fwd", x, "x", "positions")
    t, positions = x
    table = _quick_table(t, positions, cfg)
    if table is None:
        check_rows("rope_fwd", "x.0", t, cfg.dim)
        check_rotation("rope_fwd", t, positions, cfg)
        table = table_of(positions, cfg, t.dtype)
    return kernels.rope_apply(t, table, cfg.interleaved, False), rope_kept(cfg, needs, x)


def _quick_table(t: Any, positions: Any, cfg: RopeConfig) -> Tensor | None:
    """The table, if x is rows on the CPU and their table [T, 1, 3R] or positions [T], in which no check finds anything: the usual
    case, by fewer steps."""
    try:
        shape, dtype = t.shape, t.dtype
        if (
            len(shape) > 2
            and shape[-1] == cfg.dim
            and dtype in FLOATS
            and t.is_cpu
            and positions.is_cpu
            and not ((t.requires_grad or positions.requires_grad) and torch.is_grad_enabled())
        ):
            if positions.dtype is wide(dtype):
                return positions if positions.shape == (shape[-3], 1, cfg.table_size) else None
            if positions.dtype is torch.int64 and positions.shape == shape[-3:-2] and cfg.sections is None:
                return once(_table_again, positions, cfg, wide(dtype))
    except AttributeError:
        pass
    return None


@dgrad_of(RopeResiduals)
def rope_dgrad(residuals: RopeResiduals, dy: Tensor, cfg: RopeConfig) -> tuple[tuple[Tensor, None], None]:
    """`(dx, None)`: dy rotated back, times the table's factor. No params, so pending is None."""
    check("rope_dgrad", "dy", dy, residuals.shape, residuals.dtype, residuals.positions)
    if residuals.needs.x is not True and not residuals.needs.input(0):
        return residuals.nothing(), None
    table = table_of(residuals.positions, cfg, dy.dtype)
    return residuals.inputs.make((kernels.rope_apply(dy, table, cfg.interleaved, True), None)), None


def by_length(cfg: RopeConfig) -> str:
    """Whether the longest sequence decides how every sequence is rotated: `Op.mixes`."""
    return "" if cfg.known_to is None else "angles that depend on the longest sequence (give the config its length)"


rope = make_op("rope", RopeConfig, fwd=rope_fwd, dgrad=rope_dgrad, mixes=by_length)
rope_init, rope_bwd, rope_wgrad = no_params(rope, rope_dgrad)
