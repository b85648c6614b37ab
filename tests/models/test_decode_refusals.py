"""Wrong calls of decoding, generation and caches are refused by name, before anything changes."""

import dataclasses
import functools
import itertools
import re

import pytest
import torch
from test_decode import BIAS, IDS, KEYS, LENGTHS, LLAMA, MODELS, VALUES, B, D, H, K, Q, T, V, given

from funcops import (
    AttentionConfig,
    ChainConfig,
    Needs,
    RopeConfig,
    SinkAttentionConfig,
    Step,
    WithExtras,
    chain,
    random,
    sink_attention,
    trees,
)
from funcops.models import Cache, DecoderConfig, KVCache, cache_init, decode, decoder, generate, roles, roll_back, to_hf
from funcops.models import cache as cache_module
from funcops.models.cache import CachedAttentionConfig, CachedParams, cached_attention, check_room, slots
from funcops.models.decode import with_cache


def test_sinks_that_are_missing_raise():
    cfg = with_cache(ChainConfig(steps=(Step("mix", sink_attention, SinkAttentionConfig(H, causal=True)),)))
    k, v = torch.zeros(B, K, T, D, dtype=torch.float64), torch.zeros(B, K, T, V, dtype=torch.float64)
    at = slots(Cache({"a": KVCache(k, v)}, torch.zeros(B, dtype=torch.int64), context=T, chunk=T), T, None, (None,))
    with pytest.raises(TypeError, match=r"params.sinks must be a tensor \[\d\], got None"):
        chain.fwd({"mix": CachedParams(k, v, None)}, WithExtras((Q, KEYS, VALUES), {"cache": at}), cfg, needs=Needs.NONE)


def cached(**options):
    """Attention over an empty cache: its params, slots for T tokens, and its config."""
    cfg = AttentionConfig(causal=True, **options)
    k, v = torch.zeros(B, K, T, D, dtype=torch.float64), torch.zeros(B, K, T, V, dtype=torch.float64)
    at = slots(Cache({"a": KVCache(k, v)}, torch.zeros(B, dtype=torch.int64), context=T, chunk=T), T, None, (None,))
    return CachedParams(k, v, None), at, CachedAttentionConfig(of=cfg)


@pytest.mark.parametrize("shape", [(T, T), (B + 1, 1, T, T), (1, H + 1, T, T), (1, 1, T - 1, T)])
def test_a_bias_of_another_shape_than_the_tokens_is_refused(shape):
    params, at, cfg = cached(bias=True)
    said = rf"^cached_attention_fwd: x.3 \(bias\) must be \[2 or 1, 4 or 1, 19, context\], got {re.escape(str(list(shape)))}$"
    with pytest.raises(ValueError, match=said):
        cached_attention.fwd(params, ((Q, KEYS, VALUES, torch.zeros(shape).double()), at), cfg, needs=Needs.NONE)
    for right in ((B, H, T, T), (1, 1, T, T)):
        x = Q, KEYS, VALUES, torch.zeros(right).double()
        assert cached_attention.fwd(params, (x, at), cfg, needs=Needs.NONE)[0].shape == (B, T, H, V)


def test_attention_over_a_cache_has_no_backward():
    params, at, cfg = cached()
    y, kept = cached_attention.fwd(params, ((Q, KEYS, VALUES), at), cfg, needs=Needs.NONE)
    assert kept is None
    said = "^cached_attention_bwd: residuals must be of another op: a cache that is written to has no gradient, got None$"
    with pytest.raises(ValueError, match=said):
        cached_attention.bwd(kept, y, cfg)


def test_lengths_that_the_host_may_not_read_are_asserted(monkeypatch):
    """Else the error names the row, and what it may go back to."""
    cache = cache_init(LLAMA, 2)
    cache.lengths += 5
    for row, lengths in ((1, [5, 6]), (0, [-1, 5])):
        with pytest.raises(ValueError, match=rf"^roll_back: lengths\[{row}\] must be from 0 to 5, got {lengths[row]}$"):
            roll_back(cache, torch.tensor(lengths))
    monkeypatch.setattr(cache_module, "readable", lambda t: False)
    for lengths in ([5, 6], [-1, 5]):
        with pytest.raises(RuntimeError, match=r"roll_back: lengths must be at most cache\.lengths, and not too far back"):
            roll_back(cache, torch.tensor(lengths))
    assert roll_back(cache, torch.tensor([5, 0])).lengths.tolist() == [5, 0]


def test_params_of_another_model_than_the_caches_are_refused():
    """Its layers have no attention where the cache has one."""
    params, cache = given(LLAMA), cache_init(LLAMA, 3, dtype=torch.float64)
    params = trees.put(params, "blocks.0.attn", {"qkv": None})
    with pytest.raises(TypeError, match=r"^decode: params must be a decoder's, with blocks\.0\.attn\.mix, got "):
        decode(params, cache, IDS[:, :1], LLAMA)


