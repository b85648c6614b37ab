"""Decoding from latents: the logits of the whole, and a few hundred numbers a token."""

import dataclasses
import itertools
import random as python_random
import re

import pytest
import torch

from funcops import AttentionConfig, LatentSplitConfig, Needs, RopeConfig, WithExtras, chain, donate, linear, random, rewrite, walk
from funcops.engine.trees import at, put, tensors
from funcops.graphs import graphed
from funcops.lora import with_lora
from funcops.lora.params import lora_init
from funcops.low_precision import Fp8Block, quantize_params, with_recipe
from funcops.models import DecoderConfig, KVCache, LatentConfig, cache_init, decode, decoder, decoder_x, generate, roll_back
from funcops.models.cache import Cache, slots
from funcops.models.decode import with_cache
from funcops.models.latent_cache import LatentAttentionConfig, LatentParams, latent_attention
from funcops.testing.tolerances import DECODING

BASE = dict(vocab=31, dim=8, layers=2, hidden=6, context=32, head_size=4)
IDS = torch.randint(0, 31, (3, 17), generator=torch.Generator().manual_seed(1))


def drawn(seed):
    draw = python_random.Random(seed)
    heads, rope = draw.randint(1, 4), draw.choice((2, 4))
    latent = LatentConfig(
        kv_rank=draw.randint(1, 6),
        rope_size=rope,
        plain_size=draw.randint(1, 5),
        value_size=draw.randint(1, 6),
        q_rank=draw.choice((None, 3)),
    )
    options = dict(
        windows=draw.choice(((), (3, None))),
        sinks=draw.random() < 0.3,
        softcap=draw.choice((None, 2.0)),
        scale=draw.choice((None, 0.7)),
    )
    return DecoderConfig(**BASE, heads=heads, kv_heads=heads, rope=RopeConfig(rope), latent=latent, **options)


def given(cfg, dtype=torch.float64):
    params = chain.init(decoder(cfg), key=random.key(0), dtype=dtype)
    for i, t in enumerate(tensors(params)):
        if t.dim() == 1:
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64))
    return params


def whole(params, cfg, ids=IDS, model=None):
    y, _ = chain.fwd(params, decoder_x(cfg, ids, torch.float64), model or decoder(cfg), needs=Needs.NONE)
    return y.main if type(y) is WithExtras else y


def decoded(params, cfg, cache, model=None, ids=IDS):
    found, widths = [], itertools.cycle((5, 1, 3))
    start = 0
    while start < ids.shape[1]:
        part = ids[:, start : start + next(widths)]
        logits, cache = decode(params, donate(cache), part, cfg, model=model)
        found.append(logits)
        start += part.shape[1]
    return torch.cat(found, 1), cache


@pytest.mark.turns("seed", every=4)
@pytest.mark.parametrize("seed", range(24))
def test_latents_give_the_logits_of_the_whole(seed):
    """Whole keys and values do so too. A slot has L + S numbers in one head."""
    cfg = drawn(seed)
    params, want = given(cfg), whole(given(cfg), cfg)
    for latents in (True, False):
        cache = cache_init(cfg, 3, context=20, chunk=5, dtype=torch.float64, latents=latents)
        got, cache = decoded(params, cfg, cache)
        torch.testing.assert_close(got, want, rtol=0, atol=DECODING)
        rolled = roll_back(cache, cache.lengths - 1)
        again, _ = decode(params, rolled, IDS[:, -1:], cfg)
        torch.testing.assert_close(again, want[:, -1:], rtol=0, atol=DECODING)
        if latents:
            sizes = {(layer.v, layer.k.shape[1], layer.k.shape[3]) for layer in cache.layers.values()}
            assert sizes == {(None, 1, cfg.latent.kv_rank + cfg.latent.rope_size)}


@pytest.mark.turns("seed")
@pytest.mark.parametrize("seed", range(6))
def test_rows_of_several_lengths_and_a_graph(seed):
    cfg = dataclasses.replace(drawn(seed), windows=())
    params = given(cfg)
    lengths = torch.tensor([17, 4, 9])
    tokens = torch.stack(list(generate(params, cfg, IDS, 4, lengths=lengths, chunk=5)), 1)
    for row, n in enumerate(lengths.tolist()):
        ids = IDS[row : row + 1, :n]
        for _ in range(4):
            ids = torch.cat((ids, whole(params, cfg, ids)[:, -1].argmax(-1, keepdim=True)), 1)
        assert torch.equal(tokens[row], ids[0, n:])
    cache = cache_init(cfg, 3, context=20, chunk=5, dtype=torch.float64)

    def step(cache, ids):
        return decode(params, cache, ids, cfg)

    captured = graphed(step, cache, IDS[:, :1])
    for start in range(3):
        part = IDS[:, start : start + 1]
        want, later = decode(params, cache, part, cfg)
        got, cache = captured(cache, part)
        assert torch.equal(got, want) and torch.equal(cache.lengths, later.lengths)


