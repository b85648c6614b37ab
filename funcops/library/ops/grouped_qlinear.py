"""`grouped_linear` in low precision: each group's rows, and its weight, are quantised separately.

    y_n = q(x)_n q(w_e)^T + b_e        e: the group of row n, offsets[e] <= n < offsets[e + 1]

    dx_n = q(dy)_n q(w_e)        dw_e = q(dy)^T q(x), db_e = sum of dy, each over the rows of e: 0 if it has no rows

x: `(rows, offsets)`, [N, I] and [E + 1], or with `gathered` or `weighted` as for `grouped_linear`; y, dy: [N, O]; w: [E, O, I], b:
[E, O] or None, of one float dtype. Each group is a `qlinear` of its rows, with the same q and recipes: a scale for a whole tensor
is one for a group, blocks along rows begin at the first row of a group, and delayed scaling has the scales [E, 3]. Rows after
offsets[E] are in no group: y and dx are 0 there, and they do not count for any scale.

w is a tensor, which every forward and backward quantises, or a `QWeight` of `quantize_params`, made once a step. Kept:
x in low precision, or x itself if the recipe has keep="input"; w, offsets and indices, aliases. Codes by rows in blocks are made
before x is gathered; codes with a scale for each group are made after, and also serve keep="col"; codes by columns pad each group
to whole blocks: at most E (block - 1) rows more. On CUDA the host reads no value. TransformerEngine's GroupedLinear.

Rows may be given as a `QTensor` in the recipe's blocks, made before they were sent (`funcops.dist.dispatch`): results have the same
bits. If dw is computed, the recipe must have keep="row", as others make dw's operand from x itself.

>>> import torch
>>> from funcops import GroupedQLinearConfig, grouped_qlinear, random
>>> from funcops.low_precision import Fp8Block
>>> cfg = GroupedQLinearConfig(2, 128, 128, recipe=Fp8Block(), bias=False)
>>> params, offsets = grouped_qlinear.init(cfg, key=random.key(0)), torch.tensor([0, 1, 4], dtype=torch.int32)
>>> y, residuals = grouped_qlinear.fwd(params, (torch.ones(4, 128), offsets), cfg)
>>> residuals.x.codes.dtype, residuals.x.codes.shape
(torch.uint8, torch.Size([4, 128]))
>>> grouped_qlinear.bwd(residuals, torch.ones(4, 128), cfg)[0].weight[:, 0, 0]
tensor([1., 3.])
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.engine.backend import wide
from funcops.engine.contract.by_config import ByConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, both_halves, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, WGRAD, Pending, saved, static
from funcops.engine.errors import check, fail, require
from funcops.library.formats import QTensor, check_quantized
from funcops.library.formats.recipes import LOW_FORMS, OPERANDS, PRODUCTS, Recipe, require_recipe
from funcops.library.formats.rounding import Rounding, rounding
from funcops.library.formats.scaled import Scaled
from funcops.library.kernels.grouped import grouped_wgrad, grouped_wgrad_into
from funcops.library.kernels.routing import of_rows
from funcops.library.ops import _quantized_groups as coded
from funcops.library.ops._low_config import LowConfig
from funcops.library.ops._quantized_groups import Groups
from funcops.library.ops._rounding_logs import backward_logs, forward_logs
from funcops.library.ops.coded_linear import add_all_but_dw, check_params, check_rounding, low_gradients, needs_low, rounding_of
from funcops.library.ops.grouped_linear import (
    GroupedLinearConfig,
    GroupedLinearParams,
    GroupedLinearResiduals,
    gradients_of_x,
    grouped_inputs,
    grouped_linear,
    grouped_linear_init,
    kept_inputs,
)
from funcops.library.ops.grouped_wgrads import Columns, GroupedProduct, GroupedScaledProduct

__all__ = ["GroupedQLinearConfig", "GroupedQLinearPending", "GroupedQLinearResiduals"]
__all__ += ["grouped_qlinear", "grouped_qlinear_bwd", "grouped_qlinear_dgrad"]
__all__ += ["grouped_qlinear_fwd", "grouped_qlinear_init", "grouped_qlinear_wgrad"]


@config
class GroupedQLinearConfig(LowConfig, GroupedLinearConfig):
    """The fields of `GroupedLinearConfig`, for stacked weights, and a `recipe` of `funcops.low_precision`. Raises `ValueError` for
    sizes that its blocks do not divide."""

    plain = GroupedLinearConfig
    stacked: ClassVar[bool] = True  # type: ignore[misc]

    def __post_init__(self) -> None:
        where = "GroupedQLinearConfig"
        require_recipe(where, self.recipe)
        super().__post_init__()
        for name in ("in_features", "out_features"):
            size, multiple = getattr(self, name), self.recipe.multiple
            require(size % multiple == 0, where, name, f"a multiple of {multiple} ({type(self.recipe).__name__})", size)
        formats = {name: getattr(self.recipe, name) for name in OPERANDS}
        low = self.recipe.wgrad == "low"
        for left, right in PRODUCTS[: 3 if low else 2]:
            one, other = formats[left], formats[right]
            wanted = f"of the kind of {right}'s, {other.scales!r}: groups are multiplied as codes, and by one kind"
            require(one.kind == other.kind, where, f"recipe.{left}.scales", wanted, repr(one.scales))
        for name, format in formats.items():
            if name[0] == "w":
                continue
            within = format.tile == (0, 0) or (format.tile[0] == 1 and format.tile[1] > 0)
            wanted = "(0, 0) or within a row, such as (1, 128): no scale is shared by rows of two groups"
            require(within, where, f"recipe.{name}.tile", wanted, format.tile)
            wanted = "False, as rows are gathered once for all their groups (one scale for each group)"
            require(not format.row_scaled, where, f"recipe.{name}.row_scaled", wanted, True)
        alike = not low or self.recipe.dy_col.tile == self.recipe.x_col.tile
        wanted = f"x_col's, {self.recipe.x_col.tile}, as dw takes both by one tile (or wgrad='high')"
        require(alike, where, "recipe.dy_col.tile", wanted, self.recipe.dy_col.tile)
        object.__setattr__(self, "group_dims", (self.experts,))

    @property
    def takes_codes(self) -> Any:
        return self.recipe.takes_codes


OF_WEIGHT = ("params.weight",)


class GroupedQLinearResiduals(GroupedLinearResiduals):
    x: Any = saved("[N, I] or [*, I]", needed_by=WGRAD, of=OF_WEIGHT, tree=True)
    weight: Any = saved("[E, O, I]", alias="params.weight", needed_by=DGRAD, of=("x.0",), tree=True)
    bias: Tensor | None = saved("[E, O]", alias="params.bias", needed_by=DGRAD, of=("x.3",))  # if weighted
    weights: Tensor | None = saved("[*, K]", alias="x.3", needed_by=DGRAD, of=("params.bias",))
    weights_order: Tensor | None = saved("[N]", alias="x.2", needed_by=DGRAD, of=("x.3", "params.bias"))
    amaxes: Tensor = saved("[E, 2]", needed_by=WGRAD, of=OF_WEIGHT)
    rounding: Tensor = saved("[E, 3] or [E, 2]", needed_by=DGRAD | WGRAD, of=("x.0", "params.weight"), tree=True)


class GroupedQLinearOfInputResiduals(GroupedQLinearResiduals):
    x: Tensor = saved("[N, I] or [*, I]", alias="x.0", needed_by=WGRAD, of=OF_WEIGHT)


GroupedQLinearKept = GroupedQLinearResiduals | GroupedQLinearOfInputResiduals


def _kept(cfg: GroupedQLinearConfig) -> type[GroupedQLinearKept]:
    return GroupedQLinearOfInputResiduals if cfg.recipe.keep == "input" else GroupedQLinearResiduals


class GroupedQLinearPending(Pending, static=("dtype",)):
    x: Any = saved("[N, I] or [*, I]", alias="residuals.x", needed_by=WGRAD, of=OF_WEIGHT, tree=True)
    dy: Any = saved("[N, O]", needed_by=WGRAD, of=OF_WEIGHT, tree=True)
    db: Tensor = saved("[E, O]", needed_by=WGRAD, of=("params.bias",))
    offsets: Tensor = saved("[E + 1]", alias="residuals.offsets", needed_by=WGRAD, of=OF_WEIGHT)
    order: Tensor | None = saved("[N]", alias="residuals.order", needed_by=WGRAD, of=OF_WEIGHT)
    amaxes: Tensor = saved("[E, 3]", needed_by=WGRAD, of=OF_WEIGHT)
    choices: int = static()  # K; 1 if not gathered
    rows: int = static()  # N


@init_of(GroupedQLinearConfig)
def grouped_qlinear_init(
    cfg: GroupedQLinearConfig, *, key: Tensor | None = None, device: Any = None, dtype: torch.dtype | None = None
) -> GroupedLinearParams:
    """The params that `grouped_linear_init` draws, in high precision."""
    return grouped_linear_init(cfg.linear, key=key, device=device, dtype=dtype)


@forward(GroupedQLinearConfig, GroupedLinearParams)
def grouped_qlinear_fwd(
    params: GroupedLinearParams, x: tuple[Any, ...], cfg: GroupedQLinearConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, GroupedQLinearKept | None]:
    """`y_n = q(x)_n q(w_e)^T + b_e`. x: as for `grouped_linear_fwd` -> y: [N, O]. Raises `ValueError` or `TypeError` for a
    wrong shape, dtype, device, format or recipe, and on the CPU for offsets that do not ascend from 0 to at most N;
    `RuntimeError` on a device without the formats."""
    where, recipe = "grouped_qlinear_fwd", cfg.recipe
    given = _given(where, x[0], cfg, needs) if isinstance(x, tuple) and x and isinstance(x[0], QTensor) else None
    flat, groups, scales = _checked(where, params, x if given is None else (given.outline(), *x[1:]), cfg)
    weight, amaxes, rounding = params.weight, None, rounding_of(params.weight, recipe)
    if isinstance(weight, Scaled):
        (row, amax_x), index = coded.scaled_rows(flat, recipe.x, groups, weight.scale[:, :1].reshape(-1)), None
        w, amax_w = coded.scaled_weights(weight, recipe)
        amaxes, rounding = torch.stack((amax_x, amax_w), 1), weight.scale
    else:
        row, index = coded.rows_in(flat, recipe.x, groups) if given is None else (given, groups.at())
        w = coded.weight_rows(weight, recipe)
    y = coded.product(row, index, w, params.bias, scales, groups, flat.dtype)
    own = kept_inputs(params, x, cfg) | dict(rounding=rounding, y_shape=y.shape, amaxes=amaxes)
    if recipe.keep != "input":
        ready = recipe.keep == "row" or (recipe.x is recipe.x_col and recipe.x.tile == (0, 0)) or not needs.param("weight")
        own["x"] = row if ready else coded.columns_in(flat, recipe.x_col, groups, recipe.hadamard)
        own["order"] = groups.order if ready and index is not None else None
    return y, _kept(cfg).keep(cfg, needs, **own)


def _given(where: str, rows: Any, cfg: GroupedQLinearConfig, needs: Needs) -> QTensor:
    """Check and return rows in codes."""
    recipe = cfg.recipe
    why = "scale is of all rows of an expert" if recipe.x.whole else ""
    if not why and recipe.keep != "row" and needs.param("weight"):
        why = f"keep={recipe.keep!r} makes dw's operand from x itself (keep='row' takes codes)"
    if why:
        fail(where, "x.0", f"a tensor, as {type(recipe).__name__}'s {why}", "a QTensor", TypeError)
    check_quantized(where, "x.0", rows, recipe.x, "row", torch.Size((len(rows.codes), cfg.in_features)))
    return rows  # type: ignore[no-any-return]


def _checked(
    where: str, params: GroupedLinearParams, x: tuple[Tensor, ...], cfg: GroupedQLinearConfig
) -> tuple[Tensor, Groups, Tensor | None]:
    """Return x as a matrix, the groups of its rows, and, if the bias is weighted, how often it counts in each row."""
    rows, offsets, order, last = grouped_inputs(where, x, cfg)
    check_params(where, params, rows, cfg)
    flat = rows.reshape(-1, cfg.in_features)
    if cfg.gathered:
        return flat, Groups(offsets, order, last.shape[-1], len(order)), None
    return flat, Groups(offsets, None, 1, len(flat)), of_rows(last, order) if cfg.weighted else None


@dgrad_of(ByConfig(GroupedQLinearConfig, _kept, (GroupedQLinearResiduals, GroupedQLinearOfInputResiduals)))
def grouped_qlinear_dgrad(
    residuals: GroupedQLinearKept, dy: Tensor, cfg: GroupedQLinearConfig
) -> tuple[tuple[Tensor | None, ...], GroupedQLinearPending | None]:
    """`dx_n = q(dy)_n q(w_e)`, summed by token if x was gathered; None for offsets and indices. dy: [N, O] -> dx like x, and the
    pending weight gradient: dy and x in low precision, db; with keep="input" x itself, and dy itself if dw is computed
    in high precision."""
    where = "grouped_qlinear_dgrad"
    recipe, needs, weight, offsets = cfg.recipe, residuals.needs, residuals.weight, residuals.offsets
    check(where, "dy", dy, residuals.y_shape, residuals.dtype, offsets)
    low, groups = needs_low(needs, recipe), Groups(offsets, None, 1, len(dy))
    check_rounding(where, residuals, recipe, low)
    row, col, amaxes = _of_gradient(dy, recipe, residuals.rounding, groups, bool(needs.input(0)), low, residuals.amaxes)

    def product() -> Tensor:
        return coded.product(row, None, coded.weight_columns(weight, recipe), None, None, groups, dy.dtype)

    pending = GroupedQLinearPending.keep(
        cfg,
        needs,
        x=residuals.x,
        dy=col if low else dy,
        db=_db_of(dy, cfg, residuals),
        offsets=offsets,
        order=residuals.order,
        amaxes=amaxes,
        choices=residuals.choices,
        rows=len(dy),
        dtype=dy.dtype,
    )
    return gradients_of_x(residuals, dy, cfg, product), pending


def _of_gradient(
    dy: Tensor, recipe: Recipe, rounding: Tensor | None, groups: Groups, rows: bool, columns: bool, amaxes: Tensor | None
) -> tuple[Any, QTensor | None, Tensor | None]:
    """dy by rows, for dx, and by columns, for dw; and the amaxes, dy's among them."""
    row: QTensor | None
    if recipe.delayed and rounding is not None:
        row, amax = coded.scaled_rows(dy, recipe.dy, groups, rounding[:, 2:].reshape(-1))
        return row, row, None if amaxes is None else torch.cat((amaxes, amax.unsqueeze(1)), 1)
    keys = coded.split_keys(rounding) if recipe.stochastic and rounding is not None and (rows or columns) else (None, None)
    row = coded.rows_in(dy, recipe.dy, groups, keys[0])[0] if rows else None
    if not columns or (row is not None and recipe.dy is recipe.dy_col and recipe.dy.tile == (0, 0)):
        return row, row, amaxes
    return row, coded.columns_in(dy, recipe.dy_col, groups, recipe.hadamard, keys[1]), amaxes


