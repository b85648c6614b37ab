"""Tokens that end a row, penalties and filters against Hugging Face's, and caches that go back."""

import dataclasses
import importlib
import math
from random import Random

import pytest
import torch
from test_decode import IDS, LENGTHS, LLAMA, MODELS, given, whole
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from funcops import DonatedError, donate, random
from funcops.engine.trees import tree_map_tensors
from funcops.models import Cache, SamplingConfig, cache_init, decode, generate, roll_back, sample
from funcops.testing.tolerances import DECODING

decoding = importlib.import_module("funcops.models.decode")
FILTERS = [{"min_p": 0.3}, {"min_p": 1.0}, {"min_p": 0.0}, {"top_k": 4, "min_p": 0.2}, {"top_p": 0.7, "min_p": 0.5}]
FILTERS += [{"top_k": 3, "top_p": 0.9, "min_p": 0.1}, {"min_p": 0.9, "top_p": 0.2}]
PENALTIES = (0.5, 1.3, 3.0)


def theirs(logits, cfg, ids=None):
    """The probabilities after Hugging Face's own processors, in their order."""
    if cfg.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(cfg.repetition_penalty)(ids, logits)
    logits = TemperatureLogitsWarper(cfg.temperature)(None, logits)
    for value, warper in ((cfg.top_k, TopKLogitsWarper), (cfg.top_p, TopPLogitsWarper), (cfg.min_p, MinPLogitsWarper)):
        logits = logits if value is None else warper(value)(None, logits)
    return logits.softmax(-1)


def occurred(ids, vocab):
    return torch.zeros(len(ids), vocab, dtype=torch.bool).scatter(1, ids, True)


@pytest.mark.parametrize("penalty", [1.0, *PENALTIES])
@pytest.mark.parametrize("given_filters", [{}, *FILTERS], ids=str)
def test_tokens_come_as_often_as_hugging_faces_probabilities_say(given_filters, penalty):
    """Within five standard deviations over many rows; a token that is filtered never comes."""
    cfg = SamplingConfig(temperature=0.8, repetition_penalty=penalty, **given_filters)
    logits = torch.tensor([[2.0, 0.5, 1.0, -1.0, 0.9, -3.0, 1.1]], dtype=torch.float64)
    ids = torch.tensor([[0, 3, 4]])
    p, rows = theirs(logits, cfg, ids)[0], 20000
    seen = occurred(ids, 7).expand(rows, -1) if penalty != 1 else None
    counts = torch.bincount(sample(logits.expand(rows, -1), random.key(5), cfg, seen), minlength=7)
    assert torch.all((counts - rows * p).abs() <= 5 * (rows * p * (1 - p)).sqrt()), (counts, rows * p)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_stream_penalises_what_has_occurred(penalty):
    """In prompts of several lengths, and in what was generated: the likeliest token after Hugging Face's processor."""
    params = given(LLAMA)
    cfg = SamplingConfig(repetition_penalty=penalty)
    got = torch.stack(list(generate(params, LLAMA, IDS, 6, lengths=LENGTHS, chunk=5, sampling=cfg)), 1)
    for row, n in enumerate(LENGTHS.tolist()):
        ids = IDS[row : row + 1, :n]
        for _ in range(6):
            scores = RepetitionPenaltyLogitsProcessor(penalty)(ids, whole(params, LLAMA, ids)[:, -1])
            ids = torch.cat((ids, scores.argmax(-1, keepdim=True)), 1)
        assert torch.equal(got[row], ids[0, n:])
    plain = torch.stack(list(generate(params, LLAMA, IDS, 6, lengths=LENGTHS)), 1)
    assert not torch.equal(got, plain)


@pytest.mark.turns("drawn", "name", every=4)
@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "top_k": 9, "repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_rows_that_have_ended_cost_nothing_and_change_nothing(name, drawn, monkeypatch):
    """Until its end a row is as without `stop`, then it repeats the id; steps take the other rows alone; the last end is the
    iterator's."""
    cfg, steps, step = MODELS[name], [], decoding._step
    params, options = given(cfg), dict(lengths=LENGTHS, chunk=5, key=random.key(3), sampling=SamplingConfig(**drawn))
    free = torch.stack(list(generate(params, cfg, IDS, 12, **options)), 1)
    monkeypatch.setattr(decoding, "_step", lambda *args: steps.append(len(args[2])) or step(*args))
    for stop in ((int(free[0, 2]),), (int(free[1, 0]), int(free[2, 4])), tuple(range(31)), (30,)):
        steps.clear()
        got = torch.stack(list(generate(params, cfg, IDS, 12, stop=stop, **options)), 1)
        ends = [next((i for i, t in enumerate(row) if t in stop), 11) for row in free.tolist()]
        for row, end in enumerate(ends):
            assert torch.equal(got[row, : end + 1], free[row, : end + 1]) and bool((got[row, end:] == free[row, end]).all())
        assert got.shape[1] == max(ends) + 1
        assert steps[4:] == [sum(end > i for end in ends) for i in range(max(ends))]


