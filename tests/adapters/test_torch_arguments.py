"""Modules made and called as `torch.nn`'s are: every option of every constructor, and arguments by name."""

import copy
import inspect
import itertools

import pytest
import torch
from torch import nn

import funcops
from funcops import nn as fnn
from funcops.testing.checks import float_like
from funcops.testing.tolerances import assert_close

D, DTYPE = 6, torch.float64
SIZES = {"Linear": (D, 4), "Embedding": (9, 3), "LayerNorm": (D,), "RMSNorm": (D,), "GroupNorm": (1, 3)}
OPTIONS = {  # values of each option of torch's constructor
    "Linear": {"bias": (True, False)},
    "Embedding": {
        "padding_idx": (None, -2),
        "max_norm": (None, 1.0),
        "norm_type": (2.0, 1.0),
        "scale_grad_by_freq": (False, True),
        "sparse": (False, True),
    },
    "LayerNorm": {"eps": (1e-5, 0.1), "elementwise_affine": (True, False), "bias": (True, False)},
    "RMSNorm": {"eps": (None, 0.1), "elementwise_affine": (True, False)},
    "GroupNorm": {"eps": (1e-5, 0.1), "affine": (True, False), "bias": (True, False)},
    "Dropout": {"p": (0.0, 1.0), "inplace": (False, True)},
    "GELU": {"approximate": ("none", "tanh")},
    "ReLU": {"inplace": (False, True)},
    "SiLU": {"inplace": (False, True)},
    "Sigmoid": {},
    "Tanh": {},
    "GLU": {"dim": (-1, 2, 0)},
    "Softmax": {"dim": (-1, 2, 0, None)},
    "CrossEntropyLoss": {
        "weight": (None, torch.linspace(0.5, 1.5, D, dtype=DTYPE)),
        "ignore_index": (-100, 1),
        "reduction": ("mean", "sum", "none"),
        "label_smoothing": (0.0, 0.2),
    },
    "LinearCrossEntropyLoss": {
        "out_features": ((), (2,)),
        "bias": (False, True),
        "reduction": ("mean", "sum", "none"),
        "ignore_index": (None, 1),
        "weight": (None, torch.linspace(0.5, 1.5, D, dtype=DTYPE)),
        "label_smoothing": (0.0, 0.2),
        "options": (None,),
    },
}
SIZES["LinearCrossEntropyLoss"] = (D, D)
REFUSED = {  # an option that is refused when made: why
    ("Embedding", "max_norm"): "a forward that writes to its weight has no functional form",
    ("Embedding", "scale_grad_by_freq"): "the op has no such gradient",
    ("Embedding", "sparse"): "the op's gradient is dense",
}
ASIDE = {"self", "args", "kwargs", "device", "dtype", "_weight", "_freeze", "size_average", "reduce"}  # or sizes, or deprecated
NAMES = [name for name in OPTIONS if hasattr(nn, name)]


def chosen():
    for name in NAMES:
        takes = inspect.signature(getattr(nn, name)).parameters  # torch 2.11's GroupNorm has no bias=
        own = {option: values for option, values in OPTIONS[name].items() if option in takes}
        for i, values in enumerate(itertools.product(*own.values())):
            yield pytest.param(name, dict(zip(own, values, strict=True)), id=f"{name}-{i}")


def given(name, options):
    """The arguments of a call."""
    torch.manual_seed(2)
    if name == "Embedding":
        return (torch.randint(9, (3, D)),)
    if name == "CrossEntropyLoss":
        return torch.randn(5, D, dtype=DTYPE), torch.randint(D, (5,))
    if name == "LinearCrossEntropyLoss":
        return torch.randn(5, D, dtype=DTYPE), torch.randint(D, (5, *options["out_features"]))
    return (torch.randn(2, 3, D, dtype=DTYPE),)


def outcome(module, args, by_name):
    args = [t.clone().requires_grad_() if t.is_floating_point() else t for t in args]
    x, first = args[0], args[0] * 1 if args[0].requires_grad else args[0]  # a module may write to x, so x must not be a leaf
    args = [first, *args[1:]]
    y = module(**dict(zip(by_name, args, strict=True))) if by_name else module(*args)
    if y.requires_grad:
        y.backward(float_like(y.detach(), 5))
    return y.detach(), first.detach(), x.grad, [p.grad for p in module.parameters()]


