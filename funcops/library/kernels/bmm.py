"""Products of batches of matrices. a, da: [*, M, K]; b, db: [*, K, N] or, transposed, [*, N, K]; y, dy: [*, M, N]."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.backend import kernel


@kernel(library=True)
def bmm_fwd(a: Tensor, b: Tensor, transposed: bool) -> Tensor:
    """y = a b, or a b^T."""
    return torch.matmul(a, b.mT if transposed else b).contiguous()


@kernel(library=True)
def bmm_bwd_left(dy: Tensor, b: Tensor, transposed: bool) -> Tensor:
    """da = dy b^T, or dy b."""
    return torch.matmul(dy, b if transposed else b.mT).contiguous()


@kernel(library=True)
def bmm_bwd_right(dy: Tensor, a: Tensor, transposed: bool) -> Tensor:
    """db = a^T dy, or dy^T a."""
    return (torch.matmul(dy.mT, a) if transposed else torch.matmul(a.mT, dy)).contiguous()
