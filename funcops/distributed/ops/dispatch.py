"""Dispatch of tokens to the ranks of their experts: each token once to every rank that has one of its experts.

    sent[place_tr] = x_t        rows = all_to_all(sent)        (`combine` with forward and backward swapped)
    dx_t = sum over r of back[place_tr]        back = all_to_all(drows)

x is `(weights, x, indices)`, as for `experts`, of this rank's tokens: weights, indices [m, *, K], x [m, *, H]; x of any float
dtype, weights of that or its wide one, indices int32 or int64. The E experts are sharded in blocks, expert e is on rank
e // (E/n), and an index of E is a dropped choice. y is `(weights, rows, indices, place, sizes)`: received by this rank, weights,
indices [R, K], int32, and rows [R, H]; the rows of its own tokens, place [m, *, n] int32; and the rows for each rank and from each,
sizes [2, n] int64 on the host. Indices count this rank's experts from 0; a choice of another rank's expert is E/n, dropped. dy is
`(dweights, drows, None, None, None)`, None for zero: integers have no gradient.

The ranks first tell each other how many rows they send, which the host reads, and then send these rows alone. A rank may have no
tokens, and may receive none. With `capacity` sizes do not depend on the routing, so a CUDA graph can capture it: a rank sends
C = ceil(capacity T) of its T rows to each rank, R is n C, unused rows are zero, their choices dropped, and `sizes` is None, as on
one rank. A capacity of 1 is enough for all tokens; with less, tokens beyond it are not sent to that rank, the last first, and get
no gradient through it. All ranks must then have the same number of tokens. On the meta device R is n T.

With a `format` whose scales are within a row, such as (1, 128), x is quantised, and sent in codes and scales: 1.03 bytes an element
in place of 2. y's rows are then a `QTensor`, with the bits of quantising the received rows. Their gradient is dense.

Sums of the backward are in float32 (float64 for float64), in the order of the ranks, rounded once. Kept: place and sizes, parts of
y: no bytes of their own. An index outside [0, E] raises `IndexError` on the CPU.

    dispatch -> `experts`, E/n of them -> combine        is `parallel_experts`, which sends dx during the products for dw

Megatron-Core and torchtitan: token dispatcher; DeepEP: dispatch; GShard, arXiv:2006.16668.

>>> import torch
>>> from funcops import dist
>>> from funcops.testing import run_ranks
>>> def each(mesh):
...     cfg = dist.DispatchConfig(4, axis=mesh["ep"])
...     x = torch.ones(2, 1), torch.tensor([[1.0], [2.0]]) + 10 * mesh.rank, torch.tensor([[0], [3]], dtype=torch.int32)
...     (weights, rows, indices, place, sizes), residuals = dist.dispatch_fwd(None, x, cfg)
...     _, (dweights, dx, _) = dist.dispatch_bwd(residuals, (None, rows, None, None, None), cfg)
...     return rows.flatten(), indices.flatten(), sizes.tolist(), dx.equal(x[1]), residuals.place is place
...
>>> for rank in run_ranks({"ep": 2}, each):
...     print(rank)
...
(tensor([ 1., 11.]), tensor([0, 0], dtype=torch.int32), [[1, 1], [1, 1]], True, True)
(tensor([ 2., 12.]), tensor([1, 1], dtype=torch.int32), [[1, 1], [1, 1]], True, True)
"""

from __future__ import annotations

from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from funcops.distributed.checks import check_tensor, require_axis
from funcops.distributed.mesh import Axis
from funcops.distributed.ops._tokens import Dispatched, arrived, dispatched, in_flight, start_back
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params, same_width
from funcops.engine.contract.pausing import landed, without_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved, static
from funcops.engine.errors import describe, fail, require, require_type
from funcops.library.formats import Format
from funcops.library.ops.experts import check_experts_x

__all__ = ["DispatchConfig", "DispatchResiduals"]
__all__ += ["dispatch", "dispatch_bwd", "dispatch_dgrad", "dispatch_fwd", "dispatch_init", "dispatch_wgrad"]

Sent = tuple[Tensor, Any, Tensor, Tensor, Tensor | None]
_INTEGERS = {2: "indices", 3: "place", 4: "sizes"}


@config
class DispatchConfig(OpConfig):
    """`experts` (E), a multiple of the size of `axis`. `capacity`: the part of a rank's tokens for which another has room, so that
    sizes do not depend on the routing; None: room for the rows that are routed, whose number the host waits for. `format`: of the
    codes in which x is sent; None: x itself is. Raises `ValueError` for a format that shares a scale between rows."""

    experts: int = field(kw_only=False)
    axis: Axis
    capacity: float | None = None
    format: Format | None = None

    def __post_init__(self) -> None:
        where, form = "DispatchConfig", self.format
        require_experts(where, self.experts, self.axis, self.capacity)
        if form is not None:
            require_type(where, "format", form, Format)
            within = form.tile[0] == 1 and form.scales != "e4m3"
            wanted = "with scales within a row, such as (1, 128) of Fp8Block, or None (rows of one scale go to several ranks)"
            require(within, where, "format", wanted, form.name)

    widths = same_width
    featurewise = True


