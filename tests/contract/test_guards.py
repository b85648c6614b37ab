"""Guards that no other test reaches: the calls that each must stop, in its words, and similar calls that it must pass."""

import dataclasses

import pytest
import torch
from good_dist import dist_case
from torch.autograd import forward_ad

from funcops import (
    ActivationConfig,
    ChainConfig,
    DonatedError,
    ExpertsConfig,
    GLUConfig,
    GradModeError,
    LatentSplitConfig,
    Ledger,
    LinearConfig,
    LinearParams,
    ModulateConfig,
    Needs,
    ParallelConfig,
    PermuteConfig,
    Policy,
    QKVSplitConfig,
    QLinearConfig,
    RepeatConfig,
    RopeConfig,
    RouteConfig,
    RouteParams,
    SkipConfig,
    Step,
    TorchConfig,
    WithExtras,
    activation,
    chain,
    dist,
    donate,
    glu,
    latent_split,
    linear,
    modulate,
    nn,
    op_from_torch,
    parallel,
    permute,
    qlinear,
    random,
    remat,
    repeat,
    rope,
    route,
    skip,
    trees,
    with_policy,
)
from funcops.adapters.autograd.transforms import refuse_tangents
from funcops.engine.backend import backend
from funcops.engine.contract.op import make_op
from funcops.engine.contract.rerun import first_run, note, second_run
from funcops.engine.contract.walk import remade
from funcops.graphs import graphed
from funcops.library.ops.dropout import check_shared
from funcops.library.ops.expert_steps import ExpertStepsConfig, expert_steps
from funcops.library.ops.low_rank import LowRankConfig, low_rank_fwd, low_rank_init
from funcops.low_precision import Format, Fp8Current, quantize_tensor
from funcops.models import plain_experts
from funcops.optim import global_norm
from funcops.schedule import Collective, Costs, Link, Network, Schedule, draw, measure_stages, one_f_one_b, simulate
from funcops.schedule.stage import Stage
from funcops.testing import DistCase, Placed, check_dist, run_ranks

X, ROW, SCALAR = torch.ones(3, 4), torch.ones(4), torch.ones(())
LINEAR = LinearConfig(4, 4)
ZIGZAG = dist.Shared(0, dist.Mesh.abstract({"cp": 2}, 0)["cp"], zigzag=True)
WEIGHT = LinearParams(torch.ones(4, 4), torch.ones(4))
GELU = ActivationConfig("gelu")
TWO = ChainConfig(
    steps=(Step("a", linear, LINEAR), Step("b", linear, LinearConfig(4, 4, bias=False))), ties=(("b.weight", "a.weight"),)
)
BRANCHES = ParallelConfig(branches=(Step("a", linear, LINEAR), Step("b", linear, LINEAR)))
TWO_STAGES = ChainConfig(steps=(Step("a", linear, LINEAR), Step("b", linear, LINEAR)))
LAYERS = RepeatConfig(linear, LINEAR, 2)
SKIP = SkipConfig(linear, LINEAR)
COLLECTIVES = torch.ops._c10d_functional
LOW = QLinearConfig(4, 4, recipe=Fp8Current(), bias=False)
ROUTED = RouteConfig(4, 2)
SPLIT = LatentSplitConfig(2, shared=2, own=3, value=1)
STEPS = ExpertStepsConfig(plain_experts(ExpertsConfig(4, dim=8, hidden=16)))
ROUTED_X = torch.ones(3, 2), torch.ones(3, 8), torch.tensor([[0, 1]] * 3, dtype=torch.int32)
LOW_RANK = LowRankConfig(4, 4, rank=2, dropout=0.5)


def modulated(t):
    return modulate.fwd(None, (t, torch.ones(3, 4), torch.ones(3, 4)), ModulateConfig())


def paired(t):
    return glu.fwd(None, (t, t), GLUConfig(kind="swiglu", paired=True))


def split_back(dy):
    x = torch.ones(1, 2, 5), torch.ones(1, 2, 4), torch.ones(1, 1, 2)
    return latent_split.bwd(latent_split.fwd(None, x, SPLIT)[1], dy, SPLIT)


def gathered_back(dy):
    cfg = PermuteConfig(2, gathered=True)
    x = torch.ones(3, 2), torch.ones(3, 4), torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    return permute.bwd(permute.fwd(None, x, cfg)[1], dy, cfg)


def dropped_low_rank(x):
    return low_rank_fwd(low_rank_init(LOW_RANK, key=random.key(0)), x, LOW_RANK)


