"""Meshes of any axis names: ranks draw their parts of one mask and of one noise, and losses and gradients are one process's."""

import dataclasses
import math
import random as python_random

import pytest
import torch

from funcops import (
    AttentionConfig,
    BMMConfig,
    CausalConv1dConfig,
    ChainConfig,
    CrossEntropyConfig,
    DropoutConfig,
    ExpertsConfig,
    GatedDeltaRuleConfig,
    GroupNormConfig,
    LinearConfig,
    PatchifyConfig,
    QKVSplitConfig,
    RepeatConfig,
    ReshapeConfig,
    RMSNormConfig,
    RouteConfig,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    attention,
    bmm,
    causal_conv1d,
    chain,
    cross_entropy,
    dist,
    dropout,
    gated_delta_rule,
    group_norm,
    linear,
    patchify,
    qkv_split,
    random,
    repeat,
    reshape,
    rms_norm,
    route,
    skip,
)
from funcops.distributed import Mesh
from funcops.engine.contract.configs import fields_of
from funcops.engine.contract.op import OpConfig, config, make_op
from funcops.engine.trees import paths
from funcops.library.ops.activation import ActivationConfig
from funcops.models import MoEConfig, moe
from funcops.testing import run_ranks
from funcops.testing.tolerances import assert_close

D, NAMES = torch.float64, ("dp", "data", "replica", "ep", "x", "tp", "model", "cp", "seq", "node")


def mixing():
    """Attention over 4 heads whose q, k and v are one projection, and dropout of features that ranks share."""
    return ChainConfig(
        steps=(
            Step("norm", rms_norm, RMSNormConfig(8)),
            Step("proj", linear, LinearConfig(8, 24)),
            Step("split", qkv_split, QKVSplitConfig(4, 2, kv_heads=4)),
            Step("mix", attention, AttentionConfig(causal=True)),
            Step("merge", reshape, ReshapeConfig((4, 2), (8,))),
            Step("inner", dropout, DropoutConfig(0.3), takes=("key",)),
            Step("out", linear, LinearConfig(8, 8)),
            Step("drop", dropout, DropoutConfig(0.3), takes=("key",)),
        ),
        extras=("key",),
    )


def mixture(draw, whole_sequences):
    """A mixture of experts with jitter, and with a loss of each sequence where a rank has whole sequences."""
    router = RouteConfig(8, 2, jitter=0.3, z=0.1, score=draw.choice(("softmax", "sigmoid")), aux=0.2 * whole_sequences,
                         sequence_wise=whole_sequences)  # fmt: skip
    inside = moe(MoEConfig(route=router, experts=ExpertsConfig(8, 8, 4)))
    steps = (
        Step("norm", rms_norm, RMSNormConfig(8)),
        Step("moe", chain, inside),
        Step("out", dropout, DropoutConfig(0.2), takes=("key",)),
    )
    return ChainConfig(steps=steps, extras=("key",), outputs=("load", "loss"))


def model(draw, whole_sequences):
    block = ChainConfig(
        steps=(
            Step("attn", skip, SkipConfig(chain, mixing())),
            Step("ffn", skip, SkipConfig(chain, mixture(draw, whole_sequences))),
        ),
        extras=("key",),
        outputs=("load", "loss"),
    )
    steps = (
        Step("blocks", repeat, RepeatConfig(chain, block, 2), gives=("load", "aux")),
        Step("head", linear, LinearConfig(8, 5)),
        Step("loss", cross_entropy, CrossEntropyConfig(), takes=("labels",)),
    )
    return ChainConfig(steps=steps, extras=("key", "labels"), outputs=("load", "aux"))


class Drawn:
    """Three axes of drawn names, two ranks each, and what each shares out; rows over all that are left."""

    def __init__(self, seed):
        draw = self.draw = python_random.Random(seed)
        self.sizes = dict.fromkeys(draw.sample(NAMES, 3), 2)
        left = draw.sample(list(self.sizes), 3)
        self.axis = left.pop()
        self.context = left.pop() if draw.random() < 0.5 else None
        self.sequence = draw.random() < 0.7
        self.experts = draw.choice([*left, *[self.axis] * self.sequence])
        self.rows = tuple(name for name in self.sizes if name not in (self.axis, self.context))
        self.cfg = model(draw, self.context is None)
        self.rules = {"*.proj": "column", "*.attn.out": "row", "*.experts": "expert"}
        if self.context is not None:
            self.rules["*.mix"] = "context"
        self.how = dict(axis=self.axis, sequence_parallel=self.sequence, context=self.context, experts=self.experts)

    def own(self, t, mesh):
        """A rank's rows and tokens of a whole tensor."""
        over = [*self.rows, *[self.axis] * self.sequence]
        place = 0
        for name in over:
            place = 2 * place + mesh[name].rank
        t = t.chunk(2 ** len(over))[place].contiguous()
        return t if self.context is None else dist.zigzag(t, mesh[self.context])


