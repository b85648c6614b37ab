"""Scaled dot-product attention in low precision.

    p = softmax(scale q(q) q(k)^T)        y = p q(v)        dv = p^T q(dy)        dp = q(dy) q(v)^T
    ds = p * (dp - rowsum(p * dp))        dq = scale ds q(k)        dk = scale ds^T q(q)

per head, where q() rounds to codes of 8 bits and back: FlashAttention-3's block quantisation (arXiv 2407.08608, section 3.3).
Gradients are straight through: they treat each rounding as the identity. x, shapes and masks (`causal`, `window`, grouped-query,
`packed`) are `attention`'s, with heads of up to 128 elements; `chunk`, `softcap`, `alibi`, a bias and sinks are not supported.

`cfg.recipe` chooses the formats: q, k and v have the element of its x, and dy has its dy's. A scale is shared by 128 rows of a head
(`Fp8Block`; rows of neighbouring sequences share one, too), or by a whole head (`Fp8Current`). With `cfg.pv` "low" p is rounded to
e4m3 for its product with v; with "high" it is not, and v's codes are decoded. On CUDA the products q k^T, p v and dy v^T multiply
codes, if the device can; the others decode the codes within the kernel, to bfloat16 for 16-bit tensors.
Kept: codes and scales of q, k and v (1 byte an element), cu_seqlens (an alias), but neither y nor logsumexp: dgrad computes both
sums over a row's keys from the codes, which takes two products more.

>>> import torch
>>> from funcops import QAttentionConfig, qattention_bwd, qattention_fwd
>>> from funcops.low_precision import Fp8Block
>>> cfg = QAttentionConfig(Fp8Block(), causal=True)
>>> q, k, v = torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 2, 8), torch.ones(1, 3, 2, 8)
>>> y, residuals = qattention_fwd(None, (q, k, v), cfg)
>>> residuals.k.codes.dtype, residuals.k.codes.shape, residuals.k.scales.shape
(torch.uint8, torch.Size([1, 2, 3, 8]), torch.Size([1, 2, 1, 1]))
>>> dq, dk, dv = qattention_bwd(residuals, torch.ones_like(y), cfg)[1]
>>> dv[0, :, 0, 0]
tensor([3.6667, 1.6667, 0.6667])
"""

from __future__ import annotations

import dataclasses
from dataclasses import field
from typing import Any, ClassVar

import torch
from torch import Tensor

from funcops.engine.contract.configs import fields_of
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.op import config, dgrad_of, forward, make_op, no_params
from funcops.engine.contract.schema import DGRAD, Inputs, Residuals, saved
from funcops.engine.errors import check, fail, require
from funcops.library.formats import Format, QTensor
from funcops.library.formats.recipes import LOW_ATTENTION, Recipe, require_recipe
from funcops.library.formats.rounding import Rounding, rounding
from funcops.library.kernels import scaled_attention as kernels
from funcops.library.kernels.quantize import BLOCK
from funcops.library.ops._rounding_logs import backward_logs, forward_logs
from funcops.library.ops.attention import AttentionConfig, attention, check_x, indices_of

__all__ = ["QAttentionConfig", "QAttentionResiduals"]
__all__ += ["qattention", "qattention_bwd", "qattention_dgrad", "qattention_fwd", "qattention_init", "qattention_wgrad"]
_SERVED = ("causal", "scale", "window", "packed", "max_seqlen")  # of attention's options
_TILES = {(1, BLOCK): (BLOCK, BLOCK), (BLOCK, BLOCK): (BLOCK, BLOCK), (0, 0): (0, 0)}  # of a head, by the recipe's


@config
class QAttentionConfig(AttentionConfig):
    """The fields of `AttentionConfig` and a `recipe` of `funcops.low_precision`: `Fp8Block`, `Fp8Current`, or one with tiles and
    scales like theirs. `pv`: "low" to round p for the product with v, or "high". Raises `ValueError` for other recipes, such as
    `NVFP4`, and for `chunk`, `softcap`, `alibi` and `bias`, which are not supported."""

    recipe: Recipe = field(kw_only=False)
    pv: str = "low"

    def __post_init__(self) -> None:
        where, recipe = "QAttentionConfig", self.recipe
        require_recipe(where, recipe)
        super().__post_init__()
        for option in dataclasses.fields(AttentionConfig):
            value, wanted = getattr(self, option.name), f"{option.default} in low precision (leave this attention without a recipe)"
            require(option.name in _SERVED or value == option.default, where, option.name, wanted, value)
        require(self.pv in ("low", "high"), where, "pv", "'low' or 'high'", repr(self.pv))
        for name, format in (("x", recipe.x), ("dy", recipe.dy)):
            current = not (recipe.delayed or recipe.stochastic) and format.scales in ("pow2", "float32")
            right = current and format.tile in _TILES and _TILES[format.tile] == _TILES[recipe.x.tile]
            wanted = "one whose x and dy have current pow2 or float32 scales, for 1x128 blocks or tensors (Fp8Block, Fp8Current)"
            require(right, where, "recipe", wanted, f"{type(recipe).__name__}, with {format.name} for {name}")
            of_heads = dataclasses.replace(format, tile=_TILES[format.tile])
            object.__setattr__(self, "x_format" if name == "x" else "dy_format", of_heads)

    x_format: ClassVar[Format]  # of each head of q, k and v [T, D]
    dy_format: ClassVar[Format]


