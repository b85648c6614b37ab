"""`Recompute()` on what attention keeps: the steps on the way to it, products too, run again in the backward."""

import pickle
import random as pyrandom

import pytest
import torch
from policy_cases import WAYS, by_backward, drawn_needs, report_before
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

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
from funcops.adapters.graphs import graphed_op
from funcops.distributed import comm
from funcops.engine.trees import fake, tree_map_tensors
from funcops.library.kernels import linear as kernels
from funcops.lora import with_lora
from funcops.low_precision import MXFP8, NVFP4, Fp8Block, Fp8Current, Fp8Delayed, quantize_params, recipe_init, with_recipe
from funcops.memory.fit import _follow, _held
from funcops.memory.flops import ON_CPU
from funcops.memory.parts import kept_fields, kept_paths
from funcops.memory.policy import resolved
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


def traced(op, cfg, params, x, needs):
    """The bytes that an op keeps, and the flops of its products."""
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        params, x = tree_map_tensors(fake, (params, x))
        y, kept = op.fwd(params, x, cfg, needs=needs)
        held = report(kept, params, x).kept_bytes
        op.bwd(kept, torch.empty_like(y), cfg)
    return held, counter.get_total_flops()


@pytest.mark.turns("seed")
@pytest.mark.parametrize("seed", range(80))
def test_a_budget_counts_products_that_run_again(seed):
    rng = pyrandom.Random(seed)
    layers = rng.choice([None, 3])
    op, cfg, params, x = made(rng.choice(list(MODELS)), None, rng.random() < 0.4, layers)
    needs, rule = drawn_needs(rng, params), f"{'*.' * bool(layers)}attn.mix.{rng.choice(['[qkv]', 'q', '[kv]', 'k', 'v'])}"
    policy, rest = Policy({rule: Recompute()}, outputs=rng.choice(["recomputable", "norms", "none"])), Policy(outputs="none")
    try:
        under = with_policy(op, policy)
        under.init(cfg, device="meta")
    except ValueError as error:
        assert "Save()" in str(error) or "the same without it" in str(error), error  # one product makes q, k and v
        return
    _, base = traced(with_policy(op, rest), cfg, params, x, needs)
    kept, flops = traced(under, cfg, params, x, needs)
    cost = _follow(op, cfg, x, None, needs).under(_held(*resolved(op, cfg, policy)))
    assert cost[:2] == (kept, flops / base - 1.0), (rule, needs)


@pytest.mark.parametrize("recipe", [MXFP8(), NVFP4(), Fp8Delayed()], ids=lambda one: type(one).__name__)
def test_codes_by_scales_and_keys_beside_weights_are_made_again(recipe):
    sizes = DecoderConfig(**SIZES | {"dim": 64, "hidden": 64}, head_size=32, rope=RopeConfig(32), qkv_bias=True)
    cfg, extras = with_recipe(block(sizes, groups(sizes)[0].kinds[0]), recipe), decoder_x(sizes, IDS, torch.float32).extras
    plain = chain.init(cfg, key=random.key(0))
    state = recipe_init(cfg, plain) if recipe.delayed else None
    params = quantize_params(plain, cfg, state, dtype=torch.float32, key=random.key(2) if recipe == NVFP4() else None)
    x = WithExtras(random.normal(random.key(1), (2, 4, 64)), dict(extras))
    check_bits(with_policy(chain, Policy({"attn.mix.[qkv]": Recompute()})), params, x, cfg)


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


def over_ranks(name, axis, own_of, check, recipe=None, layers=1):
    """Run `check(op, params, x, cfg)` on two ranks, the op under the rule for q, k and v."""
    sizes = DecoderConfig(**SIZES | {"layers": layers}, **MODELS[name])
    plain, x = decoder(sizes), decoder_x(sizes, IDS, torch.float32)
    plain = plain if recipe is None else with_recipe(plain, recipe)

    def run(mesh):
        cfg = own_of(plain, sizes, mesh)
        check(with_policy(chain, LATENTS), chain.init(cfg, key=random.key(0)), x, cfg)

    run_ranks({axis: 2}, run)