GOING_BACK = [name for name, cfg in MODELS.items() if cfg.linear is None]


def test_the_state_of_linear_attention_cannot_go_back():
    name = next(name for name in MODELS if name not in GOING_BACK)
    cache = cache_init(MODELS[name], 3, dtype=torch.float64)
    match = r"^roll_back: cache.layers.blocks0.0 must be a KVCache: .* keep the cache before the draft .*, got a RecurrentCache$"
    with pytest.raises(ValueError, match=match):
        roll_back(cache, cache.lengths)


def drafted(params, cfg, draft, prompt, tokens, ahead):
    """Speculative decoding of one sequence: `draft` proposes, the model checks `ahead` tokens at once. Returns tokens and calls."""
    caches = [cache_init(cfg, 1, context=64, chunk=17, dtype=torch.float64) for _ in range(2)]
    _, checked = decode(params, donate(caches[0]), prompt[:, :-1], cfg)
    _, drafting = decode(draft, donate(caches[1]), prompt[:, :-1], cfg)
    found, calls = prompt, 0
    while found.shape[1] < prompt.shape[1] + tokens:
        proposed, n = found[:, -1:], found.shape[1]
        for _ in range(ahead):
            logits, drafting = decode(draft, donate(drafting), proposed[:, -1:], cfg)
            proposed = torch.cat((proposed, logits[:, -1:].argmax(-1)), 1)
        logits, checked = decode(params, donate(checked), proposed, cfg)
        calls, own = calls + 1, logits.argmax(-1)
        right = int((own[:, :-1] == proposed[:, 1:]).long().cumprod(1).sum())
        found = torch.cat((found, own[:, : right + 1]), 1)
        checked = roll_back(donate(checked), torch.tensor([n + right]))
        drafting = roll_back(donate(drafting), torch.tensor([min(n + right, n + ahead - 1)]))
        if right == ahead:
            _, drafting = decode(draft, donate(drafting), proposed[:, -1:], cfg)
    return found[0, prompt.shape[1] :][:tokens], calls


@pytest.mark.turns("ahead", "noise")
@pytest.mark.parametrize("noise", [0.0, 0.02, 3.0])
@pytest.mark.parametrize("ahead", [1, 3, 6])
@pytest.mark.parametrize("name", GOING_BACK)
def test_speculative_decoding_gives_the_likeliest_tokens(name, ahead, noise):
    """Whatever the draft proposes; fewer calls of the model if it proposes well."""
    cfg = MODELS[name]
    cfg = dataclasses.replace(cfg, context=64)
    params = given(cfg)
    generator = torch.Generator().manual_seed(0)
    draft = tree_map_tensors(lambda t: t + noise * torch.randn(t.shape, generator=generator, dtype=t.dtype), params)
    want = torch.stack(list(generate(params, cfg, IDS[:1], 12)), 1)[0]
    got, calls = drafted(params, cfg, draft, IDS[:1], 12, ahead)
    assert torch.equal(got, want) and (noise or calls == math.ceil(12 / (ahead + 1)))