def _rounded_rows(params: GroupedLinearParams, x: tuple[Any, ...], cfg: GroupedQLinearConfig) -> Rounding:
    """The rounding of the rows of x: of its own, or, with a scale for each group, of the gathered rows of all groups."""
    where, recipe, weight = "grouped_qlinear_fwd", cfg.recipe, params.weight
    if isinstance(x[0], QTensor):
        remedy = "codes, which were made before they were sent: leave this step out of the logs (rounding_logs(skip=))"
        fail(where, "x.0", "a tensor, for the logs of its rounding", remedy, TypeError)
    flat, groups, _ = _checked(where, params, x, cfg)
    if isinstance(weight, Scaled):
        row, index = coded.scaled_rows(flat, recipe.x, groups, weight.scale[:, :1].reshape(-1))[0], None
    else:
        row, index = coded.rows_in(flat, recipe.x, groups)
    at = groups.at()
    if index is not None or at is None:
        return rounding(flat, row, groups.offsets[-1] if at is None else None)
    return rounding(flat.index_select(0, at), row, groups.offsets[-1])


def _rounded_dy(residuals: GroupedQLinearKept, dy: Tensor, cfg: GroupedQLinearConfig) -> Rounding | None:
    recipe, given = cfg.recipe, residuals.rounding
    if given is None and (recipe.delayed or recipe.stochastic):
        return None
    groups = Groups(residuals.offsets, None, 1, len(dy))
    return rounding(dy, _of_gradient(dy, recipe, given, groups, True, False, None)[0], residuals.offsets[-1])


