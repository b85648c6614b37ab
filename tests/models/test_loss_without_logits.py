"""A decoder's loss without its logits: the loss and gradients of the steps one by one, and of Hugging Face's models."""

import dataclasses

import pytest
import tiny_hf
import torch

from funcops import (
    ExpertsConfig,
    Needs,
    RopeConfig,
    RouteConfig,
    WithExtras,
    chain,
    dist,
    donate,
    explain,
    random,
    report,
    with_policy,
)
from funcops.engine.residuals.policy import Policy, Recompute
from funcops.engine.trees import nbytes, paths, tree_map_tensors
from funcops.lora import lora_init, with_lora
from funcops.low_precision import Fp8Block, quantize_params, with_recipe
from funcops.models import DecoderConfig, MoEConfig, decoder, decoder_x, from_hf, roles
from funcops.testing import run_ranks
from funcops.testing.tolerances import HF_GRADIENTS

D = torch.float64
SIZES = dict(vocab=96, dim=16, layers=2, heads=4, kv_heads=2, head_size=4, hidden=12, context=16)
PLAIN = DecoderConfig(**SIZES, rope=RopeConfig(4))
MIXTURE = MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 16, 6))
KINDS = {
    "plain": {},
    "tied": dict(tied=True),
    "capped": dict(logit_softcap=1.5),
    "capped, tied": dict(logit_softcap=1.5, tied=True, embed_scale=4.0),
    "mixture": dict(moe=MIXTURE),
}


def given(cfg, dtype=D, rows=4):
    draw = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(cfg.vocab, (rows, 6), generator=draw) for _ in range(2))
    labels[0, 2:] = -100
    params = chain.init(decoder(cfg, loss=True), key=random.key(1), dtype=dtype)
    return tree_map_tensors(lambda t: t + 0.1 * torch.randn(t.shape, generator=draw, dtype=t.dtype), params), ids, labels


def step(cfg, model, params, ids, labels, share=1):
    """The loss, and the gradients of the rank's part of the mean."""
    y, kept = chain.fwd(params, decoder_x(cfg, ids, D, labels=labels), model)
    loss, dy = y.main if type(y) is WithExtras else y, torch.ones((), dtype=D) / share
    return loss, chain.bwd(kept, WithExtras(dy, dict.fromkeys(y.extras)) if type(y) is WithExtras else dy, model)[0]


def by_steps(model):
    """The chain whose head and loss are two calls."""
    assert model.joined == ("loss",)
    return dataclasses.replace(model, joined=())


def close(got, wanted):
    got, wanted = ({path: t for path, t in paths(tree).items() if t is not None} for tree in (got, wanted))
    assert got.keys() == wanted.keys()
    for path, t in got.items():
        torch.testing.assert_close(t, wanted[path], rtol=0, atol=1e-12, msg=lambda said, path=path: f"{path}: {said}")


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_and_gradients_of_the_steps_one_by_one(name):
    cfg = dataclasses.replace(PLAIN, **KINDS[name])
    model, (params, ids, labels) = decoder(cfg, loss=True), given(cfg)
    loss, found = step(cfg, model, params, ids, labels)
    wanted, gradients = step(cfg, by_steps(model), params, ids, labels)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    close(found, gradients)
    x = decoder_x(cfg, ids, D, labels=labels)
    y, kept = chain.fwd(params, x, model)
    dy = WithExtras(torch.ones((), dtype=D), dict.fromkeys(y.extras)) if type(y) is WithExtras else torch.ones((), dtype=D)
    _, pending = chain.dgrad(donate(kept), dy, model)
    close(chain.wgrad(pending, model), gradients)
    assert {row.path for row in report(chain.fwd(params, x, model)[1]).rows} >= {"head.logsumexp"}


