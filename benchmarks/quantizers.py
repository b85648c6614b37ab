"""The kernels that write and read codes, without matrix products, as rows of `kernel_calls`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernel_call import KernelCall, Maker
from funcops.library.formats import Format, by_tiles
from funcops.library.kernels import coded_glu, nf4, quantize, quantize_after


def of_quantizers(make: Maker) -> Iterator[KernelCall]:
    """The quantisers of the recipes for activations and gradients, only in bfloat16."""
    rows, width = make.sizes(8192, 4096)
    make = type(make)(make.device, torch.bfloat16, make.shrink)
    x, whole, scales = make.floats(rows, width), make.wide(1), make.wide(-(-width // 128), rows).mT
    block, tensor = ("e4m3", 1, 128, "pow2"), ("e4m3", 0, 0, "float32")
    each, mx, nv = ("e4m3", 1, 0, "float32"), ("e4m3", 1, 32, "e8m0"), ("e2m1", 1, 16, "e4m3")
    for args, amax in ((block, None), (tensor, whole), (each, None), (mx, None), (nv, whole)):
        shape = f"{args[0]} {args[1]}x{args[2]} {args[3]} {rows}x{width}"
        values = _decoded(args, amax)
        yield KernelCall(quantize.quantize_row, shape, (x, *args, amax, None), values=values)
        if args is not each:
            yield KernelCall(quantize.quantize_col, shape, (x, *args, amax, None, False), values=values)
            yield KernelCall(quantize.quantize_both, shape, (x, *args, amax), values=values)
    yield KernelCall(quantize.quantize_row, f"e4m3 128x128 pow2 {rows}x{width}", (x, "e4m3", 128, 128, "pow2", None, None))
    yield KernelCall(quantize.quantize_scaled, f"e4m3 {rows}x{width}", (x, "e4m3", whole))
    yield KernelCall(quantize.amax, f"{rows}x{width}", (x, False))
    codes = make.codes(rows, width)
    yield KernelCall(quantize.retile, f"e4m3 1x128 {rows}x{width}", (codes, scales, "e4m3", 1, 128))
    yield KernelCall(quantize.transpose, f"{rows}x{width}", (codes,))
    yield KernelCall(
        quantize.dequantize, f"e4m3 1x128 {rows}x{width}", (codes, scales, None, *block, width, make.dtype), dtype=make.dtype
    )
    tiles = make.codes(rows, -(-width // 16))
    few = make.codes(rows, -(-width // 2)), tiles, whole, *nv, width, make.dtype
    yield KernelCall(quantize.dequantize, f"e2m1 1x16 {rows}x{width}", few, dtype=make.dtype)
    yield from _codecs(make, x)


def of_frozen_weights(make: Maker) -> Iterator[KernelCall]:
    """Weights of an MLP of Llama-3-8B in NF4."""
    make = type(make)(make.device, torch.bfloat16, make.shrink)
    for high, wide in (make.sizes(14336, 4096), make.sizes(4096, 14336)):
        frozen = make.codes(high, -(-wide // 2)), make.wide(high, -(-wide // nf4.BLOCK)), wide, make.dtype
        yield KernelCall(nf4.nf4_dequantize, f"{high}x{wide}", frozen, dtype=make.dtype)


def _decoded(args: tuple[Any, ...], amax: Tensor | None) -> Callable[[Any], Any]:
    """A function that decodes each leading pair (codes, scales) of the results, and leaves the other results."""
    format = Format(args[0], args[1:3], args[3])
    scale = quantize.tensor_scale(amax) if format.scales == "e4m3" and amax is not None else None

    def values(results: tuple[Tensor, ...]) -> list[Tensor]:
        found, rest = [], list(results)
        while rest and rest[0].dtype is torch.uint8:
            codes, scales, *rest = rest
            codes = quantize.matrix(codes)
            width = codes.shape[1] * (2 if format.element == "e2m1" else 1)
            found.append(quantize.decode_tiles(codes, by_tiles(scales, format), scale, *format.args(), width))
        return found + rest

    return values


def _codecs(make: Maker, x: Tensor) -> Iterator[KernelCall]:
    """The codecs for kept tensors: e4m3 with an 8-bit scale for each block."""
    rows, width = x.shape
    yield KernelCall(quantize.quantize_row, f"e4m3 1x128 e8m0 {rows}x{width}", (x, "e4m3", 1, 128, "e8m0", None, None))
    for block in (32, 128):
        given = make.codes(rows, width), make.codes(rows, -(-width // block), about=124), None, "e4m3", 1, block, "e8m0", width
        yield KernelCall(quantize.dequantize, f"e4m3 1x{block} e8m0 {rows}x{width}", (*given, make.dtype), dtype=make.dtype)


def of_quantized_outputs(make: Maker) -> Iterator[KernelCall]:
    """Ops that write codes for the quantised linear layer after them."""
    rows, width = make.sizes(8192, 4096)
    x, both, w, b = make.floats(rows, width), make.floats(rows, 2 * width), make.floats(width), make.floats(width)
    for how in (("e4m3", 128, "pow2"), ("e4m3", 32, "e8m0")):
        shape, values = f"{how[0]} 1x{how[1]} {how[2]} {rows}x{width}", _decoded((how[0], 1, *how[1:]), None)
        yield KernelCall(quantize_after.rms_norm_quantize, shape, (x, w, 1e-5, False, *how), values=values)
        yield KernelCall(quantize_after.layer_norm_quantize, shape, (x, w, b, 1e-5, False, *how), values=values)
        yield KernelCall(quantize_after.glu_quantize, shape, (both, "swiglu", True, *how), values=values)
        yield KernelCall(quantize_after.activation_quantize, shape, (x, "gelu", *how), values=values)


def of_coded_glus(make: Maker) -> Iterator[KernelCall]:
    rows, width = make.sizes(8192, 4096)
    dy, codes = make.floats(rows, width), make.codes(rows, 2 * width)
    for cols in (128, 32):
        shape, scales = f"swiglu 1x{cols} {rows}x2x{width}", make.codes(rows, -(-2 * width // cols), about=127)
        yield KernelCall(coded_glu.coded_glu_fwd, shape, (codes, scales, cols, "swiglu", True, make.dtype), dtype=make.dtype)
        yield KernelCall(coded_glu.coded_glu_bwd, shape, (dy, codes, scales, cols, "swiglu", True))