@pytest.mark.parametrize("shape", [(3,), (2, 0), (0, 2), (1, 2, 3)])
def test_a_stream_is_of_at_least_one_token(shape):
    said = rf"^generate: ids must be \[B, T\] of at least one token, got {re.escape(str(list(shape)))}$"
    with pytest.raises(ValueError, match=said):
        generate(given(LLAMA), LLAMA, torch.zeros(shape, dtype=torch.int64), 2)


def test_ids_without_a_batch_are_refused():
    cfg = DecoderConfig(vocab=64, dim=32, layers=1, heads=4, kv_heads=2, head_size=8, hidden=48, context=64, rope=RopeConfig(8))
    params, cache = chain.init(decoder(cfg), key=random.key(0)), cache_init(cfg, batch=1, context=32)
    with pytest.raises(ValueError, match=r"^decode: ids must be \[B, T\], got \[3\]$"):
        decode(params, cache, torch.tensor([1, 2, 3]), cfg)
    assert decode(params, cache, torch.tensor([[1, 2, 3]]), cfg)[0].shape == (1, 3, 64)


@pytest.mark.parametrize("fields", [{"hidden_size": 8}, {"bos_token_id": 1, "rope_theta": 2.0}], ids=str)
def test_only_fields_without_meaning_are_added_to_a_config(fields, tmp_path):
    cfg = DecoderConfig(
        vocab=64, dim=32, layers=1, heads=4, kv_heads=2, head_size=8, hidden=48, context=64, rope=RopeConfig(8), family="llama"
    )
    params = chain.init(decoder(cfg), key=random.key(0))
    with pytest.raises(ValueError, match=rf"^to_hf: fields must be among .*, got '{list(fields)[-1]}'$"):
        to_hf(params, cfg, tmp_path / "model", fields=fields)
    assert not (tmp_path / "model").exists()
    with pytest.raises(TypeError, match="roles: loss must be bool, got 1"):
        roles(cfg, loss=1)


@pytest.mark.parametrize("known", [None, 4, 6, 9])
@pytest.mark.parametrize("counts", [None, torch.tensor([2, 0, 1])], ids=["all", "counts"])
def test_a_cache_has_room_up_to_its_last_position(known, counts):
    """Tokens of every number after every length: the last position of the context, and of the rope, is served; the next is not."""
    empty = cache_init(LLAMA, 3, context=6, dtype=torch.float64)
    for longest, tokens in itertools.product(range(7), range(8)):
        cache = dataclasses.replace(empty, lengths=torch.tensor([longest, 0, 0]))
        needed = longest + (tokens if counts is None else 2)
        if needed <= min(6, known or 6):
            check_room("decode", cache, tokens, counts, known)
        else:
            with pytest.raises(ValueError, match=r"^decode: (cache|cfg) must be of a ") as raised:
                check_room("decode", cache, tokens, counts, known)
            assert ("cache must" in str(raised.value)) == (needed > 6)


@functools.cache
def held():
    """Params of a model, a cache for two rows, and a cache of rings."""
    rings = cache_init(MODELS["windows, sinks, a cap, experts"], 2, context=16, chunk=4)
    return given(LLAMA), cache_init(LLAMA, 2, context=16, chunk=4, dtype=torch.float64), rings


def decoded(cache=None, ids=IDS[:2, :1], cfg=LLAMA, **options):
    return decode(held()[0], held()[1] if cache is None else cache, ids, cfg, **options)


def generated(ids=IDS[:2, :3], cfg=LLAMA, tokens=2, params=None, **options):
    return generate(held()[0] if params is None else params, cfg, ids, tokens, **options)


def layer_is(cache, layer):
    return dataclasses.replace(cache, layers={**cache.layers, "blocks.1": layer})


def attended(by=None, **changes):
    """Cached attention of T tokens, with another q, k, v or bias."""
    params, at, cfg = cached(bias="bias" in changes)
    x = tuple({"q": Q, "k": KEYS, "v": VALUES, **changes}.values())
    return cached_attention.fwd(params, (x, at if by is None else by), cfg, needs=Needs.NONE)