def one_chain(x):
    return chain.fwd({"a": WEIGHT, "b": LinearParams(None, None)}, x, TWO)


def chain_of(tied):
    return chain.fwd({"a": WEIGHT, "b": LinearParams(tied, None)}, X, TWO)


def skipped(body):
    return skip.fwd(None, X, SkipConfig(*body))


def parallel_back(dy):
    return parallel.bwd(parallel.fwd({"a": WEIGHT, "b": WEIGHT}, X, BRANCHES)[1], dy, BRANCHES)


def recomputable_op(recomputable):
    made = make_op(
        "mine",
        type(GELU),
        fwd=activation.fwd,
        dgrad=activation.dgrad,
        recomputable=recomputable,
        recompute=lambda *_: None if recomputable else None,
    )
    return made.recomputable


def scheduled(kind):
    ranks = [
        [action._replace(kind=kind if action.kind == "F" else action.kind) for action in one] for one in one_f_one_b(1, 2).ranks
    ]
    return Schedule("mine", tuple(map(tuple, ranks)))


def from_torch(x):
    return op_from_torch(lambda params, x, cfg: x * 2).fwd(None, x, TorchConfig())


def on_two(fn):
    return run_ranks({"tp": 2}, lambda mesh: fn(mesh))


def with_tangent(name):
    with backend(name), forward_ad.dual_level():
        refuse_tangents(linear, [forward_ad.make_dual(X, X)])


def finished(into):
    return on_two(lambda mesh: dist.finish(dist.gather_start(torch.ones(2), mesh["tp"]), into=into))


def skip_back():
    return skip.dgrad(skip.fwd(WEIGHT, X, SKIP)[1], X, SKIP)


def remat_back(given_away):
    y, residuals = remat(linear).fwd(WEIGHT, X, LINEAR)
    if given_away:
        donate(residuals)
    remat(linear).bwd(residuals, y, LINEAR)


def nested_back(given_away):
    """A part's residuals were given away: nothing may be added to the sums of the part that runs before it."""
    cfg = ChainConfig(steps=(Step("inner", chain, TWO_STAGES), Step("last", linear, LINEAR)))
    params = {"inner": {"a": WEIGHT, "b": WEIGHT}, "last": WEIGHT}
    y, residuals = chain.fwd(params, X, cfg)
    if given_away:
        donate(residuals["inner"])
    into = trees.tree_map_tensors(torch.zeros_like, params)
    try:
        chain.bwd(residuals, y, cfg, into=into)
    finally:
        assert any(bool(t.any()) for t in trees.tensors(into)) is not given_away


def weighed(params, x, cfg):
    return torch.logcumsumexp(x, -1) * x


def noted(owner):
    op_from_torch(weighed).fwd(None, X, TorchConfig())  # the first op that makes notes turns them on
    with first_run() as notes:
        note("a", dict)
    with second_run(notes):
        note(owner, dict)


def weighed_back(kept):
    made = op_from_torch(weighed)
    y, residuals = made.fwd(None, X, TorchConfig())
    residuals.kept["logcumsumexp"] = kept
    made.dgrad(residuals, y, TorchConfig())


def given_tangent(trained):
    layer = nn.Linear(4, 4).requires_grad_(trained)
    with forward_ad.dual_level():
        layer(forward_ad.make_dual(X, X))


def received(t):
    return COLLECTIVES.wait_tensor(t)


def rows_sent(to_other):
    def step(mesh):
        sent = [1, to_other] if mesh.rank == 0 else [1, 1]
        return received(COLLECTIVES.all_to_all_single(torch.ones(sum(sent)), [1, 1], sent, mesh["tp"].group))

    return on_two(step)


def placed_at(placed):
    return dataclasses.replace(DistCase(**dist_case()), placed_x=placed)


