"""Low precision in a training step: the working tree is made once, and delayed scaling's state is the same by every way that a
step may go."""

import math

import pytest
import torch

import funcops as fo
from funcops import (
    MXFP8,
    NVFP4,
    ChainConfig,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    Needs,
    Step,
    batch_wgrads,
    chain,
    donate,
    gradients_like,
    quantize_params,
    random,
    recipe_init,
    recipe_update,
    remat,
    split_amaxes,
    with_policy,
    with_recipe,
)
from funcops.adapters.graphs import graphed
from funcops.checkpoint import load, save
from funcops.kernels import quantize as kernels
from funcops.low_precision import ScaleState
from funcops.residuals import Ledger
from funcops.schedule import one_f_one_b, run, zb_h1
from funcops.trees import paths, tensors

D, COUNT = 32, 3
RECIPE = Fp8Delayed(history=4)
FP8_MAX = {"e4m3": 448.0, "e5m2": 57344.0}


def mlp(hidden=2 * D):
    steps = (
        Step("norm", fo.rms_norm, fo.RMSNormConfig(D)),
        Step("up", fo.linear, fo.LinearConfig(D, hidden)),
        Step("act", fo.activation, fo.ActivationConfig("gelu")),
        Step("down", fo.linear, fo.LinearConfig(hidden, D, bias=False)),
    )
    return ChainConfig(steps=steps)


def config(stacked=False, ties=(), op=fo.skip, cfg=None):
    """Four stages: a projection, a repeat of MLPs, a parallel, a projection."""
    inner = fo.SkipConfig(chain, mlp()) if cfg is None else cfg
    branches = tuple(Step(name, fo.linear, fo.LinearConfig(D, D)) for name in "qk")
    heads = (Step("fan", fo.parallel, fo.ParallelConfig(branches=branches)), Step("sum", fo.add, fo.AddConfig()))
    steps = (
        Step("first", fo.linear, fo.LinearConfig(D, D)),
        Step("blocks", fo.repeat, fo.RepeatConfig(op, inner, 2, stacked=stacked)),
        Step("heads", chain, ChainConfig(steps=heads)),
        Step("last", fo.linear, fo.LinearConfig(D, D)),
    )
    return ChainConfig(steps=steps, ties=ties)


def given(cfg, seed=0, dtype=torch.float32):
    params = chain.init(cfg, key=random.key(seed), dtype=dtype)
    g = torch.Generator().manual_seed(seed)
    xs, dys = ([torch.randn(5, D, generator=g) * 2.0**i for i in range(COUNT)] for _ in range(2))
    return params, [t.to(dtype) for t in xs], [t.to(dtype) for t in dys]


def begun(cfg, params):
    """A state that is not the first one: every scale another."""
    g = torch.Generator().manual_seed(1)
    return {
        path: ScaleState(2.0 ** torch.randint(0, 6, s.scale.shape, generator=g), s.history)
        for path, s in recipe_init(cfg, params).items()
    }


def together(op, work, xs, dys, cfg, order=range(COUNT), keep=donate):
    sums = gradients_like(work)
    for i in order:
        _, residuals = op.fwd(work, xs[i], cfg)
        op.bwd(keep(residuals), dys[i], cfg, into=sums)
    return sums


def later(op, work, xs, dys, cfg, order=range(COUNT)):
    sums, ledger = gradients_like(work), Ledger(work)
    for i in range(COUNT):
        _, residuals = op.fwd(work, xs[i], cfg)
        ledger.keep(f"{i}", op.dgrad(donate(residuals), dys[i], cfg)[1])
    for i in order:
        op.wgrad(donate(ledger.take(f"{i}")), cfg, into=sums)
    ledger.close()
    return sums


def batched(op, work, xs, dys, cfg, into=True):
    pendings = []
    for x, dy in zip(xs, dys, strict=True):
        _, residuals = op.fwd(work, x, cfg)
        pendings.append(op.dgrad(donate(residuals), dy, cfg)[1])
    return batch_wgrads(op, pendings, cfg, into=gradients_like(work) if into else None)


def summed(op, work, xs, dys, cfg):
    """Trees of gradients, added by hand."""
    from funcops.program.values import add

    total = None
    for x, dy in zip(xs, dys, strict=True):
        _, pull = fo.vjp(op, work, x, cfg)
        total = add(total, pull(dy)[0])
    return total


def scheduled(schedule, into):
    def way(op, work, xs, dys, cfg):
        return run(schedule, work, xs, cfg, dys, into=gradients_like(work) if into else None).dparams

    return way


def replayed(op, work, xs, dys, cfg):
    def step(work, *given):
        return together(op, work, given[:COUNT], given[COUNT:], cfg)

    return graphed(step, work, *xs, *dys)(work, *xs, *dys)


WAYS = {
    "other order": lambda *a: together(*a, order=(2, 0, 1)),
    "kept residuals": lambda *a: together(*a, keep=lambda residuals: residuals),
    "delayed": later,
    "delayed, other order": lambda *a: later(*a, order=(1, 2, 0)),
    "batched": batched,
    "batched, no accumulators": lambda *a: batched(*a, into=False),
    "summed": summed,
    "schedule 1f1b": scheduled(one_f_one_b(4, COUNT), True),
    "schedule zb": scheduled(zb_h1(4, COUNT), False),
    "remat": lambda op, *a: together(remat(op), *a),
    "policy": lambda op, *a: together(with_policy(op, "minimal"), *a),
    "recorded": replayed,
}


@pytest.fixture(scope="module", params=["listed", "stacked", "tied"])
def wanted(request):
    ties = {"last.weight": "first.weight"} if request.param == "tied" else {}
    cfg = with_recipe(config(request.param == "stacked", ties), RECIPE)
    params, xs, dys = given(cfg)
    state = begun(cfg, params)
    work = quantize_params(params, cfg, state, dtype=torch.float32)
    grads, amaxes = split_amaxes(together(chain, work, xs, dys, cfg))
    return cfg, params, xs, dys, state, work, grads, amaxes


@pytest.mark.parametrize("way", WAYS)
def test_amaxes_have_the_same_bits_by_every_way(way, wanted):
    cfg, _, xs, dys, state, work, grads, amaxes = wanted
    found, got = split_amaxes(WAYS[way](chain, work, xs, dys, cfg))
    assert set(got) == set(amaxes) == set(state)
    for path, a in amaxes.items():
        assert torch.equal(a, got[path]) and bool((a > 0).all()), path
    want = paths(grads)
    for path, g in paths(found).items():
        if g is not None:
            torch.testing.assert_close(g, want[path], rtol=1e-5, atol=1e-5 * float(want[path].abs().max()), msg=path)
