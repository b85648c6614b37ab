"""Attention in low precision beside plain attention, its kernels beside the emulation, and the bytes that it keeps."""

import importlib

import pytest
import torch
from policy_cases import same

from funcops import (
    AttentionConfig,
    ChainConfig,
    Compress,
    Policy,
    QAttentionConfig,
    RepeatConfig,
    RopeConfig,
    SinkAttentionConfig,
    Step,
    WithExtras,
    attention,
    backend,
    chain,
    donate,
    qattention,
    random,
    repeat,
    report,
    sink_attention,
    with_policy,
)
from funcops.engine.errors import DonatedError
from funcops.engine.trees import tensors
from funcops.library.formats import quantize_tensor
from funcops.library.kernels import scaled_attention
from funcops.low_precision import NVFP4, Fp8Block, Fp8Current, QTensor, quantize_params, with_recipe
from funcops.models import DecoderConfig, decoder, generate
from funcops.models.blocks import block_config
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close, relative

BARS = [  # recipe; relative errors of y, and of dq, dk and dv, on normal data
    (Fp8Block(), 0.06, 0.07),
    (Fp8Block(scales="float32", keep="col"), 0.06, 0.07),
    (Fp8Current(bwd="e4m3"), 0.06, 0.07),
    (Fp8Block(bwd="e5m2"), 0.06, 0.09),
    (Fp8Current(), 0.06, 0.09),
]
OPTIONS = {  # T, S, heads, key heads, sizes of heads and of v's; options; ends of sequences
    "causal": (150, 150, 4, 2, 16, 16, {"causal": True}, None),
    "shorter": (33, 150, 2, 2, 20, 24, {"causal": True}, None),
    "all keys": (70, 131, 2, 1, 16, 16, {}, None),
    "window": (150, 200, 2, 1, 16, 16, {"causal": True, "window": 40}, None),
    "packed": (133, 133, 2, 1, 16, 16, {"causal": True, "window": 50}, [0, 20, 20, 97, 133]),
}


def given(name, dtype, seed=0):
    t, s, heads, groups, size, value, options, ends = OPTIONS[name]
    generator = torch.Generator().manual_seed(seed)
    shapes = (t, heads, size), (s, groups, size), (s, groups, value), (t, heads, value)
    *x, dy = (torch.randn(1 if ends else 2, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    more = () if ends is None else (torch.tensor(ends, dtype=torch.int32),)
    return (*x, *more), dy, options | {"packed": ends is not None}


def results(cfg, x, dy):
    y, kept = qattention.fwd(None, x, cfg)
    return y, qattention.bwd(kept, dy, cfg)[1][:3]


def decoded(t, format):
    """[B, T, H, D] with each head quantised by itself, as a matrix."""
    heads = [[quantize_tensor(head.contiguous(), format).dequantize() for head in row.unbind(1)] for row in t]
    return torch.stack([torch.stack(row, 1) for row in heads])


def by_torch(q, k, v, dy, causal=True):
    """y and gradients of torch's attention, by autograd."""
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    parts = [t.transpose(1, 2) for t in leaves]
    y = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=causal, enable_gqa=True).transpose(1, 2)
    return y.detach(), torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize(("recipe", "of_y", "of_gradients"), BARS, ids=lambda v: repr(v)[:50])
def test_errors_beside_plain_attention(recipe, of_y, of_gradients):
    (q, k, v), dy, _ = given("causal", torch.float64)
    y, grads = results(QAttentionConfig(recipe, causal=True), (q, k, v), dy)
    exact, wanted = by_torch(q, k, v, dy)
    for got, want, bar in ((y, exact, of_y), *((g, w, of_gradients) for g, w in zip(grads, wanted, strict=True))):
        assert 0.01 < float((got - want).norm() / want.norm()) <= bar


@pytest.mark.parametrize("recipe", [Fp8Block(), Fp8Block(bwd="e5m2"), Fp8Current()], ids=lambda v: repr(v)[:50])
def test_gradients_are_those_of_decoded_operands(recipe):
    """Straight through: torch's attention of decoded q, k and v, by autograd, of a decoded dy. Over several blocks of rows."""
    (q, k, v), dy, _ = given("causal", torch.float64)
    cfg = QAttentionConfig(recipe, causal=True, pv="high")
    found = results(cfg, (q, k, v), dy)
    wanted = by_torch(*(decoded(t, cfg.x_format) for t in (q, k, v)), decoded(dy, cfg.dy_format))
    assert_close(found, wanted, dtype=torch.float64)
    assert cfg.x_format.tile == ((128, 128) if type(recipe) is Fp8Block else (0, 0))
    low = results(QAttentionConfig(recipe, causal=True), (q, k, v), dy)
    same_bits(low[1], found[1], "gradients do not depend on the rounding of p")
    values = decoded(v, cfg.x_format).abs()
    most = by_torch(*(decoded(t, cfg.x_format) for t in (q, k)), values, dy)[0]  # the sum of p |v|
    off = (low[0] - found[0]).abs()
    assert off.max() > 0 and torch.all(off <= most * 2.0**-4 + 2.0**-17 * values.sum(1).max()), "half a step of e4m3, or of 256 p"


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["packed", *(pytest.param(n, marks=pytest.mark.slow) for n in OPTIONS if n != "packed")])
@pytest.mark.parametrize("recipe", [Fp8Block(), pytest.param(Fp8Current(), marks=pytest.mark.slow)], ids=["block", "current"])
def test_kernels_do_what_the_emulation_does(recipe, name, dtype):
    x, dy, options = given(name, dtype)
    for pv in ("low", "high"):
        cfg, found = QAttentionConfig(recipe, pv=pv, **options), []
        for implementation in ("torch", "triton"):
            with backend(implementation):
                y, kept = qattention.fwd(None, x, cfg)
                found.append((y, (kept.q, kept.k, kept.v), qattention.bwd(kept, dy, cfg)[1] if pv == "low" else None))
        (wanted, codes, want), (y, same_codes, grads) = found
        same_bits(codes, same_codes, f"codes {name}")
        assert_close(grads, want, dtype=dtype, length=x[1].shape[1], what=name)
        if pv == "high":
            assert_close(y, wanted, dtype=dtype, length=x[1].shape[1], what=name)
        else:  # a score that differs in its last bit may round its p to the other neighbour
            off = (y.double() - wanted.double()).abs()
            near = off <= relative(dtype, 1024) * wanted.double().abs().max()
            assert near.double().mean() > 0.97 and off.max() <= 2.0**-4 * x[2].double().abs().max()