# what is called, what it takes, what it does not, and the words
GUARDS = {
    "modulate": (modulated, X, torch.ones(4), ValueError, "modulate_fwd: x.0 (x) must be [B, ..., D], got [4]"),
    "glu of a scalar": (paired, ROW, SCALAR, ValueError, "glu_fwd: x.0 (gate) must be [..., H], got []"),
    "latent_split's dy": (
        split_back,
        (None, None, None),
        [None] * 3,
        TypeError,
        "latent_split_dgrad: dy must be a tuple (dq, dk, dv)",
    ),
    "permute's dy": (
        gathered_back,
        (None,) * 5,
        (None,) * 4,
        TypeError,
        "permute_dgrad: dy must be a tuple (dx, d weights, None, None, None), got tuple of 4",
    ),
    "route_wgrad's config": (lambda cfg: route.wgrad(None, cfg), ROUTED, LINEAR, TypeError, "route_wgrad: cfg must be RouteConfig"),
    "route_wgrad's pending": (
        lambda p: route.wgrad(p, ROUTED),
        None,
        X,
        TypeError,
        "route_wgrad: pending must be None (no parameter has a gradient)",
    ),
    "route_wgrad's into": (
        lambda into: route.wgrad(None, ROUTED, into=into),
        RouteParams(None),
        WEIGHT,
        TypeError,
        "route_wgrad: into must be RouteParams",
    ),
    "low_rank's x": (
        dropped_low_rank,
        (X, random.key(1)),
        X,
        TypeError,
        "low_rank_fwd: x must be a tuple (x, key), as cfg.dropout is above 0, got float32[3, 4]",
    ),
    "extras that nobody declares": (
        one_chain,
        X,
        WithExtras(X, {"a": X}),
        ValueError,
        "chain_fwd: x must be without extras (the config declares none)",
    ),
    "a tied leaf": (
        chain_of,
        None,
        torch.ones(4, 4),
        ValueError,
        "chain_fwd: params.b.weight must be None (it is tied to a.weight)",
    ),
    "a skip's body": (
        skipped,
        (activation, GELU),
        (glu, GLUConfig(kind="swiglu", gate="first")),
        ValueError,
        "skip_fwd: body(x) must be like x, float32[3, 4], got float32[3, 2]",
    ),
    "parallel's dy": (
        parallel_back,
        (X, None),
        (X, X, X),
        TypeError,
        "parallel_bwd: dy must be a tuple of 2 (None for zero), got tuple of 3",
    ),
    "the config of a wgrad": (
        lambda cfg: chain.wgrad(None, cfg),
        TWO,
        LINEAR,
        TypeError,
        "chain_wgrad: cfg must be ChainConfig, got LinearConfig",
    ),
    "replace": (
        lambda name: trees.replace(WEIGHT, **{name: None}),
        "bias",
        "bais",
        ValueError,
        "replace: changes must be of fields among weight, bias, got 'bais'",
    ),
    "make_op's recomputable": (
        recomputable_op,
        "norm",
        "free",
        ValueError,
        """make_op 'mine': recomputable must be "elementwise", "norm" or "", got 'free'""",
    ),
    "a schedule's kinds": (scheduled, "F", "X", ValueError, "must be of the kinds F, I, W, B, got 0X0"),
    "quantize_tensor": (
        lambda x: quantize_tensor(x, Format("e4m3")),
        ROW,
        SCALAR,
        ValueError,
        "x must be [*, K], with at least one dimension",
    ),
    "expert steps": (
        ExpertStepsConfig,
        plain_experts(ExpertsConfig(4, dim=8, hidden=16)),
        TWO,
        ValueError,
        "ExpertStepsConfig: cfg must be a chain as plain_experts makes it, got one of steps",
    ),
    "Placed.split": (
        lambda t: Placed("shard").split(t, 2),
        torch.ones(4),
        torch.ones(3),
        ValueError,
        "check_dist: a tensor must be of a size along dimension 0 that 2 divides, got [3]",
    ),
    "costs": (
        lambda one: Costs(collectives=(one,)),
        Collective("all_gather", "tp", 1.0),
        "all_gather",
        TypeError,
        "Costs: collectives.0 must be Collective",
    ),
    "qlinear's bias": (
        lambda bias: qlinear.fwd(LinearParams(torch.ones(4, 4), bias), X, LOW),
        None,
        ROW,
        ValueError,
        "qlinear_fwd: params.bias must be None (cfg.bias is False)",
    ),
    "the config of a repeat's bwd": (
        lambda cfg: repeat.bwd(repeat.fwd((WEIGHT, WEIGHT), X, LAYERS)[1], X, cfg),
        LAYERS,
        LINEAR,
        TypeError,
        "repeat_bwd: cfg must be RepeatConfig, got LinearConfig",
    ),
    "into of a stage": (
        lambda into: Stage(TWO_STAGES, 1, WEIGHT, Ledger(), Needs.ALL, into, count=1),
        trees.tree_map(torch.zeros_like, WEIGHT),
        {"weight": X},
        ValueError,
        "stage 1: into must be a tree with the paths of params: weight, bias, got a difference at bias",
    ),
    "qkv_split over ranks": (
        lambda kv: QKVSplitConfig(4, 8, kv_heads=kv).sharded(1, 2),
        2,
        1,
        ValueError,
        "QKVSplitConfig: kv_heads must be a multiple of 2, the number of ranks, got 1",
    ),
    "op_from_torch's x": (from_torch, X, X.clone().requires_grad_(), GradModeError, "x must"),
    "rope's x": (
        lambda t: rope.fwd(None, (t, torch.arange(3)), RopeConfig(4)),
        torch.ones(3, 2, 4),
        torch.ones(3, 2, 4).requires_grad_(),
        GradModeError,
        "rope_fwd: x.0",
    ),
    "the config of expert steps": (
        lambda cfg: expert_steps.fwd(expert_steps.init(STEPS, key=random.key(0)), ROUTED_X, cfg),
        STEPS,
        LINEAR,
        TypeError,
        "expert_steps_fwd: cfg must be ExpertStepsConfig, got LinearConfig",
    ),
    "draw's unit": (
        lambda unit: draw(simulate(one_f_one_b(2, 4), Costs()), unit=unit),
        "ms",
        3,
        TypeError,
        "draw: unit must be str, got 3",
    ),
    "measure_stages' repeats": (
        lambda repeats: measure_stages({"a": WEIGHT, "b": WEIGHT}, X, TWO_STAGES, repeats=repeats),
        1,
        0,
        ValueError,
        "measure_stages: repeats must be at least 1",
    ),
    "the norm of a tree with None": (
        lambda t: global_norm({"a": None, "b": t}),
        X,
        X.int(),
        TypeError,
        "global_norm: b must be a float tensor or None",
    ),
    "rows of a zigzag": (
        lambda t: check_shared("here", t, (ZIGZAG,)),
        torch.ones(4, 2),
        X,
        ValueError,
        "here: x.0 must be of an even size along dimension 0 (zigzag)",
    ),
    "a router's rows of a zigzag": (
        lambda t: route.fwd(RouteParams(None), (t, random.key(0)), RouteConfig(4, 2, jitter=0.1, shared=(ZIGZAG,))),
        torch.ones(2, 4),
        X,
        ValueError,
        "route_fwd: x.0 must be of an even size along dimension 0 (zigzag)",
    ),
    "a tangent and Triton": (with_tangent, "torch", "triton", RuntimeError, "linear: x and params must be without tangents"),
    "finish": (finished, None, X, TypeError, "finish: into must be None (only sums from reduce_start can be added)"),
    "a network's links": (
        lambda one: Network(axes=(one,)),
        Link("tp", 2),
        "tp",
        TypeError,
        "Network: axes.0 must be Link, got 'tp'",
    ),
    "graphed's keep_graph": (
        lambda keep: graphed(torch.exp, X, keep_graph=keep),
        False,
        1,
        TypeError,
        "graphed: keep_graph must be bool, got 1",
    ),
    "graphed's debug": (lambda debug: graphed(torch.exp, X, debug=debug), True, 1, TypeError, "graphed: debug must be bool, got 1"),
    "the pending of an op without params": (
        lambda pending: activation.wgrad(pending, GELU),
        None,
        X,
        TypeError,
        "activation_wgrad: pending must be None (this op has no params), got float32[3, 4]",
    ),
    "into of an op without params": (
        lambda into: activation.wgrad(None, GELU, into=into),
        None,
        X,
        TypeError,
        "activation_wgrad: into must be None (this op has no params), got float32[3, 4]",
    ),
    "a rank's part of an odd size": (
        lambda rows: on_two(lambda mesh: dist.unshard({"a": torch.ones(rows)}, {"a": dist.Spec(fsdp="tp", whole=(257,))}, mesh)),
        129,
        128,
        ValueError,
        "unshard: a must be this rank's part, [129], got float32[128]",
    ),
    "the rows that permute sorts": (
        lambda x: permute.fwd(None, (x, ROUTED_X[2]), PermuteConfig(2)),
        X,
        [1.0],
        TypeError,
        "permute_fwd: x.0 must be a tensor [...], got list",
    ),
    "the device of what permute sorts": (
        lambda x: permute.fwd(None, (x, ROUTED_X[2]), PermuteConfig(2)),
        X,
        X.to("meta"),
        ValueError,
        "permute_fwd: x.1 (indices) must be on device meta, got cpu",
    ),
    "the config of a skip's wgrad": (
        lambda cfg: skip.wgrad(skip_back()[1], cfg),
        SKIP,
        LINEAR,
        TypeError,
        "skip_wgrad: cfg must be SkipConfig, got LinearConfig: call linear_wgrad",
    ),
    "the config of a wgrad without params": (
        lambda cfg: activation.wgrad(None, cfg),
        GELU,
        LINEAR,
        TypeError,
        "activation_wgrad: cfg must be ActivationConfig, got LinearConfig: call linear_wgrad",
    ),
    "into of a bwd without params": (
        lambda into: activation.bwd(activation.fwd(None, X, GELU)[1], X, GELU, into=into),
        None,
        WEIGHT,
        TypeError,
        "activation_bwd: into must be None (this op has no params), got LinearParams",
    ),
    "the config under a policy": (
        lambda cfg: with_policy(linear, Policy()).fwd(WEIGHT, X, cfg),
        LINEAR,
        TWO,
        TypeError,
        "linear: cfg must be LinearConfig, got ChainConfig",
    ),
    "the needs of a remat": (
        lambda path: remat(linear).fwd(WEIGHT, X, LINEAR, needs=Needs(params=(path,))),
        "bias",
        "bais",
        ValueError,
        "remat(linear)_fwd: needs.params must be paths among weight, bias, got 'bais'",
    ),
    "the residuals of a remat": (
        remat_back,
        False,
        True,
        DonatedError,
        "remat(linear)_bwd: residuals must be unused, got RematOfTensor given away with donate()",
    ),
    "residuals of residuals": (
        nested_back,
        False,
        True,
        DonatedError,
        "inner: chain_bwd: residuals must be unused, got ChainResiduals given away with donate()",
    ),
    "a second run": (
        noted,
        "a",
        "b",
        RuntimeError,
        "remat: the second run of a forward must be of the calls of the first one, got another call of b",
    ),
    "an op that stands for another": (
        lambda op: remade("parallel", op, linear, qlinear),
        remat(linear),
        remat(chain),
        ValueError,
        "parallel: op 'chain' must be linear, or one that remat or with_policy made from it, got another",
    ),
    "the params of expert steps": (
        lambda params: expert_steps.fwd(params, ROUTED_X, STEPS),
        expert_steps.init(STEPS, key=random.key(0)),
        {},
        TypeError,
        "expert_steps_fwd: params must be ExpertsParams, got dict",
    ),
    "what a function of torch kept": (
        weighed_back,
        X,
        ROW,
        ValueError,
        "weighed_dgrad: residuals.kept.logcumsumexp must be float32[3, 4], got float32[4]",
    ),
    "a module's x": (
        given_tangent,
        False,
        True,
        RuntimeError,
        "linear: x and params must be without requires_grad if one has a tangent (forward_ad.make_dual), got both",
    ),
    "the layout of what is sent": (
        lambda t: on_two(lambda mesh: received(COLLECTIVES.all_reduce(t, "sum", mesh["tp"].group))),
        torch.ones(4, 3).t().contiguous(),
        torch.ones(4, 3).t(),
        ValueError,
        "all_reduce: x must be contiguous, got float32[3, 4]",
    ),
    "a collective of torch": (
        lambda name: on_two(lambda mesh: received(getattr(COLLECTIVES, name)(torch.ones(2), "sum", mesh["tp"].group))),
        "all_reduce",
        "all_reduce_",
        ValueError,
        "run_ranks: fn must be one that sends by all_gather, reduce_scatter, all_reduce, all_to_all, got _c10d_functional",
    ),
    "rows of an all_to_all": (
        rows_sent,
        1,
        2,
        ValueError,
        "it must be of the rows that the other rank expects, got all_to_all of float32[*] with 2 rows for rank 1 on rank 0, 1 rows "
        "from rank 0 on rank 1",
    ),
    "placements of check_dist": (
        lambda placed: check_dist(dist.gather, placed_at(placed), sizes=(2,)),
        Placed("shard"),
        (Placed("shard"), Placed("shard")),
        AssertionError,
        "gather , 2 ranks: ValueError: DistCase: placements must be one for each of its tensor alone, got 2",
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_stops_wrong_calls(name):
    call, _, wrong, error, said = GUARDS[name]
    with pytest.raises(error) as raised:
        call(wrong)
    assert said in str(raised.value), raised.value


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_passes_correct_calls(name):
    call, right, *_ = GUARDS[name]
    call(right)
