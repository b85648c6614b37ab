"""The whole block of a mixture of experts: its laws, Hugging Face's blocks, and outputs of layers."""

import dataclasses
import importlib
from functools import partial

import pytest
import torch

from benchmarks.plain_moe import Router, mixture, mlp, routed
from funcops import (
    ChainConfig,
    ExpertsConfig,
    RepeatConfig,
    RMSNormConfig,
    RouteConfig,
    SkipConfig,
    Step,
    WithExtras,
    chain,
    random,
    repeat,
    rms_norm,
    skip,
    walk,
)
from funcops.engine.trees import paths, tensors, tree_map_tensors
from funcops.graphs import check_capturable
from funcops.models import MoEConfig, moe
from funcops.models.blocks import block_config
from funcops.testing import LAWS, Case
from funcops.testing.checks import float_like, same_bits
from funcops.testing.tolerances import assert_close

DEEPSEEK = dict(score="sigmoid", bias=True, scale=2.5)


def plain(params, x, cfg, config):
    """y with its outputs in plain torch, from the params of `moe(config)`."""
    of = params["moe"]["routed"] if config.shared else params
    rows, route = x.reshape(-1, x.shape[-1]), config.route
    by = Router(
        route.experts, route.top_k, route.score, route.normalize, route.scale, route.groups, route.top_groups, route.aux, route.z
    )
    logits = torch.nn.functional.linear(rows, of["gate"].weight, of["gate"].bias)
    weights, counts, loss = routed(logits, of["route"].bias if route.bias else None, by)
    y = mixture(rows, weights, of["experts"].up.weight, of["experts"].down.weight)
    if config.shared:
        own = params["moe"]["shared"]["gated"] if config.shared_gate else {"mlp": params["moe"]["shared"]}
        gate = torch.sigmoid(torch.nn.functional.linear(rows, own["gate"].weight)) if config.shared_gate else 1.0
        y = y + gate * mlp(rows, own["mlp"]["up"].weight, own["mlp"]["down"].weight)
    return WithExtras(y.view(x.shape), {"load": counts.int(), "loss": loss})


def case(rows, dim, hidden, route, shared=0, never=(), shared_gate=False):
    """Experts in `never` are not chosen, because of a bias. The gate's gradient, of weights less their mean, may be small."""
    cfg = MoEConfig(
        route=route,
        experts=ExpertsConfig(route.experts, dim, hidden),
        shared=shared,
        gate_bias=bool(never),
        shared_gate=shared_gate,
    )
    of = moe(cfg)

    def params(d):
        made = tree_map_tensors(lambda t: d.randn(*t.shape), chain.init(of, key=random.key(0), dtype=d.dtype))
        routed = made["moe"]["routed"] if shared else made
        for e in never:
            (routed["route"] if route.bias else routed["gate"]).bias[e] = -50.0
        return made

    return Case(
        op=chain,
        cfg=of,
        params=params,
        x=lambda d: d.randn(*rows, dim),
        reference=partial(plain, config=cfg),
        dtypes=(torch.float64,),
        cancels=("params.gate", "params.moe.routed.gate"),
        name=f"moe-{rows}-{route.experts}-{route.top_k}-{shared}-{never}-{shared_gate}",
    )


CASES = [
    case((2, 3), 6, 3, RouteConfig(4, 2, aux=0.1, z=0.01, score="sigmoid", bias=True), shared=4),
    case((5,), 4, 3, RouteConfig(4, 1, normalize=False), never=(0, 3)),  # the first and the last have no rows
    case((5,), 4, 3, RouteConfig(4, 2, **DEEPSEEK, groups=2, top_groups=1)),
    case((4,), 3, 2, RouteConfig(4, 2, aux=0.2), never=(1, 2)),  # those in the middle have none
    case((0,), 3, 2, RouteConfig(4, 2, aux=0.2, z=0.1)),
    case((3,), 4, 2, RouteConfig(1, 1, score="sigmoid", normalize=False)),
    case((5,), 3, 2, RouteConfig(4, 1, z=0.1, **DEEPSEEK), shared=3, never=(0, 1, 3)),  # all to one
    case((5,), 4, 3, RouteConfig(4, 2, normalize=False), shared=3, shared_gate=True),
    case((6,), 4, 3, RouteConfig(64, 1, normalize=False)),
    case((7,), 4, 2, RouteConfig(64, 8, aux=0.1)),
    case((3,), 4, 2, RouteConfig(64, 2, score="sigmoid", bias=True, groups=8, top_groups=2, scale=1.5)),
]
QUICK = ("split", "right", "frugal")


