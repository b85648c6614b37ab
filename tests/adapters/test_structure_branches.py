"""`from_torch` and forwards that may do something else in a later call than when they were recognised."""

import contextlib
import copy
import functools
import itertools
import math
import os
import pickle
import random
import textwrap
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from funcops import nn as fnn
from funcops.adapters.nn.hugging_face import FusedMLP, GatedMLP, PlainMLP, RMSNorm
from funcops.adapters.nn.straight import REFUSED, attributes_read

BY = "(by what it computes)"
pytestmark = pytest.mark.filterwarnings("ignore:dropout1d", "ignore:alpha_dropout")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class Body(nn.Module):
    """The parts of a module of each kind, and values that its forward may read."""

    kept = False

    def __init__(self, kind):
        super().__init__()
        if kind == "mlp":
            self.up, self.down, self.act = nn.Linear(4, 6), nn.Linear(6, 4), nn.SiLU()
            self.up.on = False
        elif kind == "norm":
            self.weight, self.eps = nn.Parameter(torch.randn(4)), 1e-5
        self.on, self.p, self.ablate, self.mode, self.times, self.dim = False, 0.0, None, "a", 0, -1
        self.box, self.config = (types.SimpleNamespace(on=False),), types.SimpleNamespace(on=False)

    def is_on(self):
        return self.on


class Box:
    on = False


NAMES = {"FLAG": {"on": False}, "ON": False, "BOX": [False], "Box": Box, "Body": Body, "settings": types.ModuleType("settings")}
NAMES |= {"torch": torch, "F": F, "os": os, "random": random, "shared": nn.Linear(1, 1), "helper": None, "reduce": functools.reduce}
NAMES["settings"].on = NAMES["shared"].on = False
exec("def helper(y, on):\n return y + 1 if on else y", NAMES)
COMPUTED = {
    "mlp": "self.down(self.act(self.up(x)))",
    "norm": "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight",
    "activation": "x * torch.sigmoid(x)",
}
FORMS = {  # of a branch on {c}
    "if": "if {c}:\n y = y + 1\nreturn y",
    "early": "if {c}:\n return x\nreturn y",
    "in place": "if {c}:\n y[..., 0] = 0\nreturn y",
    "an expression": "return y + 1 if {c} else y",
    "and": "return ({c} and [y + 1] or [y])[0]",
    "an index": "return (y, y + 1)[bool({c})]",
    "a dict": "return {{True: y + 1, False: y}}[bool({c})]",
    "a sum": "return y + ({c})",
    "a product": "return y * (1 + 2 * ({c}))",
    "for": "for _ in range({c}):\n y = y + 1\nreturn y",
    "while": "n = 0\nwhile n < ({c}):\n n, y = n + 1, y + 1\nreturn y",
    "a list": "return sum([y] + [y for one in [1, 2] if {c}])",
    "a repeated list": "return sum([y] * (1 + ({c})))",
    "match": "match {c}:\n case True:\n  return y + 1\nreturn y",
    "a raise": "try:\n return y + 1 / ({c})\nexcept ZeroDivisionError:\n return y",
    "assert": "assert not ({c})\nreturn y",
    "a function": "return helper(y, {c})",
    "a lambda": "return (lambda y: y + 1 if {c} else y)(y)",
    "reduce": "return reduce(torch.add, [y] * (1 + ({c})))",
}


def attribute(name, value):
    return lambda module: setattr(module, name, value)


def outer_of(module):
    return next(OUTER[cls] for cls in type(module).__mro__ if cls in OUTER)


@contextlib.contextmanager
def in_float64(module):
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


