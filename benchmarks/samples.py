"""The list of calls for `bench kernels` (on a GPU) and `bench aot` (on the meta device, for any GPU): every kernel that has a
Triton implementation, by shape class. A kernel without a row here fails a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import of_attention
from benchmarks.experts import of_experts
from benchmarks.low_experts import of_low_experts
from benchmarks.sample import Maker as Maker
from benchmarks.sample import Prepared, direct, gradient
from benchmarks.sample import Sample as Sample
from funcops import random
from funcops.formats import Format, by_tiles
from funcops.kernels import (
    adamw,
    add_norm,
    causal_conv1d,
    coded_glu,
    cross_entropy,
    embedding,
    fused_linear,
    glu,
    group_norm,
    linear,
    modulate,
    norm,
    pointwise,
    qkv_split,
    quantize,
    quantize_after,
    rope,
    route,
    routing,
    row_scale,
    scaled_mm,
    sibling_linear,
    softcap,
    softmax,
)
from funcops.kernels.activation import ACTIVATIONS, activation_bwd, activation_fwd
from funcops.kernels.bias_activation import activation_bwd_again, bias_activation_bwd, bias_activation_fwd, dropout_bwd_sums
from funcops.ops.rope import RopeConfig, rope_table


def samples(make: Maker) -> Iterator[Sample]:
    families = (
        _norms,
        _group_norms,
        _convolutions,
        _keys,
        _pointwise,
        _activations,
        _glus,
        _ropes,
        _losses,
        _embeddings,
        _optimisers,
        _quantisers,
        _quantised_outputs,
        _products,
        _siblings,
        _scaled_products,
        _coded_glus,
        _routers,
        _rows_of_experts,
        of_experts,
        of_low_experts,
        of_attention,
    )
    for family in families:
        yield from family(make)


def _rms_norm(x: Tensor, w: Tensor, *_: Any) -> Tensor:
    return F.rms_norm(x, w.shape, w, 1e-6)


def _layer_norm(x: Tensor, w: Tensor, b: Tensor, *_: Any) -> Tensor:
    return F.layer_norm(x, w.shape, w, b, 1e-6)


def _norms(make: Maker) -> Iterator[Sample]:
    for rows, width in ((131072, 256), (8192, 4096), (4096, 16384)):
        yield from norms(make, *make.sizes(rows, width))


def norms(make: Maker, rows: int, width: int) -> Iterator[Sample]:
    shape = f"{rows}x{width}"
    x, dy, w, b = make.floats(rows, width), make.floats(rows, width), make.floats(width), make.floats(width)
    rstd, mean = make.wide(rows, 1), make.wide(rows, 1)
    yield Sample(norm.rms_norm_fwd, shape, (x, w, 1e-6, False), direct(_rms_norm))
    yield Sample(norm.rms_norm_bwd, shape, (dy, x, w, rstd, False, True, True), gradient(_rms_norm, wrt=2))
    yield Sample(norm.layer_norm_fwd, shape, (x, w, b, 1e-6, False), direct(_layer_norm))
    yield Sample(
        norm.layer_norm_bwd,
        shape,
        (dy, x, w, mean, rstd, False, True, True, True),
        lambda dy, x, w, *_: gradient(_layer_norm, wrt=3)(dy, x, w, w),
    )
    yield Sample(norm.l2_norm_fwd, shape, (x, 1e-6), direct(lambda x, _: F.normalize(x, dim=-1)))
    yield Sample(norm.l2_norm_bwd, shape, (dy, x, rstd), gradient(lambda x, _: F.normalize(x, dim=-1), wrt=1))
    yield Sample(norm.row_sums, shape, (dy,), direct(lambda dy: dy.sum(0)))
    parts, others = (make.wide(256, -(-width // 16) * 16)[:, :width] for _ in range(2))  # as kernels lay them out
    yield Sample(norm.sum_parts, f"256x{width}", (parts, make.dtype))
    yield Sample(norm.sum_two_parts, f"256x{width}", (parts, others, make.dtype))
    yield from _add_norms(make, rows, width)


def _group_norms(make: Maker) -> Iterator[Sample]:
    """Group norms of images, as in a diffusion model."""
    batches, size = make.sizes(16, 4096)
    for channels, groups in ((320, 32), (512, 256)):  # groups larger and smaller than one program can hold
        x, dy, w, b = (
            make.floats(batches, channels, size),
            make.floats(batches, channels, size),
            make.floats(channels),
            make.floats(channels),
        )
        mean, rstd = make.wide(batches, groups), make.wide(batches, groups)
        shape = f"{batches}x{channels}x{size} by {groups}"
        yield Sample(
            group_norm.group_norm_fwd,
            shape,
            (x, w, b, groups, 1e-5),
            direct(lambda x, w, b, groups, eps: F.group_norm(x, groups, w, b, eps)),
        )
        yield Sample(group_norm.group_norm_bwd, shape, (dy, x, w, mean, rstd, groups, True, True, True))


def _convolutions(make: Maker) -> Iterator[Sample]:
    """The convolutions before the state of Qwen3-Next."""
    tokens, channels = make.sizes(4096, 8192)
    x, dy, w, b = (
        make.floats(2, tokens, channels),
        make.floats(2, tokens, channels),
        make.floats(channels, 4),
        make.floats(channels),
    )
    shape = f"2x{tokens}x{channels} of 4"
    yield Sample(causal_conv1d.causal_conv1d_fwd, shape, (x, w, b, True))
    yield Sample(causal_conv1d.causal_conv1d_bwd, shape, (dy, x, w, b, True, True, True, True))


def _add_norms(make: Maker, rows: int, width: int) -> Iterator[Sample]:
    shape = f"{rows}x{width}"
    x, residual, dy, dstream = (make.floats(rows, width) for _ in range(4))
    w, b, rstd, mean = make.floats(width), make.floats(width), make.wide(rows, 1), make.wide(rows, 1)
    yield Sample(add_norm.add_rms_norm_fwd, shape, (x, residual, w, 1e-6, False))
    yield Sample(add_norm.add_rms_norm_bwd, shape, (dy, dstream, x, w, rstd, False, True, True))
    yield Sample(add_norm.add_layer_norm_fwd, shape, (x, residual, w, b, 1e-6, False))
    yield Sample(add_norm.add_layer_norm_bwd, shape, (dy, dstream, x, w, mean, rstd, False, True, True, True))
    yield Sample(add_norm.add_rms_norm_bwd_again, shape, (dy, dstream, x, w, rstd, False, True))
    yield Sample(add_norm.add_layer_norm_bwd_again, shape, (dy, dstream, x, w, b, mean, rstd, False, True, True))
    yield Sample(add_norm.dropout_add_rms_norm_fwd, shape, (x, residual, w, make.key(), 0.1, 1e-6, False))
    yield Sample(add_norm.dropout_add_layer_norm_fwd, shape, (x, residual, w, b, make.key(), 0.1, 1e-6, False))


def _keys(make: Maker) -> Iterator[Sample]:
    key = make.key()
    yield Sample(random._fold_in, "a number", (key, None, 3))
    yield Sample(random._fold_in, "a tensor", (key, make.ids(1, below=8)[0], 0))


def _pointwise(make: Maker) -> Iterator[Sample]:
    for rows, width in ((8192, 4096), (8192, 4099)):
        rows, width = make.sizes(rows, width)
        shape = f"{rows}x{width}"
        x, y, b = make.floats(rows, width), make.floats(rows, width), make.floats(width)
        yield Sample(pointwise.add, shape, (x, y))
        yield Sample(pointwise.add, f"{shape} + {width}", (x, b))
        yield Sample(pointwise.scale, shape, (x, 0.5))
        yield Sample(pointwise.dropout, shape, (x, make.key(), 0.1), direct(lambda x, *_: F.dropout(x, 0.1)))
        yield Sample(
            pointwise.dropout_add,
            f"{shape} + {width}",
            (x, b, y, make.key(), 0.1),
            direct(lambda x, b, y, *_: y + F.dropout(x + b, 0.1)),
        )
        yield Sample(bias_activation_fwd, f"gelu_tanh {shape} + {width}", (x, b, "gelu_tanh"))
    yield Sample(pointwise.dropout_add, shape, (x, None, y, make.key(), 0.1), direct(lambda x, _, y, *__: y + F.dropout(x, 0.1)))
    batches, tokens, width = make.sizes(64, 256, 1152)  # of a DiT-XL
    x, y, b = make.floats(batches, tokens, width), make.floats(batches, tokens, width), make.floats(batches, width)
    of_batches = f"{batches}x{tokens}x{width}"
    yield Sample(modulate.modulate_fwd, of_batches, (x, b, make.floats(batches, width)))
    yield Sample(modulate.modulate_bwd, of_batches, (y, x, b, True, True, True))


def _activations(make: Maker) -> Iterator[Sample]:
    rows, width = make.sizes(8192, 4096)
    x, dy, b = make.floats(rows, width), make.floats(rows, width), make.floats(width)
    for kind in ACTIVATIONS:
        shape = f"{kind} {rows}x{width}"
        yield Sample(activation_fwd, shape, (x, kind))
        yield Sample(activation_bwd, shape, (dy, x, kind))
        yield Sample(bias_activation_fwd, shape, (x, b, kind))
        yield Sample(bias_activation_bwd, shape, (dy, x, b, kind, True))
        if kind == "gelu_tanh":
            yield Sample(bias_activation_bwd, f"{shape} of a sum", (dy, x, None, kind, True))
        yield Sample(activation_bwd_again, shape, (dy, x, kind, True))
    yield Sample(dropout_bwd_sums, f"{rows}x{width}", (dy, make.key(), 0.1))
    shape, gate = f"{rows}x{width}", make.floats(rows, 1)
    yield Sample(row_scale.row_scale_fwd, shape, (x, gate, True))
    yield Sample(row_scale.row_scale_bwd, shape, (dy, x, gate, True, True, True))
    for t, of in ((x, shape), (make.floats(*make.sizes(512, 65536)), "long rows")):
        yield Sample(softmax.softmax_fwd, of, (t,), direct(lambda x: torch.softmax(x, -1)))
        yield Sample(softmax.softmax_bwd, of, (t, t))
    yield Sample(softcap.softcap_fwd, f"{rows}x{width}", (x, 30.0))
    yield Sample(softcap.softcap_bwd, f"{rows}x{width}", (dy, x, 30.0))


def _glus(make: Maker) -> Iterator[Sample]:
    rows, width = make.sizes(8192, 4096)
    x, dy, scales = make.floats(rows, 2 * width), make.floats(rows, width), make.floats(rows)
    for kind in glu.GATES:
        shape = f"{kind} {rows}x2x{width}"
        yield Sample(glu.glu_fwd, shape, (x, None, kind, True))
        yield Sample(glu.glu_bwd, shape, (dy, x, None, kind, True, True, False))
        yield Sample(glu.glu_bwd_again, shape, (dy, x, kind, True))
        gate, linear = make.floats(rows, width), make.floats(rows, width)
        yield Sample(glu.glu_pair_fwd, f"{shape} apart", (gate, linear, kind))
        yield Sample(glu.glu_pair_bwd, f"{shape} apart", (dy, gate, linear, kind))
    shape = f"clamped_swiglu {rows}x2x{width}"
    clamp = (False, 7.0, 1.702, 1.0)
    yield Sample(glu.clamped_swiglu_fwd, shape, (x, scales, *clamp))
    yield Sample(glu.clamped_swiglu_bwd, shape, (dy, x, scales, *clamp, True, True))


def _ropes(make: Maker) -> Iterator[Sample]:
    for interleaved in (False, True):
        (tokens, _), heads = make.sizes(8192, 32), max(2, 32 // make.shrink)
        x = make.floats(2, tokens, heads, 128)
        positions = torch.arange(tokens, device=make.device)
        table = rope_table(positions, RopeConfig(128, interleaved=interleaved))
        shape = f"{'interleaved' if interleaved else 'halves'} 2x{tokens}x{heads}x128"
        yield Sample(rope.rope_apply, shape, (x, table, interleaved, False))
        k = make.floats(2, tokens, heads // 2, 128)
        yield Sample(rope.rope_apply_pair, f"{shape} and {heads // 2}", (x, k, table, interleaved, False))
        qkv, kv_heads = make.floats(2, tokens, 2 * heads * 128), heads // 2
        yield Sample(qkv_split.qkv_split_fwd, shape, (qkv, table, heads, kv_heads, interleaved))
        dk, dv = make.floats(2, tokens, kv_heads, 128), make.floats(2, tokens, kv_heads, 128)
        yield Sample(qkv_split.qkv_split_bwd, shape, (x, dk, dv, table, interleaved))
    shape = shape.removeprefix("interleaved ")
    half = rope_table(positions, RopeConfig(128, rotary_dim=64))
    yield Sample(rope.rope_apply, f"halves of 64 {shape}", (x, half, False, False))
    yield Sample(qkv_split.qkv_split_fwd, f"unturned {shape}", (qkv, None, heads, kv_heads, False))
    yield Sample(qkv_split.qkv_split_bwd, f"unturned {shape}", (x, dk, dv, None, False))


def _cross_entropy(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")


def _unsmoothed(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _losses(make: Maker) -> Iterator[Sample]:
    for rows, vocab in ((8192, 32000), (4096, 50257), (2048, 128256)):
        rows, vocab = make.sizes(rows, vocab)
        shape = f"{rows}x{vocab}"
        logits, labels = make.floats(rows, vocab), make.ids(rows, below=vocab)
        losses, lse, options = make.wide(rows), make.wide(rows, 2) + 5.0, (0.1, -100, 1e-4)
        yield Sample(cross_entropy.cross_entropy_fwd, shape, (logits, labels, *options), direct(_cross_entropy))
        yield Sample(
            cross_entropy.cross_entropy_bwd,
            shape,
            (losses, logits, labels, lse, *options),
            lambda d, *args: gradient(_cross_entropy, wrt=1)(d.to(args[0].dtype), *args),
        )
        plain = (0.0, -100, 0.0)
        yield Sample(cross_entropy.cross_entropy_fwd, f"{shape} unsmoothed", (logits, labels, *plain), direct(_unsmoothed))
        owned = (losses, logits, labels, lse, *options, vocab // 2, 2 * vocab)
        yield Sample(cross_entropy.cross_entropy_bwd_owned, f"{shape} of {2 * vocab}", owned)


def _embeddings(make: Maker) -> Iterator[Sample]:
    tokens, width, vocab = make.sizes(32768, 2048, 50257)
    dy, ids = make.floats(tokens, width), make.ids(tokens, below=vocab)
    shape = f"{tokens}x{width} of {vocab}"
    yield Sample(embedding.embedding_wgrad, shape, (dy, ids, vocab, -1))
    yield Sample(embedding.embedding_wgrad_into, shape, (dy, ids, -1, make.wide(vocab, width)))


def _optimisers(make: Maker) -> Iterator[Sample]:
    """The tensors of a GPT-2 of 124 million parameters."""
    (width,) = make.sizes(768)
    layer = [
        (width,),
        (width,),
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (width,),
        (width,),
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
        (width,),
    ]
    shapes = [make.sizes(50257, 768), make.sizes(1024, 768), *layer * max(1, 12 // make.shrink), (width,), (width,)]
    p, g, m = ([make.floats(*shape) for shape in shapes] for _ in range(3))
    v = [make.floats(*shape).square() for shape in shapes]
    steps = [make.wide().fill_(3.0) for _ in shapes]
    decayed = [len(shape) > 1 for shape in shapes]
    yield Sample(adamw.adamw, f"gpt-2 {len(shapes)} tensors", (p, g, m, v, steps, decayed, 1e-3, None, 0.9, 0.95, 1e-8, 0.1))


def _quantisers(make: Maker) -> Iterator[Sample]:
    """The quantisers of the recipes for activations and gradients, only in bfloat16."""
    rows, width = make.sizes(8192, 4096)
    make = type(make)(make.device, torch.bfloat16, make.shrink)
    x, whole, scales = make.floats(rows, width), make.wide(1), make.wide(-(-width // 128), rows).mT
    block, tensor = ("e4m3", 1, 128, "pow2"), ("e4m3", 0, 0, "float32")
    each, mx, nv = ("e4m3", 1, 0, "float32"), ("e4m3", 1, 32, "e8m0"), ("e2m1", 1, 16, "e4m3")
    for args, amax in ((block, None), (tensor, whole), (each, None), (mx, None), (nv, whole)):
        shape = f"{args[0]} {args[1]}x{args[2]} {args[3]} {rows}x{width}"
        values = _decoded(args, amax)
        yield Sample(quantize.quantize_row, shape, (x, *args, amax, None), values=values)
        if args is not each:
            yield Sample(quantize.quantize_col, shape, (x, *args, amax, None, False), values=values)
            yield Sample(quantize.quantize_both, shape, (x, *args, amax), values=values)
    yield Sample(quantize.quantize_row, f"e4m3 128x128 pow2 {rows}x{width}", (x, "e4m3", 128, 128, "pow2", None, None))
    yield Sample(quantize.quantize_scaled, f"e4m3 {rows}x{width}", (x, "e4m3", whole))
    yield Sample(quantize.amax, f"{rows}x{width}", (x, False))
    codes = make.codes(rows, width)
    yield Sample(quantize.retile, f"e4m3 1x128 {rows}x{width}", (codes, scales, "e4m3", 1, 128))
    yield Sample(quantize.transpose, f"{rows}x{width}", (codes,))
    yield Sample(
        quantize.dequantize, f"e4m3 1x128 {rows}x{width}", (codes, scales, None, *block, width, make.dtype), dtype=make.dtype
    )
    tiles = make.codes(rows, -(-width // 16))
    few = make.codes(rows, -(-width // 2)), tiles, whole, *nv, width, make.dtype
    yield Sample(quantize.dequantize, f"e2m1 1x16 {rows}x{width}", few, dtype=make.dtype)
    yield from _codecs(make, x)


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


def _codecs(make: Maker, x: Tensor) -> Iterator[Sample]:
    """The codecs for kept tensors: e4m3 with an 8-bit scale for each block."""
    rows, width = x.shape
    yield Sample(quantize.quantize_row, f"e4m3 1x128 e8m0 {rows}x{width}", (x, "e4m3", 1, 128, "e8m0", None, None))
    for block in (32, 128):
        given = make.codes(rows, width), make.codes(rows, -(-width // block), about=124), None, "e4m3", 1, block, "e8m0", width
        yield Sample(quantize.dequantize, f"e4m3 1x{block} e8m0 {rows}x{width}", (*given, make.dtype), dtype=make.dtype)


def _quantised_outputs(make: Maker) -> Iterator[Sample]:
    """Ops that write codes for the quantised linear layer after them."""
    rows, width = make.sizes(8192, 4096)
    x, both, w, b = make.floats(rows, width), make.floats(rows, 2 * width), make.floats(width), make.floats(width)
    for how in (("e4m3", 128, "pow2"), ("e4m3", 32, "e8m0")):
        shape, values = f"{how[0]} 1x{how[1]} {how[2]} {rows}x{width}", _decoded((how[0], 1, *how[1:]), None)
        yield Sample(quantize_after.rms_norm_quantize, shape, (x, w, 1e-5, False, *how), values=values)
        yield Sample(quantize_after.layer_norm_quantize, shape, (x, w, b, 1e-5, False, *how), values=values)
        yield Sample(quantize_after.glu_quantize, shape, (both, "swiglu", True, *how), values=values)
        yield Sample(quantize_after.activation_quantize, shape, (x, "gelu", *how), values=values)


def _coded_glus(make: Maker) -> Iterator[Sample]:
    rows, width = make.sizes(8192, 4096)
    dy, codes = make.floats(rows, width), make.codes(rows, 2 * width)
    for cols in (128, 32):
        shape, scales = f"swiglu 1x{cols} {rows}x2x{width}", make.codes(rows, -(-2 * width // cols), about=127)
        yield Sample(coded_glu.coded_glu_fwd, shape, (codes, scales, cols, "swiglu", True, make.dtype), dtype=make.dtype)
        yield Sample(coded_glu.coded_glu_bwd, shape, (dy, codes, scales, cols, "swiglu", True))


def _routers(make: Maker) -> Iterator[Sample]:
    """The routers of DeepSeek-V3, of Qwen3-MoE with both losses, and of Mixtral, with logits in the activations' dtype."""
    for experts, top_k, score, groups, losses in (
        (256, 8, "sigmoid", (8, 4), (0.0, 0.0)),
        (128, 8, "softmax", (1, 1), (1e-3, 1e-3)),
        (8, 2, "softmax", (1, 1), (0.0, 0.0)),
    ):
        (tokens,), sigmoid = make.sizes(65536), score == "sigmoid"
        logits, by_choice, shape = make.floats(1, tokens, experts), (1, tokens, top_k), f"{score} {tokens}x{experts} to {top_k}"
        bias = make.floats(experts) if sigmoid else None
        for normalize in (True, False):
            of_rows, how = any(losses) or not (normalize or sigmoid), f"{shape} {'normalised' if normalize else ''}".strip()
            args = bias, top_k, score, normalize, 2.5, *groups, *losses
            yield Sample(route.route_fwd, how, (logits, *args, sigmoid and normalize))
            indices = ((make.ids(1, tokens, 1, below=experts) + torch.arange(top_k, device=make.device)) % experts).to(torch.int32)
            kept, counts = None if of_rows else make.wide(*by_choice), make.ids(1, experts, below=tokens).to(torch.int32)
            given = make.wide(1), make.wide(*by_choice), indices, kept, logits if of_rows else None, counts if losses[0] else None
            yield Sample(route.route_bwd, how, (*given, experts, make.dtype, score, normalize, 2.5, *losses))


