"""A change of Python state after a trace of `op_from_module` is traced anew, or refused by name: none is wrong in silence."""

import array
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import os
import types
from typing import Any, NamedTuple

import changing
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from funcops import TorchConfig, WithExtras, op_from_module

CFG = TorchConfig()
SCALE = 2.0
SIZES = [2.0]


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Base(nn.Module):
    """A linear layer, and a part with another one."""

    scale = 2.0

    def __init__(self):
        super().__init__()
        self.a, self.part = nn.Linear(4, 4), Part()

    def forward(self, x):
        return self.part(self.a(x))

    @property
    def gain(self):
        return self._gain

    def helped(self, x):
        return SCALE * x


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.b, self.drop, self.by = nn.Linear(4, 4), nn.Dropout(0.5), 2.0

    def forward(self, x):
        return self.by * self.b(x)


class Change(NamedTuple):
    forward: Any  # of a subclass of Base; None: its own
    values: dict  # attributes of the instance
    change: Any  # (module, monkeypatch)


@dataclasses.dataclass
class Config:
    power: float = 2.0
    inner: Any = None


@dataclasses.dataclass(slots=True)
class Slotted:
    power: float = 2.0


class Color(enum.Enum):
    RED = 2.0
    BLUE = 3.0


class Bag(collections.UserDict):
    pass


class Callable:
    def __init__(self):
        self.by = 2.0

    def __call__(self, x):
        return self.by * x


class Shown:
    """A descriptor."""

    def __init__(self, value):
        self.value = value

    def __get__(self, instance, owner):
        return self.value


class Sub(Base):
    shown = Shown(2.0)

    def helped(self, x):
        return super().helped(x) + 1


def setting(path, value):
    def change(m, patch):
        *where, name = path.split(".")
        patch.setattr(functools.reduce(getattr, where, m), name, value)

    return change


def doubled(module, args, y):
    return 2 * y


def hooked(name, hook, find=lambda m: m.part):
    return lambda m, patch: getattr(find(m), name)(hook)


class Half(nn.Module):
    def forward(self, w):
        return w / 2


close, assign = changing.closing(2.0)