def _db_of(dy: Tensor, cfg: GroupedQLinearConfig, residuals: Any) -> Tensor | None:
    needs, r = residuals.needs, residuals
    if not (cfg.bias and (needs.params is True or needs.param("bias"))):
        return None
    db = dy.new_zeros((cfg.experts, cfg.out_features), dtype=wide(dy.dtype))
    scales = of_rows(r.weights, r.weights_order) if cfg.weighted else None
    grouped_wgrad_into(dy, None, r.offsets, None, None, 1, scales, None, db)
    return db


@wgrad_of(GroupedQLinearPending, GroupedLinearParams)
def grouped_qlinear_wgrad(
    pending: GroupedQLinearPending, cfg: GroupedQLinearConfig, *, into: GroupedLinearParams | None = None
) -> GroupedLinearParams:
    """`dw_e = q(dy)^T q(x)`, and db, 0 for a group without rows; added to `into` if given. For a `Scaled` weight, dw is
    `Scaled` too, with the amaxes [E, 3] of x, w and dy, uint32 (`bits_of`); `into` takes the larger of these."""

    def dw(out: torch.dtype) -> Tensor | None:
        return None if pending.x is None else _dw(pending, cfg, out)

    return low_gradients("grouped_qlinear_wgrad", pending, pending.x, cfg, into, dw, GroupedLinearParams)


