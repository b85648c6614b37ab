"""The error of a whole model's gradients under a recipe, and which layers to leave wide for a wanted error.

    error = |g' - g| / |g|, in norm over the gradients of all params        error^2 ~ the sum of added^2, over layers and products

g' is computed with some products rounded, g with none. A product's `added` is the error if it alone is rounded. The roundings of
different products are nearly orthogonal, so their squares add up; the error of any choice of layers is measured, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcops.engine.contract.configs import OpConfig
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import Op, config, dgrad_of, forward, init_of, make_op, wgrad_of
from funcops.engine.contract.schema import DGRAD, WGRAD, Pending, Residuals, saved
from funcops.engine.contract.walk import check_selection, matches, nested, rewrite, steps
from funcops.engine.errors import fail, few, join_path, require
from funcops.engine.trees import at, leaf, put, replace, tensors, tree
from funcops.library.formats.recipes import Recipe, low_form_of
from funcops.library.formats.scaled import Scaled
from funcops.low_precision.params import quantize_params

WHERE = "quantization_report"


@config
class EitherConfig(OpConfig):
    """A layer, and the same in low precision."""

    wide_op: Op
    wide: Any
    low_op: Op
    low: Any

    def widths(self, width: int | None) -> tuple[int | None, int | None]:
        return self.wide.widths(width)  # type: ignore[no-any-return]


@tree
class EitherParams:
    """The layer's params. `low`: its weight in low precision, None for a tied weight. `rounded`: which products are computed from
    rounded operands, y, dx and dw."""

    weight: Any = leaf("the layer's")
    bias: Any = leaf("the layer's")
    low: Any = leaf("as quantize_params makes it")
    rounded: Any = leaf("[3]", gradient=False)


class EitherResiduals(Residuals):
    wide: Any = saved("the layer's", needed_by=DGRAD | WGRAD, tree=True)
    low: Any = saved("the layer's", needed_by=DGRAD | WGRAD, tree=True)
    rounded: Any = saved("[3]", alias="params.rounded", needed_by=DGRAD | WGRAD)


class EitherPending(Pending):
    wide: Any = saved("the layer's", needed_by=WGRAD, tree=True)
    low: Any = saved("the layer's", needed_by=WGRAD, tree=True)
    rounded: Any = saved("[3]", alias="residuals.rounded", needed_by=WGRAD)


@init_of(EitherConfig)
def either_init(cfg: EitherConfig, *, key: Any = None, device: Any = None, dtype: Any = None) -> EitherParams:
    own = cfg.wide_op.init(cfg.wide, key=key, device=device, dtype=dtype)
    return EitherParams(own.weight, own.bias, None, torch.zeros(3, dtype=torch.bool, device=device))


@forward(EitherConfig, EitherParams)
def either_fwd(params: EitherParams, x: Any, cfg: EitherConfig, *, needs: Needs = Needs.ALL) -> tuple[Any, Any]:
    own, low, rounded = cfg.wide_op.params(params.weight, params.bias), None, params.rounded
    y, wide = cfg.wide_op.fwd(own, x, cfg.wide)
    if rounded.any():
        coded = own if params.low is None else replace(own, weight=params.low)
        low_y, low = cfg.low_op.fwd(coded, x, cfg.low)
        y = low_y if rounded[0] else y
    return y, EitherResiduals.keep(cfg, needs, wide=wide, low=low, rounded=rounded)


@dgrad_of(EitherResiduals)
def either_dgrad(residuals: Any, dy: Any, cfg: EitherConfig) -> tuple[Any, Any]:
    dx, wide = cfg.wide_op.dgrad(residuals.wide, dy, cfg.wide)
    low, rounded = None, residuals.rounded
    if residuals.low is not None:
        low_dx, low = cfg.low_op.dgrad(residuals.low, dy, cfg.low)
        dx = low_dx if rounded[1] else dx
    return dx, EitherPending.keep(cfg, residuals.needs, wide=wide, low=low, rounded=rounded)


@wgrad_of(EitherPending, EitherParams)
def either_wgrad(pending: Any, cfg: EitherConfig, *, into: Any = None) -> EitherParams:
    low = pending.low is not None and bool(pending.rounded[2])
    found = cfg.low_op.wgrad(pending.low, cfg.low) if low else cfg.wide_op.wgrad(pending.wide, cfg.wide)
    weight = found.weight.value if isinstance(found.weight, Scaled) else found.weight
    return EitherParams(weight, found.bias, None, None)


either = make_op("either", EitherConfig, init=either_init, fwd=either_fwd, dgrad=either_dgrad, wgrad=either_wgrad)


class AddedErrors(NamedTuple):
    """The error of the whole model's gradients if one product of a layer alone is rounded: y, dx or dw. `error`: of all three, the
    root of the sum of their squares.

    >>> from funcops.low_precision import AddedErrors
    >>> AddedErrors(y=0.3, dx=0.4, dw=0.0).error
    0.5
    """

    y: float
    dx: float
    dw: float

    @property
    def error(self) -> float:
        return math.hypot(*self)


class WideLayers(NamedTuple):
    """The layers to leave wide: `skip` for `with_recipe`. `gradients`: the measured error of the whole model's gradients if the
    others are in the recipe; `expected`: the root of the sum of their squares in `AddedErrors`; `y`: the measured error of the
    output. `weights`: how many weights stay wide, beside those that were skipped in any case.

    >>> import torch
    >>> from funcops import ChainConfig, LinearConfig, Step, chain, linear, quantization_report, random
    >>> from funcops.low_precision import Fp8Block, WideLayers, with_recipe
    >>> cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(128, 256)), Step("down", linear, LinearConfig(256, 128))))
    >>> params = chain.init(cfg, key=random.key(0))
    >>> found = quantization_report(params, torch.randn(64, 128), cfg, Fp8Block(), total=True)
    >>> choice = found.leave_wide(weights=128 * 256)
    >>> isinstance(choice, WideLayers), len(choice.skip), choice.gradients < found.total.gradients
    (True, 1, True)
    >>> low = with_recipe(cfg, Fp8Block(), skip=choice.skip)
    """

    skip: tuple[str, ...]
    gradients: float
    expected: float
    y: float
    weights: int


class Place(NamedTuple):
    """The place of a layer: its path in a report, its step in the config, the path of its params, and for each repeat with stacked
    params around it its number, and how many layers there are."""

    path: str
    step: str
    params: str
    stacked: tuple[tuple[int, int], ...]
    cfg: Any


def places(op: Op | None, cfg: Any) -> Iterator[Place]:
    """Every part that is not a combinator, once for each layer of a repeat."""
    for part, around in nested(cfg, op=op, layers=True):
        if part.composite:
            continue
        found: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [("", "", ())]  # path, step and stacked of the part so far
        for outer, inner in pairwise((*around, part)):
            own, times = inner.path.removeprefix(outer.path).strip("."), outer.cfg.times
            if times is None:
                found = [(join_path(path, own), join_path(step, own), stacked) for path, step, stacked in found]
            elif not outer.cfg.stacked:
                found = [(join_path(path, own), join_path(step, "*"), stacked) for path, step, stacked in found]
            else:
                numbers = [(i, times) for i in range(times)]
                found = [(join_path(a, n[0]), join_path(b, "*"), (*stacked, n)) for a, b, stacked in found for n in numbers]
        yield from (Place(path, step, part.path, stacked, part.cfg) for path, step, stacked in found)


class ModelErrors:
    """The relative errors, in norm, of a whole model in a recipe: `gradients` of all params, `y`, its output. `added`: what each
    layer adds to the first, by its path; `expected`: the root of the sum of their squares, near `gradients` if errors are nearly
    independent. `unfit`: the steps whose sizes the recipe does not take, which stay wide.

    >>> import torch
    >>> from funcops import LinearConfig, linear, quantization_report, random
    >>> from funcops.low_precision import Fp8Block, ModelErrors
    >>> cfg = LinearConfig(128, 64, bias=False)
    >>> found = quantization_report(linear.init(cfg, key=random.key(0)), torch.randn(8, 128), cfg, Fp8Block(), total=True)
    >>> isinstance(found.total, ModelErrors), found.total.added[""].dw == found.total.gradients
    (True, True)
    """

    def __init__(
        self, op: Op, cfg: Any, params: Any, x: Any, dy: Any, recipe: Recipe, key: Tensor, sizes: Mapping[str, int]
    ) -> None:
        """`sizes`: the number of weights of each layer that may be rounded, by path."""
        pairs, unfit = _pairs(cfg, recipe, {one.step for one in places(op, cfg) if one.path in sizes})
        if not pairs:
            fail(WHERE, "recipe", f"one that takes the sizes of a layer, such as {few(unfit)}", type(recipe).__name__)
        self._whole, self._cfg = rewrite(cfg, lambda part: (either, pairs[part.path]) if part.path in pairs else None, op=op)
        self._x, self._dy, self._recipe, self.unfit = x, dy, recipe, tuple(unfit)
        every = {one.path: one for one in places(self._whole, self._cfg)}
        self._layers = {path: every[path] for path in sizes if every[path].step in pairs}
        self._sizes = {path: sizes[path] for path in self._layers}
        coded = rewrite(cfg, lambda part: (pairs[part.path].low_op, pairs[part.path].low) if part.path in pairs else None, op=op)[1]
        self._params = _in_both_forms(params, coded, self._layers.values(), recipe, key)
        self._wide = self._run({})
        self.added = {path: AddedErrors(*[self._errors({path: (i,)})[0] for i in range(3)]) for path in self._layers}
        self.expected = self._expected(self._layers)
        self.gradients, self.y = self._errors(dict.fromkeys(self._layers, range(3)))

    def _run(self, rounded: Mapping[str, Iterable[int]]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients and y of the model, with some products of some layers rounded."""
        changed: dict[str, Tensor] = {}
        for path, products in rounded.items():
            one = self._layers[path]
            flags = changed.setdefault(one.params, at(self._params, one.params).rounded.clone())
            for i in products:
                flags[(*[number for number, _ in one.stacked], i)] = True
        params = self._params
        for path, flags in changed.items():
            params = _put(params, path, replace(at(params, path), rounded=flags))
        with torch.no_grad():
            y, residuals = self._whole.fwd(params, self._x, self._cfg)
            gradients, _ = self._whole.bwd(residuals, self._dy, self._cfg)
        return tensors(gradients), [t for t in tensors(y) if t.is_floating_point()]

    def _errors(self, rounded: Mapping[str, Iterable[int]]) -> tuple[float, float]:
        """The relative errors of the gradients and of y."""
        gradients, y = (_error(found, wide) for found, wide in zip(self._run(rounded), self._wide, strict=True))
        return gradients, y

    def _expected(self, layers: Iterable[str]) -> float:
        return math.hypot(*[self.added[path].error for path in layers])

    def leave_wide(self, where: str, error: float | None, weights: int | None, skip: Sequence[str]) -> WideLayers:
        """See `QuantizationReport.leave_wide`."""
        free: dict[str, list[str]] = {}
        for path, one in self._layers.items():
            free.setdefault(one.step, []).append(path)
        check_selection(where, [*free, *self.unfit], (), skip)
        free = {step: layers for step, layers in free.items() if not matches(step, skip)}
        size = {step: sum([self._sizes[path] for path in layers]) for step, layers in free.items()}
        gain = {step: self._expected(layers) ** 2 / size[step] for step, layers in free.items()}
        order = sorted(free, key=lambda step: (gain[step] != gain[step], gain[step]), reverse=True)
        require(bool(order), where, "skip", "globs that leave one of the layers", f"{tuple(skip)!r}, which name them all")
        chosen: list[str] = []

        def choice() -> WideLayers:
            low = [path for step in order if step not in chosen for path in free[step]]
            gradients, y = self._errors(dict.fromkeys(low, range(3)))
            named = (*skip, *[step for step in (*self.unfit, *chosen) if not matches(step, skip)])
            return WideLayers(named, gradients, self._expected(low), y, sum([size[step] for step in chosen]))

        def expected(without: list[str]) -> float:
            """In proportion to the measured error of all layers."""
            low = self._expected([path for step in order if step not in without for path in free[step]])
            return low * self.gradients / self.expected if self.expected else low

        if error is None or weights is not None:
            for step in order:
                chosen += [step] * (sum([size[one] for one in (*chosen, step)]) <= (weights or 0))
            require(len(chosen) < len(order), where, "weights", f"below {sum(size.values()):,}, of all layers", f"{weights:,}")
            return choice()
        while not expected(chosen) <= error and len(chosen) < len(order) - 1:
            chosen.append(order[len(chosen)])
        for step in sorted(chosen, key=lambda step: size[step], reverse=True):
            if expected(rest := [one for one in chosen if one != step]) <= error:
                chosen = rest
        while not (found := choice()).gradients <= error:
            left = [step for step in order if step not in chosen]
            least = f"at least {found.gradients:.3g}, with {left[0] or 'the layer'} alone in {type(self._recipe).__name__}"
            require(len(left) > 1, where, "error", least, error)
            chosen.append(left[0])
        return found


