"""Linear layer.

    y = x w^T + b

    dx = dy w        dw = dy^T x, summed over rows        db = sum over rows of dy

x: [*, I], y, dy: [*, O]; w: [O, I]; b: [O] or None; all of one float dtype (float64, float32, bfloat16, float16).
Kept: x and w, both aliases: no bytes of its own. `into` may be float32 accumulators for 16-bit gradients (main_grad).

>>> import torch
>>> from funcops import LinearConfig, LinearParams, linear_bwd, linear_fwd
>>> params = LinearParams(torch.tensor([[1.0, 2.0]]), torch.tensor([0.5]))
>>> y, residuals = linear_fwd(params, torch.tensor([[3.0, 4.0]]), LinearConfig(2, 1))
>>> y
tensor([[11.5000]])
>>> dparams, dx = linear_bwd(residuals, torch.ones(1, 1), LinearConfig(2, 1))
>>> dparams.weight, dx
(tensor([[3., 4.]]), tensor([[1., 2.]]))
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.contract.accumulators import accumulate, check_into, takes_sums
from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import bwd_of, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Pending, Residuals, saved, static
from funcops.engine.errors import check, check_rows, require
from funcops.engine.trees import leaf, tree
from funcops.library.kernels import fused_linear
from funcops.library.kernels import linear as kernels
from funcops.library.kernels.norm import sum_parts
from funcops.library.ops.linear_layer import LinearLayer
from funcops.library.ops.linear_wgrads import Product

__all__ = ["LinearConfig", "LinearParams", "LinearPending", "LinearResiduals"]
__all__ += ["linear", "linear_bwd", "linear_dgrad", "linear_fwd", "linear_init", "linear_wgrad"]


@config
class LinearConfig(OpConfig):
    """`in_features` (I) and `out_features` (O), both at least 1; `bias` adds b."""

    in_features: int = field(kw_only=False)
    out_features: int = field(kw_only=False)
    bias: bool = True
    linear_weights = ("weight",)
    reruns = True

    def __post_init__(self) -> None:
        for name in ("in_features", "out_features"):
            require(getattr(self, name) >= 1, type(self).__name__, name, "at least 1", getattr(self, name))
        object.__setattr__(self, "weight_shape", (self.out_features, self.in_features))
        object.__setattr__(self, "bias_shape", (self.out_features,))

    weight_shape: ClassVar[tuple[int, int]]
    bias_shape: ClassVar[tuple[int]]

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.in_features, self.out_features


@tree
class LinearParams:
    weight: Tensor = leaf("[O, I]")
    bias: Tensor | None = leaf("[O]")


class LinearResiduals(Residuals, static=("dtype",)):
    x: Tensor = saved("[*, I]", alias="x", needed_by=WGRAD, of=("params.weight",))
    weight: Tensor = saved("[O, I]", alias="params.weight", needed_by=DGRAD)
    y_shape: torch.Size = static()


class LinearPending(Pending):
    x: Tensor = saved("[*, I]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",))
    dy: Tensor = saved("[*, O]", alias="dy", needed_by=WGRAD)
    sums: Tensor | None = saved("[P, O]", needed_by=WGRAD, of=("params.bias",))  # over blocks of dy's rows, if a kernel made them


@init_of(LinearConfig)
def linear_init(
    cfg: LinearConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LinearParams:
    """Weight and bias uniform in ±1/sqrt(I), as torch.nn.Linear draws them."""
    bound = cfg.in_features**-0.5
    keys = random.split(key, 2)
    draw = functools.partial(random.uniform, low=-bound, high=bound, dtype=dtype, device=device)
    weight = draw(keys[0], (cfg.out_features, cfg.in_features))
    return LinearParams(weight, draw(keys[1], (cfg.out_features,)) if cfg.bias else None)


def linear_kept(cfg: LinearConfig, needs: Needs, x: Tensor, weight: Tensor, y: Tensor) -> LinearResiduals | None:
    return LinearResiduals.keep(cfg, needs, x=x, weight=weight, y_shape=y.shape, dtype=y.dtype)


@forward(LinearConfig, LinearParams)
def linear_fwd(
    params: LinearParams, x: Tensor, cfg: LinearConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, LinearResiduals | None]:
    """`y = x w^T + b`. x: [*, I] -> y: [*, O]. Raises `ValueError` or `TypeError` for a wrong shape, dtype or device."""
    weight, bias = params.weight, params.bias
    check_rows("linear_fwd", "x", x, cfg.in_features)
    dtype = x.dtype
    check("linear_fwd", "params.weight", weight, cfg.weight_shape, dtype, x)
    if cfg.bias:
        check("linear_fwd", "params.bias", bias, cfg.bias_shape, dtype, x)
    elif bias is not None:
        require(False, "linear_fwd", "params.bias", "None (cfg.bias is False)", "a tensor")
    y = kernels.linear_fwd(x, weight, bias)
    return y, linear_kept(cfg, needs, x, weight, y)


@dgrad_of(LinearResiduals)
def linear_dgrad(
    residuals: LinearResiduals, dy: Tensor, cfg: LinearConfig, sums: Tensor | None = None
) -> tuple[Tensor, LinearPending | None]:
    """`dx = dy w`. dy: [*, O] -> dx: [*, I], and the pending weight gradient (dy and x, both aliases)."""
    x, weight, needs = residuals.x, residuals.weight, residuals.needs
    check("linear_dgrad", "dy", dy, residuals.y_shape, residuals.dtype, weight if x is None else x)
    dx = kernels.linear_dgrad(dy, weight) if needs.x else NO_GRADIENT
    return dx, LinearPending.keep(cfg, needs, x=x, dy=dy, sums=sums)


@wgrad_of(LinearPending, LinearParams)
def linear_wgrad(pending: LinearPending, cfg: LinearConfig, *, into: LinearParams | None = None) -> LinearParams:
    """`dw = dy^T x`, `db = sum of dy`; added to `into` if given."""
    needs = pending.needs
    bias = cfg.bias and (needs.params is True or needs.param("bias"))
    return linear_gradients("linear_wgrad", pending.dy, pending.x, bias, into, pending.sums)


def wants_bias(cfg: Any, needs: Needs) -> bool:
    return cfg.bias and (needs.params is True or needs.param("bias"))


@bwd_of(LinearResiduals, LinearParams)
def linear_bwd(
    residuals: LinearResiduals, dy: Tensor, cfg: LinearConfig, *, into: LinearParams | None = None
) -> tuple[LinearParams, Tensor]:
    """The whole backward. Returns `(dparams, dx)`."""
    x, weight, needs = residuals.x, residuals.weight, residuals.needs
    check("linear_bwd", "dy", dy, residuals.y_shape, residuals.dtype, weight if x is None else x)
    bias = cfg.bias and (needs.params is True or needs.param("bias"))
    if into is not None:
        return _wgrad_into("linear_bwd", dy, x, bias, into), kernels.linear_dgrad(dy, weight) if needs.x else NO_GRADIENT
    if needs.x:
        dx, dw, db = kernels.linear_bwd(dy, x, weight, bias)
        return LinearParams(dw, db), dx
    return LinearParams(*kernels.linear_wgrad(dy, x, bias)), NO_GRADIENT


def linear_gradients(
    where: str, dy: Tensor, x: Tensor | None, bias: bool, into: LinearParams | None, sums: Tensor | None = None
) -> LinearParams:
    """dw (None without x) and db (None unless `bias`), added to `into` if given. `sums`: dy summed over blocks of rows, of which db
    is made if they are given."""
    if bias and sums is not None:
        return _of_sums(where, dy, x, sums, into)
    if into is not None:
        return _wgrad_into(where, dy, x, bias, into)
    return LinearParams(*kernels.linear_wgrad(dy, x, bias))


def _wgrad_into(where: str, dy: Tensor, x: Tensor | None, bias: bool, into: LinearParams) -> LinearParams:
    """Add the gradients to `into`: in the product itself, unrounded, if the accumulators are as wide as its sums."""
    if x is None:
        return accumulate(where, LinearParams(*kernels.linear_wgrad(dy, None, bias)), into)
    check_linear_into(where, dy, x, bias, into)
    db = into.bias if bias else None
    if takes_sums(into.weight, dy.dtype) and takes_sums(db, dy.dtype):
        fused_linear.fused_linear_wgrad_into(dy, x, 1.0, into.weight, db)
        return into
    return accumulate(where, LinearParams(*kernels.linear_wgrad(dy, x, bias)), into)


def _of_sums(where: str, dy: Tensor, x: Tensor | None, sums: Tensor, into: LinearParams | None) -> LinearParams:
    """Compute dw alone, and db from its partial sums."""
    if into is None:
        return LinearParams(kernels.linear_wgrad(dy, x, False)[0], sum_parts(sums, dy.dtype))
    check_linear_into(where, dy, x, True, into)
    if x is not None:
        _wgrad_into(where, dy, x, False, LinearParams(into.weight, None))
    return _add_db(where, dy, sums, into)


def _add_db(where: str, dy: Tensor, sums: Tensor, into: LinearParams) -> LinearParams:
    wide = into.bias is not None and into.bias.dtype is sums.dtype
    accumulate(where, LinearParams(NO_GRADIENT, sum_parts(sums, sums.dtype if wide else dy.dtype)), into)
    return into


def check_linear_into(where: str, dy: Tensor, x: Tensor | None, bias: bool, into: LinearParams) -> None:
    shape = dy.new_empty(()).expand(dy.shape[-1], dy.shape[-1] if x is None else x.shape[-1])
    check_into(where, into, LinearParams(NO_GRADIENT if x is None else shape, shape[:, 0] if bias else None))


def linear_products(pending: LinearPending, cfg: LinearConfig, *, into: LinearParams) -> list[Product]:
    """`dw = dy^T x`, with its db, as a product to run later. A db alone, or from partial sums, is added at once."""
    return products_of("linear_wgrad", pending, pending.x, wants_bias(cfg, pending.needs), into)


def products_of(where: str, pending: Any, x: Any, bias: bool, into: LinearParams) -> list[Product]:
    """The product of pending.dy and x, or of the x that a function returns, to run later."""
    dy, sums = pending.dy, pending.sums
    if x is None:
        linear_gradients(where, dy, x, bias, into, sums)
        return []
    check_linear_into(where, dy, pending.x, bias, into)
    if bias and sums is not None:
        _add_db(where, dy, sums, into)
        bias = False
    return [Product.of(dy, x, into.weight, into.bias if bias else None)]


class _Layer(LinearLayer):
    def joins(self, cfg: Any) -> Hashable:
        return "linear"

    def kept(self, cfg: Any, needs: Needs, x: Tensor, weight: Tensor, y: Tensor) -> Any:
        return linear_kept(cfg, needs, x, weight, y)

    def pending(self, residuals: Any, dy: Tensor, rows: Tensor, cfg: Any) -> Any:
        return LinearPending.keep(cfg, residuals.needs, x=residuals.x, dy=dy)


linear = make_op(
    "linear",
    LinearConfig,
    init=linear_init,
    fwd=linear_fwd,
    dgrad=linear_dgrad,
    wgrad=linear_wgrad,
    bwd=linear_bwd,
    products=linear_products,
    layer=_Layer(),
    mixes="",
)