def _rows_of_experts(make: Maker) -> Iterator[Sample]:
    """Rows sorted by expert, at the sizes of Qwen3-30B-A3B and Mixtral."""
    for tokens, width, top_k, experts in ((8192, 2048, 8, 128), (8192, 4096, 2, 8)):
        tokens, width = make.sizes(tokens, width)
        x, rows, shape = make.floats(tokens, width), make.floats(tokens * top_k, width), f"{tokens}x{width} to {top_k}"
        place = torch.randperm(tokens * top_k, device=make.device).to(torch.int32).view(tokens, top_k)
        offsets = torch.linspace(0, tokens * top_k, experts + 1, device=make.device).to(torch.int32)
        yield Sample(routing.scatter_rows, f"{shape} of {experts}", (x, place, offsets))
        yield Sample(routing.scatter_rows, shape, (x, place, None))
        yield Sample(routing.gather_rows, f"{shape} of {experts}", (rows, place, offsets))
        yield Sample(routing.gather_rows, shape, (rows, place, None))


def _products(make: Maker) -> Iterator[Sample]:
    for tokens, inner, outer in ((8192, 4096, 4096), (16384, 1024, 512), (48, 4096, 4096), (4096, 4099, 1001)):
        tokens, inner, outer = make.sizes(tokens, inner, outer)
        shape, flops = f"{tokens}x{inner} to {outer}", 2.0 * tokens * inner * outer
        x, w, dy = make.floats(tokens, inner), make.floats(outer, inner), make.floats(tokens, outer)
        b, residual, z = make.floats(outer), make.floats(tokens, outer), make.floats(tokens, inner)
        dw, db, into = make.wide(outer, inner), make.wide(outer), make.floats(tokens, inner)
        forward, dgrad, wgrad = _bare_products(x, w, dy)
        lengths = {forward: inner, dgrad: outer, wgrad: tokens}
        rows: list[tuple[Any, str, tuple[Any, ...], Prepared]] = [
            (linear.linear_fwd, "", (x, w, None), forward),
            (linear.linear_fwd, "bias", (x, w, b), forward),
            (linear.linear_dgrad, "", (dy, w), dgrad),
            (linear.linear_wgrad, "", (dy, x, False), wgrad),
            (linear.linear_wgrad, "bias", (dy, x, True), wgrad),
            (fused_linear.fused_linear_fwd, "bias gelu", (x, w, b, None, "gelu_tanh", 1.0, False), forward),
            (fused_linear.fused_linear_fwd, "bias gelu keep", (x, w, b, None, "gelu_tanh", 1.0, True), forward),
            (fused_linear.fused_linear_fwd, "bias residual", (x, w, b, residual, "", 0.5, False), forward),
            (fused_linear.fused_linear_fwd, "all", (x, w, b, residual, "gelu", 0.5, True), forward),
            (fused_linear.fused_linear_dgrad, "gelu", (dy, w, z, "gelu_tanh", 1.0), dgrad),
            (fused_linear.fused_linear_dgrad_into, "", (dy, w, 1.0, into), dgrad),
            (fused_linear.fused_linear_dgrad_add, "", (dy, w, 1.0, z), dgrad),
            (fused_linear.fused_linear_wgrad, "bias", (dy, x, 0.5, True), wgrad),
            (fused_linear.fused_linear_wgrad_into, "bias", (dy, x, 1.0, dw, db), wgrad),
        ]
        for kernel, what, args, product in rows:
            yield Sample(kernel, f"{shape} {what}".strip(), args, product=product, flops=flops, length=lengths[product])


