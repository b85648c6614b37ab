"""Outputs of a node that a caller may write to in place, because they are not views.

Autograd refuses a write to a view that a node made. Many kernels reshape their result, so that their output is a view of a tensor
that no one else holds. The node returns that memory as a new tensor, which is not a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def owned(outputs: list[Any], kept: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Replace each view among the outputs by a new tensor on the same memory, and return the tensors that the node keeps. A kept
    tensor that shares memory with an output also counts that output's writes, so that autograd's guard sees them. Views of `given`
    tensors, as a reshape returns, stay views: a write to one is a write to the other, and autograd reports it."""
    kept = list(kept)
    bases = [_base(t) for t in given if isinstance(t, Tensor)]
    for i, y in enumerate(outputs):
        base = y._base
        if base is None or any([base is b for b in bases]):
            continue
        outputs[i] = own = y.data
        for j, t in enumerate(kept):
            if t is y:
                kept[j] = own
            elif isinstance(t, Tensor) and _base(t) is base and _overlaps(t, y):
                # of a detached one: it shares the count of writes, but a view of an output that requires grad has no gradient edge
                kept[j] = own.detach().as_strided(t.shape, t.stride(), t.storage_offset())
    return kept


def _base(t: Tensor) -> Tensor:
    return t if t._base is None else t._base


def _overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether the memory ranges from the first to the last element overlap."""
    (a0, a1), (b0, b1) = _range(a), _range(b)
    return a0 < b1 and b0 < a1


def _range(t: Tensor) -> tuple[Any, Any]:
    if t.numel() == 0:
        return 0, 0
    first = t.storage_offset()
    return first, first + sum([(n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)]) + 1
