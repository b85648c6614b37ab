"""`op_from_module` of whole models of several projects: autograd's gradients in float64 to the bit, its products, fewer bytes."""

import pytest
import tiny_models
import torch
from more_models import MORE, more
from other_models import GPT, OTHER, other
from products import Products, saved_by

from benchmarks import modules
from funcops import Needs, TorchConfig, WithExtras, op_from_module, report
from funcops.engine.trees import tensors

pytestmark = pytest.mark.slow
CFG = TorchConfig()
NAMES = [*MORE, *tiny_models.MODELS, *tiny_models.UNKNOWN, *OTHER]


def model_of(name):
    if name in MORE:
        return more(name)
    if name in OTHER:
        return other(*OTHER[name])
    model = tiny_models.tiny(name).double()
    # experts in a loop depend on values, and grouped ones have no float64
    model.config._experts_implementation = "batched_mm"
    batch = tiny_models.batch_of(model, rows=2, length=16)
    batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    return model, batch | ({"use_cache": False} if "input_ids" in batch and name != "BERT" else {})


def result(out):
    if isinstance(out, torch.Tensor):
        return out
    return out.loss if getattr(out, "loss", None) is not None else out[0]


def by_autograd(name):
    """The result, gradients and buffers; the bytes that autograd keeps, and its products."""
    model, batch = model_of(name)
    torch.manual_seed(3)
    y, kept = saved_by(
        lambda: result(model(**batch) if isinstance(batch, dict) else model(*batch)),
        [*model.parameters(), *model.buffers(), *tensors(batch)],
    )
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    with Products() as products:
        found = torch.autograd.grad(y, list(trained.values()), torch.ones_like(y), allow_unused=True)
    return y, dict(zip(trained, found, strict=True)), dict(model.named_buffers()), kept, products.count


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # a norm that torchtune has in float32
@pytest.mark.parametrize("name", NAMES)
def test_a_model_has_autograds_gradients_products_and_fewer_bytes(name):
    want, grads, buffers, kept, products = by_autograd(name)
    model, batch = model_of(name)
    op, params = op_from_module(model, batch, output=result)
    torch.manual_seed(3)
    y, residuals = op.fwd(params, batch, CFG, needs=Needs(x=False, params=True))
    main, new = (y.main, y.extras) if isinstance(y, WithExtras) else (y, {})
    assert torch.equal(main, want) and all(torch.equal(t, buffers[n]) for n, t in new.items())
    assert op.fwd(params, batch, CFG, needs=Needs(x=False, params=True))[1].traced is residuals.traced, "traced once"
    dy = torch.ones_like(want)
    with Products() as inner:
        _, pending = op.dgrad(residuals, WithExtras(dy, dict.fromkeys(new)) if new else dy, CFG)
    with Products() as outer:
        dparams = op.wgrad(pending, CFG)
    assert inner.count + outer.count == products and outer.count
    for n, g in dparams.items():
        autograds = grads.get(n)
        assert torch.equal(g, autograds) if autograds is not None else g is None or not g.any(), n
    whole, _ = op.bwd(residuals, WithExtras(dy, dict.fromkeys(new)) if new else dy, CFG)
    assert all([g is None if dparams[n] is None else torch.equal(g, dparams[n]) for n, g in whole.items()]), "in one pass"
    ours = report(residuals, params, (batch, list(model.buffers()))).kept_bytes  # the model holds its buffers
    assert ours <= 0.8 * kept


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("name", [name for models in modules.MODELS.values() for name in models])
def test_no_more_bytes_or_products_than_torch_remat(name):
    """Version 0.2.2 was tried."""
    pytest.importorskip("torch_remat")
    model, batch = modules.build(*next(models[name] for models in modules.MODELS.values() if name in models))
    op, params = op_from_module(model, batch, output=result)
    needs = Needs(x=False, params=True)
    y, _ = op.fwd(params, batch, CFG, needs=needs)
    dy = WithExtras(torch.ones_like(y.main), dict.fromkeys(y.extras)) if isinstance(y, WithExtras) else torch.ones_like(y)
    forward, backward = lambda: op.fwd(params, batch, CFG, needs=needs), lambda held: op.bwd(held, dy, CFG)
    cost = modules.costs(model, batch, forward, backward)
    (ours, products), (theirs, also) = cost["funcops"], cost["torch_remat"]
    assert ours <= theirs and products <= also == cost["autograd"][1]


REFUSED = {
    "experts in a loop": ("litgpt", "Mixtral-8x7B-v0.1", dict(GPT, n_query_groups=2, n_expert=4)),
    "layers left out at random": ("x_transformers", "Decoder", dict(layer_dropout=0.5)),
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("experts in a loop", r"do not depend on values .* aten.nonzero.* in its module 'transformer.h.0.mlp'"),
        ("layers left out at random", "draws its random numbers with torch, got one that draws some with Python's random"),
    ],
)
def test_what_other_projects_decide_by_values_is_refused(name, text):
    model, batch = other(*REFUSED[name])
    with pytest.raises(ValueError, match=text):
        op_from_module(model, batch, output=result)


@pytest.mark.parametrize(("name", "part"), [("Mixtral", "mlp.experts"), ("M2M100", "model")])
def test_what_depends_on_values_is_refused_by_the_name_of_the_module(name, part):
    model, batch = model_of(name)
    if name == "Mixtral":
        model.config._experts_implementation = "eager"
    else:
        model.model.encoder.layerdrop = 0.5
    with pytest.raises(ValueError, match=rf"do not depend on values .* in its module '\S*{part}"):
        op_from_module(model, batch, output=result)
