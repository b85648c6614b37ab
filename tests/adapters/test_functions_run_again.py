"""Ops from torch functions where a policy runs their forward again: one that draws random numbers is refused by name, and what a
function reads beside its arguments must be what it was. Nothing is drawn or read anew in silence."""

import functools
import types

import pytest
import torch
import torch.nn.functional as F

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
    report,
    skip,
    with_policy,
)
from funcops.errors import StaleResidualError
from funcops.trees import tensors, tree_map_tensors

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
@pytest.mark.turns("name", "autograd", every=26)
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


# what a function reads beside its arguments


class Centre(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.full((D,), 3.0))
        self.scale, self.factor = torch.nn.Parameter(torch.full((D,), 2.0), requires_grad=False), 1.0

    def forward(self, x):
        return x.square() * self.mean * self.scale * self.factor


CENTRE = torch.full((D,), 3.0)


def captures():
    """Rows by name: a function that reads a tensor beside its arguments, that tensor, and its name in an error."""
    centre, module, other = torch.full((D,), 3.0), Centre(), torch.full((2, D), 3.0)
    held, table = [torch.full((D,), 3.0)], {"centre": torch.full((D,), 3.0)}
    owner = types.SimpleNamespace(centre=torch.full((D,), 3.0))

    def helper(x):
        return x.square() * centre

    class Owner:
        def __init__(self):
            self.centre = torch.full((D,), 3.0)

        def step(self, params, x, cfg):
            return x.square() * self.centre

        def __call__(self, params, x, cfg):
            return x.square() * self.centre

    one, called = Owner(), Owner()
    return {
        "variable": (lambda params, x, cfg: x.square() * centre, centre, "centre"),
        "only in the backward": (lambda params, x, cfg: (x * centre).exp() * centre, centre, "centre"),
        "global": (lambda params, x, cfg: x.square() * CENTRE, CENTRE, "CENTRE"),
        "helper": (lambda params, x, cfg: helper(x), centre, "centre"),
        "a view": (lambda params, x, cfg: x.square() * other[1], other, "other"),
        "written beside": (lambda params, x, cfg: x.clone().mul_(centre) * x, centre, "centre"),
        "list": (lambda params, x, cfg: x.square() * held[0], held[0], "0"),
        "dict": (lambda params, x, cfg: x.square() * table["centre"], table["centre"], "0"),
        "object": (lambda params, x, cfg: x.square() * owner.centre, owner.centre, "0"),
        "buffer": (lambda params, x, cfg: module(x), module.mean, "module.mean"),
        "frozen parameter": (lambda params, x, cfg: module(x), module.scale, "module.scale"),
        "method": (one.step, one.centre, "0"),
        "callable": (called, called.centre, "0"),
        "partial": (functools.partial(lambda c, params, x, cfg: x.square() * c, centre), centre, "Tensor"),
        "default": (lambda params, x, cfg, c=centre: x.square() * c, centre, "0"),
        "two of one name": (lambda params, x, cfg: helper(x) * (lambda centre: x * centre)(other[0]), centre, "centre"),
        "index": (lambda params, x, cfg: x.square() * other[:, 1:2].sum(), other, "other"),
    }


WRITES = {
    "mul_": lambda t: t.mul_(2),
    "item": lambda t: t.__setitem__((..., 0), 9.0),
    "copy_": lambda t: t.copy_(torch.zeros_like(t)),
    "of a view": lambda t: t.view(-1)[1:].add_(1),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
}
AROUND = {
    "alone": lambda op: (op, CFG),
    "remat": lambda op: (remat(op), CFG),
    "chain": lambda op: (chain, ChainConfig(steps=(Step("own", op, CFG),))),
    "remat of a chain": lambda op: (remat(chain), ChainConfig(steps=(Step("own", op, CFG),))),
    "minimal": lambda op: (with_policy(repeat, "minimal"), layers_of(op)),
}


def gradients(op, residuals, y, cfg):
    return tensors(op.bwd(residuals, torch.ones_like(y), cfg))


def params_of(op, cfg):
    return op.init(cfg, key=random.key(0))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.turns("write", "way")
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("way", captures())
def test_a_captured_tensor_is_guarded(way, write, around):
    fn, captured, name = captures()[way]
    before = captured.clone()
    op, cfg = AROUND[around](op_from_torch(fn, name="own"))
    params, x = params_of(op, cfg), torch.arange(float(D)).repeat(2, 1)
    y, residuals = op.fwd(params, x, cfg)
    if around != "alone" or "exp" in way:
        wanted = x.clone().requires_grad_()
    else:
        fn(None, (wanted := x.clone().requires_grad_()), CFG).sum().backward()
        torch.testing.assert_close(op.bwd(residuals, torch.ones_like(y), cfg)[1], wanted.grad)
        rows = [line for line in str(report(residuals, params, x)).splitlines() if f"captured.{name} " in line]
        assert len(rows) == 1 and "0 bytes" not in rows[0]
    WRITES[write](captured)
    try:
        with pytest.raises(StaleResidualError, match=rf"captured\.{name} must be as the forward left it"):
            op.bwd(residuals, torch.ones_like(y), cfg)
        y, residuals = op.fwd(params, x, cfg)  # the next one reads what it is now
        op.bwd(residuals, torch.ones_like(y), cfg)
    finally:
        captured.copy_(before)


