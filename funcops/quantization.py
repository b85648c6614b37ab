"""`quantization_report`: what a recipe of low precision does to each linear layer, measured on one batch.

    y' = q(x) q(w)^T        dx' = q(dy) q(w)        dw' = q(dy)^T q(x)        error of y: |y' - y| / |y|, in norm

where q rounds to the format of its operand and back, by blocks along the dimension that the product sums over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops import random
from funcops.compose.chain import ChainConfig, chain
from funcops.compose.parallel import ParallelConfig, parallel
from funcops.compose.repeat import RepeatConfig, repeat
from funcops.compose.skip import SkipConfig, skip
from funcops.errors import describe, fail, in_html, on_screen, require_number
from funcops.formats import Format, QTensor, quantize_tensor, turned
from funcops.kernels.quantize import HADAMARD
from funcops.memory.policy import with_policy
from funcops.op import Op
from funcops.ops.linear import LinearConfig, LinearPending, LinearResiduals, linear

OPS: dict[type, Op] = {
    ChainConfig: chain, RepeatConfig: repeat, SkipConfig: skip, ParallelConfig: parallel, LinearConfig: linear
}  # fmt: skip
LARGEST = {"e4m3": 0x7E, "e5m2": 0x7B, "e2m1": 0x77}  # the code of the largest element
WHERE = "quantization_report"


class Operand(NamedTuple):
    """`amax`: the largest |element|. `zeros`: the share of elements that become 0 and were not. `saturated`: of those that are
    clipped to the largest code of their tile."""

    amax: float
    zeros: float
    saturated: float


class LinearErrors(NamedTuple):
    """What rounding does to the linear layer at `path`: to its operands, and the relative errors of y, dx and dw. `step`: its path
    in the config, where the layers of a repeat are one, `*`."""

    path: str
    step: str
    shape: tuple[int, ...]
    operands: dict[str, Operand]  # of x, w, dy
    y: float
    dx: float
    dw: float

    @property
    def worst(self) -> float:
        return max(self.y, self.dx, self.dw, key=lambda error: (error != error, error))


class QuantizationReport:
    """A row for each linear layer, in the model's order. `str()` and notebooks render it; `rows` and `dicts()` are the data."""

    def __init__(self, rows: list[LinearErrors], recipe: Any) -> None:
        self.rows = rows
        self.recipe = recipe

    def dicts(self) -> list[dict[str, Any]]:
        return [
            {"path": row.path, "shape": row.shape, "y": row.y, "dx": row.dx, "dw": row.dw}
            | {f"{name}.{key}": value for name, one in row.operands.items() for key, value in one._asdict().items()}
            for row in self.rows
        ]

    def over(self, error: float) -> tuple[str, ...]:
        """The steps of which y, dx or dw is off by more than that, in any layer: for `with_recipe(..., skip=...)`."""
        require_number("over", 0.0, error=error)
        return tuple(dict.fromkeys([row.step for row in self.rows if not row.worst <= error]))

    def plot(self, path: str | None = None) -> Any:
        """The errors of y, dx and dw as three bars for each layer. Writes PNG, SVG, ... to `path` where that is given, and returns
        matplotlib's figure. Raises `ImportError` without matplotlib (the extra `docs`)."""
        from funcops.residuals.picture import grouped_bars

        bars = {row.path: {"y": row.y, "dx": row.dx, "dw": row.dw} for row in self.rows}
        return grouped_bars(bars, "relative error", self.title(), path)

    def title(self) -> str:
        worst = max(self.rows, key=lambda row: (row.worst != row.worst, row.worst))
        return f"{len(self.rows)} linear layers in {_name(self.recipe)}: the worst error is {worst.worst:.1%}, of {worst.path}"

    def __str__(self) -> str:
        head = ["path", "weight"] + [f"{name} {what}" for name in ("x", "w", "dy") for what in ("amax", "to 0", "clipped")]
        table = [[*head, "y", "dx", "dw"]]
        for row in self.rows:
            cells = [
                cell for one in row.operands.values() for cell in (f"{one.amax:.3g}", f"{one.zeros:.2%}", f"{one.saturated:.2%}")
            ]
            table.append([row.path, str(list(row.shape)), *cells, f"{row.y:.2%}", f"{row.dx:.2%}", f"{row.dw:.2%}"])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in table
        ]
        return "\n".join([*[line.rstrip() for line in lines], self.title()])

    def __repr__(self) -> str:
        return on_screen(str(self), 160)

    def _repr_html_(self) -> str:
        return in_html(str(self))