def require_experts(where: str, experts: int, axis: Any, capacity: float | None) -> None:
    """Check a config of sharded experts."""
    require_axis(where, axis)
    require(experts >= 1 and experts % axis.size == 0, where, "experts", f"a multiple of {axis.size}, the number of ranks", experts)
    require_capacity(where, capacity)


def require_capacity(where: str, capacity: Any) -> None:
    right = capacity is None or (type(capacity) in (int, float) and 0.0 < capacity <= 1.0)
    require(right, where, "capacity", "None or in (0, 1]", capacity)


class DispatchResiduals(Residuals, static=("inputs", "shape", "dtype")):
    place: Tensor = saved("[*, n]", alias="y.3", needed_by=DGRAD, of=("x.0", "x.1"))
    sizes: Tensor | None = saved("[2, n]", alias="y.4", needed_by=DGRAD, of=("x.0", "x.1"))
    choices: int = static()  # K
    weights_dtype: torch.dtype = static()


@forward(DispatchConfig)
def dispatch_fwd(
    params: None, x: tuple[Tensor, Tensor, Tensor], cfg: DispatchConfig, *, needs: Needs = Needs.ALL
) -> tuple[Sent, DispatchResiduals | None]:
    """x: `(weights, x, indices)` -> `(weights, rows, indices, place, sizes)`. Raises `ValueError` or `TypeError` for a wrong shape,
    dtype or device; over several ranks, `ValueError` without a capacity under torch.compile and make_fx."""
    found: tuple[Sent, DispatchResiduals | None] = landed(_begin(params, x, cfg, needs=needs))
    return found


def _begin(params: None, x: tuple[Tensor, Tensor, Tensor], cfg: DispatchConfig, *, needs: Needs) -> Any:
    check_tokens("dispatch_fwd", x, cfg.experts)
    inputs, lead = Inputs.of(x), x[1].shape[:-1]

    def end(came: Dispatched) -> tuple[Sent, DispatchResiduals | None]:
        weights, rows, indices, place, sizes = came
        place = place.view(*lead, cfg.axis.size)
        made = {"place": place, "sizes": sizes, "choices": weights.shape[-1], "weights_dtype": weights.dtype}
        kept = DispatchResiduals.keep(cfg, needs, inputs=inputs, shape=rows.shape, dtype=rows.dtype, **made)
        return (weights, rows, indices, place, sizes), kept

    return dispatched("dispatch_fwd", x, cfg.experts, cfg.capacity, cfg.axis, end, cfg.format)


def check_tokens(where: str, x: Any, experts: int, dim: int | None = None) -> None:
    """Check the x of sharded experts: plain tensors, of any width if `dim` is None."""
    width: int | str = "H" if dim is None else dim
    if isinstance(x, tuple) and len(x) == 3:
        for i, name in enumerate(("weights", "x", "indices")):
            check_tensor(where, f"x.{i} ({name})", x[i], (...,))
        if dim is None and x[1].dim():
            width = x[1].shape[-1]
    check_experts_x(where, x, width, experts)


@dgrad_of(DispatchResiduals)
def dispatch_dgrad(residuals: DispatchResiduals, dy: Any, cfg: DispatchConfig) -> tuple[Any, None]:
    """dy: `(dweights, drows, None, None, None)`, None for zero -> `(dweights, dx, None)`. No params, so pending is None."""
    found: tuple[Any, None] = landed(_begin_back(residuals, dy, cfg))
    return found


def _begin_back(residuals: DispatchResiduals, dy: Any, cfg: DispatchConfig) -> Any:
    where, r = "dispatch_dgrad", residuals
    if not isinstance(dy, tuple) or len(dy) != 5:
        fail(where, "dy", "a tuple (dweights, drows, None, None, None)", describe(dy), TypeError)
    for i, name in _INTEGERS.items():
        if dy[i] is not None:
            fail(where, f"dy.{i}", f"None ({name} are integers, without a gradient)", describe(dy[i]), TypeError)
    shapes = ((r.shape[0], r.choices), r.weights_dtype), (r.shape, r.dtype)
    for i, (shape, dtype) in enumerate(shapes):
        if dy[i] is not None:
            check_tensor(where, f"dy.{i}", dy[i], shape, dtype, r.place)
    wanted = [t if r.needs.input(i) else None for i, t in enumerate(dy[:2])]
    if all(t is None for t in wanted):
        return r.nothing(), None
    inputs, lead, place = r.inputs, r.place.shape[:-1], r.place.reshape(-1, cfg.axis.size)
    sent = [None if t is None else start_back(t, place, r.sizes, cfg.axis) for t in wanted]

    def end() -> tuple[Any, None]:
        back = [None if t is None else arrived(t, place, cfg.axis).view(*lead, t.shape[-1]) for t in sent]
        return inputs.make((*back, None)), None

    return in_flight(cfg.axis, end)


dispatch = make_op(
    "dispatch",
    DispatchConfig,
    fwd=dispatch_fwd,
    dgrad=dispatch_dgrad,
    pausing=without_params("dispatch", DispatchConfig, DispatchResiduals, _begin, _begin_back),
)
dispatch_init, dispatch_bwd, dispatch_wgrad = no_params(dispatch, dispatch_dgrad)
