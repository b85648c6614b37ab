"""Linear attention in a decoder: Hugging Face's tokens from a cache, what a cache holds, and what is refused."""

import dataclasses
import re

import pytest
import torch
from tiny_hf import Wide, edited, saved, tiny

from funcops import (
    CausalConv1dConfig,
    ExpertsConfig,
    GatedDeltaRuleConfig,
    Needs,
    RopeConfig,
    RouteConfig,
    WithExtras,
    chain,
    donate,
    random,
)
from funcops.engine.errors import CheckpointError
from funcops.engine.trees import paths, tensors
from funcops.models import (
    DecoderConfig,
    LatentConfig,
    LinearAttentionConfig,
    MoEConfig,
    cache_init,
    decode,
    decoder,
    decoder_x,
    from_hf,
    generate,
    layer_paths,
    to_hf,
)
from funcops.models.cache import Cache, slots
from funcops.models.recurrent_cache import (
    CachedConvConfig,
    CachedConvParams,
    CachedDeltaRuleConfig,
    CachedState,
    cached_conv,
    cached_delta_rule,
)
from funcops.testing.tolerances import DECODING

IDS = torch.randint(1, 48, (2, 9), generator=torch.Generator().manual_seed(4))
LINEAR = LinearAttentionConfig(key_heads=1, value_heads=3, key_size=4, value_size=2, width=3, layers=(0, 2))
SIZES = dict(vocab=31, dim=8, layers=3, heads=2, kv_heads=1, head_size=4, hidden=6, context=32, rope=RopeConfig(4))
CFG = DecoderConfig(**SIZES, linear=LINEAR, attention_gate=True)


def test_greedy_tokens_are_hugging_faces(tmp_path):
    """From its own cache: chunks of the gated delta rule for the prompt, then its recurrence."""
    with Wide():
        model = tiny("qwen3_next", torch.float64)
        model.save_pretrained(tmp_path)
        want = model.generate(IDS, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)[:, IDS.shape[1] :]
    params, cfg = from_hf(tmp_path)
    for chunk in (4, 256):
        assert torch.equal(torch.stack(list(generate(params, cfg, IDS, 12, chunk=chunk)), 1), want)


def drawn(seed):
    draw = torch.Generator().manual_seed(seed)

    def one_of(*values):
        return values[int(torch.randint(len(values), (), generator=draw))]

    keys = one_of(1, 2, 3)
    sizes = dict(key_heads=keys, value_heads=keys * one_of(1, 2), key_size=one_of(1, 3), value_size=one_of(1, 4))
    linear = LinearAttentionConfig(**sizes, width=one_of(1, 2, 4), layers=one_of((0,), (1, 2), (0, 1)))
    windows = tuple(None if i in linear.layers else 3 for i in range(3)) if one_of(True, False) else ()
    options = dict(windows=windows, attention_gate=one_of(True, False), sinks=one_of(True, False))
    sparse = MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 8, 6), shared=5, shared_gate=True)
    return dataclasses.replace(CFG, linear=linear, moe=one_of(None, sparse), zero_centered=one_of(True, False), **options)


@pytest.mark.turns("seed", every=3)
@pytest.mark.parametrize("seed", range(12))
def test_decoding_gives_the_logits_of_the_whole(seed):
    """In parts of several lengths; and with padding, which leaves every state as it is."""
    cfg = drawn(seed)
    params = chain.init(decoder(cfg), key=random.key(seed), dtype=torch.float64)
    ids = torch.randint(0, 31, (3, 11), generator=torch.Generator().manual_seed(seed))
    y, _ = chain.fwd(params, decoder_x(cfg, ids, torch.float64), decoder(cfg), needs=Needs.NONE)
    want = y.main if type(y) is WithExtras else y
    cache, counts = cache_init(cfg, 3, context=14, chunk=5, dtype=torch.float64), torch.tensor([5, 0, 2])
    _, cache = decode(params, donate(cache), ids[:, :5], cfg, counts=counts)
    done = counts.clone()
    while int(done.min()) < 11:
        n = (11 - done).clamp_max(3)
        part = ids.gather(1, (done.unsqueeze(1) + torch.arange(3)).clamp_max(10))
        logits, cache = decode(params, donate(cache), part, cfg, counts=n)
        for row in range(3):
            at = slice(int(done[row]), int(done[row] + n[row]))
            torch.testing.assert_close(logits[row, : n[row]], want[row, at], rtol=0, atol=DECODING)
        done += n
    assert cache.lengths.tolist() == [11] * 3


