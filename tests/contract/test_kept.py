"""Kept tensors and reports of them: frozen prefixes, masks of layers, policies and weights, storages, other threads."""

import pytest
import torch
from law_cases import MODULES

from funcops import (
    ActivationConfig,
    ChainConfig,
    Compress,
    DropoutConfig,
    LinearConfig,
    Needs,
    ParallelConfig,
    Policy,
    RepeatConfig,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    chain,
    donate,
    dropout,
    linear,
    parallel,
    random,
    remat,
    repeat,
    report,
    skip,
    with_policy,
)
from funcops.engine.residuals.forms import Packed
from funcops.engine.trees import leaves, paths, replace, tensors, with_leaves
from funcops.models.blocks import block_config, mlp_config
from funcops.testing.checks import float_like
from funcops.testing.frugal import held, masks

STEPS = ChainConfig(
    steps=tuple(
        step
        for i in range(3)
        for step in (Step(f"up{i}", linear, LinearConfig(4, 4)), Step(f"act{i}", activation, ActivationConfig("silu")))
    ),
    recompute=False,
)


@pytest.mark.parametrize("frozen", range(3))
@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_frozen_prefix_keeps_nothing(frozen, part):
    params, x = chain.init(STEPS, key=random.key(0)), torch.randn(3, 4)
    needs = Needs(x=False, params=[f"up{i}.{part}" for i in range(frozen, 3)])
    y, kept = chain.fwd(params, x, STEPS, needs=needs)
    own = {f"up{i}.x" for i in range(frozen, 3) if part == "weight"}
    assert held(kept) == own | {f"up{i}.weight" for i in range(frozen + 1, 3)} | {f"act{i}.x" for i in range(frozen, 3)}
    assert [kept[f"up{i}"] is None and kept[f"act{i}"] is None for i in range(3)] == [i < frozen for i in range(3)]
    dx, pending = chain.dgrad(kept, torch.ones_like(y), STEPS)
    assert dx is None
    assert held(pending) == own | {f"up{i}.dy" for i in range(frozen, 3)}


DROP = Step("drop", dropout, DropoutConfig(0.5), takes=("key",))
TWICE = ChainConfig(steps=(DROP, Step("again", dropout, DropoutConfig(0.5), takes=("key",))), extras=("key",))
ONCE = ChainConfig(steps=(DROP,), extras=("key",))
BODIES = {  # a tower of dropouts, and how many masks of a half each there are in a row
    "steps": (chain, TWICE, 2),
    "layers": (repeat, RepeatConfig(chain, ONCE, 2), 2),
    "three layers": (repeat, RepeatConfig(chain, ONCE, 3), 3),
    "layers of steps": (repeat, RepeatConfig(chain, TWICE, 2), 4),
    "layers of layers": (repeat, RepeatConfig(repeat, RepeatConfig(chain, ONCE, 2), 2), 4),
    "layers computed again": (with_policy(repeat, "minimal"), RepeatConfig(chain, ONCE, 2), 2),
    "remat": (remat(repeat), RepeatConfig(chain, ONCE, 2), 2),
}


@pytest.mark.parametrize("name", BODIES)
def test_every_layer_and_step_draws_a_mask_of_its_own(name):
    op, cfg, masks = BODIES[name]
    x = WithExtras(torch.ones(4096), {"key": random.key(3)})
    y, kept = op.fwd(op.init(cfg, key=random.key(0)), x, cfg)
    part = float((y != 0).double().mean())
    assert abs(part - 0.5**masks) < 5 * (0.5**masks / 4096) ** 0.5
    assert torch.equal(y, op.bwd(kept, torch.ones_like(y), cfg)[1].main), "the backward draws the same"


def test_branches_draw_masks_of_their_own():
    cfg = ParallelConfig(branches=(Step("a", chain, ONCE), Step("b", chain, ONCE)))
    (a, b), _ = parallel.fwd(parallel.init(cfg), WithExtras(torch.ones(4096), {"key": random.key(3)}), cfg)
    assert abs(float((a != b).double().mean()) - 0.5) < 0.05


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("pattern", ["*", "*.weight", "up.*", "*w*"])
def test_no_rule_packs_weights(pattern, codec):
    cfg, x = mlp_config(16, 24), torch.randn(8, 16)
    params, op = chain.init(cfg, key=random.key(0)), with_policy(chain, Policy({pattern: Compress(codec)}))
    if pattern == "*.weight":
        with pytest.raises(
            ValueError, match=r"rules at '\*.weight' must be one that changes what is kept, .*weight is a parameter"
        ):
            op.fwd(params, x, cfg)
        return
    _, kept = op.fwd(params, x, cfg)
    weights = {id(t) for t in tensors(params)}
    for step in ("norm", "up", "down"):
        assert id(kept[step].weight) in weights
    if pattern == "*":
        assert type(kept["norm"].x) is Packed, "everything but weights is packed"


