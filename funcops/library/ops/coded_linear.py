"""The three products of a linear layer in low precision, on one rank or over ranks.

    y = the sum of parts of q(x) q(w)^T, and b        dx = the sum of parts of q(dy) q(w)        dw = q(dy)^T q(x)

`CodedLinear` computes them. What is sent between quantising and multiplying, or summed after a product, is a method of its own,
which a layer over ranks overrides. Below it are the checks and the weight gradient, which grouped layers share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.accumulators import accumulate, check_into, takes_sums
from funcops.engine.contract.by_config import ByConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.schema import NO_GRADIENT
from funcops.engine.errors import StaleResidualError, check, check_rows, describe, fail, require, short
from funcops.engine.trees import replace
from funcops.library.formats import QTensor, QWeight, check_quantized, turned
from funcops.library.formats.recipes import Recipe
from funcops.library.formats.scaled import Scaled, bits_of, join_amaxes
from funcops.library.kernels.norm import sum_parts
from funcops.library.kernels.scaled_mm import SERVED
from funcops.library.ops._low_operands import (
    Largest,
    col_of,
    dw_of,
    factors_of_dw,
    of_gradient,
    operands,
    row_of,
    scaled_tensor,
    scaled_weight,
)
from funcops.library.ops.linear import LinearParams, linear_init, wants_bias
from funcops.library.ops.linear_layer import LinearLayer
from funcops.library.ops.linear_wgrads import Product
from funcops.library.ops.qlinear_wgrads import ScaledProduct, product

P = TypeVar("P", bound=Any)


class CodedLinear(LinearLayer):
    """A linear layer in low precision. The methods up to `factors` say what is sent over ranks: here nothing is."""

    dense = False
    of_input: Any
    """The class of the residuals with x itself; the others have it in codes."""

    def keeps(self, config: type) -> ByConfig:
        return ByConfig(config, self.kept_class, (self._residuals, self.of_input))

    def init(self, cfg: Any, key: Tensor | None, device: Any, dtype: torch.dtype | None) -> LinearParams:
        return linear_init(cfg.linear, key=key, device=device, dtype=dtype)

    def largest(self, cfg: Any) -> Largest:
        """The function from the amax of this rank's part of a tensor to the amax of the whole; None on one rank."""
        return None

    def check_x(self, where: str, x: Tensor, cfg: Any) -> None:
        check_rows(where, "x", x, cfg.in_features)

    def operands(self, x: Tensor, cfg: Any, needs: Needs) -> tuple[QTensor, Any]:
        """x by rows, and the form of it that is saved."""
        return operands(x, cfg.recipe, needs, self.largest(cfg))

    def x_rows_of_all(self, row: QTensor, cfg: Any) -> QTensor:
        """The x by rows that the product for y reads."""
        return row

    def y_of(self, part: Tensor, cfg: Any) -> Tensor:
        """y without its bias, from this rank's product."""
        return part

    def dy_rows_of_all(self, row: QTensor, cfg: Any) -> QTensor:
        """The dy by rows that the product for dx reads."""
        return row

    def of_dy(self, dy: Tensor, key: Tensor | None, rows: bool, columns: bool, cfg: Any) -> tuple[QTensor | None, QTensor | None]:
        """The dy that the products read: by rows for dx, and by columns for dw."""
        return of_gradient(dy, cfg.recipe, key, rows, columns, self.largest(cfg))

    def factors(self, where: str, pending: Any, cfg: Any, sent: Any = None) -> tuple[Any, Any]:
        """The operands of dw: dy and x, by columns or in high precision. `sent`: x, if it is in flight already."""
        return factors_of_dw(where, pending.dy, pending.x, cfg.recipe, self.largest(cfg))

    def kept_class(self, cfg: Any) -> Any:
        """The class of the residuals."""
        return self.of_input if cfg.recipe.keep == "input" else self._residuals

    def run(self, params: Any, x: Tensor, cfg: Any, needs: Needs) -> tuple[Tensor, Any]:
        return self.from_prepared(self.prepared(x, params, cfg, needs), params, cfg, needs)

    def check(self, params: Any, x: Tensor, cfg: Any) -> None:
        check_params(f"{self.name}_fwd", params, x, cfg)

    def prepared(self, x: Tensor, params: Any, cfg: Any, needs: Needs) -> tuple[QTensor, Any, Tensor | None]:
        """x by rows, the form of it that is saved, and, with given scales, its amax, else None."""
        recipe, weight = cfg.recipe, params.weight
        if not isinstance(weight, Scaled):
            row, kept = self.operands(x, cfg, needs)
            return self.x_rows_of_all(row, cfg), kept, None
        row, amax = scaled_tensor(x, recipe.x, weight.scale[0:1], self.largest(cfg))
        kept = turned(row) if recipe.keep == "col" and needs.param("weight") else row
        return self.x_rows_of_all(row, cfg), kept, amax

    def from_prepared(self, given: Any, params: Any, cfg: Any, needs: Needs) -> tuple[Tensor, Any]:
        row, kept, amax = given
        recipe, weight = cfg.recipe, params.weight
        own: dict[str, Any] = {}
        if amax is None:
            w, rounding = row_of(weight, recipe, self.largest(cfg)), rounding_of(weight, recipe)
        else:
            w, amax_w = scaled_weight(weight, recipe, self.largest(cfg))
            rounding, own["amaxes"] = weight.scale, torch.cat((amax, amax_w))
        y = self.y_of(product(row, w, row.dtype, recipe.emulate), cfg)
        y = y if params.bias is None else y.add_(params.bias)
        own |= dict(x=kept, weight=weight, rounding=rounding, y_shape=y.shape, dtype=y.dtype)
        return y, self.kept_class(cfg).keep(cfg, needs, **own)

    def read_dy(
        self, where: str, residuals: Any, dy: Tensor, cfg: Any, sums: Tensor | None = None, into: Any = None
    ) -> tuple[QTensor | None, Any]:
        """dy by rows, and the pending weight gradient: dy and x in low precision, db; x or dy itself where the recipe keeps or
        reads it."""
        recipe, r, needs, rounding = cfg.recipe, residuals, residuals.needs, residuals.rounding
        self.check_dy(where, dy, r, a_tensor(r.x if r.weight is None else r.weight))
        low = needs_low(needs, recipe)  # also if x is recomputed later
        check_rounding(where, r, recipe, low)
        row = col = None
        amaxes = getattr(r, "amaxes", None)
        if recipe.delayed and rounding is not None:
            own, amax = scaled_tensor(dy, recipe.dy, rounding[2:3], self.largest(cfg))
            row = self.dy_rows_of_all(own, cfg)
            col = turned(row) if low else None
            amaxes = None if amaxes is None else torch.cat((amaxes, amax))
        elif needs.x or low:
            row, col = self.of_dy(dy, rounding, bool(needs.x), low, cfg)
        own_dy, db = col if low else dy, db_of(dy, cfg, needs, sums)
        pending = self._pending.keep(cfg, needs, x=r.x, dy=own_dy, db=db, amaxes=amaxes, dtype=dy.dtype)
        if into is not None and pending is not None:
            check_low_into(where, pending, pending.x, cfg, into)
        return row if needs.x else None, pending

    def part(self, row: QTensor, residuals: Any, cfg: Any) -> Tensor:
        col = col_of(residuals.weight, cfg.recipe, self.largest(cfg))
        return product(row, col, residuals.dtype, cfg.recipe.emulate)

    def check_dy(self, where: str, dy: Tensor, residuals: Any, like: Tensor | None) -> None:
        check(where, "dy", dy, residuals.y_shape, residuals.dtype, like)

    def gradients(self, where: str, pending: Any, cfg: Any, into: LinearParams | None, sent: Any = None) -> LinearParams:
        def dw(out: torch.dtype) -> Tensor | None:
            return None if pending.x is None else dw_of(*self.factors(where, pending, cfg, sent), cfg.recipe, out)

        return low_gradients(where, pending, pending.x, cfg, into, dw)

    def products(self, pending: Any, cfg: Any, *, into: LinearParams) -> list[Any]:
        where = f"{self.name}_wgrad"
        dw, out = add_all_but_dw(where, pending, cfg, into, LinearParams)
        if pending.x is None:
            return []
        if not isinstance(pending.dy, QTensor):
            return [Product.of(*self.factors(where, pending, cfg), dw, None)]
        return [ScaledProduct(pending.dy, lambda: self.factors(where, pending, cfg)[1], cfg.recipe, dw, out)]


