"""Linear layer in low precision.

    y = q(x) q(w)^T + b

    dx = q(dy) q(w)        dw = q(dy)^T q(x), summed over rows        db = sum over rows of dy

x: [*, I], y, dy: [*, O]; w: [O, I]; b: [O] or None, of one float dtype, as for `linear`. q rounds to a format and back
(`funcops.formats`). Each product quantises its operands along the dim that it sums over: x by rows for y and by columns for dw, w
by rows for y and by columns for dx, dy by rows for dx and by columns for dw. Gradients are straight through: they treat q as the
identity.

`cfg.recipe` chooses the formats (`funcops.low_precision`). w is a tensor, which every forward and backward quantises, or
a `QWeight` of `quantize_params`, made once a step. For `Fp8Delayed` it has scales beside it (`Scaled`), and dparams has the amaxes.
Kept: x in low precision, or x itself if the recipe has keep="input"; w, an alias.

>>> import torch
>>> from funcops import QLinearConfig, qlinear, random
>>> from funcops.low_precision import Fp8Block
>>> cfg = QLinearConfig(128, 128, recipe=Fp8Block(), bias=False)
>>> params, x = qlinear.init(cfg, key=random.key(0)), torch.ones(4, 128)
>>> y, residuals = qlinear.fwd(params, x, cfg)
>>> residuals.x.codes.dtype, residuals.x.codes.shape
(torch.uint8, torch.Size([4, 128]))
>>> residuals.weight is params.weight
True
>>> dparams, dx = qlinear.bwd(residuals, torch.ones(4, 128), cfg)
>>> dparams.weight[0, :2]
tensor([4., 4.])
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from funcops.backend import wide
from funcops.contract.accumulators import accumulate, check_into, takes_sums
from funcops.contract.by_config import ByConfig
from funcops.contract.needs import Needs
from funcops.contract.op import Op, both_halves, config, dgrad_of, forward, init_of, make_op, raw_of, wgrad_of
from funcops.contract.renamed import old_names, warn
from funcops.contract.schema import DGRAD, NO_GRADIENT, WGRAD, Pending, Residuals, saved, static
from funcops.errors import StaleResidualError, check, check_rows, describe, fail, require, short
from funcops.formats import QTensor, QWeight, check_quantized, turned
from funcops.formats.recipes import LOW_FORMS, Recipe, require_recipe
from funcops.formats.scaled import Scaled, bits_of, join_amaxes
from funcops.kernels.norm import sum_parts
from funcops.ops._low_config import LowConfig
from funcops.ops._low_operands import (
    col_of,
    dw_of,
    factors_of_dw,
    of_gradient,
    operands,
    row_of,
    scaled_tensor,
    scaled_weight,
    y_of,
)
from funcops.ops.linear import LinearConfig, LinearParams, linear, linear_init, wants_bias
from funcops.ops.linear_layer import LinearLayer
from funcops.ops.linear_wgrads import Product
from funcops.ops.qlinear_wgrads import ScaledProduct, product
from funcops.trees import replace

__all__ = ["QLinearConfig", "QLinearPending", "QLinearResiduals"]
__all__ += ["qlinear", "qlinear_bwd", "qlinear_dgrad", "qlinear_fwd", "qlinear_init", "qlinear_wgrad"]

P = TypeVar("P", bound=Any)
Factors = Callable[[str, Any, Any], tuple[Any, Any]]  # (where, pending, cfg) -> the operands of dw


@config
class QLinearConfig(LowConfig):
    """The fields of `LinearConfig`, and a `recipe` of `funcops.low_precision`. Raises `ValueError` for sizes that its blocks do not
    divide."""

    in_features: int = field(kw_only=False)
    out_features: int = field(kw_only=False)
    recipe: Recipe = field(kw_only=False)
    bias: bool = True

    def __post_init__(self) -> None:
        require_recipe("QLinearConfig", self.recipe)
        for name in ("in_features", "out_features"):
            size, multiple = getattr(self, name), self.recipe.multiple
            require(size >= 1, "QLinearConfig", name, "at least 1", size)
            require(size % multiple == 0, "QLinearConfig", name, f"a multiple of {multiple} ({type(self.recipe).__name__})", size)
        object.__setattr__(self, "linear", LinearConfig(self.in_features, self.out_features, bias=self.bias))

    linear: ClassVar[LinearConfig]

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.in_features, self.out_features


class QLinearResiduals(Residuals, static=("dtype",)):
    x: QTensor = saved("[*, I]", needed_by=WGRAD, of=("params.weight",), tree=True)
    weight: Any = saved("[O, I]", alias="params.weight", needed_by=DGRAD, tree=True)
    amaxes: Tensor = saved("[2]", needed_by=WGRAD, of=("params.weight",))
    rounding: Tensor = saved("[3] or [2]", needed_by=DGRAD | WGRAD, of=("x", "params.weight"), tree=True)
    y_shape: torch.Size = static()


class QLinearOfInputResiduals(Residuals, static=("dtype",)):
    x: Tensor = saved("[*, I]", alias="x", needed_by=WGRAD, of=("params.weight",))
    weight: Any = saved("[O, I]", alias="params.weight", needed_by=DGRAD, tree=True)
    rounding: Tensor = saved("[2]", needed_by=DGRAD | WGRAD, of=("x", "params.weight"), tree=True)
    y_shape: torch.Size = static()


QLinearKept = QLinearResiduals | QLinearOfInputResiduals


def _kept(cfg: QLinearConfig) -> type[QLinearKept]:
    return QLinearOfInputResiduals if cfg.recipe.keep == "input" else QLinearResiduals


class QLinearPending(Pending, static=("dtype",)):
    x: Any = saved("[*, I]", alias="residuals.x", needed_by=WGRAD, of=("params.weight",), tree=True)
    dy: Any = saved("[*, O]", needed_by=WGRAD, of=("params.weight",), tree=True)
    db: Tensor = saved("[O]", needed_by=WGRAD, of=("params.bias",))
    amaxes: Tensor = saved("[3]", needed_by=WGRAD, of=("params.weight",))


@init_of(QLinearConfig)
def qlinear_init(
    cfg: QLinearConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> LinearParams:
    """The params that `linear_init` draws, in high precision."""
    return linear_init(cfg.linear, key=key, device=device, dtype=dtype)


@forward(QLinearConfig, LinearParams)
def qlinear_fwd(
    params: LinearParams, x: Tensor, cfg: QLinearConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, QLinearKept | None]:
    """`y = q(x) q(w)^T + b`. x: [*, I] -> y: [*, O]. Raises `ValueError` or `TypeError` for a wrong shape, dtype, device, format or
    recipe, and `RuntimeError` on a device without the formats."""
    where, recipe, weight = "qlinear_fwd", cfg.recipe, params.weight
    check_rows(where, "x", x, cfg.in_features)
    check_params(where, params, x, cfg)
    if not isinstance(weight, Scaled):
        return qlinear_of(*operands(x, recipe, needs), params, cfg, needs)
    (row, amax_x), (w, amax_w) = scaled_tensor(x, recipe.x, weight.scale[0:1]), scaled_weight(weight, recipe)
    kept = turned(row) if recipe.keep == "col" and needs.param("weight") else row
    y, amaxes = y_of(row, w, params.bias, recipe.emulate), torch.cat((amax_x, amax_w))
    return y, QLinearResiduals.keep(
        cfg, needs, x=kept, weight=weight, amaxes=amaxes, rounding=weight.scale, y_shape=y.shape, dtype=y.dtype
    )


def rounding_of(weight: Any, recipe: Recipe) -> Tensor | None:
    """The key by which dy is rounded stochastically, else None. It is saved even if the weight is not."""
    return weight.key if recipe.stochastic else None


def qlinear_of(
    row: QTensor, kept: Any, params: LinearParams, cfg: QLinearConfig, needs: Needs
) -> tuple[Tensor, QLinearKept | None]:
    """Return y and residuals, after all checks, from x by rows and the form of x that is saved."""
    y = y_of(row, row_of(params.weight, cfg.recipe), params.bias, cfg.recipe.emulate)
    rounding = rounding_of(params.weight, cfg.recipe)
    own: Any = dict(x=kept, weight=params.weight, rounding=rounding, y_shape=y.shape, dtype=y.dtype)
    return y, _kept(cfg).keep(cfg, needs, **own)


@dgrad_of(ByConfig(QLinearConfig, _kept, (QLinearResiduals, QLinearOfInputResiduals)))
def qlinear_dgrad(
    residuals: QLinearKept, dy: Tensor, cfg: QLinearConfig, sums: Tensor | None = None
) -> tuple[Tensor, QLinearPending | None]:
    """`dx = q(dy) q(w)`. dy: [*, O] -> dx: [*, I], and the pending weight gradient: dy and x in low precision, db; with
    keep="input" x itself, and dy itself if dw is computed in high precision."""
    where, recipe, needs, weight = "qlinear_dgrad", cfg.recipe, residuals.needs, residuals.weight
    check(where, "dy", dy, residuals.y_shape, residuals.dtype, a_tensor(weight if residuals.x is None else residuals.x))
    low = needs_low(needs, recipe)  # also if x is recomputed later
    check_rounding(where, residuals, recipe, low)
    row = col = None
    amaxes = residuals.amaxes if isinstance(residuals, QLinearResiduals) else None
    if recipe.delayed and residuals.rounding is not None:
        row, amax = scaled_tensor(dy, recipe.dy, residuals.rounding[2:3])
        col = turned(row) if low else None
        amaxes = None if amaxes is None else torch.cat((amaxes, amax))
    elif needs.x or low:
        row, col = of_gradient(dy, recipe, residuals.rounding, bool(needs.x), low)
    dx = NO_GRADIENT
    if needs.x and row is not None:
        dx = product(row, col_of(weight, recipe), dy.dtype, recipe.emulate)
    kept = col if low else dy
    db = db_of(dy, cfg, needs, sums)
    return dx, QLinearPending.keep(cfg, needs, x=residuals.x, dy=kept, db=db, amaxes=amaxes, dtype=dy.dtype)


@wgrad_of(QLinearPending, LinearParams)
def qlinear_wgrad(pending: QLinearPending, cfg: QLinearConfig, *, into: LinearParams | None = None) -> LinearParams:
    """`dw = q(dy)^T q(x)`, and db; added to `into` if given. For a `Scaled` weight, dw is `Scaled` too, with
    the amaxes [3] of x, w and dy, uint32 (`funcops.formats.scaled.bits_of`); `into` takes the larger of these."""
    return low_wgrad("qlinear_wgrad", pending, cfg, into, _factors)


def qlinear_products(pending: QLinearPending, cfg: QLinearConfig, *, into: LinearParams) -> list[Any]:
    """The weight's gradient as a product to run later."""
    return low_products("qlinear_wgrad", pending, cfg, into, _factors)


