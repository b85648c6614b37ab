"""Low-precision recipes: the format of each operand of a linear layer's three products. Frozen, hashable, part of a config.

    y = x w^T       reads x and w by rows
    dx = dy w       reads dy by rows, w by columns
    dw = dy^T x     reads dy and x by columns

Only `Fp8Delayed` has state, which a caller holds (`funcops.low_precision`). Sources: NVIDIA Transformer Engine's recipes
(`Float8BlockScaling`, `Float8CurrentScaling`, `DelayedScaling`, `MXFP8BlockScaling`, `NVFP4BlockScaling`); DeepSeek-V3
(arXiv 2412.19437) for blocks, arXiv 2506.08027 for MX, arXiv 2509.25149 for NVFP4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from funcops.engine.contract.op import config
from funcops.engine.errors import describe, fail, one_of, require, require_type
from funcops.library.formats.format import FOUR_OVER_SIX, SCALING_MODES, Format, check_epsilon
from funcops.library.kernels.quantize import ELEMENTS

LowForm = Callable[[Any, Any], tuple[Any, Any, Any]]
LOW_FORMS: dict[type, LowForm] = {}
"""Maps the class of a linear layer's config to `form(cfg, recipe)`, which returns its op, the op that replaces it under the recipe,
and that op's config. The file of each low-precision op adds its own entry."""
LOW_ATTENTION: dict[type, LowForm] = {}
"""As `LOW_FORMS`, for an op that attends; one in low precision keeps the recipe that it has."""


def low_form_of(cfg: Any) -> LowForm | None:
    """The entry of `LOW_FORMS` for a config; None if its op cannot take a recipe."""
    return LOW_FORMS.get(type(cfg))


Algorithm = Callable[[Tensor], Tensor]
OPERANDS = ("x", "w", "dy", "x_col", "w_col", "dy_col")
PRODUCTS = (("w", "x"), ("dy", "w_col"), ("dy_col", "x_col"))  # y, dx and dw
KEEP = ("input", "row", "col")
WGRAD = ("low", "high")
FP8 = ("e4m3", "e5m2")
SCOPES = ("none", "weights", "activations", "all")
TO_ROUND = "to round dy: another in each step, as random.fold_in(key, step), any if no backward follows; or stochastic=False"
"""Says which key a stochastic recipe takes, and what to do without one."""