def _scaled_products(make: Maker) -> Iterator[Sample]:
    """The recipes' products, measured by the product in bfloat16; a device without the formats decodes the operands."""
    m, n, k = make.sizes(8192, 4096, 4096)
    make = type(make)(make.device, torch.bfloat16, make.shrink)
    x, w = make.floats(m, k), make.floats(n, k)
    tensor, each, block, square = (0, 0), (1, 0), (1, 128), (128, 128)
    for a, b, kind, of_a, of_b in (
        ("e4m3", "e4m3", "float32", tensor, tensor),
        ("e5m2", "e4m3", "float32", tensor, tensor),
        ("e4m3", "e4m3", "float32", each, each),
        ("e4m3", "e4m3", "pow2", block, square),
        ("e4m3", "e4m3", "pow2", block, block),
        ("e4m3", "e4m3", "e8m0", (1, 32), (1, 32)),
        ("e2m1", "e2m1", "e4m3", (1, 16), (1, 16)),
    ):
        left, right = _coded(make, m, k, a, kind, of_a), _coded(make, n, k, b, kind, of_b)
        args = *left, *right, a, *of_a, b, *of_b, kind, k, make.dtype, True
        shape = f"{a} {of_a[0]}x{of_a[1]} by {b} {of_b[0]}x{of_b[1]} {kind} {m}x{k} to {n}"
        forward, *_ = _bare_products(x, w, x)
        flops = 2.0 * m * n * k
        yield Sample(scaled_mm.scaled_mm, shape, args, product=forward, flops=flops, length=k, dtype=make.dtype)


