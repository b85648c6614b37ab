"""Containers that are empty for a while, and the source generated for them, under any calls in any order."""

import copy
import dataclasses
import itertools
import os
import random
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from funcops import nn as fnn
from funcops.adapters.autograd.saved_tensors import gradient_writer, slots_of
from funcops.adapters.nn import unchanged
from funcops.engine.contract.marks import counts_writes
from funcops.engine.contract.needs import Needs
from funcops.engine.contract.schema import Residuals
from funcops.engine.trees import leaves, register

D = 4
FILL = {
    "append": lambda s, m: s.append(m),
    "add_module": lambda s, m: s.add_module(f"n{len(s)}", m),
    "register_module": lambda s, m: s.register_module(f"r{len(s)}", m),
    "extend": lambda s, m: s.extend([m]),
    "insert": lambda s, m: s.insert(0, m) if all(name.isdigit() for name in s._modules) else s.append(m),
    "+=": lambda s, m: s.__iadd__(type(s)(m)),
    "setattr": lambda s, m: setattr(s, f"a{len(s)}", m),
    "_modules": lambda s, m: s._modules.update({f"d{len(s)}": m}),
}
EMPTY = {
    "del": lambda s: [s.__delitem__(0) for _ in range(len(s))],
    "slice": lambda s: s.__delitem__(slice(None)),
    "pop": lambda s: [s.pop(-1) for _ in range(len(s))],
    "delattr": lambda s: [delattr(s, name) for name in list(s._modules)],
    "clear": lambda s: s._modules.clear(),
}
LAYERS = {
    "Linear": lambda lib: lib.Linear(D, D),
    "RMSNorm": lambda lib: lib.RMSNorm(D),
    "Tanh": lambda lib: lib.Tanh(),
    "resting": lambda lib: lib.Dropout(0.0),
    "other": lambda lib: nn.Softplus(),
}


def forget():
    """Clear the memos, as in a process that has called nothing."""
    unchanged.same_parameters.cache_clear()
    unchanged.same_modules.cache_clear()


def same(pair, x):
    """Both models give the same y and gradients."""
    found = []
    for model in pair:
        model.zero_grad()
        t = x.clone().requires_grad_()
        y = model(t)
        if y.requires_grad and y is not t:
            y.square().sum().backward()
        found.append((y.detach(), t.grad, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0])


def pairs(make, seed):
    torch.manual_seed(seed)
    want = make()
    got = copy.deepcopy(want)
    fnn.from_torch(got)
    return want, got


FIRST = {
    "nothing": [],
    "of no parameters": ["tanh"],
    "of no modules": ["empty"],
    "both": ["tanh", "empty"],
    "both, turned": ["empty", "tanh"],
}


def begin(first):
    """Start a process in which these calls came first."""
    forget()
    x = torch.randn(2, D, requires_grad=True)
    for kind in FIRST[first]:
        model = fnn.Tanh() if kind == "tanh" else fnn.Sequential()
        for _ in range(2):
            model(x)


@pytest.mark.turns("swapped", "first", "fill", every=2)
@pytest.mark.parametrize("swapped", [False, True], ids=["made", "from_torch"])
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("fill", FILL)
def test_an_empty_sequential_may_be_filled(fill, first, swapped):
    begin(first)
    x = torch.randn(3, D)
    want, got = (nn.Sequential(), fnn.Sequential()) if not swapped else pairs(nn.Sequential, 0)
    assert got(x) is x and got(x) is x
    for name in LAYERS:
        layer = LAYERS[name](nn)
        FILL[fill](want, copy.deepcopy(layer))
        FILL[fill](got, layer)
        fnn.from_torch(got)
        same((want, got), x)


@pytest.mark.parametrize("seed", range(40))
def test_a_sequential_filled_emptied_and_filled_anew(seed):
    """Drawn: what comes first in the process, and a program of fillings, emptyings and calls."""
    draw = random.Random(seed)
    begin(draw.choice(list(FIRST)))
    want, got = nn.Sequential(), fnn.Sequential()
    x = torch.randn(3, D)
    for _ in range(12):
        step = draw.choice(["fill", "fill", "empty", "call", "call", "alone"])
        if step == "fill":
            way, kind = draw.choice(list(FILL)), draw.choice(list(LAYERS))
            torch.manual_seed(seed)
            layer = LAYERS[kind](fnn)
            FILL[way](want, copy.deepcopy(fnn.to_torch(layer) and layer))
            FILL[way](got, layer)
        elif step == "empty":
            EMPTY[draw.choice(list(EMPTY))](want), EMPTY["clear"](got)
        elif step == "alone":
            fnn.Tanh()(x)
        same((want, got), x)


