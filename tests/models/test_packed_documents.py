"""Documents packed into one row: logits, losses and gradients of the documents one by one, in float64."""

import dataclasses
from random import Random

import pytest
import torch

from funcops import (
    AttentionConfig,
    DynamicScaling,
    ExpertsConfig,
    LongRopeScaling,
    RopeConfig,
    RouteConfig,
    WithExtras,
    chain,
    dist,
    random,
    report,
    walk,
)
from funcops.engine.trees import paths, tree_map_tensors
from funcops.models import DecoderConfig, LatentConfig, MoEConfig, decoder, decoder_x, pack, roles
from funcops.testing import run_ranks

D = torch.float64
SIZES = dict(vocab=24, dim=16, layers=2, heads=4, kv_heads=2, head_size=4, hidden=12, context=40)
PLAIN = DecoderConfig(**SIZES, rope=RopeConfig(4))
KINDS = {
    "llama": {},
    "no logits": dict(vocab=80, logit_softcap=1.5, tied=True),
    "windows": dict(windows=(3, None), local_rope=RopeConfig(4, theta=50.0), softcap=2.0, qk_norm="head"),
    "gpt2": dict(rope=None, places=True, norm="layer_norm", mlp="gelu", qkv_bias=True, out_bias=True, mlp_bias=True, tied=True),
    "sinks": dict(sinks=True, windows=(2, None)),
    "latent": dict(latent=LatentConfig(kv_rank=4, rope_size=4, plain_size=4, value_size=6)),
    "chunks": dict(chunks=(3, None), unrotated=(1,), temperature=(0.5, 2.0), qk_norm="l2"),
    "dynamic": dict(rope=RopeConfig(4, scaling=DynamicScaling(factor=4.0, original_context=5))),
    "longrope": dict(
        rope=RopeConfig(4, scaling=LongRopeScaling(short_factor=(1.0, 2.0), long_factor=(3.0, 5.0), factor=4.0, original_context=5))
    ),
    "mixture": dict(moe=MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 16, 6))),
}


def drawn(name, seed):
    """A config, params, and documents, of which one has one token."""
    cfg, draw = dataclasses.replace(PLAIN, **KINDS[name]), torch.Generator().manual_seed(seed)
    params = chain.init(decoder(cfg, loss=True), key=random.key(seed), dtype=D)
    params = tree_map_tensors(lambda t: t + 0.1 * torch.randn(t.shape, generator=draw, dtype=D), params)  # sinks are zeros else
    lengths = [*torch.randint(1, 12, (3,), generator=draw).tolist(), 1, 7]
    return cfg, params, [torch.randint(cfg.vocab, (n,), generator=draw) for n in lengths]


def main_of(y):
    return y.main if type(y) is WithExtras else y


def like(y, dy):
    return WithExtras(dy, dict.fromkeys(y.extras)) if type(y) is WithExtras else dy


def one_by_one(cfg, params, documents):
    """The logits of each document, the mean loss over all labels, and its gradients."""
    model, plain = decoder(cfg, loss=True, reduction="sum"), decoder(cfg)
    count, logits, loss, total = sum(len(one) - 1 for one in documents), [], 0.0, None
    for one in documents:
        packed = pack([one])
        without_loss = {name: part for name, part in params.items() if name != "loss"}
        logits.append(main_of(chain.fwd(without_loss, decoder_x(cfg, packed.ids, D), plain)[0])[0])
        y, kept = chain.fwd(params, decoder_x(cfg, packed.ids, D, labels=packed.labels), model)
        loss = loss + main_of(y) / count
        grads = paths(chain.bwd(kept, like(y, torch.full((), 1 / count, dtype=D)), model)[0])
        total = grads if total is None else {path: None if g is None else g + total[path] for path, g in grads.items()}
    return logits, loss, total


def close(got, wanted):
    for path, t in paths(got).items():
        if t is not None:
            torch.testing.assert_close(t, wanted[path], rtol=0, atol=1e-12, msg=lambda said, path=path: f"{path}: {said}")


