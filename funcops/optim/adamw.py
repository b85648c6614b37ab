"""AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from funcops.engine.backend import tracing
from funcops.engine.contract.op import config
from funcops.engine.errors import check, require, require_type
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import adamw as kernels
from funcops.optim._rows import (
    as_tensor,
    check_factor,
    check_rate,
    exact_rate,
    in_wide_dtype,
    not_negative,
    on_device,
    open_into,
    open_trees,
    own_tensors,
    told,
    walkable,
    zeros_like,
)

T = TypeVar("T")


@config
class AdamWConfig:
    """`lr`, `betas` (b1, b2), `eps`, and `weight_decay`, which is decoupled (lr * weight_decay * p is subtracted from p)."""

    shows_defaults: ClassVar = True  # libraries differ in their defaults
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        not_negative("AdamWConfig", lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        ok = (
            isinstance(self.betas, tuple)
            and len(self.betas) == 2
            and all(isinstance(b, (int, float)) and 0 <= b < 1 for b in self.betas)
        )
        require(ok, "AdamWConfig", "betas", "a pair of numbers in [0, 1)", self.betas)


@tree
class AdamWState:
    """`step` counts the updates of each tensor of params, in the tree's order; the means are trees like params."""

    step: Tensor = leaf("[tensors in params], float32", each_of="exp_avg")
    exp_avg: Any = None
    exp_avg_sq: Any = None
    _views: Any = dataclasses.field(default=None, init=False, metadata={"hidden": True})  # step, and its elements


def adamw_init(params: Any, cfg: AdamWConfig) -> AdamWState:
    """m = v = 0 in the shape and dtype of each param, t = 0. Raises `TypeError` for a leaf that is neither a float tensor
    nor None, `ValueError` for memory at two paths (it would be updated twice).

    >>> import torch
    >>> from funcops.optim import AdamWConfig, AdamWState, adamw_init
    >>> state = adamw_init({"w": torch.ones(2), "frozen": None}, AdamWConfig())
    >>> isinstance(state, AdamWState), state.step, state.exp_avg
    (True, tensor([0.]), {'w': tensor([0., 0.]), 'frozen': None})
    """
    require_type("adamw_init", "cfg", cfg, AdamWConfig)
    given = own_tensors("adamw_init", params)
    step = torch.zeros(len(given), dtype=torch.float32, device=given[0].device if given else "cpu")
    return AdamWState(step, zeros_like(params), zeros_like(params))