READS = {  # the expression, and what turns it on: a function of the module, the shape of x, or a mode in which all run
    "an attribute": ("self.on", attribute("on", True)),
    "a count": ("self.times", attribute("times", 2)),
    "None": ("self.ablate is not None", attribute("ablate", 1)),
    "a string": ("self.mode == 'b'", attribute("mode", "b")),
    "a float": ("self.p > 0", attribute("p", 0.5)),
    "training and a float": ("self.training and self.p > 0", attribute("p", 0.5)),
    "by name": ("getattr(self, 'on')", attribute("on", True)),
    "its dict": ("self.__dict__['on']", attribute("on", True)),
    "its vars": ("vars(self)['on']", attribute("on", True)),
    "a method": ("self.is_on()", attribute("on", True)),
    "an attribute that comes": ("hasattr(self, 'extra')", attribute("extra", 1)),
    "a layer": ("hasattr(self, 'up') and self.up.on", lambda module: hasattr(module, "up") and setattr(module.up, "on", True)),
    "the config": ("self.config.on", lambda module: setattr(module.config, "on", True)),
    "a tuple": ("self.box[0].on", lambda module: setattr(module.box[0], "on", True)),
    "the class": ("self.kept", lambda module: mock.patch.object(Body, "kept", True)),
    "the class by name": ("Body.kept", lambda module: mock.patch.object(Body, "kept", True)),
    "the type": ("type(self).kept", lambda module: mock.patch.object(Body, "kept", True)),
    "the type by attribute": ("self.__class__.kept", lambda module: mock.patch.object(Body, "kept", True)),
    "a global dict": ("FLAG['on']", lambda module: mock.patch.dict(NAMES["FLAG"], on=True)),
    "a global list": ("BOX[0]", lambda module: mock.patch.dict(NAMES, BOX=[True])),
    "a global bool": ("ON", lambda module: mock.patch.dict(NAMES, ON=True)),
    "a global class": ("Box.on", lambda module: mock.patch.object(Box, "on", True)),
    "a global module": ("settings.on", lambda module: mock.patch.object(NAMES["settings"], "on", True)),
    "a global nn.Module": ("shared.on", lambda module: mock.patch.object(NAMES["shared"], "on", True)),
    "the environment": ("'FUNCOPS_ON' in os.environ", lambda module: mock.patch.dict(os.environ, FUNCOPS_ON="1")),
    "a closure": ("outer['on']", lambda module: mock.patch.dict(outer_of(module), on=True)),
    "a default": ("default['on']", lambda module: mock.patch.dict(outer_of(module), on=True)),
    "grad mode": ("torch.is_grad_enabled()", None),
    "inference mode": ("x.is_inference()", None),
    "the default dtype": ("torch.get_default_dtype() is torch.float64", in_float64),
    "what needs a gradient": ("x.requires_grad", None),
    "strides": ("x.is_contiguous()", None),
    "the length": ("x.shape[1] > 1024", (1, 1030, 4)),
    "the length by size": ("x.size(-2) > 64", (1, 70, 4)),
    "the batch": ("len(x) > 50", (51, 2, 4)),
    "dims": ("x.dim() == 4", (2, 1, 3, 4)),
    "one dim": ("x.ndim < 2", (4,)),
    "numbers": ("x.numel() >= 4096", (4, 256, 4)),
    "a multiple": ("x.shape[0] % 7 == 0", (7, 1, 4)),
}


def drawn(kind, text, **given):
    """A module of a new class with this text in its forward, after `y` is computed."""
    body = textwrap.indent(text if "self.down" in text else f"y = {COMPUTED[kind]}\n{text}", "  ")
    found = {}
    if "default[" in text:
        body = f"  return self.apart(x)\n def apart(self, x, default=outer):\n{body}"
    else:
        body += "\n apart = None"
    exec(f"def make(outer):\n def forward(self, x):\n{body}\n return forward, apart", NAMES, found)
    outer = {"on": False}
    forward, apart = found["make"](outer)
    module = type("Drawn", (Body,), {"forward": forward, "apart": apart})(kind).double()
    vars(module).update(given)
    OUTER[type(module)] = outer
    return module


OUTER = {}  # the dict of the closure of each class


def outcome(module, x):
    torch.manual_seed(1)
    random.seed(1)
    try:
        return module(x)
    except Exception as error:
        return repr(error)


def assert_equal(module, other, shapes=()):
    """The outputs, and the errors, of both in each mode."""
    for shape in ((2, 3, 4), *shapes):
        x = torch.randn(shape, dtype=torch.float64)
        columns = x.mT.contiguous().mT if x.dim() > 1 else x
        for mode, given in [(torch.no_grad, x), (torch.enable_grad, x.requires_grad_()), (torch.enable_grad, columns.detach())]:
            for training in (False, True):
                with mode():
                    want, got = (outcome(one.train(training), given) for one in (other, module))
                assert type(want) is type(got), (want, got)
                if isinstance(want, torch.Tensor):
                    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)
                else:
                    assert want == got


def turned(on, *modules):
    """A function that turns the read value on, for these modules."""
    stack = contextlib.ExitStack()
    if callable(on):
        for made in [on(module) for module in modules]:
            stack.enter_context(made if hasattr(made, "__enter__") else contextlib.nullcontext())
    return stack


CASES = list(itertools.product(FORMS, COMPUTED, (False, True)))
TURNS = 13  # prime to the numbers of the parts of a case, so that each turn has some of all; over the reads they cover all