@pytest.mark.turns("seed", "padded", "name", every=2)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_a_row_of_documents_equals_them_one_by_one(name, padded, seed):
    cfg, params, documents = drawn(name, seed)
    total = sum(map(len, documents))
    ids, labels, ends = pack(documents, length=total + 5, count=9) if padded else pack(documents)
    assert (
        ids.shape == (1, total + 5 * padded) and ends.shape == (10 if padded else 6,) and int((labels != -100).sum()) == total - 5
    )
    logits, loss, wanted = one_by_one(cfg, params, documents)
    without_loss = {name: part for name, part in params.items() if name != "loss"}
    y, _ = chain.fwd(without_loss, decoder_x(cfg, ids, D, cu_seqlens=ends, tokens=total), decoder(cfg, packed=True))
    torch.testing.assert_close(main_of(y)[0, :total], torch.cat(logits), rtol=0, atol=1e-12)
    model = decoder(cfg, loss=True, packed=True)
    y, kept = chain.fwd(params, decoder_x(cfg, ids, D, labels=labels, cu_seqlens=ends, tokens=total), model)
    torch.testing.assert_close(main_of(y), loss, rtol=0, atol=1e-12)
    close(chain.bwd(kept, like(y, torch.ones((), dtype=D)), model)[0], wanted)


def mixed(seed, **fixed):
    """A decoder with a mixture, params, and documents."""
    draw = Random(seed)
    options = dict(
        score=draw.choice(["softmax", "sigmoid"]),
        normalize=draw.random() < 0.5,
        bias=draw.random() < 0.5,
        aux=draw.choice([0.0, 0.5]),
        z=draw.choice([0.0, 0.1]),
        sequence_wise=draw.random() < 0.5,
        capacity=draw.choice([None, 0.5, 1.0]),
    )
    route = RouteConfig(4, draw.randint(1, 3), **options | fixed)
    shared = draw.choice([0, 5])
    mixture = MoEConfig(route=route, experts=ExpertsConfig(4, 16, 6), shared=shared, dense=draw.choice([(), (0,)]))
    cfg = dataclasses.replace(PLAIN, moe=mixture, windows=draw.choice([(), (3, None)]))
    params = chain.init(decoder(cfg, loss=True), key=random.key(seed), dtype=D)
    rng = torch.Generator().manual_seed(seed)
    params = tree_map_tensors(lambda t: t + 0.1 * torch.randn(t.shape, generator=rng, dtype=D), params)
    sizes = [draw.choice([1, 2, 5, 9]) for _ in range(draw.randint(1, 4))]
    sizes[0] += max(sizes) == 1  # one without a target in any document has a loss of 0 / 0, as torch's
    return cfg, params, [torch.randint(cfg.vocab, (size,), generator=rng) for size in sizes]


def trained(cfg, params, documents, **padding):
    """The outputs of a packed row, and the gradients of its loss with the routers' losses."""
    ids, labels, ends = pack(documents, **padding)
    x = decoder_x(cfg, ids, D, labels=labels, cu_seqlens=ends, tokens=sum(map(len, documents)))
    model = decoder(cfg, loss=True, packed=True)
    y, kept = chain.fwd(params, x, model)
    ones = {name: torch.ones_like(t) if name.startswith("loss") else None for name, t in y.extras.items()}
    return y, chain.bwd(kept, WithExtras(torch.ones_like(y.main), ones), model)[0]


@pytest.mark.parametrize("seed", [s if s < 3 else pytest.param(s, marks=pytest.mark.slow) for s in range(40)])
def test_no_router_counts_padding(seed):
    cfg, params, documents = mixed(seed)
    total, longest = sum(map(len, documents)), max(map(len, documents))
    y, grads = trained(cfg, params, documents)
    chosen = sum(int(t.sum()) for name, t in y.extras.items() if name.startswith("load"))
    layers = cfg.layers - len(cfg.moe.dense)
    assert chosen == total * cfg.moe.route.top_k * layers
    for padding in (dict(length=total + 41, count=9), dict(length=total + 2 * longest + 1, max_seqlen=longest)):
        other, dother = trained(cfg, params, documents, **padding)
        for name, t in y.extras.items():
            torch.testing.assert_close(other.extras[name], t, rtol=0, atol=1e-12)
        torch.testing.assert_close(other.main, y.main, rtol=0, atol=1e-12)
        close(dother, paths(grads))


