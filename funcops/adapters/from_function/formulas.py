"""The ways in which models write the ops of this library.

A new way is one more function. Each is traced and compared operator by operator with what a model does, so it says exactly when it
is meant: another constant, cast or dim is another function. Where tensors have 16 bits, an op computes in float32 and rounds once,
while a formula may round after each step. A norm whose statistics are in 16 bits is left as it is.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from funcops.adapters.autograd.differentiable import run
from funcops.adapters.from_function.joint import Like, arguments_of, operator_name
from funcops.adapters.from_function.matched import CAST, Call, Formula
from funcops.library.ops.activation import ActivationConfig, activation
from funcops.library.ops.attention import AttentionConfig, attention
from funcops.library.ops.cross_entropy import CrossEntropyConfig, cross_entropy
from funcops.library.ops.glu import GLUConfig, glu
from funcops.library.ops.layer_norm import LayerNormConfig, LayerNormParams, layer_norm
from funcops.library.ops.modulate import ModulateConfig, modulate
from funcops.library.ops.rms_norm import RMSNormConfig, RMSNormParams, rms_norm
from funcops.library.ops.rope import RopeConfig, rope

NARROW = (torch.bfloat16, torch.float16)
ALL = (torch.float32, *NARROW)
Number = 0.0078125  # which stands for another; the same in float32, as torch rounds some


def like(dtype: torch.dtype, *shape: int) -> Like:
    return Like.of(torch.empty(shape, dtype=dtype, device="meta"))._replace(device=torch.device("cpu"))


# RMSNorm: x, w, eps. The mean of squares is in float32, or for float32 tensors as it is.


def _squares(x: Tensor) -> Tensor:
    return x.pow(2).mean(-1, keepdim=True)


def rms_llama(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return w * (n * torch.rsqrt(_squares(n) + eps)).to(x.dtype)


def rms_olmo2(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return (w * (n * torch.rsqrt(_squares(n) + eps))).to(x.dtype)


def rms_wide_weight(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return (w.float() * (n * torch.rsqrt(_squares(n) + eps))).to(x.dtype)


def rms_gemma(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return (n * torch.rsqrt(_squares(n) + eps) * (1.0 + w.float())).to(x.dtype)


def rms_unit_offset(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return (n * torch.rsqrt((n * n).mean(-1, keepdim=True) + eps)).to(x.dtype) * (1 + w)


def rms_t5(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return w * (x * torch.rsqrt(_squares(x.float()) + eps)).to(w.dtype)


def rms_product(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return (n * torch.rsqrt((n * n).mean(-1, keepdim=True) + eps)).to(x.dtype) * w


def rms_quotient(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return (n / torch.sqrt(_squares(n) + eps)).to(x.dtype) * w


def rms_power(x: Tensor, w: Tensor, eps: float) -> Tensor:
    n = x.float()
    return (n * torch.pow(_squares(n) + eps, -0.5) * w.float()).to(x.dtype)


def rms_torch(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, w.shape, w, eps)


def rms_torch_wide(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), w.shape, w, eps).to(x.dtype)


def rms_torch_wide_weight(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), w.shape, w.float(), eps).to(x.dtype)


RMS = (
    *(rms_llama, rms_olmo2, rms_wide_weight, rms_t5, rms_product, rms_quotient, rms_power),
    *(rms_torch, rms_torch_wide, rms_torch_wide_weight),
)
RMS_CENTRED = (rms_gemma, rms_unit_offset)


def _weighted(dtype: torch.dtype) -> list[tuple[Like, ...]]:
    weights = [dtype] if dtype is torch.float32 else [dtype, torch.float32]
    return [(like(dtype, 2, 3, 8), like(one, 8)) for one in weights]


def _is_as(out: Like, *inputs: Like) -> bool:
    """Whether a result is contiguous, as an op's, and has the shape and dtype of each input."""
    return contiguous(out) and all([(one.shape, one.dtype) == (out.shape, out.dtype) for one in inputs])


def contiguous(t: Like, *dims: int) -> bool:
    """Whether a tensor is, or would be with its dims in this order."""
    made = torch.empty_strided(t.shape, t.stride, device="meta")
    return (made.permute(dims) if dims else made).is_contiguous()


def _fits(out: Like, x: Like, w: Like) -> bool:
    right = w.shape == x.shape[len(x.shape) - len(w.shape) :] and w.dtype in (x.dtype, torch.float32)
    return right and _is_as(out, x) and 0 not in x.shape


def _rms_norm(centred: bool, out: Like, x: Like, w: Like, *, eps: float) -> Call | None:
    if not _fits(out, x, w) or not 0 <= eps < math.inf:
        return None
    cfg = RMSNormConfig(w.shape, eps=eps, zero_centered_gamma=centred)
    return lambda x, w: run(rms_norm, RMSNormParams(w), x, cfg)


