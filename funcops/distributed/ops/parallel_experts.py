"""Experts that are sharded over an axis: each rank has E/n of them, and tokens of its own.

    y_t = sum over k of w_tk down_e f(up_e x_t)        e = indices[t, k], on rank e // (E/n);  as `experts`

Dispatch: a token is sent once, with its weights, to each rank that has one of its experts. There `experts` runs unchanged; a choice
of another rank's expert counts as dropped. Combine: the results are sent back and summed in the order of the ranks. Each is the
other's backward (the ops `dispatch` and `combine`):

    dispatch   x, w -> rows [R]              dy -> rows [R]
    combine    y = sum over ranks of rows    dx, dw = sum over ranks of rows

The R rows are the ones that are routed here, whose number the ranks exchange first. With `capacity`, which a CUDA graph needs, a
rank has room for C = ceil(capacity T) rows of each rank, see `dispatch`; unused rows are zero, and belong to no expert.

With shards="hidden" a rank has all experts, and H/n of the hidden features of each: up [E, 2I/n, H], gates and values each by
part, and down [E, H, I/n], without biases. Tokens, weights and indices are gathered, and the sums of y scattered; without
`sequence_parallel` all ranks have the same tokens.

x is `(weights, x, indices)`: weights, indices [m, *, K]; x, y, dy: [m, *, H], sharded along their first dimension; up:
[E/n, 2I, H], down: [E/n, H, I], biases likewise; dtypes as in `experts`. Kept: what this rank's `experts` keep for the received
rows, these rows, and the places of its tokens. The gradients of weights are complete: over the tokens of all ranks. In the
whole backward dx is in flight during the products for dw; `parallel_experts_dgrad` waits for it. TransformerEngine and
Megatron-Core: token dispatcher; arXiv:2006.16668.

>>> import torch
>>> from funcops import dist, random
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.ParallelExpertsConfig(4, 8, 16, axis=mesh["ep"])
...     params = dist.parallel_experts_init(cfg, key=random.key(0))
...     weights, indices = torch.ones(3, 1), torch.tensor([[0], [3], [3]], dtype=torch.int32)
...     y, residuals = dist.parallel_experts_fwd(params, (weights, torch.ones(3, 8), indices), cfg)
...     dparams, dx = dist.parallel_experts_bwd(residuals, torch.ones(3, 8), cfg)
...     return y.shape, params.up.weight.shape, (dparams.up.weight != 0).any((1, 2))
...
>>> run_ranks({"ep": 2}, each)[1]
(torch.Size([3, 8]), torch.Size([2, 32, 8]), tensor([False,  True]))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.distributed import comm
from funcops.distributed.checks import check_tensor, require_axis, require_shares
from funcops.distributed.init import init_part
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._tokens import Dispatched, arrived, dispatched, in_flight, rows_sent, start, start_back, token_of
from funcops.distributed.ops.dispatch import check_tokens, require_experts
from funcops.distributed.specs import Spec
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import bwd_of, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.pausing import Flying, Pausing, landed, pausing
from funcops.engine.contract.schema import DGRAD, WGRAD, Inputs, Pending, Residuals, saved
from funcops.engine.errors import require
from funcops.library.ops.experts import (
    OF_ALL,
    ExpertsConfig,
    ExpertsParams,
    check_experts_into,
    check_experts_params,
    computed,
    experts,
    experts_dgrad,
    experts_init,
    experts_wgrad,
)

__all__ = ["ParallelExpertsConfig", "ParallelExpertsPending", "ParallelExpertsResiduals"]
__all__ += ["parallel_experts", "parallel_experts_bwd", "parallel_experts_dgrad"]
__all__ += ["parallel_experts_fwd", "parallel_experts_init", "parallel_experts_wgrad"]


@config
class ParallelExpertsConfig(ExpertsConfig):
    """The fields of `ExpertsConfig`, `experts` a multiple of the size of `axis`. `capacity`: see `DispatchConfig`. `shards`:
    whether the axis shards "experts", or their "hidden" features; `sequence_parallel`: for "hidden", whether the ranks have
    different tokens."""

    axis: Axis
    capacity: float | None = None
    shards: str = "experts"
    sequence_parallel: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        where, n, size = "ParallelExpertsConfig", self.axis.size if isinstance(self.axis, Axis) else 1, self.experts
        require(self.shards in ("experts", "hidden"), where, "shards", "'experts' or 'hidden'", repr(self.shards))
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(ExpertsConfig)}
        if self.shards == "experts":
            require_experts(where, size, self.axis, self.capacity)
            object.__setattr__(self, "own", ExpertsConfig(**fields | {"experts": size // n}))
            return
        require_axis(where, self.axis)
        require_shares(where, "hidden", self.hidden, self.axis)
        require(not self.bias, where, "bias", "False with shards='hidden' (each rank would add down's bias)", self.bias)
        given = self.sequence_parallel is not None
        require(given, where, "sequence_parallel", "True or False with shards='hidden'", self.sequence_parallel)
        require(self.capacity is None, where, "capacity", "None with shards='hidden'", self.capacity)
        object.__setattr__(self, "own", ExpertsConfig(**fields | {"hidden": self.hidden // n}))

    own: ClassVar[ExpertsConfig]  # this rank's

    @property
    def specs(self) -> dict[str, Spec]:
        """The specs of the sharded params, by path."""
        if self.shards == "hidden":
            parts = (self.hidden, self.hidden)
            return {"up.weight": Spec(self.axis.name, 1, parts=parts), "down.weight": Spec(self.axis.name, 2)}
        names = ("weight", "bias") if self.bias else ("weight",)
        return {f"{layer}.{name}": Spec(self.axis.name, 0) for layer in ("up", "down") for name in names}


class ParallelExpertsResiduals(Residuals, static=("inputs", "shape", "dtype")):
    body: Any = saved("{of experts}", needed_by=DGRAD | WGRAD, tree=True)
    place: Tensor | None = saved("[T, n]", needed_by=DGRAD, of=OF_ALL)
    sizes: Tensor | None = saved("[2, n]", needed_by=DGRAD, of=OF_ALL)


class ParallelExpertsPending(Pending):
    body: Any = saved("{of experts}", needed_by=WGRAD, tree=True)


@init_of(ParallelExpertsConfig)
def parallel_experts_init(
    cfg: ParallelExpertsConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> ExpertsParams:
    """This rank's experts, as `experts_init` draws them with the same key, on every mesh."""
    whole = ExpertsConfig(cfg.experts, cfg.dim, cfg.hidden, bias=cfg.bias)
    made: ExpertsParams = init_part(cfg, lambda: experts_init(whole, key=key, device=device, dtype=dtype))
    return made