@pytest.mark.parametrize("seed", [s if s < 2 else pytest.param(s, marks=pytest.mark.slow) for s in range(24)])
def test_a_router_has_a_loss_for_each_document(seed):
    cfg, params, documents = mixed(seed, aux=0.5, sequence_wise=True, z=0.0, capacity=None)
    y, grads = trained(cfg, params, documents, length=50)
    count, model, wanted, losses = max(sum(len(one) - 1 for one in documents), 1), decoder(cfg, loss=True, reduction="sum"), {}, []
    for one in documents:
        alone = pack([one])
        found, kept = chain.fwd(params, decoder_x(cfg, alone.ids, D, labels=alone.labels), model)
        routers = {n: torch.full_like(t, 1 / len(documents)) if n.startswith("loss") else None for n, t in found.extras.items()}
        dparams = chain.bwd(kept, WithExtras(torch.full((), 1 / count, dtype=D), routers), model)[0]
        wanted = {path: g if g is None else g + wanted.get(path, 0.0) for path, g in paths(dparams).items()}
        losses.append({n: t for n, t in found.extras.items() if n.startswith("loss")})
    for name in losses[0]:
        torch.testing.assert_close(y.extras[name], sum(each[name] for each in losses) / len(documents), rtol=0, atol=1e-12)
    close(grads, wanted)


@pytest.mark.parametrize(
    ("axis", "capacity"),
    [("ep", 1.0), ("cp", None), pytest.param("ep", None, marks=pytest.mark.slow), pytest.param("tp", None, marks=pytest.mark.slow)],
)
def test_padding_of_a_mixture_over_ranks(axis, capacity):
    """Each rank of ep has a row of its own, with padding of its own; ranks of cp share out one row, of tp features."""
    cfg, params, documents = mixed(5, aux=0.0, z=0.0, capacity=None)
    rows = [documents, [*documents[::-1], documents[0]]] if axis == "ep" else [documents] * 2
    each = [(sum(map(len, row)), pack(row, length=48, count=7)) for row in rows]

    def step(own, params, mesh, i):
        total, (ids, labels, ends) = each[i]
        x, at = decoder_x(cfg, ids, D, labels=labels, cu_seqlens=ends, tokens=total), ("documents", "cu_seqlens")
        if mesh is not None and axis == "cp":
            parts = {
                n: t if n in at else dist.zigzag(t, mesh["cp"], t.dim() - 3 if n == "rotation" else 1) for n, t in x.extras.items()
            }
            x = WithExtras(dist.zigzag(ids, mesh["cp"]), parts)
        y, kept = chain.fwd(params, x, own)
        return y, chain.bwd(kept, like(y, torch.ones_like(y.main)), own)[0]

    def run(mesh):
        plain = decoder(cfg, loss=True, packed=True, reduction="sum") if axis == "cp" else decoder(cfg, loss=True, packed=True)
        own = dist.parallel(plain, roles(cfg, loss=True), mesh, axis="tp", capacity=capacity, sequence_parallel=False)
        specs = dist.specs_of(chain, own)
        y, dparams = step(own, dist.shard(params, specs, mesh), mesh, mesh[axis].rank)
        return y, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    found = run_ranks({"tp": 1, axis: 2} if axis != "tp" else {"tp": 2}, run)
    alone = decoder(cfg, loss=True, packed=True, reduction="sum" if axis == "cp" else "mean")
    want = [step(alone, params, None, i) for i in range(2)]
    summed = paths(want[0][1])
    if axis == "ep":
        summed = {path: g if g is None else g + paths(want[1][1])[path] for path, g in summed.items()}
    for (y, dparams), (whole, _) in zip(found, want, strict=True):
        close(dparams, summed)
        for name in [name for name in y.extras if name.startswith("load")]:
            load = sum(each.extras[name] for each, _ in found) if axis == "cp" else y.extras[name]
            assert torch.equal(load, whole.extras[name])


