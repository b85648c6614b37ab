"""The list of calls for `bench kernels` (on a GPU) and `bench aot` (on the meta device, for any GPU): every kernel that has a
Triton implementation, by shape class. A kernel without a row here fails a test. `bench kernels` also
measures the library's attention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import of_attention, of_caches, of_library_attention
from benchmarks.experts import LAYERS_OF_EXPERTS, of_experts
from benchmarks.kernel_call import CODES, Prepared, direct, gradient
from benchmarks.kernel_call import KernelCall as KernelCall
from benchmarks.kernel_call import Maker as Maker
from benchmarks.low_attention import of_low_attention
from benchmarks.low_experts import of_low_experts
from benchmarks.norms import of_group_norms, of_norms
from benchmarks.quantizers import of_coded_glus, of_frozen_weights, of_quantized_outputs, of_quantizers
from funcops.engine import random
from funcops.library.kernels import (
    adamw,
    causal_conv1d,
    cross_entropy,
    embedding,
    fused_linear,
    glu,
    linear,
    modulate,
    pointwise,
    qkv_split,
    quantize,
    rope,
    route,
    routing,
    row_scale,
    scaled_mm,
    sibling_linear,
    softcap,
    softmax,
)
from funcops.library.kernels.activation import ACTIVATIONS, activation_bwd, activation_fwd
from funcops.library.kernels.bias_activation import (
    activation_bwd_recompute,
    bias_activation_bwd,
    bias_activation_fwd,
    dropout_bwd_sums,
)
from funcops.library.ops.rope import RopeConfig, rope_table

Family = Callable[[Maker], Iterator[KernelCall]]


def families() -> tuple[Family, ...]:
    """The calls in parts, each of which makes its own tensors and drops them at its end."""
    return (
        of_norms,
        of_group_norms,
        _convolutions,
        _keys,
        _pointwise,
        _activations,
        _glus,
        _ropes,
        _losses,
        _embeddings,
        _optimisers,
        of_quantizers,
        of_quantized_outputs,
        _products,
        _siblings,
        _scaled_products,
        of_coded_glus,
        _routers,
        _rows_of_experts,
        *(functools.partial(of_experts, layer=layer) for layer in LAYERS_OF_EXPERTS),
        of_low_experts,
        of_attention,
        of_caches,
        of_low_attention,
        of_frozen_weights,
        _recomputed_pairs,
    )


def measured_families() -> tuple[Family, ...]:
    """The calls that are measured on a device."""
    return *families(), of_library_attention


def kernel_calls(make: Maker, parts: Sequence[Family] | None = None) -> Iterator[KernelCall]:
    for family in families() if parts is None else parts:
        yield from family(make)


def _convolutions(make: Maker) -> Iterator[KernelCall]:
    """The convolutions before the state of Qwen3-Next."""
    tokens, channels = make.sizes(4096, 8192)
    x, dy, w, b = (
        make.floats(2, tokens, channels),
        make.floats(2, tokens, channels),
        make.floats(channels, 4),
        make.floats(channels),
    )
    shape = f"2x{tokens}x{channels} of 4"
    yield KernelCall(causal_conv1d.causal_conv1d_fwd, shape, (x, w, b, True))
    yield KernelCall(causal_conv1d.causal_conv1d_bwd, shape, (dy, x, w, b, True, True, True, True))


def _keys(make: Maker) -> Iterator[KernelCall]:
    key = make.key()
    yield KernelCall(random._fold_in, "a number", (key, None, 3))
    yield KernelCall(random._fold_in, "a tensor", (key, make.ids(1, below=8)[0], 0))


def _pointwise(make: Maker) -> Iterator[KernelCall]:
    for rows, width in ((8192, 4096), (8192, 4099)):
        rows, width = make.sizes(rows, width)
        shape = f"{rows}x{width}"
        x, y, b = make.floats(rows, width), make.floats(rows, width), make.floats(width)
        yield KernelCall(pointwise.add, shape, (x, y))
        yield KernelCall(pointwise.add, f"{shape} + {width}", (x, b))
        yield KernelCall(pointwise.scale, shape, (x, 0.5))
        yield KernelCall(pointwise.dropout, shape, (x, make.key(), 0.1), direct(lambda x, *_: F.dropout(x, 0.1)))
        yield KernelCall(
            pointwise.dropout_add,
            f"{shape} + {width}",
            (x, b, y, make.key(), 0.1),
            direct(lambda x, b, y, *_: y + F.dropout(x + b, 0.1)),
        )
        yield KernelCall(bias_activation_fwd, f"gelu_tanh {shape} + {width}", (x, b, "gelu_tanh"))
    yield KernelCall(
        pointwise.dropout_add, shape, (x, None, y, make.key(), 0.1), direct(lambda x, _, y, *__: y + F.dropout(x, 0.1))
    )
    batches, tokens, width = make.sizes(64, 256, 1152)  # of a DiT-XL
    x, y, b = make.floats(batches, tokens, width), make.floats(batches, tokens, width), make.floats(batches, width)
    of_batches = f"{batches}x{tokens}x{width}"
    yield KernelCall(modulate.modulate_fwd, of_batches, (x, b, make.floats(batches, width)))
    yield KernelCall(modulate.modulate_bwd, of_batches, (y, x, b, True, True, True))


def _activations(make: Maker) -> Iterator[KernelCall]:
    rows, width = make.sizes(8192, 4096)
    x, dy, b = make.floats(rows, width), make.floats(rows, width), make.floats(width)
    for kind in ACTIVATIONS:
        shape = f"{kind} {rows}x{width}"
        yield KernelCall(activation_fwd, shape, (x, kind))
        yield KernelCall(activation_bwd, shape, (dy, x, kind))
        yield KernelCall(bias_activation_fwd, shape, (x, b, kind))
        yield KernelCall(bias_activation_bwd, shape, (dy, x, b, kind, True))
        if kind == "gelu_tanh":
            yield KernelCall(bias_activation_bwd, f"{shape} of a sum", (dy, x, None, kind, True))
        yield KernelCall(activation_bwd_recompute, shape, (dy, x, kind, True))
    yield KernelCall(dropout_bwd_sums, f"{rows}x{width}", (dy, make.key(), 0.1))
    shape, gate = f"{rows}x{width}", make.floats(rows, 1)
    yield KernelCall(row_scale.row_scale_fwd, shape, (x, gate, True))
    yield KernelCall(row_scale.row_scale_bwd, shape, (dy, x, gate, True, True, True))
    for t, of in ((x, shape), (make.floats(*make.sizes(512, 65536)), "long rows")):
        yield KernelCall(softmax.softmax_fwd, of, (t,), direct(lambda x: torch.softmax(x, -1)))
        yield KernelCall(softmax.softmax_bwd, of, (t, t if make.device == "meta" else torch.softmax(t, -1)))
    yield KernelCall(softcap.softcap_fwd, f"{rows}x{width}", (x, 30.0))
    yield KernelCall(softcap.softcap_bwd, f"{rows}x{width}", (dy, x, 30.0))


def _glus(make: Maker) -> Iterator[KernelCall]:
    rows, width = make.sizes(8192, 4096)
    x, dy, scales = make.floats(rows, 2 * width), make.floats(rows, width), make.floats(rows)
    for kind in glu.GATES:
        shape = f"{kind} {rows}x2x{width}"
        yield KernelCall(glu.glu_fwd, shape, (x, None, kind, True))
        yield KernelCall(glu.glu_bwd, shape, (dy, x, None, kind, True, True, False))
        yield KernelCall(glu.glu_bwd_recompute, shape, (dy, x, kind, True))
        gate, linear = make.floats(rows, width), make.floats(rows, width)
        yield KernelCall(glu.glu_pair_fwd, f"{shape} apart", (gate, linear, kind))
        yield KernelCall(glu.glu_pair_bwd, f"{shape} apart", (dy, gate, linear, kind))
    shape = f"clamped_swiglu {rows}x2x{width}"
    clamp = (False, 7.0, 1.702, 1.0)
    yield KernelCall(glu.clamped_swiglu_fwd, shape, (x, scales, *clamp))
    yield KernelCall(glu.clamped_swiglu_bwd, shape, (dy, x, scales, *clamp, True, True))


def _recomputed_pairs(make: Maker) -> Iterator[KernelCall]:
    rows, width = make.sizes(8192, 4096)
    dy, gate, linear = (make.floats(rows, width) for _ in range(3))
    for kind in glu.GATES:
        yield KernelCall(glu.glu_pair_bwd_recompute, f"{kind} {rows}x2x{width} apart", (dy, gate, linear, kind))


def _ropes(make: Maker) -> Iterator[KernelCall]:
    for interleaved in (False, True):
        (tokens, _), heads = make.sizes(8192, 32), max(2, 32 // make.shrink)
        x = make.floats(2, tokens, heads, 128)
        positions = torch.arange(tokens, device=make.device)
        table = rope_table(positions, RopeConfig(128, interleaved=interleaved))
        shape = f"{'interleaved' if interleaved else 'halves'} 2x{tokens}x{heads}x128"
        yield KernelCall(rope.rope_apply, shape, (x, table, interleaved, False))
        k = make.floats(2, tokens, heads // 2, 128)
        yield KernelCall(rope.rope_apply_pair, f"{shape} and {heads // 2}", (x, k, table, interleaved, False))
        qkv, kv_heads = make.floats(2, tokens, 2 * heads * 128), heads // 2
        yield KernelCall(qkv_split.qkv_split_fwd, shape, (qkv, table, heads, kv_heads, interleaved))
        dk, dv = make.floats(2, tokens, kv_heads, 128), make.floats(2, tokens, kv_heads, 128)
        yield KernelCall(qkv_split.qkv_split_bwd, shape, (x, dk, dv, table, interleaved))
    shape = shape.removeprefix("interleaved ")
    half = rope_table(positions, RopeConfig(128, rotary_dim=64))
    yield KernelCall(rope.rope_apply, f"halves of 64 {shape}", (x, half, False, False))
    yield KernelCall(qkv_split.qkv_split_fwd, f"unturned {shape}", (qkv, None, heads, kv_heads, False))
    yield KernelCall(qkv_split.qkv_split_bwd, f"unturned {shape}", (x, dk, dv, None, False))


def _cross_entropy(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")


def _unsmoothed(logits: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def _losses(make: Maker) -> Iterator[KernelCall]:
    for rows, vocab in ((8192, 32000), (4096, 50257), (2048, 128256)):
        rows, vocab = make.sizes(rows, vocab)
        shape = f"{rows}x{vocab}"
        logits, labels = make.floats(rows, vocab), make.ids(rows, below=vocab)
        losses, lse, options = make.wide(rows), make.wide(rows, 2) + 5.0, (0.1, -100, 1e-4)
        yield KernelCall(cross_entropy.cross_entropy_fwd, shape, (logits, labels, *options), direct(_cross_entropy))
        yield KernelCall(
            cross_entropy.cross_entropy_bwd,
            shape,
            (losses, logits, labels, lse, *options),
            lambda d, *args: gradient(_cross_entropy, wrt=1)(d.to(args[0].dtype), *args),
        )
        plain = (0.0, -100, 0.0)
        yield KernelCall(cross_entropy.cross_entropy_fwd, f"{shape} unsmoothed", (logits, labels, *plain), direct(_unsmoothed))
        owned = (losses, logits, labels, lse, *options, vocab // 2, 2 * vocab)
        yield KernelCall(cross_entropy.cross_entropy_bwd_owned, f"{shape} of {2 * vocab}", owned)
        yield KernelCall(cross_entropy.cross_entropy_with_gradient, shape, (losses, make.floats(rows, vocab), labels, *options))


def _embeddings(make: Maker) -> Iterator[KernelCall]:
    tokens, width, vocab = make.sizes(32768, 2048, 50257)
    dy, ids = make.floats(tokens, width), make.ids(tokens, below=vocab)
    shape = f"{tokens}x{width} of {vocab}"
    yield KernelCall(embedding.embedding_wgrad, shape, (dy, ids, vocab, -1))
    yield KernelCall(embedding.embedding_wgrad_into, shape, (dy, ids, -1, make.wide(vocab, width)))


def _optimisers(make: Maker) -> Iterator[KernelCall]:
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
    numbers, said = (0.9, 0.95, 1e-8, 0.1), f"gpt-2 {len(shapes)} tensors"
    yield KernelCall(adamw.adamw, said, (p, g, m, v, steps, [], decayed, 1e-3, None, None, *numbers))
    wide = ([t.float() for t in row] for row in (p, m, v))  # clipped, and written to the weights that the next step reads
    p, m, v, work = *wide, [make.floats(*shape) for shape in shapes]
    yield KernelCall(adamw.adamw, f"{said}, one pass", (p, g, m, v, steps, work, decayed, 1e-3, None, make.wide(), *numbers))


def _routers(make: Maker) -> Iterator[KernelCall]:
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
            yield KernelCall(route.route_fwd, how, (logits, *args, sigmoid and normalize))
            indices = ((make.ids(1, tokens, 1, below=experts) + torch.arange(top_k, device=make.device)) % experts).to(torch.int32)
            kept, counts = None if of_rows else make.wide(*by_choice), make.ids(1, experts, below=tokens).to(torch.int32)
            given = make.wide(1), make.wide(*by_choice), indices, kept, logits if of_rows else None, counts if losses[0] else None
            yield KernelCall(route.route_bwd, how, (*given, experts, make.dtype, score, normalize, 2.5, *losses))


def _rows_of_experts(make: Maker) -> Iterator[KernelCall]:
    """Rows sorted by expert, at the sizes of Qwen3-30B-A3B and Mixtral."""
    for tokens, width, top_k, experts in ((8192, 2048, 8, 128), (8192, 4096, 2, 8)):
        tokens, width = make.sizes(tokens, width)
        x, rows, shape = make.floats(tokens, width), make.floats(tokens * top_k, width), f"{tokens}x{width} to {top_k}"
        place = torch.randperm(tokens * top_k, device=make.device).to(torch.int32).view(tokens, top_k)
        offsets = torch.linspace(0, tokens * top_k, experts + 1, device=make.device).to(torch.int32)
        yield KernelCall(routing.scatter_rows, f"{shape} of {experts}", (x, place, offsets))
        yield KernelCall(routing.scatter_rows, shape, (x, place, None))
        yield KernelCall(routing.gather_rows, f"{shape} of {experts}", (rows, place, offsets))
        yield KernelCall(routing.gather_rows, shape, (rows, place, None))


def _products(make: Maker) -> Iterator[KernelCall]:
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
            yield KernelCall(kernel, f"{shape} {what}".strip(), args, product=product, flops=flops, length=lengths[product])


def _scaled_products(make: Maker) -> Iterator[KernelCall]:
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
        yield KernelCall(scaled_mm.scaled_mm, shape, args, product=forward, flops=flops, length=k, dtype=make.dtype, bits=CODES)


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


def _siblings(make: Maker) -> Iterator[KernelCall]:
    """Sibling linears: q, k, v with fewer heads for k and v; gate and up."""
    for tokens, inner, outers in ((16384, 2048, (2048, 512, 512)), (8192, 768, (2048, 2048)), (48, 4096, (4096, 1024, 1024))):
        tokens, inner, *sizes = make.sizes(tokens, inner, *outers)
        shape, flops = f"{tokens}x{inner} to {sizes}", 2.0 * tokens * inner * sum(sizes)
        x = make.floats(tokens, inner)
        w, b, dy = ([make.floats(*s) for s in shapes] for shapes in _siblings_shapes(tokens, inner, sizes))
        pad = [None] * (3 - len(sizes))
        forward, dgrad, _ = _bare_products(x, torch.cat(w), torch.cat(dy, -1))
        args = x, *w, *pad, *b, *pad
        yield KernelCall(sibling_linear.sibling_linear_fwd, shape, args, product=forward, flops=flops, length=inner)
        args = *dy, *pad, *w, *pad
        yield KernelCall(sibling_linear.sibling_linear_dgrad, shape, args, product=dgrad, flops=flops, length=sum(sizes))
        if not pad:
            args = torch.cat(dy, -1), *w
            yield KernelCall(sibling_linear.joined_linear_dgrad, shape, args, product=dgrad, flops=flops, length=sum(sizes))


def _siblings_shapes(tokens: int, inner: int, sizes: list[int]) -> tuple[list[tuple[int, ...]], ...]:
    return [(o, inner) for o in sizes], [(o,) for o in sizes], [(tokens, o) for o in sizes]


def _bare_products(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Prepared, ...]:
    """Forward, dgrad and wgrad by torch's own products, always on these tensors rather than the kernel's copies."""
    return lambda *_: lambda: x @ w.mT, lambda *_: lambda: dy @ w, lambda *_: lambda: dy.mT @ x
