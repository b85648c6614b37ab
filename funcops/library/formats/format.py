"""How a tensor is written in few bits."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from funcops.engine.contract.op import config
from funcops.engine.errors import one_of, require
from funcops.library.kernels import quantize as kernels

_TILES = {
    "pow2": ((0, 0), (1, 0), (1, 128), (128, 128)),
    "float32": ((0, 0), (1, 0), (1, 128), (128, 128)),
    "e8m0": ((1, 32), (32, 32)),
    "e4m3": ((1, 16), (16, 16)),
}
SCALING_MODES = ("rceil", "floor", "even", "ceil")
FOUR_OVER_SIX = ("off", "mse", "mae")


def check_epsilon(where: str, epsilon: float) -> None:
    """Raise `ValueError` unless `epsilon` can be the least amax of a tile."""
    normal = epsilon == 0 or 2.0**-126 <= epsilon < math.inf  # Triton takes a smaller constant for a float64
    require(normal, where, "amax_epsilon", "0, or a normal float32 (2^-126 at least)", epsilon)


@config
class Format:
    """How a tensor is written in few bits.

    `element`: "e4m3" (largest 448), "e5m2" (57344) or "e2m1" (6). `tile`: (rows, columns) of the elements that share a scale, 0 for
    all. `scales`: "pow2" or "float32" (tiles (0, 0), (1, 0), (1, 128), (128, 128)), "e8m0" ((1, 32), (32, 32); OCP MX),
    or "e4m3" (only for e2m1; (1, 16), (16, 16); NVFP4). Raises `ValueError` for other combinations.

    `scaling_mode`, of "e8m0" scales, is the rule of a tile's exponent, with torchao's names: "rceil", the least power of two with
    which no element exceeds the element's largest; "floor", the exponent of the amax less the element's greatest exponent, of
    OCP MX 1.0, by which elements saturate; "even", the same after the amax is rounded to the element's bits; "ceil", the same after
    it is rounded up to a power of two. `amax_epsilon`, of "pow2" and "float32" scales, is the least amax that a scale is made from.

    With "e4m3" scales, `row_scaled` (tiles of (1, 16)) means a float32 scale for each row in place of the tensor's; `four_over_six`
    maps a tile's amax to 4 where that has the smaller error, by "mse" or "mae", and to 6 elsewhere (arXiv 2512.02010).

    >>> from funcops.low_precision import Format
    >>> Format("e4m3", (1, 128)) == Format("e4m3")
    True
    >>> Format("e2m1", (1, 128))
    Traceback (most recent call last):
        ...
    ValueError: Format: element must be e2m1 with e4m3 scales, or e4m3 or e5m2 with pow2 or float32 scales, got e2m1, pow2
    """

    element: str = dataclasses.field(kw_only=False)
    tile: tuple[int, int] = dataclasses.field(default=(1, 128), kw_only=False)
    scales: str = dataclasses.field(default="pow2", kw_only=False)
    scaling_mode: str = "rceil"
    amax_epsilon: float = 0.0
    row_scaled: bool = False
    four_over_six: str = "off"

    def __post_init__(self) -> None:
        elements = kernels.ELEMENTS
        require(self.element in elements, "Format", "element", one_of(elements, self.element), repr(self.element))
        require(self.scales in _TILES, "Format", "scales", one_of(_TILES, self.scales), repr(self.scales))
        tiles = _TILES[self.scales]
        require(self.tile in tiles, "Format", "tile", f"one of {', '.join(map(str, tiles))} with {self.scales} scales", self.tile)
        if self.scales == "e4m3" or (self.element == "e2m1" and self.scales != "e8m0"):
            right = self.scales == "e4m3" and self.element == "e2m1"
            wanted = "e2m1 with e4m3 scales, or e4m3 or e5m2 with pow2 or float32 scales"
            require(right, "Format", "element", wanted, f"{self.element}, {self.scales}")
        self._check_rules()
        by_rows = dataclasses.replace(self, tile=(1, 0)) if self.tile == (0, 0) else self
        object.__setattr__(self, "by_rows", by_rows)
        object.__setattr__(self, "kind", "float32" if self.scales == "pow2" else self.scales)

    def _check_rules(self) -> None:
        modes, epsilon = SCALING_MODES if self.scales == "e8m0" else SCALING_MODES[:1], self.amax_epsilon
        wanted = f"{one_of(modes, self.scaling_mode)} with {self.scales} scales"
        require(self.scaling_mode in modes, "Format", "scaling_mode", wanted, repr(self.scaling_mode))
        check_epsilon("Format", epsilon)
        by_rows = not self.row_scaled or (self.scales == "e4m3" and self.tile[0] == 1)
        require(by_rows, "Format", "row_scaled", f"False with tiles of {self.tile} and {self.scales} scales", True)
        choices = FOUR_OVER_SIX if self.scales == "e4m3" else FOUR_OVER_SIX[:1]
        wanted = f"{one_of(choices, self.four_over_six)} with {self.scales} scales"
        require(self.four_over_six in choices, "Format", "four_over_six", wanted, repr(self.four_over_six))
        takes = epsilon == 0 or self.scales in ("pow2", "float32")
        require(takes, "Format", "amax_epsilon", f"0 with {self.scales} scales (it is for pow2 and float32)", epsilon)

    by_rows: ClassVar[Format]  # the same format with one scale for each row, if it has one for the whole tensor; else itself
    kind: ClassVar[str]  # of its scales, by which a product decodes both operands: a power of two ("pow2") is a float32

    @property
    def name(self) -> str:
        """The format as a text, such as `e4m3 1x128 pow2`."""
        rules = [self.scaling_mode] * (self.scaling_mode != "rceil") + [f"epsilon {self.amax_epsilon}"] * (self.amax_epsilon > 0)
        rules += ["by rows"] * self.row_scaled + [f"4 over 6 by {self.four_over_six}"] * (self.four_over_six != "off")
        return " ".join([self.element, "x".join(str(n or "all") for n in self.tile), self.scales, *rules])

    @property
    def square(self) -> bool:
        """Whether a transposed copy is exact: its tiles are as wide as high."""
        return self.tile[0] == self.tile[1]

    @property
    def whole(self) -> bool:
        """Whether quantising needs the whole tensor's largest element, for its only scale or for one beside the tiles'."""
        return self.tile == (0, 0) or (self.scales == "e4m3" and not self.row_scaled)

    @property
    def turns(self) -> bool:
        """Whether "col" codes can be made from "row" codes: by a transposed copy, or by tiling anew with power-of-two scales."""
        return self.square or self.scales == "pow2"

    @property
    def retiles(self) -> bool:
        """Whether "col" codes of x can be made from its "row" codes (`turned`): it turns, or has MX scales by which no element
        saturates, whose tiles are quantised once more. Elements keep their bits, as with powers of two."""
        return self.turns or (self.scales == "e8m0" and self.scaling_mode in ("rceil", "ceil") and self.element != "e2m1")

    def nbytes(self, rows: int, cols: int) -> tuple[int, int]:
        """The bytes of a tensor's codes, and of the scales of its tiles."""
        high, wide = (size or whole for size, whole in zip(self.tile, (rows, cols), strict=True))
        scales = -(-rows // high) * -(-cols // wide)
        return rows * cols // (2 if self.element == "e2m1" else 1), scales * (1 if self.scales in ("e8m0", "e4m3") else 4)

    def args(self) -> tuple[str, int, int, str]:
        """The arguments by which kernels that decode take a format: element, rows and columns of a tile, scales."""
        return self.element, *self.tile, self.scales

    def how(self) -> tuple[str, int, int, str]:
        """The arguments by which quantisers take a format, which have the rule of its scales in place of their kind."""
        rule = self.four_over_six if self.scales == "e4m3" else self.scaling_mode
        return self.element, *self.tile, self.scales if rule in ("off", "rceil") else f"{self.scales}_{rule}"

    @property
    def largest_scale(self) -> float:
        """The largest scale of a tile in e4m3, from which the scale of the tensor or row follows."""
        return 448.0 if self.four_over_six == "off" else kernels.FEWER


E4M3_BLOCK = Format("e4m3", (1, 128), "pow2")
E5M2_BLOCK = Format("e5m2", (1, 128), "pow2")
E4M3_SQUARE = Format("e4m3", (128, 128), "pow2")
E4M3_TENSOR = Format("e4m3", (0, 0), "float32")
E5M2_TENSOR = Format("e5m2", (0, 0), "float32")
E4M3_MX = Format("e4m3", (1, 32), "e8m0")
E2M1_NV = Format("e2m1", (1, 16), "e4m3")
E2M1_NV_SQUARE = Format("e2m1", (16, 16), "e4m3")
_MADE_OF = {"pow2": ("e4m3", "e5m2"), "float32": ("e4m3", "e5m2"), "e8m0": ("e4m3", "e5m2", "e2m1"), "e4m3": ("e2m1",)}
FORMATS = tuple(
    [Format(element, tile, kind) for kind in _TILES for tile in _TILES[kind] for element in _MADE_OF[kind]]
)  # all elements, tiles and kinds of scales
