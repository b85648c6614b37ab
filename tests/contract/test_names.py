"""Names that are subclasses of str give the same results as plain strings, wherever names are taken."""

import dataclasses
import enum
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F

from funcops import (
    ActivationConfig,
    AddConfig,
    ChainConfig,
    DropoutConfig,
    GLUConfig,
    LinearConfig,
    LinearParams,
    Needs,
    ParallelConfig,
    RepeatConfig,
    RMSNormConfig,
    Step,
    TorchConfig,
    WithExtras,
    activation,
    add,
    chain,
    differentiable,
    dropout,
    glu,
    linear,
    op_from_torch,
    parallel,
    random,
    repeat,
    rms_norm,
    trees,
    with_policy,
)
from funcops import nn as fnn
from funcops.adapters.autograd.saved_tensors import literal
from funcops.engine.backend.source import exact
from funcops.engine.residuals import Policy, Recompute

D = 4


class Hostile(str):
    """A key whose text is never a valid name."""

    def __repr__(self):
        return "<not a name>"

    def __str__(self):
        return "1 +"

    def __format__(self, spec):
        return "1 +"


def of_numpy(name):
    return pytest.importorskip("numpy").str_(name)


def of_enum(name):
    return enum.Enum("Name", {"ONE": name}, type=str).ONE


def of_str_enum(name):
    kind = getattr(enum, "StrEnum", None)
    if kind is None:
        pytest.skip("Python 3.10 has none")
    return kind("Name", {"ONE": name}).ONE


KINDS = {"numpy": of_numpy, "enum": of_enum, "str_enum": of_str_enum, "hostile": Hostile}


def x_of(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def asking(tree):
    return trees.tree_map_tensors(lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), tree)


def pair(op, cfg, x, params=None, needs=None):
    """Results of the pair fwd and bwd, then of autograd."""
    params = op.init(cfg, key=random.key(0), dtype=torch.float64) if params is None else params
    y, residuals = op.fwd(params, x, cfg, needs=Needs() if needs is None else needs)
    dy = trees.tree_map_tensors(torch.ones_like, y)
    found = [y, *op.bwd(residuals, dy, cfg)]
    own, given = asking((params, x))
    out = differentiable(op)(own, given, cfg)
    sum(t.square().sum() for t in trees.tensors(out)).backward()
    return [t for t in trees.tensors((found, [t.grad for t in trees.tensors((own, given)) if t.is_leaf]))]


def steps(n):
    return (
        Step(n("norm"), rms_norm, RMSNormConfig(D)),
        Step(n("up"), linear, LinearConfig(D, D)),
        Step(n("act"), activation, ActivationConfig(n("gelu"))),
        Step(n("down"), linear, LinearConfig(D, D)),
    )


def of_extras(n):
    drop = Step(n("drop"), dropout, DropoutConfig(p=0.5), takes=(n("key"),))
    total = Step(n("sum"), add, AddConfig(), takes=(n("skip"),))
    cfg = ChainConfig(steps=(*steps(n), drop, total), extras=(n("key"), n("skip")))
    return pair(chain, cfg, WithExtras(x_of(3, D), {n("key"): random.key(1), n("skip"): x_of(3, D)}))


def of_gives(n):
    twice = op_from_torch(lambda params, x, cfg: (2 * x, x.sin()), name=n("twice"))
    given = Step(n("two"), twice, TorchConfig(), gives=(n("sine"),))
    return pair(chain, ChainConfig(steps=(*steps(n), given), outputs=(n("sine"),)), x_of(3, D))


def of_params(n):
    op = op_from_torch(
        lambda params, x, cfg: F.linear(x, params["w"]) + params["inner"]["b"],
        init=lambda cfg, *, key=None, device=None, dtype=None: {n("w"): x_of(D, D), n("inner"): {n("b"): x_of(D)}},
    )
    return pair(op, TorchConfig(), x_of(3, D), {n("w"): x_of(D, D), n("inner"): {n("b"): x_of(D)}})


def of_fields(n):
    cls = dataclasses.make_dataclass("Point", [n("one"), n("two")])
    trees.register(cls)
    made = cls(x_of(2), x_of(3))
    assert list(trees.paths(made)) == ["one", "two"]
    op = op_from_torch(lambda params, x, cfg: x * params.one.sum() + params.two.sum(), init=lambda cfg, **_: made)
    return pair(op, TorchConfig(), x_of(3, D), made)