def rows_of_laws():
    """The first case under all laws, a few of them in the first tier; the others under all laws but Compiles."""
    assert set(QUICK) < set(LAWS)
    for i, one in enumerate(CASES):
        for law in LAWS if i == 0 else [law for law in LAWS if law != "compiles"]:  # to compile takes seconds a case
            yield pytest.param(law, one, marks=() if i == 0 and law in QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("law", "one"), list(rows_of_laws()), ids=str)
def test_laws_of_the_block(law, one):
    LAWS[law](one, torch.float64)


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ValueError, match="RouteConfig: top_k must be at most experts, 4, got 5"):
        RouteConfig(4, 5)
    with pytest.raises(ValueError, match="MoEConfig: experts.experts must be 4, as of route, got 5"):
        MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(5, 4, 3))
    with pytest.raises(ValueError, match="MoEConfig: shared_gate must be False without a shared MLP, got True"):
        MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 4, 3), shared_gate=True)
    with pytest.raises(ValueError, match="MoEConfig: shared must be 0 beside experts with biases"):
        MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 4, 3, bias=True), shared=2)


D, E, K, LAYERS = 8, 4, 2, 3


def stack(**route):
    """Layers of norm and mixture beside a stream, and a norm at the end."""
    body = moe(MoEConfig(route=RouteConfig(E, K, aux=0.1, z=0.01, **route), experts=ExpertsConfig(E, D, 5), shared=3))
    normed = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(D)), *body.steps), outputs=body.outputs)
    layers = Step("layers", repeat, RepeatConfig(skip, SkipConfig(chain, normed), LAYERS))
    return ChainConfig(steps=(layers, Step("end", rms_norm, RMSNormConfig(D))), outputs=body.outputs)


def test_load_and_loss_of_layers_leave_stacked_and_none_is_zero():
    cfg = stack(score="sigmoid", bias=True)
    params, x = chain.init(cfg, key=random.key(0), dtype=torch.float64), torch.randn(2, 5, D, dtype=torch.float64)
    y, kept = chain.fwd(params, x, cfg)
    load, loss = y.extras["load"], y.extras["loss"]
    assert load.shape == (LAYERS, E) and load.dtype is torch.int32 and load.sum(1).tolist() == [2 * 5 * K] * LAYERS
    assert loss.shape == (LAYERS,) and (loss > 0).all()
    dy = torch.randn_like(x)
    none = chain.bwd(kept, WithExtras(dy, {"load": None, "loss": None}), cfg)
    zero = chain.bwd(kept, WithExtras(dy, {"load": None, "loss": torch.zeros_like(loss)}), cfg)
    assert_close(none, zero, dtype=torch.float64)
    some = WithExtras(dy, {"load": None, "loss": torch.ones_like(loss)})
    whole = chain.bwd(kept, some, cfg)
    dx, pending = chain.dgrad(kept, some, cfg)
    same_bits(whole, (chain.wgrad(pending, cfg), dx), "halves")
    gates = [[grads["layers"][i]["moe"]["routed"]["gate"].weight for i in range(LAYERS)] for grads in (none[0], whole[0])]
    assert all(not torch.equal(a, b) for a, b in zip(*gates, strict=True)), "the loss of each layer reaches its router"
    assert all(layer["moe"]["routed"]["route"].bias is None for layer in whole[0]["layers"])


def test_a_graph_holds_a_stack_whatever_the_routing():
    cfg = stack()
    params, x = chain.init(cfg, key=random.key(0), dtype=torch.float32), torch.randn(5, D)

    def step(params, x, dy):
        y, kept = chain.fwd(params, x, cfg)
        dx, pending = chain.dgrad(kept, WithExtras(dy, {"load": None, "loss": torch.ones_like(y.extras["loss"])}), cfg)
        return y, dx, chain.wgrad(pending, cfg)

    assert check_capturable(step, params, x, torch.randn(5, D)) == []