@pytest.mark.turns("chunk", "name", every=3)
@pytest.mark.parametrize("chunk", [1, 4, 17])
@pytest.mark.parametrize("name", GOING_BACK)
def test_a_cache_that_went_back_goes_on_as_if_it_had_not_been_ahead(name, chunk):
    """Rows to lengths of their own, as far back as it goes; then other tokens, one by one."""
    cfg = MODELS[name]
    params, cache = given(cfg), cache_init(cfg, 3, context=19, chunk=chunk, dtype=torch.float64)
    for start in range(0, 17, chunk):
        _, cache = decode(params, donate(cache), IDS[:, start : start + chunk], cfg)
    back = torch.tensor([17, 17 - (chunk + 1) // 2, 17 - min(chunk, 16)])
    before = [t.clone() for t in (cache.lengths, *(layer.k for layer in cache.layers.values()))]
    copied = roll_back(cache, back)
    assert all(map(torch.equal, before, (cache.lengths, *(layer.k for layer in cache.layers.values()))))
    held = cache.lengths.data_ptr()
    given_away = roll_back(donate(cache), back)
    assert given_away.lengths.data_ptr() == held != copied.lengths.data_ptr() and isinstance(given_away, Cache)
    with pytest.raises(DonatedError, match="^roll_back: cache must be unused"):
        roll_back(cache, back)
    more = torch.tensor([[1, 2], [3, 4], [5, 6]])
    for cache in (copied, given_away):
        logits, cache = decode(params, donate(cache), more[:, :1], cfg)
        logits, cache = decode(params, donate(cache), more[:, 1:], cfg)
        for row, n in enumerate(back.tolist()):
            alone = whole(params, cfg, torch.cat((IDS[row : row + 1, :n], more[row : row + 1]), 1))
            torch.testing.assert_close(logits[row, -1], alone[0, -1], rtol=0, atol=DECODING)


@pytest.mark.parametrize("seed", [0, *[pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6)]])
def test_a_ring_that_goes_back_again_and_again(seed):
    """A drawn walk of decoding and going back, also to 0: each step is as if the rest had never been, or is refused."""
    draw, cfg = Random(seed), dataclasses.replace(LLAMA, windows=(4, None, 3, 5), context=40)
    params, known, most = given(cfg), [], 0
    cache = cache_init(cfg, 1, context=40, chunk=5, dtype=torch.float64)
    refused = 0
    for _ in range(40):
        if draw.random() < 0.6:
            back = draw.choice([0, draw.randint(0, len(known)), *[max(0, len(known) - draw.randint(1, 5)) for _ in range(8)]])
            if back and back < most - 5:
                with pytest.raises(ValueError, match=rf"lengths\[0\] must be from {most - 5} to {len(known)}, or 0, got {back}$"):
                    roll_back(cache, torch.tensor([back]))
                refused += back >= len(known) - 5  # by what an earlier call took away
                continue
            cache, known, most = roll_back(cache, torch.tensor([back])), known[:back], most if back else 0
            continue
        new = [draw.randrange(31) for _ in range(min(draw.randint(1, 5), 40 - len(known)))]
        if not new:
            continue
        known, most = known + new, max(most, len(known) + len(new))
        logits, cache = decode(params, cache, torch.tensor([new]), cfg)
        want = whole(params, cfg, torch.tensor([known]))[:, -len(new) :]
        torch.testing.assert_close(logits, want, rtol=0, atol=DECODING)
    assert refused


def rolled(windows, lengths, **options):
    cfg = dataclasses.replace(LLAMA, windows=windows)
    cache = cache_init(cfg, 2, context=20, chunk=4)
    cache.lengths += 9
    return roll_back(cache, lengths, **options)


TWO = torch.tensor([9, 9])
WRONG = {
    "roll_back: lengths[1] must be from 0 to 9, got 10": (ValueError, lambda: rolled((), torch.tensor([9, 10]))),
    "roll_back: lengths[0] must be from 0 to 9, got -1": (ValueError, lambda: rolled((), torch.tensor([-1, 9]))),
    "roll_back: lengths[0] must be from 5 to 9, or 0, got 4": (
        ValueError,
        lambda: rolled((3, None, 3, None), torch.tensor([4, 9])),
    ),
    "roll_back: lengths must be [2], got [3]": (ValueError, lambda: rolled((), torch.tensor([9, 9, 9]))),
    "roll_back: lengths must be int64, got int32": (TypeError, lambda: rolled((), TWO.int())),
    "roll_back: cache must be Cache, got None": (TypeError, lambda: roll_back(None, TWO)),
    "generate: stop must be a sequence of ids from 0 to 30, got '3'": (
        ValueError,
        lambda: generate(given(LLAMA), LLAMA, IDS, 2, stop="3"),
    ),
    "generate: stop must be a sequence of ids from 0 to 30, got (31,)": (
        ValueError,
        lambda: generate(given(LLAMA), LLAMA, IDS, 2, stop=(31,)),
    ),
    "sample: seen must be a tensor [1, 3], got None": (
        TypeError,
        lambda: sample(torch.zeros(1, 3), None, SamplingConfig(repetition_penalty=2.0)),
    ),
    "sample: seen must be [1, 3], got [1, 2]": (
        ValueError,
        lambda: sample(torch.zeros(1, 3), None, SamplingConfig(), torch.zeros(1, 2, dtype=torch.bool)),
    ),
    "SamplingConfig: min_p must be None, or from 0 to 1, got 1.5": (ValueError, lambda: SamplingConfig(min_p=1.5)),
    **{
        f"{name} must be None at temperature 0, which takes the likeliest token: set temperature=1.0, got {value}": (
            ValueError,
            lambda given={name: value}: SamplingConfig(**given),
        )
        for name, value in {"top_k": 4, "top_p": 0.9, "min_p": 0.1}.items()
    },
    "SamplingConfig: repetition_penalty must be above 0, got 0.0": (ValueError, lambda: SamplingConfig(repetition_penalty=0.0)),
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_calls_are_refused_by_name(text):
    error, call = WRONG[text]
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)
