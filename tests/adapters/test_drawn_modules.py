"""`op_from_module` of drawn modules (`drawn_modules.py`): results, gradients, buffers and random numbers are eager's to the bit."""

import copy
import functools
import random

import optree
import pytest
import torch
from drawn_modules import RESULTS, Drawn, inputs_of, module_of, named_steps, step_of
from drawn_steps import REFUSED

from funcops import Needs, TorchConfig, WithExtras, op_from_module

CFG = TorchConfig()
FIRST, ALL = 25, 300
# torch rounds in another order where a write is to a tensor with gaps, and has two kernels for a pool, with and without gradients
ROUNDED = {"recurrent", "long memory", "cell", "index add", "random slopes", "pooled"}


def flat(tree):
    return [t for t in optree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def equal(a, b, most=0.0):
    """None is a gradient of zeros."""
    if a is None or b is None:
        return a is b or not (b if a is None else a).any()
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    return torch.allclose(a, b, most, most, equal_nan=True) if most else torch.equal(a.nan_to_num(), b.nan_to_num())


def cloned(tree):
    return optree.tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, tree)


def by_autograd(module, x, seed, needs):
    """Results, gradients of parameters and inputs, buffers, and the state of the generator after the forward. What is not needed
    requires grad all the same, as torch multiplies in another way if a factor does not."""
    x = optree.tree_map(lambda t: t.detach().requires_grad_(t.is_floating_point()), x)
    torch.manual_seed(seed)
    found = module(*x) if isinstance(x, tuple) else module(**x)
    state, ys = torch.get_rng_state(), flat(found)
    own = {n: p for n, p in module.named_parameters() if p.requires_grad and needs.param(n)}
    with torch.no_grad():
        dys = [dy if y.requires_grad else None for y, dy in zip(ys, gradients_of(ys), strict=True)]
    pairs = [(y, dy) for y, dy in zip(ys, dys, strict=True) if dy is not None]
    wanted = [*own.values(), *[t for t in flat(x) if t.requires_grad and needs.x]]
    grads = (
        torch.autograd.grad([y for y, _ in pairs], wanted, [dy for _, dy in pairs], allow_unused=True)
        if pairs and wanted
        else [None] * len(wanted)
    )
    return ys, dys, dict(zip(own, grads, strict=False)), list(grads[len(own) :]), dict(module.named_buffers()), state


def gradients_of(ys):
    """In the layouts of the results, as torch multiplies others in another order."""
    generators = [torch.Generator().manual_seed(i) for i in range(len(ys))]
    drawn = [torch.randn(y.shape, generator=g, dtype=torch.float64) for y, g in zip(ys, generators, strict=True)]
    return [torch.empty_like(y).copy_(t) if y.is_floating_point() else None for y, t in zip(ys, drawn, strict=True)]


def compare(op, params, module, x, seed, needs=Needs.ALL, what="", most=0.0):
    """One call of the op, against autograd on a copy of the module."""
    alike = functools.partial(equal, most=most)
    own = copy.deepcopy(module)
    ys, dys, grads, dxs, buffers, state = by_autograd(own, x, seed, needs)
    before = cloned(module.state_dict()), cloned(x)
    torch.manual_seed(seed)
    y, residuals = op.fwd(params, x, CFG, needs=needs)
    assert torch.equal(torch.get_rng_state(), state), f"{what}: other random numbers"
    main, new = (y.main, y.extras) if isinstance(y, WithExtras) else (y, {})
    assert len(flat(main)) == len(ys) and all(map(alike, flat(main), ys)), f"{what}: results"
    was = before[0]
    assert {n for n in buffers if n in was and not equal(buffers[n], was[n])} <= set(new), f"{what}: buffers that are written"
    assert all(alike(new[n], buffers[n]) for n in new), f"{what}: buffers"
    spread = iter(dys)
    dy = optree.tree_map(lambda t: next(spread), main)
    dy = WithExtras(dy, dict.fromkeys(new)) if new else dy
    dparams, dx = op.bwd(residuals, dy, CFG) if residuals is not None else ({}, None)
    for n, g in grads.items():
        assert alike(dparams[n], g), f"{what}: gradient of {n}"
    assert all(dparams[n] is None for n in params if n not in grads), f"{what}: gradients that nobody asks for"
    if needs is Needs.ALL:
        leaves = optree.tree_leaves(dx, none_is_leaf=True) if dx is not None else []
        floats = [g for g, t in zip(leaves, flat(x), strict=True) if t.is_floating_point()]
        assert all(map(alike, floats, dxs)), f"{what}: gradients of inputs"
    assert all(map(equal, flat(before), flat((module.state_dict(), x)))), f"{what}: the module and x are as before"


