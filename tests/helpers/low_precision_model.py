"""A model in low precision and a step of it, for tests of recipes."""

import torch

import funcops as fo
from funcops import ChainConfig, Step, chain, donate, random
from funcops.engine.program.values import add
from funcops.low_precision import (
    MXFP8,
    NVFP4,
    Fp8Block,
    Fp8Current,
    Fp8Delayed,
    ScaleState,
    gradients_like,
    quantize_params,
    recipe_init,
    recipe_update,
    split_amaxes,
)

D, COUNT = 32, 3
RECIPE = Fp8Delayed(history=4)
STATELESS = Fp8Block(), Fp8Current(), MXFP8(), NVFP4(stochastic=False)


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
    """A state after some steps: every scale is another."""
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


def summed(op, work, xs, dys, cfg):
    """The sum of the gradient trees, added as a shared tensor's gradients are."""
    total = None
    for x, dy in zip(xs, dys, strict=True):
        _, pull = fo.vjp(op, work, x, cfg)
        total = add(total, pull(dy)[0])
    return total


def whole_step(params, state, xs, dys, cfg, recipe):
    work = quantize_params(params, cfg, state, dtype=torch.float32)
    grads, amaxes = split_amaxes(summed(chain, work, xs, dys, cfg))
    return grads, recipe_update(state, amaxes, recipe) if amaxes else state
