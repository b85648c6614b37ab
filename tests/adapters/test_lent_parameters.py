"""Parameters that change unseen: their dtype by `data`, or lent for one call, as by `functional_call`."""

import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from funcops import nn as fnn

D = 8
LAYERS = {
    "RMSNorm": lambda lib: lib.RMSNorm(D),
    "LayerNorm": lambda lib: lib.LayerNorm(D),
    "Linear": lambda lib: lib.Linear(D, D),
    "Sequential of a norm": lambda lib: lib.Sequential(lib.RMSNorm(D), lib.Linear(D, D)),
    "Sequential": lambda lib: lib.Sequential(lib.Linear(D, D), lib.GELU()),
}


def moved(model, how):
    """The model's function in float64, reached in a way that no method of the module sees."""
    own = {name: p.detach().double() for name, p in model.named_parameters()}
    if how == "lent":
        return lambda x: functional_call(model, own, x)
    if how == "data":
        for p in model.parameters():
            p.data = p.data.double()
    else:
        model.load_state_dict(own, assign=True)
    return model


@pytest.mark.parametrize("how", ["lent", "data", "assigned"])
@pytest.mark.parametrize("name", LAYERS)
def test_another_dtype_is_seen(name, how):
    theirs, ours = (LAYERS[name](lib) for lib in (nn, fnn))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, D, dtype=torch.float64) * 1e-4  # small, so that a norm's eps counts
    for model in (theirs, ours):
        model(x.float())
    torch.testing.assert_close(ours(x.float()), theirs(x.float()))
    torch.testing.assert_close(moved(ours, how)(x), moved(theirs, how)(x), rtol=1e-9, atol=1e-12)
    if how == "lent":
        torch.testing.assert_close(ours(x.float()), theirs(x.float()))


@pytest.mark.parametrize("name", LAYERS)
def test_lent_parameters_are_not_kept(name):
    model = LAYERS[name](fnn)
    for before in (False, True):
        lent = {name: p * 1.5 for name, p in model.named_parameters()}
        refs = [weakref.ref(t) for t in lent.values()]
        functional_call(model, lent, torch.randn(3, D)).sum().backward()
        del lent
        assert not any(ref() is not None for ref in refs), before
        model(torch.randn(3, D))


def set_again(model):
    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(p.detach().clone()))


def deleted(model):
    for name, _ in list(model.named_parameters()):
        delattr(model, name)


def registered_again(model):
    for name, p in list(model.named_parameters()):
        model.register_parameter(name, nn.Parameter(p.detach().clone()))


def assigned(model):
    model.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()}, assign=True)


def to_meta(model):
    model.to("meta")


def layer_replaced(model):
    for i in range(len(model)):
        model[i] = nn.Identity()


def layer_deleted(model):
    del model[:]


BY_ANY = assigned, to_meta
REPLACED = [(name, how) for name in LAYERS for how in BY_ANY]
REPLACED += [(name, how) for name in ("RMSNorm", "LayerNorm", "Linear") for how in (set_again, deleted, registered_again)]
REPLACED += [(name, how) for name in LAYERS if name.startswith("Sequential") for how in (layer_replaced, layer_deleted)]


@pytest.mark.parametrize(("name", "how"), REPLACED, ids=lambda one: getattr(one, "__name__", one))
def test_a_replaced_parameter_is_not_kept(name, how):
    model = LAYERS[name](fnn)
    for _ in range(2):
        model(torch.randn(3, D)).sum().backward()
    refs = [weakref.ref(p) for p in model.parameters()]
    how(model)
    assert not any(ref() is not None for ref in refs)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "Linear"])
def test_what_a_forward_set_on_a_module_lends_is_not_kept(name):
    model, refs = LAYERS[name](fnn), []
    x = torch.randn(3, D)
    want, before, own = model(x), model.forward, dict(model._parameters)

    def lending(x):  # as accelerate's, of a module whose weights are offloaded
        for name, p in own.items():
            model._parameters[name] = nn.Parameter(p.detach().clone())
            refs.append(weakref.ref(model._parameters[name]))
        y = before(x)
        model._parameters.update(own)
        return y

    model.forward = lending
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(x), want)
        assert refs
        assert not any(ref() is not None for ref in refs)
