"""Which device has which way to multiply codes by CUDA's library, as data.

A way is how scales lie: one a tensor ("tensor"), one a row ("row"), blocks of 128 ("block"), or MX's and NVFP4's small blocks. What
no device has confirmed is taken by request, gemm("cublas"), or where our own kernels do not run.
"""

from __future__ import annotations

import functools
from typing import Any, Optional

from funcops.library.kernels.scaled_mm import SERVED

# the capabilities of the devices on which torch multiplies so: by rows it has none for 12.0, for 8.9 one of bfloat16 results
DEVICES = {
    "tensor": (89, 90, 100, 103, 120, 121),
    "row": (90, 100, 103),
    "block": (90,),
    "mx": (100, 103, 120, 121),
    "nvfp4": (100, 103, 120, 121),
}
CONFIRMED = {"tensor": (90,), "row": (90,), "block": (90,)}  # of these, the ones that were measured (`docs/benchmarks`)
SMALL = {"e8m0": ("mx", 32), "e4m3": ("nvfp4", 16)}  # by the kind of scales: the way, and the elements that share one


@functools.lru_cache(maxsize=256)
def way_of(kind: str, elements: tuple[str, str], tiles: tuple[Any, Any]) -> Optional[str]:
    """How the library multiplies such operands on some device; None if it does on none."""
    if elements == ("e5m2", "e5m2"):
        return None
    if kind in SMALL:
        way, size = SMALL[kind]
        fits = all([tile in ((1, size), (size, size)) for tile in tiles])
        return way if fits and all([(element == "e2m1") is (way == "nvfp4") for element in elements]) else None
    if tiles[0] == tiles[1] and tiles[0] in ((0, 0), (1, 0)):
        return "row" if tiles[0][0] else "tensor"
    blocks = tiles[0] == (1, 128) and tiles[1] in ((1, 128), (128, 128)) and elements == ("e4m3", "e4m3")
    return "block" if blocks else None


def serves(way: Optional[str], capability: int, wanted: bool) -> bool:
    """Whether the library takes products of a way on a device: where one was measured, or, if `wanted`, wherever it runs."""
    devices = DEVICES if wanted else CONFIRMED
    return SERVED and way is not None and capability in devices.get(way, ())