def _factors(where: str, pending: QLinearPending, cfg: QLinearConfig) -> tuple[Any, Any]:
    return factors_of_dw(where, pending.dy, pending.x, cfg.recipe)


def low_wgrad(where: str, pending: Any, cfg: Any, into: LinearParams | None, factors: Factors) -> LinearParams:
    """The gradients of params, the weight's from the operands `factors(where, pending, cfg)`; added to `into`, if given, after a
    check."""

    def dw(out: torch.dtype) -> Tensor | None:
        return None if pending.x is None else dw_of(*factors(where, pending, cfg), cfg.recipe, out)

    return low_gradients(where, pending, pending.x, cfg, into, dw)


def low_products(where: str, pending: Any, cfg: Any, into: LinearParams, factors: Factors) -> list[Any]:
    """The weight's gradient as a product to run later; db and the amaxes are added at once."""
    dw, out = add_all_but_dw(where, pending, cfg, into, LinearParams)
    if pending.x is None:
        return []
    if not isinstance(pending.dy, QTensor):
        return [Product.of(*factors(where, pending, cfg), dw, None)]
    return [ScaledProduct(pending.dy, lambda: factors(where, pending, cfg)[1], cfg.recipe, dw, out)]


def add_all_but_dw(where: str, pending: Any, cfg: Any, into: P, params: type[P]) -> tuple[Any, torch.dtype]:
    """Check the accumulators, and add db and the amaxes. Return the weight's accumulator, and the dtype of its product."""
    sums, db = check_low_into(where, pending, pending.x, cfg, into, params)
    _add_rest(where, pending, params(NO_GRADIENT, db), sums, into)
    return sums.weight, wide(pending.dtype) if takes_sums(sums.weight, pending.dtype) else pending.dtype


