"""Decoders as chains: their results, rewrites of them, and configs that fit no model."""

import dataclasses

import pytest
import torch

from funcops import (
    ExpertsConfig,
    LatentSplitConfig,
    RopeConfig,
    RouteConfig,
    WithExtras,
    chain,
    latent_split,
    random,
    trees,
    value_and_grad,
    with_policy,
)
from funcops.models import DecoderConfig, LatentConfig, MoEConfig, decoder, decoder_x

SIZES = dict(vocab=11, dim=8, layers=4, heads=2, kv_heads=1, head_size=4, hidden=6, context=16)
PLAIN = DecoderConfig(**SIZES, rope=RopeConfig(4))
SPARSE = dataclasses.replace(
    PLAIN,
    windows=(3, None, 3, None),
    sinks=True,
    moe=MoEConfig(route=RouteConfig(4, 2, aux=0.1, z=0.1), experts=ExpertsConfig(4, 8, 6), shared=5),
)
IDS = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))


def given(cfg, dtype=torch.float64):
    """Params of a decoder with a loss, and its x."""
    params = chain.init(decoder(cfg, loss=True), key=random.key(0), dtype=dtype)
    return params, decoder_x(cfg, IDS, dtype, labels=IDS.roll(-1, 1))


def test_routers_losses_and_loads_leave_by_layer():
    """And their gradients come in, compared with finite differences along one direction."""
    cfg, (params, x) = decoder(SPARSE, loss=True), given(SPARSE)
    y, kept = chain.fwd(params, x, cfg)
    assert cfg.outputs == ("load0", "loss0", "load1", "loss1")
    assert y.extras["load1"].shape == (2, 4) and y.extras["load1"].sum() == 2 * 2 * 14 and y.extras["loss0"].shape == (2,)
    losses = tuple(name for name in cfg.outputs if name.startswith("loss"))
    _, dparams, *_ = value_and_grad(chain, losses=losses)(params, x, cfg)
    gate = "blocks.0.layer0.mlp.moe.routed.gate.weight"
    way, dw = torch.ones_like(trees.at(params, gate)), trees.at(dparams, gate)

    def total(step):
        y, _ = chain.fwd(trees.put(params, gate, trees.at(params, gate) + step * way), x, cfg)
        return y.main + sum(y.extras[name].sum() for name in losses)

    slope = (total(1e-6) - total(-1e-6)) / 2e-6
    torch.testing.assert_close((dw * way).sum(), slope, rtol=1e-6, atol=1e-8)


def test_given_positions_are_used():
    """For rope only distances count, so a sequence may be the end of a longer one."""
    cfg = decoder(PLAIN)
    params = chain.init(cfg, key=random.key(0), dtype=torch.float64)
    y, _ = chain.fwd(params, decoder_x(PLAIN, IDS, torch.float64), cfg)
    for at in (torch.arange(5, 12), torch.stack((torch.arange(7), torch.arange(3, 10)))):
        later, _ = chain.fwd(params, decoder_x(PLAIN, IDS, torch.float64, positions=at), cfg)
        torch.testing.assert_close(later, y, rtol=0, atol=1e-12)


def test_a_policy_keeps_less_and_changes_nothing():
    cfg, (params, x) = decoder(SPARSE, loss=True), given(SPARSE)
    found = []
    for op in (chain, with_policy(chain, "minimal")):
        y, kept = op.fwd(params, x, cfg)
        dy = WithExtras(
            torch.ones_like(y.main), {n: None if n.startswith("load") else torch.ones_like(t) for n, t in y.extras.items()}
        )
        found.append((trees.nbytes(kept), trees.tensors(op.bwd(kept, dy, cfg)[0])))
    assert found[1][0] < found[0][0] and all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