def step(params, cfg, x, labels, share):
    y, residuals = chain.fwd(params, WithExtras(x, {"key": random.key(5), "labels": labels}), cfg)
    dy = WithExtras(torch.full((), share, dtype=D), {"load": None, "aux": torch.full((2,), share, dtype=D)})
    dparams, dx = chain.bwd(residuals, dy, cfg)
    return y.main, y.extras["aux"], dparams, dx.main


def hold_to_one_process(seed):
    given = Drawn(seed)
    whole = chain.init(given.cfg, key=random.key(seed), dtype=D)
    x, labels = torch.randn(8, 4, 8, dtype=D), torch.randint(5, (8, 4))
    loss, aux, wanted, dx = step(whole, given.cfg, x, labels, 1.0)

    def run(mesh):
        cfg = dist.parallel(given.cfg, given.rules, mesh, **given.how)
        specs, share = dist.specs_of(chain, cfg), 1.0 / (mesh.size if given.sequence else mesh.size // 2)
        params = chain.init(cfg, key=random.key(seed), dtype=D)
        mine = given.own(x, mesh), given.own(labels, mesh)
        loss, aux, dparams, own_dx = step(params, cfg, *mine, share)
        assert_close(own_dx, given.own(dx, mesh), dtype=D, what=f"dx, {given.__dict__}")
        return loss, aux, dist.unshard(dist.sum_gradients(dparams, specs, mesh), specs, mesh)

    losses, auxes, found = zip(*run_ranks(given.sizes, run), strict=True)
    assert_close(torch.stack(losses).mean(), loss, dtype=D, what="loss")
    assert_close(torch.stack(auxes).mean(0), aux, dtype=D, what="losses of routers")
    for path, t in paths(wanted).items():
        if t is not None:
            for dparams in found:
                assert_close(paths(dparams)[path], t, dtype=D, what=f"{path}, {given.__dict__}")


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_losses_and_gradients_on_a_drawn_mesh_equal_one_process(seed):
    hold_to_one_process(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3, 40))
def test_more_drawn_meshes_equal_one_process(seed):
    hold_to_one_process(seed)


@pytest.mark.parametrize("seed", range(6))
def test_masks_of_ranks_are_parts_of_one_mask(seed):
    """A mesh of three drawn names; `rows` in any order, some axes without rows of their own."""
    draw = python_random.Random(seed)
    sizes = {name: draw.choice((1, 2, 3)) for name in draw.sample(NAMES, 3)}
    *others, axis = draw.sample(list(sizes), 3)
    context = others.pop() if draw.random() < 0.4 else None
    rows = tuple(draw.sample(others, draw.randrange(len(others) + 1)))
    x, key = torch.ones(36, 12, 2), random.key(seed)
    drop = Step("drop", dropout, DropoutConfig(0.5), takes=("key",), folds=seed % 2 == 0)
    cfg = ChainConfig(steps=(drop,), extras=("key",))
    whole = chain.fwd({"drop": None}, WithExtras(x, {"key": key}), cfg)[0]
    for rank in range(math.prod(sizes.values())):
        mesh = Mesh.abstract(sizes, rank)
        mine = {}
        for name, t in (("x", x), ("y", whole)):
            for one in (*rows, axis):
                t = t.chunk(mesh[one].size)[mesh[one].rank]
            mine[name] = (t if context is None else dist.zigzag(t, mesh[context])).contiguous()
        own = dist.parallel(cfg, {}, mesh, axis=axis, context=context, rows=rows)
        assert torch.equal(chain.fwd({"drop": None}, WithExtras(mine["x"], {"key": key}), own)[0], mine["y"]), (
            sizes,
            rows,
            context,
            rank,
        )


def test_a_rank_has_every_option_of_a_dropout():
    options = DropoutConfig(0.25, train=False)
    assert all(getattr(options, field.name) != field.default for field in dataclasses.fields(options))
    cfg = ChainConfig(steps=(Step("drop", dropout, options, takes=("key",)),), extras=("key",))
    made = dist.parallel(cfg, {}, Mesh.abstract({"dp": 2, "tp": 2}, 3)).steps[0].cfg
    assert fields_of(options).items() <= fields_of(made).items() and len(made.shared) == 2


