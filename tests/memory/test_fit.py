"""`fit`: the policy that it picks, and that its counts, made by following shapes, equal the kept bytes."""

import itertools
import math
import random as pyrandom

import pytest
import torch
from policy_cases import LLAMA, made, report_before
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from funcops import (
    POLICIES,
    ActivationConfig,
    AttentionConfig,
    ChainConfig,
    Disk,
    ExpertsConfig,
    LinearConfig,
    Needs,
    Offload,
    Policy,
    Recompute,
    RepeatConfig,
    RopeConfig,
    SkipConfig,
    Step,
    TorchConfig,
    WithExtras,
    activation,
    attention,
    chain,
    linear,
    models,
    op_from_module,
    random,
    remat,
    repeat,
    report,
    skip,
    with_policy,
)
from funcops.engine.errors import size_of
from funcops.engine.trees import fake, tree_map_tensors
from funcops.library.ops.expert_steps import ExpertStepsConfig, expert_steps, plain_experts
from funcops.lora import lora_needs, with_lora
from funcops.low_precision import NVFP4, Fp8Delayed, quantize_params, recipe_init, with_recipe
from funcops.memory.fit import Fitted, _follow, fit
from funcops.memory.flops import ON_CPU
from funcops.models.blocks import gpt2_block_config, mlp_config
from funcops.testing.checks import same_bits


@pytest.mark.slow
def test_fit_takes_the_cheapest_that_fits():
    cfg, _, x, _ = made("llama")
    kept = {one.name: one.kept_bytes for one in fit(chain, cfg, x, 10**9).tried}
    assert fit(chain, cfg, x, 10**9).picked.name == "save_all"
    assert fit(chain, cfg, x, kept["recompute_elementwise"]).picked.name == "recompute_elementwise"
    tight = fit(chain, cfg, x, kept["recompute_elementwise"] - 1)
    cost = {one.name: one.extra_flops for one in tight.tried}
    # at 16 tokens attention's products make up for those that an MLP has more: the one that keeps more wins
    assert (
        cost["recompute attn"] == cost["recompute mlp"]
        and tight.picked.name == "recompute mlp"
        and 0 < tight.picked.extra_flops < 0.2
    )
    assert "> recompute mlp" in str(tight)
    # x is the caller's, as in a report, so a block that keeps its inputs alone keeps nothing; of three, two keep theirs
    assert kept["minimal"] == 0 and fit(chain, cfg, x, 10).picked.name == "minimal"
    least = r"fit: budget must be at least 16,384 bytes \(16.00 KiB, policy minimal, the least of those tried\), got 10"
    with pytest.raises(ValueError, match=least):
        fit(repeat, RepeatConfig(chain, cfg, 3), x, 10)
    params = chain.init(cfg, key=random.key(0))
    assert report(tight.op.fwd(params, x, cfg)[1], params, x).kept_bytes == tight.picked.kept_bytes


def deep(times):
    """Repeats of every kind: plain, stacked, in a skip, two layers that share residuals, nested."""
    shares = ChainConfig(steps=(Step("up", linear, LinearConfig(64, 64)), Step("act", activation, ActivationConfig(kind="tanh"))))
    inner = RepeatConfig(chain, shares, 2)
    return {
        "llama": (RepeatConfig(chain, LLAMA[0], times), made("llama")[2]),
        "stacked": (RepeatConfig(chain, shares, times, stacked=True), torch.randn(3, 64)),
        "two": (
            ChainConfig(
                steps=(
                    Step("first", repeat, RepeatConfig(chain, shares, times)),
                    Step("skip", skip, SkipConfig(repeat, RepeatConfig(repeat, inner, times))),
                ),
                ties={"first.1.up.weight": "first.0.up.weight"} if times == 3 else (),
            ),
            torch.randn(3, 64),
        ),
    }


