"""Ropes that depend on the longest sequence (dynamic, LongRoPE): T is used if it is known, and nothing is guessed."""

import copy
import math

import pytest
import torch
from tiny_hf import BASE, LONG, YARN, transformers

from funcops import DynamicScaling, LongRopeScaling, RopeConfig, chain, donate, random
from funcops.models import DecoderConfig, cache_init, decode, decoder, decoder_x, from_hf, generate
from funcops.testing.tolerances import HF_LOGITS

ORIGINAL = 16
DYNAMIC = dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)
KINDS = {  # `known`: whether it turns one way, whatever the length
    "longrope": ("phi3", dict(rope_parameters=LONG, original_max_position_embeddings=ORIGINAL), False),
    "dynamic": ("llama", dict(rope_parameters=DYNAMIC, max_position_embeddings=ORIGINAL), False),
    "yarn": ("llama", dict(rope_parameters=YARN), True),
    "linear": ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=100.0, factor=2.0)), True),
    "default": ("llama", {}, True),
}
EACH = [pytest.param(name, marks=pytest.mark.slow if known else ()) for name, (_, _, known) in KINDS.items()]
LENGTHS = (3, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL, 3 * ORIGINAL + 1)


def ids(tokens):
    return torch.randint(1, 48, (2, tokens), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}
    for name, (kind, options, _) in KINDS.items():
        torch.manual_seed(0)
        own = transformers.AutoConfig.for_model(kind, **copy.deepcopy({**BASE, **options, "num_hidden_layers": 1}))
        model = transformers.AutoModelForCausalLM.from_config(own, attn_implementation="eager").eval()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(4.0 if p.dim() > 1 else 1.0)  # attention far from even, so that a turn of q and k is seen
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        made[name] = model, *from_hf(folder)
    return made


def theirs(model, given):
    """Logits of a model that has seen nothing longer: Hugging Face's dynamic frequencies stay scaled until a short input comes."""
    with torch.no_grad():
        model(given[:, :1])
        return model(given, use_cache=False).logits


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("positions", [False, True], ids=["", "positions"])
def test_a_forward_turns_by_the_length_that_it_is_given(name, tokens, positions, models):
    model, params, cfg = models[name]
    given = ids(tokens)
    x = decoder_x(cfg, given, torch.float32, positions=torch.arange(tokens) if positions else None)
    y, _ = chain.fwd(params, x, decoder(cfg))
    torch.testing.assert_close(y, theirs(model, given), atol=10 * HF_LOGITS, rtol=1e-4)


