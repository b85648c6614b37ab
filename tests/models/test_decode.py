"""Decoding: chunks and single tokens give what one forward gives, with every option of attention; the memory of caches; bad
calls."""

import dataclasses

import pytest
import torch

from funcops import (
    AttentionConfig,
    ChainConfig,
    DonatedError,
    ExpertsConfig,
    Needs,
    RopeConfig,
    RouteConfig,
    SinkAttentionConfig,
    Step,
    WithExtras,
    attention,
    chain,
    donate,
    lora,
    random,
    sink_attention,
    trees,
)
from funcops.engine.backend import backend
from funcops.graphs import check_capturable, graphed
from funcops.low_precision import MXFP8, quantize_params, with_recipe
from funcops.models import (
    Cache,
    DecoderConfig,
    KVCache,
    LatentConfig,
    LinearAttentionConfig,
    MoEConfig,
    SamplingConfig,
    cache_init,
    decode,
    decoder,
    decoder_x,
    generate,
    sample,
)
from funcops.models.cache import CachedParams, slots, slots_of
from funcops.models.decode import with_cache
from funcops.testing.tolerances import DECODING, assert_close

B, T, H, K, D, V = 2, 19, 4, 2, 6, 5
OPTIONS = {
    "plain": {},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "chunks": {"chunk": 4},
    "chunks, a window": {"chunk": 5, "window": 3},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "bias": {"bias": True},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": True},
    "all": {"window": 5, "softcap": 1.5, "alibi": True, "bias": True, "scale": 0.7, "sinks": True},
}
GIVEN = torch.Generator().manual_seed(0)
Q, KEYS, VALUES, BIAS = (
    torch.randn(shape, dtype=torch.float64, generator=GIVEN) for shape in ((B, T, H, D), (B, T, K, D), (B, T, K, V), (1, H, T, T))
)


@pytest.mark.parametrize("chunk", [1, 7, T])
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_in_chunks_is_attention_of_the_whole(name, chunk):
    """The last five positions are decoded token by token."""
    options = {"causal": True, **OPTIONS[name]}
    sinks = options.pop("sinks", False)
    op, cfg = (sink_attention, SinkAttentionConfig(H, **options)) if sinks else (attention, AttentionConfig(**options))
    params = op.init(cfg, key=random.key(0), dtype=torch.float64)
    if sinks:
        params.sinks.copy_(torch.randn(H, dtype=torch.float64, generator=GIVEN))
    whole = (Q, KEYS, VALUES, *((BIAS,) if cfg.bias else ()))
    want, _ = op.fwd(params, whole, cfg)
    count = slots_of(cfg.reach, T, chunk)
    assert cfg.reach is None or chunk == T or count < T  # a ring goes round
    k, v = (torch.zeros(B, K, count, size, dtype=torch.float64) for size in (D, V))
    lengths = torch.zeros(B, dtype=torch.int64)
    cache = Cache({"a": KVCache(k, v)}, lengths, context=T, chunk=chunk)
    cached = with_cache(ChainConfig(steps=(Step("mix", op, cfg),)))
    for start, stop in [(a, min(a + chunk, T - 5)) for a in range(0, T - 5, chunk)] + [(a, a + 1) for a in range(T - 5, T)]:
        part = slice(start, stop)
        x = (Q[:, part], KEYS[:, part], VALUES[:, part], *((BIAS[:, :, part],) if cfg.bias else ()))
        at = slots(cache, stop - start, None, (cfg.reach,))
        held = CachedParams(k, v, params.sinks if sinks else None)
        y, kept = chain.fwd({"mix": held}, WithExtras(x, {"cache": at}), cached, needs=Needs.NONE)
        assert kept is None
        torch.testing.assert_close(y, want[:, part], rtol=0, atol=DECODING)
        lengths += stop - start


