"""Small elementwise kernels, and dropout by Philox bits."""

from __future__ import annotations

from torch import Tensor

from funcops import random
from funcops.backend import kernel


@kernel()
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, where b has the shape of a or of its last dimensions."""
    return a + b


@kernel()
def scale(x: Tensor, factor: float) -> Tensor:
    """factor * x."""
    return x * factor


@kernel()
def dropout(x: Tensor, key: Tensor, p: float) -> Tensor:
    """x / (1 - p) where the element's 32 random bits are at least p 2^32, else 0; 0 < p < 1. Its own backward on dy."""
    kept = random.bits(key, x.numel()).reshape(x.shape) >= round(p * 2**32)
    return x * kept * (1.0 / (1.0 - p))