@pytest.mark.parametrize("seed", range(3))
def test_a_shortcut_that_is_empty(seed):
    """A block of a ResNet with an empty shortcut."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.shortcut = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)), nn.Sequential()

        def forward(self, x):
            return torch.relu(self.body(x) + self.shortcut(x))

    forget()
    want, got = pairs(lambda: nn.Sequential(Block(), Block()), seed)
    same((want, got), torch.randn(2, D))


FIELDS = ((), ("weight",), ("weight", "bias"), ("bias",))
ASKED = [("parameters", f) for f in FIELDS] + [("modules", of) for n in range(3) for of in itertools.product(FIELDS, repeat=n)]


def modules_of(fields):
    """Modules with the fields that a memo reads."""
    made = []
    for own in fields:
        module = fnn.Linear(D, D)
        module._parameters = {name: nn.Parameter(torch.ones(1)) for name in own}
        made.append(module)
    return dict(enumerate(made))


def check_one(kind, fields):
    """The check accepts the state that it saw, and refuses a change of any part."""
    if kind == "parameters":
        (module,) = modules_of([fields]).values()
        before, now = unchanged.parameters_of(module, fields), dict(module._parameters)
        asked = unchanged.same_parameters(fields)
        assert asked(now, before) is True
        for name in fields:
            assert asked(now | {name: nn.Parameter(torch.ones(1))}, before) is False
            assert asked({k: v for k, v in now.items() if k != name}, before) is False
        return
    modules = modules_of(fields)
    before, asked = (
        unchanged.state_of(list(modules.values()), fields),
        unchanged.same_modules(fields, unchanged.follows(modules.values())),
    )
    assert asked(modules, before) is True
    assert asked(modules | {len(modules): fnn.Tanh()}, before) is False
    for i, own in enumerate(fields):
        assert asked({k: v for k, v in modules.items() if k != i}, before) is False
        assert asked(modules | {i: modules_of([own])[0]}, before) is False
        for name in own:
            kept, modules[i]._parameters[name] = modules[i]._parameters[name], nn.Parameter(torch.ones(1))
            assert asked(modules, before) is False
            modules[i]._parameters[name] = kept


@pytest.mark.parametrize("seed", range(6))
def test_generated_source_depends_on_its_arguments_alone(seed):
    forget()
    order = list(ASKED)
    random.Random(seed).shuffle(order)
    for kind, fields in order if seed else reversed(ASKED):
        check_one(kind, fields)


def of_no_fields():
    """Every other function that is generated as source, for modules without fields."""

    @dataclasses.dataclass
    class Nothing:
        pass

    register(Nothing)
    assert leaves(Nothing()) == []
    counts_writes(Nothing)
    assert Nothing()._version == ()

    class Kept(Residuals):
        pass

    node = Kept.keep(None, Needs.ALL)
    assert Kept.names == () and (node is None or node.fresh())
    slots = slots_of(None)
    assert slots.take(None) == () and slots.fill(None, ()) is slots.empty(None) is None
    assert gradient_writer(None, None)(None, None) == (None, None)


def of_no_parameters():
    x = torch.randn(2, D)
    model = fnn.Tanh()
    assert model(x) is not x and torch.equal(model(x), x.tanh())


def of_no_modules():
    x, model = torch.randn(2, D), fnn.Sequential()
    assert model(x) is model(x) is x
    model.append(fnn.Linear(D, D))
    assert model(x) is not x and model(x).requires_grad


PARTS = (of_no_fields, of_no_parameters, of_no_modules)


def in_orders():
    """Run each order in a fork of this process, which has only imported and called nothing."""
    for order in itertools.permutations(PARTS):
        child = os.fork()
        if not child:
            code = 1
            try:
                for part in order:
                    part()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, [part.__name__ for part in order]


@pytest.mark.slow
def test_the_empty_case_in_every_order_in_fresh_processes():
    path = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; import test_filled_later as t; t.in_orders()"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