def test_a_pending_guards_what_its_wgrad_reads():
    gain = torch.full((D,), 3.0)
    op = op_from_torch(
        lambda params, x, cfg: x * (params["w"] * gain),
        name="own",
        init=lambda cfg, *, key=None, device=None, dtype=None: {"w": torch.ones(D)},
    )
    y, residuals = op.fwd({"w": torch.ones(D)}, torch.ones(2, D), CFG)
    _, pending = op.dgrad(residuals, torch.ones_like(y), CFG)
    gain.mul_(2)
    with pytest.raises(StaleResidualError, match="own_wgrad: pending.kept.captured.gain must be as the forward left it"):
        op.wgrad(pending, CFG)


RATE = 1.0


class Rate(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = 1.0

    def forward(self, x):
        return x * self.rate * (1 if self.training else 2)


def rebound():
    """Rows by name: a function of x that reads a number beside its arguments, a function that sets it, and its name in an error."""
    cell, held, table, lot = 1.0, [1.0], {"rate": [1.0]}, [1.0] * 100
    owner, module, pair = types.SimpleNamespace(rate=1.0, inner=types.SimpleNamespace(rate=1.0)), Rate(), (1, [1.0])
    array = pytest.importorskip("numpy").ones(1)

    class Owner:
        rate = 1.0

        def step(self, params, x, cfg):
            return x.sin() * self.rate

        def __call__(self, params, x, cfg):
            return x.sin() * self.rate

    one, called = Owner(), Owner()

    def set_cell(value):
        nonlocal cell
        cell = value

    def helper(x):
        return x.sin() * cell

    def set_global(value):
        globals()["RATE"] = value

    def by_default(params, x, cfg, rate=[1.0], *, more={"rate": 1.0}):  # noqa: B006
        return x.sin() * rate[0] * more["rate"]

    return {
        "variable": (lambda params, x, cfg: x.sin() * cell, set_cell, "cell"),
        "helper": (lambda params, x, cfg: helper(x), set_cell, "cell"),
        "global": (lambda params, x, cfg: x.sin() * RATE, set_global, "RATE"),
        "list": (lambda params, x, cfg: x.sin() * held[0], lambda v: held.__setitem__(0, v), "held"),
        "a longer list": (lambda params, x, cfg: x.sin() * len(held), lambda v: held.append(v), "held"),
        "a long list": (lambda params, x, cfg: x.sin() * lot[50], lambda v: lot.__setitem__(50, v), "lot"),
        "dict": (lambda params, x, cfg: x.sin() * table["rate"][0], lambda v: table["rate"].__setitem__(0, v), "table"),
        "tuple": (lambda params, x, cfg: x.sin() * pair[1][0], lambda v: pair[1].__setitem__(0, v), "pair"),
        "object": (lambda params, x, cfg: x.sin() * owner.rate, lambda v: setattr(owner, "rate", v), "owner"),
        "inner object": (lambda params, x, cfg: x.sin() * owner.inner.rate, lambda v: setattr(owner.inner, "rate", v), "owner"),
        "module": (lambda params, x, cfg: module(x.sin()), lambda v: setattr(module, "rate", v), "module"),
        "mode": (lambda params, x, cfg: module(x.sin()), lambda v: module.train(v == 1.0), "module"),
        "method": (one.step, lambda v: setattr(one, "rate", v), "Owner"),
        "callable": (called, lambda v: setattr(called, "rate", v), "Owner"),
        "array": (lambda params, x, cfg: x.sin() * float(array[0]), lambda v: array.__setitem__(0, v), "array"),
        "default": (by_default, lambda v: by_default.__defaults__[0].__setitem__(0, v), "__defaults__"),
        "keyword": (by_default, lambda v: by_default.__kwdefaults__["more"].__setitem__("rate", v), "__kwdefaults__"),
        "partial": (functools.partial(lambda by, params, x, cfg: x.sin() * by[0], held), lambda v: held.__setitem__(0, v), "list"),
    }


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.turns("way")
@pytest.mark.parametrize("way", rebound())
def test_a_value_that_was_rebound_is_not_read_anew(way, around):
    """A forward that would run again raises; one that ran once gives the gradients of its own forward."""
    fn, change, name = rebound()[way]
    op, cfg = AROUND[around](op_from_torch(fn, name="own"))
    params, x = params_of(op, cfg), torch.arange(float(D)).repeat(2, 1)
    y, residuals = op.fwd(params, x, cfg)
    want = gradients(op, residuals, y, cfg)
    y, residuals = op.fwd(params, x, cfg)
    change(5.0)
    if around in ("alone", "chain"):
        torch.testing.assert_close(gradients(op, residuals, y, cfg), want)
    else:
        with pytest.raises(StaleResidualError, match=rf"{name} must be as the forward left it, got one that has changed since"):
            op.bwd(residuals, torch.ones_like(y), cfg)
    if "longer" not in way:
        change(1.0)
        y, residuals = op.fwd(params, x, cfg)
        change(5.0)
        change(1.0)  # back to what it was
        torch.testing.assert_close(gradients(op, residuals, y, cfg), want)
