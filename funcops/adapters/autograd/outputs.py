"""What a node gives to autograd, which a caller may write to in place: outputs that are no views.

Autograd refuses a write to a view that a node made. Many kernels reshape what they computed, so that their output is a view of a
tensor that nobody else has. The node gives its memory as a tensor of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def owned(outputs: list[Any], kept: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """What a node keeps, once each view among its outputs is replaced by a tensor of its own on the same memory. A tensor that is
    kept and shares memory with an output counts that output's writes, so that autograd's guard sees them. Views of what was
    `given`, as of a reshape, are left: a write to one is a write to the other, and autograd names it."""
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
                kept[j] = own.as_strided(t.shape, t.stride(), t.storage_offset())
    return kept


def _base(t: Tensor) -> Tensor:
    return t if t._base is None else t._base


def _overlaps(a: Tensor, b: Tensor) -> bool:
    """Whether the ranges of memory from their first to their last element meet."""
    (a0, a1), (b0, b1) = _range(a), _range(b)
    return a0 < b1 and b0 < a1


def _range(t: Tensor) -> tuple[Any, Any]:
    if t.numel() == 0:
        return 0, 0
    first = t.storage_offset()
    return first, first + sum([(n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)]) + 1
