"""Adapters over ranks equal adapters in one process, whichever rewrite comes first, in low precision too; wrong calls raise."""

import pytest
import torch
from dist_cases import low_rank_layer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lora_model import base_config, batch, drawn

from funcops import Needs, WithExtras, chain, dist, random, remat
from funcops.distributed import Mesh
from funcops.engine.trees import at, paths
from funcops.lora import (
    LowRankConfig,
    adapter,
    lora_init,
    lora_needs,
    low_rank,
    merge,
    save_adapter,
    unmerge,
    with_adapter,
    with_lora,
)
from funcops.low_precision import Fp8Current, quantize_params, with_recipe
from funcops.models import DecoderConfig, decoder, roles
from funcops.testing import check_dist, run_ranks
from funcops.testing.checks import same_bits

RULES = {"embed": "vocab", "*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row", "head": "column", "loss": "vocab"}
TARGETS = ("*.q.proj", "*.v.proj", "*.out", "*.up", "*.down")
D = torch.float64
WAYS = [("column", True), ("row", True), ("column", False), ("row", False)]


@pytest.mark.parametrize(("side", "sequence"), WAYS)
@settings(max_examples=1)
@example(shape=((1, 2), 3, 2, 2))
@given(shape=st.tuples(st.tuples(st.integers(0, 2), st.integers(0, 2)), *[st.integers(1, 4)] * 3))
def test_adapters_are_the_plain_op_in_parts(side, sequence, shape):
    check_dist(dist.parallel_low_rank, low_rank_layer(side, *shape, sequence), sizes=(1, 2, 4))


@pytest.mark.parametrize(("side", "dim", "name"), [("column", 0, "b"), ("row", 1, "a")])
def test_parts_are_slices_of_what_one_process_draws(side, dim, name):
    whole = low_rank.init(LowRankConfig(8, 8, 3), key=random.key(1))
    axes = [Mesh.abstract({"tp": 4}, r)["tp"] for r in range(4)]
    own = [dist.parallel_low_rank.init(dist.ParallelLowRankConfig(8, 8, 3, axis=a, side=side), key=random.key(1)) for a in axes]
    for leaf in "ab":
        parts = [getattr(one, leaf) for one in own]
        same_bits(torch.cat(parts, dim) if leaf == name else parts[0], getattr(whole, leaf), leaf)


def model(kv_heads=2):
    return base_config(kv_heads=kv_heads)


def ours(base, targets=TARGETS, dtype=D):
    cfg = with_lora(base, 3, targets, alpha=6.0)
    return cfg, drawn(lora_init(chain.init(base, key=random.key(0), dtype=dtype), cfg, key=random.key(1)), cfg)


def gradients(params, x, cfg, needs=None):
    y, kept = chain.fwd(params, x, cfg, needs=needs or lora_needs(cfg))
    return y, chain.bwd(kept, torch.ones_like(y), cfg)[0]


@pytest.mark.parametrize("sequence", [True, False], ids=["rows", "all rows"])
def test_a_model_with_adapters_equals_one_process(sequence):
    """Its loss and the adapters' gradients, with `with_lora` before or after `parallel`, which give one config; merged too."""
    base, (x, _, _) = model(), batch()
    cfg, params = ours(base)
    loss, wanted = gradients(params, x, cfg)
    merged = merge(params, cfg)

    def run(mesh):
        own = dist.parallel(cfg, RULES, mesh, sequence_parallel=sequence)
        of_base = dist.parallel(base, RULES, mesh, sequence_parallel=sequence)
        assert with_lora(of_base, 3, TARGETS, alpha=6.0) == own
        specs = dist.specs_of(chain, own)
        mine = dist.shard(params, specs, mesh)
        loss, dparams = gradients(mine, x, own)
        both = merge(mine, own)
        wanted = dist.shard(merged, dist.specs_of(chain, of_base), mesh)
        torch.testing.assert_close(paths(both), paths(wanted), rtol=1e-12, atol=1e-12)
        back = unmerge(both, adapter(mine, own), own)
        torch.testing.assert_close(paths(back), paths(mine), rtol=1e-12, atol=1e-12)
        return loss, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh), specs

    for got, dparams, specs in run_ranks({"tp": 2}, run):
        torch.testing.assert_close(got, loss, rtol=1e-12, atol=1e-12)
        found = {path: t for path, t in paths(dparams).items() if t is not None}
        assert found.keys() == {path for path, t in paths(wanted).items() if t is not None}
        torch.testing.assert_close(found, {path: at(wanted, path) for path in found}, rtol=0, atol=1e-12)
        out, up = "blocks.0.attn.out.both", "blocks.0.mlp.up.both"
        assert specs[f"{up}.lora.b"] == specs[f"{up}.base.weight"] and specs[f"{up}.lora.b"].parts
        assert specs[f"{out}.lora.a"] == dist.Spec("tp", 1) and f"{out}.lora.b" not in {p for p, s in specs.items() if s.axis}


