"""Grouped linear layer: rows sorted by group, such as an expert, and a weight for each group.

    y_n = x_n w_e^T + b_e        e: the group of row n, offsets[e] <= n < offsets[e + 1]

    dx_n = dy_n w_e        dw_e = dy^T x, db_e = sum of dy, each over the rows of e: 0 if it has no rows

Rows from offsets[E] on are in no group: y and dx are 0 there. x is `(rows, offsets)`: [N, I] and [E + 1], int32, ascending from 0
to at most N. With `gathered` it is `(x, offsets, order, place)`, as `permute` returns them for the choices of experts, int32: x [*,
I] of T tokens with K choices each, row n being x[order[n] // K]; order [N = T K]; place [*, K], the rows of a token. Then dx is the
sum of a token's rows, in the order of its choices, and x is not copied to [N, I]. With `weighted` the bias is multiplied by s_n,
for rows that already are: x is `(rows, offsets, order, weights)`, s_n = weights.flat[order[n]], weights [*, K] of x's dtype or the
wide one, and y_n = x_n w_e^T + s_n b_e, db_e = sum of s_n dy_n, d weights.flat[order[n]] = dy_n . b_e.

y, dy: [N, O]; w: [E, O, I], b: [E, O] or None, or with `stacked=False` a tuple of E tensors each (as in other checkpoints), which
costs a copy of the weights a call. One float dtype (float64, float32, bfloat16, float16). Kept: x, w, b, offsets, order, place and
weights, aliases: no bytes of its own. `into` may be float32 accumulators for 16-bit gradients. The offsets stay on the device.
TransformerEngine's GroupedLinear; arXiv:2211.15841.

>>> import torch
>>> from funcops import GroupedLinearConfig, GroupedLinearParams, grouped_linear_bwd, grouped_linear_fwd
>>> cfg = GroupedLinearConfig(2, 1, 1, bias=False)
>>> params = GroupedLinearParams(torch.tensor([[[10.0]], [[100.0]]]), None)
>>> rows, offsets = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 1, 3], dtype=torch.int32)
>>> y, residuals = grouped_linear_fwd(params, (rows, offsets), cfg)
>>> y.flatten(), grouped_linear_bwd(residuals, torch.ones(3, 1), cfg)[0].weight.flatten()
(tensor([ 10., 200., 300.]), tensor([1., 5.]))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.backend import wide
from funcops.engine.contract.accumulators import accumulate, check_into, takes_sums
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, WGRAD, Inputs, Pending, Residuals, saved, static
from funcops.engine.errors import FLOATS, check, describe, fail, not_a_tuple, require
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import grouped as kernels
from funcops.library.kernels.routing import check_row_count, gather_rows, of_choices, of_rows
from funcops.library.ops.grouped_wgrads import GroupedProduct, add_grouped

__all__ = ["GroupedLinearConfig", "GroupedLinearParams", "GroupedLinearPending", "GroupedLinearResiduals"]
__all__ += ["grouped_linear", "grouped_linear_bwd", "grouped_linear_dgrad"]
__all__ += ["grouped_linear_fwd", "grouped_linear_init", "grouped_linear_wgrad"]


@config
class GroupedLinearConfig(OpConfig):
    """`experts` (E), `in_features` (I) and `out_features` (O), each at least 1; `bias` adds b. `gathered`: rows of x are gathered
    by an index; `weighted`: the bias is multiplied by the row's weight; `stacked`: one leaf holds all experts."""

    experts: int = field(kw_only=False)
    in_features: int = field(kw_only=False)
    out_features: int = field(kw_only=False)
    bias: bool = True
    gathered: bool = False
    stacked: bool = True
    weighted: bool = False
    reruns = True
    linear_weights = ("weight",)

    def __post_init__(self) -> None:
        where = type(self).__name__
        for name in ("experts", "in_features", "out_features"):
            require(getattr(self, name) >= 1, where, name, "at least 1", getattr(self, name))
        right = not self.weighted or (self.bias and not self.gathered)
        require(right, where, "weighted", "False without a bias or with gathered rows", True)
        object.__setattr__(self, "weight_shape", (self.out_features, self.in_features))
        object.__setattr__(self, "bias_shape", (self.out_features,))

    weight_shape: ClassVar[tuple[int, int]]  # of an expert
    bias_shape: ClassVar[tuple[int]]

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.in_features, self.out_features


