"""The norm of all gradients together, and clipping by it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.errors import FLOATS, describe, fail
from funcops.optim._rows import rebuilt
from funcops.optim.rates import not_negative
from funcops.trees import leaves, paths

T = TypeVar("T")


def global_norm(tree: Any) -> Tensor:
    """The 2-norm over all tensors of a tree, a 0-d tensor, in float32 (float64 for float64). No host sync.

    >>> global_norm({"a": torch.tensor([3.0]), "b": (None, torch.tensor(4.0))})
    tensor(5.)
    """
    given = _float_tensors("global_norm", tree)
    if not given:
        return torch.zeros(())
    dtype = torch.float64 if any(t.dtype is torch.float64 for t in given) else torch.float32
    with torch.no_grad():
        norms = (
            torch._foreach_norm(given, 2, dtype=dtype)
            if _alike(given)
            else [torch.linalg.vector_norm(t, dtype=dtype).to(given[0].device) for t in given]
        )
        return torch.linalg.vector_norm(torch.stack(norms))


def clip_by_global_norm(grads: T, max_norm: float | Tensor, *, in_place: bool = False) -> tuple[T, Tensor]:
    """Gradients times `min(1, max_norm / (norm + 1e-6))`, as torch.nn.utils.clip_grad_norm_, and the norm before it.

    No host sync. A norm that is not finite spoils every gradient: see `funcops.precision.all_finite` and `select_step`.
    """
    if not isinstance(max_norm, Tensor):
        not_negative("clip_by_global_norm", max_norm=max_norm)
    norm = global_norm(grads)
    old = [g for g in leaves(grads) if g is not None]
    with torch.no_grad():
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        factors = {device: factor.to(device) for device in {g.device for g in old}}
        new: list[Tensor] = old
        if in_place:
            for device, by in factors.items():
                torch._foreach_mul_([g for g in old if g.device == device], by)
            return grads, norm
        if len(factors) == 1:
            new = list(torch._foreach_mul(old, factor))
        elif factors:
            new = [g * factors[g.device] for g in old]
    return rebuilt(grads, leaves(grads), new), norm


def _float_tensors(where: str, tree: Any) -> list[Tensor]:
    given = [t for t in leaves(tree) if t is not None]
    if not all([isinstance(t, Tensor) and t.dtype in FLOATS for t in given]):
        path, t = next(
            (k, t) for k, t in paths(tree).items() if t is not None and getattr(t, "dtype", None) not in FLOATS
        )
        fail(where, path or "tree", "a float tensor or None", describe(t), TypeError)
    return given


def _alike(given: list[Tensor]) -> bool:
    return len({t.device for t in given}) == 1
