"""The global norm of gradients, and clipping by it."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.backend import tracing
from funcops.engine.errors import FLOATS, check, describe, fail, require_flag
from funcops.engine.trees import paths, with_leaves
from funcops.library.kernels.adamw import times
from funcops.optim._rows import not_negative
from funcops.optim._walk import leaves_of

T = TypeVar("T")


def global_norm(tree: Any) -> Tensor:
    """sqrt(sum of g^2 over all elements of all tensors of a tree): [], float32 (float64 if one of them is float64),
    on the device of the first. No host sync. Raises `TypeError` for a leaf that is neither a float tensor nor None.

    >>> import torch
    >>> from funcops.optim import global_norm
    >>> global_norm({"a": torch.tensor([3.0]), "b": (None, torch.tensor(4.0))})
    tensor(5.)
    """
    return _norm(_float_tensors("global_norm", tree, leaves_of(tree)))


def clip_factor(norm: Tensor, max_norm: float | Tensor) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)): the 0-d factor by which `clip_by_global_norm` multiplies gradients, for an update that
    multiplies them as it reads them (`adamw_update(..., factor=...)`). No host sync. Raises `ValueError` for a negative max_norm,
    `ValueError` or `TypeError` for a norm that is not a 0-d float tensor.

    >>> import torch
    >>> from funcops.optim import clip_factor
    >>> clip_factor(torch.tensor(5.0), 2.5)
    tensor(0.5000)
    """
    check("clip_factor", "norm", norm, (), FLOATS)
    _check_max("clip_factor", max_norm)
    with torch.no_grad():
        if isinstance(max_norm, Tensor):
            return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        return norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_(max=1.0)  # as torch divides a number, without three tensors


def _check_max(where: str, max_norm: Any) -> None:
    if isinstance(max_norm, Tensor):
        check(where, "max_norm", max_norm, (), FLOATS)
    else:
        not_negative(where, max_norm=max_norm)


def clip_by_global_norm(
    grads: T, max_norm: float | Tensor, *, norm: Tensor | None = None, in_place: bool = False
) -> tuple[T, Tensor]:
    """Gradients times min(1, max_norm / (norm + 1e-6)), in their dtypes, and their `global_norm` before clipping. `norm`: the norm
    of a larger tree that these are part of, from `funcops.dist.global_norm` for example. `in_place` writes into the gradients.
    arXiv:1211.5063; the numbers equal torch.nn.utils.clip_grad_norm_'s.

    No host sync. If the norm is not finite, the gradients become NaN or 0, as torch's do: ask `funcops.precision.all_finite` of the
    norm, as it also overflows for finite gradients, and leave the step out by `select_step`.
    Raises `TypeError` for a leaf that is neither a float tensor nor None, `ValueError` for a negative max_norm.

    >>> import torch
    >>> from funcops.optim import clip_by_global_norm
    >>> clip_by_global_norm({"w": torch.tensor([3.0, 4.0])}, 10.0)
    ({'w': tensor([3., 4.])}, tensor(5.))
    """
    require_flag("clip_by_global_norm", in_place=in_place)
    _check_max("clip_by_global_norm", max_norm)
    every = leaves_of(grads)
    given = _float_tensors("clip_by_global_norm", grads, every)
    if norm is not None:
        check("clip_by_global_norm", "norm", norm, (), FLOATS)
    norm = _norm(given) if norm is None else norm
    clipped = list(given)
    with torch.no_grad():
        for device in {g.device for g in given}:
            at = [i for i, g in enumerate(given) if g.device == device]
            own = [given[i] for i in at]
            if in_place and not tracing():
                torch._foreach_mul_(own, clip_factor(norm, max_norm).to(device))
                continue
            bounds = (0.0, max_norm) if isinstance(max_norm, Tensor) else (max_norm, None)
            for i, g in zip(at, (_clipped if tracing() else _clipped_by)(own, norm, *bounds), strict=True):
                clipped[i] = given[i].copy_(g) if in_place else g
    new = iter(clipped)
    return (grads if in_place else with_leaves(grads, [None if g is None else next(new) for g in every])), norm


def _norm(given: list[Tensor]) -> Tensor:
    if not given:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        return _norm_operator(given) if tracing() else _norm_of(given)


def _norm_of(given: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(given, 2, dtype=_norm_dtype(given))
    device = given[0].device
    together = norms if all([t.device == device for t in given]) else [n.to(device) for n in norms]
    return torch.linalg.vector_norm(torch.stack(together))


def _norm_dtype(given: list[Tensor]) -> torch.dtype:
    return torch.float64 if any([t.dtype is torch.float64 for t in given]) else torch.float32


def _clipped_by(given: list[Tensor], norm: Tensor, bound: float, varying: Tensor | None) -> list[Tensor]:
    return times(given, clip_factor(norm, bound if varying is None else varying).to(given[0].device))


# A compiler would write a loop for each tensor, and compile it, for what is one call already: it gets two operators.
_norm_operator = torch.library.custom_op("funcops::global_norm", _norm_of, mutates_args=(), schema="(Tensor[] given) -> Tensor")
_norm_operator.register_fake(lambda given: given[0].new_empty((), dtype=_norm_dtype(given)))
_CLIPPED = "(Tensor[] given, Tensor norm, float bound, Tensor? varying) -> Tensor[]"
_clipped = torch.library.custom_op("funcops::clipped", _clipped_by, mutates_args=(), schema=_CLIPPED)
_clipped.register_fake(lambda given, *_: [torch.empty_like(t) for t in given])


def _float_tensors(where: str, tree: Any, every: list[Any]) -> list[Tensor]:
    given = [t for t in every if t is not None]
    if not all([isinstance(t, Tensor) and t.dtype in FLOATS for t in given]):
        wrong = ((k, t) for k, t in paths(tree).items() if t is not None and getattr(t, "dtype", None) not in FLOATS)
        path, t = next(wrong)
        fail(where, path or "tree", "a float tensor or None", describe(t), TypeError)
    return given