MIXING = {
    "conv": Step("conv", causal_conv1d, CausalConv1dConfig(8)),
    "bmm": Step("mix", bmm, BMMConfig()),
    "group_norm": Step("norm", group_norm, GroupNormConfig(2, 8)),
    "patches": Step("cut", patchify, PatchifyConfig((2, 2))),
    "delta rule": Step("rule", gated_delta_rule, GatedDeltaRuleConfig()),
}
ROUTER = {"sequence": RouteConfig(4, 2, aux=0.1, sequence_wise=True), "capacity": RouteConfig(4, 2, capacity=1.0)}

ROUTED = ("indices", "load", "loss")


@pytest.mark.parametrize("name", ["cp", "seq"])
@pytest.mark.parametrize("mixes", [*MIXING, *ROUTER])
def test_a_step_that_mixes_positions_is_refused_on_parts_of_a_sequence(name, mixes):
    step = MIXING[mixes] if mixes in MIXING else Step("route", route, ROUTER[mixes], gives=ROUTED)
    cfg = ChainConfig(steps=(Step("in", activation, ActivationConfig("silu")), step), outputs=step.gives)
    mesh = Mesh.abstract({name: 2, "dp": 2, "tp": 1}, 0)
    with pytest.raises(
        ValueError, match=rf"^parallel: step {step.name} must be of each token alone, as tokens are sharded over '{name}' "
    ):
        dist.parallel(cfg, {}, mesh, context=name)
    kept = dist.parallel(cfg, {step.name: lambda op, cfg: (op, cfg)}, mesh, context=name)
    assert kept.steps[1] == dist.parallel(cfg, {}, Mesh.abstract({"dp": 2, "tp": 1}, 0)).steps[1]


@pytest.mark.parametrize("fields", [dict(aux=0.1), dict(z=0.1), dict(sequence_wise=True), dict(sequence_wise=True, z=0.1)], ids=str)
def test_a_router_without_a_loss_of_each_sequence_may_have_parts_of_one(fields):
    cfg = ChainConfig(steps=(Step("route", route, RouteConfig(4, 2, **fields), gives=ROUTED),), outputs=ROUTED)
    assert dist.parallel(cfg, {}, Mesh.abstract({"cp": 2, "dp": 2, "tp": 1}, 0), context="cp").steps[0].op is route


def test_an_op_with_a_key_that_has_no_parts_is_refused():
    @config
    class NoiseConfig(OpConfig):
        """No options."""

    noise = make_op("noise", NoiseConfig, fwd=dropout.fwd, dgrad=dropout.dgrad, keyed=True)
    cfg = ChainConfig(steps=(Step("noise", noise, NoiseConfig(), takes=("key",)),), extras=("key",))
    with pytest.raises(ValueError, match=r"^parallel: step noise must be of no random key, as it would draw the same on all ranks"):
        dist.parallel(cfg, {}, Mesh.abstract({"any": 2, "tp": 1}, 0))
    assert dist.parallel(cfg, {}, Mesh.abstract({"any": 2, "tp": 1}, 0), rows=()) == cfg


MESH = Mesh.abstract({"dp": 2, "pp": 1, "cp": 2, "tp": 2}, 0)
BAD = {
    "parallel: context must be another axis than `axis`, got 'tp'": dict(context="tp"),
    "parallel: experts must be an axis along which rows differ, got 'cp'": dict(experts="cp"),
    "parallel: rows must be different ones of dp, got ('dp', 'dp')": dict(rows=("dp", "dp")),
    "parallel: rows must be different ones of dp, got ('tp',)": dict(rows=("tp",)),
    "parallel: rows must be different ones of dp, got ('other',)": dict(rows=("other",)),
    "parallel: context must be an axis of the mesh (dp, pp, cp, tp) or None, got 'other'": dict(context="other"),
    "parallel: context must be axes of the mesh (dp, pp, cp, tp), got ('cp', 'other')": dict(context=("cp", "other")),
    "parallel: context must be axes of the mesh (dp, pp, cp, tp), got ('other', 'cp')": dict(context=("other", "cp")),
    "parallel: experts must be an axis of the mesh (dp, pp, cp, tp) or None, got 'other'": dict(experts="other"),
    "Mesh: axis must be one of dp, pp, cp, tp, got 'other'": dict(axis="other"),
}


@pytest.mark.parametrize("said", BAD)
def test_bad_axes_raise(said):
    with pytest.raises(ValueError) as raised:
        dist.parallel(ChainConfig(steps=(Step("a", linear, LinearConfig(4, 4)),)), {}, MESH, **BAD[said])
    assert str(raised.value) == said
