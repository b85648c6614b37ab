import itertools

import torch
from hypothesis import strategies as st

from funcops import QAttentionConfig, qattention, qattention_fwd
from funcops.library.formats.recipes import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed
from funcops.testing import Case, Error

LARGEST = {"e4m3": (448.0, torch.float8_e4m3fn), "e5m2": (57344.0, torch.float8_e5m2)}


def in_8_bits(x, element, rows, pow2):
    """x [B, T, H, D] in float64, rounded to codes with one scale for each so many rows of a head, as torch casts them."""
    largest, dtype = LARGEST[element]
    parts = []
    for part in x.split(rows or max(x.shape[1], 1), 1):
        amax = part.float().abs().amax((1, 3), keepdim=True) if part.numel() else part.new_zeros(()).float()
        scale = torch.where(amax == 0, 1.0, torch.full_like(amax, largest) / amax)
        scale = torch.exp2(torch.floor(torch.log2(scale))) if pow2 else scale
        codes = (part.float() * scale).clamp(-largest, largest).to(dtype)
        parts.append((codes.float() * (1.0 / scale)).to(x.dtype))
    return torch.cat(parts, 1)


class Rounded(torch.autograd.Function):
    """x as codes hold it, and its gradient through codes, too; either may be left as it is."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_of = backward
        return in_8_bits(x, *forward) if forward else x.clone()

    @staticmethod
    def backward(ctx, dy):
        return in_8_bits(dy, *ctx.backward_of) if ctx.backward_of else dy, None, None


def reference(params, x, cfg):
    """Softmax attention of decoded operands. A rounded p has the gradients of p itself."""
    q, k, v, *ends = x
    recipe, rows = cfg.recipe, cfg.x_format.tile[0]
    pow2 = recipe.x.scales == "pow2"
    q, k, v = (Rounded.apply(t, (recipe.x.element, rows, pow2), None) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if cfg.scale is None else cfg.scale)
    t, s = scores.shape[-2:]
    away = torch.arange(s) - torch.arange(t)[:, None] - (s - t)
    if cfg.causal:
        scores = scores.masked_fill((away > 0) | (away <= -(cfg.window or s + t)), float("-inf"))
    if cfg.packed:
        ids = torch.repeat_interleave(torch.arange(len(ends[0]) - 1), ends[0].diff())
        scores = scores.masked_fill(ids[:, None] != ids, float("-inf"))
    p = scores.softmax(-1).nan_to_num() if s else scores
    y = torch.einsum("bhts,bshd->bthd", p, v)
    if cfg.pv == "low" and s:
        assert s <= 64, "more keys are rounded in steps, each relative to the largest score so far"
        whole = (scores - scores.amax(-1, keepdim=True)).exp().detach()
        near = (whole.float() * 256).to(torch.float8_e4m3fn).double() / 256 / whole.sum(-1, keepdim=True)
        y = y + (torch.einsum("bhts,bshd->bthd", near, v) - y).detach()
    return Rounded.apply(y, None, (recipe.dy.element, rows, pow2))


def case(b, t, s, h, k, d, recipe, value=None, ends=None, **options):
    """`ends`: the ends of packed sequences; `value`: v's head size."""

    def x(draw):
        more = () if ends is None else (torch.tensor(ends).int(),)
        return draw.randn(b, t, h, d), draw.randn(b, s, k, d), draw.randn(b, s, k, value or d), *more

    options |= {"packed": True} if ends else {}
    name = f"qattention-{b}-{t}-{s}-{h}-{k}-{d}-{value}-{ends}-{type(recipe).__name__}-{recipe.dy.element}-{options}"
    alone = s == 1 or options.get("window") == 1 or (ends and max(b - a for a, b in itertools.pairwise(ends)) <= 1)
    return Case(
        op=qattention,
        cfg=QAttentionConfig(recipe, **options),
        x=x,
        reference=reference,
        name=name,
        exempt=("finite_differences",),  # of a step function
        cancels=("x.0", "x.1") if alone else (),  # p is 1 whatever q and k are, and ds the difference of two equal sums
    )


CASES = [
    case(2, 5, 5, 4, 2, 8, Fp8Block(), causal=True),
    case(2, 7, 7, 3, 1, 16, Fp8Block(bwd="e5m2"), causal=True, pv="high"),
    case(1, 3, 69, 2, 2, 8, Fp8Current(), scale=0.3, pv="high"),
    case(1, 130, 131, 1, 1, 8, Fp8Block(), pv="high"),
    case(2, 1, 1, 1, 1, 4, Fp8Block()),
    case(0, 3, 3, 2, 1, 8, Fp8Block(), causal=True),
    case(2, 0, 0, 2, 1, 8, Fp8Current(), causal=True),
    case(2, 3, 0, 2, 2, 8, Fp8Block()),
    case(1, 21, 23, 4, 2, 8, Fp8Current(pow2=True), causal=True, window=4),
    case(2, 5, 5, 2, 2, 12, Fp8Block(fwd="e5m2"), value=5, causal=True),
    case(1, 9, 9, 2, 1, 8, Fp8Block(), ends=[0, 4, 4, 9], causal=True, window=3),
    case(1, 9, 9, 2, 2, 8, Fp8Current(), ends=[0, 3, 9]),
]


