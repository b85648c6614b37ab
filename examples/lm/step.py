"""One training step as a pure function of params, optimiser state and a batch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops import ChainConfig, WithExtras, chain_fwd, donate, named_scope
from funcops.contract import Needs, Op
from funcops.low_precision import Recipe, end_step, quantize_params
from funcops.models import DecoderConfig
from funcops.precision import select_step
from funcops.trees import at, cast, paths, put, tensors
from lm.model import main_of, model_x
from lm.optimiser import Optimiser, update
from lm.ranks import Ranks

NEEDS = Needs(x=False)


class Settings(NamedTuple):
    """The static settings of a step."""

    decoder: DecoderConfig
    ranks: Ranks
    model: ChainConfig
    op: Op  # chain, under a residual policy
    optimiser: Optimiser
    clip: float
    dtype: torch.dtype
    delay_wgrad: bool
    in_place: bool
    recipe: Recipe | None = None
    balance: float = 0.0  # how far a router's bias moves in a step


class State(NamedTuple):
    """The state that a step passes to the next beside the params: the optimiser's, and the scales of a recipe that has some."""

    optimiser: Any  # as `lm.optimiser.first_state` makes it
    scales: Any


class Gradients(NamedTuple):
    loss: Tensor
    grads: Any
    scales: Any  # of the next step, for a recipe that has some
    load: Tensor | None  # [layers, experts]: how many tokens each expert got, over all ranks


def balanced(params: Any, load: Tensor | None, s: Settings) -> Any:
    """The params after each router's bias has moved towards an even load (arXiv 2408.15664)."""
    biases = [path for path, t in paths(params).items() if path.endswith("route.bias") and t is not None]
    for path, counts in zip(biases, () if load is None else load, strict=True):
        params = put(params, path, s.ranks.balanced(at(params, path), counts, s.balance))
    return params


def inputs(params: Any, x: Tensor, labels: Tensor, s: Settings) -> WithExtras:
    """x of the model: bytes, their labels, and the rotary table in the precision of `params`."""
    return model_x(s.decoder, x, labels, params["embed"].weight.dtype, s.ranks.cp)


def loss_and_grads(
    params: Any, x: Tensor, labels: Tensor, s: Settings, scales: Any, key: Tensor | None = None, reduce: bool = False
) -> Gradients:
    """The loss of these rows, the gradient of every parameter in the parameter's dtype, from this rank's rows as a part of the
    mean, the scales of the next step, and the load that a step reads. `scales`: {} in a first step. `key`: of this
    step, for a recipe that rounds stochastically. `reduce`: return a stage's gradients, whose sum over ranks has started."""
    wide = torch.float64 if s.dtype is torch.float64 else torch.float32
    if s.ranks.stages is not None:

        def done(grads: Any) -> Any:
            return s.ranks.reduce_start(cast(grads, wide)) if reduce else cast(grads, wide)

        return Gradients(*s.ranks.stages.loss_and_grads(params, x, labels, s.dtype, key, s.ranks.shares, done), {}, None)
    with named_scope("params in the dtype of products"):
        compute = params if s.ranks.casts else quantize_params(params, s.model, scales, dtype=s.dtype, key=key)
    y, residuals = s.op.fwd(compute, inputs(compute, x, labels, s), s.model, needs=NEEDS)
    loss = main_of(y)
    dy: Any = torch.full_like(loss, 1 / s.ranks.shares)
    if isinstance(y, WithExtras):
        dy = WithExtras(dy, dict.fromkeys(y.extras))  # routers' losses get no gradient: biases balance the load
    if s.delay_wgrad:
        _, pending = s.op.dgrad(donate(residuals), dy, s.model)
        grads = s.op.wgrad(donate(pending), s.model)
    else:
        grads, _ = s.op.bwd(donate(residuals), dy, s.model)
    grads, scales = end_step(grads, s.model, scales, over_ranks=s.ranks.largest)
    load = s.ranks.load_of_all(y.extras["load"]) if isinstance(y, WithExtras) else None
    with named_scope("gradients in the dtype of params"):
        return Gradients(loss, cast(grads, wide), scales, load)


Stepped = tuple[Any, State, Tensor, Tensor, Tensor | None]


def train_step(params: Any, state: State, x: Tensor, labels: Tensor, lr: Any, key: Tensor | None, s: Settings) -> Stepped:
    """Do a step; return new params and state, the loss, the norm of the gradients before clipping, and the load of experts. If the
    norm is not finite, params and state do not change."""
    loss, grads, scales, load = loss_and_grads(params, x, labels, s, state.scales, key, reduce=True)
    loss, grads = s.ranks.reduced(loss, grads)
    with named_scope("clip"):
        grads, norm = s.ranks.clip(grads, s.clip, in_place=s.in_place)

    def updated(in_place: bool) -> tuple[Any, State]:
        own = s.ranks.shards(params)
        new, moments = update(own, grads, state.optimiser, s.optimiser, lr=lr, in_place=in_place)
        return balanced(s.ranks.gathered(new, params), load, s), State(moments, scales)

    if not s.in_place:  # one graph: it cannot branch on a value
        with named_scope("optimizer"):
            (new, after), finite = updated(False), torch.isfinite(norm)
            if not state.scales:  # torch.compile cannot trace an empty dict as a tree
                params, moments = select_step(finite, (new, after.optimiser), (params, state.optimiser))
                return params, State(moments, state.scales), loss, norm, load
            params, state = select_step(finite, (new, after), (params, state))
    elif math.isfinite(float(norm)):
        params, state = updated(True)
    elif not state.scales:
        state = state._replace(scales=scales)
    return params, state, loss, norm, load


def written_step(params: Any, state: State, x: Tensor, labels: Tensor, lr: Tensor, key: Tensor | None, s: Settings) -> Stepped:
    """`train_step` that writes the new params and state over the old: for a graph, whose tensors keep their addresses."""
    new_params, new_state, loss, norm, load = train_step(params, state, x, labels, lr, key, s._replace(in_place=False))
    for old, new in zip(tensors((params, state)), tensors((new_params, new_state)), strict=True):
        old.copy_(new)
    return params, state, loss, norm, load


def evaluate(
    params: Any, x: Tensor, labels: Tensor, s: Settings, batch: int, scales: Any = None, key: Tensor | None = None
) -> float:
    """The mean loss over windows, without residuals. `key`: any, for a recipe that rounds gradients stochastically."""
    stages = s.ranks.stages
    whole = stages is None and not s.ranks.casts
    compute = quantize_params(params, s.model, scales, dtype=s.dtype, columns=False, key=key) if whole else params
    total = 0.0
    for i in range(0, len(x), batch):
        rows, counting = s.ranks.padded(x[i : i + batch], labels[i : i + batch])
        if stages is None:
            loss = main_of(chain_fwd(compute, inputs(compute, *rows, s), s.model, needs=Needs.NONE)[0])
        else:
            loss = stages.loss(params, *rows, s.dtype, key)
        total += float(loss) * counting if counting else 0.0
    return s.ranks.total(total) / len(x)
