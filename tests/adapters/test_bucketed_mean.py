"""`BucketedMean`: means of what every process started, by dtype and bucket. Processes are stood in for by what they would add."""

import pytest
import torch
import torch.distributed as dist

from funcops import delayed_wgrad
from funcops import nn as fnn
from funcops.adapters.pipelining import BucketedMean

WORLD = 4


class Work:
    def __init__(self, flat):
        self.flat = flat

    def wait(self):
        self.flat.mul_(WORLD * 2.5)  # as if the others' values were such that the mean is 2.5 times one's own


@pytest.fixture
def sent(monkeypatch):
    """A list of what is sent, in order: dtype and number of elements."""
    found = []

    def all_reduce(flat, group=None, async_op=False):
        assert async_op and group == "group"
        found.append((flat.dtype, flat.numel()))
        return Work(flat)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda group: WORLD)
    return found


TREES = [
    {"a": torch.arange(6.0).view(2, 3), "none": None},
    {"b": torch.arange(4.0).bfloat16(), "c": torch.arange(10.0).view(5, 2).t(), "d": torch.tensor(3.0, dtype=torch.float64)},
    {"e": torch.ones(8).bfloat16(), "f": torch.ones(1)},
]
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.parametrize(
    ("size", "at_once", "later"),
    [
        (1, [(F32, 6), (BF16, 4), (F32, 10), (F64, 1), (BF16, 8), (F32, 1)], []),
        (24, [(F32, 6), (F32, 10), (BF16, 12)], [(F64, 1), (F32, 1)]),
        (64, [(F32, 16)], [(BF16, 12), (F64, 1), (F32, 1)]),
        (2**20, [], [(F32, 17), (BF16, 12), (F64, 1)]),
    ],
)
def test_buckets_are_of_one_dtype_and_every_tensor_gets_its_mean(size, at_once, later, sent):
    given = [
        {name: None if t is None else t.clone(memory_format=torch.preserve_format) for name, t in tree.items()} for tree in TREES
    ]
    mean = BucketedMean("group", bucket_bytes=size)
    for tree in given:
        mean.start(tree)
    assert sent == at_once
    mean.wait()
    assert sent == at_once + later
    for tree, was in zip(given, TREES, strict=True):
        for name, t in tree.items():
            if t is not None:
                assert t.dtype is was[name].dtype and t.stride() == was[name].stride()
                assert torch.equal(t, was[name] * 2.5), name
    mean.wait()
    assert sent == at_once + later, "nothing is sent twice"


def test_a_store_reduces_every_gradient_that_it_gave_once(sent):
    """Gradients that came without the store are reduced too, if they are named; main_grad comes before grad."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(fnn.Linear(3, 4), torch.nn.Tanh(), fnn.Linear(4, 2), torch.nn.Linear(2, 2)).double()
    net[0].bias.requires_grad_(False)
    net[2].weight.main_grad = torch.ones(2, 4, dtype=torch.float64)
    with delayed_wgrad() as store:
        net(torch.randn(5, 3, dtype=torch.float64)).square().sum().backward()
    with pytest.raises(RuntimeError, match=r"reduce\(\) must follow run\(\), got 2 weight gradients that wait"):
        store.reduce("group")
    store.run()
    found = {name: getattr(p, "main_grad", p.grad) for name, p in net.named_parameters() if p.requires_grad}
    before = {name: g.clone() for name, g in found.items()}
    store.reduce("group", also=net.parameters())
    assert sorted(found) == ["0.weight", "2.bias", "2.weight", "3.bias", "3.weight"] and net[2].weight.grad is None
    assert all(torch.equal(g, before[name] * 2.5) for name, g in found.items())
    assert sum(count for _, count in sent) == sum(g.numel() for g in found.values())