def follow(op, cfg, x):
    """The bytes that an op keeps, and its floating-point operations, from one run of all its layers."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        params, given = tree_map_tensors(fake, op.init(cfg, device="meta")), tree_map_tensors(fake, x)
        with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
            y, residuals = op.fwd(params, given, cfg)
            kept = report(residuals, params, given).kept_bytes
            op.bwd(residuals, torch.empty_like(y), cfg)
    return kept, counter.get_total_flops()


@pytest.mark.turns("turn")
@pytest.mark.parametrize("turn", range(4))
@pytest.mark.parametrize("times", [3, 4])
@pytest.mark.parametrize("name", deep(1))
@pytest.mark.slow
def test_fit_for_many_layers_equals_their_bytes(name, times, turn):
    cfg, x = deep(times)[name]
    op = chain if isinstance(cfg, ChainConfig) else repeat
    tried = fit(op, cfg, x, 10**9).tried
    _, base = follow(with_policy(op, "save_all"), cfg, x)
    for one in tried[turn::4][:2]:
        kept, flops = follow(with_policy(op, one.policy), cfg, x)
        assert (one.kept_bytes, one.extra_flops) == (kept, flops / base - 1.0), one.name


def test_a_part_that_keeps_its_inputs_already_costs_no_more():
    mlp = mlp_config(8, 12)
    cfg = ChainConfig(steps=(Step("a", remat(chain), mlp), Step("b", chain, mlp), Step("c", with_policy(chain, "save_all"), mlp)))
    x = torch.randn(3, 8)
    _, base = follow(with_policy(chain, "save_all"), cfg, x)
    tried = fit(chain, cfg, x, 10**9).tried
    assert {"recompute b", "minimal"} <= {one.name for one in tried}
    for one in (one for one in tried if one.name in ("save_all", "recompute_elementwise", "recompute b")):
        kept, flops = follow(with_policy(chain, one.policy), cfg, x)
        assert (one.kept_bytes, one.extra_flops) == (kept, flops / base - 1.0), one.name


@pytest.mark.parametrize("recipe,stacked", [(Fp8Delayed(), False), (NVFP4(), True)], ids=["state", "keys"])
def test_a_recipe_has_its_scales_and_keys_beside_its_weights(recipe, stacked):
    cfg = with_recipe(RepeatConfig(chain, mlp_config(16, 32), 2, stacked=stacked), recipe)
    params, x = repeat.init(cfg, key=random.key(0)), torch.randn(16, 16)
    state = recipe_init(cfg, params) if recipe.delayed else None
    work = quantize_params(params, cfg, state, dtype=torch.float32, key=random.key(1))
    for one in fit(repeat, cfg, x, 10**9).tried:
        _, residuals = with_policy(repeat, one.policy).fwd(work, x, cfg)
        assert report(residuals, work, x).kept_bytes == one.kept_bytes, one.name


@pytest.mark.slow
def test_fit_leaves_out_impossible_policies():
    """The last step's x cannot be recomputed, so nothing of that step is tried alone."""
    cfg, x = deep(2)["two"]
    assert len(fit(chain, cfg, x, 10**9).tried) >= 4


def test_the_cost_of_fit_does_not_grow_with_depth():
    body, x = LLAMA[0], made("llama")[2]
    cfgs = [RepeatConfig(repeat, RepeatConfig(chain, body, n), n) for n in (4, 300)]
    few, many = [_follow(repeat, cfg, x, None).parts for cfg in cfgs]
    assert [part.path for part in few] == [part.path for part in many]
    stand_for = [{math.prod(layer.stands_for(150) for layer in part.layers) for part in parts} for parts in (few, many)]
    assert stand_for == [{1, 3}, {1, 149, 299, 149 * 299}]
    assert len(str(fit(repeat, cfgs[1], x, 10**15)).splitlines()) <= 60


def test_attention_counts_on_the_cpu():
    t = torch.randn(2, 8, 3, 4)
    cfg = AttentionConfig(causal=True)
    x = (t, t, t)
    fitted = fit(attention, cfg, x, 10**6)
    least = min(one.extra_flops for one in fitted.tried)
    again = next(one.extra_flops for one in fitted.tried if one.name == "minimal")
    assert least == 0.0 and again == pytest.approx(2 / 7), "a forward of two products again, beside one and a backward of five"


def test_fit_counts_what_the_needs_keep_and_takes_the_dtype_of_x():
    """A step that trains the head alone keeps less; params of the dtype of a float64 x."""
    steps = (Step("body", linear, LinearConfig(16, 32)), Step("act", activation, ActivationConfig("gelu")))
    layers = Step("layers", repeat, RepeatConfig(chain, mlp_config(32, 24), 6))
    cfg = ChainConfig(steps=(*steps, layers, Step("head", linear, LinearConfig(32, 4))))
    x = torch.zeros(64, 16, dtype=torch.float64)
    params = chain.init(cfg, key=random.key(0), dtype=torch.float64)
    masks = (True, False, ("head",), ("body",), ("layers",), ("head", "layers"), ("layers.0",))
    for needs in (Needs(x, params) for x in (True, False) for params in masks if x or params):
        for one in fit(chain, cfg, x, 10**9, needs=needs).tried:
            kept = with_policy(chain, one.policy).fwd(params, x, cfg, needs=needs)[1]
            assert report(kept, params, x).kept_bytes == one.kept_bytes, (needs, one.name)
    with pytest.raises(TypeError, match="fit: needs must be Needs"):
        fit(chain, cfg, x, 10**9, needs=True)


