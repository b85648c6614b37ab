"""Quantisation of a tensor to low precision, and back.

    quantize      y = q(x), codes and scales of a format          dx = dy
    dequantize    y = codes times scales, rounded to x's dtype    dx = dy

x of `quantize` and y of `dequantize`: [*, K] of a float dtype; the other side is a `QTensor` of that shape, which counts as one
leaf: its gradient is dense, [*, K] in the dtype of x. Gradients are straight-through: rounding counts as the identity, even for an
element that saturates. Kept: nothing.

>>> import torch
>>> from funcops import QuantizeConfig, dequantize_fwd, quantize_bwd, quantize_fwd
>>> from funcops.low_precision import Format
>>> cfg = QuantizeConfig(Format("e4m3"))
>>> y, residuals = quantize_fwd(None, torch.tensor([[0.0, 1.0, 448.0]]), cfg)
>>> y.codes.dtype
torch.uint8
>>> quantize_bwd(residuals, torch.ones(1, 3), cfg)[1]
tensor([[1., 1., 1.]])
>>> dequantize_fwd(None, y, cfg)[0]
tensor([[  0.,   1., 448.]])
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.schema import NO_GRADIENT, Residuals
from funcops.engine.errors import check, require_type
from funcops.library.formats import Format, QTensor, check_quantized, quantize_tensor

__all__ = ["QuantizeConfig", "QuantizeResiduals"]
__all__ += ["dequantize", "dequantize_bwd", "dequantize_dgrad", "dequantize_fwd", "dequantize_init", "dequantize_wgrad"]
__all__ += ["quantize", "quantize_bwd", "quantize_dgrad", "quantize_fwd", "quantize_init", "quantize_wgrad"]


@config
class QuantizeConfig(OpConfig):
    """`format`: a `Format`, of y for `quantize` and of x for `dequantize`; by rows."""

    widths = same_width

    format: Format = field(kw_only=False)

    def __post_init__(self) -> None:
        require_type("QuantizeConfig", "format", self.format, Format)


class QuantizeResiduals(Residuals, static=("shape", "dtype")):
    """No tensor, only the shape and dtype of dy."""


@forward(QuantizeConfig)
def quantize_fwd(
    params: None, x: Tensor, cfg: QuantizeConfig, *, needs: Needs = Needs.ALL
) -> tuple[QTensor, QuantizeResiduals | None]:
    """x: [*, K] -> y: a `QTensor` of it. Raises `ValueError` or `TypeError` for a wrong shape or dtype."""
    y = quantize_tensor(x, cfg.format, where="quantize_fwd")
    return y, QuantizeResiduals.keep(cfg, needs, shape=x.shape, dtype=x.dtype)


@dgrad_of(QuantizeResiduals)
def quantize_dgrad(residuals: QuantizeResiduals, dy: Any, cfg: QuantizeConfig) -> tuple[Tensor, None]:
    """`dx = dy`: [*, K]. No params, so pending is None."""
    return _straight("quantize_dgrad", residuals, dy), None


@forward(QuantizeConfig)
def dequantize_fwd(
    params: None, x: QTensor, cfg: QuantizeConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, QuantizeResiduals | None]:
    """x: a `QTensor` by rows -> y: [*, K]. Raises `ValueError` or `TypeError` for another format or codes that do not fit it."""
    require_type("dequantize_fwd", "x", x, QTensor)
    check_quantized("dequantize_fwd", "x", x, cfg.format, "row", x.shape)
    return x.dequantize(), QuantizeResiduals.keep(cfg, needs, shape=x.shape, dtype=x.dtype)


@dgrad_of(QuantizeResiduals)
def dequantize_dgrad(residuals: QuantizeResiduals, dy: Any, cfg: QuantizeConfig) -> tuple[Tensor, None]:
    """`dx = dy`: dense, [*, K]. No params, so pending is None."""
    return _straight("dequantize_dgrad", residuals, dy), None


def _straight(where: str, residuals: QuantizeResiduals, dy: Any) -> Tensor:
    check(where, "dy", dy, residuals.shape, residuals.dtype)
    return dy if residuals.needs.x else NO_GRADIENT


quantize = make_op("quantize", QuantizeConfig, fwd=quantize_fwd, dgrad=quantize_dgrad)
quantize_init, quantize_bwd, quantize_wgrad = no_params(quantize, quantize_dgrad)
dequantize = make_op("dequantize", QuantizeConfig, fwd=dequantize_fwd, dgrad=dequantize_dgrad)
dequantize_init, dequantize_bwd, dequantize_wgrad = no_params(dequantize, dequantize_dgrad)
