"""Two or three linear layers of one input, as one product each way. x, dx: [*, I]; w: [O_i, I]; b: [O_i]; y, dy: [*, O_i].

Every layer has its own tensors: nothing is joined or split in memory. w2 is None for two layers.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import Parameter
from torch.nn.functional import linear

from funcops.engine.backend import kernel, tracing


@kernel(product=True)
def sibling_linear_fwd(
    x: Tensor, w0: Tensor, w1: Tensor, w2: Optional[Tensor], b0: Optional[Tensor], b1: Optional[Tensor], b2: Optional[Tensor]
) -> tuple[Tensor, Tensor, Optional[Tensor]]:
    """y_i = x w_i^T + b_i."""
    return linear(x, w0, b0), linear(x, w1, b1), None if w2 is None else linear(x, w2, b2)


@kernel(product=True)
def sibling_linear_dgrad(dy0: Tensor, dy1: Tensor, dy2: Optional[Tensor], w0: Tensor, w1: Tensor, w2: Optional[Tensor]) -> Tensor:
    """dx = sum over i of dy_i w_i, each product added to the one before."""
    dx = torch.mm(dy0.reshape(-1, w0.shape[0]), w0)
    dx.addmm_(dy1.reshape(-1, w1.shape[0]), w1)
    if dy2 is not None and w2 is not None:
        dx.addmm_(dy2.reshape(-1, w2.shape[0]), w2)
    return dx.view(*dy0.shape[:-1], w0.shape[1])


@kernel(product=True)
def joined_linear_dgrad(dy: Tensor, w0: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """dx = dy [w0; w1; w2], where dy is [dy_0, dy_1, dy_2] side by side. For many rows the weights are joined, for one product:
    the sums of three would be written, read and written again. Weights that lie one below the other are not copied for it."""
    outer, (rows, inner) = [w.shape[0] for w in (w0, w1, w2)], (dy.numel() // dy.shape[-1], w0.shape[1])
    if sum(outer) < 2 * rows:
        return torch.matmul(dy, joined(w0, w1, w2))
    parts = dy.reshape(-1, sum(outer)).split(outer, -1)
    dx = torch.mm(parts[0], w0).addmm_(parts[1], w1).addmm_(parts[2], w2)
    return dx.view(*dy.shape[:-1], inner)


def joined(*weights: Tensor) -> Tensor:
    """[w_0; w_1; ...]: a view if the weights lie one below the other in one memory, as `pack_qkv` lays them; else a copy."""
    view = stacked(*weights)
    return torch.cat(weights) if view is None else view


def stacked(*weights: Tensor) -> Optional[Tensor]:
    """A view of weights (or biases) that lie one below the other in one memory; else None. A tracer and a transform know no memory,
    and autograd would take a view for one of the first weight alone."""
    first = weights[0]
    if tracing() or weights[1].storage_offset() == 0:  # most weights lie apart, each at the start of its memory
        return None
    if not all([type(w) in (Tensor, Parameter) and not is_functorch_wrapped_tensor(w) for w in weights]):
        return None
    if torch.is_grad_enabled() and any([w.requires_grad for w in weights]):
        return None
    memory, place = first.untyped_storage()._cdata, first.storage_offset()
    for w in weights:
        below = w.storage_offset() == place and w.untyped_storage()._cdata == memory and w.dtype is first.dtype
        if not (below and w.is_contiguous() and w.shape[1:] == first.shape[1:]):
            return None
        place += w.numel()
    rows = sum([w.shape[0] for w in weights])
    return first.as_strided((rows, *first.shape[1:]), (first.shape[-1], 1)[-first.dim() :])  # a weight of one row: any stride