@pytest.mark.parametrize("options", [dict(aux=0.1), dict(z=0.1), dict(aux=0.1, sequence_wise=True), dict(capacity=1.0)], ids=str)
def test_what_a_part_of_a_packed_row_does_not_tell_is_refused_over_ranks(options):
    cfg, _, _ = mixed(1, **{**dict(aux=0.0, z=0.0, capacity=None), **options})
    mesh = dist.Mesh.abstract({"tp": 1, "cp": 2}, 0)
    with pytest.raises(ValueError, match=r"parallel: step \S*route must be of each token alone, as tokens are sharded over 'cp'"):
        dist.parallel(decoder(cfg, loss=True, packed=True), roles(cfg, loss=True), mesh)


def test_a_bound_of_lengths_reaches_every_attention_and_the_padding():
    cfg, params, documents = drawn("sinks", 1)
    longest, total = max(map(len, documents)), sum(map(len, documents))
    ids, labels, ends = pack(documents, length=3 * longest + total + 2, count=12, max_seqlen=longest)
    assert ends.diff().tolist() == [*map(len, documents), *[longest] * 3, 2, 0, 0, 0]
    assert int((labels != -100).sum()) == total - len(documents)
    bounded = decoder(cfg, loss=True, packed=True, max_seqlen=longest)
    found = [part.cfg.max_seqlen for part in walk(bounded) if isinstance(part.cfg, AttentionConfig)]
    assert found == [longest] * 2
    x, wanted = decoder_x(cfg, ids, D, labels=labels, cu_seqlens=ends), one_by_one(cfg, params, documents)[1]
    torch.testing.assert_close(main_of(chain.fwd(params, x, bounded)[0]), wanted, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=rf"x.3 \(cu_seqlens\) must be of sequences of at most {longest - 1} \(cfg.max_seqlen\)"):
        chain.fwd(params, x, decoder(cfg, loss=True, packed=True, max_seqlen=longest - 1))


def test_over_ranks():
    """Heads, features and the vocabulary are sharded; all ranks have the row."""
    cfg, params, documents = drawn("no logits", 3)
    ids, labels, ends = pack(documents)
    _, loss, wanted = one_by_one(cfg, params, documents)

    def run(mesh):
        own = dist.parallel(decoder(cfg, loss=True, packed=True), roles(cfg, loss=True), mesh, sequence_parallel=False)
        specs = dist.specs_of(chain, own)
        y, kept = chain.fwd(dist.shard(params, specs, mesh), decoder_x(cfg, ids, D, labels=labels, cu_seqlens=ends), own)
        dparams = chain.bwd(kept, torch.ones((), dtype=D), own)[0]
        return y, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    for y, dparams in run_ranks({"tp": 2}, run):
        torch.testing.assert_close(y, loss, rtol=0, atol=1e-12)
        close(dparams, wanted)