SIZES = dict(vocab=31, dim=8, layers=4, heads=2, kv_heads=1, head_size=4, hidden=6, context=32)
LLAMA = DecoderConfig(**SIZES, rope=RopeConfig(4))
MODELS = {
    "llama": LLAMA,
    "windows, sinks, a cap, experts": dataclasses.replace(
        LLAMA,
        windows=(3, None, 3, None),
        sinks=True,
        softcap=2.0,
        local_rope=RopeConfig(4, theta=100.0),
        moe=MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 8, 6), shared=5, dense=(0,)),
    ),
    "a latent": dataclasses.replace(
        LLAMA, latent=LatentConfig(kv_rank=4, rope_size=4, plain_size=3, value_size=5, q_rank=3), rope=RopeConfig(4)
    ),
    "linear attention, a gate": dataclasses.replace(
        LLAMA,
        attention_gate=True,
        linear=LinearAttentionConfig(key_heads=2, value_heads=4, key_size=3, value_size=5, layers=(0, 1, 3)),
    ),
    "layers without rope, factors": dataclasses.replace(
        LLAMA, unrotated=(1, 2), windows=(None, 3, None, None), residual_scale=0.5, embed_scale=2.0, logit_scale=3.0
    ),
    "chunks, a temperature, weights on the input": dataclasses.replace(
        LLAMA,
        rope=RopeConfig(4, interleaved=True),
        unrotated=(1, 3),
        chunks=(5, None, 5, None),
        temperature=(0.5, 3.0),
        qk_norm="l2",
        moe=MoEConfig(
            route=RouteConfig(4, 2, score="sigmoid", normalize=False),
            experts=ExpertsConfig(4, 8, 6, weights_on="input"),
            shared=5,
            dense=(0, 2),
        ),
    ),
    "learned positions": dataclasses.replace(LLAMA, rope=None, places=True, norm="layer_norm", mlp="gelu", tied=True),
}
IDS = torch.randint(0, 31, (3, 17), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([17, 4, 9])


def given(cfg, dtype=torch.float64):
    params = chain.init(decoder(cfg), key=random.key(0), dtype=dtype)
    if cfg.sinks:
        params = trees.tree_map_with_path(lambda path, t: t + 0.5 if path.endswith("sinks") else t, params)
    return params


def whole(params, cfg, ids=IDS):
    y, _ = chain.fwd(params, decoder_x(cfg, ids, torch.float64), decoder(cfg), needs=Needs.NONE)
    return y.main if type(y) is WithExtras else y


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_one_forward(name):
    """In chunks of 1, 7 and all, then token by token; and with rows of several lengths, each continuing from its own end."""
    cfg = MODELS[name]
    params = given(cfg)
    want = whole(params, cfg)
    for chunk in (1, 7, 17):
        cache, start = cache_init(cfg, 3, context=17, chunk=chunk, dtype=torch.float64), 0
        while start < 17:
            part = IDS[:, start : start + (chunk if start < 7 else 1)]
            logits, cache = decode(params, donate(cache), part, cfg)
            torch.testing.assert_close(logits, want[:, start : start + part.shape[1]], rtol=0, atol=DECODING)
            start += part.shape[1]
        assert cache.lengths.tolist() == [17, 17, 17]
    cache = cache_init(cfg, 3, context=19, chunk=7, dtype=torch.float64)
    padded = torch.cat((IDS, IDS[:, :4]), 1)  # more columns than the cache has places for
    for start in range(0, 17, 7):
        counts = (LENGTHS - start).clamp(0, 7)
        logits, cache = decode(params, donate(cache), padded[:, start : start + 7], cfg, counts=counts)
        for row, n in enumerate(counts.tolist()):
            torch.testing.assert_close(logits[row, :n], want[row, start : start + n], rtol=0, atol=DECODING)
    assert torch.equal(cache.lengths, LENGTHS)
    more = torch.tensor([[1, 2], [3, 4], [5, 6]])
    for i in range(2):
        logits, cache = decode(params, donate(cache), more[:, i : i + 1], cfg)
    for row, n in enumerate(LENGTHS.tolist()):
        alone = whole(params, cfg, torch.cat((IDS[row : row + 1, :n], more[row : row + 1]), 1))
        torch.testing.assert_close(logits[row, -1], alone[0, -1], rtol=0, atol=DECODING)


def test_triton_reads_a_ring():
    """With a softcap, which no library kernel supports."""
    cfg = dataclasses.replace(LLAMA, layers=1, softcap=2.0, windows=(3,))
    params, cache = given(cfg, torch.float32), cache_init(cfg, 3, context=17, chunk=7)
    want = whole(trees.cast(params, torch.float64), cfg)
    with backend("triton"):
        for start, stop in ((0, 7), (7, 14), (14, 15)):
            logits, cache = decode(params, donate(cache), IDS[:, start:stop], cfg)
            assert_close(logits, want[:, start:stop].float(), dtype=torch.float32)


def test_a_cache_stays_where_it_is_and_is_written_to_where_it_is_given_away():
    cfg, ids = MODELS["windows, sinks, a cap, experts"], IDS[:, :5]
    params, cache = given(cfg), cache_init(MODELS["windows, sinks, a cap, experts"], 3, chunk=7, dtype=torch.float64)
    before = [(t.data_ptr(), t.clone()) for t in trees.tensors(cache)]
    logits, other = decode(params, cache, ids, cfg)
    assert [t.data_ptr() for t in trees.tensors(other)] != [at for at, _ in before]
    assert all(torch.equal(t, old) for t, (_, old) in zip(trees.tensors(cache), before, strict=True))
    cell = donate(cache)
    same, after = decode(params, cell, ids, cfg)
    assert torch.equal(same, logits) and [t.data_ptr() for t in trees.tensors(after)] == [at for at, _ in before]
    for used in (cache, cell):
        with pytest.raises(DonatedError, match=r"^decode: cache must be unused, got .* given away with donate\(\)"):
            decode(params, used, ids, cfg)
    sizes = {path: t.shape[2] for path, t in trees.paths(after).items() if path.endswith(".k")}
    assert sorted(sizes.values()) == [9, 9, 32, 32]  # a window of 3, chunks of 7


def test_bad_calls_raise_by_name_before_anything_changes():
    params, cache = given(LLAMA), cache_init(LLAMA, 3, context=6, chunk=4, dtype=torch.float64)
    _, cache = decode(params, cache, IDS[:, :4], LLAMA)
    wrong = dataclasses.replace(
        cache, layers={**cache.layers, "blocks.1": KVCache(*[t[:, :, :5] for t in trees.tensors(cache.layers["blocks.1"])])}
    )
    narrow = dataclasses.replace(cache, layers={**cache.layers, "blocks.1": trees.cast(cache.layers["blocks.1"], torch.float32)})
    less = dataclasses.replace(cache, layers={"blocks.0": cache.layers["blocks.0"]})
    lengths = torch.tensor([2, 1, 3])
    for match, other, ids, options in (
        (r"cache must be of a context of at least 7, got one of 6", cache, IDS[:, :3], {}),
        (r"cache must be of a context of at least 7, got one of 6", cache, IDS[:, :3], {"counts": lengths}),
        (r"cache.lengths must be \[2\], got \[3\]", cache, IDS[:2, :1], {}),
        (r"ids must be \[3, T\] with T from 1 to the cache's chunk, 4, got \[3, 5\]", cache, IDS[:, :5], {}),
        (r"ids must be \[3, T\] with T from 1 to the cache's chunk, 4, got \[3, 0\]", cache, IDS[:, :0], {}),
        (r"cache.layers.blocks.1.k must be \[3, 1, 6, 4\], got \[3, 1, 5, 4\]", wrong, IDS[:, :1], {}),
        (r"cache.layers.blocks.1.k must be float64, got float32", narrow, IDS[:, :1], {}),
        (r"cache.layers must be a dict of the layers blocks.0, blocks.1, .*, got dict", less, IDS[:, :1], {}),
        (r"counts must be from 0 to 1, as ids has, got \[2, 1, 3\]", cache, IDS[:, :1], {"counts": lengths}),
        (r"counts must be \[3\], got \[2\]", cache, IDS[:, :1], {"counts": lengths[:2]}),
    ):
        marks = [t._version for t in trees.tensors(other)]
        with pytest.raises((ValueError, TypeError), match="^decode: " + match):
            decode(params, donate(dataclasses.replace(other)), ids, LLAMA, **options)
        assert [t._version for t in trees.tensors(other)] == marks
    with pytest.raises(ValueError, match="^cache_init: context must be at most 32, as many positions as are learned, got 33"):
        cache_init(MODELS["learned positions"], 1, context=33)
    for cfg, match in (
        (AttentionConfig(), "causal must be True"),
        (AttentionConfig(causal=True, packed=True), "packed must be False"),
    ):
        with pytest.raises(ValueError, match=f"^with_cache: attention.{match}"):
            with_cache(ChainConfig(steps=(Step("mix", attention, cfg),)))
    with pytest.raises(ValueError, match="cached_attention_fwd: needs must be Needs.NONE"):
        chain.fwd(
            {"mix": CachedParams()},
            WithExtras((Q, KEYS, VALUES), {"cache": {}}),
            with_cache(ChainConfig(steps=(Step("mix", attention, AttentionConfig(causal=True)),))),
        )


@pytest.mark.parametrize("capacity", [0.5, 1.0, 8.0])
@pytest.mark.parametrize("given", ["cfg", "model"])
def test_a_capacity_is_refused_as_it_would_depend_on_the_chunks(capacity, given):
    plain = next(cfg for cfg in MODELS.values() if cfg.moe is not None)
    route = dataclasses.replace(plain.moe.route, capacity=capacity)
    dropping = dataclasses.replace(plain, moe=dataclasses.replace(plain.moe, route=route))
    params, cache = chain.init(decoder(plain), key=random.key(0)), cache_init(plain, 3, chunk=4)
    cfg, model = (dropping, None) if given == "cfg" else (plain, decoder(dropping))
    said = rf"{given} must be of a blocks\S*route.capacity of None, as an expert's room depends on .*, got {capacity}"
    with pytest.raises(ValueError, match=f"^decode: {said}"):
        decode(params, cache, IDS[:, :1], cfg, model=model)
    with pytest.raises(ValueError, match=f"^generate: {said}"):
        generate(params, cfg, IDS[:, :2], 1, model=model)


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_waits_for_nothing(name):
    cfg = MODELS[name]
    cache = cache_init(cfg, 3, chunk=4)

    def step(params, cache, ids, counts, key):
        logits, cache = decode(params, donate(cache), ids, cfg, counts=counts)
        return sample(logits[:, -1], key, SamplingConfig(temperature=0.5, top_k=5, top_p=0.9)), cache

    params = given(cfg, torch.float32)
    assert check_capturable(step, params, cache, IDS[:, :4], LENGTHS.clamp(0, 4), random.key(0)) == []


def test_a_captured_step_goes_on_with_its_cache():
    """The cache is donated at every call and stays at its address, until it is full."""
    cfg = MODELS["windows, sinks, a cap, experts"]
    params = given(cfg)

    def step(params, cache, token):
        logits, cache = decode(params, donate(cache), token, cfg)
        return logits[:, -1:].argmax(-1), cache

    want = torch.stack(list(generate(params, cfg, IDS, 5)), 1)
    logits, cache = decode(params, cache_init(cfg, 3, context=21, chunk=17, dtype=torch.float64), IDS, cfg)
    token = logits[:, -1:].argmax(-1)
    captured, found = graphed(step, params, cache, token, inputs={"0": "pinned", "1": "donated"}), [token]
    assert cache.lengths.tolist() == [17, 17, 17]
    for _ in range(4):
        token, cache = captured(params, cache, token)
        found.append(token)
    assert torch.equal(torch.cat(found, 1), want) and cache.lengths.tolist() == [21, 21, 21]
    with pytest.raises(RuntimeError, match="decode: cache must be of a longer context than 21"):
        captured(params, cache, token)


@pytest.mark.turns("name", every=2)
@pytest.mark.parametrize("name", MODELS)
def test_a_stream_is_the_likeliest_token_after_each_prompt(name):
    """Rows of several lengths go on as each would alone, by whole forwards."""
    cfg = MODELS[name]
    params = given(cfg)
    got = torch.stack(list(generate(params, cfg, IDS, 4, lengths=LENGTHS, chunk=5)), 1)
    for row, n in enumerate(LENGTHS.tolist()):
        ids = IDS[row : row + 1, :n]
        for _ in range(4):
            ids = torch.cat((ids, whole(params, cfg, ids)[:, -1:].argmax(-1)), 1)
        assert torch.equal(got[row], ids[0, n:])


@pytest.mark.parametrize("targets", [["*.q.proj", "*.v.proj"], ["embed"], ["embed", "head", "*.up"]], ids=str)
def test_a_stream_of_a_model_with_adapters(targets):
    model = lora.with_lora(decoder(LLAMA), 2, targets)
    params = trees.tree_map_tensors(lambda t: t + 0.1, chain.init(model, key=random.key(0), dtype=torch.float64))
    got = torch.stack(list(generate(params, LLAMA, IDS, 4, model=model)), 1)
    ids = IDS
    for _ in range(4):
        y, _ = chain.fwd(params, decoder_x(LLAMA, ids, torch.float64), model, needs=Needs.NONE)
        ids = torch.cat((ids, y[:, -1:].argmax(-1)), 1)
    assert torch.equal(got, ids[:, 17:])


def test_a_stream_of_a_model_in_low_precision():
    """Weights in codes, beside a norm and an embedding that are not; a weight of another shape is named before the first token."""
    cfg = dataclasses.replace(LLAMA, dim=32, kv_heads=2, head_size=16, hidden=32, layers=1, rope=RopeConfig(16))
    model = with_recipe(decoder(cfg), MXFP8(), only=("blocks.*",))
    work = quantize_params(given(cfg, torch.float32), model, dtype=torch.float32, columns=False)
    ids = IDS
    for _ in range(4):
        y, _ = chain.fwd(work, decoder_x(cfg, ids, torch.float32), model, needs=Needs.NONE)
        ids = torch.cat((ids, y[:, -1:].argmax(-1)), 1)
    assert torch.equal(torch.stack(list(generate(work, cfg, IDS, 4, chunk=5, model=model)), 1), ids[:, 17:])
    wrong = trees.put(work, "blocks.0.mlp.up.weight", trees.at(work, "blocks.0.mlp.down.weight"))
    match = r"^generate: params.blocks.0.mlp.up.weight must be \[64, 32\] on cpu, got \[32, 32\] on cpu"
    with pytest.raises(ValueError, match=match):
        generate(wrong, cfg, IDS, 4, model=model)


def test_a_model_with_other_windows_than_the_config_is_refused():
    cfg = dataclasses.replace(LLAMA, windows=(3, None, 3, None))
    match = r"model must be made of decoder\(cfg\), whose layers have windows \[3, None, 3, None\], got \[None, None, None, None\]"
    with pytest.raises(ValueError, match="^generate: " + match):
        generate(given(cfg), cfg, IDS, 4, model=decoder(LLAMA))
    with pytest.raises(ValueError, match="^decode: " + match):
        decode(given(cfg), cache_init(cfg, 3, dtype=torch.float64), IDS, cfg, model=decoder(LLAMA))


def test_a_stream_is_of_its_key():
    params, cfg = given(LLAMA), SamplingConfig(temperature=1.0)

    def drawn(seed, tokens):
        return torch.stack(list(generate(params, LLAMA, IDS, tokens, key=random.key(seed), sampling=cfg)), 1)

    assert torch.equal(drawn(0, 6)[:, :3], drawn(0, 3)) and not torch.equal(drawn(0, 6), drawn(1, 6))
    with pytest.raises(TypeError, match="^generate: key must be a key, random.key"):
        generate(params, LLAMA, IDS, 3, sampling=cfg)


def test_tokens_come_as_often_as_their_probabilities_say():
    """Over many rows of the same logits each count is within five standard deviations; filtered tokens never come."""
    logits = torch.tensor([2.0, 0.5, 1.0, -1.0, 1.0, -3.0])
    rows = 20000
    p = torch.softmax(logits.double() / 0.8, 0)
    two, mass = p * torch.tensor([1, 0, 1, 0, 0, 0]), p * torch.tensor([1, 0, 1, 0, 1, 0])
    for cfg, kept in (
        (SamplingConfig(temperature=0.8), p),
        (SamplingConfig(temperature=0.8, top_k=2), two),
        (SamplingConfig(temperature=0.8, top_p=float(p[0] + p[2] + p[4]) - 1e-6), mass),
        (SamplingConfig(temperature=0.8, top_k=3, top_p=0.75), two),
        (SamplingConfig(temperature=0.8, top_k=9, top_p=1.0), p),
        (SamplingConfig(), torch.eye(6)[0]),
    ):
        counts = torch.bincount(sample(logits.expand(rows, -1), random.key(3), cfg), minlength=6)
        share = kept.double() / kept.sum()
        assert torch.all((counts - rows * share).abs() <= 5 * (rows * share * (1 - share)).sqrt()), cfg


ODD_ROWS = {
    "nan": [0.0, torch.nan, 1.0],
    "all nan": [torch.nan] * 3,
    "inf": [0.0, torch.inf, 1.0],
    "two infs": [torch.inf, 0.0, torch.inf],
    "-inf": [-torch.inf, 0.0, -torch.inf],
    "all -inf": [-torch.inf] * 3,
    "both": [torch.inf, -torch.inf, 0.0],
    "nan and inf": [torch.nan, torch.inf, 0.0],
    "huge": [3e38, -3e38, 3e38],
    "equal": [1.0, 1.0, 1.0],
    "one": [2.0],
}
TEMPERATURES = (0.0, 5e-324, 1e-300, 1e-30, 1.0, 1e30, 3e38)
FILTERS = ({}, {"top_k": 2}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9}, {"top_p": 1e-300})