def grouped_qlinear_products(
    pending: GroupedQLinearPending, cfg: GroupedQLinearConfig, *, into: GroupedLinearParams
) -> list[GroupedProduct | GroupedScaledProduct]:
    """dw of all groups as a product to run later; db and the amaxes are added at once."""
    dw, out = add_all_but_dw("grouped_qlinear_wgrad", pending, cfg, into, GroupedLinearParams)
    if pending.x is None:
        return []
    if not isinstance(pending.dy, QTensor):
        return [GroupedProduct(_high_args(pending, cfg), dw, None)]
    return [GroupedScaledProduct(lambda: _columns(pending, cfg), cfg.recipe, dw, out)]


def _dw(pending: GroupedQLinearPending, cfg: GroupedQLinearConfig, out: torch.dtype) -> Tensor:
    if not isinstance(pending.dy, QTensor):
        return grouped_wgrad(*_high_args(pending, cfg), False)[0].to(out)  # type: ignore[no-any-return]
    return _columns(pending, cfg).product(out)


def _high_args(pending: GroupedQLinearPending, cfg: GroupedQLinearConfig) -> tuple[Any, ...]:
    """The arguments of `grouped_wgrad` for dw in high precision."""
    p, rows = pending, pending.x.reshape(-1, cfg.in_features)
    return p.dy, rows, p.offsets, None, p.order, p.choices, None


