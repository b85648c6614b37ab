"""Embedding lookup. ids: [*], w: [V, D], y, dy: [*, D]."""

from __future__ import annotations

import torch
from torch import Tensor

from funcops.engine.backend import kernel, wide

_backward = torch.ops.aten.embedding_dense_backward.default


@kernel(library=True, rows="each")
def embedding_fwd(w: Tensor, ids: Tensor) -> Tensor:
    """y = w[ids]. An id outside [0, V) raises IndexError on the CPU."""
    return torch.embedding(w, ids)


@kernel(rows="each")
def embedding_wgrad(dy: Tensor, ids: Tensor, vocab: int, padding_idx: int) -> Tensor:
    """dw [V, D]: the sum of the rows of dy by id, in a fixed order, in the wide dtype. Rows whose id is
    padding_idx (a row of w, or -1 for none) are left out."""
    if dy.is_cpu and dy.dtype is not wide(dy.dtype):  # torch would round after every row
        return _backward(dy.to(wide(dy.dtype)), ids, vocab, padding_idx, False).to(dy.dtype)
    return _backward(dy, ids, vocab, padding_idx, False)


@embedding_wgrad.plain
def plain_embedding_wgrad(dy: Tensor, ids: Tensor, vocab: int, padding_idx: int) -> Tensor:
    """dw = onehot^T dy, as y = onehot w."""
    onehot = ids.reshape(-1, 1) == torch.arange(vocab, device=ids.device)
    onehot &= ids.reshape(-1, 1) != padding_idx
    return onehot.to(dy.dtype).T @ dy.reshape(-1, dy.shape[-1])


@kernel(mutates=("dw",), rows="each")
def embedding_wgrad_into(dy: Tensor, ids: Tensor, padding_idx: int, dw: Tensor) -> None:
    """Add the unrounded sum of `embedding_wgrad` to dw [V, D], contiguous and in the wide dtype. Other rows are left alone."""
    dw += _backward(dy.to(dw.dtype), ids, dw.shape[0], padding_idx, False)


@embedding_wgrad_into.plain
def plain_embedding_wgrad_into(dy: Tensor, ids: Tensor, padding_idx: int, dw: Tensor) -> Tensor:
    return dw + plain_embedding_wgrad(dy, ids, dw.shape[0], padding_idx)