CHANGES = {
    # modes and attributes of modules
    "the mode": Change(lambda self, x: self.a(x) * (2 if self.training else 3), {}, lambda m, patch: m.eval()),
    "the mode of a part": Change(lambda self, x: self.part.drop(self.a(x)), {}, lambda m, patch: m.part.drop.eval()),
    "an attribute": Change(lambda self, x: self.a(x) * self.slope, {"slope": 2.0}, setting("slope", 3.0)),
    "an attribute of a part": Change(None, {}, setting("part.by", 3.0)),
    "an attribute of a part of torch": Change(
        lambda self, x: self.norm(x), {"norm": nn.LayerNorm(4)}, lambda m, patch: setattr(m.norm, "eps", 0.5)
    ),
    "an attribute that is gone": Change(
        lambda self, x: self.a(x) * getattr(self, "by", 3.0), {"by": 2.0}, lambda m, patch: delattr(m, "by")
    ),
    "a new attribute": Change(lambda self, x: self.a(x) * getattr(self, "by", 3.0), {}, lambda m, patch: setattr(m, "by", 2.0)),
    "an attribute that shadows a class": Change(
        lambda self, x: self.a(x) * self.scale, {}, lambda m, patch: setattr(m, "scale", 3.0)
    ),
    "the source of a property": Change(lambda self, x: self.a(x) * self.gain, {"_gain": 2.0}, setting("_gain", 3.0)),
    "a property": Change(
        lambda self, x: self.a(x) * self.gain,
        {"_gain": 2.0},
        lambda m, patch: patch.setattr(Base, "gain", property(lambda self: 3.0)),
    ),
    # classes
    "an attribute of a class": Change(
        lambda self, x: self.a(x) * self.scale, {}, lambda m, patch: patch.setattr(Base, "scale", 3.0)
    ),
    "an attribute of a class, below": Change(
        lambda self, x: self.a(x) * self.scale, {}, lambda m, patch: patch.setattr(type(m), "scale", 3.0, raising=False)
    ),
    "a method": Change(
        lambda self, x: self.helped(self.a(x)), {}, lambda m, patch: patch.setattr(Base, "helped", lambda self, x: 3 * x)
    ),
    "a global of a method": Change(
        lambda self, x: self.helped(self.a(x)), {}, lambda m, patch: patch.setitem(globals(), "SCALE", 3.0)
    ),
    "the class": Change(lambda self, x: self.helped(self.a(x)), {}, lambda m, patch: setattr(m, "__class__", OtherClass)),
    "the class of a part": Change(None, {}, lambda m, patch: setattr(m.part, "__class__", OtherPart)),
    "the forward of a class": Change(None, {}, lambda m, patch: patch.setattr(Part, "forward", lambda self, x: 3 * self.b(x))),
    "the forward of a class of torch": Change(
        None, {}, lambda m, patch: patch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight)
    ),
    "the forward of a part": Change(None, {}, lambda m, patch: setattr(m.part, "forward", lambda x: 3 * x)),
    "what a function of a part reads": Change(
        lambda self, x: self.act(self.a(x)), {"act": lambda x: SCALE * x}, lambda m, patch: patch.setitem(globals(), "SCALE", 3.0)
    ),
    "the arguments of a partial": Change(
        lambda self, x: self.act(self.a(x)),
        {"act": functools.partial(changing.with_default, plus=2.0)},
        lambda m, patch: patch.setitem(m.act.keywords, "plus", 3.0),
    ),
    "an attribute of a callable": Change(
        lambda self, x: self.act(self.a(x)), {"act": Callable()}, lambda m, patch: setattr(m.act, "by", 3.0)
    ),
    "a descriptor": Change(
        lambda self, x: self.a(x) * Sub.shown, {}, lambda m, patch: patch.setattr(Sub.__dict__["shown"], "value", 3.0)
    ),
    # objects
    "a config": Change(
        lambda self, x: self.a(x) ** self.config.power, {"config": types.SimpleNamespace(power=2)}, setting("config.power", 3)
    ),
    "a config of a config": Change(
        lambda self, x: self.a(x) ** self.config.inner.power, {"config": Config(inner=Config())}, setting("config.inner.power", 3)
    ),
    "a dataclass in a list": Change(
        lambda self, x: self.a(x) ** self.held[0].power, {"held": [Config()]}, lambda m, patch: setattr(m.held[0], "power", 3)
    ),
    "a dataclass in a dict in a config": Change(
        lambda self, x: self.a(x) ** self.config.inner["one"].power,
        {"config": Config(inner={"one": Config()})},
        lambda m, patch: setattr(m.config.inner["one"], "power", 3),
    ),
    "a dataclass with slots": Change(
        lambda self, x: self.a(x) ** self.config.power, {"config": Slotted()}, setting("config.power", 3)
    ),
    "an attribute of a config by name": Change(
        lambda self, x: self.a(x) ** getattr(self.config.inner, "power"),  # noqa: B009
        {"config": Config(inner=Config())},
        setting("config.inner.power", 3),
    ),
    "a field that a config has": Change(
        lambda self, x: self.a(x) ** (3 if hasattr(self.config, "cubed") else 2),
        {"config": types.SimpleNamespace()},
        lambda m, patch: setattr(m.config, "cubed", True),
    ),
    "a dict of a user": Change(
        lambda self, x: self.a(x) * self.bag["by"], {"bag": Bag(by=2.0)}, lambda m, patch: m.bag.update(by=3.0)
    ),
    "a list": Change(lambda self, x: self.a(x) * self.parts[0], {"parts": [2.0]}, lambda m, patch: m.parts.__setitem__(0, 3.0)),
    "a longer list": Change(lambda self, x: self.a(x) * len(self.parts), {"parts": [2.0]}, lambda m, patch: m.parts.append(2.0)),
    "a nested list": Change(
        lambda self, x: self.a(x) * self.parts[0][0][0], {"parts": [([2.0],)]}, lambda m, patch: m.parts[0][0].__setitem__(0, 3.0)
    ),
    "a dict": Change(lambda self, x: self.a(x) * self.parts["by"], {"parts": {"by": 2.0}}, lambda m, patch: m.parts.update(by=3.0)),
    "a key of a dict": Change(
        lambda self, x: self.a(x) * (2 if "by" in self.parts else 3),
        {"parts": {"by": 2.0}},
        lambda m, patch: m.parts.update(to=m.parts.pop("by")),
    ),
    "a set": Change(
        lambda self, x: self.a(x) * (2 if "by" in self.parts else 3), {"parts": {"by"}}, lambda m, patch: m.parts.clear()
    ),
    "a deque": Change(
        lambda self, x: self.a(x) * self.parts[0], {"parts": collections.deque([2.0, 3.0])}, lambda m, patch: m.parts.rotate()
    ),
    "a default dict": Change(
        lambda self, x: self.a(x) * (1 + len(self.parts)), {"parts": collections.defaultdict(list)}, lambda m, patch: m.parts["new"]
    ),
    "an array of numpy": Change(
        lambda self, x: self.a(x) * float(self.array[0]), {"array": np.ones(2)}, lambda m, patch: m.array.__setitem__(0, 3.0)
    ),
    "an array in a list": Change(
        lambda self, x: self.a(x) * float(self.arrays[0][0]),
        {"arrays": [np.ones(2)]},
        lambda m, patch: m.arrays[0].__setitem__(0, 3.0),
    ),
    "an array of bytes": Change(
        lambda self, x: self.a(x) * self.array[0], {"array": array.array("d", [2.0])}, lambda m, patch: m.array.__setitem__(0, 3.0)
    ),
    "a member of an enum": Change(lambda self, x: self.a(x) * self.color.value, {"color": Color.RED}, setting("color", Color.BLUE)),
    "a dtype": Change(lambda self, x: self.a(x.to(self.kind).double()), {"kind": torch.float64}, setting("kind", torch.float16)),
    "an object that forward reads of a module": Change(
        lambda self, x: self.other[0].by * self.a(x), {"other": [Part()]}, lambda m, patch: setattr(m.other[0], "by", 3.0)
    ),
    # globals, functions and closures
    "a global": Change(lambda self, x: self.a(x) * SCALE, {}, lambda m, patch: patch.setitem(globals(), "SCALE", 3.0)),
    "a global list": Change(lambda self, x: self.a(x) * SIZES[0], {}, lambda m, patch: SIZES.__setitem__(0, 3.0)),
    "a global of a file": Change(
        lambda self, x: self.a(x) * changing.FACTOR, {}, lambda m, patch: patch.setattr(changing, "FACTOR", 3.0)
    ),
    "a global dict of a file": Change(
        lambda self, x: self.a(x) * changing.TABLE["gain"][0], {}, lambda m, patch: patch.setitem(changing.TABLE, "gain", [3.0])
    ),
    "a global of a helper of a helper": Change(
        lambda self, x: changing.scaled(self.a(x)), {}, lambda m, patch: patch.setattr(changing, "FACTOR", 3.0)
    ),
    "a helper of a helper": Change(
        lambda self, x: changing.scaled(self.a(x)), {}, lambda m, patch: patch.setattr(changing, "inner", lambda x: 3 * x)
    ),
    "an attribute of a global class": Change(
        lambda self, x: self.a(x) ** changing.Options.power, {}, lambda m, patch: patch.setattr(changing.Options, "power", 3)
    ),
    "a global of a method of a class": Change(
        lambda self, x: self.a(x) * changing.Options.factor(), {}, lambda m, patch: patch.setattr(changing, "FACTOR", 3.0)
    ),
    "a global member of an enum": Change(
        lambda self, x: self.a(x) * changing.MODE.value, {}, lambda m, patch: patch.setattr(changing, "MODE", changing.Mode.DOUBLED)
    ),
    "a default": Change(
        lambda self, x: changing.with_default(self.a(x)),
        {},
        lambda m, patch: patch.setattr(changing.with_default, "__defaults__", (3.0,)),
    ),
    "a default by name": Change(
        lambda self, x: changing.with_default(self.a(x)),
        {},
        lambda m, patch: patch.setitem(changing.with_default.__kwdefaults__, "plus", 3.0),
    ),
    "the code of a function": Change(
        lambda self, x: changing.scaled(self.a(x)),
        {},
        lambda m, patch: patch.setattr(changing.inner, "__code__", (lambda x: 3 * x).__code__),
    ),
    "a closure": Change(
        lambda self, x: close(self.a(x)), {}, lambda m, patch: (assign(3.0), patch.setattr(m, "undo", UNDO, raising=False))
    ),
    "a global of an autograd function": Change(
        lambda self, x: changing.Scaled.apply(self.a(x)), {}, lambda m, patch: patch.setattr(changing, "FACTOR", 3.0)
    ),
    "what only a backward reads": Change(
        lambda self, x: changing.Scaled.apply(self.a(x)), {}, lambda m, patch: patch.setattr(changing.Options, "power", 3.0)
    ),
    "an environment variable": Change(
        lambda self, x: self.a(x) * float(os.environ.get("OF_THIS_TEST", "2")),
        {},
        lambda m, patch: patch.setenv("OF_THIS_TEST", "3"),
    ),
    # functions of torch
    "a function of torch": Change(
        lambda self, x: F.gelu(self.a(x)), {}, lambda m, patch: patch.setattr(F, "gelu", lambda x: 3 * x)
    ),
    "a function of torch, by its path": Change(
        lambda self, x: torch.nn.functional.gelu(self.a(x)), {}, lambda m, patch: patch.setattr(F, "gelu", lambda x: 3 * x)
    ),
    "a function that a module of torch calls": Change(
        lambda self, x: self.act(self.a(x)),
        {"act": nn.GELU()},
        lambda m, patch: patch.setattr(F, "gelu", lambda x, approximate: 3 * x),
    ),
    "a function that a function of torch calls": Change(
        lambda self, x: self.norm(x),
        {"norm": nn.BatchNorm1d(4)},
        lambda m, patch: patch.setattr(torch, "batch_norm", lambda x, *rest: 3 * x),
    ),
    "a method of tensors": Change(
        lambda self, x: self.a(x).relu(), {}, lambda m, patch: patch.setattr(torch.Tensor, "relu", lambda x: 3 * x, raising=False)
    ),
    # hooks
    "a forward hook": Change(None, {}, hooked("register_forward_hook", doubled)),
    "a forward pre-hook": Change(None, {}, hooked("register_forward_pre_hook", lambda module, args: (2 * args[0],))),
    "a backward hook": Change(None, {}, hooked("register_full_backward_hook", lambda module, dx, dy: (3 * dx[0],))),
    "a backward pre-hook": Change(None, {}, hooked("register_full_backward_pre_hook", lambda module, dy: (3 * dy[0],))),
    "a hook of all modules": Change(
        None, {}, hooked("register_module_forward_hook", lambda m, args, y: 2 * y, lambda m: nn.modules.module)
    ),
    "a pre-hook of all modules": Change(
        None, {}, hooked("register_module_forward_pre_hook", lambda m, args: (2 * args[0],), lambda m: nn.modules.module)
    ),
    "a backward hook of all modules": Change(
        None, {}, hooked("register_module_full_backward_hook", lambda m, dx, dy: (3 * dx[0],), lambda m: nn.modules.module)
    ),
    "what a hook reads": Change(None, {"hook": "part"}, lambda m, patch: patch.setitem(globals(), "SCALE", 3.0)),
    # parts, parameters and buffers
    "a parametrization": Change(None, {}, lambda m, patch: parametrize.register_parametrization(m.part.b, "weight", Half())),
    "a weight norm": Change(None, {}, lambda m, patch: (parametrizations.weight_norm(m.part.b), setattr(m.part, "by", 3.0))),
    "another part": Change(None, {}, lambda m, patch: setattr(m, "part", nn.Linear(4, 3).double())),
    "no part": Change(
        lambda self, x: self.a(x) if self.part is None else self.part(x), {}, lambda m, patch: setattr(m, "part", None)
    ),
    "one more part": Change(
        lambda self, x: self.parts(x), {"parts": nn.Sequential(nn.Linear(4, 4))}, lambda m, patch: m.parts.append(nn.GELU())
    ),
    "parts in another order": Change(
        lambda self, x: self.parts(x),
        {"parts": nn.Sequential(nn.GELU(), nn.Tanh())},
        lambda m, patch: m.parts.__init__(nn.Tanh(), nn.GELU()),
    ),
    "a frozen parameter": Change(None, {}, lambda m, patch: m.part.b.weight.requires_grad_(False)),
    "a parameter of another shape": Change(
        None, {}, lambda m, patch: setattr(m.part.b, "weight", nn.Parameter(drawn(2, 4))) or setattr(m.part.b, "bias", None)
    ),
    "no parameter": Change(None, {}, lambda m, patch: setattr(m.part.b, "bias", None)),
    "a tied parameter": Change(None, {}, lambda m, patch: setattr(m.part.b, "weight", m.a.weight)),
    "a parameter tied to another": Change(
        lambda self, x: self.c(self.part(self.a(x))), {"c": "a"}, lambda m, patch: setattr(m.c, "weight", m.part.b.weight)
    ),
    "an untied parameter": Change(
        lambda self, x: self.c(self.part(self.a(x))), {"c": "a"}, lambda m, patch: setattr(m.c, "weight", nn.Parameter(drawn(4, 4)))
    ),
    "another buffer": Change(
        lambda self, x: self.a(x) * self.buffer, {"buffer": 2}, lambda m, patch: setattr(m, "buffer", torch.tensor(3.0).double())
    ),
    "the values of a buffer": Change(lambda self, x: self.a(x) * self.buffer, {"buffer": 2}, lambda m, patch: m.buffer.fill_(3)),
    "one more buffer": Change(
        lambda self, x: self.a(x) * (self.more if hasattr(self, "more") else 2),
        {},
        lambda m, patch: m.register_buffer("more", drawn(4)),
    ),
    "the values of a buffer that decide": Change(
        lambda self, x: self.a(x) * (2.0 if self.buffer > 0 else 3.0), {"buffer": 2}, lambda m, patch: m.buffer.fill_(-1)
    ),
    "the numbers of a buffer": Change(
        lambda self, x: self.a(x) * self.buffer.tolist(), {"buffer": 2}, lambda m, patch: m.buffer.fill_(3)
    ),
    "the values of a mask": Change(
        lambda self, x: self.a(x).index_select(1, self.buffer.nonzero()[:, 0]),
        {"buffer": [1, 1, 1, 1]},
        lambda m, patch: m.buffer[:2].fill_(0),
    ),
    "the values of a tensor in a list": Change(
        lambda self, x: self.a(x) * self.held[0].item(), {"held": [torch.tensor(2.0)]}, lambda m, patch: m.held[0].fill_(3)
    ),
    # the state of torch
    "the dtype of the arguments": Change(None, {}, lambda m, patch: m.float()),
    "the default dtype": Change(
        lambda self, x: self.a(x) * torch.full((), 0.1),
        {},
        lambda m, patch: (patch.setattr(m, "undo", UNDO, raising=False), torch.set_default_dtype(torch.float64)),
    ),
    "deterministic algorithms": Change(
        lambda self, x: self.a(x) * (3 if torch.are_deterministic_algorithms_enabled() else 2),
        {},
        lambda m, patch: torch.use_deterministic_algorithms(True),
    ),
    "flash attention": Change(
        lambda self, x: F.scaled_dot_product_attention(*[self.a(x)[None, None]] * 3).float(),
        {},
        lambda m, patch: torch.backends.cuda.enable_flash_sdp(False),
    ),
    "the precision of products": Change(
        lambda self, x: self.a(x) * (2 if torch.get_float32_matmul_precision() == "highest" else 3),
        {},
        lambda m, patch: torch.set_float32_matmul_precision("high"),
    ),
    "a flag of cudnn": Change(
        lambda self, x: self.a(x) * (2 if torch.backends.cudnn.enabled else 3),
        {},
        lambda m, patch: BLOCKS.enter_context(torch.backends.cudnn.flags(enabled=False)),
    ),
    "the order of contractions": Change(
        lambda self, x: self.a(x) * (2 if torch.backends.opt_einsum.enabled else 3),
        {},
        lambda m, patch: patch.setattr(torch.backends.opt_einsum, "enabled", not torch.backends.opt_einsum.enabled),
    ),
    "the dtype of autocast": Change(
        lambda self, x: in_autocast(self.a, x), {}, lambda m, patch: torch.set_autocast_dtype("cpu", torch.float16)
    ),
}