def rounding_of(weight: Any, recipe: Recipe) -> Tensor | None:
    """The key by which dy is rounded stochastically, else None. It is saved even if the weight is not."""
    return weight.key if recipe.stochastic else None


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
    like: Any = None if x is None else one.new_empty((), dtype=pending.dtype).expand(*cfg.group_dims, *cfg.weight_shape)
    check_into(where, sums, params(like, db))
    return sums, db


def check_params(where: str, params: Any, x: Tensor, cfg: Any) -> None:
    """Check the params of a config with a recipe: their shapes, x's dtype and device, and that the device has the formats."""
    recipe, weight, bias, groups = cfg.recipe, params.weight, params.bias, cfg.group_dims
    if isinstance(weight, Scaled) != recipe.delayed:
        wanted = "a Scaled weight, from quantize_params(params, cfg, state)" if recipe.delayed else "without scales of its own"
        fail(where, "params.weight", f"{wanted} (the recipe is {type(recipe).__name__})", describe(weight), TypeError)
    if isinstance(weight, Scaled):
        unmeasured = isinstance(weight.scale, Tensor) and weight.scale.shape[-1:] == (0,)  # in a first step
        known = 0 if unmeasured else 3
        check(where, "params.weight.scale", weight.scale, (*groups, known), torch.float32, x)
        if weight.scale.requires_grad:
            wanted = "without requires_grad (autograd sums gradients, and an amax is a maximum: take it with split_amaxes)"
            fail(where, "params.weight.scale", wanted, "one with it")
        weight = weight.value
    if isinstance(weight, QWeight):
        _check_quantized(where, weight, x, cfg)
    elif recipe.stochastic:
        wanted = (
            "a QWeight with a key, from quantize_params(params, cfg, key=key), or quantize_weights(model, key=key) of a module "
            "(the recipe rounds dy stochastically; stochastic=False rounds to nearest, as a tied weight needs, or skip its layer)"
        )
        fail(where, "params.weight", wanted, describe(weight), TypeError)
    else:
        check(where, "params.weight", weight, (*groups, *cfg.weight_shape), x.dtype, x)
    if cfg.bias:
        check(where, "params.bias", bias, (*groups, *cfg.bias_shape), x.dtype, x)
    elif bias is not None:
        require(False, where, "params.bias", "None (cfg.bias is False)", "a tensor")
    if x.is_cuda and not recipe.emulate and torch.cuda.is_available():
        have = torch.cuda.get_device_capability(x.device)
        needed = f"of capability {recipe.capability} or above, or the recipe with emulate=True ({type(recipe).__name__})"
        if torch.version.hip is not None and not groups:  # whose capability is a number of another kind
            fail(where, "x", f"on a CUDA device {needed}", "a device of ROCm", RuntimeError)
        if have < recipe.capability:
            fail(where, "x", f"on a device {needed}", f"capability {have}", RuntimeError)
        if not groups and (8, 9) <= have < (9, 0) and not SERVED:  # our own kernel begins with Hopper
            needed = f"of CUDA 12.9 or later, whose library multiplies codes on capability {have}, or a recipe with emulate=True"
            fail(where, "torch", needed, f"CUDA {torch.version.cuda}", RuntimeError)


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
        format = cfg.recipe.w if side == "row" else cfg.recipe.w_col
        check_quantized(where, name, q, format, side, torch.Size(cfg.weight_shape), x, cfg.group_dims)
        if q.dtype is not x.dtype:
            fail(
                where,
                name,
                f"made from {short(x.dtype)}, like x",
                f"{short(q.dtype)}: quantize_params(params, cfg, dtype={x.dtype})",
                TypeError,
            )


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
