"""`quantization_report`: what a recipe of low precision does to each linear layer, measured on one batch.

    y' = q(x) q(w)^T        dx' = q(dy) q(w)        dw' = q(dy)^T q(x)        error of y: |y' - y| / |y|, in norm

where q rounds to the format of its operand and back, by blocks along the dimension that the product sums over.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine import random
from funcops.engine.compose.chain import ChainConfig, chain
from funcops.engine.compose.parallel import ParallelConfig, parallel
from funcops.engine.compose.repeat import RepeatConfig, repeat
from funcops.engine.compose.skip import SkipConfig, skip
from funcops.engine.contract.op import Op
from funcops.engine.contract.walk import Inside, Part, rewrite, steps
from funcops.engine.errors import (
    check,
    describe,
    fail,
    few,
    in_html,
    join_path,
    on_screen,
    require,
    require_count,
    require_flag,
    require_number,
)
from funcops.engine.trees import WithExtras, tensors
from funcops.library.formats import Format, QTensor, quantize_tensor, turned
from funcops.library.formats.recipes import OPERANDS, low_form_of, require_recipe
from funcops.library.formats.rounding import rounding
from funcops.library.kernels.grouped import gathered, groups_of
from funcops.library.kernels.quantize import HADAMARD
from funcops.library.ops.expert_steps import by_steps
from funcops.library.ops.experts import ExpertsConfig, experts
from funcops.library.ops.grouped_linear import GroupedLinearConfig, GroupedLinearPending, GroupedLinearResiduals, grouped_linear
from funcops.library.ops.linear import LinearConfig, LinearPending, LinearResiduals, linear
from funcops.low_precision.total import WHERE, AddedErrors, ModelErrors, Place, WideLayers, places
from funcops.memory.policy import with_policy

OPS: dict[type, Op] = {
    ChainConfig: chain,
    RepeatConfig: repeat,
    SkipConfig: skip,
    ParallelConfig: parallel,
    LinearConfig: linear,
    GroupedLinearConfig: grouped_linear,
    ExpertsConfig: experts,
}


class Operand(NamedTuple):
    """`amax`: the largest |element|. `zeros`: the share of nonzero elements that become 0, among all. `saturated`: the share of
    elements that are clipped to the largest code of their tile.

    >>> import torch
    >>> from funcops import LinearConfig, linear, quantization_report, random
    >>> from funcops.low_precision import Fp8Block, Operand
    >>> cfg = LinearConfig(128, 128)
    >>> found = quantization_report(linear.init(cfg, key=random.key(0)), torch.ones(4, 128), cfg, Fp8Block())
    >>> isinstance(found.rows[0].operands["x"], Operand), found.rows[0].operands["x"]
    (True, Operand(amax=1.0, zeros=0.0, saturated=0.0))
    """

    amax: float
    zeros: float
    saturated: float


class LinearErrors(NamedTuple):
    """The effects of rounding on the linear layer at `path`, whose weight has that `shape`: on its `operands` x, w and dy, and the
    relative errors of `y`, `dx` and `dw`; `worst` is the largest of these. `step`: its path in the config, where the layers of a
    repeat are one, `*`. A grouped layer has one row: groups are rounded separately, and groups without rows are left out.
    `adds`: with `total`, what the layer adds to the error of the whole model's gradients.

    >>> import torch
    >>> from funcops import LinearConfig, linear, quantization_report, random
    >>> from funcops.low_precision import Fp8Block, LinearErrors
    >>> cfg = LinearConfig(128, 64)
    >>> row = quantization_report(linear.init(cfg, key=random.key(0)), torch.ones(4, 128), cfg, Fp8Block()).rows[0]
    >>> isinstance(row, LinearErrors), row.shape, row.worst == max(row.y, row.dx, row.dw)
    (True, (64, 128), True)
    """

    path: str
    step: str
    shape: tuple[int, ...]
    operands: dict[str, Operand]  # of x, w, dy
    y: float
    dx: float
    dw: float
    adds: AddedErrors | None = None

    @property
    def worst(self) -> float:
        return max(self.y, self.dx, self.dw, key=lambda error: (error != error, error))


class QuantizationReport:
    """A row for each linear layer, in the model's order. `str()` and notebooks render it; `rows`, each `LinearErrors`, and
    `dicts()` are the data. `not_measured`: the paths of layers that could take a recipe but have no row, such as layers over
    ranks. `total`: with `total=True` the errors of the whole model; `over`, `worst` and `plot` then go by what a layer adds to the
    error of its gradients.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, quantization_report, random
    >>> from funcops.low_precision import Fp8Block, QuantizationReport, with_recipe
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)), Step("down", linear, LinearConfig(256, 128))))
    >>> found = quantization_report(chain.init(cfg, key=random.key(0)), torch.randn(64, 128), cfg, Fp8Block())
    >>> isinstance(found, QuantizationReport), len(found.worst(1)), found.over(0.5), found.not_measured
    (True, 1, (), ())
    >>> low = with_recipe(cfg, Fp8Block(), skip=(*found.over(0.5), "down"))
    """

    def __init__(
        self, rows: list[LinearErrors], recipe: Any, not_measured: tuple[str, ...] = (), total: ModelErrors | None = None
    ) -> None:
        self.rows = rows
        self.recipe = recipe
        self.not_measured = not_measured
        self._total = total

    @property
    def total(self) -> ModelErrors:
        """The errors of the whole model. Raises `ValueError` for a report without them."""
        if self._total is None:
            fail("total", "the report", "made by quantization_report(..., total=True)", "one without total")
        return self._total

    def dicts(self) -> list[dict[str, Any]]:
        return [
            {"path": row.path, "shape": row.shape, "y": row.y, "dx": row.dx, "dw": row.dw}
            | {f"{name}.{key}": value for name, one in row.operands.items() for key, value in one._asdict().items()}
            | ({} if row.adds is None else {f"adds.{key}": value for key, value in row.adds._asdict().items()})
            for row in self.rows
        ]

    def over(self, error: float) -> tuple[str, ...]:
        """The steps whose y, dx or dw has a larger error than `error` in any layer; with `total`, steps a layer of which adds more
        than `error` to the model's gradients. For `with_recipe(..., skip=...)`."""
        require_number("over", 0.0, error=error)
        return tuple(dict.fromkeys([row.step for row in self.rows if not self._error(row) <= error]))

    def _error(self, row: LinearErrors) -> float:
        return row.worst if self._total is None else 0.0 if row.adds is None else row.adds.error

    def leave_wide(self, error: float | None = None, *, weights: int | None = None, skip: Sequence[str] = ()) -> WideLayers:
        """Choose steps to leave wide, so that the error of the model's gradients is at most `error`; or the best choice of at most
        `weights` weights. The steps that add most per weight come first (a weight costs bytes and, in a dense model, products in
        proportion), until the sum of the others' squares is small enough; then the choice is measured on the batch, and grows while
        the error is still above. `skip`: globs of steps that stay wide in any case, such as the head, and count neither in
        `weights` nor in the error.

        Raises `ValueError` for a report without `total`, for both or none of `error` and `weights`, for an `error` that one
        layer alone exceeds or `weights` of all layers, and for globs that match no step, or all."""
        where, total = "leave_wide", self.total
        require((error is None) != (weights is None), where, "error", "given, or weights, but not both", error)
        if error is not None:
            require_number(where, 0.0, error=error)
        else:
            require_count(where, 0, weights=weights)
        return total.leave_wide(where, error, weights, skip)

    def worst(self, n: int = 3) -> list[LinearErrors]:
        """The rows of the n layers with the largest errors, the worst first; a NaN is worse than any number. Raises `ValueError`
        for n below 1."""
        require_count("worst", n=n)
        return sorted(self.rows, key=lambda row: ((error := self._error(row)) != error, error), reverse=True)[:n]

    def plot(self, path: str | None = None) -> Any:
        """Plot the errors of y, dx and dw as three bars for each layer, with `total` what each adds to the error of the model's
        gradients. Returns matplotlib's figure, and writes it to `path` (PNG, SVG, ...) if given. Raises `ImportError` without
        matplotlib (the extra `examples`)."""
        from funcops.engine.residuals.picture import grouped_bars

        errors: list[tuple[str, Any]] = [(row.path, row if self._total is None else row.adds) for row in self.rows]
        bars = {path: {"y": one.y, "dx": one.dx, "dw": one.dw} for path, one in errors if one is not None}
        label = "relative error" if self._total is None else "added to the relative error of the model's gradients"
        return grouped_bars(bars, label, self.title(), path, "QuantizationReport.plot")

    def title(self) -> str:
        (worst,), count = self.worst(1), len(self.rows)
        layers = f"{count} linear layer{'s' * (count != 1)} in {_name(self.recipe)}"
        if self._total is None:
            return f"{layers}: the worst error is {worst.worst:.1%}, of {worst.path or 'the layer'}"
        most = f"{worst.path or 'the layer'} adds {self._error(worst):.1%}"
        return f"{layers}: the gradients' error is {self.total.gradients:.1%} ({self.total.expected:.1%} expected); {most}"

    def __str__(self) -> str:
        head = ["path", "weight"] + [f"{name} {what}" for name in ("x", "w", "dy") for what in ("amax", "to 0", "clipped")]
        table = [[*head, "y", "dx", "dw", *[f"adds by {name}" for name in ("y", "dx", "dw") if self._total is not None]]]
        for row in self.rows:
            cells = [
                cell for one in row.operands.values() for cell in (f"{one.amax:.3g}", f"{one.zeros:.2%}", f"{one.saturated:.2%}")
            ]
            errors = [f"{error:.2%}" for error in (row.y, row.dx, row.dw, *(row.adds or ()))]
            table.append([row.path, str(list(row.shape)), *cells, *errors, *[""] * (len(table[0]) - 2 - len(cells) - len(errors))])
        columns = list(zip(*table, strict=True))
        # most recipes leave most of these at 0, and the table would be too wide for a screen
        none = [column[0] for column in columns if set(column[1:]) == {"0.00%"} and column[0] in head]
        shown = [column for column in columns if column[0] not in none]
        widths = [max(map(len, column)) for column in shown]
        lines = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in zip(*shown, strict=True)
        ]
        left = [f"0.00% in every layer: {', '.join(none)}"] if none else []
        left += [f"not measured: {', '.join(self.not_measured)}"] if self.not_measured else []
        if self._total is not None and self.total.unfit:
            left.append(f"wide, as {_name(self.recipe)} does not take their sizes: {', '.join(self.total.unfit)}")
        return "\n".join([*[line.rstrip() for line in lines], self.title(), *left])

    def __repr__(self) -> str:
        return on_screen(str(self), 160)

    def _repr_html_(self) -> str:
        return in_html(str(self))