@tree
class GroupedLinearParams:
    weight: Any = leaf("[E, O, I], or E of [O, I]")
    bias: Any = leaf("[E, O], or E of [O]")

    @staticmethod
    def without(cfg: GroupedLinearConfig) -> GroupedLinearParams:
        """Gradients that are all None."""
        nothing = None if cfg.stacked else (None,) * cfg.experts
        return GroupedLinearParams(nothing, nothing if cfg.bias else None)


class GroupedLinearResiduals(Residuals, static=("inputs", "shape", "dtype")):
    x: Tensor = saved("[N, I] or [*, I]", alias="x.0", needed_by=WGRAD, of=("params.weight",))
    weight: Any = saved("[E, O, I], or E of [O, I]", alias="params.weight", needed_by=DGRAD, of=("x.0",), tree=True)
    offsets: Tensor = saved("[E + 1]", alias="x.1", needed_by=DGRAD | WGRAD, of=("x.0", "x.3", "params.weight", "params.bias"))
    order: Tensor | None = saved("[N]", alias="x.2", needed_by=WGRAD, of=("params.weight",))
    place: Tensor | None = saved("[*, K]", alias="x.3", needed_by=DGRAD, of=("x.0",))
    bias: Any = saved("[E, O], or E of [O]", alias="params.bias", needed_by=DGRAD, of=("x.3",), tree=True)  # if weighted
    weights: Any = saved("[*, K]", alias="x.3", needed_by=WGRAD, of=("params.bias",))
    weights_order: Any = saved("[N]", alias="x.2", needed_by=DGRAD | WGRAD, of=("x.3", "params.bias"))
    y_shape: torch.Size = static()
    weights_like: Any = static()  # the shape and dtype of weights
    choices: int = static()  # K; 1 if not gathered


class GroupedLinearPending(Pending):
    x: Tensor = saved("[N, I] or [*, I]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",))
    dy: Tensor = saved("[N, O] or [*, O]", alias="dy", needed_by=WGRAD)
    dy_order: Tensor | None = saved("[N]", alias="residuals.order", needed_by=WGRAD)  # if dy is by token, from a rule
    offsets: Tensor = saved("[E + 1]", alias="residuals.offsets", needed_by=WGRAD)
    order: Tensor | None = saved("[N]", alias="residuals.order", needed_by=WGRAD, of=("params.weight",))
    weights: Tensor | None = saved("[*, K]", alias="residuals.weights", needed_by=WGRAD, of=("params.bias",))
    weights_order: Any = saved("[N]", alias="residuals.weights_order", needed_by=WGRAD, of=("params.bias",))
    choices: int = static()  # K; 1 if not gathered


