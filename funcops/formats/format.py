"""How a tensor is written in few bits."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from funcops.contract.op import config
from funcops.errors import require
from funcops.kernels import quantize as kernels

_TILES = {
    "pow2": ((0, 0), (1, 0), (1, 128), (128, 128)),
    "float32": ((0, 0), (1, 0), (1, 128), (128, 128)),
    "e8m0": ((1, 32), (32, 32)),
    "e4m3": ((1, 16), (16, 16)),
}


@config
class Format:
    """How a tensor is written in few bits.

    `element`: "e4m3" (largest 448), "e5m2" (57344) or "e2m1" (6). `tile`: (rows, columns) of the elements that share a scale, 0 for
    all. `scales`: "pow2" or "float32" (tiles (0, 0), (1, 0), (1, 128), (128, 128)), "e8m0" ((1, 32), (32, 32); OCP MX),
    or "e4m3" (only for e2m1; (1, 16), (16, 16); NVFP4). Raises `ValueError` for other combinations.

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

    def __post_init__(self) -> None:
        elements = kernels.ELEMENTS
        require(self.element in elements, "Format", "element", f"one of {', '.join(elements)}", repr(self.element))
        require(self.scales in _TILES, "Format", "scales", f"one of {', '.join(_TILES)}", repr(self.scales))
        tiles = _TILES[self.scales]
        require(self.tile in tiles, "Format", "tile", f"one of {', '.join(map(str, tiles))} with {self.scales} scales", self.tile)
        if self.scales == "e4m3" or (self.element == "e2m1" and self.scales != "e8m0"):
            right = self.scales == "e4m3" and self.element == "e2m1"
            require(
                right,
                "Format",
                "element",
                "e2m1 with e4m3 scales, or e4m3 or e5m2 with pow2 or float32 scales",
                f"{self.element}, {self.scales}",
            )
        by_rows = Format(self.element, (1, 0), self.scales) if self.tile == (0, 0) else self
        object.__setattr__(self, "by_rows", by_rows)

    by_rows: ClassVar[Format]  # the same format with one scale for each row, if it has one for the whole tensor; else itself

    @property
    def name(self) -> str:
        """The format as a text, such as `e4m3 1x128 pow2`."""
        return f"{self.element} {'x'.join(str(n or 'all') for n in self.tile)} {self.scales}"

    @property
    def square(self) -> bool:
        """Whether a transposed copy is exact: its tiles are as wide as high."""
        return self.tile[0] == self.tile[1]

    @property
    def whole(self) -> bool:
        """Whether quantising needs the whole tensor's largest element, for its only scale or for one beside the tiles'."""
        return self.tile == (0, 0) or self.scales == "e4m3"

    @property
    def turns(self) -> bool:
        """Whether "col" codes can be made from "row" codes: by a transposed copy, or by tiling anew with power-of-two scales."""
        return self.square or self.scales == "pow2"

    def args(self) -> tuple[str, int, int, str]:
        """The arguments by which kernels take a format: element, rows and columns of a tile, scales."""
        return self.element, *self.tile, self.scales


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
)  # all valid formats
