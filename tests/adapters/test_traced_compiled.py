"""Ops of a module or a function under `torch.compile(fullgraph=True)`: the same bits, also after a change of the module."""

import own_models
import pytest
import torch
from own_models import CFG, MODELS, Mlp, Scales, draw, made
from torch import nn

from funcops import (
    ChainConfig,
    Compress,
    Needs,
    Policy,
    Recompute,
    Save,
    Step,
    TorchConfig,
    WithExtras,
    chain,
    differentiable,
    donate,
    fit,
    op_from_module,
    op_from_torch,
    remat,
    with_policy,
)
from funcops.contract import OpConfig, config
from funcops.engine.trees import tensors, tree_map_tensors


class Compiled:
    """A function under torch.compile, and how often it was compiled."""

    def __init__(self, fn, backend="eager", dynamic=None):
        self.graphs = 0
        self.run = torch.compile(fn, fullgraph=True, backend=self.count if backend == "eager" else backend, dynamic=dynamic)

    def count(self, graph, example):
        self.graphs += 1
        return graph

    def __call__(self, *args):
        return self.run(*args)


def seeded(fn, *args):
    torch.manual_seed(3)
    return fn(*args)


def same(a, b):
    a, b = tensors(a), tensors(b)
    return len(a) == len(b) > 0 and all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


def steps(op, cfg=CFG):
    """Each half, and a whole step, as functions of what they take."""

    def step(params, x, dy):
        y, residuals = op.fwd(params, x, cfg)
        return y, *op.bwd(residuals, dy, cfg)

    return {
        "fwd": lambda params, x: op.fwd(params, x, cfg),
        "dgrad": lambda residuals, dy: op.dgrad(residuals, dy, cfg),
        "wgrad": lambda pending: op.wgrad(pending, cfg),
        "bwd": lambda residuals, dy: op.bwd(residuals, dy, cfg),
        "step": step,
    }


def ones(y):
    main = tree_map_tensors(lambda t: draw(*t.shape, seed=1), y.main if isinstance(y, WithExtras) else y)
    return WithExtras(main, dict.fromkeys(y.extras)) if isinstance(y, WithExtras) else main


@pytest.mark.turns("name", every=8)
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_each_half_and_a_step(name, backend):
    module, x = made(name)
    op, params = op_from_module(module, x)
    y, residuals = seeded(op.fwd, params, x, CFG)
    dy = ones(y)
    pending = op.dgrad(residuals, dy, CFG)[1]
    given = {"fwd": (params, x), "dgrad": (residuals, dy), "wgrad": (pending,), "bwd": (residuals, dy), "step": (params, x, dy)}
    compiled = {}
    for half, fn in steps(op).items():
        compiled[half] = Compiled(fn, backend)
        assert same(seeded(compiled[half], *given[half]), seeded(fn, *given[half])), half
    other = tree_map_tensors(lambda t: t * 2 if t.is_floating_point() else t.roll(1), (params, x))
    assert same(seeded(compiled["step"], *other, dy), seeded(steps(op)["step"], *other, dy)), "no value is part of it"
    assert compiled["step"].graphs <= 1
    want, got = [{n: torch.ones_like(p) for n, p in params.items()} for _ in range(2)]
    op.wgrad(pending, CFG, into=want)
    Compiled(lambda pending, into: op.wgrad(pending, CFG, into=into), backend)(pending, got)
    assert same(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["block", "conv", "dropout"])
def test_inductor_takes_the_graphs(name):
    module, x = made(name)
    op, params = op_from_module(module, x)
    step = steps(op)["step"]
    dy = ones(op.fwd(params, x, CFG)[0])
    got = Compiled(step, "inductor")(params, x, dy)
    if name != "dropout":  # which it draws in another way
        torch.testing.assert_close(tensors(got), tensors(step(params, x, dy)))
    assert all(t.isfinite().all() for t in tensors(got))


def changes():
    def replaced(module):
        module.up = nn.Linear(6, 12).double()

    def hooked(module):
        module.up.register_forward_hook(lambda module, args, out: 2 * out)

    return {
        "attribute": lambda m: setattr(m, "slope", 0.25),
        "an equal attribute": lambda m: setattr(m, "slope", float("0.5")),
        "a list": lambda m: m.parts.__setitem__(0, 3.0),
        "a config": lambda m: setattr(m.config, "power", 3),
        "a new attribute of a part": lambda m: setattr(m.norm, "eps", 1e-2),
        "a function of a part": lambda m: setattr(m.up, "forward", lambda x: m.norm(x).repeat(1, 1, 2)),
        "mode": lambda m: m.eval(),
        "a part": lambda m: replaced(m),
        "a hook": lambda m: hooked(m),
        "a global": lambda m: setattr(own_models, "SCALE", 7.0),
        "dtype": lambda m: None,
    }