def quantization_report(
    params: Any, x: Any, cfg: Any, recipe: Any, *, dy: Any = None, key: Tensor | None = None, total: bool = False
) -> QuantizationReport:
    """Measure what a recipe would do to every linear and grouped linear layer of a model, to choose which of them to leave in high
    precision. A mixture's `experts` run as separate steps, and have the rows `up` and `down`.

    The model runs once, forward and backward, without the recipe: with `params` in high precision, on one batch `x`. Each linear
    layer's x, w and dy are then rounded as by the recipe, and its three products computed from the rounded operands, in float32. So
    each row is the error that its own layer adds, without the errors that reach it from others.

    `cfg`: the config, without a recipe yet, of a combinator or such a layer; or an op that `op_from_module` made, with or without
    a recipe, whose rows have the paths of modules. `recipe`: a recipe, or anything with a
    `Format` or None (not rounded) as `x`, `w` and `dy`; or one `Format` for all. Scales come from the tensors themselves, even if
    the recipe takes them from earlier steps. `dy`: the gradient of y; by default ones for a loss, else normal numbers, and None for
    the extras of y, such as the loads and losses of routers (`WithExtras`). `key`: for a recipe that rounds stochastically, as in
    `quantize_params`, by default `random.key(0)`: a step with that key rounds to the same codes.

    `total`: also run the model with y, dx or dw of one layer rounded at a time, and once with all, for the error that each adds to
    the gradients of all params (`LinearErrors.adds`), the whole error (`total`), and the layers to leave wide for a wanted one
    (`leave_wide`). That takes a forward and backward for each product, and the report holds on to params and batch. It needs a
    recipe, not formats. Layers whose sizes the recipe does not take stay wide.

    Raises `TypeError` for another config, recipe or key, and `ValueError` for a config with a recipe, or without a linear layer
    that gets a gradient.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, quantization_report, random
    >>> from funcops.low_precision import Fp8Block
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)), Step("down", linear, LinearConfig(256, 128))))
    >>> found = quantization_report(chain.init(cfg, key=random.key(0)), torch.randn(64, 128), cfg, Fp8Block())
    >>> [row.path for row in found.rows], all(0.01 < row.y < 0.06 for row in found.rows)
    (['up', 'down'], True)
    >>> found.over(0.06)
    ()
    """
    if isinstance(cfg, Op):
        require(total is False, WHERE, "total", "False for an op of a module", total)
        return _of_module(cfg, params, x, recipe, dy, _checked_key(key, x))
    op = OPS.get(type(cfg))
    if op is None:
        fail(WHERE, "cfg", " or ".join(one.__name__ for one in OPS), describe(cfg), TypeError)
    known = list(steps(cfg))
    low = [part.path or "the layer" for part in known if part.cfg.low_recipe is not None]
    if low:
        fail(WHERE, "cfg", "a config without a recipe (it is measured before with_recipe)", f"one with a recipe at {few(low)}")
    plan = _OperandFormats.of(recipe)
    require_flag(WHERE, total=total)
    if total:
        require_recipe(WHERE, recipe)
    key = _checked_key(key, x)
    op, cfg = rewrite(cfg, _laid_open, op=op)
    with torch.no_grad():
        y, residuals = with_policy(op, "save_all").fwd(params, x, cfg)
        dy = _cotangent(y) if dy is None else dy
        _, pending = with_policy(op, "save_all").dgrad(residuals, dy, cfg)
        where = {one.path: one for one in places(op, cfg)}
        rows = [_row(where[path], kept, waiting, plan, key) for path, kept, waiting in _linears(residuals, pending, "")]
    found = {row.step for row in rows}
    missing = tuple(layer for part in known for layer in layers(part) if layer not in found)
    if not rows:
        left = f", of which {few(missing)} cannot be measured" if missing else ""
        fail(WHERE, "cfg", "a config with linear layers whose weights get gradients", type(cfg).__name__ + left)
    if not total:
        return QuantizationReport(rows, recipe, missing)
    sizes = {row.path: math.prod(row.shape) for row in rows}
    del residuals, pending
    whole = ModelErrors(op, cfg, params, x, dy, recipe, key, sizes)
    return QuantizationReport([row._replace(adds=whole.added.get(row.path)) for row in rows], recipe, missing, whole)


