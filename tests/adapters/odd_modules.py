"""Modules that read or do something else than their first call shows."""

import contextlib
import functools
import os
import random
import textwrap
import types
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn


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


OUTER = {}  # the dict of the closure of each class


DRAWS = {  # the text of a forward that draws
    "of samples": "return y * (torch.rand(x.shape[0], 1, 1) >= self.p * self.training) / (1 - self.p * self.training)",
    "of samples, by Bernoulli": "q = 1.0 - self.p * self.training\n"
    "return y * torch.bernoulli((x * 0.0 + q).flatten(1)[:, :1].unsqueeze(-1)) / q",
    "of samples, in a branch": (
        "if self.training and self.p > 0:\n"
        " y = y * (torch.rand(x.shape[0], *[1] * (x.dim() - 1)) > self.p) / (1 - self.p)\nreturn y"
    ),
    "of elements, by Bernoulli": "q = 1 - self.p * self.training\nreturn y * torch.bernoulli(y.detach() * 0 + q) / q",
    "of channels": "return F.dropout1d(y, self.p, self.training)",
    "alpha": "return F.alpha_dropout(y, self.p, self.training)",
    "noise": "return y + self.p * torch.randn_like(y)",
    "numbers of Python": "return y + self.p * random.random()",
    "rarely": "return y * (1.0 + (random.random() > 0.999))",
    "one of two": "return random.choice([y, y * (1 + self.p)])",
    "always": "return F.dropout(y, self.p)",
    "of elements": "return F.dropout(y, self.p, self.training)",
    "of elements, by names": "return F.dropout(y, p=self.p, training=self.training)",
}


class Norm(nn.Module):
    """`formula(x, weight, bias, eps)` over a weight, and perhaps a bias."""

    def __init__(self, formula, size=6, eps=1e-5, bias=False):
        super().__init__()
        self.weight, self.formula, self.epsilon = nn.Parameter(torch.randn(size)), formula, eps
        if bias:
            self.bias = nn.Parameter(torch.randn(size))

    def forward(self, hidden):
        return self.formula(hidden, self.weight, self._parameters.get("bias"), self.epsilon)


def rms(x, w, b, eps):
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class Mlp(nn.Module):
    """`formula(self, x)` over two linear layers."""

    def __init__(self, formula):
        super().__init__()
        self.first, self.last, self.inner, self.formula = nn.Linear(6, 24), nn.Linear(24, 6), nn.SiLU(), formula

    def forward(self, x):
        return self.formula(self, x)


def plain(m, x):
    return m.last(m.inner(m.first(x)))


def counting(x, w, b, eps, seen=[]):  # noqa: B006
    seen.append(len(seen))
    return rms(x, w, b, eps) * (1.0 + 0.1 * (len(seen) > 3))


class Counts(Norm):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


class Trains(Norm):
    def forward(self, x):
        return super().forward(x) * (1.0 if self.training else 2.0)


class Branches(Norm):
    def forward(self, x):
        return super().forward(x) if x.abs().max() < 1e9 else x


class Takes(Norm):
    def forward(self, x, gate=None):
        return super().forward(x)


class Logs(Norm):
    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return super().forward(x)


class TakesAny(Norm):
    def forward(self, *args):
        return super().forward(args[0])


def with_buffer(module):
    module.register_buffer("scale", torch.ones(()))
    return module


def with_parameter(module):
    module.gain = nn.Parameter(torch.ones(6))
    return module


def noisy(m, x):
    y = plain(m, x)
    return y + torch.randn_like(y) if m.training else y


def in_half(change):
    return lambda m, x: change(plain(m, x)) if x.dtype is torch.float16 else plain(m, x)


def scaled(m, x):
    return plain(m, x) * m.factor


def with_factor(module):
    module.factor = 1.0
    return module


def normed_by(change):
    return Norm(lambda x, w, b, eps: change(rms(x, w, b, eps)))


ODD = {
    "a factor that may change": with_factor(Mlp(scaled)),
    "half in another way": Mlp(in_half(lambda y: 2.0 * y)),
    "half without overflow": Mlp(in_half(lambda y: y.clamp(-6e4, 6e4))),
    "NaN is replaced": normed_by(torch.nan_to_num),
    "bounds far away": Mlp(lambda m, x: plain(m, x).clamp(-6e4, 6e4)),
    "eps outside of the root": Norm(lambda x, w, b, eps: w * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + eps)),
    "unbiased": Norm(lambda x, w, b, eps: w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)),
    "over another dim": Norm(lambda x, w, b, eps: w * x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + eps)),
    "a detached statistic": Norm(lambda x, w, b, eps: w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps).detach()),
    "a little more": Norm(lambda x, w, b, eps: 1.001 * rms(x, w, b, eps)),
    "another dtype": Norm(lambda x, w, b, eps: rms(x, w, b, eps).double() if x.dtype is torch.float16 else rms(x, w, b, eps)),
    "a state outside": Norm(counting),
    "an attribute that is set": Counts(rms),
    "another in training": Trains(rms),
    "a branch on values": Branches(rms),
    "two arguments": Takes(rms),
    "any arguments": TakesAny(rms),
    "a list that it fills": Logs(rms),
    "a slice that only many rows notice": Norm(lambda x, w, b, eps: rms(x, w, b, eps)[:70000]),
    "a buffer": with_buffer(Norm(rms)),
    "another parameter": with_parameter(Norm(rms)),
    "a weight of two dims": Norm(rms, size=(2, 6)),
    "noise in training": Mlp(noisy),
    "a sum beside": Mlp(lambda m, x: x + plain(m, x)),
    "an activation that is not used": Mlp(lambda m, x: m.last(m.first(x))),
    "a tied layer": Mlp(lambda m, x: plain(m, x) @ m.first.weight[:8]),
    "a function of the output's size": Mlp(lambda m, x: plain(m, x) / x.shape[0]),
    "a tuple": Mlp(lambda m, x: (plain(m, x),)),
    "raises": Mlp(lambda m, x: m.nothing(x)),
}