@pytest.mark.turns("change", "known", every=8)
@pytest.mark.parametrize("known", [True, False], ids=["after a call", "before one"])
@pytest.mark.parametrize("change", [*[name for name in changes() if name != "dtype"], "a frozen parameter"])
def test_a_change_of_the_module_is_compiled_anew(change, known):
    module, x = made("mlp")
    op, params = op_from_module(module, x)
    step, dy = steps(op)["step"], draw(2, 5, 6, seed=4)
    compiled = Compiled(step)
    assert same(compiled(params, x, dy), step(params, x, dy)) and compiled.graphs == 1
    compiled(params, x, dy)
    assert compiled.graphs == 1
    try:
        if change == "a frozen parameter":
            module.up.requires_grad_(False)
        else:
            changes()[change](module)
        want = step(params, x, dy) if known else None
        got = compiled(params, x, dy)
        assert same(got, want or step(params, x, dy))
        assert compiled.graphs == (1 if change == "an equal attribute" else 2)
        compiled(params, x, dy)
        assert compiled.graphs < 3
    finally:
        own_models.SCALE = 2.0


class Holder(nn.Module):
    def __init__(self, op, params):
        super().__init__()
        self.op, self.params, self.inner = op, params, nn.Linear(6, 6).double()

    def forward(self, x):
        return self.op.fwd(self.params, self.inner(x).detach(), CFG)[0]


def test_an_op_that_a_module_holds():
    module, x = made("mlp")
    holder = Holder(*op_from_module(module, x))
    compiled = Compiled(holder)
    for slope in (0.5, 0.125, 0.125, 0.25):
        module.slope = slope
        assert torch.equal(compiled(x), holder(x))
    assert compiled.graphs == 3


def test_buffers_are_read_at_every_call():
    inner = nn.Sequential(nn.Linear(6, 6), nn.Softmax(-1)).double()
    inner.register_buffer("gain", draw(6))
    x, dy = draw(3, 6), draw(3, 6, seed=4)
    op, params = op_from_module(Scales(inner), x)
    step = steps(op)["step"]
    compiled = Compiled(step)
    compiled(params, x, dy)
    inner.gain.mul_(2)
    assert same(compiled(params, x, dy), step(params, x, dy)) and compiled.graphs == 1
    inner.gain = draw(6, seed=9)
    assert same(compiled(params, x, dy), step(params, x, dy)) and compiled.graphs == 2


@pytest.mark.turns("dynamic")
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_every_shape_is_compiled(dynamic):
    """A trace has fixed sizes, also where the compiler has symbols."""
    module, x = made("block")
    op, params = op_from_module(module, x)
    step = steps(op)["step"]
    compiled = Compiled(step, dynamic=dynamic)
    for shape in ((2, 5, 6), (2, 7, 6), (1, 5, 6), (3, 5, 6), (2, 5, 6)):
        x, dy = draw(*shape), draw(*shape, seed=3)
        assert same(compiled(params, x, dy), step(params, x, dy))
    assert compiled.graphs == 4


class Sees(nn.Module):
    """Takes another way under a compiler."""

    def forward(self, x):
        return x * 3 if torch.compiler.is_compiling() else x * 2


def test_a_trace_that_the_compiler_asks_for_is_the_uncompiled_one():
    op, params = op_from_module(Sees(), draw(3))
    assert torch.equal(Compiled(steps(op)["fwd"])(params, draw(5))[0], 2 * draw(5))
    language, x = made("language")
    op, params = op_from_module(language, x)
    x = {"ids": torch.arange(8).view(2, 4) % 7, "labels": torch.ones(2, 4, dtype=torch.long)}
    assert same(Compiled(steps(op)["fwd"])(params, x), op.fwd(params, x, CFG))


class OnlyInTraining(nn.Module):
    def forward(self, x):
        return x if self.training and x.sum() > 0 else 2 * x


def test_what_cannot_be_traced_is_refused():
    module = OnlyInTraining().eval()
    op, params = op_from_module(module, draw(4))
    compiled = Compiled(steps(op)["fwd"])
    compiled(params, draw(4))
    module.train()
    with pytest.raises(Exception, match="OnlyInTraining_fwd: OnlyInTraining must be a module whose shapes and steps"):
        compiled(params, draw(4))


class Shared(nn.Module):
    """Two parameters of a part have one gradient, which dgrad computes."""

    def __init__(self):
        super().__init__()
        self.a, self.g, self.h = nn.Linear(6, 6), nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))

    def forward(self, x):
        return self.a(x * (self.g + self.h)) + (self.g + self.h)


def with_needs(op):
    needs = Needs(x=False, params=["a.weight"])

    def step(params, x, dy):
        y, residuals = op.fwd(params, x, CFG, needs=needs)
        return y, *op.bwd(residuals, dy, CFG)

    return step


def donated(op):
    def step(params, x, dy):
        y, residuals = op.fwd(params, x, CFG)
        dx, pending = op.dgrad(donate(residuals), dy, CFG)
        return y, dx, op.wgrad(donate(pending), CFG)

    return step


def recomputed(op):
    return steps(remat(op))["step"]


def in_a_chain(op):
    whole = steps(chain, ChainConfig(steps=(Step("one", op, CFG), Step("two", op, CFG))))["step"]
    return lambda params, x, dy: whole({"one": params, "two": params}, x, dy)