class Recipe:
    """The base of recipes. A recipe of your own is a `config` with a subset of the fields below and of fields of its own; its
    `__post_init__` calls `settle(x, w, dy)` with the format of each operand (`docs/your-own-recipe.md`).

    `x`, `w`, `dy`: the formats by rows; y reads x and w so, dx reads dy. `x_col`, `w_col`, `dy_col`: by columns; dx reads w so, dw
    reads x and dy.

    `keep`: what is saved of x for dw, "input" (x itself: an alias, or recomputed by a chain; quantised once more for dw), "row"
    (the codes that y's product read, tiled anew for dw) or "col" (codes ready for dw). `wgrad`: whether dw's product runs in "low"
    precision, or in "high", x's own, which needs `keep` "input". `emulate`: compute with decoded operands on a device that lacks
    the formats, and for operands with scales of two kinds; without it these raise.

    >>> from funcops.low_precision import Fp8Block, Recipe
    >>> recipe = Fp8Block(bwd="e5m2", keep="col")
    >>> isinstance(recipe, Recipe), recipe.x.element, recipe.dy.element, recipe.w.tile
    (True, 'e4m3', 'e5m2', (128, 128))
    """

    keep: str = "input"
    wgrad: str = "low"
    emulate: bool = False
    x: ClassVar[Format]
    w: ClassVar[Format]
    dy: ClassVar[Format]
    x_col: ClassVar[Format]
    w_col: ClassVar[Format]
    dy_col: ClassVar[Format]
    delayed = False
    hadamard = False  # transform the operands of dw
    stochastic = False  # round dy stochastically
    multiple = 1  # in_features and out_features must be divisible by it
    capability = (8, 9)  # the lowest of a CUDA device whose tensor cores take the formats

    @property
    def takes_codes(self) -> Format | None:
        """The format in which a grouped layer takes rows that other ranks have quantised; None if it quantises them itself."""
        return None if self.keep != "row" or self.x.whole else self.x

    def settle(
        self,
        x: Format,
        w: Format,
        dy: Format,
        *,
        x_col: Format | None = None,
        w_col: Format | None = None,
        dy_col: Format | None = None,
    ) -> None:
        """Set the formats, by columns the same as by rows unless given, and check that the fields go together. Raises `ValueError`
        for a product of scales of different kinds: it decodes both of its operands by one kind ("pow2" is "float32" with powers of
        two), except with `emulate`, by which such a product has decoded operands."""
        where, given = type(self).__name__, ((x, x_col), (w, w_col), (dy, dy_col))
        col = [row if of is None or of == row else of for row, of in given]  # equal formats are one object, which tracers compare
        formats = dict(zip(OPERANDS, (x, w, dy, *col), strict=True))
        for name, format in formats.items():
            require_type(f"{where}.settle", name, format, Format)
            object.__setattr__(self, name, format)
        stateless = "False, or the class a subclass of Fp8Delayed, whose fields say how a scale follows from earlier steps"
        require(not self.delayed or isinstance(self, Fp8Delayed), where, "delayed", stateless, True)
        require(
            not self.delayed or col == [x, w, dy], where, "x_col, w_col, dy_col", "None with scales from earlier steps", "given"
        )
        products = PRODUCTS[: 2 if self.wgrad == "high" else 3]
        if any([formats[left].element == formats[right].element == "e5m2" for left, right in products]):
            # a device of (8, 9) multiplies by CUDA's library, which has no product of e5m2 by e5m2
            object.__setattr__(self, "capability", max(self.capability, (9, 0)))
        for left, right in products:
            one, other = (plain if formats[n] == formats[plain := n.split("_")[0]] else n for n in (left, right))
            same = formats[left].kind == formats[right].kind or self.emulate
            wanted = f"of the kind of {other}'s, {formats[right].scales!r} (or emulate=True, which multiplies decoded operands)"
            require(same, where, f"{one}.scales", wanted, repr(formats[left].scales))
        require(self.keep in KEEP, where, "keep", one_of(KEEP, self.keep), repr(self.keep))
        require(self.wgrad in WGRAD, where, "wgrad", one_of(WGRAD, self.wgrad), repr(self.wgrad))
        if self.wgrad == "high":
            require(self.keep == "input", where, "keep", "'input' where wgrad is 'high'", repr(self.keep))
        for name in ("dy", "dy_col") if self.stochastic else ():
            mode, wanted = formats[name].four_over_six, "'off' with stochastic, as it compares the errors of rounding to nearest"
            require(mode == "off", where, f"{name}.four_over_six", wanted, repr(mode))
        turns = self.x.retiles and not self.hadamard and self.x is self.x_col
        why = "'input' or 'col', as codes by rows would be rounded a second time"
        require(turns or self.keep != "row", where, "keep", why, repr(self.keep))


def require_recipe(where: str, recipe: Any) -> None:
    """Raise `TypeError` unless `recipe` is a recipe whose formats are set."""
    if not isinstance(recipe, Recipe):
        got = f"the class {recipe.__name__}: call it" if isinstance(recipe, type) else describe(recipe)
        got += ", a format of weights alone: with_weight_only" if type(recipe).__name__ in ("NF4", "Format") else ""
        fail(where, "recipe", "a recipe, such as Fp8Current(), Fp8Delayed(), Fp8Block(), MXFP8() or NVFP4()", got, TypeError)
    if not hasattr(recipe, "dy"):
        wanted = "a Recipe whose formats are set (self.settle(x, w, dy) in its __post_init__, and @config on its class)"
        fail(where, "recipe", wanted, describe(recipe), TypeError)


def _epsilon(recipe: Any) -> float:
    check_epsilon(type(recipe).__name__, recipe.amax_epsilon)
    return float(recipe.amax_epsilon)


def _check_tiles(recipe: Any, size: int, *names: str) -> None:
    for name in names:
        tiles, tile = ((1, size), (size, size)), getattr(recipe, name)
        require(tile in tiles, type(recipe).__name__, name, f"{tiles[0]} or {tiles[1]}", tile)