def of_modules(n):
    body = dict(op=linear, params_class=LinearParams, fields=(n("weight"), n("bias")), values=(n("in_features"), n("out_features")))
    module = type("Own", (fnn.OpModule,), body)()
    module.in_features = module.out_features = D
    module.weight, module.bias = torch.nn.Parameter(x_of(D, D)), torch.nn.Parameter(x_of(D))
    model = fnn.Sequential(OrderedDict([(n("first"), module), (n("second"), module)]))
    found = []
    for _ in range(2):
        model(x_of(3, D)).sum().backward()
        found.append(module(x_of(3, D)))
    return [*found, module.weight.grad]


def of_a_mask(n):
    return pair(linear, LinearConfig(D, D), x_of(3, D), needs=Needs(params={n("weight"): True, n("bias"): False}))


def of_a_part(n):
    """`requires_grad` is read off a tree with such keys."""
    op = op_from_torch(
        lambda params, x, cfg: x * params["one"] + params["two"], init=lambda cfg, **_: {"one": x_of(D), "two": x_of(D)}
    )
    one, two = x_of(D).requires_grad_(), x_of(D)
    y = differentiable(op)({n("one"): one, n("two"): two}, x_of(3, D), TorchConfig())
    y.square().sum().backward()
    return [y, one.grad]


ENTRIES = {
    "steps": lambda n: pair(chain, ChainConfig(steps=steps(n)), x_of(3, D)),
    "extras": of_extras,
    "gives": of_gives,
    "ties": lambda n: pair(chain, ChainConfig(steps=steps(n), ties={n("down.weight"): n("up.weight")}), x_of(3, D)),
    "recompute": lambda n: pair(chain, ChainConfig(steps=steps(n), recompute=(n("act"),)), x_of(3, D)),
    "branches": lambda n: pair(parallel, ParallelConfig(branches=steps(n)), x_of(3, D)),
    "repeat": lambda n: pair(repeat, RepeatConfig(chain, ChainConfig(steps=steps(n)), times=2), x_of(3, D)),
    "needs": lambda n: pair(
        chain, ChainConfig(steps=steps(n)), x_of(3, D), needs=Needs(x=False, params=(n("up.weight"), n("norm")))
    ),
    "needs as a tree": of_a_mask,
    "needs of a part": of_a_part,
    "policy": lambda n: pair(
        with_policy(chain, Policy({n("act.x"): Recompute()}, optional=True)), ChainConfig(steps=steps(n)), x_of(3, D)
    ),
    "kinds": lambda n: pair(glu, GLUConfig(kind=n("swiglu"), gate=n("first")), x_of(3, 2 * D)),
    "params": of_params,
    "fields": of_fields,
    "modules": of_modules,
}


# The dataclasses module itself writes names of these kinds into its source.
NO_FIELDS = {("fields", "enum"), ("fields", "hostile")}


@pytest.mark.turns("entry", "kind", every=2)
@pytest.mark.parametrize(("entry", "kind"), [(e, k) for e in ENTRIES for k in KINDS if (e, k) not in NO_FIELDS])
def test_a_name_is_its_letters(entry, kind):
    got, want = ENTRIES[entry](KINDS[kind]), ENTRIES[entry](str)
    assert len(got) == len(want) > 0
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_plain_from_then_on(kind):
    n = KINDS[kind]
    cfg = ChainConfig(steps=steps(n), recompute=(n("act"),))
    needs = Needs(params=(n("up.weight"),))
    for name in (*cfg.names, *cfg.recompute, cfg.steps[2].cfg.kind, *needs.params, exact({n("a"): [n("b")]})["a"][0]):
        assert type(name) is str
    assert (literal(None), literal(True), literal(2.5)) == ("None", "True", "2.5")
    assert literal(n("it's")) == '"it\'s"' and literal(enum.IntEnum("Number", {"TWO": 2}).TWO) == "2"


def test_a_key_without_a_name_still_raises():
    with pytest.raises(ValueError, match="Step: name must be an identifier"):
        Step(Hostile("a b"), linear, LinearConfig(D, D))
    with pytest.raises(TypeError, match="Step: name must be"):
        Step(3, linear, LinearConfig(D, D))