def _columns(pending: GroupedQLinearPending, cfg: GroupedQLinearConfig) -> Columns:
    """The operands of dw in low precision."""
    recipe, dy, x = cfg.recipe, pending.dy, pending.x
    groups = Groups(pending.offsets, pending.order, pending.choices, pending.rows)
    if not isinstance(x, QTensor):
        x = coded.columns_in(x.reshape(-1, cfg.in_features), recipe.x_col, groups, recipe.hadamard)
    elif x.side == "row":
        check_quantized("grouped_qlinear_wgrad", "pending.x", x, recipe.x_col.by_rows, "row", x.shape, dy.codes)
        x = coded.columns_of(x, groups)
    return coded.columns(dy, x, groups)


grouped_qlinear = make_op(
    "grouped_qlinear",
    GroupedQLinearConfig,
    init=grouped_qlinear_init,
    fwd=grouped_qlinear_fwd,
    dgrad=grouped_qlinear_dgrad,
    wgrad=grouped_qlinear_wgrad,
    products=grouped_qlinear_products,
    logs=(*forward_logs("rows", _rounded_rows, also=("amax",)), *backward_logs(_rounded_dy)),
)
grouped_qlinear_bwd = both_halves(grouped_qlinear, grouped_qlinear_dgrad, grouped_qlinear_wgrad)


def _low(cfg: GroupedLinearConfig, recipe: Recipe) -> tuple[Op, Op, GroupedQLinearConfig]:
    require(cfg.stacked, "with_recipe", "cfg.stacked", "True (a recipe takes weights as one leaf)", cfg.stacked)
    sizes = cfg.experts, cfg.in_features, cfg.out_features
    made = GroupedQLinearConfig(*sizes, recipe, bias=cfg.bias, gathered=cfg.gathered, weighted=cfg.weighted)
    return grouped_linear, grouped_qlinear, made


LOW_FORMS[GroupedLinearConfig] = _low