@forward(ParallelExpertsConfig, ExpertsParams)
def parallel_experts_fwd(
    params: ExpertsParams, x: tuple[Tensor, Tensor, Tensor], cfg: ParallelExpertsConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, ParallelExpertsResiduals | None]:
    """x: `(weights, x, indices)`, this rank's tokens -> y: [m, *, H]. Raises `ValueError` or `TypeError` as `dispatch_fwd`."""
    found: tuple[Tensor, ParallelExpertsResiduals | None] = landed(_begin(params, x, cfg, needs=needs))
    return found


def _begin(params: ExpertsParams, x: tuple[Tensor, Tensor, Tensor], cfg: ParallelExpertsConfig, *, needs: Needs) -> Any:
    check_tokens("parallel_experts_fwd", x, cfg.experts, cfg.dim)
    check_experts_params("parallel_experts_fwd", params, cfg.own, x[1])
    axis, shape = cfg.axis, x[1].shape
    static = {"inputs": Inputs.of(x), "shape": shape, "dtype": x[1].dtype}

    def kept(body: Any, place: Tensor | None = None, sizes: Tensor | None = None) -> ParallelExpertsResiduals | None:
        return ParallelExpertsResiduals.keep(cfg, needs, body=body, place=place, sizes=sizes, **static)

    def here(came: Dispatched) -> Any:
        rows, body = computed(params, (came.weights, came.rows, came.indices), cfg.own, needs)
        place, sizes = came.place, came.sizes
        sent = start_back(rows, place, sizes, axis)
        return Flying(lambda: (arrived(sent, place, axis).view(shape), kept(body, place, sizes)))

    if axis.size > 1 and cfg.shards == "experts":
        return dispatched("parallel_experts_fwd", x, cfg.experts, cfg.capacity, axis, here)
    rows, body = computed(params, _gathered(x, axis) if cfg.sequence_parallel else x, cfg.own, needs)
    total = _start_sum(rows, cfg)
    return in_flight(axis, lambda: (comm.wait(total, axis), kept(body)))


def _gathered(x: tuple[Tensor, Tensor, Tensor], axis: Axis) -> tuple[Tensor, Tensor, Tensor]:
    weights, tokens, indices = [comm.wait(one, axis) for one in [comm.start_gather(t, axis) for t in x]]
    return weights, tokens, indices


def _start_sum(t: Tensor, cfg: ParallelExpertsConfig) -> Tensor:
    """The sum over the ranks, for this rank's tokens, in flight."""
    return (comm.start_scatter_sum if cfg.sequence_parallel else comm.start_sum)(t, cfg.axis)