def _of_module(op: Op, params: Any, x: Any, recipe: Any, dy: Any, key: Tensor) -> QuantizationReport:
    """The report of an op that `op_from_module` made."""
    if not hasattr(op.named, "linears"):
        fail(WHERE, "cfg", "a config, or an op that op_from_module made", describe(op), TypeError)
    plan = _OperandFormats.of(recipe)
    found = op.named.linears(params, x, op.config(), lambda y: _cotangent(y) if dy is None else dy)
    rows = []
    for path, *operands in found:
        given, w, back = [t.reshape(-1, t.shape[-1]) for t in operands]
        place, groups = Place(path, path, path, (), None), [(0, (given, w, back))]
        rows.append(_measured(place, tuple(w.shape), groups, _keys(place, key, plan, None), plan))
    if not rows:
        fail(WHERE, "cfg", "an op with linear layers that get gradients", describe(op))
    return QuantizationReport(rows, recipe)


def layers(part: Part) -> list[str]:
    """The paths of a step's layers that can take a recipe."""
    return [join_path(part.path, name) for name in part.cfg.linear_parts] or ([part.path] if low_form_of(part.cfg) else [])


def _laid_open(part: Part) -> tuple[Op, Any] | Inside:
    """Rewrite a part so that all its layers can be measured: `experts` as separate steps, and nothing recomputed, as remat
    would."""
    op = _bare(part.op)
    if part.cfg.linear_parts:
        op, inner = by_steps(WHERE, op, part.cfg)
        return op, dataclasses.replace(inner, cfg=dataclasses.replace(inner.cfg, recompute=False, fuse=False))
    return Inside(
        changes=(lambda _: {"joined": ()}) if part.composite and part.cfg.joined else None, after=lambda _, cfg: (op, cfg)
    )