def quantization_report(params: Any, x: Any, cfg: Any, recipe: Any, *, dy: Any = None) -> QuantizationReport:
    """What a recipe would do to every linear layer of a model: which of them to leave in high precision.

    The model runs once, forward and backward, as it is: with `params` in high precision, on one batch `x`. Each linear layer's x, w
    and dy are then rounded as the recipe says, and its three products taken of the rounded operands, in float32. So each row is the
    error that its layer adds, not what reached it from others.

    `cfg`: the config, without a recipe yet, of a chain, repeat, skip, parallel or linear. `recipe`: a recipe, or anything with a
    `Format` or None (not rounded) as `x`, `w` and `dy`; or one `Format` for all. Scales are those of the tensors as they are, also
    where the recipe takes those of steps before. `dy`: the gradient of y; by default ones for a loss, else normal numbers.

        found = quantization_report(params, x, cfg, Fp8Block())
        print(found)
        low = with_recipe(cfg, Fp8Block(), skip=found.over(0.05))

    Raises `TypeError` for another config or recipe, and `ValueError` where no linear layer gets a gradient.

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
    op = OPS.get(type(cfg))
    if op is None:
        fail(WHERE, "cfg", " or ".join(one.__name__ for one in OPS), describe(cfg), TypeError)
    plan = _Plan.of(recipe)
    op = with_policy(op, "save_all")
    with torch.no_grad():
        y, residuals = op.fwd(params, x, cfg)
        _, pending = op.dgrad(residuals, _cotangent(y) if dy is None else dy, cfg)
        rows = [_measured(path, kept, waiting, plan) for path, kept, waiting in _linears(residuals, pending, ())]
    if not rows:
        fail(WHERE, "cfg", "a config with linear layers whose weights get gradients", type(cfg).__name__)
    return QuantizationReport(rows, recipe)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Of a recipe: the formats, and how the operands of dw are made."""

    x: Format | None
    w: Format | None
    dy: Format | None
    hadamard: bool = False
    turns: bool = False  # the column side of x and dy is tiled anew from the row side
    high_wgrad: bool = False

    @staticmethod
    def of(recipe: Any) -> _Plan:
        if isinstance(recipe, Format):
            return _Plan(recipe, recipe, recipe)
        formats: dict[str, Any] = {name: getattr(recipe, name, "") for name in ("x", "w", "dy")}
        if not all([one is None or isinstance(one, Format) for one in formats.values()]):
            fail(WHERE, "recipe", "a recipe or a Format", describe(recipe), TypeError)
        return _Plan(
            **formats,
            hadamard=getattr(recipe, "hadamard", False),
            turns=getattr(recipe, "keep", "") == "row",
            high_wgrad=getattr(recipe, "wgrad", "low") == "high",
        )


def _name(recipe: Any) -> str:
    return recipe.name if isinstance(recipe, Format) else type(recipe).__name__


def _cotangent(y: Any) -> Tensor:
    if not isinstance(y, Tensor) or not y.is_floating_point():
        fail(WHERE, "dy", f"given for a y that is {describe(y)}", None)
    if y.dim() == 0:
        return torch.ones_like(y)
    return random.normal(random.key(0, device=y.device), y.shape, dtype=y.dtype)


def _linears(
    residuals: Any, pending: Any, path: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], LinearResiduals, LinearPending]]:
    if isinstance(pending, LinearPending):
        yield path, residuals, pending
    elif isinstance(pending, dict):
        for name, child in pending.items():
            if name in residuals:  # what is computed again has rows of its own in a pending
                yield from _linears(residuals[name], child, (*path, name))


def _measured(path: tuple[Any, ...], kept: LinearResiduals, waiting: LinearPending, plan: _Plan) -> LinearErrors:
    x, w, dy = (t.reshape(-1, t.shape[-1]) for t in (waiting.x, kept.weight, waiting.dy))
    qx, qw, qdy = (_rounded(t, f) for t, f in ((x, plan.x), (w, plan.w), (dy, plan.dy)))
    operands = {name: _operand(t, q) for name, t, q in (("x", x, qx), ("w", w, qw), ("dy", dy, qdy))}
    wide_x, wide_w, wide_dy = x.float(), w.float(), dy.float()
    error_y = _error(_value(qx, x) @ _value(qw, w).mT, wide_x @ wide_w.mT)
    error_dx = _error(_value(qdy, dy) @ _value(_rounded(w, plan.w, "col"), w), wide_dy @ wide_w)
    error_dw = 0.0
    if not plan.high_wgrad:
        columns = [_column(t, q, f, plan) for t, q, f in ((dy, qdy, plan.dy), (x, qx, plan.x))]
        error_dw = _error(columns[0].mT @ columns[1], wide_dy.mT @ wide_x)
    step = ".".join(["*" if isinstance(name, int) else name for name in path])
    return LinearErrors(".".join(map(str, path)), step, tuple(w.shape), operands, error_y, error_dx, error_dw)


def _rounded(t: Tensor, format: Format | None, side: str = "row", hadamard: bool = False) -> QTensor | None:
    return None if format is None else quantize_tensor(t, format, side=side, hadamard=hadamard)


def _column(t: Tensor, row: QTensor | None, format: Format | None, plan: _Plan) -> Tensor:
    """An operand of dw, rounded by blocks along its rows; transformed where the recipe says so."""
    if row is not None and plan.turns and row.format.turns:
        return _value(turned(row), t)
    if plan.hadamard:
        t = torch.nn.functional.pad(t, (0, 0, 0, -len(t) % HADAMARD))
    return _value(_rounded(t, format, "col", plan.hadamard), t)


def _value(q: QTensor | None, t: Tensor) -> Tensor:
    return t.float() if q is None else q.dequantize(torch.float32)


def _operand(t: Tensor, q: QTensor | None) -> Operand:
    size = t.float().abs()
    amax = float(size.amax()) if size.numel() else 0.0
    if q is None or not size.numel():
        return Operand(amax, 0.0, 0.0)
    zeros = (q.dequantize(torch.float32) == 0) & (size > 0)
    largest = dataclasses.replace(q, codes=torch.full_like(q.codes, LARGEST[q.format.element])).dequantize(torch.float32)
    return Operand(amax, float(zeros.float().mean()), float((size > largest * (1 + 2**-10)).float().mean()))


def _error(found: Tensor, want: Tensor) -> float:
    off, size = float((found - want).norm()), float(want.norm())
    return off / size if size else 0.0 if off == 0 else float("inf")
