"""Keys of latent attention: a part that all heads share beside their own, and back. Heads in the last dimension but one."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.backend import kernel


@kernel(library=True)
def join_heads(shared: Tensor, own: Tensor) -> Tensor:
    """[*, N, A + B] of shared [*, 1, A] and own [*, N, B]."""
    return torch.cat((shared.expand(*own.shape[:-1], shared.shape[-1]), own), -1)


@kernel(library=True)
def join_values(own: Tensor, values: Tensor) -> Tensor:
    """[*, N, A + B] of own [*, N, A] and values [*, N, B]."""
    return torch.cat((own, values), -1)


@kernel(library=True)
def sum_heads(x: Tensor) -> Tensor:
    """[*, 1, A] of x [*, N, A]: the sum over heads, as torch rounds it."""
    return x.sum(-2, keepdim=True)
