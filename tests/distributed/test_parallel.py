"""Whole models rewritten for a mesh compute in parts what one process computes."""

import dataclasses
import math
import random as python_random

import pytest
import torch
from tally import routed
from tiers import drawn

import funcops
from funcops import (
    ActivationConfig,
    AddConfig,
    AttentionConfig,
    CastConfig,
    ChainConfig,
    CrossEntropyConfig,
    DropoutConfig,
    EmbeddingConfig,
    ForkConfig,
    GLUConfig,
    IdentityConfig,
    LayerNormConfig,
    LinearConfig,
    LinearCrossEntropyConfig,
    ModulateConfig,
    Op,
    QKVSplitConfig,
    RepeatConfig,
    ReshapeConfig,
    RopeConfig,
    RowScaleConfig,
    ScaleConfig,
    SkipConfig,
    SoftcapConfig,
    SoftmaxConfig,
    Step,
    UnpermuteConfig,
    WithExtras,
    activation,
    add,
    attention,
    cast,
    chain,
    cross_entropy,
    dist,
    dropout,
    embedding,
    fork,
    glu,
    identity,
    layer_norm,
    linear,
    linear_cross_entropy,
    modulate,
    qkv_split,
    random,
    remat,
    repeat,
    reshape,
    row_scale,
    scale,
    skip,
    softcap,
    softmax,
    unpermute,
)
from funcops.distributed import Mesh
from funcops.distributed.rewrite import ROLES
from funcops.engine.contract.op import make_op
from funcops.engine.trees import paths, tensors
from funcops.models.blocks import block_config, gpt2_block_config
from funcops.testing import run_ranks
from funcops.testing.checks import same_bits
from funcops.testing.tolerances import assert_close

RULES = {"*.qkv.*.proj": "column", "*.out": "row", "*.up": "column", "*.down": "row"}
PACKED = {"*.qkv": "column", "*.out": "row", "*.up": "column", "*.down": "row"}
MESHES = ({"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 1})
KEY, D = random.key(3), torch.float64


def packed_block(dim, heads, hidden, kv_heads):
    """A block with one joint projection of q, k and v, and a layer that is recomputed in the backward."""
    size = dim // heads
    attn = ChainConfig(
        steps=(
            Step("norm", layer_norm, LayerNormConfig(dim)),
            Step("qkv", linear, LinearConfig(dim, (heads + 2 * kv_heads) * size)),
            Step("split", qkv_split, QKVSplitConfig(heads, size, kv_heads=kv_heads, rope=RopeConfig(size)), takes=("positions",)),
            Step("mix", attention, AttentionConfig(causal=True)),
            Step("merge", reshape, ReshapeConfig((heads, size), (dim,))),
            Step("out", linear, LinearConfig(dim, dim)),
        ),
        extras=("positions",),
    )
    mlp = ChainConfig(
        steps=(
            Step("up", remat(linear), LinearConfig(dim, 2 * hidden)),
            Step("act", glu, GLUConfig(kind="geglu", gate="second")),
            Step("inner", activation, ActivationConfig("silu")),
            Step("drop", dropout, DropoutConfig(0.4), takes=("key",)),
            Step("down", linear, LinearConfig(hidden, dim)),
            Step("after", dropout, DropoutConfig(0.4), takes=("key",)),
        ),
        extras=("key",),
    )
    steps = (Step("attn", skip, SkipConfig(chain, attn)), Step("mlp", skip, SkipConfig(chain, mlp)))
    body = ChainConfig(steps=steps, extras=("positions", "key"))
    return ChainConfig(steps=(Step("blocks", repeat, RepeatConfig(chain, body, 2)),), extras=("positions", "key"))


MODELS = {
    "llama": lambda heads, kv: block_config(8 * heads, heads, 24, kv),
    "gpt2": lambda heads, kv: gpt2_block_config(8 * heads, heads, 32, 0.3),
    "packed": lambda heads, kv: packed_block(8 * heads, heads, 16, kv),
}


def parts(t, mesh):
    return t.chunk(mesh.size)[mesh.rank].contiguous()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), drawn(MODELS, MESHES))
