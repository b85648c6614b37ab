"""Programs: the calls of a combinator, their cost, and their errors."""

import dataclasses
import linecache
import traceback

import pytest
import torch
from law_cases import CASES
from python_calls import of_a_block

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    ForkConfig,
    LayerNormConfig,
    LinearConfig,
    Needs,
    ParallelConfig,
    RMSNormConfig,
    SkipConfig,
    Step,
    WithExtras,
    activation,
    add,
    chain,
    dist,
    fork,
    layer_norm,
    linear,
    named_steps,
    parallel,
    plan,
    random,
    rms_norm,
    skip,
)
from funcops.engine.backend import backend
from funcops.engine.contract.op import make_op
from funcops.engine.program import programs
from funcops.engine.program.lower import Call, lower
from funcops.engine.trees import leaves, tensors, tree_map_tensors
from funcops.models.blocks import block_config
from funcops.testing.checks import float_like
from funcops.testing.tolerances import assert_close

D = 6
RECOMPUTABLE = sorted({case.op.name for case, _ in CASES if case.op.recompute is not None})
ROWS = [
    row for op in RECOMPUTABLE for row in [row for row in CASES if row[0].op.name == op][::7][:14]
]  # 7 and the 4 dtypes take turns


def test_a_block_costs_few_calls():
    """A chain in nested functions took 435 calls, in 34 files, 22 deep. Positions are given as ids."""
    calls, files, depth = of_a_block(recompute=True)
    assert calls <= 140 and files <= 20 and depth <= 11
    assert of_a_block(recompute=False).calls < calls


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_a_recomputed_y_has_the_bits_of_the_forward(name):
    """Every op that can recompute y does so from the fields kept for that, under every mask that keeps its x."""
    seen = set()
    for case, dtype in ROWS:
        params, x = case.make(dtype)
        for needs in (Needs.ALL, Needs(x=False), Needs(params=False)):
            with backend(name):
                y, kept = case.op.fwd(params, x, case.cfg, needs=needs.with_recompute())
                if all(field.wanted(needs) for field in case.op.fields(case.cfg).values() if (field.alias or "").startswith("x")):
                    assert torch.equal(case.op.recompute(kept, case.cfg), y), (case, dtype, needs)
                    seen.add(case.op.name)
    norms = {"rms_norm", "layer_norm", "l2_norm", "group_norm"}
    assert seen >= norms | {"activation", "glu", "softcap", "row_scale", "causal_conv1d"}


def test_a_recomputable_op_has_a_function_for_y():
    """Without it a chain would silently keep what it promises to recompute."""
    halves = {"fwd": rms_norm.fwd, "dgrad": rms_norm.dgrad, "wgrad": rms_norm.wgrad}
    for wrong in ({"recomputable": "norm"}, {"recompute": rms_norm.recompute}):
        with pytest.raises(ValueError, match=r"make_op 'mine': recomputable must be given together with recompute"):
            make_op("mine", RMSNormConfig, init=rms_norm.init, **halves, **wrong)


def residual_stream(norm):
    body = ChainConfig(
        steps=(Step("norm", *norm), Step("up", linear, LinearConfig(D, D)), Step("more", add, AddConfig(), takes=("m",))),
        extras=("m",),
    )
    return ChainConfig(steps=(Step("a", skip, SkipConfig(chain, body)), Step("b", skip, SkipConfig(chain, body))), extras=("m",))


@pytest.mark.parametrize("norm", [(rms_norm, RMSNormConfig(D)), (layer_norm, LayerNormConfig(D))], ids=["rms", "ln"])
def test_a_sum_and_the_norm_of_the_next_skip_are_one_kernel(norm):
    """The rule sees across the boundaries of both skips, and the numbers stay."""
    cfg = residual_stream(norm)
    fused = [line.paths for line in plan(cfg).forward if line.rule and line.rule.name == "add + norm"]
    assert fused == [("a.add", "b.fork", "b.norm")]
    params = chain.init(cfg, key=random.key(0))
    x, dy = WithExtras(torch.randn(5, D), {"m": torch.randn(5, D)}), torch.randn(5, D)
    found = []
    for name in ("torch", "triton"):
        with backend(name):
            y, kept = chain.fwd(params, x, cfg)
            found.append([y, *leaves(chain.bwd(kept, dy, cfg))])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, atol=1e-5, rtol=1e-4)


