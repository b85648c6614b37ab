"""Ops from torch functions that draw random numbers, where a policy runs their forward again: they are refused by name."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from funcops import (
    POLICIES,
    ChainConfig,
    LinearConfig,
    Needs,
    Policy,
    Recompute,
    RepeatConfig,
    SkipConfig,
    Step,
    TorchConfig,
    chain,
    differentiable,
    fit,
    linear,
    op_from_torch,
    random,
    remat,
    repeat,
    skip,
    with_policy,
)
from funcops.engine.trees import tensors, tree_map_tensors

D, TIMES = 4, 2
CFG = TorchConfig()


def of_size(x):
    return torch.empty_like(x)


DRAWS = {
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + x * torch.randn(x.shape, dtype=x.dtype),
    "randint_like": lambda x: x * torch.randint_like(x, 9),
    "normal": lambda x: x * torch.normal(0.0, 1.0, x.shape, dtype=x.dtype),
    "exponential_": lambda x: x * of_size(x).exponential_(),
    "uniform_": lambda x: x * of_size(x).uniform_(),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: x * of_size(x).bernoulli_(0.5),
    "poisson": lambda x: x * torch.poisson(torch.ones_like(x)),
    "randperm": lambda x: x[..., torch.randperm(D)],
    "multinomial": lambda x: x[..., torch.multinomial(torch.ones(D), D)],
    "dropout": lambda x: F.dropout(x, 0.5),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "dropout2d": lambda x: F.dropout2d(x[..., None, None], 0.5)[..., 0, 0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "hard gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True),
    "attention with dropout": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)[0],
    "a sample": lambda x: x * torch.distributions.Normal(0.0, 1.0).sample(x.shape).to(x.dtype),
}
QUIET = {  # which torch marks as random, but whose forward draws nothing
    "in the backward": lambda x: Noisy.apply(x),
    "dropout of none": lambda x: F.dropout(x, 0.0),
    "dropout in eval mode": lambda x: F.dropout(x, 0.5, False),
    "native_dropout of none": lambda x: torch.native_dropout(x, 0.0, True)[0],
    "native_dropout in eval mode": lambda x: torch.native_dropout(x, 0.5, False)[0],
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "rrelu in eval mode": lambda x: F.rrelu(x, training=False),
}


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        return dy * torch.rand_like(dy)


@functools.cache
def op_of(name):
    fn = DRAWS.get(name) or QUIET[name]
    return op_from_torch(lambda params, x, cfg: fn(x), name="drawn")


def layers_of(op):
    """A chain of the op between two linears, in a skip, twice."""
    steps = Step("up", linear, LinearConfig(D, D)), Step("own", op, CFG), Step("down", linear, LinearConfig(D, D))
    return RepeatConfig(skip, SkipConfig(chain, ChainConfig(steps=steps)), TIMES)


AGAIN = {  # ways in which a forward runs again
    "remat": lambda op: remat(repeat),
    "remat, offloaded": lambda op: remat(repeat, offload=True),
    "minimal": lambda op: with_policy(repeat, "minimal"),
    "offload_block_inputs": lambda op: with_policy(repeat, "offload_block_inputs"),
    "a rule": lambda op: with_policy(repeat, Policy({"*.own": Recompute()})),
    "remat of minimal": lambda op: remat(with_policy(repeat, "minimal")),
}
ONCE = {name: functools.partial(lambda name, op: with_policy(repeat, name), name) for name in POLICIES}
ONCE = {name: make for name, make in ONCE.items() if name not in AGAIN and not name.startswith("compress")}
PATHS = {**AGAIN, **ONCE, "no policy": lambda op: repeat}


def given():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, D, dtype=torch.float64, generator=generator)
    return repeat.init(layers_of(op_of("attention")), key=random.key(0), dtype=torch.float64), x


def by_torch(fn, params, x):
    """y and the gradients of the model by autograd, with torch's generator as it is now."""
    own, h = tree_map_tensors(lambda t: t.clone().requires_grad_(), (params, x))
    y = h
    for layer in (own[i] for i in range(TIMES)):
        up, down = layer["up"], layer["down"]
        y = y + F.linear(fn(F.linear(y, up.weight, up.bias)), down.weight, down.bias)
    y.backward(torch.ones_like(y))
    return [y.detach(), h.grad, *[t.grad for t in tensors(own)]]