def test_a_block_in_one_call(name, sizes):
    """y, dx and the summed gradients; params by shard and masks of dropout, which are bits."""
    draw = python_random.Random(f"{name} {sizes}")
    cfg = MODELS[name](4, draw.choice([4] if sizes["tp"] == 4 else [2, 4]))
    overlap = draw.choice(["none", "bulk", "ring"])
    extras = {"positions": torch.arange(3), "key": random.key(9)}
    extras = {path: extras[path] for path in cfg.extras}
    whole, x, dy = chain.init(cfg, key=KEY, dtype=D), torch.randn(8, 3, 32, dtype=D), torch.randn(8, 3, 32, dtype=D)
    y, residuals = chain.fwd(whole, WithExtras(x, extras), cfg)
    wanted, dx = chain.bwd(residuals, dy, cfg)

    def run(mesh):
        own = dist.parallel(cfg, PACKED if name == "packed" else RULES, mesh, overlap=overlap)
        specs = dist.specs_of(chain, own)
        params = chain.init(own, key=KEY, dtype=D)
        same_bits(params, dist.shard(whole, specs, mesh), "params")
        y, residuals = chain.fwd(params, WithExtras(parts(x, mesh), extras), own)
        dparams, dx = chain.bwd(residuals, parts(dy, mesh), own)
        return y, dx.main, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    ys, dxs, found = zip(*run_ranks(sizes, run), strict=True)
    torch.testing.assert_close(torch.cat(ys), y, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(dxs), dx.main, rtol=0, atol=1e-12)
    for dparams in found:
        for path, t in paths(dparams).items():
            if t is not None:
                torch.testing.assert_close(t, paths(wanted)[path], rtol=0, atol=1e-10, msg=path)


ENDS = {
    "logits": (
        (
            Step("head", linear, LinearConfig(32, 16, bias=False)),
            Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
        ),
        {"head": "column", "loss": "vocab"},
    ),
    "fused": ((Step("loss", linear_cross_entropy, LinearCrossEntropyConfig(32, 16), takes=("labels",)),), {"loss": "vocab"}),
}