def test_gradients_of_one_value_are_summed_inside_of_each_scope_first():
    """Three readers of one x, two of them in a parallel inside: a + (b + c), not (a + b) + c."""
    inner = ParallelConfig(branches=(Step("b", linear, LinearConfig(D, D)), Step("c", linear, LinearConfig(D, D))))
    cfg = ParallelConfig(branches=(Step("a", linear, LinearConfig(D, D)), Step("inner", parallel, inner)), fuse=False)
    params, x = parallel.init(cfg, key=random.key(0)), torch.randn(50, D)
    (a, (b, c)), kept = parallel.fwd(params, x, cfg)
    dy = tuple(float_like(t, i) for i, t in enumerate((a, b, c)))
    _, dx = parallel.bwd(kept, (dy[0], dy[1:]), cfg)
    own = [d @ params[p].weight if p == "a" else d @ params["inner"][p].weight for p, d in zip("abc", dy, strict=True)]
    assert torch.equal(dx, own[0] + (own[1] + own[2])) and not torch.equal(dx, (own[0] + own[1]) + own[2])


def test_branches_of_a_parallel_may_read_all_ys_of_another():
    """Both read the pair (a, b); their ys are a pair, too."""
    layers = tuple(Step(name, linear, LinearConfig(D, D, bias=False)) for name in "ab")
    sums = tuple(Step(name, add, AddConfig()) for name in "cd")
    steps = Step("layers", parallel, ParallelConfig(branches=layers)), Step("sums", parallel, ParallelConfig(branches=sums))
    cfg = ChainConfig(steps=(*steps, Step("last", add, AddConfig())))
    params, (x, dy) = chain.init(cfg, key=random.key(0), dtype=torch.float64), torch.randn(2, 5, D, dtype=torch.float64)
    y, kept = chain.fwd(params, x, cfg)
    dparams, dx = chain.bwd(kept, dy, cfg)
    weight = params["layers"]["a"].weight + params["layers"]["b"].weight
    torch.testing.assert_close((y, dx), (2 * x @ weight.mT, 2 * dy @ weight))
    for name in "ab":
        torch.testing.assert_close(dparams["layers"][name].weight, 2 * dy.mT @ x)


def test_unrequested_gradients_are_not_in_the_program():
    cfg = ChainConfig(steps=(Step("frozen", linear, LinearConfig(D, D)), Step("own", linear, LinearConfig(D, D))))
    calls = lower(chain, cfg, Needs(x=False, params=("own",))).calls
    assert [bool(call.needs) for call in calls] == [False, True] and not calls[1].needs.x
    rows = lower(chain, ChainConfig(steps=(Step("s", skip, SkipConfig(chain, cfg)),)), Needs.ALL)
    assert [call.op for call in rows.calls] == [fork, linear, linear, add]
    assert [row.op for row in rows.backward if type(row) is Call] == [add, linear, linear, fork]


def test_a_traceback_shows_the_line_that_was_written():
    cfg = ChainConfig(steps=(Step("up", linear, LinearConfig(D, D)), Step("down", linear, LinearConfig(D, D))))
    params = chain.init(cfg, key=random.key(0))
    params["down"] = dataclasses.replace(params["down"], weight=torch.randn(2, 2))
    with pytest.raises(ValueError, match="^down: linear_fwd: params.weight") as raised:
        chain.fwd(params, torch.randn(3, D), cfg)
    lines = [frame for frame in traceback.extract_tb(raised.value.__traceback__) if frame.filename.startswith("<funcops program")]
    assert len(lines) == 1 and "P0['down']" in linecache.getline(lines[0].filename, lines[0].lineno - 1)


