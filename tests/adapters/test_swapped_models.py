"""`from_torch` of whole models of several projects, as they are: the bytes that they keep, in float32 and under autocast."""

import copy
import statistics

import more_models
import pytest
import tiny_models
import torch
from other_models import OTHER, PROJECTS
from test_models_as_ops import model_of, result
from torch import nn

from funcops import nn as fnn

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
BY_PROJECT = {
    "transformers": [*more_models.MORE, *tiny_models.MODELS, *tiny_models.UNKNOWN],
    **{project: [name for name, (of, *_) in OTHER.items() if of == project] for project in PROJECTS},
}


def called(model, batch):
    """The result of a call, with the same random numbers each time."""
    torch.manual_seed(3)
    return result(model(**batch) if isinstance(batch, dict) else model(*batch))


def gradients(model, y):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.autograd.grad(y, trained, torch.ones_like(y), allow_unused=True)


def kept(model, batch):
    return fnn.kept_bytes(model, **batch) if isinstance(batch, dict) else fnn.kept_bytes(model, *batch)


def still(model):
    """A copy without dropout, whose masks are ours in a swapped model."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def compare(name, model, other, batch):
    want, got = called(model, batch), called(other, batch)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
    for g, own in zip(gradients(model, want), gradients(other, got), strict=True):
        g, own = [torch.zeros(()) if t is None else t for t in (g, own)]
        assert (own - g).norm() <= 2e-3 * g.norm() + 1e-4, name


def shares(name):
    """A swapped model's share of torch's bytes, in float32 and under autocast, after its gradients were seen to be right."""
    model, batch = model_of(name)
    single = {torch.float64: torch.float32}
    model = model.float()
    values = list(batch.values()) if isinstance(batch, dict) else list(batch)
    values = [t.to(single.get(t.dtype, t.dtype)) if isinstance(t, torch.Tensor) else t for t in values]
    batch = dict(zip(batch, values, strict=True)) if isinstance(batch, dict) else tuple(values)
    other = copy.deepcopy(model)
    fnn.from_torch(other)
    compare(name, still(model), still(other), batch)
    found = [kept(other, batch) / kept(model, batch)]
    with torch.autocast("cpu", torch.bfloat16):
        called(other, batch)
        found.append(kept(other, batch) / kept(model, batch))
    return found


@pytest.mark.parametrize("project", BY_PROJECT)
def test_the_bytes_of_swapped_models(project):
    if project != "transformers":
        pytest.importorskip(project, exc_type=ImportError)
    found = {name: shares(name) for name in BY_PROJECT[project]}
    for name, (plain, cast) in found.items():
        print(f"{name:40} {plain:6.2f} {cast:6.2f}")
    plain, cast = [statistics.median(column) for column in zip(*found.values(), strict=True)]
    print(f"{project}: {plain:.2f} {cast:.2f}")
    assert plain <= 0.75 and cast <= plain + 0.05
    assert all(share <= 1.0 for row in found.values() for share in row), found