@pytest.mark.parametrize(("end", "sizes"), drawn(ENDS, [{"cp": 2, "tp": 2}, {"dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 1}]))
def test_a_decoder_with_sharded_vocabulary_and_sequence(end, sizes):
    for mix in ("context", "context ring", "context heads") if "cp" in sizes else ("context",):
        hold_a_decoder_to_one_process(end, sizes, mix)


def hold_a_decoder_to_one_process(end, sizes, mix):
    """Loss and gradients of the whole model; dropout is drawn by places in the whole tensor."""
    last, roles = ENDS[end]
    drop = Step("drop", dropout, DropoutConfig(0.2), takes=("key",))
    steps = (Step("embed", embedding, EmbeddingConfig(16, 32)), drop, Step("block", chain, block_config(32, 4, 24)), *last)
    cfg = ChainConfig(steps=steps, extras=("key", "positions", "labels"))
    ids, labels = torch.randint(16, (8, 8)), torch.randint(16, (8, 8))
    whole = chain.init(cfg, key=KEY, dtype=D)
    loss, residuals = chain.fwd(whole, WithExtras(ids, {"key": KEY, "positions": torch.arange(8), "labels": labels}), cfg)
    wanted, _ = chain.bwd(residuals, torch.ones((), dtype=D), cfg)

    def run(mesh):
        own = dist.parallel(cfg, {**RULES, **roles, "embed": "vocab", "*.mix": mix}, mesh)
        specs = dist.specs_of(chain, own)
        params = dist.init(chain, own, specs, mesh, key=KEY, dtype=D)
        same_bits(params, dist.shard(whole, specs, mesh), "params")
        rows, tokens = ([axis for axis in mesh.axes if axis.name == name] for name in ("dp", "cp"))
        given = [t.chunk(rows[0].size)[rows[0].rank] if rows else t for t in (ids, labels)]
        mine, right = (dist.zigzag(t, tokens[0]) if tokens else t for t in given)
        positions = dist.zigzag_positions(8, tokens[0]) if tokens else torch.arange(8)
        loss, residuals = chain.fwd(params, WithExtras(mine, {"key": KEY, "positions": positions, "labels": right}), own)
        share = math.prod(axis.size for axis in (*rows, *tokens))
        dparams, _ = chain.bwd(residuals, torch.ones((), dtype=D) / share, own)
        return loss, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    losses, found = zip(*run_ranks(sizes, run), strict=True)
    torch.testing.assert_close(torch.stack(losses).mean(), loss, rtol=0, atol=1e-12)
    for dparams in found:
        for path, t in paths(dparams).items():
            if t is not None:
                torch.testing.assert_close(t, paths(wanted)[path], rtol=0, atol=1e-12, msg=path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "gpt2"])
def test_a_block_without_sequence_parallelism(name):
    """All ranks of tp have the same rows between layers, of any number; gradients there are whole, not partial sums."""
    cfg, rows = MODELS[name](4, 4), 3
    extras = {path: {"positions": torch.arange(3), "key": random.key(9)}[path] for path in cfg.extras}
    whole = chain.init(cfg, key=KEY, dtype=D)
    x, dy = (torch.randn(2 * rows, 3, 32, dtype=D) for _ in range(2))
    y, residuals = chain.fwd(whole, WithExtras(x, extras), cfg)
    wanted, dx = chain.bwd(residuals, dy, cfg)

    def run(mesh):
        dp = mesh["dp"]
        own = dist.parallel(cfg, PACKED if name == "packed" else RULES, mesh, overlap="bulk", sequence_parallel=False)
        specs = dist.specs_of(chain, own)
        params = chain.init(own, key=KEY, dtype=D)
        same_bits(params, dist.shard(whole, specs, mesh), "params")
        y, residuals = chain.fwd(params, WithExtras(x.chunk(2)[dp.rank], extras), own)
        dparams, dx = chain.bwd(residuals, dy.chunk(2)[dp.rank], own)
        norm = dist.global_norm(dist.sum_gradients(dparams, specs, mesh), (), dist.part_axes(params, specs, mesh))
        return y, dx.main, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh), norm

    ys, dxs, found, norms = zip(*run_ranks({"dp": 2, "tp": 2}, run), strict=True)
    torch.testing.assert_close(torch.cat(ys[::2]), y, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat(dxs[1::2]), dx.main, rtol=0, atol=1e-12)
    total = torch.stack([t.square().sum() for t in tensors(wanted)]).sum().sqrt()
    for dparams, norm in zip(found, norms, strict=True):
        torch.testing.assert_close(norm, total, rtol=1e-12, atol=0)
        for path, t in paths(dparams).items():
            if t is not None:
                torch.testing.assert_close(t, paths(wanted)[path], rtol=0, atol=1e-10, msg=path)


def test_layers_of_one_axis_agree_on_sequence_parallelism():
    tp = Mesh.abstract({"tp": 2}, 0)["tp"]
    cfg = chained(
        ("up", dist.column_linear, dist.ColumnLinearConfig(4, 8, axis=tp)),
        ("down", dist.row_linear, dist.RowLinearConfig(8, 4, axis=tp, sequence_parallel=False)),
    )
    with pytest.raises(
        ValueError, match=r"^specs_of: cfg.sequence_parallel must be the same in all layers over axis 'tp' of 2, got both"
    ):
        dist.specs_of(chain, cfg)


def test_masks_of_dropout_are_parts_of_one_mask():
    """Six x of drawn sizes, sharded along their dimensions in every way; the gradient of half the elements is 0."""
    draw = python_random.Random(0)
    for case in range(6):
        sizes = {name: draw.choice([1, 2, 3]) for name in ("dp", "cp", "tp")}
        world, inside = math.prod(sizes.values()), case % 2
        rows, features = (sizes["dp"], sizes["tp"]) if inside else (sizes["dp"] * sizes["tp"], 1)
        shape = (rows * draw.randint(1, 2), 2 * sizes["cp"] * draw.randint(1, 2), features * draw.randint(1, 5))
        t, key = torch.randn(shape), random.key(case)
        whole, residuals = dropout.fwd(None, (t, key), DropoutConfig(0.5))
        wanted = whole, dropout.bwd(residuals, t, DropoutConfig(0.5))[1][0]
        for rank in range(world):
            mesh = Mesh.abstract(sizes, rank)
            over = [dist.Shared(0, mesh["dp"]), dist.Shared(1, mesh["cp"], zigzag=True)]
            over.insert(1, dist.Shared(-1 if inside else 0, mesh["tp"]))
            cfg = dist.ShardedDropoutConfig(0.5, shared=tuple(over))

            def own(t, over=over):
                for one in over:
                    n, r = one.axis.size, one.axis.rank
                    chunks = t.chunk(2 * n if one.zigzag else n, one.dim)
                    t = torch.cat([chunks[r], chunks[2 * n - 1 - r]], one.dim) if one.zigzag else chunks[r]
                return t.contiguous()

            y, residuals = dist.sharded_dropout.fwd(None, (own(t), key), cfg)
            dx = dist.sharded_dropout.bwd(residuals, own(t), cfg)[1][0]
            same_bits((y, dx), tuple(map(own, wanted)), f"{sizes} {rank}")


def test_on_an_axis_of_one_rank_a_model_stays_as_it_is():
    cfg = block_config(16, 4, 24)
    assert dist.parallel(cfg, RULES, Mesh.abstract({"dp": 4, "tp": 1}, 2)) == cfg


def chained(*steps):
    return ChainConfig(steps=tuple(Step(name, op, cfg) for name, op, cfg in steps))


UP, DOWN = ("up", linear, LinearConfig(4, 8)), ("down", linear, LinearConfig(8, 4))
OWN = make_op("own", LinearConfig, init=linear.init, fwd=linear.fwd, dgrad=linear.dgrad, wgrad=linear.wgrad)
MLP, BOTH = chained(UP, DOWN), {"up": "column", "down": "row"}
BAD = {
    "parallel: rules must be globs that are the first to match a step (up, down), got 'no'": (MLP, {**BOTH, "no": "row"}),
    "parallel: rules must be globs that are the first to match a step (up, down), got 'd*'": (MLP, {**BOTH, "d*": "row"}),
    f"parallel: rules['up'] must be {', '.join(map(repr, ROLES))}, or a function, got 'rows'": (MLP, {**BOTH, "up": "rows"}),
    "parallel: rules must be with a row layer after every column layer, got none after up": (chained(UP), {"up": "column"}),
    "parallel: down, a row layer, must be after a column layer, where features are sharded, got x sharded only along rows": (
        chained(DOWN),
        {"down": "row"},
    ),
    "parallel: down, a column layer, must be where x has all features, got x sharded along dim -1 over 'tp'": (
        MLP,
        {"up": "column", "down": "column"},
    ),
    "parallel: rules for act must be of another role ('row' is for linear or qlinear or low_rank), got ActivationConfig": (
        chained(UP, ("act", activation, ActivationConfig("silu")), DOWN),
        {**BOTH, "act": "row"},
    ),
    "parallel: step norm must be featurewise, as x is sharded along dim -1 over 'tp' (put a row layer before it), "
    "got layer_norm, which mixes features": (chained(UP, ("norm", layer_norm, LayerNormConfig(8)), DOWN), BOTH),
    "parallel: step soft must be featurewise, as x is sharded along dim -1 over 'tp' (put a row layer before it), "
    "got softmax, which mixes features": (chained(UP, ("soft", softmax, SoftmaxConfig()), DOWN), BOTH),
    "parallel: step loss must be featurewise, as x is sharded along dim -1 over 'tp' (put a row layer before it), "
    "got cross_entropy, which mixes features": (
        ChainConfig(steps=(Step(*UP), Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",))), extras=("labels",)),
        {"up": "column"},
    ),
    "parallel: step down must be featurewise, as x is sharded along dim -1 over 'tp' (put a row layer before it), "
    "got linear, which mixes features": (MLP, {"up": "column"}),
    "up: parallel: op 'own' must be linear, or one that remat or with_policy made from it, got another": (
        chained(("up", OWN, LinearConfig(4, 8)), DOWN),
        BOTH,
    ),
    "up: ColumnLinearConfig: out_features must be a multiple of 2, the size of axis 'tp', got 7": (
        chained(("up", linear, LinearConfig(4, 7)), ("down", linear, LinearConfig(7, 4))),
        BOTH,
    ),
    "down: RowLinearConfig: in_features must be a multiple of 2, the size of axis 'tp', got 3": (
        chained(
            ("up", linear, LinearConfig(4, 6)),
            ("act", glu, GLUConfig(kind="swiglu", gate="first")),
            ("down", linear, LinearConfig(3, 4)),
        ),
        BOTH,
    ),
    "heads: ReshapeConfig: out_shape must be sizes of which the first is a multiple of 2, the number of ranks, got (3, 4)": (
        chained(
            ("up", linear, LinearConfig(4, 12)),
            ("heads", reshape, ReshapeConfig((12,), (3, 4))),
            ("merge", reshape, ReshapeConfig((3, 4), (12,))),
            ("down", linear, LinearConfig(12, 4)),
        ),
        BOTH,
    ),
    "parallel: output 'wide' of step split must be of all features: take it after a row layer, "
    "got sharded along dim -1 over 'tp'": (
        ChainConfig(steps=(Step(*UP), Step("split", fork, ForkConfig(), gives=("wide",)), Step(*DOWN)), outputs=("wide",)),
        BOTH,
    ),
    "parallel: y of inner must be sharded like its x, got sharded along dim -1 over 'tp'": (
        chained(("inner", skip, SkipConfig(linear, LinearConfig(4, 4)))),
        {"inner": "column"},
    ),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_rules_raise(said):
    cfg, rules = BAD[said]
    with pytest.raises(ValueError) as raised:
        dist.parallel(cfg, rules, Mesh.abstract({"tp": 2}, 0))
    assert str(raised.value) == said


DP = Mesh.abstract({"dp": 2, "tp": 2}, 0)["dp"]
FEATUREWISE = {
    activation: ActivationConfig("silu"),
    add: AddConfig(),
    cast: CastConfig(torch.float32),
    fork: ForkConfig(),
    identity: IdentityConfig(),
    modulate: ModulateConfig(),
    row_scale: RowScaleConfig(),
    scale: ScaleConfig(2.0),
    softcap: SoftcapConfig(5.0),
    unpermute: UnpermuteConfig(),
    dist.combine: dist.CombineConfig(DP),
    dist.copy_to: dist.CopyToConfig(DP),
    dist.dispatch: dist.DispatchConfig(4, axis=DP),
    dist.shift: dist.ShiftConfig(DP),
    dist.sum_over: dist.SumOverConfig(DP),
}


@pytest.mark.parametrize("op", FEATUREWISE, ids=lambda op: op.name)
def test_a_step_of_each_feature_alone_stays_as_it_is_on_sharded_features(op):
    cfg = chained(UP, ("one", op, FEATUREWISE[op]), DOWN)
    own = dist.parallel(cfg, BOTH, Mesh.abstract({"dp": 2, "tp": 2}, 0))
    assert [step.op for step in own.steps] == [dist.column_linear, op, dist.row_linear] and own.steps[1] == cfg.steps[1]


def test_every_op_of_each_feature_alone_is_in_the_table():
    """Beside those that draw a mask of x's shape, of which a rank draws its part."""
    named = [getattr(room, name) for room in (funcops, dist) for name in room.__all__]
    found = {op.name for op in named if isinstance(op, Op) and op.config.featurewise}
    assert found == {op.name for op in FEATUREWISE} | {"dropout", "sharded_dropout"}


def test_outputs_are_of_the_rows_of_a_rank():
    steps = (Step(*UP), Step("act", activation, ActivationConfig("silu")), Step(*DOWN), Step("moe", chain, routed(4)))
    cfg = ChainConfig(steps=steps, outputs=("load", "loss", "logits"))
    whole, x, dy = chain.init(cfg, key=KEY, dtype=D), torch.randn(8, 4, dtype=D), torch.randn(8, 4, dtype=D)

    def step(params, x, logits, cfg):
        y, residuals = chain.fwd(params, x, cfg)
        dy = WithExtras(None, {"load": None, "loss": torch.ones((), dtype=D), "logits": logits})
        return y, *chain.bwd(residuals, dy, cfg)

    def run(mesh):
        own = dist.parallel(cfg, BOTH, mesh)
        specs = dist.specs_of(chain, own)
        y, dparams, dx = step(dist.shard(whole, specs, mesh), parts(x, mesh), parts(dy, mesh), own)
        return y, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh), dx

    halves = [step(whole, *both, cfg) for both in zip(x.chunk(2), dy.chunk(2), strict=True)]
    wanted = [a + b for a, b in zip(*[tensors(dparams) for _, dparams, _ in halves], strict=True)]
    for (y, dparams, dx), (y_alone, _, dx_alone) in zip(run_ranks({"tp": 2}, run), halves, strict=True):
        assert_close((y, tensors(dparams), dx), (y_alone, wanted, dx_alone), dtype=D)


def test_other_axes():
    with pytest.raises(ValueError, match=r"^Mesh: axis must be one of dp, tp, got 'xp'"):
        dist.parallel(MLP, BOTH, Mesh.abstract({"dp": 1, "tp": 2}, 0), axis="xp")
    with pytest.raises(
        ValueError, match=r"^parallel: rules must be with 'context' for attn.mix, an attention over the tokens of all ranks"
    ):
        dist.parallel(block_config(16, 4, 24), RULES, Mesh.abstract({"cp": 2, "tp": 2}, 0))
    cfg = chained(UP, ("mid", activation, ActivationConfig("silu")), DOWN)
    own_rule = lambda op, cfg: (op, dataclasses.replace(cfg, kind="relu"))  # noqa: E731
    replaced = dist.parallel(cfg, {**BOTH, "mid": own_rule}, Mesh.abstract({"tp": 2}, 0))
    assert replaced.steps[1].cfg == ActivationConfig("relu") and replaced.steps[0].op is dist.column_linear


def test_a_parallel_layer_has_every_option_of_its_plain_one():
    for role in (role for roles in ROLES.values() for role in roles.values()):
        names = [{field.name for field in dataclasses.fields(op.config)} for op in (role.source, role.becomes)]
        assert names[0] <= names[1], role.source.name
    mesh = Mesh.abstract({"cp": 2, "tp": 1}, 0)
    cfg = ChainConfig(steps=(Step("mix", attention, AttentionConfig(causal=True, scale=0.3, window=4)),))
    made = dist.parallel(cfg, {"mix": "context"}, mesh).steps[0].cfg
    assert (made.causal, made.scale, made.window, made.axis) == (True, 0.3, 4, mesh["cp"])


def test_a_sharded_leaf_given_to_a_plain_op_is_named():
    mesh = Mesh.abstract({"tp": 2}, 1)
    own = dist.parallel(MLP, BOTH, mesh)
    params = chain.init(own, key=KEY)
    assert len(tensors(params)) == 4
    with pytest.raises(ValueError, match=r"^up: linear_fwd: params.weight must be \[8, 4\], got \[4, 4\]"):
        chain.fwd(params, torch.ones(2, 4), MLP)


def test_a_role_drops_no_option():
    """Each option of a step is one of the step that replaces it."""
    for role, kinds in ROLES.items():
        for cls, part in kinds.items():
            assert {f.name for f in dataclasses.fields(cls)} <= {f.name for f in dataclasses.fields(part.becomes.config)}, (
                role,
                cls,
            )


def test_packed_features_are_known_through_steps_that_keep_them():
    """Up makes gate and linear side by side; a GLU behind a pointwise step is told so, behind another GLU not."""
    up, down = Step("up", linear, LinearConfig(8, 32)), Step("down", linear, LinearConfig(16, 8))
    act, gate = Step("act", activation, ActivationConfig("relu")), Step("gate", glu, GLUConfig(kind="swiglu", gate="first"))
    mesh, rules = dist.Mesh.abstract({"tp": 2}, rank=0), {"up": "column", "down": "row"}
    own = dist.parallel(ChainConfig(steps=(up, act, gate, down)), rules, mesh)
    assert own.steps[0].cfg.parts == dist.parallel(ChainConfig(steps=(up, gate, down)), rules, mesh).steps[0].cfg.parts == (16, 16)
    narrow = Step("down", linear, LinearConfig(8, 8))
    twice = ChainConfig(steps=(up, gate, dataclasses.replace(gate, name="again"), narrow))
    with pytest.raises(ValueError, match="again: parallel: x must be the y of a column layer, unchanged"):
        dist.parallel(twice, rules, mesh)
