"""Helpers that the laws share: random gradients for a tree, bitwise comparison, one run of a case, memory that shows who reads
it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from funcops.engine.contract.needs import Needs
from funcops.engine.errors import describe, differing
from funcops.engine.trees import dense, leaves, paths, same_structure, tree_map
from funcops.testing.case import Case


def float_like(tree: Any, seed: int) -> Any:
    """Draw a tree of gradients for the float leaves; a quantised tensor is one leaf, and its gradient dense."""
    generator = torch.Generator().manual_seed(seed)

    def draw(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return None
        return torch.randn(t.shape, dtype=torch.float64, device="cpu", generator=generator).to(t)

    return tree_map(draw, dense(tree))


def same_bits(a: Any, b: Any, what: str) -> None:
    """Raise `AssertionError` unless two trees are equal to the bit: with the path, and by how much they differ there."""
    assert same_structure(a, b), f"{what}: structures differ: must be equal trees, got one with {differing(paths(a), paths(b))}"
    for (path, x), y in zip(paths(a).items(), leaves(b), strict=True):
        same = x is y is None or (isinstance(x, Tensor) and isinstance(y, Tensor) and equal_bits(x, y))
        assert same, f"{what}: {path or 'value'} differs: {_unlike(x, y)}"


def _unlike(x: Any, y: Any) -> str:
    """How two leaves differ: which elements, and the first of them in each."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)):
        return f"must be tensors of one shape and dtype, got {describe(x)} and {describe(y)}"
    odd = _odd(x, y).nonzero()
    first = tuple(odd[0].tolist())
    count = f"{len(odd)} of {x.numel()} elements that are not"
    return f"must be equal to the bit, got {count}, as at {[*first]}: {x[first]} and {y[first]}"


def equal_bits(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    return x.dtype == y.dtype and x.shape == y.shape and not _odd(x, y).any()


def _odd(x: Tensor, y: Tensor) -> Tensor:
    return (x != y) & ~(x.isnan() & y.isnan())


def run(case: Case, dtype: torch.dtype, needs: Needs = Needs.ALL) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Run a case: return params, x, y, residuals, dy and (dparams, dx)."""
    params, x = case.make(dtype)
    y, residuals = case.op.fwd(params, x, case.cfg, needs=needs)
    dy = float_like(y, 7)
    return params, x, y, residuals, dy, case.op.bwd(residuals, dy, case.cfg)


@contextlib.contextmanager
def poisoned_empties() -> Iterator[None]:
    """Make `torch.empty` and its like return NaN (or the largest integer), so that memory which nobody writes shows. torch fills
    only under deterministic algorithms; its warnings about operators without one (on CUDA: attention, cuBLAS) are ignored here."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    # a strict setting stays strict: if torch only warns, its attention on CUDA has no fixed order
    torch.use_deterministic_algorithms(True, warn_only=before[1] or not before[0])
    settings.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="(?i).*determinis")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def tree_map_path(fn: Callable[[str, Any], Any], tree: Any) -> Any:
    names = iter(paths(tree))
    return tree_map(lambda t: fn(next(names), t), tree)