def test_a_cache_has_states_in_float32_and_does_not_grow():
    for context in (16, 1024):
        cache = cache_init(CFG, 2, context=context, chunk=4, dtype=torch.bfloat16)
        held = paths(cache.layers[layer_paths(CFG)[0]])
        assert {name: list(t.shape) for name, t in held.items()} == {
            "q": [2, 2, 4],
            "k": [2, 2, 4],
            "v": [2, 2, 6],
            "state": [2, 3, 4, 2],
        }
        assert {t.dtype for name, t in held.items() if name != "state"} == {torch.bfloat16}
        assert held["state"].dtype is torch.float32
    params = chain.init(decoder(CFG), key=random.key(0), dtype=torch.bfloat16)
    _, after = decode(params, cache, IDS[:, :4] % 31, CFG)
    _, cache = decode(params, donate(cache), IDS[:, :4] % 31, CFG)
    assert all(torch.equal(a, b) for a, b in zip(tensors(cache), tensors(after), strict=True))
    assert after.layers[layer_paths(CFG)[0]].state.dtype is torch.float32


def test_bad_calls_raise_by_name():
    other = dataclasses.replace(CFG, linear=dataclasses.replace(LINEAR, layers=(0,)))
    cache, params = cache_init(CFG, 2, dtype=torch.float64), chain.init(decoder(CFG), key=random.key(0), dtype=torch.float64)
    first = layer_paths(CFG)[0]
    narrow = dataclasses.replace(
        cache, layers={**cache.layers, first: dataclasses.replace(cache.layers[first], state=torch.zeros(2, 3, 4, 2))}
    )
    wrong = {
        "key_heads must be a number that divides value_heads, 3, got 2": lambda: dataclasses.replace(LINEAR, key_heads=2),
        "layers must be a tuple of different numbers of layers, got (0, 0)": lambda: dataclasses.replace(LINEAR, layers=(0, 0)),
        "linear.layers must be some of layers 0..1, and not all, got (0, 2)": lambda: dataclasses.replace(CFG, layers=2),
        "linear.layers must be layers without a window or chunk": lambda: dataclasses.replace(CFG, windows=(3, None, None)),
        "packed must be False for a config with linear attention": lambda: decoder(CFG, packed=True),
        "cache.layers must be a dict of the layers": lambda: decode(params, cache, IDS % 31, other),
        f"cache.layers.{first}.state must be float64, got float32": lambda: decode(params, narrow, IDS % 31, CFG),
        "needs must be Needs.NONE": lambda: cached_delta_rule.fwd(
            CachedState(torch.zeros(1)), (None, {}), CachedDeltaRuleConfig(of=GatedDeltaRuleConfig()), needs=Needs.ALL
        ),
    }
    for said, call in wrong.items():
        with pytest.raises((ValueError, TypeError)) as error:
            call()
        assert said in str(error.value), error.value
    latent = LatentConfig(kv_rank=2, rope_size=4, plain_size=2, value_size=2)
    for options in ({}, {"attention_gate": False}, {"linear": None}):
        with pytest.raises(ValueError, match="latent must be None with attention_gate or linear"):
            dataclasses.replace(CFG, latent=latent, **options)