def check_bits(op, params, x, cfg):
    y, kept = with_policy(chain, "save_all").fwd(params, x, cfg)
    dy = float_like(y, 0)
    want = with_policy(chain, "save_all").bwd(kept, dy, cfg)
    for how in WAYS:
        same_bits(by_backward(op, op.fwd(params, x, cfg)[1], dy, cfg, how), want, how)


def columns(sequence):
    return lambda cfg, sizes, mesh: dist.parallel(cfg, roles(sizes), mesh, sequence_parallel=sequence)


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", MODELS)
def test_columns_over_ranks_run_again_if_nothing_is_sent(name, monkeypatch):
    sent, gather = [], comm.gather
    monkeypatch.setattr(comm, "gather", lambda t, axis: sent.extend([axis] * (axis.size > 1)) or gather(t, axis))
    over_ranks(name, "tp", columns(False), check_bits)
    assert not sent


@pytest.mark.turns("name", "recipe", "sequence")
@pytest.mark.parametrize(
    "recipe,sequence", [(None, True), *[(one, rows) for one in (Fp8Current(), Fp8Block()) for rows in (False, True)]], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_columns_that_send_or_round_over_ranks_are_named(name, recipe, sequence):
    step = r"blocks\.\*\.attn\.\S+ \((column_q?linear|parallel_latent_split)\) cannot run again"

    def check(op, params, x, cfg):
        with pytest.raises(ValueError, match=rf"without Recompute for the [qkv] of blocks\.\*\.attn\.mix \({step}"):
            op.fwd(params, x, cfg)

    over_ranks(name, "tp", columns(sequence), check, recipe)


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", MODELS)
def test_layers_of_shards_run_products_again(name):
    over_ranks(name, "dp", lambda cfg, sizes, mesh: dist.zero3(cfg, mesh["dp"]), check_bits, layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_graphs_and_a_compiler_run_products_again(name):
    op, cfg, params, x = made(name, layers=2)
    ops = with_policy(op, "save_all"), with_policy(op, LATENTS)
    y, kept = ops[0].fwd(params, x, cfg)
    dy = float_like(y, 0)
    want = ops[0].bwd(kept, dy, cfg)
    graph = graphed_op(ops[1], cfg, params, x, warmup=0)
    found, handle = graph.fwd(params, x)
    same_bits((found, graph.bwd(handle, dy)), (y, want), "both halves")
    dx, handle = graph.dgrad(graph.fwd(params, x)[1], dy)
    same_bits((graph.wgrad(handle), dx), want, "each half")

    def compiled(op):  # a compiler adds in an order of its own, the same for both
        def step(params, x, dy):
            dx, pending = op.dgrad(op.fwd(params, x, cfg)[1], dy, cfg)
            return op.wgrad(pending, cfg), dx

        torch.compiler.reset()
        return torch.compile(step, fullgraph=True, backend="eager")(params, x, dy)

    same_bits(*[compiled(one) for one in ops], "compiled")


def test_a_layer_that_keeps_its_inputs_has_nothing_to_leave_out():
    op, cfg, params, x = made("latents", layers=2)
    for blocks in ("inputs", "offloaded"):
        with pytest.raises(ValueError, match=f"without effect: each layer keeps its inputs, as blocks='{blocks}' says"):
            with_policy(op, Policy({"*.attn.mix.[qkv]": Recompute()}, blocks=blocks)).fwd(params, x, cfg)
    one = Policy({"0": Save(), "0.attn.mix.[qkv]": Recompute()}, blocks="inputs")
    y, kept = with_policy(op, one).fwd(params, x, cfg)
    want, every = with_policy(op, "save_all").fwd(params, x, cfg)
    dy = float_like(y, 0)
    same_bits(with_policy(op, one).bwd(kept, dy, cfg), with_policy(op, "save_all").bwd(every, dy, cfg), "one layer")


def test_residuals_of_steps_that_run_again_are_pickled():
    op, cfg, params, x = made("biases")
    under = with_policy(op, Policy({"attn.mix.[qkv]": Recompute()}))
    y, kept = under.fwd(params, x, cfg)
    dy, found = float_like(y, 0), pickle.loads(pickle.dumps(kept))
    same_bits(pickle.loads(pickle.dumps(under)).bwd(found, dy, cfg), under.bwd(donate(kept), dy, cfg), "pickled")
    assert linear.again is None  # the op itself knows nothing of it
