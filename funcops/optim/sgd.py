"""SGD. With g' = g + weight_decay p:

    u <- momentum u + g'          p <- p - lr u        (nesterov: p <- p - lr (g' + momentum u))
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.errors import require, require_type
from funcops.op import config
from funcops.optim._rows import changed, check_params, copied, fusable, groups, like, open_trees, rebuilt, zeros_like
from funcops.optim.rates import check_rate, not_negative, on_device
from funcops.trees import tree, tree_map

T = TypeVar("T")


@config
class SGDConfig:
    """`lr`, `momentum`, `nesterov` (needs momentum), and `weight_decay`, which is added to the gradient."""

    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        not_negative("SGDConfig", lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        require(self.momentum > 0 or not self.nesterov, "SGDConfig", "momentum", "positive for nesterov", self.momentum)


@tree
class SGDState:
    """`momentum` is a tree like params, with None leaves where cfg.momentum is 0."""

    momentum: Any = None


def sgd_init(params: Any, cfg: SGDConfig) -> SGDState:
    """Zero momentum in the dtype of each param, or None leaves where cfg.momentum is 0. Raises as `adamw_init`."""
    require_type("sgd_init", "cfg", cfg, SGDConfig)
    check_params("sgd_init", params)
    return SGDState(zeros_like(params) if cfg.momentum else tree_map(lambda _: None, params))


def sgd_update(
    params: T,
    grads: T,
    state: SGDState,
    cfg: SGDConfig,
    *,
    lr: float | Tensor | None = None,
    decay: Any = None,
    in_place: bool = False,
) -> tuple[T, SGDState]:
    """One step of SGD; arguments and errors as for `adamw_update`.

    >>> params, cfg = {"w": torch.ones(2)}, SGDConfig(lr=0.25)
    >>> sgd_update(params, {"w": torch.ones(2)}, sgd_init(params, cfg), cfg)[0]["w"]
    tensor([0.7500, 0.7500])
    """
    where = "sgd_update"
    require_type(where, "cfg", cfg, SGDConfig)
    require_type(where, "state", state, SGDState)
    trees = (params, grads, state.momentum) if cfg.momentum else (params, grads)
    rows, _, decayed = open_trees(where, trees, ("params", "grads", "state.momentum"), decay, in_place)
    rate = check_rate(where, cfg.lr if lr is None else lr)
    with torch.no_grad():
        if not in_place:
            rows = copied(rows)
        run = _fused_sgd_ if fusable(rows) else _foreach_sgd_
        for device, decays, (p, g, *u) in groups(rows, decayed):
            run(p, like(g, p), u[0] if u else [], on_device(rate, device), cfg, cfg.weight_decay if decays else 0.0)
    if in_place:
        return params, state
    new = [rebuilt(tree, old, values) for tree, old, values in changed(trees, rows)]
    return new[0], SGDState(new[1]) if cfg.momentum else state


def _fused_sgd_(p: Any, g: Any, u: Any, lr: Any, cfg: SGDConfig, decay: float) -> None:
    torch._fused_sgd_(
        p, g, u, weight_decay=decay, momentum=cfg.momentum, lr=lr, dampening=0.0, nesterov=cfg.nesterov,
        maximize=False, is_first_step=False,
    )  # fmt: skip


def _foreach_sgd_(p: Any, g: Any, u: Any, lr: Any, cfg: SGDConfig, decay: float) -> None:
    if decay:
        g = torch._foreach_add(g, p, alpha=decay)
    if cfg.momentum:
        torch._foreach_mul_(u, cfg.momentum)
        torch._foreach_add_(u, g)
        g = torch._foreach_add(g, u, alpha=cfg.momentum) if cfg.nesterov else u
    torch._foreach_sub_(p, torch._foreach_mul(g, lr))