@pytest.mark.turns("sizes", "sequence", every=3)
@pytest.mark.parametrize(("sizes", "sequence"), [(dict(dp=2, tp=2), True), (dict(dp=1, tp=2), False), (dict(dp=2, tp=1), True)])
def test_masks_are_parts_of_one_mask(sizes, sequence):
    """Dropout of adapters, also of one whose layer is not sharded (the keys'): y and gradients of one process."""
    base, (x, _, _) = model(), batch()
    cfg = with_lora(base, 3, (*TARGETS[:-1], "*.k.proj"), alpha=6.0, dropout=0.5)
    params = drawn(lora_init(chain.init(base, key=random.key(0), dtype=D), cfg, key=random.key(1)), cfg)
    x = WithExtras(torch.cat([x.main] * 2), x.extras | {"labels": torch.cat([x.extras["labels"]] * 2)})
    given = WithExtras(x.main, x.extras | {"key": random.key(5)})
    loss, wanted = gradients(params, given, cfg)
    assert not torch.equal(loss, gradients(params, WithExtras(x.main, x.extras | {"key": random.key(6)}), cfg)[0])

    def run(mesh):
        dp, rules = mesh["dp"], RULES
        own = dist.parallel(cfg, rules, mesh, sequence_parallel=sequence)
        specs = dist.specs_of(chain, own)
        cut = {name: t.chunk(dp.size)[dp.rank] if name == "labels" else t for name, t in given.extras.items()}
        mine = WithExtras(given.main.chunk(dp.size)[dp.rank], cut)
        loss, dparams = gradients(dist.shard(params, specs, mesh), mine, own)
        return loss, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    losses, found = zip(*run_ranks(sizes, run), strict=True)
    torch.testing.assert_close(torch.stack(losses).mean(), loss, rtol=1e-12, atol=1e-12)
    for path, t in paths(found[-1]).items():
        if t is not None:
            torch.testing.assert_close(t / sizes["dp"], at(wanted, path), rtol=0, atol=1e-12)


def test_adapters_are_drawn_by_part():
    """`lora_init` of a rank's base draws its part of the adapters of one process; layers may be stacked."""
    for stacked in (False, True):
        base = base_config(stacked, kv_heads=2)
        cfg = with_lora(base, 3, TARGETS)
        whole = lora_init(chain.init(base, key=random.key(0)), cfg, key=random.key(1))
        mesh = Mesh.abstract({"tp": 2}, 1)
        own, of_base = (dist.parallel(one, RULES, mesh) for one in (cfg, base))
        made = lora_init(chain.init(of_base, key=random.key(0)), own, key=random.key(1))
        same_bits(made, dist.shard(whole, dist.specs_of(chain, own), mesh), "params")


