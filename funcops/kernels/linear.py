"""Matrix products of a linear layer. Shapes: x [*, I], w [O, I], b [O], y and dy [*, O]."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from funcops.backend import kernel


@kernel()
def linear_fwd(x: Tensor, w: Tensor, b: Optional[Tensor]) -> Tensor:
    """y = x w^T + b."""
    return torch_linear(x, w, b)


@kernel()
def linear_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    """dx = dy w."""
    return torch.matmul(dy, w)


@kernel()
def linear_wgrad(dy: Tensor, x: Optional[Tensor], bias: bool) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """dw = dy^T x (None without x) and db = sum of dy (None unless `bias`), both over all rows, in dy's dtype."""
    dy = dy.reshape(-1, dy.shape[-1])
    dw = None if x is None else torch.mm(dy.t(), x.reshape(-1, x.shape[-1]))
    return dw, dy.sum(0) if bias else None