@pytest.mark.parametrize("tokens", [1, 4, ORIGINAL])
@pytest.mark.parametrize("prompt", LENGTHS)
@pytest.mark.parametrize("name", EACH)
def test_generated_tokens_are_hugging_faces_or_refused(name, prompt, tokens, models):
    model, params, cfg = models[name]
    given, longest = ids(prompt), prompt + tokens - 1
    crosses = not KINDS[name][2] and longest > ORIGINAL and not (name == "longrope" and prompt > ORIGINAL)
    if crosses:
        with pytest.raises(ValueError, match=rf"^generate: cfg must be of a rope that knows .*, length={longest}\)"):
            generate(params, cfg, given, tokens)
        return
    found = torch.stack(list(generate(params, cfg, given, tokens, chunk=7)), 1)
    theirs(model, given)
    want = model.generate(given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
    assert found.equal(want[:, prompt:])


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("name", EACH)
def test_decoding_goes_up_to_the_original_context_or_raises(name, tokens, models):
    model, params, cfg = models[name]
    given, cache = ids(tokens), cache_init(cfg, 2, context=4 * ORIGINAL, chunk=5)
    parts, most = given.split(5, 1), ORIGINAL if not KINDS[name][2] else 4 * ORIGINAL
    found = []
    for part in parts:
        before = cache.lengths.clone()
        if int(before[0]) + part.shape[1] > most:
            with pytest.raises(ValueError, match=r"^decode: cfg must be of a rope .* length=64\), got position \d+ beyond"):
                decode(params, cache, part, cfg)
            assert cache.lengths.equal(before)
            break
        logits, cache = decode(params, donate(cache), part, cfg)
        found.append(logits)
    if found:
        got = torch.cat(found, 1)
        torch.testing.assert_close(got, theirs(model, given[:, : got.shape[1]]), atol=10 * HF_LOGITS, rtol=1e-4)


FACTORS = dict(short_factor=(1.0, 2.0), long_factor=(3.0, 5.0), factor=4.0)
ROPES = {
    "plain": RopeConfig(4),
    "dynamic 8": RopeConfig(4, scaling=DynamicScaling(factor=4.0, original_context=8)),
    "dynamic 20": RopeConfig(4, scaling=DynamicScaling(factor=4.0, original_context=20)),
    "longrope 8": RopeConfig(4, scaling=LongRopeScaling(**FACTORS, original_context=8)),
    "longrope 20": RopeConfig(4, scaling=LongRopeScaling(**FACTORS, original_context=20)),
}


@pytest.mark.parametrize("windows", [(5, None), (None, None)], ids=str)
@pytest.mark.parametrize("local", ROPES)
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.turns("rope", "local", "windows", every=10)
def test_each_of_two_ropes_turns_as_in_a_forward_or_is_refused(rope, local, windows):
    """A layer with a window has a rope of its own, with a limit of its own; without such a layer it limits nothing."""
    sizes = dict(vocab=31, dim=16, layers=2, heads=4, kv_heads=2, head_size=4, hidden=12, context=64)
    cfg = DecoderConfig(**sizes, windows=windows, rope=ROPES[rope], local_rope=ROPES[local])
    params, given = chain.init(decoder(cfg), key=random.key(0), dtype=torch.float64), ids(12)[:, :12] % 31
    ends = [int(name.split()[1]) for name in (rope, *((local,) if any(windows) else ())) if name != "plain"]
    most = min(ends, default=64)
    cache, tokens = cache_init(cfg, 2, context=32, chunk=4, dtype=torch.float64), min(most, 12)
    for start in range(0, tokens, 4):
        logits, cache = decode(params, donate(cache), given[:, start : start + 4], cfg)
        want, _ = chain.fwd(params, decoder_x(cfg, given[:, : start + 4], torch.float64), decoder(cfg))
        torch.testing.assert_close(logits, want[:, start:], rtol=0, atol=1e-12)
    if tokens == most:
        with pytest.raises(ValueError, match="^decode: cfg must be of a rope that knows the longest sequence"):
            decode(params, cache, given[:, :1], cfg)
        with pytest.raises(ValueError, match="^generate: cfg must be of a rope that knows the longest sequence"):
            generate(params, cfg, given[:, :most], 2)
    found, known = torch.stack(list(generate(params, cfg, given[:, :4], 4)), 1), given[:, :4]
    for _ in range(4):
        logits, _ = chain.fwd(params, decoder_x(cfg, known, torch.float64), decoder(cfg))
        known = torch.cat((known, logits[:, -1:].argmax(-1)), 1)
    assert found.equal(known[:, 4:])


def test_positions_that_cannot_be_read_need_a_length(models):
    _, _, cfg = models["longrope"]
    meta = torch.empty(2, 4, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match=r"^decoder_x: length must be given \(the rope of cfg depends on the longest sequence"):
        decoder_x(cfg, meta, torch.float32, positions=meta[0])
    assert decoder_x(cfg, meta, torch.float32, positions=meta[0], length=9).extras["rotation"].device.type == "meta"
    assert decoder_x(models["default"][2], meta, torch.float32, positions=meta[0]).extras["rotation"].device.type == "meta"


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "x", True], ids=repr)
def test_a_length_is_a_count(wrong, models):
    with pytest.raises((ValueError, TypeError), match=r"^decoder_x: length must be"):
        decoder_x(models["longrope"][2], ids(3), torch.float32, length=wrong)


def test_a_given_attention_factor_is_the_tables():
    """Phi 3's config.json may give it; else it is the paper's."""
    factors = dict(short_factor=(1.0, 1.0), long_factor=(4.0, 4.0), factor=32.0, original_context=4096)
    assert LongRopeScaling(**factors, attention_factor=1.25).table_factor() == 1.25
    assert LongRopeScaling(**factors).table_factor() == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
