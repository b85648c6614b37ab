"""A swapped model never keeps more than torch's, whatever surrounds an activation."""

import copy
import itertools

import pytest
import torch
from torch import nn

from funcops import nn as fnn

C, ACTS = 8, {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}
BESIDE = {
    "nothing": None,
    "conv": lambda: nn.Conv1d(C, C, 1),
    "linear": lambda: nn.Linear(C, C),
    "batch norm": lambda: nn.BatchNorm1d(C),
    "layer norm": lambda: nn.LayerNorm(C),
    "pool": lambda: nn.MaxPool1d(1),
    "leaky relu": lambda: nn.LeakyReLU(),
}
PLACES = list(itertools.product(BESIDE, ACTS, BESIDE))


class OneByOne(nn.Module):
    """Calls its layers one by one, so that no two of them join."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def built(names, container):
    torch.manual_seed(0)
    layers = [make() for name in names if (make := (BESIDE | ACTS)[name])]
    return (nn.Sequential(*layers) if container is nn.Sequential else OneByOne(layers)).double()


@pytest.mark.turns("container")
@pytest.mark.parametrize("container", [nn.Sequential, OneByOne], ids=["sequential", "one by one"])
@pytest.mark.parametrize("names", PLACES, ids=["-".join(names) for names in PLACES])
def test_a_swapped_activation_keeps_no_more_than_torchs(names, container):
    x = torch.randn(700, C, C, dtype=torch.float64, requires_grad=True)  # enough numbers for a Sequential to recompute
    found = []
    for swap in (False, True):
        model = built(names, container)
        if swap:
            fnn.from_torch(model)
        kept = fnn.kept_bytes(model, x)
        y = model(x)
        found.append((kept, y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])))
    (theirs, *want), (ours, *got) = found
    assert ours <= theirs
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("act", ACTS)
def test_an_activation_whose_output_is_read_twice(act):
    """The next layer reads it, and a product beside it: no chain can recompute it there."""
    x = torch.randn(700, C, dtype=torch.float64, requires_grad=True)

    class Read(OneByOne):
        def forward(self, x):
            h = self.layers[1](self.layers[0](x))
            return self.layers[2](h) * h

    kept = []
    for swap in (False, True):
        model = Read([nn.Linear(C, C), ACTS[act](), nn.Linear(C, C)]).double()
        if swap:
            fnn.from_torch(model)
        kept.append(fnn.kept_bytes(model, x))
    assert kept[1] <= kept[0]


def test_kept_bytes_are_torchs_own_sums():
    """Layers whose saved tensors are documented: the input of a GELU, the output of a ReLU, two numbers a row of a norm."""
    x = torch.randn(16, C, requires_grad=True)
    assert fnn.kept_bytes(nn.GELU(), x) == 0 and fnn.kept_bytes(nn.GELU(), 2 * x) == 0  # its input is the caller's
    assert fnn.kept_bytes(nn.ReLU(), x) == x.nbytes
    assert fnn.kept_bytes(nn.LayerNorm(C), x) == 2 * 16 * 4
    assert fnn.kept_bytes(nn.Sequential(nn.GELU(), nn.GELU()), x) == x.nbytes
    assert fnn.kept_bytes(nn.Linear(C, C), x) == 0
    with torch.no_grad():
        assert fnn.kept_bytes(nn.ReLU(), x) == 0
    model = nn.Sequential(nn.BatchNorm1d(C), nn.Dropout(0.5))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert fnn.kept_bytes(model, x) > 0
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    with pytest.raises(TypeError, match=r"kept_bytes: module must be a torch.nn.Module, got function"):
        fnn.kept_bytes(lambda x: x, x)


@pytest.mark.parametrize("rows", [1, 4, 32, 1024])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("container", [nn.Sequential, OneByOne], ids=["sequential", "one by one"])
def test_small_inputs_keep_no_more_than_torchs(container, act, rows):
    """A Sequential recomputes little for few rows: what torch does not keep either, it does not keep."""
    x = torch.randn(rows, C, requires_grad=True)
    kept = []
    for swap in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(C, 32), ACTS[act](), nn.LayerNorm(32), nn.Linear(32, C), ACTS[act](), nn.Linear(C, C)]
        model = nn.Sequential(*layers) if container is nn.Sequential else OneByOne(layers)
        if swap:
            fnn.from_torch(model)
        kept.append((fnn.kept_bytes(model, x), torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])))
    assert kept[1][0] <= kept[0][0]
    torch.testing.assert_close(kept[1][1], kept[0][1])
