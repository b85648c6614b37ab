"""SGD."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from funcops.engine.backend import tracing, wide
from funcops.engine.contract.op import config
from funcops.engine.errors import require, require_type
from funcops.engine.trees import nothing_like, tree
from funcops.library.kernels.adamw import grouped, like_params
from funcops.optim._rows import (
    check_rate,
    in_wide_dtype,
    not_negative,
    on_device,
    open_trees,
    own_tensors,
    told,
    walkable,
    zeros_like,
)

T = TypeVar("T")


@config
class SGDConfig:
    """`lr`, `momentum`, `nesterov` (needs momentum), and `weight_decay`, which is added to the gradient."""

    shows_defaults: ClassVar = True  # libraries differ in their defaults
    lr: float = 1e-2
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        not_negative("SGDConfig", lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        require(self.momentum > 0 or not self.nesterov, "SGDConfig", "momentum", "positive for nesterov", self.momentum)


@tree
class SGDState:
    """`momentum` is a tree like params, with None leaves if cfg.momentum is 0."""

    momentum: Any = None


def sgd_init(params: Any, cfg: SGDConfig) -> SGDState:
    """u = 0 in the shape and dtype of each param, or None leaves if cfg.momentum is 0. Raises as `adamw_init` does.

    >>> import torch
    >>> from funcops.optim import SGDConfig, SGDState, sgd_init
    >>> state = sgd_init({"w": torch.ones(2)}, SGDConfig(momentum=0.9))
    >>> isinstance(state, SGDState), state.momentum
    (True, {'w': tensor([0., 0.])})
    """
    require_type("sgd_init", "cfg", cfg, SGDConfig)
    own_tensors("sgd_init", params)
    return SGDState(zeros_like(params) if cfg.momentum else nothing_like(params))


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
    """One step of SGD (momentum and nesterov as in Sutskever et al., ICML 2013, in torch.optim.SGD's form):

        g' = g + weight_decay p        u <- momentum u + g'
        p <- p - lr u        (nesterov: p <- p - lr (g' + momentum u))

    Shapes, dtypes and other arguments are as for `adamw_update`. Raises as `adamw_update` does.

    >>> import torch
    >>> from funcops.optim import SGDConfig, sgd_init, sgd_update
    >>> params, cfg = {"w": torch.ones(2)}, SGDConfig(lr=0.25)
    >>> sgd_update(params, {"w": torch.ones(2)}, sgd_init(params, cfg), cfg)[0]["w"]
    tensor([0.7500, 0.7500])
    """
    where = "sgd_update"
    require_type(where, "cfg", cfg, SGDConfig)
    require_type(where, "state", state, SGDState)
    require_type(where, "in_place", in_place, bool)
    rate = check_rate(where, cfg.lr if lr is None else lr)
    trees = {"params": params, "grads": grads} | ({"state.momentum": state.momentum} if cfg.momentum else {})
    opened = open_trees(where, trees, decay, in_place)
    rows, kinds, decayed, *_ = opened
    with torch.no_grad():
        dense, copies = walkable(rows)
        for ((device, dtype), decays), (p, g, *u) in grouped(dense, list(zip(kinds, decayed, strict=True))):
            g = like_params(g, dtype)
            # torch's fused SGD on the CPU leaves params of 16 bits as they are if they have 16 elements or more
            run = _foreach_ if tracing() or (device.type == "cpu" and wide(dtype) is not dtype) else _fused_
            run(p, g, u[0] if u else [], on_device(rate, device), cfg, cfg.weight_decay if decays else 0.0)
        for tensor, copy in copies:
            tensor.copy_(copy)
    if in_place:
        return told(params), state
    new, *momentum = opened.rebuilt(params, 0, 2) if cfg.momentum else opened.rebuilt(params, 0)
    return told(new), SGDState(*momentum) if cfg.momentum else state


def _fused_(p: Any, g: Any, u: Any, lr: Any, cfg: SGDConfig, decay: float) -> None:
    torch._fused_sgd_(
        p,
        g,
        u,
        weight_decay=decay,
        momentum=cfg.momentum,
        lr=lr,
        dampening=0.0,
        nesterov=cfg.nesterov,
        maximize=False,
        is_first_step=False,
    )
    torch.autograd.graph.increment_version([*p, *u])  # torch's fused ops do not count their writes


def _foreach_(p: Any, g: Any, u: Any, lr: Any, cfg: SGDConfig, decay: float) -> None:
    def step(p: Any, g: Any, u: Any) -> None:
        if decay:
            g = torch._foreach_add(g, p, alpha=decay)
        if cfg.momentum:
            torch._foreach_mul_(u, cfg.momentum)
            torch._foreach_add_(u, g)
            g = torch._foreach_add(g, u, alpha=cfg.momentum) if cfg.nesterov else u
        torch._foreach_sub_(p, torch._foreach_mul(g, lr))

    in_wide_dtype(step, p, g, u)