def test_deepseek_keeps_576_numbers_a_token():
    latent = LatentConfig(kv_rank=512, rope_size=64, plain_size=128, value_size=128, q_rank=1536)
    sizes = dict(vocab=129280, dim=7168, layers=61, heads=128, kv_heads=128, head_size=192, hidden=18432, context=4096)
    cfg = DecoderConfig(**sizes, rope=RopeConfig(64), latent=latent)
    small, large = (
        sum(
            t[:, :, 0].numel()
            for layer in cache_init(cfg, 1, device="meta", latents=latents).layers.values()
            for t in tensors(layer)
        )
        for latents in (True, False)
    )
    assert small == 61 * 576 and large == 61 * 40_960


CFG = dataclasses.replace(drawn(0), windows=(), sinks=False)
WIDE = dataclasses.replace(
    CFG,
    dim=128,
    latent=LatentConfig(kv_rank=128, rope_size=4, plain_size=60, value_size=64),
    heads=2,
    kv_heads=2,
    windows=(),
    sinks=False,
)


def adapted(targets):
    base = decoder(CFG)
    model = with_lora(base, 2, targets)
    params = lora_init(given(CFG), model, key=random.key(1))
    for t in tensors(params):
        t.add_(0.01)
    return params, model


def test_adapters_and_codes_where_latents_are_read():
    """They are served by whole keys and values, which `generate` chooses by itself, and refused by name with latents."""
    params, model = adapted(("*.kv.up",))
    cache = cache_init(CFG, 3, context=20, chunk=5, dtype=torch.float64)
    said = r"params.blocks.0.attn.qkv.kv.up must be a plain weight for a cache of latents \(make the cache with cache_init"
    with pytest.raises(TypeError, match=said):
        decoded(params, CFG, cache, model)
    plain = cache_init(CFG, 3, context=20, chunk=5, dtype=torch.float64, latents=False)
    got, _ = decoded(params, CFG, plain, model)
    torch.testing.assert_close(got, whole(params, CFG, model=model), rtol=0, atol=DECODING)
    tokens = torch.stack(list(generate(params, CFG, IDS, 2, model=model)), 1)
    assert torch.equal(tokens[:, 0], whole(params, CFG, model=model)[:, -1].argmax(-1))
    params, model = adapted(("*.q.*", "*.out"))
    got, _ = decoded(params, CFG, cache_init(CFG, 3, context=20, chunk=5, dtype=torch.float64), model)
    torch.testing.assert_close(got, whole(params, CFG, model=model), rtol=0, atol=DECODING)
    coded = with_recipe(decoder(WIDE), Fp8Block(emulate=True), only=("*.kv.up",))
    with pytest.raises(ValueError, match=r"with_cache: blocks.\*.attn.qkv.kv.up must be a plain linear for a cache of latents"):
        with_cache(coded, latents=True)
    work = quantize_params(given(WIDE, torch.bfloat16), coded)
    assert len(list(generate(work, WIDE, IDS, 2, model=coded))) == 2
    with pytest.raises(TypeError, match="kv.up must be a plain weight for a cache of latents"):
        decode(work, cache_init(WIDE, 3, dtype=torch.bfloat16), IDS[:, :2], WIDE, model=coded)


def test_a_cache_of_latents_has_no_gradient():
    model = with_cache(decoder(CFG), latents=True)
    (part,) = {part.cfg: part for part in walk(model) if type(part.cfg) is LatentAttentionConfig}.values()
    params, where = part.op.init(part.cfg), "latent_attention_fwd: needs"
    with pytest.raises(ValueError, match=f"{where} must be Needs.NONE: a cache that is written to has no gradient, got "):
        part.op.fwd(params, ((IDS, IDS, IDS), {}), part.cfg, needs=Needs.ALL)


def test_a_cache_of_both_kinds_is_refused():
    cache = cache_init(CFG, 3, context=20, chunk=5, dtype=torch.float64)
    other = cache_init(CFG, 3, context=20, chunk=5, dtype=torch.float64, latents=False)
    mixed = dataclasses.replace(cache, layers={**cache.layers, "blocks.1": other.layers["blocks.1"]})
    with pytest.raises((ValueError, TypeError), match=r"decode: cache.layers.blocks.1.k must be"):
        decode(given(CFG), mixed, IDS[:, :1], CFG)
    layer = cache.layers["blocks.1"]
    mixed = dataclasses.replace(cache, layers={**cache.layers, "blocks.1": KVCache(layer.k, layer.k)})
    with pytest.raises(ValueError, match=r"cache.layers.blocks.1.v must be None, as in the other layers"):
        decode(given(CFG), mixed, IDS[:, :1], CFG)