@init_of(GroupedLinearConfig)
def grouped_linear_init(
    cfg: GroupedLinearConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> GroupedLinearParams:
    """Weights and biases uniform in ±1/sqrt(I), as torch.nn.Linear draws them."""
    bound = cfg.in_features**-0.5
    keys = random.split(key, 2)
    draw = functools.partial(random.uniform, low=-bound, high=bound, dtype=dtype, device=device)
    weight = draw(keys[0], (cfg.experts, *cfg.weight_shape))
    bias = draw(keys[1], (cfg.experts, cfg.out_features)) if cfg.bias else None
    if cfg.stacked:
        return GroupedLinearParams(weight, bias)
    unstacked = tuple(t.clone() for t in weight)
    return GroupedLinearParams(unstacked, None if bias is None else tuple(t.clone() for t in bias))


def check_experts(where: str, name: str, leaf: Any, experts: int, shape: tuple[int, ...], like: Tensor, stacked: bool) -> None:
    """Check a leaf of all experts, or a tuple of one leaf per expert."""
    if stacked:
        check(where, name, leaf, (experts, *shape), like.dtype, like)
        return
    if not isinstance(leaf, tuple) or len(leaf) != experts:
        fail(where, name, f"a tuple of {experts} tensors (cfg.stacked is False)", describe(leaf), TypeError)
    for e, t in enumerate(leaf):
        check(where, f"{name}.{e}", t, shape, like.dtype, like)


def grouped_inputs(where: str, x: Any, cfg: Any) -> tuple[Tensor, Tensor, Any, Any]:
    """Check x and return its parts, the last of which is `place` or the weights."""
    names = ("x", "offsets", "order", "place") if cfg.gathered else ("rows", "offsets", *("order", "weights") * cfg.weighted)
    if not isinstance(x, tuple) or len(x) != len(names):
        not_a_tuple(where, x, *names, why=", as the config says")
    rows, offsets, order, last = (*x, None, None)[:4]
    check(where, f"x.0 ({names[0]})", rows, (..., cfg.in_features), FLOATS)
    if not cfg.gathered and rows.dim() != 2:
        fail(where, "x.0 (rows)", f"[N, {cfg.in_features}]", list(rows.shape))
    check(where, "x.1 (offsets)", offsets, (cfg.experts + 1,), torch.int32, rows)
    if cfg.gathered:
        check(where, "x.3 (place)", last, (...,), torch.int32, rows)
        if last.dim() < 1 or last.shape[:-1] != rows.shape[:-1] or last.shape[-1] < 1:
            fail(where, "x.3 (place)", f"{[*rows.shape[:-1], 'K']}, K at least 1", list(last.shape))
        check(where, "x.2 (order)", order, (last.numel(),), torch.int32, rows)
    elif cfg.weighted:
        check(where, "x.2 (order)", order, (len(rows),), torch.int32, rows)
        check(where, "x.3 (weights)", last, (...,), tuple({rows.dtype: 0, wide(rows.dtype): 0}), rows)
        if last.numel() != len(rows):
            fail(where, "x.3 (weights)", f"{len(rows)} numbers, one for each row", list(last.shape))
    check_row_count(where, f"x.0 ({names[0]})", len(rows) if order is None else len(order))
    return rows, offsets, order, last


@forward(GroupedLinearConfig, GroupedLinearParams)
def grouped_linear_fwd(
    params: GroupedLinearParams, x: tuple[Tensor, ...], cfg: GroupedLinearConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, GroupedLinearResiduals | None]:
    """`y_n = x_n w_e^T + b_e`. x: `(rows, offsets)`, `(x, offsets, order, place)` or `(rows, offsets, order, weights)` -> y:
    [N, O]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device, and on the CPU for offsets that do not ascend
    from 0 to at most N."""
    rows, offsets, order, last = grouped_inputs("grouped_linear_fwd", x, cfg)
    place, weights = (last, None) if cfg.gathered else (None, last)
    weight, bias = params.weight, params.bias
    check_experts("grouped_linear_fwd", "params.weight", weight, cfg.experts, cfg.weight_shape, rows, cfg.stacked)
    if cfg.bias:
        check_experts("grouped_linear_fwd", "params.bias", bias, cfg.experts, (cfg.out_features,), rows, cfg.stacked)
    elif bias is not None:
        require(False, "grouped_linear_fwd", "params.bias", "None (cfg.bias is False)", "a tensor")
    s = None if weights is None else of_rows(weights, order)
    index, every = (None, 1) if place is None else (order, place.shape[-1])
    flat, b = rows.reshape(-1, cfg.in_features), None if bias is None else _stacked(bias)
    y = kernels.grouped_product(flat, _stacked(weight), b, offsets, index, every, s, True)
    return y, grouped_linear_kept(cfg, needs, params, x, y.shape)


def grouped_linear_kept(
    cfg: GroupedLinearConfig, needs: Needs, params: GroupedLinearParams, x: Any, y_shape: torch.Size
) -> GroupedLinearResiduals | None:
    """Residuals for checked inputs."""
    return GroupedLinearResiduals.keep(cfg, needs, y_shape=y_shape, **kept_inputs(params, x, cfg))


def kept_inputs(params: GroupedLinearParams, x: Any, cfg: Any) -> dict[str, Any]:
    """The fields of residuals that are params or parts of x, or describe them."""
    rows, offsets, order, last = x if len(x) == 4 else (*x, None, None)
    own = dict(x=rows, weight=params.weight, offsets=offsets, inputs=Inputs.of(x), shape=rows.shape, dtype=rows.dtype)
    if cfg.gathered:
        return own | dict(order=order, place=last, choices=last.shape[-1])
    if cfg.weighted:
        own |= dict(bias=params.bias, weights=last, weights_order=order, weights_like=(last.shape, last.dtype))
    return own | dict(choices=1)


def _stacked(leaf: Any) -> Tensor:
    return torch.stack(leaf) if isinstance(leaf, tuple) else leaf


@dgrad_of(GroupedLinearResiduals)
def grouped_linear_dgrad(
    residuals: GroupedLinearResiduals, dy: Tensor, cfg: GroupedLinearConfig
) -> tuple[tuple[Tensor | None, ...], GroupedLinearPending | None]:
    """`dx_n = dy_n w_e`, by token if x was gathered; `d weights = dy_n . b_e`; offsets and indices have no gradient. dy: [N, O] ->
    dx with x's shape, and the pending weight gradient, which holds only aliases."""
    r, needs, offsets = residuals, residuals.needs, residuals.offsets
    check("grouped_linear_dgrad", "dy", dy, r.y_shape, r.dtype, offsets)
    pending = GroupedLinearPending.keep(
        cfg,
        needs,
        x=r.x,
        dy=dy,
        offsets=offsets,
        order=r.order,
        weights=r.weights,
        weights_order=r.weights_order,
        choices=r.choices,
    )
    weight = r.weight
    return gradients_of_x(
        r, dy, cfg, lambda: kernels.grouped_product(dy, _stacked(weight), None, offsets, None, 1, None, False)
    ), pending


def gradients_of_x(r: Any, dy: Tensor, cfg: Any, product: Callable[[], Tensor]) -> tuple[Tensor | None, ...]:
    """dx, from the function that computes it by row, summed by token if x was gathered; and `dy_n . b_e`, at the place of the row's
    weight."""
    dx = d_weights = None
    if r.needs.input(0):
        dx = product()
        if r.place is not None:
            dx = gather_rows(dx, r.place.reshape(-1, r.place.shape[-1]), None).view(r.shape)
    if cfg.weighted and r.needs.input(3):
        shape, dtype = r.weights_like
        ds = kernels.grouped_product(dy, _stacked(r.bias).unsqueeze(-1), None, r.offsets, None, 1, None, False)
        d_weights = of_choices(ds.to(dtype), r.weights_order, shape)
    return r.inputs.make((dx, None, None, d_weights)[: r.inputs.parts])


@wgrad_of(GroupedLinearPending, GroupedLinearParams)
def grouped_linear_wgrad(
    pending: GroupedLinearPending, cfg: GroupedLinearConfig, *, into: GroupedLinearParams | None = None
) -> GroupedLinearParams:
    """`dw_e = dy^T x`, `db_e = sum of dy` (weighted: of s dy), 0 for an expert without rows; added to `into` if given."""
    args, needs, x = _wgrad_args(pending, cfg), pending.needs, pending.x
    dy, bias = args[0], cfg.bias and needs.param("bias")
    if into is None:
        return _per_expert(GroupedLinearParams(*kernels.grouped_wgrad(*args, bias)), cfg, needs)
    shape = dy.new_empty(()).expand(cfg.experts, *cfg.weight_shape)
    wanted = GroupedLinearParams(None if x is None else shape, shape[..., 0] if bias else None)
    check_into("grouped_linear_wgrad", into, _per_expert(wanted, cfg, needs))
    if cfg.stacked:
        return into_grouped(args, into, x is not None, bias)
    found = wanted_sums(args, cfg, x is not None, bias) if _all_wide(into, dy.dtype) else None
    found = GroupedLinearParams(*kernels.grouped_wgrad(*args, bias)) if found is None else found
    return accumulate("grouped_linear_wgrad", _per_expert(found, cfg, needs), into)


def _wgrad_args(pending: GroupedLinearPending, cfg: GroupedLinearConfig) -> tuple[Any, ...]:
    """The arguments of `grouped_wgrad` but the last."""
    rows = None if pending.x is None else pending.x.reshape(-1, cfg.in_features)
    s = None if pending.weights is None else of_rows(pending.weights, pending.weights_order)
    dy = pending.dy.reshape(-1, cfg.out_features)
    return dy, rows, pending.offsets, pending.dy_order, pending.order, pending.choices, s


def into_grouped(args: Any, into: GroupedLinearParams, weight: bool, bias: bool) -> GroupedLinearParams:
    """Add dw and db of `grouped_wgrad(*args)` to stacked accumulators, which the caller has checked."""
    add_grouped(args, into.weight if weight else None, into.bias if bias else None)
    return into


def wanted_sums(args: Any, cfg: GroupedLinearConfig, weight: bool, bias: bool) -> GroupedLinearParams:
    """The gradients in the wide dtype."""
    dy = args[0]
    dw = dy.new_zeros((cfg.experts, *cfg.weight_shape), dtype=wide(dy.dtype)) if weight else None
    db = dy.new_zeros((cfg.experts, cfg.out_features), dtype=wide(dy.dtype)) if bias else None
    kernels.grouped_wgrad_into(*args, dw, db)
    return GroupedLinearParams(dw, db)


def _all_wide(into: GroupedLinearParams, dtype: torch.dtype) -> bool:
    return all([takes_sums(t, dtype) for leaf in (into.weight, into.bias) for t in (leaf or ())])


def _per_expert(found: GroupedLinearParams, cfg: GroupedLinearConfig, needs: Needs) -> GroupedLinearParams:
    """Split stacked gradients, if params are not stacked, into the requested ones."""
    if cfg.stacked:
        return found

    def parts(name: str, t: Tensor | None) -> Any:
        if t is None and name == "bias" and not cfg.bias:
            return None
        return tuple([t[e] if t is not None and needs.param(f"{name}.{e}") else None for e in range(cfg.experts)])

    return GroupedLinearParams(parts("weight", found.weight), parts("bias", found.bias))


def grouped_linear_products(
    pending: GroupedLinearPending, cfg: GroupedLinearConfig, *, into: GroupedLinearParams
) -> list[GroupedProduct]:
    """dw and db of all groups as a product to run later. Weights that are not stacked get their gradients at once."""
    bias = cfg.bias and pending.needs.param("bias")
    if pending.x is None or not cfg.stacked:
        grouped_linear_wgrad(pending, cfg, into=into)
        return []
    args = _wgrad_args(pending, cfg)
    shape = args[0].new_empty(()).expand(cfg.experts, *cfg.weight_shape)
    check_into("grouped_linear_wgrad", into, GroupedLinearParams(shape, shape[..., 0] if bias else None))
    return [GroupedProduct(args, into.weight, into.bias if bias else None)]


grouped_linear = make_op(
    "grouped_linear",
    GroupedLinearConfig,
    init=grouped_linear_init,
    fwd=grouped_linear_fwd,
    dgrad=grouped_linear_dgrad,
    wgrad=grouped_linear_wgrad,
    products=grouped_linear_products,
)
grouped_linear_bwd = both_halves(grouped_linear, grouped_linear_dgrad, grouped_linear_wgrad)