def test_a_config_without_such_layers_and_unknown_kinds_are_refused(tmp_path):
    saved("qwen3_next", tmp_path / "hf")
    params, cfg = from_hf(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"^to_hf: cfg.linear must be a LinearAttentionConfig, for family 'qwen3_next', got None"):
        to_hf(params, dataclasses.replace(cfg, linear=None), tmp_path / "ours")
    edited(tmp_path / "hf", layer_types=["linear_attention", "sliding_attention", "full_attention"])
    with pytest.raises(ValueError, match="layer_types must be of 'linear_attention' and 'full_attention', got 'sliding_attention'"):
        from_hf(tmp_path / "hf")
    edited(tmp_path / "hf", layer_types=["linear_attention", "full_attention", "full_attention"])
    with pytest.raises(CheckpointError, match="missing: model.layers.2.self_attn.q_proj.weight"):
        from_hf(tmp_path / "hf")


def at_once(tokens):
    """Slots of that many tokens of two rows."""
    return slots(Cache({}, torch.zeros(2, dtype=torch.int64), context=8, chunk=4), tokens, None, (None,))


def convolved(shape=(2, 1, 3), weight=(3, 4), dtype=torch.float32, of=None, needs=Needs.NONE, device="cpu"):
    """A convolution of one token, with another input or weight, of another dtype or device."""
    of = torch.float32 if of is None else of
    params = CachedConvParams(torch.zeros(weight, dtype=of), torch.zeros(3, dtype=of), torch.zeros(2, 3, 3))
    x = torch.zeros(shape, dtype=dtype, device=device)
    return cached_conv.fwd(params, (x, at_once(1)), CachedConvConfig(of=CausalConv1dConfig(3)), needs=needs)


def ruled(batch=2, tokens=1, value=3, heads=2):
    """The gated delta rule of one token of two rows, with other sizes."""
    q, v, g = torch.ones(batch, tokens, 1, 4), torch.ones(batch, tokens, heads, value), torch.zeros(batch, tokens, heads)
    state = CachedState(torch.zeros(2, 2, 4, 3))
    cfg = CachedDeltaRuleConfig(of=GatedDeltaRuleConfig())
    return cached_delta_rule.fwd(state, ((q, q, v, g, g), at_once(1)), cfg, needs=Needs.NONE)


WRONG_INPUTS = {
    "with_cache: convolution must be CausalConv1dConfig, got 3": lambda: CachedConvConfig(of=3),
    "with_cache: gated_delta_rule must be GatedDeltaRuleConfig, got None": lambda: CachedDeltaRuleConfig(of=None),
    "cached_conv_fwd: needs must be Needs.NONE: a cache that is": lambda: convolved(needs=Needs.ALL),
    "cached_conv_fwd: x.0, as the cache, must be [2, 1, 3], got [2, 2, 3]": lambda: convolved((2, 2, 3)),
    "cached_conv_fwd: x.0, as the cache, must be float32, got float64": lambda: convolved(dtype=torch.float64),
    "cached_conv_fwd: x.0, as the cache, must be on device cpu, got meta": lambda: convolved(device="meta"),
    "cached_conv_fwd: params.weight must be [3, 4], got [3, 5]": lambda: convolved(weight=(3, 5)),
    "cached_conv_fwd: params.weight must be float32, got bfloat16": lambda: convolved(of=torch.bfloat16),
    "cached_delta_rule_fwd: x.2 (v), as the cache, must be [2, 1, 2, 3], got [1, 1, 2, 3]": lambda: ruled(batch=1),
    "cached_delta_rule_fwd: x.2 (v), as the cache, must be [2, 1, 2, 3], got [2, 2, 2, 3]": lambda: ruled(tokens=2),
    "cached_delta_rule_fwd: x.2 (v), as the cache, must be [2, 1, 2, 3], got [2, 1, 2, 5]": lambda: ruled(value=5),
    "cached_delta_rule_fwd: x.2 (v), as the cache, must be [2, 1, 2, 3], got [2, 1, 3, 3]": lambda: ruled(heads=3),
}


@pytest.mark.parametrize("said", WRONG_INPUTS)
def test_a_wrong_input_beside_a_state_is_refused_by_its_name(said):
    assert convolved()[0].shape == (2, 1, 3) and ruled()[0].shape == (2, 1, 2, 3)
    with pytest.raises((ValueError, TypeError), match="^" + re.escape(said)):
        WRONG_INPUTS[said]()