@pytest.mark.parametrize("wrong", ["edited", "foreign", "stale", "of another config"])
def test_a_tree_that_is_not_the_forwards_takes_the_loud_way(wrong):
    cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(D)), Step("up", linear, LinearConfig(D, D))))
    params, x, dy = chain.init(cfg, key=random.key(0)), torch.randn(3, D), torch.randn(3, D)
    _, kept = chain.fwd(params, x, cfg)
    if wrong == "edited":
        kept["norm"].x = torch.randn(4, D)
    elif wrong == "foreign":
        kept["up"] = 3.0
    elif wrong == "stale":
        params["up"].weight.add_(1.0)
    else:
        kept["up"] = linear.fwd(params["up"], x, LinearConfig(D, D, bias=True))[1]
        kept["up"].cfg = LinearConfig(D, D, bias=False)
    with pytest.raises((ValueError, TypeError, RuntimeError), match="^(up|norm): "):
        chain.bwd(kept, dy, cfg)


def test_explicit_forks_and_skips_give_the_same_bits():
    body = (Step("norm", rms_norm, RMSNormConfig(D)), Step("up", linear, LinearConfig(D, D)))
    by_hand = ChainConfig(
        steps=(Step("s", fork, ForkConfig(), gives=("x",)), *body, Step("e", add, AddConfig(), takes=("x",))), fuse=False
    )
    as_skip = SkipConfig(chain, ChainConfig(steps=body, fuse=False))
    params, x, dy = skip.init(as_skip, key=random.key(0)), torch.randn(7, D), torch.randn(7, D)
    y, kept = skip.fwd(params, x, as_skip)
    want, other = chain.fwd({"s": None, **params, "e": None}, x, by_hand)
    assert torch.equal(y, want)
    (dparams, dx), (others, other_dx) = skip.bwd(kept, dy, as_skip), chain.bwd(other, dy, by_hand)
    assert torch.equal(dx, other_dx) and all(torch.equal(a, b) for a, b in zip(tensors(dparams), tensors(others), strict=True))


LOWERED = {case.op.name: case for case in reversed([case for case, dtype in CASES if case.op.lower is not None])}
BLOCK = block_config(16, 2, 24)


def as_traced(monkeypatch):
    """Let the programs that a compiler traces run without one; the arguments with which each was made."""
    made, make = [], programs._made

    def noted(*args):
        made.append(args)
        return make(*args)

    monkeypatch.setattr(programs, "_made", noted)
    monkeypatch.setattr(programs, "_compiling", lambda: True)
    return made


def every_half(op, params, x, cfg):
    """Returns what the forward and both forms of the backward give, and what accumulators have after them."""
    y, kept = op.fwd(params, x, cfg)
    dy = float_like(y, 3)
    dx, pending = op.dgrad(kept, dy, cfg)
    found = [y, dx, op.wgrad(pending, cfg), op.bwd(op.fwd(params, x, cfg)[1], dy, cfg)]
    for run in (
        lambda kept, into: op.bwd(kept, dy, cfg, into=into),
        lambda kept, into: op.wgrad(op.dgrad(kept, dy, cfg)[1], cfg, into=into),
    ):
        into = tree_map_tensors(torch.ones_like, params)
        run(op.fwd(params, x, cfg)[1], into)
        found.append(into)
    return tensors(found)


@pytest.mark.parametrize("name", [*LOWERED, "a block"])
def test_the_programs_for_a_tracer_compute_what_the_usual_ones_do(name, monkeypatch):
    """They have the rules for a CPU, which a small tensor has not otherwise: the sums are rounded in another order."""
    if name == "a block":
        op, cfg, params = chain, BLOCK, chain.init(BLOCK, key=random.key(0))
        x = WithExtras(torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1)), {"positions": torch.arange(5)})
    else:
        op, cfg = LOWERED[name].op, LOWERED[name].cfg
        params, x = LOWERED[name].make(torch.float32)
    want = every_half(op, params, x, cfg)
    made = as_traced(monkeypatch)
    got = every_half(op, params, x, cfg)
    assert made
    assert_close(got, want, dtype=torch.float32)


