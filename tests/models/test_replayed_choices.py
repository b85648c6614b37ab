"""Experts that a sampler chose, given to the training forward: `decoder(cfg, choices=)`, `generate(choices=True)` and `moe`."""

import re

import pytest
import torch

from funcops import ExpertsConfig, Needs, RopeConfig, RouteConfig, WithExtras, chain, random
from funcops.invariant import with_invariant
from funcops.models import DecoderConfig, MoEConfig, SamplingConfig, decoder, decoder_x, generate, moe, pack
from funcops.models.decoder import choices_of
from funcops.trees import tensors, tree_map_tensors

SIZES = dict(vocab=61, dim=32, layers=4, heads=4, kv_heads=2, head_size=8, hidden=48, context=64)
KINDS = {  # one repeat; a repeat of two layers; three repeats; a dense layer before two
    "alike": {},
    "in turns": dict(windows=(5, None, 5, None)),
    "in groups": dict(windows=(5, None, None, 5)),
    "dense first": dict(dense=(0,)),
}
SCORES = dict(score="sigmoid", bias=True), dict(normalize=False), {}


def model(kind, score=SCORES[2]):
    options = dict(KINDS[kind])
    dense = options.pop("dense", ())
    mixture = MoEConfig(route=RouteConfig(6, 2, **score), experts=ExpertsConfig(6, dim=32, hidden=24), dense=dense)
    return DecoderConfig(**SIZES, rope=RopeConfig(8), moe=mixture, **options)


