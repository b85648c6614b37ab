"""`Recompute()` on what attention keeps: the steps on the way to it, products too, run again in the backward."""

import pickle
import random as pyrandom

import pytest
import torch
from policy_cases import WAYS, by_backward, drawn_needs, report_before

from funcops import (
    POLICIES,
    Policy,
    Recompute,
    RepeatConfig,
    RopeConfig,
    Save,
    WithExtras,
    chain,
    dist,
    donate,
    linear,
    random,
    repeat,
    report,
    with_policy,
)
from funcops.distributed import comm
from funcops.library.kernels import linear as kernels
from funcops.lora import with_lora
from funcops.low_precision import Fp8Block, Fp8Current, with_recipe
from funcops.memory.parts import kept_fields, kept_paths
from funcops.models import DecoderConfig, LatentConfig, decoder, decoder_x, roles
from funcops.models.decoder import block
from funcops.models.decoder_config import groups
from funcops.testing import run_ranks
from funcops.testing.checks import float_like, same_bits

SIZES = dict(vocab=8, dim=16, layers=1, heads=2, kv_heads=2, hidden=24, context=8)
LATENT = dict(kv_rank=8, rope_size=4, plain_size=8, value_size=8)
MODELS = {
    "latents": dict(head_size=12, rope=RopeConfig(4), latent=LatentConfig(**LATENT, q_rank=8)),
    "latents of k and v": dict(head_size=12, rope=RopeConfig(4), latent=LatentConfig(**LATENT)),
    "norms of heads": dict(head_size=8, rope=RopeConfig(8), qk_norm="head"),
    "biases": dict(head_size=8, rope=RopeConfig(8), qkv_bias=True),
}
IDS = torch.zeros(2, 4, dtype=torch.int64)
ADAPTED = ("*.up", "*.proj")
LATENTS = Policy({"*.attn.mix.[qkv]": Recompute()})


def made(name, recipe=None, adapted=False, layers=None):
    """Op, config, params and x of a block, or of layers of it."""
    sizes = DecoderConfig(**SIZES, **MODELS[name])
    op, cfg, extras = chain, block(sizes, groups(sizes)[0].kinds[0]), decoder_x(sizes, IDS, torch.float32).extras
    cfg = cfg if recipe is None else with_recipe(cfg, recipe)
    cfg = with_lora(cfg, 2, ADAPTED) if adapted else cfg
    op, cfg = (op, cfg) if layers is None else (repeat, RepeatConfig(op, cfg, layers))
    params = op.init(cfg, key=random.key(0))
    return op, cfg, params, WithExtras(random.normal(random.key(1), (2, 4, 16)), dict(extras))


def counted(monkeypatch):
    """The widths of the products of `linear` that run from here on."""
    found, plain = [], kernels.linear_fwd

    def fwd(x, weight, bias):
        found.append(tuple(weight.shape))
        return plain(x, weight, bias)

    monkeypatch.setattr(kernels, "linear_fwd", fwd)
    return found


def test_the_latents_are_kept_and_their_up_projections_run_again_once(monkeypatch):
    op, cfg, params, x = made("latents")
    y, plain = op.fwd(params, x, cfg)
    under = with_policy(op, Policy({"attn.mix.[qkv]": Recompute()}))
    _, kept = under.fwd(params, x, cfg)
    rows = {row.path for row in report(kept, params, x).rows}
    assert not rows & {f"attn.mix.{name}" for name in "qkv"} and {"attn.qkv.q.norm.x", "attn.qkv.kv.norm.x"} <= rows
    # q, k and kv, of which v is a part: 8 rows of 2 heads of 12, 12 and 16 numbers
    assert report(plain, params, x).kept_bytes - report(kept, params, x).kept_bytes == 4 * 8 * 2 * (12 + 12 + 16)
    dy = float_like(y, 0)
    for how in WAYS:
        _, kept = under.fwd(params, x, cfg)
        with monkeypatch.context() as patch:
            products = counted(patch)
            by_backward(under, kept, dy, cfg, how)
        assert sorted(products) == [(4, 16), (24, 8), (32, 8)], how


