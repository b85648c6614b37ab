"""Matrix products of a linear layer. Shapes: x [*, I], w [O, I], b [O], y and dy [*, O]."""

from __future__ import annotations

from typing import Optional

from torch import Tensor, matmul, mm, reshape
from torch import sum as torch_sum
from torch.nn.functional import linear as torch_linear

from funcops.engine.backend import kernel


@kernel(product=True, rows="pinned")
def linear_fwd(x: Tensor, w: Tensor, b: Optional[Tensor]) -> Tensor:
    """y = x w^T + b."""
    return torch_linear(x, w, b)


@kernel(product=True, rows="pinned")
def linear_dgrad(dy: Tensor, w: Tensor) -> Tensor:
    """dx = dy w."""
    return matmul(dy, w) if w.shape[1] != 1 else _one_feature(dy, w)


def _one_feature(dy: Tensor, w: Tensor) -> Tensor:
    """dy w for a w of one column, as a product with a vector: torch.mm of one row and one column is one running sum on the CPU,
    which is several roundings off; a dot product is partial sums, and less than one rounding off."""
    return matmul(dy, w.squeeze(-1)).unsqueeze(-1)


@kernel(product=True, rows="each")
def linear_wgrad(dy: Tensor, x: Optional[Tensor], bias: bool) -> tuple[Optional[Tensor], Optional[Tensor]]:
    """dw = dy^T x (None without x) and db = sum of dy (None unless `bias`), both over all rows, in dy's dtype."""
    dy = reshape(dy, (-1, dy.shape[-1]))
    dw = None if x is None else mm(dy.mT, reshape(x, (-1, x.shape[-1])))
    return dw, torch_sum(dy, 0) if bias else None


@kernel(product=True, rows="pinned")
def linear_bwd(dy: Tensor, x: Optional[Tensor], w: Tensor, bias: bool) -> tuple[Tensor, Optional[Tensor], Optional[Tensor]]:
    """dx, dw and db: `linear_dgrad` and `linear_wgrad` in one call."""
    o, i = w.shape
    if dy.dim() == 2 and i != 1:  # rows already: nothing to reshape
        return mm(dy, w), None if x is None else mm(dy.mT, x), torch_sum(dy, 0) if bias else None
    rows = reshape(dy, (-1, o))
    dw = None if x is None else mm(rows.mT, reshape(x, (-1, i)))
    return matmul(dy, w) if i != 1 else _one_feature(dy, w), dw, torch_sum(rows, 0) if bias else None