def its_config_inside(op):
    def step(params, x, dy):
        y, residuals = op.fwd(params, x, TorchConfig())
        return y, *op.bwd(residuals, dy, TorchConfig())

    return step


@pytest.mark.parametrize("way", [with_needs, donated, recomputed, in_a_chain, its_config_inside], ids=lambda way: way.__name__)
def test_other_ways_to_call_it(way):
    torch.manual_seed(0)
    step = way(op_from_module(Shared().double(), draw(3, 6))[0])
    params = {n: p.detach() for n, p in Shared().double().named_parameters()}
    args = params, draw(3, 6), draw(3, 6, seed=2)
    assert same(Compiled(step)(*args), step(*args))


def test_recomputed_residuals_of_an_uncompiled_forward():
    module, x = made("mlp")
    op, params = op_from_module(module, x)
    again, dy = remat(op), draw(2, 5, 6, seed=4)
    _, residuals = again.fwd(params, x, CFG)
    want = again.bwd(residuals, dy, CFG)
    module.slope = 0.25
    assert same(Compiled(steps(again)["bwd"])(residuals, dy), want), "by the trace of the first run"


def test_differentiable():
    module, x = made("block")
    op, _ = op_from_module(module, x)
    params = dict(module.named_parameters())

    def loss(params, x):
        return differentiable(op)(params, x, CFG).square().sum()

    loss(params, x).backward()
    want = [p.grad for p in params.values()]
    module.zero_grad()
    Compiled(loss)(params, x).backward()
    assert same([p.grad for p in params.values()], want)


@config
class GainConfig(OpConfig):
    gain: float = 1.0


def test_op_from_torch_with_a_config():
    op = op_from_torch(lambda params, x, cfg: (cfg.gain * x).relu(), name="gained", config=GainConfig)
    x = draw(4, 3)

    def step(x, cfg):
        y, residuals = op.fwd(None, x, cfg)
        return y, op.bwd(residuals, x, cfg)[1]

    compiled = Compiled(step)
    for gain in (2.0, 3.0, 2.0, 1.0):
        assert same(compiled(x, GainConfig(gain=gain)), step(x, GainConfig(gain=gain)))
    with pytest.raises(Exception, match="GainConfig must be a config that is made outside of the function .* inside, with gain"):
        Compiled(lambda x: step(x, GainConfig(gain=5.0)))(x)
    sliced = op_from_torch(lambda params, x, cfg: x.as_strided((2,), (1,), 1).exp(), name="sliced")
    with pytest.raises(Exception, match="sliced_fwd: sliced must be an op without places in memory, under torch.compile"):
        Compiled(steps(sliced, TorchConfig())["fwd"])(None, x)


def test_another_op_of_the_same_code():
    ops = [op_from_module(Mlp().double(), draw(2, 5, 6)) for _ in range(2)]

    def call(op, params, x):
        return op.fwd(params, x, CFG)[0]

    compiled = Compiled(call)
    for op, params in [*ops, *ops]:
        assert torch.equal(compiled(op, params, draw(2, 5, 6)), call(op, params, draw(2, 5, 6)))


RULES = {
    "recompute": Policy({"kept.up.*": Recompute()}),
    "codes": Policy({"kept.norm.*": Compress("bf16"), "kept.up.*": Recompute()}, optional=True),
    "save": Policy({"kept.up.*": Save()}, optional=True),
    "preset": "minimal",
}


def test_rules_by_module_path():
    """One function, compiled for an op under each of several policies, before and after a change of the module."""
    module, x = made("mlp")
    op, params = op_from_module(module, x)
    dy = ones(op.fwd(params, x, CFG)[0])

    def step(op, params, x):
        y, residuals = op.fwd(params, x, CFG)
        dx, pending = op.dgrad(residuals, dy, CFG)
        return y, dx, op.wgrad(pending, CFG), *op.bwd(op.fwd(params, x, CFG)[1], dy, CFG)

    ops = [with_policy(op, RULES["recompute"]), with_policy(op, RULES["codes"]), fit(op, CFG, x, budget=1500).op]
    compiled = Compiled(step)
    for _ in range(2):
        for lean in ops:
            assert same(compiled(lean, params, x), step(lean, params, x))
        module.slope = 0.25
    assert compiled.graphs == 2 * len(ops)


@pytest.mark.turns("policy")
@pytest.mark.parametrize("policy", RULES)
def test_rules_by_module_path_below_the_step_of_a_chain(policy):
    op, params = op_from_module(*made("mlp"))
    cfg, x = ChainConfig(steps=(Step("one", op, CFG), Step("two", op, CFG))), made("mlp")[1]
    rules = RULES[policy]
    rules = rules if isinstance(rules, str) else Policy({f"*.{path}": action for path, action in rules.rules}, optional=True)
    lean, both = with_policy(chain, rules), {"one": params, "two": params}

    def step(params, x):
        y, residuals = lean.fwd(params, x, cfg)
        return y, *lean.bwd(residuals, y, cfg)

    want = step(both, x)
    assert same(Compiled(step)(both, x), want)
