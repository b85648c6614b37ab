"""Matrix products of a linear layer, fused with the steps around them. Shapes: x, dx [*, I], w [O, I], b [O], y, dy [*, O].

`kind` is an activation's name, or "" for none. Products and epilogues are in float32 and rounded once.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide
from funcops.library.kernels.activation import ACTIVATIONS


@kernel()
def fused_linear_fwd(
    x: Tensor, w: Tensor, b: Optional[Tensor], residual: Optional[Tensor], kind: str, scale: float, keep: bool
) -> tuple[Tensor, Optional[Tensor]]:
    """y = f(z) + residual with z = scale x w^T + b. Returns y, and z if `keep`."""
    z = torch.nn.functional.linear(x, w) * scale
    z = z if b is None else z + b
    y = ACTIVATIONS[kind].forward(z) if kind else z
    y = y if residual is None else y + residual
    return y.clone() if y is z and keep else y, z if keep else None


@kernel()
def fused_linear_dgrad(dy: Tensor, w: Tensor, z: Optional[Tensor], kind: str, scale: float) -> Tensor:
    """dx = scale dy w; with `kind`, times f'(z): then x was f(z), and the result is the gradient of z. z: [*, I]."""
    dx = torch.matmul(dy, w) * scale
    if not kind or z is None:
        return dx
    f = ACTIVATIONS[kind]
    return f.backward(dx, z, f.forward(z) if f.reads_y else None)


@kernel()
def fused_linear_dgrad_add(dy: Tensor, w: Tensor, scale: float, add: Tensor) -> Tensor:
    """dx = scale dy w + add. add: [*, I]."""
    return torch.matmul(dy, w) * scale + add


@kernel(mutates=("into",), rows="pinned")
def fused_linear_dgrad_into(dy: Tensor, w: Tensor, scale: float, into: Tensor) -> None:
    """into += scale dy w. into: [*, I], contiguous."""
    rows, out = dy.reshape(-1, dy.shape[-1]), into.view(-1, into.shape[-1])
    if into.dtype is dy.dtype:
        out.addmm_(rows, w, alpha=scale)
    else:
        out.add_(torch.mm(rows, w), alpha=scale)


@kernel(rows="each")
def fused_linear_wgrad(dy: Tensor, x: Tensor, scale: float, bias: bool) -> tuple[Tensor, Optional[Tensor]]:
    """dw = scale dy^T x, and if `bias` db = the sum of dy, over all rows, in dy's dtype."""
    rows = dy.reshape(-1, dy.shape[-1])
    dw = torch.mm(rows.mT, x.reshape(-1, x.shape[-1])) * scale
    return dw, rows.sum(0) if bias else None


@kernel(mutates=("dw", "db"), rows="each")
def fused_linear_wgrad_into(dy: Tensor, x: Tensor, scale: float, dw: Tensor, db: Optional[Tensor]) -> None:
    """dw += scale dy^T x, db += the sum of dy. dw [O, I], db [O]: contiguous, in the wide dtype."""
    rows, inner = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    if dw.dtype is dy.dtype:
        dw.addmm_(rows.mT, inner, alpha=scale)
    else:
        dw.add_(torch.mm(rows.mT, inner), alpha=scale)
    if db is not None:
        db += rows.sum(0, dtype=wide(dy.dtype))
