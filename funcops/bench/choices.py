"""Every choice that a matrix product, a norm or a quantiser can make, as calls on the meta device. Of a product: kernel, tile, and
whether the inner dimension is split, by epilogue, dtype and size; of a norm: how it takes rows, by dtype and width, with all that
it can compute at once; of a quantiser, and of a product of what it makes: elements, tiles and scales. `bench aot` compiles them
all, so that none is met first by a user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcops.formats import FORMATS
from funcops.kernels import add_norm, norm, quantize, scaled_mm
from funcops.kernels.triton.matmul import LONG, Epilogue, matmul

SIZES = {"narrow": (48, 512), "medium": (512, 512), "large": (1024, 1024)}  # of the output
SHORT, ODD = 256, 3
WIDTHS = 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 32784, 1001, 2049, 4099, 8191, 8193  # of a norm's rows


class Layout(NamedTuple):
    """Whether A and B are stored transposed: a forward's are (False, True), a dgrad's (False, False), a wgrad's (True, False)."""

    a: bool
    b: bool


FORWARD, DGRAD, WGRAD = Layout(False, True), Layout(False, False), Layout(True, False)


def choices(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    yield from _products_of_all_sizes(dtype)
    for width in WIDTHS:
        yield from norms(dtype, width)
    if dtype is torch.bfloat16:
        for format in FORMATS:
            yield from quantisers(dtype, format.element, format.tile, format.scales)
        yield from _scaled_products()


def norms(dtype: torch.dtype, width: int, rows: int = 4096) -> Iterator[Callable[[], object]]:
    x, w = torch.empty(rows, width, dtype=dtype, device="meta"), torch.empty(width, dtype=dtype, device="meta")
    column = torch.empty(rows, 1, device="meta")
    yield lambda: add_norm.add_layer_norm_fwd(x, x, w, w, 1e-6, False)
    yield lambda: add_norm.add_layer_norm_bwd(x, x, x, w, column, column, False, True, True, True)
    yield lambda: norm.row_sums(x)


def quantisers(dtype: torch.dtype, element: str, tile: tuple[int, int], kind: str) -> Iterator[Callable[[], object]]:
    """Of even rows."""
    rows, width = 512, 1024
    x, whole = torch.empty(rows, width, dtype=dtype, device="meta"), torch.empty(1, device="meta")
    amax = whole if kind == "e4m3" or tile == (0, 0) else None
    args = element, *tile, kind
    yield lambda: quantize.quantize_row(x, *args, amax, None)
    if tile != (1, 0):  # whose columns are rows of a copy
        yield lambda: quantize.quantize_col(x, *args, amax, None, False)
        yield lambda: quantize.quantize_both(x, *args, amax)
    codes, scales = quantize.quantize_row.kernel.torch_impl(x, *args, amax, None)
    yield lambda: quantize.dequantize(codes, scales, amax if kind == "e4m3" else None, *args, width, dtype)
    if (tile, kind) == ((1, 128), "pow2"):
        yield lambda: quantize.retile(codes, scales, element, *tile)
        yield lambda: quantize.quantize_scaled(x, element, whole)


def _scaled_products() -> Iterator[Callable[[], object]]:
    """Elements, and tiles of A and B, that the samples lack."""
    for a, b in (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")):
        for kind, of_a, of_b in (
            ("float32", (1, 0), (1, 0)), ("float32", (0, 0), (0, 0)), ("pow2", (1, 128), (128, 128)), ("pow2", (1, 128), (1, 128)),
            ("float32", (128, 128), (1, 128)), ("e8m0", (1, 32), (1, 32)), ("e8m0", (1, 32), (32, 32)),
        ):  # fmt: skip
            yield lambda a=a, b=b, kind=kind, of_a=of_a, of_b=of_b: _scaled_product(a, b, kind, of_a, of_b)  # type: ignore[misc]
    yield lambda: _scaled_product("e2m1", "e2m1", "e4m3", (1, 16), (16, 16))
    yield lambda: _scaled_product("e2m1", "e2m1", "e8m0", (1, 32), (1, 32))


def _scaled_product(a: str, b: str, kind: str, of_a: tuple[int, int], of_b: tuple[int, int]) -> object:
    size = 1024
    whole = torch.empty(1, device="meta") if kind == "e4m3" else None

    def coded(element: str, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
        x, make = torch.empty(size, size, device="meta"), quantize.quantize_row.kernel.torch_impl
        return make(x, element, *tile, kind, whole, None)  # type: ignore[no-any-return]

    (p, of_p), (q, of_q) = coded(a, of_a), coded(b, of_b)
    return scaled_mm.scaled_mm(p, of_p, whole, q, of_q, whole, a, *of_a, b, *of_b, kind, size, torch.bfloat16, True)


def _products_of_all_sizes(dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    sizes = SIZES if dtype.itemsize == 2 else {"medium": SIZES["medium"]}
    for m, n in sizes.values():
        for k in (SHORT, 2 * LONG):
            yield from _products(dtype, m, n, k)
            yield from _products(dtype, m, n + ODD, k)
    for k in (SHORT, 2 * LONG):  # strides of which nothing is known
        yield from _products(dtype, *(size + ODD for size in (*SIZES["medium"], k)))


def _products(dtype: torch.dtype, m: int, n: int, k: int) -> Iterator[Callable[[], None]]:
    """With an output of odd rows only a forward's operands may be even, as for a vocabulary of 50257."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    wide, sums = empty(m, n, dtype=torch.float32), empty(m, dtype=torch.float32)
    every = Epilogue(empty(n), empty(m, n), "keep", "gelu_tanh", empty(m, n), 0.5)
    unkept = every._replace(z=None, mode="")
    plain, accumulate = Epilogue(), Epilogue(add=wide)
    forward, dgrad, wgrad = (FORWARD,) * 3 if n % 16 and not k % 16 else (FORWARD, DGRAD, WGRAD)
    calls = [
        *((layout, empty(m, n), plain) for layout in (forward, dgrad, wgrad)),
        (wgrad, empty(m, n), Epilogue(sums=empty(m))),
        (dgrad, wide, accumulate),
        (wgrad, wide, accumulate._replace(sums=sums)),
    ]
    if k < LONG:  # which an epilogue never splits
        calls += [(forward, empty(m, n), e) for e in (every, unkept, unkept._replace(add=None))]
        calls += [(dgrad, empty(m, n), Epilogue(add=empty(m, n)))]
        calls += [(dgrad, empty(m, n), Epilogue(z=empty(m, n), mode="derivative", kind="gelu_tanh"))]
    for layout, out, epilogue in calls:
        a = empty(k, m).mT if layout.a else empty(m, k)
        b = empty(n, k).mT if layout.b else empty(k, n)
        yield lambda a=a, b=b, out=out, epilogue=epilogue: matmul(a, b, out, epilogue)  # type: ignore[misc]
