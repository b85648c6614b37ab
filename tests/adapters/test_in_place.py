"""Writes in place to the output of a node: torch's gradients, or an error that names the write."""

import pytest
import torch
from law_cases import CASES
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from funcops import differentiable
from funcops import nn as fnn
from funcops.adapters.autograd.outputs import owned
from funcops.engine.trees import tensors, tree_map_tensors
from funcops.testing.laws import float_like

WRITES = {"add": lambda y: y.add_(1), "relu": lambda y: y.relu_(), "mul": lambda y: y.mul_(2)}
# in the first of its dtypes; a y of codes has no arithmetic, and the scale of a delayed recipe takes no gradient from autograd
NONE = ("quantize-", "Fp8Delayed")
EACH = list({str(case): (case, dtype) for case, dtype in reversed(CASES) if not any(n in str(case) for n in NONE)}.values())[::-1]


def able(t):
    return t.is_floating_point() and t.element_size() > 1


def storage(t):
    return t.untyped_storage()._cdata


def of_call(call, params, x):
    """Leaves that require a gradient, and the float outputs of a call on them."""
    params, x = tree_map_tensors(lambda t: t.detach().clone().requires_grad_(able(t)), (params, x))
    y = call(params, x)
    return [t for t in tensors((params, x)) if t.requires_grad], [t for t in tensors(y) if t.requires_grad]


def compare(call, params, x, write):
    """Gradients after writes in place to each output equal gradients of the same arithmetic on copies. Returns the refusals."""
    kept = set()
    with saved_tensors_hooks(lambda t: kept.add(storage(t)) or t, lambda t: t):  # hooks get no guard against writes
        given, outputs = of_call(call, params, x)
    keeps_y = any([storage(t) in kept for t in outputs])
    copies = [write(t.clone()) for t in outputs]
    dys = [float_like(t.detach(), 3) for t in outputs]
    want = torch.autograd.grad(copies, given, dys, allow_unused=True) if outputs else ()

    given, outputs = of_call(call, params, x)
    try:
        for t in outputs:
            write(t)
    except RuntimeError as error:
        inputs = {storage(t) for t in given}
        assert "is a view" in str(error) and any([storage(t) in inputs for t in outputs]), error
        return "the write"
    try:
        got = torch.autograd.grad(outputs, given, dys, allow_unused=True) if outputs else ()
    except RuntimeError as error:
        assert keeps_y and "modified by an inplace operation" in str(error), error
        return "the backward"
    assert all([torch.equal(a, b) for a, b in zip(copies, outputs, strict=True)])
    for a, b in zip(want, got, strict=True):
        assert a is b is None or torch.equal(a, b), "a gradient of a changed value"
    return None


@pytest.mark.turns("case", "dtype", every=2, each="op")
@pytest.mark.parametrize(("case", "dtype"), EACH, ids=[str(case) for case, _ in EACH])
def test_an_output_of_an_op_may_be_written_to(case, dtype):
    params, x = case.make(dtype)
    for i, write in enumerate(WRITES.values()):
        if i == 0 or case is EACH[0][0] or len(tensors(x)) == 1:
            compare(lambda p, t: differentiable(case.op)(p, t, case.cfg), params, x, write)


D = 8
LAYERS = {
    "Linear": lambda lib: lib.Linear(D, D),
    "Linear without bias": lambda lib: lib.Linear(D, D, bias=False),
    "LayerNorm": lambda lib: lib.LayerNorm(D),
    "LayerNorm of two": lambda lib: lib.LayerNorm((3, D)),
    "RMSNorm": lambda lib: lib.RMSNorm(D),
    "RMSNorm of two": lambda lib: lib.RMSNorm((3, D)),
    "GELU": lambda lib: lib.GELU(),
    "GELU tanh": lambda lib: lib.GELU(approximate="tanh"),
    "ReLU": lambda lib: lib.ReLU(),
    "SiLU": lambda lib: lib.SiLU(),
    "Sigmoid": lambda lib: lib.Sigmoid(),
    "Tanh": lambda lib: lib.Tanh(),
    "GLU": lambda lib: lib.GLU(),
    "Sequential": lambda lib: lib.Sequential(lib.RMSNorm(D), lib.Linear(D, D), lib.GELU(), lib.Linear(D, D)),
}
SHAPES = {"1d": (D,), "2d": (3, D), "3d": (2, 3, D), "4d": (2, 2, 3, D)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", LAYERS)
def test_an_output_of_a_layer_may_be_written_to(name, shape):
    """But for layers whose backward reads y, as in torch, which raises in the backward."""
    if "of two" in name and len(shape) == 1:
        return
    torch.manual_seed(0)
    layer = LAYERS[name](fnn).double()
    x = torch.randn(shape, dtype=torch.float64)
    for write in WRITES.values():
        got = compare(lambda p, t: torch.func.functional_call(layer, p, t), dict(layer.named_parameters()), x, write)
        assert got == ("the backward" if getattr(layer, "keeps_y", False) else None)


@pytest.mark.parametrize("after", [lambda: nn.ReLU(inplace=True), lambda: nn.Dropout(0.5, inplace=True)], ids=["ReLU", "Dropout"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_module_that_writes_in_place_follows_a_swapped_one(after, shape):
    found = []
    for swap in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(D, D), after()]).double()
        if swap:
            fnn.from_torch(model)
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        torch.manual_seed(1)
        h = model[0](x)
        y = model[1](h)
        assert y is h or torch.equal(y, h), "as in torch, the input holds the output"
        y.square().sum().backward()
        found.append((y.detach(), x.grad, *[p.grad for p in model.parameters()]))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_kept_views_of_an_output_count_its_writes():
    base, x = torch.zeros(4, 3), torch.zeros(6)
    y, seen = base.view(12), x.view(2, 3)
    outputs, other = [y, seen], torch.zeros(2)
    kept = owned(outputs, [y, base, base[1], other], [x])
    assert outputs[1] is seen and outputs[0] is not y and not outputs[0]._is_view()
    before = [t._version for t in kept]
    outputs[0].add_(1)
    assert [t._version - v for t, v in zip(kept, before, strict=True)] == [1, 1, 1, 0]
    assert kept[0] is outputs[0] and kept[2].eq(1).all() and base.eq(1).all(), "the memory is one"
