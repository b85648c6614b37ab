"""Multiply each row by a number, which may be a gate.

    y = x g        dx = dy g        dg = sum over H of dy x

With `sigmoid` g is sigmoid(gate), and d gate = dg g (1 - g): the gate of a shared expert (Qwen2-MoE). With `gathered` x is
`(x, weights, order)`, and the number of row n is weights.flat[order[n]], for rows sorted by expert (`permute`). With `constant`
the numbers do not depend on params and get no gradient, and may be one for each position, [T, 1] for an x of [*, T, H]: the
temperature of attention by position (Llama 4).

x is `(x, gate)`. x, y, dy, dx: [*, H] of one float dtype; gate, d gate: [*, 1], as a linear layer to one feature gives it, of x's
dtype or the wide one (float32; float64 for float64). Gathered: x [N, H], weights and d weights of N numbers, order [N], a
permutation, int32. Kept: x, unless the numbers are constant, gate and order, aliases: no bytes of their own.

>>> import torch
>>> from funcops import RowScaleConfig, row_scale_bwd, row_scale_fwd
>>> y, residuals = row_scale_fwd(None, (torch.ones(2, 3), torch.tensor([[2.0], [5.0]])), RowScaleConfig())
>>> y
tensor([[2., 2., 2.],
        [5., 5., 5.]])
>>> dx, dgate = row_scale_bwd(residuals, torch.ones(2, 3), RowScaleConfig())[1]
>>> dx[:, 0], dgate
(tensor([2., 5.]), tensor([[3.],
        [3.]]))
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, recompute_of, same_width
from funcops.engine.contract.schema import DGRAD, RECOMPUTE, Inputs, Residuals, saved
from funcops.engine.errors import FLOATS, check, fail
from funcops.library.kernels import row_scale as kernels
from funcops.library.kernels.routing import of_choices, of_rows
from funcops.library.ops._tuples import require_tuple

__all__ = ["RowScaleConfig", "RowScaleResiduals"]
__all__ += ["row_scale", "row_scale_bwd", "row_scale_dgrad", "row_scale_fwd", "row_scale_init", "row_scale_wgrad"]


@config
class RowScaleConfig(OpConfig):
    """`sigmoid`: rows are multiplied by the sigmoid of the gate; `gathered`: the numbers are gathered by an index; `constant`: they
    have no gradient."""

    widths = same_width
    featurewise = True

    sigmoid: bool = field(default=False, kw_only=False)
    gathered: bool = False
    constant: bool = False


class RowScaleResiduals(Residuals, static=("inputs", "shape", "dtype")):
    x: Tensor = saved("[*, H]", alias="x.0", needed_by=DGRAD | RECOMPUTE, of=("x.1",))
    gate: Tensor = saved("[*, 1], or [N]", alias="x.1", needed_by=DGRAD | RECOMPUTE)  # dgate reads it for a sigmoid's derivative
    order: Any = saved("[N]", alias="x.2", needed_by=DGRAD | RECOMPUTE)


@forward(RowScaleConfig)
def row_scale_fwd(
    params: None, x: tuple[Tensor, ...], cfg: RowScaleConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, RowScaleResiduals | None]:
    """x: `(x, gate)`, or `(x, weights, order)` -> y: [*, H]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or
    device."""
    t, gate, *rest = require_tuple("row_scale_fwd", x, "x", *(("weights", "order") if cfg.gathered else ("gate",)))
    check("row_scale_fwd", "x.0 (x)", t, (...,), FLOATS)
    if t.dim() < 1:
        fail("row_scale_fwd", "x.0 (x)", "[..., H]", list(t.shape))
    dtypes, order = tuple({t.dtype: 0, wide(t.dtype): 0}), None
    if cfg.gathered:
        order = rest[0]
        check("row_scale_fwd", "x.1 (weights)", gate, (...,), dtypes, t)
        if gate.numel() != t.shape[:-1].numel():
            fail("row_scale_fwd", "x.1 (weights)", f"{t.shape[:-1].numel()} numbers, one per row of x", list(gate.shape))
        check("row_scale_fwd", "x.2 (order)", order, t.shape[:-1], torch.int32, t)
    else:
        by_position = cfg.constant and getattr(gate, "ndim", 0) == 2
        check("row_scale_fwd", "x.1 (gate)", gate, (*(t.shape[-2:-1] if by_position else t.shape[:-1]), 1), dtypes, t)
    kept = RowScaleResiduals.keep(
        cfg,
        needs,
        x=None if cfg.constant and not needs.recompute else t,
        gate=gate,
        order=order,
        inputs=Inputs.of(x),
        shape=t.shape,
        dtype=t.dtype,
    )
    return kernels.row_scale_fwd(t, _by_row(gate, order, t.shape), cfg.sigmoid), kept


def _by_row(gate: Tensor, order: Tensor | None, shape: torch.Size) -> Tensor:
    """The number of each row: [*, 1]."""
    if order is not None:
        return of_rows(gate, order).unsqueeze(-1)
    return gate if gate.dim() == len(shape) else gate.expand(*shape[:-1], 1)


@recompute_of(RowScaleResiduals)
def row_scale_recompute(residuals: RowScaleResiduals, cfg: RowScaleConfig) -> Tensor:
    """Recompute y, bit for bit."""
    return kernels.row_scale_fwd(residuals.x, _by_row(residuals.gate, residuals.order, residuals.shape), cfg.sigmoid)


@dgrad_of(RowScaleResiduals)
def row_scale_dgrad(residuals: RowScaleResiduals, dy: Tensor, cfg: RowScaleConfig) -> tuple[tuple[Tensor | None, ...], None]:
    """`(dx, dgate)` or `(dx, d weights, None)`. No params, so pending is None."""
    x, gate, order, needs = residuals.x, residuals.gate, residuals.order, residuals.needs
    check("row_scale_dgrad", "dy", dy, residuals.shape, residuals.dtype, gate)
    if not needs.x:
        return residuals.nothing(), None
    wanted = needs.input(0), needs.input(1) and not cfg.constant
    dx, dgate = kernels.row_scale_bwd(dy, x, _by_row(gate, order, residuals.shape), cfg.sigmoid, *wanted)
    if order is None:
        return residuals.inputs.make((dx, dgate)), None
    return residuals.inputs.make((dx, None if dgate is None else of_choices(dgate, order, gate.shape), None)), None


row_scale = make_op(
    "row_scale",
    RowScaleConfig,
    fwd=row_scale_fwd,
    dgrad=row_scale_dgrad,
    recomputable="elementwise",
    recompute=row_scale_recompute,
    mixes="",
)
row_scale_init, row_scale_bwd, row_scale_wgrad = no_params(row_scale, row_scale_dgrad)
