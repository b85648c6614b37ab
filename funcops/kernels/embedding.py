"""Embedding lookup. ids: [*], w: [V, D], y, dy: [*, D]."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.backend import kernel


@kernel(library=True)
def embedding_fwd(w: Tensor, ids: Tensor) -> Tensor:
    """y = w[ids]. An id outside [0, V) raises IndexError on the CPU."""
    return torch.embedding(w, ids)


@kernel()
def embedding_wgrad(dy: Tensor, ids: Tensor, vocab: int, padding_idx: int) -> Tensor:
    """dw [V, D]: the sum of the rows of dy by id, in a fixed order; padding_idx -1 skips none."""
    return torch.ops.aten.embedding_dense_backward.default(dy, ids, vocab, padding_idx, False)
