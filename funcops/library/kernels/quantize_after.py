"""Ops whose y is quantised before it is written: they return codes and scales of y in tiles of 1 x `cols`, not y.

y is rounded to x's dtype first, so that the codes equal the op followed by `quantize_row`, bit for bit.
x: [*, D], for a GLU [*, 2H]; codes uint8, scales [R, D / cols] for R rows; `element`, `cols` and `scales` as in `quantize`.
"""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.engine.backend import kernel
from funcops.library.kernels import activation, glu, norm
from funcops.library.kernels.quantize import quantize_row


@kernel()
def rms_norm_quantize(
    x: Tensor, w: Tensor, eps: float, zero_centered_gamma: bool, element: str, cols: int, scales: str, epsilon: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales of y, and rstd [*, 1]."""
    y, rstd = norm.rms_norm_fwd(x, w, eps, zero_centered_gamma)
    return *quantize_row(y, element, 1, cols, scales, None, None, epsilon), rstd


@kernel()
def layer_norm_quantize(
    x: Tensor,
    w: Tensor,
    b: Optional[Tensor],
    eps: float,
    zero_centered_gamma: bool,
    element: str,
    cols: int,
    scales: str,
    epsilon: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes and scales of y, mean and rstd [*, 1]."""
    y, mean, rstd = norm.layer_norm_fwd(x, w, b, eps, zero_centered_gamma)
    return *quantize_row(y, element, 1, cols, scales, None, None, epsilon), mean, rstd


@kernel()
def glu_quantize(
    x: Tensor, kind: str, first: bool, element: str, cols: int, scales: str, epsilon: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Codes and scales of y = f(gate) * linear, [*, H]."""
    return quantize_row(glu.glu_fwd(x, None, kind, first), element, 1, cols, scales, None, None, epsilon)  # type: ignore[no-any-return]


@kernel()
def activation_quantize(x: Tensor, kind: str, element: str, cols: int, scales: str, epsilon: float = 0.0) -> tuple[Tensor, Tensor]:
    """Codes and scales of y = f(x)."""
    return quantize_row(activation.activation_fwd(x, kind), element, 1, cols, scales, None, None, epsilon)  # type: ignore[no-any-return]