@pytest.mark.turns("seeds")
@pytest.mark.parametrize("seeds", [range(first, first + 4) for first in range(0, 80, 4)], ids=lambda of: f"{of[0]}-{of[-1]}")
def test_drawn_reruns_give_the_bits_of_a_save(seeds):
    for seed in seeds:
        rng = pyrandom.Random(seed)
        recipe, layers = rng.choice([None, None, Fp8Current(), Fp8Block(), Fp8Block(keep="input")]), rng.choice([None, 2])
        name, adapted, how = rng.choice(list(MODELS)), rng.random() < 0.4, rng.choice(WAYS)
        op, cfg, params, x = made(name, recipe, adapted, layers)
        needs, at = drawn_needs(rng, params), "" if layers is None else rng.choice(["*.", "0.", "1."])
        rules = {f"{at}attn.mix.{rng.choice(['[qkv]', '[qkv]', 'q', '[kv]', 'k', 'v'])}": Recompute()}
        rules |= {"*mlp.act.x": Save()} if rng.random() < 0.3 else {}
        said = f"{seed}: {name} {rules} {recipe} {adapted} {needs} {how}"
        try:
            policy = Policy(rules, outputs=rng.choice(["recomputable", "norms", "none"]))
            y, kept = with_policy(op, policy).fwd(params, x, cfg, needs=needs)
        except ValueError as error:
            assert "Save()" in str(error), (said, error)  # kept anyway
            continue
        want, every = with_policy(op, Policy(outputs="none")).fwd(params, x, cfg, needs=needs)
        same_bits(y, want, said)
        if kept is None:
            continue
        under, dy = with_policy(op, policy), float_like(y, seed)
        assert report_before(under, params, x, cfg, needs).kept_bytes == report(kept, params, x).kept_bytes, said
        want = with_policy(op, Policy(outputs="none")).bwd(every, dy, cfg)
        same_bits(by_backward(under, kept, dy, cfg, how), want, said)


def test_no_pattern_that_means_more_runs_products_again(monkeypatch):
    op, cfg, params, x = made("latents")
    optional = Policy({"*.x": Recompute(), "*.mix.[qkv]": Recompute()}, optional=True)
    for policy in (*[one for one in POLICIES.values() if one.blocks == "residuals"], optional):
        under = with_policy(op, policy)
        y, kept = under.fwd(params, x, cfg)
        with monkeypatch.context() as patch:
            products = counted(patch)
            under.bwd(kept, float_like(y, 0), cfg)
        assert products == [], policy


def test_what_cannot_run_again_is_named():
    op, cfg, params, x = made("latents")
    message = r"without Recompute for the x of attn.out \(attn.mix \(attention\) cannot run again\)"
    with pytest.raises(ValueError, match=message):
        with_policy(op, Policy({"attn.out.x": Recompute()})).fwd(params, x, cfg)
    with pytest.raises(ValueError, match="without effect"):
        with_policy(op, Policy({"attn.mix.[qkv]": Recompute(), "attn.mix.?": Save()})).fwd(params, x, cfg)


@pytest.mark.parametrize("name", MODELS)
def test_a_rule_for_a_part_that_is_not_there_is_refused(name):
    op, cfg, params, x = made(name)
    _, kept = with_policy(op, Policy(outputs="none")).fwd(params, x, cfg)
    there = {path for path, value in kept_fields(kept) if value is not None}
    absent = [one.path for one in kept_paths(op, cfg) if one.field and one.field.of_x and not one.waits and one.path not in there]
    assert {"attn.mix.more", "mlp.act.linear"} <= set(absent)
    for path in absent:
        with pytest.raises(ValueError, match="without effect"):
            with_policy(op, Policy({path: Recompute()})).init(cfg, device="meta")


@pytest.mark.parametrize("sequence", [False, True], ids=["all rows", "rows"])
def test_columns_over_ranks_run_again_if_nothing_is_sent(sequence, monkeypatch):
    sizes = DecoderConfig(**SIZES, **MODELS["latents"])
    cfg, x = decoder(sizes), decoder_x(sizes, IDS, torch.float32)
    params = chain.init(cfg, key=random.key(0))
    sent, gather = [], comm.gather
    monkeypatch.setattr(comm, "gather", lambda t, axis: sent.extend([axis] * (axis.size > 1)) or gather(t, axis))

    def run(mesh):
        own = dist.parallel(cfg, roles(sizes), mesh, sequence_parallel=sequence)
        mine, under = dist.shard(params, dist.specs_of(chain, own), mesh), with_policy(chain, LATENTS)
        if sequence:
            with pytest.raises(ValueError, match=r"attn.split \(parallel_latent_split\) cannot run again"):
                under.fwd(mine, x, own)
            return
        y, kept = chain.fwd(mine, x, own)
        dy = float_like(y, 0)
        same_bits(under.bwd(under.fwd(mine, x, own)[1], dy, own), chain.bwd(kept, dy, own), "over ranks")

    run_ranks({"tp": 2}, run)
    assert sequence or not sent


def test_residuals_of_steps_that_run_again_are_pickled():
    op, cfg, params, x = made("biases")
    under = with_policy(op, Policy({"attn.mix.[qkv]": Recompute()}))
    y, kept = under.fwd(params, x, cfg)
    dy, found = float_like(y, 0), pickle.loads(pickle.dumps(kept))
    same_bits(pickle.loads(pickle.dumps(under)).bwd(found, dy, cfg), under.bwd(donate(kept), dy, cfg), "pickled")
    assert linear.again is None  # the op itself knows nothing of it