def test_a_row_keeps_less_than_padding():
    """In proportion to the tokens, beside a few numbers a document."""
    cfg, params, documents = drawn("llama", 0)
    longest, total = max(map(len, documents)), sum(map(len, documents))
    rows = torch.zeros(len(documents), longest, dtype=torch.int64)
    model = decoder(cfg, loss=True)
    x = decoder_x(cfg, rows, D, labels=rows)
    padded = report(chain.fwd(params, x, model)[1], params, x).kept_bytes
    ids, labels, ends = pack(documents)
    x = decoder_x(cfg, ids, D, labels=labels, cu_seqlens=ends)
    packed = report(chain.fwd(params, x, decoder(cfg, loss=True, packed=True))[1], params, x).kept_bytes
    assert packed <= 1.01 * padded * total / rows.numel() + 100


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_part_of_a_sequence_does_not_say_how_long_that_is(name):
    """A rank of cp must give the length to a rope that depends on it, and then gets its rows of the whole table."""
    cfg, ids = dataclasses.replace(PLAIN, **KINDS[name]), torch.zeros(1, 12, dtype=torch.int64)
    whole = decoder_x(cfg, ids, D).extras["rotation"]
    ends = torch.tensor([0, 9, 12], dtype=torch.int32)
    for rank in range(3):
        axis = dist.Mesh.abstract({"cp": 3}, rank)["cp"]
        part, at = dist.zigzag(ids, axis), dist.zigzag_positions(12, axis)
        for options in ({"positions": at}, {"positions": at, "cu_seqlens": ends}):
            if rank or "cu_seqlens" in options:
                with pytest.raises(ValueError, match=r"^decoder_x: length must be given \(the rope of cfg depends on the longest"):
                    decoder_x(cfg, part, D, **options)
            given = options if rank == 0 and "cu_seqlens" not in options else {**options, "length": 12}
            assert torch.equal(decoder_x(cfg, part, D, **given).extras["rotation"], dist.zigzag(whole, axis, 0))


def test_wrong_documents_raise():
    one = torch.arange(3)
    for given, error in (
        (([],), "pack: documents must be a list of at least one tensor"),
        (([one, one.float()],), r"pack: documents\[1\] must be int64"),
        (([one, one[None]],), r"pack: documents\[1\] must be \[t\], got \[1, 3\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            pack(*given)
    with pytest.raises(ValueError, match="pack: length must be at least 6, the tokens of all documents, got 5"):
        pack([one, one], length=5)
    with pytest.raises(ValueError, match="pack: count must be at least 3, the documents with the padding, got 2"):
        pack([one, one], length=7, count=2)
    with pytest.raises(ValueError, match="pack: max_seqlen must be at least 3, the longest document, got 2"):
        pack([one, one], max_seqlen=2)
    with pytest.raises(ValueError, match="decoder: max_seqlen must be None without packed, got 9"):
        decoder(PLAIN, max_seqlen=9)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"decoder_x: ids must be \[1, T\] with cu_seqlens: one row of documents .*, got \[2, 3\]"):
        decoder_x(PLAIN, torch.zeros(2, 3, dtype=torch.int64), D, cu_seqlens=ends)
    with pytest.raises(TypeError, match="decoder_x: cu_seqlens must be int32"):
        decoder_x(PLAIN, one[None], D, cu_seqlens=ends.long())
    sparse, ids = dataclasses.replace(PLAIN, **KINDS["mixture"]), torch.zeros(1, 5, dtype=torch.int64)
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    for given, error in (
        (dict(cu_seqlens=ends), r"tokens must be given with cu_seqlens \(the routers of cfg must not count padding"),
        (dict(cu_seqlens=ends, tokens=4), "tokens must be the end of a document, one of cu_seqlens, got 4"),
        (dict(cu_seqlens=ends, tokens=-1), "tokens must be"),
        (dict(tokens=3), "tokens must be None without cu_seqlens, got 3"),
    ):
        with pytest.raises(ValueError, match=f"decoder_x: {error}"):
            decoder_x(sparse, ids, D, **given)
    for tokens, documents in ((0, [0, 0, 0]), (3, [0, 3, 3]), (5, [0, 3, 5])):
        assert decoder_x(sparse, ids, D, cu_seqlens=ends, tokens=tokens).extras["documents"].tolist() == documents
    with pytest.raises(ValueError, match=r"DecoderConfig: moe.route.packed must be False \(decoder\(cfg, packed=True\) sets it\)"):
        dataclasses.replace(sparse, moe=MoEConfig(route=RouteConfig(4, 2, packed=True), experts=ExpertsConfig(4, 16, 6)))
    params = chain.init(decoder(PLAIN), key=random.key(0), dtype=D)
    with pytest.raises(ValueError, match=r"x.extras must be \['cu_seqlens', 'rotation'\], got \['rotation'\]"):
        chain.fwd(params, decoder_x(PLAIN, one[None], D), decoder(PLAIN, packed=True))