@pytest.mark.turns("read", every=4)
@pytest.mark.parametrize("turn", [0, *[pytest.param(turn, marks=pytest.mark.slow) for turn in range(1, 4)]])
@pytest.mark.parametrize("read", READS)
def test_a_value_that_is_changed_later(read, turn):
    """In any form of a branch, on at the swap or later, the module computes what it would have computed."""
    expression, on = READS[read]
    wrong = []
    for form, kind, first in CASES[(turn + list(READS).index(read)) % TURNS :: TURNS]:
        module = drawn(kind, FORMS[form].format(c=expression))
        other = copy.deepcopy(module)
        with turned(on, module, other) if first else contextlib.nullcontext():
            fnn.from_torch(module)
        try:
            assert_equal(module, other)
            with turned(on, module, other):
                assert_equal(module, other, [on] if isinstance(on, tuple) else [])
        except AssertionError as error:
            wrong.append((form, kind, first, str(error).split("\n")[0]))
    assert not wrong


DRAWS = {  # the text, and whether the module is swapped
    "of samples": ("return y * (torch.rand(x.shape[0], 1, 1) >= self.p * self.training) / (1 - self.p * self.training)", False),
    "of samples, by Bernoulli": (
        "q = 1.0 - self.p * self.training\nreturn y * torch.bernoulli((x * 0.0 + q).flatten(1)[:, :1].unsqueeze(-1)) / q",
        False,
    ),
    "of samples, in a branch": (
        "if self.training and self.p > 0:\n"
        " y = y * (torch.rand(x.shape[0], *[1] * (x.dim() - 1)) > self.p) / (1 - self.p)\nreturn y",
        False,
    ),
    "of elements, by Bernoulli": ("q = 1 - self.p * self.training\nreturn y * torch.bernoulli(y.detach() * 0 + q) / q", False),
    "of channels": ("return F.dropout1d(y, self.p, self.training)", False),
    "alpha": ("return F.alpha_dropout(y, self.p, self.training)", False),
    "noise": ("return y + self.p * torch.randn_like(y)", False),
    "numbers of Python": ("return y + self.p * random.random()", False),
    "rarely": ("return y * (1.0 + (random.random() > 0.999))", False),
    "one of two": ("return random.choice([y, y * (1 + self.p)])", False),
    "always": ("return F.dropout(y, self.p)", False),
    "of elements": ("return F.dropout(y, self.p, self.training)", True),
    "of elements, by names": ("return F.dropout(y, p=self.p, training=self.training)", True),
}


@pytest.mark.turns("first")
@pytest.mark.parametrize("first", [0.0, 0.5])
@pytest.mark.parametrize("name", DRAWS)
def test_random_draws(name, first):
    """With the same seeds the outputs are equal, whatever the probability was at the swap."""
    text, swapped = DRAWS[name]
    module = drawn("mlp", text, p=first)
    other = copy.deepcopy(module)
    done = fnn.from_torch(module)
    for p in (first, 0.5, 0.25, 0.0):
        module.p = other.p = p
        assert_equal(module, other)
    assert any(BY in c.after for c in done.replaced) == swapped


CALLS = {  # an activation that is a function
    "a function": ("silu", "return self.down(F.silu(self.up(x)))"),
    "gelu": ("gelu", "return self.down(F.gelu(self.up(x)))"),
    "gelu with tanh": ("gelu_tanh", "return self.down(F.gelu(self.up(x), approximate='tanh'))"),
    "by hand": ("silu", "h = self.up(x)\nreturn self.down(h * torch.sigmoid(h))"),
    "a method": ("relu", "return self.down(self.up(x).relu())"),
    "squared": ("squared_relu", "return self.down(F.relu(self.up(x)).square())"),
    "an attribute": ("gelu", "return self.down(self.function(self.up(x)))"),
}
GATES = {
    "gated": "return self.down(F.silu(self.gate(x)) * self.up(x))",
    "gated, the other first": "return self.down(self.up(x) * F.gelu(self.gate(x)))",
    "chunks": "h, g = self.up(x).chunk(2, -1)\nreturn self.down(F.silu(h) * g)",
    "halves": "h = self.up(x)\nd = h.shape[-1] // 2\nreturn self.down(F.relu(h[..., :d]) * h[..., d:])",
    "split": "h, g = torch.split(self.up(x), self.half, -1)\nreturn self.down(F.relu(h) * g)",
}