def in_autocast(layer, x):
    with torch.autocast("cpu"):
        return F.linear(x.float(), layer.weight.float()).double()


def UNDO():
    assign(2.0)


class OtherClass(Base):
    def forward(self, x):
        return 3 * self.a(x)


class OtherPart(Part):
    def forward(self, x):
        return 3 * self.b(x)


BLOCKS = contextlib.ExitStack()  # until the test ends


@pytest.fixture(autouse=True)
def as_before():
    flags = torch.backends.cuda.flash_sdp_enabled(), torch.get_float32_matmul_precision(), torch.get_autocast_dtype("cpu")
    yield
    BLOCKS.close()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_flash_sdp(flags[0])
    torch.set_float32_matmul_precision(flags[1])
    torch.set_autocast_dtype("cpu", flags[2])
    for name, value in vars(nn.modules.module).items():
        if name.startswith("_global") and isinstance(value, dict):
            value.clear()
    assign(2.0)


def made(case):
    torch.manual_seed(0)
    cls = Base if case.forward is None else type("Model", (Base,), {"forward": case.forward})
    module = cls()
    for name, value in case.values.items():
        if name == "buffer":
            module.register_buffer(name, torch.tensor(value, dtype=torch.float64))
        elif name == "c":
            module.c = nn.Linear(4, 4)
            module.c.weight = module.a.weight
        elif name == "hook":
            module.part.register_forward_hook(lambda module, args, y: SCALE * y)
        else:
            setattr(module, name, copy.deepcopy(value))
    return module.double()


