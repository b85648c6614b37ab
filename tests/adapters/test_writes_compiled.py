"""A write to what a node reads, under torch.compile: the error of torch's modules, or their gradients."""

import copy
from random import Random

import pytest
import torch
from torch import nn

from funcops import nn as fnn

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
D = 8
MODULES = {
    "layer norm": lambda: nn.LayerNorm(D),
    "rms norm": lambda: nn.RMSNorm(D, eps=1e-6),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "glu": nn.GLU,
    "softmax": lambda: nn.Softmax(-1),
    "linear": lambda: nn.Linear(D, D),
    "mlp": lambda: nn.Sequential(nn.RMSNorm(D, eps=1e-6), nn.Linear(D, D), nn.GELU(), nn.Linear(D, D)),
}
WRITES = {
    "add_": lambda t: t.add_(1),
    "mul_": lambda t: t.mul_(2),
    "copy_": lambda t: t.copy_(torch.ones_like(t)),
    "index": lambda t: t.__setitem__(0, 1.0),
    "out": lambda t: torch.mul(t.detach(), 2, out=t.detach()),
    "part of a view": lambda t: t.view(-1)[1:].neg_(),
}
TO = ("input", "graph's input", "weight", "output", "nothing")
WORDS = "modified by an inplace operation"


def gradients(module, write, to, backend):
    """x's and the weights' gradients, or whether autograd's guard said that something was written to."""

    def step(x):
        h = x if to == "graph's input" else x * 1.5
        y = module(h)
        if to in ("input", "graph's input"):
            write(h)
        elif to == "output":
            write(y)
        elif to == "weight":
            with torch.no_grad():
                write(next(module.parameters()))
        return y.square().sum()

    leaf = torch.randn(4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    try:
        (step if backend is None else torch.compile(step, backend=backend))(leaf * 1).backward()
    except Exception as error:  # a compiler wraps it in its own
        assert WORDS in str(error), error
        return WORDS
    return [leaf.grad, *[p.grad for p in module.parameters()]]


class Copy(nn.Module):
    def forward(self, y):
        return y.clone()


def compare(name, write, to, backend):
    torch.manual_seed(0)
    plain = MODULES[name]().double()
    ours = copy.deepcopy(plain)
    fnn.from_torch(ours)
    if to == "weight" and not list(plain.parameters()):
        return None
    want = gradients(plain, WRITES[write], to, None)
    got = gradients(ours, WRITES[write], to, backend)
    if to == "output" and want is WORDS and got is not WORDS:  # compiled, the output is a copy of what the node keeps
        assert backend is not None
        plain.zero_grad()
        want = gradients(nn.Sequential(plain, Copy()), WRITES[write], to, None)
    assert (want is WORDS) == (got is WORDS), (name, write, to, backend, want, got)
    if want is not WORDS:
        torch.testing.assert_close(got, want, msg=lambda said: f"{(name, write, to, backend)}: {said}")
    return got


EACH = [(name, to, backend) for name in MODULES for to in TO for backend in (None, "eager", "aot_eager")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to", "backend"), EACH, ids=["-".join(map(str, each)) for each in EACH])
def test_every_write_to_every_tensor(name, to, backend):
    for write in WRITES:
        torch._dynamo.reset()
        compare(name, write, to, backend)


@pytest.mark.slow
def test_a_write_is_refused_or_right():
    """A sample of them: each tensor that a program holds, in a module and by a write drawn for it."""
    draw, refused = Random(0), 0
    for to in TO:
        torch._dynamo.reset()
        name = draw.choice([name for name in MODULES if to != "weight" or name in ("layer norm", "linear", "mlp")])
        refused += compare(name, draw.choice(list(WRITES)), to, "aot_eager") is WORDS
    assert refused
