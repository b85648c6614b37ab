"""A gradient under `create_graph=True` is a first derivative, and raises if it is differentiated, however the op is called."""

import pytest
import torch
from faces import FACES, D, made
from torch import nn

from funcops import delayed_wgrad
from funcops import nn as fnn


def gradient(y, inputs, dy=None):
    return torch.autograd.grad(y, inputs, dy, create_graph=True)


def wgan_gp(model, x, inputs):
    return (gradient(model(x).sum(), inputs)[0].norm(dim=-1) - 1).square().mean()


def r1(model, x, inputs):
    return gradient(model(x).sum(), inputs)[0].square().sum() / 2


def expanded(model, x, inputs):
    y = model(x)
    return gradient(y, inputs, torch.ones((), dtype=y.dtype).expand(y.shape))[0].sum()


def hessian_vector(model, x, inputs):
    found = gradient(model(x).square().sum(), inputs)
    return sum((g * torch.ones_like(g)).sum() for g in found)


def backward_graph(model, x, inputs):
    model(x).sum().backward(create_graph=True)
    return inputs[0].grad.sum()


PENALTIES = [wgan_gp, r1, expanded, hessian_vector, backward_graph]


@pytest.mark.turns("face", every=2)
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("asked", ["x", "params", "both"])
@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda p: p.__name__)
@pytest.mark.parametrize("face", FACES)
def test_penalties_raise(face, penalty, asked):
    """They raise wherever torch's own penalty has a gradient."""
    found = []
    for model in made(face):
        own = list(model.parameters())
        if asked == "params" and not own:
            return
        x = torch.randn(3, D, dtype=torch.float64, requires_grad=asked != "params")
        for p in own:
            p.requires_grad_(asked != "x")
        found.append(penalty(model, x, own[-2:] if asked == "params" else [x]))
    value, plain = found
    if not value.requires_grad:
        assert not plain.requires_grad
        return
    extra = torch.ones((), dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"_bwd: a gradient must not be differentiated again"):
        (value + extra).backward()  # a loss beside it hides that the penalty has no gradient


@pytest.mark.parametrize("face", FACES)
def test_first_derivatives_are_the_same(face):
    model = made(face)[0]
    x, seen = torch.randn(3, D, dtype=torch.float64, requires_grad=True), []
    inputs = [x, *model.parameters()]
    want = torch.autograd.grad(model(x).square().sum(), inputs)
    for p in inputs:
        p.register_hook(lambda g: seen.append(g.detach()))
    y = model(x).square().sum()
    for _ in range(2):  # the graph is kept
        for a, b in zip(gradient(y, inputs), want, strict=True):
            torch.testing.assert_close(a.detach(), b)
    assert len(seen) == 2 * len(inputs)
    y.backward()
    for p, b in zip(inputs, want, strict=True):
        torch.testing.assert_close(p.grad, b)
        assert not p.grad.requires_grad


def test_delayed_weight_gradients_refuse_create_graph():
    model = fnn.Linear(D, D).double()
    with (
        pytest.raises(RuntimeError, match="linear_bwd: a backward inside delayed_wgrad must be without create_graph"),
        delayed_wgrad(),
    ):
        gradient(model(torch.randn(2, D, dtype=torch.float64)).sum(), list(model.parameters()))


@pytest.fixture
def alone(tmp_path):
    """After each test, drop its model: a reducer that outlives its group waits for threads that wait for Python."""
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meet'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_distributed_model_steps_under_create_graph(alone):
    model = nn.parallel.DistributedDataParallel(made("sequential")[0])
    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    model(x).square().sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    for a, b in zip(gradient(model.module(x).square().sum(), list(model.parameters())), want, strict=True):
        torch.testing.assert_close(a.detach(), b)
