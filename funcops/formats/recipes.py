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
from typing import Any, ClassVar

from funcops.contract.op import config
from funcops.errors import describe, fail, require, require_type
from funcops.formats.format import Format
from funcops.kernels.quantize import ELEMENTS

LowForm = Callable[[Any, Any], tuple[Any, Any, Any]]
LOW_FORMS: dict[type, LowForm] = {}
"""Maps the class of a linear layer's config to `form(cfg, recipe)`, which returns its op, the op that replaces it under the recipe,
and that op's config. The file of each low-precision op adds its own entry."""


def low_form_of(cfg: Any) -> LowForm | None:
    """The entry of `LOW_FORMS` for a config; None if its op cannot take a recipe."""
    return LOW_FORMS.get(type(cfg))


KEEP = ("input", "row", "col")
WGRAD = ("low", "high")
FP8 = ("e4m3", "e5m2")


class Recipe:
    """The base of recipes. A recipe of your own is a `config` with a subset of the fields below and of fields of its own; its
    `__post_init__` calls `settle(x, w, dy)` with the format of each operand (`docs/your-own-recipe.md`).

    `keep`: what is saved of x for dw, "input" (x itself: an alias, or recomputed by a chain; quantised once more for dw), "row"
    (the codes that y's product read, tiled anew for dw) or "col" (codes ready for dw). `wgrad`: whether dw's product runs in "low"
    precision, or in "high", x's own, which needs `keep` "input". `emulate`: compute with decoded operands on a device that lacks
    the formats; without it such a device raises.

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
    delayed = False
    hadamard = False  # transform the operands of dw
    stochastic = False  # round dy stochastically
    multiple = 1  # in_features and out_features must be divisible by it
    capability = (8, 9)  # the lowest of a CUDA device whose tensor cores take the formats

    def settle(self, x: Format, w: Format, dy: Format) -> None:
        """Set the formats, and check that the fields go together. Raises `ValueError` for scales of different kinds: a product
        decodes both of its operands by one kind ("pow2" is "float32" with powers of two)."""
        where = type(self).__name__
        for name, format in (("x", x), ("w", w), ("dy", dy)):
            require_type(f"{where}.settle", name, format, Format)
        stateless = "False, or the class a subclass of Fp8Delayed, whose fields say how a scale follows from earlier steps"
        require(not self.delayed or isinstance(self, Fp8Delayed), where, "delayed", stateless, True)
        kinds = {name: "float32" if format.scales == "pow2" else format.scales for name, format in (("w", w), ("dy", dy), ("x", x))}
        for name, format in (("x", x), ("w", w), ("dy", dy)):
            require(kinds[name] == kinds["x"], where, f"{name}.scales", f"of the kind of x's, {x.scales!r}", repr(format.scales))
            object.__setattr__(self, name, format)
        require(self.keep in KEEP, where, "keep", f"one of {', '.join(KEEP)}", repr(self.keep))
        require(self.wgrad in WGRAD, where, "wgrad", f"one of {', '.join(WGRAD)}", repr(self.wgrad))
        if self.wgrad == "high":
            require(self.keep == "input", where, "keep", "'input' where wgrad is 'high'", repr(self.keep))
        turns = self.x.turns and not self.hadamard
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


def _check_elements(where: str, fwd: str, bwd: str) -> None:
    for name, element in (("fwd", fwd), ("bwd", bwd)):
        require(element in FP8, where, name, f"one of {', '.join(FP8)}", repr(element))


@config
class Fp8Block(Recipe):
    """x and dy in blocks of 1x128, w in 128x128; `fwd` elements for x and w, `bwd` for dy. `scales` is "pow2", or "float32", whose
    codes cannot be tiled anew (use `keep` "input" or "col" with it). The default on Hopper.

    >>> from funcops.low_precision import Fp8Block
    >>> Fp8Block().x.tile, Fp8Block().w.tile, Fp8Block().x.scales
    ((1, 128), (128, 128), 'pow2')
    """

    fwd: str = "e4m3"
    bwd: str = "e4m3"
    scales: str = "pow2"
    keep: str = "row"
    wgrad: str = "low"
    emulate: bool = False
    capability = (9, 0)

    def __post_init__(self) -> None:
        _check_elements("Fp8Block", self.fwd, self.bwd)
        require(self.scales in ("pow2", "float32"), "Fp8Block", "scales", "'pow2' or 'float32'", repr(self.scales))
        block = Format(self.fwd, (1, 128), self.scales)
        self.settle(block, Format(self.fwd, (128, 128), self.scales), Format(self.bwd, (1, 128), self.scales))


@config
class Fp8Current(Recipe):
    """One scale per tensor, from its current largest element, which costs another pass. `fwd` elements for x and w, `bwd` for dy.

    >>> from funcops.low_precision import Fp8Current
    >>> Fp8Current().x.tile, Fp8Current().x.element, Fp8Current().dy.element
    ((0, 0), 'e4m3', 'e5m2')
    """

    fwd: str = "e4m3"
    bwd: str = "e5m2"
    pow2: bool = False
    keep: str = "row"
    wgrad: str = "low"
    emulate: bool = False

    def __post_init__(self) -> None:
        _check_elements("Fp8Current", self.fwd, self.bwd)
        scales = "pow2" if self.pow2 else "float32"
        whole = Format(self.fwd, (0, 0), scales)
        self.settle(whole, whole, Format(self.bwd, (0, 0), scales))


@config
class Fp8Delayed(Recipe):
    """One scale per tensor, from the largest elements of the last `history` steps: their maximum (`algorithm` "max") or the latest
    ("most_recent"), with headroom of 2^`margin`. The caller holds its state: see `recipe_init` and `recipe_update` of
    `funcops.low_precision`. Raises `ValueError` for a margin beyond the formats' range (17 for e4m3): all codes would be zeros.

    >>> from funcops.low_precision import Fp8Delayed
    >>> Fp8Delayed(history=16).history, Fp8Delayed().dy.element
    (16, 'e5m2')
    """

    fwd: str = "e4m3"
    bwd: str = "e5m2"
    margin: int = 0
    history: int = 1024
    algorithm: str = "max"
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
        algorithms = ("max", "most_recent")
        require(self.algorithm in algorithms, "Fp8Delayed", "algorithm", f"one of {', '.join(algorithms)}", repr(self.algorithm))
        require(self.keep != "input", "Fp8Delayed", "keep", "'row' or 'col' (an amax is measured once)", repr(self.keep))
        whole = Format(self.fwd, (0, 0), "float32")
        self.settle(whole, whole, Format(self.bwd, (0, 0), "float32"))


@config
class MXFP8(Recipe):
    """Blocks of 1x32 with E8M0 scales for x, w and dy; columns are quantised from high precision. For sm_100.

    >>> from funcops.low_precision import MXFP8
    >>> MXFP8().x.tile, MXFP8().x.scales
    ((1, 32), 'e8m0')
    """

    fwd: str = "e4m3"
    bwd: str = "e4m3"
    keep: str = "col"
    wgrad: str = "low"
    emulate: bool = False
    multiple = 32
    capability = (10, 0)

    def __post_init__(self) -> None:
        _check_elements("MXFP8", self.fwd, self.bwd)
        block = Format(self.fwd, (1, 32), "e8m0")
        self.settle(block, block, Format(self.bwd, (1, 32), "e8m0"))


@config
class NVFP4(Recipe):
    """e2m1 in blocks of 1x16 (w: 16x16) with e4m3 scales, and one float32 scale per tensor. `hadamard`: transform the operands of
    dw along tokens, 16 at a time. `stochastic`: round dy stochastically, by keys in the working tree (`quantize_params(...,
    key=key)`, and `with_keys` for each further microbatch). For sm_100.

    >>> from funcops.low_precision import NVFP4
    >>> NVFP4().x.element, NVFP4().x.tile, NVFP4().w.tile
    ('e2m1', (1, 16), (16, 16))
    """

    keep: str = "col"
    wgrad: str = "low"
    hadamard: bool = True
    stochastic: bool = False
    emulate: bool = False
    multiple = 16
    capability = (10, 0)

    def __post_init__(self) -> None:
        block = Format("e2m1", (1, 16), "e4m3")
        self.settle(block, Format("e2m1", (16, 16), "e4m3"), block)