class QAttentionResiduals(Residuals, static=("inputs", "dtype")):
    q: Any = saved("[B, H, T, D]", needed_by=DGRAD, tree=True)
    k: Any = saved("[B, K, S, D]", needed_by=DGRAD, tree=True)
    v: Any = saved("[B, K, S, V]", needed_by=DGRAD, tree=True)
    more: Tensor | None = saved("[N + 1]", alias="x.3", needed_by=DGRAD)  # cu_seqlens


def _in_codes(x: Tensor, format: Format) -> QTensor:
    """Each head [T, D] of x [B, T, H, D] in the format, stacked: codes [B, H, T, D]."""
    found, scales = kernels.quantize_heads(x, format.element, format.tile[0], format.scales, format.amax_epsilon)
    shape = torch.Size((x.shape[1], x.shape[3]))
    return QTensor(found, scales, None, format=format, shape=shape, dtype=x.dtype, side="row", hadamard=False)


def _check(where: str, x: Any, cfg: QAttentionConfig) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, more = check_x(where, x, cfg)
    for name, sizes, t in (("x.0 (q)", "[B, T, H, D] with D", q), ("x.2 (v)", "[B, S, K, V] with V", v)):
        wanted = f"{sizes} of at most {kernels.LONGEST} in low precision"
        require(t.shape[3] <= kernels.LONGEST, where, name, wanted, list(t.shape))
    if q.is_cuda and not cfg.recipe.emulate and torch.cuda.is_available():
        have, least = torch.cuda.get_device_capability(q.device), cfg.recipe.capability
        if have < least:
            needed = f"on a device of capability {least} or above, or the recipe with emulate=True ({type(cfg.recipe).__name__})"
            fail(where, "x", needed, f"capability {have}", RuntimeError)
    return q, k, v, more


def _options(cfg: QAttentionConfig, size: int) -> tuple[bool, int, float]:
    score = cfg.score(size)
    return score.causal, score.window, score.scale


@forward(QAttentionConfig)
def qattention_fwd(
    params: None, x: tuple[Tensor, ...], cfg: QAttentionConfig, *, needs: Needs = Needs.ALL
) -> tuple[Tensor, QAttentionResiduals | None]:
    """x: `(q, k, v)`, and cu_seqlens if `cfg.packed` -> y: [B, T, H, V]. Raises as `attention_fwd`, `ValueError` for heads of more
    than 128 elements, and `RuntimeError` on a device without the formats."""
    q, k, v, more = _check("qattention_fwd", x, cfg)
    dtype, format = q.dtype, cfg.x_format
    low = [_in_codes(t, format) for t in (q, k, v)]
    given = [t for each in low for t in (each.codes, each.scales)]
    y = kernels.scaled_attention_fwd(*given, more, format.element, *_options(cfg, q.shape[3]), cfg.pv == "low", dtype)
    kept = QAttentionResiduals.keep(cfg, needs, q=low[0], k=low[1], v=low[2], more=more, inputs=Inputs.of(x), dtype=dtype)
    return y, kept


@dgrad_of(QAttentionResiduals)
def qattention_dgrad(residuals: QAttentionResiduals, dy: Tensor, cfg: QAttentionConfig) -> tuple[tuple[Tensor, ...], None]:
    """`(dq, dk, dv)`, and None for cu_seqlens. dy: [B, T, H, V]. No params, so pending is None."""
    r, needs = residuals, residuals.needs
    if not needs.x:
        return r.nothing(), None
    batch, heads, t, size = r.q.codes.shape
    check("qattention_dgrad", "dy", dy, (batch, t, heads, r.v.codes.shape[3]), r.dtype, r.q.codes)
    given = [t for each in (_in_codes(dy, cfg.dy_format), r.q, r.k, r.v) for t in (each.codes, each.scales)]
    elements = cfg.dy_format.element, cfg.x_format.element
    grads: list[Any] = [*kernels.scaled_attention_bwd(*given, r.more, *elements, *_options(cfg, size), r.dtype)]
    grads += [None] * cfg.packed
    if needs.x is not True:
        grads = [g if needs.input(i) else None for i, g in zip(indices_of(r), grads, strict=False)]
    return r.inputs.make(tuple(grads)), None


def _rounded(number: int) -> Any:
    def measured(params: None, x: tuple[Tensor, ...], cfg: QAttentionConfig) -> Rounding:
        return rounding(x[number].transpose(1, 2), _in_codes(x[number], cfg.x_format))

    return measured


def _rounded_dy(residuals: QAttentionResiduals, dy: Tensor, cfg: QAttentionConfig) -> Rounding:
    return rounding(dy.transpose(1, 2), _in_codes(dy, cfg.dy_format))


_logs = [log for i, name in enumerate("qkv") for log in forward_logs(name, _rounded(i), also=("amax",))]
qattention = make_op(
    "qattention",
    QAttentionConfig,
    fwd=qattention_fwd,
    dgrad=qattention_dgrad,
    logs=(*_logs, *backward_logs(_rounded_dy)),
    mixes="the scales of its codes, each over several rows",
)
qattention_init, qattention_bwd, qattention_wgrad = no_params(qattention, qattention_dgrad)
LOW_ATTENTION[AttentionConfig] = lambda cfg, recipe: (attention, qattention, QAttentionConfig(**fields_of(cfg), recipe=recipe))
LOW_ATTENTION[QAttentionConfig] = lambda cfg, recipe: (qattention, qattention, cfg)