def _coded(make: Maker, rows: int, width: int, element: str, kind: str, tile: tuple[int, int]) -> tuple[Tensor, Tensor, Any]:
    """Codes, scales, and the scale of the whole tensor, or None."""
    count = -(-rows // (tile[0] or rows)), -(-width // (tile[1] or width))
    codes = make.codes(rows, -(-width // 2) if element == "e2m1" else width)
    if element == "e2m1" and width % 2:
        codes[:, -1] &= 0xF  # the other half of the last byte is padding: 0, as a quantiser leaves it
    if kind in ("e8m0", "e4m3"):
        scales = make.codes(*count, about=124 if kind == "e8m0" else 0x38)
    else:
        scales = make.wide(*count[::-1]).mT if quantize.by_columns(*tile, kind) else make.wide(*count)
    return codes, scales, make.wide(1) if kind == "e4m3" else None


def _siblings(make: Maker) -> Iterator[Sample]:
    """Sibling linears: q, k, v with fewer heads for k and v; gate and up."""
    for tokens, inner, outers in ((16384, 2048, (2048, 512, 512)), (8192, 768, (2048, 2048)), (48, 4096, (4096, 1024, 1024))):
        tokens, inner, *sizes = make.sizes(tokens, inner, *outers)
        shape, flops = f"{tokens}x{inner} to {sizes}", 2.0 * tokens * inner * sum(sizes)
        x = make.floats(tokens, inner)
        w, b, dy = ([make.floats(*s) for s in shapes] for shapes in _siblings_shapes(tokens, inner, sizes))
        pad = [None] * (3 - len(sizes))
        forward, dgrad, _ = _bare_products(x, torch.cat(w), torch.cat(dy, -1))
        args = x, *w, *pad, *b, *pad
        yield Sample(sibling_linear.sibling_linear_fwd, shape, args, product=forward, flops=flops, length=inner)
        args = *dy, *pad, *w, *pad
        yield Sample(sibling_linear.sibling_linear_dgrad, shape, args, product=dgrad, flops=flops, length=sum(sizes))
        if not pad:
            args = torch.cat(dy, -1), *w
            yield Sample(sibling_linear.joined_linear_dgrad, shape, args, product=dgrad, flops=flops, length=sum(sizes))


def _siblings_shapes(tokens: int, inner: int, sizes: list[int]) -> tuple[list[tuple[int, ...]], ...]:
    return [(o, inner) for o in sizes], [(o,) for o in sizes], [(tokens, o) for o in sizes]


def _bare_products(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Prepared, ...]:
    """Forward, dgrad and wgrad by torch's own products, always on these tensors rather than the kernel's copies."""
    return lambda *_: lambda: x @ w.mT, lambda *_: lambda: dy @ w, lambda *_: lambda: dy.mT @ x