def test_a_weight_of_another_shape_or_dtype_and_a_bias_are_refused_by_name():
    params, cache = given(CFG), cache_init(CFG, 3, context=20, chunk=5, dtype=torch.float64)
    path = "blocks.0.attn.qkv.kv.up.weight"
    weight = at(params, path)
    for wrong in (weight[:-1], weight.float()):
        with pytest.raises((ValueError, TypeError), match=r"blocks.0.attn.split: latent_attention_fwd: params.weight must be"):
            decode(put(params, path, wrong), cache, IDS[:, :1], CFG)
    want, _ = decode(params, cache, IDS[:, :1], CFG)
    got, _ = decode(put(params, path, weight.mT.contiguous().mT), cache, IDS[:, :1], CFG)
    torch.testing.assert_close(got, want, rtol=0, atol=DECODING)

    def with_bias(part):
        plain = part.op is linear and part.path.endswith("kv.up")
        return (linear, dataclasses.replace(part.cfg, bias=True)) if plain else None

    biased = rewrite(decoder(CFG), with_bias)[1]
    with pytest.raises(ValueError, match=r"with_cache: blocks.\*.attn.qkv.kv.up must be a plain linear .*, got linear with a bias"):
        with_cache(biased, latents=True)
    params = chain.init(biased, key=random.key(0), dtype=torch.float64)
    tokens = torch.stack(list(generate(params, CFG, IDS, 1, model=biased)), 1)
    assert torch.equal(tokens[:, 0], whole(params, CFG, model=biased)[:, -1].argmax(-1)), "by keys and values"


SPLIT = LatentSplitConfig(heads=2, shared=2, own=3, value=4)
READS = LatentAttentionConfig(of=AttentionConfig(causal=True), split=SPLIT, rank=3)


def attended(q=(2, 1, 2, 5), c=(2, 1, 1, 3), shared=(2, 1, 1, 2), held=(2, 1, 8, 5), dtypes=(), weight=(14, 3), device="cpu"):
    """Latent attention of one token, with other shapes or dtypes; `device`: of the shared part."""
    q, c, shared, held = (
        torch.zeros(shape, dtype=dtype)
        for shape, dtype in itertools.zip_longest((q, c, shared, held), dtypes or [torch.float32] * 4)
    )
    at = slots(Cache({"a": KVCache(held, None)}, torch.zeros(2, dtype=torch.int64), context=8, chunk=4), 1, None, (None,))
    params = LatentParams(held, torch.zeros(weight), None)
    return latent_attention.fwd(params, ((q, c, shared.to(device)), at), READS, needs=Needs.NONE)


INT, HALF, WIDEST = torch.int64, torch.bfloat16, torch.float64
WRONG_INPUTS = {
    "x.0 (q) must be [..., 2, 5], got [2, 1, 2, 4]": dict(q=(2, 1, 2, 4)),
    "x.0 (q) must be float64 or float32 or bfloat16 or float16, got int64": dict(dtypes=[INT] * 4),
    "x.1 (latents) must be [2, 1, 1, 3], got [2, 1, 1, 4]": dict(c=(2, 1, 1, 4)),
    "x.1 (latents) must be float32, got float64": dict(dtypes=[None, WIDEST, None, None]),
    "x.2 (shared) must be [2, 1, 1, 2], got [2, 1, 2, 2]": dict(shared=(2, 1, 2, 2)),
    "x.2 (shared) must be float32, got bfloat16": dict(dtypes=[None, None, HALF, None]),
    "x.2 (shared) must be on device cpu, got meta": dict(device="meta"),
    "x.1 (latents), as the cache, must be [2, 1, 1, 3], got [2, 2, 1, 3]": dict(
        q=(2, 2, 2, 5), c=(2, 2, 1, 3), shared=(2, 2, 1, 2)
    ),
    "x.1 (latents), as the cache, must be bfloat16, got float32": dict(dtypes=[None, None, None, HALF]),
}


@pytest.mark.parametrize("said", WRONG_INPUTS)
def test_a_wrong_input_of_latent_attention_is_refused_by_its_name(said):
    assert attended()[0].shape == (2, 1, 2, 4)
    with pytest.raises((ValueError, TypeError), match="^latent_attention_fwd: " + re.escape(said)):
        attended(**WRONG_INPUTS[said])


@pytest.mark.parametrize(
    "of", [AttentionConfig(), AttentionConfig(causal=True, packed=True), SPLIT], ids=["whole", "packed", "other"]
)
def test_latents_are_read_by_causal_attention_alone(of):
    with pytest.raises((ValueError, TypeError), match=r"^with_cache: attention(\.causal|\.packed)? must be "):
        LatentAttentionConfig(of=of, split=SPLIT, rank=3)
