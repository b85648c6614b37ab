"""Every choice that a matrix product, a norm or a quantiser can make, as calls on the meta device. A product chooses kernel, tile,
and whether the inner dim is split, by epilogue, dtype and size. A norm chooses how it reads rows, by dtype and width; here it
computes everything that it can at once. A quantiser, and a product of its codes, choose by elements, tiles and scales. `bench aot`
compiles all choices, so that no user is the first to compile one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from funcops.library.formats import E4M3_BLOCK, E5M2_BLOCK, FORMATS, Format, by_tiles, quantize_sides, quantize_tensor, turned
from funcops.library.formats.format import SCALING_MODES
from funcops.library.formats.recipes import FP8, MXFP8, NVFP4, Fp8Block, Fp8Current, Recipe
from funcops.library.kernels import (
    add_norm,
    cross_entropy,
    fused_linear,
    linear,
    norm,
    quantize,
    quantize_after,
    scaled_mm,
    slot_attention,
)
from funcops.library.kernels.attention import attend_fwd
from funcops.library.kernels.pins import Pins, pinning
from funcops.library.kernels.scored_attention import Score
from funcops.library.kernels.triton.matmul import LONG, Epilogue, matmul, rows_of

SIZES = {"narrow": (48, 512), "medium": (512, 512), "large": (1024, 1024)}  # of a product's output
SHORT, ODD, ODD_WIDTH = 256, 3, 2051
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
    for call in _invariant(dtype):
        yield functools.partial(_pinned, call)
    if dtype is torch.bfloat16:
        for format in (*FORMATS, *RULES):
            yield from quantisers(format)
        yield from _scaled_products()
        yield from _quantised_outputs()


def norms(dtype: torch.dtype, width: int, rows: int = 4096) -> Iterator[Callable[[], object]]:
    x, w = torch.empty(rows, width, dtype=dtype, device="meta"), torch.empty(width, dtype=dtype, device="meta")
    column = torch.empty(rows, 1, device="meta")
    yield lambda: add_norm.add_layer_norm_fwd(x, x, w, w, 1e-6, False)
    yield lambda: add_norm.add_layer_norm_bwd(x, x, x, w, column, column, False, True, True, True)
    yield lambda: norm.row_sums(x)


def _pinned(call: Callable[[], object]) -> object:
    with pinning(Pins()):
        return call()


def _invariant(dtype: torch.dtype) -> Iterator[Callable[[], object]]:
    """The launches that the mode of `library.kernels.pins` alone has: products of rows; norms and losses of odd widths;
    and attention in training and over a cache, with each option for some size of heads."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for wide, out in ((1024, 512), (1001, 333)):
        x, w, into = empty(4096, wide), empty(out, wide), empty(4096, out, dtype=torch.float32)
        yield functools.partial(linear.linear_fwd, x, w, empty(out))
        yield functools.partial(linear.linear_fwd, x, w, None)
        yield functools.partial(linear.linear_dgrad, x, empty(wide, out))
        yield functools.partial(fused_linear.fused_linear_dgrad_into, x, empty(wide, out), 1.0, into)
    x, w, column = empty(4096, ODD_WIDTH), empty(ODD_WIDTH), empty(4096, 1, dtype=torch.float32)
    yield functools.partial(norm.rms_norm_fwd, x, w, 1e-6, False)
    yield functools.partial(norm.rms_norm_bwd, x, x, w, column, False, True, True)
    yield functools.partial(cross_entropy.cross_entropy_fwd, x, empty(4096, dtype=torch.int64), 0.1, -100, 0.0)
    for size, window, chunk, alibi in ((64, 0, 0, False), (128, 64, 0, False), (192, 0, 64, True)):
        q, k, cache = empty(1, 1024, 8, size), empty(1, 1024, 2, size), empty(1, 2, 1024, size)
        yield functools.partial(attend_fwd, q, k, k, None, None, Score(True, window, 0.0, alibi, 0.1), chunk)
        ends, how = empty(1, dtype=torch.int64), (None, None, size, window, chunk, 0.0, alibi, 0.1)
        yield functools.partial(slot_attention.slot_attention_fwd, empty(1, 1, 8, size), cache, cache, ends, ends, *how)


EPSILON = 1e-12
RULES = (  # of other scales than the default's
    *(Format("e4m3", (1, 32), "e8m0", scaling_mode=mode) for mode in SCALING_MODES[1:]),
    Format("e5m2", (32, 32), "e8m0", scaling_mode="even"),
    Format("e4m3", (32, 32), "e8m0", scaling_mode="floor"),
    *(Format("e4m3", tile, "float32", amax_epsilon=EPSILON) for tile in ((1, 0), (0, 0))),
    *(Format("e4m3", tile, "pow2", amax_epsilon=EPSILON) for tile in ((1, 128), (128, 128))),
)