def _check_elements(where: str, fwd: str, bwd: str) -> None:
    for name, element in (("fwd", fwd), ("bwd", bwd)):
        require(element in FP8, where, name, one_of(FP8, element), repr(element))


@config
class Fp8Block(Recipe):
    """x and dy in blocks of 1x128, w in 128x128; `fwd` elements for x and w, `bwd` for dy. `scales` is "pow2", or "float32", whose
    codes cannot be tiled anew (use `keep` "input" or "col" with it). `x_tile`, `w_tile`, `dy_tile`: (1, 128) or (128, 128).
    `amax_epsilon`: the least amax that a scale is made from. The default on Hopper.

    >>> from funcops.low_precision import Fp8Block
    >>> Fp8Block().x.tile, Fp8Block().w.tile, Fp8Block().x.scales
    ((1, 128), (128, 128), 'pow2')
    """

    fwd: str = "e4m3"
    bwd: str = "e4m3"
    scales: str = "pow2"
    x_tile: tuple[int, int] = (1, 128)
    w_tile: tuple[int, int] = (128, 128)
    dy_tile: tuple[int, int] = (1, 128)
    amax_epsilon: float = 0.0
    keep: str = "row"
    wgrad: str = "low"
    emulate: bool = False
    capability = (9, 0)

    def __post_init__(self) -> None:
        _check_elements("Fp8Block", self.fwd, self.bwd)
        require(self.scales in ("pow2", "float32"), "Fp8Block", "scales", "'pow2' or 'float32'", repr(self.scales))
        _check_tiles(self, 128, "x_tile", "w_tile", "dy_tile")
        block = Format(self.fwd, self.x_tile, self.scales, amax_epsilon=_epsilon(self))
        self.settle(block, replace(block, tile=self.w_tile), replace(block, element=self.bwd, tile=self.dy_tile))


@config
class Fp8Current(Recipe):
    """One scale per tensor, from its current largest element, which costs another pass. `fwd` elements for x and w, `bwd` for dy.
    `pow2`: scales that are powers of two. `amax_epsilon`: the least amax that a scale is made from. For sm_89, or with `fwd` "e5m2"
    for sm_90.

    >>> from funcops.low_precision import Fp8Current
    >>> Fp8Current().x.tile, Fp8Current().x.element, Fp8Current().dy.element
    ((0, 0), 'e4m3', 'e5m2')
    """

    fwd: str = "e4m3"
    bwd: str = "e5m2"
    pow2: bool = False
    amax_epsilon: float = 0.0
    keep: str = "row"
    wgrad: str = "low"
    emulate: bool = False

    def __post_init__(self) -> None:
        _check_elements("Fp8Current", self.fwd, self.bwd)
        whole = Format(self.fwd, (0, 0), "pow2" if self.pow2 else "float32", amax_epsilon=_epsilon(self))
        self.settle(whole, whole, replace(whole, element=self.bwd))


@config
class Fp8Delayed(Recipe):
    """One scale per tensor, from the largest elements of the last `history` steps: their maximum (`algorithm` "max"), the latest
    ("most_recent"), or a function's result, with headroom of 2^`margin`. The function gets the amaxes [H, n] of n tensors, float32,
    newest first, 0 for a step that has not been, and returns [n]; it must be pure, as a config is a constant. Where it returns 0,
    a negative number, infinity or NaN, a scale stays.

    The caller holds its state: see `recipe_init` and `recipe_update` of `funcops.low_precision`. Raises `ValueError` for a margin
    beyond the formats' range (17 for e4m3): all codes would be zeros.

    >>> from funcops.low_precision import Fp8Delayed
    >>> Fp8Delayed(history=16).history, Fp8Delayed().dy.element
    (16, 'e5m2')
    """

    fwd: str = "e4m3"
    bwd: str = "e5m2"
    margin: int = 0
    history: int = 1024
    algorithm: str | Algorithm = "max"
    keep: str = "row"
    wgrad: str = "low"
    emulate: bool = False
    delayed = True

    def __post_init__(self) -> None:
        _check_elements("Fp8Delayed", self.fwd, self.bwd)
        most = int(math.log2(min(ELEMENTS[e].largest / ELEMENTS[e].least for e in (self.fwd, self.bwd))))
        wanted = f"from {-most} to {most} (beyond, all codes are zeros, or all saturate)"
        require(abs(self.margin) <= most, "Fp8Delayed", "margin", wanted, self.margin)
        require(self.history >= 1, "Fp8Delayed", "history", "at least 1", self.history)
        right = self.algorithm in ("max", "most_recent") or callable(self.algorithm)
        wanted = "'max', 'most_recent', or a function from the history [H, n] to amaxes [n]"
        require(right, "Fp8Delayed", "algorithm", wanted, repr(self.algorithm))
        require(self.keep != "input", "Fp8Delayed", "keep", "'row' or 'col' (an amax is measured once)", repr(self.keep))
        whole = Format(self.fwd, (0, 0), "float32")
        self.settle(whole, whole, Format(self.bwd, (0, 0), "float32"))


