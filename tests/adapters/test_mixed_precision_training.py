"""Training under torch.autocast: scaled, checkpointed, compiled, with custom functions and delayed weight gradients."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn

from funcops import delayed_wgrad
from funcops import nn as fnn
from funcops.engine.trees import cast, leaves
from funcops.testing import assert_close

D = 8


def trained(model, steps=6, dtype=torch.bfloat16, scaler=None, wrap=lambda m: m):
    """The losses of a few steps."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), []
    run = wrap(model)
    for _ in range(steps):
        x = torch.randn(32, D)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = nn.functional.mse_loss(run(x).float(), x.flip(-1))
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


def pair():
    torch.manual_seed(0)
    want, got = (lib.Sequential(lib.LayerNorm(D), lib.Linear(D, 16), lib.SiLU(), lib.Linear(16, D)) for lib in (nn, fnn))
    got.load_state_dict(want.state_dict())
    return want, got


def check_curve(got, want, exact):
    """Losses are as far from float32's as torch's own, or within one rounding to bfloat16 (2^-8) of them."""
    assert exact[-1] < exact[0]
    room = max((want - exact).abs().max(), 2**-8 * exact.max())
    assert (got - exact).abs().max() <= 1.5 * room, (got, want, exact)


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.turns("way", every=2)
@pytest.mark.parametrize("way", ["plain", "scaled float16", "checkpointed", "compiled"])
def test_training(way):
    want, got = pair()
    exact = trained(copy.deepcopy(want), dtype=None)
    wrap = {"checkpointed": Checkpointed, "compiled": functools.partial(torch.compile, backend="aot_eager", fullgraph=True)}.get(
        way
    )
    options = {"wrap": wrap} if wrap else {}
    found = []
    for model in (got, want):
        if way == "scaled float16":
            options = {"dtype": torch.float16, "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**10)}
        found.append(trained(model, **options))
        assert all(p.dtype is torch.float32 for p in model.parameters())
    check_curve(*found, exact)


class Custom(torch.autograd.Function):
    """A function that says in which dtype it runs."""

    @staticmethod
    @functools.partial(torch.amp.custom_fwd, device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Custom.module(x)

    @staticmethod
    @functools.partial(torch.amp.custom_bwd, device_type="cpu")
    def backward(ctx, dy):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(Custom.module(x), x, dy)[0]


def test_custom_functions_and_backwards_inside_the_region():
    want, got = pair()
    x = torch.randn(4, D)
    found = []
    for module in (want, got):
        t = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            Custom.module = module
            y = Custom.apply(t)
            y.sum().backward()
        u = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            module(u).float().sum().backward()
        found.append((y.detach(), t.grad, u.grad, [p.grad for p in module.parameters()]))
    assert found[1][0].dtype is torch.float32
    assert_close(found[1][:2], found[0][:2], dtype=torch.float32, length=64)
    assert_close(cast(found[1][2:], torch.bfloat16), cast(found[0][2:], torch.bfloat16), dtype=torch.bfloat16, length=64)
    assert all(isinstance(t, torch.Tensor) for t in leaves(found))


def test_delayed_weight_gradients_of_weights_that_were_cast():
    (_, plain), (_, delayed), store = pair(), pair(), delayed_wgrad()
    delayed[3].bias.main_grad = torch.zeros(D, dtype=torch.float64)
    x = torch.randn(64, D)
    for model, context in ((plain, contextlib.nullcontext()), (delayed, store)):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x) + model(x + 1)
        with context:
            y.float().square().sum().backward()
    assert len(store) == 6 and all(p.grad is None for p in delayed.parameters()), "two norms and four products wait"
    store.run()
    for want, got in zip(plain.parameters(), delayed.parameters(), strict=True):
        found = got.grad if got is not delayed[3].bias else got.main_grad
        assert found.dtype is (torch.float32 if got is not delayed[3].bias else torch.float64)
        assert_close(found.bfloat16(), want.grad.bfloat16(), dtype=torch.bfloat16, length=64)
