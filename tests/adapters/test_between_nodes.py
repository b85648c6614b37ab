"""A value between two modules is the program's, which may write to it unseen, copy it or drop it: as with torch's modules."""

import copy
import functools
import gc
import weakref
from random import Random

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from funcops import nn as fnn
from funcops.engine.program.rules import FEW

D = 16
FIRST = {  # modules whose output a chain recomputes, and others
    "layer norm": lambda: nn.LayerNorm(D),
    "rms norm": lambda: nn.RMSNorm(D, eps=1e-6),
    "group norm": lambda: nn.GroupNorm(4, D),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "glu": nn.GLU,
    "softmax": lambda: nn.Softmax(-1),
    "linear": lambda: nn.Linear(D, D),
    "sequential": lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D)),
}


def moved(h, by):
    """`by(h)` on another tensor of the same memory, of which h's version knows nothing."""
    by(h)
    return h


UNSEEN = {  # writes that no version counts, and those that one does
    "data": lambda h: moved(h, lambda h: h.data.mul_(2)),
    "index of data": lambda h: moved(h, lambda h: h.data.__setitem__(0, 3.0)),
    "other data": lambda h: moved(h, lambda h: setattr(h, "data", h.data * 2)),
    "numpy": lambda h: moved(h, lambda h: h.detach().numpy().__setitem__(slice(0, 2), 3.0)),
    "dlpack": lambda h: moved(h, lambda h: torch.from_dlpack(h.detach()).data.mul_(2)),
    "set": lambda h: moved(h, lambda h: h.data.set_((h.detach() * 2).contiguous())),
    "storage": lambda h: moved(h, lambda h: h.untyped_storage().copy_((h.detach() * 2).contiguous().untyped_storage())),
    "a view's data": lambda h: moved(h, lambda h: h[: len(h) // 2].data.neg_()),
    "counted": lambda h: h.mul_(2),
    "counted, without a graph": lambda h: moved(h, lambda h: h.detach().mul_(2)),
    "nothing": lambda h: h,
}
READS = {"itself": lambda h: h, "a view": lambda h: h[:], "reshaped": lambda h: h.view(2, -1, h.shape[-1]), "part": lambda h: h[1:]}


class Between:
    """Three modules, with the program's own `write` and `read` between the second and the third."""

    def __init__(self, modules):
        self.before, self.first, self.last = modules
        self.modules, self.write, self.read = modules, UNSEEN["nothing"], READS["itself"]

    def __call__(self, x):
        return self.last(self.read(self.write(self.first(self.before(x)))))


def both(first):
    """With torch's modules, and with swapped ones."""
    torch.manual_seed(0)
    first = FIRST[first]()
    modules = nn.ModuleList([nn.Linear(D, D), first, nn.Linear(D // 2 if type(first) is nn.GLU else D, 4)]).double()
    ours = copy.deepcopy(modules)
    fnn.from_torch(ours)
    return Between(modules), Between(ours)


def rows(large):
    x = torch.randn(-(-FEW // D) if large else 4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.requires_grad_()


def outcome(model, x):
    """y and the gradients, or the first words of torch's error."""
    try:
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.modules.parameters()])]
    except RuntimeError as error:
        return str(error).partition(":")[0]


def assert_same(got, want, what):
    assert isinstance(got, str) == isinstance(want, str), (what, got, want)
    if isinstance(want, str):
        assert got == want, what
    else:
        torch.testing.assert_close(got, want, msg=lambda said: f"{what}: {said}")


@pytest.mark.turns("first", every=6)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("first", FIRST)
def test_a_write_between_modules_is_what_the_next_one_reads(first, large):
    """Every kind of write, seen by a version or not, and every way to read what was written to."""
    models = both(first)
    for write in UNSEEN:
        for read in READS if write in ("data", "nothing") else [Random(first + write).choice(list(READS))]:
            found = []
            for model in models:
                model.write, model.read = UNSEEN[write], READS[read]
                found.append(outcome(model, rows(large)))
            assert_same(found[1], found[0], (first, write, read))


def cloned(model, x):
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return model(x)


def on_cpu(model, x):
    with save_on_cpu():
        return model(x)


def again(fn, x):
    return checkpoint(fn, x, use_reentrant=False)


def in_halves(model, x):
    """Two checkpoints inside a checkpoint."""
    return again(lambda x: again(model.last, again(lambda x: model.first(model.before(x)), x)), x)


AROUND = {
    "checkpoint": again,
    "reentrant": lambda model, x: checkpoint(model, x, use_reentrant=True),
    "nested": lambda model, x: again(functools.partial(again, model), x),
    "in halves": in_halves,
    "clones": cloned,
    "on cpu": on_cpu,
    "checkpoint on cpu": lambda model, x: on_cpu(functools.partial(again, model), x),
    "on cpu in a checkpoint": lambda model, x: again(functools.partial(on_cpu, model), x),
}


def reached(model, x, around):
    model.modules.zero_grad()
    around(model, x).square().sum().backward()
    return [x.grad, *[p.grad for p in model.modules.parameters()]]


@pytest.mark.turns("first", every=6)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("first", FIRST)
def test_what_a_node_keeps_does_not_depend_on_which_tensor_came_in(first, large):
    """Checkpoints count tensors in two runs, and hooks give other tensors back: the bytes and the gradients are those without."""
    model, ours = both(first)
    for name, around in AROUND.items():
        assert_same(reached(ours, rows(large), around), reached(model, rows(large), around), (first, name))
    counts = []
    for change in (lambda x: x, lambda x: x.clone(), lambda x: x.detach().clone().requires_grad_(), lambda x: x.view_as(x)):
        seen, x = [], rows(large)
        with saved_tensors_hooks(lambda t, seen=seen: seen.append(t.nbytes) or t.clone(), lambda t: t):
            h = ours.first(ours.before(change(x)))
            ours.last(change(h))
        counts.append(sorted(seen))
    assert all(found == counts[0] for found in counts), counts


@pytest.mark.turns("first", every=4)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("first", FIRST)
def test_a_held_output_holds_no_input(first, large):
    """After its backward, and without a graph: as in torch, only y itself lives on."""
    for model in both(first):
        for backward in (True, False):
            x = rows(large).detach()
            h = model.before(x)
            alive = weakref.ref(h.untyped_storage())
            y = model.first(h)
            if backward:
                y.sum().backward()
            else:
                y = y.detach()
            del h
            gc.collect()
            assert alive() is None, (type(model.first), backward)
            del y