def test_quantisers_give_the_same_codes():
    t = torch.randn(1, 130, 3, 24, generator=torch.Generator().manual_seed(0))
    t[0, 0, 0, 0], t[0, 129, 1, 3], t[0, :, 2] = torch.nan, torch.inf, 0.0
    for x in (t, t.bfloat16(), t.transpose(1, 2), t[..., ::2], t[:, :0]):
        for how in (("e4m3", 128, "pow2", 0.5), ("e5m2", 0, "float32", 0.0)):
            found = []
            for implementation in ("torch", "triton"):
                with backend(implementation):
                    found.append(scaled_attention.quantize_heads(x, *how))
            same_bits(*found, f"{list(x.shape)} {how}")


def test_codes_are_kept_and_nothing_else():
    (q, k, v), dy, _ = given("causal", torch.bfloat16)
    cfg = QAttentionConfig(Fp8Block(), causal=True)
    y, kept = qattention.fwd(None, (q, k, v), cfg)
    rows = {row.path: row for row in report(kept, None, (q, k, v)).rows}
    assert list(rows) == ["q", "k", "v"] and all(row.dtype == "e4m3 128x128 pow2" for row in rows.values())
    for name, t in (("q", q), ("k", k), ("v", v)):
        held = getattr(kept, name)
        assert type(held) is QTensor and torch.equal(held.dequantize().transpose(1, 2), decoded(t, cfg.x_format))
        blocks = t.shape[0] * t.shape[2] * -(-t.shape[1] // 128)
        assert rows[name].bytes == sum(part.nbytes for part in tensors(held)) == t.numel() + 4 * blocks
    whole = qattention.bwd(donate(kept), dy, cfg)
    with pytest.raises(DonatedError, match="given away with donate"):
        qattention.bwd(kept, dy, cfg)
    assert all(g.dtype is torch.bfloat16 and g.shape == t.shape for g, t in zip(whole[1], (q, k, v), strict=True))


def mix(op, cfg, name="mix"):
    return ChainConfig(steps=(Step(name, op, cfg),))


def test_a_recipe_reaches_the_attention_that_it_names():
    plain = block_config(64, 2, 96)
    assert with_recipe(plain, Fp8Block()).steps[0].cfg.cfg.steps[2] == plain.steps[0].cfg.cfg.steps[2], "none by default"
    both = ChainConfig(steps=tuple(Step(name, chain, mix(attention, AttentionConfig())) for name in "ab"))
    assert [step.cfg.steps[0].op for step in with_recipe(both, Fp8Block(), attention=("b.*",)).steps] == [attention, qattention]
    low = with_recipe(plain, Fp8Block(), skip=("*",), attention=("*.mix",))
    step = low.steps[0].cfg.cfg.steps[2]
    assert (step.op, step.cfg) == (qattention, QAttentionConfig(Fp8Block(), causal=True))
    assert low.steps[1] == plain.steps[1] and low.steps[0].cfg.cfg.steps[:2] == plain.steps[0].cfg.cfg.steps[:2]
    again = with_recipe(low, Fp8Current(), attention=("*",))
    assert again.steps[0].cfg.cfg.steps[2] == step, "it keeps the recipe that it has"
    whole = with_recipe(AttentionConfig(causal=True, window=3), Fp8Block(), attention=("*",))
    assert whole == QAttentionConfig(Fp8Block(), causal=True, window=3)
    two = RepeatConfig(chain, mix(attention, AttentionConfig(causal=True)), 2)
    for cfg, globs, message in (
        (plain, ("*.up",), "attention must be globs over attn.mix, got '\\*.up'"),
        (plain, "*.mix", "attention must be a tuple of globs"),
        (two, ("0.mix",), "attention must be of all layers of the repeat, which share one config"),
        (
            mix(sink_attention, SinkAttentionConfig(2)),
            ("mix",),
            "globs over steps of the op attention \\(sink_attention has no form",
        ),
        (mix(attention, AttentionConfig(softcap=2.0)), ("*",), "mix: QAttentionConfig: softcap must be None in low precision"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            with_recipe(cfg, Fp8Block(), attention=globs)
    with pytest.raises(ValueError, match="attn.mix: QAttentionConfig: recipe must be one whose x and dy"):
        with_recipe(plain, NVFP4(emulate=True), skip=("*",), attention=("*",))


@pytest.mark.parametrize("recipe", [Fp8Block(), Fp8Block(keep="input")], ids=["row", "input"])
def test_a_block_trains_with_linears_and_attention_in_8_bits(recipe):
    """Both halves are the whole, with its other tensors in 8 bits, too; and y is near the plain block's."""
    plain = block_config(64, 2, 96, kv_heads=1)
    cfg = with_recipe(plain, recipe, attention=("*.mix",))
    params = chain.init(plain, key=random.key(0), dtype=torch.float32)
    x = WithExtras(torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0)), {"positions": torch.arange(20)})
    dy, work = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(1)), quantize_params(params, cfg, dtype=torch.float32)
    op = with_policy(chain, Policy({"mlp.act.x": Compress("fp8"), "*.norm.x": Compress("fp8")}))
    y, kept = op.fwd(work, x, cfg)
    whole = op.bwd(kept, dy, cfg)
    dx, pending = op.dgrad(kept, dy, cfg)
    assert same(whole, (op.wgrad(pending, cfg), dx))
    exact, plainly = chain.fwd(params, x, plain)
    want = chain.bwd(plainly, dy, plain)[1].main
    assert float((y - exact).norm() / exact.norm()) < 0.05 and float((whole[1].main - want).norm() / want.norm()) < 0.08


