"""AdamW over lists of tensors, in place. A param and its two means: any shape, one float dtype; its gradient: that dtype or a
narrower one; its step count: a float32 scalar. A gradient may be multiplied by a factor as it is read, and the new param may also
be written, rounded, to a tensor of another dtype: the weights that the next step computes with.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from funcops.engine.backend import kernel


def grouped(rows: Sequence[Sequence[Any]], keys: Sequence[Hashable]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield each key with its columns of the rows, in the order in which keys first appear."""
    kinds = dict.fromkeys(keys)
    if len(kinds) == 1:
        yield keys[0], list(rows)
        return
    for key in kinds:
        at = [i for i, k in enumerate(keys) if k == key]
        yield key, [[row[i] for i in at] for row in rows]


def like_params(grads: Sequence[Tensor], dtype: torch.dtype, factor: Optional[Tensor] = None) -> Sequence[Tensor]:
    """Make gradients contiguous and of `dtype`, as torch's multi-tensor operators require, and multiply them by `factor`."""
    if not all([g.dtype is dtype and g.is_contiguous() for g in grads]):
        grads = [g.to(dtype).contiguous() for g in grads]
    return grads if factor is None else times(grads, factor)


def times(tensors: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """Multiply tensors by a 0-d one, in their dtypes: a product of two 0-d tensors has the wider dtype of the two."""
    products = torch._foreach_mul(list(tensors), factor)
    return [x if x.dtype is t.dtype else x.to(t.dtype) for x, t in zip(products, tensors, strict=True)]


@kernel(mutates=("params", "exp_avg", "exp_avg_sq", "work"))
def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    steps: list[Tensor],
    work: list[Tensor],
    decayed: list[bool],
    lr: float,
    lr_tensor: Optional[Tensor],
    factor: Optional[Tensor],
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2; p <- p - lr weight_decay p (where `decayed`)
    - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps). `lr_tensor`, 0-d, replaces lr if given. `factor`, 0-d: g is the gradient
    times it, if given. `work`: p is also written here; empty, or one for each param. All tensors are on one device, and contiguous
    except the gradients."""
    for decays, (p, g, m, v, t) in grouped([params, grads, exp_avg, exp_avg_sq, steps], decayed):
        torch._fused_adamw_(  # type: ignore[call-overload]
            p,
            like_params(g, p[0].dtype, factor),
            m,
            v,
            [],
            t,
            lr=lr if lr_tensor is None else lr_tensor,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay if decays else 0.0,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
    if work:
        torch._foreach_copy_(work, params)
    torch.autograd.graph.increment_version([*params, *exp_avg, *exp_avg_sq])  # torch's fused ops do not count their writes


@adamw.plain
def plain_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    steps: list[Tensor],
    work: list[Tensor],
    decayed: list[bool],
    lr: float,
    lr_tensor: Optional[Tensor],
    factor: Optional[Tensor],
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    rate = lr if lr_tensor is None else lr_tensor
    grads = grads if factor is None else [factor * g for g in grads]
    m = [beta1 * m + (1 - beta1) * g for m, g in zip(exp_avg, grads, strict=True)]
    v = [beta2 * v + (1 - beta2) * g**2 for v, g in zip(exp_avg_sq, grads, strict=True)]
    new = []
    for p, m_p, v_p, t, decays in zip(params, m, v, steps, decayed, strict=True):
        unbiased_m, unbiased_v = m_p / (1 - beta1**t), v_p / (1 - beta2**t)
        new.append(p - rate * weight_decay * p * decays - rate * unbiased_m / (unbiased_v**0.5 + eps))
    return new, m, v, [p.to(w.dtype) for p, w in zip(new, work, strict=False)]