ZEROS = torch.zeros(2, dtype=torch.int64)
WRONG_CALLS = {
    "decode: cfg must be DecoderConfig, got 'llama'": lambda: decoded(cfg="llama"),
    "decode: model must be ChainConfig or NoneType, got 3": lambda: decoded(model=3),
    "decode: ids must be int64, got int32": lambda: decoded(ids=IDS[:2, :1].int()),
    "decode: ids must be on device cpu, got meta": lambda: decoded(ids=IDS[:2, :1].to("meta")),
    "decode: cache must be Cache, got 3": lambda: decoded(3),
    "decode: cache.layers.blocks.1 must be KVCache, got 'x'": lambda: decoded(layer_is(held()[1], "x")),
    "generate: cfg must be DecoderConfig, got 'llama'": lambda: generated(cfg="llama"),
    "generate: sampling must be SamplingConfig, got 0.5": lambda: generated(sampling=0.5),
    "generate: model must be ChainConfig or NoneType, got 3": lambda: generated(model=3),
    "generate: tokens must be at least 1, got 0": lambda: generated(tokens=0),
    "generate: chunk must be int or SymInt, got 1.5": lambda: generated(chunk=1.5),
    "generate: ids must be int64, got int32": lambda: generated(IDS.int()),
    "generate: key must be on device meta, got cpu": lambda: generated(IDS.to("meta"), key=random.key(0)),
    "generate: lengths must be [2], got [3]": lambda: generated(lengths=LENGTHS),
    "generate: lengths must be int64, got int32": lambda: generated(lengths=ZEROS.int()),
    "generate: lengths must be from 1 to 3, as ids has, got [0, 0]": lambda: generated(lengths=ZEROS),
    "generate: lengths must be from 1 to 3, as ids has, got [4, 4]": lambda: generated(lengths=ZEROS + 4),
    "generate: params.norm.weight must be [8], got [7]": lambda: generated(
        params=trees.put(held()[0], "norm.weight", torch.ones(7).double())
    ),
    "generate: params.norm.weight must be float64 or float32 or bfloat16 or float16, got int64": lambda: generated(
        params=trees.put(held()[0], "norm.weight", torch.ones(8, dtype=torch.int64))
    ),
    "generate: params.norm.weight must be on device cpu, got meta": lambda: generated(
        params=trees.put(held()[0], "norm.weight", torch.ones(8, dtype=torch.float64, device="meta"))
    ),
    "roll_back: cache must be Cache, got 3": lambda: roll_back(3, ZEROS),
    "roll_back: cache.layers.blocks.1 must be KVCache, got 'x'": lambda: roll_back(layer_is(held()[1], "x"), ZEROS),
    "roll_back: cache.layers.blocks.1.v must be [B, K, R, D] with B as in cache.lengths, got [3, 1, 16, 4]": lambda: roll_back(
        layer_is(held()[1], KVCache(torch.zeros(2, 1, 16, 4), torch.zeros(3, 1, 16, 4))), ZEROS
    ),
    "roll_back: cache.layers.blocks.1.k must be [B, K, R, D] with B as in cache.lengths, got [2, 16, 4]": lambda: roll_back(
        layer_is(held()[1], KVCache(torch.zeros(2, 16, 4), torch.zeros(2, 1, 16, 4))), ZEROS
    ),
    "roll_back: cache.reached must be a tensor [2], got None": lambda: roll_back(
        dataclasses.replace(held()[2], reached=None), ZEROS
    ),
    "roll_back: cache.reached must be [2], got [3]": lambda: roll_back(
        dataclasses.replace(held()[2], reached=torch.zeros(3, dtype=torch.int64)), ZEROS
    ),
    "with_cache: attention must be AttentionConfig, got 3": lambda: CachedAttentionConfig(of=3),
    "cached_attention_fwd: x.0 (q) must be float64 or float32 or bfloat16 or float16, got int64": lambda: attended(q=Q.long()),
    "cached_attention_fwd: x.1 (k) must be float64, got float32": lambda: attended(k=KEYS.float()),
    "cached_attention_fwd: x.1 (k) must be on device cpu, got meta": lambda: attended(k=KEYS.to("meta")),
    "cached_attention_fwd: x.1 (k), as the cache, must be [2, 19, 2, 6], got [2, 18, 2, 6]": lambda: attended(
        q=Q[:, 1:], k=KEYS[:, 1:], v=VALUES[:, 1:]
    ),
    "cached_attention_fwd: x.2 (v), as the cache, must be [2, 19, 2, 5], got [2, 19, 2, 4]": lambda: attended(v=VALUES[..., 1:]),
    "cached_attention_fwd: x.1 (k), as the cache, must be float64, got float32": lambda: attended(
        q=Q.float(), k=KEYS.float(), v=VALUES.float()
    ),
    "cached_attention_fwd: x.3 (bias) must be float64, got float32": lambda: attended(bias=BIAS.float()),
    "cached_attention_fwd: x.3 (bias) must be on device cpu, got meta": lambda: attended(bias=BIAS.to("meta")),
}


@pytest.mark.parametrize("said", WRONG_CALLS)
def test_a_wrong_argument_of_decoding_is_refused_by_its_name(said):
    """The error comes from the call itself, before a token is asked for, and leaves the cache alone."""
    _, cache, rings = held()
    marks = [t._version for t in trees.tensors((cache, rings))]
    with pytest.raises((ValueError, TypeError), match="^" + re.escape(said)):
        WRONG_CALLS[said]()
    assert [t._version for t in trees.tensors((cache, rings))] == marks
