"""Samples of the kernels of a mixture of experts: at the sizes of open models, with few rows an expert, and with odd sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernel_call import KernelCall, Maker, Prepared
from funcops.library.kernels import glu
from funcops.library.kernels.experts import experts_dgrad, experts_up
from funcops.library.kernels.grouped import grouped_product, grouped_wgrad, grouped_wgrad_into
from funcops.library.kernels.routing import sort_by_expert

CONSTANTS = 7.0, 1.702, 1.0  # limit, alpha and offset of GPT-OSS


class Layer(NamedTuple):
    """A layer that its calls share: T tokens with K choices of E experts, H to 2I to H."""

    make: Maker
    choices: int
    x: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    weights: Tensor
    indices: Tensor
    order: Tensor
    offsets: Tensor
    place: Tensor

    @staticmethod
    def of(make: Maker, tokens: int, choices: int, count: int, dim: int, hidden: int, bias: bool) -> Layer:
        tokens, dim, hidden = make.sizes(tokens, dim, hidden)
        count = max(2, count // make.shrink)
        indices = make.ids(tokens, choices, below=count).to(torch.int32)
        order, _, offsets, place = sort_by_expert(indices, count)
        up_bias, down_bias = (make.floats(count, 2 * hidden), make.floats(count, dim)) if bias else (None, None)
        return Layer(
            make,
            choices,
            make.floats(tokens, dim),
            make.floats(count, 2 * hidden, dim) * dim**-0.5,  # as they are drawn for training: a float16 holds the square of a sum
            make.floats(count, dim, hidden) * hidden**-0.5,
            up_bias,
            down_bias,
            make.wide(tokens, choices),
            indices,
            order,
            offsets,
            place,
        )

    @property
    def name(self) -> str:
        (tokens, dim), (count, width, _) = self.x.shape, self.up.shape
        return f"{tokens}x{dim} by {self.choices} of {count} to 2x{width // 2}"


# tokens, choices, experts, dim, hidden, with biases
WIDE = 8192, 8, 128, 2048, 768, False
LAYERS_OF_EXPERTS = WIDE, (8192, 8, 128, 2048, 768, True), (64, 8, 128, 2048, 768, True), (4096, 2, 8, 1001, 603, True)


def of_experts(make: Maker, layer: tuple[int, int, int, int, int, bool]) -> Iterator[KernelCall]:
    made = Layer.of(make, *layer)
    yield from _both(made, "swiglu" if layer == WIDE else "clamped_swiglu")
    yield from _products(made)
    if layer == WIDE:
        yield from _both(made, "swiglu", before=True)
        for kind in [kind for kind in glu.GATES if kind != "swiglu"]:
            yield from _both(made, kind)


def _both(layer: Layer, kind: str, before: bool = False) -> Iterator[KernelCall]:
    """The up product and down's input gradient, each with the gated unit; `before`: with the weights on its input."""
    x, make, how = layer.x, layer.make, (kind, *CONSTANTS, before)
    rows, (_, dim, hidden) = layer.order.numel(), layer.down.shape
    shape, flops = f"{kind} {'weighted before ' * before}{layer.name}", 2.0 * rows * dim * hidden
    args: tuple[Any, ...] = x, layer.up, layer.up_bias, layer.weights, layer.order, layer.offsets, *how
    yield KernelCall(experts_up, shape, args, product=_dense(rows, layer.up[0].mT), flops=2 * flops, length=dim)
    z, indices = make.floats(rows, 2 * hidden), None if layer.down_bias is None else layer.indices
    given = x, layer.down, z, layer.weights, layer.order, layer.offsets, layer.place, layer.down_bias, indices
    args = *given, *how, True, True, True
    yield KernelCall(experts_dgrad, shape, args, product=_dense(rows, layer.down[0]), flops=flops, length=dim)


def _products(layer: Layer) -> Iterator[KernelCall]:
    """Down's forward, up's input gradient, both weight gradients, up's into accumulators too; and up as a single layer."""
    x, make, offsets, order, every = layer.x, layer.make, layer.offsets, layer.order, layer.choices
    rows, (count, dim, hidden), bias = order.numel(), layer.down.shape, layer.up_bias is not None
    dz, scaled, s = make.floats(rows, 2 * hidden), make.floats(rows, hidden), make.wide(rows) if bias else None
    dw, db = make.wide(count, 2 * hidden, dim), make.wide(count, 2 * hidden) if bias else None
    up, down = _dense(rows, layer.up[0].mT), _dense(rows, layer.down[0].mT)
    dup, ddown = _dense(2 * hidden, x.new_empty(rows, dim)), _dense(dim, x.new_empty(rows, hidden))
    one = 2.0 * rows * dim * hidden
    for kernel, what, args, product, flops, length in (
        (grouped_product, "up", (x, layer.up, layer.up_bias, offsets, order, every, None, True), up, 2 * one, dim),
        (grouped_product, "down", (scaled, layer.down, layer.down_bias, offsets, None, 1, s, True), down, one, hidden),
        (grouped_product, "up's dgrad", (dz, layer.up, None, offsets, None, 1, None, False), up, 2 * one, 2 * hidden),
        (grouped_wgrad, "up", (dz, x, offsets, None, order, every, None, bias), dup, 2 * one, rows),
        (grouped_wgrad, "down", (x, scaled, offsets, order, None, every, s, bias), ddown, one, rows),
        (grouped_wgrad_into, "up", (dz, x, offsets, None, order, every, None, dw, db), dup, 2 * one, rows),
    ):
        yield KernelCall(kernel, f"{what} {layer.name}", args, product=product, flops=flops, length=length)


def _dense(rows: int, other: Tensor) -> Prepared:
    """A dense product of the same number of rows with one matrix [K, N]."""
    left = other.new_empty((rows, other.shape[0]))
    return lambda *_: lambda: left @ other