def _begin_back(
    where: str,
    residuals: ParallelExpertsResiduals,
    dy: Tensor,
    cfg: ParallelExpertsConfig,
    beside: Callable[[Any], Any],
    into: ExpertsParams | None = None,
) -> Any:
    """Send dy to the experts, and the gradient of x back, in flight during `beside(pending)`, which returns what makes the result
    of dx."""
    check_tensor(where, "dy", dy, residuals.shape, residuals.dtype)
    axis, body, place, sizes = cfg.axis, residuals.body, residuals.place, residuals.sizes
    inputs, shape = residuals.inputs, residuals.shape

    def here(dy: Tensor) -> Any:
        (*found, _), pending = experts_dgrad(body, dy, cfg.own)
        if into is not None and pending is not None:
            check_experts_into(where, pending, cfg.own, into)
        back = (lambda t: _start_sum(t, cfg)) if place is None else (lambda t: start_back(t, place, sizes, axis))
        sent = [None if t is None else back(t) for t in found]

        def arrive() -> Any:
            if place is None:
                return inputs.make((*[None if t is None else comm.wait(t, axis) for t in sent], None))
            d_weights, dx = (None if t is None else arrived(t, place, axis) for t in sent)
            d_weights = None if d_weights is None else d_weights.view(*shape[:-1], d_weights.shape[-1])
            return inputs.make((d_weights, None if dx is None else dx.view(shape), None))

        end = beside(pending)
        return in_flight(axis, lambda: end(arrive()))

    if place is None:
        return here(comm.gather(dy, axis) if cfg.sequence_parallel else dy)
    rows = rows_sent(place, sizes, cfg.capacity, axis)
    flying = start(dy.reshape(-1, dy.shape[-1]), token_of(place, rows), axis, sizes, rows)
    return in_flight(axis, lambda: here(comm.wait(flying, axis)))


@dgrad_of(ParallelExpertsResiduals)
def parallel_experts_dgrad(
    residuals: ParallelExpertsResiduals, dy: Tensor, cfg: ParallelExpertsConfig
) -> tuple[Any, ParallelExpertsPending | None]:
    """`(d weights, dx, None)` of this rank's tokens, and the pending weight gradients. dy: [m, *, H]."""
    found: tuple[Any, ParallelExpertsPending | None] = landed(_begin_dgrad(residuals, dy, cfg))
    return found


def _begin_dgrad(residuals: ParallelExpertsResiduals, dy: Tensor, cfg: ParallelExpertsConfig) -> Any:
    needs = residuals.needs

    def beside(pending: Any) -> Callable[[Any], Any]:
        return lambda dx: (dx, ParallelExpertsPending.keep(cfg, needs, body=pending))

    return _begin_back("parallel_experts_dgrad", residuals, dy, cfg, beside)


@wgrad_of(ParallelExpertsPending, ExpertsParams)
def parallel_experts_wgrad(
    pending: ParallelExpertsPending, cfg: ParallelExpertsConfig, *, into: ExpertsParams | None = None
) -> ExpertsParams:
    """The gradients of this rank's experts, as from `experts_wgrad`; added to `into` if given."""
    return experts_wgrad(pending.body, cfg.own, into=into)


@bwd_of(ParallelExpertsResiduals, ExpertsParams)
def parallel_experts_bwd(
    residuals: ParallelExpertsResiduals, dy: Tensor, cfg: ParallelExpertsConfig, *, into: ExpertsParams | None = None
) -> tuple[ExpertsParams, Any]:
    """The whole backward: dx is in flight during the products for dw. Returns `(dparams, dx)`."""
    found: tuple[ExpertsParams, Any] = landed(_begin_bwd(residuals, dy, cfg, into=into))
    return found


def _begin_bwd(
    residuals: ParallelExpertsResiduals, dy: Tensor, cfg: ParallelExpertsConfig, *, into: ExpertsParams | None = None
) -> Any:
    def beside(pending: Any) -> Callable[[Any], Any]:
        dparams = experts_wgrad(pending, cfg.own, into=into)
        return lambda dx: (dparams, dx)

    return _begin_back("parallel_experts_bwd", residuals, dy, cfg, beside, into)


parallel_experts = make_op(
    "parallel_experts",
    ParallelExpertsConfig,
    init=parallel_experts_init,
    fwd=parallel_experts_fwd,
    dgrad=parallel_experts_dgrad,
    wgrad=parallel_experts_wgrad,
    products=lambda pending, cfg, *, into: experts.products(pending.body, cfg.own, into=into),
    bwd=parallel_experts_bwd,
    pausing=Pausing(
        pausing(forward(ParallelExpertsConfig, ExpertsParams, "parallel_experts_fwd")(_begin)),
        pausing(dgrad_of(ParallelExpertsResiduals, "parallel_experts_dgrad")(_begin_dgrad)),
        pausing(bwd_of(ParallelExpertsResiduals, ExpertsParams, "parallel_experts_bwd")(_begin_bwd)),
    ),
)