def given(cfg, dtype=torch.float32):
    """Params in which no router's bias is 0."""
    params = chain.init(decoder(cfg), key=random.key(0), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    return tree_map_tensors(lambda t: t + 0.1 * torch.randn(t.shape, generator=generator).to(t.dtype), params)


def run(params, x, cfg):
    """y, its outputs and the gradients of params by a drawn dy."""
    y, residuals = chain.fwd({**params, "loss": None}, x, cfg)
    dy = torch.rand(y.main.shape, generator=torch.Generator().manual_seed(2))
    return y, chain.bwd(residuals, WithExtras(dy, dict.fromkeys(y.extras)), cfg)[0]


@pytest.mark.turns("score", "dtype", every=6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_routers_own_choices_give_the_bits_of_the_plain_run(kind, score, dtype):
    cfg = model(kind, score)
    params, ids = given(cfg, dtype), torch.randint(0, 61, (2, 9))
    saved = chain.fwd(params, decoder_x(cfg, ids, dtype), decoder(cfg, choices="saved"), needs=Needs.NONE)[0]
    choices = choices_of(saved.extras, cfg)
    assert choices.shape == (2, 9, 3 if kind == "dense first" else 4, 2)
    choices[0, 3:5] = -1  # where the router chooses: the same
    labels = ids.roll(-1, 1)
    want, of_plain = run(params, decoder_x(cfg, ids, dtype, labels=labels), decoder(cfg, loss=True, reduction="none"))
    x = decoder_x(cfg, ids, dtype, labels=labels, choices=choices)
    got, of_replayed = run(params, x, decoder(cfg, loss=True, reduction="none", choices="given"))
    assert all(map(torch.equal, tensors(got), tensors(want)))
    assert all(map(torch.equal, tensors(of_replayed), tensors(of_plain)))
    other = torch.where(choices < 0, choices, (choices + 1) % 6)
    elsewhere, _ = run(
        params, decoder_x(cfg, ids, dtype, labels=labels, choices=other), decoder(cfg, loss=True, reduction="none", choices="given")
    )
    assert not torch.equal(elsewhere.main, want.main)


def dense(params, x, choices, cfg):
    """y of each token through each of its given experts, written out."""
    route, own = cfg.route, params["experts"]
    logits = x @ params["gate"].weight.T
    scores = torch.softmax(logits, -1) if route.score == "softmax" else torch.sigmoid(logits)
    weights = scores.gather(-1, choices)
    weights = weights / weights.sum(-1, keepdim=True) if route.normalize else weights
    rows = []
    for t in range(len(x)):
        parts = []
        for k, e in enumerate(choices[t].tolist()):
            gate, up = (own.up.weight[e] @ x[t]).chunk(2)
            parts.append(weights[t, k] * (own.down.weight[e] @ (torch.nn.functional.silu(gate) * up)))
        rows.append(sum(parts))
    return torch.stack(rows)


@pytest.mark.parametrize("score", SCORES, ids=str)
def test_other_choices_and_all_gradients_are_a_dense_references(score):
    """Choices of the second of three routers, none of which the router would make itself."""
    cfg = MoEConfig(route=RouteConfig(6, 2, replays=1, **score), experts=ExpertsConfig(6, dim=8, hidden=12))
    params, x = chain.init(moe(cfg), key=random.key(0), dtype=torch.float64), torch.randn(11, 8, dtype=torch.float64)
    worst = (-(x @ params["gate"].weight.T)).argsort(-1)[:, 3:5].flip(-1).contiguous()
    choices = torch.stack((torch.zeros_like(worst), worst, torch.zeros_like(worst)), 1)
    y, residuals = chain.fwd(params, WithExtras(x, {"choices": choices}), moe(cfg))
    dy = torch.randn(y.main.shape, dtype=torch.float64)
    dparams, dx = chain.bwd(residuals, WithExtras(dy, dict.fromkeys(y.extras)), moe(cfg))
    names = "gate.weight", "experts.up.weight", "experts.down.weight"
    taken = {
        name: t.clone().requires_grad_()
        for name, t in zip(names, (params["gate"].weight, params["experts"].up.weight, params["experts"].down.weight), strict=True)
    }
    leaf = x.clone().requires_grad_()
    own = {
        **params,
        "gate": params["gate"].__class__(taken[names[0]], None),
        "experts": params["experts"].__class__(
            params["experts"].up.__class__(taken[names[1]], None), params["experts"].down.__class__(taken[names[2]], None)
        ),
    }
    want = dense(own, leaf, worst, cfg)
    of_x, *of_params = torch.autograd.grad(want, (leaf, *taken.values()), dy)
    got = dparams["gate"].weight, dparams["experts"].up.weight, dparams["experts"].down.weight
    assert torch.allclose(y.main, want, atol=1e-12) and torch.allclose(dx.main, of_x, atol=1e-12)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(got, of_params, strict=True))
    assert torch.equal(y.extras["load"], torch.bincount(worst.flatten(), minlength=6).int())
    assert dx.extras["choices"] is None


@pytest.mark.parametrize("stop", [(), tuple(range(0, 61, 5))], ids=["all", "stop"])
@pytest.mark.parametrize("kind", ["alike", "dense first"])
def test_what_generate_saves_gives_the_trainer_the_samplers_bits(kind, stop):
    """Prompts of several lengths are taken in chunks, rows packed in another order; no sampler knows the last token's experts."""
    cfg = model(kind)
    params, lengths = given(cfg), torch.tensor([5, 2, 7])
    sampler, ids = with_invariant(decoder(cfg, choices="saved"), queries=32), torch.randint(0, 61, (3, 7))
    options = dict(key=random.key(4), sampling=SamplingConfig(temperature=3.0), lengths=lengths, chunk=3, stop=stop, model=sampler)
    found = list(generate(params, cfg, ids, 9, **options, log_probabilities=True, entropy=True, choices=True))
    choices = torch.cat([one.choices for one in found], 1)
    assert found[0].choices.shape[1] == 7 and all(one.choices.shape[1] == 1 for one in found[1:])
    rows, given_choices, saved = [], [], []
    for i, n in enumerate(lengths.tolist()):
        assert bool((choices[i, n:7] == -1).all()) and bool((choices[i, :n] >= 0).all())
        tokens = [int(one.tokens[i]) for one in found]
        count = next((j + 1 for j, t in enumerate(tokens) if t in stop), len(tokens))
        assert bool((choices[i, 7 + count - 1 :] == -1).all())
        rows.append(torch.cat((ids[i, :n], torch.tensor(tokens[:count]))))
        own = torch.cat((choices[i, :n], choices[i, 7 : 7 + count - 1]))
        given_choices.append(torch.cat((own, torch.full_like(own[:1], -1))))
        saved.append(torch.stack([torch.stack((one.log_probabilities[i], one.entropy[i])) for one in found[:count]], 1))
    order = [2, 0, 1]
    batch = pack([rows[i] for i in order], length=50)
    padding = torch.full((50 - sum(map(len, rows)), *choices.shape[2:]), -1, dtype=choices.dtype)
    packed = torch.cat((*[given_choices[i] for i in order], padding))[None]
    trainer = with_invariant(decoder(cfg, loss=True, reduction="none", entropy=True, packed=True, choices="given"), queries=32)
    x = decoder_x(cfg, batch.ids, labels=batch.labels, cu_seqlens=batch.cu_seqlens, tokens=sum(map(len, rows)), choices=packed)
    y, _ = chain.fwd({**params, "loss": None}, x, trainer, needs=Needs.NONE)
    end = 0
    for i in order:
        first, end = end, end + len(rows[i])
        at = slice(first + int(lengths[i]) - 1, end - 1)
        assert torch.equal(torch.stack((-y.main[0, at], y.extras["entropy"][0, at])), saved[i])


CFG, IDS = model("alike"), torch.zeros(1, 3, dtype=torch.int64)
TAKEN = torch.tensor([0, 1]).expand(1, 3, 4, 2)
DENSE = DecoderConfig(**SIZES, rope=RopeConfig(8))


def generating(**options):
    return generate(given(CFG), CFG, IDS, 2, **options)


REFUSED = {
    "decoder: choices must be one of None, 'saved', 'given', got 'own'": lambda: decoder(CFG, choices="own"),
    "decoder: choices must be None without layers of experts (cfg.moe), got 'given'": lambda: decoder(DENSE, choices="given"),
    "decoder_x: choices must be None without experts (cfg.moe), got int64[1, 3, 4, 2]": lambda: decoder_x(
        DENSE, IDS, choices=TAKEN
    ),
    "decoder_x: choices must be [1, 3, 4, 2], got [1, 3, 3, 2]": lambda: decoder_x(CFG, IDS, choices=TAKEN[:, :, 1:]),
    "decoder_x: choices must be int32 or int64, got float32": lambda: decoder_x(CFG, IDS, choices=TAKEN.float()),
    "generate: choices must be False without log_probabilities": lambda: generating(choices=True),
    "generate: entropy must be False without log_probabilities": lambda: generating(entropy=True),
    'generate: model must be made of decoder(cfg, choices="saved")': lambda: generating(
        choices=True, log_probabilities=True, model=decoder(CFG)
    ),
    "generate: model must be made of decoder(cfg), whose extras are": lambda: generating(model=decoder(CFG, choices="given")),
    "decoder: entropy must be False without loss": lambda: decoder(DENSE, entropy=True),
    "CrossEntropyConfig: reduction must be 'none' with entropy": lambda: decoder(DENSE, loss=True, entropy=True),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_not_served_raises_by_name(said):
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        REFUSED[said]()


def test_choices_that_no_layer_has_raise_by_the_layers_path():
    cfg = decoder(CFG, choices="given")
    with pytest.raises(
        IndexError, match=r"blocks.*route.*choices\) must be experts from 0 to 5, or -1 where a router chooses, got 6"
    ):
        chain.fwd(given(CFG), decoder_x(CFG, IDS, choices=TAKEN + 5), cfg)
