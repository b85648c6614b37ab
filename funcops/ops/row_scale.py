"""Multiply each row by a number, which may be a gate.

    y = x g        dx = dy g        dg = sum over H of dy x

With `sigmoid` g is sigmoid(gate), and d gate = dg g (1 - g): the gate of a shared expert (Qwen2-MoE).

x is `(x, gate)`. x, y, dy, dx: [*, H]; gate, d gate: [*, 1], as a linear layer to one feature gives it; one float dtype.
Kept: x and gate, aliases: no bytes of their own.

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

from torch import Tensor

from funcops.contract.configs import OpConfig
from funcops.contract.needs import Needs
from funcops.contract.op import config, dgrad_of, forward, make_op, no_params, recompute_of, same_width
from funcops.contract.schema import DGRAD, RECOMPUTE, Inputs, Residuals, saved
from funcops.errors import FLOATS, check, fail
from funcops.kernels import row_scale as kernels
from funcops.ops._tuples import require_tuple

__all__ = ["RowScaleConfig", "RowScaleResiduals"]
__all__ += ["row_scale", "row_scale_bwd", "row_scale_dgrad", "row_scale_fwd", "row_scale_init", "row_scale_wgrad"]


@config
class RowScaleConfig(OpConfig):
    """`sigmoid`: rows are multiplied by the sigmoid of the gate."""

    widths = same_width
    featurewise = True

    sigmoid: bool = field(default=False, kw_only=False)


class RowScaleResiduals(Residuals, static=("inputs", "shape", "dtype")):
    x: Tensor = saved("[*, H]", alias="x.0", needed_by=DGRAD | RECOMPUTE, of=("x.1",))
    gate: Tensor = saved("[*, 1]", alias="x.1", needed_by=DGRAD | RECOMPUTE)  # dgate reads it for a sigmoid's derivative


@forward(RowScaleConfig)
def row_scale_fwd(
    params: None, x: tuple[Tensor, Tensor], cfg: RowScaleConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, RowScaleResiduals | None]:
    """x: `(x, gate)` -> y: [*, H]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    t, gate = require_tuple("row_scale_fwd", x, "x", "gate")
    check("row_scale_fwd", "x.0 (x)", t, (...,), FLOATS)
    if t.dim() < 1:
        fail("row_scale_fwd", "x.0 (x)", "[..., H]", list(t.shape))
    check("row_scale_fwd", "x.1 (gate)", gate, (*t.shape[:-1], 1), t.dtype, t)
    kept = RowScaleResiduals.keep(cfg, needs, x=t, gate=gate, inputs=Inputs.of(x), shape=t.shape, dtype=t.dtype)
    return kernels.row_scale_fwd(t, gate, cfg.sigmoid), kept


@recompute_of(RowScaleResiduals)
def row_scale_recompute(residuals: RowScaleResiduals, cfg: RowScaleConfig) -> Tensor:
    """Recompute y, bit for bit."""
    return kernels.row_scale_fwd(residuals.x, residuals.gate, cfg.sigmoid)


@dgrad_of(RowScaleResiduals)
def row_scale_dgrad(residuals: RowScaleResiduals, dy: Tensor, cfg: RowScaleConfig) -> tuple[tuple[Tensor, Tensor], None]:
    """`(dx, dgate)`. No params, so pending is None."""
    x, gate, needs = residuals.x, residuals.gate, residuals.needs
    check("row_scale_dgrad", "dy", dy, residuals.shape, residuals.dtype, gate)
    if not needs.x:
        return residuals.nothing(), None
    return residuals.inputs.make(kernels.row_scale_bwd(dy, x, gate, cfg.sigmoid, needs.input(0), needs.input(1))), None


row_scale = make_op(
    "row_scale", RowScaleConfig, fwd=row_scale_fwd, dgrad=row_scale_dgrad, recomputable="elementwise", recompute=row_scale_recompute
)
row_scale_init, row_scale_bwd, row_scale_wgrad = no_params(row_scale, row_scale_dgrad)