def quantisers(format: Format) -> Iterator[Callable[[], object]]:
    """Quantise activations by rows, by columns and both, decode them, tile them anew; and quantise a weight in float32."""
    x, whole = torch.empty(512, 1024, dtype=torch.bfloat16, device="meta"), torch.empty(1, device="meta")
    amax, how = whole if format.whole else None, format.how()
    if format.square:
        yield lambda: quantize.quantize_row(x.float(), *how, amax, None, format.amax_epsilon)
    yield lambda: quantize_tensor(x, format, amax=amax).dequantize()
    yield lambda: quantize_tensor(x, format, side="col", amax=amax)
    yield lambda: quantize_sides(x, format)
    if format.turns:
        yield lambda: turned(quantize_tensor(x, format, amax=amax))
    if format.tile == (1, 128):  # codes by columns are stored one by one where four rows do not go into a word
        yield lambda: quantize_tensor(x[1:], format, side="col", amax=amax)
        yield lambda: quantize_sides(x[1:], format)
        if format.turns:
            yield lambda: turned(quantize_tensor(x[1:], format, amax=amax))
    if format in (E4M3_BLOCK, E5M2_BLOCK):
        yield lambda: quantize.quantize_scaled(x, format.element, whole)


def recipes() -> Iterator[Recipe]:
    """Each recipe with all elements and scales that it can have; `Fp8Delayed` has the formats of `Fp8Current`."""
    for fwd, bwd in itertools.product(FP8, FP8):
        yield from (Fp8Block(fwd=fwd, bwd=bwd, scales=scales, keep="col") for scales in ("pow2", "float32"))
        yield from (Fp8Current(fwd=fwd, bwd=bwd, pow2=pow2, keep="col") for pow2 in (False, True))
        yield MXFP8(fwd=fwd, bwd=bwd)
    yield from (NVFP4(stochastic=False), NVFP4(stochastic=False, w_tile=(1, 16)), MXFP8(scaling_mode="floor", w_tile=(32, 32)))
    yield Fp8Block(x_tile=(128, 128), amax_epsilon=EPSILON)


def _scaled_products() -> Iterator[Callable[[], object]]:
    """The three products of every recipe."""
    pairs = [pair for r in recipes() for pair in ((r.x, r.w), (r.dy, r.w), (r.dy, r.x))]
    for a, b in dict.fromkeys(pairs):
        yield lambda a=a, b=b: scaled_product(a.element, b.element, a.scales, a.tile, b.tile)  # type: ignore[misc]


def _quantised_outputs() -> Iterator[Callable[[], object]]:
    """The kernels of ops that write codes for the linear layer after them, in each recipe's format."""
    x, w = torch.empty(512, 4096, dtype=torch.bfloat16, device="meta"), torch.empty(4096, dtype=torch.bfloat16, device="meta")
    for format in dict.fromkeys(recipe.x for recipe in recipes() if recipe.x.tile[0] == 1 and recipe.x.element != "e2m1"):
        element, _, cols, kind = format.how()
        how = element, cols, kind, format.amax_epsilon
        yield lambda how=how: quantize_after.rms_norm_quantize(x, w, 1e-5, False, *how)  # type: ignore[misc]
        yield lambda how=how: quantize_after.layer_norm_quantize(x, w, w, 1e-5, False, *how)  # type: ignore[misc]
        yield lambda how=how: quantize_after.glu_quantize(x, "swiglu", True, *how)  # type: ignore[misc]
        yield lambda how=how: quantize_after.activation_quantize(x, "gelu", *how)  # type: ignore[misc]


def scaled_product(a: str, b: str, kind: str, of_a: tuple[int, int], of_b: tuple[int, int], emulate: bool = True) -> object:
    size = 1024
    whole = torch.empty(1, device="meta") if kind == "e4m3" else None

    def coded(element: str, tile: tuple[int, int]) -> tuple[Tensor, Tensor]:
        x, make = torch.empty(size, size, device="meta"), quantize.quantize_row.kernel.torch_impl
        codes, scales = make(x, element, *tile, kind, whole, None)
        return codes, by_tiles(scales, Format(element, tile, kind))

    (p, of_p), (q, of_q) = coded(a, of_a), coded(b, of_b)
    return scaled_mm.scaled_mm(p, of_p, whole, q, of_q, whole, a, *of_a, b, *of_b, kind, size, torch.bfloat16, emulate)


def _products_of_all_sizes(dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    sizes = SIZES if dtype.itemsize == 2 else {"medium": SIZES["medium"]}
    for m, n in sizes.values():
        for k in (SHORT, 2 * LONG):
            yield from _products(dtype, m, n, k)
            yield from _products(dtype, m, n + ODD, k)
    for k in (SHORT, 2 * LONG):  # strides without any known divisor
        yield from _products(dtype, *(size + ODD for size in (*SIZES["medium"], k)))


def _products(dtype: torch.dtype, m: int, n: int, k: int) -> Iterator[Callable[[], None]]:
    """The products of an [m, n] output. If n is odd, as a vocabulary of 50257, all are in a forward's layout."""

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
    if k < LONG:  # with an epilogue the inner dim is never split
        calls += [(forward, empty(m, n), e) for e in (every, unkept, unkept._replace(add=None))]
        calls += [(dgrad, empty(m, n), Epilogue(add=empty(m, n)))]
        calls += [(dgrad, empty(m, n), Epilogue(z=empty(m, n), mode="derivative", kind="gelu_tanh"))]
    for layout, out, epilogue in calls:
        a = empty(k, m).mT if layout.a else empty(m, k)
        b = empty(n, k).mT if layout.b else empty(k, n)
        yield lambda a=a, b=b, out=out, epilogue=epilogue: matmul(rows_of(a), rows_of(b), out, epilogue)  # type: ignore[misc]