# LayerNorm: x, w, b or none, eps


def layer_torch(x: Tensor, w: Tensor, b: Tensor | None = None, *, eps: float) -> Tensor:
    return F.layer_norm(x, w.shape, w, b, eps)


def layer_wide(x: Tensor, w: Tensor, b: Tensor | None = None, *, eps: float) -> Tensor:
    return F.layer_norm(x.float(), w.shape, w.float(), None if b is None else b.float(), eps).to(x.dtype)


def layer_quotient(x: Tensor, w: Tensor, b: Tensor | None = None, *, eps: float) -> Tensor:
    d = x - x.mean(-1, keepdim=True)
    n = w * (d / torch.sqrt(d.pow(2).mean(-1, keepdim=True) + eps))
    return n if b is None else n + b


def layer_twice(x: Tensor, w: Tensor, b: Tensor | None = None, *, eps: float) -> Tensor:
    m = x.mean(-1, keepdim=True)
    n = w * ((x - m) / torch.sqrt((x - m).pow(2).mean(-1, keepdim=True) + eps))
    return n if b is None else n + b


def layer_variance(x: Tensor, w: Tensor, b: Tensor | None = None, *, eps: float) -> Tensor:
    v = x.var(-1, keepdim=True, unbiased=False)
    n = w * ((x - x.mean(-1, keepdim=True)) * torch.rsqrt(v + eps))
    return n if b is None else n + b


def layer_cohere(x: Tensor, w: Tensor, b: Tensor | None = None, *, eps: float) -> Tensor:
    n = x.float()
    m = n.mean(-1, keepdim=True)
    v = (n - m).pow(2).mean(-1, keepdim=True)
    return (w.float() * ((n - m) * torch.rsqrt(v + eps))).to(x.dtype)


LAYER = (layer_torch, layer_wide)
LAYER_FLOAT32 = (layer_quotient, layer_twice, layer_variance)


def _biased(dtype: torch.dtype) -> list[tuple[Like, ...]]:
    return [(*likes, *bias) for likes in _weighted(dtype) for bias in ((likes[1],), ())]


def _layer_norm(out: Like, x: Like, w: Like, b: Like | None = None, *, eps: float) -> Call | None:
    if not _fits(out, x, w) or (b is not None and (b.shape, b.dtype) != (w.shape, w.dtype)) or not 0 <= eps < math.inf:
        return None
    cfg = LayerNormConfig(w.shape, eps=eps, bias=b is not None)
    return lambda x, w, b=None: run(layer_norm, LayerNormParams(w, b), x, cfg)


# activations of several operators, and GLUs: gate and linear, or both side by side


def gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def gelu_cubed(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    return torch.square(F.relu(x))


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


gelu_tanh: Callable[[Tensor], Tensor] = functools.partial(F.gelu, approximate="tanh")
Ways = dict[str, tuple[Callable[[Tensor], Tensor], ...]]
ACTIVATIONS: Ways = {
    "gelu_tanh": (gelu_new, gelu_cubed),
    "gelu": (gelu_erf,),
    "quick_gelu": (quick_gelu,),
    "squared_relu": (squared_relu,),
    "silu": (silu,),
}
GATES: Ways = {
    "swiglu": (F.silu, silu),
    "geglu": (F.gelu, gelu_erf),
    "geglu_tanh": (gelu_tanh, gelu_new, gelu_cubed),
    "quick_geglu": (quick_gelu,),
    "reglu": (F.relu,),
    "squared_reglu": (squared_relu,),
    "glu": (torch.sigmoid,),
}


def _pair(f: Callable[[Tensor], Tensor], gate: Tensor, linear: Tensor) -> Tensor:
    return f(gate) * linear


def _packed(f: Callable[[Tensor], Tensor], first: bool, x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return f(a) * b if first else a * f(b)


def _activation(kind: str, out: Like, x: Like) -> Call | None:
    return None if not _is_as(out, x) else lambda x: run(activation, None, x, ActivationConfig(kind))


def _glu_pair(kind: str, out: Like, gate: Like, linear: Like) -> Call | None:
    if not out.shape or not _is_as(out, gate, linear):
        return None
    return lambda gate, linear: run(glu, None, (gate, linear), GLUConfig(kind, paired=True))


def _glu(kind: str, first: bool, out: Like, x: Like) -> Call | None:
    if x.shape != (*out.shape[:-1], 2 * out.shape[-1]) or x.dtype is not out.dtype or not contiguous(out):
        return None
    return lambda x: run(glu, None, x, GLUConfig(kind, gate="first" if first else "second"))


# modulation: x [B, *T, D], scale and shift [B, D]


def modulation(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def modulation_after(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return x * (1 + scale).unsqueeze(1) + shift.unsqueeze(1)


def _modulate(out: Like, x: Like, scale: Like, shift: Like) -> Call | None:
    right = len(x.shape) == 3 and scale.shape == shift.shape == (x.shape[0], x.shape[-1]) and _is_as(out, x)
    if not right or not x.dtype is scale.dtype is shift.dtype:
        return None
    return lambda x, scale, shift: run(modulate, None, (x, scale, shift), ModulateConfig())


# rotary embedding: x [B, H, T, D], cos and sin [B or 1, T, D] of angles whose halves are the same


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def rotation_rounded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotation(x, cos, sin).to(x.dtype)


def _rotate(out: Like, x: Like, cos: Like, sin: Like) -> Call | None:
    b, _, t, d = x.shape
    right = cos.shape == sin.shape == (cos.shape[0], t, d) and cos.shape[0] in (1, b) and d % 2 == 0 and 0 not in x.shape
    if not right or (out.shape, out.dtype) != (x.shape, x.dtype) or not contiguous(out, 0, 2, 1, 3):
        return None

    def call(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if cos.requires_grad or sin.requires_grad:  # a table has no gradient
            return rotation(x, cos, sin)
        wide, (first, second) = torch.float32, sin.float().chunk(2, -1)
        table = torch.cat((cos.to(wide), -first, second, first, -second), -1).unsqueeze(-2)
        return run(rope, None, (x.transpose(1, 2), table[0] if cos.shape[0] == 1 else table), RopeConfig(d)).transpose(1, 2)

    return call


def _rotated(narrow: bool, batch: int, dtype: torch.dtype) -> list[tuple[Like, ...]]:
    table = like(dtype if narrow else torch.float32, batch, 4, 8)
    return [(like(dtype, 2, 3, 4, 8), table, table)]


def _of_equal_halves(_: fx.Node, *tables: fx.Node) -> bool:
    return all(map(_doubled, tables))


def _doubled(node: fx.Node) -> bool:
    """Whether a tensor's last dim is two equal halves: cosines or sines of angles that were put side by side twice."""
    name = operator_name(node)
    if name == "cat":
        parts, dim = arguments_of(node)["tensors"], arguments_of(node)["dim"]
        return len(parts) == 2 and parts[0] is parts[1] and dim in (-1, node.meta["val"].dim() - 1)
    factor = node.args[1] if len(node.args) > 1 else 1.0
    alike = node.target is CAST or name in ("cos", "sin", "detach") or (name == "mul" and not isinstance(factor, fx.Node))
    return alike and _doubled(node.args[0])  # type: ignore[arg-type]


# attention by products: q, k, v [B, H, T, D] and a mask that is added, or True where nothing is seen; y [B, T, H, D].
# A row that sees nothing is NaN by the formula, and zeros by the op.


def attended(scaled: str, masked: str, wide: bool, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor, scale: float = 1.0) -> Tensor:
    s = torch.matmul(q, k.transpose(-2, -1))
    s = s * scale if scaled == "times" else s / scale if scaled == "by" else s
    s = s + mask[0] if masked == "added" else s.masked_fill(mask[0], -math.inf) if masked == "filled" else s
    p = torch.softmax(s, -1, dtype=torch.float32).to(q.dtype) if wide else torch.softmax(s, -1)
    return torch.matmul(p, v).transpose(1, 2).contiguous()


def _attend(
    scaled: str, masked: str, out: Like, q: Like, k: Like, v: Like, mask: Like | None = None, *, scale: float = 1.0
) -> Call | None:
    b, h, t, _ = q.shape
    right = k.shape == (b, h, k.shape[2], q.shape[3]) and v.shape[:3] == k.shape[:3] and 0 not in (*k.shape, *q.shape, *v.shape)
    seen = mask is None or (len(mask.shape) == 4 and mask.shape[0] in (1, b) and mask.shape[1] in (1, h))
    if not right or not seen or (mask is not None and mask.shape[2:] != (t, k.shape[2])) or not contiguous(out):
        return None
    if not q.dtype is k.dtype is v.dtype is out.dtype or (masked == "added" and mask is not None and mask.dtype is not q.dtype):
        return None
    if not 0 < scale < math.inf:
        return None
    cfg = AttentionConfig(scale=1 / scale if scaled == "by" else scale, bias=mask is not None)

    def call(*parts: Tensor) -> Tensor:
        bias = parts[3:]
        if masked == "filled":
            bias = (torch.zeros_like(bias[0], dtype=q.dtype).masked_fill(bias[0], -math.inf),)
        return run(attention, None, (*[part.transpose(1, 2) for part in parts[:3]], *bias), cfg)  # type: ignore[no-any-return]

    return call


def _parts(masked: str, dtype: torch.dtype) -> list[tuple[Like, ...]]:
    """q, k and v as views of heads, whose layout a product changes first, or k and v copied for each head, or all."""
    mask = {"": (), "added": (like(dtype, 2, 1, 4, 5),), "filled": (like(torch.bool, 2, 1, 4, 5),)}[masked]
    q, k, v = (2, 3, 4, 8), (2, 3, 5, 8), (2, 3, 5, 6)
    copied = like(dtype, *k), like(dtype, *v)
    views = [_heads(dtype, *size) for size in (q, k, v)]
    return [(*views, *mask), (views[0], *copied, *mask), (like(dtype, *q), *copied, *mask)]


def _heads(dtype: torch.dtype, b: int, h: int, t: int, d: int) -> Like:
    return like(dtype, b, h, t, d)._replace(stride=(t * h * d, d, h * d, 1))


def _attention() -> Iterator[Formula]:
    for scaled, masked in itertools.product(("times", "by", ""), ("", "added", "filled")):
        numbers = (("scale", Number),) if scaled else ()
        for wide, dtypes in ((False, ALL), (True, NARROW)):
            way = functools.partial(attended, scaled, masked, wide)
            yield Formula(way, functools.partial(_parts, masked), numbers, functools.partial(_attend, scaled, masked), dtypes)


# cross entropy: logits and labels; the loss is in float32


def entropy(reduction: str, logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
    return F.cross_entropy(logits.float(), labels, ignore_index=ignore, reduction=reduction)


def entropy_of_rows(reduction: str, logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
    return entropy(reduction, logits.float().view(-1, logits.shape[-1]), labels, ignore)


def _entropy(reduction: str, out: Like, logits: Like, labels: Like, *, ignore: int) -> Call | None:
    if labels.dtype is not torch.int64 or len(labels.shape) != 1 or 0 in logits.shape:
        return None
    cfg = CrossEntropyConfig(reduction=reduction, ignore_index=ignore)
    return lambda logits, labels: run(cross_entropy, None, (logits.reshape(-1, logits.shape[-1]), labels), cfg)


def _logits(*shape: int) -> Callable[[torch.dtype], Sequence[tuple[Like, ...]]]:
    return lambda dtype: [(like(one, *shape, 8), like(torch.int64, 6)) for one in ALL]


def _like(*shapes: tuple[int, ...]) -> Callable[[torch.dtype], Sequence[tuple[Like, ...]]]:
    return lambda dtype: [tuple([like(dtype, *shape) for shape in shapes])]


def _table() -> Iterator[Formula]:
    """All formulas, the longer ones first."""
    eps, rows = (("eps", Number),), (2, 3, 8)
    norms: list[tuple[Any, Any, Any, Any]] = [(fn, _weighted, functools.partial(_rms_norm, False), ALL) for fn in RMS]
    norms += [(fn, _weighted, functools.partial(_rms_norm, True), ALL) for fn in RMS_CENTRED]
    norms += [(fn, _biased, _layer_norm, ALL) for fn in LAYER]
    norms += [(fn, _biased, _layer_norm, (torch.float32,)) for fn in LAYER_FLOAT32]
    norms += [(layer_cohere, _weighted, _layer_norm, ALL)]
    for fn, examples, op, dtypes in norms:
        yield Formula(fn, examples, eps, op, dtypes)
    gates = [(kind, f) for kind, ways in GATES.items() for f in ways]
    for kind, f in gates:
        for first in (True, False):
            yield Formula(functools.partial(_packed, f, first), _like(rows), (), functools.partial(_glu, kind, first), ALL)
    for kind, ways in ACTIVATIONS.items():
        for f in ways:
            yield Formula(f, _like(rows), (), functools.partial(_activation, kind), ALL)
    for kind, f in gates:
        yield Formula(functools.partial(_pair, f), _like(rows, rows), (), functools.partial(_glu_pair, kind), ALL)
    for modulates in (modulation, modulation_after):
        yield Formula(modulates, _like(rows, (2, 8), (2, 8)), (), _modulate, ALL)
    for batch in (2, 1):
        for fn, dtypes in ((rotation, ALL), (rotation_rounded, NARROW)):
            yield Formula(fn, functools.partial(_rotated, fn is rotation, batch), (), _rotate, dtypes, _of_equal_halves)
    for reduction in ("mean", "sum", "none"):
        for way, shape in ((entropy_of_rows, (2, 3)), (entropy, (6,))):
            call = functools.partial(way, reduction)
            yield Formula(call, _logits(*shape), (("ignore", -97),), functools.partial(_entropy, reduction), (torch.float32,))


FORMULAS = tuple(_table())
ATTENTION = tuple(_attention())  # apart, as few models write it, and a formula has many layouts
