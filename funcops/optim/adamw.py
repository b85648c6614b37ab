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
        before = [step.clone().select(0, i) for i in range(len(has_grad))] if tracing() else []  # in place, `step` changes
        step = step if in_place else step.clone()
        times = _elements(state, step) if in_place else step.unbind()
        if all(has_grad):
            step.add_(1)
        elif rows[0]:
            kept = [i for i, has in enumerate(has_grad) if has]
            times, before = [times[i] for i in kept], [before[i] for i in kept if before]
            torch._foreach_add_(times, 1)
        run = kernels.adamw if not tracing() else _written_ if in_place else _replace_
        dense, copies = walkable([*rows, written])
        own: Any = dense.pop() or [None] * len(kinds)
        like: Any = [(*kind, w.dtype) for kind, w in zip(kinds, own, strict=True)] if written else kinds
        for (device, *_), (p, g, m, v, w, t, decays) in kernels.grouped([*dense, own, before or times, decayed], like):
            t = [s.to(device) for s in t] if t[0].device != device else t
            number, rate_tensor = (0.0, on_device(rate, device)) if isinstance(rate, Tensor) else (rate, None)
            options = number, rate_tensor, as_tensor(factor, device), *cfg.betas, cfg.eps, cfg.weight_decay
            run(p, g, m, v, t, w if written else [], decays, *options)
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


# A compiler would write a loop for each tensor, and compile it, for what is one call already: it gets the kernel as one operator.
# Its step counts are those before the update, as a compiler would compute each new one apart.
_REST = "bool[] decayed, float lr, Tensor? lr_tensor, Tensor? factor, float beta1, float beta2, float eps, float weight_decay"


def _next_(params: Any, grads: Any, exp_avg: Any, exp_avg_sq: Any, before: Any, *given: Any) -> None:
    kernels.adamw(params, grads, exp_avg, exp_avg_sq, torch._foreach_add(before, 1), *given)


_written_ = torch.library.custom_op(
    "funcops::adamw_",
    _next_,
    mutates_args=("params", "exp_avg", "exp_avg_sq", "work"),
    schema="(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, Tensor[] before, "
    f"Tensor(d!)[] work, {_REST}) -> ()",
)
_written_.register_fake(lambda *_: None)


def _new(params: Any, grads: Any, exp_avg: Any, exp_avg_sq: Any, before: Any, *given: Any) -> list[Tensor]:
    p, m, v = [[t.clone() for t in row] for row in (params, exp_avg, exp_avg_sq)]
    _next_(p, grads, m, v, before, [], *given)
    return [*p, *m, *v]


_made = torch.library.custom_op(
    "funcops::adamw_new",
    _new,
    mutates_args=(),
    schema=f"(Tensor[] params, Tensor[] grads, Tensor[] exp_avg, Tensor[] exp_avg_sq, Tensor[] before, {_REST}) -> Tensor[]",
)
_made.register_fake(lambda p, g, m, v, *_: [torch.empty_like(t) for row in (p, m, v) for t in row])


def _replace_(p: Any, g: Any, m: Any, v: Any, before: Any, work: Any, *given: Any) -> None:
    """The operator that returns new tensors, for copies that a pure update made: of one that writes into them a compiler would also
    write the copies."""
    for t, new in zip([*p, *m, *v], _made(p, g, m, v, before, *given), strict=True):
        t.copy_(new)
    if work:
        torch._foreach_copy_(work, p)