def test_every_weight_learns_beside_its_adapter():
    """All gradients of a decoder by its roles, with each layer recomputed in the backward."""
    small = DecoderConfig(vocab=16, dim=16, layers=2, heads=4, kv_heads=2, head_size=4, hidden=8, context=8, qk_norm="head")
    base = decoder(small, loss=True)
    cfg, params = ours(base, ("*.proj", "*.down", "*.up"))
    cfg = cfg.with_parts(lambda name, op, inner: (remat(op), inner) if name == "blocks" else (op, inner))
    ids = torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(0))
    x = WithExtras(ids, {"labels": ids.roll(-1, 1)})
    loss, wanted = gradients(params, x, cfg, Needs.ALL)

    def run(mesh):
        own = dist.parallel(cfg, roles(small, loss=True), mesh)
        specs = dist.specs_of(chain, own)
        loss, dparams = gradients(dist.shard(params, specs, mesh), x, own, Needs.ALL)
        return loss, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    for got, dparams in run_ranks({"tp": 2}, run):
        torch.testing.assert_close(got, loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(paths(dparams), paths(wanted), rtol=0, atol=1e-12)


def test_a_base_in_low_precision():
    """Its scales are of whole tensors, so codes equal one process's, in either order of the rewrites."""
    base, (x, _, _) = model(), batch()
    recipe, only = Fp8Current(), ("*.both.base",)
    cfg, params = ours(base)
    low = with_recipe(cfg, recipe, only=only)
    loss, wanted = gradients(quantize_params(params, low, dtype=D), x, low)

    def run(mesh):
        own = dist.parallel(low, RULES, mesh)
        assert with_recipe(dist.parallel(cfg, RULES, mesh), recipe, only=only) == own
        specs = dist.specs_of(chain, own)
        work = quantize_params(dist.shard(params, specs, mesh), own, dtype=D)
        loss, dparams = gradients(work, x, own)
        return loss, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    for got, dparams in run_ranks({"tp": 2}, run):
        torch.testing.assert_close(got, loss, rtol=1e-12, atol=1e-12)
        for path, t in paths(dparams).items():
            if t is not None:
                torch.testing.assert_close(t, at(wanted, path), rtol=0, atol=1e-12)


def refused():
    """Error texts and the calls that raise them."""
    mesh, base = Mesh.abstract({"tp": 2}, 0), model()
    of_base = dist.parallel(base, RULES, mesh)
    yield (
        "blocks.*.mlp.up: ParallelLowRankConfig: dropout must be 0 beside a layer over ranks (call with_lora before dist.parallel, "
        "which knows how x is sharded), got 0.1",
        lambda: with_lora(of_base, 2, ("*.up",), dropout=0.1),
    )
    yield (
        "with_lora: cfg must be the config of a combinator (the config of a layer over ranks does not tell its op), got Column",
        lambda: with_lora(dist.ColumnLinearConfig(4, 6, axis=mesh["tp"]), 2, ("",)),
    )
    own = with_lora(of_base, 2, ("*.up",))
    params = lora_init(chain.init(of_base, key=random.key(0)), own, key=random.key(1))
    yield (
        "save_adapter: cfg must be one with unsharded adapters (dist.unshard the params, and use the config before dist.parallel), "
        "got blocks.0.mlp.up over axis 'tp' of 2",
        lambda: save_adapter("no", params, own),
    )
    whole = with_lora(base, 2, ("*.up",))
    yield (
        "with_adapter: adapter['blocks.0.mlp.up'].b must be [24, 2], got [48, 2]",
        lambda: with_adapter(params, adapter(lora_init(chain.init(base, key=random.key(0)), whole, key=random.key(1)), whole), own),
    )
    yield (
        "ParallelLowRankConfig: parts must be () for a row, whose outputs are not sharded, got (2, 2)",
        lambda: dist.ParallelLowRankConfig(4, 4, 1, axis=mesh["tp"], side="row", parts=(2, 2)),
    )
    yield (
        "ParallelLowRankConfig: in_features must be a multiple of 2, the size of axis 'tp', got 3",
        lambda: dist.ParallelLowRankConfig(3, 4, 1, axis=mesh["tp"], side="row"),
    )
    cfg = dist.ParallelLowRankConfig(4, 4, 1, axis=mesh["tp"], side="row")
    yield (
        "parallel_low_rank_fwd: params.a must be [1, 2], got [1, 4]",
        lambda: dist.parallel_low_rank.fwd(low_rank.init(LowRankConfig(4, 4, 1), key=random.key(0)), torch.ones(2, 2), cfg),
    )
    yield (
        "parallel_low_rank_fwd: x must be of a size along dimension 0 that axis 'tp' of 2 divides, got float32[3, 2]",
        lambda: dist.parallel_low_rank.fwd(dist.parallel_low_rank.init(cfg, key=random.key(0)), torch.ones(3, 2), cfg),
    )


def test_unsupported_adapters_raise_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for said, call in refused():
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value).startswith(said)
    assert not list(tmp_path.iterdir())