def test_jitter_takes_a_key_and_is_the_same_in_the_backward():
    cfg = moe(MoEConfig(route=RouteConfig(E, K, jitter=0.5), experts=ExpertsConfig(E, D, 5), shared=3))
    params, x = chain.init(cfg, key=random.key(0), dtype=torch.float64), torch.randn(6, D, dtype=torch.float64)
    found = []
    for seed in (1, 1, 2):
        y, kept = chain.fwd(params, WithExtras(x, {"key": random.key(seed)}), cfg)
        found.append((y, chain.bwd(kept, float_like(y, 0), cfg)))
    same_bits(found[0], found[1], "one key")
    assert not torch.equal(found[0][0].main, found[2][0].main)


HUGGING_FACE = {  # home, name of the block, fields of the config, ours, and what names of theirs begin with what
    "Mixtral": (
        "mixtral",
        "MixtralSparseMoeBlock",
        dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=6),
        RouteConfig(8, 2),
    ),
    "Qwen3-MoE": (
        "qwen3_moe",
        "Qwen3MoeSparseMoeBlock",
        dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=6, norm_topk_prob=True),
        RouteConfig(8, 3),
    ),
    "Qwen2-MoE": (
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=6, shared_expert_intermediate_size=10),
        RouteConfig(8, 2, normalize=False),
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        "DeepseekV3MoE",
        dict(
            n_routed_experts=8,
            num_local_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=6,
            n_shared_experts=2,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        ),
        RouteConfig(8, 3, groups=4, top_groups=2, **DEEPSEEK),
    ),
    "GPT-OSS": ("gpt_oss", "GptOssMLP", dict(num_local_experts=8, num_experts_per_tok=4, intermediate_size=6), RouteConfig(8, 4)),
}


def as_ours(name, given, shared):
    """Their weights, or their weights' gradients, by our paths."""
    oss, at, made = name == "GPT-OSS", "moe.routed." if shared else "", {}
    rows = [*range(0, 12, 2), *range(1, 12, 2)]  # the gate's first
    for path, t in given.items():
        if path in ("gate.weight", "router.weight", "router.bias"):
            made[f"{at}gate.{path.rpartition('.')[2]}"] = t
        elif path == "gate.e_score_correction_bias":
            made[f"{at}route.bias"] = t
        elif path.startswith("experts."):
            part = "up" if "gate_up" in path else "down"
            t = t.mT if oss and "bias" not in path else t
            t = t[:, rows] if oss and part == "up" else t
            made[f"{at}experts.{part}.{'bias' if 'bias' in path else 'weight'}"] = t.contiguous()
    if shared:
        mlp, to = ("shared_expert", "moe.shared.gated.mlp") if name == "Qwen2-MoE" else ("shared_experts", "moe.shared")
        made[f"{to}.up.weight"] = torch.cat([given[f"{mlp}.{part}_proj.weight"] for part in ("gate", "up")])
        made[f"{to}.down.weight"] = given[f"{mlp}.down_proj.weight"]
    if name == "Qwen2-MoE":
        made["moe.shared.gated.gate.weight"] = given["shared_expert_gate.weight"]
    return made


def theirs_and_ours(name):
    home, block, fields, route = HUGGING_FACE[name]
    modeling = importlib.import_module(f"transformers.models.{home}.modeling_{home}")
    config = getattr(modeling, next(n for n in vars(modeling) if n.endswith("Config") and "Pre" not in n))
    theirs = getattr(modeling, block)(config(hidden_size=8, **fields))
    generator = torch.Generator().manual_seed(1)
    for t in (*theirs.parameters(), *theirs.buffers()):
        t.data = torch.randn(t.shape, generator=generator) * 0.7
    experts = ExpertsConfig(8, 8, 6)
    if name == "GPT-OSS":
        of = theirs.experts
        experts = ExpertsConfig(8, 8, 6, kind="clamped_swiglu", bias=True, limit=of.limit, alpha=of.alpha)
    shared = {"DeepSeek-V3": 12, "Qwen2-MoE": 10}.get(name, 0)
    gates = dict(shared_gate=name == "Qwen2-MoE", gate_bias=name == "GPT-OSS")
    return modeling, theirs, MoEConfig(route=route, experts=experts, shared=shared, **gates)


def filled(cfg, ours):
    """Params of the chain, from tensors by path."""
    like = chain.init(cfg, key=random.key(0), dtype=torch.float32)
    assert set(ours) == {path for path, t in paths(like).items() if t is not None}
    left = iter([ours[path] for path, t in paths(like).items() if t is not None])
    return tree_map_tensors(lambda t: next(left), like)


def near(got, want):
    """Compare within 1e-6 of the largest element of each leaf."""
    assert got.keys() == want.keys()
    for path, t in want.items():
        assert float((got[path] - t).abs().max() / t.abs().max()) < 1e-6, path