def test_a_part_of_dy_that_is_None_counts_as_zero():
    cfg = LatentSplitConfig(2, shared=2, own=3, value=1)
    x = torch.randn(4, 2, 5), torch.randn(4, 2, 4), torch.randn(4, 1, 2)
    y, kept = latent_split.fwd(None, x, cfg)
    for absent in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2)):
        dy = tuple(torch.zeros_like(t) if i in absent else torch.ones_like(t) for i, t in enumerate(y))
        want, _ = latent_split.dgrad(kept, dy, cfg)
        got, _ = latent_split.dgrad(kept, tuple(None if i in absent else t for i, t in enumerate(dy)), cfg)
        assert all((w == 0).all() if g is None else torch.equal(g, w) for g, w in zip(got, want, strict=True)), absent


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(kv_heads=3), "kv_heads must be a number that divides heads, 2, got 3"),
        (dict(mlp="mish"), "mlp must be one of glu, .*, got 'mish'"),
        (dict(windows=(1, 0, 1, 1)), r"windows must be a tuple of windows of at least 1, or None, got \(1, 0, 1, 1\)"),
        (dict(windows=(1, 2.5, None, 1)), r"windows must be a tuple of windows of at least 1, or None, got \(1, 2.5, None, 1\)"),
        (dict(chunks=[4, 4, 4, 4]), r"chunks must be a tuple of chunks of at least 1, or None, got \[4, 4, 4, 4\]"),
        (dict(windows=(1, 2)), r"windows must be \(\) or one for each of 4 layers, got 2 of them"),
        (dict(chunks=(1, 2)), r"chunks must be \(\) or one for each of 4 layers, got 2 of them"),
        (dict(temperature=(0.1, 0)), r"temperature must be None, or \(a, f\) with a of at least 0 and f above 0, both finite"),
        (dict(temperature=(0.1, 8), qk_norm="head"), "temperature must be None with latent, or with qk_norm 'head'"),
        (dict(rope=RopeConfig(6)), r"rope must be None or a RopeConfig\(4\), got RopeConfig\(dim=6"),
        (dict(rope=None, local_rope=RopeConfig(4)), "local_rope must be None without rope"),
        (dict(norm_before=False), "norm_before must be True without norm_after, got False"),
        (dict(latent=LatentConfig(kv_rank=3, rope_size=4, plain_size=2, value_size=2), qk_norm="head"), "latent must be None"),
        (dict(moe=MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 6, 6))), "moe.experts.dim must be 8, as dim, got 6"),
        (
            dict(moe=MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 8, 6), dense=(0, 1, 2, 3))),
            r"moe.dense must be some of layers 0..3, and not all, got \(0, 1, 2, 3\)",
        ),
        (
            dict(moe=MoEConfig(route=RouteConfig(4, 2, jitter=0.5), experts=ExpertsConfig(4, 8, 6))),
            r"moe.route.jitter must be 0 \(a decoder takes no key\), got 0.5",
        ),
    ],
)
def test_a_config_that_fits_no_model_names_its_field(change, said):
    with pytest.raises(ValueError, match=f"DecoderConfig: {said}"):
        dataclasses.replace(PLAIN, **change)


def test_routers_and_experts_must_agree():
    with pytest.raises(ValueError, match="MoEConfig: experts.experts must be 4, as of route, got 8"):
        MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(8, 4, 4))
    with pytest.raises(ValueError, match=r"decoder_x: positions must be \[7\], got \[6\]"):
        decoder_x(PLAIN, IDS, torch.float32, positions=torch.arange(6))
    with pytest.raises(ValueError, match=r"^decoder_x: key must be on device meta, got cpu$"):
        decoder_x(PLAIN, IDS.to("meta"), torch.float32, key=random.key(0))


@pytest.mark.slow
def test_a_decoder_compiles_whole():
    one = dataclasses.replace(SPARSE, layers=1, windows=(3,))
    cfg, (params, x) = decoder(one, loss=True), given(one)

    def step(params, x):
        y, kept = chain.fwd(params, x, cfg)
        return y.main, chain.bwd(kept, WithExtras(torch.ones_like(y.main), dict.fromkeys(y.extras)), cfg)[0]

    want, got = step(params, x), torch.compile(step, backend="eager", fullgraph=True)(params, x)
    for a, b in zip(trees.tensors(got), trees.tensors(want), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
