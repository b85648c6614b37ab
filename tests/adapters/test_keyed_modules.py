"""A module whose random numbers are drawn by a key in x."""

import pytest
import torch
from own_models import CFG, draw
from test_equal_layers import Layer, Stack
from torch import nn

from funcops import Policy, Recompute, WithExtras, op_from_module, random, remat, report, with_policy
from funcops.engine.trees import tensors

KEY = random.key(7)


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.draw(x)


EVERY = {  # name: (draws for an x of 0.25, their mean, their standard deviation)
    "dropout": (lambda x: nn.functional.dropout(x, 0.2), 0.25, 0.125),
    "dropout of all": (lambda x: nn.functional.dropout(x, 1.0), 0.0, 0.0),
    "bernoulli": (torch.bernoulli, 0.25, 0.433),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.5), 0.5, 0.5),
    "rand_like": (torch.rand_like, 0.5, 0.2887),
    "rand": (lambda x: torch.rand(x.shape, dtype=x.dtype), 0.5, 0.2887),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 3), 1.0, 1.1547),
    "randn_like": (torch.randn_like, 0.0, 1.0),
    "normal_": (lambda x: torch.empty_like(x).normal_(2, 3), 2.0, 3.0),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(4.0), 0.25, 0.25),
    "randint": (lambda x: torch.randint(2, 5, x.shape).to(x.dtype), 3.0, 0.8165),
    "in another layout": (lambda x: torch.rand_like(x.t()).t(), 0.5, 0.2887),
}


@pytest.mark.parametrize("name", EVERY)
def test_draws_have_their_distribution(name):
    draws, mean, std = EVERY[name]
    x = torch.full((400, 250), 0.25, dtype=torch.float64)
    op, params = op_from_module(Draws(draws), x)
    state = torch.get_rng_state()
    y, _ = op.fwd(params, WithExtras(x, {"key": KEY}), CFG)
    assert torch.equal(torch.get_rng_state(), state), "torch's generator stays"
    # five standard errors of 100,000 draws
    assert abs(y.mean().item() - mean) <= 5 * std / 100_000**0.5 and abs(y.std().item() - std) <= 0.02 * std + 1e-9
    assert torch.equal(y, op.fwd(params, WithExtras(x, {"key": KEY.clone()}), CFG)[0])
    other, _ = op.fwd(params, WithExtras(x, {"key": random.fold_in(KEY, 1)}), CFG)
    assert std == 0 or not torch.equal(y, other)
    assert y.stride() == op.fwd(params, x, CFG)[0].stride()


def test_a_key_makes_it_a_function_that_may_run_again():
    torch.manual_seed(0)
    module, x = Stack([Layer(i) for i in range(3)]).double(), draw(64, 6)
    op, params = op_from_module(module, x)
    keyed = WithExtras(x, {"key": KEY})
    y, residuals = op.fwd(params, keyed, CFG)
    dy = torch.ones_like(y)
    wanted = op.bwd(residuals, dy, CFG)
    assert wanted[1].extras == {"key": None}
    for other in (op, remat(op), with_policy(op, Policy({"kept.layers.1.*": Recompute()}))):
        again, kept = other.fwd(params, keyed, CFG)
        assert torch.equal(y, again)
        assert all(torch.equal(a, b) for a, b in zip(tensors(other.bwd(kept, dy, CFG)), tensors(wanted), strict=True))
    drawn = report(op.fwd(params, x, CFG)[1], params, x).kept_bytes
    assert report(residuals, params, keyed).kept_bytes < drawn, "masks are not kept"
    with pytest.raises(ValueError, match="gives the same when its forward runs again"):
        remat(op).fwd(params, x, CFG)
    # the derivative by differences, with the same key
    step = 1e-6 * draw(64, 6, seed=2)
    ends = [op.fwd(params, WithExtras(x + sign * step, {"key": KEY}), CFG)[0].sum() for sign in (1, -1)]
    torch.testing.assert_close((ends[0] - ends[1]) / 2, (wanted[1].main * step).sum(), rtol=1e-6, atol=1e-12)


def test_layers_draw_other_numbers():
    module = nn.Sequential(*[Dropped() for _ in range(2)]).double()
    op, params = op_from_module(module, torch.ones(1, 400, dtype=torch.float64))
    y, _ = op.fwd(params, WithExtras(torch.ones(1, 400, dtype=torch.float64), {"key": KEY}), CFG)
    assert 0.15 < (y != 0).double().mean() < 0.35, "a quarter is kept by both"


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.gain = nn.Sequential(nn.Dropout(0.5)), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.drop(x) * self.gain


class Keyed(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("key", torch.zeros(2, dtype=torch.int64))

    def forward(self, x):
        return x + self.key.sum()


@pytest.mark.parametrize(
    ("module", "extras", "error", "text"),
    [
        (
            Draws(lambda x: x[torch.randperm(4)]),
            {"key": KEY},
            ValueError,
            "random operators are among .*, got one that calls aten.randperm",
        ),
        (Draws(torch.rand_like), {"key": KEY.float()}, TypeError, "x.extras: key must be int64"),
        (
            Draws(torch.rand_like),
            {"keys": KEY},
            ValueError,
            "x.extras must be a key, or buffers of the module by name .*, got keys",
        ),
        (Keyed(), {"key": KEY}, ValueError, "x.extras.key must be for a module without a buffer of that name"),
    ],
)
def test_what_a_key_cannot_draw_is_refused(module, extras, error, text):
    x = draw(4)
    op, params = op_from_module(module, x)
    with pytest.raises(error, match=text):
        op.fwd(params, WithExtras(x, extras), CFG)
    op.fwd(params, x, CFG)