def low_gradients(
    where: str,
    pending: Any,
    x: Any,
    cfg: Any,
    into: P | None,
    dw: Callable[[torch.dtype], Any],
    params: type[P] = LinearParams,  # type: ignore[assignment]
) -> P:
    """The gradients of params, the weight's from `dw(dtype)`; added to `into`, if given, after a check."""
    dtype = pending.dtype
    if into is None:
        gradient: Any = dw(dtype) if pending.amaxes is None else Scaled(dw(dtype), bits_of(pending.amaxes), None)
        return params(gradient, None if pending.db is None else pending.db.to(dtype, copy=True))
    sums, db = check_low_into(where, pending, x, cfg, into, params)
    _add_rest(where, pending, params(dw(wide(dtype) if takes_sums(sums.weight, dtype) else dtype), db), sums, into)
    return into


def _add_rest(where: str, pending: Any, found: Any, sums: Any, into: Any) -> None:
    """Add gradients to accumulators: db unrounded if its accumulator is wide enough, and the amaxes by their maximum."""
    accumulate(where, replace(found, bias=pending.db) if takes_sums(sums.bias, pending.dtype) else found, sums)
    if pending.amaxes is not None:
        join_amaxes(into.weight.scale, pending.amaxes)


def check_low_into(
    where: str,
    pending: Any,
    x: Any,
    cfg: Any,
    into: P,
    params: type[P] = LinearParams,  # type: ignore[assignment]
) -> tuple[P, Tensor | None]:
    """Check the accumulators. Return them without the amaxes, and db in the dtype of a gradient."""
    sums, db = _sums(where, into, pending.amaxes, cfg, params), None if pending.db is None else pending.db.to(pending.dtype)
    one: Any = a_tensor(x)
    like: Any = None if x is None else one.new_empty((), dtype=pending.dtype).expand(*cfg.group_dims, *cfg.linear.weight_shape)
    check_into(where, sums, params(like, db))
    return sums, db