def adamw_update(
    params: T,
    grads: T,
    state: AdamWState,
    cfg: AdamWConfig,
    *,
    lr: float | Tensor | None = None,
    decay: Any = None,
    factor: float | Tensor | None = None,
    into: Any = None,
    in_place: bool = False,
) -> tuple[T, AdamWState]:
    """One step of AdamW (arXiv:1711.05101). With m and v the running means of g and g^2, at the t-th step of a leaf:

        m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
        p <- p - lr weight_decay p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    p, m, v: any shape, one float dtype; g: that dtype or a narrower one. `lr` overrides cfg.lr (a tensor: no host sync on
    CUDA); `decay` is a tree of bools like params, from `decay_mask` for example: a leaf with False is not decayed. `in_place`
    writes into params and state and returns them.

    On CUDA one kernel reads every gradient and param once, and can do what else would read them again. `factor`: g is the gradient
    times it, a number or a 0-d tensor on their device: `clip_factor`, or the inverse of a loss scale. `into`: a tree like params of
    tensors of its dtype or a narrower one, the weights that the next step computes with; each new p is written to it as well,
    rounded. A leaf without a gradient is not written.

        params, state = adamw_update(params, grads, state, cfg, factor=clip_factor(global_norm(grads), 1.0), into=work)

    Raises `ValueError` (structure, shape, device) or `TypeError` (not a float tensor, dtype), naming the path, before
    anything changes; `GradModeError` if autograd would record a pure update.

    >>> import torch
    >>> from funcops.optim import AdamWConfig, adamw_init, adamw_update
    >>> params, cfg = {"w": torch.ones(2)}, AdamWConfig(lr=0.1, weight_decay=0.0)
    >>> params, state = adamw_update(params, {"w": torch.ones(2)}, adamw_init(params, cfg), cfg)
    >>> params["w"]
    tensor([0.9000, 0.9000])
    """
    where = "adamw_update"
    require_type(where, "cfg", cfg, AdamWConfig)
    require_type(where, "state", state, AdamWState)
    require_type(where, "in_place", in_place, bool)
    rate = check_rate(where, cfg.lr if lr is None else lr)
    check_factor(where, factor)
    trees = {"params": params, "grads": grads, "state.exp_avg": state.exp_avg, "state.exp_avg_sq": state.exp_avg_sq}
    opened = open_trees(where, trees, decay, in_place)
    rows, kinds, decayed, has_grad, _ = opened
    written = [] if into is None else open_into(where, params, grads, into)
    step = state.step
    check(where, "state.step", step, (len(has_grad),), torch.float32)
    with torch.no_grad():
        step = step if in_place else step.clone()
        times = _elements(state, step) if in_place else step.unbind()
        if all(has_grad):
            step.add_(1)
        elif rows[0]:
            times = [t for t, has in zip(times, has_grad, strict=True) if has]
            torch._foreach_add_(times, 1)
        run, (b1, b2) = _foreach_ if tracing() else kernels.adamw, cfg.betas
        dense, copies = walkable([*rows, written])
        own: Any = dense.pop() or [None] * len(kinds)
        like: Any = [(*kind, w.dtype) for kind, w in zip(kinds, own, strict=True)] if written else kinds
        for (device, *_), (p, g, m, v, w, t, decays) in kernels.grouped([*dense, own, times, decayed], like):
            t = [s.to(device) for s in t] if t[0].device != device else t
            number, rate_tensor = (0.0, on_device(rate, device)) if isinstance(rate, Tensor) else (rate, None)
            run(
                p,
                g,
                m,
                v,
                t,
                w if written else [],
                decays,
                number,
                rate_tensor,
                as_tensor(factor, device),
                b1,
                b2,
                cfg.eps,
                cfg.weight_decay,
            )
        for tensor, copy in copies:
            tensor.copy_(copy)
    if in_place:
        return told(params), state
    new, *means = opened.rebuilt(params, 0, 2, 3)
    return told(new), AdamWState(step, *means)


def _elements(state: AdamWState, step: Tensor) -> Sequence[Tensor]:
    """Views of the elements of `state.step`, cached: making them takes a fifth of an update's host time."""
    if tracing():
        return step.unbind()
    kept = state._views
    if kept is None or kept[0] is not step or (kept[1] and kept[1][0].data_ptr() != step.data_ptr()):
        state._views = kept = step, step.unbind()
    views: Sequence[Tensor] = kept[1]
    return views


def _foreach_(
    params: Any,
    g: Any,
    m: Any,
    v: Any,
    t: Any,
    into: Any,
    decayed: Any,
    number: float,
    rate_tensor: Any,
    factor: Any,
    b1: float,
    b2: float,
    eps: float,
    decay: float,
) -> None:
    """Compute what the kernel does, in operators that a tracer can follow."""
    lr = number if rate_tensor is None else exact_rate(rate_tensor, params[0].device)
    t = [s.double() for s in t]  # b^t is close to 1 at first: 1 - b^t needs more digits than float32 has

    def step(params: Any, g: Any, m: Any, v: Any) -> None:
        for decays, (p,) in kernels.grouped([params], decayed):
            if decays and decay:
                torch._foreach_mul_(p, 1 - lr * decay)
        torch._foreach_lerp_(m, g, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, 1 - b2)
        root = [(1 - b2**s).sqrt().to(x.dtype) for s, x in zip(t, params, strict=True)]
        rate = [(lr / (1 - b1**s)).to(x.dtype) for s, x in zip(t, params, strict=True)]
        scaled = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(v), root), eps)
        torch._foreach_sub_(params, torch._foreach_mul(torch._foreach_div(m, scaled), rate))

    in_wide_dtype(step, params, kernels.like_params(g, params[0].dtype, factor), m, v)
    if into:
        torch._foreach_copy_(into, params)