def test_a_report_counts_the_memory_that_a_tensor_keeps_alive():
    cfg = LinearConfig(4, 3)
    params, buffer = linear.init(cfg, key=random.key(0)), torch.randn(1000, 4)
    _, kept = linear.fwd(params, buffer[:2], cfg)
    assert report(kept, params).kept_bytes == buffer.nbytes
    assert report(kept, params, buffer).kept_bytes == 0 and report(kept, params, buffer).aliased_bytes == buffer.nbytes + 48
    both = replace(kept, weight=buffer[5:8])
    assert [row.bytes for row in report(both).rows] == [buffer.nbytes, 0], "shared memory counts once"


@pytest.mark.parametrize("needs", [Needs(x=False), Needs(params=False), Needs(params="0.down")], ids=str)
def test_donated_blocks_give_the_same_bits(needs):
    cfg = RepeatConfig(skip, SkipConfig(chain, mlp_config(8, 6)), 2)
    params, x = repeat.init(cfg, key=random.key(0)), torch.randn(5, 8)
    y, kept = repeat.fwd(params, x, cfg, needs=needs)
    want = repeat.bwd(kept, torch.ones_like(y), cfg)
    got = repeat.bwd(donate(kept), torch.ones_like(y), cfg)
    for (path, a), b in zip(paths(want).items(), leaves(got), strict=True):
        assert (a is None and b is None) or torch.equal(a, b), path


def test_a_block_keeps_exactly_these():
    """Every path that a Llama block and its pending keep is written out here, so that a change is seen."""
    cfg = block_config(8, 2, 12)
    params, x = chain.init(cfg, key=random.key(0)), WithExtras(torch.randn(1, 4, 8), {"positions": torch.arange(4)})
    y, kept = chain.fwd(params, x, cfg)
    _, pending = chain.dgrad(kept, torch.ones_like(y), cfg)
    assert " ".join(sorted(p for p in held(kept) if p.startswith("attn"))) == KEPT
    assert " ".join(sorted(p for p in held(pending) if p.startswith("attn"))) == WAITING


KEPT = (
    "attn.mix.k attn.mix.logsumexp attn.mix.q attn.mix.v attn.mix.y attn.norm.rstd "
    "attn.norm.weight attn.norm.x attn.out.weight attn.out.x attn.qkv.k.proj.weight attn.qkv.k.rope.positions "
    "attn.qkv.q.proj.weight attn.qkv.q.rope.positions attn.qkv.v.proj.weight"
)
WAITING = (
    "attn.norm().rstd attn.norm().weight attn.norm().x attn.norm.parts attn.out.dy attn.out.x attn.qkv.k.proj.dy "
    "attn.qkv.q.proj.dy attn.qkv.v.proj.dy"
)


LEAVES = [m.CASES[0] for m in MODULES.values() if m.CASES[0].op.fields(m.CASES[0].cfg)]


@pytest.mark.parametrize("case", LEAVES, ids=str)
def test_every_kept_tensor_is_read(case):
    """Under every mask, a NaN in a kept float tensor changes a gradient: no declared tensor goes unread."""
    params, x = case.make(torch.float64)
    # attention's kernels make dq, dk and dv at once, and read for all of them
    parts = case.op.name not in ("attention", "sink_attention", "qattention", "gated_delta_rule")
    for needs in (Needs.ALL, *(masks(params, x) if parts else ())):
        y, kept = case.op.fwd(params, x, case.cfg, needs=needs)
        dy = float_like(y, 7)
        want = case.op.bwd(kept, dy, case.cfg)
        for path, t in paths(kept).items():
            if t is not None and t.is_floating_point():
                spoilt = with_leaves(kept, [t * float("nan") if p == path else u for p, u in paths(kept).items()])
                got = case.op.bwd(spoilt, dy, case.cfg)
                pairs = zip(leaves(got), leaves(want), strict=True)
                assert not all((a is None and b is None) or torch.equal(a, b) for a, b in pairs), f"{path} under {needs}"