@config
class MXFP8(Recipe):
    """Blocks of 1x32 with E8M0 scales for x, w and dy; columns are quantised from high precision. `scaling_mode`: the rule of a
    block's exponent, "rceil", "floor", "even" or "ceil" (`Format`). `w_tile`: (1, 32), or (32, 32), by which both of w's
    products read the same numbers. With keep="row", of "rceil" and "ceil", x is quantised once more, from its codes, for dw. For
    sm_100.

    >>> from funcops.low_precision import MXFP8
    >>> MXFP8().x.tile, MXFP8().x.scales
    ((1, 32), 'e8m0')
    """

    fwd: str = "e4m3"
    bwd: str = "e4m3"
    scaling_mode: str = "rceil"
    w_tile: tuple[int, int] = (1, 32)
    keep: str = "col"
    wgrad: str = "low"
    emulate: bool = False
    multiple = 32
    capability = (10, 0)

    def __post_init__(self) -> None:
        _check_elements("MXFP8", self.fwd, self.bwd)
        mode = self.scaling_mode
        require(mode in SCALING_MODES, "MXFP8", "scaling_mode", one_of(SCALING_MODES, mode), repr(mode))
        _check_tiles(self, 32, "w_tile")
        block = Format(self.fwd, (1, 32), "e8m0", scaling_mode=self.scaling_mode)
        self.settle(block, replace(block, tile=self.w_tile), replace(block, element=self.bwd))


@config
class NVFP4(Recipe):
    """e2m1 in blocks of 1x16 (w: 16x16) with e4m3 scales, and one float32 scale per tensor. `hadamard`: transform the operands of
    dw along tokens, 16 at a time. `stochastic`: round dy stochastically, by a key of each step (`begin_step(..., key=key)`, and
    `with_keys` for each further microbatch); a working tree without a key raises. False rounds dy to nearest.
    `w_tile`: (16, 16) or (1, 16). `row_scaled`: x has a float32 scale per row, for dw per column. `four_over_six`: which of
    "weights", "activations" or "all" of both have tiles whose largest element is 4 where that has the smaller `error`, "mse" or
    "mae"; or "none". For sm_100.

    >>> from funcops.low_precision import NVFP4
    >>> NVFP4().x.element, NVFP4().x.tile, NVFP4().w.tile
    ('e2m1', (1, 16), (16, 16))
    """

    keep: str = "col"
    wgrad: str = "low"
    hadamard: bool = True
    stochastic: bool = True
    w_tile: tuple[int, int] = (16, 16)
    row_scaled: bool = False
    four_over_six: str = "none"
    error: str = "mse"
    emulate: bool = False
    multiple = 16
    capability = (10, 0)

    def __post_init__(self) -> None:
        _check_tiles(self, 16, "w_tile")
        scope, errors = self.four_over_six, FOUR_OVER_SIX[1:]
        require(scope in SCOPES, "NVFP4", "four_over_six", one_of(SCOPES, scope), repr(scope))
        require(self.error in errors, "NVFP4", "error", one_of(errors, self.error), repr(self.error))
        block = Format("e2m1", (1, 16), "e4m3")
        x, w = (replace(block, four_over_six=self.error if scope in (name, "all") else "off") for name in SCOPES[2:0:-1])
        self.settle(replace(x, row_scaled=self.row_scaled), replace(w, tile=self.w_tile), block)