@pytest.mark.parametrize(("name", "options"), list(chosen()))
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_every_option_is_torchs_or_refused_when_made(name, options):
    options = copy.deepcopy(options)
    theirs = getattr(nn, name)(*SIZES.get(name, ()), **options).to(DTYPE)
    swapped = copy.deepcopy(theirs)
    said = fnn.from_torch(swapped)
    reasons = [key for key in options if (name, key) in REFUSED and options[key]]
    if reasons:
        with pytest.raises(ValueError, match=f"funcops.nn.{name}: {reasons[0]} must be .*use torch.nn"):
            getattr(fnn, name)(*SIZES[name], **options)
        assert type(swapped) is type(theirs) and said.left[0].after.startswith(reasons[0])
        return
    ours = getattr(fnn, name)(*SIZES.get(name, ()), **options).to(DTYPE)
    assert repr(ours) == repr(theirs) and list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    names = [key for key in inspect.signature(theirs.forward).parameters]
    args = given(name, options)
    want = outcome(theirs, args, ())
    for module in (ours, swapped):
        for by_name in ((), names):
            module.zero_grad()
            assert_close(outcome(module, args, by_name), want, dtype=DTYPE, length=256)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_of_torch_is_asked(name):
    known = {*OPTIONS[name], *ASIDE}
    parameters = [p for p in inspect.signature(getattr(nn, name).__init__).parameters.values() if p.name not in known]
    assert all(p.default is p.empty for p in parameters), [p.name for p in parameters]


def test_an_own_module_has_x():
    class Softcap(fnn.OpModule):
        op, values = funcops.softcap, ("cap",)

        def __init__(self):
            super().__init__()
            self.cap = 2.0

    x = torch.ones(3)
    assert torch.equal(Softcap()(x=x), Softcap()(x))

    class Own(fnn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    layer = Own(3, 3)
    assert torch.equal(fnn.Sequential(layer)(x), layer(input=x)), "a forward of one's own is called"


def test_a_layer_whose_class_is_patched_is_called(monkeypatch):
    model = fnn.Sequential(fnn.Linear(3, 3), fnn.Tanh())
    x = torch.ones(2, 3)
    model(x)
    monkeypatch.setattr(fnn.Tanh, "forward", lambda self, input: input * 0)
    assert not model(x).any()


PATCHED = {  # a class of torch whose forward a program replaces for all its modules, ours, and its inputs
    "Sequential": (nn.Sequential, lambda: fnn.Sequential(fnn.Linear(3, 3)), (torch.ones(2, 3),)),
    "LinearCrossEntropyLoss": (None, lambda: fnn.LinearCrossEntropyLoss(3, 4), (torch.ones(2, 3), torch.tensor([1, 2]))),
}


@pytest.mark.parametrize("name", PATCHED)
def test_a_class_of_torch_that_is_patched_is_called(name, monkeypatch):
    theirs, make, given = PATCHED[name]
    if theirs is None:
        theirs = getattr(nn, name, None) or pytest.skip("this torch has no such class")
    module = make()
    assert module(*given) is not None
    monkeypatch.setattr(theirs, "forward", lambda self, *given: ("patched", *given))
    assert module(*given)[0] == "patched" and module(*given)[1] is given[0]


@pytest.mark.parametrize("seed", range(4))
def test_in_place_modules_in_a_sequential(seed):
    """The first writes to the caller's x, as torch's does; later ones write to tensors that nobody else has."""
    make = (
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D, D)),
        lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True), nn.Linear(D, D)),
        lambda: nn.Sequential(nn.Dropout(0.0), nn.SiLU(inplace=True)),
        lambda: nn.Sequential(nn.Linear(D, D), nn.Softplus(), nn.ReLU(inplace=True)),
    )[seed]
    theirs = make().to(DTYPE)
    ours = copy.deepcopy(theirs)
    fnn.from_torch(ours)
    args = (torch.randn(4, D, dtype=DTYPE),)
    assert_close(outcome(ours, args, ()), outcome(theirs, args, ()), dtype=DTYPE, length=256)
    ours[0].inplace = theirs[0].inplace = False
    assert_close(outcome(ours, args, ())[:2], outcome(theirs, args, ())[:2], dtype=DTYPE, length=256)


def compile_alone(names):
    for name in names:
        layer = getattr(fnn, name)(*SIZES.get(name, ()), **({"dim": -1} if name == "Softmax" else {}))
        x = torch.randn(2, 3, D)
        torch.testing.assert_close(torch.compile(layer, backend="eager", fullgraph=True)(x), layer(x))


OF_X = [name for name in NAMES if name not in ("Embedding", "Dropout") and "Loss" not in name]


def test_classes_compile_apart():
    """torch counts compilations by code object, and each class has its own."""
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        compile_alone(["Linear", "GELU", "Tanh"])


@pytest.mark.slow
def test_every_class_compiles_beside_all_others():
    assert len(OF_X) > torch._dynamo.config.recompile_limit
    compile_alone(OF_X)