@pytest.mark.slow
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_the_block_is_hugging_faces_with_both_losses(name):
    """Weights and gradients; the load's loss, which is theirs over K, and the z loss of their Switch."""
    pytest.importorskip("transformers")
    modeling, theirs, config = theirs_and_ours(name)
    softmax = config.route.score == "softmax"
    losses = dict(aux=0.1 * config.route.top_k, z=0.01) if softmax else dict(z=0.01)
    cfg = moe(dataclasses.replace(config, route=dataclasses.replace(config.route, **losses)))
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(2))
    asked = x.clone().requires_grad_()
    want = theirs(asked)
    want = want[0] if isinstance(want, tuple) else want
    gate = getattr(theirs, "gate", None) or theirs.router
    logits = torch.nn.functional.linear(asked.flatten(0, 1), gate.weight, getattr(gate, "bias", None))
    switch = importlib.import_module("transformers.models.switch_transformers.modeling_switch_transformers")
    loss = 0.01 * switch.router_z_loss_func(logits[None])
    if softmax:
        balancing = importlib.import_module("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
        loss = loss + 0.1 * balancing((logits,), 8, config.route.top_k)
    dy = torch.randn_like(want)
    torch.autograd.backward((want, loss), (dy, torch.ones(())))
    state = {path: t.detach() for path, t in theirs.state_dict().items()}
    params = filled(cfg, as_ours(name, state, config.shared))
    y, kept = chain.fwd(params, x, cfg)
    dparams, dx = chain.bwd(kept, WithExtras(dy, {"load": None, "loss": torch.ones(())}), cfg)
    near({"y": y.main, "loss": y.extras["loss"], "dx": dx}, {"y": want.detach(), "loss": loss.detach(), "dx": asked.grad})
    grads = as_ours(name, {path: p.grad for path, p in theirs.named_parameters()}, config.shared)
    near({path: t for path, t in paths(dparams).items() if t is not None}, grads)


@pytest.mark.slow
@pytest.mark.parametrize("one", CASES, ids=str)
def test_the_block_is_plain_torchs_within_1e_10(one):
    params, x = one.make(torch.float64)
    asked = tree_map_tensors(lambda t: t.requires_grad_(), (params, x))
    want = one.reference(*asked, one.cfg)
    dy = WithExtras(torch.randn_like(want.main), {"load": None, "loss": torch.ones((), dtype=torch.float64)})
    inputs = [t for path, t in paths(asked).items() if t is not None and not path.endswith("route.bias")]
    sought = torch.autograd.grad((want.main, want.extras["loss"]), inputs, (dy.main, dy.extras["loss"]), allow_unused=True)
    params, x = tree_map_tensors(torch.detach, asked)
    y, kept = chain.fwd(params, x, one.cfg)
    dparams, dx = chain.bwd(kept, dy, one.cfg)
    assert torch.equal(y.extras["load"], want.extras["load"])
    pairs = [(y.main, want.main), (y.extras["loss"], want.extras["loss"])]
    pairs += zip(tensors((dparams, dx)), sought, strict=True)
    for got, wanted in pairs:
        wanted = torch.zeros_like(got) if wanted is None else wanted.detach()
        assert not got.numel() or float((got - wanted).abs().max()) <= 1e-10 * max(1.0, float(wanted.abs().max()))


def test_a_block_with_a_mixture_also_normalises_queries_and_keys():
    """A block without a mixture has another epsilon, no such norms, and no outputs of a router."""
    mixed = block_config(8, 2, 6, mixture=MoEConfig(route=RouteConfig(4, 2), experts=ExpertsConfig(4, 8, 6)))
    for block, names, eps in (
        (block_config(8, 2, 6), ("attn.norm", "mlp.norm"), 1e-5),
        (mixed, ("attn.norm", "attn.qkv.q.norm", "attn.qkv.k.norm", "mlp.norm"), 1e-6),
    ):
        assert {part.path: part.cfg.eps for part in walk(block) if part.op is rms_norm} == dict.fromkeys(names, eps)
    x = WithExtras(torch.randn(2, 3, 8), {"positions": torch.arange(3)})
    y, _ = chain.fwd(chain.init(mixed, key=random.key(0)), x, mixed)
    assert mixed.outputs == ("load", "loss") == (*y.extras,) and y.main.shape == (2, 3, 8)