def by_op(op, cfg, params, x, autograd):
    if not autograd:
        y, residuals = op.fwd(params, x, cfg)
        dparams, dx = op.bwd(residuals, torch.ones_like(y), cfg)
        return [y, dx, *tensors(dparams)]
    own, h = tree_map_tensors(lambda t: t.clone().requires_grad_(), (params, x))
    y = differentiable(op)(own, h, cfg)
    y.backward(torch.ones_like(y))
    return [y.detach(), h.grad, *[t.grad for t in tensors(own)]]


@pytest.mark.parametrize("autograd", [False, True], ids=["bwd", "autograd"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.turns("name", "path", "autograd", every=100)
@pytest.mark.parametrize("name", [*DRAWS, *QUIET])
def test_what_draws_is_refused_or_kept(name, path, autograd):
    """If its forward runs once, its gradients are autograd's with the same generator; where it would run again, it raises."""
    params, x = given()
    op, cfg = PATHS[path](op_of(name)), layers_of(op_of(name))
    fn = DRAWS.get(name) or QUIET[name]
    torch.manual_seed(7)
    if path in AGAIN and name in DRAWS:
        with pytest.raises(ValueError, match="fwd.*: drawn must be an op that gives the same when its forward runs again"):
            by_op(op, cfg, params, x, autograd)
        with torch.no_grad():
            op.fwd(params, x, cfg, needs=Needs.NONE)  # nothing runs again
        return
    found = by_op(op, cfg, params, x, autograd)
    torch.manual_seed(7)
    torch.testing.assert_close(found, by_torch(fn, params, x))


@pytest.mark.parametrize("name", ["native_dropout of none", "native_dropout in eval mode"])
def test_an_argument_without_its_name_turns_a_draw_off(name):
    params, x = given()
    found = by_op(remat(repeat), layers_of(op_of(name)), params, x, autograd=False)
    torch.testing.assert_close(found, by_torch(QUIET[name], params, x))


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", [*DRAWS, *QUIET])
def test_fit_chooses_no_policy_that_draws_anew(name):
    """Whatever the budget: it raises, or its op gives autograd's gradients."""
    params, x = given()
    cfg, served = layers_of(op_of(name)), 0
    for budget in (1, 400, 900, 10**6):
        try:
            op = fit(repeat, cfg, x, budget).op
        except ValueError as error:
            assert "budget must be at least" in str(error)
            continue
        torch.manual_seed(7)
        found = by_op(op, cfg, params, x, autograd=False)
        torch.manual_seed(7)
        torch.testing.assert_close(found, by_torch(DRAWS.get(name) or QUIET[name], params, x))
        served += 1
    assert served


RECOMPUTED = ("rand_like", "bernoulli_", "dropout", "native_dropout", "rrelu", "gumbel_softmax", "attention with dropout")


@pytest.mark.turns("name")
@pytest.mark.parametrize("name", [*RECOMPUTED, *QUIET])
def test_a_checkpoint_inside_draws_nothing_anew(name):
    """torch's checkpoint restores the generator, which a trace cannot: a function that draws in one is refused."""
    fn = DRAWS.get(name) or QUIET[name]
    op = op_from_torch(lambda params, x, cfg: checkpoint(lambda h: fn(h).exp(), x, use_reentrant=False), name="own")
    x = given()[1]
    if name in RECOMPUTED:
        with pytest.raises(ValueError, match="own_fwd: fn must be a function whose backward draws nothing again"):
            op.fwd(None, x, CFG)
        return
    wanted = x.clone().requires_grad_()
    torch.manual_seed(7)
    fn(wanted).exp().sum().backward()
    torch.manual_seed(7)
    y, residuals = op.fwd(None, x, CFG)
    torch.testing.assert_close(op.bwd(residuals, torch.ones_like(y), CFG)[1], wanted.grad)
