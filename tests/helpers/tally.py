"""tally: an op that gives a count and a loss beside its main value, as a router does.

    z = x * w        load_j = how many rows have z_j > 0        loss = sum(z^2) / max(N, 1), N the elements of x

    dz = d_main + 2 z dloss / max(N, 1)        dx = dz * w        dw = sum over rows of dz * x

x, z: [*, n]; w: [n]; load: [n] int32, without gradient; loss: [], all others of x's dtype. Kept: x and w, both aliases.
"""

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    ForkConfig,
    LinearConfig,
    Step,
    WithExtras,
    activation,
    add,
    fork,
    linear,
)
from funcops.engine.backend import wide
from funcops.engine.contract.accumulators import accumulate
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import OpConfig, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Pending, Residuals, saved
from funcops.engine.errors import FLOATS, check, describe, fail
from funcops.engine.trees import leaf, tree


@config
class TallyConfig(OpConfig):
    width: int = field(kw_only=False)

    def widths(self, width):
        return self.width, self.width


@tree
class TallyParams:
    weight: Any = leaf("[n]")


class TallyResiduals(Residuals):
    x: Tensor = saved("[*, n]", alias="x", needed_by=DGRAD, of=("x", "params"))
    weight: Tensor = saved("[n]", alias="params.weight", needed_by=DGRAD, of=("x", "params"))


class TallyPending(Pending):
    x: Tensor = saved("[*, n]", alias="residuals.x", needed_by=WGRAD)
    dz: Tensor = saved("[*, n]", needed_by=WGRAD)


@init_of(TallyConfig)
def tally_init(cfg, *, key=None, device=None, dtype=None):
    return TallyParams(torch.ones(cfg.width, device=device, dtype=dtype))


@forward(TallyConfig, TallyParams)
def tally_fwd(params, x, cfg, *, needs=Needs.ALL):
    check("tally_fwd", "x", x, (..., cfg.width), FLOATS)
    check("tally_fwd", "params.weight", params.weight, (cfg.width,), x.dtype, x)
    z = x.to(wide(x.dtype)) * params.weight
    rows = tuple(range(x.dim() - 1))
    load = (z > 0).sum(rows, dtype=torch.int32) if rows else (z > 0).to(torch.int32)
    loss = (z * z).sum() / max(x.numel(), 1)
    return (z.to(x.dtype), load, loss.to(x.dtype)), TallyResiduals.keep(cfg, needs, x=x, weight=params.weight)


@dgrad_of(TallyResiduals)
def tally_dgrad(residuals, dy, cfg):
    x, weight = residuals.x, residuals.weight
    if not isinstance(dy, tuple) or len(dy) != 3:
        fail("tally_dgrad", "dy", "a tuple of 3 (None for zero)", describe(dy), TypeError)
    d_main, d_load, d_loss = dy
    if d_load is not None:
        fail("tally_dgrad", "dy.1", "None (load is of integers, which have no gradient)", describe(d_load))
    for name, d, shape in (("dy.0", d_main, x.shape), ("dy.2", d_loss, ())):
        if d is not None:
            check("tally_dgrad", name, d, shape, x.dtype, x)
    high = wide(x.dtype)
    dz = torch.zeros_like(x, dtype=high) if d_main is None else d_main.to(high)
    if d_loss is not None:
        dz = dz + x.to(high) * weight * (2.0 / max(x.numel(), 1) * d_loss.to(high))
    dx = (dz * weight).to(x.dtype) if residuals.needs.x else NO_GRADIENT
    return dx, TallyPending.keep(cfg, residuals.needs, x=x, dz=dz.contiguous())


@wgrad_of(TallyPending, TallyParams)
def tally_wgrad(pending, cfg, *, into=None):
    x, dz = pending.x, pending.dz
    found = (dz * x).reshape(-1, cfg.width).sum(0).to(x.dtype)
    return accumulate("tally_wgrad", TallyParams(found), into)


tally = make_op("tally", TallyConfig, init=tally_init, fwd=tally_fwd, dgrad=tally_dgrad, wgrad=tally_wgrad)


def tallied(x, weight):
    """z, load and loss in plain torch."""
    z = x * weight
    return z, (z > 0).reshape(-1, z.shape[-1]).sum(0, dtype=torch.int32), (z * z).sum() / max(x.numel(), 1)


def routed(dim):
    """A chain with outputs, as a router makes them; its output `logits` is also read inside."""
    steps = (
        Step("in", fork, ForkConfig(), gives=("tokens",)),
        Step("gate", linear, LinearConfig(dim, dim)),
        Step("both", fork, ForkConfig(), gives=("logits",)),
        Step("tally", tally, TallyConfig(dim), gives=("load", "loss")),
        Step("act", activation, ActivationConfig("silu")),
        Step("more", add, AddConfig(), takes=("tokens",)),
        Step("again", add, AddConfig(), takes=("logits",)),
    )
    return ChainConfig(steps=steps, outputs=("load", "loss", "logits"))


def routed_reference(params, x):
    """y of `routed` in plain torch."""
    logits = torch.nn.functional.linear(x, params["gate"].weight, params["gate"].bias)
    z, load, loss = tallied(logits, params["tally"].weight)
    main = torch.nn.functional.silu(z) + x + logits
    return WithExtras(main, {"load": load, "loss": loss, "logits": logits})