@pytest.mark.turns("spare")
@pytest.mark.parametrize("spare", [False, True], ids=["alone", "beside an activation"])
@pytest.mark.parametrize("name", [*CALLS, *GATES])
def test_mlps_that_call_functions(name, spare):
    """They are recognised too; an activation that is a module, but is not called, does not count."""
    base = PlainMLP if name in CALLS else GatedMLP if "gated" in name else FusedMLP
    module = drawn("mlp", CALLS[name][1] if name in CALLS else GATES[name], half=6, function=F.gelu)
    module.up, module.down = nn.Linear(4, 12).double(), nn.Linear(6 if base is FusedMLP else 12, 4).double()
    if base is GatedMLP:
        module.gate = nn.Linear(4, 12).double()
    del module.act
    vars(module).update(kind="a", guarded="b")  # names that its new class has
    if spare:
        module.act = nn.SiLU()
    other = copy.deepcopy(module)
    done = fnn.from_torch(module)
    if name == "split":  # of sizes that the drawn layers do not have
        assert [c.after[:9] for c in done.left] == ["not known"]
        return
    assert isinstance(module, base) and [c.path for c in done.replaced if BY in c.after] == [""]
    assert_equal(module, other)
    assert "_NodeBackward" in module(torch.ones(2, 4).double()).grad_fn.name()
    handle = [one.up.register_forward_hook(lambda m, given, y: 2 * y) for one in (module, other)]
    assert_equal(module, other)
    for one in handle:
        one.remove()
    module.function = other.function = F.silu
    assert_equal(module, other)
    fnn.to_torch(module)
    assert type(module) is type(other)


TESTED = {  # a branch on an attribute alone, which is compared in each call
    "a flag": ("if self.on:\n y = y + 1\nreturn y", "on", True),
    "no flag": ("return y if not self.on else y + 1", "on", True),
    "None": ("if self.ablate is not None:\n y[..., self.ablate] = 0\nreturn y", "ablate", 1),
    "a parameter": ("return y if self.weight is not None else x", "times", 0),
    "a context": ("with torch.autocast('cpu', enabled=False):\n return y + self.times", "times", 2),
}


@pytest.mark.parametrize("name", TESTED)
def test_a_branch_on_an_attribute(name):
    text, attribute, value = TESTED[name]
    module = drawn("norm", text)
    other = copy.deepcopy(module)
    fnn.from_torch(module)
    assert isinstance(module, RMSNorm)
    before = getattr(module, attribute)
    for now in (before, value, before):
        setattr(module, attribute, now)
        setattr(other, attribute, now)
        assert_equal(module, other)
        if name != "a parameter":
            assert ("_NodeBackward" in module(torch.ones(2, 4).double()).grad_fn.name()) == (now is before)