def eager(module, x):
    """The result of a fresh call, and its gradients."""
    torch.manual_seed(3)
    own = x.clone().requires_grad_()
    y = module(own)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(
        y, [own, *[dict(module.named_parameters())[name] for name in names]], torch.ones_like(y), allow_unused=True
    )
    return y.detach(), found[0], dict(zip(names, found[1:], strict=True))


def by_op(op, module, x):
    torch.manual_seed(3)
    params = {name: p.detach() for name, p in module.named_parameters()}
    y, residuals = op.fwd(params, x, CFG)
    dy = WithExtras(torch.ones_like(y.main), dict.fromkeys(y.extras)) if isinstance(y, WithExtras) else torch.ones_like(y)
    y = getattr(y, "main", y)
    dparams, dx = op.bwd(residuals, dy, CFG) if residuals is not None else ({}, None)
    return y, dx, dparams


def equal(a, b):
    return (a is None or not a.any() if b is None else b is None or not b.any()) if a is None or b is None else torch.equal(a, b)


def same(got, want):
    names = {*got[2], *want[2]}
    right = got[0].dtype is want[0].dtype and equal(got[0], want[0]) and equal(got[1], want[1])
    return right and all(equal(got[2].get(name), want[2].get(name)) for name in names)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_traced_anew(name, monkeypatch):
    case = CHANGES[name]
    module, x = made(case), drawn(4, 4)
    op, _ = op_from_module(module, x)
    before = by_op(op, module, x)
    assert same(before, eager(module, x))
    case.change(module, monkeypatch)
    x = x.to(module.a.weight.dtype)
    want = eager(module, x)
    assert not same(before, want), "a change that changes nothing shows nothing"
    assert same(by_op(op, module, x), want)