def check_params(where: str, params: Any, x: Tensor, cfg: Any) -> None:
    """Check the params of a config with a recipe: their shapes, x's dtype and device, and that the device has the formats."""
    recipe, weight, bias, groups = cfg.recipe, params.weight, params.bias, cfg.group_dims
    if isinstance(weight, Scaled) != recipe.delayed:
        wanted = "a Scaled weight, from quantize_params(params, cfg, state)" if recipe.delayed else "without scales of its own"
        fail(where, "params.weight", f"{wanted} (the recipe is {type(recipe).__name__})", describe(weight), TypeError)
    if isinstance(weight, Scaled):
        check(where, "params.weight.scale", weight.scale, (*groups, 3), torch.float32, x)
        if weight.scale.requires_grad:
            wanted = "without requires_grad (autograd sums gradients, and an amax is a maximum: take it with split_amaxes)"
            fail(where, "params.weight.scale", wanted, "one with it")
        weight = weight.value
    if isinstance(weight, QWeight):
        _check_quantized(where, weight, x, cfg)
    elif recipe.stochastic:
        wanted = "a QWeight with a key, from quantize_params(params, cfg, key=key) (the recipe rounds dy stochastically)"
        fail(where, "params.weight", wanted, describe(weight), TypeError)
    else:
        check(where, "params.weight", weight, (*groups, *cfg.linear.weight_shape), x.dtype, x)
    if cfg.bias:
        check(where, "params.bias", bias, (*groups, *cfg.linear.bias_shape), x.dtype, x)
    elif bias is not None:
        require(False, where, "params.bias", "None (cfg.bias is False)", "a tensor")
    if x.is_cuda and not recipe.emulate and torch.cuda.is_available():
        have = torch.cuda.get_device_capability(x.device)
        needed = f"of capability {recipe.capability} or above, or the recipe with emulate=True ({type(recipe).__name__})"
        if have < recipe.capability:
            fail(where, "x", f"on a device {needed}", f"capability {have}", RuntimeError)


def _check_quantized(where: str, weight: QWeight, x: Tensor, cfg: Any) -> None:
    if not torch.compiler.is_compiling() and weight.stale():
        raise StaleResidualError(
            f"{where}: params.weight must have the codes of the current weight, got codes of an older one. "
            "Make a new working tree after an update: quantize_params(params, cfg)"
        )
    if cfg.recipe.stochastic:
        check(where, "params.weight.key", weight.key, (*cfg.group_dims, 2), torch.int64, x)
    for side in ("row", "col"):
        q = getattr(weight, side)
        if q is None and side == "col":
            continue
        name = f"params.weight.{side}"
        check_quantized(where, name, q, cfg.recipe.w, side, torch.Size(cfg.linear.weight_shape), x, cfg.group_dims)
        if q.dtype is not x.dtype:
            fail(where, name, f"made from {short(x.dtype)}, like x", short(q.dtype), TypeError)


def needs_low(needs: Needs, recipe: Recipe) -> bool:
    """Whether the weight's gradient is needed, in low precision."""
    return recipe.wgrad == "low" and (needs.params is True or needs.param("weight"))