def values(module):
    """The attributes of all parts."""
    return [{n: v for n, v in vars(part).items() if n != "tables"} for part in module.modules()]


def check(number, every=True):
    """Compare all calls of a drawn module. Returns why it is refused, or ""."""
    module, x = module_of(number), inputs_of(number)
    before, attributes = cloned((module.state_dict(), x)), [dict(one) for one in values(module)]
    torch.manual_seed(7)
    state, drawn = torch.get_rng_state(), random.getstate()
    try:
        op, params = op_from_module(module, x)
    except (ValueError, TypeError, RuntimeError) as error:
        assert str(error).startswith("Drawn_fwd: "), f"{named_steps(number)}: {error}"
        assert all(map(equal, flat(before), flat((module.state_dict(), x)))) and values(module) == attributes
        assert torch.equal(torch.get_rng_state(), state) and random.getstate() == drawn
        return str(error)
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == drawn, "a trace draws nothing"
    same = functools.partial(compare, op, params, module, most=1e-12 if ROUNDED & {*named_steps(number)} else 0.0)
    same(x, 3, what="first")
    same(inputs_of(number, seed=1), 4, what="other values")
    draw = random.Random(number)
    some = draw.sample([*params], len(params) // 2)
    for way in WAYS if every else draw.sample(WAYS, 1):
        way(same, module, x, number, some)
    return ""


def shapes(same, module, x, number, some):
    same(inputs_of(number, rows=2, length=5, seed=2), 5, what="another shape")


def evaluated(same, module, x, number, some):
    module.eval()
    same(x, 6, what="eval")
    module.train()


def frozen(same, module, x, number, some):
    own = dict(module.named_parameters())
    for trained in (False, True):
        for n in some:
            own[n].requires_grad_(trained)
        same(x, 7, what="frozen")


def needed(same, module, x, number, some):
    if some:
        same(x, 8, Needs(x=False, params=some), what="needs")


WAYS = [shapes, evaluated, frozen, needed]


# of each kind that a page names, and no other: values of inputs or buffers, random numbers, writes, attributes, layouts
REASONS = (
    "shapes and steps do not depend on values of its inputs or random numbers",
    "steps do not depend on values of buffers that it writes to",
    "draws its random numbers with torch",
    "draws from torch's own generators",
    "draws normal numbers into contiguous tensors",
    "writes neither to its inputs nor to its parameters",
    "writes to nothing that its backward reads",
    "leaves its attributes as they are",
    "whose backward reads no parameter again",
    "whose backward draws nothing again",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(FIRST))
def test_a_drawn_module(number):
    reason = check(number, every=False)
    assert not reason or any(one in reason for one in REASONS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*REFUSED])
def test_what_is_refused_changes_nothing(name, monkeypatch):
    monkeypatch.setattr("test_drawn_modules.module_of", lambda number: Drawn([step_of(name)], RESULTS["tensor"]).double())
    assert any(one in check(0) for one in REASONS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, ALL, 25))
def test_drawn_modules_are_seldom_refused(first):
    reasons = [check(number) for number in range(first, first + 25)]
    found = [reason for reason in reasons if reason]
    assert all(any(one in reason for one in REASONS) for reason in found), found
    assert len(found) <= 8, found