@st.composite
def drawn(draw):
    causal, packed, t = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 6))
    s = t if packed else draw(st.integers(t if causal else 0, 6))
    b, k, groups, d = 1 if packed else draw(st.integers(0, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3)), [4, 8, 5]
    options = {"causal": causal, "pv": draw(st.sampled_from(["low", "high"]))}
    if causal:
        options["window"] = draw(st.sampled_from([None, 1, 3, 9]))
    if packed:
        options["ends"] = [0, *sorted(draw(st.lists(st.integers(0, t), max_size=3))), t]
    recipe = draw(st.sampled_from([Fp8Block(), Fp8Block(bwd="e5m2"), Fp8Current(), Fp8Current(pow2=True)]))
    return case(b, t, s, k * groups, k, draw(st.sampled_from(d)), recipe, value=draw(st.sampled_from(d)), **options)


def _call(*shapes, ends=None, **options):
    more = () if ends is None else (torch.tensor(ends, dtype=torch.int32),)
    return lambda: qattention_fwd(None, (*(torch.ones(s) for s in shapes), *more), QAttentionConfig(Fp8Block(), **options))


def _of(recipe, **options):
    return lambda: QAttentionConfig(recipe, **options)


def _with_dy(dy):
    def call():
        cfg = QAttentionConfig(Fp8Block())
        y, residuals = qattention_fwd(None, (torch.ones(1, 4, 2, 8),) * 3, cfg)
        qattention.bwd(residuals, dy, cfg)

    return call


SAME = ((1, 4, 2, 8),) * 3
ONE = "QAttentionConfig: recipe must be one whose x and dy have current pow2 or float32 scales, for 1x128 blocks or tensors"
ERRORS = [
    Error(call=_of(Fp8Block(), softcap=2.0), match="QAttentionConfig: softcap must be None in low precision"),
    Error(call=_of(Fp8Block(), causal=True, chunk=4), match="QAttentionConfig: chunk must be None in low precision"),
    Error(call=_of(Fp8Block(), alibi=True), match="QAttentionConfig: alibi must be False in low precision"),
    Error(call=_of(Fp8Block(), bias=True), match="QAttentionConfig: bias must be False in low precision"),
    Error(call=_of(Fp8Block(), window=3), match="QAttentionConfig: window must be None without causal, got 3"),
    Error(call=_of(Fp8Block(), pv="fp8"), match="QAttentionConfig: pv must be 'low' or 'high', got 'fp8'"),
    Error(call=_of(Fp8Delayed()), match=f"{ONE} (Fp8Block, Fp8Current), got Fp8Delayed, with e4m3 allxall float32 for x"),
    Error(call=_of(MXFP8()), match=f"{ONE} (Fp8Block, Fp8Current), got MXFP8, with e4m3 1x32 e8m0 for x"),
    Error(call=_of(NVFP4(stochastic=False)), match=f"{ONE} (Fp8Block, Fp8Current), got NVFP4, with e2m1 1x16 e4m3 for x"),
    Error(call=_of(Fp8Block), match="QAttentionConfig: recipe must be a recipe", error=TypeError),
    Error(
        call=_call((1, 4, 2, 136), (1, 4, 2, 136), (1, 4, 2, 8)),
        match="qattention_fwd: x.0 (q) must be [B, T, H, D] with D of at most 128 in low precision, got [1, 4, 2, 136]",
    ),
    Error(
        call=_call((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 129)),
        match="qattention_fwd: x.2 (v) must be [B, S, K, V] with V of at most 128 in low precision, got [1, 4, 2, 129]",
    ),
    Error(
        call=_call((1, 5, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8), causal=True),
        match="qattention_fwd: x.1 (k) must be at least as long as q, 5 (cfg.causal), got 4",
    ),
    Error(
        call=_call(*SAME, ends=[0, 3], packed=True),
        match="qattention_fwd: x.3 (cu_seqlens) must be ascending, from 0 to q's length 4, got [0, 3]",
    ),
    Error(
        call=_call(*SAME, ends=[0, 3, 2, 4], packed=True),
        match="qattention_fwd: x.3 (cu_seqlens) must be ascending, from 0 to q's length 4, got [0, 3, 2, 4]",
    ),
    Error(call=_with_dy(torch.ones(1, 4, 2, 7)), match="qattention_dgrad: dy must be [1, 4, 2, 8], got [1, 4, 2, 7]"),
    Error(
        call=_with_dy(torch.ones(1, 4, 2, 8).double()), match="qattention_dgrad: dy must be float32, got float64", error=TypeError
    ),
]