def _bare(op: Op) -> Op:
    """The op that remat or with_policy wrapped."""
    _, args = getattr(op.fwd, "made_by", (None, ()))
    return next((_bare(arg) for arg in args if isinstance(arg, Op)), op)


@dataclasses.dataclass(frozen=True)
class _OperandFormats:
    """The formats of a recipe, by rows and by columns, and how the operands of dw are made."""

    x: Format | None
    w: Format | None
    dy: Format | None
    x_col: Format | None
    w_col: Format | None
    dy_col: Format | None
    hadamard: bool = False
    stochastic: bool = False  # dy
    turns: bool = False  # the column side of x and dy is tiled anew from the row side
    high_wgrad: bool = False

    @staticmethod
    def of(recipe: Any) -> _OperandFormats:
        if isinstance(recipe, Format):
            return _OperandFormats(recipe, recipe, recipe, recipe, recipe, recipe)
        formats: dict[str, Any] = {name: getattr(recipe, name, "") for name in OPERANDS[:3]}
        formats |= {col: getattr(recipe, col, formats[row]) for row, col in zip(OPERANDS[:3], OPERANDS[3:], strict=True)}
        if not all([one is None or isinstance(one, Format) for one in formats.values()]):
            fail(WHERE, "recipe", "a recipe or a Format", describe(recipe), TypeError)
        return _OperandFormats(
            **formats,
            hadamard=getattr(recipe, "hadamard", False),
            stochastic=getattr(recipe, "stochastic", False),
            turns=getattr(recipe, "keep", "") == "row",
            high_wgrad=getattr(recipe, "wgrad", "low") == "high",
        )