@pytest.mark.parametrize("stacked", [False, True])
def test_layers_of_a_repeat_keep_codes(stacked):
    cfg = with_recipe(RepeatConfig(chain, block_config(16, 2, 24), 2, stacked=stacked), Fp8Block(), attention=("*.mix",))
    params = repeat.init(cfg, key=random.key(0), dtype=torch.float32)
    x = WithExtras(torch.randn(1, 5, 16), {"positions": torch.arange(5)})
    y, kept = repeat.fwd(params, x, cfg)
    held = [layer["attn"]["mix"] for layer in kept] if isinstance(kept, tuple) else []
    assert all(type(part.q) is QTensor for part in held)
    dx, pending = repeat.dgrad(kept, torch.ones_like(y), cfg)
    assert same(repeat.bwd(kept, torch.ones_like(y), cfg), (repeat.wgrad(pending, cfg), dx))


def test_decoding_leaves_attention_without_a_recipe():
    cfg = DecoderConfig(vocab=8, dim=16, layers=1, heads=2, kv_heads=1, head_size=8, hidden=8, context=8, rope=RopeConfig(8))
    model = with_recipe(decoder(cfg), Fp8Block(), skip=("*",), attention=("*.mix",))
    params = chain.init(model, key=random.key(0), dtype=torch.float32)
    with pytest.raises(ValueError, match=r"blocks\.\*\.attn\.mix must be attention that reads a cache .*, got qattention"):
        list(generate(params, cfg, torch.zeros(1, 4, dtype=torch.int64), 2, model=model))


def test_a_device_without_the_formats_raises(monkeypatch):
    op = importlib.import_module("funcops.library.ops.qattention")

    class OnCuda:
        is_cuda, device, shape = True, "cuda", torch.Size((1, 2, 1, 8))

    monkeypatch.setattr(op, "check_x", lambda where, x, cfg: (OnCuda, OnCuda, OnCuda, None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(
        RuntimeError, match=r"x must be on a device of capability \(9, 0\) or above, or the recipe with emulate=True"
    ):
        op._check("qattention_fwd", (), QAttentionConfig(Fp8Block()))
    assert op._check("qattention_fwd", (), QAttentionConfig(Fp8Block(emulate=True)))[3] is None