def _pairs(cfg: Any, recipe: Recipe, known: Collection[str]) -> tuple[dict[str, EitherConfig], list[str]]:
    """For each of the `known` steps the layer in both forms, and the steps whose sizes the recipe does not take."""
    pairs, unfit = {}, []
    for part in steps(cfg):
        form = low_form_of(part.cfg) if part.path in known else None
        if form is not None:
            try:
                source, becomes, made = form(part.cfg, recipe)
                pairs[part.path] = EitherConfig(wide_op=source, wide=part.cfg, low_op=becomes, low=made)
            except ValueError:
                unfit.append(part.path)
    return pairs, unfit


def _in_both_forms(params: Any, coded: Any, layers: Collection[Place], recipe: Recipe, key: Tensor) -> Any:
    """The params with an `EitherParams` for each layer, none of whose products is rounded yet. `coded`: the config with the
    recipe."""
    weights = [t for one in layers if (t := at(params, join_path(one.params, "weight"))) is not None]
    dtype = tensors(weights)[0].dtype if weights else torch.float32
    state: Any = {} if recipe.delayed else None  # as in a first step: scales from the tensors themselves
    work = quantize_params(params, coded, state, dtype=dtype, key=key if recipe.stochastic else None)
    for one in layers:
        if any([number for number, _ in one.stacked]):
            continue  # the first of the stack is all of them
        own, low = at(params, one.params), at(work, join_path(one.params, "weight"))
        flags = torch.zeros(*[times for _, times in one.stacked], 3, dtype=torch.bool)
        params = _put(params, one.params, EitherParams(own.weight, own.bias, low, flags))
    return params


def _put(tree: Any, path: str, value: Any) -> Any:
    return put(tree, path, value) if path else value


def _error(found: list[Tensor], wide: list[Tensor]) -> float:
    """The relative error of all tensors together, in norm."""
    off = math.hypot(*[float((a.double() - b.double()).norm()) for a, b in zip(found, wide, strict=True)])
    return off / size if (size := math.hypot(*[float(t.double().norm()) for t in wide])) else 0.0 if off == 0 else math.inf