@pytest.mark.parametrize("stacked", [False, True])
def test_fit_counts_what_frozen_layers_keep(stacked):
    """A norm keeps nothing where nothing before it learns, though the same norm of a later layer keeps its x."""
    cfg = with_lora(RepeatConfig(chain, mlp_config(16, 24), 6, stacked=stacked), 2, ("*.up", "*.down"))
    params, x, needs = repeat.init(cfg, key=random.key(0)), torch.zeros(8, 16), lora_needs(cfg)
    for one in fit(repeat, cfg, x, 10**9, needs=needs).tried:
        kept = with_policy(repeat, one.policy).fwd(params, x, cfg, needs=needs)[1]
        assert report(kept, params, x).kept_bytes == one.kept_bytes, one.name


@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_experts_in_steps_keep_what_their_chain_keeps(weights_on):
    """Under any policy; so do the counts of `fit`, whatever gradients are asked."""
    own = plain_experts(ExpertsConfig(4, dim=32, hidden=32, weights_on=weights_on))
    cfg, w, x = ExpertStepsConfig(own), torch.rand(6, 2), torch.randn(6, 32)
    indices = torch.tensor([[0, 2], [2, 3], [1, 2]] * 2, dtype=torch.int32)
    params, given = expert_steps.init(cfg, key=random.key(0)), WithExtras(w, {"tokens": x, "indices": indices})
    for policy in POLICIES.values():
        with_it = with_policy(expert_steps, policy), with_policy(chain, policy)
        y, kept = with_it[0].fwd(params, (w, x, indices), cfg)
        _, wanted = with_it[1].fwd({step.name: getattr(params, step.name, None) for step in own.steps}, given, own)
        assert report(kept, params, given).kept_bytes == report(wanted, params, given).kept_bytes, policy
        (got, dx), (want, d_given) = with_it[0].bwd(kept, y, cfg), with_it[1].bwd(wanted, y, own)
        same_bits((got.up, got.down, dx[:2]), (want["up"], want["down"], (d_given.main, d_given.extras["tokens"])), str(policy))
    for needs in (Needs.ALL, Needs(x=("0",), params=("down",))):
        for one in fit(expert_steps, cfg, (w, x, indices), 10**9, needs=needs).tried:
            kept = with_policy(expert_steps, one.policy).fwd(params, (w, x, indices), cfg, needs=needs)[1]
            assert report(kept, params, (w, x, indices)).kept_bytes == one.kept_bytes, (needs, one.name)


