"""Softmax over the last dimension. x, y, dy, dx: [*, D]. Computed in the wide dtype and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.backend import kernel


@kernel(rows="each")
def softmax_fwd(x: Tensor) -> Tensor:
    """y = exp(x) / sum(exp(x))."""
    return torch.softmax(x, -1).contiguous()


@softmax_fwd.plain
def plain_softmax_fwd(x: Tensor) -> Tensor:
    return x.exp() / x.exp().sum(-1, keepdim=True)


@kernel(rows="each")
def softmax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    """dx = y (dy - sum(dy y))."""
    return torch.ops.aten._softmax_backward_data.default(dy, y, -1, y.dtype).contiguous()


@softmax_bwd.plain
def plain_softmax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    through_numerator = dy * y
    through_sum = -y * (dy * y).sum(-1, keepdim=True)
    return through_numerator + through_sum