def _name(recipe: Any) -> str:
    return recipe.name if isinstance(recipe, Format) else type(recipe).__name__


def _cotangent(y: Any) -> Any:
    if type(y) is WithExtras:
        return WithExtras(_cotangent(y.main), dict.fromkeys(y.extras))
    if not isinstance(y, Tensor) or not y.is_floating_point():
        fail(WHERE, "dy", f"given for a y that is {describe(y)}", None)
    if y.dim() == 0:
        return torch.ones_like(y)
    return random.normal(random.key(0, device=y.device), y.shape, dtype=y.dtype)


def _linears(residuals: Any, pending: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if type(pending) in (LinearPending, GroupedLinearPending):  # of whole layers, not of parts over ranks
        yield path, residuals, pending
    elif isinstance(pending, dict):
        for name, child in pending.items():
            if name in residuals:  # recomputed steps have entries of their own in a pending
                yield from _linears(residuals[name], child, join_path(path, name))


Operands = tuple[Tensor, Tensor, Tensor]  # x, w and dy of one product


def _checked_key(key: Any, x: Any) -> Tensor:
    first = next(iter(tensors(x)), None)
    if key is None:
        return random.key(0, device=None if first is None else first.device)
    random.check_key(WHERE, key)
    check(WHERE, "key", key, (2,), torch.int64, first)
    return key  # type: ignore[no-any-return]


def _keys(place: Place, key: Tensor, plan: _OperandFormats, groups: int | None) -> list[tuple[Any, Any]]:
    """The keys for dy by rows and by columns of each group, as `with_keys` and the layer's backward in low precision make them."""
    if not plan.stochastic:
        return [(None, None)] * (groups or 1)
    own: Any = random.fold_in(key, random.path_id(join_path(place.params, "weight")))
    for number, times in place.stacked:
        own = random.split(own, times)[number]
    pairs = [random.split(one, 2) for one in ([own] if groups is None else random.split(own, groups))]
    return [(rows, columns) for rows, columns in pairs]


def _row(place: Place, kept: Any, waiting: Any, plan: _OperandFormats, key: Tensor) -> LinearErrors:
    several = isinstance(waiting, GroupedLinearPending)
    found = _groups(kept, waiting) if several else [(0, _whole(kept, waiting))]
    keys = _keys(place, key, plan, len(kept.weight) if several else None)
    shape = kept.weight.shape if isinstance(kept.weight, Tensor) else (len(kept.weight), *kept.weight[0].shape)
    return _measured(place, tuple(shape), found, keys, plan)


def _measured(
    place: Place, shape: tuple[int, ...], found: list[tuple[int, Operands]], keys: list[tuple[Any, Any]], plan: _OperandFormats
) -> LinearErrors:
    groups = [_Rounded.of(operands, plan, keys[e]) for e, operands in found]
    each = [[_operand(t, q) for t, q in zip(one.wide, one.rows, strict=True)] for one in groups]
    operands = {name: _together(parts) for name, *parts in zip(("x", "w", "dy"), *each, strict=True)}
    y, dx, dw = (_error(pairs) for pairs in zip(*[_products(one, plan) for one in groups], strict=True))
    return LinearErrors(place.path, place.step, shape, operands, y, dx, dw)


def _whole(kept: LinearResiduals, waiting: LinearPending) -> Operands:
    x, w, dy = (t.reshape(-1, t.shape[-1]) for t in (waiting.x, kept.weight, waiting.dy))
    return x, w, dy


def _groups(kept: GroupedLinearResiduals, waiting: GroupedLinearPending) -> list[tuple[int, Operands]]:
    """The number and operands of each group, because each is rounded separately; rows of x and dy that an index selects are put in
    order."""
    x, dy = waiting.x.reshape(-1, waiting.x.shape[-1]), waiting.dy.reshape(-1, waiting.dy.shape[-1])
    x = x if waiting.order is None else gathered(x, waiting.order, waiting.choices)
    dy = dy if waiting.dy_order is None else gathered(dy, waiting.dy_order, waiting.choices)
    return [(e, (x[first:last], kept.weight[e], dy[first:last])) for e, first, last in groups_of(waiting.offsets, len(x))]


class _Rounded(NamedTuple):
    """Operands, and their rounded values by rows. `key`: the random key that rounds dy by columns."""

    wide: Operands
    rows: tuple[QTensor | None, QTensor | None, QTensor | None]
    key: Tensor | None

    @staticmethod
    def of(operands: Operands, plan: _OperandFormats, keys: tuple[Any, Any]) -> _Rounded:
        x, w, dy = operands
        return _Rounded(operands, (_rounded(x, plan.x), _rounded(w, plan.w), _rounded(dy, plan.dy, key=keys[0])), keys[1])


def _products(one: _Rounded, plan: _OperandFormats) -> list[tuple[float, float]]:
    """The norms of the errors of y, dx and dw, and of their exact values."""
    (x, w, dy), (qx, qw, qdy) = one.wide, one.rows
    wide_x, wide_w, wide_dy = x.float(), w.float(), dy.float()
    y = _off(_value(qx, x) @ _value(qw, w).mT, wide_x @ wide_w.mT)
    dx = _off(_value(qdy, dy) @ _value(_rounded(w, plan.w_col, "col"), w), wide_dy @ wide_w)
    if plan.high_wgrad:
        return [y, dx, (0.0, 1.0)]
    columns = [_column(dy, qdy, plan.dy_col, plan, one.key), _column(x, qx, plan.x_col, plan, None)]
    return [y, dx, _off(columns[0].mT @ columns[1], wide_dy.mT @ wide_x)]


def _rounded(
    t: Tensor, format: Format | None, side: str = "row", hadamard: bool = False, key: Tensor | None = None
) -> QTensor | None:
    return None if format is None else quantize_tensor(t, format, side=side, hadamard=hadamard, key=key)


def _column(t: Tensor, row: QTensor | None, format: Format | None, plan: _OperandFormats, key: Tensor | None) -> Tensor:
    """An operand of dw, rounded by blocks along its rows; transformed if the recipe says so."""
    if row is not None and plan.turns and row.format.retiles and row.format == format:
        return _value(turned(row), t)
    if plan.hadamard:
        t = torch.nn.functional.pad(t, (0, 0, 0, -len(t) % HADAMARD))
    return _value(_rounded(t, format, "col", plan.hadamard, key), t)


def _value(q: QTensor | None, t: Tensor) -> Tensor:
    return t.float() if q is None else q.dequantize(torch.float32)


def _operand(t: Tensor, q: QTensor | None) -> tuple[Operand, int]:
    """The effect of rounding on an operand, and its number of elements."""
    size = t.float().abs()
    amax = float(size.amax()) if size.numel() else 0.0
    if q is None or not size.numel():
        return Operand(amax, 0.0, 0.0), size.numel()
    found = rounding(t, q)
    return Operand(amax, float(found.underflow), float(found.saturated)), size.numel()


def _together(parts: list[tuple[Operand, int]]) -> Operand:
    if len(parts) == 1:
        return parts[0][0]
    count = max(1, sum(n for _, n in parts))
    shares = [sum(getattr(one, name) * n for one, n in parts) / count for name in ("zeros", "saturated")]
    return Operand(max([one.amax for one, _ in parts], key=lambda amax: (amax != amax, amax)), *shares)


def _off(found: Tensor, want: Tensor) -> tuple[float, float]:
    return float((found - want).norm()), float(want.norm())


def _error(parts: tuple[tuple[float, float], ...]) -> float:
    """The relative error of all parts together, from the norms of each part's error and exact value."""
    off, size = (math.sqrt(sum(n * n for n in each)) if len(each) > 1 else each[0] for each in zip(*parts, strict=True))
    return off / size if size else 0.0 if off == 0 else float("inf")