def layered():
    """Models with ids, positions, labels and keys, and with layers of every kind."""
    decoder = models.DecoderConfig(
        vocab=32,
        dim=16,
        layers=7,
        heads=2,
        kv_heads=1,
        head_size=8,
        hidden=24,
        context=6,
        windows=(None, 4, 4, 4, 4, None, None),
        rope=RopeConfig(8),
    )
    ids = torch.randint(32, (2, 6), generator=torch.Generator().manual_seed(0))
    body, tanh = (
        (skip, SkipConfig(chain, mlp_config(16, 24))),
        ChainConfig(steps=(Step("up", linear, LinearConfig(16, 16)), Step("act", activation, ActivationConfig(kind="tanh")))),
    )
    rows = torch.randn(2, 6, 16)
    gpt2 = gpt2_block_config(16, 2, 24, 0.1)
    two = ChainConfig(
        steps=(
            Step("stem", linear, LinearConfig(16, 16)),
            Step("first", repeat, RepeatConfig(*body, 6)),
            Step("between", linear, LinearConfig(16, 16)),
            Step("last", repeat, RepeatConfig(repeat, RepeatConfig(chain, tanh, 3), 5)),
        )
    )
    return {
        "decoder": (chain, models.decoder(decoder, loss=True), models.decoder_x(decoder, ids, torch.float32, labels=ids)),
        "gpt-2": (repeat, RepeatConfig(chain, gpt2, 9), WithExtras(rows, {"key": random.key(3)})),
        "stacked": (repeat, RepeatConfig(*body, 8, stacked=True), rows),
        "two": (chain, two, rows),
        "shared": (repeat, RepeatConfig(chain, tanh, 6), rows),
        "three": (repeat, RepeatConfig(*body, 3), rows),
    }


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name == "decoder" else ()) for name in layered()])
def test_a_budget_is_the_bytes_of_a_report(name):
    """Under drawn budgets the pick keeps what a report says, within the budget, and no policy that fits recomputes less."""
    (op, cfg, x), rng = layered()[name], pyrandom.Random(name)
    params, by_layers = op.init(cfg, key=random.key(0), dtype=torch.float32), 0
    sizes = [one.kept_bytes for one in fit(op, cfg, x, 10**9).tried]
    y, plainly = op.fwd(params, x, cfg)
    dy = torch.ones_like(y)
    wanted = op.bwd(plainly, dy, cfg)
    for draw in range(4):
        budget = rng.randint(min(sizes), max(sizes))
        fitted = fit(op, cfg, x, max(budget, 1))
        residuals = fitted.op.fwd(params, x, cfg)[1]
        assert report(residuals, params, x).kept_bytes == fitted.picked.kept_bytes <= max(budget, 1), fitted.picked
        same_bits(fitted.op.bwd(residuals, dy, cfg), wanted, fitted.picked.name)
        for one in fitted.tried if draw == 0 else ():
            kept = report(with_policy(op, one.policy).fwd(params, x, cfg)[1], params, x).kept_bytes
            assert kept == one.kept_bytes, one.name
            assert kept > budget or one.extra_flops >= fitted.picked.extra_flops, one.name
        by_layers += any(part.isdigit() or "-" in part for glob, _ in fitted.picked.policy.rules for part in glob.split("."))
    assert by_layers or name in ("three", "shared")


def test_fit_takes_layers_between_two_policies():
    """The fewest layers whose MLPs run again, where the MLPs of all layers would be 24 % more work."""
    cfg = RepeatConfig(chain, LLAMA[0], 12)
    x = made("llama")[2]
    tried = {one.name: one for one in fit(repeat, cfg, x, 10**9).tried}
    every, none = tried["recompute *.attn"], tried["recompute_elementwise"]
    for count in range(1, 12):
        saved = (none.kept_bytes - every.kept_bytes) // 12
        budget = none.kept_bytes - saved * count
        picked = fit(repeat, cfg, x, budget).picked
        layers = "0" if count == 1 else f"0-{count - 1}"
        assert (picked.name, picked.kept_bytes) == (f"recompute {layers}.attn", budget)
        assert picked.extra_flops == pytest.approx(count * every.extra_flops / 12)


@pytest.mark.parametrize("name", ["gpt-2", "stacked", "two", "shared"])
def test_codecs_are_tried_if_asked_with_their_costs(name):
    op, cfg, x = layered()[name]
    params = op.init(cfg, key=random.key(0), dtype=torch.float32)
    lossless = fit(op, cfg, x, 10**9).tried
    every = fit(op, cfg, x, 10**9, codecs=("int8", "bf16")).tried
    rounding = [one for one in every if one.rounded_bytes]
    assert not any(one.rounded_bytes for one in lossless) and len(every) == len(lossless) + len(rounding) > len(lossless)
    plain = with_policy(op, "recompute_elementwise").fwd(params, x, cfg)[1]
    for one in rounding:
        kept = with_policy(op, one.policy).fwd(params, x, cfg)[1]
        assert report(kept, params, x).kept_bytes == one.kept_bytes, one.name
        assert one.rounded_bytes <= report(plain, params).kept_bytes and f"rounds {size_of(one.rounded_bytes)}" in str(fit_of(one))
    budget = next(one.kept_bytes for one in every if one.name == "compress_bf16")
    picked = fit(op, cfg, x, budget, codecs=("bf16",)).picked
    assert picked.extra_flops == 0 and picked.kept_bytes <= budget


def fit_of(one):
    return Fitted(None, one, [one])


