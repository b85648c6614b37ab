"""Keys of latent attention: a part that all heads share is joined with each head's own, and back. Heads are dim -2."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.backend import kernel


@kernel(library=True)
def join_heads(shared: Tensor, own: Tensor) -> Tensor:
    """Join shared [*, 1, A] and own [*, N, B] to [*, N, A + B]."""
    return torch.cat((shared.expand(*own.shape[:-1], shared.shape[-1]), own), -1)


@kernel(library=True)
def join_values(own: Tensor, values: Tensor) -> Tensor:
    """Join own [*, N, A] and values [*, N, B] to [*, N, A + B]."""
    return torch.cat((own, values), -1)


@kernel(library=True)
def sum_heads(x: Tensor) -> Tensor:
    """Sum x [*, N, A] over heads to [*, 1, A], as torch rounds it."""
    return x.sum(-2, keepdim=True)
