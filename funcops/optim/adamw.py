"""AdamW (arXiv:1711.05101). With m and v the running means of g and g^2, after t steps of a leaf:

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    p <- p - lr weight_decay p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.backend import tracing
from funcops.errors import describe, fail, require, require_type
from funcops.op import config
from funcops.optim._rows import changed, check_params, copied, fusable, groups, like, open_trees, rebuilt, zeros_like
from funcops.optim.rates import check_rate, not_negative, on_device
from funcops.trees import leaf, tree

T = TypeVar("T")


@config
class AdamWConfig:
    """`lr`, `betas` (b1, b2), `eps`, and `weight_decay`, which is decoupled (lr * weight_decay of p is taken off)."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        not_negative("AdamWConfig", lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        ok = isinstance(self.betas, tuple) and len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)
        require(ok, "AdamWConfig", "betas", "a pair of numbers in [0, 1)", self.betas)


@tree
class AdamWState:
    """`step` counts the updates of each tensor in params, in the tree's order; the means are trees like params."""

    step: Tensor = leaf("[tensors in params], float32")
    exp_avg: Any = None
    exp_avg_sq: Any = None
    _unbound: Any = dataclasses.field(default=None, init=False, metadata={"hidden": True})  # step, and its elements


def adamw_init(params: Any, cfg: AdamWConfig) -> AdamWState:
    """Zero means in the dtype of each param, and zero steps. Raises for leaves that are no float tensors, and for a
    tensor that stands at two paths (it would be updated twice)."""
    require_type("adamw_init", "cfg", cfg, AdamWConfig)
    given = check_params("adamw_init", params)
    step = torch.zeros(len(given), dtype=torch.float32, device=given[0].device if given else None)
    return AdamWState(step, zeros_like(params), zeros_like(params))


def adamw_update(
    params: T,
    grads: T,
    state: AdamWState,
    cfg: AdamWConfig,
    *,
    lr: float | Tensor | None = None,
    decay: Any = None,
    in_place: bool = False,
) -> tuple[T, AdamWState]:
    """One step of AdamW. `lr` overrides cfg.lr (a tensor: no host sync on CUDA); `decay` is a tree of bools like params,
    as `decay_mask` makes: a leaf with False is not decayed. `in_place` writes into params and state and returns them.

    Raises `ValueError` (structure, shape, device) or `TypeError` (not a float tensor, dtype), naming the path.

    >>> params, cfg = {"w": torch.ones(2)}, AdamWConfig(lr=0.1, weight_decay=0.0)
    >>> params, state = adamw_update(params, {"w": torch.ones(2)}, adamw_init(params, cfg), cfg)
    >>> params["w"]
    tensor([0.9000, 0.9000])
    """
    where = "adamw_update"
    require_type(where, "cfg", cfg, AdamWConfig)
    require_type(where, "state", state, AdamWState)
    trees = (params, grads, state.exp_avg, state.exp_avg_sq)
    rows, wanted, decayed = open_trees(
        where, trees, ("params", "grads", "state.exp_avg", "state.exp_avg_sq"), decay, in_place
    )
    step, rate = state.step, check_rate(where, cfg.lr if lr is None else lr)
    if not isinstance(step, Tensor) or step.shape != (len(wanted),) or step.dtype is not torch.float32:
        fail(where, "state.step", f"float32[{len(wanted)}]", describe(step))
    with torch.no_grad():
        whole = len(rows[0]) == len(wanted)
        if not in_place:
            rows = copied(rows)
            step = step + 1 if whole else step.clone()
        elif whole:
            step.add_(1)
        steps = _elements(state, step) if in_place else step.unbind()
        if not whole and rows[0]:
            steps = [s for s, w in zip(steps, wanted, strict=True) if w]
            torch._foreach_add_(steps, 1)
        run = _fused_adamw_ if fusable(rows) else _foreach_adamw_
        for device, decays, (p, g, m, v, t) in groups((*rows, steps), decayed):
            t = [s.to(device) for s in t] if t[0].device != device else t
            run(p, like(g, p), m, v, t, on_device(rate, device), cfg, cfg.weight_decay if decays else 0.0)
    if in_place:
        return params, state
    new = [rebuilt(tree, old, values) for tree, old, values in changed(trees, rows)]
    return new[0], AdamWState(step, new[1], new[2])


def _elements(state: AdamWState, step: Tensor) -> Sequence[Tensor]:
    """Views of the elements of `state.step`, made once: they are a fifth of an update's host time."""
    if tracing():
        return step.unbind()
    kept = state._unbound
    if kept is None or kept[0] is not step or (kept[1] and kept[1][0].data_ptr() != step.data_ptr()):
        state._unbound = step, step.unbind()
    elements: Sequence[Tensor] = state._unbound[1]
    return elements


def _fused_adamw_(p: Any, g: Any, m: Any, v: Any, t: Any, lr: Any, cfg: AdamWConfig, decay: float) -> None:
    b1, b2 = cfg.betas
    torch._fused_adamw_(
        p, g, m, v, [], t, lr=lr, beta1=b1, beta2=b2, weight_decay=decay, eps=cfg.eps, amsgrad=False, maximize=False
    )


def _foreach_adamw_(p: Any, g: Any, m: Any, v: Any, t: Any, lr: Any, cfg: AdamWConfig, decay: float) -> None:
    b1, b2 = cfg.betas
    if decay:
        torch._foreach_mul_(p, 1 - lr * decay)
    torch._foreach_lerp_(m, g, 1 - b1)
    torch._foreach_mul_(v, b2)
    torch._foreach_addcmul_(v, g, g, 1 - b2)
    root = [(1 - b2**s).sqrt().to(x.dtype) for s, x in zip(t, p, strict=True)]
    rate = [(lr / (1 - b1**s)).to(x.dtype) for s, x in zip(t, p, strict=True)]
    scaled = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(v), root), cfg.eps)
    torch._foreach_sub_(p, torch._foreach_mul(torch._foreach_div(m, scaled), rate))