def test_codecs_of_fit_are_checked():
    op, cfg, x = layered()["three"]
    with pytest.raises(ValueError, match="Compress: codec must be one of bf16, int8, fp8, mxfp8 .did you mean fp8.., got 'fp4'"):
        fit(op, cfg, x, 10**9, codecs=("fp4",))
    with pytest.raises(TypeError, match="fit: codecs must be tuple, got 'fp8'"):
        fit(op, cfg, x, 10**9, codecs="fp8")
    module = op_from_module(torch.nn.Linear(4, 4), torch.ones(2, 4))[0]
    with pytest.raises(ValueError, match=r"fit: codecs must be \(\), as the policies for a traced module round nothing, got"):
        fit(module, TorchConfig(), torch.ones(2, 4), 10**9, codecs=("fp8",))


UNITS = {"gpt-2": ("*.attn", "*.mlp"), "three": ("*.norm", "*.up", "*.act", "*.down"), "shared": ("*.up", "*.act")}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name != "shared" else name for name in UNITS])
def test_places_are_tried_if_asked_and_the_pick_is_that_of_brute_force(name, device):
    op, cfg, x = layered()[name]
    params, rng, speed = op.init(cfg, key=random.key(0), dtype=torch.float32), pyrandom.Random(name), 1e9
    assert not any(one.moved_bytes for one in fit(op, cfg, x, 10**9).tried)
    every = fit(op, cfg, x, 10**9, places={Offload(): speed}).tried
    for one in every:
        places = report(with_policy(op, one.policy).fwd(params, x, cfg)[1], params, x).places
        assert (places["here"], places["host"], one.seconds) == (one.here, one.moved_bytes, 2 * one.moved_bytes / speed), one.name
    base, plans = follow(with_policy(op, "save_all"), cfg, x)[1], []
    ways = [
        dict(zip(UNITS[name], way, strict=True))
        for way in itertools.product((None, Recompute(), Offload()), repeat=len(UNITS[name]))
    ]
    for rules in ways:
        policy = Policy({path: action for path, action in rules.items() if action}, optional=True)
        for under in (with_policy(op, policy), *([] if any(rules.values()) else [with_policy(op, "save_all")])):
            places = report(under.fwd(params, x, cfg)[1], params, x).places
            plans.append((places["here"], follow(under, cfg, x)[1] / base - 1.0, 2 * places["host"] / speed))
    for budget in rng.choices(range(1, max(here for here, *_ in plans)), k=4):
        picked = fit(op, cfg, x, budget, places={Offload(): speed}).picked
        wanted = min(cost for here, *cost in plans if here <= budget)
        assert picked.here <= budget and [picked.extra_flops, picked.seconds] == pytest.approx(wanted), (budget, picked)
    moved = next(one for one in every if one.moved_bytes)
    assert f"moves {size_of(moved.moved_bytes)} ({1e3 * moved.seconds:.2f} ms)" in str(fit_of(moved))


def test_codecs_and_places_of_fit_compose(device, tmp_path):
    op, cfg, x = layered()["shared"]
    params = op.init(cfg, key=random.key(0), dtype=torch.float32)
    both = fit(op, cfg, x, 10**9, codecs=("int8",), places={Offload(): 1e9, Disk(tmp_path): 1e8}).tried
    moved = [one for one in both if one.moved_bytes]
    assert any(one.rounded_bytes for one in moved) and any("disk" in one.name for one in moved)
    for one in moved:
        places = report_before(with_policy(op, one.policy), params, x, cfg).places
        assert (places["here"], places["host"] + places["file"]) == (one.here, one.moved_bytes), one.name
    assert fit(op, cfg, x, 10**9, places={Offload(): 1e9}).picked.name == "save_all"


def test_places_of_fit_are_checked():
    op, cfg, x = layered()["three"]
    for wrong in (0, -1.0, True, "fast", math.inf):
        with pytest.raises(ValueError, match=r"fit: places\[Offload\(\)\] must be a positive number of bytes a second, got"):
            fit(op, cfg, x, 10**9, places={Offload(): wrong})
    with pytest.raises(TypeError, match="fit: places must be Offload, got"):
        fit(op, cfg, x, 10**9, places={Recompute(): 1e9})
    with pytest.raises(TypeError, match="fit: places must be Mapping, got"):
        fit(op, cfg, x, 10**9, places=Offload())
    module = op_from_module(torch.nn.Linear(4, 4), torch.ones(2, 4))[0]
    with pytest.raises(ValueError, match="fit: places must be None, as the policies for a traced module move nothing, got"):
        fit(module, TorchConfig(), torch.ones(2, 4), 10**9, places={Offload(): 1e9})