def test_a_program_for_a_tracer_does_not_pause(monkeypatch):
    """It is a plain function, as a tracer follows no generator, though its op can pause."""
    cfg = dist.ParallelExpertsConfig(2, D, 3, axis=dist.Axis("ep", 1, 0), bias=False)
    of = ChainConfig(steps=(Step("experts", dist.parallel_experts, cfg),))
    assert dist.parallel_experts.pausing is not None
    params, draw = chain.init(of, key=random.key(0)), torch.Generator().manual_seed(1)
    x = torch.rand(3, 1, generator=draw), torch.randn(3, D, generator=draw), torch.tensor([[0], [1], [0]], dtype=torch.int32)
    want = every_half(chain, params, x, of)
    as_traced(monkeypatch)
    assert_close(every_half(chain, params, x, of), want, dtype=torch.float32)


def test_a_program_for_a_tracer_is_made_once_for_all_that_it_depends_on(monkeypatch):
    """It has the rules for its device and dtype, whatever its size, on which a tracer would guard."""
    made = as_traced(monkeypatch)
    cfg = ChainConfig(steps=(Step("norm", rms_norm, RMSNormConfig(D, eps=0.25)), Step("up", linear, LinearConfig(D, D))))
    other = dataclasses.replace(cfg, fuse=False)
    params, x = chain.init(cfg, key=random.key(0)), torch.randn(3, D)
    calls = [
        lambda: chain.fwd(params, x, cfg),
        lambda: chain.fwd(params, x, cfg, needs=Needs.NONE),
        lambda: chain.fwd(params, x, cfg, needs=Needs(x=False, params=True)),
        lambda: chain.fwd(params, x, other),
        lambda: chain.bwd(chain.fwd(params, x, cfg)[1], x, cfg),
        lambda: chain.dgrad(chain.fwd(params, x, cfg)[1], x, cfg),
        lambda: chain.fwd(tree_map_tensors(torch.Tensor.double, params), x.double(), cfg),
    ]
    for count, call in enumerate(calls, 1):
        call()
        call()
        assert len(made) == count
    with named_steps():
        calls[0]()
    assert [one[-2] for one in made] == [False] * 7 + [True]
    assert all(device == "cpu" and traced for *_, device, _, _, traced in made)
    assert [dtype for *_, dtype, _, _ in made] == [torch.float32] * 6 + [torch.float64, torch.float32]
    assert made[1][3] == Needs.NONE and made[2][3] == Needs(x=False, params=True) and {one[0] for one in made[:4]} == {"forward"}
    assert [one[0] for one in made[4:6]] == ["backward", "dgrad"] and made[3][2] is other


@pytest.mark.slow
@pytest.mark.parametrize("of", ["chain", "skip", "parallel"])
def test_a_compiled_call_runs_the_program_of_the_config_that_it_is_given(of):
    """Configs of one type, in one place of what is compiled, in turns."""
    op = {"chain": chain, "skip": skip, "parallel": parallel}[of]

    def call(params, x, cfg):
        y, residuals = op.fwd(params, x, cfg)
        return y, op.bwd(residuals, y, cfg)

    compiled, x, cfgs = torch.compile(call, fullgraph=True, backend="eager"), torch.linspace(-2, 2, D), []
    for kind in ("relu", "gelu", "silu"):
        step = Step("act", activation, ActivationConfig(kind))
        made = {
            "chain": ChainConfig(steps=(step,)),
            "skip": SkipConfig(step.op, step.cfg),
            "parallel": ParallelConfig(branches=(step,)),
        }
        cfgs.append(made[of])
    for cfg in (*cfgs, cfgs[0]):
        params = op.init(cfg)
        got, want = (leaves(f(params, x, cfg)) for f in (compiled, call))
        assert len(got) == len(want) and all(g is w is None or torch.equal(g, w) for g, w in zip(got, want, strict=True)), cfg
