"""Decoders over ranks, by the roles that `models.roles` gives: the losses and gradients of one process."""

import dataclasses

import pytest
import torch
from tiers import drawn

from funcops import ExpertsConfig, RopeConfig, RouteConfig, WithExtras, chain, dist, random, walk
from funcops.distributed import Mesh
from funcops.engine.trees import paths, tree_map_tensors
from funcops.models import DecoderConfig, LatentConfig, LinearAttentionConfig, MoEConfig, decoder, decoder_x, roles
from funcops.testing import run_ranks

SIZES = dict(vocab=16, dim=16, layers=2, heads=8, kv_heads=4, head_size=4, hidden=12, context=8)
LLAMA = DecoderConfig(**SIZES, rope=RopeConfig(4))
MIXTURE = MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 16, 6))
LATENT = LatentConfig(kv_rank=4, rope_size=4, plain_size=4, value_size=6)
CAPPED = dict(softcap=2.0, logit_softcap=1.5)
FAMILIES = {  # what each has that is its own
    "llama": {},
    "qwen3": dict(qk_norm="head"),
    "gemma2": CAPPED | dict(zero_centered=True, norm_after=True, mlp="geglu", windows=(3, None), embed_scale=4.0, tied=True),
    "gpt2": dict(rope=None, places=True, norm="layer_norm", mlp="gelu", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True),
    "granite, smollm3": dict(unrotated=(1,), residual_scale=0.5, logit_scale=2.0, embed_scale=3.0, norm_after=True),
    "mixtral": dict(moe=MIXTURE),
    "gpt-oss": dict(sinks=True, windows=(3, None), moe=MIXTURE, qkv_bias=True),
    "deepseek's mixture": dict(moe=dataclasses.replace(MIXTURE, shared=8, dense=(0,))),
    "deepseek's attention": dict(latent=LATENT),
    "llama 4": dict(
        rope=RopeConfig(4, interleaved=True),
        unrotated=(1,),
        chunks=(3, None),
        temperature=(0.5, 2.0),
        qk_norm="l2",
        moe=MoEConfig(
            route=RouteConfig(4, 2, score="sigmoid", normalize=False),
            experts=ExpertsConfig(4, 16, 6, weights_on="input"),
            shared=8,
            dense=(0,),
        ),
    ),
    "qwen3-next": dict(
        attention_gate=True,
        qk_norm="head",
        linear=LinearAttentionConfig(key_heads=2, value_heads=4, key_size=4, value_size=3, layers=(0,)),
    ),
    "latents of q": dict(latent=dataclasses.replace(LATENT, q_rank=6), moe=MIXTURE),
}
MESHES = {
    "tp 2": (dict(tp=2), True),
    "tp 2, all rows": (dict(tp=2), False),
    "tp 4": (dict(tp=4), True),
    "dp 2, tp 2, all rows": (dict(dp=2, tp=2), False),
    "ep 2, tp 2": (dict(ep=2, tp=2), True),
}
D = torch.float64


def step(cfg, model, params, ids, labels, share=1):
    """The loss, and the gradients of the rank's part of the mean."""
    y, kept = chain.fwd(params, decoder_x(cfg, ids, D, labels=labels), model)
    loss = y.main if type(y) is WithExtras else y
    dy = torch.ones((), dtype=D) / share
    return loss, chain.bwd(kept, WithExtras(dy, dict.fromkeys(y.extras)) if type(y) is WithExtras else dy, model)[0]


@pytest.mark.turns("name", "mesh", every=3)
@pytest.mark.parametrize(("name", "mesh"), drawn(FAMILIES, MESHES))
def test_a_decoder_on_ranks_equals_one_process(name, mesh):
    cfg, (sizes, sequence_parallel) = dataclasses.replace(LLAMA, **FAMILIES[name]), MESHES[mesh]
    model, draw = decoder(cfg, loss=True), torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(16, (8, 6), generator=draw) for _ in range(2))
    whole = chain.init(model, key=random.key(1), dtype=D)
    whole = tree_map_tensors(lambda t: t + 0.1 * torch.randn(t.shape, generator=draw, dtype=D), whole)  # biases are zeros else
    loss, wanted = step(cfg, model, whole, ids, labels)

    def run(mesh):
        own = dist.parallel(model, roles(cfg, loss=True), mesh, sequence_parallel=sequence_parallel)
        specs = dist.specs_of(chain, own)
        rows, share = (ids, labels), 1
        for axis in mesh.axes:
            if axis.name != "tp":
                rows, share = tuple(t.chunk(axis.size)[axis.rank] for t in rows), share * axis.size
        mean, dparams = step(cfg, own, dist.shard(whole, specs, mesh), *rows, share)
        return mean, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh), set(specs)

    losses, found, shared = zip(*run_ranks(sizes, run), strict=True)
    torch.testing.assert_close(torch.stack(losses).mean(), loss, rtol=0, atol=1e-12)
    wanted = {path: t for path, t in paths(wanted).items() if t is not None}
    for dparams in found:
        got = {path: t for path, t in paths(dparams).items() if t is not None}
        assert got.keys() == wanted.keys()
        for path, t in got.items():
            torch.testing.assert_close(t, wanted[path], rtol=0, atol=1e-12, msg=lambda said, path=path: f"{path}: {said}")
    assert {
        "embed.weight",
        *[
            path
            for path in wanted
            if path.endswith((".proj.weight", ".out.weight")) and not (".shared." in path or ".linear_attn." in path)
        ],
    } <= shared[0]


FIRST = "gpt-oss", "llama 4", "latents of q"  # with most that is their own