def check_rounding(where: str, residuals: Any, recipe: Recipe, low: bool) -> None:
    if (residuals.needs.x or low) and (recipe.delayed or recipe.stochastic) and residuals.rounding is None:
        fail(where, "residuals.rounding", "kept (the recipe rounds dy by it)", "None")


def db_of(dy: Tensor, cfg: Any, needs: Needs, sums: Tensor | None = None) -> Tensor | None:
    """db in the wide dtype, from dy or from its sums over blocks of rows."""
    if not wants_bias(cfg, needs):
        return None
    dtype = wide(dy.dtype)
    return torch.sum(dy.reshape(-1, dy.shape[-1]), 0, dtype=dtype) if sums is None else sum_parts(sums, dtype)  # type: ignore[no-any-return]


class LowLayer(LinearLayer):
    """The hooks of a linear layer in low precision, whose operands are codes."""

    dense = False


def a_tensor(kept: Any) -> Tensor | None:
    """A tensor on the device of a saved field; None if the field is None."""
    kept = kept.value if isinstance(kept, Scaled) else kept
    kept = kept.row if isinstance(kept, QWeight) else kept
    return kept.codes if isinstance(kept, QTensor) else kept


def _sums(where: str, into: P, amaxes: Tensor | None, cfg: Any, params: type[P]) -> P:
    """The accumulators without the amaxes, which are checked here."""
    if amaxes is None:
        return into
    if not isinstance(into.weight, Scaled):
        wanted = "Scaled, with a place for amaxes (funcops.low_precision.gradients_like(work) makes accumulators)"
        fail(where, "into.weight", wanted, describe(into.weight), TypeError)
    check(where, "into.weight.scale", into.weight.scale, (*cfg.group_dims, 3), torch.uint32, amaxes)
    require(into.weight.scale.is_contiguous(), where, "into.weight.scale", "contiguous", "one with other strides")
    return params(into.weight.value, into.bias)


class _Layer(LowLayer):
    def prepares(self, cfg: Any) -> Hashable:
        return None if cfg.recipe.delayed else cfg.recipe  # with delayed scaling each has a scale of its own

    def prepared(self, x: Tensor, params: Any, cfg: Any, needs: Needs) -> Any:
        return operands(x, cfg.recipe, needs)

    def from_prepared(self, given: Any, params: Any, cfg: Any, needs: Needs) -> tuple[Tensor, Any]:
        row, kept = given
        return qlinear_of(row, kept, params, cfg, needs)

    def check(self, params: Any, x: Tensor, cfg: Any) -> None:
        check_params("qlinear_fwd", params, x, cfg)

    def joins(self, cfg: Any) -> Hashable:
        return cfg.recipe if cfg.recipe.keep == "input" and cfg.recipe.wgrad == "low" else None

    def part_of_dx(self, residuals: Any, dy: Tensor, cfg: Any) -> tuple[Tensor, Any]:
        return raw_of(qlinear_dgrad)(residuals, dy, cfg)  # type: ignore[no-any-return]

    def shared(self, pending: Any, cfg: Any) -> dict[str, Any] | None:
        return {"x": factors_of_dw("qlinear_wgrad", pending.dy, pending.x, cfg.recipe)[1]}


qlinear = make_op(
    "qlinear",
    QLinearConfig,
    init=qlinear_init,
    fwd=qlinear_fwd,
    dgrad=qlinear_dgrad,
    wgrad=qlinear_wgrad,
    products=qlinear_products,
    layer=_Layer(),
)
qlinear_bwd = both_halves(qlinear, qlinear_dgrad, qlinear_wgrad)


def op_of(recipe: Recipe) -> Op:
    """Deprecated: return `qlinear`, which is the op of every recipe."""
    warn("funcops.low_precision", "op_of(recipe)", "funcops.qlinear, the op of every recipe")
    return qlinear


def _low(cfg: LinearConfig, recipe: Recipe) -> tuple[Op, Op, QLinearConfig]:
    return linear, qlinear, QLinearConfig(cfg.in_features, cfg.out_features, recipe, bias=cfg.bias)


LOW_FORMS[LinearConfig] = _low


if not TYPE_CHECKING:  # a checker would take every name for one of the module's
    __getattr__ = old_names(
        __name__,
        qlinear_of_input="qlinear",
        qlinear_of_input_fwd="qlinear_fwd",
        qlinear_of_input_dgrad="qlinear_dgrad",
        qlinear_of_input_bwd="qlinear_bwd",
    )
