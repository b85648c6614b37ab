"""Small elementwise kernels, and dropout with Philox bits."""

from __future__ import annotations

from typing import Optional

from torch import Tensor

from funcops.engine import random
from funcops.engine.backend import kernel, wide


@kernel(rows="each")
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b; b has a's shape, or its last dims."""
    return a + b


@kernel(rows="each")
def scale(x: Tensor, factor: float) -> Tensor:
    """factor * x."""
    return x * factor


@kernel()
def dropout(x: Tensor, key: Tensor, p: float) -> Tensor:
    """x / (1 - p) where the element's 32 random bits are at least p 2^32, else 0; 0 < p < 1. The same on dy is its backward."""
    kept = random.bits(key, x.numel()).reshape(x.shape) >= round(p * 2**32)
    return x * kept * (1.0 / (1.0 - p))


@kernel()
def dropout_add(x: Tensor, b: Optional[Tensor], residual: Tensor, key: Tensor, p: float) -> Tensor:
    """residual + dropout(x + b). x, residual: [*, D]; b: [D]. Computed in the wide dtype and rounded once."""
    t = x.to(wide(x.dtype))
    t = t if b is None else t + b
    return (dropout(t, key, p) + residual).to(x.dtype)