def test_a_delta_rule_reads_the_positions_before_it():
    """So a sequence over ranks is refused, by the step's path."""
    cfg = dataclasses.replace(LLAMA, **FAMILIES["qwen3-next"])
    mesh = dist.Mesh.abstract({"cp": 2, "tp": 2}, 0)
    with pytest.raises(
        ValueError, match=r"^parallel: step blocks0\..*\.linear_attn\..* must be .*, got causal_conv1d, which mixes positions"
    ):
        dist.parallel(decoder(cfg, loss=True), roles(cfg, loss=True), mesh)


SERVED = [name for name, options in FAMILIES.items() if "linear" not in options]


@pytest.mark.parametrize("name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in SERVED])
def test_a_sequence_over_ranks(name):
    """A rank's ids, labels and positions are in zigzag order."""
    cfg = dataclasses.replace(LLAMA, **FAMILIES[name])
    model, draw = decoder(cfg, loss=True), torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(16, (4, 8), generator=draw) for _ in range(2))
    whole = chain.init(model, key=random.key(1), dtype=D)
    whole = tree_map_tensors(lambda t: t + 0.1 * torch.randn(t.shape, generator=draw, dtype=D), whole)  # sinks are zeros else
    loss, wanted = step(cfg, model, whole, ids, labels)

    def run(mesh):
        cp, own = mesh["cp"], dist.parallel(model, roles(cfg, loss=True), mesh)
        specs, places = dist.specs_of(chain, own), dist.zigzag_positions(8, cp)
        x = decoder_x(cfg, dist.zigzag(ids, cp), D, labels=dist.zigzag(labels, cp), positions=places)
        y, kept = chain.fwd(dist.shard(whole, specs, mesh), x, own)
        mean, dy = y.main if type(y) is WithExtras else y, torch.full((), 0.5, dtype=D)
        dparams, _ = chain.bwd(kept, WithExtras(dy, dict.fromkeys(y.extras)) if type(y) is WithExtras else dy, own)
        return mean, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    losses, found = zip(*run_ranks({"cp": 2, "tp": 2}, run), strict=True)
    torch.testing.assert_close(torch.stack(losses).mean(), loss, rtol=0, atol=1e-12)
    for dparams in found:
        torch.testing.assert_close(paths(dparams), paths(wanted), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt-oss", "deepseek's attention", "llama 4"])
def test_a_sequence_alone_over_ranks_leaves_each_rank_all_heads(name):
    """With features on one rank, no leaf is sharded."""
    cfg = dataclasses.replace(LLAMA, **FAMILIES[name])
    model = decoder(cfg, loss=True)
    own = dist.parallel(model, roles(cfg, loss=True), Mesh.abstract({"cp": 2, "tp": 1}, 0))
    assert dist.specs_of(chain, own) == {}
    mixes = [(part, made) for part, made in zip(walk(model), walk(own), strict=True) if part.cfg.attends]
    assert len(mixes) > 0
    for part, made in mixes:
        assert made.op.name == f"context_{part.op.name}" and made.cfg.axis.name == "cp"
        assert getattr(made.cfg, "heads", None) == getattr(part.cfg, "heads", None)


def test_without_a_loss_logits_are_whole():
    """Each rank has all logits of its own rows; a head that is tied to the embeddings is not sharded."""
    for name in ("llama", "gemma2"):
        cfg = dataclasses.replace(LLAMA, **FAMILIES[name])
        model, ids = decoder(cfg), torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(0))
        whole = chain.init(model, key=random.key(1), dtype=D)
        logits, _ = chain.fwd(whole, decoder_x(cfg, ids, D), model)

        def run(mesh, cfg=cfg, model=model, ids=ids, whole=whole):
            own = dist.parallel(model, roles(cfg), mesh)
            specs = dist.specs_of(chain, own)
            assert ("embed.weight" in specs) == (not cfg.tied)
            given = ids if "embed.weight" in specs else ids.chunk(2)[mesh.rank]
            return chain.fwd(dist.shard(whole, specs, mesh), decoder_x(cfg, given, D), own)[0]

        torch.testing.assert_close(torch.cat(run_ranks({"tp": 2}, run)), logits, rtol=0, atol=1e-12)


REFUSED = {
    "blocks.*.attn.qkv.k.heads: ReshapeConfig: out_shape must be sizes of which the first is a multiple of 4, "
    "the number of ranks, got (2, 4)": dict(kv_heads=2),
    "parallel: step blocks.*.attn.qkv.q.norm must be featurewise, as x is sharded along dim -1 over 'tp' "
    "(put a row layer before it), got rms_norm, which mixes features": dict(qk_norm="all"),
    "blocks.*.mlp.down: RowLinearConfig: in_features must be a multiple of 4, the size of axis 'tp', got 6": dict(hidden=6),
    "blocks.*.mlp.experts: ParallelExpertsConfig: experts must be a multiple of 2, the number of ranks, got 3": dict(
        moe=MoEConfig(route=RouteConfig(3, 2), experts=ExpertsConfig(3, 16, 6))
    ),
    "embed: VocabEmbeddingConfig: num_embeddings must be a multiple of 4, the size of axis 'tp', got 18": dict(vocab=18),
}


@pytest.mark.parametrize("said", REFUSED)
def test_configs_that_cannot_be_sharded_raise_by_name(said):
    cfg = dataclasses.replace(LLAMA, **REFUSED[said])
    with pytest.raises(ValueError) as raised:
        dist.parallel(decoder(cfg, loss=True), roles(cfg, loss=True), Mesh.abstract({"ep": 2, "tp": 4}, 0))
    assert str(raised.value) == said