@pytest.mark.turns("dtype", "temperature")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("row", ODD_ROWS)
def test_a_sampled_token_is_one_that_can_come_next(row, temperature, dtype):
    """For every row, temperature and filter: one of the highest ids in the limit, otherwise an id whose probability is not 0."""
    logits = torch.tensor([ODD_ROWS[row]]).to(dtype)
    possible = {i for i, value in enumerate(logits[0].tolist()) if value == value and value > -torch.inf}
    refused = bool(logits.isnan().any()) or not possible
    for options in FILTERS:
        if options and not temperature:
            continue  # refused: they have no effect
        cfg = SamplingConfig(temperature=temperature, **options)
        for seed in range(4):
            if refused:
                with pytest.raises(ValueError, match=r"^sample: logits must be (without NaN|above -inf)"):
                    sample(logits, random.key(seed), cfg)
            else:
                (token,) = sample(logits, random.key(seed), cfg).tolist()
                highest = {i for i in possible if logits[0, i] == logits[0].max()}
                assert token in (highest if temperature <= 1e-30 or torch.inf in logits[0].tolist() else possible)
            (token,) = recorded(logits, seed, cfg).tolist()
            assert token in (possible or range(logits.shape[1]))


def recorded(logits, seed, cfg):
    """Sample under a dispatch mode, as when calls are recorded, so that no value is read."""

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with Seen():
        return sample(logits, random.key(seed), cfg)