@pytest.mark.parametrize("needs", [Needs(x=False), Needs(x=False, params=["head"]), Needs(x=False, params=["norm"])], ids=str)
def test_what_is_kept_follows_the_needs(needs):
    """No logits, and 16 bytes a token for the logsumexp; sums go into accumulators."""
    model, (params, ids, labels) = decoder(PLAIN, loss=True), given(PLAIN)
    x = decoder_x(PLAIN, ids, D, labels=labels)
    y, kept = chain.fwd(params, x, model, needs=needs)
    _, plain = chain.fwd(params, x, by_steps(model), needs=needs)
    logits = ids.numel() * PLAIN.vocab * 8
    less = report(plain, params, x).kept_bytes - report(kept, params, x).kept_bytes
    assert less == logits and not any("logits" in path for path in paths(kept))
    found, wanted = chain.bwd(kept, torch.ones_like(y), model)[0], chain.bwd(plain, torch.ones_like(y), by_steps(model))[0]
    close(found, wanted)
    sums = tree_map_tensors(torch.ones_like, params)
    total, _ = chain.bwd(kept, torch.ones_like(y), model, into=sums)
    assert total is sums
    for path, t in paths(wanted).items():
        if t is not None:
            torch.testing.assert_close(paths(total)[path], t + 1, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_hugging_faces_loss_and_gradients_in_float64(name, tmp_path):
    """A head of its own, a tied one, and a tied one with a cap. Gradients are converted as weights are."""
    ids = torch.randint(1, 48, (3, 11), generator=torch.Generator().manual_seed(2))
    labels = ids.clone()
    labels[1, 4:] = -100
    with tiny_hf.Wide():
        theirs = tiny_hf.tiny(name, D)
        theirs.save_pretrained(tmp_path / "weights")
        wanted = theirs(ids, labels=labels).loss
        wanted.backward()
    params, cfg = from_hf(tmp_path / "weights", length=11)
    model = dataclasses.replace(decoder(cfg, loss=True), joined=("loss",))
    assert "linear_cross_entropy" in [one.op.name for one in model.runs]
    shifted = torch.cat((labels[:, 1:], torch.full((3, 1), -100)), 1)
    y, kept = chain.fwd({**params, "loss": None}, decoder_x(cfg, ids, D, labels=shifted), model)
    torch.testing.assert_close(y, wanted.detach(), atol=HF_GRADIENTS, rtol=0)
    found = chain.bwd(kept, torch.ones_like(y), model)[0]
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(p.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    gradients = paths(from_hf(tmp_path / "gradients")[0])
    for path, t in paths(found).items():
        if t is not None:
            torch.testing.assert_close(t, gradients[path], atol=HF_GRADIENTS, rtol=0, msg=lambda said, path=path: f"{path}: {said}")


def test_few_logits_are_kept():
    assert decoder(dataclasses.replace(PLAIN, vocab=64), loss=True).joined == ()
    assert decoder(dataclasses.replace(PLAIN, vocab=65), loss=True).joined == ("loss",)
    assert decoder(PLAIN).joined == ()


@pytest.mark.parametrize("policy", ["minimal", "save_all", "recompute_norms", "compress_fp8", Policy({"loss.logits": Recompute()})])
def test_policies(policy):
    model, (params, ids, labels) = decoder(PLAIN, loss=True), given(PLAIN, torch.float32)
    x = decoder_x(PLAIN, ids, torch.float32, labels=labels)
    if isinstance(policy, Policy):
        model = by_steps(model)
    op, (y, kept) = with_policy(chain, policy), chain.fwd(params, x, model)
    loss, less = op.fwd(params, x, model)
    torch.testing.assert_close(loss, y, rtol=0, atol=1e-6)
    assert not any("logits" in path for path in paths(less))
    assert policy in ("save_all", "recompute_norms") or nbytes(less) < nbytes(kept)
    tolerance = 0.1 if policy == "compress_fp8" else 1e-6
    grads, wanted = op.bwd(less, torch.ones_like(y), model)[0], chain.bwd(kept, torch.ones_like(y), model)[0]
    for path, t in paths(wanted).items():
        if t is not None:
            torch.testing.assert_close(paths(grads)[path], t, rtol=0, atol=tolerance * float(t.abs().max()) + 1e-9)


@pytest.mark.parametrize("how", ["adapter", "recipe"])
def test_a_head_that_cannot_run_with_its_loss(how):
    """It runs by itself, and its logits are kept."""
    cfg = dataclasses.replace(PLAIN, vocab=256, dim=32)
    model, (params, ids, labels) = decoder(cfg, loss=True), given(cfg, torch.float32)
    if how == "adapter":
        made = with_lora(model, 2, ("head",))
        params = lora_init(params, made, key=random.key(3))
    else:
        made = with_recipe(model, Fp8Block(), only=("head",))
        params = quantize_params(params, made)
    assert [step.name for step in made.runs] == [step.name for step in made.steps] and made.runs == made.steps
    y, kept = chain.fwd(params, decoder_x(cfg, ids, torch.float32, labels=labels), made)
    assert any("loss.logits" in path for path in paths(kept))
    if how == "adapter":  # its b is zeros
        want, _ = chain.fwd(given(cfg, torch.float32)[0], decoder_x(cfg, ids, torch.float32, labels=labels), model)
        torch.testing.assert_close(y, want)


def test_a_recipe_of_the_blocks_alone_keeps_no_logits():
    cfg = dataclasses.replace(PLAIN, vocab=256, dim=32, head_size=8, rope=RopeConfig(8), hidden=64)
    made = with_recipe(decoder(cfg, loss=True), Fp8Block(), skip=("head",))
    assert [one.op.name for one in made.runs][-2:] == ["linear_cross_entropy", "identity"]


@pytest.mark.turns("sequence_parallel", "name", every=3)
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_over_ranks(name, sequence_parallel):
    cfg = dataclasses.replace(PLAIN, **KINDS[name])
    model, (whole, ids, labels) = decoder(cfg, loss=True), given(cfg)
    loss, wanted = step(cfg, model, whole, ids, labels)

    def run(mesh):
        own = dist.parallel(model, roles(cfg, loss=True), mesh, sequence_parallel=sequence_parallel)
        assert "vocab_linear_cross_entropy" in [one.op.name for one in own.runs]
        specs = dist.specs_of(chain, own)
        mean, dparams = step(cfg, own, dist.shard(whole, specs, mesh), ids, labels)
        return mean, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    for mean, dparams in run_ranks({"tp": 2}, run):
        torch.testing.assert_close(mean, loss, rtol=0, atol=1e-12)
        close(dparams, wanted)


@pytest.mark.parametrize("name", ["plain", "capped", "mixture"])
def test_sharded_params(name):
    """ZeRO-3: the head is whole while its loss runs."""
    cfg = dataclasses.replace(PLAIN, **KINDS[name])
    model, (whole, ids, labels) = decoder(cfg, loss=True), given(cfg)
    labels[0] = labels[1]  # so that the mean of the ranks' means is the mean
    loss, wanted = step(cfg, model, whole, ids, labels)

    def run(mesh):
        own = dist.zero3(model, mesh["dp"])
        rows = [t.chunk(2)[mesh["dp"].rank] for t in (ids, labels)]
        mean, dparams = step(cfg, own, dist.own_shards(whole, mesh["dp"]), *rows, 2)
        x = decoder_x(cfg, rows[0], D, labels=rows[1])
        assert not any(path.startswith("loss.") for path in paths(chain.fwd(dist.own_shards(whole, mesh["dp"]), x, own)[1]))
        like = chain.init(model, device="meta")
        return mean, dist.finish(dist.gather_shards_start(dparams, like, mesh["dp"]))

    losses, found = zip(*run_ranks({"dp": 2}, run), strict=True)
    torch.testing.assert_close(torch.stack(losses).mean(), loss, rtol=0, atol=1e-12)
    for dparams in found:
        close(dparams, wanted)


def test_what_it_says():
    model, (params, ids, labels) = decoder(PLAIN, loss=True), given(PLAIN)
    assert "linear_cross_entropy" in str(explain(model, device_type="cuda", dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"^head: linear_cross_entropy_fwd: x.1 \(labels\) must be \[4, 6\], got \[2\]"):
        chain.fwd(params, WithExtras(ids, {**decoder_x(PLAIN, ids, D).extras, "labels": labels[0, :2]}), model)
    with pytest.raises(ValueError, match=r"joined must be a tuple of names of losses \(loss\), got \('gone',\)"):
        dataclasses.replace(model, joined=("gone",))