@pytest.mark.turns("form")
@pytest.mark.parametrize("form", ["return self.down(F.silu(self.gate(x)) * self.up(x))", "return self.down(F.gelu(self.up(x)))"])
def test_a_policy_a_compiler_and_autocast_for_functions(form):
    module = drawn("mlp", form, gate=None).float()
    del module.act, module.gate
    if "gate" in form:
        module.gate = nn.Linear(4, 6)
    other, x = copy.deepcopy(module), torch.randn(3, 4)
    fnn.from_torch(module)
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), other(x))
    fnn.from_torch(module, policy="minimal")
    assert fnn.kept_bytes(module, x) < fnn.kept_bytes(other, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype is other(x).dtype
        torch.testing.assert_close(module(x), other(x), rtol=2e-2, atol=2e-2)


class Straight(Body):
    """Reads attributes without a branch."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(self.dim, keepdim=True) + self.eps) * self.weight


def test_an_attribute_that_is_read_is_compared_in_each_call():
    module = Straight("norm")
    other = copy.deepcopy(module)
    assert fnn.from_torch(module).replaced and isinstance(module, RMSNorm)
    x = torch.randn(4, 4)
    for dim in (-1, 0, -1):
        module.dim = other.dim = dim
        torch.testing.assert_close(module(x), other(x))
        assert ("_NodeBackward" in module(x).grad_fn.name()) == (dim == -1)
        again = pickle.loads(pickle.dumps(module))
        torch.testing.assert_close(again(x), other(x))
        torch.testing.assert_close(torch.compile(module, backend="eager")(x), other(x))
        if dim == 0:
            with pytest.raises(ValueError, match="functional: module must be one whose call"):
                fnn.functional(module)


def test_a_report_says_why():
    said = {}
    for form in ("if", "for", "a sum", "a raise"):
        module = drawn("norm", FORMS[form].format(c="FLAG['on']"))
        said[form] = [c.after for c in fnn.from_torch(module).left]
    assert all(one[0].startswith("not known: ") for one in said.values()) and all(len(one) == 1 for one in said.values())
    assert said["if"] == [f"not known: {REFUSED['jump']}"] and "FLAG" in said["a sum"][0]


SEEN = {  # the text of a forward, and the attributes that it reads besides eps
    "return y + self.is_on() + self.kept": {"on": False, "kept": False},
    "return y * self.pair[0]": {"pair": (2, "a")},
    "return self.function(y) + F.gelu(y) + torch.relu(y)": {"function": F.gelu},
    "return y * float(2) + (torch.pi - math.pi) * math.sqrt(2)": {},
    "h = 2\nreturn (lambda t: t * h)(y)": {},
    "def inner(t):\n return t * y\nreturn inner(y)": {},
    "with contextlib.nullcontext(), torch.autocast('cpu', enabled=False):\n return y": {},
    "while True:\n return y": {},
    "if self.on:\n y = y + 1\nreturn y": {"on": False},
    "if not self.on:\n y = y + 1\nreturn y": {"on": False},
    "if self.ablate is None:\n y = y + 1\nreturn y": {"ablate": None},
    "if self.weight is None:\n y = y + 1\nreturn y": {},
}
MAY_CHANGE = {  # and what is read that may change
    "return y + self.box[0].on": "box",
    "return y * self.pairs[0][0]": "pairs",
    "return y * self.number": "number",
    "return y * (1 + x.requires_grad)": "requires_grad",
    "return y * x.stride(-1)": "stride",
    "return y + self.__dict__['on']": "__dict__",
    "return y + default['on']": "default",
    "return y + outer['on']": "outer",
    "return y * len(x)": "len",
    "return y * BOX[0]": "BOX",
    "return y * ON": "ON",
    "return y + shared.on": "shared",
    "return y + settings.on": "settings.on",
    "return y + Box.on": "Box.on",
    "return y + torch.backends.cudnn.enabled": "torch.backends.cudnn.enabled",
    "return torch.ops.aten.relu(y)": "torch.ops.aten.relu",
    "return reduce(torch.add, [y, y])": "reduce",
}
OTHERWISE = {  # and why it may do something else
    "return y + (self.p > 0)": "compare",
    "return y + (not self.p)": "compare",
    "return y + (self.mode in 'ab')": "compare",
    "z = x.dim() > 1\nif FLAG['on']:\n y = y + z\nreturn y": "jump",
    "if self.p > 0:\n y = y + 1\nreturn y": "jump",
    "if self.on is True:\n y = y + 1\nreturn y": "jump",
    "if self.weight.ndim:\n y = y + 1\nreturn y": "jump",
    "self = self\nif self.on:\n y = y + 1\nreturn y": "jump",
    "other = self\nif other.on:\n y = y + 1\nreturn y": "jump",
    "for _ in (1, 2):\n y = y + 1\nreturn y": "jump",
    "return helper(y, False)": "jump",
    "import os as imported\nreturn y": "other",
    "global made\nmade = 1\nreturn y": "other",
    "class Made: pass\nreturn y": "other",
}


@pytest.mark.parametrize("text", [*SEEN, *MAY_CHANGE, *OTHERWISE])
def test_what_a_forward_reads_or_why_it_may_do_something_else(text, monkeypatch):
    monkeypatch.setitem(NAMES, "math", math)
    monkeypatch.setitem(NAMES, "contextlib", contextlib)
    module = drawn("norm", text, function=F.gelu, pair=(2, "a"), pairs=((2, [3]),), number=torch.ones(()))
    found = attributes_read(module, torch.randn(2, 3, 4, dtype=torch.float64), frozenset())
    if text in SEEN:
        assert found == {"eps": 1e-5, **SEEN[text]}
    elif text in MAY_CHANGE:
        assert found == f"its forward reads {MAY_CHANGE[text]}, which may change"
    else:
        assert found == REFUSED[OTHERWISE[text]]


def test_a_branch_on_a_name_that_the_module_is_known_by_is_not_compared():
    """The attributes that are known already are not given either."""
    x, known = torch.randn(2, 3, 4, dtype=torch.float64), frozenset({"on", "eps"})
    assert attributes_read(drawn("norm", "return y + self.on"), x, known) == {}
    assert attributes_read(drawn("norm", "if self.on:\n y = y + 1\nreturn y"), x, known) == REFUSED["jump"]
